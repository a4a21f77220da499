"""Models whose names exceed a capsule attach, and come back: names travel once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reft.wire import capsule_format
from reft.wire.slot_format import CAPSULE_MAX
from tests.scenarios.test_state_kinds import state_bytes
from tests.support import many_parameters
from tests.support.trainers import Spec, Trainers

PARAMETERS = 6_000
LONG = "layers_of_experts_" * 10


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ParameterDict({f"{LONG}{i}": nn.Parameter(torch.ones(1)) for i in range(PARAMETERS)})
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "lr": 0.5}, {"params": parameters[1::2], "lr": 0.25}]
    return model, torch.optim.SGD(groups)


def test_names_that_exceed_a_capsule_travel_in_the_manifest(attach):
    """Their optimizer's groups take turns, so no two adjacent parameters are of one group."""
    model, optimizer = make()
    assert sum(map(len, model)) > CAPSULE_MAX
    session = attach(model, optimizer)
    for step in session.steps(2):
        for i, parameter in enumerate(model.values()):
            parameter.grad = torch.full((1,), float(i + step))
        optimizer.step()
    assert session.seal(timeout=60).step == 2
    optimizer.param_groups[0]["lr"] = 0.125
    snapshots = session._window.snapshots
    tree = snapshots.host.capture(2)
    data = capsule_format.encode(tree, snapshots.facts.names)
    assert len(data) < CAPSULE_MAX // 3 and LONG.encode() not in data
    other, another = make()
    assert attach(other, another).step == 2
    assert state_bytes(other, another) == state_bytes(model, optimizer)
    assert [group["lr"] for group in another.param_groups] == [0.5, 0.25]


class ManyTrainers(Trainers):
    """One rank with thousands of parameters; each of its parts may take minutes on busy cores."""

    target = staticmethod(many_parameters.train)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("parameters", "optimizer"), [(20_000, "AdamW"), (75_000, "SGD")])
def test_thousands_of_parameters_come_back_after_a_kill(daemon, parameters, optimizer):
    options = {"parameters": parameters, "optimizer": optimizer}
    killed = ManyTrainers(Spec(daemon.address, steps=5, options={**options, "die_at": 3}))
    assert killed.wait(1200) == [-9], killed.errors()
    after = ManyTrainers(Spec(daemon.address, steps=5, options=options))
    assert after.wait(1200) == [0], after.errors()
    plain = ManyTrainers(Spec(daemon.address, steps=5, options=options, environment={"REFT_MODE": "off"}))
    assert plain.wait(600) == [0], plain.errors()
    (result,), (undisturbed,) = after.results(), plain.results()
    assert result["began"] == 3 and result["digest"] == undisturbed["digest"]
