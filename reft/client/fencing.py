"""What keeps two trainers from holding one rank: a mark of the launch, and death with the agent."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from reft.errors import AttachError
from reft.wire.process import stat_of

_PR_SET_PDEATHSIG = 1


def launch_mark(under_agent: bool) -> str:
    """What tells this launch from any other: the agent that restarts its workers, else this very process."""
    pid = os.getppid() if under_agent else os.getpid()
    facts = stat_of(pid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{pid}/{facts.start if facts else 0}"


def die_with_parent() -> None:
    """Ends this process when its agent ends: a SIGKILLed agent leaves its workers training, and the next ones collide.

    Raises:
        AttachError: the agent is gone already.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise AttachError("the torchrun agent ended while its worker attached.")
