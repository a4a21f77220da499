"""Reads what an export needs: which pieces there are, and their bytes, in the order of the slots.

table and capsule of each old rank ─► pieces ─► match ─► a plan with one reader ─► blocks
slots of lost ranks ─► decoded first, into a scratch file, and compared with their digests
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reft.cli.export.files import reserve_blocks
from reft.cli.export.slot_reader import DamagedSlot
from reft.cli.export.sources import ExportState
from reft.core.layout.layout import Leaf
from reft.core.layout.regions import ByteRuns
from reft.core.recovery.export_match import ExportMatch, match_export
from reft.core.recovery.lost_slots import refuse_resized, refuse_unguarded
from reft.core.recovery.plan import DecodeOperation, ReadOperation, SlotReaders, TransferPlan, TransferSizes
from reft.core.recovery.rebuild_plan import rebuild_plan
from reft.core.recovery.replica_samples import are_mismatched, capsule_digests
from reft.core.recovery.shard_matching import PieceSource, UnforeseenLeaves, leaves_elsewhere, pieces_of
from reft.core.recovery.stripes import StripeSlice
from reft.errors import AttachError, FormatError
from reft.wire import capsule_format
from reft.wire.capsule_format import NameTable
from reft.wire.manifest import layouts_of
from reft.wire.messages import places_from, table_from
from reft.wire.slot_format import Bytes, chunk_digest
from reft.wire.v1 import daemon_pb2 as pb

READER = 0  # the only rank of the plans
AHEAD = 4  # windows that are asked for before they are needed
SIZES = TransferSizes(piece=4 << 20, band=16 << 20, ahead=4 << 20)
ReadData = Callable[[int, int], Bytes]  # bytes begin..end of the data of one slot, verified


class GatheredBlock(NamedTuple):
    """Bytes of one tensor.

    Attributes:
        name: of the tensor's leaf.
        data: bytes of an old piece.
        runs: which of them go where in the tensor; `old` counts from the begin of `data`.
    """

    name: str
    data: Bytes
    runs: ByteRuns


@dataclass(frozen=True)
class GatheredState:
    """One opened version.

    Attributes:
        state: the version.
        trees: old rank → the tree of its capsule.
        unforeseen: old rank → how its slot or capsule differs from the manifest.
        leaves: old rank → its foreseen leaves, by name.
    """

    state: ExportState
    trees: Mapping[int, Mapping[str, Any]]
    unforeseen: Mapping[int, UnforeseenLeaves]
    leaves: Mapping[int, Mapping[str, Leaf]]

    @classmethod
    def of(cls, state: ExportState) -> GatheredState:
        """Reads the table and the capsule of each old rank.

        Raises:
            DamagedSlot: one is damaged.
            FormatError: the manifest contradicts itself.
            AttachError: a rank is missing, or replicas differ.
        """
        layouts, index = layouts_of(state.manifest)
        by_layout = [{leaf.name: leaf for leaf in form.leaves()} for form in layouts.symbolic]
        trees, unforeseen = {}, {}
        for rank in range(state.manifest.world):
            slot = state.slots.get(rank)
            if slot is None and rank not in state.capsules:
                raise AttachError(f"nothing holds rank {rank} of {state.version}.", "export another step")
            names, foreseen = layouts.name_table(index[rank]), by_layout[index[rank]]
            others: tuple[tuple[Leaf, int | None], ...] = ()
            if slot is None:
                tree = _tree_of_lost(state, rank, names, foreseen)
            else:
                tree = capsule_format.decode(slot.capsule(), names)
                table = slot.table()
                layout, places = table_from(table), places_from(table)
                cells, inline = ({name for name, each in places.items() if each == at} for at in (pb.CELL, pb.INLINE))
                others = tuple(leaves_elsewhere(state.placement, rank, layout, cells, foreseen, inline))
            trees[rank], unforeseen[rank] = tree, UnforeseenLeaves(frozenset(tree["absent"]), others)
        _refuse_mismatched(state, trees.values())
        return cls(state, trees, unforeseen, {rank: by_layout[at] for rank, at in enumerate(index)})

    def match(self, has_optimizer: bool, dtype: str = "") -> ExportMatch:
        """Returns the tensors of the export; see `match_export`."""
        pieces, problems = pieces_of(self.state.placement, lambda rank: self.leaves[rank], self.unforeseen)
        found = match_export(pieces, has_optimizer, dtype)
        found.problems += problems
        return found

    def blocks(self, match: ExportMatch, scratch: Path) -> Iterator[GatheredBlock]:
        """Yields the bytes of the tensors.

        Args:
            match: of this state.
            scratch: a folder for the slots of lost ranks.

        Raises:
            DamagedSlot: a source is damaged.
            AttachError: a lost slot can't be decoded.
            OSError: the file system of `scratch` has no room for them.
        """
        state = self.state
        with self._readers(match, scratch) as readers:
            here = SlotReaders(
                dict.fromkeys(readers, READER), dict.fromkeys(range(state.manifest.world), READER),
                dict.fromkeys(readers, ""), [""],
            )  # fmt: skip
            plan = TransferPlan(match.needs, state.placement, here, sizes=SIZES, stored=state.stored)
            begun: deque[ReadOperation] = deque()
            for operation in plan.operations(READER):
                assert isinstance(operation, ReadOperation), "every slot is at hand"
                if operation.source is PieceSource.SLOT and operation.owner in state.slots:
                    state.slots[operation.owner].ahead(operation.begin, operation.end)
                begun.append(operation)
                if len(begun) > AHEAD:
                    yield from self._read(begun.popleft(), readers)
            for operation in begun:
                yield from self._read(operation, readers)

    def _read(self, operation: ReadOperation, readers: Mapping[int, ReadData]) -> Iterator[GatheredBlock]:
        inline = self.trees[operation.owner]["riders"] if operation.source is PieceSource.CAPSULE else {}
        window = None if inline else readers[operation.owner](operation.begin, operation.end)
        for part in operation.parts:
            size = part.end - part.begin
            if window is None:
                data = np.frombuffer(inline[part.need.name], np.uint8)
                if data.nbytes != part.need.nbytes:
                    raise FormatError(
                        f"{part.need.name} has {data.nbytes} bytes in its capsule, not {part.need.nbytes}."
                    )
                data = data[part.begin : part.end]
            else:
                data = window[part.at - operation.begin :][:size]
            yield GatheredBlock(part.need.name, data, part.runs._replace(old=part.runs.old - part.at))

    # Lost slots

    @contextmanager
    def _readers(self, match: ExportMatch, scratch: Path) -> Iterator[dict[int, ReadData]]:
        """Gives a reader for each old rank and parity number; decodes lost slots first."""
        state = self.state
        readers: dict[int, ReadData] = {number: slot.data for number, slot in state.slots.items()}
        if not state.capsules:
            yield readers
            return
        with tempfile.TemporaryFile(dir=scratch) as file:
            offsets, end = {}, 0
            for rank in sorted(state.capsules):
                offsets[rank] = end
                end += state.placement.rank_placement(rank).data_bytes
            reserve_blocks(file.fileno(), max(end, 1))
            memory = np.memmap(file, np.uint8, "r+")
            made = {
                rank: memory[at : at + state.placement.rank_placement(rank).data_bytes] for rank, at in offsets.items()
            }
            self._decode(made, readers)
            for rank, data in made.items():
                self._compare(rank, data)
                readers[rank] = partial(_part, data)
            yield readers

    def _decode(self, made: Mapping[int, Bytes], readers: Mapping[int, ReadData]) -> None:
        state, rows = self.state, dict[StripeSlice, Bytes]()
        try:
            plan = rebuild_plan(state.placement, set(readers), set(made), SIZES, state.sections)
            for operation in plan.operations(READER):
                if isinstance(operation, ReadOperation) and operation.slice is not None:
                    if operation.slice not in rows:
                        rows[operation.slice] = operation.slice.empty_rows()
                    for part in operation.parts:
                        for begin, at, size in part.runs.rows():
                            rows[operation.slice][at : at + size] = readers[operation.owner](begin, begin + size)
                elif isinstance(operation, DecodeOperation):
                    decoded = operation.slice.decode(rows.pop(operation.slice))
                    for owner, begin, data in operation.slice.made_parts(decoded):
                        made[owner][begin : begin + data.nbytes] = data
        except ValueError as error:
            raise AttachError(
                f"{state.version} can't be decoded: {str(error).rstrip('.')}.", "export another step"
            ) from error

    def _compare(self, rank: int, data: Bytes) -> None:
        """Raises DamagedSlot if a decoded slot differs from the digests in its capsule.

        All its sources were right, so the capsule is given up, as in a restore.
        """
        digests, size = np.frombuffer(self.state.capsules[rank].digests, "<u8"), self.state.manifest.chunk_bytes
        for number, at in enumerate(range(0, data.nbytes, size)):
            if number >= len(digests) or chunk_digest(data[at : at + size]) != int(digests[number]):
                raise _damaged_capsule(
                    self.state, rank, f"the decoded slot of {self.state.version} differs from what was saved."
                )


def _tree_of_lost(state: ExportState, rank: int, names: NameTable, foreseen: Mapping[str, Leaf]) -> Mapping[str, Any]:
    """Returns the tree of the capsule of a lost slot, judged as a restore does.

    Raises:
        DamagedSlot: it is damaged, or the slot had leaves that nobody foresaw.
    """
    record = state.capsules[rank]
    try:
        tree: Mapping[str, Any] = capsule_format.decode(record.capsule, names)
        if rank in state.sections:
            refuse_unguarded(state.placement, rank, tree["absent"], record.unreplicated_bytes, len(record.digests))
        refuse_resized(rank, tree["riders"], foreseen.values())
    except FormatError as error:
        raise _damaged_capsule(state, rank, error.message) from error
    return tree


def _damaged_capsule(state: ExportState, rank: int, why: str) -> DamagedSlot:
    """Returns an error after which the export goes on without this capsule."""
    return DamagedSlot(state.capsule_places.get(rank), f"the capsule of rank {rank} can't be used: {why}")


def _refuse_mismatched(state: ExportState, trees: Iterable[Mapping[str, Any]]) -> None:
    """Raises AttachError if ranks differed where they should be replicas.

    The round never makes such a step whole. But slots of a step that it did not decide are sealed,
    too, and their parts together would be a tensor that no rank ever had.
    """
    samples = [capsule_digests(tree) for tree in trees]
    for data in state.earlier:
        with suppress(FormatError):
            samples.append(capsule_digests(capsule_format.decode(data)))
    if are_mismatched(samples):
        raise AttachError(
            f"in {state.version} ranks hold different bytes where they should be replicas. Nobody knows which are right.",
            "export an older step by --step; wrap the model in DDP, or attach with protect='none' if ranks shall differ",
        )


def _part(data: Bytes, begin: int, end: int) -> Bytes:
    return data[begin:end]
