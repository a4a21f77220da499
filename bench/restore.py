"""What a restoring attach costs, beside a memcpy, a plain double buffer and DCP.

    python bench/restore.py [--quick] [--rounds N] [--sizes 10MB,1.5GB,6GB]
        [--cases 1-rank,2-ranks,lost-node] [--json FILE]

    1-rank      one process
    2-ranks     two replicas on one node
    lost-node   two nodes with a replica each; one node is lost, and a fresh node takes its place

One round of a case, each time in fresh processes, one a rank:

    train       daemons start; the ranks attach, take one snapshot, and end
    lose        SIGKILL of one daemon; its slots are removed; an empty daemon starts
    restart     the ranks attach with a model, but without an optimizer's state. So the state needs
                fresh pages. Except after a loss, the ranks attach again: the state exists now.
    compare     the slots are freed. The same processes then measure the memcpy and a double buffer,
                and save with DCP.
    load        fresh processes only load with DCP, twice. Then they save as a script does; that
                checkpoint takes the place of the first one.
    dcp_restart fresh processes restore with DCP as torch's documentation does it, twice

Model and AdamW's moments have 10 MB, 1.5 GB or 6 GB a rank. All ranks measure at once; the slowest
rank counts. A size that does not fit into memory is replaced by the largest size that fits, and the
result says so. The restarted process first allocates and frees as many fresh pages, so that a
hypervisor does not back pages in the measurement.

    whole attach     call of reft.attach until it returns
    load             the step `load`: reads, messages, decoding and digests
    make             the step `make`: creates tensors; waits for pages that are being made
    the rest         whole attach less load and make
    page making      fresh huge pages for the moments, made by two threads, alone
    double buffer    the state lies in a shared-memory file; it is mapped anew, and torch copies it
                     into live tensors and fresh moments. No digests. Each rank has a file.
    DCP's load       torch.distributed.checkpoint.load alone, from /dev/shm. The moments are made by
                     hand, and the bytes lie in the tensors at its end.
    DCP's restore    get_state_dict, which makes the moments, load and set_state_dict; so a script
                     restores that does not know its optimizer's state. From /dev/shm. /dev/shm is
                     lost with its node, so after a loss it reads from the disk, not cached.
    whole attach     compared with the first restore of a process, a second attach with the second
                     one. Imports count for neither.

Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import mmap
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import reft
import reft.client.attach.api
from bench import common, result
from bench.common import Llama, Mapped, Shape, median
from bench.options import count, listed, output
from bench.restoring import timed_steps
from bench.result import Row
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

JOB = "bench-restore"
NOTES = (
    "All ranks measure at once, also the memcpy. The slowest rank counts.",
    "Load is the step of attach that fills the tensors and checks digests. The rest of attach is all but load and make.",
    "The double buffer is a file in shared memory. It is mapped anew, and torch copies it into parameters and fresh "
    "moments, without digests.",
    "DCP's load is that call alone, into moments that are made by hand. DCP's restore is what a script does: "
    "get_state_dict, which makes the moments, the load and set_state_dict. Both read /dev/shm, which is lost with its "
    "node; so after a loss DCP's restore reads from the disk, not cached.",
    "A whole attach and what it is compared with are the first ones of a fresh process. Imports count for neither.",
)
TITLE = "A restoring attach, beside a plain double buffer and DCP's load"
SLOTS = 2  # a third slot of 6 GB does not fit into the memory of a small machine
DEADLINE_S = 120.0
RESERVE_BYTES = 2 << 30  # for processes and the system, beside state and slots
MEMCPYS = 5
BACKED_TRIES = 6
BLOCK = 1 << 18  # elements of the pattern that fills the state
# Imported by the first channel, slot, optimizer and DCP's load of a process; here once for all.
IMPORTED_LATE = (
    "grpc._channel",
    "numpy.ctypeslib",
    "torch._dynamo",
    "torch.distributed.checkpoint._fsspec_filesystem",
)


@dataclass(frozen=True)
class Case:
    """Ranks and nodes of a job.

    Attributes:
        ranks: number of ranks.
        nodes: number of nodes; the ranks are divided evenly.
        copies: states in memory at the peak: one in each rank, and slots.
    """

    name: str
    ranks: int
    nodes: int
    copies: int

    @property
    def loses_node(self) -> bool:
        return self.nodes > 1


CASES = {
    "1-rank": Case("1 rank", 1, 1, 1 + SLOTS),
    "2-ranks": Case("2 ranks", 2, 1, 2 + SLOTS),  # the ranks share the node's slots
    "lost-node": Case("a lost node", 2, 2, 2 + 2 * SLOTS),
}
HUGE = Shape(width=1280, inner=3456, layers=22, heads=20, words=50304, batch=1, length=128)
SIZES = {
    "10MB": Shape(width=128, inner=344, layers=3, heads=4, words=2048, batch=1, length=128),
    "1.5GB": common.FULL,
    "6GB": HUGE,
}
SMALLER = {f"{size}GB": replace(HUGE, layers=4 * size - 2) for size in (5, 4, 3, 2)}  # four layers are a GB
ROUNDS = {"10MB": 5, "1.5GB": 3, "6GB": 1}  # so that all of them take less than ten minutes
# (size, ranks) → the largest whole attach, in memcpys; in s for 10MB. With a lost node there is no
# limit.
LIMITS = {("10MB", 1): 0.25, ("10MB", 2): 0.25, ("1.5GB", 1): 3.0, ("1.5GB", 2): 3.5, ("6GB", 1): 2.0, ("6GB", 2): 2.5}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only 10 MB, one round")
    rounds = ", ".join(f"{number} with {size}" for size, number in ROUNDS.items())
    parser.add_argument("--rounds", type=count, help=f"rounds of each case and size ({rounds})")
    parser.add_argument("--sizes", type=listed(SIZES), help="sizes of a rank's state (10MB,1.5GB,6GB)")
    parser.add_argument("--cases", type=listed(CASES), default=",".join(CASES), help="which jobs are restored")
    parser.add_argument("--json", type=output, help="write every figure to this file")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else None)
    options.sizes = options.sizes or ("10MB" if options.quick else ",".join(SIZES))
    return options


def state_bytes(shape: Shape) -> int:
    """Returns the bytes of a model and of AdamW's two moments."""
    with torch.device("meta"):
        return 3 * sum(parameter.nbytes for parameter in Llama(shape).parameters())


