"""Reports each snapshot to the daemon, and receives the outcome of the round.

A training step never waits for a reply. Each report covers all undecided steps
(`reft.core.commit.round.StepReport`), so the next report repairs what a daemon lost. At most
CALLS_MAX reports are unanswered. The daemon holds a reply back until the newest step is decided, or
until the wait time in the report is over. A thread receives the replies. If the connection has
ended, the next report opens a new one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import grpc
from google.protobuf.message import DecodeError

from reft.core.commit.pins import Pins
from reft.core.commit.relayout import LayoutOutcome, LayoutReport
from reft.core.commit.round import Outcome, StepAnswer
from reft.core.commit.snapshot_interval import SnapshotInterval
from reft.core.commit.undecided_steps import UndecidedSteps
from reft.core.commit.version import Epoch, Version
from reft.errors import ReftError, StaleEpoch, message, remedy
from reft.failpoints import Failpoints
from reft.wire import messages, rpc
from reft.wire.local_socket import ReportConnection
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

log = logging.getLogger("reft")
CALLS_MAX = 4
NO_CELLS: Mapping[int, int] = MappingProxyType({})
# Longer than other calls: a release does not run beside training, and a process that the daemon
# still thinks attached can't attach again.
RELEASE_DEADLINE_S = 10.0
AGAIN_S = 0.2  # `wait` asks the daemon again after this time without news
MARGIN_S = 0.5  # added to the daemon's wait time before a reply counts as missing


@dataclass(frozen=True)
class ReporterFacts:
    """Who reports, and to whom.

    Attributes:
        address: address of the daemon's gRPC socket.
        path: path of the daemon's local socket, from HelloReply.local_socket.
        job, epoch, rank: identify the reporting rank.
        deadline_s: how long the daemon may hold back a reply.
        refused: called with the daemon's address when the local socket refuses the connection.
    """

    address: str
    path: str
    job: str
    epoch: Epoch
    rank: int
    deadline_s: float
    refused: Callable[[str], None] = lambda address: None


class Reporter:
    """One rank's reports to its daemon.

    Args:
        facts: who reports, and to whom.
        failpoints: faults to inject.

    Attributes:
        news: the number of replies and of calls of `wake`.
        reply: the newest reply. `slots_missing` stays until somebody who gives back slots sets it
            to False.
        error: why the last report failed; None if it was answered.
        requested_every: requested snapshot interval, sent with each report; see
            `reft.core.commit.snapshot_interval`.
        layout_report: what this rank reports on layouts, sent with each report; see
            `reft.core.commit.relayout`.
    """

    def __init__(self, facts: ReporterFacts, failpoints: Failpoints) -> None:
        self.facts = facts
        self._failpoints = failpoints
        self._changed = threading.Condition()
        self.news = 0
        self._connection: ReportConnection | None = None
        self._undecided = UndecidedSteps()
        self._unanswered = 0  # unanswered reports
        self._has_unsent_report = False  # whether a report waits for the next reply
        self._last_reply_s = 0.0  # time of the last reply, or of the first report after it
        self._trouble = ""
        self._outcome = Outcome()
        self.error: ReftError | None = None
        self.reply = pb.ReportReply()
        self.requested_every = 0
        self.layout_report = LayoutReport()

    @property
    def layout(self) -> LayoutOutcome:
        """What the ranks have agreed on layouts, by the newest outcome of this rank."""
        return self._outcome.layout

    @property
    def interval(self) -> SnapshotInterval:
        """The agreed snapshot interval, by the newest outcome that this rank has received."""
        return self._outcome.interval

    @property
    def is_stale(self) -> bool:
        """Whether a newer attach owns the job: then this process must not write any more."""
        return isinstance(self.error, StaleEpoch)

    @property
    def pins(self) -> Pins:
        """The steps of this epoch that stay, by the newest outcome."""
        return self._outcome.pins

    def voids(self, version: Version) -> bool:
        """Decides whether a version is known never to become whole."""
        return version.epoch == self.facts.epoch and self._outcome.voids(version.step)

    def answer(self, step: int, answer: StepAnswer, trouble: str = "", digests: Mapping[int, int] = NO_CELLS) -> None:
        """Reports a step, and returns at once.

        Report steps in ascending order. A report of an earlier step changes nothing.

        Args:
            step: the step.
            answer: whether this rank has sealed the step.
            trouble: why the snapshot failed; empty after a success.
            digests: cell → digest of this rank's bytes in the cell; for a sealed step.
        """
        with self._changed:
            self._undecided.answer(step, answer, digests)
            self._trouble = trouble
        self.send()

    def send(self) -> None:
        """Sends the report of all undecided steps, and returns at once."""
        now_s = time.monotonic()
        with self._changed:
            if self._unanswered and now_s - self._last_reply_s > self.facts.deadline_s + MARGIN_S:
                self._note_error(rpc.error_from(grpc.StatusCode.DEADLINE_EXCEEDED, "", self.facts.address))
            self._has_unsent_report = self._unanswered >= CALLS_MAX
            if self._has_unsent_report or self._failpoints.hit("report.send", rank=self.facts.rank):
                return
            report = self._undecided.report(self._outcome.whole)
            request = pb.ReportRequest(
                job=self.facts.job,
                epoch=messages.epoch_to(self.facts.epoch),
                rank=self.facts.rank,
                steps=messages.report_to(report, self._undecided.sealed),
                wait_ms=int(self.facts.deadline_s * 1000), trouble=self._trouble, requested_every=self.requested_every,
                layout=messages.layout_report_to(self.layout_report),
            )  # fmt: skip
            try:
                self._connected().send(request)
            except OSError as error:
                self._note_error(rpc.error_from(grpc.StatusCode.UNAVAILABLE, str(error), self.facts.address))
                if isinstance(error, ConnectionRefusedError):
                    self.facts.refused(self.facts.address)
                return
            if not self._unanswered:
                self._last_reply_s = now_s
            self._unanswered += 1

    def _connected(self) -> ReportConnection:
        """Returns the connection; opens one if needed, with a thread that receives the replies."""
        if self._connection is None:
            self._connection = ReportConnection(self.facts.path)
            threading.Thread(target=self._receive, args=(self._connection,), name="reft-news", daemon=True).start()
        return self._connection

    def _receive(self, connection: ReportConnection) -> None:
        """Receives replies until the connection ends; runs in a thread of its own."""
        why = "it has ended the connection"
        try:
            for reply in connection.replies():
                with self._changed:
                    if self._connection is not connection:
                        break  # `close` was called
                    self._unanswered -= reply.calls
                    self._last_reply_s = time.monotonic()
                    if reply.status:
                        self._note_error(rpc.error_from(rpc.CODES[reply.status], reply.error, self.facts.address))
                    else:
                        self._take(reply)
                    if self._has_unsent_report and not self.is_stale:
                        self.send()  # perhaps no step follows that would send the report
                    self.news += 1
                    self._changed.notify_all()
        except (ValueError, KeyError, DecodeError) as error:
            why = f"its reply can't be read: {error}"
        with self._changed:
            if self._connection is connection:  # `close` was not called
                self._connection, self._unanswered = None, 0
                self._note_error(rpc.error_from(grpc.StatusCode.UNAVAILABLE, why, self.facts.address))
                self.news += 1
                self._changed.notify_all()
        connection.close()

    def _note_error(self, error: ReftError) -> None:
        if self.is_stale:
            return  # for ever: this process must never write again
        if isinstance(error, StaleEpoch):
            log.error("rank %d: %s%s", self.facts.rank, message(error), remedy(error))
        elif type(error) is not type(self.error):
            log.warning(
                "rank %d: no snapshot becomes whole now: %s Training goes on. A failure now loses the steps after step "
                "%d.%s", self.facts.rank, message(error), self._outcome.whole, remedy(error),
            )  # fmt: skip
        self.error = error

    def _take(self, reply: pb.LocalReply) -> None:
        try:
            messages.check_protocol(
                reply.protocol, reply.oldest, "the daemon was replaced, and now speaks", "this trainer"
            )
        except ReftError as error:
            self._note_error(error)
        else:
            self._apply(reply.report)

    def _apply(self, reply: pb.ReportReply) -> None:
        is_missing = reply.slots_missing or self.reply.slots_missing
        if self.error is not None and not self.is_stale:
            log.warning("the daemon answers again: snapshots go on.")
            # A restarted daemon does not know which memfds it lacks beside the slots that it has.
            self.error, is_missing = None, True
        reply.slots_missing = is_missing
        self.reply = reply
        self._outcome = self._outcome.merge(messages.outcome_from(reply))
        self._undecided.settle(self._outcome)

    def outcome_delays(self, step: int) -> tuple[int | None, int]:
        """Returns how late outcomes are; see `reft.core.commit.lag_backoff`.

        Args:
            step: the newest step.

        Returns:
            The newest step when this rank last heard that a step it had sealed is void; None if
            never. And the longest delay of an outcome, in steps.
        """
        with self._changed:
            return self._undecided.delays.last_void, self._undecided.longest_delay(step)

    @property
    def mismatched(self) -> frozenset[int]:
        """Cells with mismatched replicas; no version becomes whole while there are any."""
        return self._outcome.mismatched

    def wait(self, step: int, deadline_s: float) -> bool:
        """Waits until `step` is decided; returns whether that step or a newer one is whole.

        Not for use inside a training step. Ends early if the daemon misses slots: the step may be
        waiting for these slots. Ends at a `close`, too: a report after it may name an old epoch.
        """
        end = time.monotonic() + deadline_s
        connection: ReportConnection | None = None
        with self._changed:
            while not (self._outcome.decides(step) or self.is_stale or self.reply.slots_missing):
                if (left := end - time.monotonic()) <= 0:
                    break
                connection = self._connection or connection
                # Not at once: the daemon replies immediately until this rank has answered the step.
                is_notified = self._changed.wait(min(AGAIN_S, left))
                if connection is not None and self._connection is None and self.error is None:
                    break  # a connection that was lost would have left an error
                if not is_notified and not self._unanswered:
                    self.send()
            return self._outcome.whole >= step

    def wait_news(self, seen: int) -> None:
        """Waits until `news` is greater than `seen`; used by the snapshot thread."""
        with self._changed:
            while self.news == seen:
                self._changed.wait()

    def wake(self) -> None:
        """Counts as news: a thread in `wait_news` shall look again."""
        with self._changed:
            self.news += 1
            self._changed.notify_all()

    def release(self, failed: bool = False) -> None:
        """Tells the daemon that the session is closed. Only logs an error of the call.

        Args:
            failed: whether an exception is the reason.
        """
        epoch = messages.epoch_to(self.facts.epoch)
        request = pb.ReleaseRequest(job=self.facts.job, epoch=epoch, rank=self.facts.rank, failed=failed)
        try:
            with rpc.channel(self.facts.address) as channel:
                pb_grpc.DaemonStub(channel).Release(request, timeout=RELEASE_DEADLINE_S)
        except grpc.RpcError as error:
            level = logging.INFO if error.code() is grpc.StatusCode.UNAVAILABLE else logging.WARNING
            why = rpc.error_of(error, self.facts.address)
            log.log(level, "the daemon could not be told that the session was closed: %s", why)

    def close(self) -> None:
        """Closes the connection; another report would open a new one."""
        with self._changed:
            connection, self._connection = self._connection, None
            self._unanswered = 0
        if connection is not None:
            connection.close()
