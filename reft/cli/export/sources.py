"""Where an export reads: the memory of a job; `stored_source.py` has checkpoints.

this node's daemon ─► headers of all nodes ─► the plan of one version
                   ─► bytes of any node, passed on by this node's daemon
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

import grpc
import numpy as np

from reft.cli.ask import ask
from reft.cli.export.slot_reader import DamagedSlot, ExportReader
from reft.cli.survey import survey
from reft.core.coding.placement import Placement
from reft.core.commit.version import Version
from reft.core.recovery.recovery import HeldSlot, RecoveryPlan
from reft.core.recovery.stripes import parity_number, slot_name
from reft.errors import AttachError, FormatError, ReftError
from reft.wire import messages, rpc
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import placement_of
from reft.wire.slot_format import Bytes
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc

CALL_S: Final = 30.0
BYTES_PER_S: Final = 10 << 20  # a tenth of what one daemon delivers on a slow network
_GONE: Final = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
Erased = Collection[tuple[str, str, Version]]


@dataclass(frozen=True)
class ExportState:
    """One version of a job, and where each part of it is read.

    Attributes:
        version: the version.
        manifest: that it was written under.
        slots: old rank, or parity number → its slot.
        capsules: old rank without a slot → its capsule.
        capsule_places: the same ranks → (node, name, version), as the plan counts erasures.
        sections: those of them whose unreplicated leaves come from guard lanes.
        stored: old ranks whose slots are files of a checkpoint.
        earlier: capsules of older steps of the same epoch that are left.
        names: node id → name for people.
        notes: what was not used, and why, for a person.
    """

    version: Version
    manifest: pb.Manifest
    slots: Mapping[int, ExportReader]
    capsules: Mapping[int, pb.CapsuleRecord] = field(default_factory=dict)
    capsule_places: Mapping[int, tuple[str, str, Version]] = field(default_factory=dict)
    sections: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    earlier: tuple[bytes, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def placement(self) -> Placement:
        """Where the version's bytes lie."""
        return placement_of(self.manifest)


@dataclass(frozen=True)
class MemorySource:
    """The memory of a job.

    Args:
        address: of this node's daemon.
        job: name of the job.
        step: to export; -1: the newest one.
        held: the version that the job's coordinator keeps for this export; None: nobody trains.
        renew: keeps that version longer.
    """

    address: str
    job: str
    step: int = -1
    held: Version | None = None
    renew: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def open(self, erased: Erased = ()) -> Iterator[ExportState]:
        """Opens a version.

        Args:
            erased: slots and capsules that were found damaged.

        Raises:
            AttachError: the step can't be had; the message names those that can.
            DamagedSlot: a slot or a capsule is damaged.
            ReftError: a daemon does not answer.
        """
        job_survey = survey(self.address, self.job)[0]
        job_survey.inventory.refuse_rivals(self.job)
        version = self._version(job_survey, erased)
        plan = job_survey.plan_of(version, erased)
        if plan.base is None:
            raise AttachError(
                f"{version} of job {self.job} can't be put together from what the daemons hold now.",
                f"reft-cli recover {self.job} says what is missing",
            )
        with rpc.channel(self.address) as channel:
            yield self._state(job_survey, plan, version, channel)

    def _version(self, job_survey: JobSurvey, erased: Erased) -> Version:
        if self.held is not None:
            return self.held
        versions = job_survey.restorable(erased)
        chosen = [each for each in versions if self.step in (-1, each.step)]
        if not chosen:
            steps = ", ".join(f"step {each.step}" for each in versions) or "no step"
            asked = "a step" if self.step < 0 else f"step {self.step}"
            raise AttachError(
                f"memory does not hold {asked} of job {self.job} whole; it holds {steps}.",
                f"reft-cli list {self.job} shows storage, too",
            )
        return chosen[0]

    def _state(self, job_survey: JobSurvey, plan: RecoveryPlan, version: Version, channel: grpc.Channel) -> ExportState:
        own = ask(self.address, "Inventory", pb.InventoryRequest(job=self.job)).node_id
        nodes = {ident: None if ident == own else node for ident, node in job_survey.nodes.items()}
        manifest, placement = job_survey.manifests[version.epoch], job_survey.placements[version.epoch]

        def reader(number: int, held: HeldSlot) -> ExportReader:
            read = partial(self._read, channel, nodes[held.node], held.slot, version)
            what = f"{slot_name(number, len(placement.domains))} of {version} on node {job_survey.names[held.node]}"
            return ExportReader(version, held.rank, read, what, (held.node, held.slot, version))

        sources: dict[int, HeldSlot] = {**plan.sources}
        sources |= {parity_number(placement, rank): held for rank, held in plan.parity.items()}

        def capsule(rank: int, which: Version, node: str, slot: str) -> pb.CapsuleRecord:
            request = pb.CapsuleRequest(job=self.job, rank=rank, version=messages.version_to(which), node=nodes[node])
            with self._errors((node, slot, which), f"the capsule of rank {rank}"):
                record: pb.CapsuleRecord = pb_grpc.DaemonStub(channel).FetchCapsule(request, timeout=CALL_S)
            try:
                messages.check_capsule(record)
            except FormatError as error:
                raise DamagedSlot((node, slot, which), error.message) from error
            return record

        places = {rank: (held.node, held.slot, version) for rank, held in plan.capsules.items()}
        capsules = {rank: capsule(rank, version, held.node, held.slot) for rank, held in plan.capsules.items()}
        earlier = []
        for rank, which, node in ((rank, *each) for rank, held in plan.earlier.items() for each in held):
            with contextlib.suppress(ReftError):  # what is left of older steps is evidence, no more
                earlier.append(capsule(rank, which, node, "").capsule)
        return ExportState(
            version, manifest, {number: reader(number, held) for number, held in sources.items()}, capsules,
            places, plan.sections, tuple(rank for rank, held in plan.sources.items() if held.is_stored), tuple(earlier),
            job_survey.names,
        )  # fmt: skip

    def _read(
        self, channel: grpc.Channel, node: pb.Node | None, slot: str, version: Version, offset: int, into: Bytes
    ) -> None:
        request = pb.ReadRequest(
            job=self.job, slot=slot, version=messages.version_to(version), offset=offset, size=into.nbytes, node=node
        )
        arrived = 0
        self.renew()
        with self._errors(None, f"slot {slot}"):
            for chunk in pb_grpc.DaemonStub(channel).Read(request, timeout=CALL_S + into.nbytes / BYTES_PER_S):
                data = np.frombuffer(chunk.data, np.uint8)[: into.nbytes - arrived]
                into[arrived : arrived + data.nbytes] = data
                arrived += data.nbytes
        if arrived != into.nbytes:
            raise FormatError(f"it gave {arrived} of {into.nbytes} bytes.")

    @contextlib.contextmanager
    def _errors(self, source: tuple[str, str, Version] | None, what: str) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            reason = rpc.error_of(error, self.address)
            if error.code() not in _GONE:
                raise AttachError(f"{what} can't be read: {reason}", "check the daemons, and try again") from error
            if source is None:
                raise FormatError(reason.message) from error
            raise DamagedSlot(source, f"{what} can't be used: {reason.message}") from error
