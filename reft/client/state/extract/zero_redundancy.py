"""torch's ZeroRedundancyOptimizer: each rank updates some parameters whole.

    outer            param_groups (all), state (empty)
    inner, `.optim`  param_groups (this rank's parameters), their state
    step             inner.step ─► each parameter is broadcast by its owner ─► outer's hooks

The parameters are replicas. The state of each parameter is on one rank only: it is an unreplicated
leaf, or an inline leaf in the capsule if it is small.
"""

from __future__ import annotations

from typing import Any

import torch

from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.torch_internals import overlaps_with_ddp
from reft.errors import UnsupportedState


class ZeroRedundancyExtractor(OptimizerExtractor):
    """Extracts the state of torch.distributed.optim.ZeroRedundancyOptimizer."""

    def owner(self, value: Any) -> torch.optim.Optimizer:
        """Returns the inner optimizer."""
        inner: torch.optim.Optimizer = value.optim
        return inner

    def check(self, prefix: str, value: Any) -> None:
        """Refuses overlap_with_ddp.

        With this option, DDP's hooks step during backward, which leaves no window to copy in.
        """
        if overlaps_with_ddp(value):
            raise UnsupportedState(
                f"{prefix} is a ZeroRedundancyOptimizer with overlap_with_ddp, which writes the state during backward.",
                "overlap_with_ddp=False",
            )
