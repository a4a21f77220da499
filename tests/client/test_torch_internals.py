"""A missing private name of torch: attach refuses it by name, or prints a line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FlatParameter
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore

from reft.client import torch_internals
from reft.client.attach.arguments import AttachArguments
from reft.client.torch_internals import FLAT_PARAMETER, OF_CLASSES, OPTIONAL, REQUIRED, SCALER, needed, notices, require
from reft.errors import UnsupportedState
from reft.private_names import PrivateName
from tests.support import sharded
from tests.support.stages import Clock, ScriptedStage


def make(owner: str, *names: str, **values: object) -> object:
    """Returns an object of a class with this name; the names have the value None."""
    return type(owner, (), {**dict.fromkeys(names), **values})()


class Untouchable:
    """An object of a user that no code may look into."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def named(names, without: str = "") -> list[str]:
    return [each.name for each in names if each.name != without]


def of(owner: str) -> list[PrivateName]:
    return [each for each in OF_CLASSES if each.owner == owner]


def flat_wrapper(without: str = "") -> object:
    """Returns a stand-in for an FSDP1 wrapper whose flat parameter lacks one name."""
    flat = make("Parameter", *named(FLAT_PARAMETER, without))
    handle = SimpleNamespace(uses_sharded_strategy=True, flat_param=flat)
    names = named(of("FullyShardedDataParallel"), without)
    return make("FullyShardedDataParallel", *names, **({} if without == "_handle" else {"_handle": handle}))


def fsdp2_module(without: str = "") -> object:
    """Returns a stand-in for an FSDP2 module of which one private name is missing."""
    parameter = make("FSDPParam", *([] if without == "_module_info" else ["_module_info"]))
    groups = {"_fsdp_param_groups": [SimpleNamespace(fsdp_params=[parameter])]}
    state = make("FSDPState", **({} if without == "_fsdp_param_groups" else groups))
    return make("FSDPModule", **({} if without == "_get_fsdp_state" else {"_get_fsdp_state": lambda self: state}))


def scaler(without: str = "") -> object:
    return make("GradScaler", *named(SCALER, without), is_enabled=lambda self: True)


STAND_INS = {
    "FullyShardedDataParallel": flat_wrapper,
    "flat_param": flat_wrapper,
    "FSDPModule": fsdp2_module,
    "FSDPState": fsdp2_module,
    "FSDPParam": fsdp2_module,
    "GradScaler": scaler,
}


OF_OBJECTS = [each for each in REQUIRED if each.owner not in ("placement_types", "FlatParameter")]


@pytest.mark.parametrize("name", OF_OBJECTS, ids=str)
def test_each_missing_name_is_refused_by_name(name):
    stand_in = STAND_INS.get(name.owner, lambda without="": make(name.owner, *named(of(name.owner), without)))
    require([stand_in()])
    with pytest.raises(UnsupportedState, match=rf"torch 2.99.0 has no {name}, which reft needs for {name.use}"):
        require([stand_in(name.name)], torch_version="2.99.0")


def test_a_torch_without_strided_shards_is_refused_only_for_dtensors(monkeypatch):
    monkeypatch.delattr(placement_types, "_StridedShard")
    require([nn.Linear(1, 1)])
    with pytest.raises(UnsupportedState, match=r"has no placement_types\._StridedShard"):
        require([make("DTensor", "_local_tensor")])


def test_a_torch_without_fsdp1s_shard_is_refused_only_for_fsdp1(monkeypatch):
    monkeypatch.delitem(FlatParameter.__annotations__, "_local_shard")
    require([fsdp2_module()])
    with pytest.raises(UnsupportedState, match=r"has no FlatParameter\._local_shard"):
        require([flat_wrapper()])


def test_names_that_the_job_does_not_need_may_be_missing():
    require([object(), None, {}, make("GradScaler", is_enabled=lambda self: False)])
    require([], [make("DTensor"), Untouchable()])
    require([make("FullyShardedDataParallel", *named(of("FullyShardedDataParallel")))])  # NO_SHARD: no handle


def test_parts_of_models_stages_and_optimizers_are_asked():
    class OptimizedModule(nn.Module):
        """Lacks _orig_mod, as a later torch may."""

    inner = nn.Sequential(OptimizedModule())
    for value in (inner, SimpleNamespace(submod=inner)):
        with pytest.raises(UnsupportedState, match=r"OptimizedModule\._orig_mod"):
            require([value])
    with pytest.raises(UnsupportedState, match=r"OptimizedModule\._orig_mod"):
        require([], [inner])
    parameter = make("DTensor")
    optimizer = torch.optim.SGD([torch.zeros(1)])
    optimizer.param_groups[0]["params"] = [parameter]
    with pytest.raises(UnsupportedState, match=r"DTensor\._local_tensor"):
        require([optimizer])


