"""Defines the format of a slot, which a trainer maps and a daemon owns.

A slot is one file of a tmpfs, or one memfd. All numbers are little-endian.

    offset            what                size
    0                 header, copy 0      4096
    4096              header, copy 1      4096
    8192              leaf table          table_capacity       protobuf LeafTable
    …                 digests             8 × chunks           xxh3_64 of each data chunk
    …                 capsule             CAPSULE_MAX          see reft.wire.capsule_format
    …                 data                data_capacity        data shards | parity shards |
                                                               unreplicated leaves
    every part begins at a multiple of 4096

The leaf table is the same for all versions of a layout. It and the placement of the version's epoch
say which bytes of the data are which.

A header is the struct HEADER below, little-endian, followed by the xxh3_64 of its bytes. The two
copies are written in turn. The valid copy with the greater sequence number counts. So a writer that
dies while it writes one copy leaves the other. The sequence number also shows a reader whether the
slot changed since its last look.

The writer sets state WRITING before the first byte of table, capsule or data. It sets LANDED after
the last byte, and SEALED once the digests are there too. If the writer dies, any other holder of
the slot may turn LANDED into SEALED. A reader trusts only a SEALED slot, and checks the digests of
the bytes that it reads. The header names a layout only after a version of that layout has landed
here. Then the slot has the table, and the zeros between the live bytes, which are written once.
Sequence numbers end at SEQ_MAX, which no writer reaches: a greater one is a damaged copy.

Versions of this format: a reader reads any minor number of the majors in READABLE, and refuses
other majors by name. In format 1 all leaves lay in the data, each at its offset. Since format 2
leaves may lie in other slots and in capsules. Since format 3 capsules refer to names by number; a
capsule says so itself, so slots of format 2 are read too.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from reft.core.commit.slots import SlotState
from reft.core.commit.version import STEP_MAX, Epoch, Version
from reft.core.layout.layout import align
from reft.errors import FormatError
from reft.wire.shm import POPULATE_READ, advise

MAGIC: Final = b"REFTSLOT"
MAJOR: Final = 3  # written
READABLE: Final = (2, 3)
MINOR: Final = 0
PAGE: Final = 4096
TABLE_MAX: Final = 64 << 20
CAPSULE_MAX: Final = 1 << 20
SEQ_MAX: Final = 1 << 63  # of a header: a trainer needs 90,000 years to write so many
DIGEST_KIND_XXH3_64: Final = 1
# magic, major, minor, seq, state, digest kind, rank, job, epoch counter, epoch id, step, layout
# digest, chunk bytes, table capacity, data capacity, table bytes, table digest, capsule bytes,
# capsule digest, data bytes
HEADER: Final = struct.Struct("<8sHHQBBI64sQ16sQ16sIQQQQQQQ")
CHECKSUM: Final = struct.Struct("<Q")

BUFFERS_MAX: Final = 1024  # buffers of one call of preadv, on Linux

Bytes = npt.NDArray[np.uint8]
ReadVector = Callable[[int, Sequence[memoryview], int], int]


class UnknownFormat(FormatError):
    """A slot has a format that this reft does not read.

    Args:
        major: the slot's major number.
        minor: its minor number.
    """

    def __init__(self, major: int, minor: int) -> None:
        super().__init__(
            f"the slot has format {major}.{minor}; this reft reads {' and '.join(map(str, READABLE))}.",
            "use the reft that wrote it, or purge the job",
        )
        self.major = major
        self.minor = minor


@dataclass(frozen=True)
class Geometry:
    """The offsets and sizes of a slot's parts in bytes. They are fixed when the slot is created."""

    table_capacity: int
    data_capacity: int
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        return -(-self.data_capacity // self.chunk_bytes)

    @property
    def table_offset(self) -> int:
        return 2 * PAGE

    @property
    def digests_offset(self) -> int:
        return align(self.table_offset + self.table_capacity, PAGE)

    @property
    def capsule_offset(self) -> int:
        return align(self.digests_offset + 8 * self.chunks, PAGE)

    @property
    def data_offset(self) -> int:
        return align(self.capsule_offset + CAPSULE_MAX, PAGE)

    @property
    def file_bytes(self) -> int:
        return align(self.data_offset + self.data_capacity, PAGE)


@dataclass(frozen=True)
class Header:
    """The content of one header copy; fields in the order of the struct."""

    geometry: Geometry
    job: str
    rank: int
    state: SlotState = SlotState.EMPTY
    version: Version | None = None
    seq: int = 0
    layout: bytes = bytes(16)
    table_bytes: int = 0
    table_digest: int = 0
    capsule_bytes: int = 0
    capsule_digest: int = 0
    data_bytes: int = 0

    def encode(self) -> bytes:
        """Returns the header's bytes, checksum last."""
        version = self.version or Version(Epoch(0, bytes(16)), 0)
        body = HEADER.pack(
            MAGIC, MAJOR, MINOR, self.seq, self.state, DIGEST_KIND_XXH3_64, self.rank, self.job.encode(),
            version.epoch.counter, version.epoch.ident, version.step, self.layout,
            self.geometry.chunk_bytes, self.geometry.table_capacity, self.geometry.data_capacity,
            self.table_bytes, self.table_digest, self.capsule_bytes, self.capsule_digest, self.data_bytes,
        )  # fmt: skip
        return body + CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_header(data: bytes) -> Header:
    """Returns the header of one copy.

    Raises:
        FormatError: wrong magic, checksum, other major version, or impossible sizes.
    """
    body = data[: HEADER.size]
    if len(data) < HEADER.size + CHECKSUM.size or body[:8] != MAGIC:
        raise FormatError("this is not a slot: the magic number is missing.")
    fields = HEADER.unpack(body)
    major, minor = fields[1], fields[2]
    if major not in READABLE:
        raise UnknownFormat(major, minor)
    if CHECKSUM.unpack_from(data, HEADER.size)[0] != xxhash.xxh3_64_intdigest(body):
        raise FormatError("the header's checksum is wrong.")
    return _header_of(fields)


def _header_of(fields: tuple[Any, ...]) -> Header:
    (_, _, _, seq, state, kind, rank, job, counter, ident, step, layout, chunk, table_capacity, data_capacity,
     table_bytes, table_digest, capsule_bytes, capsule_digest, data_bytes) = fields  # fmt: skip
    if kind != DIGEST_KIND_XXH3_64 or state not in SlotState.__members__.values():
        raise FormatError(f"unknown digest kind {kind!r} or state {state!r}.")
    if seq > SEQ_MAX:
        raise FormatError(f"the header has sequence number {seq}; the last one is {SEQ_MAX}.")
    if step > STEP_MAX:
        raise FormatError(f"the header names step {step}; steps end at {STEP_MAX}.")
    if not chunk or table_bytes > table_capacity or capsule_bytes > CAPSULE_MAX or data_bytes > data_capacity:
        raise FormatError("the header has sizes that exceed the slot.")
    return Header(
        geometry=Geometry(table_capacity, data_capacity, chunk),
        job=job.rstrip(b"\0").decode("ascii", "replace"),
        rank=rank,
        state=SlotState(state),
        version=None if state == SlotState.EMPTY else Version(Epoch(counter, ident), step),
        seq=seq,
        layout=layout,
        table_bytes=table_bytes,
        table_digest=table_digest,
        capsule_bytes=capsule_bytes,
        capsule_digest=capsule_digest,
        data_bytes=data_bytes,
    )


def newest_header(slot: Bytes, file_bytes: int | None = None) -> Header:
    """Returns the header that counts: the valid copy with the greater sequence number.

    Args:
        slot: the slot's bytes; at least its first two pages.
        file_bytes: size of the slot's file; None: `slot` has all of its bytes.

    Raises:
        FormatError: neither copy is valid, or the file is smaller than the slot.
    """
    header, nbytes = best_header(slot), slot.nbytes if file_bytes is None else file_bytes
    if header.geometry.file_bytes > nbytes:
        raise FormatError(f"the slot says {header.geometry.file_bytes} bytes, but its file has {nbytes}.")
    return header


def best_header(slot: Bytes) -> Header:
    """Returns the same as `newest_header`, from a slot's first two pages alone.

    Raises:
        UnknownFormat: the slot has a format that this reft does not read.
        FormatError: neither copy is valid.
    """
    headers: list[Header] = []
    unknown, reason = None, "the slot has no header."
    for offset in (0, PAGE):
        try:
            headers.append(decode_header(slot[offset : offset + PAGE].tobytes()))
        # The error itself is not kept: its traceback would hold this frame, and so the mapping, for
        # ever.
        except UnknownFormat as error:
            unknown = error.major, error.minor
        except FormatError as error:
            reason = error.message
    if not headers:
        raise UnknownFormat(*unknown) if unknown else FormatError(reason)
    return max(headers, key=lambda header: header.seq)


class SlotMap:
    """Reads and writes the parts of a mapped slot. A writer must be the slot's only writer.

    The kernel ends a process that touches the mapping of a cut file (SIGBUS). A process that must
    not end uses a FileSlotMap.

    Attributes:
        header: the slot's newest header, as last read.
        is_new_layout: whether no version of the layout begun last has landed here. Then the zeros
            must be written; they stay for later versions.

    Args:
        slot: all bytes of the slot's file; writable if anything is written.
        file: descriptor of that file, which its owner keeps open; None if there is none.
        preadv: reads the file; None: as `os.preadv` does.

    Raises:
        FormatError: the bytes are no slot.
    """

    is_pinned = False  # whether a device may copy from `data` beside the host

    def __init__(self, slot: Bytes, file: int | None = None, preadv: ReadVector | None = None) -> None:
        self._slot = slot
        self._file = file
        self._preadv = preadv or _preadv
        self.header: Header
        self.reread()
        self.is_new_layout = True
        self._new_table_fields: dict[str, object] = {}

    @classmethod
    def create(cls, slot: Bytes, geometry: Geometry, job: str, rank: int, file: int | None = None) -> SlotMap:
        """Makes an empty slot of `slot`, whose size must be geometry.file_bytes."""
        for seq in (0, 1):
            encoded = Header(geometry, job, rank, seq=seq).encode()
            slot[seq * PAGE : seq * PAGE + len(encoded)] = np.frombuffer(encoded, np.uint8)
        return cls(slot, file)

    def reread(self) -> Header:
        """Returns the header as it is now; another process may have written it.

        Raises:
            FormatError: see `newest_header`.
        """
        self.header = newest_header(self._slot)
        return self.header

    @property
    def data(self) -> Bytes:
        """Returns the data part, at its full capacity."""
        geometry = self.header.geometry
        return self._slot[geometry.data_offset : geometry.data_offset + geometry.data_capacity]

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """Returns one digest for each chunk of the capacity."""
        geometry = self.header.geometry
        return self._slot[geometry.digests_offset :][: 8 * geometry.chunks].view("<u8")

    def read(self, begin: int, *outs: Bytes) -> None:
        """Copies the data from `begin` on into each uint8 [n] in turn.

        It reads the file if there is one. Reading the file maps no page. If the memory of a page
        has failed, reading gives an error; touching it would end the process.

        Raises:
            FormatError: the file ends too early, or can't be read.
        """
        if self._file is None:
            for out in outs:
                np.copyto(out, self.data[begin : begin + out.nbytes])
                begin += out.nbytes
            return
        offset, rest = self.header.geometry.data_offset + begin, deque(out.data for out in outs)
        while rest:
            try:
                count = self._preadv(self._file, list(islice(rest, BUFFERS_MAX)), offset)
            except OSError as error:
                where = f"byte {offset} of rank {self.header.rank}'s slot"
                raise FormatError(f"{where} can't be read: {error}.") from error
            if not count and rest[0]:
                raise FormatError(f"the file of rank {self.header.rank}'s slot ends after {offset} bytes.")
            offset += count
            while rest and len(rest[0]) <= count:
                count -= len(rest.popleft())
            if count:
                rest[0] = rest[0][count:]

    def write(self, begin: int, data: Bytes) -> None:
        """Writes uint8 [n] to the data from `begin` on.

        Raises:
            FormatError: the bytes can't be written.
        """
        np.copyto(self.data[begin : begin + data.nbytes], data)

    def chunk(self, index: int) -> Bytes:
        """Returns the bytes of one chunk of the version in the slot."""
        size = self.header.geometry.chunk_bytes
        return self.data[: self.header.data_bytes][index * size : (index + 1) * size]

    def digests_of(self, first: int, end: int) -> Iterator[int]:
        """Yields the digests of these chunks as they are now.

        Raises:
            FormatError: see `read`.
        """
        size = self.header.geometry.chunk_bytes
        buffer = np.empty(size, np.uint8)
        for index in range(first, end):
            data = buffer[: min(size, self.header.data_bytes - index * size)]
            self.read(index * size, data)
            yield chunk_digest(data)

    @property
    def chunks(self) -> int:
        """Returns how many chunks the version in the slot has."""
        return -(-self.header.data_bytes // self.header.geometry.chunk_bytes)

    def begin(self, version: Version, layout: bytes, table: bytes, data_bytes: int) -> None:
        """Sets WRITING, then writes the leaf table unless the slot has it already.

        A new table counts after `landed`.

        Raises:
            FormatError: the table or the data don't fit.
        """
        geometry = self.header.geometry
        if len(table) > geometry.table_capacity or data_bytes > geometry.data_capacity:
            raise FormatError(f"{len(table)} + {data_bytes} bytes don't fit into a slot of {geometry.file_bytes}.")
        self.is_new_layout = self.header.layout != layout or self.header.table_bytes != len(table)
        # A writer may fail before LANDED. Then no header may promise its table and zeros.
        table_fields = {"layout": bytes(16), "table_bytes": 0, "table_digest": 0} if self.is_new_layout else {}
        _write_header(
            self,
            state=SlotState.WRITING,
            version=version,
            data_bytes=data_bytes,
            capsule_bytes=0,
            capsule_digest=0,
            **table_fields,
        )
        self._new_table_fields = {}
        if self.is_new_layout:
            self._write_bytes(geometry.table_offset, table)
            digest = xxhash.xxh3_64_intdigest(table)
            self._new_table_fields = {"layout": layout, "table_bytes": len(table), "table_digest": digest}

    def put_capsule(self, capsule: bytes) -> None:
        """Writes the capsule, which counts after `landed`.

        Raises:
            FormatError: the capsule is larger than CAPSULE_MAX.
        """
        if len(capsule) > CAPSULE_MAX:
            raise FormatError(
                f"the capsule has {len(capsule)} bytes; the limit is {CAPSULE_MAX}.",
                "keep less in what you pass as state=",
            )
        self._write_bytes(self.header.geometry.capsule_offset, capsule)
        digest = xxhash.xxh3_64_intdigest(capsule)
        self.header = replace(self.header, capsule_bytes=len(capsule), capsule_digest=digest)

    def landed(self) -> None:
        """Sets LANDED: every byte of this version is in the slot."""
        _write_header(self, state=SlotState.LANDED, **self._new_table_fields)
        self._new_table_fields = {}

    def sealed(self, digests: npt.NDArray[np.uint64]) -> None:
        """Sets SEALED, with the digest of each chunk of this version.

        Raises:
            FormatError: there are more or fewer digests than chunks.
        """
        if len(digests) != self.chunks:
            raise FormatError(f"there are {len(digests)} digests for {self.chunks} chunks.")
        self._write_bytes(self.header.geometry.digests_offset, np.asarray(digests, "<u8").tobytes())
        _write_header(self, state=SlotState.SEALED)

    def empty(self) -> None:
        """Sets EMPTY: the slot holds no version any more."""
        _write_header(self, state=SlotState.EMPTY, version=None, capsule_bytes=0, capsule_digest=0)

    def table(self) -> bytes:
        """Returns the leaf table's bytes.

        Raises:
            FormatError: its digest is wrong.
        """
        header = self.header
        data = self._read_bytes(header.geometry.table_offset, header.table_bytes)
        return _verified("leaf table", header, data, header.table_digest)

    def capsule(self) -> bytes:
        """Returns the capsule's bytes.

        Raises:
            FormatError: its digest is wrong.
        """
        header = self.header
        data = self._read_bytes(header.geometry.capsule_offset, header.capsule_bytes)
        return _verified("capsule", header, data, header.capsule_digest)

    def bad_chunks(self) -> list[int]:
        """Returns the chunks whose digest is wrong."""
        digests = self.digests
        return [i for i, digest in enumerate(self.digests_of(0, self.chunks)) if digest != int(digests[i])]

    def _read_bytes(self, offset: int, size: int) -> bytes:
        return self._slot[offset : offset + size].tobytes()

    def _write_bytes(self, offset: int, data: bytes) -> None:
        self._slot[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


class SharedSlotMap(SlotMap):
    """A slot whose bytes are the mapped pages of its file in shared memory."""

    def map_pages(self, begin: int, end: int) -> Bytes | None:
        """Returns the data from `begin` on, a multiple of PAGE, with their pages mapped.

        Returns None where pages are missing or their memory has failed, and always before
        Linux 5.14. To touch such a page would end this process; `read` then gives an error.
        """
        pages = self.data[begin:end]
        return None if advise(pages, POPULATE_READ) else pages


class FileSlotMap(SlotMap):
    """A slot whose bytes are read and written through a descriptor, and never mapped.

    Another process may cut the file at any time: that is an error here, and no signal. A damaged
    page of memory is an error, too.

    Args:
        file: descriptor of the slot's file. This object uses a copy of the descriptor, which lives
            as long as this object: a thread that still writes can't reach another file.

    Raises:
        FormatError: the file is no slot.
        OSError: the descriptor can't be copied.
    """

    def __init__(self, file: int) -> None:
        own = os.dup(file)
        weakref.finalize(self, os.close, own)
        super().__init__(np.empty(0, np.uint8), own)

    @classmethod
    def create_in(cls, file: int, geometry: Geometry, job: str, rank: int) -> FileSlotMap:
        """Makes an empty slot in a file, whose size must be geometry.file_bytes.

        Raises:
            FormatError, OSError: the file can't be written.
        """
        for seq in (0, 1):
            _write_file(file, seq * PAGE, Header(geometry, job, rank, seq=seq).encode())
        return cls(file)

    @property
    def data(self) -> Bytes:
        """Not at hand: `read` and `write` copy bytes of the data."""
        raise TypeError("the slot is not mapped: use read() and write()")

    @property
    def digests(self) -> npt.NDArray[np.uint64]:
        """Returns a copy of the digest of each chunk of the capacity."""
        geometry = self.header.geometry
        return np.frombuffer(self._read_bytes(geometry.digests_offset, 8 * geometry.chunks), "<u8")

    def write(self, begin: int, data: Bytes) -> None:
        """Writes uint8 [n] to the data from `begin` on; see `SlotMap.write`."""
        if data.nbytes and begin + data.nbytes > self.header.geometry.data_capacity:
            raise FormatError(f"{data.nbytes} bytes from {begin} on end behind the slot's data.")
        self._write_bytes(self.header.geometry.data_offset + begin, data.data)

    def reread(self) -> Header:
        """Returns the header as it is now; see `SlotMap.reread`."""
        pages = np.frombuffer(self._read_bytes(0, 2 * PAGE), np.uint8)
        self.header = newest_header(pages, os.fstat(self._own).st_size)
        return self.header

    def _read_bytes(self, offset: int, size: int) -> bytes:
        data = np.empty(size, np.uint8)
        try:
            read_file(self._own, offset, data)
        except OSError as error:
            raise FormatError(f"byte {offset} of the slot can't be read: {error}.") from error
        return data.tobytes()

    def _write_bytes(self, offset: int, data: bytes | memoryview) -> None:
        try:
            _write_file(self._own, offset, data)
        except OSError as error:
            raise FormatError(f"byte {offset} of the slot can't be written: {error}.") from error

    @property
    def _own(self) -> int:
        assert self._file is not None, "the constructor sets it"
        return self._file


def _verified(what: str, header: Header, data: bytes, digest: int) -> bytes:
    if xxhash.xxh3_64_intdigest(data) != digest:
        raise FormatError(f"the {what} of rank {header.rank}, {header.version} has a wrong digest.")
    return data


def _write_header(slot: SlotMap, **changes: object) -> None:
    if slot.header.seq >= SEQ_MAX:
        raise FormatError(f"rank {slot.header.rank}'s slot was written {SEQ_MAX} times, and can't be again.")
    header = replace(slot.header, seq=slot.header.seq + 1, **changes)  # type: ignore[arg-type]
    slot._write_bytes((header.seq % 2) * PAGE, header.encode())
    slot.header = header


def read_head(file: int) -> tuple[bytes, Header]:
    """Returns all bytes of a slot's file before the data, and the header that counts.

    Raises:
        FormatError: the file is no slot, or is cut.
        OSError: the file can't be read.
    """
    pages = np.empty(2 * PAGE, np.uint8)
    read_file(file, 0, pages)
    offset, nbytes = best_header(pages).geometry.data_offset, os.fstat(file).st_size
    if offset > nbytes:
        raise FormatError(f"the file ends after {nbytes} bytes.")
    head = np.empty(offset, np.uint8)
    read_file(file, 0, head)
    return head.tobytes(), best_header(head)


def slot_of_head(head: bytes, file: int, preadv: ReadVector | None = None) -> SlotMap:
    """Returns a slot whose data stay in its file: no page of the file is mapped.

    So a file that is cut, or storage that fails, gives an error and no signal.

    Args:
        head: all bytes before the data, see `read_head`.
        file: descriptor of the slot's file, which its owner keeps open.
        preadv: see `SlotMap`.

    Raises:
        FormatError: the bytes are no slot.
    """
    data = np.frombuffer(head, np.uint8)
    geometry = best_header(data).geometry
    # Pages that nobody touches take no memory.
    memory = mmap.mmap(-1, geometry.file_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    slot = np.frombuffer(memory, np.uint8)
    slot[: geometry.data_offset] = data[: geometry.data_offset]
    return SlotMap(slot, file, preadv)


def _preadv(file: int, buffers: Sequence[memoryview], offset: int) -> int:
    return os.preadv(file, buffers, offset)


def read_file(file: int, offset: int, into: Bytes) -> None:
    """Fills `into` from a file.

    Raises:
        FormatError: the file ends too early.
        OSError: the file can't be read.
    """
    view, read = into.data, 0
    while read < len(view):
        count = os.preadv(file, [view[read:]], offset + read)
        if not count:
            raise FormatError(f"the file ends after {offset + read} bytes.")
        read += count


def _write_file(file: int, offset: int, data: bytes | memoryview) -> None:
    """Writes all of `data` into a file.

    Raises:
        OSError: the file can't be written.
    """
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def chunk_digest(chunk: Bytes) -> int:
    """Returns the digest of one chunk, kind DIGEST_KIND_XXH3_64.

    The interpreter's lock is free meanwhile. The one-shot functions of xxhash before 4.0 would hold
    it.
    """
    state = xxhash.xxh3_64()
    state.update(chunk.data)
    return state.intdigest()
