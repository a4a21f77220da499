"""Tests that messages and leaf tables round-trip to the classes of core."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.commit.decision import Decision
from reft.core.commit.pins import ExchangeFacts, GuardReport, Pins, TurnHistory, UnguardedLane, next_pins
from reft.core.commit.relayout import LayoutOutcome
from reft.core.commit.round import UNDECIDED_MAX, Outcome, StepReport
from reft.core.commit.slots import SlotState
from reft.core.commit.snapshot_interval import SnapshotInterval
from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery.recovery import HeldSlot
from reft.errors import AttachError, ConfigError, FormatError
from reft.wire import messages
from reft.wire.messages import OLDEST, PROTOCOL, check_protocol
from reft.wire.v1 import daemon_pb2 as pb

U64 = st.integers(0, (1 << 64) - 1)
EPOCHS = st.builds(Epoch, U64, st.binary(min_size=16, max_size=16))
VERSIONS = st.builds(Version, EPOCHS, U64)
SHAPES = st.lists(U64, max_size=4).map(tuple)
LEAVES = st.lists(
    st.builds(Leaf, st.text(), st.text(), SHAPES, SHAPES, st.integers(0, 1 << 40), st.booleans(), SHAPES, SHAPES),
    max_size=6,
    unique_by=lambda leaf: leaf.name,
)


@given(VERSIONS)
def test_versions(version):
    assert messages.version_from(messages.version_to(version)) == version


@given(st.builds(Decision, EPOCHS, st.one_of(st.none(), VERSIONS), st.lists(EPOCHS, max_size=3).map(tuple)))
def test_decisions(decision):
    wire = pb.Decision.FromString(messages.decision_to(decision).SerializeToString())
    assert messages.decision_from(wire) == decision


STEPS = st.integers(0, messages.STEP_MAX)
OR_NONE = st.integers(-1, messages.STEP_MAX)
FEW = st.frozensets(STEPS, max_size=UNDECIDED_MAX)


@given(st.integers(-1, messages.STEP_MAX), st.integers(-1, messages.STEP_MAX), FEW, FEW)
def test_step_reports_round_trip(one, other, sealed, pending):
    said = StepReport(min(one, other), max(one, other), sealed, pending)
    digests = {step: {3: step % 7} for step in sealed}
    wire = pb.StepReport.FromString(messages.report_to(said, digests).SerializeToString())
    assert messages.report_from(wire) == said
    assert messages.digests_from(wire) == digests


def test_an_empty_report_does_not_cover_step_0():
    assert (
        messages.report_from(pb.StepReport()) == StepReport() == messages.report_from(messages.report_to(StepReport()))
    )


@pytest.mark.parametrize("over", [messages.STEP_MAX + 1, (1 << 64) - 1])
def test_impossible_steps_are_refused(over):
    for bad in (
        pb.StepReport(until=over),
        pb.StepReport(sealed=[pb.SealedStep(step=over)]),
        pb.StepReport(pending=[over]),
    ):
        with pytest.raises(ConfigError, match="steps end at"):
            messages.report_from(bad)


def test_no_number_that_a_daemon_increases_can_arrive_at_its_limit():
    last = messages.STEP_MAX
    for bad, refused in (
        (pb.Pins(seq=last + 1), "change or turn"),
        (pb.Pins(attempt=last + 1), "change or turn"),
        (pb.Pins(protected_by=last + 1), "change or turn"),
        (pb.Pins(turn=last + 1), "steps end at"),
    ):
        with pytest.raises(ConfigError, match=refused):
            messages.outcome_from(pb.Outcome(pins=bad))
    with pytest.raises(ConfigError, match="no layout can begin"):
        messages.layout_report_from(pb.LayoutReport(ready=last))
    epoch = pb.Epoch(counter=last + 1, ident=bytes(16))
    for decision in (pb.Decision(epoch=epoch), pb.Decision(epoch=pb.Epoch(ident=bytes(16)), known=[epoch])):
        with pytest.raises(ConfigError, match="epochs end at"):
            messages.check_decision("job", decision)


def test_a_report_of_more_lanes_than_it_can_name_protects_nothing():
    """The lanes of the earlier step come first, so those of the turn would be left out."""
    lanes = {UnguardedLane(5, lane, "gone.", 1) for lane in range(messages.LANES_MAX)}
    for of_turn, guarded in ((0, 2), (3, 0), (messages.LANES_MAX, 0)):
        told = GuardReport(2, frozenset(lanes | {UnguardedLane(6, lane, "silent.", 2) for lane in range(of_turn)}))
        heard = messages.guard_report_from(messages.guard_report_to(told))
        assert heard.guarded == guarded and heard.lanes <= told.lanes and heard.lacking(1)
        assert bool(heard.lacking(2)) == bool(of_turn)
        pins = Pins(seq=3, whole=6, turn=6, protected=5, attempt=2, protected_by=1)
        history, facts = TurnHistory(tried=6, tries=1), ExchangeFacts(2 * messages.LANES_MAX, 4, True)
        after, _ = next_pins(pins, 6, heard, history, facts, 0.0)
        assert after.turn == -1 and after.protected == (6 if guarded else -1)


def test_a_node_that_is_silent_for_months_stops_no_beat():
    ages = {"a": 0.25, "b": 1e9}
    assert messages.heard_from(messages.heard_to(ages)) == {"a": 0.25, "b": messages.AGE_MAX_MS / 1000}


def test_the_start_of_the_last_layout_travels():
    newest = messages.layout_report_from(pb.LayoutReport(ready=messages.STEP_MAX - 1))
    outcome = Outcome(layout=LayoutOutcome().after(newest))
    assert messages.outcome_from(messages.outcome_to("job", Epoch(1, b"e" * 16), outcome)) == outcome


def test_a_whole_step_that_was_not_answered_is_refused():
    for bad in (pb.StepReport(since=4), pb.StepReport(since=4, until=3)):
        with pytest.raises(ConfigError, match="step 4 can't be whole"):
            messages.report_from(bad)


def test_more_undecided_steps_than_slots_are_refused():
    steps = range(UNDECIDED_MAX + 1)
    for bad in (
        pb.StepReport(until=99, sealed=[pb.SealedStep(step=s) for s in steps]),
        pb.StepReport(until=99, pending=steps),
    ):
        with pytest.raises(ConfigError, match=f"the limit is {UNDECIDED_MAX}"):
            messages.report_from(bad)


@given(
    st.integers(-1, messages.STEP_MAX),
    st.frozensets(STEPS),
    st.builds(SnapshotInterval, STEPS, st.integers(0, 1 << 31)),
    st.builds(Pins, STEPS, *[OR_NONE] * 3, STEPS, STEPS, OR_NONE, OR_NONE, st.booleans()),
)
def test_outcomes(until, still, pace, pins):
    outcome = Outcome(pins, until, still, interval=pace)
    wire = messages.outcome_to("job", Epoch(1, b"e" * 16), outcome)
    assert messages.outcome_from(wire) == outcome
    assert messages.outcome_from(pb.Outcome(until=-1)) == Outcome(), "without pins nothing is whole"
    reply = pb.ReportReply(
        pins=messages.pins_to(pins), until=until, open=still, every=pace.every, interval_start=pace.start
    )
    assert messages.outcome_from(reply) == outcome


@given(st.one_of(st.none(), VERSIONS), st.sampled_from(SlotState))
def test_headers(version, state):
    header = pb.SlotHeader(rank=3, slot="rank-3.slot-0", state=pb.SlotState.Name(state), layout=b"l" * 16, data_bytes=5)
    if version:
        header.version.CopyFrom(messages.version_to(version))
    assert messages.held_slot_from("n", header) == HeldSlot("n", 3, "rank-3.slot-0", state, version, b"l" * 16, 5)


def test_the_numbers_are_those_of_the_core():
    assert {state.name: state.value for state in SlotState} == dict(pb.SlotState.items())


@given(LEAVES)
def test_leaf_tables(leaves):
    layout = pack(leaves)
    table = messages.table_to(layout)
    assert messages.table_from(table) == layout
    assert messages.table_from(table).digest == layout.digest
    assert messages.table_to(pack(leaves)) == table


def test_a_leaf_outside_the_data_is_refused():
    entry = pb.LeafEntry(name="w", nbytes=65, offset=64)
    for size in (0, 64, 128):
        with pytest.raises(FormatError, match="'w' lies outside"):
            messages.table_from(pb.LeafTable(leaves=[entry], data_bytes=size).SerializeToString())
    assert messages.table_from(pb.LeafTable(leaves=[entry], data_bytes=129).SerializeToString()).offsets == (64,)


def test_values_of_a_newer_reft_are_refused():
    with pytest.raises(FormatError, match="'w' lies in place 9"):
        messages.places_from(pb.LeafTable(leaves=[pb.LeafEntry(name="w", place=9)]).SerializeToString())
    with pytest.raises(ConfigError, match="99 is no phase"):
        messages.agent_from(99)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_table_or_a_format_error(data):
    try:
        messages.table_from(data)
    except FormatError:
        pass


def test_a_range_has_no_protocol_without_proofs():
    """The token itself travelled up to protocol 10. So PROTOCOL may grow, and OLDEST too."""
    assert 11 <= OLDEST <= PROTOCOL
    for theirs in range(11):
        with pytest.raises(AttachError, match=rf"you speak protocol {theirs}\b"):
            check_protocol(theirs, 0, "you speak", "this daemon")


@pytest.mark.parametrize(
    ("theirs", "their_oldest", "fits"),
    [
        (PROTOCOL, OLDEST, True),
        (PROTOCOL, 0, True),  # a side that does not say its oldest speaks one protocol
        (PROTOCOL + 5, PROTOCOL, True),
        (OLDEST, 1, True),
        (PROTOCOL + 5, 1, True),
        (PROTOCOL + 1, 0, False),
        (PROTOCOL + 5, PROTOCOL + 1, False),
        (OLDEST - 1, 1, False),
        (0, 0, False),
    ],
)
def test_two_sides_need_a_common_protocol(theirs, their_oldest, fits):
    if fits:
        check_protocol(theirs, their_oldest, "you speak", "this daemon")
        return
    with pytest.raises(AttachError, match=rf"you speak protocol {theirs}\b.*, this daemon {PROTOCOL}.*\nFix: install"):
        check_protocol(theirs, their_oldest, "you speak", "this daemon")
