"""How fast parity is computed, as a share of the rate of one plain `torch.bitwise_xor`.

    python bench/encode.py [--quick] [--rounds N] [--slice KIB] [--json FILE]

A code has k data shards and f parities. For each code the parities of a stripe are computed one
after the other, slice by slice of the packets. The slices are as wide as in a snapshot on the CPU.
The XORed bytes are counted: an operation on n bytes counts as n. The same process and thread runs,
by turns, one `torch.bitwise_xor(a, b, out=a)` over as many bytes (uint8), and one of numpy:

    share = seconds of torch's XOR / seconds of the encoding, the median of such pairs

A plain XOR moves 3 bytes through memory for each byte that it XORs: it reads two and writes one.
Encoding reads k data shards once and writes one parity of n bytes, for (k-1) n XORed bytes. That is
(k+1)/(k-1) bytes a byte while the targets stay in the cache, hence the slices. So the share may be
above 1. Some codes need copies beside their XORs; these take time, but do not count as work. Ends
with 1 if numpy's share is below GOAL. Snapshots on the CPU use numpy. Torch is for devices; its
share is printed, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script also runs by its path

import numpy as np
import torch

from bench import result
from bench.common import Goal, Others, median, summary, table
from bench.options import count, output
from bench.result import Row
from reft.client.memory.xor import TORCH
from reft.client.snapshot.save_plan import ParityTiling
from reft.core.coding import erasure

CODES = ((3, 1), (2, 2), (4, 2), (6, 2), (5, 3))
GOAL = 0.6  # share of the plain XOR's rate


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller stripe and fewer rounds")
    parser.add_argument("--rounds", type=count, help="measurements of each figure")
    parser.add_argument("--slice", type=count, help="KiB of each packet that are coded at a time")
    parser.add_argument("--json", type=output, help="write every figure to this file")
    return parser.parse_args()


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    """Returns torch tensors on the same memory."""
    return [torch.from_numpy(each) for each in arrays]


class Encoding:
    """A stripe and the memory for its parities.

    Both are cut into the slices that the programs run on.
    """

    def __init__(self, k: int, f: int, stripe_bytes: int, slice_bytes: int) -> None:
        code = erasure.code_for(k, f)
        packet = stripe_bytes // (k * code.w) // 64 * 64
        data = np.random.default_rng(0).integers(0, 256, (k, code.w, packet), dtype=np.uint8)
        parity = np.zeros((f, code.w, packet), np.uint8)
        self.kind = code.kind
        self.jobs: list[tuple[erasure.XorProgram, list[np.ndarray], list[np.ndarray], list[np.ndarray]]] = []
        self.xored = 0
        for number in range(f):
            program = erasure.encode_program(code, number)
            self.xored += sum(step.right is not None for step in program.steps) * packet
            width = slice_bytes or ParityTiling().width(program)
            scratch = np.zeros((program.scratch, width), np.uint8)
            for at in range(0, packet, width):
                here = slice(at, at + width)
                inputs = [data[shard, r, here] for shard, r in program.inputs]
                outputs = [parity[shard - k, r, here] for shard, r in program.outputs]
                self.jobs.append((program, inputs, outputs, [row[: outputs[0].size] for row in scratch]))
        self.tensors = [
            (program, tensors(inputs), tensors(outputs), tensors(rows)) for program, inputs, outputs, rows in self.jobs
        ]

    def by_numpy(self) -> None:
        for job in self.jobs:
            erasure.run(*job)

    def by_torch(self) -> None:
        for job in self.tensors:
            erasure.run(*job, TORCH)


def measure(k: int, f: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the figures of one code, for each executor."""
    encoding = Encoding(k, f, (16 if options.quick else 32) << 20, (options.slice or 0) << 10)
    left, right = np.ones(encoding.xored, np.uint8), np.ones(encoding.xored, np.uint8)
    ours, theirs = torch.from_numpy(left), torch.from_numpy(right)
    ways: dict[str, Callable[[], object]] = {
        "numpy": encoding.by_numpy,
        "torch": encoding.by_torch,
        "torch's XOR": lambda: torch.bitwise_xor(ours, theirs, out=ours),
        "numpy's XOR": lambda: np.bitwise_xor(left, right, out=left),
    }
    for way in ways.values():
        way()
    rounds = [{name: timed(way) for name, way in ways.items()} for _ in range(options.rounds)]
    return [
        {
            "executor": executor, "kind": encoding.kind, "k": k, "f": f, "xored_bytes": encoding.xored,
            "encode_s": summary([each[executor] for each in rounds]),
            "torch_s": summary([each["torch's XOR"] for each in rounds]),
            "numpy_s": summary([each["numpy's XOR"] for each in rounds]),
            "share": median([each["torch's XOR"] / each[executor] for each in rounds]),
        }
        for executor in ("numpy", "torch")
    ]  # fmt: skip


def row(each: dict[str, Any]) -> list[str]:
    rate = each["xored_bytes"] / 1e9
    return [
        each["executor"], each["kind"], f"{each['k']}+{each['f']}", f"{rate / each['encode_s']['median']:.2f}",
        f"{rate / each['torch_s']['median']:.2f}", f"{rate / each['numpy_s']['median']:.2f}", f"{each['share']:.2f}",
    ]  # fmt: skip


def main() -> int:
    options = parse()
    options.rounds = options.rounds or (5 if options.quick else 25)
    torch.set_num_threads(1)
    others = Others()
    figures = [each for k, f in CODES for each in measure(k, f, options)]
    goals = [
        Goal(f"{each['kind']} {each['k']}+{each['f']}", 1 / each["share"], 1 / GOAL, "XORs",
             "encode / torch.bitwise_xor of as many bytes")
        for each in figures if each["executor"] == "numpy"
    ]  # fmt: skip
    print(table(["", "goal", "value", "limit", "unit", "formula"], [goal.row() for goal in goals]))
    print()
    print(
        table(
            ["executor", "code", "k+f", "encode GB/s", "torch's XOR", "numpy's", "share"],
            [row(each) for each in figures],
        )
    )
    busy = others.cores()
    print(f"\n1 thread; other processes used {busy:.1f} cores")
    if options.json:
        rows = [
            Row(f"{each['kind']} {each['k']}+{each['f']}, {each['executor']}", "of the XOR's rate",
                f">= {GOAL}" if each["executor"] == "numpy" else None, each["share"])
            for each in figures
        ]  # fmt: skip
        notes = [f"One thread each. Other processes used {busy:.1f} cores."]
        result.write(options.json, __file__, "Parity on the CPU, against one XOR of as many bytes", rows, notes,
                     {"figures": figures})  # fmt: skip
    return 0 if all(goal.passed for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
