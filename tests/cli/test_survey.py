"""Surveys of several jobs: a silent node costs its time once, and not once a job."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from reft.cli import survey
from reft.errors import AttachError
from reft.wire.v1 import daemon_pb2 as pb

JOBS = pb.StatusReply(jobs=[pb.JobStatus(job=name) for name in ("a", "b", "c")])


def test_jobs_are_surveyed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    all_begun = threading.Barrier(len(JOBS.jobs))

    def steady(address: str, status: pb.JobStatus, mute: dict[tuple[str, ...], str]) -> SimpleNamespace:
        all_begun.wait(timeout=60)
        if status.job == "b":
            raise AttachError("it was freed meanwhile")
        return SimpleNamespace(placements={}, job=status.job)

    monkeypatch.setattr(survey, "steady", steady)
    found = survey.surveys("unix:/d", JOBS)
    assert {job: each.job for job, each in found.items()} == {"a": "a", "c": "c"}
