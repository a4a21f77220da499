"""What each node of a job is, as one daemon sees it: signs of life and words in, one signal for each node out.

    beats of daemons ──┐                                        ┌──► `status`, log
    beats of agents ───┤    ┌───────┐  said   ┌─────────────┐   │
    what others hear ──┼───►│ judge ├────────►│  AFTER, the ├───┼──► agents: at once if it is final
    a node's own word ─┤    └───────┘         │    table    │   │
    news from others ──┴─────────────────────►└─────────────┘   └──► next beats: what is final

    JOINING ──► HEALTHY ◄─► SNAP ◄─► SUSPECT          said anew by every look, and only shown
       └───────────┴─────────┴──────────┴───► UNHEALTHY ─► OFFLINE ─► COMPLETED      final: only upwards

Invariants
  1. Within a term (one round of the rendezvous, else one epoch) a final signal is never taken back; only a greater one
     follows. Two daemons that know different things merge them by taking the greater.
  2. A silent daemon alone makes a node SUSPECT, for as long as it lasts. OFFLINE takes a second witness: the node's agent,
     which beats to the same daemons, is silent too. Where no agent was ever heard of a node whose daemon was, the witness
     is the training: ranks of the judging node stand still.
  3. No node is OFFLINE while another one still hears its daemon: then the link between is broken.
  4. Who was late himself, or had heard nobody at all, judges nobody until he has listened for a while. Who watches several
     gives one up only if he has heard another one's daemon since; else he may be the one who is cut off, and waits for
     CUT_OFF_S. Who was given up is not believed about others: he may have been cut off for longer than that.
  5. Of a node that was never heard in this term nothing is judged before JOIN_S: daemons learn of a term one by one.
  6. A node hung, slow or suspected is never given up for that.

A lost message is repaired by the next: each repeats all that is final. A late or repeated one changes nothing: what is
final only grows, and a sign of life counts from when it arrives. Messages of an older term never get here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from reft.core.membership.gossip_targets import gossip_targets, neighbours, ring_of
from reft.core.membership.progress import Stall

BEAT_S = 0.3
MISSES = 3  # beats in a row that make silence
GAP_MAX_S = 2.0  # the longest gap between signs of life that earns a node patience
GAP_FADES = 0.97  # by beat: half of it is forgotten in 7 s
LATE_S = 0.3  # by which a daemon's own loop may be late without doubting itself
CUT_OFF_S = 10.0
JOIN_S = 15.0


class Signal(IntEnum):
    """What a node is. In the order of the table: of two final ones the greater holds."""

    JOINING = 0  # nothing was heard of it in this term
    HEALTHY = 1
    SNAP = 2  # healthy, and a snapshot is under way: between a rank's first answer for a step and its outcome
    SUSPECT = 3  # something is wrong, or may be; nobody acts on it
    UNHEALTHY = 4  # its software: a worker or the agent died; the node is there
    OFFLINE = 5  # the node is lost
    COMPLETED = 6  # its training ended as it should; whatever it does now is no failure

    @property
    def is_final(self) -> bool:
        return self >= Signal.UNHEALTHY


_J, _H, _S, _D, _U, _O, _C = Signal  # D: in doubt
# now → said (in the order of Signal) → what the node is after. Every transition that there is.
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
    """What is said of a node: by itself, or passed on.

    Attributes:
        reason: a sentence for people; empty if all is well.
        stall: the local rank that holds the node's training up, if one does.
    """

    node: str
    signal: Signal
    reason: str = ""
    stall: Stall | None = None

    @property
    def kind(self) -> str:
        """What sort of reason it gives: that of a stall changes when it becomes known who is waited for."""
        return f"hung {self.reason.partition(';')[2]}" if self.stall else self.reason and "word"


@dataclass(frozen=True)
class NodeFacts:
    """What a daemon knows of its own node.

    Attributes:
        died: (rank, pid) of workers that ended without having said that they would.
        agent: what became of the torchrun agent; None if none was heard.
        agent_pid: of that agent.
        closed: whether every rank of the node has closed its session.
        snaps: whether a snapshot is under way.
        stall: the local rank that stands still, if one does.
        laggard: the rank of the job for which it waits, as far as is known; it may be the same.
        late_s: by how much this daemon's own loop was late of late; 0 if it was not.
        left_behind: why the other nodes went on without this one; empty if they did not.
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
    """What an agent says, and what the kernel says of it."""

    TRAINING = 0
    STOPPING = 1  # it ends its workers itself
    FAILED = 2
    FINISHED = 3
    DEAD = 4  # its process ended, and it had not said that its work was done


