"""Replicates the round between daemons: one sender task per tree neighbour and per holder of a job.

A sender task keeps no queue. It only knows that something has changed, and sends the present state:

* to the parent: the report of this node's subtree;
* to a child: the outcome;
* to a holder: the capsules of this node's ranks that the holder lacks.

What a neighbour has acknowledged is not sent again. So a slow or dead neighbour costs one message,
however long it is away. The message is tried again every RETRY_S until it is acknowledged, or out
of date.

A restarted daemon has forgotten what it acknowledged. So a child asks its parent by Gather once at
its start, also without news: its slots may be memfds, which trainers have not given back yet. To
the parent, the report is repeated every RETRY_S as long as some step is undecided.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable

import grpc
from google.protobuf.message import Message

from reft.core.commit.round import Outcome, children_of, parent_of
from reft.errors import AttachError, ReftError, split_remedy
from reft.failpoints import Failpoints, InjectedFault
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.jobs import capsules, rounds
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.peers.channels import PeerChannels, is_cut_off, reason_of

log = logging.getLogger("reft.daemon")
DEADLINE_S = 1.0
KEEP_DEADLINE_S = 5.0  # seconds; a full message takes 1.4 s at 100 Mbit/s
# At attach, for each message: a holder that is only slow, or cut off, would burn a restart of the
# job.
SECURE_DEADLINE_S = 30.0
RETRY_S = 0.3
Send = Callable[[pb.Node], Awaitable[None]]


class RoundReplicator:
    """The sender tasks of one job in one epoch.

    Args:
        job: the job of the round.
        peers: channels to the other daemons.
        failpoints: let tests drop messages.
    """

    def __init__(self, job: JobRecord, peers: PeerChannels, failpoints: Failpoints) -> None:
        self._job = job
        self._peers = peers
        self._failpoints = failpoints
        self._epoch = job.epoch
        # child → the newest outcome that the child has acknowledged
        self._acknowledged_outcomes: dict[int, Outcome] = {}
        # the report that the parent acknowledged within the last RETRY_S
        self._acknowledged_report = pb.GatherRequest()
        self._has_heard_parent = False
        self._change_events: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []
        manifest, index = job.record.manifest, job.record.node_index
        parent = parent_of(index)
        if parent is not None:
            self._start_sender(parent, "answer in the round", self._send_report)
        for child in children_of(index, len(manifest.nodes)):
            self._start_sender(child, "answer in the round", functools.partial(self._send_outcome, child))
        for holder in job.record.holders:
            self._start_sender(holder, "keep our capsules", functools.partial(self._send_capsules, holder))

    def _start_sender(self, neighbour: int, duty: str, send: Send) -> None:
        has_changed = asyncio.Event()
        self._change_events.append(has_changed)
        node = self._job.record.manifest.nodes[neighbour]
        self._tasks.append(asyncio.ensure_future(self._send_changes(node, has_changed, duty, send)))

    def wake(self) -> None:
        """Starts the sender tasks: something has changed."""
        for dirty in self._change_events:
            dirty.set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _send_changes(self, node: pb.Node, has_changed: asyncio.Event, duty: str, send: Send) -> None:
        is_reachable = True
        while True:
            await has_changed.wait()
            has_changed.clear()
            try:
                await send(node)
            except Exception as error:  # a bug must not end this sender: no further step would become whole
                if is_reachable:
                    bug = None if isinstance(error, grpc.RpcError | OSError | ReftError) else error
                    reason = reason_of(error) or repr(error)
                    log.warning("job=%s node=%s does not %s: %s", self._job.id, node.name, duty, reason, exc_info=bug)
                is_reachable = False
                has_changed.set()
                await asyncio.sleep(RETRY_S)
            else:
                is_reachable = True

    async def _send_outcome(self, child: int, node: pb.Node) -> None:
        """Sends a child the outcome, unless the child has acknowledged it already.

        The news of each child wakes the sender tasks of all other children, too.
        """
        job = self._job
        if job.round is None or self._failpoints.hit("round.send"):
            return
        outcome = job.round.outcome
        if outcome != self._acknowledged_outcomes.get(child, Outcome()):
            await self._call(node, "Announce", messages.outcome_to(job.id, job.epoch, outcome))
            self._acknowledged_outcomes[child] = outcome

    async def _send_report(self, node: pb.Node) -> None:
        job = self._job
        if job.round is None or self._failpoints.hit("round.send"):
            return
        request = pb.GatherRequest(
            job=job.id,
            epoch=messages.epoch_to(job.epoch),
            node_index=job.record.node_index,
            steps=messages.report_to(job.round.report(), job.round.digests()),
            mismatched=sorted(job.round.outcome.mismatched),
            requested_every=job.round.requested_every,
            layout=messages.layout_report_to(job.round.layout),
            guard=messages.guard_report_to(job.round.guard.report(job.round.outcome.pins)),
        )
        if (job.round.has_news or not self._has_heard_parent) and request != self._acknowledged_report:
            reply = await self._call(node, "Gather", request)
            self._acknowledged_report, self._has_heard_parent = request, True
            asyncio.get_running_loop().call_later(RETRY_S, self._repeat_report, request)
            rounds.hear_outcome(job, messages.outcome_from(reply))  # type: ignore[arg-type]

    def _repeat_report(self, request: pb.GatherRequest) -> None:
        if self._acknowledged_report is request:
            self._acknowledged_report = pb.GatherRequest()
            self.wake()

    async def _send_capsules(self, holder: int, node: pb.Node) -> None:
        """Sends the holder the capsules that it lacks, message by message, until it lacks none."""
        job = self._job
        while records := capsules.capsules_for(job, holder):
            if self._failpoints.hit("capsules.send"):
                raise InjectedFault("the capsules were dropped")
            epoch, outcome = messages.epoch_to(self._epoch), job.round.outcome if job.round else Outcome()
            outcome_message = messages.outcome_to(job.id, self._epoch, outcome)
            request = pb.KeepRequest(job=job.id, epoch=epoch, capsules=records, outcome=outcome_message)
            await self._call(node, "Keep", request, KEEP_DEADLINE_S)
            capsules.note_kept(job, holder, self._epoch, records)

    async def _call(self, node: pb.Node, method: str, request: Message, deadline_s: float = DEADLINE_S) -> object:
        tokens = messages.known_tokens(self._job.record.manifest)
        return await self._peers.call(node, tokens, pb_grpc.PeerStub, method, request, deadline_s)


async def send_base_again(job: JobRecord, peers: PeerChannels) -> None:
    """Sends the capsules of the decision's base and guard to this node's holders.

    Returns once the holders keep them.

    Args:
        job: the job.
        peers: channels to the other daemons.

    Raises:
        AttachError: a holder does not accept them.
    """
    if not job.record.holders:
        return
    decision, epoch = messages.decision_from(job.record.decision), messages.epoch_to(job.epoch)
    kept = {version for version in (decision.base, decision.guard) if version is not None}
    slots = job.slots.all.values()
    batches = [batch for version in kept for batch in job.capsule_replication.batches_of_version(slots, version)]
    nodes, tokens, stub = job.record.manifest.nodes, messages.known_tokens(job.record.manifest), pb_grpc.PeerStub

    async def keep_at(node: pb.Node, keep: pb.KeepRequest) -> None:
        end_s = time.monotonic() + SECURE_DEADLINE_S
        while True:
            left_s = end_s - time.monotonic()
            try:
                await peers.call(node, tokens, stub, "Keep", keep, left_s, reconnect=True)
                return
            except grpc.RpcError as error:
                if not is_cut_off(error) or left_s <= RETRY_S:
                    raise
            await asyncio.sleep(RETRY_S)

    async def send_to(holder: int) -> None:
        for records in batches:
            try:
                await keep_at(nodes[holder], pb.KeepRequest(job=job.id, epoch=epoch, capsules=records))
            except (grpc.RpcError, OSError) as error:
                reason, remedy = split_remedy(reason_of(error))
                raise AttachError(
                    f"node {nodes[holder].name} does not keep the capsules of {decision.base}: {reason}",
                    remedy or "check the daemon of that node, and the network to it",
                ) from error

    await asyncio.gather(*(send_to(holder) for holder in job.record.holders))
