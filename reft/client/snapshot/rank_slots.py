"""The slots that one rank writes: which one is next, and larger ones when the state grows.

    all fit ──► choose: the reuse rule (core/commit/slots.py), among slots that nobody writes
    else    ──► a thread leases larger slots; no snapshot until they are there; then the old ones
                are left, and unmapped once no snapshot is written to them

    too few, one holds a whole version of this epoch, and no version of an older epoch is pinned
        ──► a thread leases the others, while snapshots go on

Too few slots were leased while the daemon had to hold older ones (core/budget.py).

No call waits for another process, but `give_back`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence

from reft.client.link.slots import MappedSlot, SlotLeases
from reft.client.snapshot.round_view import KeptVersions
from reft.client.snapshot.save_plan import SavePlan
from reft.core.commit.slots import choose_slot
from reft.core.commit.version import Epoch, Version

log = logging.getLogger("reft")


class RankSlots:
    """The slots of one rank; see the module.

    Args:
        slots: the slots that attach has leased.
        leases: leases larger ones.
        rank: named in the log.
        wanted: the number of slots that the user asked for.
        records: the rank's slots for gradient records, which a recorder writes.
    """

    def __init__(
        self,
        slots: list[MappedSlot],
        leases: SlotLeases,
        rank: int,
        wanted: int,
        records: Sequence[MappedSlot] = (),
    ) -> None:
        self._slots = slots
        self._leases = leases
        self._rank = rank
        self._wanted = wanted
        self._records = records
        self._missing = wanted - len(slots)  # 0 once a thread has tried to lease them
        self._thread: threading.Thread | None = None  # leases larger slots
        self._larger: list[MappedSlot] | None = None
        self._further_thread: threading.Thread | None = None  # leases the missing slots
        self._further: list[MappedSlot] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk, the same in each slot."""
        return self._slots[0].map.header.geometry.chunk_bytes

    def prepare(self, plan: SavePlan, kept: KeptVersions) -> bool:
        """Tells whether the slots are large enough; leases larger or missing ones in a thread.

        Args:
            plan: what the next slot must hold.
            kept: the versions that this rank knows to be whole or pinned.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._larger is not None:
                for slot in self._slots:
                    slot.leave()  # not closed: an earlier snapshot may not have ended
                self._slots, self._larger = self._larger, None
                self._missing = self._wanted - len(self._slots)
        if self._further_thread is not None and not self._further_thread.is_alive():
            self._further_thread = None
            self._slots, self._further = [*self._slots, *self._further], []
        if self._thread is not None:
            # Even if the old slots fit: the daemon frees them once larger ones are made.
            return False
        if self._fits(plan):
            self._complete(kept)
            return True
        if self._further_thread is not None:
            return False
        self._thread = threading.Thread(target=self._lease, args=(plan,), name="reft-lease", daemon=True)
        self._thread.start()
        return False

    def _complete(self, kept: KeptVersions) -> None:
        """Leases the missing slots once the daemon needs no older ones; see the module."""
        if self._missing <= 0 or kept.whole is None:
            return
        if any(version.epoch != self._leases.epoch for version in (kept.whole, *kept.pinned)):
            return
        if any(slot.view().version == kept.whole for slot in self._slots):
            self._missing = 0
            self._further_thread = threading.Thread(target=self._lease_further, name="reft-lease", daemon=True)
            self._further_thread.start()

    def _lease_further(self) -> None:
        try:
            self._further = self._leases.lease_further(self._slots)
        except Exception as error:
            # If it is not this thread, the session was closed meanwhile.
            if self._further_thread is threading.current_thread():
                log.warning("rank %d goes on with %d of %d slots: %s", self._rank, len(self), self._wanted, error)

    def _fits(self, plan: SavePlan) -> bool:
        geometries = [slot.map.header.geometry for slot in self._slots]
        return bool(geometries) and all(
            each.data_capacity >= plan.data_bytes and each.table_capacity >= len(plan.table) for each in geometries
        )

    def _lease(self, plan: SavePlan) -> None:
        try:
            self._larger = self._leases.lease(plan.data_bytes, len(plan.table))
        except Exception as error:
            # If it is not this thread, the session was closed meanwhile.
            if self._thread is threading.current_thread():
                log.warning("rank %d gets no slots for its new layout: %s", self._rank, error)

    def choose(
        self, busy: Collection[int], kept: KeptVersions, is_void: Callable[[Version], bool]
    ) -> MappedSlot | None:
        """Returns the slot to write next; None if none may be written now.

        Args:
            busy: indexes of the slots that snapshots are being written to.
            kept: the versions that this rank knows to be whole or pinned.
            is_void: decides whether a version is known never to become whole.
        """
        views = [slot.view() for slot in self._slots if slot.index not in busy]
        voids = [view.version for view in views if view.version is not None and is_void(view.version)]
        chosen = choose_slot(views, kept.whole, voids, kept.pinned)
        return None if chosen is None else self._slots[chosen.index]

    def empty(self, epoch: Epoch, after: int) -> None:
        """Empties the slots with a version of this epoch that is newer than step `after`."""
        for slot in self._slots:
            version = slot.map.header.version
            if version is not None and version.epoch == epoch and version.step > after:
                slot.map.empty()

    def give_back(self) -> None:
        """Passes memfds to a restarted daemon, which does not have them any more.

        Raises:
            Exception: the daemon does not take them.
        """
        if memfd_slots := [slot for slot in (*self._slots, *self._records) if slot.descriptor >= 0]:
            self._leases.give_back(memfd_slots)

    def forget_lease(self) -> None:
        """Ignores slots that are still being made, because the session ends."""
        self._thread = self._further_thread = None

    def unmap(self) -> None:
        """Closes the slots. The daemon keeps them."""
        for slot in (*self._slots, *(self._larger or ()), *self._further, *self._records):
            slot.close()
