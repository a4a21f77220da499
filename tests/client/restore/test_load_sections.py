"""Every tolerated loss of unreplicated leaves is decoded from guard lanes; damage is found."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from reft.client.restore.executor import LoadReport
from reft.client.restore.opened import OldRank, open_old_rank
from reft.client.restore.restore import Restore, damaged_at_load
from reft.client.state import serialization
from reft.core.commit.slots import SlotState
from reft.core.recovery.plan import TransferSizes
from reft.core.recovery.recovery import HeldParity, RecoveryPlan, SectionReplay
from reft.core.recovery.stripes import replay_number
from reft.errors import FormatError
from reft.wire.capsule_format import NO_NAMES
from reft.wire.slot_format import Geometry, SlotMap
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.guarded import CHUNK, INLINE, LEAST, SLOTS, SMALL, GuardedJob, state
from tests.support.shards import (
    VERSION,
    Postbox,
    make_parity,
    make_slot,
    placed,
    seal,
)


@pytest.mark.parametrize("D", range(2, 7))
def test_every_lost_rank_is_decoded(D):
    job = GuardedJob(D)
    assert [lane.D for lane in job.placement.guard_lanes] == [D]
    for lost in [(), *((rank,) for rank in range(D))]:
        assert job.load(lost) == [LoadReport()] * D, f"lost {lost}"
        assert job.is_whole(), f"lost {lost}"


@pytest.mark.parametrize("D", [2, 3, 4])
def test_a_job_without_replicas_is_decoded(D):
    """With D = 2 parity is a copy."""
    job = GuardedJob(D, [state(rank, has_replicas=False) for rank in range(D)])
    assert not job.placement.lanes
    for lost in range(D):
        assert job.load([lost]) == [LoadReport()] * D and job.is_whole(), lost


def test_ranks_that_moved_and_nodes_without_ranks_change_nothing():
    """The parity and the slots of nodes without a rank are read over the network by one rank."""
    job = GuardedJob(4)
    for nodes in ({"new": [2, 3], "node0": [0], "node1": [1]}, {"node3": [0], "node0": [3], "node1": [2], "new": [1]}):
        assert job.load([2], nodes) == [LoadReport()] * 4
        assert job.is_whole()


def test_lanes_of_several_ranks_a_node_lose_one_member_each():
    job = GuardedJob(6)
    job.placement = placed(job.states, [rank // 2 for rank in range(6)], "auto", 1, CHUNK, SLOTS, INLINE)
    job.slots = [make_slot(job.placement, rank, job.states[rank]) for rank in range(6)]
    job.parity = {rank: make_parity(job.placement, rank, job.slots) for rank in range(6)}
    job.digests = [slot.digests[: slot.chunks].tobytes() for slot in job.slots]
    assert len(job.placement.guard_lanes) == 2
    for lost in ((0, 1), (2, 3), (4, 5)):
        assert job.load(lost) == [LoadReport()] * 6 and job.is_whole(), lost


def test_absent_leaves_are_not_loaded():
    job = GuardedJob(3, absent={"own1.0", "own2.1"})
    for lost in range(3):
        for name in job.absent:
            job.states[int(name[3])].setdefault(name, torch.zeros(1))
        assert job.load([lost]) == [LoadReport()] * 3 and job.is_whole(), lost


@pytest.mark.parametrize(
    "sizes", [SMALL, TransferSizes(192, 4096, 192, 64), TransferSizes(1 << 20, 1 << 20, 1 << 20, 1)]
)
def test_load_sizes_do_not_change_the_result(sizes, monkeypatch):
    monkeypatch.setattr("reft.client.restore.restore.SIZES", sizes)
    job = GuardedJob(3)
    assert job.load([1]) == [LoadReport()] * 3 and job.is_whole()


def test_only_the_pieces_travel_and_no_zeros():
    """The sizes differ by rank, and the shorter sections end with zeros."""
    job, box = GuardedJob(4, [state(rank, has_replicas=False) for rank in range(4)]), Postbox()
    job.load([0], box=box)
    (lane,) = job.placement.guard_lanes
    expected = dict.fromkeys([(sender, 0) for sender in (1, 2, 3)], 2 * 8)  # digests of slot and parity
    for holder in (1, 2, 3):
        begin, end = lane.piece_range(0, lane.piece_of(0, holder))
        for source in (1, 2, 3):
            if source != holder:
                first, last = lane.piece_range(source, lane.piece_of(source, holder))
                expected[source, 0] += min(last - first, end - begin)
        expected[holder, 0] += end - begin
    assert box.sent_bytes == expected


# Damage


def test_a_flipped_bit_in_a_source_is_found_by_its_reader():
    job = GuardedJob(3)
    job.slots[1].data[job.placement.rank_placement(1).unreplicated_offset + 5] ^= 1
    reports = job.load([0])
    assert [report.damaged for report in reports] == [(), (1,), ()] and damaged_at_load(reports, False) == (1,)


def test_a_flipped_bit_in_parity_is_found_by_its_reader():
    job = GuardedJob(3)
    job.parity[2].data[7] ^= 1
    reports = job.load([0])
    assert [report.damaged for report in reports] == [(), (), (3 + 2,)] and damaged_at_load(reports, False) == (5,)


def test_parity_that_is_too_short_or_torn_is_damaged():
    job, other = GuardedJob(3), GuardedJob(3, [{"own": torch.zeros(LEAST)}] * 2 + [{"w": torch.zeros(LEAST)}])
    job.parity[1] = other.slots[2]
    assert job.load([0])[1].damaged == (3 + 1,)
    job.parity[1] = _Torn()  # type: ignore[assignment]
    assert job.load([0])[1].damaged == (3 + 1,)


class _Torn:
    @property
    def is_pinned(self) -> bool:
        raise FormatError("torn.")


@pytest.mark.parametrize("sender", [1, 2])
def test_a_flipped_bit_in_a_message_is_found(sender):
    """The second time, its source counts as damaged."""

    def flip(a: int, b: int, data: np.ndarray) -> None:
        if (a, b) == (sender, 0) and data.nbytes > 8:
            data[3] ^= 1

    job = GuardedJob(3, [state(rank, has_replicas=False) for rank in range(3)])
    reports = job.load([0], box=Postbox(on_way=flip))
    owners = set(reports[0].faults.values()) - {0}
    assert owners <= {sender, 3 + sender} and owners
    assert any(text.startswith(f"bytes of the parity of rank {sender} changed") for text in reports[0].faults)
    assert set(damaged_at_load(reports, is_last=True)) >= owners


def test_wrong_parity_with_right_digests_is_found_by_the_saved_digests():
    """The lost rank's capsule is given up then, so an older version is used."""
    job = GuardedJob(3)
    job.parity[1].data[0] ^= 1
    seal(job.parity[1])
    report = job.load([2])[2]
    assert list(report.faults.values()) == [2] and "of rank 2, decoded from its peers, differs" in min(report.faults)
    assert damaged_at_load([report], is_last=True) == (2,)


