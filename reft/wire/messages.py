"""Between the messages of reft.v1 and the classes of reft.core; and the leaf table's bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError

from reft.core.commit.decision import Decision
from reft.core.commit.round import NO_DIGESTS, UNDECIDED_MAX, Digests, Outcome, StepReport
from reft.core.commit.slots import SlotState
from reft.core.commit.snapshot_interval import SnapshotInterval
from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import Layout, Leaf
from reft.core.membership.failure_detector import AgentPhase, NodeReport, Signal
from reft.core.membership.progress import Stall
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.errors import AttachError, ConfigError, FormatError
from reft.wire.v1 import daemon_pb2 as pb

PROTOCOL = 7  # daemons and clients of unlike numbers refuse each other
MANIFEST_MAX = 16 << 20  # bytes
STEP_MAX = 1 << 62  # an outcome travels as a signed number
SIGNS_MAX = 512  # of one beat, the gravest first: the next beats have the rest
REASON_MAX = 300  # characters


def check_protocol(theirs: int, who: str, ours: str) -> None:
    """Compares protocol numbers.

    Args:
        who, ours: what the text calls the other side and this one.

    Raises:
        AttachError: they differ.
    """
    if theirs != PROTOCOL:
        raise AttachError(
            f"{who} protocol {theirs}, {ours} {PROTOCOL}.",
            "install the same reft on both sides, and restart what was running when it changed",
        )


def epoch_to(epoch: Epoch) -> pb.Epoch:
    return pb.Epoch(counter=epoch.counter, ident=epoch.ident)


def epoch_from(message: pb.Epoch) -> Epoch:
    return Epoch(message.counter, message.ident)


def version_to(version: Version) -> pb.Version:
    return pb.Version(epoch=epoch_to(version.epoch), step=version.step)


def version_from(message: pb.Version) -> Version:
    return Version(epoch_from(message.epoch), message.step)


def decision_to(decision: Decision) -> pb.Decision:
    message = pb.Decision(epoch=epoch_to(decision.epoch), known=map(epoch_to, decision.known))
    if decision.base is not None:
        message.base.CopyFrom(version_to(decision.base))
    return message


def decision_from(message: pb.Decision) -> Decision:
    base = version_from(message.base) if message.HasField("base") else None
    return Decision(epoch_from(message.epoch), base, tuple(map(epoch_from, message.known)))


def held_from(node_id: str, header: pb.SlotHeader) -> HeldSlot:
    version = version_from(header.version) if header.HasField("version") else None
    return HeldSlot(
        node_id, header.rank, header.slot, SlotState(header.state), version, header.layout, header.data_bytes
    )


def copy_from(node_id: str, header: pb.CapsuleHeader) -> HeldCapsule:
    return HeldCapsule(node_id, header.rank, version_from(header.version), header.unreplicated_bytes)


def report_to(said: StepReport, digests: Digests = NO_DIGESTS) -> pb.StepReport:
    return pb.StepReport(
        since=None if said.since < 0 else said.since,
        until=None if said.until < 0 else said.until,
        sealed=[pb.SealedStep(step=step, cells=_cells_to(digests.get(step, {}))) for step in sorted(said.sealed)],
        pending=sorted(said.pending),
    )


def _cells_to(digests: Mapping[int, int]) -> list[pb.CellDigest]:
    return [pb.CellDigest(cell=cell, digest=digest) for cell, digest in sorted(digests.items())]


def digests_from(message: pb.StepReport) -> dict[int, dict[int, int]]:
    """What ranks say that they have in their cells: step → cell → digest."""
    return {sealed.step: {each.cell: each.digest for each in sealed.cells} for sealed in message.sealed}


def report_from(message: pb.StepReport) -> StepReport:
    """What a rank or a subtree says.

    Raises:
        ConfigError: a step is above STEP_MAX, there are more than UNDECIDED_MAX, or one is whole before it was answered.
    """
    since = message.since if message.HasField("since") else -1
    until = message.until if message.HasField("until") else -1
    said = StepReport(since, until, frozenset(each.step for each in message.sealed), frozenset(message.pending))
    newest = max((until, *said.sealed, *said.pending))
    if newest > STEP_MAX:
        raise ConfigError(f"step {newest} can't be answered: steps end at {STEP_MAX}.")
    if since > until:
        raise ConfigError(f"step {since} can't be whole where only steps up to {until} were answered.")
    if max(len(message.sealed), len(message.pending)) > UNDECIDED_MAX:
        counts = f"{len(message.sealed)} sealed and {len(message.pending)} pending"
        raise ConfigError(f"{counts} steps are said to be undecided; the limit is {UNDECIDED_MAX}.")
    return said


def outcome_to(job: str, epoch: Epoch, outcome: Outcome) -> pb.Outcome:
    return pb.Outcome(
        job=job, epoch=epoch_to(epoch), whole=outcome.whole, until=outcome.until, open=sorted(outcome.open),
        mismatched=sorted(outcome.mismatched), every=outcome.interval.every, interval_start=outcome.interval.start,
    )  # fmt: skip


def outcome_from(message: pb.Outcome | pb.ReportReply) -> Outcome:
    pace = SnapshotInterval(message.interval_start, message.every)
    return Outcome(message.whole, message.until, frozenset(message.open), frozenset(message.mismatched), pace)


def signal_from(value: int) -> Signal:
    """A signal.

    Raises:
        ConfigError: it is none that we know.
    """
    try:
        return Signal(value)
    except ValueError as error:
        raise ConfigError(f"{value} is no signal of a node that this reft knows.") from error


def signal_to(signal: Signal) -> pb.Signal:
    return pb.Signal.Name(signal)  # type: ignore[return-value]


def agent_to(agent: AgentPhase) -> pb.AgentPhase:
    return pb.AgentPhase.Name(agent)  # type: ignore[return-value]


def agent_from(value: int) -> AgentPhase:
    """What an agent says.

    Raises:
        ConfigError: it is nothing that an agent can say.
    """
    if value not in pb.AgentPhase.values():
        raise ConfigError(f"{value} is no phase of an agent that this reft knows.")
    return AgentPhase(value)


def node_reports_to(signs: Iterable[NodeReport]) -> list[pb.NodeReport]:
    """Signs for one beat: the first is the sender's own, of the others the gravest are sent."""
    own, *others = signs
    others.sort(key=lambda sign: -sign.signal)
    return [_sign_to(sign) for sign in [own, *others][:SIGNS_MAX]]


