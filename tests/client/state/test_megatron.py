"""The parts of Megatron-core that can be tested with stand-ins for its classes.

`make test-trainers` tests the rest.
"""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.schedule.hooks.megatron import IdleTimers
from reft.client.state.extract import megatron
from reft.client.state.extract.megatron import MegatronExtractor
from reft.client.state.extract.megatron_modules import MegatronModuleExtractor
from reft.client.state.extract.registry import extractor_of
from reft.client.state.tracked_objects import TrackedObjects
from reft.errors import LayoutChanged, UnsupportedState
from reft.integrations.megatron import EXPERT, RandomStates, Schedule

BASE = type("MegatronModule", (nn.Module,), {"__module__": "megatron.core.transformer.module"})
OPTIMIZER = type("MegatronOptimizer", (), {"__module__": "megatron.core.optimizer.optimizer"})
RANKS = {
    "get_tensor_model_parallel_rank": 1, "get_tensor_model_parallel_world_size": 2, "get_expert_tensor_parallel_rank": 0,
    "get_expert_tensor_parallel_world_size": 1, "get_expert_model_parallel_rank": 3,
    "get_expert_model_parallel_world_size": 4, "get_pipeline_model_parallel_rank": 1,
    "get_pipeline_model_parallel_world_size": 2, "model_parallel_is_initialized": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def parallel_state(monkeypatch):
    """Stage 1 of 2, tp 1 of 2, ep 3 of 4, in Megatron's interface."""
    state = SimpleNamespace(**{name: (lambda value=value: value) for name, value in RANKS.items()})
    core = ModuleType("megatron.core")
    core.parallel_state = state  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    return state


def sharded(key: str, tensor: torch.Tensor, whole: Any, offset: Any, prepended: int = 0) -> Any:
    return SimpleNamespace(key=key, data=tensor, global_shape=whole, global_offset=offset, prepend_axis_num=prepended)


class Chunk(BASE):  # type: ignore[misc, valid-type]
    """A chunk of the last stage.

    Its local layer 0 is layer 1. It has an embedding tied to the first stage's, an expert and a
    gated projection.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.Module()
        layer.norm, layer.rows = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(2, 3))
        layer.columns, layer.gated = nn.Parameter(torch.rand(4, 3)), nn.Parameter(torch.rand(4, 2))
        layer.expert = nn.Parameter(torch.rand(2, 2))
        layer.expert.allreduce = False
        layer.register_buffer("bias", torch.zeros(2))
        layer.register_buffer("cache", torch.zeros(2), persistent=False)
        self.layers = nn.ModuleList([layer])
        self.output = nn.Parameter(torch.rand(4, 3))

    def sharded_state_dict(self, prefix: str, metadata: dict[str, Any]) -> dict[str, Any]:
        assert metadata["non_homogeneous_layers"] and metadata["singleton_local_shards"] and prefix == ""
        layer = self.layers[0]
        entries = [
            sharded("layers.1.norm", layer.norm, (3,), (0,)),
            sharded("layers.1.rows", layer.rows, (4, 3), (2, 0)),
            sharded("layers.1.columns", layer.columns, (4, 6), (0, 3)),
            SimpleNamespace(key="layers.1.gated", data=layer.gated),
            sharded("layers.1.experts", layer.expert, (8, 2, 2), (6, 0, 0), 1),
            sharded("layers.1.bias", layer.bias, (2,), (0,)),
            sharded("embedding", self.output, (8, 3), (4, 0)),
            SimpleNamespace(key="layers.1._extra_state", data=b""),
        ]
        return {each.key: each for each in entries}


def wrapped(chunk: Any) -> Any:
    """Returns the chunk in two of Megatron's wrappers."""
    for name in ("Float16Module", "DistributedDataParallel"):
        outer = type(name, (BASE,), {"__module__": "megatron.core"})()
        outer.module = chunk
        chunk = outer
    return chunk


def of_kind(kind: str, **values: Any) -> Any:
    module, _, name = kind.rpartition(".")
    made = type(name, (OPTIMIZER,), {"__module__": module})()
    vars(made).update(values)
    return made


def adamw(*groups: list[Any]) -> torch.optim.Optimizer:
    keys = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return torch.optim.AdamW([{"params": group, **keys} for group in groups], lr=0.1)


def distributed(chunk: Chunk, runs: dict[str, tuple[int, int]], view: str = "", **values: Any) -> Any:
    """Returns a distributed optimizer with these slices of the layer's parameters.

    The parameter `view` counts as fp32.
    """
    layer, models, mains = chunk.layers[0], {}, {}
    for name, (first, stop) in runs.items():
        models[name] = getattr(layer, name)
        flat = models[name].detach().reshape(-1)[first:stop]
        mains[name] = flat if name == view else flat.clone()
    low = [name for name in runs if name != view]
    ranges = {id(models[name]): SimpleNamespace(start=first, end=stop) for name, (first, stop) in runs.items()}
    return of_kind(
        megatron.DISTRIBUTED, optimizer=adamw(list(mains.values())), config=SimpleNamespace(), ddp_config=SimpleNamespace(),
        grad_scaler=None, model_float16_groups=[[models[n] for n in low]],
        shard_fp32_groups=[[mains[n] for n in runs if n == view]],
        shard_fp32_from_float16_groups=[[mains[n] for n in low]], model_fp32_groups=[[models[n] for n in runs if n == view]],
        _get_model_param_range_map=lambda model: {"param": ranges[id(model)]}, **values,
    )  # fmt: skip


def tracked(model: Any, *optimizers: Any) -> TrackedObjects:
    models = model if isinstance(model, list) else [model]
    objects = TrackedObjects({f"model.{i}": each for i, each in enumerate(models)}, optimizers, {})
    for prefix, value, extractor in objects.items():
        extractor.check(prefix, value)
    return objects


def places(value: TrackedObjects) -> dict[str, tuple[Any, Any, Any]]:
    """Returns name → shape of the piece, shape of the whole, offset."""
    return {leaf.name: (leaf.shape, leaf.global_shape, leaf.global_offset) for leaf in value.bind().leaves()}


def test_names_and_regions_are_those_of_the_whole_model():
    chunk = wrapped(Chunk())
    assert isinstance(extractor_of(chunk), MegatronModuleExtractor)
    assert places(tracked(chunk)) == {
        "model.0.layers.1.norm": ((3,), (3,), (0,)),
        "model.0.layers.1.rows": ((2, 3), (4, 3), (2, 0)),
        "model.0.layers.1.columns": ((4, 3), (4, 6), (0, 3)),
        "model.0.layers.1.gated[tp 1 of 2]": ((4, 2), (4, 2), (0, 0)),
        "model.0.layers.1.experts[6 of 8]": ((2, 2), (2, 2), (0, 0)),
        "model.0.embedding": ((4, 3), (8, 3), (4, 0)),
        "model.0.layers.1.bias": ((2,), (2,), (0,)),
        "model.0.layers.0.cache[pp 1 of 2]": ((2,), (2,), (0,)),
    }


def test_buffers_are_staged():
    assert tracked(Chunk()).bind().staged == {"model.0.layers.1.bias", "model.0.layers.0.cache[pp 1 of 2]"}


def test_names_do_not_depend_on_the_chunk():
    other = BASE()
    other.sharded_state_dict = lambda prefix, metadata: {}
    assert places(tracked([other, wrapped(Chunk())])).keys() >= {"model.0.layers.1.rows", "model.0.embedding"}


def test_a_gated_expert_tensor_is_named_by_its_expert_ranks():
    chunk = Chunk()
    chunk.layers[0].gated.allreduce = False
    assert "model.0.layers.1.gated[tp 0 of 1, ep 3 of 4]" in places(tracked(chunk))


def test_a_parameter_missing_in_sharded_state_dict_is_refused():
    chunk = Chunk()
    chunk.extra = nn.Parameter(torch.rand(2))
    with pytest.raises(UnsupportedState, match=r"extra is not in Chunk\.sharded_state_dict"):
        tracked(chunk).bind()


def test_unsupported_models_are_refused(parallel_state):
    fsdp = type("FullyShardedDataParallel", (BASE,), {})()
    with pytest.raises(UnsupportedState, match="FullyShardedDataParallel"):
        tracked(fsdp)
    with pytest.raises(UnsupportedState, match="has no 'sharded_state_dict'"):
        tracked(BASE())
    parallel_state.model_parallel_is_initialized = lambda: False
    with pytest.raises(UnsupportedState, match="initialize_model_parallel"):
        tracked(Chunk())


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_fp32_main_parameters_have_the_regions_of_the_models():
    chunk = Chunk()
    layer = chunk.layers[0]
    mains = [layer.rows.detach().clone(), layer.gated.detach().clone()]
    low = of_kind(
        megatron.FLOAT16, optimizer=adamw([*mains, layer.norm]), config=SimpleNamespace(), grad_scaler=None,
        float16_groups=[[layer.rows, layer.gated]], fp32_from_float16_groups=[mains],
    )  # fmt: skip
    step(low.optimizer)
    found = places(tracked(chunk, low))
    assert found["optimizer.0.0.main.model.0.layers.1.rows"] == ((2, 3), (4, 3), (2, 0))
    assert found["optimizer.0.0.exp_avg.optimizer.0.0.main.model.0.layers.1.rows"] == ((2, 3), (4, 3), (2, 0))
    assert "optimizer.0.0.exp_avg.optimizer.0.0.main.model.0.layers.1.gated[tp 1 of 2]" in found
    assert "optimizer.0.0.exp_avg.model.0.layers.1.norm" in found
    assert not [name for name in found if "main" in name and "norm" in name]


def test_a_distributed_optimizer_has_slices():
    chunk = Chunk()
    value = distributed(chunk, {"rows": (1, 4), "columns": (2, 7), "gated": (0, 3)})
    step(value.optimizer)
    found = places(tracked(chunk, value))
    main = "optimizer.0.0.main.model.0.layers.1."
    assert found[f"{main}rows.flat"] == ((3,), (12,), (7,))
    assert found[f"{main}columns.flat[of 0:4,3:6]"] == ((5,), (12,), (2,))
    assert found[f"{main}gated.flat[tp 1 of 2]"] == ((3,), (8,), (0,))
    assert found[f"optimizer.0.0.exp_avg.{main}rows.flat"] == ((3,), (12,), (7,))
    assert found[f"optimizer.0.0.step.{main}rows.flat"] == ((), (), ())


def test_moments_are_leaves_but_views_of_fp32_parameters_are_not():
    chunk = Chunk()
    value = distributed(chunk, {"rows": (1, 4)}, view="rows")
    step(value.optimizer)
    found = places(tracked(chunk, value))
    assert [name for name in found if name.endswith(".flat")] == [
        f"optimizer.0.0.{key}.model.0.layers.1.rows.flat" for key in ("step", "exp_avg", "exp_avg_sq")
    ]


def test_a_range_that_does_not_fit_the_main_parameter_is_refused():
    chunk = Chunk()
    value = distributed(chunk, {"rows": (1, 4)})
    value._get_model_param_range_map = lambda model: {"param": SimpleNamespace(start=1, end=3)}
    with pytest.raises(UnsupportedState, match="has 3 elements, but Megatron says that it is 1 to 3"):
        tracked(chunk, value).bind()


def chained(*values: Any) -> Any:
    return of_kind(megatron.CHAINED, chained_optimizers=list(values), said=[])


def test_moments_are_predicted_and_created_in_their_member():
    dense, experts = Chunk(), Chunk()
    before = chained(distributed(dense, {"rows": (1, 4)}), distributed(dense, {"expert": (0, 3)}))
    live = tracked(dense, before)
    predicted = live.predict(live.names())
    for each in before.chained_optimizers:
        step(each.optimizer)
    bound = live.bind()
    assert {leaf.name for leaf in predicted} == {
        name for name in bound.tensors if ".exp_avg" in name or ".step." in name
    }
    assert all(leaf in bound.leaves() for leaf in predicted)
    fresh = chained(distributed(experts, {"rows": (1, 4)}), distributed(experts, {"expert": (0, 3)}))
    other = tracked(experts, fresh)
    other.make(predicted, HugePageBuffer(0))
    assert other.bind().tensors.keys() == bound.tensors.keys()
    for name, tensor in other.bind().tensors.items():
        tensor.detach().copy_(bound.tensors[name])
    other.restore(live.capture(live.names()), other.names())
    for each in (before, fresh):
        for member in each.chained_optimizers:
            step(member.optimizer)
    assert all(torch.equal(tensor, bound.tensors[name]) for name, tensor in other.bind().tensors.items())


def test_groups_are_restored_by_their_settings_not_by_their_parameters():
    chunk = Chunk()
    value, rest = distributed(chunk, {"rows": (1, 4)}), distributed(chunk, {"columns": (0, 2)})
    value.optimizer.param_groups[0]["lr"] = 0.25
    source, other = tracked(chunk, value), tracked(chunk, rest)
    saved = source.capture(source.names())
    assert saved == {**saved, "optimizer.0": {**saved["optimizer.0"]}} and "rows" not in repr(saved)
    other.restore(saved, other.names())
    assert rest.optimizer.param_groups[0]["lr"] == 0.25
    rest.optimizer.param_groups[0]["wd_mult"] = 0.0
    with pytest.raises(LayoutChanged, match="wd_mult"):
        other.restore(saved, other.names())


def test_the_loss_scale_is_a_leaf_and_its_trackers_are_restored():
    def scaler(growth: int) -> Any:
        return SimpleNamespace(_scale=torch.tensor([8.0]), _growth_tracker=growth, _hysteresis_tracker=2)

    chunk = Chunk()
    value = distributed(chunk, {"rows": (1, 4)})
    value.grad_scaler = scaler(5)
    found = tracked(chunk, value)
    assert "optimizer.0.0.scale" in found.bind().staged
    saved = found.capture(found.names())
    value.grad_scaler = scaler(0)
    assert not found.bind().is_current() or found.bind().tensors["optimizer.0.0.scale"] is value.grad_scaler._scale
    found.restore(saved, found.names())
    assert value.grad_scaler._growth_tracker == 5
    value.grad_scaler = None
    with pytest.raises(LayoutChanged, match="dynamic loss scale"):
        found.restore(saved, found.names())


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("megatron.core.optimizer.layer_wise_optimizer.LayerWiseDistributedOptimizer", {}, "LayerWiseDistributedOptimizer"),
        (megatron.FP32, {"config": SimpleNamespace(use_precision_aware_optimizer=True)}, "use_precision_aware_optimizer"),
        (megatron.FP32, {"config": SimpleNamespace(optimizer_cpu_offload=True)}, "optimizer_cpu_offload"),
        (megatron.FP32, {"config": SimpleNamespace(), "ddp_config": SimpleNamespace(overlap_param_gather=True)},
         "overlap_param_gather"),
        (megatron.FP32, {"config": SimpleNamespace(overlap_param_gather_with_optimizer_step=True)}, "with_optimizer_step"),
        (megatron.FP32, {"config": SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=True)}, "mxfp8"),
        (megatron.FP32, {"config": SimpleNamespace(), "ddp_config": SimpleNamespace(use_megatron_fsdp=True)}, "Megatron-FSDP"),
        (megatron.DISTRIBUTED, {"config": SimpleNamespace(), "optimizer": None}, "has no 'model_float16_groups'"),
    ],
)  # fmt: skip
def test_unsupported_optimizers_are_refused_by_name(kind, values, message):
    for value in (of_kind(kind, **values), chained(of_kind(kind, **values))):
        assert isinstance(extractor_of(value), MegatronExtractor)
        with pytest.raises(UnsupportedState, match=message):
            MegatronExtractor().check("optimizer.0", value)


