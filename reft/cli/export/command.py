"""`reft-cli export`: one step of a job as files for plain torch and Hugging Face, without reft.

    source ─► state ─► match ─► files with holes ─► blocks, verified, cast, at their places ─► PATH
       ▲ └─ a source is damaged: a new plan without it ─┘

It holds some windows of 4 MiB, never a tensor: files are written through mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from reft.cli.export.casts import cast, cast_runs
from reft.cli.export.files import TensorRange, dcp_files, named_at_the_end, nbytes_of, safetensors_files
from reft.cli.export.gathered import GatheredBlock, GatheredState
from reft.cli.export.slot_reader import DamagedSlot
from reft.cli.export.sources import Erased, ExportState
from reft.core.commit.version import Version
from reft.core.layout.regions import copy_runs
from reft.core.recovery.export_match import ExportMatch
from reft.core.text import counted
from reft.errors import AttachError, UnsupportedState
from reft.wire.slot_format import Bytes

TRIES_MAX = 16
LINES_MAX = 8
Show = Callable[[int, int], None]  # bytes written so far, and in all


class ExportSource(Protocol):
    """Where the bytes come from."""

    def open(self, erased: Erased = ()) -> AbstractContextManager[ExportState]:
        """Opens a version without sources that were found damaged."""
        ...


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        version: the version.
        tensors: number of tensors.
        nbytes: of the tensors.
        notes: what was left out or chosen.
    """

    version: Version
    tensors: int
    nbytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ExportCommand:
    """One run of `reft-cli export`.

    Args:
        source: where the bytes come from.
        path: the folder to make.
        is_dcp: whether to write DCP's files, else safetensors.
        has_optimizer: whether optimizer state is written, too.
        dtype: of floating point weights; empty: as they are held.
        shard_bytes: the most bytes of a safetensors file, unless one tensor has more.
        show: gets the progress.
    """

    source: ExportSource
    path: Path
    is_dcp: bool = False
    has_optimizer: bool = True
    dtype: str = ""
    shard_bytes: int = 5_000_000_000
    show: Show = lambda done, total: None
    _erased: set[tuple[str, str, Version]] = field(default_factory=set)

    def run(self) -> ExportReport:
        """Writes the files.

        Raises:
            UnsupportedState: a weight can't be exported; it is named.
            DamagedSlot: a source is damaged, and nothing else holds the same.
            ReftError: nothing is left under `path`.
        """
        damage: DamagedSlot | None = None
        for _ in range(TRIES_MAX):
            try:
                return self._try()
            except DamagedSlot as error:
                if error.source is None or error.source in self._erased:
                    raise
                self._erased.add(error.source)
                damage = error
            except AttachError as error:
                if damage is None or type(error) is not AttachError:
                    raise
                raise AttachError(f"{damage.message} {error.message}", error.hint) from error
        assert damage is not None, "each try has found a damage"
        raise damage

    def _try(self) -> ExportReport:
        with self.source.open(self._erased) as state:
            gathered = GatheredState.of(state)
            match = gathered.match(self.has_optimizer, self.dtype)
            self._refuse(match)
            with named_at_the_end(self.path) as folder:
                make = dcp_files(folder, match.tensors) if self.is_dcp else None
                ranges = make or safetensors_files(folder, match.tensors, self.shard_bytes)
                with opened(ranges) as targets:
                    self._write(gathered.blocks(match, folder), match, targets)
            notes = [*match.notes, *state.notes]
            notes += [
                f"{name} of {version} on node {state.names.get(node, node)}: damaged, not used"
                for node, name, version in sorted(self._erased, key=lambda each: (each[2].order, each[:2]))
            ]
            return ExportReport(state.version, len(match.tensors), sum(map(nbytes_of, match.tensors)), tuple(notes))

    def _refuse(self, match: ExportMatch) -> None:
        if match.problems:
            lines = match.problems[:LINES_MAX]
            rest = len(match.problems) - len(lines)
            raise UnsupportedState(
                "the weights can't be exported whole:\n  "
                + "\n  ".join([*lines, *([f"and {rest} more"] if rest else [])]),
                "save them from the trainer by its own checkpoint (restore the step first)",
            )
        if not match.tensors:
            raise UnsupportedState("the job holds no weights of a model.", "pass the model to attach")

    def _write(self, blocks: Iterator[GatheredBlock], match: ExportMatch, targets: dict[str, Bytes]) -> None:
        tensors = {each.leaf.name: each for each in match.tensors}
        total, done = sum(map(nbytes_of, match.tensors)), 0
        self.show(done, total)
        for name, data, runs in blocks:
            tensor = tensors[name]
            old, new = tensor.leaf.dtype, tensor.dtype
            if old != new:
                data, runs = cast(data, old, new), cast_runs(runs, old, new)
            copy_runs(data, targets[name], runs)
            done += int(runs.nbytes.sum())
            self.show(done, total)
        assert done == total, f"{done} of {total} bytes were placed"


@contextmanager
def opened(ranges: list[TensorRange]) -> Iterator[dict[str, Bytes]]:
    """Gives the memory of each tensor, by its leaf: mappings of the files.

    Raises:
        OSError: a file can't be mapped.
    """
    files = {each.path: np.memmap(each.path, np.uint8, "r+") for each in ranges}
    yield {each.tensor.leaf.name: files[each.path][each.begin : each.begin + each.nbytes] for each in ranges}


def report_lines(report: ExportReport, path: Path, size: str) -> list[str]:
    """Returns what a person reads in the end."""
    head = f"{path}: {report.version}, {counted(report.tensors, 'tensor')}, {size}."
    return [head, *(f"  {note}" for note in report.notes)]
