"""Who takes part in an attach: every rank's facts, and what follows from them alike on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from reft.client.exchange import bytes_of
from reft.client.state import Bindings, flat_bytes, is_dense
from reft.core.identity import Job, identify
from reft.core.layout import Layout
from reft.core.symbolic import Symbolic
from reft.errors import ConfigError
from reft.wire import symbols
from reft.wire.v1 import daemon_pb2 as pb

CONSTANT = "constant "  # before a digest


@dataclass(frozen=True)
class Roster:
    """The facts of all ranks, in the order of ranks: JSON values that each rank gave of itself."""

    facts: Sequence[Mapping[str, Any]]

    def job(self) -> Job:
        """The job.

        Raises:
            ConfigError: the ranks name different ones.
        """
        first = self.facts[0]
        for rank, facts in enumerate(self.facts):
            if facts["job"] != first["job"]:
                raise ConfigError(f"rank 0 names the job {first['job']!r}, rank {rank} {facts['job']!r}.")
        return identify(
            chosen=first["job"], run_id=first["run_id"], slurm_job=first["slurm"], script=first["script"], user=first["user"],
            launch=first["launch"],
        )  # fmt: skip

    def nodes(self) -> list[pb.Node]:
        """The nodes that the ranks run on, in the order of their lowest ranks."""
        nodes: dict[str, pb.Node] = {}
        for rank, facts in enumerate(self.facts):
            node = pb.Node(
                name=facts["node"], id=facts["node_id"], addresses=facts["addresses"], domain=facts["domain"]
            )
            nodes.setdefault(facts["node_id"], node).ranks.append(rank)
        return list(nodes.values())

    def describes(self, rank: int) -> bool:
        """Whether this rank is the one that publishes its symbolic table: the first of those that share it."""
        mine = self.facts[rank]["table"]
        return all(facts["table"] != mine for facts in self.facts[:rank])

    def layouts(self, described: Sequence[Mapping[str, Any]]) -> tuple[list[bytes], list[pb.RankLayout], list[int]]:
        """The symbolic tables, the distinct layouts, and for each rank the index of its own."""
        number: dict[str, int] = {}
        tables: list[bytes] = []
        layouts: list[pb.RankLayout] = []
        index: list[int] = []
        found: dict[str, int] = {}
        for facts, said in zip(self.facts, described, strict=True):
            if facts["table"] not in number:
                number[facts["table"]] = len(tables)
                tables.append(bytes_of(said["table"]))
            if facts["layout"] not in found:
                found[facts["layout"]] = len(layouts)
                digest = bytes.fromhex(facts["layout"])
                layouts.append(pb.RankLayout(table=number[facts["table"]], cuts=facts["cuts"], digest=digest))
            index.append(found[facts["layout"]])
        return tables, layouts, index

    @property
    def may_differ(self) -> bool:
        """Whether leaves that should be replicas may differ, so that each must be compared on its own."""
        return len({facts["values"] for facts in self.facts}) > 1


def layout_facts(layout: Layout, form: Symbolic) -> dict[str, Any]:
    """What a rank says of its layout: digests of it and of its symbolic table, and its cuts, as numbers in a row."""
    table = xxhash.xxh3_128_hexdigest(symbols.table_to(form.table))
    return {"layout": layout.digest.hex(), "table": table, "cuts": [number for cut in form.cuts for number in cut]}


def value_digests(bindings: Bindings) -> dict[str, str]:
    """A digest of the bytes of each leaf that only the optimizer writes; after CONSTANT if all elements are equal.

    By name; pieces of a whole by name, a line end, and their place in it: other pieces are other leaves.
    """
    found = {}
    for name, tensor in bindings.tensors.items():
        if name in bindings.staged:
            continue
        dense = tensor if is_dense(tensor) else tensor.contiguous()
        data = flat_bytes(dense).to(torch.device("cpu")).numpy()
        size = tensor.element_size()
        is_constant = not data.nbytes or bool((data.reshape(-1, size) == data[:size]).all())
        box = bindings.boxes.get(name)
        where = f"\n{list(tensor.shape)} at {list(box.offset)}" if box else ""
        found[name + where] = (CONSTANT if is_constant else "") + xxhash.xxh3_64_hexdigest(data)
    return found


def combined(digests: Mapping[str, str]) -> str:
    """One digest of all of them."""
    return xxhash.xxh3_64_hexdigest(repr(sorted(digests.items())).encode())


def unequal(described: Sequence[Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """Names of leaves that ranks hold with unlike bytes, or will.

    The optimizer's state of such a leaf goes with it. So do leaves of one repeated value once anything differs: that zeros
    are equal proves nothing.

    Args:
        names: all leaves of all layouts, also those that do not exist yet.
    """
    seen: dict[str, set[str]] = {}
    for said in described:
        for name, digest in said.get("values", {}).items():
            seen.setdefault(name, set()).add(digest)
    differ = {piece.partition("\n")[0] for piece, digests in seen.items() if len(digests) > 1}
    if not differ:
        return []
    constant = {piece for piece, digests in seen.items() if all(digest.startswith(CONSTANT) for digest in digests)}
    proven = {piece.partition("\n")[0] for piece in seen if piece not in constant}
    differ |= {piece.partition("\n")[0] for piece in constant} - proven
    return sorted({name for name in names if name in differ or any(name.endswith(f".{each}") for each in differ)})
