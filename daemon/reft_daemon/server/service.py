"""The daemon's gRPC services: check callers, translate errors, call the registry."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from reft.core.commit.gradient_records import RECORD_SLOTS_MAX
from reft.core.membership.job_identity import check_name
from reft.core.recovery.survey_timeout import WHOLE_S, survey_timeout_s
from reft.errors import AttachError, ConfigError, ReftError
from reft.wire import local_socket, messages, rpc
from reft.wire.slot_format import PAGE, TABLE_MAX
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon import __version__
from reft_daemon.arena import shortage
from reft_daemon.arena.headers import header_messages, header_of, sealed_versions
from reft_daemon.jobs import capsules, rounds, slot_reads, trainers
from reft_daemon.jobs.inventory import fill_inventory
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.leases import FENCE_DEADLINE_S
from reft_daemon.membership.monitors import JobNotWatched
from reft_daemon.peers.round_replicator import reason_of
from reft_daemon.peers.survey_dedup import clear_known_manifests, digests_of, without_repeats
from reft_daemon.rebuild.rebuild import Rebuild
from reft_daemon.registry import Registry, UnknownJob, living_pids

STATUS_DEADLINE_S = 1.0
REBUILD_DEADLINE_S = 3600.0  # for a forwarded rebuild: time enough to read a node's memory
Context = grpc.aio.ServicerContext
R = TypeVar("R", pb.ReadRequest, pb.CapsuleRequest)


@dataclass(frozen=True)
class DaemonIdentity:
    """This daemon as other processes see it.

    Attributes:
        trusts_peers: whether TLS, loopback or --insecure has admitted all callers over TCP.
    """

    node: str
    domain: str
    addresses: tuple[str, ...]
    local_socket: str
    limit_bytes: int
    tls: bool
    unattended: bool
    trusts_peers: bool


def translated(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Turns errors of reft and of the system into gRPC statuses.

    Any other exception is a bug: the call ends with the exception's name.
    """

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Context) -> Any:
        try:
            return await method(self, request, context)
        except (UnknownJob, JobNotWatched) as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except ReftError as error:
            await context.abort(slot_reads.status_of(error), str(error))
        except OSError as error:
            # not DATA_LOSS: the error does not show that data is damaged
            await context.abort(grpc.StatusCode.INTERNAL, str(shortage.shortage_error(error)))

    return call


@contextlib.contextmanager
def _naming_node(node: pb.Node) -> Iterator[None]:
    """Adds the node's name to the errors of failed calls.

    Raises:
        AttachError: the node can't be reached.
        UnreadableSlot: the node has refused the call.
    """
    try:
        yield
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise AttachError(f"node {node.name} can't be reached: {reason_of(error)}.", "check its daemon") from error
        raise slot_reads.UnreadableSlot(error.code(), f"node {node.name}: {reason_of(error)}") from error
    except OSError as error:
        raise AttachError(f"node {node.name} can't be reached: {reason_of(error)}.", "check its daemon") from error


def _is_local(context: Context) -> bool:
    return context.peer().startswith("unix:")


async def authorise(registry: Registry, name: str, context: Context) -> None:
    """Admits callers on the unix socket, and over TCP callers with the job's token."""
    if _is_local(context):
        return
    job = registry.jobs.get(name)
    if job is None or not rpc.has_token(context.invocation_metadata(), job.record.manifest.token):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this call needs the job's token")


async def _refuse_remote(context: Context) -> None:
    """Admits only callers on the unix socket: storage has all jobs of this user."""
    if not _is_local(context):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "storage is read only for callers on the unix socket")


async def authorise_agents(registry: Registry, name: str, context: Context) -> None:
    """Admits callers on the unix socket, and over TCP callers with the agents' token.

    Unlike `authorise`, this works before the first attach. Without agents the token is the
    manifest's.
    """
    if _is_local(context):
        return
    token = registry.heartbeat_service.monitors.token(name)
    if not token or not rpc.has_token(context.invocation_metadata(), token):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this call needs the token of the job's agents")


