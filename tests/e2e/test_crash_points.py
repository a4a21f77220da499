"""Tests SIGKILL at each failpoint of a snapshot and of a restore.

It kills one rank or all ranks. The restarted run must equal an undisturbed run bit for bit.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

CHUNK = {"REFT_CHUNK_BYTES": "4096"}  # so that the small model has several chunks
KILLED = -9
# Failpoint at step 5 of the first attach (epoch 1) → the newest step that may be restored then.
SNAPSHOT_POINTS = {
    "snapshot.begin:kill:step=5:epoch=1": 4,
    "snapshot.chunk:kill:step=5:epoch=1": 4,
    "snapshot.chunk:kill:step=5:epoch=1:chunk=3": 4,
    "snapshot.chunk:kill:step=5:epoch=1:chunk=6": 4,
    "snapshot.landing:kill:step=5:epoch=1": 4,
    "snapshot.landed:kill:step=5:epoch=1": 5,
    "snapshot.sealed:kill:step=5:epoch=1": 5,
}


def spec(daemon: DaemonProcess, job: str, failpoints: str = "") -> Spec:
    # Steps take a millisecond, and the round is slower. Sealing the first steps keeps them from
    # being skipped.
    options = {"seal_at": [1, 2, 3, 4]}
    return Spec(daemon=daemon.address, job=job, failpoints=failpoints, environment=CHUNK, options=options)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """Yields one daemon for all tests: no test kills it, and each test has its own job."""
    process = DaemonProcess()
    yield process
    process.close()


@pytest.fixture
def make(daemon: DaemonProcess) -> Iterator[Callable[..., Spec]]:
    """Yields a function that makes specs of this test's job."""
    job = f"job-{uuid.uuid4().hex[:12]}"
    yield partial(spec, daemon, job)
    daemon.call("Purge", pb.PurgeRequest(job=job))


@pytest.fixture(scope="module")
def undisturbed(daemon: DaemonProcess) -> dict[int, list[dict]]:
    """Returns the results of undisturbed runs, by number of ranks."""
    return {world: run(spec(daemon, f"plain-{world}"), world) for world in (1, 2)}


@pytest.mark.parametrize("point", SNAPSHOT_POINTS)
def test_a_lone_trainer_killed_in_a_snapshot(make, undisturbed, point):
    assert Trainers(make(point)).wait() == [KILLED]
    after = run(make())
    assert after[0]["from"] == "memory"
    assert after[0]["began"] == SNAPSHOT_POINTS[point]
    assert_equal(after, undisturbed[1])


@pytest.mark.parametrize("ranks", ["one", "all"])
@pytest.mark.parametrize("point", SNAPSHOT_POINTS)
def test_ranks_killed_in_a_snapshot(make, undisturbed, point, ranks):
    failpoint = f"{point}:rank=1" if ranks == "one" else point
    assert KILLED in Trainers(make(failpoint), world=2).wait()
    after = run(make(), world=2)
    assert [result["from"] for result in after] == ["memory", "memory"]
    assert after[0]["began"] == after[1]["began"] in (4, 5)
    assert_equal(after, undisturbed[2])


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("ranks", ["one", "all"])
def test_ranks_killed_during_a_restore(make, undisturbed, chunk, ranks):
    Trainers(make("snapshot.chunk:kill:step=5:epoch=1"), world=2).wait()
    rank_filter = ":rank=0" if ranks == "one" else ""
    assert KILLED in Trainers(make(f"restore.chunk:kill:epoch=2:chunk={chunk}{rank_filter}"), world=2).wait()
    after = run(make(), world=2)
    assert after[0]["began"] == after[1]["began"] == 4
    assert_equal(after, undisturbed[2])
