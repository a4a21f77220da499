"""Runs an unchanged example and records its steps: `python -m tests.support.recorded`.

    --out DIR --steps N --example NAME          runs examples/NAME.py --steps N, under torchrun
    Ranks(spec, …)                              the same in forked processes; a test can kill them

`reft.attach` returns a session that records each attach. After each step it records a digest of the
losses and of all parameters in place of the loss, because not every rank of a pipeline has a loss.
At the end it records digests of all parameters, of the optimizer's state, and of torch's generator.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import reft
from reft.client.state.tensors import flat_bytes
from reft.demo.train import LossLog
from tests.support.daemons import ROOT
from tests.support.trainers import Trainers


class Recorded:
    """A session that records its steps; all other calls go to the real session.

    Args:
        session: the real session.
        out: the folder for the records.
        started_s: when this process began.
        seal_at: steps at which the loop waits until the step is whole.
    """

    def __init__(
        self, session: reft.Session, out: Path, model: Any, optimizer: Any, started_s: float, seal_at: list[int]
    ) -> None:
        self._session, self._out, self._model, self._optimizer = session, out, model, optimizer
        self._seal_at = seal_at
        self._rank = os.environ["RANK"]
        self._record = LossLog(out / f"rank-{self._rank}.jsonl")
        self._record.add("started", pid=os.getpid(), time_s=started_s)
        self._record.add("attached", restored_from=session.restored_from, step=session.step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def steps(self, total: int) -> Iterator[int]:
        """Yields the session's steps; records the result of the loop's body before the mark."""
        for step in self._session.steps(total):
            if step in self._seal_at:
                assert self._session.seal(timeout=60).whole, f"step {step} is not whole"
            yield step
            names = sys._getframe(1).f_globals  # the example's variables
            losses = [*names.get("losses", []), *([names["loss"]] if "loss" in names else [])]
            hasher = hashlib.sha256()
            for tensor in (*losses, *self._model.parameters()):
                hasher.update(raw(tensor))
            self._record.add("step", step=step + 1, loss=float(int.from_bytes(hasher.digest()[:6], "big")).hex())

    def close(self) -> None:
        """Seals, closes, and writes the digests."""
        self._session.seal()
        self._session.close()
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        tensors = {f"parameter {name}": parameter for name, parameter in self._model.named_parameters()}
        for parameter, state in getattr(self._optimizer, "optim", self._optimizer).state.items():
            tensors |= {f"optimizer {names[id(parameter)]}.{key}": value for key, value in state.items()}
        tensors["random generator"] = torch.get_rng_state()
        digests = {name: hashlib.sha256(raw(tensor)).hexdigest() for name, tensor in tensors.items()}
        draft = self._out / f"rank-{self._rank}.digests.new"
        draft.write_text(json.dumps(digests))
        draft.rename(self._out / f"rank-{self._rank}.digests.json")


def raw(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor that this rank has."""
    local = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    return flat_bytes(local.contiguous()).numpy().tobytes()


def record(example: str, steps: int, out: Path, started_s: float, seal_at: list[int]) -> None:
    """Runs an example from start to end, as one rank.

    An example "NAME-KIND" is the script NAME of this folder with a kind of optimizer.
    """
    attach = reft.attach

    def recording(model: Any, optimizer: Any, *arguments: Any, **named: Any) -> Recorded:
        session = attach(model, optimizer, *arguments, **named)
        return Recorded(session, out, model, optimizer, started_s, seal_at)

    reft.attach = recording  # type: ignore[assignment]
    torch.set_num_threads(1)
    name, _, kind = example.partition("-")
    script = ROOT / ("tests/support" if kind else "examples") / f"{name}.py"
    sys.argv = [str(script), "--steps", str(steps), *(["--kind", kind] if kind else [])]
    runpy.run_path(str(script), run_name="__main__")


def run(spec: dict[str, Any]) -> None:
    """Runs one forked rank; spec["options"]: example, records (a folder), per_node, seal_at."""
    started_s, options = time.monotonic(), spec["options"]
    os.environ.update(
        spec["environment"], REFT_FAILPOINTS=spec["failpoints"], REFT_DAEMON=spec["daemon"], REFT_JOB=spec["job"],
        REFT_CHUNK_BYTES=str(16 << 10), RANK=str(spec["rank"]), WORLD_SIZE=str(spec["world"]), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec["port"]), LOCAL_WORLD_SIZE=str(options["per_node"]), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    record(options["example"], spec["steps"], Path(options["records"]), started_s, options["seal_at"])


class Ranks(Trainers):
    """All ranks of one run of an example."""

    target = staticmethod(run)


def train_demo(spec: dict[str, Any]) -> None:
    """Runs one forked rank of the demo's script without reft.

    Spec["options"]: records (a folder).
    """
    os.environ.update(
        REFT_MODE="off", RANK=str(spec["rank"]), WORLD_SIZE=str(spec["world"]), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec["port"]), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
    )  # fmt: skip
    sys.argv = ["train", "--out", spec["options"]["records"], "--steps", str(spec["steps"])]
    runpy.run_module("reft.demo.train", run_name="__main__", alter_sys=True)


class PlainDemo(Trainers):
    """All ranks of one undisturbed run of the demo's script."""

    target = staticmethod(train_demo)


def main() -> None:
    """Runs one rank under torchrun."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--example", required=True)
    parser.add_argument("--seal-at", type=int, nargs="*", default=[])
    options = parser.parse_args()
    record(options.example, options.steps, options.out, started_s, options.seal_at)


if __name__ == "__main__":
    main()
