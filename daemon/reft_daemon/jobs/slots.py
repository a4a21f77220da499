"""The slots of one job here, and which of them are written, leased or freed.

lease ─► current ── a larger layout, or the rank moves ──► retired ── a newer whole step ──► freed
            └── a change of shape: all but the base's ────────┴── before new slots ──────────► freed
rebuild ─► drafts ── sealed ──► current, or retired
lease, turn ─► parity ── other lanes, and no version that must stay ──► freed
lease ─► records ── another size, or the rank records no more ──► freed
storage ─► stored ── a whole step of the new epoch ──► closed
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.wire.slot_format import Geometry, Header
from reft_daemon.arena.arena import TMPFS, WEAKEST_FIRST, SlotFile, fits
from reft_daemon.jobs.leases import Lease


@dataclass
class JobSlots:
    """The slots of one job here, each by its name.

    Attributes:
        current: those that this node's ranks use now.
        retired: earlier slots of this node's ranks, and slots of ranks that train on another node
            now.
        drafts: those that a rebuild is making; no rank may use them yet.
        parity: those for parity of the exchange; no trainer uses them.
        records: those for gradient records of this node's ranks.
        stored: files of a checkpoint, open for a restore; read-only, and not in the arena.
        unreadable: bytes of each slot of another format. They stay until the job is purged, or a
            reft comes that reads them.
    """

    current: dict[str, SlotFile] = field(default_factory=dict)
    retired: dict[str, SlotFile] = field(default_factory=dict)
    drafts: dict[str, SlotFile] = field(default_factory=dict)
    parity: dict[str, SlotFile] = field(default_factory=dict)
    records: dict[str, SlotFile] = field(default_factory=dict)
    stored: dict[str, SlotFile] = field(default_factory=dict)
    unreadable: dict[str, int] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, SlotFile]:
        """The slots of snapshots, without those of parity and of gradient records."""
        return {**self.drafts, **self.retired, **self.current}

    @property
    def readable(self) -> dict[str, SlotFile]:
        """The slots that hold state of ranks: those of snapshots and those of parity."""
        return {**self.all, **self.parity}

    @property
    def files(self) -> dict[str, SlotFile]:
        """All slots, also those of gradient records. Other nodes may read them."""
        return {**self.readable, **self.records}

    @property
    def names(self) -> set[str]:
        """The names that new slots must not take."""
        return {*self.files, *self.unreadable}

    @property
    def held_bytes(self) -> int:
        return sum(slot.file_bytes for slot in self.files.values()) + sum(self.unreadable.values())

    @property
    def backing(self) -> str:
        """The weakest place where a current slot lies."""
        return min((slot.backing for slot in self.current.values()), key=WEAKEST_FIRST.index, default=TMPFS)

    def of_rank(self, rank: int) -> list[SlotFile]:
        """Returns all slots of a rank."""
        return [slot for slot in self.all.values() if slot.rank == rank]

    def current_of_rank(self, rank: int) -> list[SlotFile]:
        """Returns the slots that a rank uses now."""
        return [slot for slot in self.current.values() if slot.rank == rank]

    def retire(self, slots: Iterable[SlotFile]) -> None:
        """Moves current slots to the retired ones."""
        for slot in slots:
            self.retired[slot.name] = self.current.pop(slot.name)

    def add(self, slots: Iterable[SlotFile]) -> None:
        """Adds current slots, slots of parity, and slots of gradient records."""
        for slot in slots:
            kind = self.parity if slot.is_parity else self.records if slot.is_record else self.current
            kind[slot.name] = slot

    def close_stored(self) -> None:
        """Closes the files of a checkpoint."""
        for slot in self.stored.values():
            slot.free()
        self.stored = {}

    def clear(self) -> None:
        """Forgets all slots: they were freed."""
        for slots in (self.current, self.retired, self.drafts, self.parity, self.records):
            slots.clear()
        self.unreadable.clear()


# Decisions


def may_be_written(name: str, is_current: bool, lease: Lease | None, newer: Iterable[Header | None]) -> bool:
    """Whether a living trainer may write a slot.

    A trainer writes only slots that it has mapped. It leaves a retired slot once it has begun to
    write a newer slot.

    Args:
        name: of the slot.
        is_current: whether the slot is one that its rank uses now.
        lease: of the slot's rank.
        newer: the headers of the rank's current slots; None for a damaged slot.
    """
    if lease is None or lease.watch is None or name not in lease.given_slots:
        return False
    return is_current or all(header is None or header.state is SlotState.EMPTY for header in newer)


def may_be_freed(header: Header | None, whole: Version, pinned: Collection[Version]) -> bool:
    """Whether a retired slot that no trainer may write can go, once `whole` is whole.

    Args:
        header: of the slot; None if the slot is damaged.
        whole: the newest whole version.
        pinned: versions that stay, though they may be older.
    """
    version = header.version if header else None
    return version is None or (version.is_older_than(whole) and version not in pinned)


def is_superfluous(header: Header | None, epoch: Epoch, pinned: Collection[Version]) -> bool:
    """Whether no recovery needs a slot, once all ranks have restored the base.

    Versions of the epoch may become whole. Of older epochs only pinned versions are needed.

    Args:
        header: of the slot; None if the slot is damaged.
        epoch: the epoch that the attach began.
        pinned: the versions that stay: at first the base and the guard.
    """
    version = header.version if header else None
    return version is None or (version.epoch != epoch and version not in pinned)


def fitting_slots(headers: Mapping[str, Header | None], wanted: Geometry, count: int) -> list[str]:
    """Returns the names of the slots that serve a lease, at most `count`.

    Args:
        headers: name → header of each current slot of the rank; None for a damaged slot.
        wanted: the geometry that the rank needs.
        count: the number of slots that the rank needs.
    """
    names = [name for name, header in headers.items() if header is not None and fits(header.geometry, wanted)]
    return names[:count]
