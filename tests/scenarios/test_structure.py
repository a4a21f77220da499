"""Groups and parameters that join or leave in mid-run, and a restart that builds the first ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from reft.client.state.structure import StructureFacts, changed_beyond_repair, missing_groups
from reft.errors import LayoutChanged
from tests.scenarios.test_state_kinds import state_bytes

UNFREEZES_AT = 3
STEPS = 7


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[:2].requires_grad_(False)
    model[2].register_buffer("history", torch.zeros(2))
    return model, torch.optim.AdamW(model[2].parameters(), lr=1e-2)


def iteration(model, optimizer, step: int, adds: bool) -> None:
    """One step; layers are unfrozen at steps 3 and 5, as gradual unfreezing does."""
    for layer, at in ((model[1], UNFREEZES_AT), (model[0], UNFREEZES_AT + 2)):
        if step == at:
            layer.requires_grad_(True)
            if adds:
                optimizer.add_param_group({"params": [*layer.parameters()], "lr": 1e-3 * at})
    optimizer.zero_grad()
    model(torch.ones(4, 8) * (step + 1)).square().sum().backward()
    optimizer.step()


def everything(model, optimizer) -> tuple:
    """Returns all bytes, the settings of all groups, and which parameters get gradients."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    parameters = [[id(p) for p in model.parameters()].index(id(p)) for g in optimizer.param_groups for p in g["params"]]
    return state_bytes(model, optimizer), groups, parameters, [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("killed_at", range(2, STEPS))
def test_an_unfrozen_group_comes_back_bit_for_bit(attach, killed_at, capsys):
    model, optimizer = build()
    for step in range(STEPS):
        iteration(model, optimizer, step, adds=True)
    undisturbed = everything(model, optimizer)
    model, optimizer = build()
    session = attach(model, optimizer)
    for step in session.steps(killed_at):
        iteration(model, optimizer, step, adds=True)
    assert session.seal(timeout=60).step == killed_at
    at_kill = everything(model, optimizer)
    capsys.readouterr()
    other, another = build()
    session = attach(other, another)
    assert session.step == killed_at and everything(other, another) == at_kill
    assert ("group added to optimizer.0" in capsys.readouterr().err) == (UNFREEZES_AT < killed_at <= UNFREEZES_AT + 2)
    for step in session.steps(STEPS):
        iteration(other, another, step, adds=True)
    assert everything(other, another) == undisturbed


def test_parameters_that_were_unfrozen_get_gradients_again(attach):
    """All parameters are in the optimizer from the start, as many scripts have it."""

    def make():
        model, _ = build()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = make()
    session = attach(model, optimizer)
    for step in session.steps(UNFREEZES_AT + 1):
        iteration(model, optimizer, step, adds=False)
    assert session.seal(timeout=60).step == UNFREEZES_AT + 1
    other, another = make()
    assert attach(other, another).step == UNFREEZES_AT + 1
    assert everything(other, another) == everything(model, optimizer)


def prune_a_layer(model, optimizer):
    prune.l1_unstructured(model[2], "weight", 0.5)
    return "model.0.2.weight_orig"


def add_foreign_parameters(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return "optimizer.0.group1.param0"


def freeze_a_layer_by_another_list(model, optimizer):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]
    return "the groups of optimizer.0 got other parameters"


def give_a_group_a_frozen_layer(model, optimizer):
    optimizer.param_groups[0]["params"] += [*model[1].requires_grad_(True).parameters()]
    return "the groups of optimizer.0 got other parameters"


def grow_a_layer(model, optimizer):
    """As a vocabulary that is resized: the same name, another shape."""
    layer, grown = model[2], nn.Linear(8, 3)
    optimizer.param_groups[0]["params"] = [*grown.parameters()]
    optimizer.state.clear()
    layer.weight, layer.bias = grown.weight, grown.bias
    return "2 parameters got another shape, dtype or order in memory during this run, e.g. model.0.2.bias"


def cast_in_place(model, optimizer):
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    for moment in (each for state in optimizer.state.values() for each in state.values() if each.dim()):
        moment.data = moment.data.double()
    model.register_forward_pre_hook(lambda _, inputs: tuple(each.double() for each in inputs))
    return "6 parameters got another shape, dtype or order in memory"


def lay_a_parameter_in_another_order(model, optimizer):
    """As `model.to(memory_format=torch.channels_last)` after attach does."""
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    return "1 parameter got another shape, dtype or order in memory during this run, e.g. model.0.2.weight"


def register_a_buffer_for_checkpoints(model, optimizer):
    model[2].register_buffer("mask", torch.ones(2))
    return "1 buffer joined during this run, e.g. model.0.2.mask"


def resize_a_buffer_of_checkpoints(model, optimizer):
    model[2].history = torch.ones(3)
    return "1 buffer got another shape, dtype or order in memory during this run, e.g. model.0.2.history"


def take_a_buffer(model, optimizer):
    model[2].history = None
    return "1 buffer left during this run, e.g. model.0.2.history"


def register_a_buffer_in_a_new_module(model, optimizer):
    model[2].norm = nn.Module()
    model[2].norm.register_buffer("mask", torch.ones(2), persistent=False)
    return "1 buffer joined during this run, e.g. model.0.2.norm.mask"


CHANGES = [prune_a_layer, add_foreign_parameters, freeze_a_layer_by_another_list, give_a_group_a_frozen_layer,
           grow_a_layer, cast_in_place, lay_a_parameter_in_another_order,
           register_a_buffer_for_checkpoints, resize_a_buffer_of_checkpoints, take_a_buffer,
           register_a_buffer_in_a_new_module]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_that_a_restart_cannot_repeat_is_said_when_it_happens(attach, change, caplog):
    """No later step is held, so the last step before the change stays, and comes back."""
    model, optimizer = build()
    session = attach(model, optimizer)
    for step in session.steps(2):
        iteration(model, optimizer, step, adds=True)
    assert session.seal(timeout=60).step == 2
    before = state_bytes(model, optimizer)
    name = change(model, optimizer)
    for step in session.steps(5):
        iteration(model, optimizer, step, adds=False)
    assert not session.seal(timeout=10) and session.stats()["whole_step"] == 2
    assert name in caplog.text and "A restarted script builds the model as at the start" in caplog.text
    other, another = build()
    assert attach(other, another).step == 2 and state_bytes(other, another) == before


def test_a_buffer_that_a_forward_registers_comes_back(attach):
    """Such as a mask made at the first batch. A restart must not need a forward before attach."""

    def forward(model):
        if not hasattr(model[1], "mask"):
            model[1].register_buffer("mask", torch.randn(8, 4).t(), persistent=False)

    model, optimizer = build()
    session = attach(model, optimizer)
    for step in session.steps(3):
        iteration(model, optimizer, step, adds=False)
        forward(model)
    assert session.seal(timeout=60).step == 3
    other, another = build()
    session = attach(other, another)
    assert session.step == 3 and everything(other, another) == everything(model, optimizer)
    forward(other)
    assert torch.equal(other[1].mask, model[1].mask) and "1.mask" not in other.state_dict()
    for step in session.steps(5):
        iteration(other, another, step, adds=False)
    assert session.seal(timeout=60).step == 5, "a restart could bring this mask back, too"


def test_groups_that_the_script_has_no_longer_are_refused(attach):
    model, optimizer = build()
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    session = attach(model, optimizer)
    for step in session.steps(2):
        iteration(model, optimizer, step, adds=False)
    assert session.seal(timeout=60)
    other, _ = build()
    with pytest.raises(LayoutChanged):
        attach(other, torch.optim.AdamW(other[1].parameters(), lr=1e-2))


@pytest.mark.parametrize(
    ("saved", "missing"),
    [
        ([["a"], ["b", "c"]], [["b", "c"]]),
        ([["a"]], []),
        ([["a"], ["b"], ["c"]], [["b"], ["c"]]),
        ([["b"], ["c"]], []),  # the first group is another one
        ([["a"], ["x"]], []),  # a parameter that no model has
        ([["a"], ["a"]], []),  # in two groups
        ([], []),
    ],
)
def test_only_groups_of_known_parameters_behind_the_own_ones_are_added(saved, missing):
    groups = [{"params": names} for names in saved]
    assert [group["params"] for group in missing_groups([["a"]], groups, {"a", "b", "c"})] == missing


def facts(parameters: str, *groups: str) -> StructureFacts:
    """Parameters of one letter each, and those in the groups of an optimizer."""
    return StructureFacts(dict.fromkeys(parameters, "float32 [2]"), {"optimizer.0": [[*group] for group in groups]})


@pytest.mark.parametrize(
    ("groups", "can"),
    [
        (("ab", "c"), True),
        (("ab", "c", "d"), True),  # a group that was added
        (("ab",), False),
        (("a", "c"), False),
        (("abd", "c"), False),
        (("ba", "c"), False),
        (("c", "ab"), False),
        (("ab", "c", "a"), False),  # in two groups
    ],
)
def test_other_parameters_in_the_groups_that_the_script_builds_are_beyond_repair(groups, can):
    text = changed_beyond_repair(facts("abcd", "ab", "c"), facts("abcd", *groups))
    assert text == "" if can else "the groups of optimizer.0 got other parameters during this run" in text


def test_what_joined_and_left_is_named():
    assert changed_beyond_repair(facts("a"), facts("a")) == ""
    text = changed_beyond_repair(facts("ab"), facts("bc"))
    assert "1 parameter joined during this run, e.g. c, and 1 parameter left during this run, e.g. a." in text
