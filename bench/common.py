"""Shared parts of the benchmarks.

A model to train, references to compare with, statistics, tables, and processes that end.

Every cost is given in *memcpys*. One memcpy is one copy of all the state's bytes into mapped
memory, measured in the same process. On a shared machine seconds vary from minute to minute; these
ratios hardly do.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import nn

from bench.result import Row
from reft.core.commit.snapshot_interval import DueSteps

if TYPE_CHECKING:
    from reft.client.session import Session  # not at run time: bench/gpu_stage.py needs only torch and numpy

ROOT = Path(__file__).resolve().parents[1]
SHM = Path("/dev/shm")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
REPORTING_S = 7.0  # after this time a guest has given back all pages that it freed before
BACKED_TRIES = 20


# The training job


@dataclass(frozen=True)
class Shape:
    """The size of a model and of its batch."""

    width: int
    inner: int
    layers: int
    heads: int
    words: int
    batch: int
    length: int


FULL = Shape(width=768, inner=2096, layers=12, heads=12, words=50304, batch=1, length=128)  # 125 M parameters
QUICK = Shape(width=512, inner=1408, layers=4, heads=8, words=16384, batch=1, length=128)  # 21 M parameters


class Block(nn.Module):
    """One layer: attention and a gated MLP, each with its norm and residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query, self.key, self.value, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norm_1(x)
        q, k, v = (
            f(h).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns `x` with rotary position embedding."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Llama(nn.Module):
    """A small model like Llama; the embedding is tied to the output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        size = shape.width // shape.heads
        angles = torch.arange(shape.length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)[None]
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.norm(x) @ self.embedding.weight.t()


class Training:
    """A model, its optimizer and one batch: fp32, AdamW with torch's defaults."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.model = Llama(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.words = torch.randint(0, shape.words, (shape.batch, shape.length))

    def step(self) -> None:
        """Runs forward, backward and the optimizer."""
        logits = self.model(self.words)
        F.cross_entropy(logits.view(-1, self.shape.words), self.words.view(-1)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """Returns every tensor of the state, without step counters and buffers.

        There must have been one step.
        """
        return state_tensors(self.model, self.optimizer)

    def tree(self) -> dict[str, Any]:
        """Returns the state in the form that torch.distributed.checkpoint takes."""
        return state_tree(self.model, self.optimizer)


def state_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns each parameter and its two moments, which must exist."""
    tensors = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors += [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]]
    return tensors


def state_tree(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state in the form that torch.distributed.checkpoint takes."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}
    return {"model": model.state_dict(), "optimizer": states}


# References


class Mapped:
    """Memory for the state, in a file of /dev/shm without a name.

    Every page is allocated.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.file = tempfile.TemporaryFile(dir=SHM)
        os.ftruncate(self.file.fileno(), self.nbytes)
        pages = mmap.mmap(self.file.fileno(), self.nbytes)
        pages.madvise(_POPULATE_WRITE)
        memory = np.frombuffer(pages, np.uint8)
        self.pairs, offset = [], 0
        for tensor in tensors:
            source = tensor.reshape(-1).numpy().view(np.uint8)
            self.pairs.append((source, memory[offset : offset + source.nbytes]))
            offset += source.nbytes

    def copy(self) -> float:
        """Copies all state into this memory; returns the seconds.

        This is the memcpy in which costs are given.
        """
        began = time.perf_counter()
        for source, target in self.pairs:
            np.copyto(target, source)
        return time.perf_counter() - began

    def digest(self) -> float:
        """Digests all state; returns the seconds."""
        began = time.perf_counter()
        for source, _ in self.pairs:
            xxhash.xxh3_64_intdigest(source)
        return time.perf_counter() - began

    def copy_and_digest(self) -> None:
        """Copies in parts, and digests each part while the cache holds it.

        No snapshot beside training does less.
        """
        part = 1 << 20
        for source, target in self.pairs:
            for at in range(0, source.nbytes, part):
                np.copyto(target[at : at + part], source[at : at + part])
                xxhash.xxh3_64_intdigest(target[at : at + part].data)

    def copy_back(self, threads: int) -> float:
        """Copies everything into the live tensors with `threads` threads; returns the seconds."""
        step = 1 << 20
        parts = [(s[i : i + step], t[i : i + step]) for s, t in self.pairs for i in range(0, s.nbytes, step)]
        shares = [parts[len(parts) * i // threads : len(parts) * (i + 1) // threads] for i in range(threads)]

        def copy_parts(share: list[tuple[np.ndarray, np.ndarray]]) -> None:
            for source, target in share:
                np.copyto(source, target)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(copy_parts, [[]] * threads))
            began = time.perf_counter()
            list(pool.map(copy_parts, shares))
            return time.perf_counter() - began


def fresh(nbytes: int) -> float:
    """Allocates and frees `nbytes` of fresh huge pages with two threads; returns the seconds.

    A second call right after the first gets the same pages. Then a hypervisor that takes free
    memory from its guests has nothing to do. The guest's own work remains, mostly zeroing.
    """
    from reft.client.memory.huge_pages import HugePageBuffer

    began = time.perf_counter()
    buffer = HugePageBuffer(nbytes)
    buffer.make_pages()
    buffer.wait()
    return time.perf_counter() - began


def backed(nbytes: int) -> None:
    """Returns once the host backs `nbytes` of free memory.

    All memory is backed where no hypervisor takes free memory from its guests. A guest gives free
    huge pages back to its host (free page reporting). It does so in cycles of 2 s while more pages
    become free. So this function first waits until the pages of earlier processes are given back.
    Then it allocates memory until the same pages come twice. It allocates half as many again: the
    kernel does not always hand out the pages that were freed last, and a few unbacked pages cost
    much.
    """
    time.sleep(REPORTING_S)
    seconds = [fresh(nbytes * 3 // 2) for _ in range(3)]
    while max(seconds[-2:]) > 2 * min(seconds) and len(seconds) < BACKED_TRIES:
        seconds.append(fresh(nbytes * 3 // 2))


# Facts about processes and the machine


def own_bytes(pid: int | str = "self") -> int:
    """Returns a process's memory without shared pages: anonymous, files, page tables."""
    sizes = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        sizes[key] = value.split()
    return sum(int(sizes[key][0]) for key in ("RssAnon", "RssFile", "VmPTE")) << 10


class Others:
    """The CPU time of other processes: how noisy the machine is."""

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _, _, irq, softirq, steal = fields
        mine = os.times()
        busy = (user + nice + system + irq + softirq + steal) / self._ticks
        return time.perf_counter(), busy - mine.user - mine.system

    def cores(self) -> float:
        """Returns the average number of cores that others used since the last call."""
        before, self._before = self._before, self._now()
        return max(0.0, (self._before[1] - before[1]) / (self._before[0] - before[0]))


# Statistics


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which this share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Returns median, minimum, 99th percentile and count of measurements."""
    return {
        "median": median(values),
        "min": min(values, default=float("nan")),
        "p99": quantile(values, 0.99),
        "count": len(values),
    }


# Goals and tables


@dataclass(frozen=True)
class Goal:
    """One figure with its limit."""

    name: str
    value: float
    limit: float
    unit: str
    formula: str

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def result(self, p99: float | None = None) -> Row:
        """Returns this figure as a row for a file of results."""
        return Row(self.name, self.unit, f"<= {self.limit:g}", self.value, p99=p99)

    def row(self) -> list[str]:
        verdict = "pass" if self.passed else "MISS"
        return [verdict, self.name, f"{self.value:.3g}", f"<= {self.limit:g}", self.unit, self.formula]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows as text; each column is as wide as its widest cell."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)


# Processes


def end_on_signals() -> None:
    """Turns SIGTERM and SIGHUP into SystemExit.

    So context managers end their processes and remove their files.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


@contextmanager
def folder(where: Path | None = None) -> Iterator[Path]:
    """Yields a temporary folder, and removes it at the end."""
    path = Path(tempfile.mkdtemp(prefix="reft-bench-", dir=where))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def process(command: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process, and ends it with the block."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    settings = {**os.environ, "PYTHONPATH": paths, **environment}
    with open(log, "ab") as output:
        started = subprocess.Popen(list(command), stdout=output, stderr=output, env=settings)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextmanager
def daemon(node: str = "bench", *more: str) -> Iterator[tuple[str, int]]:
    """Yields address and pid of a new daemon. At the end it and its files are removed.

    Args:
        node: the node's name.
        more: further flags.
    """
    with folder() as home, folder(SHM) as slots:
        flags = [
            "--node",
            node,
            "--socket",
            str(home / "d.sock"),
            "--dir",
            str(slots),
            "--purge",
            "--idle-exit",
            "120",
            *more,
        ]
        with process([sys.executable, "-m", "reft_daemon", *flags], home / "log", {}) as started:
            end = time.monotonic() + 30
            while not (home / "d.sock.ln").exists():
                if started.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the daemon did not start:\n{(home / 'log').read_text()}")
                time.sleep(0.05)
            yield f"unix:{home / 'd.sock'}", started.pid


def run_role(script: str, arguments: Sequence[str], environment: dict[str, str], home: Path) -> dict[str, Any]:
    """Runs a script of this folder in a fresh process.

    It returns the JSON that the script writes.
    """
    log, result = home / "role.log", home / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "bench" / script), *arguments, "--result", str(result)]
    with process(command, log, environment) as started:
        code = started.wait()
    if code or not result.exists():
        raise RuntimeError(f"{' '.join(arguments)} ended with {code}:\n{log.read_text()[-3000:]}")
    return dict(json.loads(result.read_text()))


def snapshot_each(session: Session, every: int) -> None:
    """Makes a session take every n-th step from now on.

    A user fixes this number in `reft.attach(every=n)`.
    """
    assert session._window.cadence is not None, "reft is switched off"
    session._window.cadence.due_steps = DueSteps(every, adapts=False)
