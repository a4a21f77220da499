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
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Final

import grpc

from reft.core.commit.version import Epoch, Version
from reft.core.persist.persist_cadence import PERSIST_SLOTS_MIN, PersistCadence, newest_step
from reft.core.persist.stored_names import is_lineage
from reft.errors import AttachError, ConfigError, ReftError
from reft.failpoints import Failpoints
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.arena.arena import Arena
from reft_daemon.jobs import rounds
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.peers.channels import PeerChannels, reason_of
from reft_daemon.peers.holds import HoldService
from reft_daemon.peers.persist_run import ATTEMPTS, CALL_S, PersistRun
from reft_daemon.persist.node_writer import NodeWriter
from reft_daemon.persist.persister import Persister, PersistSettings, StorageFailed, StoredStep
from reft_daemon.persist.stored_reader import StoredReader

log = logging.getLogger("reft.daemon")
LOOK_S: Final = 0.2  # between two looks at what is due
QUIET_S: Final = 15.0  # that storage may take nothing, until `status` says so
RETRY_S: Final = 30.0  # until a decision is put to storage again
FLUSH_AFTER_S: Final = 15.0  # without a trainer: a launcher that restarts the job is faster
HOLD_S: Final = 5.0  # that an answer to a node that flushes waits for the checkpoint
FLUSH_SILENCE_S: Final = 5.0  # of the coordinator, in a flush


@dataclass
class JobState:
    """What the coordinator's daemon knows of one job's checkpoints.

    Attributes:
        epoch: in force.
        cadence: when the next one is due.
        has_decision: whether storage has the epoch's decision.
        decide_s: when the decision is put to storage next.
        task: puts the decision, or makes a checkpoint; None: nothing is under way.
        task_s: when the task began its present part.
        run: the checkpoint under way.
        last: the newest complete one.
        last_s: when it was completed.
        found: step and time of the newest one that storage had before; None: none.
        took_s: how long it took.
        trouble: what is wrong; empty: nothing.
    """

    epoch: Epoch
    cadence: PersistCadence
    has_decision: bool = False
    decide_s: float = 0.0
    task: asyncio.Task[None] | None = None
    task_s: float = 0.0
    run: PersistRun | None = None
    last: PersistRun | None = None
    last_s: float = 0.0
    found: StoredStep | None = None
    took_s: float = 0.0
    trouble: str = ""

    def note_trouble(self, job: str, words: str) -> None:
        """Notes what is wrong; logs it if it is new."""
        if words != self.trouble:
            log.error("job=%s %s", job, words)
        self.trouble = words

    def note_complete(self, run: PersistRun) -> None:
        """Notes that a checkpoint is complete."""
        self.last, self.last_s, self.trouble = run, time.monotonic(), ""
        self.took_s = self.last_s - run.began_s
        log.info("job=%s %s is on storage: %d bytes in %.2f s", run.job.id, run.version, run.total_bytes, self.took_s)

    def begin(self, task: asyncio.Task[None]) -> None:
        """Notes what is under way."""
        self.task, self.task_s = task, time.monotonic()

    def quiet_s(self, now_s: float) -> float:
        """Returns how long storage has taken nothing of what is under way."""
        if self.task is None:
            return 0.0
        return now_s - max(self.task_s, self.run.moved_s if self.run is not None else 0.0)

    def stop(self) -> None:
        """Ends what is under way; its end changes no pins."""
        if self.task is not None:
            self.task.cancel()
        self.task = self.run = None


