"""torch's ZeroRedundancyOptimizer: each rank updates some parameters whole, and has their state in an optimizer of its own.

    outer: param_groups (all), state (empty)   step: inner.step ─► broadcast of each parameter by its owner ─► hooks of the outer
    inner, `.optim`: param_groups (this rank's share), state

The parameters are replicas. The state of each has one holder: it is kept by its rank, or rides in the capsule if it is small.
"""

from __future__ import annotations

from typing import Any

import torch

from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.errors import UnsupportedState


class ZeroRedundancyExtractor(OptimizerExtractor):
    """For torch.distributed.optim.ZeroRedundancyOptimizer."""

    def owner(self, value: Any) -> torch.optim.Optimizer:
        """The inner optimizer."""
        inner: torch.optim.Optimizer = value.optim
        return inner

    def check(self, prefix: str, value: Any) -> None:
        """Refuses steps that DDP's communication hooks take in the middle of backward: no window is left to copy in."""
        if value._overlap_with_ddp:
            raise UnsupportedState(
                f"{prefix} is a ZeroRedundancyOptimizer with overlap_with_ddp, which writes the state during backward.",
                "overlap_with_ddp=False",
            )
