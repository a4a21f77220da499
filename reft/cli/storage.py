"""What memory and storage hold of jobs: `reft-cli list` and `reft-cli verify`.

    list JOB      this node's daemon: slots of all daemons of JOB, and its storage
    list DIR      a process that reads DIR (or s3://…) itself; no daemon is needed
    verify DIR    the same process compares every byte with its digest

The process is the daemon's program for storage (`reft_daemon.persist.audit`). It answers a JSON
object a line. Storage that hangs stops that process; Ctrl-C ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reft.cli.ask import NoSuchJob, ask
from reft.cli.survey import survey
from reft.config import child_environment
from reft.core.commit.version import Version
from reft.core.persist.storage_url import check_url, is_url
from reft.core.persist.stored_lineages import StoredLineage, newer_than_memory
from reft.errors import ConfigError, DaemonUnavailable, ReftError
from reft.wire import messages
from reft.wire.inventory import JobSurvey, StoredHistory, lineages_from
from reft.wire.v1 import daemon_pb2 as pb

STORED_S = 120.0  # the daemon gives up on its storage earlier
LEFT_BEHIND = "left behind: the job went on from an earlier step"
GUARDED = "survives lost nodes"
UNITS = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


class StorageUnreadable(ReftError):
    """Storage can't be listed or read."""


@dataclass(frozen=True)
class HeldEntry:
    """One step that memory or storage holds.

    Attributes:
        where: "memory", "storage", or "damaged" for a checkpoint that can't be read.
        step, epoch: of the version; -1: not known.
        age_s: since the checkpoint was complete; None in memory.
        lineage: of the job on storage; empty: none.
        counts: whether a restart could go on from the step.
        note: words for a person.
    """

    where: str
    step: int
    epoch: int
    age_s: float | None = None
    lineage: str = ""
    counts: bool = True
    note: str = ""


def rows_of_job(address: str, job: str) -> list[HeldEntry]:
    """Returns what memory and storage hold of a job, the newest first.

    A row says so if one of both can't be listed, and the other has the job.

    Raises:
        NoSuchJob: neither has the job.
        ReftError: the daemon does not answer; or one has nothing, and the other can't be listed.
    """
    job_survey, trouble = None, None
    try:
        job_survey = survey(address, job)[0]
    except NoSuchJob:
        pass
    except DaemonUnavailable:
        raise
    except ReftError as error:  # the job's record on this node is damaged, for example
        trouble = error
    rows: list[HeldEntry] = []
    lineages: list[StoredLineage] = []
    try:
        reply: pb.StoredReply = ask(address, "Stored", pb.StoredRequest(job=job), STORED_S)
        rows = [row for each in reply.lineages for row in _stored_rows(each)]
        lineages = lineages_from(reply)
    except ConfigError:
        rows.append(HeldEntry("storage", -1, -1, counts=False, note="this daemon has no storage (--persist)"))
    except ReftError as error:
        if job_survey is None:
            raise trouble or error from error
        rows.append(HeldEntry("storage", -1, -1, counts=False, note=f"not listed: {error.message}"))
    if job_survey is not None:
        rows = _with_memory(job_survey, lineages, rows)
    if all(row.step < 0 for row in rows):
        raise trouble or NoSuchJob(
            f"neither memory nor storage holds job {job!r}.", "reft-cli status lists the jobs in memory"
        )
    if trouble is not None:
        rows.insert(0, HeldEntry("memory", -1, -1, counts=False, note=f"not listed: {trouble.message}"))
    return rows


def _with_memory(job_survey: JobSurvey, lineages: Sequence[StoredLineage], stored: list[HeldEntry]) -> list[HeldEntry]:
    """Returns the rows of memory and storage; last, what the job left behind in memory."""
    plan, manifest = job_survey.plan(()), job_survey.manifest
    ident = manifest.lineage if manifest is not None else ""
    # `recover --step` can go back to older ones, too, until their slots are needed.
    steps = {each for each in (plan.base, plan.guard, *job_survey.restorable()) if each is not None}
    held = sorted(steps, key=lambda version: (*version.order, version.epoch.ident), reverse=True)
    kept = set(held)
    lineage = next((each for each in lineages if each.ident == ident), None)
    if lineage is not None and newer_than_memory(job_survey.decision, lineage):
        with suppress(ReftError):  # two histories on storage: its rows say so
            history = StoredHistory(lineage.decisions, lineage.history(), manifest=manifest)
            kept &= set(replace(job_survey, storage=history).restorable())

    def note_of(version: Version) -> str:
        if version not in kept:
            return LEFT_BEHIND
        return GUARDED if version == plan.guard != plan.base else ""

    rows = [
        HeldEntry("memory", each.step, each.epoch.counter, None, ident, each in kept, note_of(each)) for each in held
    ]
    return [row for row in rows if row.counts] + stored + [row for row in rows if not row.counts]


