"""Makes the copies of a turn by recomputing them, where this is possible.

    turn T of a copy lane ─► all is at hand? ─► replayer ─► SEALED: the lane is guarded
                                │ no               │ wrong, dead or slow
                                ▼                  ▼
                             the reason is noted, and the mover makes the lane

Each failure costs bytes on the wire, and never a copy. The mover's copies are the next base.

Where protect="auto" has chosen copies, the first turns decide whether they go on to be recomputed
(core/commit/replay_trials.py). If not, the mover makes all further turns, the ranks of this node
record nothing more, and the job's record has the reason: a later attach chooses parity.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from reft.core.commit.replay_trials import ReplayMeter, ReplayTrials
from reft.core.commit.version import Epoch, Version
from reft.errors import ReftError
from reft.wire.replay_sections import OwnerFacts
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile
from reft_daemon.jobs import gradient_records, parity
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.parity import LocalLane
from reft_daemon.jobs.persistence import save_or_log
from reft_daemon.peers.replay_order import (
    LateRecord,
    NoCopies,
    ReplayInputs,
    copied_owners,
    replay_inputs,
    replay_order,
    replayable_step,
)
from reft_daemon.peers.replayer import ReplayCost, Replayer, ReplayFailed

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
        meter: of its first turns, where auto has chosen copies.
        verdict: what these turns have decided; empty: nothing yet.
        tried: the version of the last turn that was considered; a turn that is begun anew is not.
        owners: epoch and what its manifest says of the copied ranks.
        in_vain: epoch, and the mark whose record was waited for in vain.
    """

    trials: ReplayTrials = field(default_factory=ReplayTrials)
    verified: int = -1
    marks: int = 0
    cpu_s: float = 0.0
    reason: str = "no turn has ended yet."
    tried: Version | None = None
    meter: ReplayMeter = field(default_factory=ReplayMeter)
    verdict: str = ""
    owners: tuple[Epoch, list[OwnerFacts]] | None = None
    in_vain: tuple[Epoch, int] | None = None

    def records_nothing(self, epoch: Epoch, newest: int) -> bool:
        """Whether no record came since one was waited for in vain: the next wait would be, too.

        Args:
            epoch: in force.
            newest: the newest mark of the epoch whose record is sealed; -1: none.
        """
        return self.in_vain is not None and self.in_vain[0] == epoch and newest < self.in_vain[1]

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
        if words := gradient_records.given_up(job):
            lane.reason, lane.verdict = words, f"given up: {words}"
            return False
        if version == lane.tried:
            return False
        # the first turn of an epoch has no copies at hand
        counts = lane.tried is not None and lane.tried.epoch == version.epoch
        lane.tried = version
        if lane.trials.left_out:
            lane.trials = lane.trials.skip()
            return False
        try:
            cost = await self._replay(job, local, version, slot, lane)
        except ReplayFailed as error:
            if error.counts:
                lane.trials = lane.trials.fail()
            self._note(job, local, version, lane, error.message)
        except (ReftError, OSError) as error:
            counts &= not isinstance(error, NoCopies)  # nor has one after turns that nobody could make
            self._note(job, local, version, lane, error.message if isinstance(error, ReftError) else str(error))
        except Exception as error:  # a bug, or no thread: the mover can make the lane all the same
            if repr(error) != lane.reason:
                log.error("job=%s lane=%d copies can't be recomputed", job.id, local.number, exc_info=error)
            self._note(job, local, version, lane, repr(error))
        else:
            lane.trials, lane.verified, lane.cpu_s = lane.trials.succeed(), version.step, cost.cpu_s
            self._note(job, local, version, lane, "")
            lane.meter = lane.meter.replayed(version.step, time.monotonic(), lane.marks, *cost)
        if lane.reason and counts:
            lane.meter = lane.meter.exchanged(version.step, time.monotonic())
        if job.record.manifest.choice and not lane.verdict:
            self._judge(job, local, lane)
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
                marks=lane.marks, cpu_s=lane.cpu_s, left_out=lane.trials.left_out, verdict=lane.verdict,
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
    ) -> ReplayCost:
        inputs = await _inputs(job, local, version, lane)
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
        cost = await self._replayer.replay(order, slots, deadline_s)
        lane.marks = inputs.marks
        return cost

    def _judge(self, job: JobRecord, local: LocalLane, lane: LaneReplay) -> None:
        """Decides whether copies that auto has chosen go on to be recomputed."""
        if lane.trials.left_out:
            refusal = f"recomputing failed again and again: {lane.reason}"
        elif lane.meter.is_over:
            refusal = lane.meter.refusal
        else:
            return
        lane.verdict = f"given up: {refusal}" if refusal else lane.meter.verdict
        log.info("job=%s lane=%d %s", job.id, local.number, lane.verdict)
        if refusal:
            job.record.not_recomputed = refusal
            save_or_log(job)

    def _note(self, job: JobRecord, local: LocalLane, version: Version, lane: LaneReplay, reason: str) -> None:
        """Remembers why the exchange makes a lane; logs it when it changes."""
        if reason != lane.reason:
            how = f"is made by the exchange: {reason}" if reason else "is recomputed here, as its owners sealed it"
            log.info("job=%s lane=%d %s %s", job.id, local.number, version, how)
        lane.reason = reason


async def _inputs(job: JobRecord, local: LocalLane, version: Version, lane: LaneReplay) -> ReplayInputs:
    """Returns what this node holds; waits for records that may still come.

    A trainer seals the record and the snapshot of a mark in two threads. Where cores are busy, the
    step may be whole before its record is sealed. A rank that can record none at all, such as one
    whose marks are all gaps, delays one turn, and not each.

    Raises:
        CannotReplay: something is missing.
    """
    deadline_s = time.monotonic() + RECORDS_S
    while True:
        try:
            return replay_inputs(job, local, version)
        except LateRecord as late:
            if lane.records_nothing(job.epoch, late.newest):
                raise
            if time.monotonic() > deadline_s:
                lane.in_vain = job.epoch, late.mark
                raise
        await asyncio.sleep(RECORDS_POLL_S)
