"""Steps of torch's ZeRO whose moments another node recomputes (paper, AOR), beside the exchange.

    .venv/bin/python bench/aor.py [--quick] [--rounds 5] [--json FILE]

    2 daemons, a rank each; DDP + ZeroRedundancyOptimizer (AdamW), a snapshot of every step

        alone      no reft
        none       snapshots, no protection
        exchange   the daemons send parity of the moments after each whole step
        aor        gradients are recorded, and each node recomputes the other's moments

    In each round each job trains one block, one after the other, and waits until its newest whole
    step is protected. ratio = median over rounds of (median step / median step alone) of one round.
    The ranks share all cores but one, which the daemons and their children use.

Ends with 1 if a goal is missed. On two cores both ranks share one core.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "daemon"))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import reft
from bench import common, result
from bench.common import median, quantile
from bench.exchange_turn import DEADLINE_S, NODES, STEP_S, WARM, TwoDaemons, answer_of, block, cpu_s, spawned, verdict
from bench.options import count, output
from bench.result import Row
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

ALONE, NONE, EXCHANGE, AOR = MODES = ("alone", "none", "exchange", "aor")
PROTECT = {NONE: "none", EXCHANGE: "aec", AOR: "aor"}
JOB = "bench-aor"
GOAL = 1.02
WIDTH = 1024
ROWS_MAX = 4096
SLOTS = 4
NOTES = (
    "The ranks share all cores but one. The other one carries the daemons, the movers and the replayers of both nodes.",
    "CPU seconds of a step: of all processes of both daemons, in blocks of that job. The paper reports 0.6 %.",
    "sent: what the movers of both nodes received, for each snapshot that became whole.",
)


@dataclass(frozen=True)
class RankTask:
    """What the two ranks of a job have in common.

    Attributes:
        mode: one of MODES.
        layers: of the model.
        daemons: the daemon's address of each rank.
        cores: where the ranks run.
        store: file for the process group.
    """

    mode: str
    layers: int
    daemons: tuple[str, ...]
    cores: frozenset[int]
    store: str


@dataclass
class ModeFigures:
    """What was measured of one job.

    Attributes:
        blocks: seconds of each step, for each block.
        daemons_s: processor time of all processes of both daemons, for each step of a block.
        moved_bytes: that the movers brought in the blocks.
        whole: steps that became whole in the blocks.
        replays: how the copies were made at last; of aor only.
        stats: of rank 0 at the end.
    """

    blocks: list[list[float]] = field(default_factory=list)
    daemons_s: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    whole: int = 0
    replays: list[str] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)


def train(rank: int, task: RankTask, control: Connection) -> None:
    """Runs a rank: trains a block for each command, and answers with the seconds of its steps."""
    os.sched_setaffinity(0, task.cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.store}", rank=rank, world_size=len(task.daemons))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(task.layers))))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    session: Any = None
    if task.mode != ALONE:
        session = reft.attach(
            model, optimizer, job=f"{JOB}-{task.mode}", daemon=task.daemons[rank], protect=PROTECT[task.mode], every=1,
            slots=SLOTS,
        )  # fmt: skip
    control.send("attached")
    while command := control.recv():
        batch, steps = command
        x, seconds = torch.randn(batch, WIDTH), []
        for _ in range(steps + WARM):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if session is not None:
                session.step_end()
            seconds.append(time.perf_counter() - began)
        if session is not None:
            session.seal(DEADLINE_S)
        control.send({"seconds": seconds[WARM:], "stats": session.stats() if session is not None else {}})
    with session or nullcontext():
        dist.destroy_process_group()


def status(address: str, mode: str) -> pb.JobStatus:
    with rpc.channel(address) as channel:
        (job,) = pb_grpc.DaemonStub(channel).Status(pb.StatusRequest(job=f"{JOB}-{mode}"), timeout=10).jobs
    return job


def await_protected(addresses: Sequence[str], mode: str) -> None:
    """Returns once the newest whole step is protected on both nodes."""
    end = time.monotonic() + DEADLINE_S
    while True:
        exchanges = [(job.exchange, job.whole) for job in (status(address, mode) for address in addresses)]
        if all(exchange.turn < 0 and exchange.protected == whole >= 0 for exchange, whole in exchanges):
            return
        if time.monotonic() > end:
            raise RuntimeError(f"the newest whole step of {mode} is not protected after {DEADLINE_S:g} s")
        time.sleep(0.05)


def processes_s(pids: Sequence[int]) -> float:
    """Returns the processor time of these processes and of their living children."""
    total = 0.0
    for pid in pids:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        total += sum(cpu_s(each) for each in (pid, *map(int, children)))
    return total


def measure(cores: set[int], layers: int, rounds: int, steps: int) -> dict[str, ModeFigures]:
    """Trains one block of each job in each round."""
    figures = {mode: ModeFigures() for mode in MODES}
    with ExitStack() as stack:
        daemons = TwoDaemons(stack)
        home = stack.enter_context(common.folder())
        ranks: dict[str, list[Connection]] = {}
        for mode in MODES:
            task = RankTask(mode, layers, daemons.addresses, frozenset(cores), str(home / mode))
            ranks[mode] = [stack.enter_context(spawned(train, rank, task))[0] for rank in range(NODES)]
            for control in ranks[mode]:
                answer_of(control)
        batch = 8
        while median(block(ranks[ALONE], batch, 3)[0]) < STEP_S and batch < ROWS_MAX:
            batch *= 2
        for number in range(rounds + 1):  # the first round makes the anchors, and does not count
            for mode in MODES:
                moved, whole = daemons.turns(), status(daemons.addresses[0], mode).whole if mode != ALONE else 0
                used_s = processes_s(daemons.pids)
                seconds, stats = block(ranks[mode], batch, steps)
                if mode in (EXCHANGE, AOR):
                    await_protected(daemons.addresses, mode)
                if not number:
                    continue
                figure = figures[mode]
                figure.blocks.append(seconds)
                figure.stats = stats
                figure.daemons_s.append((processes_s(daemons.pids) - used_s) / NODES / (steps + WARM))
                figure.moved_bytes += sum(
                    nbytes for old, new in zip(moved, daemons.turns(), strict=True) for nbytes, _ in new[len(old) :]
                )
                if mode != ALONE:
                    job = status(daemons.addresses[0], mode)
                    figure.whole += job.whole - whole
                    figure.replays = [each.reason or "recomputed" for each in job.exchange.replays]
            print({mode: f"{median(f.blocks[-1]):.3f} s" for mode, f in figures.items() if f.blocks}, file=sys.stderr)
    return figures


def rows_of(figures: dict[str, ModeFigures]) -> list[Row]:
    """Returns the steps of each job beside those without reft, and what its daemons did."""
    rows: list[Row] = []
    alone = figures[ALONE].blocks
    for mode in (NONE, EXCHANGE, AOR):
        ratios = [median(own) / median(base) for own, base in zip(figures[mode].blocks, alone, strict=True)]
        goal = f"<= {GOAL:g}" if mode == AOR else None
        name = f"{mode}: step over one without reft"
        rows.append(Row(name, "ratio", goal, median(ratios), min=min(ratios), max=max(ratios)))
    for mode, figure in figures.items():
        steps = [1000 * seconds for each in figure.blocks for seconds in each]
        rows.append(Row(f"{mode}: step", "ms", None, median(steps), p99=quantile(steps, 0.99)))
        if mode != ALONE:
            rows.append(
                Row(f"{mode}: a node's daemon and children", "CPU ms a step", None, 1000 * median(figure.daemons_s))
            )
        if mode in (EXCHANGE, AOR):
            sent = figure.moved_bytes / NODES / max(figure.whole, 1) / 1e6
            rows.append(Row(f"{mode}: sent by a node for a whole step", "MB", "<= 0" if mode == AOR else None, sent))
    recorded = figures[AOR].stats
    marks = recorded["records"] + recorded["records_torn"] + recorded["records_missed"]
    rows.append(Row("aor: marks without a record", "of all", None, 1 - recorded["records"] / max(marks, 1)))
    return rows


def main() -> int:
    common.end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parser.add_argument("--rounds", type=count, help="blocks of each job (5)")
    parser.add_argument("--json", type=output, help="write every figure to this file")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    print(f"load before: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    layers, steps = (3, 8) if options.quick else (10, 30)
    figures = measure(set(cores[:-1] or cores), layers, options.rounds or (1 if options.quick else 5), steps)
    rows = rows_of(figures)
    texts = [
        [verdict(row), row.name, f"{row.value:.3g}", row.goal or "", row.unit,
         *(f"{each:.3g}" if each is not None else "" for each in (row.min, row.max, row.p99))]
        for row in rows
    ]  # fmt: skip
    print(common.table(["", "figure", "value", "goal", "unit", "least", "largest", "p99"], texts))
    print(f"load after: {os.getloadavg()[0]:.1f}; copies at last: {figures[AOR].replays}", file=sys.stderr)
    if options.json:
        title = "Steps of torch's ZeRO, with moments recomputed by another node" + ", --quick" * options.quick
        details = {mode: vars(figure) for mode, figure in figures.items()}
        result.write(options.json, __file__, title, rows, NOTES, details=details)
    return 1 if any(row.is_missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
