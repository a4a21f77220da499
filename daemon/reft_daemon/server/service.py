"""The daemon's gRPC services: what is done for calls that `judge.py` has admitted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2

from reft.core.membership.job_identity import check_name
from reft.core.recovery.survey_timeout import WHOLE_S, survey_timeout_s
from reft.errors import AttachError, ConfigError, ReftError
from reft.log_lines import audit
from reft.wire import messages
from reft.wire.proof import CERTIFIED
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon import __version__
from reft_daemon.arena.headers import header_messages, header_of, sealed_versions
from reft_daemon.jobs import capsules, rounds, slot_reads, trainers
from reft_daemon.jobs.inventory import fill_inventory
from reft_daemon.jobs.job_record import UNKNOWN, JobRecord, whole_words
from reft_daemon.jobs.leases import FENCE_DEADLINE_S, caller_process, check_sizes
from reft_daemon.peers.channels import UnprovedReply, call_paced, reason_of, remedy_of
from reft_daemon.peers.survey_dedup import clear_repeats, digests_of, known_fields, known_manifests
from reft_daemon.rebuild.rebuild import Rebuild
from reft_daemon.registry import Registry, living_pids
from reft_daemon.server.judge import AdmittedCall, CallRefused
from reft_daemon.server.status_merge import merge_signals, merge_status, name_ranks, node_names

STATUS_DEADLINE_S = 1.0
REBUILD_DEADLINE_S = 3600.0  # for a forwarded rebuild: time enough to read a node's memory
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
R = TypeVar("R", pb.ReadRequest, pb.CapsuleRequest)


@dataclass(frozen=True)
class DaemonIdentity:
    """This daemon as other processes see it."""

    node: str
    domain: str
    addresses: tuple[str, ...]
    local_socket: str
    limit_bytes: int
    tls: bool
    unattended: bool


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
        if error.code() in _SILENT:
            raise _unreachable(node, error) from error
        raise slot_reads.UnreadableSlot(error.code(), f"node {node.name}: {reason_of(error)}") from error
    except OSError as error:
        raise _unreachable(node, error) from error


@contextlib.contextmanager
def _naming_coordinator(job: JobRecord) -> Iterator[None]:
    """Names the coordinator's node in the errors of calls that were passed on.

    Its silence travels as AttachError: else the caller would take this daemon for silent.

    Raises:
        AttachError: the coordinator can't be reached, such as at a socket that was removed.
        CallRefused: it has refused the call.
    """
    node = job.record.manifest.nodes[0]
    try:
        yield
    except grpc.RpcError as error:
        if error.code() in _SILENT:
            raise _unreachable(node, error) from error
        raise CallRefused(error.code(), f"node {node.name}: {reason_of(error)}") from error
    except (ConnectionError, FileNotFoundError, PermissionError) as error:  # others are of this daemon
        raise _unreachable(node, error) from error


def _unreachable(node: pb.Node, error: BaseException) -> AttachError:
    reason = reason_of(error).rstrip(".")
    return AttachError(f"node {node.name} can't be reached: {reason}.", remedy_of(error))


def _refuse_passing_on(job: JobRecord, call: AdmittedCall) -> None:
    """Raises CallRefused for a call of another node that only the coordinator can answer."""
    if not call.is_local and job.round is not None and job.round.index != 0:
        text = "calls over TCP are not passed on, and this node is not the coordinator of the job"
        raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, text)


class HealthService:
    """Answers the probes of Kubernetes, and of others who know gRPC's health service."""

    async def Check(self, request: health_pb2.HealthCheckRequest, call: AdmittedCall) -> health_pb2.HealthCheckResponse:
        if request.service:
            raise CallRefused(grpc.StatusCode.NOT_FOUND, f"this daemon has no health of a service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class DaemonService(pb_grpc.DaemonServicer):
    """The calls of trainers and of the CLI.

    Args:
        registry: the jobs of this daemon.
        identity: of this daemon.
        refused: returns what was refused at the doors, at a time of the monotonic clock.
    """

    def __init__(
        self, registry: Registry, identity: DaemonIdentity, refused: Callable[[float], pb.RefusedStatus]
    ) -> None:
        self._registry = registry
        self._identity = identity
        self._refused = refused
        self._rebuilding = asyncio.Lock()  # one rebuild at a time: each takes much memory

    async def Hello(self, request: pb.HelloRequest, call: AdmittedCall) -> pb.HelloReply:
        reply = pb.HelloReply(protocol=messages.PROTOCOL, oldest=messages.OLDEST, node_id=self._registry.arena.node_id)
        if not call.is_local:
            return reply
        messages.check_protocol(request.protocol, request.oldest, "you speak", f"this daemon (reft {__version__})")
        if request.agent_pid:
            self._registry.keep_for_agent(request.agent_pid)
        if request.job:
            self._registry.restart_idle_time()
        identity, job = self._identity, self._registry.jobs.get(request.job)
        job_token = self._registry.heartbeat_service.monitors.job_token(request.launch)
        reply.MergeFrom(
            pb.HelloReply(
                node=identity.node, addresses=identity.addresses, version=__version__, pid=os.getpid(),
                domain=identity.domain, local_socket=identity.local_socket,
                held=job is not None and job.record.had_whole, tls=identity.tls, unattended=identity.unattended,
                persists=self._registry.persists.settings is not None, job_token=job_token,
            )
        )  # fmt: skip
        return reply

    async def Inventory(self, request: pb.InventoryRequest, call: AdmittedCall) -> pb.InventoryReply:
        # A token admits to one job. Names and scripts of other jobs are only for callers that can
        # open the socket.
        others = [_other_job(job) for job in self._registry.jobs.values() if job.id != request.job and call.is_local]
        reply = pb.InventoryReply(others=others, node=self._identity.node, node_id=self._registry.arena.node_id)
        reply.known.extend(self._registry.known_steps(request.job, self._identity.node))
        reply.slots.extend(
            header_messages(request.job, self._registry.persists.reader.opened.get(request.job, {}).values())
        )
        self._registry.arena.job_files.refuse_damaged(request.job)
        job = self._registry.jobs.get(request.job)
        if job is None:
            reply.room_bytes = self._registry.arena.room_bytes()
            return reply
        if request.end_orphans:
            await trainers.end_orphans(job, request.launch, request.pids, str(call.caller))
            await self._registry.turns.hold(job)
        reply.room_bytes = self._registry.arena.room_bytes() + job.held_bytes
        fill_inventory(reply, job, known_fields(job.record, request.known))
        return reply

    async def Survey(self, request: pb.SurveyRequest, call: AdmittedCall) -> bytes:
        """Returns the bytes of a SurveyReply.

        Each node's part is made when the node has answered: the slots of a hundred thousand ranks
        have tens of megabytes. In protobuf, parts of a message one after the other are the message.
        """
        record = self._registry.get(request.job).record
        heartbeat_service, has_round = self._registry.heartbeat_service, request.HasField("round")
        given_up_s = (
            heartbeat_service.monitors.given_up_s(request.job, request.launch, request.round) if has_round else {}
        )
        tokens, digests, known = self._tokens(request), digests_of(record), known_manifests(record)

        async def ask(node: pb.Node) -> bytes:
            patience_s = survey_timeout_s(given_up_s.get(node.id), request.again)
            surveyed = await self._survey(node, tokens, request, digests, patience_s)
            clear_repeats(known, surveyed.reply)
            return pb.SurveyReply(nodes=[surveyed]).SerializeToString()

        return b"".join(await call_paced(ask, request.nodes))

    async def _survey(
        self, node: pb.Node, tokens: Sequence[bytes], request: pb.SurveyRequest, known: list[int], wait_s: float
    ) -> pb.SurveyedNode:
        """Returns one node's inventory, or the reason why there is none.

        A node that answers gets further time to end its orphans.
        """
        inventory = pb.InventoryRequest(job=request.job, launch=request.launch, known=known)
        surveyed = await self._request_inventory(node, tokens, inventory, wait_s)
        surveyed.brief = not request.again and wait_s < WHOLE_S
        if not request.end_orphans or not surveyed.HasField("reply"):
            return surveyed
        inventory.end_orphans = True
        return await self._request_inventory(node, tokens, inventory, FENCE_DEADLINE_S + WHOLE_S)

    async def _request_inventory(
        self, node: pb.Node, tokens: Sequence[bytes], inventory: pb.InventoryRequest, deadline_s: float
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
            node, tokens, pb_grpc.DaemonStub, "Inventory", inventory, share_s, reconnect=True
        )
        try:
            reply = await asyncio.wait_for(call, deadline_s)
        except (grpc.RpcError, OSError, asyncio.TimeoutError, ReftError) as error:
            return pb.SurveyedNode(node=node, trouble=reason_of(error))
        return pb.SurveyedNode(node=node, reply=reply)  # type: ignore[arg-type]

    async def Stored(self, request: pb.StoredRequest, call: AdmittedCall) -> pb.StoredReply:
        self._registry.restart_idle_time()
        return await self._registry.persists.reader.stored(request)

    async def OpenStored(self, request: pb.OpenStoredRequest, call: AdmittedCall) -> pb.OpenStoredReply:
        return await self._registry.open_stored(request)

    async def FetchCapsule(self, request: pb.CapsuleRequest, call: AdmittedCall) -> pb.CapsuleRecord:
        if request.HasField("node"):
            node, passed, tokens = self._forwarded_request(request)
            with _naming_node(node):
                return await self._registry.peers.call(  # type: ignore[return-value]
                    node, tokens, pb_grpc.DaemonStub, "FetchCapsule", passed, call.left_s
                )
        version = messages.version_from(request.version)
        if record := self._registry.persists.reader.capsule(request.job, request.rank, version):
            return record
        record = capsules.capsule(self._registry.get(request.job), request.rank, version)
        if record is None:
            message = f"no capsule of rank {request.rank}, {version}, of job {request.job} here"
            raise CallRefused(grpc.StatusCode.NOT_FOUND, message)
        return record

    async def Pin(self, request: pb.PinRequest, call: AdmittedCall) -> pb.PinReply:
        whole = rounds.pin(self._registry.get(request.job), request)
        return pb.PinReply(whole=whole.step if whole else None)

    async def Decide(self, request: pb.DecideRequest, call: AdmittedCall) -> pb.DecideReply:
        if request.HasField("node"):
            if not request.goes_back:
                raise ConfigError("only a decision to go back is passed on; attach decides on each node.")
            node, tokens, passed = request.node, messages.known_tokens(request.manifest), pb.DecideRequest()
            passed.CopyFrom(request)
            passed.ClearField("node")
            with _naming_node(node):
                return await self._registry.peers.call(  # type: ignore[return-value]
                    node, tokens, pb_grpc.PeerStub, "GoBack", passed, call.left_s
                )
        await self._registry.decide(request)
        return pb.DecideReply()

    async def StoreDecision(self, request: pb.StoreDecisionRequest, call: AdmittedCall) -> pb.StoreDecisionReply:
        messages.check_decision(check_name(request.job), request.decision)
        decision = messages.decision_from(request.decision)
        await self._registry.persists.reader.store_decision(request.job, request.lineage, decision)
        return pb.StoreDecisionReply()

    async def Lease(self, request: pb.LeaseRequest, call: AdmittedCall) -> pb.LeaseReply:
        check_sizes(request)
        slots = await self._registry.lease(request, caller_process(call.caller.pid, call.caller.start))
        leased = [pb.LeasedSlot(name=slot.name, file_bytes=slot.file_bytes) for slot in slots]
        return pb.LeaseReply(slots=leased, backing=self._registry.get(request.job).slots.backing)

    async def Secure(self, request: pb.SecureRequest, call: AdmittedCall) -> pb.SecureReply:
        await self._registry.secure(request)
        return pb.SecureReply()

    async def Release(self, request: pb.ReleaseRequest, call: AdmittedCall) -> pb.ReleaseReply:
        self._registry.release(request, call.caller.pid)
        return pb.ReleaseReply()

    async def Read(self, request: pb.ReadRequest, call: AdmittedCall) -> AsyncIterator[pb.Chunk]:
        """Yields bytes of a sealed slot, for a rank that now runs on another node."""
        if not request.HasField("node"):
            async for data in slot_reads.read(self._registry.jobs.get(request.job), request):
                yield pb.Chunk(data=data)
            return
        node, passed, tokens = self._forwarded_request(request)
        pieces = self._registry.peers.pieces(node, tokens, passed, call.left_s)
        with _naming_node(node):
            async with contextlib.aclosing(pieces):
                async for data in pieces:
                    yield pb.Chunk(data=data)

    def _forwarded_request(self, request: R) -> tuple[pb.Node, R, list[bytes]]:
        """Returns the node to ask, the request for it, and the job's tokens.

        Daemons have certificates and know each other's addresses. A trainer needs neither, because
        its own daemon forwards the call.
        """
        forwarded = type(request)()
        forwarded.CopyFrom(request)
        forwarded.ClearField("node")
        forwarded.ClearField("tokens")
        return request.node, forwarded, self._tokens(request)

    def _tokens(self, request: pb.SurveyRequest | pb.ReadRequest | pb.CapsuleRequest) -> list[bytes]:
        """Returns the tokens for calls to nodes of a job: this daemon's, then the caller's."""
        known = messages.known_tokens(self._registry.get(request.job).record.manifest)
        return list(dict.fromkeys((*known, *request.tokens)))

    async def Rebuild(self, request: pb.RebuildRequest, call: AdmittedCall) -> pb.RebuildReply:
        if request.HasField("onto") and not self._registry.peers.is_own(request.onto):
            return await self._forward_rebuild(request)
        async with self._rebuilding:
            return await Rebuild(self._registry, request).run()

    async def _forward_rebuild(self, request: pb.RebuildRequest) -> pb.RebuildReply:
        """Forwards the request to the daemon that is to rebuild.

        Only daemons may be able to reach that daemon.
        """
        job = self._registry.get(request.manifest.job)
        slot_reads.refuse_living(job)
        forwarded = pb.RebuildRequest()
        forwarded.CopyFrom(request)
        forwarded.ClearField("onto")
        onto = request.onto
        try:
            reply = await self._registry.peers.call(
                onto, self._rebuild_tokens(job), pb_grpc.DaemonStub, "Rebuild", forwarded, REBUILD_DEADLINE_S
            )
        except UnprovedReply as error:
            raise AttachError(
                f"the daemon at {onto.addresses[0]} does not hold job {job.id}, and takes no job from this node: "
                f"{reason_of(error)}",
                f"run reft-cli recover {job.id} on that node, or give the daemons certificates",
            ) from error
        except grpc.RpcError as error:
            if error.code() in _SILENT:
                raise AttachError(
                    f"the daemon at {onto.addresses[0]} can't be reached: {reason_of(error).rstrip('.')}.",
                    "start it, or correct --onto",
                ) from error
            raise CallRefused(error.code(), f"daemon {onto.addresses[0]}: {error.details()}") from error
        return reply  # type: ignore[return-value]

    def _rebuild_tokens(self, job: JobRecord) -> list[bytes]:
        """Returns what may admit this daemon to one that is to rebuild a job.

        The other daemon may hold the job, may know it from its agent, or may know only this user.
        """
        agents_tokens = self._registry.heartbeat_service.monitors.tokens(job.id)
        certified = [CERTIFIED] if self._identity.tls else []
        return list(dict.fromkeys([*messages.known_tokens(job.record.manifest), *agents_tokens, *certified]))

    async def Status(self, request: pb.StatusRequest, call: AdmittedCall) -> pb.StatusReply:
        registry, beats = self._registry, self._registry.heartbeat_service.sender
        damaged = [each for each in registry.arena.job_files.damaged.values() if request.job in ("", each.job)]
        if request.job and not damaged:
            registry.get(request.job)
        jobs = [job for job in registry.jobs.values() if not request.job or job.id == request.job]
        reply = pb.StatusReply(
            jobs=[
                _status(
                    job,
                    self._identity.node,
                    registry.ttl_s.left_s(job, registry.heartbeat_service.monitors.agent_of(job.id)),
                )
                for job in jobs
            ]
        )
        for job, each in zip(jobs, reply.jobs, strict=True):
            if exchange := registry.turns.status(job):
                each.exchange.CopyFrom(exchange)
            if storage := registry.persists.status(job):
                each.storage.CopyFrom(storage)
        for each in reply.jobs:
            each.signals.extend(await registry.heartbeat_service.status(each.job, is_brief=not call.is_local))
        if request.deep:
            # The smallest job first: its call says whether a node answers.
            pairs = sorted(zip(jobs, reply.jobs, strict=True), key=lambda pair: pair[0].record.manifest.world)
            silent: dict[tuple[str, ...], asyncio.Future[bool]] = {}
            await asyncio.gather(*(self._ask_peers(job, status, silent) for job, status in pairs))
        own = pb.StatusReply(
            node=self._identity.node, node_id=registry.arena.node_id, version=__version__, pid=os.getpid(),
            held_bytes=registry.arena.held_bytes, limit_bytes=self._identity.limit_bytes,
            directory=str(registry.arena.folder), domain=self._identity.domain,
            round_bytes_sent=registry.peers.sent["Gather"] + registry.peers.sent["Announce"],
            capsule_bytes_sent=registry.peers.sent["Keep"],
            beat_bytes_sent=beats.peers.sent["Beat"], beats_sent=beats.beats_sent,
            spare_bytes=registry.arena.pool.bytes, spare_limit_bytes=registry.arena.pool.want.bytes,
            scrubbed_bytes=registry.scrubbed.read_bytes, damaged_slots=registry.scrubbed.damaged,
            repaired_slots=registry.scrubbed.repaired, agents=living_pids(registry.agents),
            damaged=[
                pb.DamagedJob(job=each.job, reason=each.reason, held_bytes=each.held_bytes, slots=each.slots)
                for each in damaged if call.is_local
            ],
            refused=self._refused(time.monotonic()) if call.is_local else None,
        )  # fmt: skip
        reply.MergeFrom(own)
        return reply

    async def _ask_peers(
        self, job: JobRecord, status: pb.JobStatus, silent: dict[tuple[str, ...], asyncio.Future[bool]]
    ) -> None:
        """Adds the status of the job's other daemons; names those that don't answer.

        Args:
            job: the job.
            status: of the job, as this daemon knows it.
            silent: id and addresses of each node that was asked → whether the node is silent. One
                job asks first: a lost node would else cost 200 jobs a call each, to its deadline.
        """
        manifest = job.record.manifest
        names = node_names(manifest)
        name_ranks(status, names.get(self._registry.arena.node_id, ""))
        await asyncio.sleep(0)
        others = [node for i, node in enumerate(manifest.nodes) if i != job.record.node_index]
        request, tokens = pb.StatusRequest(job=job.id), messages.known_tokens(manifest)
        gravest = {each.node_id: each for each in status.signals}

        async def ask(node: pb.Node) -> pb.JobStatus | None:
            key, is_silent = (node.id, *node.addresses), False
            is_known = key in silent
            first = silent.setdefault(key, asyncio.get_running_loop().create_future())
            if is_known and await asyncio.shield(first):
                return None
            call = self._registry.peers.call(node, tokens, pb_grpc.DaemonStub, "Status", request, STATUS_DEADLINE_S)
            try:
                reply: pb.StatusReply = await call  # type: ignore[assignment]
            except (grpc.RpcError, OSError, asyncio.TimeoutError, ReftError) as error:
                # a daemon that answers knows each job by itself
                is_silent = isinstance(error, grpc.RpcError) and error.code() in _SILENT
                is_silent &= not isinstance(error, UnprovedReply)
                return None
            finally:
                if not first.done():
                    first.set_result(is_silent)
            if not reply.jobs:
                return None
            merge_signals(gravest, reply.jobs[0].signals)
            return reply.jobs[0]

        for node, theirs in zip(others, await call_paced(ask, others), strict=True):
            if theirs is None:
                status.silent_nodes.append(names[node.id])
            else:
                name_ranks(theirs, names[node.id])
                merge_status(status, theirs)
                await asyncio.sleep(0)  # other calls go on between thousands of nodes
        for node_id, each in gravest.items():
            each.node = names.get(node_id, each.node)
        signals = list(gravest.values())
        del status.signals[:]
        status.signals.extend(signals)
        await asyncio.sleep(0)  # what follows is one slice: the reply's bytes

    async def AgentBeat(self, request: pb.AgentBeatRequest, call: AdmittedCall) -> pb.AgentBeatReply:
        return self._registry.heartbeat_service.agent_beat(request)

    async def Signals(self, request: pb.SignalsRequest, call: AdmittedCall) -> pb.SignalsReply:
        return await self._registry.heartbeat_service.signals(request)

    async def Purge(self, request: pb.PurgeRequest, call: AdmittedCall) -> pb.PurgeReply:
        whole_step = UNKNOWN
        if request.job not in self._registry.arena.job_files.damaged:
            job = self._registry.get(request.job)
            whole_step = whole_words(job)
            epoch = job.epoch
            if job.is_live:
                raise ConfigError(f"job {job.id} is being trained.", "end its trainers first")
            if not request.memory_only:
                await self._registry.persists.end_lineage(job)
                # storage may take a minute: the slots may belong to a new attach by now
                if self._registry.get(request.job) is not job or job.is_live or job.epoch != epoch:
                    raise ConfigError(
                        f"job {job.id} was started again while its purge waited for storage: its memory here stays.",
                        "end its trainers first, then purge it again",
                    )
        freed_bytes = self._registry.purge(request.job)
        audit("purge", job=request.job, by=call.caller, whole_step=whole_step, freed_bytes=freed_bytes)
        return pb.PurgeReply(freed_bytes=freed_bytes)

    async def PersistJob(self, request: pb.PersistJobRequest, call: AdmittedCall) -> pb.PersistJobReply:
        job = self._registry.get(request.job)
        _refuse_passing_on(job, call)
        with _naming_coordinator(job):
            return await self._registry.persists.request(job, request)

    async def Hold(self, request: pb.HoldRequest, call: AdmittedCall) -> pb.HoldReply:
        job = self._registry.get(request.job)
        _refuse_passing_on(job, call)
        with _naming_coordinator(job):
            return await self._registry.persists.holds.hold(job, request)


class PeerService(pb_grpc.PeerServicer):
    """The calls of other daemons."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Keep(self, request: pb.KeepRequest, call: AdmittedCall) -> pb.KeepReply:
        capsules.keep(self._registry.get(request.job), request)
        return pb.KeepReply()

    async def OpenBulk(self, request: pb.OpenBulkRequest, call: AdmittedCall) -> pb.OpenBulkReply:
        job = self._registry.get(request.job)
        job.check_epoch(request.epoch)
        return await self._registry.turns.open_bulk(job)

    async def Persist(self, request: pb.PersistRequest, call: AdmittedCall) -> pb.PersistReply:
        job = self._registry.get(request.job)
        job.check_epoch(request.epoch)
        return await self._registry.persists.writer.persist(job, request)

    async def GoBack(self, request: pb.DecideRequest, call: AdmittedCall) -> pb.DecideReply:
        """Goes back to an earlier step, as a person on another node has decided."""
        if not request.goes_back:
            raise ConfigError("other nodes may only go back to a step; attach decides at the unix socket.")
        self._registry.get(request.manifest.job)
        await self._registry.decide(request)
        return pb.DecideReply()

    async def Beat(self, request: pb.BeatRequest, call: AdmittedCall) -> pb.BeatReply:
        return self._registry.heartbeat_service.beat(request)

    async def Gather(self, request: pb.GatherRequest, call: AdmittedCall) -> pb.Outcome:
        job = self._registry.get(request.job)
        job.check_epoch(request.epoch)
        try:
            outcome = rounds.hear_node(job, request)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return messages.outcome_to(job.id, job.epoch, outcome)

    async def Announce(self, request: pb.Outcome, call: AdmittedCall) -> pb.OutcomeReply:
        job = self._registry.get(request.job)
        job.check_epoch(request.epoch)
        rounds.hear_outcome(job, messages.outcome_from(request))
        return pb.OutcomeReply()


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
        other_format_slots=len(job.slots.unreadable), other_format_bytes=sum(job.slots.unreadable.values()),
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
        status.alive, status.closed = lease.watch is not None, lease.has_ended_well
        status.trouble, status.pid = lease.trouble, lease.process.pid
    damaged = [slot.damaged for slot in job.slots.of_rank(rank) if slot.damaged and not header_of(job.id, slot)]
    if damaged and not status.trouble:
        newest = max(damaged, key=lambda version: version.order)
        status.trouble = f"{newest} has changed in memory on this node, and counts as lost here."
    if sealed:
        status.sealed.CopyFrom(messages.version_to(sealed[-1]))
        status.sealed_age_s = time.monotonic() - job.sealed_s.get(rank, job.since_s)
    return status
