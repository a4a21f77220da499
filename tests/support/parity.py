"""Slots with unreplicated sections, and what the parity of a lane must be."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.wire.shm import map_file
from reft.wire.slot_format import Geometry, SlotMap, chunk_digest
from reft_daemon.arena.arena import SlotFile

CHUNK = 4096


def at(step: int, counter: int = 1) -> Version:
    return Version(Epoch(counter, bytes([counter]) * 16), step)


def memory_slot(name: str, rank: int, data_bytes: int, job: str = "job") -> SlotFile:
    """Returns an empty slot in a memfd."""
    geometry = Geometry(0, data_bytes, CHUNK)
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, geometry.file_bytes)
    pages = map_file(descriptor, geometry.file_bytes)[1]
    slot_map = SlotMap.create(pages, geometry, job, rank, descriptor)
    return SlotFile(name, rank, descriptor, None, geometry.file_bytes, slot_map)


def mapped(slot: SlotFile) -> SlotMap:
    """Maps a slot, as its trainer does."""
    return SlotMap(map_file(slot.descriptor, slot.file_bytes)[1], slot.descriptor)


def fill(slot: SlotFile, version: Version, data: bytes, upto: SlotState = SlotState.SEALED) -> None:
    """Writes a version into a slot, as a trainer does."""
    slot_map = slot.map
    slot_map.begin(version, bytes(16), b"", len(data))
    slot_map.data[: len(data)] = np.frombuffer(data, np.uint8)
    if upto >= SlotState.LANDED:
        slot_map.landed()
    if upto >= SlotState.SEALED:
        slot_map.sealed(np.array([chunk_digest(slot_map.chunk(i)) for i in range(slot_map.chunks)], np.uint64))


@dataclass(frozen=True)
class SectionSource:
    """A rank whose slot has a replicated part of one chunk, then its section."""

    rank: int
    section: bytes
    slot: SlotFile

    @property
    def place(self) -> tuple[int, int]:
        return CHUNK, len(self.section)


def section_source(rank: int, nbytes: int, version: Version, seed: int = 0) -> SectionSource:
    noise = random.Random(f"{rank} {seed}")
    section = noise.randbytes(nbytes)
    slot = memory_slot(f"rank-{rank}.slot-0", rank, CHUNK + nbytes)
    fill(slot, version, noise.randbytes(CHUNK) + section)
    return SectionSource(rank, section, slot)


def expected_parity(sections: Sequence[bytes], holder: int, piece_bytes: int) -> bytes:
    """Computes the parity of a holder by the drawing of `reft/core/coding/exchange.py`."""
    parity = np.zeros(piece_bytes, np.uint8)
    for source, section in enumerate(sections):
        if source != holder:
            piece = (holder - source - 1) % len(sections)
            part = np.frombuffer(section[piece * piece_bytes : (piece + 1) * piece_bytes], np.uint8)
            parity[: len(part)] ^= part
    return parity.tobytes()
