"""What a trainer and its torchrun agent have to do with each other: a mark of the launch, death with the agent, and whether
the agent has the rendezvous that it was asked for."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from reft.config import Launch
from reft.errors import AttachError
from reft.wire.process import mark_of

_PR_SET_PDEATHSIG = 1


def launch_mark(launch: Launch) -> str:
    """What tells this launch from any other: as reft's rendezvous says, else the agent that restarts its workers, else we."""
    if launch.launch:
        return launch.launch
    return mark_of(os.getppid() if launch.under_agent else os.getpid())


def die_with_parent() -> None:
    """Ends this process when its agent ends: a SIGKILLed agent leaves its workers training, and the next ones collide.

    Raises:
        AttachError: the agent is gone already.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise AttachError("the torchrun agent ended while its worker attached.")


def agents_command() -> list[str]:
    """The command line of this process's parent; empty if it can't be read."""
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def dropped_backend(launch: Launch, agent: Sequence[str]) -> str:
    """What to tell whoever asked torchrun for reft's rendezvous and did not get it; empty if nobody did.

    Args:
        launch: what the agent told this process.
        agent: its command line.
    """
    if not launch.under_agent or launch.launch:
        return ""
    words = " ".join(agent).replace("=", " ").replace("_", "-")
    asked = "--rdzv-backend reft" in words or launch.backend == "reft"
    if not asked or "--standalone" not in agent:
        return ""
    return (
        "torchrun's --standalone has dropped --rdzv-backend=reft without a word, and took c10d: restarts may hang, ranks may "
        "move. Leave --standalone out; on one node the reft backend needs no endpoint."
    )
