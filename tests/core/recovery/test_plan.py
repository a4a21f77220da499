"""Tests the operations of all ranks: every byte once, messages in pairs, bounds, linear work."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from reft.core.coding.placement import Placement
from reft.core.layout.layout import ALIGNMENT, Leaf
from reft.core.recovery.gather import group_lanes, undecodable
from reft.core.recovery.plan import (
    DecodeOperation,
    EmitOperation,
    NeededRange,
    ReadOperation,
    ReceiveOperation,
    SlotReaders,
    TransferOperation,
    TransferPlan,
    TransferSizes,
    cell_name,
    cells_near,
    same_shape_needs,
)
from reft.core.recovery.shard_matching import PieceSource
from reft.core.recovery.stripes import NO_CELL, StripeSlice
from reft.core.recovery.walk import WalkPhase, walk
from tests.support.instruction_count import instructions
from tests.support.moves import Move, drawn_move
from tests.support.shapes import Shape, placement_for, random_shape, whole_state

CHUNK = 4096
SIZES = TransferSizes(piece=4096, band=16 << 10, window=8 << 10, ahead=4 << 10)
Nodes = Mapping[str, Sequence[int]]


class Plans:
    """The plans of all ranks of one job.

    Attributes:
        operations: of each rank.
    """

    def __init__(self, placement: Placement, plans: Sequence[TransferPlan], lost: Collection[int]) -> None:
        self.placement, self.plans, self.lost, self.readers = placement, plans, lost, plans[0].readers
        self.operations = [list(plan.operations(rank)) for rank, plan in enumerate(plans)]

    @property
    def all(self) -> Iterator[TransferOperation]:
        return (each for operations in self.operations for each in operations)


def leaf(name: str, nbytes: int) -> Leaf:
    return Leaf(name, "uint8", (nbytes,), (1,), nbytes, False, (nbytes,), (0,))


def same_shape(leaves: Sequence[Sequence[Leaf]], domains: Sequence[int], scheme: str, tolerate: int | None, lost: Collection[int],
               nodes: Nodes, wants_all: bool = False, sizes: TransferSizes = SIZES) -> Plans:  # fmt: skip
    placement = placement_for(leaves, domains, scheme, tolerate, CHUNK)
    sources = {old: f"node{domain}" for old, domain in enumerate(domains) if old not in lost}
    readers = SlotReaders.of(sources, nodes, len(domains))
    plans = []
    for rank in range(len(domains)):
        cells = range(len(placement.division.cells)) if wants_all else cells_near(placement, readers, rank)
        needs = same_shape_needs(placement, cells, sizes)
        plans.append(TransferPlan(needs, placement, readers, lost, has_live_cells=True, sizes=sizes))
    return Plans(placement, plans, lost)


def random_job(seed: int, wants_all: bool = False) -> Plans:
    """Returns a job with cells on some ranks, nodes of several ranks, losses and moved ranks."""
    rng = random.Random(seed)
    stages, per_node = rng.choice((1, 1, 2)), rng.choice((1, 1, 2))
    world = stages * per_node * rng.randint(3, 5)
    own = [[leaf(f"stage{s}.{i}", rng.choice((64, 900, 7_000, 40_000))) for i in range(3)] for s in range(stages)]
    shared = [leaf("shared", rng.choice((500, 30_000)))] if rng.random() < 0.5 else []
    leaves = [own[rank % stages] + shared for rank in range(world)]
    domains = [rank // per_node for rank in range(world)]
    scheme, tolerate = rng.choice(("auto", "aec", "aec", "arc")), rng.choice((1, 1, 2, 3))
    placement = placement_for(leaves, domains, scheme, tolerate, CHUNK)
    for gone in (rng.sample(sorted(set(domains)), min(rng.randint(0, tolerate), len(set(domains)) - 1)), []):
        lost = [rank for rank in range(world) if domains[rank] in gone]
        if not undecodable(group_lanes(placement.lanes), _have(world, lost)):
            break
    ranks = list(range(world))
    if rng.random() < 0.5:
        rng.shuffle(ranks)
    nodes: dict[str, list[int]] = {}
    for at, rank in enumerate(ranks):  # nodes that are gone are replaced; others may have no rank any more
        domain = domains[at]
        is_new = domain in gone or (rng.random() < 0.15 and per_node == 1)
        nodes.setdefault(f"new{domain}" if is_new else f"node{domain}", []).append(rank)
    return same_shape(leaves, domains, scheme, tolerate, lost, nodes, wants_all)


def _have(world: int, lost: Collection[int]) -> Any:
    return np.array([rank not in lost for rank in range(world)])


def random_move(seed: int) -> Plans:
    """Returns the plans of a move into another shape, with a lost node if it can be lost."""
    rng = random.Random(seed)
    whole = whole_state(rng, rng.randint(1, 6), rng.choice((10, 300, 3000)))
    old, new = random_shape(rng, whole, 8), random_shape(rng, whole, 8)
    per_node = rng.choice((1, 2))
    if seed % 2:  # replicas, so that a lost node can be lost
        old = Shape((rng.randint(3, 6) * per_node,), dict.fromkeys(whole, (None,)), {}, {})
    move, nodes, lost = drawn_move(rng, whole, old, new, per_node)
    lost = lost if move.can_lose(lost) else []
    plan = move.plan(lost, nodes, SIZES)
    return Plans(move.placement, [plan] * new.world, plan.lost)


def lost_sections(seed: int) -> Plans:
    """Returns the plans of a move to fewer ranks, after the loss of a node.

    Only the lost slots had their rows. A rank that reads slots at hand makes several of these
    sections, of several windows each.
    """
    rng = random.Random(seed)
    while True:
        per_node = rng.choice((3, 4, 4))
        world = per_node * rng.choice((2, 3))
        whole = {"w": torch.zeros(rng.choice((3000, 8000)) * world), "v": torch.zeros(901 * world)}
        old = Shape((world,), {"w": (0,), "v": (0,)}, {}, {})
        new = Shape((rng.randint(2, per_node),), {"w": (rng.choice((0, None)),), "v": (0,)}, {}, {})
        move, nodes, lost = drawn_move(rng, whole, old, new, per_node)
        if not move.sections(lost) or not move.can_lose(lost):
            continue
        plan = move.plan(lost, nodes, SIZES)
        makers = Counter(plan.readers.keeper_of[old] for old in plan.sections)
        if any(count > 1 and keeper in plan.readers.reader_of.values() for keeper, count in makers.items()):
            return Plans(move.placement, [plan] * new.world, plan.lost)


def moved_to_slots(seed: int) -> Plans:
    """Returns the plans of a recover: lost slots are made by ranks that hold no cells."""
    job = random_job(seed)
    plan = TransferPlan((), job.placement, job.readers, job.lost, makes_parity=True, sizes=SIZES)
    return Plans(job.placement, [plan] * len(job.operations), job.lost)


JOBS = [pytest.param(kind, seed, id=f"{kind.__name__}-{seed}") for seed in range(16)
        for kind in (random_job, random_move, lost_sections, moved_to_slots)]  # fmt: skip


def placed_parts(operation: TransferOperation) -> tuple[NeededRange, ...]:
    """Returns the parts that an operation places in live memory."""
    if isinstance(operation, DecodeOperation) or (
        isinstance(operation, (ReadOperation, ReceiveOperation)) and operation.slice
    ):
        return ()
    return operation.parts


def described(operation: TransferOperation) -> str:
    """Returns an operation in words: operations are equal only if they are one object."""
    text = repr(operation)
    return text if not hasattr(operation, "slice") else text.replace(repr(operation.slice), str(operation.slice))


# What arrives


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", [random_job, random_move])
def test_every_needed_byte_is_placed_once(kind, seed):
    job = kind(seed)
    for rank, operations in enumerate(job.operations):
        needed: Counter[tuple[str, int]] = Counter()
        for need in job.plans[rank].needs:
            if rank in need.receivers:
                runs = need.copy.within(0, need.nbytes)
                for new, nbytes in zip(runs.new.tolist(), runs.nbytes.tolist(), strict=True):
                    needed.update((need.name, at) for at in range(new, new + nbytes))
        placed: Counter[tuple[str, int]] = Counter()
        for operation in operations:
            for part in placed_parts(operation):
                runs = part.need.copy.within(part.begin, part.end)
                for new, nbytes in zip(runs.new.tolist(), runs.nbytes.tolist(), strict=True):
                    placed.update((part.need.name, at) for at in range(new, new + nbytes))
        assert placed == needed and set(placed.values()) <= {1}


@pytest.mark.parametrize(("kind", "seed"), [*JOBS, *((lost_sections, seed) for seed in range(16, 32))])
def test_what_one_rank_sends_the_other_expects_in_the_same_order(kind, seed):
    assert_one_order(kind(seed))


@pytest.mark.parametrize("nodes", [{"node0": [0, 1], "new": [2]}, {"node0": [0], "new": [1, 2]}])
def test_the_sizes_of_the_product_keep_the_order_of_lost_sections(nodes):
    whole, sizes = {"w": torch.zeros(8 * 2_600_000)}, TransferSizes()
    old, new = (Shape((world,), {"w": (0,)}, {}, {}) for world in (8, 3))
    move = Move(whole, old, new, [0, 0, 0, 0, 1, 1, 1, 1], slots=4)
    plan = move.plan([4, 5, 6, 7], nodes, sizes)
    assert min(leaf.nbytes for leaf in move.before[0]) > 2 * sizes.piece and len(plan.sections) == 4
    assert_one_order(Plans(move.placement, [plan] * new.world, plan.lost))


def assert_one_order(job: Plans) -> None:
    """Both ranks of each pair post the same messages, in one order."""
    posted: dict[tuple[int, int], list[object]] = {}
    for rank, operations in enumerate(job.operations):
        for operation in operations:
            if isinstance(operation, ReceiveOperation):
                sender, parts = operation.sender, [(part.at, part.begin, part.end) for part in operation.parts]
                posted.setdefault((rank, sender), []).append((sender, rank, operation.owner, operation.nbytes, parts))
            for message in getattr(operation, "messages", ()):
                parts = [(part.at, part.begin, part.end) for part in message.parts]
                assert message.nbytes == sum(part.nbytes for part in message.parts)
                for to in message.receivers:
                    posted.setdefault((rank, to), []).append((rank, to, operation.owner, message.nbytes, parts))
    assert all(posted[a, b] == posted.get((b, a)) for a, b in posted), "in both directions, in one order"


@pytest.mark.parametrize(("kind", "seed"), JOBS)
def test_ranks_never_wait_in_a_circle(kind, seed):
    """A message ends once both sides have posted it; a rank that waits does nothing else."""
    job = kind(seed)
    actions = [deque(walk(operations, SIZES)) for operations in job.operations]
    posted: list[Counter[tuple[int, int]]] = [Counter() for _ in actions]  # rank → (peer, is_send) → messages
    last: list[dict[TransferOperation, Counter[tuple[int, int]]]] = [{} for _ in actions]
    while any(actions):
        is_moving = False
        for rank, waiting in enumerate(actions):
            while waiting:
                phase, operation = waiting[0]
                if phase is WalkPhase.POST:
                    peers = [(m, to) for m in getattr(operation, "messages", ()) for to in m.receivers]
                    posted[rank].update((to, 1) for _, to in peers)
                    if isinstance(operation, ReceiveOperation):
                        posted[rank][operation.sender, 0] += 1
                    last[rank][operation] = posted[rank].copy()
                elif phase is WalkPhase.FINISH and any(
                    posted[peer][rank, 1 - is_send] < count
                    for (peer, is_send), count in last[rank][operation].items()
                    if _concerns(operation, peer, is_send)
                ):
                    break
                waiting.popleft()
                is_moving = True
        assert is_moving, [waiting[0] if waiting else None for waiting in actions]


def _concerns(operation: TransferOperation, peer: int, is_send: int) -> bool:
    if isinstance(operation, ReceiveOperation):
        return not is_send and operation.sender == peer
    return bool(is_send) and any(peer in message.receivers for message in getattr(operation, "messages", ()))


@pytest.mark.parametrize(("kind", "seed"), JOBS)
def test_a_rank_reads_its_nodes_slots_itself(kind, seed):
    """No message brings bytes of a slot to a rank on the slot's node, nor to the sender."""
    job = kind(seed)
    for rank, operations in enumerate(job.operations):
        for operation in operations:
            if isinstance(operation, ReadOperation) and operation.source is PieceSource.SLOT:
                receivers = [to for message in operation.messages for to in message.receivers]
                assert job.readers.is_near(operation.owner, rank)
                assert not any(job.readers.is_near(operation.owner, to) for to in receivers)
                assert not receivers or job.readers.reader_of[operation.owner] == rank
            elif isinstance(operation, EmitOperation):
                assert all(rank not in message.receivers for message in operation.messages)


