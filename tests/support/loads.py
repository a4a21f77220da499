"""Jobs whose ranks load in threads of one process.

Their slots lie in the memory of this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch

from reft.client.restore.decode import StripeDecoder
from reft.client.restore.executor import LoadReport, TransferExecutor
from reft.client.restore.slot_reader import SlotReader
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import Transport
from reft.client.restore.verify import PeerMessages, chunk_verifier
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Leaf, align
from reft.core.recovery.plan import SlotReaders, TransferPlan, TransferSizes, cell_name, cells_near, same_shape_needs
from reft.wire.slot_format import SlotMap
from tests.support.shards import Postbox, Tensors, alike, make_slot, on_all, placed

CHUNK = 4096
SMALL = TransferSizes(piece=4096, band=32 << 10, window=16 << 10, ahead=8 << 10)
CLEAN = LoadReport()


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def mixed(scale: int = 1) -> Tensors:
    """Returns tensors of odd sizes and several dtypes, many small ones, and some with gaps."""
    kinds = [
        torch.bfloat16,
        torch.int8,
        torch.bool,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ]
    tensors = {f"small.{i}": random((3 * i + 1,), kinds[i % len(kinds)], i) for i in range(30)}
    tensors["large"] = random((331 * scale, 37), torch.float32, 100)
    tensors["odd"] = random((9973 * scale,), torch.int8, 101)
    tensors["fp8"] = random((2003 * scale,), torch.float8_e4m3fn, 104)
    tensors["transposed"] = random((64, 41 * scale), torch.bfloat16, 102).t()
    tensors["strided"] = random((48 * scale, 64), torch.float32, 103)[:, ::2]
    tensors["empty"] = torch.empty((0, 7))
    return tensors


def blank(tensors: Tensors) -> Tensors:
    """Returns tensors of the same names and shapes, filled with zeros."""
    made = {}
    for name, tensor in tensors.items():
        made[name] = torch.zeros_like(tensor)
        if name == "strided":
            made[name] = torch.zeros((tensor.shape[0], 2 * tensor.shape[1]))[:, ::2]
    return made


class Job:
    """A job with its slots. All ranks have the same `tensors`, or each has its own in `ranks`.

    Attributes:
        nodes: node → its ranks when the slots were written: one node for each domain.
        live: the tensors of each rank to load into.
        decoder: makes each rank's decoder.
    """

    def __init__(self, world: int, scheme: str, tolerate: int, tensors: Tensors | None = None, ranks: Any = None,
                 domains: Any = None) -> None:  # fmt: skip
        self.world = world
        self.ranks: list[Tensors] = ranks or [tensors or mixed()] * world
        self.domains: list[int] = domains or list(range(world))
        self.nodes: dict[str, list[int]] = {}
        for rank, domain in enumerate(self.domains):
            self.nodes.setdefault(f"node{domain}", []).append(rank)
        self.placement: Placement = placed(self.ranks, self.domains, scheme, tolerate, CHUNK)
        self.slots: list[SlotMap] = [make_slot(self.placement, rank, self.ranks[rank]) for rank in range(world)]
        self.live = [blank(tensors) for tensors in self.ranks]
        self.decoder: Callable[[], StripeDecoder] = StripeDecoder

    def digests(self, rank: int) -> bytes:
        slot = self.slots[rank]
        return slot.digests[: slot.chunks].tobytes()

    def plan(
        self, rank: int, lost: Collection[int] = (), nodes: Any = None, sizes: TransferSizes = SMALL
    ) -> TransferPlan:
        """Returns a rank's plan; ranks run where their slots lie, or as `nodes` says."""
        sources = {old: f"node{self.domains[old]}" for old in range(self.world) if old not in lost}
        readers = SlotReaders.of(sources, nodes or self.nodes, self.world)
        needs = same_shape_needs(self.placement, cells_near(self.placement, readers, rank), sizes)
        return TransferPlan(needs, self.placement, readers, lost, has_live_cells=True, sizes=sizes)

    def load(self, lost: Collection[int] = (), nodes: Any = None, sizes: TransferSizes = SMALL, box: Postbox | None = None,
             at_chunk: Any = lambda rank, chunk: None, digests: Any = None, absent: Collection[str] = (),
             unopened: Collection[int] = ()) -> list[LoadReport | Exception]:  # fmt: skip
        """Loads on all ranks, each in a thread, without the lost slots; returns all results."""
        box = box or Postbox()
        return on_all(
            self.world,
            lambda rank: self.load_rank(rank, box.of(rank), lost, nodes, sizes, at_chunk, digests, absent, unopened),
        )

    def load_rank(self, rank: int, transport: Transport, lost: Collection[int] = (), nodes: Any = None,
                  sizes: TransferSizes = SMALL, at_chunk: Any = lambda rank, chunk: None, digests: Any = None,
                  absent: Collection[str] = (), unopened: Collection[int] = ()) -> LoadReport:  # fmt: skip
        """Loads on one rank; the other ranks must load too.

        Args:
            unopened: old ranks whose slots could not be opened, and are not known as lost.
        """
        plan = self.plan(rank, lost, nodes, sizes)
        slots = {
            old: SlotReader(
                self.slots[old],
                self.placement.rank_placement(old).unreplicated_offset,
                lambda chunk: at_chunk(rank, chunk),
            )
            for old in plan.owners
            if old not in {*lost, *unopened} and plan.readers.is_near(old, rank)
        }
        table = (digests or {}).get(rank) or self.digests(rank)
        verifiers = {rank: chunk_verifier(self.placement, rank, table)} if rank in lost else {}
        decoder = self.decoder()
        target = self.target(rank, decoder, absent)
        peers = PeerMessages(transport, rank)
        executor = TransferExecutor(sizes, CHUNK, peers, slots, *target, decoder, verifiers=verifiers)
        return executor.load(plan.operations(rank))

    def target(
        self, rank: int, decoder: StripeDecoder, absent: Collection[str] = ()
    ) -> tuple[FlatTensorView, dict[str, int]]:
        """Returns a rank's live memory, cell after cell, and where each target begins there."""
        division = self.placement.division
        leaves, places, offsets, end = list[Leaf](), list[int](), {}, 0
        for number in division.cells_of[division.layout_of[rank]]:
            cell = division.cells[number]
            offsets[cell_name(number)] = end
            leaves += cell.leaves
            places += [end + offset for offset in cell.offsets]
            end = align(end + cell.nbytes)
        copies, device = decoder.begin(), getattr(decoder, "device", None)
        present = [(leaf, at) for leaf, at in zip(leaves, places, strict=True) if leaf.name not in absent]
        view = FlatTensorView([leaf for leaf, _ in present], [at for _, at in present], self.live[rank], copies, device)
        return view, offsets

    def cell_names(self, rank: int) -> list[str]:
        division = self.placement.division
        cells = (division.cells[index] for index in division.cells_of[division.layout_of[rank]])
        return [leaf.name for cell in cells for leaf in cell.leaves]

    def is_whole(self) -> bool:
        return all(alike(self.live[r], self.ranks[r], self.cell_names(r)) for r in range(self.world))


def few() -> Tensors:
    """Returns few tensors, one of them not dense. Tests can then try all losses of a wide group."""
    small = {f"small.{i}": random((3 * i + 1,), torch.bfloat16, i) for i in range(4)}
    return small | {"odd": random((2503,), torch.int8, 101), "strided": random((8, 64), torch.float32, 103)[:, ::2]}


def every_loss(job: Job, f: int) -> None:
    """Loads once for every combination of at most f lost ranks."""
    for count in range(f + 1):
        for lost in itertools.combinations(range(job.world), count):
            job.live = [blank(tensors) for tensors in job.ranks]
            assert job.load(lost) == [CLEAN] * job.world, f"lost {lost}"
            assert job.is_whole(), f"lost {lost}"
