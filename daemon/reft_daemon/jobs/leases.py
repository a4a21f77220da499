"""Tracks the trainer process of each rank.

It ends orphans before a new attach reads their slots. The kernel says whether a trainer is alive,
dead, or orphaned by the agent that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from reft.core.commit.gradient_records import RECORD_SLOTS_MAX
from reft.errors import AlreadyAttached, AttachError, ConfigError
from reft.log_lines import audit
from reft.wire import local_socket
from reft.wire.local_socket import CallerProcess
from reft.wire.process import Process, stat_of
from reft.wire.slot_format import PAGE, TABLE_MAX
from reft.wire.v1 import daemon_pb2 as pb

log = logging.getLogger("reft.daemon")


@dataclass
class Lease:
    """One rank's trainer: its process, the slots it was given, its last report.

    Attributes:
        watch: None once the trainer has ended.
        closed: whether the trainer has closed its session.
        failed: whether it closed the session because of an exception.
        refused: whether the trainer's attach has raised an error.
        wanted_slots: the number of slots that the trainer asked for; 0 if unknown.
    """

    process: Process
    parent: int
    watch: ProcessWatch | None = None
    closed: bool = False
    failed: bool = False
    refused: bool = False
    step: int = -1
    trouble: str = ""
    given_slots: set[str] = field(default_factory=set)
    wanted_slots: int = 0

    @property
    def has_ended_well(self) -> bool:
        """Whether the trainer closed its session, and not because of an exception."""
        return self.closed and not self.failed


def lease_from(entry: pb.LeaseRecord) -> Lease:
    """Returns the lease that a record tells of; its trainer is not watched yet."""
    process = Process(entry.pid, entry.pid_start)
    return Lease(process, entry.parent, closed=entry.closed, failed=entry.failed)


def caller_process(pid: int, start: int = 0) -> CallerProcess:
    """Returns the process at the other end of a connection, and its parent.

    Args:
        pid: by the word of the kernel (SO_PEERCRED).
        start: of the process when its connection was accepted; 0: it is accepted now.

    Raises:
        AttachError: this daemon can't see the process, or the process has ended.
        OSError: the process can't be examined now.
    """
    facts = stat_of(pid)
    if facts is None or (start and facts.start != start):
        raise AttachError(
            "the caller has ended, or lives in a pid namespace that this daemon does not see.",
            "run reft-daemon in the trainers' container, or in the host's pid namespace (hostPID, --pid=host)",
        )
    return CallerProcess(Process(pid, facts.start), facts.parent)


def have_ended_well(leases: Mapping[int, Lease]) -> bool:
    """Whether all trainers closed their sessions, none because of an exception."""
    return bool(leases) and all(lease.has_ended_well for lease in leases.values())


async def end_orphans(
    job: str, leases: Mapping[int, Lease], same_launch: bool, new_pids: Collection[int], launch: str, by: str
) -> None:
    """Ends the orphans of an earlier attach, all at once: each may take seconds to free memory.

    Args:
        job: for messages.
        leases: rank → its trainer.
        same_launch: whether the new attach belongs to the same launch; then all earlier trainers
            are orphans.
        new_pids: pids of the processes that attach.
        launch: of the new attach, for the audit lines.
        by: who calls, for the audit lines.

    Raises:
        AlreadyAttached: a trainer lives and is no orphan; no process was ended.
        AttachError: an orphan does not die.
    """
    orphans = [(rank, lease) for rank, lease in leases.items() if _is_orphan(job, rank, lease, same_launch, new_pids)]
    why = "an orphan of an earlier attach"
    kills = (
        lease.watch.kill(rank=rank, job=job, launch=launch, why=why, by=by)
        for rank, lease in orphans
        if lease.watch is not None
    )
    kill_results = await asyncio.gather(*kills)
    for (rank, lease), has_ended in zip(orphans, kill_results, strict=True):
        if not has_ended:
            raise AttachError(
                f"process {lease.process.pid}, an orphan of rank {rank}, does not die.", "end that process by hand"
            )


def _is_orphan(job: str, rank: int, lease: Lease, same_launch: bool, new_pids: Collection[int]) -> bool:
    """Whether a rank's trainer lives and must be ended for a new attach.

    Raises:
        AlreadyAttached: the trainer lives and is no orphan, or is one of the new processes.
    """
    if lease.watch is None:
        return False
    if lease.process.pid in new_pids:
        raise AlreadyAttached(
            f"rank {rank} of job {job} is attached by this very process.", "close the earlier session first"
        )
    if not same_launch and not lease.process.is_orphan(lease.parent):
        raise _living_trainer_error(job, rank, lease)
    return True


def refuse_living(job: str, leases: Mapping[int, Lease]) -> None:
    """Raises AlreadyAttached if a trainer lives.

    A trainer that came after orphans were ended belongs to another attach.
    """
    for rank, lease in leases.items():
        if lease.watch is not None:
            raise _living_trainer_error(job, rank, lease)


def _living_trainer_error(job: str, rank: int, lease: Lease) -> AlreadyAttached:
    return AlreadyAttached(
        f"rank {rank} of job {job} is trained by process {lease.process.pid}, which lives (last step {lease.step}).",
        f"end that run (kill {lease.process.pid}), or give this run another name: REFT_JOB=NAME (torchrun: --rdzv-id=NAME)",
    )


# a SIGKILLed process that frees much memory takes seconds; a process stuck in the kernel never ends
FENCE_DEADLINE_S = 10.0


class ProcessWatch:
    """Calls `on_end` in the event loop when a process ends.

    Args:
        process: must be alive.
        on_end: called once.

    Raises:
        ProcessLookupError: the process is gone, or another process has its pid now.
        OSError: the process can't be watched, e.g. if no descriptor is free. The process may live.
    """

    def __init__(self, process: Process, on_end: Callable[[], None]) -> None:
        self._process = process
        self._descriptor = os.pidfd_open(process.pid)
        try:
            if not process.is_alive:
                raise ProcessLookupError(f"no process {process.pid} that started at {process.start}")
        except OSError:
            os.close(self._descriptor)
            raise
        self._on_end = on_end
        self._ended_event = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._process_ended)

    def _process_ended(self) -> None:
        self.close()
        self._on_end()

    async def kill(self, **facts: object) -> bool:
        """Sends SIGKILL; returns True once the process has ended or is no longer watched.

        Returns False if the process still lives after FENCE_DEADLINE_S.

        Args:
            facts: about the kill, for its audit line: the rank, the job, why, and who asked.
        """
        if not self._ended_event.is_set():
            # the process was just reaped; the event loop does not know yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
                audit("kill", pid=self._process.pid, **facts)
        try:
            await asyncio.wait_for(self._ended_event.wait(), FENCE_DEADLINE_S)
        except asyncio.TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stops watching: the process has ended, or has closed its session."""
        self._ended_event.set()
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def check_sizes(request: pb.LeaseRequest) -> None:
    """Raises ConfigError for sizes that no trainer requests.

    Whether valid sizes fit is checked later, before memory is touched.
    """
    if request.slots > local_socket.DESCRIPTORS_MAX or request.table_bytes > TABLE_MAX:
        raise ConfigError(
            f"{request.slots} slots with a table of {request.table_bytes} bytes were requested; "
            f"at most {local_socket.DESCRIPTORS_MAX} slots and {TABLE_MAX} bytes are allowed."
        )
    if request.records > RECORD_SLOTS_MAX or (request.records and request.slots):
        raise ConfigError(
            f"{request.records} record slots were requested beside {request.slots} slots; a request is for at most "
            f"{RECORD_SLOTS_MAX} record slots alone."
        )
    if (request.slots or request.records) and (request.chunk_bytes < PAGE or request.chunk_bytes % PAGE):
        raise ConfigError(
            f"chunks of {request.chunk_bytes} bytes were requested; the size must be a multiple of {PAGE}."
        )
