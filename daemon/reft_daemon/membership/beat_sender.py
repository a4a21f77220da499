"""Sends this daemon's beats, and passes final signals on.

Beats have connections of their own. So they never wait behind megabytes of slots and capsules, and
can be connected anew. A connection that survived a cut link stays silent until TCP tries again,
which may take minutes.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Iterable

import grpc

from reft.core.membership.failure_detector import BEAT_S, MISSES
from reft.errors import ReftError
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.membership.job_monitor import JobMonitor, MembershipView
from reft_daemon.membership.monitors import MonitorRegistry
from reft_daemon.peers.channels import PeerChannels, UnprovedReply, reason_of

log = logging.getLogger("reft.daemon")
NEWS_S = 0.05
DEADLINE_S = BEAT_S * MISSES
UNANSWERED_MAX = 3  # beats to one node that wait for a reply
TIMEOUTS_MAX = 5  # unanswered beats in a row, before the connection is made anew


class BeatSender:
    """Sends beats to other daemons, without waiting for earlier replies.

    Args:
        own: id of this node.
        peers: channels for beats alone.
        monitors: the watched jobs.
    """

    def __init__(self, own: str, peers: PeerChannels, monitors: MonitorRegistry) -> None:
        self._own = own
        self.peers = peers
        self._monitors = monitors
        self._unanswered_beats: collections.Counter[tuple[str, str]] = collections.Counter()
        self._timeouts: collections.Counter[str] = collections.Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs_with_news: set[str] = set()
        self.beats_sent = 0

    def send(self, monitor: JobMonitor, nodes: Iterable[str], is_news: bool = False) -> None:
        """Sends a beat to each node.

        A node that owes UNANSWERED_MAX replies gets news only.
        """
        for node in nodes:
            key = (monitor.name, node)
            if is_news or self._unanswered_beats[key] < UNANSWERED_MAX:
                self._unanswered_beats[key] += 1
                task = asyncio.ensure_future(self._beat(monitor, monitor.view, node))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def pass_on_soon(self, monitor: JobMonitor) -> None:
        """Passes a final signal on to other nodes. Further news within NEWS_S goes along."""
        if monitor.name not in self._jobs_with_news:
            self._jobs_with_news.add(monitor.name)
            asyncio.get_running_loop().call_soon(self._send_news, monitor)

    def _send_news(self, monitor: JobMonitor) -> None:
        self.send(monitor, monitor.detector.news_targets(), is_news=True)
        asyncio.get_running_loop().call_later(NEWS_S, self._jobs_with_news.discard, monitor.name)

    async def _beat(self, monitor: JobMonitor, view: MembershipView, node: str) -> None:
        try:
            await self._beat_once(monitor, view, node)
        finally:
            key = (monitor.name, node)
            self._unanswered_beats[key] -= 1
            if not self._unanswered_beats[key]:  # else an entry of each job and node would stay for ever
                del self._unanswered_beats[key]

    async def _beat_once(self, monitor: JobMonitor, view: MembershipView, node: str) -> None:
        detector = monitor.detector
        own_report = monitor.own_report(self._monitors.record_of(monitor))
        request = pb.BeatRequest(
            job=monitor.name,
            launch=view.launch,
            round=view.round,
            source=self._own,
            target=node,
            reports=messages.node_reports_to(detector.reports(own_report)),
            last_heard=messages.heard_to(detector.heard_s(time.monotonic())),
        )
        try:
            reply = await self.peers.call(view.nodes[node], [view.token], pb_grpc.PeerStub, "Beat", request, DEADLINE_S)
            assert isinstance(reply, pb.BeatReply)
            self._timeouts.pop(node, None)
            self.beats_sent += 1
            if monitor.detector is detector:
                reports, heard = messages.node_reports_from(reply.reports), messages.heard_from(reply.last_heard)
                if monitor.publish(detector.answered(node, reports, heard, time.monotonic())):
                    self.pass_on_soon(monitor)
        except grpc.RpcError as error:
            await self._note_failed_beat(monitor, detector is monitor.detector, view.nodes[node], error)
        except (OSError, ReftError) as error:
            log.debug("job=%s node=%s no beat: %s", monitor.name, node, reason_of(error))

    async def _note_failed_beat(
        self, monitor: JobMonitor, is_current: bool, called: pb.Node, error: grpc.RpcError
    ) -> None:
        node = called.id
        code = error.code()
        if code is grpc.StatusCode.ABORTED and is_current:
            monitor.note_left_behind(reason_of(error))
            if monitor.publish(monitor.detector.answered(node, [], {}, time.monotonic())):
                self.pass_on_soon(monitor)
        is_unproved = isinstance(error, UnprovedReply)  # somebody listens there; the text may be anything
        if code is grpc.StatusCode.UNAVAILABLE and not is_unproved and is_current and "refused" in reason_of(error):
            monitor.detector.refused(node)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._timeouts[node] += 1
            if self._timeouts[node] >= TIMEOUTS_MAX:
                del self._timeouts[node]
                await self.peers.drop(called)  # the round in force may be a newer one, without that node

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self.peers.close()
