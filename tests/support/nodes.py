"""Nodes on this machine that tests can lose: with own network, processes, memory, daemon, agent.

    with Nodes(4, ranks_per_node=2) as nodes:
        training = nodes.launch("job", steps=24, failpoints=stop_at("snapshot.chunk", rank=3,
        step=7))
        lost = nodes.await_stop()            # rank 3 has stopped during a copy; returns its node
        whole = nodes.whole("job")           # the newest whole version: (epoch, step)
        nodes.lose(lost)                     # SIGKILL of every process at once; its memory is gone
        nodes.replace(1)                     # an empty node joins the same rendezvous
        nodes.await_end()                    # every agent but the lost ones ended with 0
        training.result()                    # every line and digest that the ranks wrote

`tests.support.netns` makes the nodes. REFT_TEST_NODES=loopback uses process groups even where
namespaces can be made. A keeper process ends all processes when the owner ends, also by SIGKILL;
their namespaces and memory go with them. Agents sort by address, so the ranks of a replacement come
last, and survivors get lower ranks.
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

from reft.cli.ask import NoSuchJob, ask
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
from reft.core.text import counted
from reft.errors import DaemonUnavailable, ReftError
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.agent_forks import agent_fork
from tests.support.certificates import USER, Certificates
from tests.support.commands import BIN
from tests.support.daemon_forks import daemon_fork
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

# A lost agent is forgotten after keep_alive_interval x keep_alive_max_attempt seconds. Agents read
# the store once a second. With an interval of one second they would livelock: each agent's
# heartbeat overwrites those of the others. On busy cores four agents then needed minutes for a
# rendezvous.
RENDEZVOUS = {
    "is_host": "false", "join_timeout": "300", "last_call_timeout": "1", "close_timeout": "5", "heartbeat_timeout": "20",
    "keep_alive_interval": "4", "keep_alive_max_attempt": "3", "read_timeout": "120",
}  # fmt: skip
# So small that a rank writes dozens of chunks, and can be stopped during a copy.
CHUNK_BYTES = 16 << 10
DEADLINE_S = 300.0  # for a start of all ranks; two cores may be shared with other tests
STATUS_S = 5.0


def stop_at(point: str, *, rank: int, step: int | None = None, epoch: int = 1, after: int = 0) -> str:
    """Returns a failpoint that stops a rank for good. A test can lose the rank's node then.

    Args:
        point: the name of the failpoint, such as "snapshot.chunk".
        rank: the rank that stops.
        step: the failpoint fires at the first snapshot of this step or a later one; None if the
            point has no step.
        epoch: the number of the attach, from 1.
        after: how many hits pass first.
    """
    # The rank stops and is not killed: its agent would notice a dead worker, and restart the others
    # too early.
    return f"{point}:stop:rank={rank}:epoch={epoch}:after={after}" + ("" if step is None else f":from={step}")


@dataclass
class Machine(PretendNode):
    """A node that can be lost; `socket` is a path outside of the node's namespaces.

    Attributes:
        inside: the daemon's address for the node's own processes.
        flags: the flags of the node's daemon.
        user: of the node's certificates.
    """

    place: Space | Loopback | None = None
    inside: str = ""
    agent: subprocess.Popen[bytes] | Fork | None = None
    flags: Sequence[str] = ()
    user: str = USER

    @property
    def living(self) -> Space | Loopback:
        assert self.place is not None, f"{self.name} is lost"
        return self.place


@dataclass(frozen=True)
class Launch:
    """The command and environment of a job's agents, also for nodes that join later."""

    training: Training
    command: Sequence[str]
    script: Sequence[str]
    environment: Mapping[str, str]
    agents: list[Any] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Visitor:
    """A node that is none of the job's, and its agents with their logs."""

    machine: Machine
    agents: list[Fork]
    logs: list[Path]


