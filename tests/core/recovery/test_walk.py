"""Tests the order of a walk's actions, and how many bytes are held at a time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reft.core.layout.regions import RegionCopy
from reft.core.recovery.plan import (
    DecodeOperation,
    EmitOperation,
    NeededRange,
    OutgoingMessage,
    ReadOperation,
    ReceiveOperation,
    TransferOperation,
    TransferSizes,
)
from reft.core.recovery.shard_matching import PieceLocation, PieceSource, PieceTransfer
from reft.core.recovery.walk import OPERATIONS_MAX, WalkPhase, walk

START, POST, FINISH = WalkPhase.START, WalkPhase.POST, WalkPhase.FINISH


def part(nbytes: int) -> NeededRange:
    location = PieceLocation(PieceSource.CELL, 0, 0)
    return NeededRange(PieceTransfer("w", nbytes, location, RegionCopy(0, 0, nbytes), (0,)), 0, 0, nbytes)


def message(nbytes: int, receivers: int) -> OutgoingMessage:
    return OutgoingMessage((part(nbytes),), tuple(range(1, 1 + receivers)), nbytes)


def read(own: int, sent: int = 0, receivers: int = 1) -> ReadOperation:
    messages = (message(sent, receivers),) if sent else ()
    return ReadOperation(PieceSource.SLOT, 0, 0, own + sent, (part(own),) if own else (), messages)


def receive(nbytes: int) -> ReceiveOperation:
    return ReceiveOperation(0, 1, (part(nbytes),), nbytes)


def sent_or_received(operation: TransferOperation) -> int:
    """Returns the bytes of an operation's messages that are under way."""
    if isinstance(operation, ReceiveOperation):
        return operation.nbytes
    return sum(each.nbytes * len(each.receivers) for each in getattr(operation, "messages", ()))


@st.composite
def operation_lists(draw: Any) -> list[TransferOperation]:
    """Reads, receives and slices; an emission comes at any place after its decode operation."""
    sizes, operations, decoded = st.integers(1, 300), list[TransferOperation](), list[Any]()
    for kind in draw(st.lists(st.sampled_from(["read", "send", "receive", "decode", "emit"]), max_size=60)):
        if kind == "read":
            operations.append(read(draw(sizes)))
        elif kind == "send":
            operations.append(read(draw(st.sampled_from([0, 40])), draw(sizes), draw(st.integers(1, 3))))
        elif kind == "receive":
            operations.append(receive(draw(sizes)))
        elif kind == "decode":
            decoded.append(SimpleNamespace())
            operations.append(DecodeOperation(decoded[-1]))
        elif decoded:
            operations.append(EmitOperation(decoded.pop(0), (), (message(draw(sizes), 2),)))
    return operations + [EmitOperation(each, (), ()) for each in decoded]


SIZES = st.builds(TransferSizes, window=st.integers(0, 1000), ahead=st.integers(0, 1000))


@given(operation_lists(), SIZES)
def test_each_operation_is_started_posted_and_finished_once_and_in_list_order(operations, sizes):
    done = list(walk(operations, sizes))
    for phase in WalkPhase:
        expected = [each for each in operations if phase is not START or isinstance(each, ReadOperation)]
        assert [each for which, each in done if which is phase] == expected
    place = {action: at for at, action in enumerate(done)}
    for each in operations:
        assert place.get((START, each), -1) < place[POST, each] < place[FINISH, each]


@given(operation_lists(), SIZES)
def test_a_decode_finishes_after_all_before_it_and_before_its_emission_is_posted(operations, sizes):
    finished: list[TransferOperation] = []
    for phase, operation in walk(operations, sizes):
        if phase is FINISH:
            if isinstance(operation, DecodeOperation):
                assert finished == operations[: operations.index(operation)]
            finished.append(operation)
        elif phase is POST and isinstance(operation, EmitOperation):
            assert any(isinstance(each, DecodeOperation) and each.slice is operation.slice for each in finished)


@given(operation_lists(), SIZES)
def test_reads_ahead_and_messages_under_way_are_bounded(operations, sizes):
    """What is held before one more read starts, or one more operation is posted."""
    started: list[TransferOperation] = []
    under_way: list[TransferOperation] = []
    for phase, operation in walk(operations, sizes):
        if phase is START:
            assert sum(each.nbytes for each in started) <= sizes.ahead and len(started) <= OPERATIONS_MAX
            started.append(operation)
        elif phase is POST:
            held = sum(map(sent_or_received, under_way))
            assert len(under_way) <= 1 or (held <= sizes.window and len(under_way) <= OPERATIONS_MAX)
            started = [each for each in started if each is not operation]
            under_way.append(operation)
        else:
            under_way.remove(operation)
    assert not started and not under_way


def test_operations_are_pulled_only_when_they_are_due():
    """A plan of thousands of ranks makes its operations while the load runs."""
    pulled = 0

    def listed() -> Iterator[TransferOperation]:
        nonlocal pulled
        for _ in range(1000):
            pulled += 1
            yield receive(1)

    posted = 0
    for phase, _ in walk(listed(), TransferSizes()):
        posted += phase is POST
        assert pulled <= posted + OPERATIONS_MAX + 1


def test_reads_are_ahead_of_messages_and_messages_of_their_end():
    """Reading, sending and placing overlap; else each would wait for the one before."""
    phases = [phase for phase, _ in walk([read(0, 10) for _ in range(30)], TransferSizes())]
    assert phases[: OPERATIONS_MAX + 1] == [START] * (OPERATIONS_MAX + 1)
    first = phases.index(FINISH)
    assert phases[:first].count(POST) == OPERATIONS_MAX + 1
    assert phases[:first].count(START) > phases[:first].count(POST)


def test_columns_of_the_next_slice_are_posted_before_a_slice_is_decoded():
    """So messages are under way while a helper thread decodes: the list of the drawing."""
    one, two = SimpleNamespace(), SimpleNamespace()
    columns = [receive(10), receive(10), receive(10), receive(10)]
    decodes, emissions = [DecodeOperation(one), DecodeOperation(two)], [EmitOperation(s, (), ()) for s in (one, two)]
    operations = [*columns[:2], decodes[0], *columns[2:], decodes[1], *emissions]
    done = list(walk(operations, TransferSizes()))
    place = {action: at for at, action in enumerate(done)}
    assert place[POST, columns[3]] < place[FINISH, decodes[0]] < place[POST, emissions[0]]
    assert place[POST, emissions[0]] < place[FINISH, columns[2]], "the first emission does not wait for the next slice"
