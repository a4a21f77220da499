"""What a manifest says, as reft.core understands it: topology, layouts, and the placement that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from reft.core.cells import RIDERS_MAX, divide
from reft.core.placement import Placement, Scheme, place
from reft.errors import FormatError
from reft.wire.symbols import Layouts
from reft.wire.v1 import daemon_pb2 as pb


def layouts_of(manifest: pb.Manifest) -> tuple[Layouts, list[int]]:
    """The distinct layouts that were predicted at attach, and for each rank the index of its own.

    Raises:
        FormatError: a table can't be read, or a rank has none.
    """
    layouts = Layouts(manifest)
    index = list(manifest.layout_of)
    if len(index) != manifest.world or any(i >= len(layouts) for i in index):
        raise FormatError(f"the manifest of job {manifest.job} names no layout for some of its {manifest.world} ranks.")
    return layouts, index


def domains_of(manifest: pb.Manifest) -> list[int]:
    """The failure domain of every rank, numbered from 0 in the order of the nodes.

    Raises:
        FormatError: a rank lies on no node, or on two.
    """
    numbers = node_domains(manifest.nodes)
    found = {rank: numbers[i] for i, node in enumerate(manifest.nodes) for rank in node.ranks}
    count = sum(len(node.ranks) for node in manifest.nodes)
    if sorted(found) != list(range(manifest.world)) or count != manifest.world:
        raise FormatError(f"the manifest of job {manifest.job} does not give each of {manifest.world} ranks one node.")
    return [found[rank] for rank in range(manifest.world)]


def node_domains(nodes: Sequence[pb.Node]) -> list[int]:
    """The number of each node's failure domain: nodes with the same label share one."""
    labels: dict[str, int] = {}
    return [labels.setdefault(node.domain or f"node {node.id}", len(labels)) for node in nodes]


def placement_of(manifest: pb.Manifest) -> Placement:
    """Where every byte of every rank's state lies, the same for everyone who holds the manifest.

    With protect "none" every rank keeps all that it has, whether others have the same or not.

    Raises:
        FormatError: the manifest contradicts itself.
    """
    layouts, index = layouts_of(manifest)
    scheme = next((each for each in get_args(Scheme) if each == manifest.protect), None)
    if scheme is None:
        raise FormatError(
            f"the manifest of job {manifest.job} asks for protect={manifest.protect!r}, which is not known."
        )
    own = layouts.names if scheme == "none" else set(manifest.unequal)
    domains = domains_of(manifest)
    riders_max = RIDERS_MAX if len(set(domains)) > 1 else 0  # with one domain, a capsule has nowhere to go
    digests = layouts.digests
    division = divide(dict(zip(digests, layouts.symbolic, strict=True)), [digests[i] for i in index], own, riders_max)
    tolerate = None if manifest.tolerate < 0 else manifest.tolerate
    return place(division, domains, scheme, tolerate, manifest.chunk_bytes)
