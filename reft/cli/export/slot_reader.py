"""Reads a slot, wherever it lies, and compares each chunk with its digest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.errors import FormatError
from reft.wire.slot_format import PAGE, Bytes, Header, best_header, chunk_digest

ReadBytes = Callable[[int, Bytes], None]
AskBytes = Callable[[int, int], None]


class DamagedSlot(FormatError):
    """A slot, parity slot or capsule is damaged, gone, or of another version.

    Args:
        source: (node, name, version) as the recovery plan counts erasures; empty: on storage.
        message: for a person.
    """

    def __init__(self, source: tuple[str, str, Version] | None, message: str) -> None:
        super().__init__(message, "reft-cli list shows other steps")
        self.source = source


class ExportReader:
    """One slot of one version.

    Args:
        version: that the slot must hold.
        rank: whose slot it is.
        read: `read(offset, into)` fills `into` from the slot's file.
        name: of the slot, for a person.
        source: see `DamagedSlot`.
        ask: `ask(offset, nbytes)` says which bytes `read` will want next.

    Attributes:
        read_bytes: of data, so far.

    Raises:
        DamagedSlot: it is no sealed slot of the version.
    """

    def __init__(
        self, version: Version, rank: int, read: ReadBytes, name: str,
        source: tuple[str, str, Version] | None = None, ask: AskBytes = lambda offset, nbytes: None,
    ) -> None:  # fmt: skip
        self._ask = ask
        self._version, self._rank, self._read = version, rank, read
        self._name, self._source = name, source
        self.read_bytes = 0
        pages = np.empty(2 * PAGE, np.uint8)
        self._fill(0, pages)
        self._header = self._header_of(pages)
        geometry = self._header.geometry
        self._digests = np.empty(geometry.chunks, "<u8")
        self._fill(geometry.digests_offset, self._digests.view(np.uint8))

    def table(self) -> bytes:
        """Returns the leaf table's bytes.

        Raises:
            DamagedSlot: its digest is wrong.
        """
        header = self._header
        return self._part("leaf table", header.geometry.table_offset, header.table_bytes, header.table_digest)

    def capsule(self) -> bytes:
        """Returns the capsule's bytes.

        Raises:
            DamagedSlot: its digest is wrong.
        """
        header = self._header
        return self._part("capsule", header.geometry.capsule_offset, header.capsule_bytes, header.capsule_digest)

    def data(self, begin: int, end: int) -> Bytes:
        """Returns bytes begin..end of the data. Whole chunks are read, and compared first.

        Raises:
            DamagedSlot: a chunk has a wrong digest, or can't be read.
        """
        header, size = self._header, self._header.geometry.chunk_bytes
        first, stop = self._chunks(begin, end)
        data = np.empty(stop - first, np.uint8)
        self._fill(header.geometry.data_offset + first, data)
        self.read_bytes += data.nbytes
        for at in range(0, data.nbytes, size):
            if chunk_digest(data[at : at + size]) != int(self._digests[(first + at) // size]):
                raise self._damage(f"chunk {(first + at) // size} has a wrong digest.")
        return data[begin - first : end - first]

    def ahead(self, begin: int, end: int) -> None:
        """Announces a call of `data` for these bytes. Calls follow in the same order.

        Raises:
            DamagedSlot: the slot has no such bytes.
        """
        first, stop = self._chunks(begin, end)
        self._ask(self._header.geometry.data_offset + first, stop - first)

    def _chunks(self, begin: int, end: int) -> tuple[int, int]:
        """Returns begin and end of the chunks that have bytes begin..end."""
        header, size = self._header, self._header.geometry.chunk_bytes
        stop = min(-(-end // size) * size, header.data_bytes)
        if end > stop:
            raise self._damage(f"its data have {header.data_bytes} bytes, not {end}.")
        return begin // size * size, stop

    def _header_of(self, pages: Bytes) -> Header:
        try:
            header = best_header(pages)
        except FormatError as error:
            raise self._damage(error.message) from error
        if (header.rank, header.version, header.state) != (self._rank, self._version, SlotState.SEALED):
            raise self._damage(f"it holds {header.version} of rank {header.rank}.")
        return header

    def _part(self, what: str, offset: int, size: int, digest: int) -> bytes:
        data = np.empty(size, np.uint8)
        self._fill(offset, data)
        if xxhash.xxh3_64_intdigest(data.data) != digest:
            raise self._damage(f"its {what} has a wrong digest.")
        return data.tobytes()

    def _fill(self, offset: int, into: Bytes) -> None:
        try:
            if into.nbytes:
                self._read(offset, into)
        except DamagedSlot:
            raise
        except FormatError as error:
            raise self._damage(error.message) from error

    def _damage(self, why: str) -> DamagedSlot:
        return DamagedSlot(self._source, f"{self._name} can't be used: {why}")
