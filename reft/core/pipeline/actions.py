"""Simulates a step of each pipeline stage, for schedules without a closed form.

    1F1B, 3 stages, 4 microbatches             order of stage 0: F0 F1 F2 B0 F3 B1 B2 B3
    stage 0   F F F . . . . B B F B B . B B . B B
    stage 1   . F F . . B B F B B F B B . B B . .        (backward takes twice as long as forward)
    stage 2   . . F B B F B B F B B F B B . . . .

An action waits until its own stage is free and its input is there. A forward needs the forward of
the previous virtual stage. A backward needs the backward of the next one. The weights' part of a
backward needs its own first part. Links take no time here. A measured run is more exact than any
model of links (core/pipeline/profile.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple

from reft.errors import ConfigError


class ActionKind(Enum):
    """The kinds of work of one microbatch; zero-bubble schedules split the backward pass in two."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # backward, first part: the gradient of the input
    WEIGHT = "W"  # backward, second part: the gradients of the weights, any time after INPUT


class Action(NamedTuple):
    """One piece of a stage's work.

    Attributes:
        kind: kind of work.
        microbatch: number of the microbatch.
        part: number of the stage's part of the model (virtual stage, model chunk), from 0 in
            forward order.
    """

    kind: ActionKind
    microbatch: int
    part: int = 0


class Times(NamedTuple):
    """The duration of each kind of action, the same for all stages.

    All have one unit, which may be any.

    Attributes:
        forward: one forward pass of one microbatch through one part.
        backward: the whole backward pass of it.
        weight: the part of `backward` that makes the weights' gradients; used only where a schedule
            splits it off.
    """

    forward: float
    backward: float
    weight: float = 0.0

    @property
    def input(self) -> float:
        """Returns the part of `backward` that makes the input's gradient."""
        return self.backward - self.weight

    def of(self, kind: ActionKind) -> float:
        """Returns the duration of an action of this kind."""
        if kind is ActionKind.FORWARD:
            return self.forward
        if kind is ActionKind.BACKWARD:
            return self.backward
        return self.weight if kind is ActionKind.WEIGHT else self.input


class ActionSpan(NamedTuple):
    """An action with its start and end, counted from the step's start.

    Their unit is that of the times.
    """

    action: Action
    start: float
    end: float


