"""Tests how well a job is protected, in one word, from what daemons hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from reft.core.coding.placement import Placement, capsule_holders, place
from reft.core.commit.decision import Decision
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.core.status.protection import (
    NO_COUNTS,
    Protection,
    ProtectionGroup,
    ProtectionWord,
    groups,
    protection,
    protection_counts,
)
from tests.core.coding import test_placement as places

EPOCH = Epoch(1, b"e" * 16)
DECISION = Decision(EPOCH, None)
SIZE = 3 << 18


def placed(domains: int, f: int | None, scheme: str = "aec") -> Placement:
    layout = pack([Leaf("w", "uint8", (SIZE,), (1,), SIZE, False, (SIZE,), (0,))])
    division = divide({layout.digest: layout}, [layout.digest] * domains)
    return place(division, list(range(domains)), scheme, f, 64)  # type: ignore[arg-type]


def holdings(domains: int, f: int, step: int, ranks: set[int]) -> tuple[list[HeldSlot], list[HeldCapsule]]:
    """Returns slots and capsules of a step: rank r of node r has sealed, capsules lie as placed."""
    version = Version(EPOCH, step)
    held = [HeldSlot(f"n{r}", r, f"rank-{r}.slot-{step % 3}", SlotState.SEALED, version) for r in sorted(ranks)]
    holders = {r: capsule_holders(r, list(range(domains)), f) for r in ranks}
    return held, [HeldCapsule(f"n{node}", r, version, 0) for r, nodes in holders.items() for node in nodes]


def judged(
    placement: Placement, held: list[HeldSlot], copies: list[HeldCapsule], lost: set[str] = frozenset()
) -> Protection:
    domains = {f"n{r}": f"node n{r}" for r in range(len(placement.domains)) if f"n{r}" not in lost}
    held = [slot for slot in held if slot.node not in lost]
    copies = [copy for copy in copies if copy.node not in lost]
    protected = protection(held, copies, {EPOCH: placement}, DECISION, domains)
    assert protected is not None
    return protected[0]


def test_intact():
    protected = judged(placed(4, 1), *holdings(4, 1, 7, set(range(4))))
    assert (protected.word, protected.tolerated, protected.meant, protected.fatal) == (
        ProtectionWord.PROTECTED,
        1,
        1,
        (),
    )
    assert protected.version == Version(EPOCH, 7) and protected.nodes == 4 and not protected.survives_pairs
    assert protected.groups == (ProtectionGroup("aec", 4, 3, 1, SIZE, 1, "replicas"),) and protected.exposed == ()


def test_after_a_loss_less_survives():
    protected = judged(placed(4, 1), *holdings(4, 1, 7, set(range(4))), lost={"n2"})
    assert (protected.word, protected.tolerated) == (ProtectionWord.DEGRADED, 0) and len(protected.fatal) == 3
    six = judged(placed(6, 2), *holdings(6, 2, 7, set(range(6))), lost={"n2"})
    assert (six.word, six.tolerated, six.fatal, six.survives_pairs) == (ProtectionWord.DEGRADED, 1, (), False)


def test_pairs_and_domains_are_named():
    placement = placed(4, 1)
    racked = {f"n{i}": f"rack{i // 2}" for i in range(4)}
    protected = judged(placement, *holdings(4, 1, 7, set(range(4))))
    assert protected.fatal_pairs == tuple(itertools.combinations(("n0", "n1", "n2", "n3"), 2))
    assert (protected.domains, protected.fatal_domains) == (4, ())
    held, copies = holdings(4, 1, 7, set(range(4)))
    racks = protection(held, copies, {EPOCH: placement}, DECISION, racked)
    assert racks is not None and (racks[0].domains, racks[0].fatal_domains) == (2, ("rack0", "rack1"))
    lost = judged(placed(6, 2), *holdings(6, 2, 7, set(range(6))), lost={"n2"})
    assert lost.fatal_pairs is not None and all("n2" not in pair for pair in lost.fatal_pairs)
    gone = judged(placement, *holdings(4, 1, 7, set(range(4))), lost={"n2"})
    assert gone.fatal_pairs == (), "each of them is fatal alone"


def test_one_loss_too_many():
    protected = judged(placed(4, 1), *holdings(4, 1, 7, set(range(4))), lost={"n2", "n3"})
    assert (protected.word, protected.tolerated, protected.version) == (ProtectionWord.DEGRADED, -1, None)


def test_a_step_that_is_being_sealed_does_not_count():
    """The step could be restored, but not after a lost node. So the step before it counts."""
    old, new = holdings(4, 1, 7, set(range(4))), holdings(4, 1, 8, {0, 1, 2})
    copies = [HeldCapsule("n0", 3, Version(EPOCH, 8), 0)]
    protected = judged(placed(4, 1), old[0] + new[0], old[1] + new[1] + copies)
    assert protected.version == Version(EPOCH, 7) and protected.word is ProtectionWord.PROTECTED


@pytest.mark.parametrize(("domains", "f", "scheme"), [(1, None, "aec"), (4, 0, "aec")])
def test_a_job_without_protection_is_unprotected(domains, f, scheme):
    protected = judged(placed(domains, f, scheme), *holdings(domains, 0, 7, set(range(domains))))
    assert protected.word is ProtectionWord.UNPROTECTED and protected.meant == 0
    assert protected.exposed


def test_one_node_alone_is_local():
    alone = judged(placed(1, None), *holdings(1, 0, 7, {0}))
    assert replace(alone, members=1).word is ProtectionWord.LOCAL
    assert replace(alone, members=2).word is ProtectionWord.UNPROTECTED, "two nodes of one rack"
    assert replace(alone, members=1, version=None).word is ProtectionWord.DEGRADED, "nothing is held"


def test_without_a_placement_protection_is_unknown():
    held, copies = holdings(2, 1, 7, {0, 1})
    assert protection(held, copies, {}, DECISION, {}) is None
    assert protection(held, copies, {}, None, {}) is None


@pytest.mark.parametrize(
    ("placement", "scheme", "reason"),
    [
        (placed(4, 1), "aec", "replicas"),
        (placed(2, 1), "arc", "replicas"),
        (placed(4, 1, "arc"), "arc", "settings"),
        (placed(4, 0), "none", "settings"),
        (placed(4, 1, "none"), "none", "settings"),
        (places.placed(500, [2]), "none", "one domain"),
        (places.placed(500, [1] * 8, tolerate=1), "arc", "small replicas"),
    ],
)
def test_each_group_says_why_it_is_kept_so(placement, scheme, reason):
    assert [(group.scheme, group.reason) for group in groups(placement)] == [(scheme, reason)]


def test_the_counts_of_a_job_that_exchanges():
    """Two ranks share node 0, so rank 1 or rank 0 has no partner."""
    placement = places.sharded([9 << 20, 1 << 20, 9 << 20], [0, 0, 1])
    (lane,) = placement.guard_lanes
    assert lane.members == (0, 2)
    counts = protection_counts(placement, 0)
    assert counts == {
        "aec_bytes": 0, "arc_bytes": 0, "exchange_bytes": 18 << 20, "aor_bytes": 0, "none_bytes": 1 << 20,
        "turn_bytes": 9 << 20, "parity_bytes": 18 << 20, "extra_slot_bytes": placement.rank_placement(0).data_bytes,
    }  # fmt: skip
    without = protection_counts(placement, 1)
    assert without == counts | {"turn_bytes": 0, "parity_bytes": 0, "extra_slot_bytes": 0}


def test_the_counts_of_a_job_that_exchanges_nothing():
    assert protection_counts(placed(4, 1), 2) == NO_COUNTS | {"aec_bytes": SIZE}
    assert protection_counts(places.sharded([9, 9], [0, 1], "none"), 0)["exchange_bytes"] == 0
