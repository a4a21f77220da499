"""`status` says when a job's last trainer ended, and how long the slots stay."""

from __future__ import annotations

import pytest

from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.server.status_merge import merge_end
from tests.cli.test_main import make_job
from tests.support.daemons import DaemonProcess, until
from tests.support.trainers import Spec, Trainers


@pytest.mark.parametrize(
    ("ours", "theirs", "merged"),
    [(9.0, 3.0, 3.0), (3.0, 9.0, 3.0), (None, 4.0, 4.0), (4.0, None, 4.0), (None, None, None)],
)
def test_the_latest_end_of_all_daemons_counts(ours, theirs, merged):
    status = pb.JobStatus(ended_s=ours)
    merge_end(status, pb.JobStatus(ended_s=theirs))
    assert (status.ended_s if status.HasField("ended_s") else None) == merged


def test_the_end_and_the_time_that_is_left_are_told_once_no_trainer_lives():
    daemon = DaemonProcess("--ttl-failed", "500")
    try:
        make_job(daemon, "new")
        new = daemon.status("new")
        assert not new.HasField("ended_s") and new.kept_s == pytest.approx(500, abs=60), "no trainer was there"
        trainers = Trainers(Spec(daemon.address, job="run1", options={"seal_at": [4], "pause_at": [4]}))
        trainers.wait_for(4)
        training = daemon.status("run1")
        assert not training.HasField("ended_s") and not training.HasField("kept_s")
        trainers.kill()
        until(lambda: daemon.status("run1").HasField("ended_s"), what="the end of the trainer")
        failed = daemon.status("run1")
        assert failed.ended_s < 60 and failed.kept_s == pytest.approx(500 - failed.ended_s, abs=1)
        daemon.kill()
        daemon.start()
        adopted = daemon.status("run1")
        assert not adopted.HasField("ended_s") and adopted.kept_s > 440, "this daemon has not seen the end"
    finally:
        daemon.close()
