"""The time of one rank's work on another shape's plan, by number of ranks.

    python bench/reshape.py [--quick] [--json FILE]

Fully sharded ranks become half as many. All ranks cut every parameter and moment along its first
dimension, like FSDP2, and every shard has one holder. This is the most expensive case, because no
two ranks hold the same shards. The time is that of each rank's own work before the first byte
moves. The rank lists all leaves of both shapes, matches them, and plans the transfers. Seconds are
of the CPU, in one thread. A restart in the same shape has none of this work.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import result
from bench.common import Goal, table
from bench.exchange import RANKS, Clock, fsdp2
from bench.options import output
from bench.result import Row
from reft.core.coding.placement import place
from reft.core.layout import symbolic
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf
from reft.core.recovery.plan import SlotReaders, TransferPlan
from reft.core.recovery.shard_matching import UnforeseenLeaves, match, pieces_of, wanted_leaves

LAYERS = 4  # layers of the model: (4 x 9 + 3) parameters, four leaves each
CHUNK = 256 << 10


def measure(world: int) -> dict[str, Any]:
    """Returns the seconds of the first of `world` ranks, by purpose."""
    old, new, clock = fsdp2(world, 1, LAYERS), fsdp2(world // 2, 1, LAYERS), Clock()
    before = [symbolic.symbolic_form(old.leaves(rank)) for rank in range(world)]
    after = [symbolic.symbolic_form(new.leaves(rank)) for rank in range(world // 2)]
    digests = [rank.to_bytes(4, "big") for rank in range(world)]
    domains = [rank // RANKS for rank in range(world)]
    placement = place(divide(dict(zip(digests, before, strict=True)), digests), domains, "auto", None, CHUNK)

    leaves_before = clock("leaves", lambda: [form.leaves() for form in before])
    leaves_after = clock("leaves", lambda: [form.leaves() for form in after])

    def leaves_of(rank: int) -> dict[str, Leaf]:
        return {leaf.name: leaf for leaf in leaves_before[rank]}

    owns = {rank: UnforeseenLeaves() for rank in range(world)}
    pieces, problems = clock("pieces", lambda: pieces_of(placement, leaves_of, owns))
    wanted = clock("match", lambda: wanted_leaves(leaves_after, pieces))
    shard_match = clock("match", lambda: match(pieces, wanted))
    if problems or shard_match.problems:
        raise RuntimeError(f"{world} ranks: {(problems + shard_match.problems)[:3]}")
    nodes = {f"node-{node}": list(range(node * RANKS, (node + 1) * RANKS)) for node in range(world // 2 // RANKS)}
    sources = {rank: f"node-{rank // RANKS}" for rank in range(world)}
    readers = clock("list", lambda: SlotReaders.of(sources, nodes, world))
    transfer_plan = TransferPlan(shard_match.needs, placement, readers)
    operations = clock("list", lambda: sum(1 for _ in transfer_plan.operations(0)))
    return {
        "ranks": world, "leaves": len(leaves_before[0]), "needs": len(shard_match.needs), "operations": operations,
        "seconds": sum(clock.spent.values()), "parts": clock.spent,
        "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 256 ranks")
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    rows = [measure(world) for world in ((64, 128, 256) if options.quick else (256, 512, 1024, 2048))]
    parts = list(rows[0]["parts"])
    head = ["ranks", "leaves", "needs", "operations", "MB", "seconds"]
    cells = [[*(f"{row[key]:.0f}" for key in head[:-1]), f"{row['seconds']:.2f}",
              *(f"{row['parts'][part]:.2f}" for part in parts)] for row in rows]  # fmt: skip
    print(table([*head, *parts], cells))
    growth = rows[-1]["seconds"] / rows[0]["seconds"] / (rows[-1]["ranks"] / rows[0]["ranks"])
    first = rows[0] if not options.quick else rows[-1]
    goals = [
        Goal("256 ranks", first["seconds"], 1.5, "s", "one rank's own work, one core"),
        Goal("growth", growth, 1.5, "x", "seconds over ranks, largest by smallest; 1 is linear"),
    ]
    print(table(["", "goal", "value", "limit", "unit", "formula"], [goal.row() for goal in goals]))
    if options.json:
        lines = [goal.result() for goal in goals]
        lines += [Row(f"{row['ranks']} ranks", "s of a core", None, row["seconds"]) for row in rows]
        result.write(options.json, __file__, "Plan of another shape, one rank's work", lines, details={"rows": rows})
    sys.exit(0 if all(goal.passed for goal in goals) else 1)


if __name__ == "__main__":
    main()
