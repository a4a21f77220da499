"""Steps of a job while `reft-cli export` reads its memory, beside steps of the same job alone.

    python bench/export.py [--quick] [--size 250MB] [--rounds 5] [--seconds 60] [--folder DIR]
                           [--json FILE]

    core 0   one rank trains without a pause, and takes a snapshot of each 4th step
    core 1   its daemon, all exports, and this program

             | alone | exports | alone | exports | … | alone |      windows of --seconds

In a window of exports they follow each other without a pause: process, files, fsync. Each one
writes weights and both moments as safetensors. A step counts where it lies in one window as a
whole. Clocks are those of the machine, so both processes have the same.

    ratio       the median step of a window with exports over the mean of the medians of the two
                windows beside it: slow drifts of a machine cancel out; the median of all rounds
    ratio, p99  of all steps in windows with exports, over that of all other steps

An export keeps one step of the job in its slot meanwhile. So the rows also say how many snapshots
were taken in each kind of window.

Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import reft
from bench import common, result
from bench.common import FULL, QUICK, Training, median, quantile
from bench.options import count, listed, output
from bench.result import Row

JOB = "bench-export"
EVERY = 4
WARM_STEPS = 8
STEPS_LEAST = 4  # of a window, however long they take
LOOK_S = 0.05
START_S = 300.0
EXPORT_S = 600.0
SHAPES = {"250MB": QUICK, "1.5GB": FULL}
MEDIAN_GOAL, P99_GOAL = "<= 1.02", "<= 1.1"
TITLE = "Steps of a job while its memory is exported"
NOTES = (
    "One rank on a core of its own; the other core carries its daemon and the exports, which run at nice 19.",
    "An export is the whole command: a process starts, writes weights and moments as safetensors, and syncs them.",
)


class Step(NamedTuple):
    """One step of the rank.

    Attributes:
        begin_s, end_s: by the machine's clock.
        snapshots: taken until its end.
    """

    begin_s: float
    end_s: float
    snapshots: int


class Window(NamedTuple):
    """A time in which exports follow each other, or none runs.

    Attributes:
        begin_s, end_s: by the machine's clock.
        exports: seconds of each export in it.
    """

    begin_s: float
    end_s: float
    exports: tuple[float, ...]


# The rank


def train(core: int, size: str, address: str, pipe: Connection, done: Any) -> None:
    """Trains until the parent says so; counts its steps in `done`, and sends them in the end."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    training = Training(SHAPES[size])
    session = reft.attach(training.model, training.optimizer, job=JOB, daemon=address, every=EVERY)
    steps: list[Step] = []
    while not pipe.poll():
        began = time.monotonic()
        training.step()
        session.step_end()
        steps.append(Step(began, time.monotonic(), int(session.stats()["snapshots"])))
        done.value = len(steps)
        if len(steps) == WARM_STEPS:
            if not session.seal(START_S):
                raise RuntimeError(f"the snapshot did not become whole: {session.stats()}")
            pipe.send(None)
    session.close()
    pipe.send(steps)


@contextmanager
def rank(core: int, size: str, address: str) -> Iterator[tuple[Callable[[], int], Callable[[], list[Step]]]]:
    """Runs the rank; gives two functions: the number of its steps; its end, and all its steps."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    done = context.Value("q", 0, lock=False)
    process = context.Process(target=train, args=(core, size, address, there, done), daemon=True)
    process.start()
    there.close()

    def receive() -> list[Step]:
        if not here.poll(START_S):
            raise RuntimeError(f"the rank says nothing for {START_S:.0f} s")
        steps: list[Step] = here.recv()
        return steps

    def end() -> list[Step]:
        here.send(None)
        return receive()

    try:
        receive()
        yield lambda: done.value, end
    finally:
        process.kill()
        process.join()


# The windows


def export(address: str, folder: Path) -> float:
    """Exports the newest whole step, and removes the files; returns the seconds of the export."""
    path = folder / "export"
    command = [sys.executable, "-m", "reft.cli.main", "export", JOB, "--to", str(path), "--daemon", address]
    paths = os.pathsep.join([str(common.ROOT), str(common.ROOT / "daemon")])
    began = time.monotonic()
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=EXPORT_S, check=False
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    shutil.rmtree(path)
    return seconds


def window(seconds: float, done: Callable[[], int], address: str, folder: Path | None) -> Window:
    """Waits so long, and for some steps; meanwhile exports, if there is a folder."""
    began, first, exports = time.monotonic(), done(), list[float]()
    while time.monotonic() < began + seconds or done() < first + STEPS_LEAST:
        if folder is None:
            time.sleep(LOOK_S)
        else:
            exports.append(export(address, folder))
    return Window(began, time.monotonic(), tuple(exports))


def measure(size: str, rounds: int, seconds: float, disk: Path) -> tuple[list[Window], list[Step]]:
    """Runs all windows; returns them, alone and with exports in turn, and the steps."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("bench/export.py needs 2 cores, and this process may use 1: give it another one")
    os.sched_setaffinity(0, {cores[1]})  # the daemon and the exports inherit it
    with (
        common.daemon() as (address, _),
        common.folder(disk) as folder,
        rank(cores[0], size, address) as (done, end),
    ):
        windows = [window(seconds, done, address, None)]
        for number in range(rounds):
            windows += [window(seconds, done, address, each) for each in (folder, None)]
            print(f"round {number + 1}: {len(windows[-2].exports)} exports", file=sys.stderr, flush=True)
        return windows, end()