@pytest.mark.parametrize("seed", range(25))
def test_a_rank_needs_only_the_cells_near_it(seed):
    """Its operations are the same if it knows the needs of all cells."""
    some, everything = random_job(seed), random_job(seed, wants_all=True)
    for rank in range(len(some.operations)):
        assert list(map(described, some.operations[rank])) == list(map(described, everything.operations[rank]))


def test_a_copy_on_the_own_node_is_preferred():
    leaves = [[leaf("w", 90_000)]] * 4
    nodes = {"node0": [0, 1], "node1": [2, 3]}
    job = same_shape(leaves, [0, 0, 1, 1], "arc", 1, (), nodes)
    assert not any(isinstance(each, ReceiveOperation) for each in job.all), "each node has a copy of every byte"
    job = same_shape(leaves, [0, 0, 1, 1], "arc", 1, (2, 3), {"node0": [0, 1], "new": [2, 3]})
    for rank, operations in enumerate(job.operations):
        received = sum(each.nbytes for each in operations if isinstance(each, ReceiveOperation) and each.slice is None)
        assert received == (job.placement.division.cells[0].nbytes if rank > 1 else 0)


def test_a_slot_on_a_node_without_ranks_is_read_by_one_rank():
    leaves = [[leaf("w", 90_000)]] * 3
    job = same_shape(leaves, [0, 1, 2], "none", 0, (), {"node0": [0], "node1": [1], "new": [2]})
    readers = [rank for rank, each in enumerate(job.operations)
               if any(isinstance(o, ReadOperation) and o.owner == 2 for o in each)]  # fmt: skip
    assert readers == [2], "the rank of the same number, over the network"


