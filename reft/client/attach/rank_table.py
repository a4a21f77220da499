"""What each rank tells about itself in an attach, with equal conclusions on every rank.

RankInfo of each rank ─► RankTable ─┬─► the job, or ConfigError: the ranks differ
                                    ├─► the nodes, in the order of their lowest ranks
                                    └─► symbolic tables and layouts, each once
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from reft.client.attach.arguments import AttachArguments
from reft.client.attach.launcher import agents_command, chosen_run_id, launch_mark
from reft.client.memory.threads import ComputeThreads
from reft.config import Config, Launch
from reft.core.layout.layout import Layout
from reft.core.layout.symbolic import SymbolicLayout
from reft.core.membership.job_identity import JobIdentity, identify
from reft.errors import ConfigError
from reft.wire import manifest, messages
from reft.wire.v1 import daemon_pb2 as pb

IDENT_BYTES = 16  # of an epoch's id


@dataclass(frozen=True)
class IdentityFacts:
    """What a rank knows of the job; see `identify`."""

    job: str
    run_id: str
    slurm: str
    script: str
    user: int
    launch: str
    unnamed: str

    @classmethod
    def of(cls, settings: Config, launch: Launch) -> IdentityFacts:
        """Returns this rank's facts."""
        return cls(
            job=settings.job,
            run_id=chosen_run_id(launch, agents_command()),
            slurm=launch.slurm_job,
            script=str(Path(sys.argv[0]).resolve()) if sys.argv[0] else "script",
            user=os.getuid(),
            launch=launch_mark(launch),
            unnamed=launch.unnamed_job,
        )

    def identify(self) -> JobIdentity:
        """Returns the job that these facts describe. For the whole job, rank 0's facts count.

        Raises:
            ConfigError: the job's name is not allowed.
        """
        return identify(
            chosen=self.job,
            run_id=self.run_id,
            slurm_job=self.slurm,
            script=self.script,
            user=self.user,
            launch=self.launch,
            unnamed=self.unnamed,
        )


@dataclass(frozen=True)
class AgreedSettings:
    """The settings that must be the same on all ranks.

    Each rank makes the manifest and the placement by itself, so these settings must not differ.

    Attributes:
        every: the snapshot interval; "auto" if the ranks agree on the interval.
    """

    protocol: int
    protect: str
    tolerate: int | None
    every: int | str
    chunk_bytes: int
    load_transport: str
    restore: str
    lineage: str

    @classmethod
    def of(cls, request: AttachArguments, settings: Config) -> AgreedSettings:
        """Returns this rank's settings."""
        return cls(
            protocol=messages.PROTOCOL,
            protect=request.protect,
            tolerate=request.tolerate,
            every="auto" if request.adapts else request.every,
            chunk_bytes=settings.chunk_bytes,
            load_transport=settings.load_transport,
            restore=settings.restore,
            lineage=settings.lineage,
        )


@dataclass(frozen=True)
class LayoutFacts:
    """A rank's layout, in short.

    Attributes:
        layout: digest of the layout.
        table: digest of the symbolic table.
        cuts: all cuts, as one list of numbers.
    """

    layout: bytes
    table: str
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, form: SymbolicLayout) -> LayoutFacts:
        """Returns this rank's facts."""
        table = xxhash.xxh3_128_hexdigest(manifest.table_to(form.table))
        return cls(layout.digest, table, tuple(number for cut in form.cuts for number in cut))


@dataclass(frozen=True)
class NodeIdentity:
    """The node that a rank runs on, as the node's daemon names it."""

    name: str
    id: str
    addresses: tuple[str, ...]
    domain: str


@dataclass(frozen=True)
class ProcessFacts:
    """A rank's process: its pid as the daemon sees it, and its compute threads.

    Attributes:
        cpus: the CPUs of the threads, as the bits of a hex number.
    """

    pid: int
    threads: int
    cpus: str

    @classmethod
    def of(cls, pid: int, team: ComputeThreads) -> ProcessFacts:
        """Returns the facts of a process."""
        return cls(pid, team.threads, f"{sum(1 << cpu for cpu in team.cpus):x}")

    @property
    def team(self) -> ComputeThreads:
        """The compute threads."""
        cpus = int(self.cpus, 16)
        return ComputeThreads(self.threads, frozenset(cpu for cpu in range(cpus.bit_length()) if cpus >> cpu & 1))


@dataclass(frozen=True)
class JobSecrets:
    """The bytes that rank 0 makes for the job.

    Attributes:
        idents: an id of IDENT_BYTES for the epoch of each try. Two decisions of one attach must
            differ.
        token: the job's token: random, or from the job key.
        lineage: names the job on storage, if this is its first attach.
    """

    idents: bytes
    token: bytes = field(repr=False)
    lineage: str = ""

    @property
    def tries(self) -> int:
        """How many tries this attach has, by the slots of rank 0: ranks may have other slots."""
        return len(self.idents) // IDENT_BYTES

    def ident(self, number: int) -> bytes:
        """Returns the id of a try's epoch."""
        return self.idents[IDENT_BYTES * number :][:IDENT_BYTES]


