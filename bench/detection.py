"""How soon the survivors know that a node is lost: its cable pulled and all of its processes killed, 20 times.

    python bench/detection.py [--losses 20] [--nodes 4] [--json FILE]

Each node is a set of namespaces with a real daemon and a process that beats as a torchrun agent does, no trainer. From
the moment before the cable is pulled to the moment at which the last survivor's long poll of `Signals`, which is what
wakes its agent, returns with OFFLINE. Needs the right to make namespaces (root).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "daemon")]  # nobody who starts this need set PYTHONPATH

from bench import result  # noqa: E402
from bench.options import count, output  # noqa: E402
from bench.result import Row  # noqa: E402
from reft.core.membership.failure_detector import Signal  # noqa: E402
from tests.support.netns import why_not  # noqa: E402
from tests.support.watched import Watched  # noqa: E402

GOAL_S = 1.5
SEED = 7


def measure(nodes: int, losses: int) -> tuple[list[float], list[float]]:
    """For each loss: seconds until the first survivor knew, until the last."""
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
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(f"nodes can't be namespaces here: {reason}")
    first, last = measure(given.nodes, given.losses)
    load = os.getloadavg()[0]
    found = {
        "nodes": given.nodes, "losses": given.losses, "median_s": percentile(last, 0.5), "p95_s": percentile(last, 0.95),
        "worst_s": max(last), "first_median_s": percentile(first, 0.5), "load": load, "cpus": os.cpu_count(),
    }  # fmt: skip
    print(f"all survivors know after {found['median_s']:.2f} s (median), {found['p95_s']:.2f} s (p95), "
          f"{found['worst_s']:.2f} s (worst); goal: p95 {GOAL_S} s. Load {load:.1f} on {os.cpu_count()} cores.")  # fmt: skip
    if given.json:
        rows = [
            Row("last survivor knows, p95", "s", f"<= {GOAL_S}", found["p95_s"]),
            Row("last survivor knows, median", "s", None, found["median_s"], max=found["worst_s"]),
            Row("first survivor knows, median", "s", None, found["first_median_s"]),
        ]
        notes = [f"{given.losses} losses, {given.nodes} nodes without trainers. Load average at the end: {load:.1f}."]
        result.write(given.json, __file__, "How soon survivors know of a lost node", rows, notes, found)


if __name__ == "__main__":
    main()
