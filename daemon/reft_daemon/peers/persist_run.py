"""One checkpoint, at its coordinator: all nodes write, then the manifest completes it.

    Persist, each POLL_S ─► node: digest of its index ─► written
                                  an error ────────────► another attempt of it, ATTEMPTS in all
                                  silent for SILENCE_S ► given up
    all are written ─► MANIFEST
    a node failed too often, or is given up ─► what the others have written is removed

A lost question or answer is asked again. Attempts of an epoch grow, so a node tells late ones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import Final

import grpc

from reft.core.commit.version import Version
from reft.errors import ReftError
from reft.failpoints import Failpoints
from reft.wire import messages
from reft.wire import stored_format as stored
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.peers.channels import PeerChannels, reason_of
from reft_daemon.persist.node_writer import NodeWriter
from reft_daemon.persist.persister import Persister, StorageFailed

log = logging.getLogger("reft.daemon")
POLL_S: Final = 2.0  # between two questions to a node; the first ones come sooner
POLL_MIN_S: Final = 0.05
SILENCE_S: Final = 60.0  # of a node, until it is given up
ATTEMPTS: Final = 3  # of one node and checkpoint
CALL_S: Final = 10.0
_SILENT: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass
class PersistRun:
    """One checkpoint under way, or the last complete one.

    Args:
        job: the job.
        version: the version.
        attempt: the first one of each node.
        writer: writes this node's part.
        peers: channels to the other nodes.

    Attributes:
        began_s: when it began.
        moved_s: when a node last said that storage has taken something.
        replies: node → its newest reply.
        record: manifest and decision of the version.
        has_failed: whether not all nodes have written. Then no manifest names these attempts.
    """

    job: JobRecord
    version: Version
    attempt: int
    writer: NodeWriter
    peers: PeerChannels
    began_s: float = field(default_factory=time.monotonic)
    moved_s: float = field(init=False)
    replies: dict[int, pb.PersistReply] = field(default_factory=dict)
    record: pb.JobRecord = field(init=False)
    has_failed: bool = False

    def __post_init__(self) -> None:
        self.record = self.job.record  # an attach replaces the job's record by another one
        self.moved_s = self.began_s

    @property
    def written_bytes(self) -> int:
        return sum(reply.written_bytes for reply in self.replies.values())

    @property
    def total_bytes(self) -> int:
        return sum(reply.total_bytes for reply in self.replies.values())

    async def write(self) -> list[stored.StoredNode]:
        """Returns what all nodes have written.

        Raises:
            StorageFailed: a node has failed too often, or is silent.
        """
        count = len(self.record.manifest.nodes)
        tasks = [asyncio.ensure_future(self._write_on(index)) for index in range(count)]
        try:
            return list(await asyncio.gather(*tasks))
        except StorageFailed:
            self.has_failed = True
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _write_on(self, index: int) -> stored.StoredNode:
        job, attempt = self.job, self.attempt
        manifest = self.record.manifest
        node, heard_s, pause_s = manifest.nodes[index], time.monotonic(), POLL_MIN_S
        while True:
            request = pb.PersistRequest(
                job=job.id, epoch=self.record.decision.epoch, version=messages.version_to(self.version),
                lineage=manifest.lineage, attempt=attempt,
            )  # fmt: skip
            try:
                reply = await self._ask(index, request)
            except (grpc.RpcError, OSError, ReftError) as error:
                if isinstance(error, grpc.RpcError) and error.code() not in _SILENT:
                    raise StorageFailed(f"node {node.name} does not write: {reason_of(error)}.") from error
                if time.monotonic() - heard_s > SILENCE_S:
                    raise StorageFailed(
                        f"node {node.name} is silent for {SILENCE_S:g} s: {reason_of(error)}."
                    ) from error
                await asyncio.sleep(POLL_S)
                continue
            heard_s = time.monotonic()
            self._note(index, reply, heard_s)
            if reply.index_digest:
                return stored.StoredNode(index, attempt, reply.index_digest)
            if reply.error:
                attempt += 1
                if attempt == self.attempt + ATTEMPTS:
                    raise StorageFailed(f"node {node.name}: {reply.error}")
                log.warning("job=%s node=%s %s is written again: %s", job.id, node.name, self.version, reply.error)
                pause_s = POLL_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)

    def _note(self, index: int, reply: pb.PersistReply, now_s: float) -> None:
        before = self.replies.get(index)
        if before is None or before != reply:
            self.moved_s = now_s
        self.replies[index] = reply

    async def _ask(self, index: int, request: pb.PersistRequest) -> pb.PersistReply:
        if index == self.record.node_index:
            self.job.check_epoch(request.epoch)
            return await self.writer.persist(self.job, request)
        node, tokens = self.record.manifest.nodes[index], messages.known_tokens(self.record.manifest)
        reply = await self.peers.call(node, tokens, pb_grpc.PeerStub, "Persist", request, CALL_S, reconnect=True)
        assert isinstance(reply, pb.PersistReply)
        return reply

    async def discard(self, persister: Persister) -> None:
        """Removes what nodes have written, after a failure. Else each one takes room for a day.

        Raises:
            StorageFailed: storage does not answer.
        """
        self.writer.drop(self.job.id)
        attempts = range(self.attempt, self.attempt + ATTEMPTS)
        await persister.discard(self.job.id, self.record.manifest.lineage, self.version, attempts)

    async def commit(self, persister: Persister, nodes: list[stored.StoredNode], failpoints: Failpoints) -> None:
        """Completes the checkpoint.

        Args:
            persister: of this daemon.
            nodes: what they have written.
            failpoints: let tests end this daemon before.

        Raises:
            StorageFailed: it is not complete.
        """
        version = self.version
        failpoints.hit("persist.commit", step=version.step, epoch=version.epoch.counter)
        manifest = pb.Manifest()
        manifest.CopyFrom(self.record.manifest)
        for secret in ("token", "earlier_tokens"):
            manifest.ClearField(secret)
        await persister.commit(
            stored.StoredManifest(
                version, manifest.job, manifest.lineage, secrets.token_hex(16), manifest.SerializeToString(),
                self.record.decision.SerializeToString(), tuple(nodes),
            ),
            messages.decision_from(self.record.decision),
        )  # fmt: skip