@dataclass(frozen=True)
class RankInfo:
    """What one rank tells all ranks about itself.

    Attributes:
        slots: the number of slots that the rank asks for; 0: any. Ranks may ask for other numbers.
        persists: whether the daemon of the rank's node writes checkpoints to storage.
        secrets: from rank 0 only.
        key_mark: stands for the job key of the rank; empty: it has none.
    """

    node: NodeIdentity
    process: ProcessFacts
    identity: IdentityFacts
    layout: LayoutFacts
    agreed: AgreedSettings
    slots: int = 0
    persists: bool = False
    secrets: JobSecrets | None = None
    key_mark: str = ""


@dataclass(frozen=True)
class RankTable:
    """The infos of all ranks, in the order of ranks."""

    infos: Sequence[RankInfo]

    @property
    def first(self) -> RankInfo:
        """The info of rank 0, which counts for the job."""
        return self.infos[0]

    @property
    def secrets(self) -> JobSecrets:
        """The secrets of the job."""
        assert self.first.secrets is not None, "rank 0 sends them"
        return self.first.secrets

    @property
    def fewest_slots(self) -> int:
        """The least number of slots that a rank asks for; 0: no rank asks for a number."""
        return min((info.slots for info in self.infos if info.slots), default=0)

    @property
    def are_persisted(self) -> bool:
        """Whether checkpoints of the job go to storage. Those of a job without a name do not.

        Nothing would find them again.
        """
        return self.job().named and bool(self.persisting)

    @property
    def persisting(self) -> list[int]:
        """The ranks whose daemons have storage, ascending."""
        return [rank for rank, info in enumerate(self.infos) if info.persists]

    def job(self) -> JobIdentity:
        """Returns the job.

        Raises:
            ConfigError: the ranks name different jobs, or have different settings.
        """
        first = self.first
        for rank, info in enumerate(self.infos):
            if info.identity.job != first.identity.job:
                raise ConfigError(f"rank 0 names the job {first.identity.job!r}, rank {rank} {info.identity.job!r}.")
            if info.key_mark != first.key_mark:
                raise ConfigError(
                    f"rank 0 and rank {rank} have different job keys, or one of them has none.",
                    "the same REFT_JOB_KEY_FILE for all ranks; start reft-daemon before torchrun, which gives it the key",
                )
            for name, value in vars(first.agreed).items():
                other = getattr(info.agreed, name)
                if other != value:
                    raise ConfigError(
                        f"rank 0 has {name} {value!r}, rank {rank} {other!r}.",
                        "give all ranks the same arguments and REFT_ variables, and all nodes the same reft",
                    )
        return first.identity.identify()

    def nodes(self) -> list[pb.Node]:
        """Returns the nodes that the ranks run on. Their order is that of their lowest ranks."""
        nodes: dict[str, pb.Node] = {}
        for rank, info in enumerate(self.infos):
            facts = info.node
            if facts.id not in nodes:
                nodes[facts.id] = pb.Node(name=facts.name, id=facts.id, addresses=facts.addresses, domain=facts.domain)
            nodes[facts.id].ranks.append(rank)
        return list(nodes.values())

    def describes(self, rank: int) -> bool:
        """Decides whether this rank publishes its symbolic table.

        The first of all ranks with the same table does.
        """
        mine = self.infos[rank].layout.table
        return all(info.layout.table != mine for info in self.infos[:rank])

    def layouts(self, tables: Sequence[bytes]) -> tuple[list[bytes], list[pb.RankLayout], list[int]]:
        """Returns the symbolic tables, the distinct layouts, and the layout index of each rank.

        Args:
            tables: the symbolic table that each rank published, in the order of ranks; empty for a
                rank that publishes none.
        """
        table_index: dict[str, int] = {}
        layout_index: dict[bytes, int] = {}
        distinct_tables: list[bytes] = []
        layouts: list[pb.RankLayout] = []
        index: list[int] = []
        for info, table in zip(self.infos, tables, strict=True):
            facts = info.layout
            if facts.table not in table_index:
                table_index[facts.table] = len(distinct_tables)
                distinct_tables.append(table)
            if facts.layout not in layout_index:
                layout_index[facts.layout] = len(layouts)
                layouts.append(pb.RankLayout(table=table_index[facts.table], cuts=facts.cuts, digest=facts.layout))
            index.append(layout_index[facts.layout])
        return distinct_tables, layouts, index
