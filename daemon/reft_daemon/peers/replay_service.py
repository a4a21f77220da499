"""Makes the copies of a turn by recomputing them, where this is possible.

    turn T of a copy lane ─► all is at hand? ─► replayer ─► SEALED: the lane is guarded
                                │ no               │ wrong, dead or slow
                                ▼                  ▼
                             the reason is noted, and the mover makes the lane

Each failure costs bytes on the wire, and never a copy. The mover's copies are the next base.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from reft.core.commit.replay_trials import ReplayTrials
from reft.core.commit.version import Epoch, Version
from reft.errors import ReftError
from reft.wire.replay_sections import OwnerFacts
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile
from reft_daemon.jobs import parity
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.parity import LocalLane
from reft_daemon.peers.replay_order import (
    LateRecord,
    ReplayInputs,
    copied_owners,
    replay_inputs,
    replay_order,
    replayable_step,
)
from reft_daemon.peers.replayer import Replayer, ReplayFailed

log = logging.getLogger("reft.daemon")
DEADLINE_S: Final = 30.0  # and the time at BYTES_PER_S
BYTES_PER_S: Final = 20e6  # the slowest replay that is waited for
RECORDS_S: Final = 2.0  # for records that are sealed after the step is whole
RECORDS_POLL_S: Final = 0.05


@dataclass
class LaneReplay:
    """The replays of one lane, as `status` shows them.

    Attributes:
        trials: when the next attempt is made.
        verified: the newest step whose copies were recomputed, and compared; -1: none.
        marks: records that the last replay folded.
        cpu_s: CPU seconds of the last replay.
        reason: why the exchange made the last turn; empty: it did not.
        tried: the version of the last turn that was considered; a turn that is begun anew is not.
        owners: epoch and what its manifest says of the copied ranks.
    """

    trials: ReplayTrials = field(default_factory=ReplayTrials)
    verified: int = -1
    marks: int = 0
    cpu_s: float = 0.0
    reason: str = "no turn has ended yet."
    tried: Version | None = None
    owners: tuple[Epoch, list[OwnerFacts]] | None = None

    def lag(self, whole: int) -> int:
        """Returns the steps from the newest verified step to the newest whole one."""
        return max(whole - self.verified, 0) if self.verified >= 0 else 0


class ReplayService:
    """Recomputes copies for the turns of all jobs here.

    Args:
        replayer: the process that does it.
    """

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self._lanes: dict[str, dict[int, LaneReplay]] = {}  # job → lane → its replays

    async def make(self, job: JobRecord, local: LocalLane, version: Version, slot: SlotFile) -> bool:
        """Returns whether `slot` is sealed with the copies of `version`, recomputed here.

        If not, no process writes the slot any more, and the exchange may.
        """
        if not local.lane.is_copies:
            return False
        lane = self._lanes.setdefault(job.id, {}).setdefault(local.number, LaneReplay())
        if version == lane.tried:
            return False
        lane.tried = version
        if lane.trials.left_out:
            lane.trials = lane.trials.skip()
            return False
        try:
            await self._replay(job, local, version, slot, lane)
        except ReplayFailed as error:
            if error.counts:
                lane.trials = lane.trials.fail()
            self._note(job, local, version, lane, error.message)
        except (ReftError, OSError) as error:
            self._note(job, local, version, lane, error.message if isinstance(error, ReftError) else str(error))
        else:
            lane.trials, lane.verified = lane.trials.succeed(), version.step
            self._note(job, local, version, lane, "")
        return not lane.reason

    def status(self, job: JobRecord, whole: int) -> list[pb.ReplayStatus]:
        """Returns how the copies of each lane are made.

        Args:
            job: the job.
            whole: its newest whole step.
        """
        steps = {local.number: replayable_step(job, local) for local in parity.local_lanes(job)}
        return [
            pb.ReplayStatus(
                lane=number, reason=lane.reason, verified=lane.verified, lag=lane.lag(whole),
                marks=lane.marks, cpu_s=lane.cpu_s, left_out=lane.trials.left_out,
                log=steps.get(number, -1),
            )
            for number, lane in sorted(self._lanes.get(job.id, {}).items())
        ]  # fmt: skip

    async def drop(self, job: str) -> None:
        """Forgets a job; ends the replayer with the last one."""
        if self._lanes.pop(job, None) is not None and not self._lanes:
            await self._replayer.close()

    async def close(self) -> None:
        """Ends the replayer."""
        await self._replayer.close()

    async def _replay(
        self, job: JobRecord, local: LocalLane, version: Version, slot: SlotFile, lane: LaneReplay
    ) -> None:
        inputs = await _inputs(job, local, version)
        manifest = job.record.manifest
        # Layouts of many leaves take a while, and rounds must go on.
        if lane.owners is None or lane.owners[0] != job.epoch:
            lane.owners = job.epoch, await asyncio.to_thread(copied_owners, manifest, local)
        order = await asyncio.to_thread(
            replay_order, local, lane.owners[1], inputs, version, manifest.chunk_bytes
        )  # fmt: skip
        nbytes = sum(section.nbytes for section in order.sections)
        deadline_s = DEADLINE_S + (1 + inputs.marks) * nbytes / BYTES_PER_S
        slots = [inputs.copies, slot, *inputs.records]
        lane.cpu_s = await self._replayer.replay(order, slots, deadline_s)
        lane.marks = inputs.marks

    def _note(self, job: JobRecord, local: LocalLane, version: Version, lane: LaneReplay, reason: str) -> None:
        """Remembers why the exchange makes a lane; logs it when it changes."""
        if reason != lane.reason:
            how = f"is made by the exchange: {reason}" if reason else "is recomputed here, as its owners sealed it"
            log.info("job=%s lane=%d %s %s", job.id, local.number, version, how)
        lane.reason = reason


async def _inputs(job: JobRecord, local: LocalLane, version: Version) -> ReplayInputs:
    """Returns what this node holds; waits for records that may still come.

    A trainer seals the record and the snapshot of a mark in two threads. Where cores are busy, the
    step may be whole before its record is sealed.

    Raises:
        CannotReplay: something is missing.
    """
    deadline_s = time.monotonic() + RECORDS_S
    while True:
        try:
            return replay_inputs(job, local, version)
        except LateRecord:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(RECORDS_POLL_S)
