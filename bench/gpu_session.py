"""Snapshots and restores of a training on a GPU: the steps, the waits, the copies, an attach.

    python bench/gpu_session.py [--quick] [--device cuda|cpu] [--rounds N] [--json FILE]

One process trains Llama's blocks with fused AdamW: fp32 state, autocast to bf16. There is one
daemon, and a real `reft.attach` with protect="none": a snapshot has the whole state. In each round
the ways take turns in blocks of steps; the first step of a block does not count.

    alone       training alone
    every 1     reft is asked for a snapshot of every step
    every 4     of every fourth step
    blocking    torch copies the whole state into pinned memory after each step, and waits

    step        from mark to mark, in the device's time
    waited      of the optimizer at the fence, for each snapshot
    mark        time of Python in `step_end`; a full queue of the device makes Python wait there
    snapshots   taken, of those that were due; a slot is free again once a later step is whole

Then training stands still, and some snapshots are taken alone: `copied` is when the last byte is in
the slot, `sealed` when the host has digested it. A fresh process attaches, and the state comes
back. `plain copy` is one copy of as many bytes between the device and pinned memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

import reft
from bench import common, result
from bench.common import Llama, Shape, median, quantile
from bench.options import count, output
from bench.restoring import timed_steps
from bench.result import Row

JOB = "bench-gpu"
NEVER = 1 << 40
WAYS = {"alone": NEVER, "every 1": 1, "every 4": 4, "blocking": NEVER}
STEPS = 9  # of a block
SEALED_S = 4.0  # for which a block waits until its snapshots are sealed
ALONE = 5  # snapshots while training stands still
FULL = Shape(width=2048, inner=5504, layers=8, heads=16, words=32000, batch=24, length=1024)  # 470 M parameters
QUICK = Shape(width=128, inner=344, layers=3, heads=4, words=2048, batch=1, length=128)
TITLE = "Snapshots and a restore of a training on a GPU"


class GpuTraining:
    """The model, its optimizer and one batch."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.shape, self.device = QUICK if options.quick else FULL, options.device
        with torch.device(self.device):
            self.model = Llama(self.shape)
            self.words = torch.randint(0, self.shape.words, (self.shape.batch, self.shape.length))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(self.words)
        F.cross_entropy(logits.view(-1, self.shape.words), self.words.view(-1)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        return common.state_tensors(self.model, self.optimizer)

    def wait(self) -> float:
        """Waits for the device; returns the time of the host."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def moment(self) -> Any:
        """Returns this moment of the device, for `seconds`."""
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        if self.device != "cuda":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class PinnedCopy:
    """A copy of the whole state in pinned memory."""

    def __init__(self, training: GpuTraining) -> None:
        self._training, self._tensors = training, training.tensors()
        pin = training.device == "cuda"
        self._targets = [torch.empty(each.shape, dtype=each.dtype, pin_memory=pin) for each in self._tensors]
        self.nbytes = sum(each.nbytes for each in self._tensors)

    def copy(self, back: bool = False) -> float:
        """Copies to the host, or back, and waits; returns the seconds."""
        began = self._training.wait()
        for live, kept in zip(self._tensors, self._targets, strict=True):
            source, target = (kept, live) if back else (live, kept)
            target.copy_(source, non_blocking=True)
        return self._training.wait() - began


def await_whole(session: reft.Session, key: str = "whole_step") -> None:
    end = time.perf_counter() + 60
    while session.stats()[key] < session.step:
        if time.perf_counter() > end:
            raise RuntimeError(f"step {session.step} is not there after 60 s: {session.stats()}")
        time.sleep(0.0005)


def block(training: GpuTraining, session: reft.Session, way: str, pinned: PinnedCopy) -> dict[str, Any]:
    """Trains a block; returns the seconds of its steps and what was counted in it."""
    common.snapshot_each(session, WAYS[way])
    assert session._window.snapshots is not None, "reft is switched off"
    copy_stats = session._window.snapshots.engine.copy_stats
    before, stalled_s = session.stats(), copy_stats.stall_s
    moments, marks, first = [training.moment()], [], session.step
    for _ in range(STEPS):
        training.step()
        if way == "blocking":
            pinned.copy()
        began = time.perf_counter()
        session.step_end()
        marks.append(time.perf_counter() - began)
        moments.append(training.moment())
    seconds = [training.seconds(*pair) for pair in pairwise(moments)]
    due = sum(step % WAYS[way] == 0 for step in range(first + 1, session.step + 1))
    common.snapshot_each(session, NEVER)
    training.step()  # its pre-hook is the fence of the last snapshot
    session.step_end()
    training.wait()
    after, end = session.stats(), time.perf_counter() + SEALED_S
    while (
        after["snapshots"] + after["skipped"] < before["snapshots"] + before["skipped"] + due
        and time.perf_counter() < end
    ):
        time.sleep(0.05)
        after = session.stats()
    return {
        "seconds": seconds[1:], "marks": marks[1:], "due": due, "taken": after["snapshots"] - before["snapshots"],
        "stalled_s": copy_stats.stall_s - stalled_s,
    }  # fmt: skip


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Trains all blocks, then takes snapshots alone."""
    training = GpuTraining(options)
    training.step()
    began = training.wait()
    session = reft.attach(training.model, training.optimizer, job=JOB, daemon=options.daemon, protect="none", every=1)
    attach_s = time.perf_counter() - began
    common.snapshot_each(session, NEVER)
    pinned = PinnedCopy(training)
    blocks: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(options.rounds + 1):
        for way in WAYS:
            measured = block(training, session, way, pinned)
            if number:
                blocks[way].append(measured)
            print(number, way, {key: value for key, value in measured.items() if key != "marks"}, flush=True)
    alone: dict[str, list[float]] = {"mark": [], "copied": [], "sealed": []}
    for _ in range(ALONE):
        common.snapshot_each(session, 1)
        began = training.wait()
        session.step_end()
        alone["mark"].append(time.perf_counter() - began)
        alone["copied"].append(training.wait() - began)
        await_whole(session, "sealed_step")
        alone["sealed"].append(time.perf_counter() - began)
        await_whole(session)
    copies = {"to": [pinned.copy() for _ in range(5)], "from": [pinned.copy(back=True) for _ in range(5)]}
    stats = session.stats()
    assert session._window.snapshots is not None
    slots = [slot.map.is_pinned for slot in session._window.snapshots.slots._slots]
    session.close()
    return {"attach_s": attach_s, "blocks": blocks, "alone": alone, "copies": copies, "bytes": pinned.nbytes, "stats": stats,
            "pinned": slots}  # fmt: skip


def restore(options: argparse.Namespace) -> dict[str, Any]:
    """Attaches in a fresh process, with and without state that exists, and compares the bits."""
    found: dict[str, Any] = {}
    for kind in ("fresh", "existing"):
        training = GpuTraining(options)
        if kind == "existing":
            training.step()
        began = training.wait()
        with timed_steps() as seconds:
            session = reft.attach(
                training.model, training.optimizer, job=JOB, daemon=options.daemon, protect="none", every=1
            )
        found[kind] = {"attach_s": training.wait() - began, **seconds}
        session.close()
        del session, training
    return found


ROLES = {"train": train, "restore": restore}


def rows_of(trained: dict[str, Any], restored: dict[str, Any]) -> list[Row]:
    """Returns the figures for the table."""
    rows, nbytes = [], trained["bytes"]
    seconds = {way: [s for each in blocks for s in each["seconds"]] for way, blocks in trained["blocks"].items()}
    for way, blocks in trained["blocks"].items():
        steps = [1000 * each for each in seconds[way]]
        rows.append(Row(f"{way}: step", "ms", None, median(steps), p99=quantile(steps, 0.99)))
        if way == "alone":
            continue
        over = [
            100 * (median(own["seconds"]) / median(base["seconds"]) - 1)
            for own, base in zip(blocks, trained["blocks"]["alone"], strict=True)
        ]
        rows.append(Row(f"{way}: over training alone", "%", None, median(over), min=min(over), max=max(over)))
        if way != "blocking":
            taken, due = (sum(each[key] for each in blocks) for key in ("taken", "due"))
            stalled_ms = 1000 * sum(each["stalled_s"] for each in blocks) / max(taken, 1)
            marks = [1000 * mark for each in blocks for mark in each["marks"]]
            rows.append(Row(f"{way}: waited at the fence", "ms a snapshot", None, stalled_ms))
            rows.append(Row(f"{way}: snapshots taken", "of those due", None, taken / due))
            rows.append(Row(f"{way}: calls of the mark", "ms a step", None, fmean(marks), max=max(marks)))
    to, back = median(trained["copies"]["to"]), median(trained["copies"]["from"])
    alone = {key: median(values) for key, values in trained["alone"].items()}
    rows += [
        Row("plain copy to pinned memory", "GB/s", None, nbytes / to / 1e9),
        Row("snapshot alone: copied into the slot", "GB/s", None, nbytes / alone["copied"] / 1e9),
        Row("snapshot alone: copied over a plain copy", "ratio", None, alone["copied"] / to),
        Row("snapshot alone: sealed", "s", None, alone["sealed"]),
        Row("snapshot alone: call of the mark", "ms", None, 1000 * alone["mark"]),
        Row("first attach", "s", None, trained["attach_s"]),
        Row("plain copy from pinned memory", "GB/s", None, nbytes / back / 1e9),
    ]
    for kind, each in restored.items():
        rows.append(Row(f"restoring attach, optimizer state {kind}", "s", None, each["attach_s"]))
        rows.append(Row(f"restoring attach, optimizer state {kind}: load", "s", None, each["load"]))
        rows.append(
            Row(f"restoring attach, optimizer state {kind}: load over a plain copy", "ratio", None, each["load"] / back)
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=count, help="blocks of each way (3)")
    parser.add_argument("--json", type=output, help="write every figure to this file")
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--daemon", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    common.end_on_signals()
    if options.role:
        options.result.write_text(json.dumps(ROLES[options.role](options)))
        return
    arguments = [f"--device={options.device}", f"--rounds={options.rounds}", *["--quick"] * options.quick]
    with common.folder() as home, common.daemon() as (address, _):
        measured = [
            common.run_role(Path(__file__).name, [*arguments, "--role", role, "--daemon", address], {}, home)
            for role in ROLES
        ]
    rows = rows_of(*measured)
    print(common.table(["figure", "value", "unit"], [[row.name, f"{row.value:.4g}", row.unit] for row in rows]))
    if options.json:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        notes = [f"Device: {device}. The state has {measured[0]['bytes'] / 1e9:.2f} GB.",
                 f"Slots pinned: {sum(measured[0]['pinned'])} of {len(measured[0]['pinned'])}."]  # fmt: skip
        details = {"trained": measured[0], "restored": measured[1]}
        result.write(options.json, __file__, TITLE + ", --quick" * options.quick, rows, notes, details)


if __name__ == "__main__":
    main()
