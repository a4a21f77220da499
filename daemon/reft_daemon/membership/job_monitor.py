"""Watches one job: membership view, this node's agent, progress of ranks, signals of nodes.

    agent's first beat of a round ─┐
    decision of an attach ─────────┴► membership view: the nodes of the job, and their common token
    beats, deaths, steps ──► facts ─► FailureDetector ─► signals; `announced` wakes agents

A view belongs to (launch, round) of the agents. Under another launcher than torchrun with reft
there are no agents; then the launch is empty, and the round is the attach's epoch. A new view
replaces the old one completely: reports of the old view don't count in the new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from reft.core.membership.failure_detector import (
    AgentPhase,
    FailureDetector,
    NodeFacts,
    NodeReport,
    Signal,
    SignalChange,
    WatchedNode,
    self_report,
)
from reft.core.membership.log_debounce import SignalLog
from reft.core.membership.progress import Stall
from reft.core.recovery.survey_timeout import GivenUpNodes
from reft.errors import AttachError, StaleEpoch
from reft.wire.process import Process
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs.changes import ChangeKind, ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.membership.agent_process import AgentProcess
from reft_daemon.membership.own_facts import LoopLateness, died_trainers, has_completed, trainers_of
from reft_daemon.membership.rank_progress import RankProgress, awaited_stall, stall_to_kill

log = logging.getLogger("reft.daemon")
TICK_S = 0.1
# seconds that another node must have been in a newer round before this node counts as left behind:
# a slow rendezvous is no loss
LEFT_BEHIND_S = 5.0
LINGER_S = 60.0  # after the end of the last trainer and the agent's last beat


class SignalNews:
    """Wakes the agents that wait for changes of signals.

    Attributes:
        version: grows with each announcement; starts above all versions of an earlier daemon.
        event: set, and replaced, at each announcement.
    """

    def __init__(self) -> None:
        self.version = time.time_ns()
        self.event = asyncio.Event()

    def announce(self) -> None:
        """Wakes everybody who waits."""
        self.version += 1
        self.event.set()
        self.event = asyncio.Event()


@dataclass(frozen=True)
class MembershipView:
    """The nodes of a job in one round, and how they know each other. All nodes have the same view.

    Attributes:
        launch: id of the agents' launch; empty without agents.
        round: the agents' round; without agents the epoch.
        token: 32 bytes that agents and daemons of the view show one another over TCP.
        nodes: id → node.
        job_token: the token that this node's trainers write into the job's manifest; empty: they
            make one.
    """

    launch: str
    round: int
    token: bytes = field(repr=False)
    nodes: dict[str, pb.Node]
    job_token: bytes = field(default=b"", repr=False)


class JobMonitor:
    """Watches one job on this node, see the module.

    This daemon's record of the job is an argument where it is needed: None before the first attach.

    Args:
        name: name of the job, as its agents or trainers know it.
        own: id of this node.
        view: the first membership view.
        changes: where the agent's end is put.
        job: this daemon's record of the job.

    Attributes:
        agent: this node's agent; None: not heard yet, or nobody works on the job any more.
    """

    def __init__(
        self, name: str, own: str, view: MembershipView, changes: ChangeQueue, job: JobRecord | None = None
    ) -> None:
        self.name = name
        self.view, self._own = view, own
        self._changes = changes
        self.agent: AgentProcess | None = None
        self.announced = SignalNews()
        self._lateness = LoopLateness(time.monotonic(), TICK_S)
        self._left_behind: tuple[float, str] | None = None
        self._progress = RankProgress()
        self._active_s = time.monotonic()
        # trainers whose death says nothing about this view
        self._ignored_trainers: frozenset[Process] = frozenset()
        self.given_up = GivenUpNodes(view.launch, view.round)
        self._set_view(view, trainers_of(job.leases if job else {}, False))

    def start_view(self, view: MembershipView, job: JobRecord | None) -> None:
        """Starts a new membership view. Everything is forgotten, except which nodes were lost."""
        self.given_up = self.given_up.next(view.launch, view.round, view.nodes, self.detector.lost())
        # An agent announces a round before its workers attach. So the trainers that are here now
        # were ended for that round.
        self._set_view(view, trainers_of(job.leases if job else {}, bool(view.launch)))

    def _set_view(self, view: MembershipView, ignored_trainers: frozenset[Process]) -> None:
        now_s = time.monotonic()
        self.view, self._ignored_trainers = view, ignored_trainers
        self.detector = FailureDetector(self._own, {node: each.name for node, each in view.nodes.items()}, now_s)
        self._signal_log = SignalLog(self.detector)
        self._left_behind = None
        self._progress.forget()
        self._active_s = now_s
        self.announced.announce()
        log.info("job=%s watched launch=%s round=%d nodes=%d", self.name, view.launch, view.round, len(view.nodes))

    # What is heard

    def agent_beat(self, pid: int, phase: AgentPhase, job: JobRecord | None) -> bool:
        """Takes a beat of this node's own agent; True if a signal became final."""
        now_s = time.monotonic()
        if self.agent is None or self.agent.pid != pid:
            self._forget_agent()
            self.agent = AgentProcess(pid, phase, now_s)
        if not self.agent.is_alive:
            self.agent.begin_watch(self._note_agent_end)
        self.agent.phase, self.agent.last_s = phase, now_s
        return self.look(now_s, job)

    def has_other_agent(self, pid: int) -> bool:
        """Whether a living agent with another pid works for this job here."""
        return self.agent is not None and self.agent.pid != pid and self.agent.is_alive

    def _note_agent_end(self) -> None:
        if self.agent is not None:
            self.agent.note_end()
            log.info("job=%s agent pid=%d has ended", self.name, self.agent.pid)
        self._changes.put(self.name, ChangeKind.AGENT)

    def _forget_agent(self) -> None:
        if self.agent is not None:
            self.agent.close()
        self.agent = None

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
            raise AttachError(f"job {self.name} is watched for launch {self.view.launch!r} here, not for {launch!r}.")
        if round < self.view.round:
            raise StaleEpoch(f"round {round} of job {self.name} is over; round {self.view.round} has begun.")
        return round == self.view.round

    def note_left_behind(self, reason: str) -> None:
        """Notes that another node is in a newer round."""
        self._left_behind = self._left_behind or (time.monotonic(), reason)

    def note_attach(self) -> None:
        """Forgets the ranks' usual step times: a new attach within this view may change them."""
        self._progress.forget()

    # What follows

    def look(self, now_s: float, job: JobRecord | None) -> bool:
        """Judges all nodes anew, and publishes changes; True if a signal became final.

        Called every TICK_S, and at news.
        """
        late_s = self._lateness.note_look(now_s)
        facts = self._facts(now_s, job)
        changes = self.detector.look(now_s, late_s, self_report(self._own, facts), facts.stall is not None)
        return self.publish(changes)

    def publish(self, changes: Iterable[SignalChange]) -> bool:
        """Publishes changes of signals to agents and to the log.

        The result is True if a signal became final: other nodes must hear of it at once.
        """
        news = [change for change in changes if change.is_news]
        now_s = time.monotonic()
        self._signal_log.heard(news, now_s)
        for change in self._signal_log.due(now_s):
            member = self.detector.members[change.node]
            level = logging.INFO if change.after in (Signal.HEALTHY, Signal.COMPLETED) else logging.WARNING
            reason = f": {member.reason}" if member.reason else ""
            log.log(level, "job=%s node=%s %s -> %s%s", self.name, member.name, change.before.name, change.after.name,
                    reason)  # fmt: skip
        if news:
            self.announced.announce()
        return any(change.after.is_final for change in news)

    def own_report(self, job: JobRecord | None) -> NodeReport:
        """Returns this node's report on itself, as of now."""
        return self_report(self._own, self._facts(time.monotonic(), job))

    def _facts(self, now_s: float, job: JobRecord | None) -> NodeFacts:
        agent, leases, ranks = self.agent, job.leases if job else {}, job.ranks if job else []
        stall = self._progress.stall(leases, now_s)
        awaited = awaited_stall(stall, self._others()) if stall else None
        is_left_behind = self._left_behind is not None and now_s - self._left_behind[0] > LEFT_BEHIND_S
        return NodeFacts(
            died=died_trainers(leases, ranks, self._ignored_trainers),
            agent=agent.phase if agent else None,
            agent_pid=agent.pid if agent else 0,
            closed=has_completed(leases, ranks, agent is not None),
            snaps=job is not None and job.round is not None and job.round.is_open,
            stall=stall,
            laggard=awaited.rank if awaited else None,
            late_s=self._lateness.shown_s(now_s),
            left_behind=self._left_behind[1] if self._left_behind and is_left_behind else "",
        )

    def _others(self) -> list[WatchedNode]:
        return [each for node, each in self.detector.members.items() if node != self._own]

    def to_kill(self, job: JobRecord | None) -> Stall | None:
        """Returns the local rank to kill, see `stall_to_kill`."""
        own_stall = self.own_report(job).stall
        return stall_to_kill(own_stall, self.detector.members[self._own], self._others(), time.monotonic())

    def is_over(self, now_s: float, job: JobRecord | None) -> bool:
        """Returns whether the watch can end: the job has been idle on this node for LINGER_S."""
        has_living_agent = self.agent is not None and self.agent.is_alive
        if has_living_agent or (job is not None and job.is_live):
            self._active_s = now_s
        if self.agent is not None:
            self._active_s = max(self._active_s, self.agent.last_s)
        return now_s - self._active_s > LINGER_S

    def close(self) -> None:
        self._forget_agent()
        self.announced.announce()