def self_report(node: str, facts: NodeFacts) -> NodeReport:
    """What a node says of itself: the first of these that is true."""
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
    """The sentence of a rank that stands still, and of the one that it waits for."""
    why = "; its process is stopped" if stall.stopped else ""
    if laggard is not None and laggard != stall.rank:
        why = f"; it may wait for rank {laggard}"
    return (
        f"rank {stall.rank} stands still at step {stall.step}: no step for {stall.still_s:.0f} s, "
        f"{stall.usual_s:.2g} s are usual{why}."
    )


@dataclass
class HeartbeatChannel:
    """One way of hearing from a node: its daemon's calls, its daemon's answers, or its agent's calls."""

    last_s: float | None = None
    _gap_s: float = 0.0

    def heard(self, now_s: float) -> None:
        gap_s = now_s - self.last_s if self.last_s is not None else 0.0
        self._gap_s = min(max(gap_s, self._gap_s * GAP_FADES), GAP_MAX_S)
        self.last_s = now_s

    @property
    def patience_s(self) -> float:
        """How long silence may last: MISSES beats, or longer if the node was slow of late."""
        return max(MISSES * BEAT_S, self._gap_s + 2 * BEAT_S)

    def silent_s(self, now_s: float, since_s: float) -> float:
        """For how long nothing was heard, beginning at `since_s` at the earliest."""
        return now_s - max(self.last_s if self.last_s is not None else since_s, since_s)

    def is_silent(self, now_s: float, since_s: float) -> bool:
        return self.silent_s(now_s, since_s) > self.patience_s


@dataclass
class WatchedNode:
    """One node in one term. `kind` names the reason, so that a sentence with numbers is not made anew at each look."""

    name: str
    calls: HeartbeatChannel = field(default_factory=HeartbeatChannel)
    answers: HeartbeatChannel = field(default_factory=HeartbeatChannel)
    agent: HeartbeatChannel = field(default_factory=HeartbeatChannel)
    others_s: float | None = None  # when another node heard its daemon, the newest
    other: str = ""  # that node's name
    gone: bool = False  # its daemon's address refuses connections: the process has ended
    word: NodeReport | None = None
    signal: Signal = Signal.JOINING
    kind: str = ""
    reason: str = ""
    since_s: float = 0.0

    @property
    def was_heard(self) -> bool:
        """Whether its daemon was."""
        return self.calls.last_s is not None or self.answers.last_s is not None

    @property
    def daemon_s(self) -> float:
        """When its daemon was last heard; -inf: never."""
        return max(_moment(self.calls), _moment(self.answers))

    @property
    def newest_s(self) -> float:
        """When the node was last heard, in whatever way; -inf: never."""
        return max(self.daemon_s, _moment(self.agent))


def _moment(line: HeartbeatChannel) -> float:
    return -inf if line.last_s is None else line.last_s


@dataclass(frozen=True)
class SignalChange:
    """A node is something else now, or for another reason."""

    node: str
    before: Signal
    after: Signal

    @property
    def is_news(self) -> bool:
        """Whether people and agents hear of it: snapshots come and go with every step."""
        return {self.before, self.after} != {Signal.HEALTHY, Signal.SNAP}


