"""Keeps a whole step of a running job while `reft-cli export` reads it.

    reft-cli      any daemon ─► the coordinator's           ranks
    Hold(60 s)  ───────────────► pins(persist = newest whole) ─► keep the slots, train on
    Hold(60 s), each 10 s ─────► keeps it longer
    Hold(0), or silence for 60 s ► pins(persist = none)

A hold takes the pin of a checkpoint (`reft/core/commit/pins.py`). So there is one of both at a
time: an export waits for no checkpoint, it is refused; a checkpoint that is due waits for the hold.
An attach ends all holds. A coordinator that restarts gives up the pin, or writes a checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final

from reft.core.commit.version import Version
from reft.core.persist.persist_cadence import PERSIST_SLOTS_MIN
from reft.errors import AttachError, ConfigError
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.jobs import rounds
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.peers.channels import PeerChannels
from reft_daemon.peers.persist_run import CALL_S

HOLD_MAX_S: Final = 600.0


@dataclass(frozen=True)
class HeldStep:
    """A step that is kept.

    Attributes:
        version: of the step.
        end_s: when it is given up.
    """

    version: Version
    end_s: float


class HoldService:
    """The holds of all jobs whose coordinator is this daemon.

    Args:
        peers: channels to other daemons.
        persists: whether this daemon writes checkpoints: then a pin without a hold is one's.
    """

    def __init__(self, peers: PeerChannels, persists: bool) -> None:
        self._peers = peers
        self._persists = persists
        self._held: dict[str, HeldStep] = {}

    async def hold(self, job: JobRecord, request: pb.HoldRequest) -> pb.HoldReply:
        """Keeps a step, keeps it longer, or gives it up. The coordinator answers.

        Raises:
            ConfigError: the ranks have too few slots, or the time is too long.
            AttachError: no step is whole, a checkpoint is being written, or an attach has come.
            grpc.RpcError: the coordinator does not answer, or refuses.
        """
        if not 0 <= request.seconds <= HOLD_MAX_S:
            raise ConfigError(f"{request.seconds:g} s are too long for a hold; the limit is {HOLD_MAX_S:g} s.")
        if job.round is None:
            raise AttachError(f"no step of job {job.id} is whole yet.", "try again later")
        if job.round.index != 0:
            manifest = job.record.manifest
            coordinator = manifest.nodes[0], messages.known_tokens(manifest)
            return await self._peers.call(*coordinator, pb_grpc.DaemonStub, "Hold", request, CALL_S, reconnect=True)  # type: ignore[return-value]
        end_s = time.monotonic() + request.seconds
        if request.HasField("version"):
            held = self._held.get(job.id)
            if held is None or held.version != messages.version_from(request.version):
                raise AttachError(f"step {request.version.step} of job {job.id} is kept no longer.", "export again")
            self._held[job.id] = replace(held, end_s=end_s)
            self.look(job)
        else:
            held = self._held[job.id] = HeldStep(self._pin(job), end_s)
        return pb.HoldReply(version=messages.version_to(held.version))

    def _pin(self, job: JobRecord) -> Version:
        assert job.round is not None, "it was asked for"
        pins, slots = job.round.outcome.pins, job.record.manifest.slots
        if slots < PERSIST_SLOTS_MIN:
            raise ConfigError(
                f"job {job.id} trains with {slots} slots a rank; to keep a step meanwhile takes {PERSIST_SLOTS_MIN}.",
                f"attach(slots={PERSIST_SLOTS_MIN}), or export a checkpoint",
            )
        if pins.persist >= 0:
            what = "another export reads" if self.is_held(job) else "a checkpoint is being written of"
            raise AttachError(f"{what} step {pins.persist} of job {job.id}.", "try again when that is done")
        if pins.whole < 0 or not rounds.pin_persist(job, pins.whole):
            raise AttachError(f"no step of job {job.id} can be kept now.", "try again later")
        return Version(job.epoch, pins.whole)

    def is_held(self, job: JobRecord) -> bool:
        """Whether a step of the job's present epoch is kept for an export."""
        held = self._held.get(job.id)
        return held is not None and held.version.epoch == job.epoch

    def look(self, job: JobRecord) -> None:
        """Gives up a step whose time is over, and a pin that nobody owns."""
        held = self._held.get(job.id)
        if held is not None and (held.version.epoch != job.epoch or time.monotonic() >= held.end_s):
            del self._held[job.id]
            is_over = held.version.epoch == job.epoch
        else:
            is_over = held is None and not self._persists
        is_mine = job.round is not None and job.round.index == 0 and job.round.outcome.pins.persist >= 0
        if is_over and is_mine and not rounds.pin_persist(job, -1) and held is not None:
            self._held[job.id] = held  # the pins could not be recorded now

    def drop(self, name: str) -> None:
        """Forgets a job that is dropped."""
        self._held.pop(name, None)
