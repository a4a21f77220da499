"""State that is made, replaced, shared or shaped in unusual ways: stored exactly, or refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from reft.client.attach.arguments import AttachArguments
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore.host_state_resharding import HostStateResharding
from reft.client.restore.materialize import live_index
from reft.client.state.extract.optimizers import OptimizerExtractor
from reft.client.state.host_state import HostState
from reft.client.state.parameters import NamedParameter
from reft.client.state.serialization import from_plain, to_plain
from reft.client.state.tensors import check_supported
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout.layout import Leaf
from reft.errors import ConfigError, UnsupportedState
from reft.wire.capsule_format import NameTable
from tests.scenarios.test_state_kinds import round_trip, state_bytes, step_once, train


def scalar(key):
    return Leaf(f"optimizer.0.{key}.model.0.w", "float32", (), (), 4, False, (), ())


@pytest.mark.parametrize(
    ("flags", "step_device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")], ids=str
)
def test_a_restored_step_counter_is_made_on_the_device_that_the_kernel_reads(flags, step_device):
    parameter = nn.Parameter(torch.empty(4, 4, device="meta"))  # in the place of a CUDA device
    optimizer = torch.optim.ASGD([parameter])
    optimizer.param_groups[0].update(flags)
    names = {id(parameter): NamedParameter("model.0.w", parameter, parameter, None)}
    leaves = [scalar("step"), scalar("eta"), scalar("mu")]
    OptimizerExtractor().make("optimizer.0", optimizer, leaves, names, HugePageBuffer(0))
    made = optimizer.state[parameter]
    assert {key: each.device.type for key, each in made.items()} == {"step": step_device, "eta": "meta", "mu": "meta"}


class Twins(nn.Module):
    """Two networks, a buffer without a value, and a buffer to be resized."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("later", None)
        self.register_buffer("grows", torch.zeros(8))


def replace_a_submodule(model, optimizer):
    model.two = nn.Linear(4, 4)


def give_a_buffer_its_value(model, optimizer):
    model.later = torch.ones(3)


def resize_in_place(model, optimizer):
    model.grows.resize_(4)


def replace_a_parameters_state(model, optimizer):
    parameter = model.one.weight
    optimizer.state[parameter] = {key: each.clone() for key, each in optimizer.state[parameter].items()}


def replace_a_parameter_in_its_group(model, optimizer):
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(4, 4))


def replace_a_group(model, optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0]}


def put_another_buffer_over_the_same_memory(model, optimizer):
    model.grows = model.grows.view(torch.int32)


def move_a_buffer(model, optimizer):
    model.two.register_buffer("grows", model.grows)
    del model.grows


def add_to_the_last_state(model, optimizer):
    optimizer.state[model.two.bias]["more"] = torch.zeros(1)


def take_from_the_last_state(model, optimizer):
    del optimizer.state[model.two.bias]["exp_avg_sq"]


def transpose_over_the_same_memory(model, optimizer):
    model.one.weight.data = model.one.weight.data.t()


def make_a_learning_rate_a_tensor(model, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def put_a_tensor_into_a_group(model, optimizer):
    optimizer.param_groups[0]["more"] = torch.ones(2)


def give_a_group_another_list_of_the_same_parameters(model, optimizer):
    optimizer.param_groups[0]["params"] = [*optimizer.param_groups[0]["params"]]


def freeze_a_layer_by_another_list(model, optimizer):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][2:]