def _stored_rows(stored: pb.StoredLineage) -> list[HeldEntry]:
    ages = {messages.version_from(each.version): each.age_s for each in stored.checkpoints}
    lineage = StoredLineage(stored.ident, tuple(map(messages.decision_from, stored.decisions)), tuple(ages))
    try:
        order, trouble = lineage.restorable(), ""
    except ReftError as error:
        order, trouble = [], error.message
    left_behind = trouble or LEFT_BEHIND

    def key(version: Version) -> tuple[bool, tuple[int, int]]:
        return version in order, version.order

    return [
        HeldEntry(
            "storage", each.step, each.epoch.counter, ages[each], stored.ident, each in order and not stored.has_ended,
            ("ended by reft-cli purge" if stored.has_ended else "") if each in order else left_behind,
        )
        for each in sorted(ages, key=key, reverse=True)
    ]  # fmt: skip


def rows_of_lineage(lineage: Mapping[str, Any]) -> list[HeldEntry]:
    """Returns the rows of a lineage in a document of `reft_daemon.persist.audit`."""
    left_behind = lineage["trouble"] or LEFT_BEHIND
    ended = "ended by reft-cli purge" if lineage["ended"] else ""
    return [
        HeldEntry(
            "storage", each["step"], each["epoch"], each["age_s"], lineage["lineage"], each["counts"] and not ended,
            ended if each["counts"] else left_behind,
        )
        for each in lineage["checkpoints"]
    ] + [
        HeldEntry("damaged", -1, -1, None, lineage["lineage"], False, f"{name}: {damage}")
        for name, damage in lineage["damaged"].items()
    ]  # fmt: skip


def root_of(text: str) -> str:
    """Returns a folder as a whole path, or the address of an object store, checked.

    Raises:
        ConfigError: the address has credentials, or is none.
    """
    return check_url(text) if is_url(text) else os.path.abspath(text)


def rows_of_folder(root: str, key_file: Path | None = None) -> dict[str, list[HeldEntry]]:
    """Returns job → what a folder or an object store holds of it.

    Raises:
        StorageUnreadable: it can't be listed.
    """
    (document,) = audit("list", root, key_file=key_file)
    return {
        each["job"]: [row for lineage in each["lineages"] for row in rows_of_lineage(lineage)]
        + ([HeldEntry("damaged", -1, -1, None, "", False, each["trouble"])] if each["trouble"] else [])
        for each in document["jobs"]
    }


def audit(verb: str, root: str, job: str = "", key_file: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yields the answers of the program that reads storage.

    Args:
        verb: of that program.
        root: see `root_of`.
        job: only this one; empty: all.
        key_file: the key of the checkpoints' MACs; None: MACs are not asked for.

    Raises:
        StorageUnreadable: storage can't be listed or read.
    """
    process = start_audit(verb, root, job, key_file=key_file)
    assert process.stdout is not None, "it is a pipe"
    try:
        for line in process.stdout:
            try:
                answer = json.loads(line)
            except ValueError as error:  # it was killed in the middle of a line, for lack of memory perhaps
                raise StorageUnreadable(
                    f"the program that reads {root} has ended in the middle of an answer.", "run the command again"
                ) from error
            if "error" in answer:
                raise StorageUnreadable(f"{root} can't be read: {answer['error']}", answer["hint"])
            yield answer
        if process.wait():
            raise StorageUnreadable(f"the program that reads {root} has ended with {process.returncode}.")
    finally:
        process.stdout.close()
        process.kill()


def start_audit(
    verb: str, root: str, job: str, *more: str, key_file: Path | None = None, stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts the program that reads storage; its output is a pipe.

    Args:
        verb, root, job, key_file: see `audit`.
        more: further arguments of the verb.
        stdin: see `subprocess`.
    """
    command = [sys.executable, "-m", "reft_daemon.persist.audit", verb, root]
    command += ["--job", job] if job else []
    command += ["--key-file", str(key_file.absolute())] if key_file else []
    # The path is this process's own: the program must be of the same reft.
    environment = child_environment(PYTHONPATH=os.pathsep.join(os.path.abspath(each) for each in sys.path if each))
    # In a session of its own: Ctrl-C is for this process, which ends that one without a traceback.
    return subprocess.Popen(
        [*command, *more], stdin=stdin, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )


def lines_of(job: str, rows: Sequence[HeldEntry]) -> list[str]:
    """Returns the rows as text."""
    lines = [f"job {job}"]
    for row in rows:
        step = f"step {row.step} (epoch {row.epoch})" if row.step >= 0 else ""
        age = "" if row.age_s is None else f"{_age(row.age_s)} ago"
        words = [f"  {row.where:8}", f"{step:24}", f"{age:14}", f"{row.lineage:18}", row.note]
        lines.append(" ".join(words).rstrip())
    return lines


def document(rows: Mapping[str, Sequence[HeldEntry]]) -> list[dict[str, Any]]:
    """Returns the rows of each job for `--json`."""
    return [{"job": job, "held": [asdict(row) for row in each]} for job, each in rows.items()]


def _age(seconds: float) -> str:
    size, unit = next((each for each in UNITS if seconds >= each[0]), UNITS[-1])
    return f"{seconds / size:.0f} {unit}"
