"""Which state other nodes can compute again from gradients (protect="aor"), and what is refused.

torch's ZeroRedundancyOptimizer    each rank has the moments of some parameters, alone
its class, element by element      SGD, Adam, AdamW: torch's own, not a class derived from them
a rank's unreplicated section      these moments, and nothing else
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from reft.client.state.extract.registry import Extractor
from reft.client.state.extract.zero_redundancy import ZeroRedundancyExtractor
from reft.core.layout.layout import Leaf
from reft.core.text import more
from reft.errors import UnsupportedState
from reft.replay.fold import reads_parameter

REMEDY = "protect='auto', which exchanges parity of any state"
ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
MOMENTS: Mapping[type, tuple[str, ...]] = MappingProxyType(
    {
        torch.optim.SGD: ("momentum_buffer",),
        torch.optim.Adam: ADAM,
        torch.optim.AdamW: ADAM,
    }
)


def check_optimizers(objects: Iterable[tuple[str, Any, Extractor]]) -> None:
    """Refuses optimizers whose state no other node can compute again.

    Args:
        objects: prefix, object and extractor of all that attach was given.

    Raises:
        UnsupportedState: none is torch's ZeroRedundancyOptimizer, or one is of an unknown class.
    """
    sharded = _sharded(objects)
    if not sharded:
        raise UnsupportedState(
            "protect='aor' updates the moments of torch's ZeroRedundancyOptimizer on other nodes, and no optimizer is one.",
            REMEDY,
        )
    known = ", ".join(kind.__name__ for kind in MOMENTS)
    for prefix, inner in sharded.items():
        if type(inner) not in MOMENTS:
            raise UnsupportedState(
                f"{prefix} is a ZeroRedundancyOptimizer of {type(inner).__name__}; with protect='aor' it can be one of torch's "
                f"own {known}, whose steps other nodes can repeat.",
                REMEDY,
            )


def check_section(leaves: Iterable[Leaf], objects: Iterable[tuple[str, Any, Extractor]]) -> None:
    """Refuses leaves that only one rank holds, and that are no moments.

    Args:
        leaves: the unreplicated leaves of this rank.
        objects: prefix, object and extractor of all that attach was given.

    Raises:
        UnsupportedState: names the first such leaf.
    """
    moments = tuple(f"{prefix}.{key}." for prefix, inner in _sharded(objects).items() for key in MOMENTS[type(inner)])
    if others := [leaf.name for leaf in leaves if not leaf.name.startswith(moments)]:
        raise UnsupportedState(
            f"only this rank holds {others[0]}{more(len(others) - 1, 'leaf', 'leaves')}; with protect='aor' it can hold only "
            "moments alone, which other nodes compute from gradients.",
            REMEDY,
        )


def check_threads(leaves: Iterable[Leaf], objects: Iterable[tuple[str, Any, Extractor]], threads: int) -> None:
    """Refuses moments that other nodes compute with other bits: their replayer has one thread.

    Args:
        leaves: the unreplicated leaves of this rank.
        objects: prefix, object and extractor of all that attach was given.
        threads: number of threads that this process computes with.

    Raises:
        UnsupportedState: names the first such leaf; see `reft.replay.fold`.
    """
    narrow = tuple(
        f"{prefix}."
        for prefix, inner in _sharded(objects).items()
        if isinstance(inner, torch.optim.SGD)
        or any(reads_parameter(type(inner).__name__, group) for group in inner.param_groups)
    )
    for leaf in leaves if threads > 1 else ():
        if leaf.dtype == "bfloat16" and leaf.name.startswith(narrow):
            raise UnsupportedState(
                f"{leaf.name} is of bfloat16, and its bits depend on the {threads} threads of this rank; a replayer has one.",
                "OMP_NUM_THREADS=1",
            )


def _sharded(objects: Iterable[tuple[str, Any, Extractor]]) -> dict[str, torch.optim.Optimizer]:
    """Returns prefix → inner optimizer of each ZeroRedundancyOptimizer of torch."""
    return {
        prefix: extractor.owner(value)
        for prefix, value, extractor in objects
        if isinstance(extractor, ZeroRedundancyExtractor)
    }
