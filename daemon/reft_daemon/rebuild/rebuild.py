"""Rebuilds the slots of lost ranks. The daemon that does so takes the place of a lost node.

    decision, manifests ─► taken over, as in an attach       own arena: slot WRITING, zeros
    capsule of each lost rank ◄── its keeper                         │
    shards of each stripe ◄── Read (checked) ── surviving slots ──► slice: decoded in a thread
    digests of the capsule's record ── equal? ──► capsule, LANDED, SEALED; no: EMPTY, an error

Nothing counts before the last step. A daemon that dies leaves WRITING slots, which count as lost.
An attach that decides during a rebuild wins: its epoch is newer, and the rebuild ends with an
error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import grpc
import numpy as np

from reft.core.coding.placement import Placement
from reft.core.commit.decision import counts
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.core.layout.layout import Layout
from reft.core.recovery.rebuild import (
    Bytes,
    RebuildSlice,
    ShardRebuilder,
    StripeRebuild,
    lane_at,
    rebuild_slices,
    stripes,
)
from reft.errors import AttachError, ConfigError, FormatError, ReftError, StaleEpoch
from reft.wire import capsule_format, messages
from reft.wire.manifest import layouts_of, placement_of
from reft.wire.rebuild_request import layout_mark, rebuilt_table
from reft.wire.slot_format import PAGE, Geometry, best_header
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.arena.arena import SlotFile, next_names
from reft_daemon.jobs import capsules, slot_reads, trainers
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.persistence import save
from reft_daemon.peers.round_replicator import reason_of
from reft_daemon.registry import Registry

log = logging.getLogger("reft.daemon")
SLICES_AT_ONCE = 2  # one slice is read while another is decoded
READ_DEADLINE_S = 30.0
PATIENCE_S = 5.0
T = TypeVar("T")


class DamagedSource(Exception):
    """A slot or a capsule that the rebuild needs is damaged or missing."""

    def __init__(self, node: pb.Node, slot: str, reason: str) -> None:
        super().__init__(f"{slot} on node {node.name}: {reason}")
        self.node, self.slot = node, slot


@dataclass
class _Lost:
    """One lost rank whose slot is rebuilt."""

    rank: int
    record: pb.CapsuleRecord
    table: bytes
    data_bytes: int
    slot: SlotFile | None = None


@dataclass
class Rebuild:
    """Carries out one request to rebuild slots.

    Args:
        registry: of this daemon.
        request: the request; its field `onto` is ignored here.
    """

    registry: Registry
    request: pb.RebuildRequest
    _read_bytes: int = 0
    # rank → offset of the data in its slot's file
    _data_offsets: dict[int, int] = field(default_factory=dict)

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
        request = self.request
        placement, layouts = await self._placement_and_layouts()
        stripe_rebuilds = await _in_thread(self._stripes, placement)
        name = request.manifest.job
        is_new = name not in self.registry.jobs
        if not is_new:
            slot_reads.refuse_living(self.registry.jobs[name])
        job = await self._adopt()
        lost: list[_Lost] = []
        try:
            lost = [await self._fetch_capsule(job, each, placement, layouts) for each in request.lost]
            await self._prepare_slots(job, lost, stripe_rebuilds)
            await self._decode_slices(job, lost, placement, stripe_rebuilds)
            for each in lost:
                await self._verify(each, placement)
            self._check_not_replaced(job)
            headers = [self._seal(job, each) for each in lost]
        except DamagedSource as error:
            log.warning("job=%s rebuild: %s", name, error)
            return pb.RebuildReply(damaged=[pb.DamagedSlot(node=error.node.id, slot=error.slot)])
        finally:
            self._drop_unsealed(job, lost, is_new)
        job.record.had_whole = True
        save(job)
        for each in lost:
            # no slot is LANDED here; the call only reports the sealed slots to the round
            await trainers.seal_landed(job, each.rank)
            log.info("job=%s rank=%d rebuilt %s", name, each.rank, self.version)
        return pb.RebuildReply(slots=headers, read_bytes=self._read_bytes)

    # What is to be done

    async def _placement_and_layouts(self) -> tuple[Placement, dict[int, Layout]]:
        """Returns the placement of the version's epoch, and the predicted layout of each lost rank.

        Raises:
            ConfigError: the request contradicts itself.
        """
        request, version = self.request, self.version
        decision = messages.decision_from(request.decision)
        if not counts(version, decision):
            raise ConfigError(f"{version} is not of the history of epoch {decision.epoch.counter}.")
        if version.epoch != decision.epoch and not request.HasField("base_manifest"):
            raise ConfigError(f"the manifest under which {version} was written is missing.")
        manifest = request.manifest if version.epoch == decision.epoch else request.base_manifest
        ranks = [source.rank for source in request.slots] + [lost.rank for lost in request.lost]
        nodes = [source.node for source in request.slots] + [lost.keeper for lost in request.lost]
        if len(set(ranks)) != len(ranks) or max(ranks, default=0) >= manifest.world:
            raise ConfigError(f"a rank is named twice, or is not below {manifest.world}, the number of ranks.")
        if not request.lost or max(nodes, default=0) >= len(request.nodes):
            raise ConfigError("the request names no rank to rebuild, or an unknown node.")
        layouts, index = layouts_of(manifest)
        return await _in_thread(placement_of, manifest), {lost.rank: layouts[index[lost.rank]] for lost in request.lost}

    def _stripes(self, placement: Placement) -> list[StripeRebuild]:
        surviving_ranks = {each.rank for each in self.request.slots}
        return list(stripes(placement, surviving_ranks, {each.rank for each in self.request.lost}))

    async def _adopt(self) -> JobRecord:
        """Makes the job known, as an attach would have done on the lost node.

        Raises:
            StaleEpoch: another epoch is in force here.
        """
        request = self.request
        decide = pb.DecideRequest(manifest=request.manifest, decision=request.decision, node_index=request.node_index)
        if request.HasField("base_manifest"):
            decide.base_manifest.CopyFrom(request.base_manifest)
        await self.registry.decide(decide)
        job = self.registry.get(request.manifest.job)
        if job.epoch != messages.decision_from(request.decision).epoch:
            raise StaleEpoch(f"epoch {job.epoch.counter} of job {job.id} is in force here.")
        return job

    async def _fetch_capsule(
        self, job: JobRecord, lost: pb.LostRank, placement: Placement, layouts: Mapping[int, Layout]
    ) -> _Lost:
        """Fetches a lost rank's capsule. It also works out the table and size of the rank's slot.

        Raises:
            DamagedSource: the capsule is missing or damaged.
            ConfigError: the slot had bytes that no other slot has.
        """
        node, capsule_name = self.request.nodes[lost.keeper], f"capsule-{lost.rank}"
        record = await self._request_capsule(job, node, lost.rank)
        if record is None or record.rank != lost.rank or messages.version_from(record.version) != self.version:
            raise DamagedSource(node, capsule_name, "the capsule is missing")
        rank_placement = placement.rank_placement(lost.rank)
        chunks = -(-rank_placement.data_bytes // placement.chunk_bytes)
        try:
            tree = capsule_format.decode(record.capsule)
            absent = frozenset(tree["absent"])
        except (FormatError, KeyError, TypeError) as error:
            raise DamagedSource(node, capsule_name, str(error)) from error
        if record.unreplicated_bytes or len(record.digests) != 8 * chunks:
            raise ConfigError(
                f"the slot of rank {lost.rank} had {record.unreplicated_bytes} bytes that no other slot has, and "
                f"{len(record.digests) // 8} chunks, where the placement has {chunks}: it can't be rebuilt."
            )
        table = rebuilt_table(placement, layouts[lost.rank], lost.rank, absent)
        return _Lost(lost.rank, record, table, rank_placement.data_bytes)

    async def _request_capsule(self, job: JobRecord, node: pb.Node, rank: int) -> pb.CapsuleRecord | None:
        if self._is_here(node):
            return capsules.capsule(job, rank, self.version)
        capsule_request = pb.CapsuleRequest(job=job.id, rank=rank, version=self.request.version)
        token = self.request.manifest.token
        try:
            reply = await _retry_while_unavailable(
                lambda: self.registry.peers.call(
                    node, token, pb_grpc.DaemonStub, "FetchCapsule", capsule_request, READ_DEADLINE_S
                )
            )
        except (grpc.RpcError, OSError) as error:
            if slot_reads.is_damage(error):
                return None
            raise _unreachable(node, error) from error
        return reply  # type: ignore[return-value]

    def _is_here(self, node: pb.Node) -> bool:
        return node.id == self.registry.arena.node_id

    # Slots

    async def _prepare_slots(
        self, job: JobRecord, lost: Iterable[_Lost], stripe_rebuilds: Iterable[StripeRebuild]
    ) -> None:
        """Checks all needed sources, then makes WRITING slots for the lost ranks."""
        needed = {piece.rank for stripe in stripe_rebuilds for piece in stripe.read}
        sources = {each.rank: each for each in self.request.slots}
        await asyncio.gather(*(self._check_source(job, sources[rank]) for rank in sorted(needed)))
        for each in lost:
            slot = await _run_to_end(job.allocator.run_alone(partial(self._make_slot, job, each)))
            slot.map.begin(self.version, layout_mark(each.table), each.table, each.data_bytes)

    async def _make_slot(self, job: JobRecord, lost: _Lost) -> SlotFile:
        self._check_not_replaced(job)
        geometry = Geometry(max(len(lost.table), PAGE), lost.data_bytes, self._chunk_bytes)
        (slot,) = await job.allocator.create(lost.rank, next_names(job.slots.all, lost.rank, 1), geometry, [])
        lost.slot = slot
        # a draft until it is sealed: an attach that comes meanwhile must not lease it
        job.slots.drafts[slot.name] = slot
        return slot

    @property
    def _chunk_bytes(self) -> int:
        request = self.request
        is_own = self.version.epoch == messages.epoch_from(request.decision.epoch)
        return (request.manifest if is_own else request.base_manifest).chunk_bytes

    async def _check_source(self, job: JobRecord, source: pb.SlotSource) -> None:
        head = np.zeros(2 * PAGE, np.uint8)
        await self._read_source(job, source, 0, head, checked=False)
        node = self.request.nodes[source.node]
        try:
            header = best_header(head)
        except FormatError as error:
            raise DamagedSource(node, source.slot, str(error)) from error
        if (header.rank, header.version, header.state) != (source.rank, self.version, SlotState.SEALED):
            raise DamagedSource(node, source.slot, f"it holds {header.version} of rank {header.rank}")
        self._data_offsets[source.rank] = header.geometry.data_offset

    async def _read_source(
        self, job: JobRecord, source: pb.SlotSource, offset: int, into: Bytes, checked: bool = True
    ) -> None:
        """Fills `into` with bytes of a source's file.

        Raises:
            DamagedSource: the source is damaged, gone, or of another version.
            AttachError: the node can't be reached.
        """
        node = self.request.nodes[source.node]
        read_request = pb.ReadRequest(
            job=job.id, slot=source.slot, version=self.request.version, offset=offset, size=into.nbytes, checked=checked
        )
        try:
            if self._is_here(node):
                await slot_reads.read_here(job, read_request, into)
            else:
                token = self.request.manifest.token
                await _retry_while_unavailable(
                    lambda: self.registry.peers.read(node, token, read_request, into, READ_DEADLINE_S)
                )
        except (grpc.RpcError, OSError, ReftError) as error:
            if slot_reads.is_damage(error):
                raise DamagedSource(node, source.slot, reason_of(error)) from error
            raise _unreachable(node, error) from error
        self._read_bytes += into.nbytes

    # Bytes

    async def _decode_slices(
        self, job: JobRecord, lost: Iterable[_Lost], placement: Placement, stripe_rebuilds: list[StripeRebuild]
    ) -> None:
        """Decodes all slices, SLICES_AT_ONCE at a time."""
        rebuilder = ShardRebuilder(placement)
        slices = (each for stripe in stripe_rebuilds for each in rebuild_slices(placement, stripe))
        targets = {each.rank: each.slot for each in lost}

        async def decode_next_slices() -> None:
            for rebuild_slice in slices:
                self._check_not_replaced(job)
                job.ended_s = time.monotonic()  # the job must not expire during the rebuild
                await self._decode_slice(job, rebuild_slice, placement, rebuilder, targets)

        tasks = [asyncio.ensure_future(decode_next_slices()) for _ in range(SLICES_AT_ONCE)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            # The slots may be freed after this. So all tasks that write them must have ended.
            await _run_to_end(asyncio.gather(*tasks, return_exceptions=True))

    async def _decode_slice(
        self,
        job: JobRecord,
        rebuild_slice: RebuildSlice,
        placement: Placement,
        rebuilder: ShardRebuilder,
        targets: dict[int, SlotFile | None],
    ) -> None:
        lane, width = placement.lanes[rebuild_slice.stripe.lane], rebuild_slice.end - rebuild_slice.begin
        sources = {each.rank: each for each in self.request.slots}
        rows = {piece.shard: np.empty((lane.code.w, width), np.uint8) for piece in rebuild_slice.stripe.read}
        reads = []
        for piece in rebuild_slice.stripe.read:
            at = self._data_offsets[piece.rank] + piece.offset
            # the slice spans whole packets: read the shard in one call
            if width == lane.packet_bytes:
                reads.append(self._read_source(job, sources[piece.rank], at, rows[piece.shard].reshape(-1)))
                continue
            for packet in range(lane.code.w):
                begin = at + packet * lane.packet_bytes + rebuild_slice.begin
                reads.append(self._read_source(job, sources[piece.rank], begin, rows[piece.shard][packet]))
        await asyncio.gather(*reads)
        decoded = {}
        for piece in rebuild_slice.stripe.made:
            slot = targets[piece.rank]
            assert slot is not None, "a lost rank without a slot"
            for packet in range(lane.code.w):
                begin = piece.offset + packet * lane.packet_bytes + rebuild_slice.begin
                decoded[piece.shard, packet] = slot.map.data[begin : begin + width]
        read = {(shard, packet): row for shard, packets in rows.items() for packet, row in enumerate(packets)}
        await _in_thread(rebuilder.make, rebuild_slice, read, decoded)

    async def _verify(self, lost: _Lost, placement: Placement) -> None:
        """Compares the decoded data with the digests that were taken when the data was saved.

        Raises:
            FormatError: they differ.
        """
        digests = np.frombuffer(lost.record.digests, "<u8")
        slot = lost.slot
        assert slot is not None, "a lost rank without a slot"

        def first_bad() -> int:
            digests_now = enumerate(slot.map.digests_of(0, slot.map.chunks))
            return next((i for i, digest in digests_now if digest != int(digests[i])), -1)

        bad = await _in_thread(first_bad)
        if bad >= 0:
            lane = lane_at(placement.rank_placement(lost.rank), bad * placement.chunk_bytes)
            raise FormatError(
                f"the decoded data of rank {lost.rank}, {self.version}, is not what was saved: chunk {bad}, in lane {lane}.",
                "bring back the lost node with its memory, or restore from a checkpoint",
            )

    def _seal(self, job: JobRecord, lost: _Lost) -> pb.SlotHeader:
        slot = lost.slot
        assert slot is not None, "a lost rank without a slot"
        slot.map.put_capsule(lost.record.capsule)
        slot.map.landed()
        slot.map.sealed(np.frombuffer(lost.record.digests, "<u8"))
        # A rank of another lost node does not train here, so its slot is only held.
        (job.slots.current if lost.rank in job.ranks else job.slots.retired)[slot.name] = job.slots.drafts.pop(
            slot.name
        )
        return pb.SlotHeader(
            rank=lost.rank,
            slot=slot.name,
            state=pb.SEALED,
            version=self.request.version,
            layout=slot.map.header.layout,
            data_bytes=lost.data_bytes,
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

    def _drop_unsealed(self, job: JobRecord, lost: Iterable[_Lost], is_new: bool) -> None:
        """Empties and frees unfinished slots.

        It forgets a job that is new here and has no slots.
        """
        is_held = self.registry.jobs.get(job.id) is job
        for each in lost:
            slot = each.slot
            if slot is None or slot.name not in job.slots.drafts:
                continue  # finished, or freed together with the job
            slot.map.empty()
            self.registry.arena.free(job.slots.drafts.pop(slot.name))
        if is_new and is_held and not job.slots.all and job.epoch == messages.epoch_from(self.request.decision.epoch):
            self.registry.purge(job.id)


async def _retry_while_unavailable(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a call for PATIENCE_S while the daemon is unavailable: it may be restarting.

    gRPC itself connects again only once a second.
    """
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await call()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                raise
        await asyncio.sleep(0.2)


async def _in_thread(function, *arguments):  # type: ignore[no-untyped-def]
    """Runs a function in a thread, to its end.

    Raises:
        ConfigError: the function raised ValueError.
    """
    try:
        return await _run_to_end(asyncio.to_thread(function, *arguments))
    except ValueError as error:
        raise ConfigError(f"it can't be rebuilt: {error}.") from error


async def _run_to_end(work: Awaitable[T]) -> T:
    """Waits until `work` has ended, even if the caller is cancelled; then returns its result.

    The work writes into a slot, which must not be freed before.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # marks the exception as retrieved
    raise cancelled


def _unreachable(node: pb.Node, error: BaseException) -> AttachError:
    return AttachError(f"node {node.name} can't be read: {reason_of(error)}.", "check its daemon, and try again")