# Lost slots


@pytest.mark.parametrize(("kind", "seed"), JOBS)
def test_lost_slots_are_made_from_shards_at_hand(kind, seed):
    job = kind(seed)
    for rank, operations in enumerate(job.operations):
        made: dict[int, list[tuple[int, int]]] = {}
        for each in (o.slice for o in operations if isinstance(o, DecodeOperation)):
            stripe, lane, members = each.stripe, each.stripe.lane, each.stripe.lane.members
            if lane.cell == NO_CELL:
                continue  # a section; test_load_sections loads them all
            owner_of = {s: members[lane.member_of(stripe.index, s)] for s in range(lane.code.k + lane.code.f)}
            assert each.keeper == rank and len(stripe.inputs) == lane.code.k
            assert all(owner_of[shard] in job.readers.reader_of for shard in stripe.inputs)
            at_hand = [s for s in range(lane.code.k) if owner_of[s] in job.readers.reader_of]
            assert lane.code.k == 1 or set(at_hand) <= set(stripe.inputs), "data at hand is read, not decoded"
            for one in stripe.made:
                assert one.owner in job.lost and owner_of[one.shard] == one.owner
                for packet in range(lane.code.w):
                    at = one.offset + packet * lane.packet_bytes + each.begin
                    made.setdefault(one.owner, []).append((at, at + each.width))
        relevant = [old for old in job.lost if job.readers.keeper_of[old] == rank]
        for old in relevant:
            part, has_parity = job.placement.rank_placement(old), job.plans[rank].makes_parity
            blocks = part.blocks if has_parity else part.blocks[: part.data_blocks]
            expected = {at for block in blocks for at in range(block.offset, block.offset + block.nbytes)}
            found = Counter(at for begin, end in made.get(old, []) for at in range(begin, end))
            if old in job.plans[rank].owners or has_parity:
                assert found.keys() == expected and set(found.values()) <= {1}


