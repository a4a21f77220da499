"""How soon the survivors know that a node is lost, in 20 losses.

    python bench/detection.py [--losses 20] [--nodes 4] [--json FILE]

Each node is a set of namespaces with a real daemon, and with a process that sends heartbeats like a
torchrun agent. There is no trainer. A loss pulls the node's cable and kills all its processes. The
time begins before the cable is pulled. It ends when OFFLINE arrives at the last survivor, in its
long poll of `Signals`, which wakes its agent. Needs the right to make namespaces (root).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "daemon")]  # so this script runs without PYTHONPATH

from bench import result  # noqa: E402
from bench.options import count, output  # noqa: E402
from bench.result import Row  # noqa: E402
from reft.core.membership.failure_detector import Signal  # noqa: E402
from tests.support.netns import why_not  # noqa: E402
from tests.support.watched import Watched  # noqa: E402

GOAL_S = 1.5
SEED = 7


def measure(nodes: int, losses: int) -> tuple[list[float], list[float]]:
    """Returns for each loss the seconds until the first survivor knew, and until the last."""
    chance = random.Random(SEED)
    first, last = [], []
    with Watched(nodes) as watched:
        for i in range(losses):
            watched.begin_round()
            lost = chance.choice(watched.living)
            watching = watched.watching(lost, Signal.OFFLINE)
            at_s = watched.lose(lost)
            known_s = watching.result()
            first.append(min(known_s.values()) - at_s)
            last.append(max(known_s.values()) - at_s)
            print(f"loss {i + 1:2}: {first[-1]:.2f} s, all {last[-1]:.2f} s", flush=True)
            watched.add()
    return first, last


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=count, default=20)
    parser.add_argument("--nodes", type=count, default=4)
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"nodes can't be namespaces here: {reason}")
    first, last = measure(options.nodes, options.losses)
    load = os.getloadavg()[0]
    figures = {
        "nodes": options.nodes, "losses": options.losses, "median_s": percentile(last, 0.5), "p95_s": percentile(last, 0.95),
        "worst_s": max(last), "first_median_s": percentile(first, 0.5), "load": load, "cpus": os.cpu_count(),
    }  # fmt: skip
    print(f"all survivors know after {figures['median_s']:.2f} s (median), {figures['p95_s']:.2f} s (p95), "
          f"{figures['worst_s']:.2f} s (worst); goal: p95 {GOAL_S} s. Load {load:.1f} on {os.cpu_count()} cores.")  # fmt: skip
    if options.json:
        rows = [
            Row("last survivor knows, p95", "s", f"<= {GOAL_S}", figures["p95_s"]),
            Row("last survivor knows, median", "s", None, figures["median_s"], max=figures["worst_s"]),
            Row("first survivor knows, median", "s", None, figures["first_median_s"]),
        ]
        notes = [
            f"{options.losses} losses, {options.nodes} nodes without trainers. Load average at the end: {load:.1f}."
        ]
        result.write(options.json, __file__, "How soon survivors know of a lost node", rows, notes, figures)


if __name__ == "__main__":
    main()
