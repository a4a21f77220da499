"""Refuses capsules of lost slots that held something which only those slots could tell.

A capsule has no leaf table. So a lost slot counts only if all of its leaves were as foreseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized

from reft.core.coding.placement import Placement
from reft.core.layout.layout import Leaf
from reft.errors import FormatError


def refuse_unguarded(
    placement: Placement, rank: int, absent: Iterable[str], unreplicated_bytes: int, digest_bytes: int
) -> None:
    """Raises FormatError if a lost slot had leaves that its guard lane does not guard.

    Args:
        placement: under which the slot was written.
        rank: the slot's rank.
        absent: names of foreseen leaves that did not exist.
        unreplicated_bytes: size of the unreplicated leaves in the slot, as its capsule says.
        digest_bytes: size of the digests of the slot's chunks, in its capsule.
    """
    part, missing = placement.rank_placement(rank), {*absent}
    foreseen = sum(leaf.nbytes for leaf in part.unreplicated.leaves if leaf.name not in missing)
    chunks = -(-part.data_bytes // placement.chunk_bytes)
    if unreplicated_bytes != foreseen or digest_bytes != 8 * chunks:
        raise FormatError(
            f"the slot of rank {rank} held {unreplicated_bytes} bytes that no other slot has, and {digest_bytes // 8} chunks. "
            f"Its guard lane gives back {foreseen} bytes, in {chunks} chunks."
        )


def refuse_resized(rank: int, inline: Mapping[str, Sized], foreseen: Iterable[Leaf]) -> None:
    """Raises FormatError if an inline leaf of a lost slot has another size than foreseen.

    Only the table of the slot had its shape.

    Args:
        rank: the slot's rank.
        inline: name → bytes of each inline leaf in the capsule.
        foreseen: the rank's foreseen leaves.
    """
    nbytes_of = {leaf.name: leaf.nbytes for leaf in foreseen}
    for name, data in inline.items():
        if len(data) != nbytes_of[name]:
            raise FormatError(
                f"{name} has {len(data)} bytes in the capsule of rank {rank}. Attach foresaw {nbytes_of[name]} bytes, and "
                "another shape stands only in the lost slot."
            )
