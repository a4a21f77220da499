"""The record slots of one rank: which one is next, and more of them where turns are late.

the last slot that may be written is taken ─► a thread leases as many again, once
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from reft.client.link.slots import MappedSlot
from reft.core.commit.gradient_records import RECORD_SLOTS_MAX, usable_record_slots
from reft.core.commit.pins import Pins
from reft.core.commit.version import Epoch, Version

log = logging.getLogger("reft")
Lease = Callable[[int, list[MappedSlot]], list[MappedSlot]]


class RecordSlots:
    """The record slots of one rank and one epoch; see the module.

    Args:
        mapped: the slots that attach has leased.
        lease: leases slots until there are so many; gets the mapped ones, and returns the others.
        replayed: see `usable_record_slots`.

    Attributes:
        mapped: all slots. The thread that leases more appends them.
    """

    def __init__(self, mapped: list[MappedSlot], lease: Lease, replayed: frozenset[Version] = frozenset()) -> None:
        self.mapped = mapped
        self._lease = lease
        self._replayed = replayed
        self._thread: threading.Thread | None = None  # has leased more, or tries to

    def choose(self, epoch: Epoch, mark: int, pins: Pins) -> MappedSlot | None:
        """Returns the slot for the record of a mark; None if none may be written.

        Waits for nothing.

        Args:
            epoch: the epoch in force.
            mark: the mark to record.
            pins: the newest pins that are known.
        """
        slots = list(self.mapped)
        usable = usable_record_slots([slot.view() for slot in slots], epoch, mark, pins, self._replayed)
        if len(usable) < 2 and self._thread is None:
            self._thread = threading.Thread(target=self._grow, name="reft-lease", daemon=True)
            self._thread.start()
        return next(slot for slot in slots if slot.index == usable[0].index) if usable else None

    def _grow(self) -> None:
        count = min(2 * len(self.mapped), RECORD_SLOTS_MAX)
        try:
            if count > len(self.mapped):
                self.mapped += self._lease(count, self.mapped)
        except Exception as error:  # a failed lease must never end training; without it marks are gaps
            log.info("there are no more than %d record slots: %s", len(self.mapped), error)
