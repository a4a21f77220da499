"""What snapshots cost, with a core free and with every core busy.

    python bench/save.py [--quick] [--rounds N] [--json FILE]

Compares training alone, reft at every step, torch.distributed.checkpoint.async_save at every step,
and a blocking copy into mapped memory. One run, one daemon a mode, real `reft.attach`. In each
round the ways take turns in blocks of a few steps, in random order. The figure is the difference to
the plain blocks of the same round, in memcpys of the state:

    extra = median over rounds of (median step with - median step without) / median memcpy

Other processes on the machine disturb the figures. So a block waits until they are quiet
(--patience). A disturbed step counts only if the round has no others.

`--ways plain,read,bare,reft` adds threads with nothing else to do beside training. `bare` copies
and digests the same bytes: the cost of any snapshot on another core. `read` only digests them, so
it reads each byte once.

Fresh processes take a first snapshot each, others restore it (bench/restoring.py), and one measures
the memory that reft needs.

Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import reft
from bench import common, restoring, result
from bench.common import Goal, Mapped, Others, Training, median, quantile, summary
from bench.options import count, listed, output
from bench.result import Row

# Steps before attach, and after it. Many, because the heap of training alone varies by tens of
# megabytes.
STEPS_OF_MEMORY = 12
NEVER = 1 << 40  # as `every`: no snapshot
WAYS = ("plain", "reft", "copy", "dcp", "bare", "read")
STEPS = 4  # of a block; the first does not count, because no copy of the block is under way
QUIET_CORES = 0.15  # a step is disturbed if other processes used more cores than this
CALM_S = 0.25
JOB = "bench-save"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="21 M parameters, 2 rounds, 2 first snapshots, 2 restores")
    parser.add_argument("--rounds", type=count, help="rounds of each mode (12)")
    parser.add_argument("--firsts", type=int, help="fresh processes of each mode that take a first snapshot (5)")
    parser.add_argument("--restores", type=int, help="fresh processes that restore, of each kind (5)")
    parser.add_argument(
        "--modes",
        type=listed(("free", "busy")),
        default="free,busy",
        help="free: one core is left alone; busy: all compute",
    )
    parser.add_argument(
        "--ways", type=listed(WAYS), default="plain,reft,copy,dcp", help="the ways that take turns; also bare and read"
    )
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds a mode may wait for other processes to be quiet"
    )
    parser.add_argument(
        "--keep-heap", action="store_true", help="let malloc keep freed memory (no page faults in a step)"
    )
    parser.add_argument("--json", type=output, help="write every figure to this file")
    parser.add_argument("--role", choices=["train", "first", "restore", "memory"], help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="busy", help=argparse.SUPPRESS)
    parser.add_argument("--into", choices=restoring.INTO, default="fresh", help=argparse.SUPPRESS)
    parser.add_argument("--daemon", help=argparse.SUPPRESS)
    parser.add_argument("--daemon-pid", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 12)
    options.firsts = options.firsts if options.firsts is not None else (2 if options.quick else 5)
    options.restores = options.restores if options.restores is not None else (2 if options.quick else 5)
    return options


def set_threads(mode: str) -> None:
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores - 1) if mode == "free" else cores)


# Role: train


class Bench:
    """One training process; the ways of saving take turns in it."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.ways = options.ways.split(",")
        self.scratch = scratch
        self.training = Training(common.QUICK if options.quick else common.FULL)
        self._watch_fence()
        self.session = reft.attach(self.training.model, self.training.optimizer, job=JOB, daemon=options.daemon)
        self._watch_fence()
        self.first_s, self.first_blocked_s = self.time_to_sealed()
        self.mapped = Mapped(self.training.tensors())
        self.mapped.copy()
        self.patience_s = options.patience
        self.upload: Any = None
        self.beside = threading.Thread()
        self.beside.start()
        self.group = self._group() if "dcp" in self.ways else None
        self.steps: dict[str, list[list[float]]] = {way: [] for way in self.ways}
        self.quiet: dict[str, list[list[bool]]] = {way: [] for way in self.ways}
        self.times: dict[str, list[float]] = {
            key: [] for key in ("memcpy", "digest", "sealed", "mark", "fence", "blocked", "dcp_call")
        }

    def _watch_fence(self) -> None:
        """Installs a hook; called before and after attach.

        reft's own hook then runs between these two, and nothing else does.
        """
        self.hooked_s: list[float] = []
        self.training.optimizer.register_step_pre_hook(lambda *_: self.hooked_s.append(time.perf_counter()))

    def _group(self) -> Any:
        dist.init_process_group("gloo", init_method=f"file://{self.scratch / 'store'}", rank=0, world_size=1)
        return dist.new_group([0], backend="gloo")

    def close(self) -> None:
        self.session.close()
        if self.group is not None:
            dist.destroy_process_group()

    # The work after an optimizer step

    def after_plain(self) -> None:
        self.session.step_end()

    def after_reft(self) -> None:
        began = time.perf_counter()
        self.session.step_end()
        self.times["mark"].append(time.perf_counter() - began)

    def after_copy(self) -> None:
        self.mapped.copy()
        self.session.step_end()

    def after_bare(self) -> None:
        self._beside(self.mapped.copy_and_digest)

    def after_read(self) -> None:
        self._beside(self.mapped.digest)

    def _beside(self, work: Callable[[], object]) -> None:
        self.beside.join()
        self.beside = threading.Thread(target=work)
        self.beside.start()
        self.session.step_end()

    def after_dcp(self) -> None:
        began = time.perf_counter()
        if self.upload is not None:
            self.upload.result()
        writer = dcp.FileSystemWriter(self.scratch / "checkpoint", overwrite=True)
        self.upload = dcp.async_save(self.training.tree(), storage_writer=writer, process_group=self.group)
        self.times["dcp_call"].append(time.perf_counter() - began)
        self.session.step_end()

    # Blocks

    def time_to_sealed(self) -> tuple[float, float]:
        """Runs a step, and then waits until its snapshot is sealed.

        Returns the seconds from the mark, and those of the mark itself.
        """
        common.snapshot_each(self.session, 1)
        self.training.step()
        began = time.perf_counter()
        self.session.step_end()
        marked = time.perf_counter()
        self._until("sealed_step")
        taken = time.perf_counter() - began
        self._until("whole_step")
        common.snapshot_each(self.session, NEVER)
        return taken, marked - began

    def _until(self, counter: str) -> None:
        end = time.perf_counter() + 20
        while self.session.stats()[counter] < self.session.step:
            if time.perf_counter() > end:
                raise RuntimeError(f"step {self.session.step} is not sealed and whole: {self.session.stats()}")
            time.sleep(0.0005)

    def calm(self) -> None:
        """Waits until other processes are quiet, while there is patience left."""
        others = Others()
        while self.patience_s > 0:
            time.sleep(CALM_S)
            self.patience_s -= CALM_S
            if others.cores() < QUIET_CORES:
                return

    def block(self, way: str) -> None:
        """Runs a few steps of one way.

        Only the later steps count, because the way's earlier copy is under way in them.
        """
        before, first = self.session.stats(), self.session.step
        after: Callable[[], None] = getattr(self, f"after_{way}")
        common.snapshot_each(self.session, 1 if way == "reft" else NEVER)
        steps, quiet, others = [], [], Others()
        for i in range(STEPS):
            self.hooked_s.clear()
            began = time.perf_counter()
            self.training.step()
            after()
            if i:
                steps.append(time.perf_counter() - began)
                quiet.append(others.cores() < QUIET_CORES)
                if way == "reft":
                    self._note_blocked()
            else:
                others.cores()
        self.steps[way].append(steps)
        self.quiet[way].append(quiet)
        common.snapshot_each(self.session, NEVER)
        if way == "reft":
            self._until("whole_step")
            taken = self.session.stats()["snapshots"] - before["snapshots"]
            if taken != self.session.step - first:
                raise RuntimeError(
                    f"{taken} of {self.session.step - first} snapshots were taken: {self.session.stats()}"
                )
        self.beside.join()
        if self.upload is not None:
            self.upload.result()
            self.upload = None

    def _note_blocked(self) -> None:
        fence = self.hooked_s[1] - self.hooked_s[0]
        self.times["fence"].append(fence)
        # A snapshot begins at the mark of one step, and ends at the fence of the next.
        self.times["blocked"].append(fence + self.times["mark"][-2])

    def round(self) -> None:
        order = [*self.ways, "plain", "reft"] if "reft" in self.ways else list(self.ways)
        random.shuffle(order)
        for way in order:
            self.calm()
            self.times["memcpy"].append(self.mapped.copy())
            self.block(way)
        self.calm()
        for _ in range(2):
            self.times["digest"].append(self.mapped.digest())
            self.times["sealed"].append(self.time_to_sealed()[0])
            self.times["memcpy"].append(self.mapped.copy())


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Runs all rounds of one mode."""
    set_threads(options.mode)
    with common.folder(common.SHM) as scratch:
        bench = Bench(options, scratch)
        for way in bench.ways:
            bench.block(way)  # warms up allocators, caches and files
        for kept in (bench.times, bench.steps, bench.quiet):
            for values in kept.values():
                values.clear()
        for i in range(options.rounds):
            bench.round()
            print(f"round {i + 1}", bench.session.stats(), flush=True)
        stats = bench.session.stats()
        measurements = {
            "mode": options.mode,
            "rounds": options.rounds,
            "state_bytes": bench.mapped.nbytes,
            "steps": bench.steps,
            "quiet": bench.quiet,
            "times": bench.times,
            "stats": stats,
            "daemon_bytes": common.own_bytes(options.daemon_pid),
        }
        bench.close()
    return measurements


# Roles: first, memory; restore: bench/restoring.py


def first(options: argparse.Namespace) -> dict[str, Any]:
    """Takes the first snapshot of a fresh process, and later ones."""
    set_threads(options.mode)
    with common.folder(common.SHM) as scratch:
        bench = Bench(options, scratch)
        later = [bench.time_to_sealed()[0] for _ in range(3)]
        bench.close()
    return {"first_s": bench.first_s, "first_blocked_s": bench.first_blocked_s, "later_s": median(later)}


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the memory that attach and snapshots add to a trainer.

    Slots and state do not count.
    """
    set_threads("busy")
    training = Training(common.QUICK if options.quick else common.FULL)
    peaks = []
    for _ in range(STEPS_OF_MEMORY):
        training.step()
        peaks.append(common.own_bytes())
    session = reft.attach(training.model, training.optimizer, job=f"{JOB}-memory", daemon=options.daemon)
    for _ in range(STEPS_OF_MEMORY):
        training.step()
        session.step_end()
        peaks.append(common.own_bytes())
    if not session.seal():
        raise RuntimeError(f"not sealed: {session.stats()}")
    daemon_bytes = common.own_bytes(options.daemon_pid)
    session.close()
    before, after = peaks[:STEPS_OF_MEMORY], peaks[STEPS_OF_MEMORY:]
    return {"trainer_bytes": max(after) - max(before), "daemon_bytes": daemon_bytes}


