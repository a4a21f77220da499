"""What a turn of the exchange costs: its copy, the steps beside it, its bytes and memory.

    python bench/exchange_turn.py [--quick] [--parts mover,steps,bytes] [--rounds N] [--json FILE]

mover   A daemon's mover pulls the section of a sealed slot from another mover, over loopback. Both
        movers are the real processes, and get the commands that daemons send. Three copies of the
        same bytes take turns. All processes share two cores.

            raw       blocking send() from the mapped slot, recv_into() one buffer of 4 MiB
            plain     the movers, with digests and XOR replaced by nothing
            mover     the movers: digests at both ends, XOR into the parity

        ratio = median over rounds of (time of raw / time of the copy) of the same round

        Not in these times: zeroing the parity slot before, and digesting it after. They are given
        apart. The first round does not count.

steps   Two ranks train with FSDP2 and AdamW; each has a daemon and takes a snapshot of each step.
        Two such jobs take turns in blocks of steps: one exchanges parity, one has protect="none".
        Turns follow each other without a pause. Between two blocks all turns end.

            free      the ranks share all cores but one; on two cores they share one core
            busy      the ranks use all cores

        The free core carries the movers and daemons of both nodes.

        ratio = median over rounds of (median step with turns / median step without) of one round

        The first steps of a block do not count. The processor time of a mover is that of sending
        and receiving, because each of the two nodes does both. Turns are not paced. There are
        few, long blocks, so that both ways of sharing the cores take minutes.

bytes   D daemons with a rank each make one turn. The bytes that a node received are those in its
        log; memory is what the files of its parity slots have allocated. Beside them stand full
        copies on one peer, with two buffers (Gemini, SOSP '23): S sent and 2 S kept. S is a rank's
        section. The formulas: (D-1)/(D-f) S sent, 2f/(D-f) S kept. f is 1, and 2 from six nodes on.

Ends with 1 if a goal is missed. `busy` has no goal, because turns and training then share cores.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "daemon"))

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reft
from bench import bulk_ends, common, result
from bench.common import median, quantile
from bench.options import count, listed, output
from bench.result import Row
from reft.core.coding.exchange import GuardLane, guard_lanes, requested_losses
from reft.core.commit.version import Epoch, Version
from reft.wire import rpc
from reft.wire.slot_format import PAGE, Bytes, Geometry
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.arena.arena import Arena, SlotFile
from reft_daemon.child.child_process import ChildProcess
from reft_daemon.mover.mover import Mover, MoverSettings, SourceSlot
from reft_daemon.mover.range_client import MoverAddress, RangePull
from reft_daemon.peers.turns import RANGES_MAX
from tests.support.daemons import Site
from tests.support.exchange import ShardedJob

PARTS = ("mover", "steps", "bytes")
JOB = "bench-turn"
CHUNK = 256 << 10
VERSION = Version(Epoch(1, b"turn" * 4), 1)
DEADLINE_S = 120.0
NODES = 2  # of the copies and the steps
SPAWN = multiprocessing.get_context("spawn")
RAW, PLAIN, MOVER = COPIES = ("raw", "plain", "mover")
GOALS = {PLAIN: 0.85, MOVER: 0.55}  # least part of the rate of raw sockets
NAMES = {PLAIN: "mover without digests and XOR", MOVER: "mover"}
STEP_GOAL = 1.02
WIDTH = 1024
WARM = 3  # steps of a block that do not count
STEP_S = 0.12  # the batch is doubled until a step takes so long
ROWS_MAX = 4096
FLAGS = ("--listen", "127.0.0.1:0", "--protect-bandwidth", "off")
BLOCKS, BLOCK_STEPS, BLOCK_STEPS_QUICK = 3, 40, 8
SLOTS = 4
SEALED_PARITY = re.compile(r"parity of .* is sealed here: (\d+) bytes in ([\d.]+) s")
MOVER_STARTED = re.compile(r"mover pid=(\d+) started")
MEMBERS = (2, 4, 8)
PADDING = 1.01  # pieces are whole chunks
HEADERS = 2 * Geometry(0, 0, CHUNK).data_offset + CHUNK  # bytes of two slots beside their data

NOTES = (
    "Both ends of a copy share two cores. Raw sockets send from the mapped slot and receive into one buffer of 4 MiB.",
    "free: the ranks share all cores but one. busy: the ranks use all cores; turns and training share them.",
    "Full copies on one peer, in two buffers, send S and keep 2 S, where S is the section of a rank.",
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB, small models, few rounds")
    parser.add_argument("--parts", type=listed(PARTS), default=",".join(PARTS), help="what is measured")
    parser.add_argument("--rounds", type=count, help="rounds of copies (9), and of blocks of steps (3)")
    parser.add_argument("--json", type=output, help="write every figure to this file")
    options = parser.parse_args()
    options.copies = options.rounds or (3 if options.quick else 9)
    options.blocks = options.rounds or BLOCKS
    return options


def cpu_s(pid: int) -> float:
    """Returns the processor time of all threads of a process, user and system."""
    return time.clock_gettime(~pid << 3 | 2)


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Binds this process, and those that it starts meanwhile, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def spawned(target: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, int]]:
    """Yields a pipe to a process that runs `target`, and its pid; a false command ends it."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        yield ours, process.pid
        ours.send(None)
        process.join(10)
    finally:
        process.kill()
        process.join()


