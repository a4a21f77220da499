"""Where an export reads: the daemons of a job, or a folder of checkpoints.

JOB       this node's daemon ─► headers of all nodes ─► the plan of one version
                             ─► bytes of any node, passed on by this node's daemon
DIR/JOB   a child process lists the folder; this process opens the files of one checkpoint
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from reft.cli import storage
from reft.cli.ask import NoSuchJob, ask
from reft.cli.export.slot_reader import DamagedSlot, ExportReader
from reft.cli.survey import survey
from reft.core.coding.placement import Placement
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.recovery import HeldSlot, RecoveryPlan
from reft.core.recovery.stripes import parity_number, slot_name
from reft.errors import AttachError, ConfigError, FormatError
from reft.wire import messages, rpc
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import placement_of
from reft.wire.slot_format import Bytes, read_file
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
        sections: those of them whose unreplicated leaves come from guard lanes.
        stored: old ranks whose slots are files of a checkpoint.
    """

    version: Version
    manifest: pb.Manifest
    slots: Mapping[int, ExportReader]
    capsules: Mapping[int, pb.CapsuleRecord] = field(default_factory=dict)
    sections: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()

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
        version = self._version(job_survey)
        plan = job_survey.plan_of(version, erased)
        if plan.base is None:
            raise AttachError(
                f"{version} of job {self.job} can't be put together from what the daemons hold now.",
                f"reft-cli recover {self.job} says what is missing",
            )
        with rpc.channel(self.address) as channel:
            yield self._state(job_survey, plan, version, channel)

    def _version(self, job_survey: JobSurvey) -> Version:
        if self.held is not None:
            return self.held
        versions = job_survey.restorable()
        chosen = [each for each in versions if self.step in (-1, each.step)]
        if not chosen:
            steps = ", ".join(f"step {each.step}" for each in versions) or "no step"
            asked = "a step" if self.step < 0 else f"step {self.step}"
            raise AttachError(
                f"memory does not hold {asked} of job {self.job} whole; it holds {steps}.",
                "reft-cli list shows storage, too",
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
        capsules = {}
        for rank, held in plan.capsules.items():
            request = pb.CapsuleRequest(
                job=self.job, rank=rank, version=messages.version_to(version), node=nodes[held.node]
            )
            with self._errors((held.node, held.slot, version), f"the capsule of rank {rank}"):
                capsules[rank] = pb_grpc.DaemonStub(channel).FetchCapsule(request, timeout=CALL_S)
        return ExportState(
            version, manifest, {number: reader(number, held) for number, held in sources.items()}, capsules,
            plan.sections, tuple(rank for rank, held in plan.sources.items() if held.is_stored),
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


@dataclass(frozen=True)
class StoredSource:
    """A checkpoint of a job on storage.

    Args:
        path: DIR/JOB; DIR is the folder of `reft-daemon --persist`.
        step: to export; -1: the newest one that counts.
        lineage: of the job; empty: the only one.
        key_file: the key of the checkpoints' MACs; None: MACs are not asked for.
    """

    path: Path
    step: int = -1
    lineage: str = ""
    key_file: Path | None = None

    @contextlib.contextmanager
    def open(self, erased: Erased = ()) -> Iterator[ExportState]:
        """Opens a checkpoint; nothing of it can be `erased`, since it has no copies.

        Raises:
            NoSuchJob: the folder has no such job.
            ConfigError: several lineages or checkpoints are meant, or none.
            DamagedSlot: a file is damaged.
            StorageUnreadable: storage can't be read.
        """
        answer = self._files(*self._checkpoint())
        try:
            manifest = pb.Manifest.FromString(base64.b64decode(answer["manifest"]))
        except (DecodeError, ValueError) as error:
            raise FormatError(f"the manifest of {self.path} can't be read: {error}.") from error
        counter, ident, step = answer["version"]
        version = Version(Epoch(counter, bytes.fromhex(ident)), step)
        with contextlib.ExitStack() as files:
            slots = {int(rank): self._slot(int(rank), path, version, files) for rank, path in answer["files"].items()}
            yield ExportState(version, manifest, slots, stored=tuple(slots))

    @property
    def _root(self) -> str:
        return str(self.path.parent.absolute())

    def _checkpoint(self) -> tuple[str, str]:
        """Returns lineage and name of the checkpoint."""
        documents = list(storage.audit("list", self._root, self.path.name, key_file=self.key_file))
        jobs = documents[0]["jobs"]
        lineages = [each for each in (jobs[0]["lineages"] if jobs else ()) if self.lineage in ("", each["lineage"])]
        if not lineages:
            raise NoSuchJob(f"{self.path} holds no checkpoints of such a job.", f"reft-cli list {self.path.parent}/")
        going_on = [each for each in lineages if not each["ended"]] or lineages
        if len(going_on) > 1:
            names = ", ".join(each["lineage"] for each in going_on)
            raise ConfigError(f"{self.path} has several lineages: {names}.", "choose one by --lineage")
        (lineage,) = going_on
        rows = [each for each in lineage["checkpoints"] if self.step in (-1, each["step"])]
        rows = [each for each in rows if each["counts"]] or (rows if self.step >= 0 else [])
        if not rows:
            steps = ", ".join(str(each["step"]) for each in lineage["checkpoints"]) or "none"
            raise AttachError(
                f"{self.path} has no such checkpoint; it has the steps {steps}.", lineage["trouble"] or "correct --step"
            )
        return lineage["lineage"], rows[0]["name"]

    def _files(self, lineage: str, name: str) -> dict[str, Any]:
        more = "--lineage", lineage, "--name", name
        (answer,) = storage.audit("files", self._root, self.path.name, *more, key_file=self.key_file)
        return answer

    def _slot(self, rank: int, path: str, version: Version, files: contextlib.ExitStack) -> ExportReader:
        what = f"the file {path}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedSlot(None, f"{what} can't be used: {error}.") from error
        files.callback(os.close, descriptor)

        def read(offset: int, into: Bytes) -> None:
            try:
                read_file(descriptor, offset, into)
            except OSError as error:
                raise DamagedSlot(None, f"{what} can't be used: {error}.") from error

        return ExportReader(version, rank, read, what)
