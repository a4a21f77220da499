"""Checkpoints on storage: the coordinator decides and commits, each node writes its own slots.

    coordinator                                   every node, itself included
      pins(persist = s) ─► recorded, announced      the slots of s stay
      Persist(s, attempt) ──────────────────────►   its persister writes these slots
      Persist(s, attempt), each POLL_S ─────────►   how far it is … the digest of its index
      all have written ─► MANIFEST ─► pins(persist = none) ─► older checkpoints are removed
      a node fails or is silent ─► another attempt of that node, ATTEMPTS in all ─► given up

    first whole step of an epoch ─► DECISION; without it there is no MANIFEST
    last trainer gone for FLUSH_AFTER_S, or SIGTERM ─► each daemon asks the coordinator for a flush

`reft/core/persist/persist_cadence.py` decides when. Training waits for none of this.

* Lost, repeated: the first Persist of an attempt begins the work, the others only ask. A node whose
  daemon restarts begins it again.
* Late: attempts grow in an epoch, since each checkpoint counts `seq` of the pins up. A Persist with
  a smaller attempt than the node has seen changes nothing.
* An attach ends all work of the earlier epoch here.
* A restarted coordinator finds the step in its recorded pins, and persists it under a new attempt.

The DECISION waits for a whole step because a refused attach undoes its decision: one on storage
would make all later attaches stale. Before that step the epoch has nothing to commit.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Final

import grpc

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.persist.persist_cadence import PERSIST_SLOTS_MIN, PersistCadence, newest_step
from reft.core.persist.stored_names import is_lineage
from reft.errors import AttachError, ConfigError, FormatError, ReftError
from reft.failpoints import Failpoints
from reft.wire import messages
from reft.wire import stored_format as stored
from reft.wire.manifest import placement_of
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs import rounds
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.peers.round_replicator import PeerChannels, reason_of
from reft_daemon.persist.persister import Persister, PersistSettings, StorageFailed
from reft_daemon.persist.slot_copy import SlotRange, SlotSource, stored_bytes

log = logging.getLogger("reft.daemon")
LOOK_S: Final = 0.2  # between two looks at what is due
POLL_S: Final = 2.0  # between two questions to a node; the first ones come sooner
POLL_MIN_S: Final = 0.05
SILENCE_S: Final = 60.0  # of a node, until it is given up
ATTEMPTS: Final = 3  # of one node and checkpoint
RETRY_S: Final = 30.0  # until a decision is put to storage again
CALL_S: Final = 10.0
FLUSH_AFTER_S: Final = 15.0  # without a trainer: a launcher that restarts the job is faster
FLUSH_SILENCE_S: Final = 5.0  # of the coordinator, in a flush
_END: Final = 1 << 62
_SILENT: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass
class NodePart:
    """What this node writes of a checkpoint.

    Attributes:
        version: the version.
        attempt: of the coordinator.
        task: ends with the work.
        written_bytes: so far.
        total_bytes: of this node; 0: not known yet.
        index_digest: once all is written.
        error: why it has failed.
    """

    version: Version
    attempt: int
    task: asyncio.Task[None] | None = None
    written_bytes: int = 0
    total_bytes: int = 0
    index_digest: str = ""
    error: str = ""


@dataclass
class PersistRun:
    """One checkpoint under way, as its coordinator sees it.

    Attributes:
        version: the version.
        attempt: the first one of each node.
        began_s: when it began.
        replies: node → its newest reply.
    """

    version: Version
    attempt: int
    began_s: float = field(default_factory=time.monotonic)
    replies: dict[int, pb.PersistReply] = field(default_factory=dict)

    @property
    def written_bytes(self) -> int:
        return sum(reply.written_bytes for reply in self.replies.values())

    @property
    def total_bytes(self) -> int:
        return sum(reply.total_bytes for reply in self.replies.values())


@dataclass
class JobState:
    """What the coordinator's daemon knows of one job's checkpoints.

    Attributes:
        epoch: in force.
        cadence: when the next one is due.
        has_decision: whether storage has the epoch's decision.
        decide_s: when the decision is put to storage next.
        task: puts the decision, or makes a checkpoint; None: nothing is under way.
        run: the checkpoint under way.
        last: the newest complete one.
        last_s: when it was completed.
        took_s: how long it took.
        trouble: what is wrong; empty: nothing.
    """

    epoch: Epoch
    cadence: PersistCadence
    has_decision: bool = False
    decide_s: float = 0.0
    task: asyncio.Task[None] | None = None
    run: PersistRun | None = None
    last: PersistRun | None = None
    last_s: float = 0.0
    took_s: float = 0.0
    trouble: str = ""


class PersistService:
    """The checkpoints of all jobs on this daemon.

    Args:
        jobs: name → job.
        peers: channels to other daemons.
        settings: how checkpoints are written; None: this daemon writes none.
        failpoints: let tests end this daemon before a commit.
    """

    def __init__(
        self, jobs: Mapping[str, JobRecord], peers: PeerChannels, settings: PersistSettings | None,
        failpoints: Failpoints,
    ) -> None:  # fmt: skip
        self.settings = settings
        self._jobs = jobs
        self._peers = peers
        self._failpoints = failpoints
        self._persister = Persister(settings.root) if settings else None
        self._states: dict[str, JobState] = {}
        self._parts: dict[str, NodePart] = {}
        self._flushed: dict[str, Epoch] = {}  # job → the epoch whose end was flushed
        self._refused: set[str] = set()  # jobs that are not persisted, as already logged
        self._tasks: set[asyncio.Task[None]] = set()

    # What the registry, the services and main call

    async def run(self) -> None:
        """Begins what is due, until it is cancelled. Without `--persist` nothing is."""
        while True:
            for job in list(self._jobs.values()) if self.settings else []:
                try:
                    self._look(job)
                    self._look_for_end(job)
                except Exception:  # a bug that one job meets must not stop the others
                    log.exception("job=%s can't be persisted", job.id)
            await asyncio.sleep(LOOK_S)

    def wake(self, job: JobRecord) -> None:
        """Ends all work of an earlier epoch of the job."""
        part, state = self._parts.get(job.id), self._states.get(job.id)
        if not job.record.HasField("decision"):
            return
        if part is not None and part.version.epoch != job.epoch:
            _cancel(self._parts.pop(job.id).task)
        if state is not None and state.epoch != job.epoch:
            _cancel(state.task)
            state.epoch, state.cadence = job.epoch, state.cadence.next_epoch()
            state.has_decision, state.decide_s, state.task, state.run = False, 0.0, None, None

    def drop(self, name: str) -> None:
        """Ends all work for a job that is dropped."""
        if name in self._parts:
            _cancel(self._parts.pop(name).task)
        if name in self._states:
            _cancel(self._states.pop(name).task)
        self._flushed.pop(name, None)
        self._refused.discard(name)

    async def end_lineage(self, job: JobRecord) -> None:
        """Marks the job's lineage as ended on purpose, if this daemon writes to storage.

        Raises:
            StorageFailed: it is not marked. A later start under this name would go on with it.
        """
        if self._persister is not None and is_lineage(job.record.manifest.lineage):
            await self._persister.end(job.id, job.record.manifest.lineage)

    async def persist(self, job: JobRecord, request: pb.PersistRequest) -> pb.PersistReply:
        """Begins this node's part of a checkpoint, unless it is begun; returns how far it is.

        Raises:
            ConfigError: this daemon does not write to storage.
        """
        if self._persister is None or not is_lineage(request.lineage):
            raise ConfigError(f"this daemon can't persist job {job.id}.", "start each daemon with --persist DIR")
        version, part = messages.version_from(request.version), self._parts.get(job.id)
        if part is None or part.attempt < request.attempt:
            earlier = part.task if part is not None else None
            _cancel(earlier)
            part = self._parts[job.id] = NodePart(version, request.attempt)
            part.task = self._start(self._write(job, part, request.lineage, earlier))
        elif part.attempt > request.attempt:
            return pb.PersistReply(error=f"attempt {part.attempt} is under way.")
        return pb.PersistReply(
            written_bytes=part.written_bytes, total_bytes=part.total_bytes, index_digest=part.index_digest,
            error=part.error,
        )  # fmt: skip

    async def request(self, job: JobRecord, request: pb.PersistJobRequest) -> pb.PersistJobReply:
        """Takes a request for a checkpoint, or for how far it is. The coordinator answers.

        Raises:
            ConfigError: the job is not persisted.
            AttachError: no step is whole yet, or the question belongs to an earlier attach.
            grpc.RpcError: the coordinator does not answer, or refuses.
        """
        if job.round is None:
            raise AttachError(f"no step of job {job.id} is whole yet.", "try again later")
        if job.round.index != 0:
            return await self._ask_coordinator(job, request)
        if reason := self._refusal(job):
            raise ConfigError(reason, "start each daemon with --persist DIR, and attach again")
        state, pins = self._state_of(job), job.round.outcome.pins
        if request.HasField("step"):
            if messages.epoch_from(request.epoch) != job.epoch:
                raise AttachError(f"job {job.id} was started again meanwhile.", "ask again")
            step = request.step
        else:
            step = newest_step(pins, request.flush)
            if step < 0:
                raise AttachError(f"no step of job {job.id} is whole yet.", "try again later")
            if step > state.cadence.persisted:
                state.cadence = state.cadence.request(pins, request.flush)
        is_done, is_given_up = state.cadence.persisted >= step, state.cadence.given_up >= step
        reply = pb.PersistJobReply(step=step, done=is_done, storage=self.status(job))
        reply.trouble = state.trouble if is_given_up and not is_done else ""
        reply.epoch.CopyFrom(messages.epoch_to(job.epoch))
        return reply

    async def flush(self) -> None:
        """Persists the newest whole step of each job, within the grace."""
        if self.settings is None or not self.settings.flushes:
            return
        tasks = [self._start(self._flush(job)) for job in self._jobs.values() if not self._refusal(job)]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.settings.grace_s)
            if late:
                log.error(
                    "%s did not take everything within the grace of %g s", self.settings.root, self.settings.grace_s
                )

    def status(self, job: JobRecord) -> pb.StorageStatus | None:
        """Returns the state of the job's checkpoints; None on other nodes than the coordinator."""
        if self.settings is None or job.round is None or job.round.index != 0:
            return None
        now, state = time.monotonic(), self._states.get(job.id)
        status = pb.StorageStatus(persisted=-1, step=-1, every_s=self.settings.every_s, trouble=self._refusal(job))
        if state is None:
            return status
        status.trouble = state.trouble
        if state.last is not None:
            status.persisted, status.age_s = state.last.version.step, now - state.last_s
            status.nbytes, status.took_s = state.last.total_bytes, state.took_s
        if state.run is not None:
            status.step, status.since_s = state.run.version.step, now - state.run.began_s
            status.written_bytes, status.total_bytes = state.run.written_bytes, state.run.total_bytes
        return status

    async def close(self) -> None:
        """Ends all work, and the persister. Waits for neither storage nor other nodes."""
        for task in self._tasks:
            task.cancel()
        if self._persister is not None:
            self._persister.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CALL_S)

    # The coordinator

    def _refusal(self, job: JobRecord) -> str:
        """Returns why a job is not persisted; empty if it is."""
        if self.settings is None:
            return f"the daemon of job {job.id}'s coordinator writes no checkpoints."
        if not job.record.manifest.named:
            return f"job {job.id} has no name, so its checkpoints could not be found again."
        if not is_lineage(job.record.manifest.lineage):
            return f"job {job.id} was attached while no daemon had --persist."
        return ""

    def _state_of(self, job: JobRecord) -> JobState:
        if job.id not in self._states:
            assert self.settings is not None
            every_s = self.settings.every_s
            self._states[job.id] = JobState(job.epoch, PersistCadence(every_s, time.monotonic() + every_s))
        return self._states[job.id]

    def _look(self, job: JobRecord) -> None:
        """Begins what is due for a job, if this node is its coordinator."""
        if job.round is None or job.round.index != 0:
            return
        if reason := self._refusal(job):
            if job.id not in self._refused:
                self._refused.add(job.id)
                log.warning("job=%s is not persisted: %s", job.id, reason)
            return
        state, pins, now = self._state_of(job), job.round.outcome.pins, time.monotonic()
        if state.task is not None or pins.whole < 0:
            return
        if 0 <= pins.persist <= max(state.cadence.persisted, state.cadence.given_up):
            rounds.pin_persist(job, -1)  # the pins could not be recorded when it ended
            return
        step = state.cadence.next_step(pins, now)
        if step < 0:
            if state.cadence.every_s and now >= state.cadence.due_s:
                state.cadence = state.cadence.begin(now)
            if not state.has_decision and now >= state.decide_s:
                state.task = self._start(self._decide_alone(job, state))
            return
        has_room = job.record.manifest.slots >= PERSIST_SLOTS_MIN
        if not rounds.pin_persist(job, step if has_room else -1):
            return
        state.cadence = state.cadence.begin(now)
        seq = job.round.outcome.pins.seq
        state.run = PersistRun(Version(job.epoch, step), (ATTEMPTS + 1) * seq)
        state.task = self._start(self._run(job, state, state.run))

    async def _decide_alone(self, job: JobRecord, state: JobState) -> None:
        try:
            await self._decide(job, state)
            state.trouble = ""
        except StorageFailed as error:
            self._note_trouble(job, state, f"the decision of this attach is not on storage: {error.message}")
        finally:
            if state.task is asyncio.current_task():
                state.task, state.decide_s = None, time.monotonic() + RETRY_S

    async def _decide(self, job: JobRecord, state: JobState) -> None:
        assert self._persister is not None
        if not state.has_decision:
            decision = messages.decision_from(job.record.decision)
            await self._persister.decide(job.id, job.record.manifest.lineage, decision)
            state.has_decision = state.epoch == decision.epoch

    async def _run(self, job: JobRecord, state: JobState, run: PersistRun) -> None:
        """Makes one checkpoint, or says why not."""
        is_complete = False
        try:
            await self._decide(job, state)
            nodes = await self._write_everywhere(job, run)
            await self._commit(job, run, nodes)
            is_complete = True
            state.last, state.last_s, state.took_s = run, time.monotonic(), time.monotonic() - run.began_s
            state.trouble = ""
            log.info("job=%s %s is on storage: %d bytes in %.2f s", job.id, run.version, run.total_bytes, state.took_s)
        except (ReftError, OSError, grpc.RpcError) as error:
            words = error.message if isinstance(error, ReftError) else reason_of(error)
            self._note_trouble(job, state, f"step {run.version.step} is not on storage: {words}")
        finally:
            if state.run is run:  # else an attach has begun another epoch
                state.cadence = state.cadence.end(run.version.step, is_complete)
                state.run = None
                if job.round is not None and job.round.outcome.pins.persist >= 0:
                    rounds.pin_persist(job, -1)
        if is_complete and state.epoch == run.version.epoch:
            await self._prune(job, state)
        if state.task is asyncio.current_task():
            state.task = None

    async def _write_everywhere(self, job: JobRecord, run: PersistRun) -> list[stored.StoredNode]:
        """Returns what all nodes have written.

        Raises:
            StorageFailed: a node has failed too often, or is silent.
        """
        count = len(job.record.manifest.nodes)
        tasks = [asyncio.ensure_future(self._write_on(job, run, index)) for index in range(count)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _write_on(self, job: JobRecord, run: PersistRun, index: int) -> stored.StoredNode:
        manifest, attempt = job.record.manifest, run.attempt
        node, heard_s, pause_s = manifest.nodes[index], time.monotonic(), POLL_MIN_S
        while True:
            request = pb.PersistRequest(
                job=job.id, epoch=job.record.decision.epoch, version=messages.version_to(run.version),
                lineage=manifest.lineage, attempt=attempt,
            )  # fmt: skip
            try:
                reply = await self._ask_node(job, index, request)
            except (grpc.RpcError, OSError, ReftError) as error:
                if isinstance(error, grpc.RpcError) and error.code() not in _SILENT:
                    raise StorageFailed(f"node {node.name} does not write: {reason_of(error)}.") from error
                if time.monotonic() - heard_s > SILENCE_S:
                    raise StorageFailed(
                        f"node {node.name} is silent for {SILENCE_S:g} s: {reason_of(error)}."
                    ) from error
                await asyncio.sleep(POLL_S)
                continue
            heard_s, run.replies[index] = time.monotonic(), reply
            if reply.index_digest:
                return stored.StoredNode(index, attempt, reply.index_digest)
            if reply.error:
                attempt += 1
                if attempt == run.attempt + ATTEMPTS:
                    raise StorageFailed(f"node {node.name}: {reply.error}")
                log.warning("job=%s node=%s %s is written again: %s", job.id, node.name, run.version, reply.error)
                pause_s = POLL_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)

    async def _ask_node(self, job: JobRecord, index: int, request: pb.PersistRequest) -> pb.PersistReply:
        if index == job.record.node_index:
            job.check_epoch(request.epoch)
            return await self.persist(job, request)
        node, token = job.record.manifest.nodes[index], job.record.manifest.token
        reply = await self._peers.call(node, token, pb_grpc.PeerStub, "Persist", request, CALL_S, reconnect=True)
        assert isinstance(reply, pb.PersistReply)
        return reply

    async def _commit(self, job: JobRecord, run: PersistRun, nodes: list[stored.StoredNode]) -> None:
        assert self._persister is not None
        self._failpoints.hit("persist.commit", step=run.version.step, epoch=run.version.epoch.counter)
        manifest = pb.Manifest()
        manifest.CopyFrom(job.record.manifest)
        manifest.ClearField("token")
        await self._persister.commit(
            stored.StoredManifest(
                run.version, job.id, manifest.lineage, secrets.token_hex(16), manifest.SerializeToString(),
                job.record.decision.SerializeToString(), tuple(nodes),
            ),
            messages.decision_from(job.record.decision),
        )  # fmt: skip

    async def _prune(self, job: JobRecord, state: JobState) -> None:
        assert self._persister is not None and self.settings is not None
        decision, lineage = messages.decision_from(job.record.decision), job.record.manifest.lineage
        try:
            removed = await self._persister.prune(job.id, lineage, decision, self.settings.retention)
            if removed:
                log.info("job=%s removed checkpoints=%d", job.id, removed)
        except StorageFailed as error:
            self._note_trouble(job, state, f"old checkpoints are not removed: {error.message}")

    @staticmethod
    def _note_trouble(job: JobRecord, state: JobState, words: str) -> None:
        if words != state.trouble:
            log.error("job=%s %s", job.id, words)
        state.trouble = words

    # Every node

    async def _write(self, job: JobRecord, part: NodePart, lineage: str, earlier: asyncio.Task[None] | None) -> None:
        """Writes this node's slots, or notes why not."""
        assert self._persister is not None
        if earlier is not None:
            await asyncio.wait({earlier})

        def note(nbytes: int) -> None:
            part.written_bytes = nbytes

        try:
            manifest, index = job.record.manifest, job.record.node_index
            ranges = await asyncio.to_thread(stored_ranges, manifest, index)
            slots, part.total_bytes = slots_to_store(job, part.version, ranges)
            place = index, part.attempt
            part.index_digest = await self._persister.write(job.id, lineage, part.version, place, slots, note)
            part.written_bytes = part.total_bytes
        except (ReftError, OSError, ValueError) as error:
            part.error = error.message if isinstance(error, ReftError) else str(error)

    # The end of a job, or of this daemon

    def _look_for_end(self, job: JobRecord) -> None:
        """Begins a flush once the job's last trainer here is gone for a while."""
        assert self.settings is not None
        is_over = not job.is_live and time.monotonic() - job.ended_s > FLUSH_AFTER_S
        if not self.settings.flushes or not is_over or job.round is None or self._refusal(job):
            return
        if self._flushed.get(job.id) != job.epoch:
            self._flushed[job.id] = job.epoch
            self._start(self._flush(job))

    async def _flush(self, job: JobRecord) -> None:
        """Asks for the newest whole step, and waits until it is on storage or given up."""
        request, heard_s = pb.PersistJobRequest(job=job.id, flush=True), time.monotonic()
        while job.id in self._jobs:
            try:
                reply = await self.request(job, request)
            except (grpc.RpcError, OSError, ReftError) as error:
                if time.monotonic() - heard_s > FLUSH_SILENCE_S or isinstance(error, ReftError):
                    log.error("job=%s can't be flushed to storage: %s", job.id, reason_of(error))
                    return
            else:
                heard_s = time.monotonic()
                if reply.done or reply.trouble:
                    return
                request = pb.PersistJobRequest(job=job.id, step=reply.step, epoch=reply.epoch, flush=True)
            await asyncio.sleep(LOOK_S)

    async def _ask_coordinator(self, job: JobRecord, request: pb.PersistJobRequest) -> pb.PersistJobReply:
        manifest = job.record.manifest
        reply = await self._peers.call(
            manifest.nodes[0], manifest.token, pb_grpc.DaemonStub, "PersistJob", request, CALL_S, reconnect=True
        )
        assert isinstance(reply, pb.PersistJobReply)
        return reply

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def note_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a checkpoint has failed", exc_info=error)

        task.add_done_callback(note_end)
        return task


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()