@pytest.mark.parametrize(("kind", "seed"), JOBS)
def test_all_columns_come_before_their_slice_is_decoded_and_live_ones_do_not_come(kind, seed):
    job = kind(seed)
    for operations in job.operations:
        columns: Counter[int] = Counter()
        for operation in operations:
            if isinstance(operation, (ReadOperation, ReceiveOperation)) and operation.slice is not None:
                columns[id(operation.slice)] += sum(part.nbytes for part in operation.parts)
            elif isinstance(operation, DecodeOperation):
                each, lane = operation.slice, operation.slice.stripe.lane
                begins = [packet * lane.packet_bytes + each.begin for packet in range(lane.code.w)]
                assert columns.pop(id(each), 0) == sum(
                    min(max(source.nbytes - begin, 0), each.width)  # behind a source there are zeros
                    for shard, source in each.stripe.inputs.items()
                    for begin in begins
                    if shard not in each.stripe.live
                )
        assert not columns


def registers(stripe_slice: StripeSlice) -> int:
    """Returns the number of packets that are read and made."""
    stripe = stripe_slice.stripe
    return (len(stripe.inputs) + len(stripe.made)) * stripe.lane.code.w


@pytest.mark.parametrize(("kind", "seed"), JOBS)
def test_slices_are_bounded_and_at_most_two_are_open(kind, seed):
    for operations in kind(seed).operations:
        opened: list[int] = []
        for operation in operations:
            stripe_slice = getattr(operation, "slice", None)
            if stripe_slice is None:
                continue
            each = stripe_slice
            assert each.width == ALIGNMENT or registers(each) * each.width <= SIZES.band
            assert each.width <= ALIGNMENT or each.stripe.lane.code.w * each.width <= SIZES.piece
            if isinstance(operation, EmitOperation):
                assert opened.pop(0) == id(each), "in the order of the decode operations"
            elif isinstance(operation, DecodeOperation):
                opened.append(id(each))
            if not isinstance(operation, ReadOperation) or not operation.messages:
                assert len(opened) <= 2
        assert not opened


