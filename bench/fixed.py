"""What a snapshot costs beside its bytes: CPU time of trainer and daemon, for a state of 0.3 MB.

    python bench/fixed.py [--steps N] [--layers L] [--json FILE]
    python bench/fixed.py --parameters 1000 5000 20000 75000 [--device cuda|cpu] [--steps N]
                          [--json FILE]

The second form measures the mark alone, for models of so many parameters of 4 elements each, as
experts of a mixture have them: the CPU time of the training thread at a mark that takes a snapshot.
With `--device cuda` the mark also enqueues the copies of all these tensors.

Blocks of steps with and without snapshots take turns. The difference is the cost of a snapshot. It
comes from the CPU clocks of both processes and of the training thread. So other processes on the
machine make it somewhat larger, but not by their own time. Between two snapshots training rests for
50 ms, so that caches are as cold as in a real step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

import reft
from bench import common, result
from bench.options import count, output
from bench.result import Row

NEVER = 1 << 40
REST_S = 0.05
BLOCKS = 4  # of each kind
WIDTH = 64
TITLE = "What a snapshot costs beside its bytes, in processor time"
MARK_TITLE = "A mark in the training thread, by the number of parameters"
MARK_GOALS = {20_000: 15.0}  # number of parameters → ms
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
EXPERTS = 128  # of a layer; 3 parameters each


def cpu_ms(pid: int) -> float:
    """Returns the CPU time of all threads of a process, also of ended threads."""
    return 1000 * time.clock_gettime(~pid << 3 | 2)


def switches(pid: int) -> int:
    """Returns how often the living threads of a process went to sleep."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        count += sum(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("volunt"))
    return count


class Measured:
    """A model, its session, and the clocks of both processes."""

    def __init__(self, address: str, pid: int, layers: int) -> None:
        torch.set_num_threads(1)
        self.pid = pid
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.session = reft.attach(self.model, self.optimizer, job="fixed", daemon=address, protect="none")
        self.x = torch.randn(8, WIDTH)

    def block(self, every: int, steps: int) -> list[float]:
        """Trains `steps` steps; returns averages for a step.

        These are ms at the mark, ms of the whole trainer, ms of the daemon, and the switches of
        both.
        """
        common.snapshot_each(self.session, every)
        before, mark_ms = self.clocks(), 0.0
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.x).sum().backward()
            time.sleep(REST_S)
            self.optimizer.step()
            began = time.thread_time()
            self.session.step_end()
            mark_ms += 1000 * (time.thread_time() - began)
        return [mark_ms / steps, *((b - a) / steps for a, b in zip(before, self.clocks(), strict=True))]

    def clocks(self) -> list[float]:
        me = os.getpid()
        return [cpu_ms(me), cpu_ms(self.pid), float(switches(me)), float(switches(self.pid))]


def experts(parameters: int) -> nn.Module:
    """Returns layers of experts with at least so many parameters."""
    expert = lambda: nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("gate", "up", "down")})  # noqa: E731
    layers, rest = divmod(-(-parameters // 3), EXPERTS)
    return nn.ModuleList(nn.ModuleList(expert() for _ in range(n)) for n in (*[EXPERTS] * layers, rest) if n)


def mark_times(address: str, parameters: int, optimizer_name: str, steps: int, device: str) -> list[float]:
    """Returns the milliseconds of each of so many marks, after three others."""
    torch.set_num_threads(1)
    model = experts(parameters).to(device)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters(), lr=0.1)
    job = f"mark-{parameters}-{optimizer_name}"
    session = reft.attach(model, optimizer, job=job, daemon=address, protect="none", every=1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    times = []
    for _ in range(steps + 3):
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()  # a full queue of the device would make the mark wait
        began = time.thread_time()
        session.step_end()
        times.append(1000 * (time.thread_time() - began))
        session.seal()
    session.close()
    return times[3:]


def measure_marks(options: argparse.Namespace) -> None:
    """Measures marks by the number of parameters, and prints and writes the figures."""
    rows = []
    with common.daemon() as (address, _):
        for name in OPTIMIZERS:
            for parameters in options.parameters:
                times = mark_times(address, parameters, name, options.steps, options.device)
                goal = MARK_GOALS.get(parameters)
                limit = None if goal is None else f"<= {goal:.0f}"
                figure = common.median(times)
                rows.append(
                    Row(f"{parameters} parameters, {name}", "ms", limit, figure, min=min(times), max=max(times))
                )
                print(
                    f"{parameters} parameters, {name}: {figure:.1f} ms at a mark ({min(times):.1f} to {max(times):.1f})"
                )
    if options.json:
        notes = [f"{options.steps} marks each, with a snapshot at each; CPU time of the training thread.",
                 "AdamW has four tensors for each parameter, SGD one."]  # fmt: skip
        on_device = options.device == "cuda"
        notes += [f"Device: {torch.cuda.get_device_name()}."] if on_device else []
        result.write(options.json, __file__, MARK_TITLE + ", on CUDA" * on_device, rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--parameters", type=count, nargs="+", help="measure marks for so many parameters")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of these parameters")
    parser.add_argument("--steps", type=count, default=50, help="of a block")
    parser.add_argument("--layers", type=count, default=6)
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    common.end_on_signals()
    if options.parameters:
        return measure_marks(options)
    with common.daemon() as (address, pid):
        measured = Measured(address, pid, options.layers)
        measured.block(1, 10)
        taken = [(measured.block(NEVER, options.steps), measured.block(1, options.steps)) for _ in range(BLOCKS)]
        skipped = measured.session.stats()["skipped"]
        measured.session.close()
    costs = [[on - off for off, on in zip(*pair, strict=True)] for pair in taken]
    names = [
        "training thread, at the mark",
        "trainer, all threads",
        "daemon",
        "trainer's switches",
        "daemon's switches",
    ]
    units = ["ms", "ms", "ms", "", ""]
    rows = [
        [name, f"{common.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}", unit]
        for name, unit, values in zip(names, units, zip(*costs, strict=True), strict=True)
    ]
    print(common.table(["a snapshot takes", "median", "blocks", ""], rows))
    conditions = (
        f"{options.layers} layers, {BLOCKS} blocks of {options.steps} steps each; {skipped:.0f} snapshots were skipped"
    )
    print(conditions)
    if options.json:
        lines = [
            Row(name, f"{unit} a snapshot".strip(), None, common.median(values), min=min(values), max=max(values))
            for name, unit, values in zip(names, units, zip(*costs, strict=True), strict=True)
        ]
        result.write(options.json, __file__, TITLE, lines, [f"{conditions}."])


if __name__ == "__main__":
    main()
