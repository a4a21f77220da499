"""What attach exchanges on thousands of ranks, and how long one rank works on it.

    python bench/exchange.py [--quick] [--json FILE]

One process simulates the exchange, without a network. The jobs have 16,384 ranks, 8 a node, and a
Llama-like model with 2,000 leaves. There are three jobs:

    FSDP2                    all ranks cut every parameter and moment along its first dimension
    TP 8 x PP 16 x DP 128    all eight tensor parallel ranks have whole norms
    HSDP                     128 replicas of the same 128 shards

One rank's own work is real. The reports of the other ranks are made from their cuts alone. Those of
24 ranks are compared with real reports. Bytes are those that a rank receives, with padding. Seconds
are of the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import result
from bench.common import Goal, table
from bench.options import output
from bench.result import Row
from reft.client.attach.arguments import AttachArguments
from reft.client.attach.introduce import make_secrets
from reft.client.attach.rank_table import (
    AgreedSettings,
    IdentityFacts,
    LayoutFacts,
    NodeIdentity,
    ProcessFacts,
    RankInfo,
    RankTable,
)
from reft.client.link.exchange import RankMessage, from_json, to_json
from reft.client.link.rank_group import LENGTH_BYTES, broadcast_ranks, short_bytes
from reft.client.snapshot.replica_check import all_match
from reft.config import Config
from reft.core.coding.placement import exposures
from reft.core.layout import symbolic
from reft.core.layout.cells import INLINE_BYTES_MAX
from reft.core.layout.layout import Leaf, pack
from reft.wire import manifest as symbols
from reft.wire.manifest import division_of, layouts_of, placement_of
from reft.wire.v1 import daemon_pb2 as pb

T = TypeVar("T")
RANKS = 8  # ranks on a node
WIDTH, INNER, WORDS, KV = 16384, 53248, 128256, 1024
MiB = 1 << 20
# name, shape, dimension that tensor parallelism cuts (-1: none)
BLOCK = [
    ("wq", (WIDTH, WIDTH), 0), ("wk", (KV, WIDTH), 0), ("wv", (KV, WIDTH), 0), ("wo", (WIDTH, WIDTH), 1),
    ("w1", (INNER, WIDTH), 0), ("w2", (WIDTH, INNER), 1), ("w3", (INNER, WIDTH), 0), ("norm", (WIDTH,), -1),
    ("ffn_norm", (WIDTH,), -1),
]  # fmt: skip
STATE = ("", "exp_avg", "exp_avg_sq", "step")


@dataclass
class Job:
    """A job, described by the leaves of its ranks.

    Attributes:
        name: of the job.
        world: number of ranks.
        cut: (shape, tp dimension, rank) → begin and size for each dimension.
        layers: rank → the layers that it holds.
    """

    name: str
    world: int
    cut: Callable[[tuple[int, ...], int, int], list[tuple[int, int]]]
    layers: Callable[[int], range]

    def leaves(self, rank: int) -> Iterator[Leaf]:
        """Yields all leaves of a rank, parameters first."""
        layers = self.layers(rank)
        named = [(f"layers.{layer}.{name}", shape, dim) for layer in layers for name, shape, dim in BLOCK]
        named += [("embed", (WORDS, WIDTH), 0)] if 0 in layers else []
        named += [("output", (WORDS, WIDTH), 0), ("norm", (WIDTH,), -1)] if LAYERS - 1 in layers else []
        for state in STATE:
            for name, shape, dim in named:
                full = f"model.0.{name}.weight" if not state else f"optimizer.0.{state}.model.0.{name}.weight"
                yield self._leaf(full, () if state == "step" else shape, dim, rank)

    def _leaf(self, name: str, shape: tuple[int, ...], dim: int, rank: int) -> Leaf:
        cuts = self.cut(shape, dim, rank)
        local = tuple(size for _, size in cuts)
        stride, step = [0] * len(shape), 1
        for i in reversed(range(len(shape))):
            stride[i], step = step, step * max(local[i], 1)
        nbytes = 4
        for size in local:
            nbytes *= size
        return Leaf(name, "float32", local, tuple(stride), nbytes, False, shape, tuple(begin for begin, _ in cuts))


LAYERS = 55  # (55 x 9 + 3) parameters x 4


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Returns begin and size of a part, in the way of torch.chunk.

    The last parts may be short or empty.
    """
    step = -(-length // parts)
    begin = min(index * step, length)
    return begin, min(step, length - begin)


def fsdp2(shards: int, replicas: int, layers: int = LAYERS) -> Job:
    """Returns a job that cuts every first dimension among `shards` neighbours."""

    def cut(shape: tuple[int, ...], dim: int, rank: int) -> list[tuple[int, int]]:
        return [chunk(size, shards, rank % shards) if d == 0 else (0, size) for d, size in enumerate(shape)]

    name = f"FSDP2 x {shards}" if replicas == 1 else f"HSDP {replicas} x {shards}"
    return Job(name, shards * replicas, cut, lambda rank: range(layers))


def hybrid(world: int) -> Job:
    """Returns a job of TP 8 within a node, PP 16, and data parallelism.

    Each rank holds only its stage.
    """

    def cut(shape: tuple[int, ...], dim: int, rank: int) -> list[tuple[int, int]]:
        return [chunk(size, 8, rank % 8) if d == dim else (0, size) for d, size in enumerate(shape)]

    def layers(rank: int) -> range:
        stage = rank // 8 % 16
        return range(LAYERS * stage // 16, LAYERS * (stage + 1) // 16)

    return Job(f"TP 8 x PP 16 x DP {world // 128}", world, cut, layers)


@dataclass
class Clock:
    """CPU seconds by purpose."""

    spent: dict[str, float] = field(default_factory=dict)

    def __call__(self, what: str, work: Callable[[], T]) -> T:
        began = time.process_time()
        result = work()
        self.spent[what] = self.spent.get(what, 0.0) + time.process_time() - began
        return result


def received(messages: list[str]) -> int:
    """Returns the bytes that a rank receives in one exchange: heads, rests of messages, padding."""
    short = short_bytes(len(messages))
    rests = [max(len(message) - short, 0) for message in messages]
    alone = broadcast_ranks(rests)
    widest = max((rest for rank, rest in enumerate(rests) if rank not in alone), default=0)
    return len(rests) * (LENGTH_BYTES + short + widest) + sum(rests[rank] for rank in alone)


def infos_of(job: Job) -> tuple[list[RankInfo], list[symbolic.PatternTable]]:
    """Returns the info of every rank, and the table of each rank."""
    kinds: dict[object, tuple[symbolic.PatternTable, LayoutFacts, list[Leaf]]] = {}
    digests: dict[object, bytes] = {}
    infos, tables = [], []
    agreed = AgreedSettings.of(AttachArguments(None, (), None, {}, None, "auto", 1), Config())
    checked = {0, 1, 7, 8, 127, 128, job.world - 1, *range(5, job.world, job.world // 16)}
    for rank in range(job.world):
        kind = job.layers(rank)
        if kind not in kinds:
            leaves = list(job.leaves(rank))
            form = symbolic.symbolic_form(leaves)
            axes = [next(leaf for leaf, p in zip(leaves, form.table.patterns, strict=True) if i in p.axes)
                    for i in range(len(form.table.axes))]  # fmt: skip
            kinds[kind] = (form.table, LayoutFacts.of(pack(leaves), form), axes)
        table, described, axes = kinds[kind]
        cuts: list[int] = []
        for i, leaf in enumerate(axes):
            dim = next(p.axes.index(i) for p in table.patterns if p.name == leaf.name)
            name = leaf.name.rsplit(".", 2)[-2]
            cuts += job.cut(leaf.global_shape, {n: d for n, _, d in BLOCK}.get(name, 0), rank)[dim]
        layout_key = kind, *cuts
        if layout_key not in digests:  # rank 0 has a real digest; the others only need distinct ones
            digest = hashlib.blake2b(repr((kind, cuts)).encode(), digest_size=16).digest()
            digests[layout_key] = digest if rank else described.layout
        layout = LayoutFacts(digests[layout_key], described.table, tuple(cuts))
        if rank in checked:
            leaves = list(job.leaves(rank))
            form = symbolic.symbolic_form(leaves)
            real = LayoutFacts.of(pack(leaves), form)
            if (real.table, real.cuts) != (layout.table, layout.cuts) or form.leaves() != leaves:
                raise RuntimeError(f"{job.name}: rank {rank} would report another layout")
        node = rank // RANKS
        addresses = (f"10.{node >> 8}.{node & 255}.7:29401",)
        infos.append(
            RankInfo(
                node=NodeIdentity(f"node-{node:05}", f"{node:032x}", addresses, f"rack-{node // 16:04}"),
                process=ProcessFacts(100_000 + rank, 14, "f" * 28),
                identity=IdentityFacts(
                    job="",
                    run_id="run-2026-11-21",
                    slurm="",
                    script="/" + "opt/training/pretrain/train.py",
                    user=1000,
                    launch="f" * 32,
                    unnamed="",
                ),
                layout=layout,
                agreed=agreed,
                secrets=None if rank else make_secrets(5),
            )
        )
        tables.append(table)
    return infos, tables


def measure(job: Job) -> dict[str, Any]:
    """Returns bytes and seconds of the first rank."""
    clock = Clock()
    leaves = list(job.leaves(0))
    form = clock("own layout", lambda: symbolic.symbolic_form(leaves))
    clock("own layout", lambda: LayoutFacts.of(pack(leaves), form))
    infos, tables = infos_of(job)
    sent = [json.dumps({"ok": to_json(each)}) for each in infos]
    nbytes = received(sent)
    rank_table = clock("facts", lambda: RankTable([from_json(RankInfo, json.loads(each)["ok"]) for each in sent]))
    nodes = clock("facts", lambda: (rank_table.job(), rank_table.nodes())[1])
    first = {each.layout.table: rank for rank, each in reversed(list(enumerate(infos)))}
    clock("facts", lambda: rank_table.describes(job.world - 1))
    described = [
        RankMessage(symbols.table_to(tables[rank]) if first[each.layout.table] == rank else b"")
        for rank, each in enumerate(infos)
    ]
    sent = [json.dumps({"ok": to_json(each)}) for each in described]
    nbytes += received(sent)
    described = clock("tables", lambda: [from_json(RankMessage, json.loads(each)["ok"]) for each in sent])
    distinct_tables, layouts, index = clock("tables", lambda: rank_table.layouts([each.data for each in described]))
    manifest = pb.Manifest(
        job="run", world=job.world, nodes=nodes, protect="auto", tolerate=-1, chunk_bytes=256 << 10,
        packed_tables=distinct_tables, layouts=layouts, layout_of=index,
    )  # fmt: skip
    held, index = clock("tables", lambda: layouts_of(manifest))
    if held[index[0]] != pack(leaves):
        raise RuntimeError(f"{job.name}: the layout of rank 0 differs from its report")
    division = clock("cells", lambda: division_of(layouts_of(manifest), INLINE_BYTES_MAX, ()))
    cells = [[f"{cell:016x}" for cell in division.cells_of[digest]] for digest in division.layout_of]
    sent = [json.dumps({"ok": {"cells": each}}) for each in cells]
    nbytes += received(sent)
    if not clock("cells", lambda: all_match(division, [json.loads(each)["ok"]["cells"] for each in sent])):
        raise RuntimeError(f"{job.name}: equal cells do not match")
    placement = clock("placement", lambda: placement_of(manifest, division))
    part = clock("placement", lambda: placement.rank_placement(0))
    lost = clock("placement", lambda: exposures(placement))
    return {
        "job": job.name, "leaves": len(leaves), "tables": len(distinct_tables), "layouts": len(layouts),
        "cells": len(division.cells),
        "MB": nbytes / 1e6, "manifest_MB": manifest.ByteSize() / 1e6, "seconds": sum(clock.spent.values()),
        "kept_GiB": part.unreplicated.payload_bytes / 1024**3, "exposed": [each.what for each in lost], "parts": clock.spent,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,048 ranks")
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    world = 2048 if options.quick else 16384
    rows = [measure(job) for job in (fsdp2(world, 1), hybrid(world), fsdp2(128, world // 128))]
    head = ["job", "leaves", "tables", "layouts", "cells", "MB", "manifest_MB", "seconds"]
    print(
        table(
            head,
            [[f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key]) for key in head] for row in rows],
        )
    )
    parts = list(rows[0]["parts"])
    print(table(["seconds", *parts], [[row["job"], *(f"{row['parts'][part]:.2f}" for part in parts)] for row in rows]))
    goals = []
    for row in rows:
        goals.append(
            Goal(f"{row['job']}: received", row["MB"], 64, "MB", "a rank, facts, tables and cells of an attach")
        )
        goals.append(Goal(f"{row['job']}: work", row["seconds"], 5, "s", "a rank, one core, all parts above"))
    print(table(["", "goal", "value", "limit", "unit", "formula"], [goal.row() for goal in goals]))
    if options.json:
        lines = [goal.result() for goal in goals]
        lines += [Row(f"{row['job']}: manifest", "MB", None, row["manifest_MB"]) for row in rows]
        result.write(
            options.json, __file__, f"What attach exchanges, simulated, {world} ranks", lines, details={"rows": rows}
        )
    sys.exit(0 if all(goal.passed for goal in goals) else 1)


if __name__ == "__main__":
    main()
