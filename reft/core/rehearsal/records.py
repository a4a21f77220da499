"""What a rehearsed trainer has recorded: one history a rank, divided into attempts.

Digests are texts. Equal texts stand for equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class AttachRecord:
    """The end of attach in one process of one rank.

    Attributes:
        step: the step from which the process begins.
        restored_from: memory, peers or storage; None for a fresh start.
        generators: name → digest of each random generator.
        state: the names in state=.
        regroups: whether DDP regroups its sums after the first backward pass.
        hash_sample: the hash of some text; differs with the seed of Python's hash.
    """

    rank: int
    world: int
    pid: int
    step: int
    restored_from: str | None
    time_s: float
    generators: Mapping[str, str]
    state: Sequence[str] = ()
    regroups: bool = False
    hash_sample: int = 0


@dataclass(frozen=True)
class MoveRecord:
    """A line of the script that moved a generator between attach and the first forward.

    Attributes:
        is_usual: whether the line did so in a later step, before that step's first forward.
    """

    generator: str
    file: str
    line: int
    code: str
    is_usual: bool = False


@dataclass(frozen=True)
class UntracedRecord:
    """Why no line, or not every line, that moves a generator is known."""

    reason: str


class ForwardKind(Enum):
    """How the model's forward was called."""

    TRAINING = "training"
    EVAL = "eval"  # in eval mode, without gradients
    EVAL_WITH_GRADIENTS = "eval with gradients"
    WITHOUT_GRADIENTS = "without gradients"  # in training mode


@dataclass(frozen=True)
class MarkRecord:
    """The digests at one mark, which ends `step`.

    Attributes:
        inputs: of the tensors that the model got since the mark before, in order.
        at_batch: the generators when a loader handed out the first batch since then; None if that
            was not seen, or if the first forward came before.
        at_forward: the generators at the first forward since then; None without a forward.
        generators: at the mark.
        groups: parameter groups of the optimizers, without parameters.
        state: the entries of state=.
        leaves: the tensors of model and optimizer.
        forwards: how the model was called since the mark before.
        epoch_ends: how an epoch was seen to end since then; None if no loader was seen to train.
        saves: calls that saved tensors since then, with their lines; None if none could be seen.
    """

    step: int
    time_s: float
    inputs: Sequence[str]
    at_batch: Mapping[str, str] | None
    at_forward: Mapping[str, str] | None
    generators: Mapping[str, str]
    groups: Mapping[str, Mapping[str, object]]
    state: Mapping[str, str]
    leaves: Mapping[str, str]
    forwards: Sequence[ForwardKind] = ()
    epoch_ends: Sequence[str] | None = None
    saves: Sequence[str] | None = None


@dataclass(frozen=True)
class AliveObject:
    """An object with state that lives in the trainer and is not in state=.

    Attributes:
        kind: scheduler, ema, scaler, module, optimizer, loader, or object of the script.
        name: of the script's variable; empty if there is none.
    """

    kind: str
    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.type})" if self.name else self.type


@dataclass(frozen=True)
class AliveRecord:
    """The objects that were alive at the second mark of an attempt."""

    objects: Sequence[AliveObject]


RehearsalRecord = AttachRecord | MoveRecord | UntracedRecord | MarkRecord | AliveRecord


@dataclass
class RehearsedAttempt:
    """One process of one rank, with all that it recorded.

    Attributes:
        untraced: why not all moves of generators are known; empty if they are.
    """

    attach: AttachRecord
    moves: list[MoveRecord] = field(default_factory=list)
    untraced: str = ""
    marks: dict[int, MarkRecord] = field(default_factory=dict)
    alive: list[AliveObject] = field(default_factory=list)


def attempts_of(records: Iterable[RehearsalRecord]) -> list[RehearsedAttempt]:
    """Returns the attempts of one rank, oldest first.

    Records before the first attach belong to no attempt, and are left out.
    """
    attempts: list[RehearsedAttempt] = []
    for record in records:
        if isinstance(record, AttachRecord):
            attempts.append(RehearsedAttempt(record))
        elif not attempts:
            continue
        elif isinstance(record, MarkRecord):
            attempts[-1].marks[record.step] = record
        elif isinstance(record, MoveRecord):
            attempts[-1].moves.append(record)
        elif isinstance(record, UntracedRecord):
            attempts[-1].untraced = record.reason
        else:
            attempts[-1].alive += record.objects
    return attempts
