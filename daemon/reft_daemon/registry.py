"""The jobs of this daemon, and the daemon's work on them without a request.

Without a request it takes over old jobs, expires ended ones, drops ended ones when memory is short,
and tells changes of jobs (see `reft_daemon.jobs.changes`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

from reft.core.membership.job_identity import check_name
from reft.errors import AttachError, ConfigError, NoRoom
from reft.failpoints import Failpoints
from reft.wire import messages
from reft.wire.local_socket import CallerProcess
from reft.wire.process import Process, stat_of
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import UNLINKED, Arena, SlotFile
from reft_daemon.arena.slices import run_in_slices
from reft_daemon.jobs import epochs, leasing, persistence, trainers, undo
from reft_daemon.jobs.changes import (
    TOLD_TO_MONITOR,
    TOLD_TO_REPORTS,
    TOLD_TO_SENDERS,
    TOLD_TO_TURNS,
    ChangeQueue,
    JobChange,
)
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.scrub import ScrubCounts
from reft_daemon.membership.heartbeats import HeartbeatService
from reft_daemon.membership.retention import RetentionTimes, audit_freed, may_be_dropped
from reft_daemon.mover.mover import Mover, MoverSettings
from reft_daemon.peers.channels import PeerChannels
from reft_daemon.peers.persists import PersistService
from reft_daemon.peers.round_replicator import RoundReplicator, send_base_again
from reft_daemon.peers.turns import TurnService
from reft_daemon.persist.persister import PersistSettings

log = logging.getLogger("reft.daemon")
JOBS_MAX = 256
DECISION_TRIES = 16  # each fails only if a rank here got or gave up a lease meanwhile
MAKES_ROOM = "jobs that ended and have no name make room"
PAUSE_S = 0.05  # shortest pause between two checks for expired jobs: --ttl may be 0


class FreedJob(NamedTuple):
    """A job whose slots this daemon has freed by itself.

    Attributes:
        whole: the newest step that was whole; -1: not known.
        cause: why the slots were freed.
        at_s: when they were freed.
    """

    whole: int
    cause: str
    at_s: float


class UnknownJob(AttachError):
    """This daemon has no job of that name."""


class Registry:
    """All jobs of one daemon.

    Args:
        arena: where slots lie.
        peers: channels to other daemons.
        ttl_s: how long a job's slots are kept after its last trainer ended.
        beats: channels to other daemons for heartbeats alone.
        kills_hung: see `HeartbeatService`.
        mover: how this daemon's mover listens.
        persist: how checkpoints are written; None: this daemon writes none.
    """

    def __init__(
        self,
        arena: Arena,
        peers: PeerChannels,
        ttl_s: RetentionTimes,
        failpoints: Failpoints,
        beats: PeerChannels,
        kills_hung: bool = False,
        mover: MoverSettings = MoverSettings(),  # noqa: B008  frozen
        persist: PersistSettings | None = None,
    ) -> None:
        self.arena = arena
        self.peers = peers
        self.ttl_s = ttl_s
        self._failpoints = failpoints
        self.jobs: dict[str, JobRecord] = {}
        self.changes = ChangeQueue()
        self._replicators: dict[str, RoundReplicator] = {}
        self.scrubbed = ScrubCounts()
        self.turns = TurnService(peers, Mover(mover), mover.advertised, failpoints)
        self.persists = PersistService(self.jobs, peers, persist, failpoints, arena)
        self.heartbeat_service = HeartbeatService(arena.node_id, beats, self.jobs, self.changes, kills_hung)
        self.idle_since_s = time.monotonic()
        self.agents: set[Process] = set()
        self._freed: dict[str, FreedJob] = {}
        # jobs whose slot files somebody removed, as already logged
        self._jobs_with_removed_files: set[str] = set()

    def keep_for_agent(self, pid: int) -> None:
        """Keeps this daemon running while an agent of this node lives.

        A job may begin at any time.
        """
        stat = stat_of(pid)
        if stat is not None:
            self.agents.add(Process(pid, stat.start))

    def restart_idle_time(self) -> None:
        """Restarts the idle time: an attach has begun, or goes on.

        The job itself comes with the decision of that attach. Until then only files of a checkpoint
        keep this daemon.
        """
        self.idle_since_s = time.monotonic()

    def adopt(self) -> None:
        """Takes over the jobs that an earlier daemon left in the arena."""
        for record in self.arena.read_records():
            job = self.jobs[record.manifest.job] = JobRecord(self.arena, record, self.changes)
            epochs.adopt(job)
            self._start_replicator(job)
            if job.is_live:
                self.heartbeat_service.monitors.note_decision(job)
            log.info("job=%s adopted slots=%d bytes=%d", job.id, len(job.slots.current), job.held_bytes)

    def get(self, name: str) -> JobRecord:
        """Returns the job of that name.

        Raises:
            UnknownJob: this daemon has no such job.
            FormatError: the job's record is damaged.
        """
        if check_name(name) not in self.jobs:
            self.arena.job_files.refuse_damaged(name)
            raise UnknownJob(f"this daemon holds no job {name!r}.")
        return self.jobs[name]

    async def decide(self, request: pb.DecideRequest) -> None:
        """Takes the decision of a new attach. It creates the job if the job is new here.

        Raises:
            ConfigError, FormatError: the manifest contradicts itself, or the job's record here is
                damaged.
            StaleEpoch: a newer decision is in force.
            AttachError: the attach counts on slots of a job that is no longer held here.
        """
        # A placement of thousands of ranks takes seconds. Nobody changes the request meanwhile.
        placement = await asyncio.to_thread(epochs.place, request)
        async with self.arena.job_files.deciding:
            name = request.manifest.job
            is_full = name not in self.jobs and len(self.jobs) >= JOBS_MAX
            if is_full and (oldest := oldest_to_drop(self, name)) is not None:
                self._free(oldest, f"job {name} needed a place, of which there are {JOBS_MAX}: {MAKES_ROOM}")
            for _ in range(DECISION_TRIES):
                job = job_to_decide(self, request)
                if await run_in_slices(epochs.decide(job, request, placement)):
                    break  # in force: what follows belongs to the same slice
            else:
                raise AttachError(f"job {request.manifest.job} changes all the time on this node.", "try again")
            self.jobs[job.id] = job
            if opened := self.persists.reader.take(job.id):
                job.slots.close_stored()
                job.slots.stored.update(opened)
            if job.id in self._replicators:
                self._replicators.pop(job.id).close()
            self._start_replicator(job)
            self.turns.release(job.id)
            self.heartbeat_service.monitors.note_decision(job)

    async def open_stored(self, request: pb.OpenStoredRequest) -> pb.OpenStoredReply:
        """Opens files of a checkpoint for the next attach of a job; see `StoredReader.open`."""
        check_name(request.job)
        self.restart_idle_time()
        if (job := self.jobs.get(request.job)) is not None:
            if job.is_live:
                raise AttachError(f"job {job.id} is being trained.", "end its trainers first")
            job.slots.close_stored()
        return await self.persists.reader.open(request)

    async def secure(self, request: pb.SecureRequest) -> None:
        """Sends the capsules of the decision's base and guard to this node's holders.

        Returns once the holders keep them. The holders may be other nodes than before.

        The base may be a version that never became whole: all ranks sealed it, but some capsules
        did not arrive. The next snapshots overwrite older whole versions. So the base's capsules
        must lie on other nodes first.

        Raises:
            StaleEpoch: a newer decision is in force.
            AttachError: a holder does not accept them.
        """
        job = self.get(request.job)
        job.check_epoch(request.epoch)
        await send_base_again(job, self.peers)

    def _start_replicator(self, job: JobRecord) -> None:
        if job.record.HasField("decision"):
            self._replicators[job.id] = RoundReplicator(job, self.peers, self._failpoints)

    async def tell_changes(self) -> None:
        """Tells the changes of jobs, one after the other, until `close`.

        It is the only consumer of the queue.
        """
        while change := await self.changes.take():
            try:
                self._tell(change)
            except Exception:  # a bug that one job meets must not stop the rounds of the others
                log.exception("job=%s a change can't be told", change.job)

    def _tell(self, change: JobChange) -> None:
        if change.kinds & TOLD_TO_REPORTS and change.job in self.jobs:
            self.jobs[change.job].wake_waiting_reports()
        if change.kinds & TOLD_TO_SENDERS and change.job in self._replicators:
            self._replicators[change.job].wake()
        if change.kinds & TOLD_TO_TURNS and change.job in self.jobs:
            self.turns.wake(self.jobs[change.job])
            self.persists.wake(self.jobs[change.job])
        if change.kinds & TOLD_TO_MONITOR:
            self.heartbeat_service.look(change.job)
        if change.job in self.jobs and any(lease.refused for lease in self.jobs[change.job].leases.values()):
            self._undo(self.jobs[change.job])  # the last rank has died, after another rank was refused

    async def lease(self, request: pb.LeaseRequest, caller: CallerProcess) -> list[SlotFile]:
        """Returns slots for a rank, whose trainer is the caller.

        If memory is short, ended jobs without a name are dropped first.

        Raises:
            AttachError: the caller trains another job.
        """
        job = self.get(request.job)
        leasing.refuse_trainer_of_others(job, self.jobs.values(), caller.process)
        while True:
            try:
                return await leasing.lease(job, request, caller)
            except NoRoom:
                if (oldest := oldest_to_drop(self, job.id)) is None:
                    raise
                self._free(oldest, f"job {job.id} needed its memory: {MAKES_ROOM}")

    def release(self, request: pb.ReleaseRequest, pid: int) -> None:
        """Ends a rank's lease, for process `pid`. If its attach was refused, undoes its decision.

        Raises:
            StaleEpoch: the rank belongs to an older attach.
        """
        job = self.get(request.job)
        trainers.release(job, request, pid)
        if request.refused:  # perhaps on another node, before a rank was registered here
            self._undo(job)

    def _undo(self, job: JobRecord) -> None:
        """Undoes the decision of a refused attach, once none of its trainers is left.

        A job that was new is dropped.
        """
        if not undo.may_undo(job):
            return
        undo.undo(job)
        if not job.record.HasField("decision"):
            self.purge(job.id)
            return
        self._replicators.pop(job.id).close()
        self._start_replicator(job)
        self.heartbeat_service.monitors.note_undo(job)

    def _free(self, job: JobRecord, cause: str) -> None:
        """Drops a job that nobody asked to drop, and remembers that it was there."""
        freed, had_whole = FreedJob(job.known_whole, cause, time.monotonic()), job.record.had_whole
        audit_freed(job.id, job, cause, self.purge(job.id))
        if had_whole:
            self._freed[job.id] = freed
            while len(self._freed) > JOBS_MAX:
                del self._freed[next(iter(self._freed))]

    def known_steps(self, name: str, node: str) -> list[pb.KnownStep]:
        """Returns the whole step of a job that this daemon, of node `node`, has freed."""
        freed = self._freed.get(name)
        if freed is None:
            return []
        age_s = time.monotonic() - freed.at_s
        source = f"the daemon of node {node}, which freed the job {age_s:.0f} s ago: {freed.cause}"
        return [pb.KnownStep(step=freed.whole, source=source)]

    def purge(self, name: str) -> int:
        """Drops a job and its slots; returns the number of freed bytes."""
        if name in self.arena.job_files.damaged:
            return self.arena.free_damaged(name)
        job = self.get(name)
        self._freed.pop(name, None)
        if name in self._replicators:
            self._replicators.pop(name).close()
        del self.jobs[name]
        self.turns.drop(name)
        self.persists.drop(name)
        self.heartbeat_service.monitors.forget(name)
        return persistence.free(job)

    async def expire_for_ever(self, idle_exit_s: float) -> None:
        """Drops jobs whose time to live is over.

        It returns when this daemon has been idle for `idle_exit_s`. With `idle_exit_s` 0 it never
        returns.
        """
        while True:
            now = time.monotonic()
            for job in list(self.jobs.values()):
                try:
                    agent = self.heartbeat_service.monitors.agent_of(job.id)
                    is_over = not job.is_live and now - job.ended_s > self.ttl_s.seconds_for(job, agent)
                    # slots of a newer reft go only by a purge, or by that reft
                    if is_over and not job.slots.unreadable and not self.persists.needs(job):
                        self._free(job, self.ttl_s.end_cause(job, agent))
                except Exception:  # a bug that one job meets must not end this daemon, and so all jobs
                    log.exception("job=%s can't be expired", job.id)
            self._notice_removed_files()
            await asyncio.gather(self.peers.close_unused(), self.heartbeat_service.sender.peers.close_unused())
            self.persists.reader.expire(now)
            self.arena.reserve.refill()
            self.agents = {agent for agent in self.agents if not _has_ended(agent)}
            is_idle = self.heartbeat_service.is_idle and self.persists.reader.is_idle
            if self.jobs or self.arena.job_files.damaged or self.agents or not is_idle:
                self.idle_since_s = now
            if idle_exit_s and now - self.idle_since_s > idle_exit_s:
                log.info("no job and no agent for %.0f s: this daemon exits", now - self.idle_since_s)
                return
            await asyncio.sleep(max(PAUSE_S, min(1.0, *(each / 4 for each in self.ttl_s), idle_exit_s / 4 or 1.0)))

    def _notice_removed_files(self) -> None:
        unlinked = {job.id for job in self.jobs.values() if job.slots.backing == UNLINKED}
        for name in unlinked - self._jobs_with_removed_files:
            log.error(
                "job=%s: somebody has removed slot files of this job from %s. Training and snapshots continue, but the "
                "snapshots are lost when this daemon ends. systemd removes such files when a user's last session ends (set "
                "RemoveIPC=no in logind.conf, or run loginctl enable-linger). Scripts that clear /dev/shm do it, too.",
                name,
                self.arena.folder,
            )
        self._jobs_with_removed_files = unlinked

    async def close(self, purge: bool) -> None:
        """Stops all work. The slots stay for the next daemon unless `purge` is set."""
        self.changes.close()
        for replicator in self._replicators.values():
            replicator.close()
        if purge:
            self._replicators.clear()
            cause = "this daemon ended, and was to free all jobs then (--purge)"
            for job in list(self.jobs.values()):
                self._free(job, cause)
            for name in list(self.arena.job_files.damaged):
                audit_freed(name, None, cause, self.purge(name))
        await asyncio.gather(self.turns.close(), self.persists.close())
        await self.heartbeat_service.close()
        await self.peers.close()


def oldest_to_drop(registry: Registry, but: str) -> JobRecord | None:
    """Returns the job without a name that ended first; None: there is none.

    A job without a trainer so far stays: its attach goes on, or its slots were rebuilt here.

    Args:
        registry: all jobs.
        but: name of the job that needs the room.
    """
    agent_of = registry.heartbeat_service.monitors.agent_of
    ended = [
        each for each in registry.jobs.values()
        if each.id != but and each.leases and may_be_dropped(each, agent_of(each.id))
    ]  # fmt: skip
    return min(ended, key=lambda candidate: candidate.ended_s, default=None)


def job_to_decide(registry: Registry, request: pb.DecideRequest) -> JobRecord:
    """Returns the job of a decision, a new one if this daemon has none.

    Raises:
        ConfigError, FormatError, AttachError: see `Registry.decide`.
    """
    manifest = request.manifest
    name = manifest.job
    registry.arena.job_files.refuse_damaged(name)
    if request.counts_on_slots and name not in registry.jobs:
        raise AttachError(
            f"job {name} was freed on this node while an attach planned its restore with slots of this node.",
            "start the job again: it goes on with what is held then",
        )
    if name not in registry.jobs and len(registry.jobs) >= JOBS_MAX:
        raise NoRoom(f"this daemon holds {len(registry.jobs)} jobs; the limit is {JOBS_MAX}.", "reft-cli purge JOB")
    job = registry.jobs.get(name) or JobRecord(registry.arena, pb.JobRecord(manifest=manifest), registry.changes)
    if messages.job_mark(job.record.manifest) != messages.job_mark(manifest):
        raise ConfigError(
            f"this daemon holds another job of the name {name}.",
            f"choose another name, or free the old job: reft-cli purge {name}",
        )
    return job


def living_pids(processes: Iterable[Process]) -> list[int]:
    """Returns the pids of the processes that have not ended."""
    return sorted(process.pid for process in processes if not _has_ended(process))


def _has_ended(process: Process) -> bool:
    """Whether a process is known to have ended."""
    try:
        return not process.is_alive
    except OSError:
        return False
