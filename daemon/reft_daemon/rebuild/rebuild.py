"""Rebuilds the slots of lost ranks. The daemon that does so takes the place of a lost node.

    decision, manifests ─► taken over, as in an attach       own arena: slot WRITING, zeros
    capsule of each lost rank ◄── its keeper                         │
    shards of each stripe ◄── Read (checked) ── surviving slots ──► slice: decoded in a thread
    pieces of guard lanes ◄── Read (checked) ── slots, parity ────► the same, unreplicated leaves
    digests of the capsule's record ── equal? ──► capsule, LANDED, SEALED
                                          no: once more; no again: EMPTY, an error with the sources

Nothing counts before the last step. A daemon that dies leaves WRITING slots, which count as lost.
The next rebuild frees these first.
Parity that the lost node had of other nodes is not made here: the next turn makes it anew.
An attach that decides during a rebuild wins: its epoch is newer, and the rebuild ends with an
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from reft.core.budget import format_bytes
from reft.core.coding.placement import Placement
from reft.core.commit.decision import counts
from reft.core.commit.version import Version
from reft.core.layout.layout import Layout
from reft.core.recovery.lost_slots import refuse_resized, refuse_unguarded
from reft.core.recovery.plan import TransferPlan
from reft.core.recovery.rebuild_plan import chunk_sources, costs, rebuild_plan
from reft.core.recovery.stripes import parity_number, slot_name
from reft.errors import AttachError, ConfigError, FormatError, StaleEpoch
from reft.wire import capsule_format, messages
from reft.wire.capsule_format import NameTable
from reft.wire.manifest import layouts_of, placement_of
from reft.wire.rebuild_request import layout_mark, rebuilt_table
from reft.wire.slot_format import PAGE, Geometry
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile, next_names
from reft_daemon.arena.threads import run_to_end
from reft_daemon.jobs import slot_reads, trainers
from reft_daemon.jobs.job_record import JobRecord, free_unfinished
from reft_daemon.jobs.persistence import save
from reft_daemon.rebuild.executor import in_thread, made_slices
from reft_daemon.rebuild.source_reader import DamagedSource, SourceReader
from reft_daemon.registry import Registry

log = logging.getLogger("reft.daemon")
PROGRESS_S = 5.0  # a rebuild that takes longer says so, this often


@dataclass(frozen=True)
class _LostSlot:
    """The slot of one lost rank, as it is to become again."""

    rank: int
    record: pb.CapsuleRecord
    table: bytes
    geometry: Geometry


@dataclass(frozen=True)
class Rebuild:
    """Carries out one request to rebuild slots.

    Args:
        registry: of this daemon.
        request: the request; its field `onto` is ignored here.
        bytes_per_s: the most that is read, for a rebuild that nobody waits for. The job may expire
            meanwhile. None: as fast as possible, and the job stays.
    """

    registry: Registry
    request: pb.RebuildRequest
    bytes_per_s: float | None = None

    @property
    def version(self) -> Version:
        return messages.version_from(self.request.version)

    async def run(self) -> pb.RebuildReply:
        """Rebuilds the slots; returns their headers, or the damaged sources.

        Raises:
            ConfigError, FormatError: the request contradicts itself, or the decoded data differs
                from what was saved.
            AttachError: trainers live, or a node does not answer.
            StaleEpoch: a newer decision is in force.
            NoRoom: the slots don't fit.
        """
        request, registry, name = self.request, self.registry, self.request.manifest.job
        placement, layouts = await self._placement_and_layouts()
        needed_ranks = await in_thread(self._needed_ranks, placement)
        is_new = name not in registry.jobs
        if not is_new:
            slot_reads.refuse_living(registry.jobs[name])
        job = await self._adopt()
        sources = SourceReader(registry.arena.node_id, registry.peers, job, request, len(placement.domains))
        slots: dict[int, SlotFile] = {}
        try:
            lost = [await self._lost_slot(sources, each, placement, *layouts[each.rank]) for each in request.lost]
            await sources.check(needed_ranks)
            for each in lost:
                await self._make_slot(job, each, slots)
            await self._fill_slots(job, sources, placement, lost, slots)
            self._check_not_replaced(job)
            headers = [self._seal(job, each, slots[each.rank]) for each in lost]
        except DamagedSource as error:
            log.warning("job=%s rebuild: %s", name, error)
            return pb.RebuildReply(damaged=[pb.DamagedSlot(node=error.node.id, slot=error.slot)])
        finally:
            self._drop_unsealed(job, slots.values(), is_new)
        job.record.had_whole = True
        job.record.ClearField("before")  # a refused attach must not drop what was rebuilt
        save(job)
        for each in lost:
            # no slot is LANDED here; the call only reports the sealed slots to the round
            await trainers.seal_landed(job, each.rank)
            log.info("job=%s rank=%d rebuilt %s", name, each.rank, self.version)
        return pb.RebuildReply(slots=headers, read_bytes=sources.read_bytes)

    # What is to be done

    async def _placement_and_layouts(self) -> tuple[Placement, dict[int, tuple[Layout, NameTable]]]:
        """Returns the placement of the version's epoch.

        Also returns, for each lost rank, the predicted layout and the names in its capsule.

        Raises:
            ConfigError: the request contradicts itself.
        """
        request, version = self.request, self.version
        decision = messages.decision_from(request.decision)
        if not counts(version, decision):
            raise ConfigError(f"{version} is not of the history of epoch {decision.epoch.counter}.")
        manifest = messages.manifests_from(request).get(version.epoch)
        if manifest is None:
            raise ConfigError(f"the manifest under which {version} was written is missing.")
        ranks = [source.rank for source in request.slots] + [lost.rank for lost in request.lost]
        nodes = [source.node for source in (*request.slots, *request.parity)] + [lost.keeper for lost in request.lost]
        if len(set(ranks)) != len(ranks) or max(ranks, default=0) >= manifest.world:
            raise ConfigError(f"a rank is named twice, or is not below {manifest.world}, the number of ranks.")
        if not request.lost or max(nodes, default=0) >= len(request.nodes):
            raise ConfigError("the request names no rank to rebuild, or an unknown node.")
        layouts, index = layouts_of(manifest)
        lost = [(each.rank, index[each.rank]) for each in request.lost]
        return await in_thread(placement_of, manifest), {rank: (layouts[i], layouts.name_table(i)) for rank, i in lost}

    def _needed_ranks(self, placement: Placement) -> list[int]:
        """Returns the ranks, and parity numbers, whose slots are read.

        Raises:
            ValueError: a stripe or a section can't be decoded from the slots at hand.
        """
        have, lost = self._have(placement), {each.rank for each in self.request.lost}
        return sorted({number for cost in costs(placement, have, lost, self._sections) for number in cost.read})

    def _have(self, placement: Placement) -> set[int]:
        """Returns the old ranks, and parity numbers, whose slots are at hand."""
        parity = {parity_number(placement, each.rank) for each in self.request.parity}
        return {each.rank for each in self.request.slots} | parity

    @property
    def _sections(self) -> list[int]:
        """The lost ranks whose unreplicated leaves are decoded from their guard lanes."""
        return [each.rank for each in self.request.lost if each.section]

    async def _adopt(self) -> JobRecord:
        """Makes the job known, as an attach would have done on the lost node.

        Raises:
            StaleEpoch: another epoch is in force here.
        """
        request, job = self.request, self.registry.jobs.get(self.request.manifest.job)
        if (
            job is not None
            and job.epoch == messages.epoch_from(request.decision.epoch)
            and messages.job_mark(job.record.manifest) == messages.job_mark(request.manifest)
        ):
            return job  # the decision is in force here already, and nothing has to be told
        decide = pb.DecideRequest(manifest=request.manifest, decision=request.decision, node_index=request.node_index)
        if request.HasField("base_manifest"):
            decide.base_manifest.CopyFrom(request.base_manifest)
        if request.HasField("guard_manifest"):
            decide.guard_manifest.CopyFrom(request.guard_manifest)
        await self.registry.decide(decide)
        job = self.registry.get(request.manifest.job)
        if job.epoch != messages.decision_from(request.decision).epoch:
            raise StaleEpoch(f"epoch {job.epoch.counter} of job {job.id} is in force here.")
        return job

    async def _lost_slot(
        self, sources: SourceReader, lost: pb.LostRank, placement: Placement, layout: Layout, names: NameTable
    ) -> _LostSlot:
        """Fetches a lost rank's capsule. It also works out the table and size of the rank's slot.

        Raises:
            DamagedSource: the capsule is missing or damaged, or the slot had leaves that nobody
                foresaw: only its own table could tell them.
        """
        record = await sources.capsule(lost)
        rank_placement = placement.rank_placement(lost.rank)
        try:
            tree = capsule_format.decode(record.capsule, names)
            absent = frozenset(tree["absent"])
            refuse_unguarded(placement, lost.rank, absent, record.unreplicated_bytes, len(record.digests))
            refuse_resized(lost.rank, tree["riders"], layout.leaves)
        except (FormatError, KeyError, TypeError) as error:
            raise DamagedSource(self.request.nodes[lost.keeper], f"capsule-{lost.rank}", str(error)) from error
        table = rebuilt_table(placement, layout, lost.rank, absent)
        geometry = Geometry(max(len(table), PAGE), rank_placement.data_bytes, placement.chunk_bytes)
        return _LostSlot(lost.rank, record, table, geometry)

    # Slots

    async def _make_slot(self, job: JobRecord, lost: _LostSlot, slots: dict[int, SlotFile]) -> None:
        """Adds a WRITING slot for a lost rank to `slots`."""
        slot = await run_to_end(job.allocator.run_alone(partial(self._allocate, job, lost, slots)))
        slot.map.begin(self.version, layout_mark(lost.table), lost.table, lost.geometry.data_capacity)

    async def _allocate(self, job: JobRecord, lost: _LostSlot, slots: dict[int, SlotFile]) -> SlotFile:
        self._check_not_replaced(job)
        # No trainer writes a whole version: its ranks have sealed their slots.
        free_unfinished(job, lost.rank, self.version)
        (name,) = next_names(job.slots.names, lost.rank, 1)
        (slot,) = await job.allocator.create(lost.rank, {name: lost.geometry}, [])
        slots[lost.rank] = slot
        # a draft until it is sealed: an attach that comes meanwhile must not lease it
        job.slots.drafts[slot.name] = slot
        return slot

    # Bytes

    async def _fill_slots(
        self,
        job: JobRecord,
        sources: SourceReader,
        placement: Placement,
        lost: Iterable[_LostSlot],
        slots: Mapping[int, SlotFile],
    ) -> None:
        """Makes the data of the slots, and compares it with the saved digests.

        Bytes may have changed on their way from a source. So wrong data is made once more.

        Raises:
            FormatError: data is wrong again.
        """
        have, digests = self._have(placement), {each.rank: each.record.digests for each in lost}
        world = len(placement.domains)
        for is_last in (False, True):
            sections = [rank for rank in self._sections if rank in digests]
            plan = rebuild_plan(placement, have, digests, sections=sections)
            await self._run(plan, job, sources, slots)
            chunks = {rank: await in_thread(_wrong_chunk, slots[rank], saved) for rank, saved in digests.items()}
            digests = {rank: saved for rank, saved in digests.items() if chunks[rank] is not None}
            if not digests:
                return
            rank, chunk = next((rank, chunk) for rank, chunk in chunks.items() if chunk is not None)
            lanes, ranks = await in_thread(chunk_sources, plan, rank, chunk)
            text = (
                f"the decoded data of rank {rank}, {self.version}, is not what was saved: chunk {chunk}, in lane "
                f"{_listed(lanes) or 'the exchange'}, made from {_listed(slot_name(rank, world) for rank in ranks)} on "
                f"{_listed(sources.node_names(ranks))}"
            )
            if is_last:
                raise FormatError(
                    f"{text}, twice.", "bring back the lost node with its memory, or restore from a checkpoint"
                )
            log.warning("job=%s rebuild: %s; once more", job.id, text)

    async def _run(
        self, plan: TransferPlan, job: JobRecord, sources: SourceReader, slots: Mapping[int, SlotFile]
    ) -> None:
        """Carries out a plan; logs its progress after each PROGRESS_S."""
        blocks = (block for rank in plan.lost for block in plan.placement.rank_placement(rank).blocks)
        total = sum(block.nbytes for block in blocks)
        total += sum(plan.placement.rank_placement(rank).unreplicated.data_bytes for rank in plan.sections)
        done, said = 0, time.monotonic()
        began, read_before = said, sources.read_bytes
        async with contextlib.aclosing(made_slices(plan, sources.read, slots)) as slices:
            async for each in slices:
                self._check_not_replaced(job)
                now = time.monotonic()
                if self.bytes_per_s is None:
                    job.ended_s = now  # the job must not expire during the rebuild
                else:
                    nbytes = sources.read_bytes - read_before
                    await asyncio.sleep(pause_s(nbytes, now - began, self.bytes_per_s))
                done += each.made_bytes
                if now - said >= PROGRESS_S:
                    said = now
                    log.info("job=%s rebuilt %s of %s", job.id, format_bytes(done), format_bytes(total))

    def _seal(self, job: JobRecord, lost: _LostSlot, slot: SlotFile) -> pb.SlotHeader:
        slot.map.put_capsule(lost.record.capsule)
        slot.map.landed()
        slot.map.sealed(np.frombuffer(lost.record.digests, "<u8"))
        # A rank of another lost node does not train here, so its slot is only held.
        held = job.slots.current if lost.rank in job.ranks else job.slots.retired
        held[slot.name] = job.slots.drafts.pop(slot.name)
        return pb.SlotHeader(
            rank=lost.rank,
            slot=slot.name,
            state=pb.SEALED,
            version=self.request.version,
            layout=slot.map.header.layout,
            data_bytes=lost.geometry.data_capacity,
        )

    def _check_not_replaced(self, job: JobRecord) -> None:
        """Raises if a new attach, a living trainer or a purge has come meanwhile.

        Raises:
            StaleEpoch: a new attach has decided.
            AttachError: a trainer lives, or the job was purged.
        """
        job.check_epoch(self.request.decision.epoch)
        slot_reads.refuse_living(job)
        if self.registry.jobs.get(job.id) is not job:
            raise AttachError(f"job {job.id} was purged while it was rebuilt.")

    def _drop_unsealed(self, job: JobRecord, slots: Iterable[SlotFile], is_new: bool) -> None:
        """Empties and frees unfinished slots.

        It forgets a job that is new here and has no slots.
        """
        is_held = self.registry.jobs.get(job.id) is job
        for slot in slots:
            if slot.name not in job.slots.drafts:
                continue  # finished, or freed together with the job
            with contextlib.suppress(FormatError):  # its file was cut
                slot.map.empty()
            self.registry.arena.free(job.slots.drafts.pop(slot.name))
        if is_new and is_held and not job.slots.all and job.epoch == messages.epoch_from(self.request.decision.epoch):
            self.registry.purge(job.id)


def pause_s(nbytes: int, took_s: float, bytes_per_s: float) -> float:
    """Returns how long to wait after reading bytes, so that the rate is kept.

    Args:
        nbytes: what was read so far.
        took_s: how long that took, pauses included.
        bytes_per_s: the rate.
    """
    return max(nbytes / bytes_per_s - took_s, 0.0)


def _wrong_chunk(slot: SlotFile, digests: bytes) -> int | None:
    """Returns the first chunk of a slot with another digest; None if all are right."""
    now = enumerate(slot.map.digests_of(0, slot.map.chunks))
    saved = np.frombuffer(digests, "<u8").tolist()
    return next((chunk for chunk, digest in now if digest != saved[chunk]), None)


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))