# Figures


def extra(measurements: dict[str, Any], way: str) -> dict[str, float]:
    """Returns the extra time per step of a way, in memcpys.

    Paired by round; and over all rounds by medians, quiet steps and minima.
    """
    memcpy = median(measurements["times"]["memcpy"])
    flat, quiet, pairs = {}, {}, []
    for name in ("plain", way):
        both = [
            list(zip(s, q, strict=True))
            for s, q in zip(measurements["steps"][name], measurements["quiet"][name], strict=True)
        ]
        flat[name] = [step for block in both for step, _ in block]
        quiet[name] = [step for block in both for step, is_quiet in block if is_quiet]
    for i in range(measurements["rounds"]):
        pairs.append(median(_of_round(measurements, way, i)) - median(_of_round(measurements, "plain", i)))
    return {
        "paired": median(pairs) / memcpy,
        "medians": (median(flat[way]) - median(flat["plain"])) / memcpy,
        "quiet": (median(quiet[way]) - median(quiet["plain"])) / memcpy,
        "minima": (min(flat[way]) - min(flat["plain"])) / min(measurements["times"]["memcpy"]),
        "p99_s": quantile(flat[way], 0.99),
        "step_s": median(flat[way]),
    }


def _of_round(measurements: dict[str, Any], way: str, index: int) -> list[float]:
    """Returns the steps of one way in one round.

    If some were undisturbed, these are the undisturbed ones. A way may have several blocks in a
    round.
    """
    share = len(measurements["steps"][way]) // measurements["rounds"]
    blocks = slice(index * share, (index + 1) * share)
    steps = [step for block in measurements["steps"][way][blocks] for step in block]
    quiet = [is_quiet for block in measurements["quiet"][way][blocks] for is_quiet in block]
    return [step for step, is_quiet in zip(steps, quiet, strict=True) if is_quiet] or steps


