"""A flipped bit is found where bytes arrive, whatever the way, and is named.

On the wire: data, columns of parity, decoded bytes and inline leaves. In a decoder. Bits that flip
on their way to a device: `test_device_copies.py`.
"""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from reft.client.restore.decode import StripeDecoder
from reft.client.restore.executor import NO_RANK, LoadReport
from reft.client.restore.tensor_view import FlatTensorView
from reft.client.restore.verify import DIGEST_BYTES, VERDICT_TAG, ChunkVerifier, PeerMessages
from reft.core.recovery.plan import DecodeOperation, EmitOperation, ReadOperation, ReceiveOperation
from reft.core.recovery.shard_matching import PieceSource
from reft.core.recovery.stripes import StripeSlice
from reft.errors import RestoreError
from reft.wire.slot_format import Bytes, chunk_digest
from tests.support.loads import CHUNK, CLEAN, Job
from tests.support.moves import ROWS, Move, replicated, rows
from tests.support.shards import Postbox, on_all

LOST = 2


def flipping(sender: int, receiver: int, number: int) -> Postbox:
    """Returns a postbox that flips one bit of the n-th message from one rank to another."""
    count = 0

    def flip(a: int, b: int, data: np.ndarray) -> None:
        nonlocal count
        if (a, b) == (sender, receiver):
            if count == number:
                data[len(data) // 2] ^= 4
            count += 1

    return Postbox(on_way=flip)


def messages_of(operations: list[object], sender: int) -> list[ReceiveOperation]:
    return [each for each in operations if isinstance(each, ReceiveOperation) and each.sender == sender]


def fault(owner: int, sender: int, receiver: int) -> dict[str, int]:
    way = f"rank {sender} sent them to rank {receiver} over memory"
    return {f"bytes of rank {owner} changed on their way: {way}": owner}


def faults_of(results: list[LoadReport]) -> dict[str, int]:
    return {text: owner for report in results for text, owner in report.faults.items()}


@pytest.mark.parametrize("scheme", ["aec", "arc"])
@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_flip_in_a_message_of_data_is_named(scheme, place):
    job = Job(4, scheme, 1)
    arrivals = [(number, each) for number, each in enumerate(messages_of(list(job.plan(3).operations(3)), 1))]
    number, each = arrivals[place]
    results = job.load(box=flipping(1, 3, number))
    assert results == [CLEAN, CLEAN, CLEAN, LoadReport((), fault(each.owner, 1, 3))]
    assert not job.is_whole(), "the flip was in bytes that count"


def test_a_flip_in_columns_of_parity_is_named():
    job = Job(5, "aec", 2)
    operations = list(job.plan(LOST, (LOST,)).operations(LOST))
    number, each = next(
        (number, each) for number, each in enumerate(messages_of(operations, 0)) if each.slice is not None
    )
    results = job.load((LOST,), box=flipping(0, LOST, number))
    assert fault(0, 0, LOST).items() <= results[LOST].faults.items() and each.owner == 0
    assert any("decoded from its peers" in text for text in results[LOST].faults), "and what was made of them"
    assert results[:2] + results[3:] == [CLEAN] * 4


def test_a_flip_in_decoded_bytes_on_their_way_is_named():
    job = Job(4, "aec", 1)
    assert messages_of(list(job.plan(0, (LOST,)).operations(0)), LOST)
    results = job.load((LOST,), box=flipping(LOST, 0, 1))
    assert results == [LoadReport((), fault(LOST, LOST, 0)), CLEAN, CLEAN, CLEAN]


def test_a_flip_in_the_digests_of_messages_is_found():
    job = Job(3, "aec", 1)
    count = len(messages_of(list(job.plan(2).operations(2)), 1))
    results = job.load(box=flipping(1, 2, count))
    assert results == [CLEAN, CLEAN, LoadReport((), fault(1, 1, 2))]


def test_a_slot_that_could_not_be_opened_is_no_ones_state():
    """Its reader sends something, so that no rank waits; all receivers know that it is wrong."""
    results = Job(4, "aec", 1).load(unopened={1})
    assert [report.faults for report in results] == [fault(1, 1, 0), {}, fault(1, 1, 2), fault(1, 1, 3)]


def move() -> Move:
    return Move(ROWS, replicated(4), rows(3), range(4), "aec", 1)


@pytest.mark.parametrize("kind", ["data", "parity", "decoded"])
def test_a_flip_in_a_message_into_another_shape_is_named(kind):
    moved, lost = move(), () if kind == "data" else (0,)
    plan = moved.plan(lost)
    keeper = plan.readers.keeper_of[0]
    for receiver in range(3):
        operations = list(plan.operations(receiver))
        for sender in range(3):
            for number, each in enumerate(messages_of(operations, sender)):
                is_emitted = bool(lost) and each.owner == 0 and sender == keeper
                found = "parity" if each.slice is not None else "decoded" if is_emitted else "data"
                if found == kind:
                    results = moved.load(lost, box=flipping(sender, receiver, number))
                    assert fault(each.owner, sender, receiver).items() <= results[receiver].faults.items()
                    assert [set(report.faults) for rank, report in enumerate(results) if rank != receiver] == [
                        set()
                    ] * 2
                    return
    raise AssertionError(f"no message of {kind}")


def test_a_flip_in_inline_leaves_on_their_way_is_named():
    """Leaves in the capsules of old ranks, which new ranks need whole."""
    tensors = {"w": ROWS["w"], "b": ROWS["b"]}
    moved = Move(tensors, rows(3), replicated(2), range(3), "aec", 1)
    plan = moved.plan()
    for sender, receiver in ((0, 1), (1, 0)):
        capsules = [
            operation.owner
            for operation in plan.operations(sender)
            if isinstance(operation, ReadOperation) and operation.source is PieceSource.CAPSULE and operation.messages
        ]
        for number, each in enumerate(messages_of(list(plan.operations(receiver)), sender)):
            if each.owner in capsules and {part.need.location.where for part in each.parts} == {PieceSource.CAPSULE}:
                results = moved.load(box=flipping(sender, receiver, number))
                assert results[receiver] == LoadReport((), fault(each.owner, sender, receiver))
                return
    raise AssertionError("no inline leaf was sent")


# Decoding


class Faulty(StripeDecoder):
    """A decoder that flips one bit of one slice."""

    def __init__(self) -> None:
        self.count = 0

    def decode(self, stripe_slice: StripeSlice, rows: Bytes, live: FlatTensorView, base: int) -> Bytes:
        made = super().decode(stripe_slice, rows, live, base)
        self.count += 1
        if self.count == 2:
            made[0, 0] ^= 1
        return made


@pytest.mark.parametrize("scheme", ["aec", "arc"])
def test_a_flip_in_decoded_bytes_is_named(scheme):
    job = Job(4, scheme, 1)
    job.decoder = Faulty
    results = job.load((LOST,))
    ((text, owner),) = results[LOST].faults.items()
    assert text.startswith("chunk ") and owner == NO_RANK
    assert text.endswith(f"of rank {LOST}, decoded from its peers, differs from the saved bytes")
    assert results[:2] + results[3:] == [CLEAN] * 3


def test_a_flip_in_decoded_bytes_for_another_shape_is_named():
    results = move().load((0,), decoder=Faulty())
    ((text, owner),) = faults_of(results).items()
    assert text.endswith("of rank 0, decoded from its peers, differs from the saved bytes") and owner == NO_RANK


def test_the_keeper_compares_every_byte_that_it_makes():
    """Each emission has a decode operation, and together they fill the data of the lost slot."""
    job = Job(5, "aec", 2)
    operations = list(job.plan(LOST, (LOST,)).operations(LOST))
    decoded = [each.slice for each in operations if isinstance(each, DecodeOperation)]
    assert decoded == [each.slice for each in operations if isinstance(each, EmitOperation)]
    part = job.placement.rank_placement(LOST)
    made = sum(each.width * each.stripe.lane.code.w * len(each.stripe.made) for each in decoded)
    assert made == sum(block.nbytes for block in part.blocks[: part.data_blocks])


# The parts


def test_chunks_are_verified_in_any_order_of_their_bytes():
    rng = random.Random(0)
    data = np.frombuffer(rng.randbytes(10 * CHUNK + 17), np.uint8)
    padded = np.concatenate([data, np.zeros(-len(data) % CHUNK, np.uint8)])
    digests = np.array([chunk_digest(padded[i : i + CHUNK]) for i in range(0, len(padded), CHUNK)], np.uint64)
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(60))})
    pieces = list(pairwise(cuts))
    for flipped in (None, 3 * CHUNK + 1):
        rng.shuffle(pieces)
        verifier = ChunkVerifier(digests, CHUNK, len(data))
        for begin, end in pieces:
            piece = data[begin:end].copy()
            if flipped is not None and begin <= flipped < end:
                piece[flipped - begin] ^= 1
            verifier.take(begin, piece)
            piece[:] = 0  # the caller reuses the buffer
        assert verifier.finish() == ([] if flipped is None else [3])