def test_leaves_outside_the_section_are_refused_when_the_capsule_is_opened():
    """They are in no parity: the manifest did not foresee them."""
    job = GuardedJob(2)
    part = job.placement.rank_placement(1)
    foreseen = sum(leaf.nbytes for leaf in part.unreplicated.leaves)
    tree = pb.CapsuleRecord(rank=1, unreplicated_bytes=foreseen, capsule=b"", digests=job.digests[1])

    def opened(**changes: Any) -> OldRank:
        record = pb.CapsuleRecord()
        record.CopyFrom(tree)
        for name, value in changes.items():
            setattr(record, name, value)
        restore, _ = job.restore(1, [1], {"node0": [0], "new": [1]})
        opener = SimpleNamespace(capsule=lambda plan, old: record, remote=None)
        context = replace(restore.context, opener=opener, names=[NO_NAMES] * 2)
        return open_old_rank(context, 1)

    record = serialization.encode({"absent": [], "riders": {}, "compared": {}, "subjects": {}})
    assert opened(capsule=record).lost_digests == job.digests[1]
    for changes in ({"unreplicated_bytes": foreseen + 4}, {"digests": job.digests[1] + bytes(8)}):
        with pytest.raises(FormatError, match="Its guard lane gives back"):
            opened(capsule=record, **changes)


