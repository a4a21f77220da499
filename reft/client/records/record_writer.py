"""Writes the record of one mark after the other, in a thread of its own.

trainer's thread        record thread
update ─► (queue) ─►    slot by the rule (record_slots.py) ─► WRITING
                        gradients ─► chunks, digests ─► were they written meanwhile?
mark   ─► (queue) ─►    capsule ─► LANDED ─► SEALED; or the mark is a gap
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reft.client.link.reports import Reporter
from reft.client.link.slots import MappedSlot
from reft.client.memory.threads import TaskThread
from reft.client.records.record_copy import HostRecordCopy, RecordCopy, TensorRun
from reft.client.records.record_plan import RecordPlan
from reft.client.records.record_slots import RecordSlots
from reft.client.torch_internals import write_count
from reft.core.commit.gradient_records import mark_of
from reft.core.commit.version import Version
from reft.core.membership.log_debounce import TroubleLog
from reft.errors import ReftError
from reft.wire.record_format import NO_RECORD, GradientRecord, RecordUpdate, encode_record, record_digest

log = logging.getLogger("reft")
ZEROS = HostRecordCopy()  # copies nothing, so all bytes become zeros


@dataclass(frozen=True)
class GradientUpdate:
    """The gradients of one optimizer's step, as its pre-hook found them.

    Attributes:
        mark: the mark that will end the step.
        optimizer: index of the optimizer.
        update: what the record says of the step.
        runs: the tensors to copy, in the order of their offsets.
        counts: how often each tensor was written until now.
        ready: what the copy waits for.
    """

    mark: int
    optimizer: int
    update: RecordUpdate
    runs: tuple[TensorRun, ...]
    counts: tuple[int, ...]
    ready: Any

    def check(self) -> None:
        """Raises ReftError if a tensor was written since the pre-hook."""
        for run, count in zip(self.runs, self.counts, strict=True):
            if write_count(run.tensor) != count:
                raise TornRecord(f"a gradient of {self.update.optimizer} was written before it was copied.")


class TornRecord(ReftError):
    """A gradient was overwritten while it was copied."""


@dataclass
class RecordCounts:
    """What the session has recorded.

    Attributes:
        sealed: number of records.
        torn: marks without a record, because a gradient was overwritten.
        missed: marks without a record for another reason.
        mark: the mark of the newest record; -1: none.
        reason: why the last gap is one; empty: there was none.
    """

    sealed: int = 0
    torn: int = 0
    missed: int = 0
    mark: int = -1
    reason: str = ""


@dataclass
class _OpenRecord:
    """The record that is being written."""

    slot: MappedSlot
    mark: int
    digests: np.ndarray
    updates: dict[int, RecordUpdate] = field(default_factory=dict)


class RecordWriter:
    """Writes the records of one rank and one epoch; see the module.

    Args:
        plan: what a record holds.
        slots: the record slots of this rank.
        reporter: knows the pins, and whether this epoch is over.
        copy: copies the gradients.
        cpu: the CPU to run on; None leaves the choice to the scheduler.
    """

    def __init__(
        self, plan: RecordPlan, slots: RecordSlots, reporter: Reporter, copy: RecordCopy, cpu: int | None
    ) -> None:
        self.counts = RecordCounts()
        self._plan = plan
        self._slots = slots
        self._reporter = reporter
        self._copy = copy
        self._open: _OpenRecord | None = None
        self._failure: Exception | None = None  # why the open mark becomes a gap
        self._last: tuple[int, str] = (-1, NO_RECORD)  # mark and digest of the newest record
        self._trouble_log = TroubleLog()
        self._thread = TaskThread("reft-records", cpu)

    @property
    def is_over(self) -> bool:
        """Whether no turn folds records any more: none need be written."""
        return self._reporter.reply.records_over

    def add(self, update: GradientUpdate) -> None:
        """Copies the gradients of a step into the record of its mark."""
        self._thread.submit(lambda: self._add(update))

    def finish(self, mark: int, updated: frozenset[int], gap: str) -> Future[None]:
        """Seals the record of a mark, or makes the mark a gap. Then the future is done.

        Args:
            mark: the mark.
            updated: the optimizers that have stepped since the mark before.
            gap: why the mark gets no record; empty: the mark gets one.
        """
        return self._thread.submit(lambda: self._finish(mark, updated, gap))

    def idle(self) -> Future[None]:
        """Returns a future that is done once all work of before is done."""
        return self._thread.submit(lambda: None)

    def close(self) -> None:
        """Ends the thread after its last work. The slots stay with the daemon."""
        self._thread.close()

    def _add(self, update: GradientUpdate) -> None:
        if self._failure is not None:
            return
        try:
            self._check_owner()
            record = self._open
            if record is None or record.mark != update.mark:
                record = self._open = self._opened(update.mark, self._plan.layout.data_bytes)
            self._fill(record, update.optimizer, self._copy, update.runs, update.ready)
            update.check()
            record.updates[update.optimizer] = update.update
        except Exception as error:  # a failed record must never end training
            self._failure = error

    def _check_owner(self) -> None:
        """Raises ReftError if this process must write no slot any more."""
        if self._reporter.is_stale:
            raise ReftError("a newer attach owns the job.")

    def _opened(self, mark: int, data_bytes: int) -> _OpenRecord:
        """Returns a record slot that is WRITING.

        Raises:
            ReftError: no slot may be written.
        """
        epoch = self._reporter.facts.epoch
        slot = self._slots.choose(epoch, mark, self._reporter.pins)
        if slot is None:
            raise ReftError(f"all {len(self._slots.mapped)} record slots are kept for a turn or a replay.")
        slot.map.begin(Version(epoch, mark), self._plan.layout.digest, b"", data_bytes)
        return _OpenRecord(slot, mark, np.zeros(slot.map.chunks, np.uint64))

    def _fill(
        self, record: _OpenRecord, optimizer: int, copy: RecordCopy, runs: Sequence[TensorRun], ready: Any
    ) -> None:
        header = record.slot.map.header
        chunks, data = range(*self._plan.layout.parts[optimizer]), record.slot.map.data[: header.data_bytes]
        digests = copy.copy(runs, ready, data, header.geometry.chunk_bytes, chunks)
        record.digests[chunks.start : chunks.stop] = digests

    def _finish(self, mark: int, updated: frozenset[int], gap: str) -> None:
        failure, self._failure = self._failure, None
        record, self._open = self._open, None
        try:
            self._check_owner()
            self._empty_from(mark)
            if failure is not None:
                raise failure
            if gap:
                raise ReftError(gap)
            if not updated:
                record = self._opened(mark, 0)
            if record is None or record.mark != mark or record.updates.keys() != updated:
                raise ReftError("the steps were counted anew.")
            self._seal(record)
            self._note(mark, "")
        except TornRecord as error:
            self.counts.torn += 1
            self._note(mark, error.message)
        except Exception as error:  # a failed record must never end training
            self.counts.missed += 1
            self._note(mark, error.message if isinstance(error, ReftError) else f"{type(error).__name__}: {error}")

    def _empty_from(self, mark: int) -> None:
        """Empties records whose steps are counted anew: they have this mark, or a later one."""
        for slot in self._slots.mapped:
            if mark_of(slot.view(), self._reporter.facts.epoch) >= mark:
                slot.map.empty()

    def _seal(self, record: _OpenRecord) -> None:
        for optimizer in self._plan.layout.parts.keys() - record.updates.keys() if record.updates else ():
            self._fill(record, optimizer, ZEROS, (), None)
        slot, (last_mark, digest) = record.slot.map, self._last
        previous = digest if last_mark == record.mark - 1 else NO_RECORD
        capsule = encode_record(GradientRecord(record.mark, previous, tuple(record.updates.values())))
        slot.put_capsule(capsule)
        slot.landed()
        slot.sealed(record.digests)
        self._last = record.mark, record_digest(slot.header, capsule, record.digests.tolist())
        self.counts.sealed += 1
        self.counts.mark = record.mark

    def _note(self, mark: int, reason: str) -> None:
        """Logs when gaps begin, have another reason, or end ("")."""
        self.counts.reason = reason or self.counts.reason
        if not self._trouble_log.heard(reason, time.monotonic()):
            return
        rank = self._reporter.facts.rank
        if reason:
            log.warning(
                "rank %d has no gradient record of mark %d: %s The next turn exchanges copies. Training goes on.",
                rank, mark, reason,
            )  # fmt: skip
        else:
            log.warning("rank %d records gradients again.", rank)
