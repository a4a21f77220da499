"""The facts of all ranks in an attach, with equal conclusions on every rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from reft.client.attach.arguments import AttachArguments
from reft.client.attach.launcher import agents_command, chosen_run_id, launch_mark
from reft.client.link.rank_group import bytes_of
from reft.client.memory.threads import ComputeThreads
from reft.config import Config, Launch
from reft.core.layout.layout import Layout
from reft.core.layout.symbolic import SymbolicLayout
from reft.core.membership.job_identity import JobIdentity, identify
from reft.errors import ConfigError
from reft.wire import manifest, messages
from reft.wire.v1 import daemon_pb2 as pb


@dataclass(frozen=True)
class RankTable:
    """The facts of all ranks.

    Attributes:
        facts: JSON values that each rank sent about itself, in the order of ranks.
    """

    facts: Sequence[Mapping[str, Any]]

    def job(self) -> JobIdentity:
        """Returns the job.

        Raises:
            ConfigError: the ranks name different jobs, or have different settings.
        """
        first = self.facts[0]
        for rank, facts in enumerate(self.facts):
            if facts["job"] != first["job"]:
                raise ConfigError(f"rank 0 names the job {first['job']!r}, rank {rank} {facts['job']!r}.")
            for name, value in first["agreed"].items():
                if facts["agreed"][name] != value:
                    raise ConfigError(
                        f"rank 0 has {name} {value!r}, rank {rank} {facts['agreed'][name]!r}.",
                        "give all ranks the same arguments and REFT_ variables, and all nodes the same reft",
                    )
        return job_of(first)

    def nodes(self) -> list[pb.Node]:
        """Returns the nodes that the ranks run on. Their order is that of their lowest ranks."""
        nodes: dict[str, pb.Node] = {}
        for rank, facts in enumerate(self.facts):
            node = pb.Node(
                name=facts["node"], id=facts["node_id"], addresses=facts["addresses"], domain=facts["domain"]
            )
            nodes.setdefault(facts["node_id"], node).ranks.append(rank)
        return list(nodes.values())

    def describes(self, rank: int) -> bool:
        """Decides whether this rank publishes its symbolic table.

        The first of all ranks with the same table does.
        """
        mine = self.facts[rank]["table"]
        return all(facts["table"] != mine for facts in self.facts[:rank])

    def layouts(self, descriptions: Sequence[Mapping[str, Any]]) -> tuple[list[bytes], list[pb.RankLayout], list[int]]:
        """Returns the symbolic tables, the distinct layouts, and the layout index of each rank.

        Args:
            descriptions: what each rank published, in the order of ranks: the symbolic table, or
                nothing.
        """
        table_index: dict[str, int] = {}
        layout_index: dict[str, int] = {}
        tables: list[bytes] = []
        layouts: list[pb.RankLayout] = []
        index: list[int] = []
        for facts, description in zip(self.facts, descriptions, strict=True):
            if facts["table"] not in table_index:
                table_index[facts["table"]] = len(tables)
                tables.append(bytes_of(description["table"]))
            if facts["layout"] not in layout_index:
                layout_index[facts["layout"]] = len(layouts)
                digest = bytes.fromhex(facts["layout"])
                layouts.append(pb.RankLayout(table=table_index[facts["table"]], cuts=facts["cuts"], digest=digest))
            index.append(layout_index[facts["layout"]])
        return tables, layouts, index


def identity_facts(settings: Config, launch: Launch) -> dict[str, Any]:
    """Returns this rank's facts about the job."""
    script = str(Path(sys.argv[0]).resolve()) if sys.argv[0] else "script"
    return {
        "job": settings.job,
        "run_id": chosen_run_id(launch, agents_command()),
        "slurm": launch.slurm_job,
        "script": script,
        "user": os.getuid(),
        "launch": launch_mark(launch),
        "unnamed": launch.unnamed_job,
    }


def agreed_facts(request: AttachArguments, settings: Config) -> dict[str, Any]:
    """Returns the facts that must be the same on all ranks.

    Each rank makes the manifest and the placement by itself, so they must not differ.
    """
    agreed = {
        "protocol": messages.PROTOCOL,
        "protect": request.protect,
        "tolerate": request.tolerate,
        "every": "auto" if request.adapts else request.every,
        "chunk_bytes": settings.chunk_bytes,
        "load_transport": settings.load_transport,
    }
    return {"agreed": agreed}


def team_facts(team: ComputeThreads) -> dict[str, Any]:
    """Returns this rank's facts about its compute threads.

    The CPUs are the bits of a hex number.
    """
    return {"threads": team.threads, "cpus": f"{sum(1 << cpu for cpu in team.cpus):x}"}


def team_of(facts: Mapping[str, Any]) -> ComputeThreads:
    """Returns the compute threads of a rank, by the facts of `team_facts`."""
    cpus = int(facts["cpus"], 16)
    return ComputeThreads(facts["threads"], frozenset(cpu for cpu in range(cpus.bit_length()) if cpus >> cpu & 1))


def job_of(facts: Mapping[str, Any]) -> JobIdentity:
    """Returns the job that a rank's facts describe. For the whole job, the facts of rank 0 count.

    Raises:
        ConfigError: the job's name is not allowed.
    """
    return identify(
        chosen=facts["job"],
        run_id=facts["run_id"],
        slurm_job=facts["slurm"],
        script=facts["script"],
        user=facts["user"],
        launch=facts["launch"],
        unnamed=facts["unnamed"],
    )


def layout_facts(layout: Layout, form: SymbolicLayout) -> dict[str, Any]:
    """Returns this rank's facts about its layout.

    These are digests of the layout and of the symbolic table, and all cuts as one list of numbers.
    """
    table = xxhash.xxh3_128_hexdigest(manifest.table_to(form.table))
    return {"layout": layout.digest.hex(), "table": table, "cuts": [number for cut in form.cuts for number in cut]}
