"""What loading from peers costs: reft's load, without loss and with lost nodes.

    python bench/load.py [--quick] [--rounds N] [--ranks 2,4] [--cases TEXT] [--mib N] [--json FILE]

It is compared with plain gloo messages of the same bytes between the same processes, with
torch.distributed.checkpoint.load from disk, and with a plain copy of a rank's state. Each node is
one rank, and each rank is one process on this machine. Their slots lie in a tmpfs and are mapped.
In each round these ways take turns in random order, on all ranks at once. A way's time is that of
its slowest rank.

    ratio = median over rounds of (time of plain moving / time of REFT-load) of the same round

Plain moving brings the same bytes into the live tensors with isend and irecv. It sends the same
messages of 4 MiB from the mapped slot, eight at a time. Between them it copies the bytes that the
rank holds itself. "messages" leaves these copies out. REFT-load also digests the bytes that it
reads, decodes, and checks the bytes of a lost node against their digests. On a shared machine the
same ratio of processor time, summed over ranks, is more reliable. Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes

from bench import common, result
from bench.options import count, listed, output
from bench.result import Row
from reft.client.restore.decode import StripeDecoder
from reft.client.restore.executor import LoadReport, TransferExecutor
from reft.client.restore.slot_reader import SlotReader
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.transport import GroupTransport
from reft.client.restore.verify import PeerMessages, chunk_verifier
from reft.core.coding.placement import Placement
from reft.core.recovery.plan import (
    DecodeOperation,
    ReceiveOperation,
    SlotReaders,
    TransferPlan,
    TransferSizes,
    cell_name,
    cells_near,
    same_shape_needs,
)
from reft.wire.slot_format import SlotMap
from tests.support.shards import make_slot, placed

CHUNK = 256 << 10
DEADLINE_S = 120.0
WINDOW = 8  # plain messages under way in each direction


@dataclass(frozen=True)
class Case:
    """One set of lost nodes, for one code."""

    name: str
    ranks: int
    scheme: str
    tolerate: int
    lost: tuple[int, ...]

    @property
    def goal(self) -> float:
        """The least ratio.

        It is lower after a loss (decoding, comparison). It is lower, too, where no message hides
        the time of digests.
        """
        is_local = not self.lost and self.scheme == "arc" and self.ranks <= self.tolerate + 1
        return 0.5 if is_local or self.lost else 0.8


CASES = [
    Case("no loss, stored once", 2, "none", 0, ()),
    Case("no loss, copies", 2, "arc", 1, ()),
    Case("one of two lost, copies", 2, "arc", 1, (1,)),
    Case("no loss, stored once", 4, "none", 0, ()),
    Case("no loss, coded f=1", 4, "aec", 1, ()),
    Case("one lost, copies f=1", 4, "arc", 1, (1,)),
    Case("one lost, coded f=1", 4, "aec", 1, (1,)),
    Case("two lost, coded f=2", 4, "aec", 2, (1, 2)),
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="64 MiB a rank, 2 rounds")
    parser.add_argument("--rounds", type=count, help="rounds of each case (7)")
    parser.add_argument("--ranks", type=listed(("2", "4")), default="2,4", help="numbers of ranks")
    parser.add_argument("--cases", default="", help="only the cases whose name contains this text")
    parser.add_argument("--mib", type=count, help="MiB of state a rank (1024 with 2 ranks, 512 with 4)")
    parser.add_argument("--json", type=output, help="write every figure to this file")
    options = parser.parse_args()
    if not any(is_chosen(case, options) for case in CASES):
        parser.error(
            f"argument --cases: no name contains {options.cases!r}: {', '.join(dict.fromkeys(case.name for case in CASES))}"
        )
    options.rounds = options.rounds or (2 if options.quick else 7)
    return options


def is_chosen(case: Case, options: argparse.Namespace) -> bool:
    return str(case.ranks) in options.ranks.split(",") and options.cases in case.name


def state(mib: int) -> dict[str, torch.Tensor]:
    """Returns tensors like those of a model: large matrices, each with a small vector."""
    width = 1024
    count = max(mib // 16, 1)
    generator = torch.Generator().manual_seed(0)
    matrices = {f"layer{i}.weight": torch.rand((4 * width, width), generator=generator) for i in range(count)}
    return matrices | {f"layer{i}.norm": torch.rand((width,), generator=generator) for i in range(count)}


def make_sealed_slot(placement: Placement, rank: int, tensors: Any, file: IO[bytes]) -> SlotMap:
    """Returns a sealed slot in a file, mapped and open, as in a restore.

    Mapping and descriptor belong to it. Processes that are forked later share both.
    """
    mapped = []

    def pages(nbytes: int) -> np.ndarray:
        os.ftruncate(file.fileno(), nbytes)
        mapped.append(np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8))
        return mapped[0]

    make_slot(placement, rank, tensors, pages)
    return SlotMap(mapped[0], file.fileno())


class Rank:
    """One process: its slot, its live tensors, and the ways to fill them."""

    def __init__(self, rank: int, case: Case, placement: Placement, slots: list[Any], tensors: Any, disk: Path) -> None:
        self.rank, self.case, self.placement, self.disk = rank, case, placement, disk
        self.group = dist.new_group(backend="gloo")
        self.slots = {rank: slots[rank]} if rank not in case.lost else {}
        self.digests = slots[rank].digests[: slots[rank].chunks].tobytes()
        self.source = tensors
        self.live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self.plan = self._plan()
        self.mine = list(self.plan.operations(rank))
        # A rank without a slot sends bytes that it made.
        self.data = next(iter(self.slots.values())).data if self.slots else np.zeros(16 << 20, np.uint8)

    def _plan(self) -> TransferPlan:
        nodes = {f"node{rank}": [rank] for rank in range(self.case.ranks)}
        sources = {rank: f"node{rank}" for rank in range(self.case.ranks) if rank not in self.case.lost}
        readers, sizes = SlotReaders.of(sources, nodes, self.case.ranks), TransferSizes()
        needs = same_shape_needs(self.placement, cells_near(self.placement, readers, self.rank), sizes)
        return TransferPlan(needs, self.placement, readers, self.case.lost, has_live_cells=True, sizes=sizes)

    def reft(self) -> None:
        part, cell = self.placement.rank_placement(self.rank), self.placement.division.cells[0]
        slots = {
            old: SlotReader(slot, part.unreplicated_offset, lambda chunk: None) for old, slot in self.slots.items()
        }
        is_lost = self.rank in self.case.lost
        executor = TransferExecutor(
            self.plan.sizes,
            CHUNK,
            PeerMessages(GroupTransport(self.group, DEADLINE_S), self.rank),
            slots,
            FlatTensorView(cell.leaves, cell.offsets, self.live),
            {cell_name(0): 0},
            StripeDecoder(),
            verifiers={self.rank: chunk_verifier(self.placement, self.rank, self.digests)} if is_lost else {},
        )
        report = executor.load(self.plan.operations(self.rank))
        if report != LoadReport():
            raise RuntimeError(f"rank {self.rank}: {report}")

    def plain(self) -> None:
        """Moves the same bytes with plain messages and copies.

        Messages go from a mapping into the live tensors. The rank copies the bytes that it holds
        itself.
        """
        self.messages(copies=True)

    def messages(self, copies: bool = False) -> None:
        """Sends the same messages; copies the rank's own bytes only with `copies`."""
        under_way: deque[Any] = deque()
        into = [tensor.view(-1).view(torch.uint8) for tensor in self.live.values() if tensor.nbytes >= 4 << 20]
        data, read, written = torch.from_numpy(self.data), 0, 0
        for operation in self.mine:
            if isinstance(operation, DecodeOperation):
                continue
            own = 0 if isinstance(operation, ReceiveOperation) else sum(part.nbytes for part in operation.parts)
            messages = () if isinstance(operation, ReceiveOperation) else operation.messages
            nbytes = max([own, *(message.nbytes for message in messages)])
            if isinstance(operation, ReceiveOperation):
                nbytes = operation.nbytes
            read = read if read + nbytes <= len(data) else 0
            target = into[written % len(into)]
            begin = (written // len(into) * nbytes) % (len(target) - nbytes + 1)
            for message in messages:
                for to in message.receivers:
                    under_way.append(dist.isend(data[read : read + message.nbytes], group=self.group, group_dst=to))
            if isinstance(operation, ReceiveOperation):
                into_bytes = target[begin : begin + nbytes]
                under_way.append(dist.irecv(into_bytes, group=self.group, group_src=operation.sender))
            if copies and own:
                target[begin : begin + own].copy_(data[read : read + own])
            read += nbytes
            written += 1
            while len(under_way) > 2 * WINDOW:
                under_way.popleft().wait()
        while under_way:
            under_way.popleft().wait()

    def copy(self) -> None:
        """Copies the state once."""
        for name, tensor in self.live.items():
            np.copyto(tensor.numpy(), self.source[name].numpy())

    def dcp(self) -> None:
        """Reads the rank's share from disk, as a job of replicas does."""
        dcp.load({"state": self.live}, checkpoint_id=self.disk, process_group=self.group)

    def timed(self, way: str) -> tuple[float, float]:
        """Returns the seconds of the slowest rank, and the processor seconds of all."""
        dist.barrier(self.group)
        began, used = time.perf_counter(), time.process_time()
        getattr(self, way)()
        taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        spent = torch.tensor([time.process_time() - used], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(spent, group=self.group)
        return float(taken), float(spent)

    def is_whole(self) -> bool:
        return all(torch.equal(self.live[name], tensor) for name, tensor in self.source.items())


def work(rank: int, case: Case, placement: Placement, slots: list[Any], tensors: Any, home: str, rounds: int) -> None:
    """Runs the process of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=rank, world_size=case.ranks)
    it = Rank(rank, case, placement, slots, tensors, Path(home) / "dcp")
    with_dcp = not case.lost and case.scheme == "none"
    if with_dcp:
        dcp.save({"state": dict(tensors)}, checkpoint_id=it.disk, process_group=it.group)
    ways = ["reft", "plain", "messages", "copy", *(["dcp"] if with_dcp else [])]
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    order = random.Random(0)
    it.reft()
    if not it.is_whole():
        raise RuntimeError(f"rank {rank} is not whole")
    for _ in range(rounds):
        for way in order.sample(ways, len(ways)):
            times[way].append(it.timed(way))
    received = sum(operation.nbytes for operation in it.mine if isinstance(operation, ReceiveOperation))
    sent_bytes = torch.tensor([received])
    dist.all_reduce(sent_bytes, group=it.group)
    sent = int(sent_bytes)
    if rank == 0:
        state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        Path(home, "result").write_text(json.dumps({"times": times, "sent": sent, "state": state_bytes}))
    dist.barrier(it.group)
    dist.destroy_process_group()


def measure(case: Case, mib: int, rounds: int) -> dict[str, Any]:
    """Measures one case in fresh processes."""
    tensors = state(mib)
    placement = placed([tensors] * case.ranks, list(range(case.ranks)), case.scheme, case.tolerate, CHUNK)
    with common.folder() as home, contextlib.ExitStack() as files:
        nameless = [files.enter_context(tempfile.TemporaryFile(dir=common.SHM)) for _ in range(case.ranks)]
        slots = [make_sealed_slot(placement, rank, tensors, file) for rank, file in enumerate(nameless)]
        arguments = (case, placement, slots, tensors, str(home), rounds)
        processes.start_processes(work, arguments, nprocs=case.ranks, start_method="fork")
        return dict(json.loads((home / "result").read_text()))


def ratio_of(times: dict[str, list[tuple[float, float]]], way: str, clock: int = 0) -> float:
    """Returns the time of a way in units of REFT-load's time.

    By the clock (0) or in processor time (1).
    """
    pairs = zip(times[way], times["reft"], strict=True)
    return statistics.median(other[clock] / own[clock] for other, own in pairs)


def result_rows(case: Case, figures: dict[str, Any]) -> list[Row]:
    """Returns the same figures for a file of results."""
    name, times = f"{case.ranks} ranks, {case.name}", figures["times"]
    rows = [Row(f"{name}: plain messages and copies", "x REFT-load", f">= {case.goal:g}", ratio_of(times, "plain"))]
    ways = {
        "messages": "plain messages alone",
        "copy": "a copy of a rank's state",
        "dcp": "torch.distributed.checkpoint.load",
    }
    rows += [
        Row(f"{name}: {text}", "x REFT-load", None, ratio_of(times, way)) for way, text in ways.items() if way in times
    ]
    seconds = [taken for taken, _ in times["reft"]]
    return [*rows, Row(f"{name}: REFT-load", "s", None, statistics.median(seconds), min=min(seconds), max=max(seconds))]


def row(case: Case, figures: dict[str, Any]) -> tuple[list[str], bool]:
    """Returns a line of the table, and whether the goal is met."""
    times = figures["times"]
    ratio = partial(ratio_of, times)
    passed = ratio("plain") >= case.goal
    gib = figures["state"] * case.ranks / 2**30
    cells = [
        "pass" if passed else "MISS", str(case.ranks), case.name, f"{gib:.2f}", f"{figures['sent'] / 2**30:.2f}",
        f"{statistics.median(seconds for seconds, _ in times['reft']):.2f}", f"{ratio('plain'):.2f}", f">= {case.goal:g}",
        f"{ratio('plain', 1):.2f}", f"{ratio('messages'):.2f}", f"{ratio('copy'):.2f}",
        f"{ratio('dcp'):.1f}" if "dcp" in times else "-",
    ]  # fmt: skip
    return cells, passed


def main() -> int:
    common.end_on_signals()
    options = parse()
    rows, results, all_passed = [], {}, True
    lines: list[Row] = []
    for case in CASES:
        if is_chosen(case, options):
            mib = options.mib or (64 if options.quick else 2048 // case.ranks)
            figures = measure(case, mib, options.rounds)
            cells, passed = row(case, figures)
            rows.append(cells)
            all_passed &= passed
            lines += result_rows(case, figures)
            results[f"{case.ranks} ranks, {case.name}"] = figures
            print(" ".join(cells), file=sys.stderr, flush=True)
    head = ["goal", "ranks", "case", "GiB restored", "GiB sent", "s", "plain/reft", "limit", "processor", "messages/reft",
            "copy/reft", "dcp/reft"]  # fmt: skip
    print(common.table(head, rows))
    if options.json:
        title = "Loading from peers, against plain messages" + ", 64 MiB a rank" * options.quick
        result.write(options.json, __file__, title, lines, details=results)
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
