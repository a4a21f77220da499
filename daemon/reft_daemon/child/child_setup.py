"""What each child of the daemon does first."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

from reft.wire.process import set_oom_score

_PR_SET_PDEATHSIG: Final = 1


def become_child(oom_score: int, nice: int) -> None:
    """Ties this process to its daemon, and makes it yield to training."""
    set_oom_score(oom_score)
    # The channel's end ends this process too, but not while it is stopped. Then it could still
    # write a slot that the next daemon's child has sealed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpriority(os.PRIO_PROCESS, 0, nice)  # not more, where the daemon itself has been made nice
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to the group is for the daemon, whose end ends this process
