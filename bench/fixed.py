"""What a snapshot costs beside its bytes: CPU time of trainer and daemon, for a state of 0.3 MB.

    python bench/fixed.py [--steps N] [--layers L] [--json FILE]

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=count, default=50, help="of a block")
    parser.add_argument("--layers", type=count, default=6)
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    common.end_on_signals()
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
