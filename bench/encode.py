"""How fast parity is computed, as a share of the rate of one plain XOR.

    python bench/encode.py [--quick] [--rounds N] [--slice KIB] [--json FILE]

For each code (k data shards, f parities), the parities of a stripe are computed one after the other, slice by slice of
the packets, as wide as a snapshot on the CPU does it. The bytes that this XORs are counted: an operation on n bytes
counts as n. Beside it, in the same process and by turns, one `bitwise_xor(a, b, out=a)` runs over as many bytes:

    share = seconds of the plain XOR / seconds of the encoding, the median of such pairs

It is above 1 where the encoding profits from the cache, which the plain XOR cannot. Copies that a code needs beside its
XORs are not counted as work but take time. Ends with 1 if a share of the numpy executor, which snapshots on the CPU use,
is below GOAL. The torch executor is for CUDA; it is shown here too, beside torch's XOR.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside "python -m", the plain path works too

import numpy as np
import torch

from bench.common import Goal, Others, median, summary, table
from reft.client import coding as torch_coding
from reft.client.share import Cut
from reft.core import coding

CODES = ((3, 1), (2, 2), (4, 2), (6, 2), (5, 3))
GOAL = 0.6  # share of the plain XOR's rate


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller stripe and fewer rounds")
    parser.add_argument("--rounds", type=int, help="measurements of each figure")
    parser.add_argument("--slice", type=int, help="KiB of each packet that are coded at a time")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser.parse_args()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Encoding:
    """A stripe with room for its parities, cut into the slices that the programs run on."""

    def __init__(self, k: int, f: int, stripe_bytes: int, slice_bytes: int) -> None:
        code = coding.code_for(k, f)
        packet = stripe_bytes // (k * code.w) // 64 * 64
        data = np.random.default_rng(0).integers(0, 256, (k, code.w, packet), dtype=np.uint8)
        parity = np.zeros((f, code.w, packet), np.uint8)
        self.kind = code.kind
        self.jobs: list[tuple[coding.Program, list[np.ndarray], list[np.ndarray], list[np.ndarray]]] = []
        self.xored = 0
        for number in range(f):
            program = coding.encode_program(code, number)
            self.xored += sum(step.right is not None for step in program.steps) * packet
            width = slice_bytes or Cut().width(program)
            scratch = np.zeros((program.scratch, width), np.uint8)
            for at in range(0, packet, width):
                here = slice(at, at + width)
                inputs = [data[shard, r, here] for shard, r in program.inputs]
                outputs = [parity[shard - k, r, here] for shard, r in program.outputs]
                self.jobs.append((program, inputs, outputs, [row[: outputs[0].size] for row in scratch]))
        self.tensors = [
            (program, *([torch.from_numpy(each) for each in arrays] for arrays in rest)) for program, *rest in self.jobs
        ]

    def by_numpy(self) -> None:
        for job in self.jobs:
            coding.run(*job)

    def by_torch(self) -> None:
        for job in self.tensors:
            torch_coding.run(*job)


def measure(k: int, f: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of one code, for each executor."""
    encoding = Encoding(k, f, (16 if options.quick else 32) << 20, (options.slice or 0) << 10)
    left, right = np.ones(encoding.xored, np.uint8), np.ones(encoding.xored, np.uint8)
    ours, theirs = torch.from_numpy(left), torch.from_numpy(right)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "numpy": (encoding.by_numpy, lambda: np.bitwise_xor(left, right, out=left)),
        "torch": (encoding.by_torch, lambda: torch.bitwise_xor(ours, theirs, out=ours)),
    }
    found = []
    for executor, (encode, plain) in pairs.items():
        encode()
        plain()
        times = [(timed(encode), timed(plain)) for _ in range(options.rounds)]
        found.append(
            {
                "executor": executor, "kind": encoding.kind, "k": k, "f": f, "xored_bytes": encoding.xored,
                "encode_s": summary([each for each, _ in times]), "xor_s": summary([each for _, each in times]),
                "share": median([reference / each for each, reference in times]),
            }
        )  # fmt: skip
    return found


def row(each: dict[str, Any]) -> list[str]:
    rate = each["xored_bytes"] / 1e9
    return [
        each["executor"], each["kind"], f"{each['k']}+{each['f']}", f"{rate / each['encode_s']['median']:.2f}",
        f"{rate / each['xor_s']['median']:.2f}", f"{each['share']:.2f}",
    ]  # fmt: skip


def main() -> int:
    options = parse()
    options.rounds = options.rounds or (5 if options.quick else 25)
    torch.set_num_threads(1)
    others = Others()
    found = [each for k, f in CODES for each in measure(k, f, options)]
    goals = [
        Goal(f"{each['kind']} {each['k']}+{each['f']}", 1 / each["share"], 1 / GOAL, "plain XORs",
             "encode / XOR of as many bytes")
        for each in found if each["executor"] == "numpy"
    ]  # fmt: skip
    print(table(["", "goal", "value", "limit", "unit", "formula"], [goal.row() for goal in goals]))
    print()
    print(table(["executor", "code", "k+f", "encode GB/s", "XOR GB/s", "share"], [row(each) for each in found]))
    print(f"\n1 thread; other processes used {others.cores():.1f} cores")
    if options.json:
        verdicts = [{**vars(goal), "passed": goal.passed} for goal in goals]
        options.json.write_text(json.dumps({"figures": found, "goals": verdicts}, indent=1))
    return 0 if all(goal.passed for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
