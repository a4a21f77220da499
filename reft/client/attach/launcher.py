"""The trainer and its torchrun agent.

Finds the launch mark, ends the trainer together with the agent, keeps half an error file from the
agent, and checks whether the agent uses the rendezvous and the run id that the user gave.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from reft.config import Launch, replace_error_file
from reft.core.text import counted
from reft.errors import AttachError
from reft.wire.process import mark_of

_PR_SET_PDEATHSIG = 1
_UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_INCOMPLETE = ".incomplete"
_TORCHRUN = re.compile(r"(.*/)?torchrun|torch\.distributed\.run|.*/torch/distributed/run\.py")


def launch_mark(launch: Launch) -> str:
    """Returns the mark that distinguishes this launch from any other launch.

    The mark comes from reft's rendezvous if there is one. Else it names the agent's process, or
    this process if there is no agent.
    """
    if launch.launch:
        return launch.launch
    return mark_of(os.getppid() if launch.under_agent else os.getpid())


def die_with_parent() -> None:
    """Makes the kernel kill this process when its agent ends.

    Otherwise the workers of a SIGKILLed agent would go on training, and collide with the next
    workers.

    Raises:
        AttachError: the agent has ended already.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise AttachError("the torchrun agent ended while its worker attached.")


def complete_error_file() -> None:
    """Gives the agent this process's error file only when the file is complete.

    When a rank has failed, the others fail, too, and each writes its error file in place
    (`torch.distributed.elastic.multiprocessing.errors.record`) while the agent ends it by SIGTERM.
    An agent that then reads half a file raises JSONDecodeError, and restarts nothing. So torch
    writes beside the file that the agent reads, and this process puts the text there as it ends.
    Without an error file the agent names the signal or the exit code.
    """
    if path := replace_error_file(_INCOMPLETE):
        atexit.register(_put_in_place, path, os.getpid())


def _put_in_place(path: str, pid: int) -> None:
    if os.getpid() != pid:  # a forked child
        return
    # there may be no file, or half a one: a handler of SIGTERM raised, or a disk is full
    with contextlib.suppress(OSError, ValueError):
        json.loads(Path(path + _INCOMPLETE).read_bytes())
        os.replace(path + _INCOMPLETE, path)


def agents_command() -> list[str]:
    """Returns the command line of this process's parent; empty if it can't be read."""
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def chosen_run_id(launch: Launch, agent: Sequence[str]) -> str:
    """Returns the --rdzv-id that the user gave.

    On one node without a backend, torchrun replaces the user's id by a random one.

    Args:
        launch: facts from this process's environment.
        agent: the command line of the agent.
    """
    is_random = _UUID4.fullmatch(launch.run_id) and launch.run_id != launch.asked_id
    if not is_random or not any(map(_TORCHRUN.fullmatch, agent)):
        return launch.run_id
    command = " ".join(agent).replace("--rdzv_id", "--rdzv-id")
    option = re.search(r"--rdzv-id[= ](\S+)", command)
    return option.group(1) if option else launch.asked_id or "none"


def dropped_backend(launch: Launch, agent: Sequence[str]) -> str:
    """Returns a notice if restarts may hang, because torchrun does not use reft's rendezvous.

    Returns an empty text otherwise.

    Args:
        launch: facts from this process's environment.
        agent: the command line of the agent.
    """
    if not launch.under_agent or launch.launch:
        return ""
    command = " ".join(agent).replace("=", " ").replace("_", "-")
    wants_reft = "--rdzv-backend reft" in command or launch.backend == "reft"
    if not wants_reft or "--standalone" not in agent:
        if not launch.restarts:
            return ""
        return (
            f"the launcher restarts failed ranks up to {counted(launch.restarts, 'time')}, and with torch's own rendezvous they "
            "often hang after a restart. Start with torchrun --rdzv-backend=reft; on one node it needs no endpoint."
        )
    return (
        "torchrun's --standalone silently replaced --rdzv-backend=reft by c10d: restarts may hang, and ranks may move. "
        "Leave --standalone out; on one node the reft backend needs no endpoint."
    )
