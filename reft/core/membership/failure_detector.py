"""Judges the state of each node of a job from heartbeats. This is the view of one daemon.

    beats of daemons ──┐                                        ┌──► `status`, log
    beats of agents ───┤    ┌───────┐ signal  ┌─────────────┐   │
    beats that others ─┼───►│ judge ├────────►│  AFTER, the ├───┼──► agents: at once if final
      have heard       │    └───────┘         │    table    │   │
    self reports ──────┤                      │             │   │
    reports of others ─┴─────────────────────►└─────────────┘   └──► next beats: final signals

    JOINING ──► HEALTHY ◄─► SNAP ◄─► SUSPECT          judged anew at every look, only shown
       └───────────┴─────────┴──────────┴───► UNHEALTHY ─► OFFLINE ─► COMPLETED   final: only up

Invariants
  1. A term is one round of the rendezvous, else one epoch. Within a term a final signal is never
     taken back. Only a greater one follows. Daemons that know different final signals merge them by
     taking the greater.
  2. A silent daemon alone makes a node SUSPECT, while the silence lasts. OFFLINE needs a second
     witness. That is the node's agent, which beats to the same daemons and must be silent too. If
     the node's daemon was heard but never an agent, the witness is the training: ranks of the
     judging node stand still.
  3. No node is OFFLINE while another node still hears its daemon. Then the link between the two is
     broken.
  4. A node that was late itself, or had heard no other node, judges no node until it has listened
     for a while. A node that watches several nodes gives one up only if it has heard another one's
     daemon since. Otherwise the judging node may be the one that is cut off, and waits for
     CUT_OFF_S. Reports of a node that was given up do not count for other nodes: that node may have
     been cut off for longer than CUT_OFF_S.
  5. A node that was never heard in this term is not judged before JOIN_S. Daemons learn of a term
     one by one. The neighbours that it had from the beginning never give it up: a closed port or
     a certificate may separate daemons whose ranks train. Else all workers restarted for ever, each
     JOIN_S. If it was lost that early, the rendezvous misses its keep-alives.
  6. A node that is hung, slow or suspected is never given up for that reason.

The next message repairs a lost message: each message repeats all final signals. A late or repeated
    message changes
nothing: final signals only grow, and a sign of life counts from its arrival. Messages of an older
term are dropped before they get here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from reft.core.membership.gossip_targets import gossip_targets, neighbours, ring_of
from reft.core.membership.progress import Stall

BEAT_S = 0.3
MISSES = 3  # so many missed beats in a row count as silence
GAP_MAX_S = 2.0  # longer gaps between signs of life do not lengthen the patience further
GAP_FADES = 0.97  # factor per beat: the remembered gap halves in 7 s
LATE_S = 0.3  # a daemon whose own loop is later than this does not trust its own judgement
CUT_OFF_S = 10.0
JOIN_S = 15.0
UNHEARD = (
    "nothing was heard of its daemon and its agent since the round began. Is its daemon's port open, and are the "
    "certificates of both nodes valid?"
)


class Signal(IntEnum):
    """The state of a node, in the order of the table: of two final signals the greater counts."""

    JOINING = 0  # the node was not heard in this term
    HEALTHY = 1
    # Healthy, and a snapshot is under way: between a rank's first answer for a step and the
    # outcome.
    SNAP = 2
    SUSPECT = 3  # something is wrong, or may be; no agent acts on it
    UNHEALTHY = 4  # software failed: a worker or the agent died, but the node is there
    OFFLINE = 5  # the node is lost
    COMPLETED = 6  # training ended normally; nothing that the node does now is a failure

    @property
    def is_final(self) -> bool:
        return self >= Signal.UNHEALTHY


_J, _H, _S, _D, _U, _O, _C = Signal  # D: in doubt
# Signal now → judged signal (in the order of Signal) → signal after. These are all transitions.
AFTER: Mapping[Signal, tuple[Signal, ...]] = {
    _J: (_J, _H, _S, _D, _U, _O, _C),
    _H: (_H, _H, _S, _D, _U, _O, _C),
    _S: (_S, _H, _S, _D, _U, _O, _C),
    _D: (_D, _H, _S, _D, _U, _O, _C),
    _U: (_U, _U, _U, _U, _U, _O, _C),
    _O: (_O, _O, _O, _O, _O, _O, _C),
    _C: (_C, _C, _C, _C, _C, _C, _C),
}


@dataclass(frozen=True)
class NodeReport:
    """A report on a node, by the node itself or passed on by another.

    Attributes:
        node: id of the node.
        signal: the node's signal.
        reason: a sentence for people; empty if all is well.
        stall: the local rank that holds up the node's training, if any.
    """

    node: str
    signal: Signal
    reason: str = ""
    stall: Stall | None = None

    @property
    def kind(self) -> str:
        """Returns the kind of reason; a stall's kind changes once the awaited rank is known."""
        return f"hung {self.reason.partition(';')[2]}" if self.stall else self.reason and "word"