def answer_of(control: Connection) -> Any:
    """Returns the next message of a process.

    Raises:
        RuntimeError: it ended, or sent nothing in time.
    """
    if not control.poll(DEADLINE_S):
        raise RuntimeError(f"a process sent nothing in {DEADLINE_S:g} s")
    try:
        return control.recv()
    except EOFError:
        raise RuntimeError("a process has ended; its error stands above") from None


# The copy


@dataclass
class Copied:
    """What one copy took.

    Attributes:
        seconds: of the copy.
        source_s: processor time of the sending process.
        holder_s: processor time of the receiving process.
        zero_s: of zeroing the parity slot.
        digest_s: of digesting the parity slot.
    """

    seconds: float
    source_s: float
    holder_s: float
    zero_s: float = 0.0
    digest_s: float = 0.0


class PlainMover(Mover):
    """A mover whose process computes no digest and no XOR."""

    def __init__(self, settings: MoverSettings) -> None:
        super().__init__(settings)
        code = "from bench.bulk_ends import run_plain_mover; run_plain_mover()"
        self.child = ChildProcess("mover", ["-c", code, "--host", settings.host])


def mover_pid(mover: Mover) -> int:
    assert mover.child.running is not None
    return mover.child.running.process.pid


@dataclass
class TwoNodes:
    """Two nodes with a rank each: a sealed slot on the first, a parity slot on the second."""

    nbytes: int
    lane: GuardLane
    source: SlotFile
    parity: SlotFile
    movers: dict[str, tuple[Mover, Mover]] = field(default_factory=dict)

    async def copy(self, kind: str) -> Copied:
        """Makes the second node's parity with the movers of a kind, as a turn does."""
        source, holder = self.movers[kind]
        await source.port()
        began = time.perf_counter()
        writer = await holder.begin(JOB, self.parity, VERSION, self.lane.digest, self.lane.parity_bytes)
        begun = time.perf_counter()
        pids = mover_pid(source), mover_pid(holder)
        before = [cpu_s(pid) for pid in pids]
        ranges = list(self.lane.requests(0, 1, CHUNK))
        for first in range(0, len(ranges), RANGES_MAX):
            ticket, port = await source.grant(JOB, [SourceSlot(self.source, 0, self.nbytes)])
            address = MoverAddress("127.0.0.1", port, "localhost")
            batch = ranges[first : first + RANGES_MAX]
            await writer.pull(RangePull(address, ticket, VERSION, 0, batch), DEADLINE_S)
        copied = time.perf_counter()
        source_s, holder_s = (cpu_s(pid) - used for pid, used in zip(pids, before, strict=True))
        await writer.seal()
        return Copied(copied - begun, source_s, holder_s, begun - began, time.perf_counter() - copied)

    def check(self, kind: str) -> None:
        """Raises RuntimeError unless the parity is what a kind of mover makes."""
        data = data_of(self.parity)
        is_right = np.array_equal(data, data_of(self.source)) if kind == MOVER else not data.any()
        if not is_right:
            raise RuntimeError(f"{NAMES[kind]}: the parity is wrong")


def data_of(slot: SlotFile) -> Bytes:
    """Returns a copy of a slot's data."""
    data = np.empty(slot.map.header.geometry.data_capacity, np.uint8)
    slot.map.read(0, data)
    return data


