"""Other users of this machine, who train a few steps: for tests that root runs. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.daemons import ROOT

ATTACH = """
import os, torch, reft
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = reft.attach(model, optimizer)
for _ in session.steps(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
print("uid", os.getuid(), "whole", session.seal(timeout=60).step)
session.close()
"""


def as_user(user: int) -> list[str]:
    """Runs what follows as `user`, who may read what root's Python needs, but write nothing of root's, and lock no memory.

    Root may lock memory whatever its limit is.
    """
    caps = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return [
        "prlimit",
        "--memlock=0:0",
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        *(caps if user else []),
        sys.executable,
    ]


def execute(user: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """A user's training, with a HOME that can't be written."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    base = {"HOME": "/proc", "PATH": os.environ["PATH"], "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [*as_user(user), "-c", ATTACH]
    return subprocess.run(command, env={**base, **environment}, capture_output=True, text=True, timeout=120, cwd="/")
