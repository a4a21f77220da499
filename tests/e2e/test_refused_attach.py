"""A refused attach changes nothing: the job stays failed, as it was, and can be restored."""

from __future__ import annotations

import json

import grpc
import pytest
from click.testing import CliRunner

from reft.cli.main import main
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess, until
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

OPTIONS = {"seal_at": [4, 5]}


def status(daemon: DaemonProcess, job: str = "job") -> tuple[int, dict]:
    """Returns the exit code of `status --check`, and the job's document."""
    command = ["status", "--check", "--json", "--job", job]
    done = CliRunner().invoke(main, command, env={"REFT_DAEMON": daemon.address}, catch_exceptions=False)
    return done.exit_code, json.loads(done.stdout)["jobs"][0]


def described(document: dict) -> dict:
    """Returns the parts of a job's document that a refused attach must not change."""
    ranks = [
        {key: rank[key] for key in ("rank", "node", "state", "sealed_step", "bytes")} for rank in document["ranks"]
    ]
    same = ("script", "world", "epoch", "health", "reason", "whole_step", "held_bytes")
    return {**{key: document[key] for key in same}, "ranks": ranks}


def is_forgotten(daemon: DaemonProcess, job: str) -> bool:
    try:
        daemon.status(job)
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.NOT_FOUND
    return False


@pytest.mark.parametrize(
    ("world", "options", "text"),
    [
        (1, {"width": 80}, "LayoutChanged"),  # refused in the restore, after the decision
        (2, {"apart": True, "bad_rank": 1}, "UnsupportedState"),  # before it
    ],
)
def test_a_failed_job_is_as_it_was_after_a_refused_attach(world, options, text):
    daemon = DaemonProcess("--ttl", "0.3", "--ttl-failed", "600")
    try:
        plain = run(Spec(daemon.address, job="plain", options=OPTIONS), 2)
        killed = Trainers(Spec(daemon.address, options={**OPTIONS, "die_at": 5}), 2)
        assert -9 in killed.wait(), killed.errors()
        until(lambda: not any(rank.alive for rank in daemon.status("job").ranks), what="the trainers' end")
        code, before = status(daemon)
        assert code == 3 and before["whole_step"] >= 4
        wrong = Trainers(Spec(daemon.address, options={**OPTIONS, **options}), world)
        assert 1 in wrong.wait() and text in wrong.errors(), wrong.errors()
        code, after = status(daemon)
        assert code == 3 and described(after) == described(before)
        run(Spec(daemon.address, job="short", options=OPTIONS))
        until(lambda: is_forgotten(daemon, "short"), what="the end of --ttl")
        restored = run(Spec(daemon.address, options=OPTIONS), 2)
        assert [each["began"] for each in restored] == [before["whole_step"]] * 2
        assert_equal(restored, plain)
    finally:
        daemon.close()


def test_a_refused_first_attach_leaves_nothing():
    """Not even a job that `status` shows as failed."""
    daemon = DaemonProcess("--memory", "100KiB")
    try:
        refused = Trainers(Spec(daemon.address))
        assert refused.wait() == [1] and "NoRoom" in refused.errors()
        assert not daemon.call("Status", pb.StatusRequest()).jobs
    finally:
        daemon.close()
