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

import grpc

from reft.core.budget import format_bytes
from reft.core.commit.decision import KNOWN_MAX
from reft.core.membership.job_identity import check_name
from reft.errors import AttachError, ConfigError, NoRoom, split_remedy
from reft.failpoints import Failpoints
from reft.wire import messages
from reft.wire.messages import MANIFEST_MAX
from reft.wire.process import Process, stat_of
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.arena.arena import UNLINKED, Arena, SlotFile
from reft_daemon.jobs import epochs, leasing, persistence, trainers, undo
from reft_daemon.jobs.capsule_replication import place_node
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
from reft_daemon.mover.mover import Mover, MoverSettings
from reft_daemon.peers.persists import PersistService
from reft_daemon.peers.round_replicator import KEEP_DEADLINE_S, PeerChannels, RoundReplicator, reason_of
from reft_daemon.peers.turns import TurnService
from reft_daemon.persist.persister import PersistSettings

log = logging.getLogger("reft.daemon")
JOBS_MAX = 256
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


class RetentionTimes(NamedTuple):
    """Seconds for which a job's slots are kept after its last trainer ended.

    Attributes:
        ended: for jobs that ended, and for all jobs without a name.
        failed: for a named job with an unclosed session: people may have to be woken to start it
            again.
    """

    ended: float
    failed: float

    def seconds_for(self, job: JobRecord) -> float:
        """Returns a job's time to live.

        On nodes without ranks of the job, the job counts as failed.
        """
        return self.failed if job.record.manifest.named and not job.are_all_closed else self.ended

    def left_s(self, job: JobRecord) -> float:
        """Returns for how many seconds an ended job's slots are kept yet."""
        return max(0.0, self.seconds_for(job) - (time.monotonic() - job.ended_s))


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
        """Restarts the idle time: an attach has begun.

        The job itself comes with the decision of that attach. Until then nothing else keeps this
        daemon.
        """
        self.idle_since_s = time.monotonic()

    def adopt(self) -> None:
        """Takes over the jobs that an earlier daemon left in the arena."""
        for record in self.arena.records():
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
        """
        if check_name(name) not in self.jobs:
            raise UnknownJob(f"this daemon holds no job {name!r}.")
        return self.jobs[name]

    async def decide(self, request: pb.DecideRequest) -> None:
        """Takes the decision of a new attach. It creates the job if the job is new here.

        Raises:
            ConfigError, FormatError: the manifest contradicts itself.
            StaleEpoch: a newer decision is in force.
        """
        manifest = request.manifest
        _check_decision(request)
        name = manifest.job
        placement = await place_node(manifest, request.node_index)
        if name not in self.jobs:
            if len(self.jobs) >= JOBS_MAX:
                raise NoRoom(f"this daemon holds {len(self.jobs)} jobs; the limit is {JOBS_MAX}.", "reft-cli purge JOB")
            self.jobs[name] = JobRecord(self.arena, pb.JobRecord(manifest=manifest), self.changes)
        job = self.jobs[name]
        known_token = job.record.manifest.token
        if known_token and known_token != manifest.token:
            raise ConfigError(
                f"this daemon holds job {name} with another token.",
                f"choose another name, or free the old job: reft-cli purge {name}",
            )
        epochs.decide(job, request, placement)
        if opened := self.persists.reader.take(name):
            job.slots.close_stored()
            job.slots.stored.update(opened)
        if name in self._replicators:
            self._replicators.pop(name).close()
        self._start_replicator(job)
        self.turns.release(name)
        self.heartbeat_service.monitors.note_decision(job)

    async def open_stored(self, request: pb.OpenStoredRequest) -> pb.OpenStoredReply:
        """Opens files of a checkpoint for the next attach of a job; see `StoredReader.open`."""
        check_name(request.job)
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
        if not job.record.holders:
            return
        decision = messages.decision_from(job.record.decision)
        kept = {version for version in (decision.base, decision.guard) if version is not None}
        slots = job.slots.all.values()
        batches = [batch for version in kept for batch in job.capsule_replication.batches_of_version(slots, version)]
        nodes, token, stub = job.record.manifest.nodes, job.record.manifest.token, pb_grpc.PeerStub

        async def send_to(holder: int) -> None:
            for capsules in batches:
                keep = pb.KeepRequest(job=job.id, epoch=request.epoch, capsules=capsules)
                try:
                    await self.peers.call(nodes[holder], token, stub, "Keep", keep, KEEP_DEADLINE_S, reconnect=True)
                except (grpc.RpcError, OSError) as error:
                    reason, remedy = split_remedy(reason_of(error))
                    raise AttachError(
                        f"node {nodes[holder].name} does not keep the capsules of {decision.base}: {reason}",
                        remedy or "check the daemon of that node",
                    ) from error

        await asyncio.gather(*(send_to(holder) for holder in job.record.holders))

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

    async def lease(self, request: pb.LeaseRequest) -> list[SlotFile]:
        """Returns slots for a rank.

        If memory is short, ended jobs without a name are dropped first.
        """
        job = self.get(request.job)
        while True:
            try:
                return await leasing.lease(job, request)
            except NoRoom:
                ended = [
                    j for j in self.jobs.values() if j is not job and not j.is_live and not j.record.manifest.named
                ]
                if not ended:
                    raise
                oldest = min(ended, key=lambda candidate: candidate.ended_s)
                log.warning(
                    "job=%s is dropped to make room for job=%s: it has ended and has no name", oldest.id, job.id
                )
                self._free(oldest, "other jobs needed its memory")

    def release(self, request: pb.ReleaseRequest) -> None:
        """Ends a rank's lease. If the rank's attach was refused, undoes its decision.

        Raises:
            StaleEpoch: the rank belongs to an older attach.
        """
        job = self.get(request.job)
        trainers.release(job, request)
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

    def _free(self, job: JobRecord, cause: str) -> int:
        """Drops a job that nobody asked to drop, and remembers that it was there."""
        freed = FreedJob(job.known_whole, cause, time.monotonic())
        had_whole, nbytes = job.record.had_whole, self.purge(job.id)
        if had_whole:
            self._freed[job.id] = freed
            while len(self._freed) > JOBS_MAX:
                del self._freed[next(iter(self._freed))]
        return nbytes

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
                is_over = not job.is_live and now - job.ended_s > self.ttl_s.seconds_for(job)
                if is_over and not self.persists.needs(job):
                    ttl_s = self.ttl_s.seconds_for(job)
                    nbytes = self._free(job, f"its time to live of {ttl_s:.0f} s was over")
                    log.info("job=%s ended %.0f s ago, freed %s", job.id, now - job.ended_s, format_bytes(nbytes))
            self._notice_removed_files()
            self.persists.reader.expire(now)
            self.arena.reserve.refill()
            self.agents = {agent for agent in self.agents if not _has_ended(agent)}
            if self.jobs or self.agents or not self.heartbeat_service.is_idle:
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
            for name in list(self.jobs):
                self._replicators.pop(name, None)
                self.purge(name)
        await asyncio.gather(self.turns.close(), self.persists.close())
        await self.heartbeat_service.close()
        await self.peers.close()


def living_pids(processes: Iterable[Process]) -> list[int]:
    """Returns the pids of the processes that have not ended."""
    return sorted(process.pid for process in processes if not _has_ended(process))


def _has_ended(process: Process) -> bool:
    """Whether a process is known to have ended."""
    try:
        return not process.is_alive
    except OSError:
        return False


def _check_decision(request: pb.DecideRequest) -> None:
    """Raises ConfigError for a decision that no attach makes."""
    manifest = request.manifest
    name = check_name(manifest.job)
    ranks = [rank for node in manifest.nodes for rank in node.ranks]
    is_complete = len(ranks) == manifest.world and sorted(ranks) == list(range(manifest.world))
    if manifest.ByteSize() > MANIFEST_MAX or not is_complete:
        raise ConfigError(f"the manifest of job {name} does not name each of its {manifest.world} ranks once.")
    if request.node_index >= len(manifest.nodes) or len(manifest.token) != 32:
        raise ConfigError(f"the manifest of job {name} has no node {request.node_index}, or no token of 32 bytes.")
    if any(len(epoch.ident) != 16 for epoch in (request.decision.epoch, *request.decision.known)):
        raise ConfigError(f"an epoch of job {name} has no id of 16 bytes.")
    if len(request.decision.known) > KNOWN_MAX:
        raise ConfigError(
            f"a decision of job {name} names {len(request.decision.known)} attaches; the limit is {KNOWN_MAX}."
        )
    for what, earlier in (("base", request.base_manifest), ("guard", request.guard_manifest)):
        if request.HasField(f"{what}_manifest") and (earlier.job != name or earlier.ByteSize() > MANIFEST_MAX):
            raise ConfigError(
                f"the {what}'s manifest names job {earlier.job!r} and has {earlier.ByteSize()} bytes; it must name job "
                f"{name} and may have {MANIFEST_MAX} bytes."
            )
