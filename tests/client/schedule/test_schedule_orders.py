"""Tests that reft orders actions like torch.distributed.pipelining, so gaps have equal numbers."""

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from reft.core.pipeline import actions
from reft.core.pipeline.actions import ActionKind

KINDS = {
    "FORWARD": ActionKind.FORWARD,
    "FULL_BACKWARD": ActionKind.BACKWARD,
    "BACKWARD_INPUT": ActionKind.INPUT,
    "BACKWARD_WEIGHT": ActionKind.WEIGHT,
}
SHAPES = [(2, 4), (3, 3), (4, 8), (4, 3), (4, 12), (6, 18), (5, 5)]


def torchs(name, P, M, parts):
    """Returns (kind, virtual stage, microbatch) of each action of each stage, in torch's order."""
    tables = get_schedule_ops(name, P, M, num_stages_per_rank=parts)
    return [
        [
            (KINDS[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in table
            if a and a.computation_type.name in KINDS
        ]
        for table in tables
    ]


@pytest.mark.parametrize(("P", "M"), SHAPES)
def test_orders_are_those_of_torch(P, M):
    interleaved = [actions.interleaved(p, P, M, 2) for p in range(P)]
    zbv = [actions.zbv(p, P, M) for p in range(P)]
    gpipe = [actions.gpipe(p, P, M) for p in range(P)]
    around = [[(a.kind, a.part * P + p, a.microbatch) for a in order] for p, order in enumerate(interleaved)]
    there_and_back = [
        [(a.kind, 2 * P - 1 - p if a.part else p, a.microbatch) for a in order] for p, order in enumerate(zbv)
    ]
    assert around == torchs("Interleaved1F1B", P, M, 2)
    assert there_and_back == torchs("ZBVZeroBubble", P, M, 2)
    assert [[(a.kind, p, a.microbatch) for a in order] for p, order in enumerate(gpipe)] == torchs("GPipe", P, M, None)


@pytest.mark.parametrize(("P", "M"), [shape for shape in SHAPES if shape[0] <= shape[1]])  # torch needs M >= P
def test_1f1b_is_that_of_torch_up_to_its_last_stage(P, M):
    """torch 2.13 lists the last stage's forwards from 1 on. It runs them from 0 on."""
    ours = [[(a.kind, p, a.microbatch) for a in actions.one_f_one_b(p, P, M)] for p in range(P)]
    assert ours[:-1] == torchs("1F1B", P, M, None)[:-1]
