"""The step inventory: what all daemons hold of the job, on present and on absent nodes.

    one rank a node: end orphans, read headers ═► all ranks ─► JobSurvey
    absent nodes that these replies name: the daemon of one rank asks them ═► all ranks ─► JobSurvey

The time for an answer of an absent node is decided in `reft.core.recovery.survey_timeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Introduction, NodeDaemon, leader_of
from reft.client.link.exchange import RankMessage, gather
from reft.client.link.rank_group import RankGroup
from reft.config import Launch
from reft.core.commit.version import Version
from reft.core.recovery.survey_timeout import is_settled
from reft.wire.inventory import JobSurvey, is_itself, silence_in
from reft.wire.v1 import daemon_pb2 as pb

DEADLINE_S = 20.0  # a node may be gone for good, or need time to end orphans
# node id, name, and version of a slot or a capsule that must not be used
Erasure = tuple[str, str, Version]


def take_inventory(
    context: AttachContext,
    introduction: Introduction,
    erased: Collection[Erasure] = (),
    before: JobSurvey | None = None,
    ends_orphans: bool = True,
) -> JobSurvey:
    """Returns the replies of all daemons that answer. All ranks call it together.

    Args:
        context: what every step needs.
        introduction: the ranks and nodes that take part.
        erased: slots and capsules that failed their digests.
        before: the survey of this attach's first try, during later tries.
        ends_orphans: whether daemons end the orphans of earlier trainers; False in mid-training.

    Raises:
        ReftError: a node's own daemon does not answer.
    """

    def ask() -> RankMessage:
        if not introduction.is_leader:
            return RankMessage()
        reply: pb.InventoryReply = introduction.daemon.call("Inventory", inventory_request(introduction, ends_orphans))
        reply.known.extend(known_to_agent(context.launch, reply.node))
        return RankMessage(reply.SerializeToString())

    messages = gather(context.rank_group, ask, RankMessage)
    replies = {node.id: pb.InventoryReply.FromString(messages[leader_of(node)].data) for node in introduction.nodes}
    survey = JobSurvey(replies, before=before)
    absent = survey.absent(introduction.nodes)
    if not absent or not any(reply.HasField("decision") for reply in replies.values()):
        return survey  # no node that answered has the token, which the absent nodes ask for
    job, launch = introduction.job.id, introduction.ranks.first.identity.launch
    asker = asker_of(introduction.nodes, replies)
    ask_absent = AbsentNodeSurvey(
        context.rank_group, asker, introduction.daemon, job, launch, context.launch.round, ends_orphans
    )
    return survey_absent_nodes(survey, absent, ask_absent, erased)


def known_to_agent(launch: Launch, node: str) -> list[pb.KnownStep]:
    """Returns the whole step that this node's torchrun agent remembers."""
    if launch.whole_step < 0:
        return []
    return [pb.KnownStep(step=launch.whole_step, source=f"the torchrun agent of node {node}, which has lived on")]


def inventory_request(introduction: Introduction, ends_orphans: bool = True) -> pb.InventoryRequest:
    """Returns the question to this rank's daemon.

    Args:
        introduction: the ranks and nodes that take part.
        ends_orphans: whether the daemon ends orphans on its node first.
    """
    infos = introduction.ranks.infos
    return pb.InventoryRequest(
        job=introduction.job.id,
        launch=introduction.ranks.first.identity.launch,
        pids=[infos[rank].process.pid for rank in introduction.node.ranks],
        end_orphans=ends_orphans,
    )


def asker_of(nodes: Sequence[pb.Node], replies: Mapping[str, pb.InventoryReply]) -> int:
    """Returns the rank whose daemon asks absent nodes.

    Any daemon that knows the job has the job's token; the first of these daemons asks.
    """
    return next(leader_of(node) for node in nodes if replies[node.id].HasField("decision"))