def fitting(size: str, case: Case) -> str | None:
    """Returns the size itself, or the largest smaller one that fits into memory now.

    Returns None if nothing fits.
    """
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    shm = os.statvfs(common.SHM)
    free = min(int(facts["MemAvailable"].split()[0]) << 10, shm.f_bavail * shm.f_frsize) - RESERVE_BYTES
    candidates = [size, *(SMALLER if size == "6GB" else ())]
    shapes = {**SIZES, **SMALLER}
    return next((each for each in candidates if case.copies * state_bytes(shapes[each]) <= free), None)


# One rank


@dataclass(frozen=True)
class Task:
    """What the processes of one role have in common.

    Attributes:
        case: the job.
        shape: the model.
        daemons: the daemon's address of each rank.
        home: folder for results and for the store of the process group.
        files: folder in shared memory, for DCP's checkpoint.
    """

    case: Case
    shape: Shape
    daemons: tuple[str, ...]
    home: Path
    files: Path

    @property
    def lasting(self) -> Path:
        """Where a checkpoint outlives the loss of the case: on the disk, or in shared memory."""
        return (self.home if self.case.loses_node else self.files) / "lasting"


class Replica:
    """The model and the optimizer of one rank.

    Every tensor of the state has values of its own.
    """

    def __init__(self, shape: Shape) -> None:
        with torch.device("meta"):
            self.model = Llama(shape)
        self.model.to_empty(device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._pattern = torch.rand(BLOCK, generator=torch.Generator().manual_seed(0))
        for buffer in self.model.buffers():
            buffer.zero_()
        self.missing_bytes = 2 * sum(parameter.nbytes for parameter in self.model.parameters())

    def make_moments(self) -> None:
        """Creates the optimizer's state, without values."""
        for parameter in self.model.parameters():
            moments = {key: torch.empty_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}

    def drop_moments(self) -> None:
        """Frees the optimizer's state, and zeros the parameters."""
        self.optimizer.state.clear()
        gc.collect()
        for parameter in self.model.parameters():
            parameter.detach().zero_()

    def tensors(self) -> list[torch.Tensor]:
        """Returns parameters and moments; the moments must exist."""
        return common.state_tensors(self.model, self.optimizer)

    def tree(self) -> dict[str, Any]:
        """Returns the state in the form that DCP takes."""
        return common.state_tree(self.model, self.optimizer)

    def fill(self) -> None:
        """Writes the values."""
        for tensor, at, values in self._parts():
            tensor[at : at + len(values)].copy_(values)

    def zero(self) -> None:
        """Writes zeros, and keeps no tensor: one of them would keep all moments alive."""
        for tensor in self.tensors():
            tensor.zero_()

    def check(self, way: str) -> None:
        """Raises RuntimeError unless every byte has its value."""
        for tensor, at, values in self._parts():
            if not torch.equal(tensor[at : at + len(values)], values):
                raise RuntimeError(f"{way}: a tensor with {tensor.nbytes} bytes is wrong from element {at} on")

    def _parts(self) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
        for i, tensor in enumerate(self.tensors()):
            flat, values = tensor.view(-1), self._pattern * (i + 1)
            for at in range(0, len(flat), BLOCK):
                yield flat, at, values[: len(flat) - at]


def train(rank: int, task: Task) -> None:
    """Leaves a whole snapshot of the state with the daemons."""
    with process_group(rank, task, "train"):
        replica = Replica(task.shape)
        replica.make_moments()
        replica.fill()
        session = attach(in_job(replica, task), replica, rank, task)
        session.step_end()
        if not session.seal(DEADLINE_S):
            raise RuntimeError(f"the snapshot did not become whole: {session.stats()}")
        session.close()


def restart(rank: int, task: Task) -> None:
    """Restores the state, measures all ways but DCP, and saves with DCP; writes the seconds."""
    with process_group(rank, task, "restart"):
        replica = Replica(task.shape)
        replica.drop_moments()
        # After a loss the attach also makes slots for a whole state on the new node.
        back_pages(task, replica.missing_bytes * (4 if task.case.loses_node else 1))
        seconds = restored(replica, rank, task)
        if not task.case.loses_node:
            replica.zero()
            barrier(task)
            again = restored(replica, rank, task)
            seconds |= {"existing_attach": again["attach"], "existing_load": again["load"]}
        barrier(task)
        if rank == task.daemons.index(task.daemons[rank]):  # the first rank of the node
            free_slots(task.daemons[rank])
        barrier(task)
        seconds |= compared(replica, rank, task)
    write(seconds, rank, task)


def load(rank: int, task: Task) -> None:
    """Loads twice with DCP; writes the seconds to a file, and saves as a script does."""
    with process_group(rank, task, "load"):
        replica, seconds = Replica(task.shape), dict[str, float]()
        for part in ("dcp", "dcp_again"):
            replica.drop_moments()
            back_pages(task, replica.missing_bytes)
            seconds[part] = timed(task, lambda: load_with_dcp(replica, task))
            replica.check("DCP")
        save_lasting(replica, rank, task)
    write(seconds, rank, task)


def dcp_restart(rank: int, task: Task) -> None:
    """Restores twice with DCP, as a script does; writes the seconds to a file."""
    with process_group(rank, task, "dcp_restart"):
        replica, seconds = Replica(task.shape), dict[str, float]()
        model = in_job(replica, task)
        for part in ("dcp_restore", "dcp_restore_again"):
            replica.drop_moments()
            back_pages(task, replica.missing_bytes)
            drop_cached(task.lasting)
            seconds[part] = timed(task, lambda: restore_with_dcp(model, replica, task))
            replica.check("DCP")
    write(seconds, rank, task)


def write(seconds: dict[str, float], rank: int, task: Task) -> None:
    """Adds the seconds of a role to this rank's file."""
    file = task.home / f"{rank}.json"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(earlier | seconds))