@dataclass(frozen=True)
class NodeFacts:
    """The facts that a daemon knows of its own node.

    Attributes:
        died: (rank, pid) of workers that ended without announcing their end.
        agent: phase of the torchrun agent; None if no agent was heard.
        agent_pid: process id of that agent.
        closed: whether every rank of the node has closed its session.
        snaps: whether a snapshot is under way.
        stall: the local rank that stands still, if any.
        laggard: the rank of the job that the stalled rank waits for, as far as is known; may be the
            stalled rank.
        late_s: seconds by which this daemon's own loop was recently late; 0 if it was not.
        left_behind: why the other nodes continued without this one; empty if they did not.
    """

    died: tuple[tuple[int, int], ...] = ()
    agent: AgentPhase | None = None
    agent_pid: int = 0
    closed: bool = False
    snaps: bool = False
    stall: Stall | None = None
    laggard: int | None = None
    late_s: float = 0.0
    left_behind: str = ""


class AgentPhase(IntEnum):
    """The phase of an agent, by its own words or by the kernel's."""

    TRAINING = 0
    STOPPING = 1  # the agent ends its workers itself
    FAILED = 2
    FINISHED = 3
    DEAD = 4  # the agent's process ended without reporting that its work was done


def self_report(node: str, facts: NodeFacts) -> NodeReport:
    """Returns a node's report of itself, by the first condition that is true."""
    if facts.agent is AgentPhase.FINISHED or facts.closed:
        return NodeReport(node, Signal.COMPLETED, "its training has ended.")
    if facts.left_behind:
        return NodeReport(node, Signal.OFFLINE, facts.left_behind)
    if facts.agent is AgentPhase.DEAD:
        return NodeReport(node, Signal.UNHEALTHY, f"its agent, process {facts.agent_pid}, has ended.")
    if facts.agent is AgentPhase.FAILED:
        return NodeReport(node, Signal.UNHEALTHY, "its agent says that a worker failed.")
    if facts.died and facts.agent is not AgentPhase.STOPPING:
        rank, pid = facts.died[0]
        return NodeReport(node, Signal.UNHEALTHY, f"the trainer of rank {rank}, process {pid}, died.")
    if facts.stall:
        return NodeReport(node, Signal.SUSPECT, hung(facts.stall, facts.laggard), facts.stall)
    if facts.late_s:
        return NodeReport(node, Signal.SUSPECT, f"it is overloaded: its daemon was {facts.late_s:.1f} s late.")
    return NodeReport(node, Signal.SNAP if facts.snaps else Signal.HEALTHY)


def hung(stall: Stall, laggard: int | None) -> str:
    """Returns a sentence about a rank that stands still.

    It names the rank that this rank waits for.
    """
    why = "; its process is stopped" if stall.stopped else ""
    if laggard is not None and laggard != stall.rank:
        why = f"; it may wait for rank {laggard}"
    return (
        f"rank {stall.rank} stands still at step {stall.step}: no step for {stall.still_s:.0f} s, "
        f"{stall.usual_s:.2g} s are usual{why}."
    )


@dataclass(frozen=True, slots=True)
class HeartbeatChannel:
    """One way to hear a node: its daemon's calls, its daemon's answers, or its agent's calls."""

    last_s: float | None = None
    gap_s: float = 0.0

    def heard(self, now_s: float) -> HeartbeatChannel:
        """Returns the channel after a sign of life."""
        gap_s = now_s - self.last_s if self.last_s is not None else 0.0
        return HeartbeatChannel(now_s, min(max(gap_s, self.gap_s * GAP_FADES), GAP_MAX_S))

    @property
    def patience_s(self) -> float:
        """Returns how long silence may last: MISSES beats, or longer for a slow node."""
        return max(MISSES * BEAT_S, self.gap_s + 2 * BEAT_S)

    def silent_s(self, now_s: float, since_s: float) -> float:
        """Returns the seconds of silence, counted from `since_s` at the earliest."""
        return now_s - max(self.last_s if self.last_s is not None else since_s, since_s)

    def is_silent(self, now_s: float, since_s: float) -> bool:
        return self.silent_s(now_s, since_s) > self.patience_s


