"""The step inventory: what all daemons hold of the job, on present and on absent nodes.

    one rank a node: end orphans, read headers ═► all ranks ─► JobSurvey; short tables come along
    absent nodes that these replies name: the daemon of one rank asks them ═► all ranks ─► JobSurvey

The time for an answer of an absent node is decided in `reft.core.recovery.survey_timeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Introduction, leader_of, short_table
from reft.client.link.exchange import gather, gather_replies
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

    def ask() -> pb.InventoryReply:
        return ask_own(context, introduction, ends_orphans)

    by_rank = gather_replies(context.rank_group, introduction.is_leader, ask, pb.InventoryReply)
    return _with_absent_nodes(context, introduction, by_rank, erased, before, ends_orphans)


@dataclass(frozen=True)
class InventoryMessage:
    """What a rank sends for the first inventory.

    Attributes:
        reply: the reply of its daemon; empty if another rank of its node asks.
        table: see `short_table`.
    """

    reply: bytes = b""
    table: bytes = b""


def take_first_inventory(context: AttachContext, introduction: Introduction) -> tuple[JobSurvey, list[bytes]]:
    """Returns the replies of all daemons, and each rank's short table. All ranks call it together.

    The tables need no exchange of their own then.

    Raises:
        ReftError: a node's own daemon does not answer.
    """

    def ask() -> InventoryMessage:
        reply = ask_own(context, introduction).SerializeToString() if introduction.is_leader else b""
        return InventoryMessage(reply, short_table(introduction))

    sent = gather(context.rank_group, ask, InventoryMessage)
    by_rank = [pb.InventoryReply.FromString(each.reply) for each in sent]
    return _with_absent_nodes(context, introduction, by_rank), [each.table for each in sent]


def ask_own(context: AttachContext, introduction: Introduction, ends_orphans: bool = True) -> pb.InventoryReply:
    """Returns the inventory of this node's daemon.

    Raises:
        ReftError: the daemon does not answer.
    """
    reply: pb.InventoryReply = introduction.daemon.call("Inventory", inventory_request(introduction, ends_orphans))
    reply.known.extend(known_to_agent(context.launch, reply.node))
    return reply


def _with_absent_nodes(
    context: AttachContext,
    introduction: Introduction,
    by_rank: Sequence[pb.InventoryReply],
    erased: Collection[Erasure] = (),
    before: JobSurvey | None = None,
    ends_orphans: bool = True,
) -> JobSurvey:
    """Returns the survey of these replies, and of the absent nodes that they name."""
    replies = {node.id: by_rank[leader_of(node)] for node in introduction.nodes}
    survey = JobSurvey(replies, before=before)
    absent = survey.absent(introduction.nodes)
    if not absent or not any(reply.HasField("decision") for reply in replies.values()):
        return survey  # no node that answered has the token, which the absent nodes ask for
    asker = asker_of(introduction.nodes, replies)

    def ask_absent(nodes: Sequence[pb.Node], is_again: bool, tokens: Sequence[bytes]) -> pb.SurveyReply:
        request = pb.SurveyRequest(
            job=introduction.job.id, nodes=nodes, launch=introduction.ranks.first.identity.launch,
            end_orphans=ends_orphans, again=is_again, tokens=tokens,
        )  # fmt: skip
        if context.launch.round >= 0:  # reft's rendezvous made the round
            request.round = context.launch.round
        ask = partial(introduction.daemon.call, "Survey", request, DEADLINE_S)
        return gather_replies(context.rank_group, context.rank == asker, ask, pb.SurveyReply, DEADLINE_S)[asker]

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
        ask: asks nodes, perhaps for the second time, with the tokens that the survey knows. The
            first time, nodes that were given up get little time.
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
