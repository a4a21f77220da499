"""The parts of DeepSpeed's engine that can be tested without DeepSpeed.

`make test-trainers` tests the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from reft.client.attach.arguments import AttachArguments
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.state.extract.deepspeed import PARTITIONED, DeepSpeedExtractor
from reft.client.state.extract.registry import extractor_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import ConfigError, UnsupportedState


def kind(name: str, **values: Any) -> Any:
    """Returns an object whose class has the name of a DeepSpeed class."""
    module, _, short = name.rpartition(".")
    made = type(short, (), {"__module__": module})()
    vars(made).update(values)
    return made


def engine(optimizer: Any, **values: Any) -> Any:
    counters = {"global_steps": 3, "global_samples": 12, "skipped_steps": 1, "micro_steps": 6}
    values = {"param_names": {}, **counters, **values}
    made = kind("deepspeed.runtime.engine.DeepSpeedEngine", optimizer=optimizer, said=[], **values)
    type(made)._take_model_step = lambda self, _: self.said.append("step")
    type(made).step = lambda self: self._take_model_step(None)
    return made


def zero(**values: Any) -> Any:
    parts = {"single_partition_of_fp32_groups": [torch.ones(4)], "real_dp_process_group": [None], "bit16_groups": [[]],
             "loss_scaler": SimpleNamespace(cur_scale=2.0, dtype=torch.half), "optimizer": None}  # fmt: skip
    return kind("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", **{**parts, **values})


def zero3(**values: Any) -> Any:
    parts = {"fp16_groups": [], "fp32_partitioned_groups_flat": [], "sub_group_to_group_id": {}, "sub_group_process_groups": [],
             "persistent_parameters": [], "loss_scaler": SimpleNamespace(cur_scale=1.0), "optimizer": None,
             "offload_optimizer": False, "offload_param": False, "zero_hpz_partition_size": 1, "use_muon": False,
             "zero_quantized_nontrainable_weights": False, "zenflow": False}  # fmt: skip
    return kind("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", **{**parts, **values})


def grid(slices: int) -> Any:
    """Returns the grid of a pipeline of two stages."""
    return SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: slices, get_model_parallel_world_size=lambda: 2 * slices
    )


def partitioned(model: nn.Module, world: int, rank: int) -> Any:
    """Returns an engine with parameters partitioned as in ZeRO-3; one sub group for each module."""
    groups, masters = [], []
    for part in model:
        for parameter in part.parameters():
            size = -(-parameter.numel() // world)
            padded = torch.cat(
                [parameter.detach().flatten(), torch.full((size * world - parameter.numel(),), torch.nan)]
            )
            parameter.ds_tensor = padded[size * rank : size * (rank + 1)].bfloat16()
            parameter.ds_tensor.ds_numel, parameter.ds_numel = size, parameter.numel()
            parameter.ds_shape = parameter.shape
            parameter.ds_zero_partition_rank = rank
            parameter.data = torch.empty(0)
        groups.append([*part.parameters()])
        masters.append(torch.cat([each.ds_tensor.float() for each in groups[-1]]).requires_grad_())
    core = torch.optim.AdamW(masters, lr=0.1)
    core.param_groups[0]["params"] = []  # empty outside of a step
    names = {parameter: name for name, parameter in model.named_parameters()}
    sub_groups = range(len(groups))
    value = zero3(
        fp16_groups=groups, fp32_partitioned_groups_flat=masters, optimizer=core,
        sub_group_to_group_id=dict.fromkeys(sub_groups, 0), sub_group_process_groups=[None for _ in sub_groups],
    )  # fmt: skip
    return engine(value, param_names=names)


def fragmented(name: str, model: nn.Module, world: int, rank: int, alignment: int) -> Any:
    """Returns an engine whose optimizer partitions a flat master of each module's parameters.

    ZeRO-1, ZeRO-2 and BF16_Optimizer do this. Each parameter begins at a multiple of `alignment`.
    Gaps and the end are padding, here nan. A parameter without elements in this rank's partition
    has an `_hp_mapping` of None, as in DeepSpeed.
    """
    masters_at, groups_at = PARTITIONED[name]
    groups, masters = [], []
    for part in model:
        starts, end = [], 0
        for parameter in part.parameters():
            starts.append(-(-end // alignment) * alignment)
            end = starts[-1] + parameter.numel()
        size = -(-end // world)
        whole = torch.full((size * world,), torch.nan)
        first, stop = size * rank, size * (rank + 1)
        for start, parameter in zip(starts, part.parameters(), strict=True):
            whole[start : start + parameter.numel()] = parameter.detach().flatten()
            low, high = max(start, first), min(start + parameter.numel(), stop)
            mapping = SimpleNamespace(
                lp_fragment_address=SimpleNamespace(start=low - start, numel=high - low),
                hp_fragment_address=SimpleNamespace(start=low - first, numel=high - low),
            )
            parameter._hp_mapping = mapping if low < high else None
            parameter.data = parameter.data.bfloat16()
        groups.append([*part.parameters()])
        masters.append(whole[first:stop].clone().requires_grad_())
    core = torch.optim.AdamW([{"params": [master]} for master in masters], lr=0.1)
    parts = {masters_at: masters, groups_at: groups, "real_dp_process_group": [None for _ in groups], "optimizer": core}
    names = {parameter: name for name, parameter in model.named_parameters()}
    return engine(kind(name, loss_scaler=None, **parts), param_names=names)


def step_all(value: Any, gradient_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    core = value.optimizer.optimizer
    for group in core.param_groups:
        for master in group["params"]:
            master.grad = gradient_of(master.detach()).clone()
    core.step()


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))


def step(value: Any) -> None:
    core = value.optimizer.optimizer
    for master in value.optimizer.fp32_partitioned_groups_flat:
        master.grad = torch.arange(master.numel()).float()
        core.param_groups[0]["params"] = [master]
        core.step()
        core.param_groups[0]["params"] = []


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def become(rank: int, world: int) -> tuple[Any, TrackedObjects]:
        monkeypatch.setattr("torch.distributed.get_rank", lambda _=None: rank)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda _=None: world)
        torch.manual_seed(0)
        model = two_layers()
        value = partitioned(model, world, rank)
        return value, TrackedObjects({"model.0": model}, [value], {})

    return become


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_slices_of_all_ranks_cover_each_parameter_master_and_moment_without_padding(as_rank, world):
    covered: dict[str, list[int]] = {}
    for rank in range(world):
        value, tracked = as_rank(rank, world)
        step(value)
        for leaf in tracked.bind().leaves():
            if leaf.shape:
                first, size = leaf.global_offset[0], leaf.shape[0]
                covered.setdefault(f"{leaf.name} {leaf.global_shape}", []).extend(range(first, first + size))
    assert len(covered) == 4 * 4  # weight and bias of two layers; master, two moments
    for name, elements in covered.items():
        assert f"({len(elements)},)" in name
        assert sorted(elements) == list(range(len(elements)))
    assert "optimizer.0.exp_avg.optimizer.0.master.1.weight (5,)" in covered


def test_state_is_predicted_created_and_restored_in_place(as_rank):
    first, tracked = as_rank(1, 2)
    predicted = sorted(leaf.describe() for leaf in tracked.predict(tracked.names()))
    step(first)
    saved_index = tracked.bind()
    moments = [leaf for leaf in saved_index.leaves() if not leaf.name.startswith(("model.", "optimizer.0.master."))]
    assert predicted == sorted(leaf.describe() for leaf in moments)
    saved = tracked.capture(tracked.names())
    fresh, again = as_rank(1, 2)
    fresh.optimizer.optimizer.param_groups[0]["lr"] = 7.0
    again.make(saved_index.leaves(), HugePageBuffer(0))
    bound = again.bind()
    assert list(bound.tensors) == list(saved_index.tensors)
    for name, tensor in bound.tensors.items():
        tensor.copy_(saved_index.tensors[name])
    again.restore(saved, again.names())
    assert fresh.optimizer.optimizer.param_groups[0] == {**first.optimizer.optimizer.param_groups[0], "params": []}
    for mine, theirs in zip(
        fresh.optimizer.fp32_partitioned_groups_flat, first.optimizer.fp32_partitioned_groups_flat, strict=True
    ):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        for key, value in first.optimizer.optimizer.state[theirs].items():
            is_padding = theirs.isnan() if value.shape else torch.tensor(False)
            assert torch.equal(fresh.optimizer.optimizer.state[mine][key], value.where(~is_padding, 0))


@pytest.fixture
def as_rank_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def become(name: str, rank: int, world: int, alignment: int = 1) -> tuple[Any, TrackedObjects]:
        monkeypatch.setattr("torch.distributed.get_rank", lambda _=None: rank)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda _=None: world)
        torch.manual_seed(0)
        model = two_layers()
        value = fragmented(name, model, world, rank, alignment)
        return value, TrackedObjects({"model.0": model}, [value], {})

    return become


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("name", PARTITIONED)
def test_slices_of_flat_masters_and_moments_match_their_parameters_without_padding(as_rank_of, name, world, alignment):
    torch.manual_seed(0)
    whole = {each: value.detach().flatten() for each, value in two_layers().named_parameters()}
    counts = {each: torch.zeros(value.numel()) for each, value in whole.items()}
    for rank in range(world):
        rank_engine, tracked = as_rank_of(name, rank, world, alignment)
        before = {each: tensor.detach().clone() for each, tensor in tracked.bind().tensors.items()}
        step_all(rank_engine, lambda master: master.nan_to_num(7.0))
        bound = tracked.bind()
        for leaf in bound.leaves():
            key, _, owner = leaf.name.removeprefix("optimizer.0.").rpartition("optimizer.0.master.")
            if key == "exp_avg.":
                place = slice(leaf.global_offset[0], leaf.global_offset[0] + leaf.shape[0])
                gradient = whole[owner][place]
                assert leaf.global_shape == whole[owner].shape
                assert torch.equal(before[f"optimizer.0.master.{owner}"], gradient)
                assert torch.equal(bound.tensors[leaf.name], torch.zeros_like(gradient).lerp(gradient, 1 - 0.9))
                counts[owner][place] += 1
    assert all(bool((count == 1).all()) for count in counts.values())


@pytest.mark.parametrize("name", PARTITIONED)
def test_state_of_flat_masters_is_predicted_and_restored_into_a_fresh_engine(as_rank_of, name):
    value, tracked = as_rank_of(name, 1, 2, 4)
    predicted = sorted(leaf.describe() for leaf in tracked.predict(tracked.names()))
    before = set(tracked.bind().tensors)
    step_all(value, torch.ones_like)
    saved_index = tracked.bind()
    assert predicted == sorted(leaf.describe() for leaf in saved_index.leaves() if leaf.name not in before)
    saved = tracked.capture(tracked.names())
    fresh, again = as_rank_of(name, 1, 2, 4)
    fresh.global_steps = 99
    again.make(saved_index.leaves(), HugePageBuffer(0))
    bound = again.bind()
    assert list(bound.tensors) == list(saved_index.tensors)
    for leaf_name, tensor in bound.tensors.items():
        tensor.detach().copy_(saved_index.tensors[leaf_name])
    again.restore(saved, again.names())
    assert fresh.global_steps == 3
    for each in (value, fresh):
        step_all(each, torch.ones_like)
    for leaf_name, tensor in again.bind().tensors.items():
        assert torch.equal(tensor, saved_index.tensors[leaf_name]), leaf_name


def test_a_master_whose_memory_moved_is_noticed(as_rank):
    value, tracked = as_rank(0, 2)
    bound = tracked.bind()
    assert bound.is_current()
    master = value.optimizer.fp32_partitioned_groups_flat[0]
    master.data = master.detach().clone()
    assert not bound.is_current()


def test_before_runs_ahead_of_the_engines_step_and_after_behind_it():
    value = engine(zero())
    hooks = DeepSpeedExtractor().hook(
        value, lambda: value.said.append("before"), lambda owner: owner.said.append("after")
    )
    value._take_model_step(None)
    for hook in hooks:
        hook.remove()
    value._take_model_step(None)
    assert value.said == ["before", "step", "after", "step"]


def test_a_step_ends_once_the_engine_has_counted_its_micro_batch():
    """Else a loop without marks would go on with one micro-batch less in its next step."""
    value = engine(zero(), micro_steps=0)

    def step(self):
        if self.micro_steps % 2:
            self._take_model_step(None)
        self.micro_steps += 1

    type(value).step = step
    ends: list[int] = []
    hooks = DeepSpeedExtractor().hook(value, lambda: None, lambda owner: ends.append(owner.micro_steps))
    for _ in range(4):
        value.step()
    assert ends == [2, 4]
    for hook in hooks:
        hook.remove()
    assert "step" not in vars(value) and "_take_model_step" not in vars(value)


def test_the_count_by_which_a_pipeline_seeds_its_layers_is_restored(as_rank_of):
    first, tracked = as_rank_of(next(iter(PARTITIONED)), 0, 1)
    first.module = SimpleNamespace(micro_offset=24)
    saved = tracked.capture(tracked.names())
    fresh, again = as_rank_of(next(iter(PARTITIONED)), 0, 1)
    fresh.module = SimpleNamespace(micro_offset=0)
    again.restore(saved, again.names())
    assert fresh.module.micro_offset == 24


def test_an_engine_is_recognised_by_class_name_and_zero_1_and_2_are_accepted():
    value = engine(zero())
    found = extractor_of(value)
    assert isinstance(found, DeepSpeedExtractor)
    found.check("optimizer.0", value)
    found.check("optimizer.0", engine(zero(), mpu=grid(slices=1), stage_id=0))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (engine(kind("deepspeed.runtime.zero.mics.MiCS_Optimizer")), "MiCS_Optimizer"),
        (engine(zero3(offload_param=True)), "offloaded parameters"),
        (engine(zero3(zero_hpz_partition_size=2)), "partitioned within nodes"),
        (engine(zero3(torch_autocast_gradscaler=object())), "gradient scaler"),
        (engine(zero(), has_moe_layers=True), "experts"),
        (engine(zero(cpu_offload=True)), "offloaded"),
        (engine(zero(), mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 2)), "tensor parallelism"),
        (engine(zero(), mpu=grid(slices=2), stage_id=0), "tensor parallelism"),
    ],
)
def test_unsupported_features_are_refused_by_name(value, message):
    with pytest.raises(UnsupportedState, match=message):
        DeepSpeedExtractor().check("optimizer.0", value)


def test_an_engine_in_the_place_of_the_model_is_refused():
    """The engine is a module, and its extractor holds masters and moments only."""
    made = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    made.module = nn.Linear(2, 2)
    made.optimizer = torch.optim.SGD(made.parameters())
    with pytest.raises(ConfigError, match=r"model is a DeepSpeedEngine.*\n?.*integrations\.deepspeed\.attach"):
        AttachArguments(made, [made.optimizer], None, {}, None, "auto", 1).tracked()


def test_another_version_is_refused_and_the_tested_version_is_named():
    other = zero()
    del other.bit16_groups
    with pytest.raises(UnsupportedState, match=r"no 'bit16_groups'; reft was tested with 0\.19"):
        DeepSpeedExtractor().check("optimizer.0", engine(other))
