"""Nodes that can be lost, on this one machine: each has its own network, processes, memory, daemon and torchrun agent.

    with Nodes(4, ranks_per_node=2) as nodes:
        training = nodes.launch("job", steps=24, failpoints=stop_at("snapshot.chunk", rank=3, step=7))
        lost = nodes.await_stop()            # rank 3 stands still in mid-copy; its node is returned
        whole = nodes.whole("job")           # what the daemons call whole now: (epoch, step)
        nodes.lose(lost)                     # SIGKILL of every process at once; its memory is gone
        nodes.replace(1)                     # a fresh node, empty, joins the same rendezvous
        nodes.await_end()                    # every agent but the lost ones ended with 0
        training.result()                    # every line and digest that the ranks wrote

How a node is made: `tests.support.netns`. REFT_TEST_NODES=loopback takes process groups even where namespaces can be
made. However the owner ends, also by SIGKILL, a keeper ends every process, and with the processes all the rest goes.
Agents sort by address, so the ranks of a replacement are the last ones and survivors move up.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from reft.cli.ask import UnknownJob, ask
from reft.cli.demo import clean_up
from reft.cli.demo.cluster import (
    FOREIGN,
    FOREIGN_NAMES,
    LOCAL_ONLY,
    TRAINER,
    DemoError,
    PretendNode,
    Training,
    await_daemon,
    short_folder,
    spawn,
)
from reft.cli.demo.records import TrainingResult, recovery
from reft.errors import DaemonUnavailable, ReftError
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.agent_forks import agent_fork
from tests.support.daemons import ROOT, until
from tests.support.forks import Fork
from tests.support.netns import (
    NODE_MARK,
    Loopback,
    LoopbackStore,
    Space,
    Switch,
    folder_on_loopback,
    marked,
    why_not,
)

# A lost agent is forgotten after keep_alive_interval x keep_alive_max_attempt seconds. An interval of one second, the pace
# at which agents look at the store, would be a livelock: each writes its own sign of life over those of the others, and
# four agents were seen to need minutes for a rendezvous on busy cores.
RENDEZVOUS = {
    "is_host": "false", "join_timeout": "300", "last_call_timeout": "1", "close_timeout": "5", "heartbeat_timeout": "20",
    "keep_alive_interval": "4", "keep_alive_max_attempt": "3", "read_timeout": "120",
}  # fmt: skip
CHUNK_BYTES = 16 << 10  # small: a rank's part of the demo's model has dozens of chunks, so a stop can be in mid-copy
DEADLINE_S = 300.0  # for anything in which all ranks start; two cores may be shared with other tests
STATUS_S = 5.0


def stop_at(point: str, *, rank: int, step: int | None = None, epoch: int = 1, after: int = 0) -> str:
    """A failpoint at which a rank stops for good, for its node to be lost in just that moment.

    Args:
        point: its name, such as "snapshot.chunk".
        step: fires at the first snapshot of this step or a later one; None at points that know no step.
        epoch: counts the attaches of the job from 1.
        after: how many hits pass first.
    """
    # Stopped, not killed: its agent would notice a dead worker, and begin to restart the others before we look.
    return f"{point}:stop:rank={rank}:epoch={epoch}:after={after}" + ("" if step is None else f":from={step}")


@dataclass
class Machine(PretendNode):
    """A node that can be lost. `socket` is its path as seen from here."""

    place: Space | Loopback | None = None
    inside: str = ""  # the daemon's address for the node's own processes
    agent: subprocess.Popen[bytes] | Fork | None = None
    command: Sequence[str] = ()  # of its daemon

    @property
    def living(self) -> Space | Loopback:
        assert self.place is not None, f"{self.name} is lost"
        return self.place


@dataclass(frozen=True)
class Launch:
    """How the agents of a job are started: now, and on nodes that join later."""

    training: Training
    command: Sequence[str]
    script: Sequence[str]
    environment: Mapping[str, str]
    agents: list[Any] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)


class Nodes:
    """See the module.

    Args:
        count: how many nodes there are at all times: torchrun waits for that many.
        ranks_per_node: trainers on each.
        daemon_flags: further flags of all daemons.
    """

    def __init__(self, count: int, ranks_per_node: int, daemon_flags: Sequence[str] = ()) -> None:
        self._daemon_flags = daemon_flags
        self.count, self.ranks_per_node = count, ranks_per_node
        self.world = count * ranks_per_node
        self.reason = "REFT_TEST_NODES=loopback" if os.environ.get("REFT_TEST_NODES") == "loopback" else why_not()
        self.folder = short_folder()
        self.machines: list[Machine] = []
        self.timeline: list[str] = []
        self._made = 0
        self._launch: Launch | None = None
        self._shared = folder_on_loopback(self.folder) if self.reason else self.folder / "node"
        self._shared.mkdir(mode=0o700, exist_ok=True)
        self._keeper = clean_up.start([self.folder, self._shared])
        self._began_s = time.monotonic()

    def __enter__(self) -> Nodes:
        try:
            if self.reason:
                print(f"nodes are processes on loopback, not namespaces: {self.reason}", flush=True)
            spawn_store = partial(spawn, log=self.folder / "store.log", mark=self.folder, environment={})
            self._switch = LoopbackStore(spawn_store) if self.reason else Switch(spawn_store)
            self._add(self.count)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process at once and removes the folders; returns when that is done."""
        print("\n".join(self.timeline), flush=True)
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()

    def note(self, text: str) -> None:
        """A line of the timeline, which every failure shows and `close` prints."""
        self.timeline.append(f"{time.monotonic() - self._began_s:6.1f} s  {text}")

    # Nodes

    @property
    def living(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.place is not None]

    def lose(self, *lost: Machine, silently: bool = False) -> float:
        """Ends nodes with all that they hold; the moment, in seconds of the monotonic clock.

        Args:
            silently: their peers' connections are not reset: they just hear nothing more (not on loopback).
        """
        places = [machine.living for machine in lost]
        for machine in lost:
            machine.place = None
        if silently:
            for place in places:
                place.unplug()
        at = time.monotonic()
        for place in places:
            place.kill()
        for place in places:
            place.bury()
        self.note(f"{', '.join(machine.name for machine in lost)} lost{' silently' if silently else ''}")
        return at

    def replace(self, count: int = 1) -> list[Machine]:
        """Adds fresh nodes, whose agents join the running job."""
        return self._add(count)

    def _add(self, count: int) -> list[Machine]:
        added = [self._make() for _ in range(count)]
        self.machines += added
        for machine in added:
            await_daemon(machine)
        self.note(f"daemons of {', '.join(machine.name for machine in added)} answer")
        for machine in added:
            self._start_agent(machine)
        return added

    def _make(self) -> Machine:
        self._made += 1
        name = f"node-{self._made}"
        log = self.folder / f"{name}.daemon.log"
        if isinstance(self._switch, Switch):
            start = partial(spawn, log=log, mark=self.folder, environment={NODE_MARK: self._mark(name)})
            place: Space | Loopback = Space(self._switch, self._made, self._shared, start)
        else:
            place = Loopback(self._made, self._shared / name, self._mark(name))
        slots, socket = place.folder / "slots", place.folder / "daemon.sock"
        machine = Machine(name, slots, place.seen(socket), log, place=place, inside=f"unix:{socket}")
        insecure = ["--insecure"] if isinstance(place, Space) and "--tls-cert" not in self._daemon_flags else []
        machine.command = [sys.executable, "-m", "reft_daemon", "--node", name, "--socket", str(socket), "--dir", str(slots),
                           "--listen", place.listen, *insecure, *self._daemon_flags]  # fmt: skip
        machine.daemon = self.start_daemon(machine)
        return machine

    def start_daemon(self, machine: Machine) -> subprocess.Popen[bytes]:
        """Starts a node's daemon, also again; returns at once."""
        return self._spawn(machine, machine.command, machine.log, {})

    def _mark(self, name: str) -> str:
        return str(self.folder / name)

    def _spawn(
        self, machine: Machine, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        own = {NODE_MARK: self._mark(machine.name), "PYTHONPATH": path, **environment}
        return spawn(machine.living.enter(command), log, self.folder, own)

    def _fork(self, machine: Machine, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Fork:
        """As `_spawn` of `python -m` with these arguments, but torch is imported already."""
        marks = {NODE_MARK: self._mark(machine.name), clean_up.MARK: str(self.folder)}
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
        }
        path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        return agent_fork(
            arguments, {**kept, **marks, "PYTHONPATH": path, **environment}, marks, log, machine.living.init
        )

    # Jobs

    def launch(
        self, job: str, steps: int, *, failpoints: str = "", environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (), restarts: int = 4, backend: str = "c10d", conf: Mapping[str, str] | None = None,
        fewest: int = 0, agent: str = "tests.support.agent", script: Sequence[str] = (), endpoint: str = "",
    ) -> Training:  # fmt: skip
        """Starts a job's agents; returns at once. A job before it must have ended.

        Args:
            job: becomes torchrun's --rdzv-id, and so the job's name.
            steps: that it trains.
            failpoints: REFT_FAILPOINTS of all trainers, also of those of nodes that come later.
            environment: further variables of the trainers.
            arguments: further arguments of the script.
            restarts: how often an agent may restart its workers.
            backend: torchrun's --rdzv-backend.
            conf: further options of --rdzv-conf.
            fewest: nodes with which the job goes on; 0: all.
            agent: the module that is torchrun; the default forks workers that have torch, and takes modules alone.
            script: what it runs, in place of the demo's trainer; it is told what that one is told.
            endpoint: of a rendezvous store that is not the switch's.
        """
        out = self.folder / job
        out.mkdir()
        command = [
            sys.executable, "-m", agent, f"--nnodes={fewest or self.count}:{self.count}",
            f"--nproc-per-node={self.ranks_per_node}", f"--rdzv-backend={backend}", f"--rdzv-id={job}",
            f"--rdzv-endpoint={endpoint or self._switch.endpoint}", f"--max-restarts={restarts}",
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in {**RENDEZVOUS, **(conf or {})}.items()),
        ]  # fmt: skip
        script = [*(script or [TRAINER]), "--out", str(out), "--steps", str(steps), *arguments]
        given = {"REFT_FAILPOINTS": failpoints, "REFT_CHUNK_BYTES": str(CHUNK_BYTES), **(environment or {})}
        agents: list[Any] = []
        logs: list[Path] = []
        training = Training(job, self.world, out, agents, logs)
        self._launch = Launch(training, command, script, given, agents, logs)
        for machine in self.living:
            self._start_agent(machine)
        self.note(f"agents of job {job} are started")
        return training

    def _start_agent(self, machine: Machine) -> None:
        if self._launch is None:
            return
        command = [*self._launch.command, f"--local-addr={machine.living.address}", *self._launch.script]
        environment = {
            **LOCAL_ONLY, "GLOO_SOCKET_IFNAME": self._switch.interface, "REFT_DAEMON": machine.inside,
            **self._launch.environment,
        }  # fmt: skip
        log = self._launch.training.out / f"{machine.name}.log"
        if "LOGLEVEL" in environment:  # which torch reads when it is imported
            machine.agent = self._spawn(machine, command, log, environment)
        else:
            machine.agent = self._fork(machine, command[2:], log, environment)
        self._launch.agents.append(machine.agent)
        self._launch.logs.append(log)

    def kill_ranks(self, *ranks: int) -> float:
        """SIGKILLs trainers, but not their nodes; the moment, in seconds of the monotonic clock."""
        victims = [process for rank, process in self.trainers().items() if rank in ranks]
        at = time.monotonic()
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):  # it died of the death of the one before
                process.kill()
        self.note(f"SIGKILL of ranks {sorted(ranks)}")
        return at

    def trainers(self) -> dict[int, psutil.Process]:
        """rank → its living process, by the numbers of this machine."""
        found: dict[int, psutil.Process] = {}
        for machine in self.living:
            try:
                status = ask(machine.address, "Status", pb.StatusRequest(job=self._training.job), STATUS_S).jobs[0]
            except UnknownJob:
                continue  # it stands by
            by_number = {_number_inside(process): process for process in marked(self._mark(machine.name))}
            mine = [rank for rank in status.ranks if rank.node == machine.name and rank.alive]
            found |= {rank.rank: by_number[rank.pid] for rank in mine if rank.pid in by_number}
        return found

    # Looking

    def statuses(self, job: str) -> list[pb.JobStatus]:
        """What each living daemon says of a job; those that do not answer, or do not know it, are left out."""
        found = []
        for machine in self.living:
            try:
                found += ask(machine.address, "Status", pb.StatusRequest(job=job), STATUS_S).jobs
            except (DaemonUnavailable, UnknownJob):
                continue
        return found

    def statuses_of_signals(self, job: str) -> list[list[pb.NodeSignal]]:
        """What each living daemon that watches a job says of its nodes, if it hears the agents of all others and all are well."""
        found = []
        for machine in self.living:
            try:
                nodes = list(ask(machine.address, "Signals", pb.SignalsRequest(job=job), STATUS_S).nodes)
            except ReftError:
                continue  # it does not watch the job
            is_heard = all(each.agent for each in nodes if each.node != machine.name)
            if nodes and is_heard and all(each.signal in (pb.HEALTHY, pb.SNAP) for each in nodes):
                found.append(nodes)
        return found

    def whole(self, job: str) -> tuple[int, int]:
        """The newest version that any living daemon calls whole, as (count of the epoch, step); (0, -1): none."""
        return max(((s.epoch.counter, s.whole) for s in self.statuses(job) if s.whole >= 0), default=(0, -1))

    def stopped(self) -> Machine | None:
        """The node of a trainer that stands still at a failpoint; None if there is none."""
        for machine in self.living:
            for process in marked(self._mark(machine.name)):
                with contextlib.suppress(psutil.Error):
                    if process.status() == psutil.STATUS_STOPPED:
                        return machine
        return None

    # Waiting

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
        """The first true value of `condition`; fails, with the timeline and all logs, when an agent has or at the deadline."""

        def look() -> Any:
            codes = {machine.name: machine.agent.poll() for machine in self.living if machine.agent}
            value = condition()
            if not value and (any(codes.values()) or None not in codes.values()):
                raise DemoError(f"agents ended with {codes} before {what}.\n{self.story()}")
            return value

        try:
            return until(look, deadline_s, what)
        except AssertionError as error:
            raise DemoError(f"{error}.\n{self.story()}") from error

    def await_stop(self) -> Machine:
        """The node of the trainer that has stopped at its failpoint, once it has."""
        machine: Machine = self.until(self.stopped, "a trainer's stop at its failpoint")
        self.note(f"a trainer of {machine.name} stands at its failpoint")
        return machine

    def await_step(self, step: int) -> None:
        """Returns when all ranks have completed `step` in their newest attempt."""
        self.until(lambda: self._training.result().completed >= step, f"the end of step {step}")
        self.note(f"all ranks have completed step {step}")

    def await_protection(self, epoch: int) -> None:
        """Returns when a version of an epoch of at least this count is whole: a loss may follow then."""
        self.until(lambda: self.whole(self._training.job) >= (epoch, 0), f"a whole version of epoch {epoch}")
        self.note(f"{self.whole(self._training.job)} is whole")

    def await_recovery(self, lost_s: float) -> None:
        """Returns when every rank has trained a step in a process that began after `lost_s`."""
        self.until(lambda: recovery(self._training.result(), lost_s), "a step of every rank after the loss")
        back = recovery(self._training.result(), lost_s)
        assert back is not None
        self.note(
            f"all ranks ran the script again {back.up_s:.1f} s after the loss, had trained a step after "
            f"{back.first_step_s:.1f} s, from step {back.base} ({back.source})"
        )

    def await_end(self) -> TrainingResult:
        """What the ranks wrote, once every agent of a living node has ended with 0."""
        agents = [machine.agent for machine in self.living if machine.agent]
        self.until(lambda: all(agent.poll() == 0 for agent in agents), "the end of the training")
        self.note("the training has ended")
        return self._training.result()

    @property
    def _training(self) -> Training:
        assert self._launch is not None, "no job was launched"
        return self._launch.training

    def story(self) -> str:
        """Everything that helps a person to find out what happened."""
        parts = [*self.timeline, self._training.tail(40)] if self._launch else list(self.timeline)
        for log in sorted(self.folder.glob("*.log")):
            parts += [f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(parts)


def _number_inside(process: psutil.Process) -> int:
    """A process's number in its own namespace; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
