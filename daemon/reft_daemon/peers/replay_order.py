"""What the replayer needs to make the copies of a turn.

parity slot of P, capsules of the owners at P and T, records of P+1 … T, manifest ─► order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reft.core.commit.gradient_records import log_end
from reft.core.commit.version import Version
from reft.wire import messages
from reft.wire.manifest import layouts_of, placement_of
from reft.wire.replay_sections import CannotReplay, OwnerFacts, owner_facts, replay_section
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import replay_pb2
from reft_daemon.arena.arena import SlotFile
from reft_daemon.jobs import capsules, parity
from reft_daemon.jobs.gradient_records import sealed_records
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.jobs.parity import LocalLane


class NoCopies(CannotReplay):
    """There are no copies that records may follow: the exchange has to make some first."""


class LateRecord(CannotReplay):
    """A record may still come: no later one is sealed.

    Args:
        mark: of that record.
        newest: the newest mark of the epoch whose record is sealed; -1: none.
    """

    def __init__(self, mark: int, newest: int) -> None:
        super().__init__(_missing(mark))
        self.mark, self.newest = mark, newest


class ReplayInputs(NamedTuple):
    """What a turn is recomputed from.

    Attributes:
        base: version of the copies at hand.
        copies: the parity slot that has them.
        records: the sealed records of the epoch, of marks behind the base and up to the turn.
        capsules: for each owner, its capsules at the base and at the turn.
    """

    base: Version
    copies: SlotFile
    records: Sequence[SlotFile]
    capsules: Sequence[tuple[pb.CapsuleRecord, pb.CapsuleRecord]]

    @property
    def marks(self) -> int:
        return len(self.records)


def copied_owners(manifest: pb.Manifest, local: LocalLane) -> list[OwnerFacts]:
    """Returns the facts of the ranks whose sections a lane copies here, by column.

    Raises:
        FormatError: the manifest contradicts itself.
    """
    placement, lane = placement_of(manifest), local.lane
    layouts, index = layouts_of(manifest)
    ranks = [lane.members[member] for member in lane.copied_members(local.member)]
    return [
        owner_facts(placement, rank, layouts[index[rank]].leaves, layouts.name_table(index[rank])) for rank in ranks
    ]


def replay_inputs(job: JobRecord, local: LocalLane, version: Version) -> ReplayInputs:
    """Returns what this node holds to make the copies of `version`.

    Raises:
        LateRecord: the last records are not sealed yet.
        NoCopies, CannotReplay: something is missing.
    """
    base, copies = _copies(job, local)
    marks, records = range(base.step + 1, version.step + 1), sealed_records(job, local.rank)
    # Only the first one is looked for: another node may name a step that lies any distance ahead.
    missing = next((mark for mark in marks if mark not in records), None)
    if missing is not None:
        newest = max(records, default=-1)
        raise CannotReplay(_missing(missing)) if newest > missing else LateRecord(missing, newest)
    pairs = []
    for member in local.lane.copied_members(local.member):
        rank = local.lane.members[member]
        before, after = (capsules.capsule(job, rank, each) for each in (base, version))
        if before is None or after is None:
            raise CannotReplay(f"the capsule of rank {rank}, {base if before is None else version} is not here.")
        pairs.append((before, after))
    return ReplayInputs(base, copies, [records[mark] for mark in marks], pairs)


def replayable_step(job: JobRecord, local: LocalLane) -> int:
    """Returns the newest step that a lost member can replay from here; -1: none."""
    try:
        base, _ = _copies(job, local)
    except CannotReplay:
        return -1
    return log_end(base.step, sealed_records(job, local.rank))


def _copies(job: JobRecord, local: LocalLane) -> tuple[Version, SlotFile]:
    """Returns the version of the copies at hand, and the parity slot that has them.

    Raises:
        NoCopies: there are none that records may follow.
    """
    base = parity.kept_version(job)
    if base is None:
        raise NoCopies("no step is protected yet.")
    decision = messages.decision_from(job.record.decision)
    if base.epoch != job.epoch and base != decision.base:
        raise NoCopies(f"the copies at hand are of {base}, which no record follows.")
    copies = parity.sealed_parity(job, local, base)
    if copies is None:
        raise NoCopies(f"the copies of {base} are not at hand.")
    return base, copies


def _missing(mark: int) -> str:
    return f"the record of mark {mark} is missing."


def replay_order(
    local: LocalLane, owners: Sequence[OwnerFacts], inputs: ReplayInputs, version: Version, chunk_bytes: int
) -> replay_pb2.ReplayOrder:
    """Returns the order.

    Raises:
        CannotReplay: a leaf did not exist at the base or at the version.
        FormatError: a capsule is damaged, or was written with other names.
    """
    lane = local.lane
    pairs = zip(owners, inputs.capsules, strict=True)
    begins = [column * lane.piece_bytes for column in range(len(owners))]
    return replay_pb2.ReplayOrder(
        base=messages.version_to(inputs.base), version=messages.version_to(version), lane=lane.digest,
        data_bytes=lane.parity_bytes,
        sections=[
            replay_section(owner, *capsules, chunk_bytes, begin, begin)
            for (owner, capsules), begin in zip(pairs, begins, strict=True)
        ],
    )  # fmt: skip
