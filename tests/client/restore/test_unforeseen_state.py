"""Which leaves new ranks want of optimizer state that attach did not foresee."""

from __future__ import annotations

from dataclasses import replace

import torch

from reft.client.restore.unforeseen_state import with_unforeseen_state
from reft.client.state.extract.dtensor import Region
from reft.client.state.extract.state_forms import EntryWrapper, StateForm
from reft.client.state.tensors import leaf_of


def leaf(name, shape, whole=None, offset=None, form=""):
    box = None if whole is None else Region(whole, offset)
    return leaf_of(name, torch.empty(shape, device="meta"), False, box, form)


# Four rows of six on each of two old ranks; two new ranks have eight and none.
HELD = leaf("optimizer.0.exp_avg.model.0.w", (4, 6), (8, 6), (4, 0))
NEW = ((leaf("model.0.w", (8, 6), (8, 6), (0, 0)),), (leaf("model.0.w", (0, 6), (8, 6), (8, 0)),))


def test_state_as_large_as_its_parameter_takes_the_pieces_of_the_parameter():
    first, second = with_unforeseen_state(NEW, [HELD])
    assert first[1] == leaf(HELD.name, (8, 6), (8, 6), (0, 0))
    assert second[1] == leaf(HELD.name, (0, 6), (8, 6), (8, 0))


def test_a_whole_statistic_goes_to_each_rank_that_has_the_parameter():
    form = StateForm((EntryWrapper("1"),)).text()
    count = leaf("optimizer.0.matrices.model.0.w/1", (3, 3), form=form)
    other = (leaf("model.0.v", (2,)),)
    first, second = with_unforeseen_state((NEW[0], other), [count])
    assert first[1:] == (count,) and first[1].form == form and second == other


def test_foreseen_state_and_parameters_stay_as_they_are():
    foreseen = ((*NEW[0], HELD), NEW[1])
    assert with_unforeseen_state(foreseen, [HELD, leaf("model.0.gone", (2,))]) == list(foreseen)


def test_state_that_depends_on_the_old_pieces_is_not_wanted_so_the_restore_names_it():
    statistic = leaf("optimizer.0.row.model.0.w", (4,), (8,), (4,))
    tagged = leaf("optimizer.0.scale.model.0.w[of 0:4,0:6]", (3,), form=StateForm(tag="[of 0:4,0:6]").text())
    placed = replace(HELD, form='[[["placed",["S0"],[8,6],[6,1]]],"",null]')
    for held in (statistic, tagged, placed):
        assert with_unforeseen_state(NEW, [held]) == list(NEW)


def test_a_tensor_that_training_put_into_a_group_goes_to_each_rank():
    rate, members = leaf("optimizer.0.group1.lr", ()), leaf("optimizer.0.0.group0.lr", ())
    foreign = leaf("optimizer.0.group1.param0", (3,))
    first, second = with_unforeseen_state(NEW, [rate, members, foreign])
    assert first == (*NEW[0], members, rate) and second == (*NEW[1], members, rate)