@pytest.mark.parametrize("lost", [(0,), (3,)])
def test_both_ranks_of_a_pair_post_messages_in_the_same_order(lost):
    """Must not hang on a transport without tags, such as NCCL."""
    job, box = GuardedJob(4), Postbox()
    assert job.load(lost, box=box) == [LoadReport()] * 4
    assert box.posted and all(box.posted[a, b] == box.posted[b, a] for a, b in box.posted)


# Lanes that survive several lost members


LANES = [(D, f) for D in range(3, 8) for f in (2, 3) if f < D]


@pytest.mark.parametrize(
    ("D", "f", "most"),
    [
        *(pytest.param(D, f, 8, id=f"{D}-{f}") for D, f in LANES),
        *(pytest.param(D, f, 63, id=f"{D}-{f}-all", marks=pytest.mark.soak) for D, f in LANES if D > 3),
    ],
)
def test_every_loss_of_f_ranks_is_decoded(D, f, most):
    """In wide lanes `make test` loads only some of the losses of f ranks."""
    job = GuardedJob(D, [state(rank, has_replicas=False, leaves=1) for rank in range(D)], f=f)
    (lane,) = job.placement.guard_lanes
    assert (lane.f, lane.D) == (f, D) and lane.blocks > 1
    losses = [lost for count in range(1, f + 1) for lost in itertools.combinations(range(D), count)]
    for lost in losses if len(losses) <= most else Random(f"{D} {f}").sample(losses, most):
        assert job.load(lost) == [LoadReport()] * D, f"lost {lost}"
        assert job.is_whole(), f"lost {lost}"


def test_sections_are_decoded_beside_cells():
    job = GuardedJob(4, f=2)
    assert job.placement.lanes and [lane.f for lane in job.placement.guard_lanes] == [2]
    for lost in itertools.combinations(range(4), 2):
        assert job.load(lost) == [LoadReport()] * 4 and job.is_whole(), lost


def test_new_nodes_and_one_keeper_of_both_lost_ranks():
    """The keeper makes both sections from one reading, and sends one of them on."""
    job = GuardedJob(5, [state(rank, has_replicas=False) for rank in range(5)], f=2)
    nodes = {"new": [1, 2], "node0": [0], "node3": [4], "node4": [3]}
    assert job.load([1, 2], nodes) == [LoadReport()] * 5 and job.is_whole()


def test_a_lane_with_spare_parity_bears_lost_parity():
    job = GuardedJob(5, f=2)
    parity = dict(job.parity)
    for gone in (0, 2, 4):
        job.parity = {rank: slot for rank, slot in parity.items() if rank != gone}
        assert job.load([1]) == [LoadReport()] * 5 and job.is_whole(), gone
    with pytest.raises(ValueError, match="members \\(1, 3\\) of 5 are lost"):
        list(job.restore(0, [1, 3], {f"node{rank}": [rank] for rank in range(5)})[1].plans[0].operations(0))


def test_the_pieces_of_a_lane_travel_once_to_each_keeper():
    job, box = GuardedJob(5, [state(rank, has_replicas=False) for rank in range(5)], f=2), Postbox()
    assert job.load([0, 3], box=box) == [LoadReport()] * 5
    (lane,) = job.placement.guard_lanes
    for keeper in (0, 3):
        for sender in (1, 2, 4):  # the section, two parities, and digests of both
            assert box.sent_bytes[sender, keeper] <= lane.sizes[sender] + lane.parity_bytes + 2 * 8


def test_a_flipped_bit_in_one_of_several_parities_is_found():
    job = GuardedJob(4, f=2)
    job.parity[2].data[-7] ^= 1
    reports = job.load([0, 1])
    assert damaged_at_load(reports, False) == (4 + 2,)


# Copy lanes


def own_states(D: int) -> list[Any]:
    return [state(rank, has_replicas=False) for rank in range(D)]


@pytest.mark.parametrize(("D", "f"), [(D, f) for D in range(2, 7) for f in (1, 2) if f < D])
def test_every_loss_of_f_ranks_is_read_from_copies(D, f):
    job = GuardedJob(D, f=f, scheme="aor")
    (lane,) = job.placement.guard_lanes
    assert (lane.is_copies, lane.f, lane.D) == (True, f, D)
    for lost in (lost for count in range(1, f + 1) for lost in itertools.combinations(range(D), count)):
        assert job.load(lost) == [LoadReport()] * D and job.is_whole(), lost


