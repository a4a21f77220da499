"""The phases of a recovery, under reft's rendezvous and under torchrun's own, in one run.

    python bench/recovery.py [--nodes 4] [--rounds 1] [--cases worker,node]
        [--backends c10d,reft,warm] [--trace FILE] [--json FILE]

    worker   SIGKILL of one trainer
    node     a node vanishes silently with agent, workers and daemon, and a spare stands by
    warm     a backend: reft's rendezvous with --rdzv-conf=warm=yes, which forks workers from a
             process that has imported torch

Prints a table, and writes a trace for Perfetto. Nodes are namespaces on this machine, with
torchrun's real agents. Trainers hold a small state in reft under both rendezvous. So only the parts
differ that find the loss and restart the workers. Each phase ends when the slowest node or rank has
passed it:

    detect       until the first agent begins to stop its workers
    stop         … all have stopped them
    rendezvous   … all have joined the next round
    spawn        … all new processes exist, and the first line of the script has run
    import       torch and reft are imported: the script's own time, in no goal
    connect      init_process_group, and a barrier
    load         reft.attach: the state is back
    step         the first new step
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import result
from bench.options import count, listed, output
from bench.result import Row
from tests.support.nodes import Machine, Nodes

TRAINER = str(Path(__file__).with_name("recovery_trainer.py"))
PHASES = ("detect", "stop", "rendezvous", "spawn", "import", "connect", "load", "step")
AGENT = {
    "stopping": "Stopping worker group",
    "stopped": "Rendezvous'ing worker group",
    "joined": "Starting worker group",
}
STAMP = re.compile(r"^[IWE](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d+)")
STEPS = 100_000
STEADY = 5  # steps before the loss
RENDEZVOUS = {
    "last_call_timeout": "1",
    "keep_alive_interval": "5",
    "keep_alive_max_attempt": "3",
}  # all but the first are log lines of torch


BACKENDS = {"c10d": ("c10d", {}), "reft": ("reft", {}), "warm": ("reft", {"warm": "yes"})}


@dataclass(frozen=True)
class Span:
    """One phase of one node or rank; seconds since 1970."""

    where: str
    phase: str
    begin: float
    end: float


@dataclass(frozen=True)
class Recovery:
    """One loss and its recovery: seconds by phase, and the work of each node."""

    case: str
    backend: str
    seconds: dict[str, float]
    spans: list[Span]


def agent_moments(log: Path, after: float) -> dict[str, float]:
    """Returns when an agent first did each action of AGENT, after a moment.

    The times are those of torchrun's own log.
    """
    moments: dict[str, float] = {}
    for line in log.read_text(errors="replace").splitlines():
        stamp = STAMP.match(line)
        if not stamp:
            continue
        month, day, hour, minute, second, micro = map(int, stamp.groups())
        at = datetime(datetime.now().year, month, day, hour, minute, second, micro).timestamp()
        for name, text in AGENT.items():
            if at >= after and text in line:
                moments.setdefault(name, at)
    return moments


def marks(out: Path, after: float) -> dict[tuple[str, int], dict[str, float]]:
    """Returns (node, rank) → mark → moment, of processes that began after a moment.

    The first step counts as "step".
    """
    marks_by_rank: dict[tuple[str, int], dict[str, float]] = {}
    lines = (out / "marks").read_text().splitlines() if (out / "marks").exists() else []
    for line in map(json.loads, lines):
        if line["mark"] == "born" and line["at"] > after:
            marks_by_rank[line["node"], line["rank"]] = {"pid": line["pid"]}
        marks_of_rank = marks_by_rank.get((line["node"], line["rank"]), {})
        if marks_of_rank.get("pid") == line["pid"]:
            marks_of_rank.setdefault(line["mark"].split(" ")[0], line["at"])
    return marks_by_rank


def completed(out: Path, world: int, after: float) -> bool:
    """Decides whether all ranks have made a step in processes that began after a moment."""
    return sum("step" in each for each in marks(out, after).values()) >= world


def measure(case: str, backend: str, count: int, number: int) -> Recovery:
    """Runs one job with one loss; returns its recovery."""
    rendezvous, conf = BACKENDS[backend]
    with Nodes(count, ranks_per_node=1) as nodes:
        nodes.launch(
            f"job-{number}", STEPS, backend=rendezvous, agent="torch.distributed.run", script=[TRAINER],
            conf={**RENDEZVOUS, **conf}, environment={"LOGLEVEL": "INFO"},
        )  # fmt: skip
        out = nodes._training.out
        if case == "node":
            nodes.replace()
        nodes.until(lambda: completed(out, count, 0), "the first step of all ranks")
        before = (out / "marks").read_text().count('"step ')
        nodes.until(lambda: (out / "marks").read_text().count('"step ') > before + STEADY * count, "some steps")
        if case == "node":  # the spare must wait already
            logs = sorted(out.glob("node-*.log"))
            nodes.until(lambda: "Rendezvous'ing" in logs[-1].read_text(errors="replace"), "the spare")
        trainer = nodes.trainers()[1]
        lost_at = time.time()
        if case == "node":
            nodes.lose(nodes.living[1], silently=True)
        else:
            trainer.kill()
        nodes.until(lambda: completed(out, count, lost_at), "a step of all ranks after the loss")
        recovery = account(case, backend, nodes.living, out, lost_at)
        (out / "done").touch()
    return recovery


def account(case: str, backend: str, living: list[Machine], out: Path, lost_at: float) -> Recovery:
    """Splits the time between a loss and the first new step into phases."""
    agents = {each.name: agent_moments(out / f"{each.name}.log", lost_at) for each in living}
    ranks = marks(out, lost_at)

    def last(source: dict[Any, dict[str, float]], name: str) -> float:
        return max(each[name] for each in source.values() if name in each)

    ends = [
        min(each["stopping"] for each in agents.values() if "stopping" in each), last(agents, "stopped"),
        last(agents, "joined"), last(ranks, "started"), last(ranks, "imported"), last(ranks, "connected"),
        last(ranks, "loaded"), last(ranks, "step"),
    ]  # fmt: skip
    begins = [lost_at, *ends[:-1]]
    seconds = {phase: end - begin for phase, begin, end in zip(PHASES, begins, ends, strict=True)}
    spans = [Span("job", phase, begin, end) for phase, begin, end in zip(PHASES, begins, ends, strict=True)]
    for node, each in agents.items():
        steps = [("detect", "stopping", lost_at), ("stop", "stopped", 0), ("rendezvous", "joined", 0)]
        at = lost_at
        for phase, name, _ in steps:
            if name in each:
                spans.append(Span(f"{node} agent", phase, at, each[name]))
                at = each[name]
    for (node, rank), each in ranks.items():
        names = ["born", "started", "imported", "connected", "loaded", "step"]
        for phase, begin, end in zip(PHASES[3:], names, names[1:], strict=False):
            if begin in each and end in each:
                spans.append(Span(f"{node} rank {rank}", phase, each[begin], each[end]))
    return Recovery(case, backend, seconds, spans)


def trace(recoveries: list[Recovery]) -> dict[str, Any]:
    """Returns Chrome's JSON format, which ui.perfetto.dev opens.

    It has one process a recovery, and one thread a node or rank, in microseconds.
    """
    events: list[dict[str, Any]] = []
    for pid, recovery in enumerate(recoveries):
        zero = min(span.begin for span in recovery.spans)
        events.append(
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{recovery.case} {recovery.backend}"}}
        )
        places = sorted({span.where for span in recovery.spans})
        for tid, place in enumerate(places):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": place}})
        for span in recovery.spans:
            events.append({
                "ph": "X", "name": span.phase, "pid": pid, "tid": places.index(span.where),
                "ts": (span.begin - zero) * 1e6, "dur": max(span.end - span.begin, 0) * 1e6,
            })  # fmt: skip
    return {"traceEvents": events}


def table(recoveries: list[Recovery]) -> str:
    """Returns the seconds by phase, one row a recovery."""
    rows = [["case", "rendezvous", *PHASES, "all", "without import"]]
    for each in recoveries:
        total = sum(each.seconds.values())
        numbers = [*each.seconds.values(), total, total - each.seconds["import"]]
        rows.append([each.case, each.backend, *(f"{value:.2f}" for value in numbers)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    """Prints each row after its measurement; returns 1 if the medians miss a goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=4)
    parser.add_argument("--rounds", type=count, default=1)
    parser.add_argument("--cases", type=listed(("worker", "node")), default="worker,node")
    parser.add_argument("--backends", type=listed(BACKENDS), default=",".join(BACKENDS))
    parser.add_argument("--trace", type=output)
    parser.add_argument("--json", type=output)
    options = parser.parse_args()
    recoveries: list[Recovery] = []
    for number in range(options.rounds):
        for case in options.cases.split(","):
            for backend in options.backends.split(","):
                recoveries.append(measure(case, backend, options.nodes, number))
                print(table(recoveries[-1:]), flush=True)
    print("\n" + table(recoveries))
    if options.trace:
        options.trace.write_text(json.dumps(trace(recoveries)))
    if options.json:
        details = [{"case": r.case, "backend": r.backend, "seconds": r.seconds} for r in recoveries]
        title = f"Recovery in phases, {options.nodes} nodes"
        result.write(options.json, __file__, title, result_rows(recoveries), details={"recoveries": details})
    return judge(recoveries)