CHANGES = [
    transpose_over_the_same_memory,
    make_a_learning_rate_a_tensor,
    put_a_tensor_into_a_group,
    give_a_group_another_list_of_the_same_parameters,
    freeze_a_layer_by_another_list,
    put_another_buffer_over_the_same_memory,
    move_a_buffer,
    add_to_the_last_state,
    take_from_the_last_state,
    replace_a_submodule,
    give_a_buffer_its_value,
    resize_in_place,
    replace_a_parameters_state,
    replace_a_parameter_in_its_group,
    replace_a_group,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_tensor_index_sees_changes_that_change_no_number_of_tensors(change):
    model = Twins()
    optimizer = torch.optim.AdamW(model.parameters())
    step_once(model, optimizer)
    tensor_index = TrackedObjects({"model.0": model}, [optimizer], {}).bind()
    assert tensor_index.is_current()
    step_once(model, optimizer)
    assert tensor_index.is_current(), "training alone changes nothing"
    change(model, optimizer)
    assert not tensor_index.is_current()


def test_the_tensor_index_sees_a_state_that_is_filled_later():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    optimizer.state[parameter] = {}
    tensor_index = TrackedObjects({}, [optimizer], {}).bind()
    assert tensor_index.is_current()
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros(2)
    assert not tensor_index.is_current()


def test_a_new_number_in_the_state_leaves_the_tensor_index_current():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"step": 1000, "mean": torch.zeros(2)}
    tensor_index = TrackedObjects({}, [optimizer], {}).bind()
    optimizer.state[parameter]["step"] = 1001
    assert tensor_index.is_current()


NUMBERS = {"n": 1, "none": None, "list": [1, None], "nested": {"a": [], "b": None}}


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(none=torch.ones(2)),
        lambda state: state.update(n=[torch.ones(2)]),
        lambda state: state["list"].append(torch.ones(2)),
        lambda state: state["nested"].update(b=torch.ones(2)),
        lambda state: state["nested"]["a"].append(torch.ones(2)),
        lambda state: state["outer"][1].append(torch.ones(2)),
    ],
)
@pytest.mark.parametrize("numbers", [NUMBERS, {"list": [], "nested": {"a": [], "b": None}, "none": None, "n": 0}])
def test_the_tensor_index_sees_a_tensor_in_the_place_of_a_number_or_in_a_list(numbers, change):
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter])
    state = copy.deepcopy({**numbers, "outer": [torch.zeros(2), []], "mean": torch.zeros(2)})
    optimizer.state[parameter] = state
    tensor_index = TrackedObjects({}, [optimizer], {}).bind()
    assert tensor_index.is_current()
    change(state)
    assert not tensor_index.is_current()


def test_rollback_removes_the_state_that_was_made_for_a_version():
    """Optimizer state, an empty buffer, a resized buffer, a scaler's scale: all are as before."""
    trained = Twins()
    trained.register_buffer("window", torch.zeros(6), persistent=False)
    optimizer, scaler = torch.optim.AdamW(trained.parameters()), torch.amp.GradScaler("cpu")
    step_once(trained, optimizer)
    scaler.scale(torch.ones(1))
    trained.later = torch.ones(3)
    saved_leaves = TrackedObjects({"model.0": trained}, [optimizer], {"scaler": scaler}).bind().leaves()
    model = Twins()
    model.register_buffer("window", torch.zeros(4), persistent=False)
    fresh, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    window, tracked = model.window, TrackedObjects({"model.0": model}, [fresh], {"scaler": scaler})
    before = tracked.bind()
    assert len(live_index(saved_leaves, tracked, before).tensors) == len(saved_leaves) and not before.is_current()
    tracked.bind().rollback_to(before)
    assert before.is_current() and fresh.state_dict() == torch.optim.AdamW(model.parameters()).state_dict()
    assert model.later is None and model.window is window and scaler._scale is None
    step_once(model, fresh)
    before = tracked.bind()
    tracked.bind().rollback_to(before)
    assert before.is_current() and len(fresh.state) == 4, "state that training made stays"


class Around(torch.optim.Optimizer):
    """An optimizer that steps other optimizers, as SAM and Lookahead do."""

    def __init__(self, parameters, shares):
        super().__init__(parameters, {})
        self.inner = {"base": torch.optim.SGD(self.param_groups, lr=0.1)}
        if shares:
            self.state = self.inner["base"].state


def test_an_optimizer_that_keeps_its_state_in_another_one_is_refused():
    with pytest.raises(UnsupportedState, match=r"Around keeps its state in another optimizer, its \.inner"):
        OptimizerExtractor().check("optimizer.0", Around(Twins().parameters(), shares=False))
    OptimizerExtractor().check("optimizer.0", Around(Twins().parameters(), shares=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda each: torch.jit.trace(each, torch.zeros(1, 4))])
