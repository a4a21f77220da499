"""An example as it stands, with what it does written down as the demo's script does it: `python -m tests.support.recorded`.

    --out DIR --steps N --example NAME          runs examples/NAME.py --steps N

`reft.attach` hands out a session that records: each attach, after each step a digest of all parameters (in the place of the
loss, which not every rank of a pipeline has), and at the end digests of all parameters and of the optimizer's state.
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
import torch.distributed as dist

import reft
from reft.demo.train import Record, raw
from tests.support.daemons import ROOT


class Recorded:
    """A session that records what passes through it; all else goes to the session itself."""

    def __init__(self, session: reft.Session, out: Path, model: Any, optimizer: Any, started_s: float) -> None:
        self._session, self._out, self._model, self._optimizer = session, out, model, optimizer
        self._rank = dist.get_rank()
        self._record = Record(out / f"rank-{self._rank}.jsonl")
        self._record.add("started", pid=os.getpid(), time_s=started_s)
        self._record.add("attached", restored_from=session.restored_from, step=session.step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def steps(self, total: int) -> Iterator[int]:
        """As the session's; what the loop's body left is recorded before the step is marked."""
        for step in self._session.steps(total):
            yield step
            found = hashlib.sha256(b"".join(raw(local(parameter)) for parameter in self._model.parameters()))
            self._record.add("step", step=step + 1, loss=float(int.from_bytes(found.digest()[:6], "big")).hex())

    def close(self) -> None:
        """Seals, closes, and writes the digests."""
        self._session.seal()
        self._session.close()
        found = {}
        for name, parameter in self._model.named_parameters():
            found[f"parameter {name}"] = hashlib.sha256(raw(local(parameter))).hexdigest()
            for key, value in self._optimizer.state[parameter].items():
                found[f"optimizer {name}.{key}"] = hashlib.sha256(raw(local(value))).hexdigest()
        draft = self._out / f"rank-{self._rank}.digests.new"
        draft.write_text(json.dumps(found))
        draft.rename(self._out / f"rank-{self._rank}.digests.json")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank."""
    return getattr(tensor.detach(), "_local_tensor", tensor)


def main() -> None:
    """One rank."""
    started_s = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", required=True)
    parser.add_argument("--example", required=True)
    options = parser.parse_args()
    attach = reft.attach

    def recording(model: Any, optimizer: Any, *arguments: Any, **named: Any) -> Recorded:
        session = attach(model, optimizer, *arguments, **named)
        return Recorded(session, options.out, model, optimizer, started_s)

    reft.attach = recording  # type: ignore[assignment]
    script = ROOT / "examples" / f"{options.example}.py"
    sys.argv = [str(script), "--steps", options.steps]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
