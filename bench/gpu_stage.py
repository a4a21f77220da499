"""What a snapshot of every step costs one pipeline stage; its neighbours are emulated.

    python bench/gpu_stage.py [--device cuda|cpu] [--stages P --stage p --microbatches M]
                              [--replicas D --tolerate F] [--width W --inner I --heads H]
                              [--layers L --length T --batch B] [--steps N] [--json FILE]

    stage p of P, 1F1B   F F F ░░░░ B F B F … B ░ B ░ B ░░░░ optimizer   ░ a wait, not a receive

The stage is a stack of Llama's blocks: weights and gradients bf16, AdamW on fp32 master weights.
Its state is these 12 bytes a parameter. It belongs to a group of D replicas that survives F losses,
so each snapshot writes |P|/(D-F) bytes. The closed formula gives the length of the waits, from
forwards and backwards that are measured first. On CUDA a wait is a kernel that does nothing.
Everything else is the code of a session: the save plan and its parity, the copy engine, the
profiler of the iteration, pinned slots (three). Only the capsule and the connection to the daemon
are missing.

Steps of three kinds take turns in blocks, in one run: training alone; reft, which places copies by
the pacing plan; and the same engine without a pacing plan, which copies at once. The first block of
each kind does not count.

    step        from mark to mark, in the device's time
    overhead    of the medians, against training alone
    stall       time for which the optimizer waited at the fence, a snapshot
    in gaps     share of the bytes whose copy was placed into a wait

Only torch and numpy must be installed. Without xxhash and protobuf there are substitutes
(bench/plain.py), and the output names them. On the CPU this program shows that it works, not what
it costs. Ends with 1 if a goal is missed. There is no goal on the CPU, where copies and compute
share the cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script also runs by its path

import torch
from torch import nn

from bench import plain, result

SUBSTITUTED = plain.substitute()

from bench.common import Block, Shape, median, quantile, table  # noqa: E402
from bench.options import output  # noqa: E402
from bench.result import Row  # noqa: E402
from reft.client.memory import xor  # noqa: E402
from reft.client.memory.threads import TaskThread  # noqa: E402
from reft.client.schedule.iteration_profile import IterationProfiler  # noqa: E402
from reft.client.snapshot.cpu_engine import CpuCopyEngine  # noqa: E402
from reft.client.snapshot.engine import CopiedEvent, CopyOrder, RunningCopy  # noqa: E402
from reft.client.snapshot.save_plan import SavePlan, plan_save  # noqa: E402
from reft.client.state.tensors import TensorIndex  # noqa: E402
from reft.core.coding.erasure import run  # noqa: E402
from reft.core.coding.placement import place  # noqa: E402
from reft.core.commit.version import Epoch, Version  # noqa: E402
from reft.core.layout.cells import divide  # noqa: E402
from reft.core.pipeline import actions, bubbles  # noqa: E402
from reft.core.pipeline.actions import Action, ActionKind, Times  # noqa: E402
from reft.core.pipeline.pacing import Tier  # noqa: E402
from reft.wire.slot_format import Geometry, SlotMap  # noqa: E402

BLOCK = 10  # steps of one kind in a row
SLOTS = 3
MODES = ("alone", "reft", "at once")
GOALS = {"gaps": 0.001, "no gaps": 0.01}  # overhead of the median on CUDA


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    for name, cuda, cpu, what in (
        ("stages", 4, 4, "of the pipeline; 1: no waits"), ("stage", 1, 1, "which of them, from 0"),
        ("microbatches", 8, 4, "of a step"), ("replicas", 8, 8, "D: nodes that hold this stage"),
        ("tolerate", 2, 2, "F: how many of them may be lost"), ("width", 4096, 64, "of the model"),
        ("inner", 11008, 176, "of its MLP"), ("heads", 32, 4, "of its attention"), ("layers", 8, 1, "of this stage"),
        ("length", 2048, 32, "words of a sequence"), ("batch", 1, 1, "sequences of a microbatch"),
        ("steps", 300, 30, "measured steps of each kind"), ("chunk-kib", 4096, 256, "KiB of a digest's chunk"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, help=f"{what} ({cuda} on CUDA, {cpu} on the CPU)")
        parser.set_defaults(**{f"{name.replace('-', '_')}_": (cuda, cpu)})
    parser.add_argument("--json", type=output, help="write every figure to this file")
    args = parser.parse_args()
    for name, value in list(vars(args).items()):
        if name.endswith("_"):
            default = value[args.device == "cpu"]
            setattr(args, name[:-1], default if getattr(args, name[:-1]) is None else getattr(args, name[:-1]))
            delattr(args, name)
    if not 0 <= args.stage < args.stages or not 0 <= args.tolerate < args.replicas:
        parser.error("--stage must be from 0 to --stages - 1, and --tolerate from 0 to --replicas - 1")
    return args


class Clock:
    """The device's time: events on CUDA, the host's clock on the CPU."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"
        self._spin_per_s = self._calibrate() if self.is_cuda else 0.0

    def now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Waits for the second moment; returns the seconds between both."""
        if not self.is_cuda:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def timed(self, work: Callable[[], object], times: int) -> float:
        """Returns the median of some runs, in seconds."""
        seconds = []
        for _ in range(times):
            begin = self.now()
            work()
            seconds.append(self.seconds(begin, self.now()))
        return statistics.median(seconds)

    def wait(self, seconds: float) -> None:
        """Idles for this time, in the place of a receive."""
        if self.is_cuda:
            torch.cuda._sleep(int(seconds * self._spin_per_s))
        else:
            time.sleep(seconds)

    def _calibrate(self) -> float:
        cycles = 100_000_000
        torch.cuda._sleep(cycles)
        return cycles / self.timed(lambda: torch.cuda._sleep(cycles), 5)


class Stage:
    """The blocks and the optimizer of one stage.

    It also has the waits of its place in the pipeline.
    """

    def __init__(self, args: argparse.Namespace, clock: Clock) -> None:
        torch.manual_seed(0)
        shape = Shape(args.width, args.inner, args.layers, args.heads, 0, args.batch, args.length)
        on: dict[str, Any] = {"device": args.device, "dtype": torch.bfloat16}
        with torch.device(args.device):
            self.blocks = nn.ModuleList(Block(shape) for _ in range(args.layers)).to(**on)
        size = args.width // args.heads
        angles = torch.arange(args.length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)[None]
        angles = torch.cat((angles, angles), -1).to(args.device)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.x = torch.randn(args.batch, args.length, args.width, **on)
        self.grad = torch.randn_like(self.x) / self.x.numel()
        self.weights = list(self.blocks.parameters())
        self.master = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.master, lr=1e-4, fused=True)
        self.clock = clock
        self.order = actions.one_f_one_b(args.stage, args.stages, args.microbatches)
        self.outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.gaps: dict[int, float] = {}

    def run(self, action: Action) -> None:
        """Runs a forward or a backward of one microbatch."""
        if action.kind is ActionKind.FORWARD:
            x = self.x.detach().requires_grad_()
            y = x
            for block in self.blocks:
                y = block(y, self.cos, self.sin)
            self.outputs[action.microbatch] = x, y
        else:
            _, y = self.outputs.pop(action.microbatch)
            y.backward(self.grad)

    def update(self) -> None:
        """Runs the optimizer on the master weights, and rounds the weights from them."""
        for weight, master in zip(self.weights, self.master, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.master, strict=True):
                weight.copy_(master)

    def state(self) -> TensorIndex:
        """Returns the tensors of a snapshot; call it after the first update."""
        tensors: dict[str, torch.Tensor] = {}
        for i, master in enumerate(self.master):
            kept = self.optimizer.state[master]
            tensors |= {f"{i}.master": master.detach(), f"{i}.m": kept["exp_avg"], f"{i}.v": kept["exp_avg_sq"]}
        return TensorIndex(tensors)

    def calibrate(self, args: argparse.Namespace) -> Times:
        """Measures forward and backward, and computes the waits of such a stage."""
        forward, backward = Action(ActionKind.FORWARD, 0), Action(ActionKind.BACKWARD, 0)
        seconds: dict[ActionKind, list[float]] = {ActionKind.FORWARD: [], ActionKind.BACKWARD: []}
        for _ in range(12):
            for action in (forward, backward):
                begin = self.clock.now()
                self.run(action)
                seconds[action.kind].append(self.clock.seconds(begin, self.clock.now()))
        times = Times(median(seconds[ActionKind.FORWARD][4:]), median(seconds[ActionKind.BACKWARD][4:]))
        gaps = bubbles.one_f_one_b(args.stage, args.stages, args.microbatches, times)
        self.gaps = {gap.place: gap.length for gap in gaps}
        return times


@dataclass
class Snapshotting:
    """The engine with its slots and its profiler, as in a session."""

    copy_engine: Any
    save_plan: SavePlan
    slots: list[SlotMap]
    profiler: IterationProfiler
    free: list[int] = field(default_factory=lambda: list(range(SLOTS)))
    taken: int = 0
    skipped: int = 0
    errors: list[Exception] = field(default_factory=list)
    thread: TaskThread = field(default_factory=lambda: TaskThread("snapshots", None))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, args: argparse.Namespace, state: TensorIndex) -> Snapshotting:
        chunk = args.chunk_kib << 10
        layout = state.layout()
        division = divide({layout.digest: layout}, [layout.digest] * args.replicas)
        placement = place(division, list(range(args.replicas)), "auto", args.tolerate, chunk)
        copy_engine: Any = CpuCopyEngine([])
        if args.device == "cuda":
            from reft.client.snapshot.cuda_engine import CudaCopyEngine

            copy_engine = CudaCopyEngine()
        save_plan = plan_save(placement, 0, layout.leaves, state.tensors, copy_engine.parity_tiling)
        geometry = Geometry(1 << 20, save_plan.data_bytes, chunk)
        slots = []
        for _ in range(SLOTS):
            pages = torch.zeros(geometry.file_bytes, dtype=torch.uint8, pin_memory=args.device == "cuda")
            slots.append(SlotMap.create(pages.numpy(), geometry, "bench", 0))
        return cls(copy_engine, save_plan, slots, IterationProfiler(copy_engine))

    def take(self, step: int, pacing_plan: Any) -> None:
        """Begins a snapshot, if a slot is free."""
        with self._lock:
            index = self.free.pop() if self.free else -1
        if index < 0:
            self.skipped += 1
            return
        slot = self.slots[index]
        slot.begin(
            Version(Epoch(1, bytes(16)), step), self.save_plan.digest, self.save_plan.table, self.save_plan.data_bytes
        )
        self.taken += 1

        order = CopyOrder(self.save_plan, self.save_plan.chunk_bytes, step, pacing_plan=pacing_plan)
        copy = self.copy_engine.begin(order, slot)
        self.thread.submit(lambda: self.finish(copy, slot, index))

    def finish(self, copy: RunningCopy, slot: SlotMap, index: int) -> None:
        """Brings the slot to SEALED; runs in the snapshot thread."""
        try:
            for event in copy.events(slot):
                if isinstance(event, CopiedEvent):
                    slot.put_capsule(b"")
                    slot.landed()
                else:
                    slot.sealed(event.digests)
        except Exception as error:
            self.errors.append(error)
        with self._lock:
            self.free.append(index)


@dataclass
class Kept:
    """The measurements of one kind of step."""

    seconds: list[float] = field(default_factory=list)
    stall_s: float = 0.0
    written: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    taken: int = 0
    skipped: int = 0


def one_step(stage: Stage, snapshotting: Snapshotting, step: int, mode: str) -> None:
    """Runs one step, from a mark to the next."""
    profiler, copy_engine = snapshotting.profiler, snapshotting.copy_engine
    pacing_plan = profiler.mark(step)
    if mode != "alone":
        snapshotting.take(step, pacing_plan if mode == "reft" else None)
    for index, action in enumerate(stage.order):
        wait(stage, profiler, index)
        profiler.enter(Tier.COMPUTE, f"{action.kind.value}{action.microbatch}", action.kind)
        stage.run(action)
    wait(stage, profiler, len(stage.order))
    profiler.fence()
    copy_engine.fence()
    stage.update()


def wait(stage: Stage, profiler: IterationProfiler, place: int) -> None:
    if seconds := stage.gaps.get(place, 0.0):
        profiler.enter(Tier.GAP, "wait")
        stage.clock.wait(seconds)


def blocks(steps: int) -> Iterator[tuple[str, bool]]:
    """Yields the kind of each block, and whether it counts.

    Each kind follows each other kind equally often.
    """
    count = -(-steps // BLOCK)
    for index in range(count + 1):
        for turn in range(len(MODES)):
            yield MODES[(index + turn) % len(MODES)], index > 0


def measure(args: argparse.Namespace, stage: Stage, snapshotting: Snapshotting) -> dict[str, Kept]:
    kept = {mode: Kept() for mode in MODES}
    copy_stats, step = snapshotting.copy_engine.copy_stats, 1
    for mode, counts in blocks(args.steps):
        before = (
            copy_stats.stall_s,
            {tier: copy_stats.written(tier) for tier in Tier},
            snapshotting.taken,
            snapshotting.skipped,
        )
        marks = []
        for _ in range(BLOCK):
            marks.append(stage.clock.now())
            one_step(stage, snapshotting, step, mode)
            step += 1
        marks.append(stage.clock.now())
        seconds = [stage.clock.seconds(begin, end) for begin, end in pairwise(marks)]
        snapshotting.profiler.mark(step)  # also reads what the device has measured meanwhile
        if counts:
            found = kept[mode]
            found.seconds += seconds[1:]  # the first mark of a block comes before another kind's snapshot has ended
            found.stall_s += copy_stats.stall_s - before[0]
            for tier in Tier:
                found.written[tier] += copy_stats.written(tier) - before[1][tier]
            found.taken += snapshotting.taken - before[2]
            found.skipped += snapshotting.skipped - before[3]
    return kept


def plain_copy_rate(args: argparse.Namespace, clock: Clock) -> float:
    """Returns the bytes a second of one large copy from the device.

    The target memory is allocated, and pinned on CUDA.
    """
    nbytes = (1 << 30) if clock.is_cuda else (64 << 20)
    source = torch.ones(nbytes, dtype=torch.uint8, device=args.device)
    target = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=clock.is_cuda)
    return nbytes / clock.timed(lambda: target.copy_(source, non_blocking=True), 7)


def encode_seconds(save_plan: SavePlan, device: str, clock: Clock) -> float:
    """Returns the seconds to compute all parity of a snapshot.

    The inputs are ready; the time of copying is not included.
    """
    total, known = 0.0, dict[tuple[int, int], float]()
    for column in save_plan.columns:
        key = id(column.program), column.nbytes
        if key not in known:
            program, counts = column.program, (len(column.inputs), len(column.outputs), column.program.scratch)
            inputs, outputs, scratch = (
                list(torch.zeros(count, column.nbytes, dtype=torch.uint8, device=device)) for count in counts
            )
            known[key] = clock.timed(partial(run, program, inputs, outputs, scratch, xor.TORCH), 5)
        total += known[key]
    return total


def row(mode: str, kept: Kept, alone: Kept) -> list[str]:
    cells = [mode, f"{1000 * median(kept.seconds):.3f}", f"{1000 * quantile(kept.seconds, 0.99):.3f}"]
    if kept is alone:
        return [*cells, "", "", "", ""]
    written = sum(kept.written.values())
    return [
        *cells,
        f"{100 * (median(kept.seconds) / median(alone.seconds) - 1):.2f} %",
        f"{1000 * kept.stall_s / max(kept.taken, 1):.3f}",
        f"{100 * kept.written[Tier.GAP] / max(written, 1):.0f} %",
        f"{kept.taken} ({kept.skipped} skipped)",
    ]


def result_rows(kept: dict[str, Kept], goal: float | None) -> list[Row]:
    """Returns the table for a file of results.

    The goal limits reft's overhead, in percent.
    """
    rows, alone = [], median(kept["alone"].seconds)
    for mode in MODES:
        each, written = kept[mode], sum(kept[mode].written.values())
        rows.append(
            Row(f"{mode}: step", "ms", None, 1000 * median(each.seconds), p99=1000 * quantile(each.seconds, 0.99))
        )
        if mode != "alone":
            limit = f"<= {goal:g}" if goal is not None and mode == "reft" else None
            rows.append(Row(f"{mode}: over training alone", "%", limit, 100 * (median(each.seconds) / alone - 1)))
            rows.append(
                Row(f"{mode}: wait at the fence", "ms a snapshot", None, 1000 * each.stall_s / max(each.taken, 1))
            )
            rows.append(Row(f"{mode}: bytes in gaps", "%", None, 100 * each.written[Tier.GAP] / max(written, 1)))
    return rows


def figures(
    args: argparse.Namespace, stage: Stage, snapshotting: Snapshotting, times: Times, clock: Clock
) -> dict[str, Any]:
    copy_stats, save_plan = snapshotting.copy_engine.copy_stats, snapshotting.save_plan
    state = sum(leaf.nbytes for leaf in save_plan.leaves)
    gaps = sum(stage.gaps.values())
    return {
        "device": torch.cuda.get_device_name() if clock.is_cuda else "cpu", "torch": torch.__version__,
        "forward_ms": 1000 * times.forward, "backward_ms": 1000 * times.backward,
        "idle_ms": 1000 * gaps, "parameters": sum(weight.numel() for weight in stage.weights), "state_bytes": state,
        "snapshot_bytes": save_plan.written_bytes, "share_of_state": save_plan.written_bytes / state,
        "plain_gb_per_s": plain_copy_rate(args, clock) / 1e9, "gap_gb_per_s": copy_stats.rate(Tier.GAP) / 1e9,
        "beside_compute_gb_per_s": copy_stats.rate(Tier.COMPUTE) / 1e9,
        "encode_ms": 1000 * encode_seconds(save_plan, args.device, clock), "substituted": SUBSTITUTED,
    }  # fmt: skip


def show(args: argparse.Namespace, kept: dict[str, Kept], data: dict[str, Any]) -> None:
    alone = median(kept["alone"].seconds)
    print(
        f"{data['device']}, torch {data['torch']}: stage {args.stage} of {args.stages}, {args.microbatches} microbatches, "
        f"{data['parameters'] / 1e6:.1f} M parameters, state {data['state_bytes'] / 1e9:.3f} GB\n"
        f"forward {data['forward_ms']:.2f} ms, backward {data['backward_ms']:.2f} ms, "
        f"idle {data['idle_ms']:.2f} ms of a step ({data['idle_ms'] / alone / 10:.0f} %)\n"
        f"a snapshot writes {data['snapshot_bytes'] / 1e9:.4f} GB ({data['share_of_state']:.4f} of the state; "
        f"1/(D-F) = {1 / (args.replicas - args.tolerate):.4f})\n"
        f"copies: {data['gap_gb_per_s']:.1f} GB/s in gaps, {data['beside_compute_gb_per_s']:.1f} beside compute, "
        f"plain copy {data['plain_gb_per_s']:.1f}; parity is computed in {data['encode_ms']:.2f} ms\n"
    )
    head = ["steps", "p50 ms", "p99 ms", "overhead", "stall ms", "in gaps", "snapshots"]
    print(table(head, [row(mode, kept[mode], kept["alone"]) for mode in MODES]))
    for each in SUBSTITUTED:
        print(f"not installed: {each}")


def main() -> int:
    args = parse()
    if args.device == "cpu":
        torch.set_num_threads(1)  # without its own core the copy thread would show nothing
    clock = Clock(args.device)
    stage = Stage(args, clock)
    times = stage.calibrate(args)
    stage.update()
    snapshotting = Snapshotting.of(args, stage.state())
    kept = measure(args, stage, snapshotting)
    measurements = figures(args, stage, snapshotting, times, clock)
    snapshotting.thread.close()
    snapshotting.copy_engine.close()
    show(args, kept, measurements)
    overhead = median(kept["reft"].seconds) / median(kept["alone"].seconds) - 1
    if args.json:
        seconds = {mode: kept[mode].seconds for mode in MODES}
        details = {**measurements, "arguments": vars(args) | {"json": None}, "overhead": overhead, "seconds": seconds}
        notes = [f"Device: {measurements['device']}.", *(f"Not installed: {each}." for each in SUBSTITUTED)]
        rows = result_rows(kept, 100 * GOALS["gaps" if stage.gaps else "no gaps"] if clock.is_cuda else None)
        result.write(args.json, __file__, "Snapshots of one pipeline stage on a device", rows, notes, details)
    if snapshotting.errors:
        print(f"{len(snapshotting.errors)} snapshots failed, the first with: {snapshotting.errors[0]!r}")
        return 1
    goal = GOALS["gaps" if stage.gaps else "no gaps"]
    if clock.is_cuda and overhead > goal:
        print(f"overhead {100 * overhead:.2f} % is above the goal of {100 * goal:.1f} %")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