def goals(measurements: dict[str, Any]) -> list[Goal]:
    """Returns every goal of this benchmark, with its measurement."""
    made = []
    for mode, data in measurements["modes"].items():
        times = data["times"]
        memcpy, digest, sealed = (median(times[key]) for key in ("memcpy", "digest", "sealed"))
        limit = 0.15 if mode == "free" else 1.25
        made += [
            Goal(f"{mode}: extra time per step", extra(data, "reft")["paired"], limit, "memcpy",
                 "median over rounds of (step with reft - plain step) / memcpy"),
            Goal(f"{mode}: training thread blocked", 100 * median(times["blocked"]) / memcpy, 1.0, "% of memcpy",
                 "median of (mark + fence) / memcpy"),
            Goal(f"{mode}: first snapshot", median([each["first_s"] / each["later_s"] for each in data["firsts"]]), 1.5,
                 "of later", "median over fresh processes of first / later time to sealed"),
            Goal(f"{mode}: time to sealed", sealed / (memcpy + digest), 1.25, "of copy+digest",
                 "median mark to SEALED, trainer idle / (memcpy + xxh3 of the same bytes)"),
        ]  # fmt: skip
    made += restoring.goals(measurements["restores"])
    if measurements["memory"]:
        made.append(
            Goal(
                "daemon's memory beside slots",
                measurements["memory"]["daemon_bytes"] / 1e6,
                100,
                "MB",
                "RssAnon + RssFile + VmPTE",
            )
        )
        made.append(
            Goal(
                "trainer's memory beside slots",
                measurements["memory"]["trainer_bytes"] / 1e6,
                50,
                "MB",
                "the same, after - before attach",
            )
        )
    return made