@contextmanager
def two_nodes(nbytes: int) -> Iterator[TwoNodes]:
    """Yields the slots of two nodes, in files as a daemon makes them."""
    (lane,) = guard_lanes([nbytes, nbytes], [0, 1], CHUNK)
    with common.folder(common.SHM) as folder:
        arena = Arena(folder, 0)
        geometry = Geometry(PAGE, nbytes, CHUNK)
        (source,) = arena.create(JOB, 0, {"rank-0.slot-0": geometry}, [])
        (parity,) = arena.create(JOB, 1, {"parity-1.slot-0": Geometry(0, lane.parity_bytes, CHUNK)}, [])
        slot = source.map
        slot.begin(VERSION, b"l" * 16, b"", nbytes)
        slot.write(0, np.random.default_rng(0).integers(0, 256, nbytes, np.uint8))
        slot.landed()
        slot.sealed(np.fromiter(slot.digests_of(0, slot.chunks), np.uint64))
        try:
            yield TwoNodes(nbytes, lane, source, parity)
        finally:
            arena.free(source)
            arena.free(parity)
            arena.close()


async def compare_copies(nodes: TwoNodes, raw: Callable[[], Copied], rounds: int) -> dict[str, list[Copied]]:
    """Returns the copies of each kind, which take turns."""
    times: dict[str, list[Copied]] = {kind: [] for kind in COPIES}
    try:
        for kind, kind_of_mover in ((PLAIN, PlainMover), (MOVER, Mover)):
            nodes.movers[kind] = kind_of_mover(MoverSettings()), kind_of_mover(MoverSettings())
        for i in range(rounds + 1):
            for kind in COPIES:
                copied = raw() if kind == RAW else await nodes.copy(kind)
                if kind != RAW and not i:
                    nodes.check(kind)
                times[kind].append(copied)
    finally:
        for mover in (each for pair in nodes.movers.values() for each in pair):
            await mover.close()
    return {kind: each[1:] for kind, each in times.items()}


def measure_copies(nbytes: int, rounds: int) -> dict[str, list[Copied]]:
    """Measures all copies of a section of so many bytes."""
    with ExitStack() as stack:
        stack.enter_context(on_cores(set(sorted(os.sched_getaffinity(0))[:2])))
        nodes = stack.enter_context(two_nodes(nbytes))
        place = nodes.source.map.header.geometry.data_offset
        source, source_pid = stack.enter_context(spawned(bulk_ends.send_raw, str(nodes.source.path), place, nbytes))
        port = answer_of(source)
        holder, holder_pid = stack.enter_context(spawned(bulk_ends.receive_raw, port, nbytes))

        def raw() -> Copied:
            before = cpu_s(source_pid), cpu_s(holder_pid)
            began = time.perf_counter()
            source.send(1)
            holder.send(1)
            answer_of(holder)
            took_s = time.perf_counter() - began
            return Copied(took_s, cpu_s(source_pid) - before[0], cpu_s(holder_pid) - before[1])

        return asyncio.run(compare_copies(nodes, raw, rounds))


def copy_rows(nbytes: int, times: dict[str, list[Copied]]) -> list[Row]:
    """Returns rates in units of raw sockets, and processor time a GB and side."""
    size, gb = f"{nbytes >> 20} MiB", nbytes / 1e9
    rows = []
    for kind, goal in GOALS.items():
        ratios = [raw.seconds / own.seconds for raw, own in zip(times[RAW], times[kind], strict=True)]
        name = f"{size}: {NAMES[kind]}"
        rows.append(Row(name, "of raw", f">= {goal:g}", median(ratios), min=min(ratios), max=max(ratios)))
    rates = [gb / each.seconds for each in times[RAW]]
    rows.append(Row(f"{size}: raw sockets", "GB/s", None, median(rates), min=min(rates), max=max(rates)))
    for kind in COPIES:
        name = f"{size}: {NAMES.get(kind, 'raw sockets')}"
        for side in ("source", "holder"):
            seconds = [getattr(each, f"{side}_s") / gb for each in times[kind]]
            rows.append(Row(f"{name}, {side}", "CPU s a GB", None, median(seconds)))
    for what, each in (("zeroing", "zero_s"), ("digesting", "digest_s")):
        seconds = [getattr(copied, each) / gb for copied in times[MOVER]]
        rows.append(Row(f"{size}: {what} the parity slot", "s a GB", None, median(seconds)))
    return rows