@pytest.fixture
def two_ranks():
    """This process as rank 0 of 2; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield 2
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "owners"),
    [
        ("fsdp1", {"FullyShardedDataParallel", "flat_param", "FlatParameter"}),
        ("fsdp1_original", {"FullyShardedDataParallel", "flat_param", "FlatParameter"}),
        ("fsdp2", {"FSDPModule", "FSDPState", "FSDPParam", "DTensor", "placement_types"}),
        ("zero1", {"ZeroRedundancyOptimizer"}),
    ],
)
def test_objects_of_torch_are_asked_for_their_names_and_have_them(two_ranks, kind, owners):
    model, optimizer = getattr(sharded, kind)(two_ranks)
    asked = {name.owner for name, _ in needed([model, optimizer])}
    assert asked == owners | {"Module", "Tensor"}
    require([model, optimizer])
    assert notices([model], [optimizer], None) == []


def test_wrappers_scalers_and_schedules_of_torch_are_asked_too():
    inner = checkpoint_wrapper(nn.Linear(1, 1))
    model = torch.compile(inner, backend="eager")
    values = [model, torch.amp.GradScaler("cpu")]
    assert {name.owner for name, _ in needed(values)} == {
        *("Module", "Tensor", "OptimizedModule", "CheckpointWrapper", "GradScaler"),
    }
    require(values)
    schedule = Schedule1F1B(ScriptedStage(0, 1, [], Clock(), print), 1)
    assert {name.owner for name, _ in needed([schedule])} >= {"PipelineScheduleSingle"}
    require([schedule])
    assert torch_internals.stages_of(schedule) and torch_internals.microbatches_of(schedule) == 1


def test_attach_asks_before_it_names_anything(monkeypatch):
    monkeypatch.setattr(torch_internals, "OF_CLASSES", (PrivateName("Linear", "_gone", "every model", ("2.13",)),))
    model = nn.Linear(1, 1)
    arguments = AttachArguments(model, [torch.optim.SGD(model.parameters())], None, {}, None, "auto", 1)
    with pytest.raises(UnsupportedState, match=r"has no Linear\._gone.*Tried with torch 2\.13.*\nFix: install torch 2"):
        arguments.tracked()


def test_this_torch_was_tried_and_has_all_names():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = make("PipelineScheduleMulti", "_stages", "_n_microbatches", "_compute_loss")
    ddp = make("DistributedDataParallel", "_comm_hooks")
    assert notices([model, ddp], [optimizer], schedule) == []


def test_an_untried_torch_gives_one_line():
    assert notices([], [], None, "2.14.1+cu130") == [
        "torch 2.14.1+cu130 was not tried with this reft; tried: torch 2.13."
    ]


@pytest.mark.parametrize("name", OPTIONAL, ids=str)
def test_each_feature_that_is_off_gives_one_line(name, monkeypatch):
    gone = name.name
    schedule = make("PipelineScheduleSingle", *({"_stage", "_n_microbatches", "_compute_loss"} - {gone}))
    ddp = make("DistributedDataParallel", *({"_comm_hooks"} - {gone}))
    if name is torch_internals.QUEUE:
        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", object())
    if name is torch_internals.LR_MARK:
        monkeypatch.setattr(torch_internals, "has_lr_scheduler", lambda optimizer: False)
    if name is torch_internals.COPY_LISTS:
        monkeypatch.delattr(torch, "_foreach_copy_")
    lines = notices([ddp, ddp], [torch.optim.SGD([torch.zeros(1)])], schedule)
    assert lines == [f"this torch has no {name}: {name.use}."]


@pytest.mark.parametrize("is_absent", [False, True])
def test_lists_of_tensors_are_copied_with_and_without_the_call_for_lists(is_absent, monkeypatch):
    if is_absent:
        monkeypatch.delattr(torch, "_foreach_copy_")
    sources = [torch.arange(size, dtype=torch.uint8) for size in (3, 0, 5)]
    targets = [torch.full_like(each, 9) for each in sources]
    torch_internals.copy_each(targets, sources)
    torch_internals.copy_each([], [])
    assert all(map(torch.equal, targets, sources))


def test_without_the_queue_of_callbacks_nothing_follows_ddp(monkeypatch):
    from reft.client.schedule.hooks import ddp

    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", object())
    ddp.follow([nn.Linear(1, 1)], None)()
    assert torch_internals.backward_queue() is None


def test_a_schedule_that_does_not_tell_its_microbatches_is_measured_only():
    from reft.client.schedule.hooks import closed

    stage = SimpleNamespace(stage_index=0, num_stages=2)
    schedule = type("Schedule1F1B", (type("PipelineScheduleSingle", (), {}),), {"_stage": stage})()
    assert closed(schedule) is None
    schedule._n_microbatches = 4
    assert closed(schedule) is not None


def test_the_state_of_ddps_hooks_is_read():
    assert torch_internals.hook_states(SimpleNamespace(_comm_hooks=[(print, None), (print, 3)])) == [None, 3]
    assert torch_internals.hook_states(SimpleNamespace()) == []
