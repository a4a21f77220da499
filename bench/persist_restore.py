"""A restore from storage beside one from memory, and DCP's checkpoints on the same disk.

    .venv/bin/python bench/persist_restore.py [--quick] [--rounds 3] [--size 1.5GB] [--folder DIR]
        [--json FILE]

One round, each part in a fresh process of one rank:

    save      a daemon with --persist starts; the rank attaches, takes one snapshot, and asks for a
              checkpoint, until the checkpoint is complete
    memory    the rank attaches again
    storage   SIGKILL of the daemon; its slots are removed; an empty daemon starts; all bytes of the
              checkpoint are read once, into the page cache; the rank attaches again
    dcp       torch.distributed.checkpoint.async_save of the same state to the same disk
    load      all bytes of DCP's checkpoint are read once; torch.distributed.checkpoint.load

Model and AdamW's moments have 10 MB or 1.5 GB. A restarted process has a model, but no moments. It
first allocates and frees as many fresh pages as attach will make.

    restore        the steps of attach that read, create tensors, fill and verify them
    whole attach   call of reft.attach until it returns; without slots in memory it makes slots
    memory of one  the most that the daemon, or its persister, had for itself while it wrote
                   (RssAnon)

Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch.distributed.checkpoint as dcp

import reft
from bench import common, result
from bench.common import Shape
from bench.options import count, listed, output
from bench.restore import (
    CASES,
    DEADLINE_S,
    IMPORTED_LATE,
    SIZES,
    Replica,
    Task,
    back_pages,
    cells,
    load_with_dcp,
    row_of,
    run,
    timed,
    write,
)
from bench.restoring import timed_steps
from bench.result import Row
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

JOB = "bench-persist-restore"
SLOTS = 3
LOOK_S = 0.02
BLOCK_BYTES = 16 << 20
RESTORE_GOAL, MEMORY_GOAL = "<= 1.5", "<= 100"
MEASURED = ("10MB", "1.5GB")
TITLE = "A restore from storage, beside memory and DCP"
NOTES = (
    "The page cache is warm: each byte of a checkpoint is read once before.",
    "A whole attach from storage also makes slots, since the new daemon has none.",
    "DCP syncs its files, as reft does. Both write to the same disk.",
)


# One rank


def save(rank: int, task: Task, daemon: int) -> None:
    """Takes a snapshot, and waits for its checkpoint; writes seconds and bytes.

    Args:
        rank: of this process.
        task: what all processes have in common.
        daemon: pid of the daemon.
    """
    replica = Replica(task.shape)
    replica.make_moments()
    replica.fill()
    session = attach(replica, task)
    session.step_end()
    if not session.seal(DEADLINE_S):
        raise RuntimeError(f"the snapshot did not become whole: {session.stats()}")
    began = time.perf_counter()
    session.persist()
    seconds = {"ask": time.perf_counter() - began, "daemon_bytes": 0.0, "persister_bytes": 0.0}
    status, end_s = status_of(task), time.monotonic() + DEADLINE_S
    while status.persisted < session.step:
        if status.trouble or time.monotonic() > end_s:
            raise RuntimeError(f"no checkpoint: {status.trouble or status}")
        seconds["daemon_bytes"] = max(seconds["daemon_bytes"], anonymous_bytes(daemon))
        children = psutil.Process(daemon).children()
        seconds["persister_bytes"] = max(seconds["persister_bytes"], *(anonymous_bytes(each.pid) for each in children))
        time.sleep(LOOK_S)
        status = status_of(task)
    session.close()
    write(seconds | {"checkpoint": status.took_s}, rank, task)


def restore(rank: int, task: Task, source: str) -> None:
    """Attaches, and checks every byte; writes the seconds.

    Args:
        rank: of this process.
        task: what all processes have in common.
        source: where the state must come from.
    """
    replica = Replica(task.shape)
    replica.drop_moments()
    # From storage the attach also makes slots: a state each, and the moments are two thirds of one.
    back_pages(task, replica.missing_bytes * (1 if source == "memory" else 1 + SLOTS * 3 // 2))
    with timed_steps() as steps:
        began = time.perf_counter()
        session = attach(replica, task)
        attach_s = time.perf_counter() - began
    if session.restored_from != source:
        raise RuntimeError(f"restored from {session.restored_from}, not from {source}")
    session.close()
    replica.check(source)
    write({f"{source}_attach": attach_s, source: sum(steps.values())}, rank, task)


def save_with_dcp(rank: int, task: Task) -> None:
    """Saves with DCP beside the process; writes the seconds until the call, and the save, end."""
    replica = Replica(task.shape)
    replica.make_moments()
    replica.fill()
    began = time.perf_counter()
    saved = dcp.async_save(replica.tree(), checkpoint_id=task.files / "dcp", no_dist=True)
    asked_s = time.perf_counter() - began
    saved.result(DEADLINE_S)
    write({"dcp_ask": asked_s, "dcp_checkpoint": time.perf_counter() - began}, rank, task)


def load(rank: int, task: Task) -> None:
    """Loads with DCP; writes the seconds."""
    replica = Replica(task.shape)
    replica.drop_moments()
    back_pages(task, replica.missing_bytes)
    seconds = timed(task, lambda: load_with_dcp(replica, task))
    replica.check("DCP")
    write({"dcp": seconds}, rank, task)


def attach(replica: Replica, task: Task) -> reft.Session:
    return reft.attach(replica.model, replica.optimizer, job=JOB, daemon=task.daemons[0], slots=SLOTS)


def status_of(task: Task) -> pb.StorageStatus:
    with rpc.channel(task.daemons[0]) as channel:
        reply = pb_grpc.DaemonStub(channel).Status(pb.StatusRequest(job=JOB), timeout=DEADLINE_S)
    storage: pb.StorageStatus = reply.jobs[0].storage
    return storage


def anonymous_bytes(pid: int) -> float:
    """Returns a process's anonymous memory; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return float(int(line.split()[1]) << 10)
    return 0.0