@pytest.mark.parametrize("count", range(3))
def test_chunks_without_a_digest_are_wrong(count):
    data = np.ones(3 * CHUNK, np.uint8)
    digests = np.array([chunk_digest(data[:CHUNK])] * count, np.uint64)
    verifier = ChunkVerifier(digests, CHUNK, len(data))
    verifier.take(0, data)
    assert verifier.finish() == list(range(count, 3))


def test_a_chunk_that_never_came_is_wrong():
    """Also one of which no byte came at all."""
    data = np.ones(3 * CHUNK, np.uint8)
    digests = np.array([chunk_digest(data[:CHUNK])] * 3, np.uint64)
    for lacks in (np.s_[0:100], np.s_[CHUNK : 2 * CHUNK]):
        verifier = ChunkVerifier(digests, CHUNK, len(data))
        verifier.take(0, data[: lacks.start])
        verifier.take(lacks.stop, data[lacks.stop :])
        assert verifier.finish() == [lacks.start // CHUNK]


def test_messages_of_all_peers_are_compared_at_once():
    """Three ranks send one another messages of two old ranks' bytes; one message changes."""
    box = flipping(2, 0, 1)

    def one(rank: int) -> dict[int, str]:
        peers, sent = PeerMessages(box.of(rank), rank), np.full(100, rank, np.uint8)
        works, others = [], [each for each in range(3) if each != rank]
        arrived = {peer: [np.zeros(100, np.uint8) for _ in range(2)] for peer in others}
        for number in range(2):
            for peer in others:
                works.append(peers.send(sent, chunk_digest(sent), peer, 10 + number))
                works.append(peers.receive(arrived[peer][number], peer))
        for work in works:
            work.wait()
        for peer in others:
            for number in range(2):
                peers.received(chunk_digest(arrived[peer][number]), peer, 10 + number)
        return peers.compare()

    wrong = {11: "bytes of rank 11 changed on their way: rank 2 sent them to rank 0 over memory"}
    assert on_all(3, one) == [wrong, {}, {}]
    verdicts = {pair: [each for each in posted if each[1] == VERDICT_TAG] for pair, posted in box.posted.items()}
    assert all(verdicts[a, b] == verdicts[b, a] for a, b in verdicts)
    assert box.sent_bytes[0, 1] == 2 * 100 + 2 * DIGEST_BYTES


def test_a_rank_without_a_transport_exchanges_nothing():
    assert PeerMessages(None, 0).compare() == {}
    with pytest.raises(RestoreError, match="rank 0 needs bytes of other ranks"):
        PeerMessages(None, 0).receive(np.zeros(1, np.uint8), 1)