def test_a_member_without_parameters_has_no_leaves():
    chunk = Chunk()
    idle = of_kind(megatron.FP32, is_stub_optimizer=True, config=SimpleNamespace(), optimizer=None)
    found = tracked(chunk, chained(idle, distributed(chunk, {"rows": (1, 4)})))
    assert {name[:12] for name in found.bind().tensors if name.startswith("opt")} == {"optimizer.0."}
    assert all(name.startswith("optimizer.0.1.") for name in found.bind().tensors if name.startswith("opt"))


def test_before_runs_ahead_of_the_outermost_step_and_after_behind_it():
    value = chained()
    type(value).step = lambda self: self.said.append("step")
    hooks = MegatronExtractor().hook(
        value, lambda: value.said.append("before"), lambda owner: owner.said.append("after")
    )
    value.step()
    for hook in hooks:
        hook.remove()
    value.step()
    assert value.said == ["before", "step", "after", "step"]


def test_waits_for_neighbours_are_idle_and_the_users_timers_still_run():
    events: list[str] = []

    @contextmanager
    def idle():
        events.append("idle")
        yield
        events.append("busy")

    own = lambda name, log_level: SimpleNamespace(  # noqa: E731
        start=lambda barrier=False: events.append(f"start {name}"), stop=lambda: events.append(f"stop {name}")
    )
    for timers in (IdleTimers(idle, own), IdleTimers(idle)):
        for name in ("forward-recv", "forward-compute", "forward-send-backward-recv", "forward-send"):
            timers(name, log_level=2).start()
            timers(name, log_level=2).stop()
    wait, work = ["idle", "busy"], []
    assert events == [
        "start forward-recv", *wait, "stop forward-recv", "start forward-compute", "stop forward-compute",
        "start forward-send-backward-recv", *wait, "stop forward-send-backward-recv", "start forward-send",
        "stop forward-send", *wait, *work, *wait,
    ]  # fmt: skip