def result_rows(measurements: dict[str, Any]) -> list[Row]:
    """Returns goals with measurements, then each way's cost, then the restores."""
    rows = [goal.result() for goal in goals(measurements)]
    for mode, data in measurements["modes"].items():
        memcpy_ms = 1000 * median(data["times"]["memcpy"])
        rows.append(Row(f"{mode}: the memcpy", "ms", None, memcpy_ms))
        blocked = data["times"]["blocked"]
        if blocked:
            rows.append(
                Row(
                    f"{mode}: training thread blocked",
                    "ms",
                    None,
                    1000 * median(blocked),
                    p99=1000 * quantile(blocked, 0.99),
                )
            )
        for way in data["steps"]:
            e = extra(data, way)
            rows.append(Row(f"{mode}, {way}: step", "s", None, e["step_s"], p99=e["p99_s"]))
            if way != "plain":
                names = {"paired": "paired", "medians": "by the medians of all steps", "minima": "by the fastest steps"}
                rows += [Row(f"{mode}, {way}: extra, {name}", "memcpy", None, e[key]) for key, name in names.items()]
    for into, name in restoring.INTO.items():
        for key, what in {"load_s": "state is back", "attach_s": "attach"}.items():
            some = [each[key] for each in measurements["restores"] if each["into"] == into]
            if some:
                rows.append(Row(f"{name}: {what}", "s", None, median(some), min=min(some), max=max(some)))
    return rows


def disturbed(measurements: dict[str, Any]) -> str:
    """Returns a sentence on how noisy the machine was."""
    percentages = []
    for mode, data in measurements["modes"].items():
        quiet = [each for blocks in data["quiet"].values() for block in blocks for each in block]
        percentages.append(f"{mode}: {100 * (1 - sum(quiet) / len(quiet)):.0f} %")
    return f"Steps that other processes disturbed: {', '.join(percentages)}."