class FailureDetector:
    """One daemon's view of all nodes of a job, for one term.

    Args:
        own: id of this daemon's node.
        names: id → name, of all nodes of the job, this one among them.
        now_s: when the term began here, by the clock that all later moments are of.
    """

    def __init__(self, own: str, names: Mapping[str, str], now_s: float) -> None:
        self.own = own
        self.members = {node: WatchedNode(name, since_s=now_s) for node, name in names.items()}
        self._since_s = now_s  # from when silence counts
        self._began_s = now_s
        self._ring = ring_of(self.members)
        self._final: list[str] = []  # nodes, in the order in which it was known

    # Whom to speak to

    def watched(self) -> list[str]:
        """Whom this node exchanges beats with."""
        return neighbours(self.own, self._ring)

    def passers(self) -> list[str]:
        """Whom this node tells news at once."""
        return gossip_targets(self.own, self._ring)

    def lost(self) -> dict[str, float]:
        """Whom the term has lost → when that was known, so far as nothing was heard of them since."""
        return {
            node: each.since_s
            for node, each in self.members.items()
            if each.signal is Signal.OFFLINE and each.newest_s < each.since_s and node != self.own
        }

    # What was heard

    def spoke(
        self, node: str, signs: Iterable[NodeReport], heard_s: Mapping[str, float], now_s: float
    ) -> list[SignalChange]:
        """A beat came from a node's daemon.

        Args:
            signs: its own word, and what it knows of others for good.
            heard_s: node → seconds since the sender heard that one's daemon.
        """
        return self._heard(node, self.members[node].calls, signs, heard_s, now_s)

    def answered(
        self, node: str, signs: Iterable[NodeReport], heard_s: Mapping[str, float], now_s: float
    ) -> list[SignalChange]:
        """A node's daemon answered a beat of ours; see `spoke`."""
        self.members[node].gone = False
        return self._heard(node, self.members[node].answers, signs, heard_s, now_s)

    def refused(self, node: str) -> None:
        """A node's host answered that no daemon listens there."""
        self.members[node].gone = True

    def agent_spoke(self, node: str, agent: AgentPhase, now_s: float) -> list[SignalChange]:
        """A beat came from a node's agent."""
        self.members[node].agent.heard(now_s)
        if agent is AgentPhase.FAILED:
            return self.told(NodeReport(node, Signal.UNHEALTHY, "its agent says that a worker failed."), now_s)
        if agent is AgentPhase.FINISHED:
            return self.told(NodeReport(node, Signal.COMPLETED, "its training has ended."), now_s)
        return []

    def told(self, sign: NodeReport, now_s: float) -> list[SignalChange]:
        """What is final of a node, whichever node says so."""
        if sign.node not in self.members or not sign.signal.is_final:
            return []
        return self._become(sign.node, sign.signal, "told", sign.reason, now_s)

    def _heard(
        self, node: str, line: HeartbeatChannel, signs: Iterable[NodeReport], heard_s: Mapping[str, float], now_s: float
    ) -> list[SignalChange]:
        self._listen_anew(node, now_s)
        line.heard(now_s)
        changes = []
        is_given_up = self.members[node].signal is Signal.OFFLINE
        for sign in signs:
            if sign.node == node:
                self.members[node].word = sign
            if not is_given_up or sign.node in (node, self.own):
                changes += self.told(sign, now_s)
        for other, age_s in heard_s.items():
            each = self.members.get(other)
            if each is not None and now_s - age_s > (each.others_s or 0.0):
                each.others_s, each.other = now_s - age_s, self.members[node].name
        return changes

    def _listen_anew(self, node: str, now_s: float) -> None:
        """Before a daemon's sign of life is noted: a node that had heard none of those it watches may have been cut off. Then the
        others' silence counts from now on, since connections come back one by one."""
        watched = self.watched()
        if node in watched and all(self._is_silent(each, now_s) for each in watched):
            self._since_s = now_s

    # What follows

    def look(self, now_s: float, late_s: float, word: NodeReport, is_still: bool) -> list[SignalChange]:
        """Judges every node; the changes.

        Args:
            late_s: by how much this daemon's loop was late just now.
            word: what this node says of itself.
            is_still: whether ranks of this node stand still.
        """
        if late_s > LATE_S:
            self._since_s = now_s
        changes = self._become(self.own, word.signal, word.kind, word.reason, now_s)
        watched = self.watched()
        for node in watched:
            if self._is_silent(node, now_s):
                is_alone = len(watched) > 1 and not self._is_outlived(node, watched)
                changes += self._become(node, *self._judge(node, now_s, is_alone, is_still), now_s)
            elif found := self._soft(node, now_s):
                changes += self._become(node, *found, now_s)
        return changes

    def _is_silent(self, node: str, now_s: float) -> bool:
        each = self.members[node]
        if not each.was_heard and now_s - self._began_s < JOIN_S:
            return False
        return each.calls.is_silent(now_s, self._since_s) and each.answers.is_silent(now_s, self._since_s)

    def _is_outlived(self, node: str, watched: Iterable[str]) -> bool:
        """Whether another daemon was heard well after this node: who is cut off hears the last of all within one beat.

        Agents don't count: they don't say whom they hear.
        """
        newest_s = max(self.members[other].daemon_s for other in watched if other != node)
        return newest_s - self.members[node].newest_s > 2 * BEAT_S

    def _judge(self, node: str, now_s: float, is_alone: bool, is_still: bool) -> tuple[Signal, str, str]:
        """Of a node whose daemon is silent."""
        each = self.members[node]
        silent_s = min(line.silent_s(now_s, self._since_s) for line in (each.calls, each.answers))
        patience_s = max(each.calls.patience_s, each.answers.patience_s)
        if each.others_s is not None and now_s - each.others_s <= patience_s:
            return (
                Signal.SUSPECT,
                "link",
                f"its daemon is silent, but {each.other} hears it: the link between is broken.",
            )
        what = "gone: its address refuses calls" if each.gone else "silent"
        knows_agent = each.agent.last_s is not None
        if knows_agent and not each.agent.is_silent(now_s, self._since_s):
            return Signal.SUSPECT, f"daemon {each.gone}", f"its daemon is {what}; its agent is not: the node lives."
        if not knows_agent and each.was_heard and not is_still:
            return Signal.SUSPECT, f"daemon {each.gone}", f"its daemon is {what}; training goes on as far as is known."
        if is_alone and silent_s <= CUT_OFF_S:
            return Signal.SUSPECT, "alone", "it is silent like every other: this node may be the one that is cut off."
        who = "its daemon and its agent" if knows_agent or not each.was_heard else "its daemon"
        still = "" if knows_agent or not each.was_heard else ", and ranks stand still"
        return Signal.OFFLINE, "lost", f"nothing was heard of {who} for {silent_s:.1f} s{still}."

    def _soft(self, node: str, now_s: float) -> tuple[Signal, str, str] | None:
        """Of a node that is not silent, or that others watch; None if nothing is known anew."""
        each = self.members[node]
        if each.was_heard and self._since_s > each.daemon_s:
            return None  # we were late, and have not heard it since: that is no sign of life
        if each.was_heard and (half := self._half_open(each, now_s)):
            return Signal.SUSPECT, "half", half
        word = each.word
        if word is None:
            return (Signal.HEALTHY, "", "") if each.was_heard else None
        if word.signal.is_final:
            return word.signal, "told", word.reason
        if word.reason or each.agent.last_s is None or not each.agent.is_silent(now_s, self._since_s):
            return word.signal, word.kind, word.reason
        return Signal.SUSPECT, "agent", "its agent is silent, its daemon is not."

    def _half_open(self, each: WatchedNode, now_s: float) -> str:
        """What is wrong with a link that works in one direction."""
        calls, answers = each.calls, each.answers
        if calls.last_s is None or answers.last_s is None:
            return ""
        if calls.is_silent(now_s, self._since_s) and not answers.is_silent(now_s, self._since_s):
            return "the link is half open: its daemon answers, but its own calls do not arrive."
        if answers.is_silent(now_s, self._since_s) and not calls.is_silent(now_s, self._since_s):
            return "the link is half open: its daemon calls, but does not answer."
        return ""

    def _become(self, node: str, said: Signal, kind: str, reason: str, now_s: float) -> list[SignalChange]:
        """The only place where a node's signal changes."""
        each = self.members[node]
        after = AFTER[each.signal][said]
        if after is not said or (after is each.signal and (after.is_final or kind == each.kind)):
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

    # What is said

    def reports(self, word: NodeReport) -> list[NodeReport]:
        """This node's word first, or what is final of it; then what is final of others."""
        here = self.members[self.own]
        own = NodeReport(self.own, here.signal, here.reason) if here.signal.is_final else word
        others = [(node, self.members[node]) for node in self._final if node != self.own]
        return [own, *(NodeReport(node, each.signal, each.reason) for node, each in others)]

    def heard_s(self, now_s: float) -> dict[str, float]:
        """Seconds since this daemon heard those of its neighbours that it did hear."""
        found = {}
        for node in self.watched():
            each = self.members[node]
            if each.was_heard:
                found[node] = now_s - each.daemon_s
        return found
