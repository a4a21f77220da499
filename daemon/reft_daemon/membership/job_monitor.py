"""Watches one job: membership view, this node's agent, progress of ranks, signals of nodes.

    agent's first beat of a round ─┐
    decision of an attach ─────────┴► membership view: the nodes of the job, and their common token
    beats, deaths, steps ──► facts ─► FailureDetector ─► signals; `news` is set when one changed

A view belongs to (launch, round) of the agents. Under another launcher than torchrun with reft
there are no agents; then the launch is empty, and the round is the attach's epoch. A new view
replaces the old one completely: reports of the old view don't count in the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from reft.core.membership.failure_detector import (
    LATE_S,
    AgentPhase,
    FailureDetector,
    NodeFacts,
    NodeReport,
    Signal,
    SignalChange,
    self_report,
)
from reft.core.membership.log_debounce import SignalLog
from reft.core.membership.progress import Stall, StepProgress, laggard
from reft.core.recovery.survey_timeout import GivenUpNodes
from reft.errors import AttachError, StaleEpoch
from reft.wire.process import Process, stat_of
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import Lease, ProcessWatch

log = logging.getLogger("reft.daemon")
LATE_SHOWN_S = 3.0
TICK_S = 0.1
# seconds that another node must have been in a newer round before this node counts as left behind:
# a slow rendezvous is no loss
LEFT_BEHIND_S = 5.0
LINGER_S = 60.0  # after the end of the last trainer and the agent's last beat
# after a rank was found to make no progress; by then other nodes have reported their ranks
KILL_AFTER_S = 1.0


@dataclass(frozen=True)
class MembershipView:
    """The nodes of a job in one round, and how they know each other. All nodes have the same view.

    Attributes:
        launch: id of the agents' launch; empty without agents.
        round: the agents' round; without agents the epoch.
        token: 32 bytes that agents and daemons of the view show one another over TCP.
        nodes: id → node.
    """

    launch: str
    round: int
    token: bytes
    nodes: dict[str, pb.Node]


@dataclass
class AgentProcess:
    """This node's torchrun agent.

    Attributes:
        pid: process id.
        phase: the phase in the agent's last beat; DEAD if the agent has ended without FINISHED.
        last_s: time of the last beat.
        watch: None if the process can't be watched, or has ended.
    """

    pid: int
    phase: AgentPhase
    last_s: float
    watch: ProcessWatch | None = None


class JobMonitor:
    """Watches one job on this node, see the module.

    Args:
        job: name of the job.
        own: id of this node.
        view: the first membership view.
        find_record: launch → this daemon's record of the job; None before the first attach.
        on_final: called at once when a node's signal becomes final.
    """

    def __init__(
        self,
        job: str,
        own: str,
        view: MembershipView,
        find_record: Callable[[str], JobRecord | None],
        on_final: Callable[[JobMonitor], None],
    ) -> None:
        self.job = job
        self.view, self._own = view, own
        self._find_record = find_record
        self._on_final = on_final
        self._agent: AgentProcess | None = None
        self.version = time.time_ns()  # starts above all versions of an earlier daemon
        self.news = asyncio.Event()
        self._last_look_s = time.monotonic()
        self._last_delay = (0.0, 0.0)  # this daemon's last long delay: seconds, and when it was noticed
        self._left_behind: tuple[float, str] | None = None
        self._progress_of: dict[int, StepProgress] = {}
        self._active_s = time.monotonic()
        # trainers whose death says nothing about this view
        self._ignored_trainers: frozenset[Process] = frozenset()
        self.given_up = GivenUpNodes(view.launch, view.round)
        self._set_view(view, self._trainers(lambda lease: lease.watch is None))

    def start_view(self, view: MembershipView) -> None:
        """Starts a new membership view. Everything is forgotten, except which nodes were lost."""
        self.given_up = self.given_up.next(view.launch, view.round, view.nodes, self.detector.lost())
        # An agent announces a round before its workers attach. So the trainers that are here now
        # were ended for that round.
        self._set_view(view, self._trainers(lambda lease: bool(view.launch) or lease.watch is None))

    @property
    def _job_record(self) -> JobRecord | None:
        return self._find_record(self.view.launch)

    def _trainers(self, condition: Callable[[Lease], bool]) -> frozenset[Process]:
        job_record = self._job_record
        return (
            frozenset(each.process for each in job_record.leases.values() if condition(each))
            if job_record
            else frozenset()
        )

    def _set_view(self, view: MembershipView, ignored_trainers: frozenset[Process]) -> None:
        now_s = time.monotonic()
        self.view, self._ignored_trainers = view, ignored_trainers
        self.detector = FailureDetector(self._own, {node: each.name for node, each in view.nodes.items()}, now_s)
        self._signal_log = SignalLog(self.detector)
        self._left_behind = None
        self._progress_of.clear()
        self._active_s = now_s
        self._wake_listeners()
        log.info("job=%s watched launch=%s round=%d nodes=%d", self.job, view.launch, view.round, len(view.nodes))

    # What is heard

    def agent_beat(self, pid: int, phase: AgentPhase) -> None:
        """Takes a beat of this node's own agent."""
        now_s = time.monotonic()
        if self._agent is None or self._agent.pid != pid:
            self._forget_agent()
            self._agent = AgentProcess(pid, phase, now_s)
        if self._agent.watch is None:
            self._agent.watch = self._watch_agent(pid)
        self._agent.phase, self._agent.last_s = phase, now_s
        self.look(now_s)

    def has_other_agent(self, pid: int) -> bool:
        """Whether a living agent with another pid works for this job here."""
        return self._agent is not None and self._agent.pid != pid and self._agent.watch is not None

    def _watch_agent(self, pid: int) -> ProcessWatch | None:
        try:
            stat = stat_of(pid)
            return ProcessWatch(Process(pid, stat.start), self._agent_ended) if stat else None
        except OSError:  # the next beat tries again
            return None

    def _agent_ended(self) -> None:
        if self._agent is not None:
            self._agent.watch = None
            if self._agent.phase is not AgentPhase.FINISHED:
                self._agent.phase = AgentPhase.DEAD
            log.info("job=%s agent pid=%d has ended", self.job, self._agent.pid)
        self.look(time.monotonic())

    def _forget_agent(self) -> None:
        if self._agent is not None and self._agent.watch is not None:
            self._agent.watch.close()
        self._agent = None

    def note_alive(self, node: str) -> None:
        """Notes that a node's daemon or agent is alive; its round does not matter."""
        self.given_up = self.given_up.without(node)

    def check_round(self, launch: str, round: int) -> bool:
        """Whether a message belongs to this view.

        The result is False if the message is of a newer round.

        Raises:
            StaleEpoch: the message is of an older round.
            AttachError: the message is of another launch.
        """
        if launch != self.view.launch:
            raise AttachError(f"job {self.job} is watched for launch {self.view.launch!r} here, not for {launch!r}.")
        if round < self.view.round:
            raise StaleEpoch(f"round {round} of job {self.job} is over; round {self.view.round} has begun.")
        return round == self.view.round

    def note_left_behind(self, reason: str) -> None:
        """Notes that another node is in a newer round."""
        self._left_behind = self._left_behind or (time.monotonic(), reason)

    def note_attach(self) -> None:
        """Forgets the ranks' usual step times: a new attach within this view may change them."""
        self._progress_of.clear()

    # What follows

    def look(self, now_s: float) -> None:
        """Judges all nodes anew, and publishes changes. Called every TICK_S, and at news.

        Each call finds out whether this daemon itself was late. After this daemon was stopped, its
        first call may come from a waiting message, such as its own agent's beat. Without this check
        all nodes would look silent.
        """
        late_s, self._last_look_s = now_s - self._last_look_s - TICK_S, now_s
        if late_s > LATE_S:
            self._last_delay = (late_s, now_s)
        facts = self._facts(now_s)
        changes = self.detector.look(now_s, late_s, self_report(self._own, facts), facts.stall is not None)
        self.publish(changes)

    def publish(self, changes: Iterable[SignalChange]) -> None:
        """Publishes changes of signals to agents and to the log."""
        news = [change for change in changes if change.is_news]
        now_s = time.monotonic()
        self._signal_log.heard(news, now_s)
        for change in self._signal_log.due(now_s):
            member = self.detector.members[change.node]
            level = logging.INFO if change.after in (Signal.HEALTHY, Signal.COMPLETED) else logging.WARNING
            reason = f": {member.reason}" if member.reason else ""
            log.log(level, "job=%s node=%s %s -> %s%s", self.job, member.name, change.before.name, change.after.name,
                    reason)  # fmt: skip
        if news:
            self._wake_listeners()
        if any(change.after.is_final for change in news):
            self._on_final(self)

    def _wake_listeners(self) -> None:
        self.version += 1
        self.news.set()
        self.news = asyncio.Event()

    @property
    def own_report(self) -> NodeReport:
        """This node's report on itself, as of now."""
        return self_report(self._own, self._facts(time.monotonic()))

    def _facts(self, now_s: float) -> NodeFacts:
        job = self._job_record
        agent = self._agent
        leases = {} if job is None else {rank: job.leases[rank] for rank in job.ranks if rank in job.leases}
        late_s, late_at_s = self._last_delay
        stall = self._stall(job, now_s)
        awaited = self._awaited_stall(stall) if stall else None
        is_left_behind = self._left_behind is not None and now_s - self._left_behind[0] > LEFT_BEHIND_S
        return NodeFacts(
            died=tuple(
                (rank, each.process.pid) for rank, each in leases.items()
                if each.watch is None and not each.closed and each.process not in self._ignored_trainers
            ),
            agent=agent.phase if agent else None,
            agent_pid=agent.pid if agent else 0,
            # With an agent, only the agent's FINISHED counts as the end: an exception closes a
            # session, too.
            closed=agent is None and bool(leases) and len(leases) == len(job.ranks) and all(e.closed for e in leases.values()),  # type: ignore[union-attr]
            snaps=job is not None and job.round is not None and job.round.is_open,
            stall=stall, laggard=awaited.rank if awaited else None,
            late_s=late_s if now_s - late_at_s < LATE_SHOWN_S else 0.0,
            left_behind=self._left_behind[1] if self._left_behind and is_left_behind else "",
        )  # fmt: skip

    def _stall(self, job_record: JobRecord | None, now_s: float) -> Stall | None:
        """Returns the rank of this node that delays the others; None if all make progress."""
        if job_record is None:
            return None
        stalls = []
        for rank, lease in job_record.leases.items():
            progress = self._progress_of.setdefault(rank, StepProgress())
            progress.saw(lease.step, now_s)
            still_s = progress.stands_still_s(now_s)
            if still_s is not None and lease.watch is not None:
                stalls.append(
                    Stall(rank, progress.step, still_s, progress.usual_s or 0.0, _is_stopped(lease.process.pid))
                )
        return laggard(stalls)

    def _awaited_stall(self, own: Stall) -> Stall:
        """Returns the stall that the whole job waits for, as far as this node knows.

        It compares the ranks of this node with those that other nodes reported.
        """
        reports = [each.word for node, each in self.detector.members.items() if node != self._own]
        return laggard([own, *(word.stall for word in reports if word is not None and word.stall is not None)]) or own

    def to_kill(self) -> Stall | None:
        """Returns the local rank that has kept the whole job waiting for long enough.

        None if the job waits for another node's rank, or for none.
        """
        own_node = self.detector.members[self._own]
        own_stall = self.own_report.stall
        if (
            own_stall is None
            or own_node.signal is not Signal.SUSPECT
            or time.monotonic() - own_node.since_s < KILL_AFTER_S
        ):
            return None
        other_signals = (each.signal for node, each in self.detector.members.items() if node != self._own)
        if any(signal in (Signal.UNHEALTHY, Signal.OFFLINE) for signal in other_signals):
            return None  # ranks here wait for that node, and the job restarts because of it
        return own_stall if self._awaited_stall(own_stall) is own_stall else None

    def is_over(self, now_s: float) -> bool:
        """Returns whether the watch can end: the job has been idle on this node for LINGER_S."""
        job_record = self._job_record
        has_living_agent = self._agent is not None and self._agent.watch is not None
        if has_living_agent or (job_record is not None and job_record.is_live):
            self._active_s = now_s
        if self._agent is not None:
            self._active_s = max(self._active_s, self._agent.last_s)
        return now_s - self._active_s > LINGER_S

    def close(self) -> None:
        self._forget_agent()
        self._wake_listeners()


def _is_stopped(pid: int) -> bool:
    """Whether a process is known to be stopped, or stuck in the kernel."""
    with contextlib.suppress(OSError):
        stat = stat_of(pid)
        return stat is not None and stat.state in "TtD"
    return False
