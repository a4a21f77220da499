"""Collects the holdings of all daemons of a job, by asking one of them.

The calls block. The conclusions are pure functions (`reft.wire.inventory`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from reft.cli.ask import NoSuchJob, ask
from reft.core.recovery.holdings import UNPROVED
from reft.errors import ReftError
from reft.wire.inventory import JobSurvey, is_itself
from reft.wire.v1 import daemon_pb2 as pb

SURVEY_DEADLINE_S = 8.0  # the asked daemon gives the other daemons three seconds
LOOKS_MAX = 3
AT_ONCE = 8  # of the 64 surveys that a daemon makes at once
ROUNDS_MAX = 3  # a reply may name an attach, and nodes, that the first daemon does not know


def survey(
    address: str,
    job: str,
    onto: Iterable[str] = (),
    others: Mapping[str, pb.InventoryReply] | None = None,
    mute: dict[tuple[str, ...], str] | None = None,
) -> tuple[JobSurvey, dict[str, list[str]]]:
    """Returns the survey of a job, and the addresses of nodes that no manifest names.

    The survey ends no process and raises no error for a conflict.

    Args:
        address: a daemon that holds the job.
        job: the job's name.
        onto: addresses of daemons that may hold a part of the job although no manifest names them.
        others: node id → inventory, of daemons that were already asked.
        mute: addresses of nodes that have just not answered for another job → the reasons. They are
            not asked again; those that do not answer now are added.

    Raises:
        UnknownJob: the daemon does not hold the job.
        ReftError: the daemon did not answer, or refused.
    """
    own = ask(address, "Inventory", pb.InventoryRequest(job=job))
    if not own.HasField("decision"):
        raise NoSuchJob(
            f"the daemon at {address} holds no job {job!r}.", "reft-cli status lists the jobs that the daemon holds"
        )
    replies: dict[str, pb.InventoryReply] = {**(others or {}), own.node_id: own}
    mute = {} if mute is None else mute
    silent: dict[str, str] = {}  # id → reason
    emptied: list[str] = []
    asked: set[str] = set()
    for _ in range(ROUNDS_MAX):
        absent = [node for node in JobSurvey(replies).absent([]) if node.id not in asked]
        if not absent:
            break
        asked |= {node.id for node in absent}
        silent |= {node.id: mute[key] for node in absent if (key := tuple(node.addresses)) in mute}
        left = [node for node in absent if node.id not in silent]
        if not left:
            continue
        reply = ask(address, "Survey", pb.SurveyRequest(job=job, nodes=left), SURVEY_DEADLINE_S)
        _add_replies(replies, reply.nodes)
        for each in reply.nodes:
            if not each.HasField("reply"):
                silent[each.node.id] = each.trouble
                if not each.trouble.startswith(UNPROVED):  # a daemon that answers knows each job by itself
                    mute[tuple(each.node.addresses)] = each.trouble
        emptied += [each.node.name for each in reply.nodes if each.HasField("reply") and not is_itself(each)]
    addresses: dict[str, list[str]] = {}
    unnamed = [pb.Node(name=each, addresses=[each]) for each in sorted(set(onto))]
    if unnamed:
        reply = ask(address, "Survey", pb.SurveyRequest(job=job, nodes=unnamed), SURVEY_DEADLINE_S)
        _add_replies(replies, reply.nodes)
        addresses = {each.reply.node_id: list(each.node.addresses) for each in reply.nodes if each.reply.node_id}
    names = JobSurvey(replies).names
    return JobSurvey(
        replies, dict(sorted((names[ident], why) for ident, why in silent.items())), tuple(sorted(emptied))
    ), addresses


def _add_replies(replies: dict[str, pb.InventoryReply], nodes: Iterable[pb.SurveyedNode]) -> None:
    """Adds each reply under the id of the node that gave the reply."""
    for surveyed in nodes:
        if surveyed.HasField("reply") and surveyed.reply.node_id and surveyed.reply.HasField("decision"):
            replies.setdefault(surveyed.reply.node_id, surveyed.reply)


def surveys(address: str, reply: pb.StatusReply) -> dict[str, JobSurvey]:
    """Returns the survey of each job in a status reply.

    A job is missing if the job has no survey, or if the daemon was slow or has freed the job. Each
    waits for silent nodes, so some are made at once.
    """
    surveys_by_job: dict[str, JobSurvey] = {}
    mute: dict[tuple[str, ...], str] = {}  # a lost node costs three seconds once, not for each of 200 jobs

    def look(status: pb.JobStatus) -> None:
        with contextlib.suppress(ReftError, ValueError):
            job_survey = steady(address, status, mute)
            _ = job_survey.placements  # raises if the manifest has no layouts; the job then has no survey
            surveys_by_job[status.job] = job_survey

    pool = ThreadPoolExecutor(AT_ONCE, "reft-survey")
    try:
        for ended in [pool.submit(look, status) for status in reply.jobs]:
            ended.result()
    finally:  # Ctrl-C waits for those that have begun, no more
        pool.shutdown(wait=False, cancel_futures=True)
    return surveys_by_job


def steady(address: str, status: pb.JobStatus, mute: dict[tuple[str, ...], str] | None = None) -> JobSurvey:
    """Returns a survey of a job that is in training.

    Training changes slots while they are read, so a survey may miss a whole version. Then the job
    is surveyed again, at most LOOKS_MAX times in all.

    Args:
        address: a daemon that holds the job.
        status: of the job.
        mute: see `survey`.

    Raises:
        ReftError: the daemon did not answer, or no longer holds the job.
    """
    is_whole = status.whole >= 0 or status.HasField("base")
    for _ in range(LOOKS_MAX):
        job_survey, _ = survey(address, status.job, mute=mute)
        if not is_whole or job_survey.plan(()).base is not None:
            break
    return job_survey