NEVER_HEARD = HeartbeatChannel()  # most of thousands of nodes beat to others


@dataclass(slots=True)
class WatchedNode:
    """One node in one term.

    `kind` names the reason, so that a sentence with numbers is not written anew at each look.
    """

    name: str
    calls: HeartbeatChannel = NEVER_HEARD
    answers: HeartbeatChannel = NEVER_HEARD
    agent: HeartbeatChannel = NEVER_HEARD
    others_s: float | None = None  # newest time at which another node heard this node's daemon
    other: str = ""  # name of that other node
    gone: bool = False  # the daemon's address refuses connections: its process has ended
    word: NodeReport | None = None
    signal: Signal = Signal.JOINING
    kind: str = ""
    reason: str = ""
    since_s: float = 0.0

    @property
    def was_heard(self) -> bool:
        """Returns whether the node's daemon was heard in this term."""
        return self.calls.last_s is not None or self.answers.last_s is not None

    @property
    def daemon_s(self) -> float:
        """Returns when the node's daemon was last heard; -inf: never."""
        return max(_last_heard_s(self.calls), _last_heard_s(self.answers))

    @property
    def newest_s(self) -> float:
        """Returns when the node was last heard in any way; -inf: never."""
        return max(self.daemon_s, _last_heard_s(self.agent))


def _last_heard_s(channel: HeartbeatChannel) -> float:
    return -inf if channel.last_s is None else channel.last_s


def judge_silent(
    each: WatchedNode, now_s: float, silence_from_s: float, is_alone: bool, is_still: bool, is_first: bool = False
) -> tuple[Signal, str, str]:
    """Judges a node whose daemon is silent; returns the signal, kind and reason.

    Args:
        each: the node.
        now_s: time of the judgement.
        silence_from_s: when silence began to count.
        is_alone: whether no other watched daemon was heard after this node.
        is_still: whether ranks of the judging node stand still.
        is_first: whether the node was a neighbour when the term began.
    """
    silent_s = min(channel.silent_s(now_s, silence_from_s) for channel in (each.calls, each.answers))
    patience_s = max(each.calls.patience_s, each.answers.patience_s)
    if each.others_s is not None and now_s - each.others_s <= patience_s:
        return Signal.SUSPECT, "link", f"its daemon is silent, but {each.other} hears it: the link between is broken."
    daemon_state = "gone: its address refuses calls" if each.gone else "silent"
    knows_agent = each.agent.last_s is not None
    if is_first and not knows_agent and not each.was_heard:
        return Signal.SUSPECT, "unheard", UNHEARD
    if knows_agent and not each.agent.is_silent(now_s, silence_from_s):
        return Signal.SUSPECT, f"daemon {each.gone}", f"its daemon is {daemon_state}; its agent is not: the node lives."
    if not knows_agent and each.was_heard and not is_still:
        return (
            Signal.SUSPECT,
            f"daemon {each.gone}",
            f"its daemon is {daemon_state}; training continues, as far as is known.",
        )
    if is_alone and silent_s <= CUT_OFF_S:
        return Signal.SUSPECT, "alone", "it is silent like every other: this node may be the one that is cut off."
    silent_parts = "its daemon and its agent" if knows_agent or not each.was_heard else "its daemon"
    still = "" if knows_agent or not each.was_heard else ", and ranks stand still"
    return Signal.OFFLINE, "lost", f"nothing was heard of {silent_parts} for {silent_s:.1f} s{still}."


def judge_audible(each: WatchedNode, now_s: float, silence_from_s: float) -> tuple[Signal, str, str] | None:
    """Judges a node that is not silent; None if nothing new is known.

    Arguments and result as of `judge_silent`.
    """
    if each.was_heard and silence_from_s > each.daemon_s:
        return None  # this daemon was late, and has not heard the node since: no sign of life
    if each.was_heard and (half := half_open(each.calls, each.answers, now_s, silence_from_s)):
        return Signal.SUSPECT, "half", half
    word = each.word
    if word is None:
        return (Signal.HEALTHY, "", "") if each.was_heard else None
    if word.signal.is_final:
        return word.signal, "told", word.reason
    if word.reason or each.agent.last_s is None or not each.agent.is_silent(now_s, silence_from_s):
        return word.signal, word.kind, word.reason
    return Signal.SUSPECT, "agent", "its agent is silent, its daemon is not."


