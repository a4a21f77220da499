"""Asking nodes that take no part any more what they hold; `reft.core.recovery.survey_timeout` says for how long."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reft.client.link.rank_group import RankGroup, bytes_of, text_of
from reft.core.commit.version import Version
from reft.core.recovery.survey_timeout import is_settled
from reft.wire.inventory import JobSurvey, is_itself
from reft.wire.v1 import daemon_pb2 as pb

DEADLINE_S = 20.0  # nodes may be gone for good, or need time to end orphans


@dataclass(frozen=True)
class AbsentNodeSurvey:
    """Has one rank's daemon ask, and tells every rank what it heard.

    Attributes:
        rank: the one that asks; its daemon knows the job.
        call: calls a method of this rank's daemon; see `Attachment`.
        launch, round: in which this attach takes place; -1 without reft's rendezvous.
    """

    rank_group: RankGroup
    rank: int
    call: Callable[[str, Any, float], Any]
    job: str
    launch: str
    round: int

    def __call__(self, nodes: Sequence[pb.Node], is_again: bool) -> pb.SurveyReply:
        """What these nodes hold. Those that were given up get little time, unless they are asked again."""
        request = pb.SurveyRequest(job=self.job, nodes=nodes, launch=self.launch, end_orphans=True, again=is_again)
        if self.round >= 0:
            request.round = self.round
        said = self.rank_group.gather_or_raise(lambda: self._ask(request) if self.rank_group.rank == self.rank else {})
        return pb.SurveyReply.FromString(bytes_of(said[self.rank]["reply"]))

    def _ask(self, request: pb.SurveyRequest) -> dict[str, Any]:
        return {"reply": text_of(self.call("Survey", request, DEADLINE_S).SerializeToString())}


def survey_absent_nodes(
    found: JobSurvey,
    absent: Sequence[pb.Node],
    ask: Callable[[Sequence[pb.Node], bool], pb.SurveyReply],
    erased: Collection[tuple[str, str, Version]],
) -> JobSurvey:
    """What all daemons hold, as far as they answer; the same on every rank, as `ask` is. No node is asked more than twice.

    Args:
        found: of the nodes that take part.
        absent: the others that these know of.
        ask: an `AbsentNodeSurvey`.
        erased: (node, name, version) of slots and capsules that failed their digests.
    """
    asked = {node.id for node in absent}
    brief: list[pb.Node] = []
    while absent:
        found, given_up = _add(found, ask(absent, False))
        brief += given_up
        absent = _further(found, asked)
        if not absent and brief and not is_settled(found.plan(erased), found.decision):
            found, _ = _add(found, ask(brief, True))
            brief, absent = [], _further(found, asked)
        asked |= {node.id for node in absent}
    return found


def _further(found: JobSurvey, asked: Collection[str]) -> list[pb.Node]:
    """Nodes that nobody knew of until others had answered: the job may have gone on without any that take part now."""
    return [node for node in found.absent(()) if node.id in found.inventory.members and node.id not in asked]


def _add(found: JobSurvey, reply: pb.SurveyReply) -> tuple[JobSurvey, list[pb.Node]]:
    """The findings with a survey's answers; and who did not answer in the little time that it had."""
    heard = {each.node.id: each.reply for each in reply.nodes if is_itself(each)}
    missing = [each for each in reply.nodes if not is_itself(each)]
    asked = {each.node.name for each in reply.nodes}
    silent = (*(name for name in found.silent if name not in asked), *(each.node.name for each in missing))
    return replace(found, replies={**found.replies, **heard}, silent=silent), [
        each.node for each in missing if each.brief and not each.HasField("reply")
    ]