def restored(replica: Replica, rank: int, task: Task) -> dict[str, float]:
    """Attaches, checks the state, and closes the session; returns the seconds of the parts."""
    model = in_job(replica, task)
    with timed_steps() as steps:
        began = time.perf_counter()
        session = attach(model, replica, rank, task)
        attach_s = time.perf_counter() - began
    if not session.seal(DEADLINE_S):  # after a loss a snapshot is taken at once
        raise RuntimeError(f"the restored step is not whole: {session.stats()}")
    session.close()
    replica.check("reft")
    rest = attach_s - steps["load"] - steps["make"]
    return {"attach": attach_s, "load": steps["load"], "make": steps["make"], "rest": rest}


def compared(replica: Replica, rank: int, task: Task) -> dict[str, float]:
    """Returns the seconds of the memcpy, of page making and of the other ways to restore."""
    mapped = Mapped(replica.tensors())
    mapped.copy()
    one, two = [], []
    for _ in range(MEMCPYS):
        barrier(task)
        one.append(mapped.copy())
        barrier(task)
        two.append(mapped.copy_back(2))
    seconds = {"memcpy": median(one), "memcpy_2": median(two)}
    file, nbytes = mapped.file, mapped.nbytes
    del mapped
    replica.drop_moments()
    back_pages(task, replica.missing_bytes)
    seconds["double_buffer"] = timed(task, lambda: copy_from(file, nbytes, replica))
    replica.check("the double buffer")
    file.close()
    save_with_dcp(replica, rank, task)
    replica.drop_moments()
    back_pages(task, replica.missing_bytes)
    seconds["pages"] = timed(task, lambda: common.fresh(replica.missing_bytes))
    return seconds


