"""Which leaves attach treats as replicas, and what ranks exchange to find out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.client.link import rank_group as exchange_module
from reft.client.link.rank_group import BROADCAST_BYTES, broadcast_ranks
from reft.client.snapshot.replica_check import CONSTANT_PIECE, find_mismatched, mismatched_names, value_digests
from reft.client.state.extract.dtensor import Region
from reft.client.state.tensors import TensorIndex
from reft.core.layout.cells import divide
from reft.core.layout.stage_naming import CONSTANT
from reft.errors import AttachError

NAMES = ["model.0.w", "model.0.b", "model.0.v", "optimizer.0.exp_avg.model.0.w", "optimizer.0.exp_avg.model.0.v"]


def index_of(pieces: tuple[str, ...] = (), at: int = 0, **tensors: torch.Tensor) -> TensorIndex:
    """Returns an index of tensors.

    Those in `pieces` are the rows from `at` of a leaf twice as long.
    """
    index = TensorIndex()
    for name, tensor in tensors.items():
        box = Region((2 * tensor.shape[0],), (at,)) if name in pieces else None
        index.add(f"model.0.{name}", {name: tensor}, name, tensor, box=box)
    return index


def digests_of(**tensors: torch.Tensor) -> dict[str, str]:
    tensor_index = index_of(**tensors)
    return value_digests(tensor_index, tensor_index.tensors)


class Exchange:
    """A fake rank group, with one thread for each rank."""

    def __init__(self, world: int) -> None:
        self.world, self.rank = world, 0
        self.rounds: list[list[dict]] = []
        self.local = threading.local()
        self.barrier = threading.Barrier(world)

    def of(self, rank: int) -> Exchange:
        mine = object.__new__(Exchange)
        vars(mine).update(vars(self), rank=rank, count=0)
        return mine

    def gather_or_raise(self, act, extra_s=0.0, deadline_s=None):
        answer = act()
        self.barrier.wait(20)
        if self.rank == 0:
            self.rounds.append([{}] * self.world)
        self.barrier.wait(20)
        self.rounds[self.count][self.rank] = answer
        self.barrier.wait(20)
        self.count += 1
        return self.rounds[self.count - 1]


def run_check(ranks: list[TensorIndex]) -> tuple[list[str], list[list[dict]]]:
    """Runs the check on all ranks.

    Returns their common result, and the answers of each exchange.
    """
    layouts = [tensor_index.layout() for tensor_index in ranks]
    division = divide({each.digest: each for each in layouts}, [each.digest for each in layouts])
    names = {name for tensor_index in ranks for name in tensor_index.tensors}
    rank_group = Exchange(len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        act = lambda rank: find_mismatched(rank_group.of(rank), division, names, ranks[rank])  # noqa: E731
        results = list(pool.map(act, range(len(ranks))))
    assert all(each == results[0] for each in results)
    return results[0], rank_group.rounds


def test_equal_replicas_exchange_one_digest_a_cell():
    mismatched, rounds = run_check([index_of(w=torch.arange(6.0), b=torch.zeros(3)) for _ in range(3)])
    assert mismatched == [] and len(rounds) == 1 and all(len(each["digests"]) == 1 for each in rounds[0])


def test_pieces_of_one_rank_are_neither_compared_nor_sent():
    ranks = [index_of(("w",), 6 * rank, w=torch.arange(6.0) + rank, norm=torch.ones(2)) for rank in range(2)]
    mismatched, rounds = run_check(ranks)
    assert mismatched == [] and len(rounds) == 1
    assert value_digests(ranks[0], ["model.0.norm"]).keys() == {"model.0.norm"}


def test_only_holders_of_the_same_piece_are_compared():
    """Leaf w has two pieces with two holders each.

    The last rank's piece differs from its replica.
    """
    ranks = [
        index_of(("w", "v"), 6 * (rank % 2), w=torch.arange(6.0) + rank % 2, v=torch.arange(6.0)) for rank in range(4)
    ]
    assert run_check(ranks)[0] == []
    ranks[3].tensors["model.0.w"] += 1
    mismatched, rounds = run_check(ranks)
    assert mismatched == ["model.0.w"] and len(rounds) == 2
    assert [bool(each["digests"]) for each in rounds[1]] == [True, True, False, True], (
        "one rank of each kind speaks for all"
    )


def test_optimizer_state_and_constant_leaves_count_as_mismatched_too():
    same = torch.arange(6.0)
    ranks = [digests_of(w=same + rank, v=same, b=torch.zeros(3)) for rank in range(2)]
    assert mismatched_names(ranks, NAMES) == ["model.0.b", "model.0.w", "optimizer.0.exp_avg.model.0.w"]
    assert run_check([index_of(w=same + rank, v=same, b=torch.zeros(3)) for rank in range(2)])[0] == [
        "model.0.b",
        "model.0.w",
    ]


def test_constants_are_marked_whatever_their_type_and_order():
    tensors = {"a": torch.ones(4, 4).t(), "b": torch.arange(4), "c": torch.empty(0), "d": torch.ones(5)[::2]}
    digests = value_digests(TensorIndex(tensors, set()), tensors)
    assert [name for name, digest in digests.items() if digest.startswith(CONSTANT)] == ["a", "c", "d"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_a_large_constant_is_one_in_all_its_pieces(dtype):
    """A piece that repeats another value than the first, and a last element, are differences."""
    elements = 3 * CONSTANT_PIECE // dtype.itemsize
    same = torch.full((elements,), 3, dtype=dtype)
    halves, last = same.clone(), same.clone()
    halves[elements // 3 :] = 4
    last[-1] = 4
    gapped = torch.full((elements // 8, 16), 3, dtype=dtype)[:, :8]
    digests = digests_of(same=same, halves=halves, last=last, gapped=gapped)
    assert [name for name, digest in digests.items() if digest.startswith(CONSTANT)] == [
        "model.0.same",
        "model.0.gapped",
    ]


@pytest.mark.parametrize(
    ("widths", "alone"),
    [
        ([], []),
        ([5, 5, 5], []),
        ([BROADCAST_BYTES, 2], []),
        ([100] * 3 + [200_000] + [100] * 16_380, [3]),
        ([20_000 if rank % 64 == 0 else 2 for rank in range(16_384)], list(range(0, 16_384, 64))),
    ],
)
def test_long_messages_are_broadcast_where_padding_would_cost_more(widths, alone):
    assert broadcast_ranks(widths) == alone


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 1 << 24), max_size=40))
def test_broadcasts_never_move_more_bytes_than_padding(widths):
    alone = broadcast_ranks(widths)
    rest = max((width for rank, width in enumerate(widths) if rank not in alone), default=0)
    moved = sum(widths[rank] for rank in alone) + len(widths) * rest
    assert moved <= len(widths) * max(widths, default=0) and alone == sorted(set(alone))


def test_a_missing_rank_raises_attach_error(monkeypatch):
    def gone(*_: object) -> None:
        raise RuntimeError("Timed out waiting 5000ms")

    rank_group = exchange_module.RankGroup(5.0)
    rank_group.group, rank_group.world = SimpleNamespace(get_group_store=dist.HashStore), 2
    monkeypatch.setattr(rank_group, "_all_gather", gone)
    with pytest.raises(AttachError, match="rank 1 of 2 did not come within 5 s: Timed out"):
        rank_group.gather_or_raise(dict)
