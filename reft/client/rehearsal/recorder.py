"""Records one rank of a rehearsal: one JSON object a line, in PREFIX.RANK.jsonl.

    attach ─► tracing ─► first batch ─► first forward: inputs ─► mark: digests of all state ─► …
              where generators move                              second mark: objects not in state=

It runs on the training thread, and waits for the device. So a rehearsal is slower than training.
An error ends the recording, and never reaches training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reft.client.data.loader import ResumableLoader
from reft.client.rehearsal.alive import AliveObjects
from reft.client.rehearsal.digests import (
    ON_DEVICE,
    ON_HOST,
    generator_digests,
    group_values,
    plain_digest,
    tensor_digest,
)
from reft.client.rehearsal.epoch_ends import EpochProgress
from reft.client.rehearsal.inputs import ForwardInputs
from reft.client.rehearsal.saves import SaveTracer
from reft.client.rehearsal.tracing import GeneratorTracer
from reft.client.snapshot.snapshotter import Snapshotter
from reft.client.state.serialization import finished
from reft.client.state.tensors import TensorIndex, device_of
from reft.client.state.tracked_objects import TrackedObjects

log = logging.getLogger("reft")
# Leaves of a line; one more entry stands for the rest. So a line has at most some MB.
LEAVES_MAX: Final = 20_000
SCANNED_MARK: Final = 2


@dataclass(frozen=True)
class RehearsalFacts:
    """What attach knows of this rank.

    Attributes:
        prefix: of the files.
        regroups: whether DDP regroups its sums after the first backward pass of a process.
    """

    prefix: str
    rank: int
    world: int
    regroups: bool


class RehearsalRecorder:
    """Records one rank, from the end of attach on; see the module.

    Args:
        facts: what attach knows.
        tracked: the tracked objects.
        state: what the user passed in state=.
    """

    def __init__(self, facts: RehearsalFacts, tracked: TrackedObjects, state: Mapping[str, Any]) -> None:
        self._facts = facts
        self._pid = os.getpid()
        self._file: RecordFile | None = None
        self._tracked = tracked
        self._state = state
        self._loaders = [each for each in state.values() if isinstance(each, ResumableLoader)]
        self._inputs: ForwardInputs | None = None
        self._epochs = EpochProgress(self._loaders)
        self._saves = SaveTracer(self._fail)
        self._alive = AliveObjects(tracked, state)
        self._tracer = GeneratorTracer(self._fail, self._traced_batch)
        self._step = 0  # the newest mark
        self._marks = 0  # since attach

    def attached(self, step: int, restored_from: str | None) -> None:
        """Records the attach, when the generators are restored; begins to record this rank.

        Args:
            step: the completed steps.
            restored_from: where the state came from; None for a fresh start.
        """
        with self._guarded():
            self._file = RecordFile(Path(f"{self._facts.prefix}.{self._facts.rank}.jsonl"))
            self._step = step
            self._write(
                "attach",
                world=self._facts.world,
                pid=self._pid,
                restored_from=restored_from,
                script=Path(sys.argv[0]).name,
                time=time.time(),
                digests=ON_HOST if device_of(self._tracked.bind().tensors.values()).type == "cpu" else ON_DEVICE,
                hash=hash("reft"),  # tells runs with different seeds of Python's hash
                generators=generator_digests(),
                state=[*self._state],
                regroups=self._facts.regroups,
            )
            self._inputs = ForwardInputs(self._tracked.modules, self._before_first_forward, self._fail)
            for loader in self._loaders:
                loader.watch(self._inputs.batch)
            self._epochs.start()
            self._saves.start()
            self._trace()

    def mark(self, step: int, snapshots: Snapshotter) -> None:
        """Records the state at a mark, before anything else is done there.

        Args:
            step: the step that the mark ends.
            snapshots: knows the tracked objects and the host state.
        """
        with self._guarded():
            if self._file is None or self._inputs is None or os.getpid() != self._pid:
                return
            self._end_trace()  # a compiled model may have called no hook
            self._step, self._marks, time_s = step, self._marks + 1, time.time()
            seen = self._inputs.take()
            generators = generator_digests()
            tensor_index = snapshots.planner.tracked.bind()
            plain = finished(snapshots.host.take_objects())
            self._write(
                "mark",
                time=time_s,
                inputs=seen.digests,
                at_batch=seen.at_batch,
                at_forward=seen.at_forward,
                generators=generators,
                groups=groups_of(snapshots.planner.tracked),
                state={name: plain_digest(value) for name, value in plain.items()},
                leaves=leaf_digests(tensor_index),
                forwards=sorted(kind.value for kind in seen.forwards),
                epoch_ends=self._epochs.at_mark(),
                saves=self._saves.take(),
            )
            if self._marks == SCANNED_MARK - 1:
                self._alive.note_modules()
            elif self._marks == SCANNED_MARK:
                self._write("alive", objects=self._alive.find())
                self._trace()

    def close(self) -> None:
        """Ends the recording."""
        self._tracer.close()
        self._saves.close()
        for loader in self._loaders:
            loader.watch(None)
        if self._inputs is not None:
            self._inputs.close()
        if self._file is not None:
            self._file.close()
        self._file = None

    def _trace(self) -> None:
        if reason := self._tracer.start():
            self._write("untraced", reason=reason)

    def _traced_batch(self) -> None:
        # Only some steps are traced, and reft's loaders tell each batch. So only one kind counts.
        if self._inputs is not None and not self._loaders:
            self._inputs.batch()

    def _before_first_forward(self) -> None:
        self._end_trace()

    def _end_trace(self) -> None:
        moves, reason = self._tracer.stop()
        # Lines that move a generator in the midst of training are no fault of a restart.
        kind = "usual" if self._marks else "moved"
        for generator, line in moves:
            self._write(kind, generator=generator, file=line.short_file, line=line.number, code=line.code)
        if reason:
            self._write("untraced", reason=reason)

    def _write(self, kind: str, **fields: Any) -> None:
        if self._file is not None:
            self._file.write({"kind": kind, "rank": self._facts.rank, "step": self._step, **fields})

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Ends the recording at an error, which never reaches training."""
        try:
            yield
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        log.warning("rank %d: the rehearsal is not recorded any more: %s", self._facts.rank, text)
        if not isinstance(error, OSError):
            with contextlib.suppress(OSError):
                self._write("failed", error=text)
        self.close()


class RecordFile:
    """A file of records, opened for append.

    Each line is one write, so a SIGKILL leaves whole lines.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record.

        Raises:
            OSError: the line is not in the file, or not as a whole.
        """
        line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        written = os.write(self._descriptor, line)
        if written < len(line):
            raise OSError(f"{written} of {len(line)} bytes of a record were written.")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def groups_of(tracked: TrackedObjects) -> dict[str, dict[str, object]]:
    """Returns the settings of all parameter groups, by "optimizer.NUMBER.GROUP"."""
    return {
        f"optimizer.{number}.{index}": group_values(group)
        for number, optimizer in enumerate(tracked.optimizers)
        for index, group in enumerate(getattr(optimizer, "param_groups", ()))
    }


def leaf_digests(tensor_index: TensorIndex) -> dict[str, str]:
    """Returns the digest of each leaf; one digest stands for those beyond the limit."""
    digests = {name: tensor_digest(tensor) for name, tensor in tensor_index.tensors.items()}
    if len(digests) <= LEAVES_MAX:
        return digests
    names = [*digests]
    rest = {name: digests[name] for name in names[LEAVES_MAX:]}
    return {name: digests[name] for name in names[:LEAVES_MAX]} | {f"{len(rest)} more leaves": plain_digest(rest)}
