"""Messages and the classes of core, there and back; and the leaf table's bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reft.core.frequency import Pace
from reft.core.layout import Leaf, pack
from reft.core.recovery import Decision, Held
from reft.core.round import Answer, Outcome
from reft.core.slots import SlotState
from reft.core.version import Epoch, Version
from reft.errors import ConfigError, FormatError
from reft.wire import messages
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


@given(st.builds(Decision, EPOCHS, st.one_of(st.none(), VERSIONS)))
def test_decisions(decision):
    wire = pb.Decision.FromString(messages.decision_to(decision).SerializeToString())
    assert messages.decision_from(wire) == decision


@given(st.dictionaries(st.integers(0, messages.STEP_MAX), st.sampled_from(list(Answer))))
def test_answers(answers):
    assert messages.answers_from(messages.answers_to(answers)) == answers


def test_an_answer_that_says_nothing_is_no_answer():
    assert messages.answers_from([pb.StepAnswer(step=1), pb.StepAnswer(step=2, answer=pb.ANSWER_VOID)]) == {
        2: Answer.VOID
    }


def test_answers_that_can_not_be_are_refused():
    for bad in (pb.StepAnswer(step=messages.STEP_MAX + 1, answer=pb.ANSWER_SEALED), pb.StepAnswer(step=(1 << 64) - 1)):
        with pytest.raises(ConfigError, match="steps end at"):
            messages.answers_from([bad])
    unknown = pb.StepAnswer.FromString(b"\x08\x01\x10\x07")  # step 1, answer 7
    with pytest.raises(ConfigError, match="answer 7"):
        messages.answers_from([unknown])


@given(
    st.integers(-1, messages.STEP_MAX),
    st.frozensets(st.integers(0, messages.STEP_MAX)),
    st.builds(Pace, st.integers(0, messages.STEP_MAX), st.integers(0, 1 << 31)),
)
def test_outcomes(whole, voids, pace):
    outcome = Outcome(whole, voids, pace=pace)
    wire = messages.outcome_to("job", Epoch(1, b"e" * 16), outcome)
    assert messages.outcome_from(wire) == outcome
    reply = pb.ReportReply(whole=whole, voids=voids, every=pace.every, pace_start=pace.start)
    assert messages.outcome_from(reply) == outcome


@given(st.one_of(st.none(), VERSIONS), st.sampled_from(SlotState))
def test_headers(version, state):
    header = pb.SlotHeader(rank=3, slot="rank-3.slot-0", state=pb.SlotState.Name(state), layout=b"l" * 16)
    if version:
        header.version.CopyFrom(messages.version_to(version))
    assert messages.held_from("n", header) == Held("n", 3, "rank-3.slot-0", state, version, b"l" * 16)


def test_the_numbers_are_those_of_the_core():
    assert {state.name: state.value for state in SlotState} == dict(pb.SlotState.items())
    assert (pb.ANSWER_SEALED, pb.ANSWER_VOID) == (Answer.SEALED, Answer.VOID)


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


@given(st.binary(max_size=80))
def test_any_bytes_are_a_table_or_a_format_error(data):
    try:
        messages.table_from(data)
    except FormatError:
        pass
