"""Records the gradients of each mark, in the trainer's thread: takes references.

    pre-hook of an optimizer ─► references to gradients, or clones         ─► writer
    mark                     ─► the record is complete, or the mark is a gap ─► writer

At the pre-hook the gradients are reduced, unscaled and clipped. A reference keeps a gradient that
`zero_grad` gives up. A gradient that lies in a bucket of DDP, or that `zero_grad` overwrites, is
cloned: the former is seen at once, the latter once a record was torn by it.

No call waits, and no error reaches training: the mark becomes a gap.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from reft.client.records.record_copy import RecordCopy, TensorRun
from reft.client.records.record_plan import GradientSource, RecordPlan, group_values, reads_parameter, updater
from reft.client.records.record_writer import GradientUpdate, RecordWriter
from reft.client.torch_internals import write_count
from reft.core.commit.gradient_records import RecordItem, RecordPlace
from reft.errors import ReftError, UnsupportedState
from reft.wire.record_format import NO_PARAMETER, RecordLeaf, RecordUpdate

log = logging.getLogger("reft")
UNFINISHED_MAX = 2  # marks whose gradients are held until they are copied
HELD = "a new layout is being agreed on."


class GradientRecorder:
    """The gradient records of one rank and one epoch; see the module.

    Args:
        plan: what a record holds.
        writer: writes the records; owned by this object.
        copy: says when gradients may be read.
        mark: the mark whose state the optimizers have now; None: unknown, so recording begins with
            the step after the next mark.
    """

    def __init__(self, plan: RecordPlan, writer: RecordWriter, copy: RecordCopy, mark: int | None) -> None:
        self._plan = plan
        self._writer = writer
        self._copy = copy
        self._mark = mark  # the newest mark
        self._updated: set[int] = set()  # optimizers that have stepped since
        self._gap = "" if mark is not None else "the steps before the first mark are unknown."
        self._is_held = False
        self._clones = False  # whether each gradient is cloned
        self._lock = threading.Lock()  # held while work is handed to the writer
        self._unfinished: deque[Future[None]] = deque()
        self._late = 0  # marks that were not handed to the writer

    def before_step(self, index: int) -> None:
        """Takes the gradients of an optimizer that is about to step.

        Args:
            index: of the optimizer among those passed to attach.
        """
        with self._lock:
            if self._gap or self._is_held or self._mark is None or self._writer.is_over:
                return
            if index not in self._plan.layout.parts:
                return
            try:
                self._check_writer(index)
                self._updated.add(index)
                self._writer.add(self._update(index, self._mark + 1))
            except Exception as error:  # a failed record must never end training
                self._gap = error.message if isinstance(error, ReftError) else f"{type(error).__name__}: {error}"

    def mark(self, mark: int, calls_hooks: bool) -> None:
        """Ends the record of a mark.

        Args:
            mark: the mark.
            calls_hooks: whether the optimizers' steps call hooks.
        """
        with self._lock:
            gap, updated, before = self._gap, frozenset(self._updated), self._mark
            self._mark, self._gap = mark, ""
            self._updated.clear()
            if self._is_held or before is None or self._writer.is_over:
                return
            if mark != before + 1:
                gap = f"mark {mark} follows mark {before}."
            elif not calls_hooks:
                gap = "the optimizer's steps call no hooks."
            if self._is_late():
                self._late += 1
                return
            self._unfinished.append(self._writer.finish(mark, updated, gap))

    def _is_late(self) -> bool:
        while self._unfinished and self._unfinished[0].done():
            self._unfinished.popleft()
        return len(self._unfinished) >= UNFINISHED_MAX

    def _check_writer(self, index: int) -> None:
        """Raises ReftError if this step can't be recorded."""
        if index in self._updated:
            raise ReftError(f"optimizer.{index} has stepped more than once.")
        if self._is_late():
            raise ReftError(f"the gradients of {len(self._unfinished)} marks are still being copied.")

    def _update(self, index: int, mark: int) -> GradientUpdate:
        """Returns references to the gradients of an optimizer.

        Raises:
            UnsupportedState: a gradient or a value of a group can't be recorded.
        """
        optimizer = self._plan.optimizers[index]
        kind = type(updater(optimizer))
        if not kind.__module__.startswith("torch.optim."):
            raise UnsupportedState(f"optimizer.{index} is a {kind.__name__}, which is not one of torch's own.")
        if getattr(optimizer, "found_inf", None) is not None:
            raise UnsupportedState(f"a GradScaler leaves it to the kernels of optimizer.{index} to skip a step.")
        groups = group_values(optimizer)
        leaves: list[RecordLeaf] = []
        runs: list[TensorRun] = []
        for item, place, source in self._items(index):
            gradient, reads = source.parameter.grad, reads_parameter(kind.__name__, groups[source.group])
            if gradient is None:
                continue
            _check_gradient(item, place, source.parameter, gradient, reads)
            runs.append(TensorRun(place.offset, self._kept(gradient)))
            if reads:
                runs.append(TensorRun(place.param_offset, source.parameter.detach().clone()))
            leaves.append(
                RecordLeaf(item.owner, item.name, source.group, place.offset, item.nbytes, item.dtype, item.shape,
                           place.param_offset if reads else NO_PARAMETER)
            )  # fmt: skip
        update = RecordUpdate(f"optimizer.{index}", kind.__name__, groups, tuple(leaves))
        counts = tuple(write_count(run.tensor) for run in runs)
        return GradientUpdate(mark, index, update, tuple(runs), counts, self._copy.ready())

    def _items(self, index: int) -> Iterator[tuple[RecordItem, RecordPlace, GradientSource]]:
        layout = self._plan.layout
        for item, place, source in zip(layout.items, layout.places, self._plan.sources, strict=True):
            if item.optimizer == index:
                yield item, place, source

    def _kept(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient that nobody overwrites: itself, or a clone."""
        if not self._clones and self._writer.counts.torn:
            self._clones = True
            log.info("gradients are cloned before each step: they are overwritten before a record has them.")
        is_part = gradient.untyped_storage().nbytes() != gradient.nbytes  # of a bucket of DDP
        return gradient.detach().clone() if is_part or self._clones else gradient

    # A new layout; a thread beside training calls these

    def hold(self, deadline_s: float) -> None:
        """Records no more, and waits until the last record is written.

        Raises:
            TimeoutError: it is not written in time.
        """
        with self._lock:
            self._is_held = True
        self._writer.idle().result(deadline_s)

    def resume(self) -> None:
        """Records again, from the next mark on: the new layout was given up."""
        with self._lock:
            self._is_held, self._gap = False, HELD

    def close(self) -> None:
        """Ends the records after the last one."""
        with self._lock:
            self._is_held = True
        self._writer.close()

    def stats(self) -> dict[str, float]:
        """Returns the numbers of `Session.stats`."""
        counts = self._writer.counts
        return {
            "records": counts.sealed,
            "records_torn": counts.torn,
            "records_missed": counts.missed + self._late,
            "record_bytes": self._plan.layout.data_bytes,
            "recorded_mark": counts.mark,
        }


def _check_gradient(
    item: RecordItem, place: RecordPlace, parameter: torch.Tensor, gradient: torch.Tensor, reads: bool
) -> None:
    """Raises UnsupportedState for a gradient that has no place in a record.

    Args:
        item: the gradient's item.
        place: where the gradient goes.
        parameter: the parameter.
        gradient: its gradient.
        reads: whether the update reads the parameter.
    """
    if gradient.layout is not torch.strided or gradient.dtype != parameter.dtype or gradient.nbytes != item.nbytes:
        raise UnsupportedState(
            f"the gradient of {item.name} is of {gradient.dtype}, {gradient.layout}, {gradient.shape}."
        )
    if _order(gradient) != _order(parameter) or gradient.device != parameter.device:
        raise UnsupportedState(f"the gradient of {item.name} does not lie in memory as its parameter does.")
    if reads and place.param_offset == NO_PARAMETER:
        raise UnsupportedState(f"weight decay of {item.name} began after attach, and records have no place for it.")


def _order(tensor: torch.Tensor) -> list[int]:
    """Returns the strides that decide the order of the elements in memory."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