def back_pages(task: Task, nbytes: int) -> None:
    """Returns once the host backs so much free memory.

    A hypervisor may have taken free memory from this machine. Then the first use is slow.
    """
    seconds = [common.fresh(nbytes) for _ in range(2)]
    while seconds[-1] > 1.5 * min(seconds) and len(seconds) < BACKED_TRIES:
        seconds.append(common.fresh(nbytes))
    barrier(task)


def timed(task: Task, work: Callable[[], object]) -> float:
    """Returns the seconds of some work that all ranks begin together."""
    barrier(task)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy_from(file: Any, nbytes: int, replica: Replica) -> None:
    """Restores from a file in shared memory: maps it anew, makes the moments, and copies."""
    memory = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.float32)
    replica.make_moments()
    at = 0
    for tensor in replica.tensors():
        tensor.view(-1).copy_(memory[at : at + tensor.numel()])
        at += tensor.numel()


def save_with_dcp(replica: Replica, rank: int, task: Task) -> None:
    dcp.save(replica.tree(), checkpoint_id=task.files / "dcp", no_dist=task.case.ranks == 1)
    barrier(task)


def save_lasting(replica: Replica, rank: int, task: Task) -> None:
    """Saves with DCP as a script does, in place of the other checkpoint: memory may hold one."""
    if rank == 0:
        shutil.rmtree(task.files / "dcp")
    barrier(task)
    model, optimizer = get_state_dict(in_job(replica, task), replica.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=task.lasting, no_dist=task.case.ranks == 1)
    barrier(task)


def load_with_dcp(replica: Replica, task: Task) -> None:
    replica.make_moments()
    dcp.load(replica.tree(), checkpoint_id=task.files / "dcp", no_dist=task.case.ranks == 1)


def restore_with_dcp(model: nn.Module, replica: Replica, task: Task) -> None:
    """Restores as the documentation of torch.distributed.checkpoint does."""
    of_model, of_optimizer = get_state_dict(model, replica.optimizer)
    tree = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(tree, checkpoint_id=task.lasting, no_dist=task.case.ranks == 1)
    set_state_dict(model, replica.optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])


def drop_cached(files: Path) -> None:
    """Has the kernel forget the files that lie on a disk. Files in shared memory stay."""
    for file in files.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_job(replica: Replica, task: Task) -> nn.Module:
    """Returns the model as a script passes it to attach."""
    if task.case.ranks == 1:
        return replica.model
    return nn.parallel.DistributedDataParallel(replica.model, init_sync=False)