def stored_ranges(manifest: pb.Manifest, node_index: int) -> dict[int, list[SlotRange]]:
    """Returns rank → the bytes of its slots' data that go to storage, for one node's ranks.

    Parity is left out: it can be computed again.

    Raises:
        FormatError, ValueError: the manifest contradicts itself.
    """
    ranks = manifest.nodes[node_index].ranks
    if not manifest.layouts:
        return {rank: [SlotRange(0, _END)] for rank in ranks}
    placement = placement_of(manifest)
    parts = {rank: placement.rank_placement(rank) for rank in ranks}
    return {
        rank: [SlotRange(0, part.parity_offset), SlotRange(part.unreplicated_offset, _END)]
        for rank, part in parts.items()
    }


def slots_to_store(
    job: JobRecord, version: Version, ranges: Mapping[int, list[SlotRange]]
) -> tuple[list[SlotSource], int]:
    """Returns the slots of this node's ranks with a version, and how many bytes go to storage.

    Raises:
        FormatError: a rank has no such slot here.
    """
    sources, nbytes = [], 0
    for rank in job.ranks:
        for slot in job.slots.of_rank(rank):
            header = header_of(job.id, slot)
            if header is not None and header.state is SlotState.SEALED and header.version == version:
                sources.append(SlotSource(rank, slot.descriptor, ranges[rank]))
                nbytes += stored_bytes(header, ranges[rank])
                break
        else:
            raise FormatError(f"no slot of rank {rank} has {version} any more.")
    return sources, nbytes
