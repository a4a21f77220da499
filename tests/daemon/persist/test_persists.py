"""Checkpoints of a job on two real daemons: when they are written, and what may fail meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import Code, Trainer, refused
from tests.support.persisted import LINEAGE, PersistedJob, persister_of, persisters


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "storage"


def two_nodes(start, trainer: Trainer, root: Path, *flags: str, **facts: object) -> PersistedJob:
    daemons = [start("--listen", "127.0.0.1:0", "--persist", str(root), *flags) for _ in range(2)]
    return PersistedJob(daemons, trainer.pid, root, **facts)


def test_a_request_writes_the_newest_whole_step_from_any_node(start, trainer, root):
    job = two_nodes(start, trainer, root).begin()
    with refused(Code.FAILED_PRECONDITION, "no step of job job is whole yet"):
        job.ask()
    job.seal(1, 2)
    assert job.persist(node=1).done
    job.check(2)
    assert [each.epoch.counter for each in job.store.decisions(LINEAGE)] == [1]
    status = until(lambda: (s := job.status()).step == -1 and s)
    assert (status.persisted, status.trouble) == (2, "") and status.nbytes > 2 * job.nbytes
    assert job.persist().done and job.folders(2), "it is there already"
    assert not job.report(0, {}).pins.HasField("persist")
    manifest = job.store.checkpoints(LINEAGE)[0].manifest
    assert not pb.Manifest.FromString(manifest.job_manifest).token