def test_the_registers_of_a_slice_fit_the_band():
    sizes = TransferSizes(piece=4096, band=2048)
    nodes = {f"node{rank}": [rank] for rank in range(5)}
    job = same_shape([[leaf("w", 90_000)]] * 5, range(5), "aec", 2, (1,), nodes, sizes=sizes)
    slices = [each.slice for each in job.operations[1] if isinstance(each, DecodeOperation)]
    assert slices and all(registers(each) * each.width <= max(2048, registers(each) * ALIGNMENT) for each in slices)


@pytest.mark.parametrize(("kind", "seed"), JOBS)
def test_reads_and_messages_are_no_larger_than_a_window(kind, seed):
    window = max(SIZES.piece, CHUNK)
    for operation in kind(seed).all:
        if isinstance(operation, ReadOperation) and operation.source is PieceSource.SLOT:
            assert operation.slice or not operation.parts or operation.end - operation.begin <= window
        for message in getattr(operation, "messages", ()):
            assert message.nbytes <= window


def test_mixed_lanes_of_copies_and_codes():
    """A small cell is copied, a large one is coded; one rank's slot has blocks of both."""
    leaves = [[leaf("large", 60_000), *([leaf("small", 60)] if rank < 3 else [])] for rank in range(5)]
    nodes = {**{f"node{rank}": [rank] for rank in (0, 2, 3, 4)}, "new": [1]}
    job = same_shape(leaves, range(5), "auto", 1, (1,), nodes)
    assert {lane.code.k for lane in job.placement.lanes} == {1, 4}
    slices = [o.slice for o in job.operations[1] if isinstance(o, DecodeOperation)]
    assert {each.stripe.lane.code.k for each in slices} == {1, 4}, "the keeper compares its copies, too"
    for operation in job.operations[1]:
        if isinstance(operation, EmitOperation) and operation.slice.stripe.lane.code.k == 1:
            assert not operation.parts and not operation.messages, "copies come from the slot that has them"


def test_bytes_in_no_slot_are_refused():
    leaves, nodes = [[leaf("w", 9000)]] * 4, {f"node{rank}": [rank] for rank in range(4)}
    for scheme in ("aec", "arc"):
        with pytest.raises(ValueError, match="shards are at hand"):
            same_shape(leaves, range(4), scheme, 1, (1, 2), nodes)
    placement = placement_for(leaves, range(4), "arc", 1, CHUNK)
    readers = SlotReaders.of({0: "node0", 3: "node3"}, nodes, 4)
    needs = same_shape_needs(placement, [0], SIZES)
    with pytest.raises(ValueError, match="shards are at hand"):
        list(TransferPlan(needs, placement, readers).operations(0))


def test_the_names_of_targets_are_those_of_cells():
    job = random_job(3)
    assert {need.name for need in job.plans[0].needs} <= {
        cell_name(n) for n in range(len(job.placement.division.cells))
    }


# Work


@pytest.mark.parametrize("lost", [(), (1,)])
def test_one_ranks_work_grows_no_faster_than_the_ranks(lost):
    """In the same shape, with groups of four ranks: only the own group's slots cost work."""

    def work(world: int) -> int:
        leaves = [[leaf(f"group{rank // 4}", 200_000)] for rank in range(world)]
        placement = placement_for(leaves, range(world), "aec", 1, CHUNK)
        sources = {old: f"node{old}" for old in range(world) if old not in lost}
        nodes = {f"node{rank}": [rank] for rank in range(world)}

        def plan() -> None:
            readers = SlotReaders.of(sources, nodes, world)
            needs = same_shape_needs(placement, cells_near(placement, readers, 0), SIZES)
            list(TransferPlan(needs, placement, readers, lost, has_live_cells=True, sizes=SIZES).operations(0))

        return instructions(plan)

    small, large = work(64), work(128)
    assert large < 2.2 * small


def test_one_ranks_work_grows_linearly_with_the_bytes():
    def work(nbytes: int) -> int:
        return instructions(
            lambda: same_shape([[leaf("w", nbytes)]] * 4, range(4), "aec", 1, (1,), {f"node{r}": [r] for r in range(4)})
        )

    assert work(800_000) < 2.2 * work(400_000)