# Figures


def steps_in(window: Window, steps: Sequence[Step]) -> list[Step]:
    """Returns the steps that lie in a window as a whole."""
    return [each for each in steps if window.begin_s <= each.begin_s and each.end_s <= window.end_s]


def rows_of(windows: Sequence[Window], steps: Sequence[Step]) -> list[Row]:
    """Returns the figures; of the windows each second one has exports.

    Raises:
        RuntimeError: a window has no step.
    """
    inside = [steps_in(each, steps) for each in windows]
    if not all(inside):
        raise RuntimeError("a window has no whole step: give more --seconds")
    times = [[1000 * (step.end_s - step.begin_s) for step in each] for each in inside]
    medians = [median(each) for each in times]
    ratios = [medians[i] / ((medians[i - 1] + medians[i + 1]) / 2) for i in range(1, len(windows), 2)]
    alone, beside = (
        [each for one in times[first::2] for each in one] for first in range(2)
    )  # milliseconds of each step
    p99 = quantile(beside, 0.99) / quantile(alone, 0.99)
    exports = [each for window in windows for each in window.exports]
    return [
        Row("steps beside exports over steps alone", "ratio", MEDIAN_GOAL, median(ratios), min=min(ratios), max=max(ratios)),
        Row("the same, 99th percentile", "ratio", P99_GOAL, p99),
        Row("step alone", "ms", None, median(alone), p99=quantile(alone, 0.99)),
        Row("step beside exports", "ms", None, median(beside), p99=quantile(beside, 0.99)),
        Row("steps alone", "steps", None, len(alone)),
        Row("steps beside exports", "steps", None, len(beside)),
        Row("snapshots alone", "of all steps", None, snapshots(inside[0::2])),
        Row("snapshots beside exports", "of all steps", None, snapshots(inside[1::2])),
        Row("one export", "s", None, median(exports), min=min(exports), max=max(exports)),
    ]  # fmt: skip


def snapshots(inside: Sequence[Sequence[Step]]) -> float:
    """Returns the share of steps that were taken a snapshot of."""
    taken = sum(each[-1].snapshots - each[0].snapshots for each in inside)
    return taken / max(sum(len(each) - 1 for each in inside), 1)


def main() -> int:
    common.end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 5 s")
    parser.add_argument("--size", type=listed(SHAPES), default="250MB", help="of the state (250MB)")
    parser.add_argument("--rounds", type=count, help="windows with exports (5)")
    parser.add_argument("--seconds", type=count, help="of a window (60)")
    parser.add_argument("--folder", type=Path, help="a folder of the disk", default=Path("/var/tmp"))
    parser.add_argument("--json", type=output, help="write every figure to this file")
    options = parser.parse_args()
    rounds, seconds = options.rounds or (1 if options.quick else 5), options.seconds or (5 if options.quick else 60)
    windows, steps = measure(options.size, rounds, seconds, options.folder)
    rows = rows_of(windows, steps)
    texts = [
        [
            "MISS" if row.is_missed else "pass" if row.goal else "",
            row.name,
            f"{row.value:.3g}",
            row.goal or "",
            row.unit,
        ]
        for row in rows
    ]
    print(common.table(["", "figure", "value", "goal", "unit"], texts))
    if options.json:
        result.write(
            options.json, __file__, f"{TITLE}, {options.size}", rows, NOTES, {"windows": windows, "steps": steps}
        )
    return 1 if any(row.is_missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
