"""What a trainer and its torchrun agent have to do with each other: a mark of the launch, death with the agent, and whether
the agent has the rendezvous and the name that it was asked for."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from reft.config import Launch
from reft.errors import AttachError
from reft.wire.process import mark_of

_PR_SET_PDEATHSIG = 1
_UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_TORCHRUN = re.compile(r"(.*/)?torchrun|torch\.distributed\.run|.*/torch/distributed/run\.py")


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


def chosen_run_id(launch: Launch, agent: Sequence[str]) -> str:
    """The --rdzv-id that a person gave; for one node without a backend torchrun puts a random one in its place.

    Args:
        launch: what the agent told this process.
        agent: its command line.
    """
    was_drawn = _UUID4.fullmatch(launch.run_id) and launch.run_id != launch.asked_id
    if not was_drawn or not any(map(_TORCHRUN.fullmatch, agent)):
        return launch.run_id
    words = " ".join(agent).replace("--rdzv_id", "--rdzv-id")
    written = re.search(r"--rdzv-id[= ](\S+)", words)
    return written.group(1) if written else launch.asked_id or "none"


def dropped_backend(launch: Launch, agent: Sequence[str]) -> str:
    """What to tell a person who asked torchrun for reft's rendezvous and did not get it; empty if nobody did.

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