def test_a_copy_of_a_model_has_the_users_timers():
    """A session can't be copied, and each module of Megatron has the config with its timers."""

    class Uncopied:
        def __getstate__(self):
            raise TypeError("a Session can't be copied or sent to another process")

        def idle(self):
            raise AssertionError("not called")

    config = SimpleNamespace(timers=IdleTimers(Uncopied().idle, ["own"]))
    assert copy.deepcopy(config).timers == ["own"]
    assert copy.deepcopy(SimpleNamespace(timers=IdleTimers(Uncopied().idle))).timers is None


def tracker_of(states: dict[str, Any]) -> Any:
    return SimpleNamespace(get_states=lambda: dict(states), set_states=states.update)


def test_random_states_are_restored_and_those_of_cuda_graphs_are_refused():
    states = {"model-parallel-rng": torch.zeros(4, dtype=torch.uint8)}
    first = RandomStates(tracker_of(states), 1)
    held = first.state_dict()
    states["model-parallel-rng"] = torch.ones(4, dtype=torch.uint8)
    first.load_state_dict(held)
    assert first.state_dict()["states"]["model-parallel-rng"].sum() == 0
    states["model-parallel-rng"] = torch.Generator()
    with pytest.raises(UnsupportedState, match="CUDA graphs"):
        RandomStates(tracker_of(states), 1)


