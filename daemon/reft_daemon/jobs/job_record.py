"""One job on this node, as a record: decision, leases, slots, round, capsules and times.

The record answers small questions. What is done with a job is done by services, which are modules
of functions that take the record:

    attach ─► inventory (trainers: orphans ended) ─► epochs: decide (epoch, base)
           ─► leasing (slots, watched trainer) ─► rounds: report … ─► trainers: release
                                    │ trainer dies            capsules: keep, owed, kept
                                    └► trainers: LANDED slots are digested and SEALED here

    a service changes the record ─► puts a change ─► see `changes`
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from reft.core.budget import peak_bytes
from reft.core.coding.exchange import PARITY_BUFFERS, GuardLane
from reft.core.commit.pins import Pins, pinned_versions
from reft.core.commit.round import Round
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.errors import StaleEpoch
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.allocator import SlotAllocator
from reft_daemon.arena.arena import Arena, SlotFile
from reft_daemon.arena.capsule_store import CapsuleStore
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs.capsule_replication import CapsuleReplication
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.degraded import DegradedTime
from reft_daemon.jobs.leases import Lease, have_ended_well
from reft_daemon.jobs.slots import JobSlots, may_be_written

UNKNOWN = "unknown"  # in place of a step


@dataclass
class JobRecord:
    """All state of one job on this daemon.

    Used in the event loop only; blocking work runs in threads.

    Args:
        arena: where the job's slots lie.
        record: manifest, decision and leases, as kept in the arena.
        changes: where services put the changes of this job.

    Attributes:
        leases: rank → its trainer.
        round: this node's part in the round of the epoch; None before the first decision.
        guard_lanes: the lanes of the whole job, by which nodes keep parity of one another's slots.
        sections: rank of this node in a lane → begin and size of its unreplicated section in the
            data of its slot.
        since_s: when the decision in force came, or this daemon started.
        ended_s: when the last trainer ended.
        sealed_s: rank → when the rank last reported a sealed step.
        news: set, and replaced, when waiting reports may have an answer.
    """

    arena: Arena
    record: pb.JobRecord
    changes: ChangeQueue
    slots: JobSlots = field(default_factory=JobSlots)
    leases: dict[int, Lease] = field(default_factory=dict)
    round: Round | None = None
    guard_lanes: tuple[GuardLane, ...] = ()
    sections: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    since_s: float = field(default_factory=time.monotonic)
    ended_s: float = field(default_factory=time.monotonic)
    sealed_s: dict[int, float] = field(default_factory=dict)
    degraded: DegradedTime = field(default_factory=DegradedTime)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    capsule_replication: CapsuleReplication = field(init=False)
    allocator: SlotAllocator = field(init=False)

    def __post_init__(self) -> None:
        self.capsule_replication = CapsuleReplication(CapsuleStore(self.arena, self.id))
        self.allocator = SlotAllocator(self.arena, self.id)

    @property
    def id(self) -> str:
        return self.record.manifest.job

    @property
    def epoch(self) -> Epoch:
        return messages.epoch_from(self.record.decision.epoch)

    @property
    def ranks(self) -> list[int]:
        """The ranks that train on this node."""
        nodes = self.record.manifest.nodes
        return list(nodes[self.record.node_index].ranks) if nodes else []

    @property
    def reached(self) -> int:
        """The newest step that a rank here has reported in this epoch; -1 if none."""
        return max((lease.step for lease in self.leases.values()), default=-1)

    @property
    def restores(self) -> pb.RestoreCount | None:
        """How often the job was restored; None: never, or the job has ended well here."""
        ended_well = have_ended_well(self.leases)
        return self.record.restores if self.record.HasField("restores") and not ended_well else None

    @property
    def known_whole(self) -> int:
        """The newest step that this daemon knows to have been whole; -1: none."""
        base = self.record.decision.base.step if self.record.decision.HasField("base") else -1
        return max(base, self.round.outcome.whole if self.round else -1)

    @property
    def pinned(self) -> frozenset[Version]:
        """The versions whose slots and capsules stay here, by the newest pins that are known."""
        pins = self.round.outcome.pins if self.round else Pins()
        return pinned_versions(pins, messages.decision_from(self.record.decision))

    @property
    def held_bytes(self) -> int:
        return self.capsule_replication.store.held_bytes + self.slots.held_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that this node holds in a change of shape to equally large slots."""
        peak = self.capsule_replication.store.held_bytes
        for rank in self.ranks:
            sizes = [slot.file_bytes for slot in self.slots.current_of_rank(rank)]
            peak += peak_bytes(max(sizes, default=0), max(len(sizes), self.wanted_slots(rank)))
            parity_sizes = [slot.file_bytes for slot in self.slots.parity.values() if slot.rank == rank]
            # The guard's parity of the earlier lanes stays beside two new slots.
            peak += (PARITY_BUFFERS + 1) * max(parity_sizes, default=0)
            peak += sum(slot.file_bytes for slot in self.slots.records.values() if slot.rank == rank)
        return max(peak, self.held_bytes)

    def wanted_slots(self, rank: int) -> int:
        """Returns the number of slots that a rank asked for; 0 if unknown."""
        return self.leases[rank].wanted_slots if rank in self.leases else 0

    @property
    def is_live(self) -> bool:
        return any(lease.watch is not None for lease in self.leases.values())

    @property
    def has_seen_end(self) -> bool:
        """Whether this daemon saw a trainer end, of this decision."""
        return bool(self.leases) and self.ended_s > self.since_s

    @property
    def has_failed(self) -> bool:
        """Whether a trainer of this epoch died, or closed its session because of an exception."""
        return any(not lease.has_ended_well and lease.watch is None for lease in self.leases.values())

    @property
    def may_be_refused(self) -> bool:
        """Whether the attach of this epoch has not yet given slots to any trainer here.

        Until then it drops nothing, because most refusals come before: see `undo`.
        """
        return self.record.HasField("before") and not any(lease.given_slots for lease in self.leases.values())

    @property
    def are_all_closed(self) -> bool:
        """Whether all trainers here closed their sessions.

        A new run may start from the step that was whole at that moment. So this node keeps that
        version.
        """
        return bool(self.leases) and all(lease.closed for lease in self.leases.values())

    @property
    def trained_s(self) -> float:
        """Seconds from the decision to the newest seal of a rank here.

        They count from this daemon's start if that came later.
        """
        return max(0.0, max(self.sealed_s.values(), default=0.0) - self.since_s)

    def wake_waiting_reports(self) -> None:
        """Wakes the reports that wait for an answer: they may have one now."""
        self.news.set()
        self.news = asyncio.Event()

    def may_be_written(self, slot: SlotFile) -> bool:
        """Whether a living trainer may write the slot."""
        newer = (header_of(self.id, each) for each in self.slots.current_of_rank(slot.rank))
        return may_be_written(slot.name, slot.name in self.slots.current, self.leases.get(slot.rank), newer)

    def check_epoch(self, epoch: pb.Epoch) -> None:
        """Raises StaleEpoch unless `epoch` is in force."""
        if messages.epoch_from(epoch) != self.epoch:
            raise StaleEpoch(
                f"job {self.id} was started again (epoch {self.epoch.counter}). This process belongs to the old start "
                f"(epoch {epoch.counter}), and its steps are no longer kept.",
                "end this process; the newer run goes on",
            )


def whole_words(job: JobRecord) -> str:
    """Returns the newest step that was whole, for the log: a number, "none" or "unknown"."""
    if job.known_whole >= 0:
        return str(job.known_whole)
    return UNKNOWN if job.record.had_whole else "none"


def free_unfinished(job: JobRecord, rank: int, version: Version) -> None:
    """Frees a rank's slots that a dead process was filling with a version."""
    for slots in (job.slots.current, job.slots.retired):
        for name in [slot.name for slot in slots.values() if slot.rank == rank]:
            header = header_of(job.id, slots[name])
            if header is not None and (header.state, header.version) == (SlotState.WRITING, version):
                job.arena.free(slots.pop(name))