# The steps


@dataclass(frozen=True)
class RankTask:
    """What the two ranks of a job have in common.

    Attributes:
        protect: as in reft.attach.
        layers: of the model.
        daemons: the daemon's address of each rank.
        cores: where the ranks run.
        store: file for the process group.
    """

    protect: str
    layers: int
    daemons: tuple[str, ...]
    cores: frozenset[int]
    store: str


def train(rank: int, task: RankTask, control: Connection) -> None:
    """Runs a rank: trains a block for each command, and answers with the seconds of its steps."""
    os.sched_setaffinity(0, task.cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.store}", rank=rank, world_size=len(task.daemons))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(task.layers)))
    mesh = init_device_mesh("cpu", (len(task.daemons),))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session = reft.attach(
        model, optimizer, job=f"{JOB}-{task.protect}", daemon=task.daemons[rank], protect=task.protect, every=1,
        slots=SLOTS,
    )  # fmt: skip
    control.send("attached")
    while command := control.recv():
        batch, steps = command
        x, seconds = torch.randn(batch, WIDTH), []
        for _ in range(steps + WARM):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            session.step_end()
            seconds.append(time.perf_counter() - began)
        session.seal(DEADLINE_S)
        control.send({"seconds": seconds[WARM:], "stats": session.stats()})
    session.close()
    dist.destroy_process_group()


class TwoDaemons:
    """Two daemons of one machine that call each other over loopback."""

    def __init__(self, stack: ExitStack) -> None:
        made = [stack.enter_context(common.daemon(f"bench{i}", *FLAGS)) for i in range(NODES)]
        self.addresses = tuple(address for address, _ in made)
        self.pids = [pid for _, pid in made]

    def logs(self) -> list[str]:
        return [(Path(address.removeprefix("unix:")).parent / "log").read_text() for address in self.addresses]

    def turns(self) -> list[list[tuple[int, float]]]:
        """Returns for each daemon bytes and seconds of each turn so far."""
        return [[(int(nbytes), float(s)) for nbytes, s in SEALED_PARITY.findall(log)] for log in self.logs()]

    def mover_cpu_s(self) -> float:
        """Returns the processor time of both movers so far."""
        return sum(cpu_s(int(pids[-1])) for log in self.logs() if (pids := MOVER_STARTED.findall(log)))

    def cpu_s(self) -> float:
        """Returns the processor time of both daemons so far, without their movers."""
        return sum(map(cpu_s, self.pids))

    def await_protected(self) -> None:
        """Returns once the newest whole step of the exchanging job is protected on both nodes."""
        end = time.monotonic() + DEADLINE_S
        while not all(self._is_quiet(address) for address in self.addresses):
            if time.monotonic() > end:
                raise RuntimeError(f"the turns do not end in {DEADLINE_S:g} s:\n{self.logs()[0][-2000:]}")
            time.sleep(0.05)

    def _is_quiet(self, address: str) -> bool:
        with rpc.channel(address) as channel:
            (status,) = pb_grpc.DaemonStub(channel).Status(pb.StatusRequest(job=f"{JOB}-auto"), timeout=10).jobs
        return bool(status.exchange.turn < 0 and status.exchange.protected == status.whole >= 0)


@dataclass
class StepBlocks:
    """Steps of two jobs that took turns, in seconds.

    Attributes:
        off: blocks of the job without exchange.
        on: blocks of the job that exchanges parity.
        turns: bytes and seconds of each turn of each node.
        cpu_s: processor time of both movers.
        daemons_s: off or on → processor time of both daemons, for each block.
        on_s: seconds of the blocks with turns, until the last turn ended.
        stats: of rank 0 of either job, at the end.
    """

    off: list[list[float]] = field(default_factory=list)
    on: list[list[float]] = field(default_factory=list)
    turns: list[tuple[int, float]] = field(default_factory=list)
    cpu_s: float = 0.0
    daemons_s: dict[str, list[float]] = field(default_factory=lambda: {"off": [], "on": []})
    on_s: float = 0.0
    stats: dict[str, dict[str, float]] = field(default_factory=dict)


