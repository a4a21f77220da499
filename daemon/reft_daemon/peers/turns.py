"""Turns of the exchange: makes the parity that this node keeps of other nodes' slots.

    pins(turn = T, attempt = a) ─► for each rank here in a guard lane, at the same time:
                        a parity slot ─► begin ─► source j+1: ticket, pull ─► source j+2 … ─► seal
                          all sealed ─────────────────────────────► note_guarded(a)
                          a source is damaged, gone or silent ────► note_unguarded(a, lane, why)
                          the rank's own slot is gone here ───────► note_unguarded(a, lane, why)
                          no room, a mover that ends again ───────► note_unguarded(a, lane, why)
    pins(protected = P, by) ─► parity or slot of P is gone here ──► note_unguarded(by, lane, why)
    pins without T, or another attempt ─► the turn ends; the mover unmaps the job's slots
    the next turn ─► waits until the mover has ended all work of earlier ones
    pins(whole = T), T not protected ─► coordinator, after 1, 2, 4, … s ─► retry_turn(a)
    parity is damaged, no trainer lives ─► its lane is made again, outside a turn (make_again)
    an attach begins ─► no turn until its decision, at most HOLD_S

The mover moves the bytes (`reft_daemon/mover`), the coordinator decides (`core/commit/pins.py`).

* Lost: a ticket or a connection that is lost is asked for again, until nothing has moved for
  PATIENCE_S. A mover that ends loses the parity under way, which is begun anew, ATTEMPTS times.
* Late: pins of an earlier epoch never come here. A turn that is older than a parity slot writes
  nothing.
* Repeated: pins that say the same change nothing. Parity that is sealed already is not made again,
  also in another attempt at the step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Final

import grpc

from reft.core.commit.parity_slots import choose_buffer
from reft.core.commit.pins import Pins, UnguardedLane
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.errors import AttachError, ReftError
from reft.failpoints import Failpoints
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.arena.arena import SlotFile
from reft_daemon.arena.headers import header_of, sealed_versions
from reft_daemon.child.child_process import ChildGone
from reft_daemon.jobs import leasing, parity, rounds, slot_reads
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.parity import LocalLane
from reft_daemon.mover.mover import Mover, ParityWriter, PullFailed, SourceSlot
from reft_daemon.mover.range_client import MoverAddress, RangePull
from reft_daemon.mover.range_protocol import FRAME_S, PULLS_MAX, RangeStatus
from reft_daemon.peers.channels import PeerChannels, reason_of
from reft_daemon.peers.replay_service import ReplayService
from reft_daemon.peers.replayer import Replayer

log = logging.getLogger("reft.daemon")
HOLD_S: Final = 60.0  # from the beginning of an attach to its decision, at most
PATIENCE_S: Final = 30.0  # without a folded range
RETRY_S: Final = 0.3
TICKET_DEADLINE_S: Final = 30.0  # the other mover may have to start
RANGES_MAX: Final = 64  # of one connection
ATTEMPTS: Final = 5


class LaneUnguardable(ReftError):
    """The parity of a lane can't be made in this turn."""


@dataclass
class JobTurn:
    """A turn of one job, under way or over.

    Attributes:
        version: whose parity is made.
        attempt: number of the turn in the epoch.
        task: ends with the turn.
        began_s: when it began.
        took_s: how long it took; None: it is under way, or has failed.
        nbytes: that this node receives.
        received_bytes: of them, so far.
    """

    version: Version
    attempt: int
    task: asyncio.Task[None] | None = None
    began_s: float = field(default_factory=time.monotonic)
    took_s: float | None = None
    nbytes: int = 0
    received_bytes: int = 0