class PersistService:
    """The checkpoints of all jobs on this daemon.

    Args:
        jobs: name → job.
        peers: channels to other daemons.
        settings: how checkpoints are written; None: this daemon writes none.
        failpoints: let tests end this daemon before a commit.
        memory: counts the files that are fetched into memory; None: nobody counts them.

    Attributes:
        reader: the way back, from checkpoints to slots.
        holds: keeps the step of an export.
    """

    def __init__(
        self, jobs: Mapping[str, JobRecord], peers: PeerChannels, settings: PersistSettings | None,
        failpoints: Failpoints, memory: Arena | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self._jobs = jobs
        self._peers = peers
        self._failpoints = failpoints
        self._persister = Persister(settings.root, settings.key_file) if settings else None
        self.reader = StoredReader(self._persister, memory)
        self.holds = HoldService(peers, settings is not None)
        self._states: dict[str, JobState] = {}
        self.writer = NodeWriter(self._persister)
        self._flushed: dict[str, Epoch] = {}  # job → the epoch whose end was flushed
        self._flushing: set[str] = set()
        self._refused: set[str] = set()  # jobs that are not persisted, as already logged
        self._tasks: set[asyncio.Task[None]] = set()

    # What the registry, the services and main call

    async def run(self) -> None:
        """Begins what is due, until it is cancelled. Without `--persist` nothing is."""
        if self._persister is not None:
            self._start(_look_at_storage(self._persister))
        while True:
            for job in list(self._jobs.values()):
                try:
                    self.holds.look(job)
                    if self.settings:
                        self._look(job)
                        self._look_for_end(job)
                except Exception:  # a bug that one job meets must not stop the others, or end this daemon
                    log.exception("job=%s can't be persisted, or kept for an export", job.id)
            await asyncio.sleep(LOOK_S)

    def wake(self, job: JobRecord) -> None:
        """Ends all work of an earlier epoch of the job."""
        state = self._states.get(job.id)
        if not job.record.HasField("decision"):
            return
        self.writer.end_earlier(job)
        if state is not None and state.epoch != job.epoch:
            state.stop()
            state.epoch, state.cadence = job.epoch, state.cadence.next_epoch()
            state.has_decision, state.decide_s = False, 0.0

    def drop(self, name: str) -> None:
        """Ends all work for a job that is dropped."""
        self.writer.drop(name)
        self.holds.drop(name)
        if name in self._states:
            self._states.pop(name).stop()
        self._flushed.pop(name, None)
        self._refused.discard(name)

    async def end_lineage(self, job: JobRecord) -> None:
        """Marks the job's lineage as ended on purpose, if this daemon writes to storage.

        It stays if the job went on without this node: its checkpoints are the newer ones.

        Raises:
            StorageFailed: it is not marked. A later start under this name would go on with it.
        """
        if self._persister is not None and is_lineage(job.record.manifest.lineage):
            decision = messages.decision_from(job.record.decision) if job.record.HasField("decision") else None
            try:
                is_marked = await self._persister.end(job.id, job.record.manifest.lineage, decision)
            except StorageFailed as error:
                raise StorageFailed(
                    f"{self._persister.root} takes no mark that job {job.id} has ended, so nothing was freed: a later "
                    f"start under this name would go on from its checkpoints. {error.message}",
                    "repair the storage, then purge again; to free the memory at once, end this daemon, start it "
                    "without --persist, and purge then: the checkpoints count on",
                ) from error
            if not is_marked:
                log.warning("job=%s went on without this node: its checkpoints on storage stay", job.id)

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
            manifest, service = job.record.manifest, pb_grpc.DaemonStub
            coordinator = manifest.nodes[0], messages.known_tokens(manifest)
            return await self._peers.call(*coordinator, service, "PersistJob", request, CALL_S, reconnect=True)  # type: ignore[return-value]
        if reason := refusal(job, self.settings):
            raise ConfigError(reason, "start each daemon with --persist DIR, and attach again")
        state, pins = self._state_of(job), job.round.outcome.pins
        if request.HasField("step"):
            if messages.epoch_from(request.epoch) != job.epoch:
                raise AttachError(f"job {job.id} was started again meanwhile.", "ask again")
            step = request.step
            if request.flush:
                await _settle(state, step)
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

    def needs(self, job: JobRecord) -> bool:
        """Whether the slots of an ended job must stay, because a flush is to come."""
        if self.settings is None or not self.settings.flushes or refusal(job, self.settings):
            return False
        has_step = job.round is not None and job.round.outcome.whole >= 0
        return has_step and (self._flushed.get(job.id) != job.epoch or job.id in self._flushing)

    async def flush(self) -> None:
        """Persists the newest whole step of each job, within the grace."""
        if self.settings is None or not self.settings.flushes:
            return
        tasks = [self._start(self._flush(job)) for job in self._jobs.values() if not refusal(job, self.settings)]
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
        status = pb.StorageStatus(
            persisted=-1, step=-1, every_s=self.settings.every_s, trouble=refusal(job, self.settings)
        )
        if state is None:
            return status
        status.trouble = state.trouble
        if state.last is not None:
            status.persisted, status.age_s = state.last.version.step, now - state.last_s
            status.nbytes, status.took_s = state.last.total_bytes, state.took_s
        elif state.found is not None:
            status.persisted, status.age_s = state.found.version.step, max(time.time() - state.found.time_s, 0.0)
        if state.run is not None:
            status.step, status.since_s = state.run.version.step, now - state.run.began_s
            status.written_bytes, status.total_bytes = state.run.written_bytes, state.run.total_bytes
        if (quiet_s := state.quiet_s(now)) > QUIET_S:
            status.trouble = f"{self.settings.root} has taken nothing for {quiet_s:.0f} s; training is not affected."
        return status

    async def close(self) -> None:
        """Ends all work, and the persister. Waits for neither storage nor other nodes."""
        self.writer.close()
        for state in self._states.values():
            state.stop()  # the pins stay: the next daemon goes on
        for task in self._tasks:
            task.cancel()
        self.reader.close()
        if self._persister is not None:
            self._persister.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CALL_S)

    # The coordinator

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
        if reason := refusal(job, self.settings):
            if job.id not in self._refused:
                self._refused.add(job.id)
                log.warning("job=%s is not persisted: %s", job.id, reason)
            if job.round.outcome.pins.persist >= 0 and not self.holds.is_held(job):
                rounds.pin_persist(job, -1)  # of an export before a restart: no checkpoint ever takes it
            return
        state, pins, now = self._state_of(job), job.round.outcome.pins, time.monotonic()
        if state.task is not None or pins.whole < 0 or self.holds.is_held(job):
            return
        if 0 <= pins.persist <= max(state.cadence.persisted, state.cadence.given_up):
            rounds.pin_persist(job, -1)  # the pins could not be recorded when it ended
            return
        step = state.cadence.next_step(pins, now)
        if step < 0:
            if state.cadence.every_s and now >= state.cadence.due_s:
                state.cadence = state.cadence.begin(now)
            if not state.has_decision and now >= state.decide_s:
                state.begin(self._start(self._decide_alone(job, state)))
            return
        has_room = job.record.manifest.slots >= PERSIST_SLOTS_MIN
        if not rounds.pin_persist(job, step if has_room else -1):
            return
        state.cadence = state.cadence.begin(now)
        seq = job.round.outcome.pins.seq
        state.run = PersistRun(job, Version(job.epoch, step), (ATTEMPTS + 1) * seq, self.writer, self._peers)
        state.begin(self._start(self._run(job, state, state.run)))

    async def _decide_alone(self, job: JobRecord, state: JobState) -> None:
        try:
            await self._decide(job, state)
            state.trouble = ""
        except StorageFailed as error:
            state.note_trouble(job.id, f"the decision of this attach is not on storage: {error.message}")
        finally:
            if state.task is asyncio.current_task():
                state.task, state.decide_s = None, time.monotonic() + RETRY_S

    async def _decide(self, job: JobRecord, state: JobState) -> None:
        assert self._persister is not None
        if not state.has_decision:
            decision = messages.decision_from(job.record.decision)
            await self._persister.decide(job.id, job.record.manifest.lineage, decision)
            state.found = await self._persister.newest(job.id, job.record.manifest.lineage)
            if state.epoch == decision.epoch:
                state.has_decision = True
                if state.found is not None:
                    age_s = time.time() - state.found.time_s
                    state.cadence = state.cadence.found(age_s, time.monotonic())
                if state.found is not None and state.found.version.epoch == decision.epoch:
                    state.cadence = state.cadence.end(state.found.version.step, is_complete=True)

    async def _run(self, job: JobRecord, state: JobState, run: PersistRun) -> None:
        """Makes one checkpoint, or says why not; then removes what is not needed."""
        try:
            is_complete = await self._is_persisted(job, state, run)
            state.task_s = time.monotonic()
            if is_complete and state.epoch == run.version.epoch:
                await self._prune(job, state)
            elif run.has_failed and self._persister is not None:
                await run.discard(self._persister)
        except StorageFailed as error:
            log.error("job=%s remains of step %d are not removed: %s", job.id, run.version.step, error.message)
        finally:
            if state.task is asyncio.current_task():
                state.task = None

    async def _is_persisted(self, job: JobRecord, state: JobState, run: PersistRun) -> bool:
        """Makes one checkpoint; returns whether it is complete."""
        assert self._persister is not None
        is_complete = False
        try:
            await self._decide(job, state)
            is_complete = state.cadence.persisted >= run.version.step  # since before a restart
            if not is_complete:
                await run.commit(self._persister, await run.write(), self._failpoints)
                is_complete = True
                state.note_complete(run)
        except (ReftError, OSError, grpc.RpcError) as error:
            words = error.message if isinstance(error, ReftError) else reason_of(error)
            state.note_trouble(job.id, f"step {run.version.step} is not on storage: {words}")
        finally:
            if state.run is run:  # else an attach has begun another epoch
                state.cadence = state.cadence.end(run.version.step, is_complete)
                state.run = None
                if job.round is not None and job.round.outcome.pins.persist >= 0:
                    rounds.pin_persist(job, -1)
        return is_complete

    async def _prune(self, job: JobRecord, state: JobState) -> None:
        assert self._persister is not None and self.settings is not None
        decision, lineage = messages.decision_from(job.record.decision), job.record.manifest.lineage
        try:
            removed = await self._persister.prune(job.id, lineage, decision, self.settings.retention)
            if removed:
                log.info("job=%s removed checkpoints=%d", job.id, removed)
        except StorageFailed as error:
            state.note_trouble(job.id, f"old checkpoints are not removed: {error.message}")

    # The end of a job, or of this daemon

    def _look_for_end(self, job: JobRecord) -> None:
        """Begins a flush once the job's last trainer here is gone for a while."""
        assert self.settings is not None
        is_over = not job.is_live and time.monotonic() - job.ended_s > FLUSH_AFTER_S
        if not self.settings.flushes or not is_over or job.round is None or refusal(job, self.settings):
            return
        if self._flushed.get(job.id) != job.epoch:
            self._flushed[job.id] = job.epoch
            self._flushing.add(job.id)
            flush = self._start(self._flush(job))
            flush.add_done_callback(lambda _: self._flushing.discard(job.id))

    async def _flush(self, job: JobRecord) -> None:
        """Has the newest whole step persisted; returns when it is, or is given up."""
        request, heard_s = pb.PersistJobRequest(job=job.id, flush=True), time.monotonic()
        while job.id in self._jobs:
            try:
                reply = await self.request(job, request)
            except (grpc.RpcError, OSError, ReftError) as error:
                if time.monotonic() - heard_s > FLUSH_SILENCE_S or isinstance(error, ReftError):
                    log.error("job=%s can't be flushed to storage: %s", job.id, reason_of(error))
                    return
                await asyncio.sleep(LOOK_S)
            else:  # ask again at once: the coordinator holds its answer, and then may end
                heard_s = time.monotonic()
                if reply.done or reply.trouble:
                    return
                request = pb.PersistJobRequest(job=job.id, step=reply.step, epoch=reply.epoch, flush=True)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def note_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a checkpoint has failed", exc_info=error)

        task.add_done_callback(note_end)
        return task


async def _look_at_storage(persister: Persister) -> None:
    """Says in the log if storage is not there. Else only a job's first checkpoint would say so."""
    try:
        await persister.look()
    except StorageFailed as error:
        log.error(
            "no checkpoint can be written to %s now: %s\nFix: look whether it is mounted, and whether --persist names it",
            persister.root, error.message,
        )  # fmt: skip


def refusal(job: JobRecord, settings: PersistSettings | None) -> str:
    """Returns why a job is not persisted; empty if it is."""
    if settings is None:
        return f"the daemon of job {job.id}'s coordinator writes no checkpoints."
    if not job.record.manifest.named:
        return f"job {job.id} has no name, so its checkpoints could not be found again."
    if not is_lineage(job.record.manifest.lineage):
        return f"job {job.id} was attached while no daemon had --persist."
    return ""


async def _settle(state: JobState, step: int) -> None:
    """Returns once a step is on storage or given up, or after HOLD_S.

    A node that flushes is answered by this, before the coordinator's daemon ends.
    """
    end_s = time.monotonic() + HOLD_S
    while max(state.cadence.persisted, state.cadence.given_up) < step:
        if time.monotonic() > end_s:
            return
        await asyncio.sleep(LOOK_S)
