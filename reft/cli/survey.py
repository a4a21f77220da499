"""What all daemons of a job hold, as one of them was told it. Blocks; what follows from it is pure (`reft.wire.inventory`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from reft.cli.ask import UnknownJob, ask
from reft.errors import ReftError
from reft.wire.inventory import JobSurvey, is_itself
from reft.wire.v1 import daemon_pb2 as pb

SURVEY_DEADLINE_S = 8.0  # the daemon gives the others three seconds
LOOKS_MAX = 3
ROUNDS_MAX = 3  # a node may know of an attach, and of nodes, that the asked one has not heard of


def survey(
    address: str, job: str, onto: Iterable[str] = (), others: Mapping[str, pb.InventoryReply] | None = None
) -> tuple[JobSurvey, dict[str, list[str]]]:
    """The findings of a job, without ending or refusing anybody; and the addresses of nodes that no manifest names.

    Args:
        address: a daemon that holds the job.
        onto: addresses of daemons that may hold something of it though no manifest names them.
        others: node id → inventory, of daemons that were asked already.

    Raises:
        UnknownJob: it does not hold it.
        ReftError: it did not answer, or refused.
    """
    own = ask(address, "Inventory", pb.InventoryRequest(job=job))
    if not own.HasField("decision"):
        raise UnknownJob(
            f"the daemon at {address} holds no job {job!r}.", "reft-cli status lists the jobs that are held"
        )
    replies: dict[str, pb.InventoryReply] = {**(others or {}), own.node_id: own}
    silent: dict[str, str] = {}
    asked: set[str] = set()
    for _ in range(ROUNDS_MAX):
        absent = [node for node in JobSurvey(replies).absent([]) if node.id not in asked]
        if not absent:
            break
        asked |= {node.id for node in absent}
        reply = ask(address, "Survey", pb.SurveyRequest(job=job, nodes=absent), SURVEY_DEADLINE_S)
        silent |= _take(replies, reply.nodes)
    addresses: dict[str, list[str]] = {}
    unnamed = [pb.Node(name=each, addresses=[each]) for each in sorted(set(onto))]
    if unnamed:
        reply = ask(address, "Survey", pb.SurveyRequest(job=job, nodes=unnamed), SURVEY_DEADLINE_S)
        _take(replies, reply.nodes)
        addresses = {each.reply.node_id: list(each.node.addresses) for each in reply.nodes if each.reply.node_id}
    return JobSurvey(replies, tuple(sorted(silent.values()))), addresses


def _take(replies: dict[str, pb.InventoryReply], nodes: Iterable[pb.SurveyedNode]) -> dict[str, str]:
    """Adds the replies, each under the id of who gave it; id → name of the nodes that did not answer themselves."""
    silent = {}
    for each in nodes:
        if each.HasField("reply") and each.reply.node_id and each.reply.HasField("decision"):
            replies.setdefault(each.reply.node_id, each.reply)
        if not is_itself(each):
            silent[each.node.id] = each.node.name
    return silent


def surveys(address: str, reply: pb.StatusReply) -> dict[str, JobSurvey]:
    """The findings of each job of a status; without those that have none, or whose daemon was slow or forgot them."""
    found = {}
    for status in reply.jobs:
        with contextlib.suppress(ReftError, ValueError):
            job_survey = steady(address, status)
            _ = (
                job_survey.placements
            )  # a manifest that says nothing of layouts can't be placed, and nothing can be said
            found[status.job] = job_survey
    return found


def steady(address: str, status: pb.JobStatus) -> JobSurvey:
    """The findings of a job, looked for again while training changes slots faster than they can be read.

    Raises:
        ReftError: the daemon did not answer, or holds the job no more.
    """
    is_whole = status.whole >= 0 or status.HasField("base")
    for _ in range(LOOKS_MAX):
        job_survey, _ = survey(address, status.job)
        if not is_whole or job_survey.plan(()).base is not None:
            break
    return job_survey