def block(ranks: Sequence[Connection], batch: int, steps: int) -> tuple[list[float], dict[str, float]]:
    """Trains a block; returns the seconds of each step, of the slower rank, and stats."""
    for control in ranks:
        control.send((batch, steps))
    answers = [answer_of(control) for control in ranks]
    each = zip(*(answer["seconds"] for answer in answers), strict=True)
    return [max(seconds) for seconds in each], answers[0]["stats"]


def measure_steps(cores: set[int], layers: int, rounds: int, steps: int) -> StepBlocks:
    """Measures the steps of two jobs whose ranks run on these cores."""
    measured = StepBlocks()
    with ExitStack() as stack:
        daemons = TwoDaemons(stack)
        home = stack.enter_context(common.folder())
        ranks: dict[str, list[Connection]] = {}
        for protect in ("none", "auto"):
            task = RankTask(protect, layers, daemons.addresses, frozenset(cores), str(home / protect))
            ranks[protect] = [stack.enter_context(spawned(train, rank, task))[0] for rank in range(NODES)]
            for control in ranks[protect]:
                answer_of(control)
        batch = 8
        while median(block(ranks["none"], batch, 3)[0]) < STEP_S and batch < ROWS_MAX:
            batch *= 2
        print(f"a batch has {batch} rows", file=sys.stderr, flush=True)
        block(ranks["auto"], batch, 3)
        daemons.await_protected()
        before, before_s = daemons.turns(), daemons.mover_cpu_s()
        for _ in range(rounds):
            used_s = daemons.cpu_s()
            seconds, measured.stats["off"] = block(ranks["none"], batch, steps)
            measured.off.append(seconds)
            measured.daemons_s["off"].append(daemons.cpu_s() - used_s)
            began, used_s = time.perf_counter(), daemons.cpu_s()
            seconds, measured.stats["on"] = block(ranks["auto"], batch, steps)
            measured.on.append(seconds)
            daemons.await_protected()
            measured.on_s += time.perf_counter() - began
            measured.daemons_s["on"].append(daemons.cpu_s() - used_s)
            print(
                f"step: {median(measured.off[-1]):.3f} s, with turns {median(seconds):.3f} s",
                file=sys.stderr,
                flush=True,
            )
        measured.cpu_s = daemons.mover_cpu_s() - before_s
        for old, turns in zip(before, daemons.turns(), strict=True):
            measured.turns += turns[len(old) :]
    return measured


def step_rows(name: str, measured: StepBlocks) -> list[Row]:
    """Returns the steps with turns beside those without, and what the turns did."""
    ratios = [median(on) / median(off) for on, off in zip(measured.on, measured.off, strict=True)]
    goal = f"<= {STEP_GOAL:g}" if name == "free" else None
    rows = [
        Row(
            f"{name}: step with turns over one without", "ratio", goal, median(ratios), min=min(ratios), max=max(ratios)
        )
    ]
    for what, blocks in (("without turns", measured.off), ("with turns", measured.on)):
        steps = [1000 * seconds for each in blocks for seconds in each]
        rows.append(Row(f"{name}: step {what}", "ms", None, median(steps), p99=quantile(steps, 0.99)))
    seconds = [took_s for _, took_s in measured.turns]
    gb = sum(nbytes for nbytes, _ in measured.turns) / 1e9
    share = sum(seconds) / NODES / measured.on_s
    rows.append(Row(f"{name}: a turn", "s", None, median(seconds), p99=quantile(seconds, 0.99)))
    rows.append(Row(f"{name}: a turn is under way", "of the time", None, share))
    rows.append(Row(f"{name}: mover, sends and receives", "CPU s a GB", None, measured.cpu_s / gb))
    for what, blocks in (("off", measured.off), ("on", measured.on)):
        stats = measured.stats[what]
        skipped = stats["skipped"] / max(stats["skipped"] + stats["snapshots"], 1)
        rows.append(Row(f"{name}: snapshots skipped, turns {what}", "of all", None, skipped))
        used_ms = [
            1000 * used / NODES / (len(each) + WARM)
            for used, each in zip(measured.daemons_s[what], blocks, strict=True)
        ]
        rows.append(Row(f"{name}: a daemon, turns {what}", "CPU ms a step", None, median(used_ms)))
    return rows


# Bytes and memory