class DaemonService(pb_grpc.DaemonServicer):
    """The calls of trainers and of the CLI."""

    def __init__(self, registry: Registry, identity: DaemonIdentity) -> None:
        self._registry = registry
        self._identity = identity
        self._rebuilding = asyncio.Lock()  # one rebuild at a time: each takes much memory

    @translated
    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:
        messages.check_protocol(request.protocol, request.oldest, "you speak", f"this daemon (reft {__version__})")
        if request.agent_pid and _is_local(context):
            self._registry.keep_for_agent(request.agent_pid)
        if request.job and _is_local(context):
            self._registry.restart_idle_time()
        identity, job = self._identity, self._registry.jobs.get(request.job)
        held = job is not None and job.record.had_whole and _is_local(context)
        return pb.HelloReply(
            protocol=messages.PROTOCOL, oldest=messages.OLDEST, node=identity.node,
            node_id=self._registry.arena.node_id, addresses=identity.addresses, version=__version__, pid=os.getpid(),
            domain=identity.domain, local_socket=identity.local_socket,
            held=held, tls=identity.tls, unattended=identity.unattended,
            persists=self._registry.persists.settings is not None,
        )  # fmt: skip

    @translated
    async def Inventory(self, request: pb.InventoryRequest, context: Context) -> pb.InventoryReply:
        await authorise(self._registry, request.job, context)
        # A token admits to one job. Names and scripts of other jobs are only for callers that can
        # open the socket.
        others = [
            _other_job(job) for job in self._registry.jobs.values() if job.id != request.job and _is_local(context)
        ]
        reply = pb.InventoryReply(others=others, node=self._identity.node, node_id=self._registry.arena.node_id)
        reply.known.extend(self._registry.known_steps(request.job, self._identity.node))
        reply.slots.extend(
            header_messages(request.job, self._registry.persists.reader.opened.get(request.job, {}).values())
        )
        job = self._registry.jobs.get(request.job)
        if job is None:
            reply.room_bytes = self._registry.arena.room_bytes()
            return reply
        if request.end_orphans:
            await trainers.end_orphans(job, request.launch, request.pids)
            await self._registry.turns.hold(job)
        reply.room_bytes = self._registry.arena.room_bytes() + job.held_bytes
        fill_inventory(reply, job)
        clear_known_manifests(reply, request.known)
        return reply

    @translated
    async def Survey(self, request: pb.SurveyRequest, context: Context) -> pb.SurveyReply:
        await authorise(self._registry, request.job, context)
        record = self._registry.get(request.job).record
        heartbeat_service, has_round = self._registry.heartbeat_service, request.HasField("round")
        given_up_s = (
            heartbeat_service.monitors.given_up_s(request.job, request.launch, request.round) if has_round else {}
        )
        patience = {node.id: survey_timeout_s(given_up_s.get(node.id), request.again) for node in request.nodes}
        token, known = record.manifest.token, digests_of(record)
        calls = (self._survey(node, token, request, known, patience[node.id]) for node in request.nodes)
        return pb.SurveyReply(nodes=without_repeats(record, await asyncio.gather(*calls)))

    async def _survey(
        self, node: pb.Node, token: bytes, request: pb.SurveyRequest, known: list[int], wait_s: float
    ) -> pb.SurveyedNode:
        """Returns one node's inventory, or the reason why there is none.

        A node that answers gets further time to end its orphans.
        """
        inventory = pb.InventoryRequest(job=request.job, launch=request.launch, known=known)
        surveyed = await self._request_inventory(node, token, inventory, wait_s)
        surveyed.brief = not request.again and wait_s < WHOLE_S
        if not request.end_orphans or not surveyed.HasField("reply"):
            return surveyed
        inventory.end_orphans = True
        return await self._request_inventory(node, token, inventory, FENCE_DEADLINE_S + WHOLE_S)

    async def _request_inventory(
        self, node: pb.Node, token: bytes, inventory: pb.InventoryRequest, deadline_s: float
    ) -> pb.SurveyedNode:
        if self._registry.peers.is_self(node):
            # Its arena is gone: this daemon began with an empty folder, so it has another id.
            own = pb.InventoryReply(node=self._identity.node, node_id=self._registry.arena.node_id)
            return pb.SurveyedNode(node=node, reply=own)
        # Each address gets an equal part of the time. A missing unix socket fails at once. When
        # orphans are to be ended, an address has just answered, and the other addresses fail at
        # once.
        tcp_addresses = (
            1 if inventory.end_orphans else sum(not address.startswith("unix:") for address in node.addresses)
        )
        share_s = deadline_s / max(tcp_addresses, 1)
        call = self._registry.peers.call(
            node, token, pb_grpc.DaemonStub, "Inventory", inventory, share_s, reconnect=True
        )
        try:
            reply = await asyncio.wait_for(call, deadline_s)
        except (grpc.RpcError, OSError, asyncio.TimeoutError, ReftError) as error:
            return pb.SurveyedNode(node=node, trouble=reason_of(error))
        return pb.SurveyedNode(node=node, reply=reply)  # type: ignore[arg-type]

    @translated
    async def Stored(self, request: pb.StoredRequest, context: Context) -> pb.StoredReply:
        await _refuse_remote(context)
        return await self._registry.persists.reader.stored(request)

    @translated
    async def OpenStored(self, request: pb.OpenStoredRequest, context: Context) -> pb.OpenStoredReply:
        await _refuse_remote(context)
        return await self._registry.open_stored(request)

    @translated
    async def FetchCapsule(self, request: pb.CapsuleRequest, context: Context) -> pb.CapsuleRecord:
        await authorise(self._registry, request.job, context)
        if request.HasField("node"):
            node, passed, token = await self._forwarded_request(request, context)
            with _naming_node(node):
                return await self._registry.peers.call(  # type: ignore[return-value]
                    node, token, pb_grpc.DaemonStub, "FetchCapsule", passed, context.time_remaining()
                )
        version = messages.version_from(request.version)
        if record := self._registry.persists.reader.capsule(request.job, request.rank, version):
            return record
        record = capsules.capsule(self._registry.get(request.job), request.rank, version)
        if record is None:
            message = f"no capsule of rank {request.rank}, {version}, of job {request.job} here"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return record

    @translated
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinReply:
        await authorise(self._registry, request.job, context)
        whole = rounds.pin(self._registry.get(request.job), request)
        return pb.PinReply(whole=whole.step if whole else None)

    @translated
    async def Decide(self, request: pb.DecideRequest, context: Context) -> pb.DecideReply:
        await authorise(self._registry, request.manifest.job, context)
        if request.HasField("node"):
            if not _is_local(context):
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "calls are forwarded only from the unix socket")
            node, token, passed = request.node, request.manifest.token, pb.DecideRequest()
            passed.CopyFrom(request)
            passed.ClearField("node")
            with _naming_node(node):
                return await self._registry.peers.call(  # type: ignore[return-value]
                    node, token, pb_grpc.DaemonStub, "Decide", passed, context.time_remaining()
                )
        await self._registry.decide(request)
        return pb.DecideReply()

    @translated
    async def StoreDecision(self, request: pb.StoreDecisionRequest, context: Context) -> pb.StoreDecisionReply:
        await _refuse_remote(context)
        check_name(request.job)
        decision = messages.decision_from(request.decision)
        await self._registry.persists.reader.store_decision(request.job, request.lineage, decision)
        return pb.StoreDecisionReply()

    @translated
    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseReply:
        await authorise(self._registry, request.job, context)
        _check_sizes(request)
        slots = await self._registry.lease(request)
        leased = [pb.LeasedSlot(name=slot.name, file_bytes=slot.file_bytes) for slot in slots]
        return pb.LeaseReply(slots=leased, backing=self._registry.get(request.job).slots.backing)

    @translated
    async def Secure(self, request: pb.SecureRequest, context: Context) -> pb.SecureReply:
        await authorise(self._registry, request.job, context)
        await self._registry.secure(request)
        return pb.SecureReply()

    @translated
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        await authorise(self._registry, request.job, context)
        self._registry.release(request)
        return pb.ReleaseReply()

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.Chunk]:
        """Yields bytes of a sealed slot, for a rank that now runs on another node."""
        await authorise(self._registry, request.job, context)
        try:
            async for data in self._read(request, context):
                yield pb.Chunk(data=data)
        except ReftError as error:
            await context.abort(slot_reads.status_of(error), str(error))

    async def _read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[bytes]:
        if not request.HasField("node"):
            async for data in slot_reads.read(self._registry.jobs.get(request.job), request):
                yield data
            return
        node, passed, token = await self._forwarded_request(request, context)
        pieces = self._registry.peers.pieces(node, token, passed, context.time_remaining())
        with _naming_node(node):
            async with contextlib.aclosing(pieces):
                async for data in pieces:
                    yield data

    async def _forwarded_request(self, request: R, context: Context) -> tuple[pb.Node, R, bytes]:
        """Returns the node to ask, the request for it, and the job's token.

        Daemons have certificates and know each other's addresses. A trainer needs neither, because
        its own daemon forwards the call.
        """
        if not _is_local(context):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "calls are forwarded only for callers on the unix socket"
            )
        forwarded = type(request)()
        forwarded.CopyFrom(request)
        forwarded.ClearField("node")
        return request.node, forwarded, self._registry.get(request.job).record.manifest.token

    @translated
    async def Rebuild(self, request: pb.RebuildRequest, context: Context) -> pb.RebuildReply:
        name = request.manifest.job
        if name in self._registry.jobs or not self._identity.trusts_peers:
            await authorise(self._registry, name, context)
        if request.HasField("onto") and not self._registry.peers.is_own(request.onto):
            return await self._forward_rebuild(request, context)
        async with self._rebuilding:
            return await Rebuild(self._registry, request).run()

    async def _forward_rebuild(self, request: pb.RebuildRequest, context: Context) -> pb.RebuildReply:
        """Forwards the request to the daemon that is to rebuild.

        Only daemons may be able to reach that daemon.
        """
        job = self._registry.get(request.manifest.job)
        await authorise(self._registry, job.id, context)
        slot_reads.refuse_living(job)
        onto, token = request.onto, job.record.manifest.token
        forwarded = pb.RebuildRequest()
        forwarded.CopyFrom(request)
        forwarded.ClearField("onto")
        try:
            reply = await self._registry.peers.call(
                onto, token, pb_grpc.DaemonStub, "Rebuild", forwarded, REBUILD_DEADLINE_S
            )
        except grpc.RpcError as error:
            await context.abort(error.code(), f"daemon {onto.addresses[0]}: {error.details()}")
        return reply  # type: ignore[return-value]

    @translated
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        await authorise(self._registry, request.job, context)
        registry, beats = self._registry, self._registry.heartbeat_service.sender
        if request.job:
            registry.get(request.job)
        jobs = [job for job in registry.jobs.values() if not request.job or job.id == request.job]
        statuses = [_status(job, self._identity.node, registry.ttl_s.left_s(job)) for job in jobs]
        for job, each in zip(jobs, statuses, strict=True):
            each.signals.extend(registry.heartbeat_service.status(each.job))
            if exchange := registry.turns.status(job):
                each.exchange.CopyFrom(exchange)
            if storage := registry.persists.status(job):
                each.storage.CopyFrom(storage)
        if request.deep:
            await asyncio.gather(*(self._ask_peers(job, status) for job, status in zip(jobs, statuses, strict=True)))
        return pb.StatusReply(
            node=self._identity.node, node_id=registry.arena.node_id, version=__version__, pid=os.getpid(),
            held_bytes=registry.arena.held_bytes, limit_bytes=self._identity.limit_bytes,
            directory=str(registry.arena.folder), jobs=statuses, domain=self._identity.domain,
            round_bytes_sent=registry.peers.sent["Gather"] + registry.peers.sent["Announce"],
            capsule_bytes_sent=registry.peers.sent["Keep"],
            beat_bytes_sent=beats.peers.sent["Beat"], beats_sent=beats.beats_sent,
            spare_bytes=registry.arena.pool.bytes, spare_limit_bytes=registry.arena.pool.want.bytes,
            scrubbed_bytes=registry.scrubbed.read_bytes, damaged_slots=registry.scrubbed.damaged,
            repaired_slots=registry.scrubbed.repaired, agents=living_pids(registry.agents),
        )  # fmt: skip

    async def _ask_peers(self, job: JobRecord, status: pb.JobStatus) -> None:
        """Adds the status of the job's other daemons; names those that don't answer."""
        manifest = job.record.manifest
        others = [node for i, node in enumerate(manifest.nodes) if i != job.record.node_index]
        request = pb.StatusRequest(job=job.id)
        calls = (
            self._registry.peers.call(node, manifest.token, pb_grpc.DaemonStub, "Status", request, STATUS_DEADLINE_S)
            for node in others
        )
        for node, reply in zip(others, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(reply, pb.StatusReply) and reply.jobs:
                status.ranks.extend(reply.jobs[0].ranks)
                status.whole = max(status.whole, reply.jobs[0].whole)
                status.held_bytes += reply.jobs[0].held_bytes
                status.peak_bytes += reply.jobs[0].peak_bytes
                merge_signals(status, reply.jobs[0])
                merge_end(status, reply.jobs[0])
                if reply.jobs[0].HasField("storage"):  # from the coordinator
                    status.storage.CopyFrom(reply.jobs[0].storage)
            else:
                status.silent_nodes.append(node.name)

    @translated
    async def AgentBeat(self, request: pb.AgentBeatRequest, context: Context) -> pb.AgentBeatReply:
        await authorise_agents(self._registry, request.job, context)
        return self._registry.heartbeat_service.agent_beat(request)

    @translated
    async def Signals(self, request: pb.SignalsRequest, context: Context) -> pb.SignalsReply:
        await authorise_agents(self._registry, request.job, context)
        return await self._registry.heartbeat_service.signals(request)

    @translated
    async def Purge(self, request: pb.PurgeRequest, context: Context) -> pb.PurgeReply:
        await authorise(self._registry, request.job, context)
        job = self._registry.get(request.job)
        if job.is_live:
            raise ConfigError(f"job {job.id} is being trained.", "end its trainers first")
        if not request.memory_only:
            await self._registry.persists.end_lineage(job)
        return pb.PurgeReply(freed_bytes=self._registry.purge(job.id))

    @translated
    async def PersistJob(self, request: pb.PersistJobRequest, context: Context) -> pb.PersistJobReply:
        await authorise(self._registry, request.job, context)
        job = self._registry.get(request.job)
        try:
            return await self._registry.persists.request(job, request)
        except grpc.RpcError as error:
            await context.abort(error.code(), f"node {job.record.manifest.nodes[0].name}: {reason_of(error)}")

    @translated
    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldReply:
        await authorise(self._registry, request.job, context)
        job = self._registry.get(request.job)
        try:
            return await self._registry.persists.holds.hold(job, request)
        except grpc.RpcError as error:
            await context.abort(error.code(), f"node {job.record.manifest.nodes[0].name}: {reason_of(error)}")


class PeerService(pb_grpc.PeerServicer):
    """The calls of other daemons."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @translated
    async def Keep(self, request: pb.KeepRequest, context: Context) -> pb.KeepReply:
        await authorise(self._registry, request.job, context)
        capsules.keep(self._registry.get(request.job), request)
        return pb.KeepReply()

    @translated
    async def OpenBulk(self, request: pb.OpenBulkRequest, context: Context) -> pb.OpenBulkReply:
        await authorise(self._registry, request.job, context)
        job = self._registry.get(request.job)
        job.check_epoch(request.epoch)
        return await self._registry.turns.open_bulk(job)

    @translated
    async def Persist(self, request: pb.PersistRequest, context: Context) -> pb.PersistReply:
        await authorise(self._registry, request.job, context)
        job = self._registry.get(request.job)
        job.check_epoch(request.epoch)
        return await self._registry.persists.writer.persist(job, request)

    @translated
    async def Beat(self, request: pb.BeatRequest, context: Context) -> pb.BeatReply:
        await authorise_agents(self._registry, request.job, context)
        return self._registry.heartbeat_service.beat(request)

    @translated
    async def Gather(self, request: pb.GatherRequest, context: Context) -> pb.Outcome:
        await authorise(self._registry, request.job, context)
        job = self._registry.get(request.job)
        job.check_epoch(request.epoch)
        try:
            outcome = rounds.hear_node(job, request)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return messages.outcome_to(job.id, job.epoch, outcome)

    @translated
    async def Announce(self, request: pb.Outcome, context: Context) -> pb.OutcomeReply:
        await authorise(self._registry, request.job, context)
        job = self._registry.get(request.job)
        job.check_epoch(request.epoch)
        rounds.hear_outcome(job, messages.outcome_from(request))
        return pb.OutcomeReply()


def merge_signals(ours: pb.JobStatus, theirs: pb.JobStatus) -> None:
    """Adds the signals that another daemon of the job sees.

    The gravest signal of each node counts. Not every daemon watches every node.
    """
    seen = {each.node_id: each for each in ours.signals}
    for each in theirs.signals:
        if each.node_id not in seen:
            ours.signals.append(each)
        elif each.signal > seen[each.node_id].signal:
            seen[each.node_id].CopyFrom(each)


def merge_end(ours: pb.JobStatus, theirs: pb.JobStatus) -> None:
    """Takes over the end of the last trainer on another daemon, if that was later."""
    if theirs.HasField("ended_s") and (not ours.HasField("ended_s") or theirs.ended_s < ours.ended_s):
        ours.ended_s = theirs.ended_s


def _check_sizes(request: pb.LeaseRequest) -> None:
    """Raises ConfigError for sizes that no trainer requests.

    Whether valid sizes fit is checked later, before memory is touched.
    """
    if request.slots > local_socket.DESCRIPTORS_MAX or request.table_bytes > TABLE_MAX:
        raise ConfigError(
            f"{request.slots} slots with a table of {request.table_bytes} bytes were requested; "
            f"at most {local_socket.DESCRIPTORS_MAX} slots and {TABLE_MAX} bytes are allowed."
        )
    if request.records > RECORD_SLOTS_MAX or (request.records and request.slots):
        raise ConfigError(
            f"{request.records} record slots were requested beside {request.slots} slots; a request is for at most "
            f"{RECORD_SLOTS_MAX} record slots alone."
        )
    if (request.slots or request.records) and (request.chunk_bytes < PAGE or request.chunk_bytes % PAGE):
        raise ConfigError(
            f"chunks of {request.chunk_bytes} bytes were requested; the size must be a multiple of {PAGE}."
        )


def _other_job(job: JobRecord) -> pb.OtherJob:
    manifest = job.record.manifest
    sealed_sets = [set(sealed_versions(job.id, job.slots.of_rank(rank))) for rank in job.ranks]
    newest = max(set.intersection(*sealed_sets) if sealed_sets else set(), key=lambda v: v.order, default=None)
    other_job = pb.OtherJob(
        job=job.id, named=manifest.named, script=manifest.script, age_s=time.monotonic() - job.ended_s
    )
    if newest and not job.is_live:
        other_job.newest.CopyFrom(messages.version_to(newest))
    return other_job


def _status(job: JobRecord, node: str, kept_s: float) -> pb.JobStatus:
    manifest = job.record.manifest
    status = pb.JobStatus(
        job=job.id, named=manifest.named, world=manifest.world, whole=job.round.outcome.whole if job.round else -1,
        backing=job.slots.backing, up_s=time.monotonic() - job.since_s, script=manifest.script,
        every=(job.round.outcome.interval.every if job.round else 0) or manifest.every,
        ranks=[_rank_status(job, rank, node) for rank in job.ranks],
        degraded=job.degraded.is_degraded, degraded_s=job.degraded.seconds,
        mismatched=sorted(job.round.outcome.mismatched) if job.round else [],
        held_bytes=job.held_bytes, peak_bytes=job.peak_bytes,
    )  # fmt: skip
    if not job.is_live:
        status.kept_s = kept_s
        if job.has_seen_end:
            status.ended_s = time.monotonic() - job.ended_s
    if job.record.HasField("decision"):
        status.epoch.CopyFrom(job.record.decision.epoch)
        if job.record.decision.HasField("base"):
            status.base.CopyFrom(job.record.decision.base)
    return status


def _rank_status(job: JobRecord, rank: int, node: str) -> pb.RankStatus:
    lease = job.leases.get(rank)
    sealed = sealed_versions(job.id, job.slots.of_rank(rank))
    status = pb.RankStatus(
        rank=rank,
        node=node,
        step=lease.step if lease else -1,
        bytes=sum(slot.file_bytes for slot in job.slots.of_rank(rank)),
        slots=len(job.slots.current_of_rank(rank)),
        wanted_slots=job.wanted_slots(rank),
    )
    if lease:
        status.alive, status.closed = lease.watch is not None, lease.closed
        status.trouble, status.pid = lease.trouble, lease.process.pid
    damaged = [slot.damaged for slot in job.slots.of_rank(rank) if slot.damaged and not header_of(job.id, slot)]
    if damaged and not status.trouble:
        newest = max(damaged, key=lambda version: version.order)
        status.trouble = f"{newest} has changed in memory on this node, and counts as lost here."
    if sealed:
        status.sealed.CopyFrom(messages.version_to(sealed[-1]))
        status.sealed_age_s = time.monotonic() - job.sealed_s.get(rank, job.since_s)
    return status
