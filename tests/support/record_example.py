"""An example as it stands, with records: `-m tests.support.record_example --out DIR --steps N --example NAME`, under torchrun.

Writes what `reft.demo.train` writes (see there), so that `reft.cli.demo.records` compares two runs: the example's `loss` of
every step, and at the end a digest of all local tensors of its `model` and `optimizer`.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

STARTED_S = time.monotonic()

import torch  # noqa: E402

import reft  # noqa: E402
from reft.client.session import Session  # noqa: E402
from reft.client.state import flat_bytes  # noqa: E402
from reft.demo.train import Record  # noqa: E402
from tests.support.daemons import ROOT  # noqa: E402


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of every local tensor, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {f"parameter {name}": parameter for name, parameter in model.named_parameters()}
    for parameter, state in getattr(optimizer, "optim", optimizer).state.items():
        tensors |= {f"optimizer {names[id(parameter)]}.{key}": value for key, value in state.items()}
    tensors["random generator"] = torch.get_rng_state()
    local = {name: getattr(tensor, "_local_tensor", tensor).detach() for name, tensor in tensors.items()}
    return {
        name: hashlib.sha256(flat_bytes(each.contiguous()).numpy().tobytes()).hexdigest()
        for name, each in local.items()
    }


def main() -> None:
    """One rank, from start to end."""
    parser = argparse.ArgumentParser()
    for name, kind in (("--out", Path), ("--steps", int), ("--example", str)):
        parser.add_argument(name, type=kind, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    record = Record(options.out / f"rank-{rank}.jsonl")
    record.add("started", pid=os.getpid(), time_s=STARTED_S)
    spec = spec_from_file_location("example", ROOT / "examples" / f"{options.example}.py")
    assert spec is not None and spec.loader is not None
    example = module_from_spec(spec)
    attach, steps = reft.attach, Session.steps

    @functools.wraps(attach)
    def recorded_attach(*values: Any, **arguments: Any) -> Session:
        session = attach(*values, **arguments)
        record.add("attached", restored_from=session.restored_from, step=session.step)
        return session

    def recorded_steps(session: Session, total: int) -> Iterator[int]:
        for step in steps(session, total):
            yield step
            record.add("step", step=step + 1, loss=example.loss.item().hex())
        assert session.seal(timeout=60), "the last step is not whole"

    reft.attach, Session.steps = recorded_attach, recorded_steps
    sys.argv = [str(spec.origin), "--steps", str(options.steps)]
    spec.loader.exec_module(example)
    draft = options.out / f"rank-{rank}.digests.new"
    draft.write_text(json.dumps(digests(example.model, example.optimizer)))
    draft.rename(options.out / f"rank-{rank}.digests.json")


if __name__ == "__main__":
    main()
