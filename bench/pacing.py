"""How long it takes to plan the places of a snapshot's 10,000 chunks: gaps first, then compute.

    python bench/pacing.py [--chunks N] [--gaps N] [--json FILE]

The time is that of this process: the median and the largest of 50 plans. The goal is 10 ms of a
core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common, result
from bench.options import count, output
from bench.result import Row
from reft.core.pipeline.bubbles import Gap
from reft.core.pipeline.pacing import CopyRates, Tier, plan, windows

CHUNK = 8 << 20
STEP_S, GUARD_S = 2.5, 0.0003


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chunks", type=count, default=10_000)
    parser.add_argument("--gaps", type=count, default=60)
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    gap_s = STEP_S / options.gaps
    copy_windows = windows([Gap(i, None, gap_s * i, gap_s / 2) for i in range(options.gaps)], STEP_S)
    chunks, parity = [CHUNK] * options.chunks, [CHUNK] * (options.chunks // 20)
    speed = (
        1.2 * CHUNK * (options.chunks + len(parity)) / STEP_S
    )  # so that gaps hold half of the chunks, and compute the rest
    rates = CopyRates(speed, speed, speed, speed)
    took = []
    for _ in range(50):
        began = time.process_time()
        task_plan = plan(chunks, parity, copy_windows, rates, GUARD_S, STEP_S)
        took.append(time.process_time() - began)
    tiers = task_plan.bytes_by_tier([*chunks, *parity])
    shares = ", ".join(f"{tier.name.lower()} {100 * tiers[tier] / sum(tiers.values()):.0f} %" for tier in Tier)
    print(f"{options.chunks} chunks, {len(parity)} columns of parity, {options.gaps} gaps: {shares}")
    print(f"median {1000 * common.median(took):.1f} ms, longest {1000 * max(took):.1f} ms of a core (goal: 10 ms)")
    if options.json:
        name = f"{options.chunks} chunks, {len(parity)} columns of parity, {options.gaps} gaps"
        row = Row(name, "ms of a core", "<= 10", 1000 * common.median(took), max=1000 * max(took))
        result.write(options.json, __file__, "Plan of where chunks go", [row])


if __name__ == "__main__":
    main()
