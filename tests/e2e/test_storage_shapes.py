"""More nodes are lost than parity replaces, and other numbers of ranks go on from storage.

The state equals, bit for bit, the state that torch's own checkpoint makes of the same change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_reshape import Job
from tests.e2e.test_storage import STEPS, check_equal, trained, undisturbed
from tests.support.daemons import Site, vanish
from tests.support.stored import persist
from tests.support.trainers import Spec, run


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    folder = tmp_path / "storage"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind", ["fsdp2", "zero1", pytest.param("ddp", marks=pytest.mark.slow)])
def test_four_ranks_become_two_and_four_again(site: Site, storage: Path, tmp_path: Path, kind: str) -> None:
    """All memory is gone before each change; torch's checkpoint of the shape before is compared."""
    job, flags = Job(tmp_path), ("--persist", str(storage))
    nodes = site.add(4, *flags)
    job.run(kind, nodes)
    for count in (2, 4):
        step = persist(storage, nodes).step
        vanish(*nodes)
        nodes = site.add(count, *flags)
        assert {each["from"] for each in job.run(kind, nodes)} == {"storage"}
        assert f"GOES ON FROM STORAGE: step {step} " in job.log and f"resharded for {count} ranks" in job.log


@pytest.mark.parametrize("own", [False, True], ids=["replicas", "state with one holder"])
def test_one_more_node_is_lost_than_parity_replaces(site: Site, storage: Path, own: bool) -> None:
    """Two of four nodes are lost, with their ranks, while the second checkpoint is incomplete.

    The log names the step that memory had, and the ranks whose bytes are lost.
    """
    nodes, (step, newest) = trained(site, storage, 4, 4, 8, own=own)
    (manifest,) = storage.glob(f"job/*/e*-s{newest}/MANIFEST.json")
    manifest.unlink()
    vanish(*nodes[1:3])
    nodes[1:3] = site.add(2, "--persist", str(storage))
    addresses = [node.address for node in nodes]
    results = run(Spec(addresses[0], steps=STEPS, options={"own": own}), 4, addresses)
    check_equal(results, undisturbed(4, own=own), step)
    said = results[0]["said"]
    assert f"GOES ON FROM STORAGE: step {step} (epoch 1)" in said
    assert f"no version is whole now: step {newest} (epoch 1): no sealed slot of ranks 1-2" in said
    assert own or "2 of 4 slots are gone, with more than 1 of the 4 shards of a stripe" in said