class Nodes:
    """Nodes that can be lost and replaced; see the module.

    Args:
        count: the number of nodes; torchrun waits for this many.
        ranks_per_node: the number of trainers on each node.
        daemon_flags: further flags of all daemons.
        certificates: of all daemons and agents; None: without TLS. An agent has none where its
            environment says REFT_TLS_CERT="".
        are_typed: whether daemons and agents are started by the commands that a person types, and
            not forked. Their whole environment then stands in /proc.
    """

    def __init__(
        self,
        count: int,
        ranks_per_node: int,
        daemon_flags: Sequence[str] = (),
        certificates: Certificates | None = None,
        are_typed: bool = False,
    ) -> None:
        self._daemon_flags, self._certificates, self._are_typed = daemon_flags, certificates, are_typed
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
        """Ends every process at once, and removes the folders."""
        print("\n".join(self.timeline), flush=True)
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()

    def note(self, text: str) -> None:
        """Adds a line to the timeline, which every failure shows, and which `close` prints."""
        self.timeline.append(f"{time.monotonic() - self._began_s:6.1f} s  {text}")

    # Nodes

    @property
    def living(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.place is not None]

    def lose(self, *lost: Machine, silently: bool = False) -> float:
        """Ends nodes with their memory; returns when, in seconds of the monotonic clock.

        Args:
            lost: the nodes to end.
            silently: whether peers only hear nothing more, without connection resets (not on
                loopback).
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
        """Adds empty nodes, whose agents join the running job."""
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

    def visit(self, user: str, *environments: Mapping[str, str]) -> Visitor:
        """Starts a node that is none of the job's, with agents that ask to join the job.

        Args:
            user: of the certificates of its daemon and its agents.
            environments: for each agent, changes to its environment.
        """
        assert self._launch is not None
        machine, launch = self._make(user), self._launch
        await_daemon(machine)
        visitor = Visitor(machine, [], [])
        for number, environment in enumerate(environments):
            visitor.logs.append(launch.training.out / f"{machine.name}-{number}.log")
            arguments = ["torch.distributed.run", *self._arguments(machine)]
            variables = self._variables(machine, environment)
            visitor.agents.append(self._fork(agent_fork, machine, arguments, visitor.logs[-1], variables))
        self.note(f"{counted(len(visitor.agents), 'agent')} of {machine.name} of user {user} ask to join")
        return visitor

    def _make(self, user: str = USER) -> Machine:
        self._made += 1
        name = f"node-{self._made}"
        log = self.folder / f"{name}.daemon.log"
        if isinstance(self._switch, Switch):
            start = partial(spawn, log=log, mark=self.folder, environment={NODE_MARK: self._mark(name)})
            place: Space | Loopback = Space(self._switch, self._made, self._shared, start)
        else:
            place = Loopback(self._made, self._shared / name, self._mark(name))
        slots, socket = place.folder / "slots", place.folder / "daemon.sock"
        machine = Machine(name, slots, place.seen(socket), log, place=place, inside=f"unix:{socket}", user=user)
        if self._certificates:
            trust = self._certificates.flags("ours", name, user)
        else:
            trust = ("--insecure",) if isinstance(place, Space) else ()
        machine.flags = ["--node", name, "--socket", str(socket), "--dir", str(slots), "--listen", place.listen,
                         *trust, *self._daemon_flags]  # fmt: skip
        machine.daemon = self.start_daemon(machine)
        return machine

    def start_daemon(self, machine: Machine) -> subprocess.Popen[bytes] | Fork:
        """Starts or restarts a node's daemon; does not wait for it."""
        if self._are_typed:
            return self._spawn(machine, [str(BIN / "reft-daemon"), *machine.flags], machine.log, {})
        return self._fork(daemon_fork, machine, machine.flags, machine.log, {})

    def daemon_process(self, machine: Machine) -> psutil.Process:
        """Returns the process of a node's daemon, which must answer."""
        number = ask(machine.address, "Status", pb.StatusRequest(), STATUS_S).pid
        (daemon,) = [each for each in marked(self.mark(machine)) if _number_inside(each) == number]
        return daemon

    def mark(self, machine: Machine) -> str:
        """Returns the mark of a node's processes."""
        return self._mark(machine.name)

    def _mark(self, name: str) -> str:
        return str(self.folder / name)

    def _spawn(
        self, machine: Machine, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        own = {NODE_MARK: self._mark(machine.name), "PYTHONPATH": path, **environment}
        return spawn(machine.living.enter(command), log, self.folder, own)

    def _fork(
        self, fork: Callable[..., Fork], machine: Machine, arguments: Sequence[str], log: Path,
        environment: Mapping[str, str],
    ) -> Fork:  # fmt: skip
        """Does what `_spawn` does with `python -m`, but with the modules already imported."""
        marks = {NODE_MARK: self._mark(machine.name), clean_up.MARK: str(self.folder)}
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
        }
        path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
        return fork(
            arguments,
            {**kept, **marks, "PYTHONPATH": path, **environment},
            log,
            marks=marks,
            inside=machine.living.init,
        )

    # Jobs

    def launch(
        self, job: str, steps: int, *, failpoints: str = "", environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (), restarts: int = 4, backend: str = "c10d", conf: Mapping[str, str] | None = None,
        fewest: int = 0, agent: str = "tests.support.agent", script: Sequence[str] = (), endpoint: str = "",
        fails_later: bool = True,
    ) -> Training:  # fmt: skip
        """Starts a job's agents, and does not wait for them. An earlier job must have ended.

        Args:
            job: torchrun's --rdzv-id, which is also the job's name.
            steps: the number of steps to train.
            failpoints: REFT_FAILPOINTS of all trainers, also on nodes that join later.
            environment: further variables of the trainers.
            arguments: further arguments of the script.
            restarts: how often an agent may restart its workers.
            backend: torchrun's --rdzv-backend.
            conf: further options of --rdzv-conf.
            fewest: the least number of nodes with which the job goes on; 0 is all.
            agent: the module in place of torchrun. The default forks workers that have torch, and
                runs only modules.
            script: the script in place of the demo's trainer; it gets the same arguments.
            endpoint: the address of a rendezvous store other than the switch's.
            fails_later: whether trainers on nodes that join later have the failpoints, too. A
                refused attach takes its epoch back, so a fault of that epoch would come again.
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
        variables = {
            "REFT_FAILPOINTS": failpoints if fails_later else "",
            "REFT_CHUNK_BYTES": str(CHUNK_BYTES),
            **(environment or {}),
        }
        agents: list[Any] = []
        logs: list[Path] = []
        training = Training(job, self.world, out, agents, logs)
        self._launch = Launch(training, command, script, variables, agents, logs)
        for machine in self.living:
            self._start_agent(machine, {"REFT_FAILPOINTS": failpoints})
        self.note(f"agents of job {job} are started")
        return training

    def _start_agent(self, machine: Machine, environment_now: Mapping[str, str] | None = None) -> None:
        if self._launch is None:
            return
        arguments, environment = self._arguments(machine), self._variables(machine, environment_now or {})
        log = self._launch.training.out / f"{machine.name}.log"
        if self._are_typed:
            machine.agent = self._spawn(machine, [str(BIN / "torchrun"), *arguments], log, environment)
        elif "LOGLEVEL" in environment:  # torch reads this variable when it is imported
            machine.agent = self._spawn(machine, [*self._launch.command[:3], *arguments], log, environment)
        else:
            machine.agent = self._fork(agent_fork, machine, [self._launch.command[2], *arguments], log, environment)
        self._launch.agents.append(machine.agent)
        self._launch.logs.append(log)

    def _arguments(self, machine: Machine) -> list[str]:
        """Returns the arguments of torchrun on a node."""
        assert self._launch is not None
        return [*self._launch.command[3:], f"--local-addr={machine.living.address}", *self._launch.script]

    def _variables(self, machine: Machine, environment_now: Mapping[str, str]) -> dict[str, str]:
        """Returns what is added to the environment of an agent on a node."""
        assert self._launch is not None
        return {
            **(self._certificates.variables("ours", machine.name, machine.user) if self._certificates else {}),
            **LOCAL_ONLY, "GLOO_SOCKET_IFNAME": self._switch.interface, "REFT_DAEMON": machine.inside,
            **self._launch.environment, **environment_now,
        }  # fmt: skip

    def kill_ranks(self, *ranks: int) -> float:
        """Kills trainers, but not their nodes; returns when, in seconds of the monotonic clock."""
        victims = [process for rank, process in self.trainers().items() if rank in ranks]
        at = time.monotonic()
        for process in victims:
            # It ended because another trainer was killed.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.note(f"SIGKILL of ranks {sorted(ranks)}")
        return at

    def trainers(self) -> dict[int, psutil.Process]:
        """Returns rank → its living process, with the process numbers of this machine."""
        by_rank: dict[int, psutil.Process] = {}
        for machine in self.living:
            try:
                status = ask(machine.address, "Status", pb.StatusRequest(job=self._training.job), STATUS_S).jobs[0]
            except NoSuchJob:
                continue  # a node that stands by
            by_number = {_number_inside(process): process for process in marked(self._mark(machine.name))}
            mine = [rank for rank in status.ranks if rank.node == machine.name and rank.alive]
            by_rank |= {rank.rank: by_number[rank.pid] for rank in mine if rank.pid in by_number}
        return by_rank

    # Queries

    def statuses(self, job: str) -> list[pb.JobStatus]:
        """Returns the job's status from each living daemon that answers and knows the job."""
        statuses = []
        for machine in self.living:
            try:
                statuses += ask(machine.address, "Status", pb.StatusRequest(job=job), STATUS_S).jobs
            except (DaemonUnavailable, NoSuchJob):
                continue
        return statuses

    def statuses_of_signals(self, job: str) -> list[list[pb.NodeSignal]]:
        """Returns the node reports of each living daemon that watches the job.

        A daemon is left out unless it hears the agents of all other nodes, and reports all nodes
        healthy.
        """
        reports = []
        for machine in self.living:
            try:
                nodes = list(ask(machine.address, "Signals", pb.SignalsRequest(job=job), STATUS_S).nodes)
            except ReftError:
                continue  # this daemon does not watch the job
            is_heard = all(each.agent for each in nodes if each.node != machine.name)
            if nodes and is_heard and all(each.signal in (pb.HEALTHY, pb.SNAP) for each in nodes):
                reports.append(nodes)
        return reports

    def whole(self, job: str) -> tuple[int, int]:
        """Returns the newest version that a living daemon knows to be whole.

        Returns:
            (counter of the epoch, step); (0, -1) if there is none.
        """
        return max(((s.epoch.counter, s.whole) for s in self.statuses(job) if s.whole >= 0), default=(0, -1))

    def protected(self, job: str) -> int:
        """Returns the newest step that a daemon announces as protected; -1 if there is none."""
        statuses = [status for status in self.statuses(job) if status.HasField("exchange")]
        return max((status.exchange.protected for status in statuses), default=-1)

    def stopped(self) -> Machine | None:
        """Returns the node of a trainer that has stopped at a failpoint.

        The result is None if there is none.
        """
        for machine in self.living:
            for process in marked(self._mark(machine.name)):
                with contextlib.suppress(psutil.Error):
                    if process.status() == psutil.STATUS_STOPPED:
                        return machine
        return None

    # Waits

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
        """Calls `condition` until it returns a true value; returns that value.

        Raises:
            DemoError: an agent has failed, or the deadline has passed; the message has the timeline
                and all logs.
        """

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
        """Waits until a trainer has stopped at its failpoint; returns its node."""
        machine: Machine = self.until(self.stopped, "a trainer's stop at its failpoint")
        self.note(f"a trainer of {machine.name} has stopped at its failpoint")
        return machine

    def await_step(self, step: int) -> None:
        """Waits until all ranks have completed `step` in their newest attempt."""
        self.until(lambda: self._training.result().completed >= step, f"the end of step {step}")
        self.note(f"all ranks have completed step {step}")

    def await_protection(self, epoch: int) -> None:
        """Waits until a version of this epoch or a later one is whole: a loss may follow."""
        self.until(lambda: self.whole(self._training.job) >= (epoch, 0), f"a whole version of epoch {epoch}")
        self.note(f"{self.whole(self._training.job)} is whole")

    def await_recovery(self, lost_s: float) -> None:
        """Waits until every rank has trained a step in a process that began after `lost_s`."""
        self.until(lambda: recovery(self._training.result(), lost_s), "a step of every rank after the loss")
        back = recovery(self._training.result(), lost_s)
        assert back is not None
        self.note(
            f"all ranks ran the script again {back.up_s:.1f} s after the loss, had trained a step after "
            f"{back.first_step_s:.1f} s, from step {back.base} ({back.source})"
        )

    def await_end(self) -> TrainingResult:
        """Waits until every agent of a living node has ended with 0.

        Returns what the ranks wrote.
        """
        agents = [machine.agent for machine in self.living if machine.agent]
        self.until(lambda: all(agent.poll() == 0 for agent in agents), "the end of the training")
        self.note("the training has ended")
        return self._training.result()

    @property
    def _training(self) -> Training:
        assert self._launch is not None, "no job was launched"
        return self._launch.training

    def story(self) -> str:
        """Returns the timeline and the ends of all logs, to analyse a failure."""
        parts = [*self.timeline, self._training.tail(40)] if self._launch else list(self.timeline)
        for log in sorted(self.folder.glob("*.log")):
            parts += [f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(parts)


def _number_inside(process: psutil.Process) -> int:
    """Returns a process's number in its own namespace; 0 if the process has just ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