def _sign_to(sign: NodeReport) -> pb.NodeReport:
    message = pb.NodeReport(node_id=sign.node, signal=signal_to(sign.signal), reason=sign.reason[:REASON_MAX])
    if sign.stall is not None:
        message.stall.CopyFrom(
            pb.Stall(
                rank=sign.stall.rank,
                step=sign.stall.step,
                still_s=sign.stall.still_s,
                usual_s=sign.stall.usual_s,
                stopped=sign.stall.stopped,
            )
        )
    return message


def node_reports_from(messages: Iterable[pb.NodeReport]) -> list[NodeReport]:
    """The signs of a beat.

    Raises:
        ConfigError: one has a signal that we don't know.
    """
    return [
        NodeReport(
            message.node_id,
            signal_from(message.signal),
            message.reason[:REASON_MAX],
            _stall_from(message.stall) if message.HasField("stall") else None,
        )
        for message in messages
    ]


def _stall_from(message: pb.Stall) -> Stall:
    return Stall(message.rank, message.step, message.still_s, message.usual_s, message.stopped)


def heard_to(heard_s: Mapping[str, float]) -> list[pb.LastHeard]:
    return [pb.LastHeard(node_id=node, age_ms=max(int(age_s * 1000), 0)) for node, age_s in heard_s.items()]


def heard_from(messages: Iterable[pb.LastHeard]) -> dict[str, float]:
    """Node → seconds since the sender heard it."""
    return {message.node_id: message.age_ms / 1000 for message in messages}


def table_to(layout: Layout, places: Mapping[str, int] | None = None) -> bytes:
    """The leaf table's bytes, always the same for the same layout and places.

    Args:
        layout: the leaves; offsets of those that are not KEPT are not written.
        places: name → pb.CELL or pb.RIDER, of the leaves that are not KEPT.
    """
    entries = []
    for leaf, offset in zip(layout.leaves, layout.offsets, strict=True):
        place = places.get(leaf.name, pb.UNREPLICATED) if places else pb.UNREPLICATED
        entries.append(leaf_to(leaf, offset if place == pb.UNREPLICATED else 0, place))
    return pb.LeafTable(leaves=entries, data_bytes=layout.data_bytes).SerializeToString(deterministic=True)


def leaf_to(leaf: Leaf, offset: int = 0, place: int = pb.UNREPLICATED) -> pb.LeafEntry:
    """A leaf of a leaf table; `place` is where its bytes are, and `offset` where in the slot's data if it is KEPT."""
    return pb.LeafEntry(
        name=leaf.name, dtype=leaf.dtype, shape=leaf.shape, stride=leaf.stride, nbytes=leaf.nbytes, staged=leaf.staged,
        global_shape=leaf.global_shape, global_offset=leaf.global_offset, offset=offset, place=pb.Place.Name(place),
    )  # fmt: skip


def leaf_from(entry: pb.LeafEntry) -> Leaf:
    """The leaf itself."""
    return Leaf(
        entry.name, entry.dtype, tuple(entry.shape), tuple(entry.stride), entry.nbytes, entry.staged,
        tuple(entry.global_shape), tuple(entry.global_offset),
    )  # fmt: skip


def table_from(data: bytes) -> Layout:
    """The layout that a leaf table describes; the offset of a leaf that is not KEPT is 0 and says nothing.

    Raises:
        FormatError: the bytes are no leaf table, or a KEPT leaf lies outside the data.
    """
    table = _table(data)
    leaves = []
    for entry in table.leaves:
        if entry.place == pb.UNREPLICATED and entry.offset + entry.nbytes > table.data_bytes:
            raise FormatError(f"leaf {entry.name!r} lies outside the data.")
        leaves.append(leaf_from(entry))
    offsets = tuple(entry.offset if entry.place == pb.UNREPLICATED else 0 for entry in table.leaves)
    return Layout(tuple(leaves), offsets, table.data_bytes)


def places_from(data: bytes) -> dict[str, int]:
    """Where each leaf of a leaf table is to be found: name → pb.KEPT, pb.CELL or pb.RIDER.

    Raises:
        FormatError: the bytes are no leaf table, or name a place that we don't know.
    """
    places = {entry.name: int(entry.place) for entry in _table(data).leaves}
    for name, place in places.items():
        if place not in (pb.UNREPLICATED, pb.CELL, pb.INLINE):
            raise FormatError(f"leaf {name!r} lies in place {place}, which this reft does not know.")
    return places


def _table(data: bytes) -> pb.LeafTable:
    try:
        return pb.LeafTable.FromString(data)
    except DecodeError as error:
        raise FormatError(f"the leaf table can't be read: {error}.") from error
