"""Answers the beats of daemons and agents, and decides when beats are sent.

The decisions about nodes are made in `reft.core.membership`.

    every TICK_S     look: judge all nodes by what was heard
    every BEAT_S     send a beat to each neighbour in the ring, without waiting for earlier replies
    at once          at a final signal: a beat to all nodes that pass news on, at most every NEWS_S
    at a change      look: a trainer or agent of this node ended, or a step was decided (see
                     `reft_daemon.jobs.changes`)
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Mapping
from typing import Final

from reft.core.membership.failure_detector import BEAT_S, AgentPhase, Signal, hung
from reft.core.membership.job_identity import check_name
from reft.core.membership.progress import Stall
from reft.errors import AlreadyAttached, AttachError, ConfigError
from reft.wire import messages, rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import ProcessWatch
from reft_daemon.membership.beat_sender import BeatSender
from reft_daemon.membership.job_monitor import TICK_S, JobMonitor, MembershipView
from reft_daemon.membership.monitors import MonitorRegistry
from reft_daemon.peers.channels import PeerChannels

log = logging.getLogger("reft.daemon")
WAIT_MAX_S = 10.0
NODES_MAX = 1 << 14
WELL: Final = (Signal.JOINING, Signal.HEALTHY, Signal.SNAP)
ADDRESSES_MAX = 8
SLICE: Final = 1024  # nodes whose signals are written at a time


class HeartbeatService:
    """The heartbeats of all jobs of one daemon, see the module.

    Args:
        own: id of this node.
        peers: channels for beats alone.
        jobs: name → this daemon's record of the job; the name is the one that trainers use.
        changes: where the ends of agents are put.
        kills_hung: whether to kill a rank that makes no progress, so that its agent restarts the
            job.
    """

    def __init__(
        self,
        own: str,
        peers: PeerChannels,
        jobs: Mapping[str, JobRecord],
        changes: ChangeQueue,
        kills_hung: bool = False,
    ) -> None:
        self._own = own
        self._kills_hung = kills_hung
        self.monitors = MonitorRegistry(own, jobs, changes)
        self.sender = BeatSender(own, peers, self.monitors)
        self._kills: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references
        # a killed process that waits for a device does not end, and one SIGKILL is enough
        self._killed: weakref.WeakSet[ProcessWatch] = weakref.WeakSet()

    @property
    def is_idle(self) -> bool:
        return not self.monitors.by_name

    def look(self, job: str) -> None:
        """Judges the nodes of a job now; does nothing if the job is not watched."""
        monitor = self.monitors.find(job)
        if monitor is not None:
            self._look(monitor, time.monotonic())

    def _look(self, monitor: JobMonitor, now_s: float) -> None:
        if monitor.look(now_s, self.monitors.record_of(monitor)):
            self.sender.pass_on_soon(monitor)

    # Agents

    def agent_beat(self, request: pb.AgentBeatRequest) -> pb.AgentBeatReply:
        """Takes a beat of this node's agent, or of another node's agent.

        Raises:
            StaleEpoch: the round is over.
            AlreadyAttached: another launch of the job is alive here.
            AttachError: the job is watched for another launch.
            ConfigError: the agent's description of the round is invalid.
            JobNotWatched: the agent of another node names a job that is not watched here.
        """
        phase = messages.agent_from(request.phase)
        if request.node_id != self._own:
            return self._other_agent_beat(request, phase)
        monitor = self.monitors.by_name.get(request.job)
        if monitor is not None and monitor.has_other_agent(request.pid) and monitor.view.launch != request.launch:
            raise AlreadyAttached(f"job {request.job} has another agent on this node.", "end that launch first")
        is_known = monitor is not None and monitor.view.launch == request.launch
        if monitor is None or not is_known or not monitor.check_round(request.launch, request.round):
            if not request.nodes:
                return pb.AgentBeatReply(unknown_round=True)
            monitor = self.monitors.start_view(request.job, _view_of(request, self._own))
        if monitor.agent_beat(request.pid, phase, self.monitors.record_of(monitor)):
            self.sender.pass_on_soon(monitor)
        watchers = [monitor.view.nodes[node] for node in monitor.detector.watched_nodes()]
        job_record = self.monitors.record_of(monitor)
        return pb.AgentBeatReply(watchers=watchers, whole=job_record.known_whole if job_record else None)

    def _other_agent_beat(self, request: pb.AgentBeatRequest, phase: AgentPhase) -> pb.AgentBeatReply:
        monitor = self.monitors.find_or_raise(request.job)
        monitor.note_alive(request.node_id)
        monitor.check_round(request.launch, request.round)
        if request.node_id not in monitor.view.nodes:
            raise AttachError(
                f"node {request.node_id} is not a member of round {monitor.view.round} of job {request.job}."
            )
        if monitor.publish(monitor.detector.agent_spoke(request.node_id, phase, time.monotonic())):
            self.sender.pass_on_soon(monitor)
        return pb.AgentBeatReply()

    async def signals(self, request: pb.SignalsRequest) -> pb.SignalsReply:
        """Returns the signals of all nodes of a job.

        It waits until they differ from the asker's version. After the requested wait, it returns
        them in any case.

        Raises:
            JobNotWatched: the job is not watched here.
        """
        end_s = time.monotonic() + min(request.wait_ms / 1000, WAIT_MAX_S)
        while True:
            monitor = self.monitors.find_or_raise(request.job)
            left_s, announced = end_s - time.monotonic(), monitor.announced
            if announced.version != request.version or left_s <= 0:
                view, version = monitor.view, announced.version
                # A change that comes between the slices has a newer version, so the asker gets that
                # change by the next call.
                nodes = await self._status(monitor)
                return pb.SignalsReply(version=version, launch=view.launch, round=view.round, nodes=nodes)
            try:
                await asyncio.wait_for(announced.event.wait(), left_s)
            except asyncio.TimeoutError:
                continue

    async def status(self, job: str, is_brief: bool = False) -> list[pb.NodeSignal]:
        """Returns the signals of a job's nodes as seen here.

        The list is empty if the job is not watched.

        Args:
            job: name of the job.
            is_brief: whether other nodes that are well are left out. A daemon that asks all nodes
                hears of those from themselves; else thousands would tell it of thousands.
        """
        monitor = self.monitors.find(job)
        return [] if monitor is None else await self._status(monitor, is_brief)

    async def _status(self, monitor: JobMonitor, is_brief: bool = False) -> list[pb.NodeSignal]:
        """Returns the signals of one membership view, in slices.

        Between slices signals may change, and a new view may begin. Each entry is true for its
        slice, and all are of the view in which the call began.
        """
        now_s, signals = time.monotonic(), list[pb.NodeSignal]()
        for number, (node, each) in enumerate(monitor.detector.members.items(), 1):
            if not is_brief or node == self._own or each.signal not in WELL:
                signals.append(
                    pb.NodeSignal(
                        node_id=node,
                        node=each.name,
                        signal=messages.signal_to(each.signal),
                        reason=each.reason,
                        age_s=now_s - each.since_s,
                        agent=each.agent.last_s is not None,
                    )
                )
            if number % SLICE == 0:
                await asyncio.sleep(0)
        return signals

    # Daemons

    def beat(self, request: pb.BeatRequest) -> pb.BeatReply:
        """Takes another daemon's beat; returns the reports that this daemon has.

        Raises:
            StaleEpoch: the beat is of an older round: the other nodes continued without that node.
            AttachError: the beat is of another launch, or meant for another node.
            JobNotWatched: the job is not watched here.
        """
        monitor = self.monitors.find_or_raise(request.job)
        monitor.note_alive(request.source)
        is_current = monitor.check_round(request.launch, request.round)
        if request.target != self._own or request.source not in monitor.view.nodes:
            raise AttachError(f"a beat of node {request.source} for {request.target} reached {self._own}.")
        now_s = time.monotonic()
        # A sender in a newer round lives. Its reports are about that round, so they are ignored
        # here.
        reports = messages.node_reports_from(request.reports) if is_current else []
        heard_s = messages.heard_from(request.last_heard) if is_current else {}
        if monitor.publish(monitor.detector.spoke(request.source, reports, heard_s, now_s)):
            self.sender.pass_on_soon(monitor)
        if not is_current:
            return pb.BeatReply()
        own_report = monitor.own_report(self.monitors.record_of(monitor))
        return pb.BeatReply(
            reports=messages.node_reports_to(monitor.detector.reports(own_report)),
            last_heard=messages.heard_to(monitor.detector.heard_s(now_s)),
        )

    # The loop

    async def run(self) -> None:
        """Judges nodes and sends beats, forever."""
        last_beat_s, failing = time.monotonic(), set[str]()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            is_due = now_s - last_beat_s >= BEAT_S - TICK_S / 2
            if is_due:
                last_beat_s = now_s
            for name, monitor in list(self.monitors.by_name.items()):
                try:
                    self._tick(name, monitor, now_s, is_due)
                except Exception:  # a bug that one job meets must not end this daemon, and so all jobs
                    if name not in failing:
                        log.exception("job=%s can't be watched", name)
                    failing.add(name)
                else:
                    failing.discard(name)

    def _tick(self, name: str, monitor: JobMonitor, now_s: float, is_due: bool) -> None:
        self._look(monitor, now_s)
        if monitor.is_over(now_s, self.monitors.record_of(monitor)):
            self.monitors.forget(name)
        elif is_due:
            self.sender.send(monitor, monitor.detector.watched_nodes())
            self._kill_hung(monitor)

    def _kill_hung(self, monitor: JobMonitor) -> None:
        job = self.monitors.record_of(monitor)
        stall = monitor.to_kill(job) if self._kills_hung else None
        lease = job.leases.get(stall.rank) if job is not None and stall is not None else None
        if job is None or stall is None or lease is None or lease.watch is None or lease.watch in self._killed:
            return
        self._killed.add(lease.watch)
        task = asyncio.ensure_future(self._kill(lease.watch, lease.process.pid, monitor.name, stall, job))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)

    async def _kill(self, watch: ProcessWatch, pid: int, name: str, stall: Stall, job: JobRecord) -> None:
        """Kills the trainer of a rank, once."""
        why, by = hung(stall, None), "this daemon, --kill-hung"
        try:
            if await watch.kill(rank=stall.rank, job=name, launch=job.record.manifest.launch, why=why, by=by):
                return
            reason = "it has not ended since"
        except OSError as error:
            reason = str(error)
        log.error("job=%s rank=%d process %d was to be killed (--kill-hung): %s", name, stall.rank, pid, reason)

    async def close(self) -> None:
        for task in self._kills:
            task.cancel()
        for name in list(self.monitors.by_name):
            self.monitors.forget(name)
        await self.sender.close()


def _view_of(request: pb.AgentBeatRequest, own: str) -> MembershipView:
    """Returns the membership view that an agent's beat describes.

    Raises:
        ConfigError: the job, the token or the members are invalid.
    """
    check_name(request.job)
    nodes = {node.id: node for node in request.nodes}
    if own not in nodes or len(nodes) != len(request.nodes) or len(nodes) > NODES_MAX:
        raise ConfigError(
            f"round {request.round} of job {request.job} has {len(request.nodes)} members; at most {NODES_MAX} are "
            f"allowed. Each member needs an id of its own, and this node must be a member."
        )
    if len(request.token) != 32 or len(request.job_token) not in (0, 32) or not request.launch:
        raise ConfigError(f"the agent of job {request.job} names no launch, or a token does not have 32 bytes.")
    for node in nodes.values():
        if len(node.addresses) > ADDRESSES_MAX:
            raise ConfigError(
                f"node {node.name} has {len(node.addresses)} addresses; at most {ADDRESSES_MAX} are allowed."
            )
        for address in node.addresses:
            rpc.check_address(address)
    return MembershipView(request.launch, request.round, request.token, nodes, request.job_token)
