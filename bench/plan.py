"""The time of the recovery plan and the loss analysis, by number of nodes.

    python bench/plan.py [--quick] [--json FILE]

The job has 8 ranks a node, and 128 model-parallel coordinates with 64 cells each. All replicas of a
coordinate hold its cells. So there are 8,192 lanes, each with D = nodes / 16 members. One node is
lost, and one newer version is torn. Seconds are of the CPU: the work has one thread, and on a
shared machine the clock also shows the load of others.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import result
from bench.common import Goal, median, table
from bench.options import output
from bench.result import Row
from reft.core.coding.erasure import code_for
from reft.core.coding.placement import WIDTH_MAX, Lane, Placement
from reft.core.commit.decision import Decision
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import Cell, Division
from reft.core.layout.layout import Leaf, align, pack
from reft.core.layout.sharing import SharedLeaves
from reft.core.layout.symbolic import symbolic_form
from reft.core.recovery.plan import (
    SlotReaders,
    TransferOperation,
    TransferPlan,
    TransferSizes,
    cells_near,
    same_shape_needs,
)
from reft.core.recovery.recovery import HeldCapsule, HeldSlot, plan
from reft.core.status.loss_analysis import LossAnalysis

RANKS, COORDINATES, CELLS, F = 8, 128, 64, 2
CELL_BYTES = 64 << 20
EPOCH = Epoch(1, b"plan" * 4)
T = TypeVar("T")


def placement_for(nodes: int) -> Placement:
    """Returns a placement with the lanes of 128 coordinates.

    No two ranks of a coordinate share a node.
    """
    world = nodes * RANKS
    D = world // COORDINATES
    code = code_for(min(D, WIDTH_MAX) - F, F)
    cells: list[Cell] = []
    lanes: list[Lane] = []
    digests = [b"%d" % coordinate for coordinate in range(COORDINATES)]
    packet_bytes = align(-(-CELL_BYTES // (D * code.k * code.w)), 8)
    for coordinate in range(COORDINATES):
        holders = tuple(range(coordinate, world, COORDINATES))
        for cell in range(CELLS):
            form = symbolic_form([Leaf(f"{coordinate}.{cell}", "float32", (1,), (1,), CELL_BYTES, False, (1,), (0,))])
            lanes.append(Lane(len(cells), 0, CELL_BYTES, holders, code, packet_bytes))
            cells.append(Cell((SharedLeaves(form.table.patterns, form.cuts, CELL_BYTES),), CELL_BYTES, holders))
    cells_of = {digest: tuple(range(i * CELLS, (i + 1) * CELLS)) for i, digest in enumerate(digests)}
    layout_of = tuple(digests[rank % COORDINATES] for rank in range(world))
    nothing = pack([])
    division = Division(
        tuple(cells),
        layout_of,
        cells_of,
        dict.fromkeys(digests, ()),
        dict.fromkeys(digests, nothing),
        dict.fromkeys(digests, 0),
        dict.fromkeys(digests, 0),
    )
    domains = tuple(rank // RANKS for rank in range(world))
    return Placement(division, tuple(lanes), domains, "aec", F, 1 << 18)


def evidence(nodes: int, lost: int) -> tuple[list[HeldSlot], list[HeldCapsule]]:
    """Returns the held slots and capsules after the loss of node `lost`.

    There are two whole versions and a torn one, and two holders of each capsule.
    """
    held, copies = [], []
    for rank in range(nodes * RANKS):
        node = rank // RANKS
        for step in (1, 2, 3):
            version = Version(EPOCH, step)
            state = SlotState.WRITING if step == 3 and rank % 2 else SlotState.SEALED
            if node != lost:
                held.append(HeldSlot(f"node-{node:05}", rank, f"{rank}.{step}", state, version))
            for holder in ((node + 1) % nodes, (node + 2) % nodes):
                if holder != lost and step < 3:
                    copies.append(HeldCapsule(f"node-{holder:05}", rank, version, 0))
    return held, copies


def timed(work: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Returns the median CPU seconds of some runs, and the last result."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        result = work()
        seconds.append(time.process_time() - began)
    return median(seconds), result


def measure(nodes: int, repeats: int) -> dict[str, Any]:
    """Returns the seconds of plan and loss analysis for one size."""
    lost = nodes // 3
    placement = placement_for(nodes)
    held, copies = evidence(nodes, lost)
    decision = Decision(EPOCH, None)
    gc.collect()
    gc.freeze()  # else the collector would visit the benchmark's own job while the plan is made
    plan_s, recovery_plan = timed(lambda: plan(held, copies, {EPOCH: placement}, decision), repeats)
    if recovery_plan.base != Version(EPOCH, 2) or len(recovery_plan.capsules) != RANKS:
        raise RuntimeError(
            f"{nodes} nodes: the plan has base {recovery_plan.base} and {len(recovery_plan.capsules)} capsules"
        )
    nodes_now = {f"node-{node:05}": range(node * RANKS, (node + 1) * RANKS) for node in range(nodes)}
    readers_s, readers = timed(
        lambda: SlotReaders.of(
            {old: slot.node for old, slot in recovery_plan.sources.items()}, nodes_now, nodes * RANKS
        ),
        repeats,
    )
    # The rank that makes a lost slot has the longest list.
    keeper, peer = lost * RANKS, (lost * RANKS + COORDINATES) % (nodes * RANKS)
    first_s, _ = timed(lambda: next(operations(placement, readers, lost, keeper)), repeats)
    keeper_s, count = timed(lambda: sum(1 for _ in operations(placement, readers, lost, keeper)), 1)
    peer_s, _ = timed(lambda: sum(1 for _ in operations(placement, readers, lost, peer)), 1)
    keepers: dict[int, list[str]] = {}
    for copy in copies:
        keepers.setdefault(copy.rank, []).append(copy.node)
    slots = {rank: slot.node for rank, slot in recovery_plan.sources.items()}
    # Each figure needs a fresh LossAnalysis, because it caches its results.
    verdicts_s, verdicts = timed(lambda: LossAnalysis(placement, slots, keepers, {}, {}).nodes(), repeats)
    tolerated_s, tolerated = timed(lambda: LossAnalysis(placement, slots, keepers, {}, {}).tolerated(), repeats)
    pairs_s, _ = timed(lambda: LossAnalysis(placement, slots, keepers, {}, {}).pairs(), 1)
    if tolerated != 1 or not all(verdict.survives for verdict in verdicts):
        raise RuntimeError(f"{nodes} nodes: after one of {F} losses {tolerated} may follow")
    return {
        "nodes": nodes, "ranks": nodes * RANKS, "lanes": len(placement.lanes), "D": placement.lanes[0].D, "slots": len(held),
        "plan_s": plan_s,
        "readers_s": readers_s,
        "first_s": first_s, "keeper_s": keeper_s, "peer_s": peer_s, "operations": count,
        "nodes_s": verdicts_s, "tolerated_s": tolerated_s, "pairs_s": pairs_s,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def operations(placement: Placement, readers: SlotReaders, lost: int, rank: int) -> Iterator[TransferOperation]:
    """Yields the operations of a rank, after the loss of a node, in the same shape."""
    sizes = TransferSizes()
    needs = same_shape_needs(placement, cells_near(placement, readers, rank), sizes)
    lost_ranks = range(lost * RANKS, (lost + 1) * RANKS)
    return TransferPlan(needs, placement, readers, lost_ranks, has_live_cells=True, sizes=sizes).operations(rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 512 nodes, once")
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    sizes = (256, 512) if options.quick else (256, 512, 1024, 2048)
    figures = [measure(nodes, 1 if options.quick else 3) for nodes in sizes]
    head = list(figures[0])
    print(
        table(
            head, [[f"{row[key]:.3f}" if key.endswith("_s") else f"{row[key]:.0f}" for key in head] for row in figures]
        )
    )
    last = figures[-1]
    growth = (last["plan_s"] / figures[0]["plan_s"]) / (last["nodes"] / figures[0]["nodes"])
    goals = [
        Goal(
            f"plan, {last['nodes']} nodes",
            last["plan_s"] + last["readers_s"] + last["first_s"],
            0.5,
            "s",
            "headers to decision, readers and the first operation of the rank that makes a lost slot, one core",
        ),
        Goal("peak memory", last["rss_mb"], 300, "MiB", "of this process, job and headers included"),
        Goal("growth", growth, 1.3, "x", "plan's seconds over nodes, largest by smallest; 1 is linear"),
        Goal(f"each node's loss, {last['nodes']} nodes", last["nodes_s"], 2, "s", "LossAnalysis.nodes"),
        Goal("pairs, 256 nodes", figures[0]["pairs_s"], 2, "s", "LossAnalysis.pairs, all 32,640"),
    ]
    print(table(["", "goal", "value", "limit", "unit", "formula"], [goal.row() for goal in goals]))
    if options.json:
        lines = [goal.result() for goal in goals]
        for key, whose in (("keeper_s", "the rank that makes a lost slot"), ("peer_s", "a rank that gets its bytes")):
            lines += [
                Row(f"all operations of {whose}, {row['nodes']} nodes", "s of a core", None, row[key])
                for row in figures
            ]
        result.write(
            options.json,
            __file__,
            f"Recovery plan and verdicts, up to {last['nodes']} nodes",
            lines,
            details={"rows": figures},
        )
    sys.exit(0 if all(goal.passed for goal in goals) else 1)


if __name__ == "__main__":
    main()