class TurnService:
    """The turns of all jobs on this daemon.

    Args:
        peers: channels to other daemons.
        mover: moves the bytes.
        bulk_host: where other nodes reach the mover; empty: at the address of this daemon.
        failpoints: let tests lose the requests of tickets, and end this daemon in a turn.
    """

    def __init__(
        self, peers: PeerChannels, mover: Mover, bulk_host: str = "", failpoints: Failpoints | None = None
    ) -> None:
        self._peers = peers
        self._mover = mover
        self._replays = ReplayService(Replayer())
        self._bulk_host = bulk_host
        self._failpoints = failpoints or Failpoints()
        self._turns: dict[str, JobTurn] = {}
        self._last: dict[str, JobTurn] = {}  # job → its last turn that made all parity here
        self._repairs: dict[str, JobTurn] = {}  # job → what is made again, outside a turn
        # job → protected version, by which turn, since when
        self._protected: dict[str, tuple[Version, int, float]] = {}
        self._noted: dict[str, frozenset[UnguardedLane]] = {}  # job → losses of what is protected
        # job → the turn that another one of the same step may follow, and when
        self._retries: dict[str, tuple[tuple[Epoch, int], asyncio.TimerHandle]] = {}
        self._held: dict[str, asyncio.TimerHandle] = {}
        self._pulls = asyncio.Semaphore(PULLS_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_work: dict[str, set[asyncio.Task[None]]] = {}  # job → of them, those that use the mover

    # What the registry and the services call

    def wake(self, job: JobRecord) -> None:
        """Does what the job's present pins ask for."""
        if not job.guard_lanes and job.id not in self._turns:
            return
        self._check_protected(job)
        self._plan_retry(job)
        wanted = turn_of(job) if job.id not in self._held else None
        earlier = self._turns.get(job.id)
        if earlier is None and wanted is None:
            return
        if wanted is None:
            self._end(job.id)
        elif earlier is None or (earlier.version, earlier.attempt) != wanted:
            earlier = earlier or self._repairs.get(job.id)
            if earlier is not None and earlier.task is not None:
                earlier.task.cancel()
            turn = self._turns[job.id] = JobTurn(*wanted)
            turn.task = self._start(self._run(job, turn, set(self._at_work.get(job.id, ()))), job.id)

    async def hold(self, job: JobRecord) -> None:
        """Ends the job's turn: an attach reads the slots, and decides which versions count.

        Returns once the mover has no slot of the job. The decision ends this.
        """
        if not job.guard_lanes:
            return
        self.release(job.id)
        self._held[job.id] = asyncio.get_running_loop().call_later(HOLD_S, self._end_hold, job)
        await asyncio.wait({self._end(job.id)})

    def release(self, name: str) -> None:
        """Permits turns of a job again."""
        if timer := self._held.pop(name, None):
            timer.cancel()

    def _end_hold(self, job: JobRecord) -> None:
        self.release(job.id)
        self.wake(job)

    def drop(self, name: str) -> None:
        """Ends the turn of a job that is dropped."""
        self.release(name)
        self._protected.pop(name, None)
        self._last.pop(name, None)
        self._noted.pop(name, None)
        self._cancel_retry(name)
        self._end(name)
        self._start(self._replays.drop(name))

    async def open_bulk(self, job: JobRecord) -> pb.OpenBulkReply:
        """Returns a ticket to this node's slots of a job.

        Raises:
            AttachError: an attach has begun, or the mover does not run.
        """
        if job.id in self._held:
            raise AttachError(f"job {job.id} is being attached; its turns begin after the decision.")
        pieces = {local.rank: local.lane.piece_sizes for local in parity.local_lanes(job)}
        slots = [
            SourceSlot(slot, *job.sections[slot.rank], pieces.get(slot.rank))
            for slot in job.slots.all.values()
            if slot.rank in job.sections
        ]
        ticket, port = await self._mover.grant(job.id, slots, parity.sent_bytes(job))
        return pb.OpenBulkReply(port=port, ticket=ticket, address=self._bulk_host)

    async def make_again(self, job: JobRecord, local: LocalLane, version: Version) -> None:
        """Makes damaged parity of a version again, outside a turn. A turn or an attach ends this.

        Raises:
            ReftError: the parity can't be made again now.
        """
        if job.id in self._turns or job.id in self._held:
            raise AttachError(f"a turn or an attach of job {job.id} is under way.")
        repair = self._repairs[job.id] = JobTurn(version, 0)
        before = set(self._at_work.get(job.id, ()))

        async def make() -> None:
            await _ended(before)
            await self._make(job, repair, local)

        repair.task = task = asyncio.ensure_future(make())
        self._tasks.add(task)  # the caller takes its error
        task.add_done_callback(self._tasks.discard)
        _note_at_work(self._at_work, job.id, task)
        await asyncio.wait({task})
        del self._repairs[job.id]
        if job.id not in self._turns:
            await asyncio.wait({self._end(job.id)})
        if task.cancelled():
            raise AttachError(f"a turn or an attach of job {job.id} has begun meanwhile.")
        try:
            task.result()
        except OSError as error:
            raise AttachError(str(error)) from error

    def status(self, job: JobRecord) -> pb.ExchangeStatus | None:
        """Returns the state of the job's exchange; None if nothing is exchanged."""
        if not job.guard_lanes or job.round is None:
            return None
        now, pins, turn = time.monotonic(), job.round.outcome.pins, self._turns.get(job.id)
        sent_bytes = parity.sent_bytes(job)
        pace = self._mover.pace(sent_bytes)
        status = pb.ExchangeStatus(
            protected=pins.protected, turn=pins.turn, sent_bytes=sent_bytes, pace_bytes_per_s=pace.bytes_per_s,
            pace_reason=pace.reason, parity_bytes=parity.parity_bytes(job),
            extra_slot_bytes=parity.extra_slot_bytes(job),
        )  # fmt: skip
        if (last := self._last.get(job.id)) is not None and last.took_s is not None:
            status.last_turn_s = last.took_s
            status.bytes_per_s = last.received_bytes / max(last.took_s, 1e-9)
        version, _, since_s = self._protected.get(job.id, (None, 0, now))
        if version == Version(job.epoch, pins.protected):
            status.protected_age_s = now - since_s
        if turn is not None and pins.turn >= 0:
            status.turn_age_s = now - turn.began_s
            status.turn_bytes, status.received_bytes = turn.nbytes, turn.received_bytes
        for lane in sorted(job.round.guard.report(pins).lanes):
            status.lanes.add(step=lane.step, lane=lane.lane, words=lane.words)
        status.replays.extend(self._replays.status(job, pins.whole))
        status.choice = job.record.manifest.choice
        return status

    async def close(self) -> None:
        """Ends all turns and the mover."""
        for name in list(self._held):
            self.release(name)
        for name in list(self._retries):
            self._cancel_retry(name)
        for turn in (*self._turns.values(), *self._repairs.values()):
            if turn.task is not None:
                turn.task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._mover.close()
        await self._replays.close()

    # One turn

    def _plan_retry(self, job: JobRecord) -> None:
        """Plans another turn of a whole step that is not protected; only the coordinator does.

        News that come meanwhile do not begin the pause anew. A timer that fires after another turn
        has begun changes nothing.
        """
        if job.round is None or job.round.index != 0:
            return
        pins = job.round.outcome.pins
        pause_s, turn = job.round.guard.retry_pause_s(pins), (job.epoch, pins.attempt)
        if pause_s is None or (job.id in self._retries and self._retries[job.id][0] == turn):
            return

        def retry() -> None:
            self._retries.pop(job.id, None)
            rounds.retry_turn(job, *turn)

        self._cancel_retry(job.id)
        self._retries[job.id] = turn, asyncio.get_running_loop().call_later(pause_s, retry)

    def _cancel_retry(self, name: str) -> None:
        if name in self._retries:
            self._retries.pop(name)[1].cancel()

    def _start(self, work: Coroutine[None, None, None], name: str = "") -> asyncio.Task[None]:
        """Starts a task; `name` is the job whose slots the mover maps for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        if name:
            _note_at_work(self._at_work, name, task)

        def note_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a turn has failed", exc_info=error)

        task.add_done_callback(note_end)
        return task

    def _end(self, name: str) -> asyncio.Task[None]:
        """Ends a job's turn, and lets the mover unmap its slots; returns that work."""
        turns = self._turns.pop(name, None), self._repairs.get(name)
        for turn in turns:
            if turn is not None and turn.task is not None:
                turn.task.cancel()
        before = set(self._at_work.get(name, ()))

        async def end() -> None:
            await _ended(before)
            await self._mover.forget(name)

        return self._start(end(), name)

    async def _run(self, job: JobRecord, turn: JobTurn, before: set[asyncio.Task[None]]) -> None:
        await _ended(before)
        lanes = parity.local_lanes(job)
        turn.nbytes = sum(
            length for local in lanes for source in local.lane.sources_of(local.member)
            for _, _, length in local.lane.requests(source, local.member, job.record.manifest.chunk_bytes)
        )  # fmt: skip
        # With `return_exceptions` a cancelled turn ends after all its lanes, not after the first.
        outcomes = await asyncio.gather(*(self._guard(job, turn, local) for local in lanes), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        took_s = time.monotonic() - turn.began_s
        if all(outcomes):
            turn.took_s = took_s
            if turn.received_bytes:
                self._last[job.id] = turn
            log.info(
                "job=%s parity of %s is sealed here: %d bytes in %.2f s",
                job.id, turn.version, turn.received_bytes, took_s,
            )  # fmt: skip
        if self._turns.get(job.id) is turn:
            rounds.note_guarded(job, turn.attempt)

    async def _guard(self, job: JobRecord, turn: JobTurn, local: LocalLane) -> bool:
        """Makes the parity of one lane; returns whether it is sealed. Notes why it is not."""
        try:
            attempts_left = ATTEMPTS
            while True:
                try:
                    await self._make(job, turn, local)
                    # A step that lacks a slot must not take the place of one that `recover` has
                    # made complete, although copies of this slot may be elsewhere.
                    if words := _slot_loss(job, local, turn.version):
                        raise LaneUnguardable(words)
                    return True
                except ChildGone as error:
                    attempts_left -= 1
                    if not attempts_left:
                        raise
                    log.warning("job=%s lane=%d is begun anew: %s", job.id, local.number, error.message)
        except Exception as error:  # a bug must not leave the turn open: no later step would be protected
            is_foreseen = isinstance(error, ReftError | OSError)
            words = error.message if isinstance(error, ReftError) else str(error) or repr(error)
            if self._turns.get(job.id) is not turn:  # cancelled, perhaps because the job was purged: its files are gone
                return False
            if not is_foreseen:
                log.error("job=%s lane=%d a turn has failed", job.id, local.number, exc_info=error)
            log.warning("job=%s lane=%d %s is not guarded: %s", job.id, local.number, turn.version, words)
            rounds.note_unguarded(job, [UnguardedLane(turn.version.step, local.number, words, turn.attempt)])
            return False

    async def _make(self, job: JobRecord, turn: JobTurn, local: LocalLane) -> None:
        """Fills and seals a parity slot, unless one is sealed already.

        Raises:
            LaneUnguardable, NoRoom, AttachError: it can't be made.
            ChildGone: the mover has ended; the slot must be begun anew.
        """
        if parity.sealed_parity(job, local, turn.version):
            return
        await leasing.reserve_parity(job, local.rank)
        slot = _buffer_of(job, local, turn.version)
        slot.damaged = None
        if await self._replays.make(job, local, turn.version, slot):
            return
        lane = local.lane
        writer = await self._mover.begin(job.id, slot, turn.version, lane.digest, lane.parity_bytes)
        try:
            for source in lane.sources_of(local.member):
                await self._pull(job, turn, local, source, writer)
            await writer.seal()
        finally:
            await writer.drop()

    async def _pull(self, job: JobRecord, turn: JobTurn, local: LocalLane, source: int, writer: ParityWriter) -> None:
        """Folds all that a lane's parity needs of one source.

        Raises:
            LaneUnguardable: the source can't give it, or is silent.
            ChildGone: the mover has ended.
        """
        lane = local.lane
        rank, node = lane.members[source], _node_of(job, lane.members[source])
        ranges = list(lane.requests(source, local.member, job.record.manifest.chunk_bytes))
        moved_s = time.monotonic()
        while ranges:
            batch, reason = ranges[:RANGES_MAX], ""
            folded, queued_s = len(batch), time.monotonic()
            try:
                async with self._pulls:  # a ticket must not expire while its pull waits for others
                    moved_s += time.monotonic() - queued_s
                    pull = RangePull(
                        *(await self._ticket(job, node, turn.version)), turn.version, rank, batch,
                        lane.fold_code, lane.column_of(source, local.member), lane.block_bytes,
                    )  # fmt: skip
                    await writer.pull(pull, FRAME_S * (len(batch) + 2))
            except ChildGone:
                raise
            except PullFailed as error:
                folded, reason = error.folded, error.message
                if error.status is not RangeStatus.OK:
                    raise LaneUnguardable(f"rank {rank} on node {node.name} {error.message}.") from error
            except (grpc.RpcError, OSError, ReftError) as error:
                folded, reason = 0, reason_of(error)
            turn.received_bytes += sum(length for _, _, length in batch[:folded])
            del ranges[:folded]
            if folded:
                moved_s = time.monotonic()
            elif time.monotonic() - moved_s > PATIENCE_S:
                raise LaneUnguardable(f"node {node.name} gives nothing of rank {rank} for {PATIENCE_S:g} s: {reason}.")
            if ranges and reason:
                await asyncio.sleep(RETRY_S)

    async def _ticket(self, job: JobRecord, node: pb.Node, version: Version) -> tuple[MoverAddress, bytes]:
        if self._failpoints.hit("turn.ticket", step=version.step, epoch=version.epoch.counter):
            raise ConnectionError("a failpoint loses the request of a ticket")
        request = pb.OpenBulkRequest(job=job.id, epoch=messages.epoch_to(job.epoch))
        tokens = messages.known_tokens(job.record.manifest)
        reply = await self._peers.call(node, tokens, pb_grpc.PeerStub, "OpenBulk", request, TICKET_DEADLINE_S)
        assert isinstance(reply, pb.OpenBulkReply)
        return mover_address(node, reply), reply.ticket

    # What is protected

    def _check_protected(self, job: JobRecord) -> None:
        """Notes the lanes whose parity, or own slot, of the protected step is gone here.

        Losses are noted only while ranks train here. Else no newer step takes the place of this
        one, and what is left of it must stay: `reft-cli recover` makes the slots of one lost node
        after the other.
        """
        pins = job.round.outcome.pins if job.round is not None else Pins()
        if pins.protected < 0:
            return
        version = Version(job.epoch, pins.protected)
        if self._protected.get(job.id, (None, 0, 0.0))[:2] != (version, pins.protected_by):
            self._protected[job.id] = version, pins.protected_by, time.monotonic()
            self._noted.pop(job.id, None)
            parity.settle(job)  # the guard's parity is no longer needed
        lost = frozenset(
            UnguardedLane(pins.protected, local.number, words, pins.protected_by)
            for local in (parity.local_lanes(job) if slot_reads.living_ranks(job) else ())
            if (words := _loss(job, local, version))
        )
        if lost - self._noted.get(job.id, frozenset()):
            self._noted[job.id] = lost

            def note() -> None:
                if self._noted.get(job.id) is lost:  # else the job was purged, or another step is protected
                    rounds.note_unguarded(job, sorted(lost))

            asyncio.get_running_loop().call_soon(note)  # the change that is told now must put no other change


def turn_of(job: JobRecord) -> tuple[Version, int] | None:
    """Returns the version whose parity is to be made, and the attempt; None: there is no turn."""
    pins = job.round.outcome.pins if job.round is not None else Pins()
    return (Version(job.epoch, pins.turn), pins.attempt) if pins.turn >= 0 else None


def _note_at_work(at_work: dict[str, set[asyncio.Task[None]]], name: str, task: asyncio.Task[None]) -> None:
    """Keeps a task among those of its job until it has ended."""
    at_work.setdefault(name, set()).add(task)

    def forget(task: asyncio.Task[None]) -> None:
        at_work[name].discard(task)
        if not at_work[name]:
            del at_work[name]

    task.add_done_callback(forget)


async def _ended(before: set[asyncio.Task[None]]) -> None:
    """Returns once earlier work of a job has ended.

    All of it, and not only the latest: a turn that is cancelled while it waits ends before those
    for which it waits.
    """
    if before:
        await asyncio.wait(before)


def _node_of(job: JobRecord, rank: int) -> pb.Node:
    return next(node for node in job.record.manifest.nodes if rank in node.ranks)


def _buffer_of(job: JobRecord, local: LocalLane, version: Version) -> SlotFile:
    """Returns the parity slot that a turn writes.

    Raises:
        LaneUnguardable: none may be written.
    """
    slots = parity.buffers(job, local)
    kept = parity.kept_version(job)
    held: list[Version | None] = []
    for slot in slots:
        header = header_of(job.id, slot)
        # Parity of the kept version that is not sealed is worth nothing: it is begun anew.
        if header is None or (header.version == kept and header.state is not SlotState.SEALED):
            held.append(None)
        else:
            held.append(header.version)
    index = choose_buffer(held, kept, version)
    if index is None:
        raise LaneUnguardable(f"the parity slots of rank {local.rank} hold newer parity than {version}.")
    return slots[index]


def _loss(job: JobRecord, local: LocalLane, version: Version) -> str:
    """Returns what a lane lacks here of a protected version; empty if it lacks nothing."""
    if parity.sealed_parity(job, local, version) is None:
        return f"the parity that rank {local.rank}'s node keeps is gone."
    return _slot_loss(job, local, version)


def _slot_loss(job: JobRecord, local: LocalLane, version: Version) -> str:
    """Returns that a rank's slot of a version is gone; empty if it is not."""
    slots = job.slots.of_rank(local.rank)
    # A restarted daemon may still wait for memfds that the trainer gives back.
    if slots and version not in sealed_versions(job.id, slots):
        return f"the slot of rank {local.rank} is gone, or has changed in memory."
    return ""


def mover_address(node: pb.Node, reply: pb.OpenBulkReply) -> MoverAddress:
    """Returns where the mover of a node listens.

    Args:
        node: the node, as in the manifest.
        reply: of its daemon. Without an address the mover listens at the daemon's.
    """
    hosts = [each.rpartition(":")[0].strip("[]") for each in node.addresses if not each.startswith("unix:")]
    host = hosts[0] if hosts else "127.0.0.1"  # daemons of one host, which call each other by their sockets
    return MoverAddress(reply.address or host, reply.port, node.name)
