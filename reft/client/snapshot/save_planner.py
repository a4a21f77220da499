"""Keeps the save plan of the leaves that exist now."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from reft.client.snapshot.save_plan import ParityTiling, SavePlan, plan_save
from reft.client.state.structure import StructureFacts, changed_beyond_repair
from reft.client.state.tensors import TensorIndex
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.coding.placement import Placement
from reft.core.layout.layout import Leaf

log = logging.getLogger("reft")


class CurrentPlan(NamedTuple):
    """The leaves that exist now, their write counts, and the save plan for them.

    Attributes:
        tensor_index: the leaves.
        versions: the write counts.
        save_plan: the save plan.
        unrestorable: why a restarted script could not bring back the leaves; empty if it could.
    """

    tensor_index: TensorIndex
    versions: Sequence[int]
    save_plan: SavePlan
    unrestorable: str


class SavePlanner:
    """Makes a save plan whenever other leaves exist.

    Args:
        tracked: the objects whose leaves are saved.
        placement: where the bytes of this epoch lie; it stays the same when leaves come and go.
        rank: the rank that writes.
        tiling: the sizes of parity columns that suit the engine.
        predicted: the leaves that attach predicts. Their plan is made here, before the first mark.
        built: what a restarted script builds; None if that is not known.
        bound: the tensor index that attach has made last. The first plan uses it if it is current,
            by the same test as at each mark.
    """

    def __init__(
        self,
        tracked: TrackedObjects,
        placement: Placement,
        rank: int,
        tiling: ParityTiling,
        predicted: Sequence[Leaf] | None = None,
        built: StructureFacts | None = None,
        bound: TensorIndex | None = None,
    ) -> None:
        self.built = built
        self._bound = bound
        self.tracked = tracked
        self._placement = placement
        self._rank = rank
        self._tiling = tiling
        self._predicted = None if predicted is None else plan_save(placement, rank, predicted, {}, tiling)
        self._current: CurrentPlan | None = None

    def current(self) -> CurrentPlan:
        """Returns the plan for the leaves that exist now; reuses the one before if possible.

        Call it at the mark: the loop's values are copied here.
        """
        for values in self.tracked.held_values().values():
            values.refresh()
        if self._current is not None:
            versions = self._current.tensor_index.current_versions()
            if versions is not None:
                return self._current._replace(versions=versions)
        previous = self._current.save_plan if self._current else self._predicted
        bound, self._bound = self._bound, None
        tensor_index = bound if bound is not None and bound.is_current() else self.tracked.bind()
        leaves = tensor_index.leaves()
        reused = previous.with_tensors(leaves, tensor_index.tensors) if previous else None
        save_plan = reused or plan_save(self._placement, self._rank, leaves, tensor_index.tensors, self._tiling)
        now = StructureFacts.of(self.tracked, leaves, tensor_index.names)
        self._current = CurrentPlan(
            tensor_index, tensor_index.versions(), save_plan, changed_beyond_repair(self.built or now, now)
        )
        if self._placement.lanes and save_plan.unplanned != (previous.unplanned if previous else ()):
            log.warning(
                "rank %d: attach did not predict %d leaves, e.g. %s. They are lost with their node.",
                self._rank,
                len(save_plan.unplanned),
                ", ".join(save_plan.unplanned[:3]),
            )
        return self._current

    def bytes_per_snapshot(self) -> int:
        """Returns the bytes that one snapshot writes: live bytes, parity, and inline leaves."""
        if self._current is None:
            return 0
        save_plan = self._current.save_plan
        return save_plan.written_bytes + sum(save_plan.leaves[i].nbytes for i in save_plan.inline_leaves)

    @property
    def latest(self) -> CurrentPlan | None:
        """The plan of the last snapshot; None before the first one. Any thread may read it."""
        return self._current

    def expected_leaves(self, tensor_index: TensorIndex) -> list[Leaf]:
        """Returns the leaves of this index, and those that attach predicts and that are missing."""
        leaves = tensor_index.leaves()
        names = {leaf.name for leaf in leaves}
        predicted = self._predicted.leaves if self._predicted else ()
        return [*leaves, *(leaf for leaf in predicted if leaf.name not in names)]

    @property
    def unplanned_leaves(self) -> tuple[str, ...]:
        """Leaves of the last snapshot that attach did not predict: only this rank has them."""
        return self._current.save_plan.unplanned if self._current and self._placement.lanes else ()