def result_rows(recoveries: list[Recovery]) -> list[Row]:
    """Returns medians by case, rendezvous and phase, for a file of results.

    The rows of a lost node have goals.
    """
    rows = []
    for case, backend in dict.fromkeys((each.case, each.backend) for each in recoveries):
        same = [each.seconds for each in recoveries if (each.case, each.backend) == (case, backend)]
        sums = {phase: [seconds[phase] for seconds in same] for phase in PHASES}
        sums["all phases without import"] = [sum(each.values()) - each["import"] for each in same]
        goals = (
            {"detect": "<= 1.5", "all phases without import": "<= 5"} if case == "node" and backend != "c10d" else {}
        )
        for phase, values in sums.items():
            middle = sorted(values)[len(values) // 2]
            row = Row(
                f"{case} lost, {backend}: {phase}", "s", goals.get(phase), middle, min=min(values), max=max(values)
            )
            rows.append(row)
    return rows


def judge(recoveries: list[Recovery]) -> int:
    """Prints which goals were met; returns 1 if one is missed."""
    seconds_by_case: dict[tuple[str, str], list[dict[str, float]]] = {}
    for each in recoveries:
        seconds_by_case.setdefault((each.case, each.backend), []).append(each.seconds)

    def median(case: str, backend: str, phases: tuple[str, ...]) -> float:
        sums = sorted(sum(seconds[phase] for phase in phases) for seconds in seconds_by_case[case, backend])
        return sums[len(sums) // 2]

    missed = 0
    for backend in ("reft", "warm"):
        if {("worker", backend), ("worker", "c10d")} <= set(seconds_by_case):
            extra = median("worker", backend, PHASES[:4]) - median("worker", "c10d", PHASES[:4])
            print(f"worker lost, {backend}, until user code: {extra:+.2f} s over torchrun's own (goal: at most +1.00)")
            missed += extra > 1.0
        if ("node", backend) in seconds_by_case:
            knows = median("node", backend, PHASES[:1])
            rest = median("node", backend, tuple(phase for phase in PHASES if phase != "import"))
            print(f"node lost, {backend}, until survivors act: {knows:.2f} s (goal: 1.5)")
            print(f"node lost, {backend}, until the first step, without import: {rest:.2f} s (goal: 5)")
            missed += (knows > 1.5) + (rest > 5.0)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