# All rounds


def warm(folder: Path) -> None:
    """Reads every file once, so that the page cache has it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                while file.read(BLOCK_BYTES):
                    pass


def measure(shape: Shape, disk: Path) -> dict[str, float]:
    """Runs one round; returns the seconds and bytes of its parts."""
    with common.folder() as home, common.folder(disk) as files, contextlib.ExitStack() as first:
        storage = files / "reft"
        storage.mkdir()
        address, pid = first.enter_context(common.daemon("node-0", "--persist", str(storage)))
        task = Task(CASES["1-rank"], shape, (address,), home, files)
        run(functools.partial(save, daemon=pid), task)
        run(functools.partial(restore, source="memory"), task)
        os.kill(pid, signal.SIGKILL)  # it must not end the job in peace
        first.close()
        warm(storage)
        with common.daemon("node-1", "--persist", str(storage)) as (address, _):
            run(functools.partial(restore, source="storage"), replace(task, daemons=(address,)))
        run(save_with_dcp, task)
        warm(files / "dcp")
        run(load, task)
        measured: dict[str, float] = json.loads((home / "0.json").read_text())
    return measured


def rows_of(rounds: Sequence[dict[str, float]]) -> list[Row]:
    """Returns the figures of all rounds."""

    def ratios(part: str, other: str) -> list[float]:
        return [each[part] / each[other] for each in rounds]

    def values(part: str, unit: float = 1.0) -> list[float]:
        return [each[part] / unit for each in rounds]

    return [
        row_of("restore from storage over restore from memory", "ratio", RESTORE_GOAL, ratios("storage", "memory")),
        row_of("the same, of whole attaches", "ratio", None, ratios("storage_attach", "memory_attach")),
        row_of("whole attach from storage over DCP's load", "ratio", None, ratios("storage_attach", "dcp")),
        row_of("restore from memory", "s", None, values("memory")),
        row_of("restore from storage", "s", None, values("storage")),
        row_of("whole attach from memory", "s", None, values("memory_attach")),
        row_of("whole attach from storage", "s", None, values("storage_attach")),
        row_of("DCP's load", "s", None, values("dcp")),
        row_of("session.persist, until it returns", "ms", None, values("ask", 1e-3)),
        row_of("DCP's async_save, until it returns", "ms", None, values("dcp_ask", 1e-3)),
        row_of("reft's checkpoint, until it is complete", "s", None, values("checkpoint")),
        row_of("DCP's async_save, until it is complete", "s", None, values("dcp_checkpoint")),
        row_of("the daemon's own memory", "MB", MEMORY_GOAL, values("daemon_bytes", 1e6)),
        row_of("the persister's own memory", "MB", MEMORY_GOAL, values("persister_bytes", 1e6)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 MB, one round")
    parser.add_argument("--rounds", type=count, help="rounds (3)")
    parser.add_argument("--size", type=listed(MEASURED), help="size of the state (1.5GB)")
    parser.add_argument("--folder", type=Path, help="a folder of the disk", default=Path("/var/tmp"))
    parser.add_argument("--json", type=output, help="write every figure to this file")
    options = parser.parse_args()
    common.end_on_signals()
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    size, rounds = options.size or ("10MB" if options.quick else "1.5GB"), options.rounds or (1 if options.quick else 3)
    measured = [measure(SIZES[size], options.folder) for _ in range(rounds)]
    rows = rows_of(measured)
    print(common.table(["", "figure", "median", "goal", "unit", "rounds"], [cells(row) for row in rows]))
    print("\n".join(NOTES))
    if options.json:
        result.write(options.json, __file__, TITLE, rows, NOTES, {"size": size, "rounds": measured})
    return 1 if any(row.is_missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
