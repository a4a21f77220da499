"""Converts between the messages of reft.v1 and the classes of reft.core; encodes the leaf table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash
from google.protobuf.message import DecodeError

from reft.core.commit.decision import KNOWN_MAX, Decision
from reft.core.commit.pins import GuardReport, Pins, UnguardedLane
from reft.core.commit.relayout import LayoutOutcome, LayoutReport
from reft.core.commit.round import NO_DIGESTS, UNDECIDED_MAX, Digests, Outcome, StepReport
from reft.core.commit.slots import SlotState
from reft.core.commit.snapshot_interval import SnapshotInterval
from reft.core.commit.version import STEP_MAX, Epoch, Version
from reft.core.layout.layout import Layout, Leaf
from reft.core.membership.failure_detector import AgentPhase, NodeReport, Signal
from reft.core.membership.progress import Stall
from reft.core.recovery.recovery import HeldCapsule, HeldSlot
from reft.core.recovery.restart_loop import RestoreCount
from reft.errors import AttachError, ConfigError, FormatError
from reft.wire.v1 import daemon_pb2 as pb

PROTOCOL = 11
OLDEST = 11  # the oldest protocol that this reft speaks beside PROTOCOL
TOKEN_BYTES = 32  # of a job, or of a launch
JOB_MARK_BYTES = 16
IDENT_BYTES = 16  # of an epoch
EARLIER_TOKENS_MAX = 8
TOKENS_MAX = 64  # that a call to pass on may name
MANIFEST_MAX = 16 << 20  # bytes
NODE_REPORTS_MAX = 512  # reports in one beat, the most severe first; the next beats have the rest
REASON_MAX = 300  # characters
AGE_MAX_MS = (1 << 32) - 1  # 49 days; a node may be silent for longer while its ranks train
LANES_MAX = 4096  # lanes without parity in one report; more have only jobs of some 65,000 ranks or more


def check_protocol(theirs: int, their_oldest: int, who: str, ours: str) -> None:
    """Checks that both sides speak a common protocol.

    Args:
        theirs: the other side's number.
        their_oldest: the oldest protocol that the other side speaks; 0: only `theirs`, as up to
            protocol 7.
        who: name of the other side in the error text.
        ours: name of this side in the error text.

    Raises:
        AttachError: the sides have no protocol in common.
    """
    if theirs < OLDEST or (their_oldest or theirs) > PROTOCOL:
        raise AttachError(
            f"{who} protocol {_protocols(theirs, their_oldest)}, {ours} {_protocols(PROTOCOL, OLDEST)}.",
            "install the same reft on both sides, and restart daemons and trainers of the old version",
        )


def _protocols(newest: int, oldest: int) -> str:
    return f"{newest} (and older ones from {oldest} on)" if 0 < oldest < newest else str(newest)


def hello(job: str = "", agent_pid: int = 0, launch: str = "") -> pb.HelloRequest:
    """Returns the first request to a daemon; see HelloRequest."""
    return pb.HelloRequest(protocol=PROTOCOL, oldest=OLDEST, job=job, agent_pid=agent_pid, launch=launch)


def job_mark(manifest: pb.Manifest) -> bytes:
    """Returns what tells a job from any other job of its name.

    An older reft kept one token for the whole life of a job, and no mark.
    """
    return manifest.job_mark or hashlib.blake2b(manifest.token, digest_size=JOB_MARK_BYTES).digest()


def admitting_tokens(record: pb.JobRecord) -> list[bytes]:
    """Returns the tokens that admit other daemons to a job: the epoch's, and for a time older ones.

    A node may have missed the decision of the epoch. So tokens of earlier epochs count until a
    version of the epoch is whole.
    """
    return [record.manifest.token, *record.accepted_tokens]


def known_tokens(manifest: pb.Manifest) -> list[bytes]:
    """Returns the tokens for calls to nodes of a job, the present one first."""
    return [manifest.token, *manifest.earlier_tokens]


def earlier_tokens(tokens: Iterable[bytes], token: bytes) -> list[bytes]:
    """Returns the earlier tokens beside a job's new token, the newest first; each once.

    Args:
        tokens: of the attaches before, the newest first.
        token: the new token.
    """
    return [each for each in dict.fromkeys(tokens) if each and each != token][:EARLIER_TOKENS_MAX]


def check_tokens(manifest: pb.Manifest) -> None:
    """Raises ConfigError unless token, mark and earlier tokens of a manifest have their sizes."""
    earlier = manifest.earlier_tokens
    if len(manifest.token) != TOKEN_BYTES or len(manifest.job_mark) not in (0, JOB_MARK_BYTES):
        raise ConfigError(
            f"the manifest of job {manifest.job} has a token of {len(manifest.token)} bytes and a mark of "
            f"{len(manifest.job_mark)}; {TOKEN_BYTES} and {JOB_MARK_BYTES} are needed."
        )
    if len(earlier) > EARLIER_TOKENS_MAX or any(len(each) != TOKEN_BYTES for each in earlier):
        raise ConfigError(
            f"the manifest of job {manifest.job} has {len(earlier)} earlier tokens; it may have {EARLIER_TOKENS_MAX} of "
            f"{TOKEN_BYTES} bytes."
        )


def check_decision(job: str, decision: pb.Decision) -> None:
    """Raises ConfigError for a decision that no attach of the job makes."""
    versions = [decision.base] * decision.HasField("base") + [decision.guard] * decision.HasField("guard")
    epochs = (decision.epoch, *decision.known, *(version.epoch for version in versions))
    if any(len(epoch.ident) != IDENT_BYTES for epoch in epochs):
        raise ConfigError(f"an epoch of job {job} has no id of {IDENT_BYTES} bytes.")
    if len(decision.known) > KNOWN_MAX:
        raise ConfigError(f"a decision of job {job} names {len(decision.known)} attaches; the limit is {KNOWN_MAX}.")
    newest = max((version.step for version in versions), default=0)
    if newest > STEP_MAX:
        raise ConfigError(f"a decision of job {job} names step {newest}; steps end at {STEP_MAX}.")
    last = max(epoch.counter for epoch in epochs)
    if last > STEP_MAX:
        raise ConfigError(f"a decision of job {job} names epoch {last}; epochs end at {STEP_MAX}.")


def epoch_to(epoch: Epoch) -> pb.Epoch:
    return pb.Epoch(counter=epoch.counter, ident=epoch.ident)


def epoch_from(message: pb.Epoch) -> Epoch:
    return Epoch(message.counter, message.ident)


def version_to(version: Version) -> pb.Version:
    return pb.Version(epoch=epoch_to(version.epoch), step=version.step)


def version_from(message: pb.Version) -> Version:
    return Version(epoch_from(message.epoch), message.step)


def restores_to(count: RestoreCount) -> pb.RestoreCount:
    return pb.RestoreCount(step=count.step, count=count.count)


def restores_from(message: pb.RestoreCount) -> RestoreCount:
    return RestoreCount(message.step, message.count)


def decision_to(decision: Decision) -> pb.Decision:
    message = pb.Decision(epoch=epoch_to(decision.epoch), known=map(epoch_to, decision.known))
    if decision.base is not None:
        message.base.CopyFrom(version_to(decision.base))
    if decision.guard is not None:
        message.guard.CopyFrom(version_to(decision.guard))
    return message


def decision_from(message: pb.Decision) -> Decision:
    base = version_from(message.base) if message.HasField("base") else None
    guard = version_from(message.guard) if message.HasField("guard") else None
    return Decision(epoch_from(message.epoch), base, tuple(map(epoch_from, message.known)), guard)


def job_of(request: Any) -> str:
    """Returns the job that a request is about."""
    return str(request.job if "job" in request.DESCRIPTOR.fields_by_name else request.manifest.job)


def manifests_from(
    message: pb.JobRecord | pb.InventoryReply | pb.DecideRequest | pb.RebuildRequest,
) -> dict[Epoch, pb.Manifest]:
    """Returns epoch → the manifest that its versions were written under."""
    decision, manifests = message.decision, {}
    if message.HasField("guard_manifest") and decision.HasField("guard"):
        manifests[epoch_from(decision.guard.epoch)] = message.guard_manifest
    if message.HasField("base_manifest") and decision.HasField("base"):
        manifests[epoch_from(decision.base.epoch)] = message.base_manifest
    if message.HasField("manifest") and message.HasField("decision"):
        manifests[epoch_from(decision.epoch)] = message.manifest
    return manifests


def held_slot_from(node_id: str, header: pb.SlotHeader) -> HeldSlot:
    version = version_from(header.version) if header.HasField("version") else None
    return HeldSlot(
        node_id, header.rank, header.slot, SlotState(header.state), version, header.layout, header.data_bytes,
        header.stored,
    )  # fmt: skip


def held_capsule_from(node_id: str, header: pb.CapsuleHeader) -> HeldCapsule:
    return HeldCapsule(node_id, header.rank, version_from(header.version), header.unreplicated_bytes)


def is_as_sealed(record: pb.CapsuleRecord) -> bool:
    """Returns whether a capsule that arrives is as the trainer has sealed it."""
    return record.capsule_digest in (0, xxhash.xxh3_64_intdigest(record.capsule))


def check_capsule(record: pb.CapsuleRecord) -> None:
    """Raises FormatError for a capsule that is not as it was sealed."""
    if not is_as_sealed(record):
        raise FormatError(f"the capsule of rank {record.rank}, step {record.version.step} has a wrong digest.")


def report_to(report: StepReport, digests: Digests = NO_DIGESTS) -> pb.StepReport:
    return pb.StepReport(
        since=None if report.since < 0 else report.since,
        until=None if report.until < 0 else report.until,
        sealed=[pb.SealedStep(step=step, cells=_cells_to(digests.get(step, {}))) for step in sorted(report.sealed)],
        pending=sorted(report.pending),
    )


def _cells_to(digests: Mapping[int, int]) -> list[pb.CellDigest]:
    return [pb.CellDigest(cell=cell, digest=digest) for cell, digest in sorted(digests.items())]


def digests_from(message: pb.StepReport) -> dict[int, dict[int, int]]:
    """Returns step → cell → digest, as ranks report them."""
    return {sealed.step: {each.cell: each.digest for each in sealed.cells} for sealed in message.sealed}


def report_from(message: pb.StepReport) -> StepReport:
    """Returns the report of a rank or a subtree.

    Raises:
        ConfigError: a step is above STEP_MAX, there are more than UNDECIDED_MAX steps, or a step is
            whole before it was answered.
    """
    since = message.since if message.HasField("since") else -1
    until = message.until if message.HasField("until") else -1
    report = StepReport(since, until, frozenset(each.step for each in message.sealed), frozenset(message.pending))
    newest = max((until, *report.sealed, *report.pending))
    if newest > STEP_MAX:
        raise ConfigError(f"step {newest} can't be answered: steps end at {STEP_MAX}.")
    if since > until:
        raise ConfigError(f"step {since} can't be whole where only steps up to {until} were answered.")
    if max(len(message.sealed), len(message.pending)) > UNDECIDED_MAX:
        counts = f"{len(message.sealed)} sealed and {len(message.pending)} pending"
        raise ConfigError(f"{counts} steps are reported as undecided; the limit is {UNDECIDED_MAX}.")
    return report


def outcome_to(job: str, epoch: Epoch, outcome: Outcome) -> pb.Outcome:
    return pb.Outcome(
        job=job, epoch=epoch_to(epoch), until=outcome.until, open=sorted(outcome.open),
        mismatched=sorted(outcome.mismatched), every=outcome.interval.every, interval_start=outcome.interval.start,
        layout=layout_outcome_to(outcome.layout), pins=pins_to(outcome.pins),
    )  # fmt: skip


def outcome_from(message: pb.Outcome | pb.ReportReply) -> Outcome:
    """Returns what a round has decided.

    Raises:
        ConfigError: a step, or a number that the coordinator increases, is above STEP_MAX.
    """
    pins = pins_from(message.pins) if message.HasField("pins") else Pins()
    interval = SnapshotInterval(message.interval_start, message.every)
    open_steps, mismatched = frozenset(message.open), frozenset(message.mismatched)
    layout = layout_outcome_from(message.layout)
    steps = (
        pins.whole,
        pins.turn,
        pins.protected,
        pins.kept,
        pins.persist,
        message.until,
        interval.start,
        layout.start,
    )
    newest = max((*steps, *open_steps))
    if newest > STEP_MAX:
        raise ConfigError(f"step {newest} can't be decided: steps end at {STEP_MAX}.")
    highest = max(pins.seq, pins.attempt, pins.protected_by)
    if highest > STEP_MAX:
        raise ConfigError(f"change or turn {highest} can't be decided: they end at {STEP_MAX}.")
    return Outcome(pins, message.until, open_steps, mismatched, interval, layout)


def pins_to(pins: Pins) -> pb.Pins:
    steps = (pins.whole, pins.turn, pins.protected, pins.kept, pins.persist)
    whole, turn, protected, kept, persist = (step if step >= 0 else None for step in steps)
    return pb.Pins(
        seq=pins.seq, whole=whole, turn=turn, protected=protected, kept=kept,
        attempt=pins.attempt, protected_by=pins.protected_by, persist=persist,
        exposed=pins.is_exposed,
    )  # fmt: skip


def pins_from(message: pb.Pins) -> Pins:
    whole = message.whole if message.HasField("whole") else -1
    turn = message.turn if message.HasField("turn") else -1
    protected = message.protected if message.HasField("protected") else -1
    kept = message.kept if message.HasField("kept") else -1
    persist = message.persist if message.HasField("persist") else -1
    return Pins(
        message.seq, whole, turn, protected, message.attempt, message.protected_by, kept, persist, message.exposed
    )


def guard_report_to(report: GuardReport) -> pb.GuardReport:
    """Returns the message of a report, with at most LANES_MAX lanes.

    If there are more, the message names lanes of each turn, and calls no turn guarded: a lane that
    was left out would count as one that has its parity.
    """
    lanes = sorted(report.lanes)
    if len(lanes) > LANES_MAX:
        turns = {lane.attempt for lane in lanes}
        of_turns = ([lane for lane in lanes if lane.attempt == attempt] for attempt in sorted(turns))
        lanes = [lane for of_turn in of_turns for lane in of_turn[: LANES_MAX // len(turns)]]
    return pb.GuardReport(
        attempt=report.guarded if len(lanes) == len(report.lanes) else 0,
        lanes=[
            pb.UnguardedLane(step=lane.step, lane=lane.lane, words=lane.words[:REASON_MAX], attempt=lane.attempt)
            for lane in lanes
        ],
    )


def guard_report_from(message: pb.GuardReport) -> GuardReport:
    """Returns what a subtree guards.

    Raises:
        ConfigError: a step is above STEP_MAX, or there are more than LANES_MAX lanes.
    """
    newest = max((lane.step for lane in message.lanes), default=0)
    if newest > STEP_MAX:
        raise ConfigError(f"step {newest} can't be guarded: steps end at {STEP_MAX}.")
    if len(message.lanes) > LANES_MAX:
        raise ConfigError(f"{len(message.lanes)} lanes are reported as unguarded; the limit is {LANES_MAX}.")
    lanes = (UnguardedLane(lane.step, lane.lane, lane.words[:REASON_MAX], lane.attempt) for lane in message.lanes)
    return GuardReport(message.attempt, frozenset(lanes))


def layout_report_to(layout: LayoutReport) -> pb.LayoutReport:
    ready = None if layout.ready < 0 else layout.ready
    return pb.LayoutReport(wanted=layout.wanted, joined=layout.joined, ready=ready)


def layout_report_from(message: pb.LayoutReport) -> LayoutReport:
    """Returns what a rank or a subtree reports on layouts.

    Raises:
        ConfigError: no step can follow `ready`: it is STEP_MAX or above.
    """
    if message.ready >= STEP_MAX:
        raise ConfigError(f"no layout can begin after step {message.ready}: steps end at {STEP_MAX}.")
    return LayoutReport(message.wanted, message.joined, message.ready if message.HasField("ready") else -1)


def layout_outcome_to(layout: LayoutOutcome) -> pb.LayoutOutcome:
    start = None if layout.start < 0 else layout.start
    return pb.LayoutOutcome(wanted=layout.wanted, joined=layout.joined, start=start)


def layout_outcome_from(message: pb.LayoutOutcome) -> LayoutOutcome:
    return LayoutOutcome(message.wanted, message.joined, message.start if message.HasField("start") else -1)


def signal_from(value: int) -> Signal:
    """Returns the signal of a number.

    Raises:
        ConfigError: the number is no known signal.
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
    """Returns the phase that an agent reports.

    Raises:
        ConfigError: an agent can't report this number.
    """
    if value not in pb.AgentPhase.values():
        raise ConfigError(f"{value} is no phase of an agent that this reft knows.")
    return AgentPhase(value)


