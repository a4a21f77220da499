"""Between the messages of reft.v1 and the classes of reft.core; and the leaf table's bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError

from reft.core.layout import Layout, Leaf
from reft.core.recovery import Decision, Held
from reft.core.round import Answer, Outcome
from reft.core.slots import SlotState
from reft.core.version import Epoch, Version
from reft.errors import ConfigError, FormatError
from reft.wire.v1 import daemon_pb2 as pb

PROTOCOL = 1  # daemons and clients of unlike numbers refuse each other
MANIFEST_MAX = 16 << 20  # bytes
STEP_MAX = 1 << 62  # an outcome travels as a signed number


def epoch_to(epoch: Epoch) -> pb.Epoch:
    return pb.Epoch(counter=epoch.counter, ident=epoch.ident)


def epoch_from(message: pb.Epoch) -> Epoch:
    return Epoch(message.counter, message.ident)


def version_to(version: Version) -> pb.Version:
    return pb.Version(epoch=epoch_to(version.epoch), step=version.step)


def version_from(message: pb.Version) -> Version:
    return Version(epoch_from(message.epoch), message.step)


def decision_to(decision: Decision) -> pb.Decision:
    message = pb.Decision(epoch=epoch_to(decision.epoch))
    if decision.base is not None:
        message.base.CopyFrom(version_to(decision.base))
    return message


def decision_from(message: pb.Decision) -> Decision:
    return Decision(epoch_from(message.epoch), version_from(message.base) if message.HasField("base") else None)


def held_from(node_id: str, header: pb.SlotHeader) -> Held:
    version = version_from(header.version) if header.HasField("version") else None
    return Held(node_id, header.rank, header.slot, SlotState(header.state), version, header.layout)


def answers_to(answers: Mapping[int, Answer]) -> list[pb.StepAnswer]:
    return [pb.StepAnswer(step=step, answer=pb.Answer.Name(answer)) for step, answer in sorted(answers.items())]


def answers_from(messages: Iterable[pb.StepAnswer]) -> dict[int, Answer]:
    """A rank's or a subtree's answers.

    Raises:
        ConfigError: a step is above STEP_MAX, or an answer is none that we know.
    """
    answers = {}
    for message in messages:
        if message.step > STEP_MAX or message.answer not in (pb.NONE, pb.ANSWER_SEALED, pb.ANSWER_VOID):
            raise ConfigError(f"step {message.step} can't have the answer {message.answer}; steps end at {STEP_MAX}.")
        if message.answer != pb.NONE:
            answers[message.step] = Answer(message.answer)
    return answers


def outcome_to(job: str, epoch: Epoch, outcome: Outcome) -> pb.Outcome:
    return pb.Outcome(job=job, epoch=epoch_to(epoch), whole=outcome.whole, voids=sorted(outcome.voids))


def outcome_from(message: pb.Outcome | pb.ReportReply) -> Outcome:
    return Outcome(message.whole, frozenset(message.voids))


def table_to(layout: Layout) -> bytes:
    """The leaf table's bytes, always the same for the same layout."""
    entries = [
        pb.LeafEntry(
            name=leaf.name, dtype=leaf.dtype, shape=leaf.shape, stride=leaf.stride, nbytes=leaf.nbytes,
            staged=leaf.staged, global_shape=leaf.global_shape, global_offset=leaf.global_offset, offset=offset,
        )
        for leaf, offset in zip(layout.leaves, layout.offsets, strict=True)
    ]  # fmt: skip
    return pb.LeafTable(leaves=entries, data_bytes=layout.data_bytes).SerializeToString(deterministic=True)


def table_from(data: bytes) -> Layout:
    """The layout that a leaf table describes.

    Raises:
        FormatError: the bytes are no leaf table, or a leaf lies outside the data.
    """
    try:
        table = pb.LeafTable.FromString(data)
    except DecodeError as error:
        raise FormatError(f"the leaf table can't be read: {error}.") from error
    leaves = []
    for entry in table.leaves:
        if entry.offset + entry.nbytes > table.data_bytes:
            raise FormatError(f"leaf {entry.name!r} lies outside the data.")
        leaves.append(
            Leaf(
                entry.name, entry.dtype, tuple(entry.shape), tuple(entry.stride), entry.nbytes, entry.staged,
                tuple(entry.global_shape), tuple(entry.global_offset),
            )
        )  # fmt: skip
    return Layout(tuple(leaves), tuple(entry.offset for entry in table.leaves), table.data_bytes)
