"""Starts this node's daemon again when it has died, for whoever had started it: nobody else does.

    report or beat ─► nobody listens ─► a thread: find, or start ─► adopts slots and trainers ─► the next one is heard

Never waited for. A daemon that was named, or that does not leave by itself when it is idle, belongs to somebody else, who
starts it again; one that was stopped takes its socket away, and stays stopped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reft.config import Config
from reft.errors import ReftError
from reft.wire import starter

log = logging.getLogger("reft")
PAUSE_S = 10.0  # between two tries


@dataclass
class Reviver:
    """Of one process; all of a node may try, and one of them starts it.

    Args:
        settings: by which the daemon was found.
        unattended: whether it was started by a trainer or an agent: what it said in its HelloReply.
        flags: with which it was started, or would have been.
        agent_pid: of the torchrun agent for which it is to stay, as it sees that one; 0: for none.
    """

    settings: Config
    unattended: bool
    flags: Sequence[str] = ()
    agent_pid: int = 0
    _thread: threading.Thread | None = None
    _tried_s: float = float("-inf")

    def refused(self, address: str) -> None:
        """Nobody listens at the daemon's address. Returns at once; called by one thread at a time."""
        now_s = time.monotonic()
        is_busy = self._thread is not None and self._thread.is_alive()
        if self.settings.daemon or not self.unattended or is_busy or now_s - self._tried_s < PAUSE_S:
            return
        if not Path(address.removeprefix("unix:")).exists():
            return  # it was stopped
        self._tried_s = now_s
        self._thread = threading.Thread(target=self._revive, name="reft-revive", daemon=True)
        self._thread.start()

    def _revive(self) -> None:
        try:
            address, hello = starter.find(self.settings, self.flags)
            if self.agent_pid:
                starter.hello(address, agent_pid=self.agent_pid)
            log.warning("the daemon had died; process %d has taken over what it held.", hello.pid)
        except ReftError as error:
            log.warning("the daemon has died and can't be started again: %s", error)