@pytest.mark.parametrize(("place", "expected"), [(0, 10), (1, 11), (2, 99)])
def test_random_states_for_another_number_of_ranks_follow_the_tensor_parallel_rank(place, expected):
    """Pipeline stages have drawn different numbers.

    A new tensor-parallel rank keeps its own seed.
    """
    held = [{"tp": tp, "states": {"rng": torch.tensor([10 * (stage + 1) + tp])}} for stage in (0, 1) for tp in (0, 1)]
    states = {"rng": torch.tensor([99])}
    RandomStates(tracker_of(states), place).load_state_dicts(held)
    assert states["rng"].item() == expected


def test_the_random_state_within_experts_follows_the_ranks_in_expert_parallelism():
    """Two expert-parallel ranks have one tensor-parallel rank, and other seeds within experts."""
    held = [
        {"tp": 0, "expert": [0, ep], "states": {"rng": torch.tensor([7]), EXPERT: torch.tensor([10 + ep])}}
        for ep in (0, 1)
    ]
    for ep, expected in ((0, 10), (1, 11), (2, 99)):
        states = {"rng": torch.tensor([99]), EXPERT: torch.tensor([99])}
        RandomStates(tracker_of(states), 0, (0, ep)).load_state_dicts(held)
        assert (states["rng"].item(), states[EXPERT].item()) == (7, expected)


def test_the_random_state_of_another_tensor_parallel_rank_is_not_taken(capsys):
    """Two stages become two tensor-parallel ranks, whose dropout must not be equal."""
    states = {"rng": torch.tensor([99])}
    RandomStates(tracker_of(states), 1).load_state_dict({"tp": 0, "states": {"rng": torch.tensor([7])}})
    assert states["rng"].item() == 99
    assert "no old rank had the tensor-parallel rank 1" in capsys.readouterr().err


def test_a_schedule_that_a_checkpoint_has_moved_continues_at_the_held_step():
    """Megatron's load_state_dict adds the held steps to those of the checkpoint."""
    scheduler = SimpleNamespace(num_steps=50, state_dict=lambda: {"num_steps": scheduler.num_steps})

    def load_state_dict(state):
        scheduler.num_steps += state["num_steps"]

    scheduler.load_state_dict = load_state_dict
    schedule = Schedule(scheduler)
    assert schedule.state_dict() == {"num_steps": 50}
    schedule.load_state_dict({"num_steps": 70})
    assert scheduler.num_steps == 70
