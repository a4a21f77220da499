"""One job on this node: record, leases, slots, the node's part in the round, and kept capsules.

attach ─► inventory (orphans ended) ─► decide (epoch, base)
       ─► lease (slots, watched trainer) ─► reports … ─► release
                            │ trainer dies
                            └► LANDED slots are digested and SEALED here
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from reft.core.commit.capsules import DIGESTS_MAX, CapsuleAcks
from reft.core.commit.round import Digests, Outcome, Round, StepReport
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.errors import AlreadyAttached, AttachError, ConfigError, FormatError, StaleEpoch
from reft.wire import messages
from reft.wire.process import Process
from reft.wire.slot_format import Geometry
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena import headers
from reft_daemon.arena.allocator import SlotAllocator
from reft_daemon.arena.arena import TMPFS, WEAKEST_FIRST, Arena, SlotFile, fits, next_names
from reft_daemon.arena.capsule_store import CapsuleStore
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs.capsule_replication import CapsuleReplication
from reft_daemon.jobs.degraded import DegradedTime
from reft_daemon.jobs.leases import Lease, ProcessWatch, end_orphans, refuse_living

log = logging.getLogger("reft.daemon")


@dataclass
class JobRecord:
    """All state of one job on this daemon.

    Used in the event loop only; blocking work runs in threads.

    Args:
        arena: where the job's slots lie.
        record: manifest, decision and leases, as kept in the arena.
        on_change: called when the round has news for other nodes.

    Attributes:
        slots: the slots that this node's ranks use now, by name.
        retired: earlier slots of this node's ranks, and slots of ranks that train on another node
            now.
        drafts: slots that a rebuild is making; no rank may use them yet.
        leases: rank → its trainer.
        since_s: when the decision in force came, or this daemon started.
        ended_s: when the last trainer ended.
        sealed_s: rank → when the rank last reported a sealed step.
        listeners: called when the round has news, to answer waiting reports.
    """

    arena: Arena
    record: pb.JobRecord
    on_change: Callable[[JobRecord], None]
    slots: dict[str, SlotFile] = field(default_factory=dict)
    retired: dict[str, SlotFile] = field(default_factory=dict)
    drafts: dict[str, SlotFile] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    since_s: float = field(default_factory=time.monotonic)
    ended_s: float = field(default_factory=time.monotonic)
    sealed_s: dict[int, float] = field(default_factory=dict)
    listeners: set[Callable[[], None]] = field(default_factory=set)
    round: Round | None = None
    degraded: DegradedTime = field(default_factory=DegradedTime)
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
    def backing(self) -> str:
        return min((slot.backing for slot in self.slots.values()), key=WEAKEST_FIRST.index, default=TMPFS)

    @property
    def all_slots(self) -> dict[str, SlotFile]:
        return {**self.drafts, **self.retired, **self.slots}

    @property
    def held_bytes(self) -> int:
        return self.capsule_replication.store.held_bytes + sum(slot.file_bytes for slot in self.all_slots.values())

    @property
    def is_live(self) -> bool:
        return any(lease.watch is not None for lease in self.leases.values())

    @property
    def trained_s(self) -> float:
        """Seconds from the decision to the newest seal of a rank here.

        They count from this daemon's start if that came later.
        """
        return max(0.0, max(self.sealed_s.values(), default=0.0) - self.since_s)

    @property
    def has_failed(self) -> bool:
        """Whether a trainer of this epoch ended without closing its session."""
        return any(not lease.closed and lease.watch is None for lease in self.leases.values())

    # Adoption

    def adopt(self) -> None:
        """Takes over slots, living trainers and the epoch's round from an earlier daemon."""
        for slot in self.arena.adopt(self.id):
            self.slots[slot.name] = slot
        self.capsule_replication.store.adopt()
        self._start_round()
        for entry in self.record.leases:
            lease = self.leases[entry.rank] = Lease(
                Process(entry.pid, entry.pid_start), entry.parent, closed=entry.closed
            )
            lease.given_slots.update(name for name, slot in self.slots.items() if slot.rank == entry.rank)
        # only after all leases are known: the end of a trainer writes the record
        for rank, lease in list(self.leases.items()):
            if not lease.closed:
                self._watch_trainer(rank, lease)
        for rank in self.ranks:
            self._report_sealed_slots(rank)

    def _watch_trainer(self, rank: int, lease: Lease) -> None:
        """Watches the rank's trainer.

        Raises:
            OSError: the trainer can't be watched; nothing was changed.
        """
        with contextlib.suppress(ProcessLookupError):
            lease.watch = ProcessWatch(lease.process, lambda: self._trainer_ended(rank, lease))
        self.leases[rank] = lease
        if lease.watch is None:
            self._trainer_ended(rank, lease)

    # Attach

    async def end_orphans(self, launch: str, pids: Iterable[int]) -> None:
        """Ends orphans of this job: no process may write slots while an attach reads them.

        Raises:
            AlreadyAttached, AttachError: see `end_orphans`.
        """
        await end_orphans(self.id, self.leases, launch == self.record.manifest.launch, set(pids))
        await asyncio.gather(*(self.seal_landed(rank) for rank in list(self.leases)))

    def decide(self, request: pb.DecideRequest, holders: Iterable[int]) -> None:
        """Takes the decision of a new attach; a repeated decision changes nothing.

        Args:
            request: the decision.
            holders: the nodes that keep the capsules of this node's ranks from now on.

        Raises:
            StaleEpoch: a decision of a newer epoch is in force.
            AlreadyAttached: a trainer of the earlier epoch lives, and could overwrite what the new
                attach reads.
        """
        new = messages.decision_from(request.decision)
        if self.record.HasField("decision"):
            if new.epoch == self.epoch:
                return
            if new.epoch.counter <= self.epoch.counter:
                raise StaleEpoch(
                    f"epoch {new.epoch.counter} of job {self.id} is over; epoch {self.epoch.counter} is in force."
                )
        refuse_living(self.id, self.leases)
        slots = self.all_slots
        for name in request.dropped:
            if name in slots and header_of(self.id, slots[name]):
                slots[name].map.empty()
        self.record = pb.JobRecord(
            manifest=request.manifest,
            decision=request.decision,
            node_index=request.node_index,
            had_whole=self.record.had_whole or new.base is not None,
            base_manifest=self._base_manifest(request, new.base),
            holders=holders,
        )
        self.leases.clear()
        self._start_round()
        self.save()
        self.since_s = self.ended_s = time.monotonic()
        self._call_listeners()

    def _base_manifest(self, request: pb.DecideRequest, base: Version | None) -> pb.Manifest | None:
        """Returns the manifest under which the base was written; None if it is unknown.

        The decision may contain the manifest. Otherwise this daemon may know it from earlier
        decisions.
        """
        if request.HasField("base_manifest"):
            return request.base_manifest
        if base is None or not self.record.HasField("decision"):
            return None
        if base.epoch == self.epoch:
            return self.record.manifest
        # No version became whole since the last attach. So both decisions have the same base.
        earlier_base = messages.decision_from(self.record.decision).base
        is_same = (
            earlier_base is not None and earlier_base.epoch == base.epoch and self.record.HasField("base_manifest")
        )
        return self.record.base_manifest if is_same else None

    def _start_round(self) -> None:
        if not self.record.HasField("decision"):
            return
        nodes = len(self.record.manifest.nodes)
        self.round = Round(self.record.node_index, nodes, frozenset(self.ranks))
        self.capsule_replication.capsule_acks = CapsuleAcks(tuple(self.record.holders))
        self._settle_capsules(self.round)
        for name in [name for name, slot in self.slots.items() if slot.rank not in self.round.ranks]:
            self.retired[name] = self.slots.pop(name)  # the slot's rank trains on another node now

    def _settle_capsules(self, round: Round) -> None:
        self.capsule_replication.settle(
            messages.decision_from(self.record.decision), round.outcome, self._are_all_closed
        )

    @property
    def _are_all_closed(self) -> bool:
        """Whether all trainers here closed their sessions.

        A new run may start from the step that was whole at that moment. So this node keeps that
        version.
        """
        return bool(self.leases) and all(lease.closed for lease in self.leases.values())

    async def lease(self, request: pb.LeaseRequest) -> list[SlotFile]:
        """Returns slots for one rank, every page present.

        Reuses the rank's earlier slots if they are large enough.

        Raises:
            StaleEpoch, AlreadyAttached, NoRoom: see each class.
            AttachError: the process has closed its session, or does not exist.
            OSError: the system does not say now whether the process lives.
        """
        self.check_epoch(request.epoch)
        if request.rank not in self.ranks:
            raise AttachError(f"rank {request.rank} is not one of this node's ranks {self.ranks} in the manifest.")
        digest_bytes = 8 * -(-request.data_bytes // max(request.chunk_bytes, 1))
        if self.record.holders and digest_bytes > DIGESTS_MAX:
            raise ConfigError(
                f"rank {request.rank} has {digest_bytes} bytes of digests, which are part of its capsule; "
                f"the limit is {DIGESTS_MAX}.",
                "attach with a larger chunk_bytes",
            )
        process = Process(request.pid, request.pid_start)
        self._check_trainer(request.rank, process)
        if not process.is_alive:
            raise AttachError(
                f"process {request.pid}, started at {request.pid_start}, does not exist: it can't hold a lease.",
            )
        slots = await self.allocator.run_alone(lambda: self._slots_for(request))
        # Making slots takes time. Meanwhile a newer attach may have come, or the session may be
        # closed.
        self.check_epoch(request.epoch)
        self._check_trainer(request.rank, process)
        earlier_lease = self.leases.get(request.rank)
        if earlier_lease is None or earlier_lease.watch is None:
            self._watch_trainer(request.rank, Lease(process, request.parent))
            self.save()
        self.leases[request.rank].given_slots.update(slot.name for slot in slots)
        return slots

    def _check_trainer(self, rank: int, process: Process) -> None:
        """Raises unless the process is the rank's trainer, or may become its trainer.

        A process that has closed its session can't become the trainer again.

        Raises:
            AlreadyAttached: another process trains the rank.
            AttachError: the process has closed its session.
        """
        lease = self.leases.get(rank)
        if lease and lease.watch and lease.process != process:
            raise AlreadyAttached(f"rank {rank} of job {self.id} is already attached by process {lease.process.pid}.")
        if lease and lease.closed and lease.process == process:
            raise AttachError(f"process {process.pid} has closed its session as rank {rank} of job {self.id}.")

    async def _slots_for(self, request: pb.LeaseRequest) -> list[SlotFile]:
        geometry = Geometry(request.table_bytes, request.data_bytes, request.chunk_bytes)
        rank_slots = [slot for slot in self.slots.values() if slot.rank == request.rank]
        undamaged_slots = [slot for slot in rank_slots if header_of(self.id, slot)]
        fitting_slots = [slot for slot in undamaged_slots if fits(slot.map.header.geometry, geometry)][: request.slots]
        if len(fitting_slots) == request.slots:
            return fitting_slots
        for slot in rank_slots:
            header = header_of(self.id, slot)
            if not self._may_be_written(slot) and (header is None or header.state is SlotState.EMPTY):
                # freed before new memory is taken, since the slot holds no version
                self.arena.free(self.slots.pop(slot.name))
        names = next_names(self.all_slots, request.rank, request.slots)
        new_slots = await self.allocator.create(request.rank, names, geometry, list(request.cpus))
        # Retired only now: if memory is short, the trainer continues with its old slots.
        for slot in [slot for slot in self.slots.values() if slot.rank == request.rank]:
            self.retired[slot.name] = self.slots.pop(slot.name)
        self.slots.update({slot.name: slot for slot in new_slots})
        return new_slots

    def _may_be_written(self, slot: SlotFile) -> bool:
        """Whether a living trainer may write the slot.

        A trainer writes only slots that it has mapped. It leaves a retired slot once it has begun
        to write a newer slot.
        """
        lease = self.leases.get(slot.rank)
        if lease is None or lease.watch is None or slot.name not in lease.given_slots:
            return False
        newer_headers = [header_of(self.id, other) for other in self.slots.values() if other.rank == slot.rank]
        return slot.name in self.slots or all(
            header is None or header.state is SlotState.EMPTY for header in newer_headers
        )

    def take_back(self, slot: SlotFile) -> None:
        """Takes a memfd that a trainer returned after this daemon's restart."""
        if slot.name in self.slots:
            self.arena.free(slot)
            return
        self.slots[slot.name] = slot
        if slot.rank in self.leases:
            self.leases[slot.rank].given_slots.add(slot.name)
        self._report_sealed_slots(slot.rank)

    # Training

    def check_epoch(self, epoch: pb.Epoch) -> None:
        """Raises StaleEpoch unless `epoch` is in force."""
        if messages.epoch_from(epoch) != self.epoch:
            raise StaleEpoch(
                f"epoch {epoch.counter} of job {self.id} is over: a newer attach has taken the job (epoch {self.epoch.counter})."
            )

    def report(self, request: pb.ReportRequest) -> None:
        """Takes a rank's report.

        Raises:
            StaleEpoch: the rank belongs to an older attach.
            AttachError: the rank holds no lease.
        """
        self.check_epoch(request.epoch)
        lease = self.leases.get(request.rank)
        if lease is None or self.round is None:
            raise AttachError(f"rank {request.rank} of job {self.id} holds no lease here.")
        step_report = messages.report_from(request.steps)
        lease.trouble = request.trouble
        self.round.hear_request(request.rank, request.requested_every)
        lease.step = max(lease.step, step_report.until)
        if step_report.sealed:
            self.sealed_s[request.rank] = time.monotonic()
        self._hear_rank(request.rank, step_report, messages.digests_from(request.steps))

    def hear_node(self, request: pb.GatherRequest) -> Outcome:
        """Takes a child's report in the round. It returns the outcome so far.

        Raises:
            AttachError: the job has no round here.
        """
        if self.round is None:
            raise AttachError(f"job {self.id} has no round here.")
        node_report, digests = messages.report_from(request.steps), messages.digests_from(request.steps)
        if self.round.hear_node(request.node_index, node_report, digests, request.mismatched, request.requested_every):
            self._publish_round()
        return self.round.outcome

    def hear_outcome(self, outcome: Outcome) -> None:
        """Takes the outcome that the parent sent in the round."""
        if self.round is not None and self.round.hear_outcome(outcome):
            self._publish_round()

    def _hear_rank(self, rank: int, report: StepReport, digests: Digests) -> None:
        """Takes the report of a rank here.

        A sealed step counts once the holders have the rank's capsule.
        """
        if self.round is None or rank not in self.round.ranks:
            return
        counted_report = self.capsule_replication.capsule_acks.hear_rank(rank, report, digests)
        if self.round.hear_rank(rank, counted_report, self.capsule_replication.capsule_acks.digests_of(rank)):
            self._publish_round()
        else:
            self.on_change(self)

    # Capsules

    def keep(self, request: pb.KeepRequest) -> None:
        """Keeps capsules of another node's ranks.

        Raises:
            StaleEpoch, ConfigError, NoRoom: see CapsuleStore.keep.
        """
        self.check_epoch(request.epoch)
        # known first: otherwise a newer capsule could displace one of a whole version
        if request.HasField("outcome"):
            self.hear_outcome(messages.outcome_from(request.outcome))
        decision = messages.decision_from(self.record.decision)
        outcome = self.round.outcome if self.round else Outcome()
        # The base may come from a run of the job with more ranks.
        world = max(self.record.manifest.world, self.record.base_manifest.world)
        for record in request.capsules:
            self.capsule_replication.store.keep(record, decision, outcome, world)
        if self.round is not None:
            self._settle_capsules(self.round)

    def capsules_for(self, holder: int) -> list[pb.CapsuleRecord]:
        """Returns the capsules that a holder of this node still lacks.

        They fill at most one message.
        """
        return self.capsule_replication.batch(self.all_slots.values(), self.epoch, holder)

    def note_kept(self, holder: int, epoch: Epoch, records: Iterable[pb.CapsuleRecord]) -> None:
        """Notes that a holder keeps these records now."""
        if self.round is None or epoch != self.epoch:
            return
        kept_steps = [(record.rank, record.version.step) for record in records]
        changed = False
        for rank, due in self.capsule_replication.capsule_acks.acknowledge(holder, kept_steps).items():
            changed = self.round.hear_rank(rank, due, self.capsule_replication.capsule_acks.digests_of(rank)) or changed
        if changed:
            self._publish_round()

    def capsule(self, rank: int, version: Version) -> pb.CapsuleRecord | None:
        """Returns a rank's record, from the rank's own slot or from the store."""
        return self.capsule_replication.record(self.all_slots.values(), rank, version)

    def _publish_round(self) -> None:
        self._free_retired()
        if self.round is not None:
            self._settle_capsules(self.round)
        if self.round is not None and self.round.outcome.whole >= 0 and not self.record.had_whole:
            self.record.had_whole = True
            self._save_or_log()
        self._call_listeners()
        self.on_change(self)

    def _call_listeners(self) -> None:
        for listener in list(self.listeners):
            listener()

    def _free_retired(self) -> None:
        if not self.retired or self.round is None or self.round.outcome.whole < 0 or self._are_all_closed:
            return
        whole = Version(self.epoch, self.round.outcome.whole)
        for name, slot in list(self.retired.items()):
            if self._may_be_written(slot):
                continue
            header = header_of(self.id, slot)
            if header is None or header.version is None or header.version.is_older_than(whole):
                self.arena.free(self.retired.pop(name))

    # The end of a trainer

    def release(self, request: pb.ReleaseRequest) -> None:
        """Ends a rank's lease: its session was closed.

        The slots stay for the job's time to live.
        """
        self.check_epoch(request.epoch)
        lease = self.leases.get(request.rank)
        if lease:
            lease.closed = True
            if lease.watch:
                lease.watch.close()
            self._trainer_ended(request.rank, lease)

    def _trainer_ended(self, rank: int, lease: Lease) -> None:
        lease.watch = None
        self.ended_s = time.monotonic()
        how = "closed" if lease.closed else "died"
        log.info("job=%s rank=%d trainer pid=%d %s", self.id, rank, lease.process.pid, how)
        self._save_or_log()
        self.on_change(self)
        task = asyncio.ensure_future(self.seal_landed(rank))
        task.add_done_callback(_log_failure)

    async def seal_landed(self, rank: int) -> None:
        """Digests and seals the slots that a dead trainer left LANDED.

        WRITING slots are torn, and stay so.
        """
        for slot in [slot for slot in self.all_slots.values() if slot.rank == rank]:
            header = header_of(self.id, slot)
            if header is None or header.state is not SlotState.LANDED:
                continue
            try:
                digests = await asyncio.to_thread(slot.digests)
                if slot.map.reread().state is SlotState.LANDED:
                    slot.map.sealed(digests)
                    log.info("job=%s rank=%d sealed %s for its ended trainer", self.id, rank, slot.map.header.version)
            except FormatError as error:
                log.error("job=%s rank=%d %s can't be sealed: %s", self.id, rank, header.version, error)
        self._report_sealed_slots(rank)

    def _report_sealed_slots(self, rank: int) -> None:
        digests_by_step = self.capsule_replication.cell_digests(
            [slot for slot in self.all_slots.values() if slot.rank == rank], self.epoch
        )
        self._hear_rank(rank, StepReport(sealed=frozenset(digests_by_step)), digests_by_step)

    def sealed_versions(self, rank: int) -> list[Version]:
        """Returns the versions that the rank's slots hold SEALED, oldest first."""
        return headers.sealed_versions(self.id, (slot for slot in self.all_slots.values() if slot.rank == rank))

    # What is shown

    def headers(self) -> list[pb.SlotHeader]:
        """Returns the headers of all slots; damaged slots are left out."""
        return headers.header_messages(self.id, self.all_slots.values())

    def save(self) -> None:
        """Writes the record to the arena, so that a restarted daemon knows the same."""
        del self.record.leases[:]
        for rank, lease in self.leases.items():
            pid, start = lease.process.pid, lease.process.start
            self.record.leases.add(rank=rank, pid=pid, pid_start=start, parent=lease.parent, closed=lease.closed)
        self.arena.write_record(self.record)

    def _save_or_log(self) -> None:
        """Saves facts that only a restarted daemon needs.

        A failure is logged: this daemon can go on.
        """
        try:
            self.save()
        except AttachError as error:
            log.error("job=%s the record can't be saved, a restarted daemon may lack it: %s", self.id, error)

    def free(self) -> int:
        """Frees all slots and capsules; returns the number of bytes."""
        freed = self.held_bytes
        self.allocator.drop()
        for lease in self.leases.values():
            if lease.watch:
                lease.watch.close()
        for slot in self.all_slots.values():
            self.arena.free(slot)
        self.capsule_replication.store.free()
        for each in (self.slots, self.retired, self.drafts):
            each.clear()
        self.arena.forget(self.id)
        return freed


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("sealing the slots of an ended trainer failed: %s", task.exception())
