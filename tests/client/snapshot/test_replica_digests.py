"""Digests of replicas: equal for equal bytes only, and windows cover every byte."""

from __future__ import annotations

import numpy as np
import pytest

from reft.client.restore.remote_slots import RemoteSlots
from reft.client.snapshot.replica_check import (
    WINDOW_BYTES,
    digest_of,
    earlier_digests,
    sample_sums,
    samples,
)
from reft.client.snapshot.save_plan import CellRuns, WriteItem
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.recovery import RecoveryPlan
from reft.core.recovery.replica_samples import are_mismatched, capsule_digests
from reft.errors import RestoreError
from reft.wire import capsule_format as capsule
from reft.wire.v1 import daemon_pb2 as pb

A, B = 3 * WINDOW_BYTES + 100, 77


def cell() -> CellRuns:
    return CellRuns(5, A + 128 + B, (WriteItem(0, 0, A, 0), WriteItem(1, 0, B, A + 128)))


def bytes_of(seed: int) -> list[np.ndarray]:
    chance = np.random.default_rng(seed)
    return [chance.integers(0, 256, size, dtype=np.uint8) for size in (A, B)]


def digests(sources: list[np.ndarray], step: int, in_whole: bool, runs: CellRuns | None = None) -> list[int]:
    return [digest_of(sample, sample_sums(sample, sources)) for sample in samples([runs or cell()], step, in_whole)]


def test_equal_bytes_agree_and_a_bit_differs():
    one, other = bytes_of(1), bytes_of(1)
    assert digests(one, 3, True) == digests(other, 3, True)
    other[1][-1] ^= 1
    assert digests(one, 3, True) != digests(other, 3, True)


@pytest.mark.parametrize("at", [0, WINDOW_BYTES - 1, WINDOW_BYTES, A - 1])
def test_windows_find_each_lasting_difference(at):
    one, other = bytes_of(1), bytes_of(1)
    other[0][at] ^= 1
    assert [digests(one, step, False) != digests(other, step, False) for step in range(4)].count(True) == 1


def test_a_missing_leaf_is_a_difference():
    sources = bytes_of(1)
    sources[1][:] = 0
    without = cell()._replace(runs=cell().runs[:1])
    assert digests(sources, 0, True) != digests(sources, 0, True, without)


def test_a_small_cell_is_always_compared_as_a_whole():
    small = CellRuns(0, B, (WriteItem(1, 0, B, 0),))
    (sample,) = samples([small], 9, in_whole=False)
    assert sample.runs == small.runs


def test_capsules_with_different_cell_digests_are_found():
    one, other, third = (capsule_digests(capsule.decode(capsule.encode({"step": 3, "compared": cells}))) for cells in (
        {0: 1 << 63, 5: 7}, {0: 1 << 63}, {5: 8},
    ))  # fmt: skip
    assert not are_mismatched([one, other, one]) and not are_mismatched([other, third])
    assert are_mismatched([one, other, third])
    assert not are_mismatched([one, capsule_digests({})]), "an older capsule has no digests"


def test_capsules_of_earlier_steps_are_compared_too():
    """Two ranks have a capsule of step 2, one rank of step 1.

    The capsule of step 0 is unreadable.
    """

    class Daemons(RemoteSlots):
        def __init__(self):
            pass

        def capsule(self, node, rank, version):
            if not version.step:
                raise RestoreError("silent")
            return pb.CapsuleRecord(capsule=capsule.encode({"step": version.step, "compared": {7: rank}}))

    versions = [Version(Epoch(1, b"e" * 16), step) for step in range(3)]
    plan = RecoveryPlan(None, earlier={0: tuple((each, "n0") for each in versions), 1: ((versions[2], "n1"),)})
    samples = [earlier_digests(Daemons().earlier(plan, rank)) for rank in range(3)]
    assert samples == [[[1, 7, 0], [2, 7, 0]], [[2, 7, 1]], []]
    assert are_mismatched(samples) and not are_mismatched([samples[0][:1], samples[1]]), "steps are not mixed up"
