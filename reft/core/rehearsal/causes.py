"""Finds likely causes of a difference, with their remedies.

Each function of the tables knows one cause. It looks at the evidence, and returns the cause or
None. The tables name the most telling cause first. A difference that no function knows has no
cause: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from reft.core.rehearsal.compare import AFTER_ATTACH, DifferenceKind, MarkDifference, RankMarks
from reft.core.rehearsal.records import AliveObject, MoveRecord, RehearsedAttempt
from reft.core.text import counted, more

PLACES_SHOWN = 3
# Settings of a parameter group that schedulers write.
SCHEDULED: Final = frozenset({"lr", "momentum", "betas", "weight_decay", "initial_lr"})
LOADER: Final = 'data = reft.ResumableLoader(DataLoader(...)), and state={"data": data}'


@dataclass(frozen=True)
class LikelyCause:
    """Why two runs differ, and what to change in the script.

    Attributes:
        kind: a short name that stays, for scripts.
    """

    kind: str
    text: str
    remedy: str


@dataclass(frozen=True)
class RestartEvidence:
    """All that is known about a difference after a restart.

    Attributes:
        difference: the first one.
        expected: the marks of the undisturbed run.
        restarted: the attempt of each rank after the kill.
        alive: objects that are not in state=, in any run.
        usual: lines that move a generator in each step, not only at a start.
    """

    difference: MarkDifference
    expected: RankMarks
    restarted: Mapping[int, RehearsedAttempt]
    alive: Sequence[AliveObject]
    usual: Sequence[MoveRecord]

    @property
    def attempt(self) -> RehearsedAttempt:
        """Returns the restarted attempt of the rank that differs."""
        return self.restarted[self.difference.rank]

    @property
    def is_first_step(self) -> bool:
        """Whether the first step after the restart differs already."""
        return self.difference.step == min(self.attempt.marks)

    def has(self, *kinds: DifferenceKind) -> bool:
        """Whether one of these kinds differs in the first step that differs."""
        return bool(self.difference.kinds.intersection(kinds))

    def of_kind(self, kind: str) -> list[AliveObject]:
        """Returns the objects of one kind that are alive and not in state=."""
        return [each for each in self.alive if each.kind == kind]


@dataclass(frozen=True)
class InputRun:
    """Where the inputs of a restarted rank lie in the undisturbed run.

    Attributes:
        offset: tensors from the expected place to the found place; negative: earlier.
        step_inputs: tensors of the step that was expected.
        begins_again: whether the first inputs of the undisturbed run match as well.
    """

    offset: int
    step_inputs: int
    begins_again: bool


def find_inputs(expected: RankMarks, rank: int, attempt: RehearsedAttempt) -> InputRun | None:
    """Finds the inputs of a restarted rank among those of the undisturbed run.

    Inputs are matched tensor by tensor, so that a step may have several micro-batches. The longest
    match counts; of equally long ones the nearest.

    Returns:
        None if the inputs lie where they should, or nowhere.
    """
    marks = expected[rank]
    recorded: list[str] = []
    begins: dict[int, int] = {}
    for step in sorted(marks):
        begins[step] = len(recorded)
        recorded += marks[step].inputs
    first = min(attempt.marks)
    actual = [digest for step in sorted(attempt.marks) for digest in attempt.marks[step].inputs]
    if first not in begins or not actual:
        return None
    expected_at = begins[first]
    best, length = expected_at, _match(recorded, expected_at, actual)
    for place in sorted(range(len(recorded)), key=lambda place: abs(place - expected_at)):
        matched = _match(recorded, place, actual)
        if matched > length:
            best, length = place, matched
    if best == expected_at:
        return None
    return InputRun(best - expected_at, len(marks[first].inputs), _match(recorded, 0, actual) == length)


def _match(recorded: Sequence[str], place: int, actual: Sequence[str]) -> int:
    """Returns how many inputs from `place` on are equal."""
    length = 0
    while length < len(actual) and place + length < len(recorded) and recorded[place + length] == actual[length]:
        length += 1
    return length


def nothing_restored(restarted: Mapping[int, RehearsedAttempt]) -> LikelyCause | None:
    """Returns the cause if a rank restored nothing: it explains all else."""
    fresh = [rank for rank, attempt in restarted.items() if attempt.attach.restored_from is None]
    if not fresh:
        return None
    return LikelyCause(
        "nothing-restored",
        f"attach restored nothing: rank {fresh[0]} began at step {restarted[fresh[0]].attach.step} again.",
        "call reft.attach on all ranks, before the first step; the log of run B says why nothing was found",
    )


def _other_inputs(evidence: RestartEvidence) -> LikelyCause | None:
    """Finds a lost batch, a loader that began again, skipped and repeated batches."""
    if not evidence.is_first_step or not evidence.has(DifferenceKind.INPUTS):
        return None
    run = find_inputs(evidence.expected, evidence.difference.rank, evidence.attempt)
    if run is None:
        return None
    step = evidence.difference.step
    is_next = 0 < run.offset <= run.step_inputs
    if run.begins_again and (not is_next or evidence.of_kind("loader")):
        return LikelyCause(
            "loader-began-again",
            f"step {step} got the inputs of the first step again: the loader has no position.",
            LOADER,
        )
    if run.offset < 0:
        return LikelyCause(
            "repeated-batches",
            f"step {step} got inputs of an earlier step again: the position of the loader is older than the state.",
            f"{LOADER}; or load the position from the same state=",
        )
    if is_next:
        return LikelyCause(
            "prefetched-batch",
            f"step {step} got the inputs of the batch after its own: a batch that was fetched before the mark is lost.",
            "fetch the batch inside the loop, after the mark; or hold the fetched batch: "
            'loop = reft.Values(batch=None), and state={"loop": loop}',
        )
    # The step that was expected may have called no forward.
    steps, rest = divmod(run.offset, run.step_inputs) if run.step_inputs else (0, run.offset)
    how_many = counted(steps, "step") if not rest else counted(run.offset, "input tensor")
    return LikelyCause(
        "skipped-batches",
        f"step {step} got inputs from {how_many} later: the rest of an epoch, or a part of one, was skipped.",
        f"go on with the same batch of the same epoch: {LOADER}, for epoch in data.epochs(n)",
    )


def _loader_without_position(evidence: RestartEvidence) -> LikelyCause | None:
    loaders = evidence.of_kind("loader")
    if not loaders or not evidence.has(DifferenceKind.INPUTS):
        return None
    return LikelyCause(
        "loader-without-position",
        f"the loader {loaders[0]}{more(len(loaders) - 1, 'loader')} is not in state=: its position is not restored.",
        LOADER,
    )


def _moments(evidence: RestartEvidence, generator: str) -> str:
    """Returns between which moments of the first step a generator began to differ, in words."""
    marks, attempt = evidence.expected[evidence.difference.rank], evidence.attempt
    base, expected = marks.get(attempt.attach.step), marks.get(evidence.difference.step)
    actual = attempt.marks[evidence.difference.step]

    def differs(before: Mapping[str, str] | None, after: Mapping[str, str] | None) -> bool:
        return before is not None and after is not None and before.get(generator) != after.get(generator)

    is_wrong_at_attach = evidence.difference.kind is DifferenceKind.ATTACH_GENERATORS
    if is_wrong_at_attach or base is None or expected is None or actual.at_batch is None:
        return "attach and the first step"
    if expected.at_batch is not None:
        is_before_batch = differs(expected.at_batch, actual.at_batch)
    elif differs(base.generators, expected.at_forward):
        return "attach and the first step"  # a usual step moves it, too: at which moment is not known
    else:
        is_before_batch = differs(attempt.attach.generators, actual.at_batch)
    if is_before_batch:
        return "attach and the first batch"
    is_after_batch = differs(expected.at_forward, actual.at_forward)
    return "the first batch and the first forward" if is_after_batch else "attach and the first step"


def _moved_generator(evidence: RestartEvidence) -> LikelyCause | None:
    """Finds the lines that moved a generator after it was restored."""
    if not evidence.is_first_step:
        return None
    usual = {(move.file, move.line) for move in evidence.usual}
    moves = [move for move in evidence.attempt.moves if not move.is_usual]
    if evidence.difference.kind in (DifferenceKind.ATTACH_GENERATORS, *AFTER_ATTACH):
        moves = [move for move in moves if move.generator in evidence.difference.names]
    elif not evidence.has(DifferenceKind.INPUTS):
        return None
    moves = [move for move in moves if (move.file, move.line) not in usual] or moves
    if not moves:
        return None
    places = list(dict.fromkeys(f"`{move.code.strip()}` at {move.file}:{move.line}" for move in moves))
    return LikelyCause(
        "moved-generator",
        f"the global {moves[0].generator} generator moved between {_moments(evidence, moves[0].generator)}: "
        f"{', '.join(places[:PLACES_SHOWN])}{more(len(places[PLACES_SHOWN:]), 'line')}.",
        "draw it before attach, or give it a generator of its own; a batch drawn there belongs inside the loop. "
        f"For a DataLoader: {LOADER}",
    )


def _new_inputs(evidence: RestartEvidence) -> LikelyCause | None:
    """Finds inputs that no step of the undisturbed run had, where nothing else explains them."""
    if not evidence.is_first_step or not evidence.has(DifferenceKind.INPUTS):
        return None
    step, rank = evidence.difference.step, evidence.difference.rank
    known = {digest for recorded in evidence.expected[rank].values() for digest in recorded.inputs}
    if not known.isdisjoint(evidence.attempt.marks[step].inputs):
        return None
    if _loader_without_position(evidence) or _moved_generator(evidence):
        return None
    return LikelyCause(
        "new-inputs",
        f"step {step} got inputs that no step of the undisturbed run had: their order, or the inputs themselves, were "
        "drawn anew at the restart.",
        f"{LOADER}; for draws of your own, a torch.Generator in state=",
    )


def _other_settings(evidence: RestartEvidence) -> LikelyCause | None:
    """Finds a forgotten scheduler by what schedulers write into parameter groups."""
    if not evidence.has(DifferenceKind.GROUPS):
        return None
    schedulers = evidence.of_kind("scheduler")
    if schedulers:
        return _forgotten(schedulers)
    is_scheduled = evidence.difference.kind is DifferenceKind.GROUPS and any(
        name.rpartition(".")[2] in SCHEDULED for name in evidence.difference.names
    )
    if not is_scheduled:
        return None
    return LikelyCause(
        "other-settings",
        f"{evidence.difference.names[0]} differs: a scheduler, or a count from which the script computes it, "
        "was not restored.",
        'state={"lr": scheduler}; or compute the setting from session.step',
    )


def _regrouped_sums(evidence: RestartEvidence) -> LikelyCause | None:
    is_regrouped = evidence.attempt.attach.regroups and evidence.is_first_step
    if not is_regrouped or evidence.difference.kinds != {DifferenceKind.LEAVES}:
        return None
    return LikelyCause(
        "regrouped-sums",
        "the inputs, generators and settings are equal: only the order of additions differs. DDP regroups its "
        "gradient buckets after the first backward pass of a process. The state was restored bit for bit.",
        "nothing, if the last bits may differ; else DistributedDataParallel(..., find_unused_parameters=True)",
    )


def forgotten_objects(alive: Sequence[AliveObject]) -> list[LikelyCause]:
    """Returns a cause for each kind of object whose state a restart certainly loses."""
    by_kind = {kind: [each for each in alive if each.kind == kind] for kind in FORGOTTEN}
    return [_forgotten(objects) for objects in by_kind.values() if objects]


# kind of object → words for it, and its usual name in state=
FORGOTTEN: Final[Mapping[str, tuple[str, str]]] = {
    "scheduler": ("the scheduler", "lr"),
    "ema": ("the averaged model", "ema"),
    "scaler": ("the gradient scaler", "scaler"),
    "module": ("the module, which changes in training,", "module"),
    "optimizer": ("the optimizer", "optimizer"),
}
# Whether the state of these matters is not known.
SUSPECT: Final[Mapping[str, tuple[str, str]]] = {
    "loader": ("the loader", "data"),
    "object": ("the object", "object"),
}


def _forgotten(objects: Sequence[AliveObject]) -> LikelyCause:
    kind = objects[0].kind
    words, key = {**FORGOTTEN, **SUSPECT}[kind]
    others = more(len(objects) - 1, "object")
    return LikelyCause(
        f"forgotten-{kind}",
        f"{words} {objects[0]}{others} is alive and not in state=: a restart makes it anew.",
        f'state={{"{key}": {objects[0].name or "..."}}} in reft.attach',
    )


def _own_objects(evidence: RestartEvidence) -> LikelyCause | None:
    objects = evidence.of_kind("object")
    return _forgotten(objects) if objects else None


RestartRule = Callable[[RestartEvidence], LikelyCause | None]
AFTER_RESTART: Final[Sequence[RestartRule]] = (
    _other_inputs,
    _loader_without_position,
    _moved_generator,
    _new_inputs,
    _other_settings,
    _regrouped_sums,
    _own_objects,
)


def causes_after(evidence: RestartEvidence) -> list[LikelyCause]:
    """Returns the likely causes of a difference after the restart, the most telling one first."""
    causes = [cause for rule in AFTER_RESTART if (cause := rule(evidence))]
    seen = {cause.kind for cause in causes}
    return causes + [cause for cause in forgotten_objects(evidence.alive) if cause.kind not in seen]


def _unseeded_generators(names: Sequence[str], when: str) -> LikelyCause:
    return LikelyCause(
        "unseeded-generator",
        f"{', '.join(names)}: not seeded, and {when}.",
        "torch.manual_seed(0), random.seed(0), numpy.random.seed(0) at the start of the script",
    )


def causes_before(difference: MarkDifference, unseeded: Mapping[str, bool], other_hash: bool) -> list[LikelyCause]:
    """Returns the likely causes of a difference before the kill. Recovery has no part in it.

    Args:
        difference: the first one.
        unseeded: generators that differed at the end of attach in two fresh starts → whether
            training draws from them.
        other_hash: whether Python's hash has another seed in each run.
    """
    causes = []
    if drawn := [name for name, is_drawn in unseeded.items() if is_drawn]:
        causes.append(_unseeded_generators(drawn, "training draws from it"))
    if difference.kind is DifferenceKind.INPUTS and not drawn:
        causes.append(
            LikelyCause(
                "unseeded-data",
                "the data differ though the generators of the trainer are equal: workers of a loader or transforms "
                "draw from generators that nothing seeds, or data arrive in another order.",
                "reft.ResumableLoader(loader, seed=0) seeds the workers; seed generators that the dataset makes",
            )
        )
    if difference.kind in (DifferenceKind.INPUTS, DifferenceKind.LEAVES, DifferenceKind.STATE) and other_hash:
        causes.append(
            LikelyCause(
                "hash-order",
                "Python orders sets of texts anew in each process.",
                "sort what comes from a set; PYTHONHASHSEED=0 before the command shows whether this is the cause",
            )
        )
    if difference.kinds <= {DifferenceKind.LEAVES, DifferenceKind.MARK_GENERATORS}:
        causes.append(
            LikelyCause(
                "other-arithmetic",
                "the inputs are equal and the tensors are not: an operation adds in another order each time, or "
                "the first weights are not seeded.",
                "torch.use_deterministic_algorithms(True)",
            )
        )
    if idle := [name for name, is_drawn in unseeded.items() if not is_drawn]:
        causes.append(_unseeded_generators(idle, "a draw before attach would explain this"))
    return causes
