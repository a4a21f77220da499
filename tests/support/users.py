"""Trains a few steps as another user of this machine: for tests that root runs.

Imports no torch.
"""

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
    """Returns the beginning of a command that runs Python as `user`.

    The user may read root's files, which Python needs, but not write them, and may not lock memory.
    User 0 may lock memory in spite of the limit.
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
    """Runs a user's training, with a HOME that can't be written."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    base = {"HOME": "/proc", "PATH": os.environ["PATH"], "TMPDIR": "/tmp", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [*as_user(user), "-c", ATTACH]
    return subprocess.run(command, env={**base, **environment}, capture_output=True, text=True, timeout=250, cwd="/")
