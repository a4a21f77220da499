"""The cost of a snapshot after every step of a pipeline. All ways of copying take turns in one run.

    python bench/overhead.py [--quick] [--stages P] [--rounds N] [--json FILE] [--earlier FILE…]
                             [--trace FILE]

A 1F1B pipeline of torch's, one process a stage, over gloo. Each process is pinned to its own core
where there are enough cores. The ways take turns in blocks of a few steps, in the same random order
on all stages. Each block lies between two blocks of training alone:

    plain       training alone, without a hook of reft's
    blocking    a copy into mapped memory after the step, while training waits
    checkfreq   a host thread copies; the next optimizer step waits for it (CheckFreq, FAST '21)
    side        reft's copy engine, without a pacing plan
    reft        reft with its pacing plan: gaps first
    dcp         torch.distributed.checkpoint.async_save
    dlrover     not run; the output says why

Every way copies the whole state of the stage in each step. reft and side also digest it, seal it,
and agree on it. A step's time is the largest of all stages'. The cost of a way is the median of its
block over the mean of the medians of the two plain blocks beside it. So slow drifts cancel out. The
table has the median of these ratios with a 95 % interval (of medians of resampled blocks). On a
loaded machine the figures are ratios at best. `--earlier` adds the blocks of runs that wrote
`--json`.

The result depends on the bytes of state for each millisecond of a step. With few bytes the fixed
cost of a snapshot dominates, with many the bytes. Each stage has 76 MB (6.3 M parameters in fp32,
AdamW), and a step takes 0.4 s on two cores of a Xeon: 0.2 GB for each second of a step and core.
The Llama of bench/save.py (125 M parameters, 128 tokens a step, 1.5 GB) takes 0.65 s on two cores
and 1.5 s on one: 1.0 to 1.2 GB. Larger batches have fewer bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import reft
from bench import common, result
from bench.common import Mapped, median, quantile
from bench.options import count, listed, output
from bench.result import Row
from reft.cli.demo.cluster import free_port
from reft.client.schedule import hooks

NEVER = 1 << 40  # as `every`: no snapshot
# Steps of a block. The first ones do not count: no copy of the block is under way, or there is no
# pacing plan yet.
STEPS = 8
WARM = 3
FIGURES = ("steps", "stall")  # of each step, in seconds
WAYS = ("plain", "blocking", "checkfreq", "side", "reft", "dcp")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model and 2 rounds")
    parser.add_argument("--stages", type=count, default=2)
    parser.add_argument("--microbatches", type=count, default=8)
    parser.add_argument("--rounds", type=count, help="rounds of blocks (4)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after so many seconds")
    parser.add_argument("--ways", type=listed(WAYS), default=",".join(WAYS))
    parser.add_argument("--json", type=output, help="write every figure to this file")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="files of --json, to pool with this run")
    parser.add_argument("--trace", type=output, help="write the last steps' trace of all stages to this file")
    parser.add_argument("--role", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--daemon", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 4)
    return options


class Part(nn.Module):
    """One stage: linear layers, named by their place in the whole model."""

    def __init__(self, stage: int, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{stage * layers + i}": nn.Linear(width, width) for i in range(layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x


class Stage:
    """One process of the pipeline."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.rank, self.stages = options.role, options.stages
        torch.manual_seed(self.rank)
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= self.stages:
            os.sched_setaffinity(0, {cores[self.rank]})
        url = f"tcp://127.0.0.1:{options.port}"
        dist.init_process_group("gloo", init_method=url, rank=self.rank, world_size=self.stages)
        self.group = dist.new_group(backend="gloo")  # for background saves: collectives of two threads must not mix
        width, layers, rows = (256, 4, 16) if options.quick else (1024, 6, 16)
        self.model = Part(self.rank, width, layers)
        stage = PipelineStage(self.model, self.rank, self.stages, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, options.microbatches, loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(rows * options.microbatches, width)
        self.copied: Future[float] | None = None
        self.upload: Any = None
        self.stalled_s = 0.0
        self.optimizer.register_step_pre_hook(lambda *_: self.wait_for_copy())
        self.session = reft.attach(
            self.model, self.optimizer, self.schedule, job="overhead", daemon=options.daemon, protect="none"
        )
        self.pool = ThreadPoolExecutor(1)
        self.scratch = scratch
        self.train()
        self.session.step_end()
        self.tensors = [p.detach() for p in self.model.parameters()]
        self.tensors += [
            self.optimizer.state[p][key] for p in self.model.parameters() for key in ("exp_avg", "exp_avg_sq")
        ]
        self.mapped = Mapped(self.tensors)
        self.mapped.copy()
        assert self.session._window.profiler is not None
        self.profiler = self.session._window.profiler
        self.along = self.profiler._pacing_plan  # "side" is the same engine, without a pacing plan
        self.blocks: list[dict[str, Any]] = []
        self.trace: dict[str, Any] = {}
        self.tiers: dict[str, dict[str, float]] = {way: {} for way in ("side", "reft")}

    def train(self) -> None:
        """Trains one step of the pipeline.

        All stages meet before the optimizer, as they do for the norm of all gradients.
        """
        self.optimizer.zero_grad()
        target = {"target": self.x} if self.rank == self.stages - 1 else {}
        self.schedule.step(*((self.x,) if self.rank == 0 else ()), **target)
        dist.all_reduce(torch.zeros(1))
        self.optimizer.step()

    def wait_for_copy(self) -> None:
        """Waits for the copy: CheckFreq's fence."""
        if self.copied is not None:
            began = time.perf_counter()
            self.copied.result()
            self.stalled_s += time.perf_counter() - began
            self.copied = None

    def after(self, way: str) -> None:
        """Runs the way's work after an optimizer step."""
        began = time.perf_counter()
        if way == "blocking":
            self.mapped.copy()
        elif way == "dcp":
            if self.upload is not None:
                self.upload.result()
            names = {f"{i}": tensor for i, tensor in enumerate(self.tensors)}
            writer = dcp.FileSystemWriter(self.scratch / "checkpoint", overwrite=True)
            self.upload = dcp.async_save({f"stage{self.rank}": names}, storage_writer=writer, process_group=self.group)
        if way in ("blocking", "dcp"):
            self.stalled_s += time.perf_counter() - began
        if way == "checkfreq":
            self.copied = self.pool.submit(self.mapped.copy)
        if way in ("reft", "side"):
            self.session.step_end()

    def take_each(self, every: int) -> None:
        """Makes reft snapshot each `every`-th step from now on.

        attach fixes this number for a session, so the session has no method for it.
        """
        assert self.session._window.cadence is not None
        self.session._window.cadence.due_steps.first = every

    def block(self, way: str) -> None:
        """Runs a few steps of one way."""
        is_ours = way in ("reft", "side")
        self.take_each(1 if is_ours else NEVER)
        if is_ours:
            self.session._unfollow = hooks.follow(self.schedule, self.profiler)
        self.profiler._pacing_plan = self.along if way == "reft" else lambda: None  # type: ignore[method-assign]
        first = self.session.stats()
        steps, stall = [], []
        for i in range(STEPS):
            self.stalled_s, before = 0.0, self.session.stats()
            began = time.perf_counter()
            self.train()
            self.after(way)
            step_s = time.perf_counter() - began
            after = self.session.stats()
            reft_ms = after["stall_ms"] * after["snapshots"] - before["stall_ms"] * before["snapshots"]
            if i >= WARM:
                steps.append(step_s)
                stall.append(self.stalled_s + reft_ms / 1000)
        self.blocks.append({"way": way, "steps": steps, "stall": stall})
        if is_ours:
            self.session.seal()
            self.session._unfollow()
            for name, value in self.session.stats().items():
                if name.endswith("_bytes"):
                    self.tiers[way][name] = self.tiers[way].get(name, 0) + value - first[name]
        self.take_each(NEVER)
        self.wait_for_copy()
        if self.upload is not None:
            self.upload.result()
            self.upload = None
        dist.barrier()

    def run(self, rounds: int, ways: list[str], seconds: float) -> dict[str, Any]:
        order, until_s = random.Random(0), time.monotonic() + seconds
        self.session._unfollow()
        for way in ways:
            self.block(way)
        self.blocks.clear()
        for counted in self.tiers.values():
            counted.clear()
        others = [way for way in ways if way != "plain"]
        for _ in range(rounds):
            is_over = torch.tensor(int(time.monotonic() > until_s))
            dist.broadcast(is_over, 0)
            if is_over:
                break
            order.shuffle(others)
            for way in others:
                self.block("plain")
                self.block(way)
                if way == "reft":
                    self.trace = self.session.timeline()
        self.block("plain")
        stats = self.session.stats()
        return {
            "blocks": self.blocks,
            "bytes": self.mapped.nbytes,
            "stats": stats,
            "tiers": self.tiers,
            "trace": self.trace,
        }


def role(options: argparse.Namespace) -> None:
    with common.folder(common.SHM) as scratch:
        stage = Stage(options, scratch)
        found = stage.run(options.rounds, options.ways.split(","), options.seconds)
        stage.session.close()
        dist.destroy_process_group()
    options.result.write_text(json.dumps(found))


def run_stages(options: argparse.Namespace, daemon: str, home: Path) -> list[dict[str, Any]]:
    """Runs all stages, each in its own process; returns their results."""
    passed = ["--stages", str(options.stages), "--microbatches", str(options.microbatches), "--ways", options.ways]
    passed += [
        "--rounds",
        str(options.rounds),
        "--seconds",
        str(options.seconds),
        *(["--quick"] if options.quick else []),
    ]
    with ExitStack() as stack:
        running = []
        port = free_port()
        for rank in range(options.stages):
            command = [sys.executable, str(Path(__file__).resolve()), *passed, "--role", str(rank)]
            command += ["--port", str(port), "--daemon", daemon, "--result", str(home / f"{rank}.json")]
            running.append(stack.enter_context(common.process(command, home / f"{rank}.log", {"OMP_NUM_THREADS": "1"})))
        for rank, process in enumerate(running):
            if process.wait():
                raise RuntimeError(f"stage {rank} ended:\n{(home / f'{rank}.log').read_text()[-3000:]}")
    return [json.loads((home / f"{rank}.json").read_text()) for rank in range(options.stages)]


def merged(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the blocks; each figure is the largest of all stages."""
    return [
        {"way": same[0]["way"], **{key: [max(e) for e in zip(*(b[key] for b in same), strict=True)] for key in FIGURES}}
        for same in zip(*(stage["blocks"] for stage in stages), strict=True)
    ]


def overheads(blocks: list[dict[str, Any]], way: str) -> list[float]:
    """Returns for each block of a way its median step over its neighbours'.

    The neighbours are its two plain blocks.
    """
    medians = [median(block["steps"]) for block in blocks]
    return [
        medians[i] / ((medians[i - 1] + medians[i + 1]) / 2) - 1
        for i, block in enumerate(blocks)
        if block["way"] == way and 0 < i < len(blocks) - 1
    ]


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the interval of 95 % of the medians of resampled values."""
    dice = random.Random(0)
    drawn = sorted(median(dice.choices(values, k=len(values))) for _ in range(2000))
    return quantile(drawn, 0.025), quantile(drawn, 0.975)


def rows(runs: list[list[dict[str, Any]]], ways: list[str]) -> list[list[str]]:
    """Returns one row a way: step times over all stages, overhead, stall, bytes.

    Args:
        runs: the results of the stages of each run.
    """
    each, written = [merged(found) for found in runs], sum(stage["bytes"] for stage in runs[-1])
    table = []
    for way in ways:
        own = [block for blocks in each for block in blocks if block["way"] == way]
        steps, stall = ([value for block in own for value in block[key]] for key in FIGURES)
        cost = [value for blocks in each for value in overheads(blocks, way)] if way != "plain" else []
        low, high = interval(cost) if cost else (0.0, 0.0)
        table.append([
            way, f"{1000 * median(steps):.1f}", f"{1000 * quantile(steps, 0.99):.1f}",
            f"{100 * median(cost):+.1f} %" if cost else "", f"{100 * low:+.1f} to {100 * high:+.1f} %" if cost else "",
            f"{1000 * median(stall):.2f}", "0" if way == "plain" else f"{written / 1e6:.0f}", str(len(steps)),
        ])  # fmt: skip
    return table


def result_rows(runs: list[list[dict[str, Any]]], ways: list[str]) -> list[Row]:
    """Returns for each way its cost with the 95 % interval, its steps, and its stall."""
    each = [merged(found) for found in runs]
    table_rows = []
    for way in ways:
        own = [block for blocks in each for block in blocks if block["way"] == way]
        steps, stall = ([1000 * value for block in own for value in block[key]] for key in FIGURES)
        cost = [100 * value for blocks in each for value in overheads(blocks, way)] if way != "plain" else []
        if cost:
            low, high = interval(cost)
            table_rows.append(Row(f"{way}: over training alone, 95 %", "%", None, median(cost), min=low, max=high))
        table_rows.append(Row(f"{way}: step", "ms", None, median(steps), p99=quantile(steps, 0.99)))
        table_rows.append(Row(f"{way}: training held up", "ms a step", None, median(stall)))
    return table_rows


def main() -> None:
    options = parse()
    if options.role is not None:
        role(options)
        return
    common.end_on_signals()
    ways = options.ways.split(",")
    with common.daemon() as (address, _), common.folder() as home:
        stages = run_stages(options, address, home)
    head = ["way", "step p50 ms", "p99 ms", "overhead", "95 %", "stall ms", "MB a step", "steps"]
    runs = [*(json.loads(file.read_text())["details"]["stages"] for file in options.earlier), stages]
    print(common.table(head, rows(runs, [way for way in WAYS if way in ways])))
    for rank, stage in enumerate(stages):
        counted = stage["tiers"]["reft"]
        shares = ", ".join(
            f"{name} {100 * value / max(sum(counted.values()), 1):.0f} %" for name, value in counted.items()
        )
        print(
            f"stage {rank}, reft: {shares}; closed form off by {100 * stage['stats']['gap_error']:.0f} % of the idle time"
        )
    if importlib.util.find_spec("dlrover") is None:
        print("dlrover: not run, it is not installed here")
    else:
        print("dlrover: not run, its agent saves by rank of its own job, not by stage of this job")
    if options.trace:
        events = [event for stage in stages for event in stage["trace"]["traceEvents"]]
        options.trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    for stage in stages:
        del stage["trace"]
    if options.json:
        title = f"Snapshots of a pipeline, {options.stages} stages, {options.microbatches} microbatches"
        notes = [f"Blocks of {len(options.earlier)} earlier runs are counted too."] if options.earlier else []
        result.write(options.json, __file__, title, result_rows(runs, ways), notes, {"stages": stages})


if __name__ == "__main__":
    main()
