"""Tests which sections of lost ranks are replayed: from older copies and the gradients since."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from dataclasses import replace

import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.core.recovery import recovery
from reft.core.recovery.recovery import HeldRecord, RecoveryPlan, describe
from tests.core.recovery.test_recovery import (
    EPOCHS,
    FRESH,
    LANDED,
    ONE,
    OWN,
    SEALED,
    THREE,
    TWIN,
    TWO,
    WRITING,
    at,
    guarded,
    lacking,
    parity,
    ring,
)

P, W = 3, 6  # protected, and whole
MARKS = range(P + 1, W + 1)


def records(rank: int, marks: Collection[int] = MARKS, epoch: Epoch = ONE) -> list[HeldRecord]:
    return [HeldRecord(f"n{rank}", rank, f"record-{rank}.slot-{m % 4}", SEALED, at(m, epoch)) for m in marks]


class CopiedJob:
    """What is held of a job that lost nodes: steps P and W, copies of P, and records since.

    Rank r is on node r, the node before it has the copy of its section, the one behind its capsule.
    """

    def __init__(self, D: int, lost: Collection[int], f: int = 1) -> None:
        self.placement = guarded(D, f, "aor")
        old, new = (ring(self.placement, f, step, lost, OWN) for step in (P, W))
        self.slots = [*old[0], *(replace(slot, slot=f"{slot.slot}-new") for slot in new[0])]
        self.old_capsules, self.capsules = old[1], new[1]
        self.parity = parity(self.placement, P, lost=lost)
        self.records = [each for rank in range(D) if rank not in lost for each in records(rank)]

    def plan(
        self, erased: Collection[tuple[str, str, Version]] = (), decision: Decision | None = FRESH
    ) -> RecoveryPlan:
        known = dict.fromkeys(EPOCHS, self.placement)
        capsules = [*self.old_capsules, *self.capsules]
        return recovery.plan(self.slots, capsules, known, decision, erased, self.parity, self.records)


@pytest.mark.parametrize("D", range(2, 6))
def test_a_lost_section_is_replayed_at_the_newest_whole_step(D):
    for lost in range(D):
        job = CopiedJob(D, [lost])
        found, buddy = job.plan(), (lost - 1) % D
        (way,) = found.replays.values()
        assert found.base == at(W) and found.partial == () and found.parity == {}
        assert found.sections == (lost,) == (way.rank,) and way.records == tuple(records(buddy))
        assert (way.node, way.copies.rank, way.version) == (f"n{buddy}", buddy, at(P))
        assert found.source(2 * D + lost, D) == way
        random.Random(lost).shuffle(job.records)
        assert job.plan() == found
        job.records = []
        assert job.plan().base == at(P), "daemons replay nothing"


def spoil(mark: int, **changes: object):
    def spoil_record(job: CopiedJob) -> None:
        job.records = [replace(each, **changes) if each.version == at(mark) else each for each in job.records]

    return spoil_record


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(
    "changes", [{"state": WRITING}, {"state": LANDED}, {"version": at(9)}, {"version": at(5, TWIN)}, {"rank": 1}]
)
def test_without_the_record_of_each_mark_the_protected_step_is_taken(mark, changes):
    job = CopiedJob(3, [1])
    spoil(mark, **changes)(job)
    found = job.plan()
    assert found.base == at(P) and found.replays == {} and found.sections == (1,)
    assert found.partial == (lacking(W, 1, kept=[1]),)


def test_a_replay_needs_both_capsules_and_the_copies():
    def bases_without(name: str, *kept: object) -> Version | None:
        job = CopiedJob(3, [1])
        setattr(job, name, [each for each in getattr(job, name) if each not in kept and each.rank not in (0, 1)])
        return job.plan().base

    assert bases_without("old_capsules") is None, "nor can P be had without its capsule"
    assert bases_without("capsules") == at(P)
    assert bases_without("parity") is None
    job = CopiedJob(3, [1])
    job.parity = [replace(each, layout=b"other lane") for each in job.parity]
    assert job.plan().base is None


def test_buddy_and_owner_lost_at_once_are_a_named_loss():
    job = CopiedJob(4, [1, 0])
    found = job.plan()
    assert found.base is None and [each.version for each in found.partial] == [at(W), at(P)]
    assert "no node at hand keeps a complete copy" in " ".join(describe(found.partial[0], job.placement, {}))


def test_copies_of_the_newest_step_are_read_not_replayed():
    job = CopiedJob(3, [1])
    job.parity += [replace(each, slot=f"{each.slot}-new", version=at(W)) for each in job.parity]
    found = job.plan()
    assert found.base == at(W) and found.replays == {} and found.parity


def test_a_refused_replay_is_given_up_for_all_steps():
    """Of f = 2 holders the other one is asked next."""
    job = CopiedJob(5, [2], f=2)
    for step in (W - 1, W - 2):
        job.slots += [replace(slot, slot=f"{slot.slot}-{step}", version=at(step)) for slot in job.slots[:4]]
        job.capsules += [replace(capsule, version=at(step)) for capsule in job.old_capsules]
    erased, nodes = set(), []
    for _ in range(2):
        found = job.plan(erased)
        assert found.base == at(W)
        way = found.replays[2]
        nodes.append(way.node)
        erased.add((way.node, way.slot, way.version))
    found = job.plan(erased)
    assert nodes == ["n1", "n0"] and found.base == at(P) and found.parity and found.sections == (2,)


def test_records_lead_from_copies_of_their_epoch_or_of_its_base():
    def base(copies: Epoch, decision: Decision) -> Version | None:
        job = CopiedJob(3, [1])
        job.slots, job.capsules = [], []
        for slots, capsules in [ring(job.placement, 1, W, [1], OWN)]:
            job.slots += [replace(slot, version=at(W, TWO)) for slot in slots]
            job.capsules += [replace(capsule, version=at(W, TWO)) for capsule in capsules]
        job.old_capsules = [replace(each, version=at(P, copies)) for each in job.old_capsules]
        job.parity = [replace(each, version=at(P, copies)) for each in job.parity]
        job.records = [each for rank in (0, 2) for each in records(rank, epoch=TWO)]
        return job.plan(decision=decision).base

    assert base(ONE, Decision(TWO, at(P))) == base(TWO, Decision(TWO, at(1))) == at(W, TWO)
    assert base(ONE, Decision(TWO, at(P + 1))) is None
    assert base(ONE, Decision(TWO, None)) is None
    assert base(ONE, Decision(THREE, at(W, TWO))) is None, "nobody knows any more where epoch 2 began"
    assert base(TWO, Decision(THREE, at(W, TWO))) == at(W, TWO), "before a step of epoch 3 is whole"


def test_each_record_more_gives_no_older_base():
    for count in range(3):
        for without in itertools.combinations(MARKS, count):
            job = CopiedJob(3, [1])
            job.records = [each for each in job.records if each.version.step not in without]
            assert job.plan().base == (at(W) if not without else at(P))