def half_open(calls: HeartbeatChannel, answers: HeartbeatChannel, now_s: float, silence_from_s: float) -> str:
    """Returns the fault of a link that works in one direction.

    The text is empty if there is none.
    """
    if calls.last_s is None or answers.last_s is None:
        return ""
    if calls.is_silent(now_s, silence_from_s) and not answers.is_silent(now_s, silence_from_s):
        return "the link is half open: its daemon answers, but its own calls do not arrive."
    if answers.is_silent(now_s, silence_from_s) and not calls.is_silent(now_s, silence_from_s):
        return "the link is half open: its daemon calls, but does not answer."
    return ""


@dataclass(frozen=True)
class SignalChange:
    """A change of a node's signal, or of its reason."""

    node: str
    before: Signal
    after: Signal

    @property
    def is_news(self) -> bool:
        """Returns whether people and agents learn of the change.

        Changes between HEALTHY and SNAP are not news: they come with every step.
        """
        return {self.before, self.after} != {Signal.HEALTHY, Signal.SNAP}


class FailureDetector:
    """One daemon's view of all nodes of a job, for one term.

    Args:
        own: id of this daemon's node.
        names: id → name, of all nodes of the job, this one included.
        now_s: when the term began here; all later times are of the same clock.
    """

    def __init__(self, own: str, names: Mapping[str, str], now_s: float) -> None:
        self.own = own
        self.members = {node: WatchedNode(name, since_s=now_s) for node, name in names.items()}
        self._silence_from_s = now_s  # silence counts from here
        self._term_began_s = now_s
        self._ring = ring_of(self.members)
        self._first_neighbours = frozenset(self.watched_nodes())
        self._final: list[str] = []  # nodes with a final signal, in the order of their signals

    # Which nodes to call

    def watched_nodes(self) -> list[str]:
        """Returns the nodes that this node exchanges beats with."""
        return neighbours(self.own, self._ring)

    def news_targets(self) -> list[str]:
        """Returns the nodes that this node sends news to at once."""
        return gossip_targets(self.own, self._ring)

    def lost(self) -> dict[str, float]:
        """Returns the nodes lost in this term and silent since → time of loss."""
        return {
            node: each.since_s
            for node, each in self.members.items()
            if each.signal is Signal.OFFLINE and each.newest_s < each.since_s and node != self.own
        }

    # Heartbeats and reports that arrived

    def spoke(
        self, node: str, reports: Iterable[NodeReport], heard_s: Mapping[str, float], now_s: float
    ) -> list[SignalChange]:
        """Handles a beat of a node's daemon; returns the changes.

        Args:
            node: id of the sender.
            reports: the sender's own report, and the final reports of others that it knows.
            heard_s: node → seconds since the sender heard that node's daemon.
            now_s: time of arrival.
        """
        self._restart_silence_if_cut_off(node, now_s)
        each = self.members[node]
        each.calls = each.calls.heard(now_s)
        return self._hear_daemon(node, reports, heard_s, now_s)

    def answered(
        self, node: str, reports: Iterable[NodeReport], heard_s: Mapping[str, float], now_s: float
    ) -> list[SignalChange]:
        """Handles the answer of a node's daemon to our beat; arguments as of `spoke`."""
        self._restart_silence_if_cut_off(node, now_s)
        each = self.members[node]
        each.gone, each.answers = False, each.answers.heard(now_s)
        return self._hear_daemon(node, reports, heard_s, now_s)

    def refused(self, node: str) -> None:
        """Notes that a node's host refused the connection: no daemon listens there."""
        self.members[node].gone = True

    def agent_spoke(self, node: str, agent: AgentPhase, now_s: float) -> list[SignalChange]:
        """Handles a beat of a node's agent; returns the changes."""
        each = self.members[node]
        each.agent = each.agent.heard(now_s)
        if agent is AgentPhase.FAILED:
            return self.take_report(NodeReport(node, Signal.UNHEALTHY, "its agent says that a worker failed."), now_s)
        if agent is AgentPhase.FINISHED:
            return self.take_report(NodeReport(node, Signal.COMPLETED, "its training has ended."), now_s)
        return []

    def take_report(self, report: NodeReport, now_s: float) -> list[SignalChange]:
        """Takes over a final report of a node, from any source; returns the changes."""
        if report.node not in self.members or not report.signal.is_final:
            return []
        return self._set_signal(report.node, report.signal, "told", report.reason, now_s)

    def _hear_daemon(
        self,
        node: str,
        reports: Iterable[NodeReport],
        heard_s: Mapping[str, float],
        now_s: float,
    ) -> list[SignalChange]:
        changes = []
        is_given_up = self.members[node].signal is Signal.OFFLINE
        for report in reports:
            if report.node == node:
                self.members[node].word = report
            if not is_given_up or report.node in (node, self.own):
                changes += self.take_report(report, now_s)
        for other, age_s in heard_s.items():
            each = self.members.get(other)
            if each is not None and now_s - age_s > (each.others_s or 0.0):
                each.others_s, each.other = now_s - age_s, self.members[node].name
        return changes

    def _restart_silence_if_cut_off(self, node: str, now_s: float) -> None:
        """Restarts the count of silence if all watched nodes were silent until now.

        Called before the daemon's sign of life is noted. This node may have been cut off.
        Connections come back one by one, so the silence of the others counts from now on.
        """
        watched = self.watched_nodes()
        if node in watched and all(self._is_silent(each, now_s) for each in watched):
            self._silence_from_s = now_s

    # Judging

    def look(self, now_s: float, late_s: float, word: NodeReport, is_still: bool) -> list[SignalChange]:
        """Judges every watched node; returns the changes.

        Args:
            now_s: time of the look.
            late_s: seconds by which this daemon's loop was late just now.
            word: this node's own report.
            is_still: whether ranks of this node stand still.
        """
        if late_s > LATE_S:
            self._silence_from_s = now_s
        changes = self._set_signal(self.own, word.signal, word.kind, word.reason, now_s)
        watched = self.watched_nodes()
        for node in watched:
            if self._is_silent(node, now_s):
                is_alone = len(watched) > 1 and not self._is_outlived(node, watched)
                is_first = node in self._first_neighbours
                judgement = judge_silent(self.members[node], now_s, self._silence_from_s, is_alone, is_still, is_first)
                changes += self._set_signal(node, *judgement, now_s)
            elif heard := judge_audible(self.members[node], now_s, self._silence_from_s):
                changes += self._set_signal(node, *heard, now_s)
        return changes

    def _is_silent(self, node: str, now_s: float) -> bool:
        each = self.members[node]
        if not each.was_heard and now_s - self._term_began_s < JOIN_S:
            return False
        return each.calls.is_silent(now_s, self._silence_from_s) and each.answers.is_silent(now_s, self._silence_from_s)

    def _is_outlived(self, node: str, watched: Iterable[str]) -> bool:
        """Returns whether another daemon was heard well after this node.

        A node that is cut off hears the last of all others within one beat. Agents don't count:
        they don't say which nodes they hear.
        """
        newest_s = max(self.members[other].daemon_s for other in watched if other != node)
        return newest_s - self.members[node].newest_s > 2 * BEAT_S

    def _set_signal(self, node: str, signal: Signal, kind: str, reason: str, now_s: float) -> list[SignalChange]:
        """Sets a node's signal; nothing else changes signals."""
        each = self.members[node]
        after = AFTER[each.signal][signal]
        if after is not signal or (after is each.signal and (after.is_final or kind == each.kind)):
            return []
        change = SignalChange(node, each.signal, after)
        if after is not each.signal:
            each.since_s = now_s
            self._note_final(node, each.signal, after)
        each.signal, each.kind, each.reason = after, kind, reason
        return [change]

    def _note_final(self, node: str, before: Signal, after: Signal) -> None:
        if after.is_final and not before.is_final:
            self._final.append(node)
        if after > Signal.UNHEALTHY and node != self.own and node in self._ring:
            self._ring.remove(node)

    # Reports to others

    def reports(self, word: NodeReport) -> list[NodeReport]:
        """Returns this node's own report, then the final reports of other nodes.

        If a final signal of this node is known, that signal replaces the own report.
        """
        here = self.members[self.own]
        own = NodeReport(self.own, here.signal, here.reason) if here.signal.is_final else word
        others = [(node, self.members[node]) for node in self._final if node != self.own]
        return [own, *(NodeReport(node, each.signal, each.reason) for node, each in others)]

    def heard_s(self, now_s: float) -> dict[str, float]:
        """Returns the seconds since this daemon heard each neighbour; without those never heard."""
        ages_s = {}
        for node in self.watched_nodes():
            each = self.members[node]
            if each.was_heard:
                ages_s[node] = now_s - each.daemon_s
        return ages_s