def test_a_scripted_module_is_refused_by_its_name(make):
    model = nn.Sequential(nn.Linear(4, 4), make(nn.Linear(4, 4)))
    with pytest.raises(UnsupportedState, match=r"model\.0\.1 is a \w+ of torch\.jit") as refused:
        AttachArguments(model, [torch.optim.SGD(model.parameters())], None, {}, None, "auto", 1).tracked()
    assert "before scripting" in str(refused.value)


def test_a_value_of_a_group_that_no_capsule_holds_is_refused_by_its_name():
    optimizer = torch.optim.SGD([{"params": Twins().parameters(), "name": "all"}], lr=0.1)
    OptimizerExtractor().check("optimizer.0", optimizer)
    optimizer.param_groups[0]["rate_of"] = abs
    with pytest.raises(
        UnsupportedState, match=r"^optimizer\.0, parameter group 0: rate_of is of type builtins\."
    ) as refused:
        OptimizerExtractor().check("optimizer.0", optimizer)
    assert "attribute of the optimizer" in str(refused.value)


def test_an_optimizer_in_state_is_refused():
    model = Twins()
    one, two = (torch.optim.SGD(each.parameters()) for each in (model.one, model.two))
    request = AttachArguments(model, [one], None, {"second": two}, None, "auto", 1)
    with pytest.raises(ConfigError, match=r"state\['second'\] is a SGD") as refused:
        request.tracked()
    assert "pass it in optimizer=[...]" in str(refused.value)


def strided(shape, stride):
    return torch.arange(32.0).as_strided(shape, stride)


@pytest.mark.parametrize(
    "tensor", [torch.ones(1).expand(8), strided((2, 4), (0, 3)), strided((3, 2), (1, 1))], ids=lambda t: str(t.stride())
)
def test_a_tensor_whose_elements_share_memory_is_refused(tensor):
    with pytest.raises(UnsupportedState, match=r"(?s)model\.0\.mask .*share memory") as refused:
        check_supported("model.0.mask", tensor)
    assert "clone()" in str(refused.value)


@pytest.mark.parametrize("tensor", [strided((1, 8), (0, 1)), strided((8, 0), (0, 1)), strided((2, 2), (16, 3))])
def test_other_strides_are_accepted(tensor):
    check_supported("model.0.mask", tensor)


def add_a_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


@pytest.mark.parametrize("change", [add_a_group, replace_a_parameter_in_its_group], ids=lambda change: change.__name__)
def test_host_state_names_a_parameter_that_was_added_after_attach(change):
    model = Twins()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    host = HostState(TrackedObjects({"model.0": model}, [optimizer], {}), {})
    change(model, optimizer)
    names = [name for group in host.capture(1)["subjects"]["optimizer.0"]["groups"] for name in group["params"]]
    assert len(names) == sum(len(group["params"]) for group in optimizer.param_groups)
    assert [name for name in names if name.startswith("optimizer.0.")]


class Tabled(torch.optim.Optimizer):
    """An optimizer that gives all parameters one table, as bitsandbytes does."""

    key = "table"

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.table = torch.arange(16.0)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                self.state[parameter] = {self.key: self.table, "moment": torch.zeros_like(parameter)}
            parameter.sub_(
                self.state[parameter]["moment"].add_(parameter.grad) * self.state[parameter][self.key][1] * 0.01
            )


def test_a_state_tensor_shared_by_parameters_is_shared_after_a_restore(attach):
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return model, Tabled(model.parameters())

    (model, optimizer), (other, another), _ = round_trip(attach, make)
    assert len({id(each["table"]) for each in another.state.values()}) == 1
    step_once(model, optimizer)
    step_once(other, another)
    assert state_bytes(model, optimizer) == state_bytes(other, another)


@pytest.mark.parametrize("key", [0, "a.b"])
def test_a_state_key_that_cannot_be_in_a_leaf_name_is_refused(key):
    model = Twins()
    optimizer = type("Odd", (Tabled,), {"key": key})(model.parameters())
    tracked = TrackedObjects({"model.0": model}, [optimizer], {})
    step_once(model, optimizer)
    with pytest.raises(UnsupportedState, match=f"optimizer.0 keeps a tensor .* under {key!r}"):
        tracked.bind()


