"""What a manifest says, as reft.core understands it: topology, layouts, and the placement that follows from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import get_args

from reft.core.coding.placement import Placement, Scheme, place
from reft.core.layout.cells import RIDERS_MAX, Division, divide
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


def holders_of_unequal(manifest: pb.Manifest) -> list[tuple[str, list[int]]]:
    """Leaves whose replicas were found to differ, so that each rank keeps its own, and the ranks that have them."""
    layouts, index = layouts_of(manifest)
    wanted = set(manifest.unequal)
    found: dict[str, list[int]] = {name: [] for name in sorted(wanted)}
    for rank, at in enumerate(index if wanted else ()):
        for name in wanted & layouts.names_of(at):
            found[name].append(rank)
    return list(found.items())


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


def division_of(manifest: pb.Manifest, riders_max: int, own: Collection[str]) -> Division:
    """The manifest's layouts, divided.

    Args:
        riders_max: see `divide`.
        own: names of leaves that each rank keeps for itself.

    Raises:
        FormatError: a table can't be read, or a rank has none.
    """
    layouts, index = layouts_of(manifest)
    digests = layouts.digests
    return divide(dict(zip(digests, layouts.symbolic, strict=True)), [digests[i] for i in index], own, riders_max)


def placement_of(manifest: pb.Manifest, alike: Division | None = None) -> Placement:
    """Where every byte of every rank's state lies, the same for everyone who holds the manifest.

    With protect "none" every rank keeps all that it has, whether others have the same or not.

    Args:
        alike: the division if no leaf is unequal, where it is known already: of thousands of ranks it takes a second.

    Raises:
        FormatError: the manifest contradicts itself.
    """
    scheme = next((each for each in get_args(Scheme) if each == manifest.protect), None)
    if scheme is None:
        raise FormatError(
            f"the manifest of job {manifest.job} asks for protect={manifest.protect!r}, which is not known."
        )
    domains = domains_of(manifest)
    if alike is not None and scheme != "none" and not manifest.unequal:
        division = alike
    else:
        own = layouts_of(manifest)[0].names if scheme == "none" else set(manifest.unequal)
        division = division_of(manifest, riders_max(domains), own)
    tolerate = None if manifest.tolerate < 0 else manifest.tolerate
    return place(division, domains, scheme, tolerate, manifest.chunk_bytes)


def riders_max(domains: Sequence[int]) -> int:
    """The most bytes of riders: none where all ranks are in one domain, for a capsule has nowhere to go then."""
    return RIDERS_MAX if len(set(domains)) > 1 else 0


def placing(manifest: pb.Manifest) -> tuple[object, ...]:
    """What of a manifest decides where bytes lie."""
    nodes = tuple((node.id, node.domain, tuple(node.ranks)) for node in manifest.nodes)
    layouts = tuple(manifest.layouts[i].digest for i in manifest.layout_of)
    return nodes, manifest.protect, manifest.tolerate, manifest.chunk_bytes, layouts
