"""A job that makes round after round while a test does something else to its daemons."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

from reft.core.commit.round import StepAnswer
from reft.wire import messages, rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.jobs import Job

SEALED = StepAnswer.SEALED


class Rounds:
    """Reports step after step of a job of two nodes, and asks for Hello all the time."""

    def __init__(self, job: Job) -> None:
        self._job, self._step = job, max(job.whole(0), 0)
        self._ends = threading.Event()
        self.made, self.hello_s, self.rss = 0, 0.0, 0
        self.in_time = False  # whether peer and trainer came before the flood's end
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guard, args=(each,)) for each in (self._report, self._greet)]
        for thread in self._threads:
            thread.start()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            while not self._ends.is_set():
                work()
        except BaseException as error:
            self.errors.append(error)

    def _report(self) -> None:
        self._step += 1
        self._job.report(1, {self._step: SEALED})
        reply = self._job.report(0, {self._step: SEALED}, wait_ms=9000)
        assert reply.pins.whole == self._step, f"step {self._step}: {reply}"
        self.made += 1
        self._ends.wait(0.02)

    def _greet(self) -> None:
        daemon = self._job.daemons[0]
        with rpc.channel(daemon.address) as channel:
            stub, process = pb_grpc.DaemonStub(channel), psutil.Process(daemon.process.pid)
            while not self._ends.wait(0.05):
                began = time.monotonic()
                stub.Hello(pb.HelloRequest(protocol=messages.PROTOCOL), timeout=10)
                self.hello_s = max(self.hello_s, time.monotonic() - began)
                self.rss = max(self.rss, process.memory_info().rss)

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
