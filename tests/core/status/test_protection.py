"""How well a job is protected, in one word, by what daemons hold."""

from __future__ import annotations

import itertools

import pytest

from reft.core.coding.placement import Placement, capsule_holders, place
from reft.core.commit.decision import Decision
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.core.status.protection import Protection, ProtectionGroup, ProtectionWord, protection

EPOCH = Epoch(1, b"e" * 16)
DECISION = Decision(EPOCH, None)
SIZE = 3 << 18


def placed(domains: int, f: int | None, scheme: str = "aec") -> Placement:
    layout = pack([Leaf("w", "uint8", (SIZE,), (1,), SIZE, False, (SIZE,), (0,))])
    division = divide({layout.digest: layout}, [layout.digest] * domains)
    return place(division, list(range(domains)), scheme, f, 64)  # type: ignore[arg-type]


def holdings(domains: int, f: int, step: int, ranks: set[int]) -> tuple[list[HeldSlot], list[HeldCapsule]]:
    """Rank r of node r has sealed a step, and its capsules lie where they should."""
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
    found = protection(held, copies, {EPOCH: placement}, DECISION, domains)
    assert found is not None
    return found[0]


def test_intact():
    found = judged(placed(4, 1), *holdings(4, 1, 7, set(range(4))))
    assert (found.word, found.tolerated, found.meant, found.fatal) == (ProtectionWord.PROTECTED, 1, 1, ())
    assert found.version == Version(EPOCH, 7) and found.nodes == 4 and not found.survives_pairs
    assert found.groups == (ProtectionGroup("aec", 4, 3, 1, SIZE, 1),) and found.exposed == ()


def test_after_a_loss_less_survives():
    found = judged(placed(4, 1), *holdings(4, 1, 7, set(range(4))), lost={"n2"})
    assert (found.word, found.tolerated) == (ProtectionWord.DEGRADED, 0) and len(found.fatal) == 3
    six = judged(placed(6, 2), *holdings(6, 2, 7, set(range(6))), lost={"n2"})
    assert (six.word, six.tolerated, six.fatal, six.survives_pairs) == (ProtectionWord.DEGRADED, 1, (), False)


def test_pairs_and_domains_are_named():
    placement = placed(4, 1)
    racked = {f"n{i}": f"rack{i // 2}" for i in range(4)}
    found = judged(placement, *holdings(4, 1, 7, set(range(4))))
    assert found.fatal_pairs == tuple(itertools.combinations(("n0", "n1", "n2", "n3"), 2))
    assert (found.domains, found.fatal_domains) == (4, ())
    held, copies = holdings(4, 1, 7, set(range(4)))
    racks = protection(held, copies, {EPOCH: placement}, DECISION, racked)
    assert racks is not None and (racks[0].domains, racks[0].fatal_domains) == (2, ("rack0", "rack1"))
    lost = judged(placed(6, 2), *holdings(6, 2, 7, set(range(6))), lost={"n2"})
    assert lost.fatal_pairs is not None and all("n2" not in pair for pair in lost.fatal_pairs)
    gone = judged(placement, *holdings(4, 1, 7, set(range(4))), lost={"n2"})
    assert gone.fatal_pairs == (), "each of them is fatal alone"


def test_one_more_than_may_be_lost():
    found = judged(placed(4, 1), *holdings(4, 1, 7, set(range(4))), lost={"n2", "n3"})
    assert (found.word, found.tolerated, found.version) == (ProtectionWord.DEGRADED, -1, None)


def test_a_step_that_is_being_sealed_is_no_loss():
    """It could be restored already, but would not survive a node: the step before it is what is protected."""
    old, new = holdings(4, 1, 7, set(range(4))), holdings(4, 1, 8, {0, 1, 2})
    copies = [HeldCapsule("n0", 3, Version(EPOCH, 8), 0)]
    found = judged(placed(4, 1), old[0] + new[0], old[1] + new[1] + copies)
    assert found.version == Version(EPOCH, 7) and found.word is ProtectionWord.PROTECTED


@pytest.mark.parametrize(("domains", "f", "scheme"), [(1, None, "aec"), (4, 0, "aec")])
def test_what_was_never_protected_is_said_so(domains, f, scheme):
    found = judged(placed(domains, f, scheme), *holdings(domains, 0, 7, set(range(domains))))
    assert found.word is ProtectionWord.UNPROTECTED if domains > 1 else found.meant == 0
    assert found.exposed


def test_without_a_placement_nothing_is_said():
    held, copies = holdings(2, 1, 7, {0, 1})
    assert protection(held, copies, {}, DECISION, {}) is None
    assert protection(held, copies, {}, None, {}) is None
