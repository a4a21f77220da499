"""How long attach takes for 2,000 leaves, and its parts: one process, AdamW on 500 parameters.

    python bench/attach.py [--json FILE]

The process has its own daemon. It attaches afresh, and then attaches once more and restores. The
parts are the rank's own work. The rest of an attach are calls to the daemon, and allocating the
slots.

The replica check reads a leaf of 512 MiB; its time is divided by that of a memcpy of this leaf, in
turn with it, in one process. The median of five rounds counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn

import reft
from bench import result
from bench.common import Goal, daemon, median, table
from bench.options import output
from bench.result import Row
from reft.client.attach.rank_table import LayoutFacts
from reft.client.snapshot.replica_check import value_digests
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout import symbolic
from reft.core.layout.cells import divide
from reft.core.layout.layout import pack
from reft.wire import messages

PARAMETERS = 500
LEAF_BYTES = 512 << 20
ROUNDS = 5


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model of 250 layers with two parameters each."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(PARAMETERS // 2)])
    return model, torch.optim.AdamW(model.parameters())


def parts() -> dict[str, float]:
    """Returns the seconds of each part of the rank's own work."""
    model, optimizer = make()
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - began
        return result

    tracked = TrackedObjects({"model.0": model}, [optimizer], {})
    tensor_index = timed("find tensors", tracked.bind)
    predicted = timed("predict the optimizer's", lambda: tracked.predict(tensor_index.names))
    leaves = [*tensor_index.leaves(), *predicted]
    layout = timed("pack and digest", lambda: pack(leaves))
    form = timed("symbolic table", lambda: symbolic.symbolic_form(leaves))
    timed("facts", lambda: LayoutFacts.of(layout, form))
    timed("leaf table", lambda: messages.table_to(layout))
    timed("cells", lambda: divide({layout.digest: form}, [layout.digest] * 8))
    timed("values, 8 MB", lambda: value_digests(tensor_index, tensor_index.tensors))
    return seconds | {"leaves": len(leaves)}


def replica_check() -> dict[str, float]:
    """Returns the time of digesting each kind of leaf, as a multiple of a memcpy's."""
    elements = LEAF_BYTES // 4
    target, source = torch.zeros(elements).numpy(), torch.randn(elements)
    leaves = {
        "a leaf": source,
        "a leaf that begins between words": torch.randn(elements + 1)[1:],
        "a leaf of one value": torch.ones(elements),
        "a leaf with gaps": torch.randn(elements // 500, 1000)[:, ::2],
    }
    ratios: dict[str, list[float]] = {name: [] for name in leaves}
    for _ in range(ROUNDS):
        for name, leaf in leaves.items():
            began = time.perf_counter()
            np.copyto(target, source.numpy())
            copied = time.perf_counter()
            value_digests(TensorIndex({name: leaf}, set()), [name])
            ratios[name].append((time.perf_counter() - copied) / (copied - began))
    return {name: median(values) for name, values in ratios.items()}


def attached(address: str) -> list[tuple[float, float]]:
    """Measures an attach that starts afresh, and one that restores 2,000 leaves.

    Returns seconds, and seconds of this process's CPU.
    """
    seconds = []
    for _ in range(2):
        model, optimizer = make()
        began, worked = time.perf_counter(), time.process_time()
        session = reft.attach(model, optimizer, job="bench", daemon=address)
        seconds.append((time.perf_counter() - began, time.process_time() - worked))
        for _ in session.steps(session.step + 2):
            model(torch.randn(2, 64)).square().mean().backward()
            optimizer.step()
        if not session.seal(60):
            raise RuntimeError("the bench's snapshot did not become whole")
        session.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    torch.optim.AdamW(
        [nn.Parameter(torch.zeros(1))]
    ).step()  # in the first step torch imports its compiler, which takes seconds
    part_seconds, memcpys = parts(), replica_check()
    with tempfile.TemporaryDirectory() as home:
        os.environ["REFT_RUNTIME_DIR"] = home
        with daemon() as (address, _):
            fresh, restoring = both = attached(address)
    leaves = part_seconds.pop("leaves")
    print(table(["seconds", *part_seconds], [["", *(f"{value:.3f}" for value in part_seconds.values())]]))
    goals = [
        Goal(
            f"attach, {leaves} leaves, fresh", fresh[0], 2, "s", f"call to session; {fresh[1]:.2f} s of them on a core"
        ),
        Goal(
            f"attach, {leaves} leaves, restoring",
            restoring[0],
            2,
            "s",
            f"with what is held; {restoring[1]:.2f} s on a core",
        ),
        Goal("replica check: a leaf", memcpys.pop("a leaf"), 1.25, "memcpys", "digest / memcpy: 0.8 of its speed"),
    ]
    print(table(["memcpys", *memcpys], [["", *(f"{value:.2f}" for value in memcpys.values())]]))
    print(table(["", "goal", "value", "limit", "unit", "formula"], [goal.row() for goal in goals]))
    if options.json:
        rows = [goal.result() for goal in goals]
        rows += [Row(f"replica check: {name}", "memcpys", None, value) for name, value in memcpys.items()]
        rows += [
            Row(f"{goal.name}: on a core", "s", None, spent) for goal, (_, spent) in zip(goals, both, strict=False)
        ]
        rows += [Row(f"a rank's own part: {name}", "s", None, value) for name, value in part_seconds.items()]
        result.write(options.json, __file__, f"Attach, {leaves} leaves", rows)
    sys.exit(0 if all(goal.passed for goal in goals) else 1)


if __name__ == "__main__":
    main()