@dataclass(frozen=True)
class OneTurn:
    """What one turn of D nodes moved and keeps, in bytes.

    Attributes:
        section: of each rank.
        received: by each node.
        kept: allocated by the parity slots of each node.
        loopback: all bytes on the loopback device in the turn.
    """

    section: int
    received: list[int]
    kept: list[int]
    loopback: int


def loopback_bytes() -> int:
    """Returns the bytes that the loopback device has sent so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def measure_turn(members: int, section: int) -> OneTurn:
    """Makes one turn of so many nodes, each with a daemon and a rank that wrote a slot."""
    site = Site()
    try:
        job = ShardedJob(site.add(members), [section] * members).begin()
        before = loopback_bytes()
        job.seal(1)
        job.await_protected(1)
        loopback = loopback_bytes() - before
        turns = [SEALED_PARITY.findall(daemon.log.read_text()) for daemon in job.daemons]
        files = [daemon.folder.rglob("parity-*") for daemon in job.daemons]
        kept = [sum(path.stat().st_blocks * 512 for path in each) for each in files]
        return OneTurn(section, [int(nbytes) for ((nbytes, _),) in turns], kept, loopback)
    finally:
        site.close()


def turn_rows(members: int, turn: OneTurn) -> list[Row]:
    """Returns bytes and memory of a turn in sections, beside the formulas."""
    f = requested_losses(members, None)
    name, sent, kept = f"D = {members}, f = {f}", (members - 1) / (members - f), 2 * f / (members - f)
    received = [nbytes / turn.section for nbytes in turn.received]
    held = [nbytes / turn.section for nbytes in turn.kept]
    limit = kept * PADDING + HEADERS / turn.section
    return [
        Row(f"{name}: received and sent a node", "S", f"<= {sent * PADDING:.3f}", max(received)),
        Row(f"{name}: the same by the formula", "S", None, sent),
        Row(f"{name}: all bytes on loopback, a node", "S", None, turn.loopback / members / turn.section),
        Row(f"{name}: full copies, sent a node", "S", None, 1),
        Row(f"{name}: parity kept a node", "S", f"<= {limit:.3f}", max(held)),
        Row(f"{name}: the same by the formula, without headers", "S", None, kept),
        Row(f"{name}: full copies, kept a node", "S", None, 2),
    ]


# The program


def verdict(row: Row) -> str:
    return "" if row.goal is None else "MISS" if row.is_missed else "pass"


def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Measures the chosen parts."""
    rows: list[Row] = []
    details: dict[str, Any] = {}
    parts = options.parts.split(",")
    if "mover" in parts:
        for nbytes in (64 << 20,) if options.quick else (256 << 20, 1 << 30):
            times = measure_copies(nbytes, options.copies)
            rows += copy_rows(nbytes, times)
            details[f"copy {nbytes}"] = {kind: [vars(each) for each in copies] for kind, copies in times.items()}
    if "steps" in parts:
        cores = sorted(os.sched_getaffinity(0))
        print(f"{len(cores)} cores: the two ranks of `free` share {len(cores[:-1])} of them", file=sys.stderr)
        for name, chosen in (("free", cores[:-1] or cores), ("busy", cores)):
            layers, steps = (3, BLOCK_STEPS_QUICK) if options.quick else (10, BLOCK_STEPS)
            blocks = measure_steps(set(chosen), layers, options.blocks, steps)
            rows += step_rows(name, blocks)
            details[name] = vars(blocks)
    if "bytes" in parts:
        for members in MEMBERS:
            turn = measure_turn(members, (16 if options.quick else 64) << 20)
            rows += turn_rows(members, turn)
            details[f"D = {members}"] = vars(turn)
    return rows, details


def main() -> int:
    common.end_on_signals()
    options = parse()
    print(f"load before: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    rows, details = measure(options)
    head = ["", "figure", "value", "goal", "unit", "least", "largest", "p99"]
    texts = [
        [verdict(row), row.name, f"{row.value:.3g}", row.goal or "", row.unit,
         *(f"{each:.3g}" if each is not None else "" for each in (row.min, row.max, row.p99))]
        for row in rows
    ]  # fmt: skip
    print(common.table(head, texts))
    print(f"load after: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    if options.json:
        title = "A turn of the exchange: its copy, the steps beside it, its bytes" + ", --quick" * options.quick
        result.write(options.json, __file__, title, rows, NOTES, details=details)
    return 1 if any(row.is_missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
