"""REFT-load between processes over gloo, also when a peer dies or stops."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from reft.client.restore.load import load
from reft.client.restore.load_plan import LoadSizes
from reft.client.restore.transport import DeviceTransport, GlooTransport, Transport
from reft.errors import RestoreError
from tests.support.shards import alike, make_slot, placed

WORLD = 3
DEADLINE_S = 3.0
SIZES = LoadSizes(piece=64 << 10, group=128 << 10, groups=2, window=256 << 10, ahead=128 << 10)
AtChunk = Callable[[int], object]


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"small{i}": torch.rand((i + 1,), generator=generator) for i in range(20)}
    return tensors | {"large": torch.rand((1 << 20,), generator=generator).bfloat16(), "odd": torch.arange(99991)}


def device_transport(group: Any, deadline_s: float) -> Transport:
    """Returns NCCL's transport, over gloo.

    There are no tags, so both ranks of a pair must post in the same order.
    """
    return DeviceTransport(group, torch.device("cpu"), deadline_s)


def run_rank(
    rank: int, home: str, lost: tuple[int, ...], at_chunk: dict[int, AtChunk], make_transport: Any = GlooTransport
) -> None:
    """Runs one rank, and writes its outcome to a file of its own."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{home}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
    )
    tensors = state()
    placement = placed([tensors] * WORLD, list(range(WORLD)), "aec", 1, 4096)
    slots = [make_slot(placement, old, tensors) for old in range(WORLD)]
    have = frozenset(range(WORLD)) - set(lost)
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    digests = {old: slots[old].digests.copy() for old in lost}
    transport = make_transport(dist.new_group(backend="gloo"), DEADLINE_S)
    dist.barrier()
    began = time.monotonic()
    try:
        load(
            transport, placement, rank, have, {old: old for old in have}, {rank: slots[rank]} if rank in have else {},
            live, (), digests, at_chunk.get(rank, lambda _: None), SIZES,
        )  # fmt: skip
        outcome = "whole" if alike(live, tensors, list(tensors)) else "not whole"
    except RestoreError as error:
        outcome = f"RestoreError: {error}"
    Path(home, str(rank)).write_text(f"{time.monotonic() - began:.3f} {outcome}")
    if not at_chunk:
        dist.barrier()
    os._exit(0)  # do not close a group with a dead member


def results(
    home: Path, lost: tuple[int, ...] = (), at_chunk: Any = None, stopped: int | None = None, make_transport: Any = GlooTransport,
) -> dict[int, Any]:  # fmt: skip
    """Returns each rank's outcome and time in seconds; ranks that died have none."""
    arguments = (str(home), lost, at_chunk or {}, make_transport)
    context = processes.start_processes(run_rank, arguments, nprocs=WORLD, start_method="fork", join=False)
    end = time.monotonic() + 60
    for rank, process in enumerate(context.processes):
        if rank != stopped:
            process.join(max(end - time.monotonic(), 0.1))
    hung = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
    for process in context.processes:
        process.kill()
        process.join()
    assert hung == ([] if stopped is None else [stopped])
    outcomes = {}
    for path in home.iterdir():
        if path.name.isdigit():
            seconds, _, outcome = path.read_text().partition(" ")
            outcomes[int(path.name)] = (float(seconds), outcome)
    return outcomes


@pytest.mark.parametrize(
    ("lost", "make_transport"), [((), GlooTransport), ((1,), GlooTransport), ((1,), device_transport)]
)
def test_all_bytes_arrive(tmp_path, lost, make_transport):
    outcomes = results(tmp_path, lost, make_transport=make_transport)
    assert [outcome for _, outcome in dict(sorted(outcomes.items())).values()] == ["whole"] * WORLD


def test_the_death_of_a_peer_is_an_error_on_the_other_ranks(tmp_path):
    def dies(chunk: int) -> None:
        if chunk >= 20:
            os.kill(os.getpid(), signal.SIGKILL)

    outcomes = results(tmp_path, (0,), {2: dies})
    assert sorted(outcomes) == [0, 1]
    assert all(outcome.startswith("RestoreError") for _, outcome in outcomes.values()), outcomes
    assert all(seconds < 4 * DEADLINE_S for seconds, _ in outcomes.values()), outcomes


def test_a_peer_that_stops_is_an_error_within_the_deadline(tmp_path):
    def stops(chunk: int) -> None:
        if chunk >= 20:
            threading.Event().wait()

    outcomes = results(tmp_path, (), {1: stops}, stopped=1)
    assert sorted(outcomes) == [0, 2]
    assert all(outcome.startswith("RestoreError") for _, outcome in outcomes.values()), outcomes
    assert all(seconds < 4 * DEADLINE_S for seconds, _ in outcomes.values()), outcomes