@dataclass(frozen=True)
class AbsentNodeSurvey:
    """A survey by one rank's daemon, with the answers sent to all ranks.

    Attributes:
        rank_group: all ranks of the job.
        rank: the rank whose daemon asks; that daemon knows the job.
        daemon: the daemon of this rank's node.
        job: name of the job.
        launch: launch mark of this attach.
        round: round of reft's rendezvous; -1 without reft's rendezvous.
        ends_orphans: whether daemons end the orphans of earlier trainers.
    """

    rank_group: RankGroup
    rank: int
    daemon: NodeDaemon
    job: str
    launch: str
    round: int
    ends_orphans: bool = True

    def __call__(self, nodes: Sequence[pb.Node], is_again: bool, tokens: Sequence[bytes]) -> pb.SurveyReply:
        """Returns the holdings of these nodes. All ranks call it together.

        Args:
            nodes: the nodes to ask.
            is_again: whether these nodes are asked for the second time. The first time, nodes that
                were given up get little time.
            tokens: of the job, as far as the survey knows them.
        """
        request = pb.SurveyRequest(
            job=self.job, nodes=nodes, launch=self.launch, end_orphans=self.ends_orphans, again=is_again, tokens=tokens
        )
        if self.round >= 0:
            request.round = self.round

        def ask() -> RankMessage:
            if self.rank_group.rank != self.rank:
                return RankMessage()
            reply: pb.SurveyReply = self.daemon.call("Survey", request, DEADLINE_S)
            return RankMessage(reply.SerializeToString())

        messages = gather(self.rank_group, ask, RankMessage, extra_s=DEADLINE_S)
        return pb.SurveyReply.FromString(messages[self.rank].data)


def survey_absent_nodes(
    survey: JobSurvey,
    absent: Sequence[pb.Node],
    ask: Callable[[Sequence[pb.Node], bool, Sequence[bytes]], pb.SurveyReply],
    erased: Collection[Erasure],
) -> JobSurvey:
    """Returns the survey with the answers of all absent nodes that answer.

    The result is the same on every rank, because `ask` gives the same answers. No node is asked
    more than twice.

    Args:
        survey: answers of the nodes that take part.
        absent: the other nodes that these answers name.
        ask: an `AbsentNodeSurvey`.
        erased: (node, name, version) of slots and capsules that failed their digests.
    """
    asked = {node.id for node in absent}
    ask_again: list[pb.Node] = []
    while absent:
        survey, unanswered = _add(survey, ask(absent, False, survey.tokens))
        ask_again += unanswered
        absent = _not_asked(survey, asked)
        if not absent and ask_again and not is_settled(survey.plan(erased), survey.decision):
            survey, _ = _add(survey, ask(ask_again, True, survey.tokens))
            ask_again, absent = [], _not_asked(survey, asked)
        asked |= {node.id for node in absent}
    return survey


def _not_asked(survey: JobSurvey, asked: Collection[str]) -> list[pb.Node]:
    """Returns the absent nodes that only the last answers named.

    There are such nodes if the job went on for a time without any node that takes part now.
    """
    return [node for node in survey.absent(()) if node.id in survey.inventory.members and node.id not in asked]


def _add(survey: JobSurvey, reply: pb.SurveyReply) -> tuple[JobSurvey, list[pb.Node]]:
    """Returns the survey with these answers, and the nodes that may be asked again.

    A node may be asked again if it had little time and did not answer.
    """
    answers = {each.node.id: each.reply for each in reply.nodes if is_itself(each)}
    asked = {each.node.name for each in reply.nodes}
    silent = {name: why for name, why in survey.silent.items() if name not in asked}
    silent = dict(sorted({**silent, **silence_in(reply.nodes)}.items()))
    others = (each.node.name for each in reply.nodes if each.HasField("reply") and not is_itself(each))
    replies, emptied = {**survey.replies, **answers}, (*survey.emptied, *others)
    again = [each.node for each in reply.nodes if each.brief and not each.HasField("reply")]
    return replace(survey, replies=replies, silent=silent, emptied=emptied), again
