"""The torchrun agent of this node: its phase, by its own beats and by the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reft.core.membership.failure_detector import AgentPhase
from reft.wire.process import Process, stat_of
from reft_daemon.jobs.leases import ProcessWatch


@dataclass
class AgentProcess:
    """One agent.

    Attributes:
        pid: process id.
        phase: the phase in the agent's last beat; DEAD if the agent has ended without FINISHED.
        last_s: time of the last beat.
        watch: None if the process can't be watched, or has ended.
    """

    pid: int
    phase: AgentPhase
    last_s: float
    watch: ProcessWatch | None = None

    @property
    def is_alive(self) -> bool:
        return self.watch is not None

    @property
    def may_start_workers(self) -> bool:
        """Whether the agent may start its workers again: it lives, and its job has not finished."""
        return self.is_alive and self.phase is not AgentPhase.FINISHED

    def begin_watch(self, on_end: Callable[[], None]) -> None:
        """Watches the process; if that is impossible now, the next beat tries again.

        Args:
            on_end: called by the event loop when the process has ended.
        """
        try:
            stat = stat_of(self.pid)
            self.watch = ProcessWatch(Process(self.pid, stat.start), on_end) if stat else None
        except OSError:
            self.watch = None

    def note_end(self) -> None:
        """Notes that the process has ended."""
        self.watch = None
        if self.phase is not AgentPhase.FINISHED:
            self.phase = AgentPhase.DEAD

    def close(self) -> None:
        """Stops watching the process."""
        if self.watch is not None:
            self.watch.close()