def report(measurements: dict[str, Any]) -> str:
    """Returns the tables for a person."""
    rows = [goal.row() for goal in goals(measurements)]
    parts = [common.table(["", "goal", "measured", "limit", "unit", "formula"], rows)]
    lines = []
    for mode, data in measurements["modes"].items():
        for way in data["steps"]:
            e = extra(data, way)
            lines.append([mode, way, f"{e['step_s']:.3f}", f"{e['p99_s']:.3f}", *(f"{e[key]:.2f}" for key in
                          ("paired", "medians", "quiet", "minima"))])  # fmt: skip
    head = ["mode", "way", "step s", "p99 s", "extra/memcpy: paired", "medians", "quiet steps", "minima"]
    parts.append(common.table(head, lines))
    times = []
    for mode, data in measurements["modes"].items():
        for name, values in data["times"].items():
            if values:
                s = summary(values)
                cells = (f"{1000 * s[key]:.3f}" for key in ("min", "median", "p99"))
                times.append([mode, name, *cells, str(s["count"])])
        for name in ("first_s", "first_blocked_s"):
            s = summary([each[name] for each in data["firsts"]])
            cells = (f"{1000 * s[key]:.3f}" for key in ("min", "median", "p99"))
            times.append([mode, name.removesuffix("_s"), *cells, str(s["count"])])
    parts.append(common.table(["mode", "time, ms", "min", "median", "p99", "count"], times))
    for each in measurements["restores"]:
        parts.append(
            f"restore, {each['into']}: "
            + ", ".join(f"{key} {value:.3f}" for key, value in each.items() if key != "into")
        )
    for mode, data in measurements["modes"].items():
        quiet = [each for blocks in data["quiet"].values() for block in blocks for each in block]
        stats = data["stats"]
        parts.append(f"{mode}: {100 * (1 - sum(quiet) / len(quiet)):.0f} % of the steps were disturbed by other processes; "
                     f"{stats['snapshots']} snapshots sealed and whole, {stats['skipped']} skipped")  # fmt: skip
    return "\n\n".join(parts)


def main() -> int:
    options = parse()
    common.end_on_signals()
    if options.role:
        restore: Callable[..., dict[str, Any]] = partial(restoring.restore, job=JOB)
        role = {"train": train, "first": first, "restore": restore, "memory": memory}[options.role]
        options.result.write_text(json.dumps(role(options)))
        return 0
    measurements: dict[str, Any] = {"modes": {}, "restores": [], "memory": {}}
    shared = ["--quick"] * options.quick + ["--rounds", str(options.rounds), "--ways", options.ways,
              "--patience", str(options.patience)]  # fmt: skip
    keep = {
        "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
    }
    environment = keep if options.keep_heap else {}

    def run(role: str, address: str, pid: int, mode: str = "busy", more: Sequence[str] = ()) -> dict[str, Any]:
        arguments = ["--role", role, "--mode", mode, "--daemon", address, "--daemon-pid", str(pid), *shared, *more]
        with common.folder() as home:
            return common.run_role("save.py", arguments, environment if role in ("train", "first") else {}, home)

    modes = options.modes.split(",")
    for mode in modes:
        firsts = []
        for _ in range(options.firsts):
            with common.daemon() as (address, pid):
                firsts.append(run("first", address, pid, mode))
        with common.daemon() as (address, pid):
            measurements["modes"][mode] = {**run("train", address, pid, mode), "firsts": firsts}
            if mode == modes[-1]:
                kinds = [into for _ in range(options.restores) for into in restoring.INTO]
                measurements["restores"] = [run("restore", address, pid, more=["--into", into]) for into in kinds]
    if options.restores:
        with common.daemon() as (address, pid):
            several = [run("memory", address, pid) for _ in range(3)]
            measurements["memory"] = {key: median([each[key] for each in several]) for key in several[0]}
    measurements["goals"] = [{**vars(goal), "passed": goal.passed} for goal in goals(measurements)]
    if options.json:
        title = "Snapshots at every step" + ", a model of 21 M parameters" * options.quick
        result.write(options.json, __file__, title, result_rows(measurements), [disturbed(measurements)], measurements)
    print(report(measurements))
    return 0 if all(goal["passed"] for goal in measurements["goals"]) else 1


if __name__ == "__main__":
    sys.exit(main())