def gpipe(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """Returns all forwards, then all backwards, both from microbatch 0 on."""
    forwards = [Action(ActionKind.FORWARD, m) for m in range(microbatches)]
    return (*forwards, *(Action(ActionKind.BACKWARD, m) for m in range(microbatches)))


def one_f_one_b(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """Returns one forward for each stage behind, then forwards and backwards in turn."""
    ahead = min(stages - 1 - stage, microbatches)
    forwards = [Action(ActionKind.FORWARD, m) for m in range(microbatches)]
    backwards = [Action(ActionKind.BACKWARD, m) for m in range(microbatches)]
    return _alternating(forwards, backwards, ahead)


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """Returns `ahead` forwards, then forward and backward in turn, then the remaining backwards."""
    pairs = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return (*forwards[:ahead], *pairs, *backwards[len(forwards) - ahead :])


def interleaved(stage: int, stages: int, microbatches: int, parts: int) -> tuple[Action, ...]:
    """Returns 1F1B with several parts of the model a stage.

    The parts take turns after about one microbatch for each stage.

    Raises:
        ConfigError: the microbatches can't be split into equal rounds with at least one microbatch
            for each stage.
    """
    rounds = max(1, microbatches // stages)
    if microbatches % rounds:
        raise ConfigError(
            f"{microbatches} microbatches are no multiple of {rounds} rounds of {stages} stages.",
            f"take a multiple of {stages} microbatches",
        )
    size = microbatches // rounds
    starts = range(0, microbatches, size)
    forwards = [Action(ActionKind.FORWARD, i + m, part) for i in starts for part in range(parts) for m in range(size)]
    backwards = [Action(ActionKind.BACKWARD, a.microbatch, parts - 1 - a.part) for a in forwards]
    ahead = min((parts - 1) * size + 2 * (stages - 1 - stage), len(forwards))
    return _alternating(forwards, backwards, ahead)


def zb_h1(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """Returns 1F1B with the backward split in two.

    Stage p delays the weights' gradients by p microbatches. So gradients of inputs go back sooner,
    and the end of the step is filled.
    """
    ahead = min(stages - 1 - stage, microbatches)
    order = [Action(ActionKind.FORWARD, m) for m in range(ahead)]
    put_off = 0
    for m in range(microbatches):
        if ahead + m < microbatches:
            order.append(Action(ActionKind.FORWARD, ahead + m))
        order.append(Action(ActionKind.INPUT, m))
        if m >= stage or ahead + m >= microbatches:
            order.append(Action(ActionKind.WEIGHT, put_off))
            put_off += 1
    return (*order, *(Action(ActionKind.WEIGHT, m) for m in range(put_off, microbatches)))


def zbv(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """Returns zero bubble with two parts a stage: stage 0 has the first part and the last.

    The second part lies on the way back. The schedule is made for at least 2·stages - 1
    microbatches. With fewer, the actions of the missing microbatches are left out.
    """
    behind, count = stages - stage, max(microbatches, 2 * stages - 1)
    f0, f1, i0, i1, w0, w1 = (
        iter([Action(kind, m, part) for m in range(count)])
        for kind in (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT)
        for part in (0, 1)
    )
    order = [next(f0) for _ in range(2 * behind - 1)]
    for _ in range(stage):
        order += [next(f1), next(f0)]
    for _ in range(behind):
        order += [next(f1), next(i1), next(w1)]
    for _ in range(count - stages):
        order += [*islice(f0, 1), next(i0), next(w0), next(f1), next(i1), next(w1)]
    for _ in range(stage):
        order += [next(i0), next(i1)]
    for _ in range(behind):
        order += [next(i0), next(w0)]
    return tuple(action for action in (*order, *w1, *w0) if action.microbatch < microbatches)


def simulate(orders: Sequence[Sequence[Action]], times: Times, is_v_shaped: bool = False) -> list[list[ActionSpan]]:
    """Returns when each stage does each action: once its stage is free and its input is there.

    Args:
        orders: for each stage, its actions in one step, in order.
        times: duration of each kind of action.
        is_v_shaped: the second half of the parts runs backwards through the stages (two parts a
            stage). Otherwise the last stage's part 0 is followed by the first stage's part 1.

    Raises:
        ConfigError: the orders wait for one another, so that no run can follow them.
    """
    stages, parts = len(orders), 1 + max((action.part for order in orders for action in order), default=0)
    last = stages * parts - 1
    ended: dict[tuple[ActionKind, int, int], float] = {}  # by kind, virtual stage and microbatch
    spans: list[list[ActionSpan]] = [[] for _ in orders]
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            done = spans[stage]
            while len(done) < len(order):
                action = order[len(done)]
                virtual = action.part * stages + stage
                if is_v_shaped and action.part:
                    virtual = last - stage
                ready = _input_ready_at(ended, action, virtual, last)
                if ready is None:
                    break
                start = max(ready, done[-1].end if done else 0)
                end = start + times.of(action.kind)
                done.append(ActionSpan(action, start, end))
                # An action that waits for the input's gradient needs no gradients of weights.
                kind = ActionKind.INPUT if action.kind is ActionKind.BACKWARD else action.kind
                ended[kind, virtual, action.microbatch] = end
                progress = True
    for stage, order in enumerate(orders):
        if len(spans[stage]) < len(order):
            stuck = order[len(spans[stage])]
            raise ConfigError(
                f"the orders wait for one another: stage {stage} never gets to {stuck.kind.value}{stuck.microbatch}."
            )
    return spans


def _input_ready_at(
    ended: dict[tuple[ActionKind, int, int], float], action: Action, virtual: int, last: int
) -> float | None:
    """Returns when the action's input is there; None if it has not been made yet."""
    kind, microbatch = action.kind, action.microbatch
    if kind is ActionKind.FORWARD:
        return 0 if virtual == 0 else ended.get((ActionKind.FORWARD, virtual - 1, microbatch))
    if kind is ActionKind.WEIGHT:
        return ended.get((ActionKind.INPUT, virtual, microbatch))
    if virtual == last:
        return ended.get((ActionKind.FORWARD, virtual, microbatch))
    return ended.get((ActionKind.INPUT, virtual + 1, microbatch))