def attach(model: nn.Module, replica: Replica, rank: int, task: Task) -> reft.Session:
    return reft.attach(model, replica.optimizer, job=JOB, daemon=task.daemons[rank], slots=SLOTS)


def free_slots(address: str) -> None:
    """Frees all slots of the job on one node."""
    with rpc.channel(address) as channel:
        pb_grpc.DaemonStub(channel).Purge(pb.PurgeRequest(job=JOB), timeout=DEADLINE_S)


@contextlib.contextmanager
def process_group(rank: int, task: Task, role: str) -> Iterator[None]:
    """Joins the ranks of a role, if there are several; the ranks share the cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // task.case.ranks))
    if task.case.ranks == 1:
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{task.home / role}", rank=rank, world_size=task.case.ranks)
    yield
    dist.destroy_process_group()


def barrier(task: Task) -> None:
    if task.case.ranks > 1:
        dist.barrier()


# All rounds


def measure(case: Case, shape: Shape) -> dict[str, float]:
    """Runs one round; returns the seconds of the slowest rank for each part."""
    with common.folder() as home, common.folder(common.SHM) as files, contextlib.ExitStack() as nodes:
        last = contextlib.ExitStack()  # entered last, so that it is left first
        listen = ("--listen", "127.0.0.1:0") if case.loses_node else ()
        daemons = [nodes.enter_context(common.daemon("node-0", *listen))]
        if case.loses_node:
            daemons.append(nodes.enter_context(last).enter_context(common.daemon("node-1", *listen)))
        run(train, task_of(case, shape, daemons, home, files))
        if case.loses_node:
            os.kill(daemons[1][1], signal.SIGKILL)
            last.close()
            daemons[1] = nodes.enter_context(common.daemon("node-2", *listen))
        run(restart, task_of(case, shape, daemons, home, files))
        run(load, task_of(case, shape, daemons, home, files))
        run(dcp_restart, task_of(case, shape, daemons, home, files))
        ranks = [json.loads((home / f"{rank}.json").read_text()) for rank in range(case.ranks)]
    return {key: max(each[key] for each in ranks) for key in ranks[0]}


def task_of(case: Case, shape: Shape, daemons: Sequence[tuple[str, int]], home: Path, files: Path) -> Task:
    addresses = [address for address, _ in daemons]
    return Task(
        case, shape, tuple(addresses[rank * len(addresses) // case.ranks] for rank in range(case.ranks)), home, files
    )


def run(role: Callable[[int, Task], None], task: Task) -> None:
    """Runs a role in one fresh process a rank.

    The processes are forks of this one. This one has imported torch, and holds no state.
    """
    processes.start_processes(role, (task,), nprocs=task.case.ranks, daemon=True, start_method="fork")


# Figures


@dataclass(frozen=True)
class Measured:
    """All rounds of one case and size.

    Attributes:
        case: the job.
        wanted: the size that was asked for.
        size: the size that fitted.
        rounds: part → seconds, for each round.
    """

    case: Case
    wanted: str
    size: str
    rounds: list[dict[str, float]]

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.size.replace('GB', ' GB').replace('MB', ' MB')}"

    @property
    def is_large(self) -> bool:
        """Whether memcpys are a fit unit: a memcpy of 10 MB takes only a millisecond."""
        return self.size != "10MB"

    def seconds(self, part: str) -> list[float]:
        """Returns the seconds of a part; an empty list if the case does not have the part."""
        return [each[part] for each in self.rounds if part in each]

    def memcpys(self, part: str) -> list[float]:
        """Returns a part in memcpys of the same round."""
        return [each[part] / each["memcpy"] for each in self.rounds if part in each]

    def rows(self) -> list[Row]:
        """Returns the figures for a file of results."""
        limit = None if self.case.loses_node else LIMITS[self.wanted, self.case.ranks]
        attach_goal = f"<= {limit:g}" if limit else None
        rows = [
            self._row("whole attach", "attach", attach_goal) if self.is_large else
            row_of(f"{self.name}: whole attach", "s", attach_goal, self.seconds("attach")),
            self._ratio("whole attach", "of DCP's restore", "attach", "dcp_restore", "< 1"),
            self._ratio("whole attach", "of DCP's load", "attach", "dcp", "< 1"),
            self._ratio("second attach", "of DCP's second restore", "existing_attach", "dcp_restore_again"),
            self._ratio("second attach", "of DCP's second load", "existing_attach", "dcp_again"),
            self._row("second attach, into existing pages", "existing_attach"),
            self._row("load into existing pages", "existing_load", "<= 1.6" if self.is_large else None),
            self._row("load into fresh pages", "load"),
            self._row("make: tensors, and pages not made yet", "make"),
            row_of(f"{self.name}: the rest of attach", "s", None, self.seconds("rest")),
            self._row("page making, alone", "pages"),
            self._row("plain double buffer", "double_buffer"),
            self._row("DCP's restore", "dcp_restore"),
            self._row("DCP's second restore", "dcp_restore_again"),
            self._row("DCP's load", "dcp"),
            self._row("DCP's second load", "dcp_again"),
            self._row("memcpy by two threads", "memcpy_2"),
            row_of(f"{self.name}: the memcpy", "ms", None, [1000 * each for each in self.seconds("memcpy")]),
        ]  # fmt: skip
        return [row for row in rows if row is not None]

    def _ratio(self, name: str, unit: str, part: str, beside: str, goal: str | None = None) -> Row | None:
        """Returns a part in terms of another one of the same round; None if the case lacks it."""
        ratios = [each[part] / each[beside] for each in self.rounds if part in each]
        return row_of(f"{self.name}: {name}", unit, goal, ratios) if ratios else None

    def _row(self, name: str, part: str, goal: str | None = None) -> Row | None:
        """Returns a part in memcpys, or in ms if the state is small.

        Returns None if the case lacks the part.
        """
        if not self.seconds(part):
            return None
        if self.is_large:
            return row_of(f"{self.name}: {name}", "memcpy", goal, self.memcpys(part))
        return row_of(f"{self.name}: {name}", "ms", goal, [1000 * each for each in self.seconds(part)])


def row_of(name: str, unit: str, goal: str | None, values: Sequence[float]) -> Row:
    return Row(name, unit, goal, median(values), min=min(values), max=max(values))


def note(case: Case, wanted: str, size: str | None) -> list[str]:
    """Returns a sentence about a size that does not fit into memory."""
    if size == wanted:
        return []
    states = f"{case.copies} times the state, in ranks and slots"
    instead = f"{size} was measured, against the goals of {wanted}" if size else "nothing was measured"
    return [f"{case.name}: {wanted} does not fit into the free memory ({states}); {instead}."]


def cells(row: Row) -> list[str]:
    """Returns a line of the printed table."""
    verdict = "" if row.goal is None else "MISS" if row.is_missed else "pass"
    return [verdict, row.name, f"{row.value:.3g}", row.goal or "", row.unit, f"{row.min:.3g} to {row.max:.3g}"]


def main() -> int:
    options = parse()
    common.end_on_signals()
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    began, notes, measured = time.perf_counter(), list(NOTES), []
    for wanted in options.sizes.split(","):
        for case in (CASES[name] for name in options.cases.split(",")):
            size = fitting(wanted, case)
            notes += note(case, wanted, size)
            if size is None:
                continue
            shape, rounds = {**SIZES, **SMALLER}[size], options.rounds or ROUNDS[wanted]
            measured.append(Measured(case, wanted, size, [measure(case, shape) for _ in range(rounds)]))
            print(f"{measured[-1].name}: done after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    rows = [row for each in measured for row in each.rows()]
    print(common.table(["", "figure", "median", "goal", "unit", "rounds"], [cells(row) for row in rows]))
    print("\n".join(notes))
    if options.json:
        details = {each.name: each.rounds for each in measured}
        result.write(options.json, __file__, TITLE, rows, notes, details)
    return 1 if any(row.is_missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