@pytest.mark.parametrize("columns", [4, 1024], ids=["malloc", "huge pages"])
def test_a_parameter_with_gaps_gets_state_without_gaps_back(attach, columns):
    """Such as one half of a fused weight. Its moments are smaller than the memory that it spans."""

    def make():
        model = nn.Module()
        fused = torch.randn(1024, 2 * columns)
        model.left, model.right = nn.Parameter(fused[:, :columns]), nn.Parameter(fused[:, columns:])
        return model, torch.optim.AdamW(model.parameters())

    (_, optimizer), (_, another), _ = round_trip(attach, make)
    strides = [{key: each.stride() for state in one.state.values() for key, each in state.items()}
               for one in (optimizer, another)]  # fmt: skip
    assert strides[0] == strides[1]


def host_of(module):
    return HostState(TrackedObjects({"model.0": module}, [torch.optim.SGD(module.parameters(), lr=0.1)], {}), {})


def test_host_state_too_large_for_a_capsule_is_refused_at_attach():
    host_of(nn.Linear(2, 2)).check_size(NameTable(()))
    named_at_length = nn.ParameterDict({f"{'long' * 100}_{i}": nn.Parameter(torch.zeros(1)) for i in range(3000)})
    with pytest.raises(UnsupportedState, match=r"has \d{7} bytes, for 3000 parameters; the limit is 1048576"):
        host_of(named_at_length).check_size(NameTable(()))


def test_the_live_settings_ask_no_object_of_the_user():
    """A reshape takes them before it restores; see `attach.restore.lease`."""
    unasked = SimpleNamespace(state_dict=lambda: pytest.fail("asked"), load_state_dict=lambda state: None)
    module = nn.Linear(2, 2)
    tracked = TrackedObjects({"model.0": module}, [torch.optim.SGD(module.parameters(), lr=0.1)], {})
    takes_all = SimpleNamespace(load_state_dicts=None, **vars(unasked))
    objects = {"loader": unasked, "all": takes_all, "own": torch.Generator(), "model.0.fc.extra_state": unasked}
    resharding = HostStateResharding.of(0, 1, [{}], {}, HostState(tracked, objects))
    assert resharding.live.keys() == {"subjects", "random"} and "optimizer.0" in resharding.live["subjects"]
    named = [list(each) for each in (resharding.generators, resharding.takes_all, resharding.extra_states)]
    assert named == [["own"], ["all"], ["model.0.fc.extra_state"]]


def test_buffers_that_training_makes_or_resizes_are_restored(attach):
    def make():
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_buffer("later", None)
        model[0].register_buffer("cache", torch.zeros(4), persistent=False)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    session = attach(model, optimizer)
    model[0].later, model[0].cache = torch.arange(3.0), torch.arange(16.0)
    train(session, model, optimizer)
    other, another = make()
    assert attach(other, another).step == 3
    assert state_bytes(other, another) == state_bytes(model, optimizer)


def test_a_buffer_made_in_inference_mode_is_restored(attach):
    """For example, an evaluation between two steps makes a mask. It has no version counter."""

    def make():
        model = nn.Linear(4, 4)
        model.register_buffer("mask", torch.zeros(4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make()
    session = attach(model, optimizer)
    for _ in session.steps(2):
        step_once(model, optimizer)
        with torch.inference_mode():
            model.mask = torch.arange(4.0)
    assert session.seal(timeout=60)
    other, another = make()
    with torch.inference_mode():
        other.mask = torch.zeros(4)
    assert attach(other, another).step == 2 and torch.equal(other.mask, torch.arange(4.0))


def test_a_default_device_does_not_move_state_that_lies_on_the_host(attach):
    def make():
        model = nn.Linear(4, 4, device="cpu")
        model.register_buffer("strided", torch.zeros(6, 4, device="cpu")[:, ::2])
        model.register_buffer("none", torch.zeros(0, device="cpu"))
        return model, torch.optim.AdamW(model.parameters())

    torch.set_default_device("meta")  # in the place of a CUDA device
    try:
        round_trip(attach, make)
        assert from_plain(to_plain(torch.zeros(0, device="cpu"))).device.type == "cpu"
    finally:
        torch.set_default_device(None)
