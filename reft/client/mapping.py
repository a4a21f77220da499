"""Slots as this process sees them: the daemon's pages, mapped, touched once, and registered with CUDA where there is one."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from dataclasses import dataclass

import torch

from reft.client.device import pin, unpin
from reft.client.pages import map_shared
from reft.core.slots import Slot
from reft.wire.mapped import map_file
from reft.wire.slot_format import Bytes, SlotMap

log = logging.getLogger("reft")


@dataclass
class MappedSlot:
    """One slot.

    Attributes:
        index: its place among this rank's slots.
        name: its name in the daemon's arena.
        descriptor: kept open only for a memfd, which a restarted daemon needs back, and while the slot is restored; else -1.
        map: its parts.
    """

    index: int
    name: str
    descriptor: int
    map: SlotMap
    _pages: mmap.mmap
    _bytes: Bytes
    _unpin: weakref.finalize[..., MappedSlot] | None = None

    @classmethod
    def open(cls, index: int, name: str, descriptor: int, file_bytes: int, keeps: bool) -> MappedSlot:
        """Maps a slot; takes the descriptor over, and keeps it open if asked to."""
        pages, whole = map_file(descriptor, file_bytes)
        # A DataLoader's forked workers must neither keep the pages alive nor pay for their page tables.
        pages.madvise(mmap.MADV_DONTFORK)
        if not keeps:
            os.close(descriptor)
        slot = SlotMap(whole, descriptor if keeps else None)
        return cls(index, name, descriptor if keeps else -1, slot, pages, whole)

    def touch(self) -> None:
        """Maps every page now: the first write through a new mapping costs four times the later ones.

        By reading: the kernel maps many pages at a time then, and pages of a shared mapping of shared
        memory may be written from then on.
        """
        map_shared(self._bytes)

    def register(self, device: torch.device) -> None:
        """Pins the pages for CUDA, so that a device's copies run beside the host; until `close`, or until nobody has the slot."""
        address = self._bytes.ctypes.data
        if error := pin(address, self._bytes.nbytes, device):
            log.warning("slot %s can't be pinned (CUDA error %d): copies will block the host.", self.name, error)
            return
        self._unpin = weakref.finalize(self, unpin, address, device)
        self._unpin.atexit = False  # the process's end does it

    def view(self) -> Slot:
        """What the reuse rule needs to know."""
        header = self.map.header
        return Slot(self.index, header.state, header.version)

    def close(self) -> None:
        """Unmaps; the slot itself stays with the daemon."""
        if self._unpin is not None:
            self._unpin()
        if self.descriptor >= 0:
            os.close(self.descriptor)
