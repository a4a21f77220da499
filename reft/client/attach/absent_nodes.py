"""Survey of nodes that no longer take part in the job: asks what these nodes hold.

The time for an answer is decided in `reft.core.recovery.survey_timeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reft.client.link.rank_group import RankGroup, bytes_of, text_of
from reft.core.commit.version import Version
from reft.core.recovery.survey_timeout import is_settled
from reft.wire.inventory import JobSurvey, is_itself
from reft.wire.v1 import daemon_pb2 as pb

DEADLINE_S = 20.0  # a node may be gone for good, or need time to end orphans


@dataclass(frozen=True)
class AbsentNodeSurvey:
    """A survey by one rank's daemon, with the answers sent to all ranks.

    Attributes:
        rank_group: all ranks of the job.
        rank: the rank whose daemon asks; that daemon knows the job.
        call: calls a method of this rank's daemon; see `Attachment`.
        job: name of the job.
        launch: launch mark of this attach.
        round: round of reft's rendezvous; -1 without reft's rendezvous.
    """

    rank_group: RankGroup
    rank: int
    call: Callable[[str, Any, float], Any]
    job: str
    launch: str
    round: int

    def __call__(self, nodes: Sequence[pb.Node], is_again: bool) -> pb.SurveyReply:
        """Returns the holdings of these nodes. All ranks call it together.

        Args:
            nodes: the nodes to ask.
            is_again: whether these nodes are asked for the second time. The first time, nodes that
                were given up get little time.
        """
        request = pb.SurveyRequest(job=self.job, nodes=nodes, launch=self.launch, end_orphans=True, again=is_again)
        if self.round >= 0:
            request.round = self.round
        replies = self.rank_group.gather_or_raise(
            lambda: self._ask(request) if self.rank_group.rank == self.rank else {}
        )
        return pb.SurveyReply.FromString(bytes_of(replies[self.rank]["reply"]))

    def _ask(self, request: pb.SurveyRequest) -> dict[str, Any]:
        return {"reply": text_of(self.call("Survey", request, DEADLINE_S).SerializeToString())}


def survey_absent_nodes(
    survey: JobSurvey,
    absent: Sequence[pb.Node],
    ask: Callable[[Sequence[pb.Node], bool], pb.SurveyReply],
    erased: Collection[tuple[str, str, Version]],
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
        survey, unanswered = _add(survey, ask(absent, False))
        ask_again += unanswered
        absent = _not_asked(survey, asked)
        if not absent and ask_again and not is_settled(survey.plan(erased), survey.decision):
            survey, _ = _add(survey, ask(ask_again, True))
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
    missing = [each for each in reply.nodes if not is_itself(each)]
    asked = {each.node.name for each in reply.nodes}
    silent = (*(name for name in survey.silent if name not in asked), *(each.node.name for each in missing))
    return replace(survey, replies={**survey.replies, **answers}, silent=silent), [
        each.node for each in missing if each.brief and not each.HasField("reply")
    ]
