"""SIGKILL at each named point of a snapshot and of a restore, of one rank and of all: bit-equal to an undisturbed run."""

from __future__ import annotations

import pytest

from tests.support.daemons import DaemonProcess
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

CHUNK = {"REFT_CHUNK_BYTES": "4096"}  # so that the small model has several chunks
KILLED = -9
# What dies at step 5 of the first attach (epoch 1); the newest version that may then be restored.
SNAPSHOT_POINTS = {
    "snapshot.begin:kill:step=5:epoch=1": 4,
    "snapshot.chunk:kill:step=5:epoch=1": 4,
    "snapshot.chunk:kill:step=5:epoch=1:chunk=3": 4,
    "snapshot.chunk:kill:step=5:epoch=1:chunk=6": 4,
    "snapshot.landing:kill:step=5:epoch=1": 4,
    "snapshot.landed:kill:step=5:epoch=1": 5,
    "snapshot.sealed:kill:step=5:epoch=1": 5,
}


def spec(daemon: DaemonProcess, failpoints: str = "", **changes: object) -> Spec:
    # Steps of a millisecond outrun the round; each of the first is waited for, so that none is skipped.
    options = {"seal_at": [1, 2, 3, 4]}
    return Spec(daemon=daemon.address, failpoints=failpoints, environment=CHUNK, options=options, **changes)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, list[dict]]:
    """Results of runs that nobody disturbed, by number of ranks."""
    process = DaemonProcess()
    yield {world: run(spec(process, job=f"plain-{world}"), world) for world in (1, 2)}
    process.close()


@pytest.mark.parametrize("point", SNAPSHOT_POINTS)
def test_a_lone_trainer_killed_in_a_snapshot(daemon, undisturbed, point):
    assert Trainers(spec(daemon, point)).wait() == [KILLED]
    after = run(spec(daemon))
    assert after[0]["from"] == "memory"
    assert after[0]["began"] == SNAPSHOT_POINTS[point]
    assert_equal(after, undisturbed[1])


@pytest.mark.parametrize("ranks", ["one", "all"])
@pytest.mark.parametrize("point", SNAPSHOT_POINTS)
def test_ranks_killed_in_a_snapshot(daemon, undisturbed, point, ranks):
    failpoint = f"{point}:rank=1" if ranks == "one" else point
    assert KILLED in Trainers(spec(daemon, failpoint), world=2).wait()
    after = run(spec(daemon), world=2)
    assert [result["from"] for result in after] == ["memory", "memory"]
    assert after[0]["began"] == after[1]["began"] in (4, 5)
    assert_equal(after, undisturbed[2])


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("ranks", ["one", "all"])
def test_killed_in_mid_load(daemon, undisturbed, chunk, ranks):
    Trainers(spec(daemon, "snapshot.chunk:kill:step=5:epoch=1"), world=2).wait()
    which = ":rank=0" if ranks == "one" else ""
    assert KILLED in Trainers(spec(daemon, f"restore.chunk:kill:epoch=2:chunk={chunk}{which}"), world=2).wait()
    after = run(spec(daemon), world=2)
    assert after[0]["began"] == after[1]["began"] == 4
    assert_equal(after, undisturbed[2])
