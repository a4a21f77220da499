"""Prints one step of a trace as text: the work of each stage, and the tier of each copy.

    python bench/overhead.py --quick --stages 4 --ways plain,reft --trace trace.json
    python bench/picture.py trace.json [--step N] [--width 100]

For a running job: `reft-cli timeline JOB --output trace.json`. Each rank has two lines. Training: F
forward, B backward, · idle, ? unknown. Copying: 1 in a gap, 2 beside compute, 3 beside a
collective, 4 while the optimizer waits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.options import count

IDLE = ("gap", "idle", "wait")


def letter(event: dict[str, Any]) -> str:
    """Returns the letter of a phase of training."""
    name = event["name"]
    return "·" if name.startswith(IDLE) else name[0] if name[0] in "FBIW" else "?"


def drawn(events: Sequence[tuple[float, float, str]], begin: float, end: float, width: int) -> str:
    """Returns a line of characters; each shows the longest event in its time."""
    cell = (end - begin) / width
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for first, last, char in events:
        for i in range(max(0, int((first - begin) / cell)), min(width, int((last - begin) / cell) + 1)):
            inside = min(last, begin + (i + 1) * cell) - max(first, begin + i * cell)
            if inside > 0:
                shares[i][char] = shares[i].get(char, 0) + inside
    return "".join(max(share, key=lambda char: share[char]) if share else " " for share in shares)


def spans(events: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--step", type=int, help="show the window after this step (the newest)")
    parser.add_argument("--width", type=count, default=100)
    options = parser.parse_args()
    events = [event for event in json.loads(options.trace.read_text())["traceEvents"] if event["ph"] == "X"]
    windows = {(e["pid"], int(e["name"].split()[-1])): e for e in events if e["name"].startswith("after step ")}
    common_steps = set.intersection(*({step for pid, step in windows if pid == rank} for rank, _ in windows))
    if options.step is not None and options.step not in common_steps:
        parser.error(f"{options.trace} has steps {min(common_steps)} to {max(common_steps)} of all stages")
    step = options.step if options.step is not None else max(common_steps)
    shown = {pid: event for (pid, at), event in sorted(windows.items()) if at == step}
    begin = min(event["ts"] for event in shown.values())
    end = max(event["ts"] + event["dur"] for event in shown.values())
    print(f"after step {step}: {(end - begin) / 1000:.0f} ms")
    for rank in shown:
        own = [event for event in events if event["pid"] == rank]
        training = [
            e for e in own if e["cat"] != "steps" and "number" not in e.get("args", {}) and e["name"] != "fence"
        ]
        copying = [e for e in own if "number" in e.get("args", {})]
        lines = [
            [(*span, letter(e)) for span, e in zip(spans(training), training, strict=True)],
            [(*span, str(e["args"]["tier"])) for span, e in zip(spans(copying), copying, strict=True)],
        ]
        print(f"stage {rank}  {drawn(lines[0], begin, end, options.width)}")
        print(f"  copies {drawn(lines[1], begin, end, options.width)}")


if __name__ == "__main__":
    main()
