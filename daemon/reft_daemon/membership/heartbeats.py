"""Sends and answers heartbeats between daemons and agents.

The decisions are made in `reft.core.membership`.

    every TICK_S     look: judge all nodes by what was heard
    every BEAT_S     send a beat to each neighbour in the ring, without waiting for earlier replies
    at once          at a final signal: a beat to all nodes that pass news on, at most every NEWS_S

Beats have connections of their own. So they never wait behind megabytes of slots and capsules, and
can be connected anew. A connection that survived a cut link stays silent until TCP tries again,
which may take minutes.

Agents know a job by their launcher's name, trainers by `job=`. The two names are paired by the
launch: reft's agents give the launch to their trainers, which write it into the manifest.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping

import grpc

from reft.core.membership.failure_detector import BEAT_S, MISSES, AgentPhase
from reft.core.membership.job_identity import check_name
from reft.core.recovery.survey_timeout import GivenUpNodes
from reft.errors import AlreadyAttached, AttachError, ConfigError, NoRoom, ReftError
from reft.wire import messages, rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.membership.job_monitor import TICK_S, JobMonitor, MembershipView
from reft_daemon.peers.round_replicator import PeerChannels, reason_of

log = logging.getLogger("reft.daemon")
NEWS_S = 0.05
DEADLINE_S = BEAT_S * MISSES
UNANSWERED_MAX = 3  # beats to one node that wait for a reply
TIMEOUTS_MAX = 5  # unanswered beats in a row, before the connection is made anew
WAIT_MAX_S = 10.0
NODES_MAX = 1 << 14
ADDRESSES_MAX = 8
MONITORS_MAX = 256


class HeartbeatService:
    """Sends and answers the heartbeats of all jobs, see the module.

    Args:
        own: id of this node.
        peers: channels for beats alone.
        jobs: name → this daemon's record of the job; the name is the one that trainers use.
        kills_hung: whether to kill a rank that makes no progress, so that its agent restarts the
            job.
    """

    def __init__(self, own: str, peers: PeerChannels, jobs: Mapping[str, JobRecord], kills_hung: bool = False) -> None:
        self._own = own
        self.peers = peers
        self._jobs = jobs
        self._kills_hung = kills_hung
        self._monitors: dict[str, JobMonitor] = {}
        self._unanswered_beats: collections.Counter[tuple[str, str]] = collections.Counter()
        self._timeouts: collections.Counter[str] = collections.Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs_with_news: set[str] = set()
        self.beats_sent = 0

    @property
    def is_idle(self) -> bool:
        return not self._monitors

    def monitor(self, job: str) -> JobMonitor | None:
        """Returns the monitor of a job; None if the job is not watched.

        The name may be the agents' or the trainers'.
        """
        job_record = self._jobs.get(job)
        launch = job_record.record.manifest.launch if job_record else ""
        paired_monitors = [each for each in self._monitors.values() if launch and each.view.launch == launch]
        return self._monitors.get(job) or (paired_monitors[0] if paired_monitors else None)

    def _find_record(self, job: str, launch: str) -> JobRecord | None:
        """Returns the record of a job, by the agents' name or launch.

        The result is None if there is none.
        """
        paired_records = [each for each in self._jobs.values() if launch and each.record.manifest.launch == launch]
        return self._jobs.get(job) or (paired_records[0] if paired_records else None)

    def token(self, job: str) -> bytes:
        """Returns the token that admits a job's agents and daemons over TCP.

        Empty if the job is not watched.
        """
        monitor = self.monitor(job)
        return monitor.view.token if monitor else b""

    def given_up_s(self, job: str, launch: str, round: int) -> dict[str, float]:
        """Returns the nodes that the previous round lost → seconds since the loss.

        Only nodes that this round lacks are returned. The result is empty if this daemon watches
        another round or launch.
        """
        monitor = self.monitor(job)
        given_up = monitor.given_up if monitor else GivenUpNodes()
        now_s = time.monotonic()
        is_same_round = (given_up.launch, given_up.round) == (launch, round)
        return {node: now_s - at_s for node, at_s in given_up.nodes.items()} if is_same_round else {}

    # Terms

    def note_decision(self, job: JobRecord) -> None:
        """Takes a new decision, or one found in the arena.

        Without agents, its manifest gives the membership view.
        """
        manifest = job.record.manifest
        monitor = self.monitor(job.id)
        if monitor is not None and monitor.view.launch:
            monitor.note_attach()
            return
        if not job.record.HasField("decision"):
            return
        round = job.epoch.counter
        if manifest.nodes[job.record.node_index].id != self._own or (monitor and monitor.view.round >= round):
            return
        self._start_view(job.id, MembershipView("", round, manifest.token, {node.id: node for node in manifest.nodes}))

    def _start_view(self, job: str, view: MembershipView) -> None:
        if job in self._monitors:
            self._monitors[job].start_view(view)
            return
        if len(self._monitors) >= MONITORS_MAX:
            raise NoRoom(f"this daemon watches {len(self._monitors)} jobs; the limit is {MONITORS_MAX}.")
        self._monitors[job] = JobMonitor(
            job, self._own, view, lambda launch: self._find_record(job, launch), self._pass_on_soon
        )
        job_record = self._find_record(job, view.launch)
        if view.launch and job_record is not None and job_record.id != job:
            # The restarted daemon has found the trainers before it heard their agents. Until now it
            # watched the job by the trainers' name.
            self.forget(job_record.id)

    def forget(self, job: str) -> None:
        """Stops watching a job: it was purged, or nobody works on it any more.

        A living agent's next beat starts the watch again.
        """
        monitor = self._monitors.pop(job, None)
        if monitor is not None:
            monitor.close()

    def wake(self, job: str) -> None:
        """Judges the job's nodes now: a trainer of this node ended, or a step was decided."""
        monitor = self.monitor(job)
        if monitor is not None:
            monitor.look(time.monotonic())

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
        monitor = self._monitors.get(request.job)
        if monitor is not None and monitor.has_other_agent(request.pid) and monitor.view.launch != request.launch:
            raise AlreadyAttached(f"job {request.job} has another agent on this node.", "end that launch first")
        is_known = monitor is not None and monitor.view.launch == request.launch
        if not is_known or (monitor is not None and not monitor.check_round(request.launch, request.round)):
            if not request.nodes:
                return pb.AgentBeatReply(unknown_round=True)
            self._start_view(request.job, _view_of(request, self._own))
            monitor = self._monitors[request.job]
        assert monitor is not None
        monitor.agent_beat(request.pid, phase)
        return pb.AgentBeatReply(watchers=[monitor.view.nodes[node] for node in monitor.detector.watched_nodes()])

    def _other_agent_beat(self, request: pb.AgentBeatRequest, phase: AgentPhase) -> pb.AgentBeatReply:
        monitor = self._monitor_or_raise(request.job)
        monitor.note_alive(request.node_id)
        monitor.check_round(request.launch, request.round)
        if request.node_id not in monitor.view.nodes:
            raise AttachError(
                f"node {request.node_id} is not a member of round {monitor.view.round} of job {request.job}."
            )
        monitor.publish(monitor.detector.agent_spoke(request.node_id, phase, time.monotonic()))
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
            monitor = self._monitor_or_raise(request.job)
            left_s = end_s - time.monotonic()
            if monitor.version != request.version or left_s <= 0:
                view = monitor.view
                return pb.SignalsReply(
                    version=monitor.version, launch=view.launch, round=view.round, nodes=self.status(request.job)
                )
            try:
                await asyncio.wait_for(monitor.news.wait(), left_s)
            except asyncio.TimeoutError:
                continue

    def status(self, job: str) -> list[pb.NodeSignal]:
        """Returns the signals of a job's nodes as seen here.

        The list is empty if the job is not watched.
        """
        monitor = self.monitor(job)
        if monitor is None:
            return []
        now_s = time.monotonic()
        return [
            pb.NodeSignal(
                node_id=node,
                node=each.name,
                signal=messages.signal_to(each.signal),
                reason=each.reason,
                age_s=now_s - each.since_s,
                agent=each.agent.last_s is not None,
            )
            for node, each in monitor.detector.members.items()
        ]

    # Daemons

    def beat(self, request: pb.BeatRequest) -> pb.BeatReply:
        """Takes another daemon's beat; returns the reports that this daemon has.

        Raises:
            StaleEpoch: the beat is of an older round: the other nodes continued without that node.
            AttachError: the beat is of another launch, or meant for another node.
            JobNotWatched: the job is not watched here.
        """
        monitor = self._monitor_or_raise(request.job)
        monitor.note_alive(request.source)
        is_current = monitor.check_round(request.launch, request.round)
        if request.target != self._own or request.source not in monitor.view.nodes:
            raise AttachError(f"a beat of node {request.source} for {request.target} reached {self._own}.")
        now_s = time.monotonic()
        if not is_current:
            # The sender lives and is in a newer round. Its reports are about that round, so they
            # are ignored here.
            monitor.publish(monitor.detector.spoke(request.source, [], {}, now_s))
            return pb.BeatReply()
        reports = messages.node_reports_from(request.reports)
        monitor.publish(monitor.detector.spoke(request.source, reports, messages.heard_from(request.last_heard), now_s))
        return pb.BeatReply(
            reports=messages.node_reports_to(monitor.detector.reports(monitor.own_report)),
            last_heard=messages.heard_to(monitor.detector.heard_s(now_s)),
        )

    def _monitor_or_raise(self, job: str) -> JobMonitor:
        monitor = self.monitor(check_name(job))
        if monitor is None:
            raise JobNotWatched(f"this daemon watches no job {job!r}.")
        return monitor

    # The loop

    async def run(self) -> None:
        """Judges nodes and sends beats, forever."""
        last_beat_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            is_due = now_s - last_beat_s >= BEAT_S - TICK_S / 2
            if is_due:
                last_beat_s = now_s
            for job, monitor in list(self._monitors.items()):
                monitor.look(now_s)
                if monitor.is_over(now_s):
                    self.forget(job)
                elif is_due:
                    self._send(monitor, monitor.detector.watched_nodes())
                    self._kill_hung(monitor)

    def _kill_hung(self, monitor: JobMonitor) -> None:
        stall = monitor.to_kill() if self._kills_hung else None
        job = self._find_record(monitor.job, monitor.view.launch)
        lease = job.leases.get(stall.rank) if job is not None and stall is not None else None
        if stall is not None and lease is not None and lease.watch is not None:
            log.warning(
                "job=%s killing pid=%d: rank %d makes no progress (--kill-hung)",
                monitor.job,
                lease.process.pid,
                stall.rank,
            )
            self._spawn(_kill(lease.watch.kill))

    def _pass_on_soon(self, monitor: JobMonitor) -> None:
        """Passes a final signal on to other nodes. Further news within NEWS_S goes along."""
        if monitor.job not in self._jobs_with_news:
            self._jobs_with_news.add(monitor.job)
            asyncio.get_running_loop().call_soon(self._send_news, monitor)

    def _send_news(self, monitor: JobMonitor) -> None:
        self._send(monitor, monitor.detector.news_targets(), is_news=True)
        asyncio.get_running_loop().call_later(NEWS_S, self._jobs_with_news.discard, monitor.job)

    def _send(self, monitor: JobMonitor, nodes: Iterable[str], is_news: bool = False) -> None:
        for node in nodes:
            key = (monitor.job, node)
            if is_news or self._unanswered_beats[key] < UNANSWERED_MAX:
                self._unanswered_beats[key] += 1
                self._spawn(self._beat(monitor, monitor.view, node))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self, monitor: JobMonitor, view: MembershipView, node: str) -> None:
        detector = monitor.detector
        request = pb.BeatRequest(
            job=monitor.job,
            launch=view.launch,
            round=view.round,
            source=self._own,
            target=node,
            reports=messages.node_reports_to(detector.reports(monitor.own_report)),
            last_heard=messages.heard_to(detector.heard_s(time.monotonic())),
        )
        try:
            reply = await self.peers.call(view.nodes[node], view.token, pb_grpc.PeerStub, "Beat", request, DEADLINE_S)
            assert isinstance(reply, pb.BeatReply)
            self._timeouts.pop(node, None)
            self.beats_sent += 1
            if monitor.detector is detector:
                reports, heard = messages.node_reports_from(reply.reports), messages.heard_from(reply.last_heard)
                monitor.publish(detector.answered(node, reports, heard, time.monotonic()))
        except grpc.RpcError as error:
            await self._note_failed_beat(monitor, detector is monitor.detector, node, error)
        except (OSError, ReftError) as error:
            log.debug("job=%s node=%s no beat: %s", monitor.job, node, reason_of(error))
        finally:
            self._unanswered_beats[(monitor.job, node)] -= 1

    async def _note_failed_beat(self, monitor: JobMonitor, is_current: bool, node: str, error: grpc.RpcError) -> None:
        code = error.code()
        if code is grpc.StatusCode.ABORTED and is_current:
            monitor.note_left_behind(reason_of(error))
            monitor.publish(monitor.detector.answered(node, [], {}, time.monotonic()))
        if code is grpc.StatusCode.UNAVAILABLE and is_current and "refused" in reason_of(error):
            monitor.detector.refused(node)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._timeouts[node] += 1
            if self._timeouts[node] % TIMEOUTS_MAX == 0:
                await self.peers.drop(monitor.view.nodes[node])

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for job in list(self._monitors):
            self.forget(job)
        await self.peers.close()


class JobNotWatched(AttachError):
    """This daemon does not watch the job."""


async def _kill(kill: Callable[[], Awaitable[bool]]) -> None:
    await kill()


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
    if len(request.token) != 32 or not request.launch:
        raise ConfigError(f"the agent of job {request.job} names no launch, or its token does not have 32 bytes.")
    for node in nodes.values():
        if len(node.addresses) > ADDRESSES_MAX:
            raise ConfigError(
                f"node {node.name} has {len(node.addresses)} addresses; at most {ADDRESSES_MAX} are allowed."
            )
        for address in node.addresses:
            rpc.check_address(address)
    return MembershipView(request.launch, request.round, request.token, nodes)