def test_more_than_f_lost_ranks_are_read_if_each_has_a_copy_and_else_refused():
    """Without cells: of D = 6, f = 1 each second rank may be lost."""
    job = GuardedJob(6, own_states(6), scheme="aor")
    for lost in ((0, 2, 4), (1, 3, 5), (0, 3)):
        assert job.load(lost) == [LoadReport()] * 6 and job.is_whole(), lost
    errors = job.load((2, 3))
    assert all("no copy of the unreplicated leaves of old rank 3 is at hand" in str(each) for each in errors)


def test_another_copy_is_read_where_one_is_gone():
    job = GuardedJob(5, own_states(5), f=2, scheme="aor")
    parity = dict(job.parity)
    for gone in (0, 4):  # both copy rank 1; rank 0 in its first column
        job.parity = {rank: slot for rank, slot in parity.items() if rank != gone}
        assert job.load([1]) == [LoadReport()] * 5 and job.is_whole(), gone


def test_only_the_section_travels_from_one_node():
    job, box = GuardedJob(4, own_states(4), f=2, scheme="aor"), Postbox()
    assert job.load([0], box=box) == [LoadReport()] * 4
    (lane,) = job.placement.guard_lanes
    assert {pair: n for pair, n in box.sent_bytes.items() if n} == {(3, 0): lane.sizes[0] + 8}


def test_a_flipped_bit_in_a_copy_is_found():
    job = GuardedJob(4, f=2, scheme="aor")
    job.parity[3].data[7] ^= 1
    assert damaged_at_load(job.load([0]), False) == (4 + 3,)


# Replayed sections


class ReplayedJob(GuardedJob):
    """A job whose lost ranks' keepers have replayed the sections; no copy is at hand.

    Attributes:
        flipped: whether the replayed bytes are wrong.
    """

    flipped = False

    def plan(self, lost: Collection[int]) -> RecoveryPlan:
        plan = super().plan(lost)
        copies = HeldParity("gone", 0, "parity-0.slot-0", SlotState.SEALED, VERSION)
        ways = {old: SectionReplay(old, copies, plan.capsules[old], ()) for old in lost}
        return replace(plan, parity={}, replays=ways)

    def replayed(self, restore: Restore) -> dict[int, SlotMap]:
        context, made = restore.context, {}
        for old in context.plan.replays:
            if context.readers.keeper_of[old] == context.rank:
                part = self.placement.rank_placement(old)
                data = self.slots[old].data[part.unreplicated_offset : part.data_bytes]
                geometry = Geometry(0, data.nbytes, CHUNK)
                slot = SlotMap.create(np.zeros(geometry.file_bytes, np.uint8), geometry, "job", old)
                slot.begin(VERSION, bytes(16), b"", data.nbytes)
                slot.data[: data.nbytes] = data
                slot.data[7] ^= self.flipped
                seal(slot)
                made[replay_number(self.placement, old)] = slot
        return made


@pytest.mark.parametrize(("D", "f"), [(2, 1), (3, 1), (5, 2)])
def test_replayed_sections_are_loaded(D, f):
    job = ReplayedJob(D, f=f, scheme="aor")
    for lost in (lost for count in range(1, f + 1) for lost in itertools.combinations(range(D), count)):
        box = Postbox()
        assert job.load(lost, box=box) == [LoadReport()] * D and job.is_whole(), lost


def test_no_byte_of_a_replayed_section_travels():
    job, box = ReplayedJob(3, own_states(3), scheme="aor"), Postbox()
    assert job.load([1], box=box) == [LoadReport()] * 3 and job.is_whole()
    assert not any(box.sent_bytes.values())


def test_replayed_bytes_are_compared_with_the_capsule_once_more():
    job = ReplayedJob(3, own_states(3), scheme="aor")
    job.flipped = True
    reports = job.load([1])
    assert damaged_at_load(reports, True) == (1,) and "chunk 0 of rank 1" in min(reports[1].faults)
