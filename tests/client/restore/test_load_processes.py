"""REFT-load between processes over gloo, also when a peer dies or stops."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from reft.client.restore.transport import GroupTransport, Transport
from reft.core.recovery.plan import TransferSizes
from reft.errors import RestoreError
from tests.support.loads import CLEAN, Job
from tests.support.trainers import FORKS

WORLD = 3
DEADLINE_S = 3.0
SIZES = TransferSizes(piece=64 << 10, band=128 << 10, window=256 << 10, ahead=128 << 10)
AtChunk = Callable[[int, int], object]
FAILS_AT = 20  # the chunk, or the message


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"small{i}": torch.rand((i + 1,), generator=generator) for i in range(20)}
    return tensors | {"large": torch.rand((1 << 20,), generator=generator).bfloat16(), "odd": torch.arange(99991)}


def device_transport(group: Any, deadline_s: float) -> Transport:
    """Returns NCCL's transport, over gloo.

    There are no tags, so both ranks of a pair must post in the same order.
    """
    return GroupTransport(group, deadline_s, torch.device("cpu"))


@dataclass
class Failure:
    """Ends or stops one rank at its 20th chunk.

    Attributes:
        signal_number: that the rank sends to itself.
        rank: the rank.
        count: chunks that this process has read.
    """

    signal_number: int
    rank: int
    count: int = 0

    def __call__(self, rank: int, chunk: int) -> None:
        self.count += 1
        if rank == self.rank and self.count == FAILS_AT:
            os.kill(os.getpid(), self.signal_number)


class Failing(GroupTransport):
    """Fails at the 20th message: a keeper reads no slot."""

    def __init__(self, group: Any, deadline_s: float, signal_number: int) -> None:
        super().__init__(group, deadline_s)
        self.signal_number, self.count = signal_number, 0

    def receive(self, into: Any, source: int, tag: int) -> Any:
        self.count += 1
        if self.count == FAILS_AT:
            os.kill(os.getpid(), self.signal_number)
        return super().receive(into, source, tag)


def failing_transport(failing: int, signal_number: int, group: Any, deadline_s: float) -> Transport:
    is_failing = dist.get_rank() == failing
    return Failing(group, deadline_s, signal_number) if is_failing else GroupTransport(group, deadline_s)


def read_on(rank: int, chunk: int) -> None:
    """Does nothing at a chunk."""


def run_rank(
    rank: int, home: str, lost: tuple[int, ...], at_chunk: AtChunk, make_transport: Any, all_ended: Any
) -> None:
    """Runs one rank, and writes its outcome to a file of its own."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{home}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
    )
    job = Job(WORLD, "aec", 1, state())
    transport = make_transport(dist.new_group(backend="gloo"), DEADLINE_S)
    dist.barrier()
    began = time.monotonic()
    try:
        report = job.load_rank(rank, transport, lost, sizes=SIZES, at_chunk=at_chunk)
        job.ranks, job.live = job.ranks[rank : rank + 1], job.live[rank : rank + 1]
        job.world = 1
        outcome = "whole" if report == CLEAN and job.is_whole() else f"not whole: {report}"
    except RestoreError as error:
        outcome = f"RestoreError: {error}"
    Path(home, str(rank)).write_text(f"{time.monotonic() - began:.3f} {outcome}")
    all_ended.wait(30)  # a rank that exits earlier would be one more dead peer
    os._exit(0)  # do not close a group with a dead member


def results(
    home: Path, lost: tuple[int, ...] = (), at_chunk: Any = read_on, failing: int | None = None,
    make_transport: Any = GroupTransport,
) -> dict[int, tuple[float, str]]:  # fmt: skip
    """Returns each rank's time in seconds and its outcome; a rank that fails has none."""
    # Not forked from this process: its threads may hold locks, which then stay locked in the fork.
    all_ended = FORKS.Barrier(WORLD - (failing is not None))
    arguments = (str(home), lost, at_chunk, make_transport, all_ended)
    context = processes.start_processes(run_rank, arguments, nprocs=WORLD, start_method="forkserver", join=False)
    end = time.monotonic() + 60
    for rank, process in enumerate(context.processes):
        if rank != failing:
            process.join(max(end - time.monotonic(), 0.1))
    hung = [rank for rank, process in enumerate(context.processes) if process.is_alive() and rank != failing]
    for process in context.processes:
        process.kill()
        process.join()
    assert not hung
    outcomes = {}
    for path in home.iterdir():
        if path.name.isdigit():
            seconds, _, outcome = path.read_text().partition(" ")
            outcomes[int(path.name)] = (float(seconds), outcome)
    return outcomes


@pytest.mark.parametrize(
    ("lost", "make_transport"), [((), GroupTransport), ((1,), GroupTransport), ((1,), device_transport)]
)
def test_all_bytes_arrive(tmp_path, lost, make_transport):
    outcomes = results(tmp_path, lost, make_transport=make_transport)
    assert [outcome for _, outcome in dict(sorted(outcomes.items())).values()] == ["whole"] * WORLD


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("lost", "failing"), [((), 1), ((0,), 2), ((0,), 0)])
def test_a_peer_that_dies_or_stops_is_named_by_all_others_within_the_deadline(tmp_path, signal_number, lost, failing):
    """A reader of slots, a reader for a keeper, and a keeper (its own slot is lost) fail."""
    is_keeper = failing in lost
    outcomes = results(
        tmp_path, lost, read_on if is_keeper else Failure(signal_number, failing), failing,
        partial(failing_transport, failing, signal_number) if is_keeper else GroupTransport,
    )  # fmt: skip
    assert sorted(outcomes) == [rank for rank in range(WORLD) if rank != failing]
    said = f"RestoreError: rank {failing} stopped answering during the load"
    assert all(outcome.startswith(said) for _, outcome in outcomes.values()), outcomes
    assert all(seconds < 4 * DEADLINE_S for seconds, _ in outcomes.values()), outcomes