def node_reports_to(reports: Iterable[NodeReport]) -> list[pb.NodeReport]:
    """Returns the reports of one beat: the sender's own, then the most severe others."""
    own, *others = reports
    others.sort(key=lambda report: -report.signal)
    return [_node_report_to(report) for report in [own, *others][:NODE_REPORTS_MAX]]


def _node_report_to(report: NodeReport) -> pb.NodeReport:
    message = pb.NodeReport(node_id=report.node, signal=signal_to(report.signal), reason=report.reason[:REASON_MAX])
    if report.stall is not None:
        message.stall.CopyFrom(
            pb.Stall(
                rank=report.stall.rank,
                step=report.stall.step,
                still_s=report.stall.still_s,
                usual_s=report.stall.usual_s,
                stopped=report.stall.stopped,
            )
        )
    return message


def node_reports_from(messages: Iterable[pb.NodeReport]) -> list[NodeReport]:
    """Returns the reports of a beat.

    Raises:
        ConfigError: a report has an unknown signal.
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
    """Returns the ages of the last news from nodes, at most AGE_MAX_MS."""
    ages_ms = {node: min(max(int(age_s * 1000), 0), AGE_MAX_MS) for node, age_s in heard_s.items()}
    return [pb.LastHeard(node_id=node, age_ms=age_ms) for node, age_ms in ages_ms.items()]


def heard_from(messages: Iterable[pb.LastHeard]) -> dict[str, float]:
    """Returns node → seconds since the sender heard that node."""
    return {message.node_id: message.age_ms / 1000 for message in messages}


def table_to(layout: Layout, places: Mapping[str, int] | None = None) -> bytes:
    """Returns the leaf table's bytes, always the same for the same layout and places.

    Args:
        layout: the leaves; only offsets of UNREPLICATED leaves are written.
        places: name → pb.CELL or pb.INLINE, of the leaves that are not UNREPLICATED.
    """
    entries = []
    for leaf, offset in zip(layout.leaves, layout.offsets, strict=True):
        place = places.get(leaf.name, pb.UNREPLICATED) if places else pb.UNREPLICATED
        entries.append(leaf_to(leaf, offset if place == pb.UNREPLICATED else 0, place))
    return pb.LeafTable(leaves=entries, data_bytes=layout.data_bytes).SerializeToString(deterministic=True)


def leaf_to(leaf: Leaf, offset: int = 0, place: int = pb.UNREPLICATED) -> pb.LeafEntry:
    """Returns a leaf of a leaf table.

    Args:
        leaf: the leaf.
        offset: in the slot's data, if the leaf is UNREPLICATED.
        place: where the leaf's bytes are.
    """
    return pb.LeafEntry(
        name=leaf.name, dtype=leaf.dtype, shape=leaf.shape, stride=leaf.stride, nbytes=leaf.nbytes, staged=leaf.staged,
        global_shape=leaf.global_shape, global_offset=leaf.global_offset, offset=offset, place=pb.Place.Name(place),
        form=leaf.form,
    )  # fmt: skip


def leaf_from(entry: pb.LeafEntry) -> Leaf:
    """Returns the leaf of an entry."""
    return Leaf(
        entry.name, entry.dtype, tuple(entry.shape), tuple(entry.stride), entry.nbytes, entry.staged,
        tuple(entry.global_shape), tuple(entry.global_offset), entry.form,
    )  # fmt: skip


def table_from(data: bytes) -> Layout:
    """Returns the layout of a leaf table. Offsets of leaves that are not UNREPLICATED are 0.

    Raises:
        FormatError: the bytes are no leaf table, or an UNREPLICATED leaf lies outside the data.
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
    """Returns name → pb.UNREPLICATED, pb.CELL or pb.INLINE: where each leaf's bytes are.

    Raises:
        FormatError: the bytes are no leaf table, or name an unknown place.
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
