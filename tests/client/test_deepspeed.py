"""What of DeepSpeed's engine can be shown without it; the rest is run by `make test-trainers`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reft.client.extract.deepspeed import DeepSpeedExtractor
from reft.client.extract.registry import extractor_of
from reft.errors import UnsupportedState


def kind(name: str, **values: Any) -> Any:
    """An object whose class is called as one of DeepSpeed's."""
    module, _, short = name.rpartition(".")
    made = type(short, (), {"__module__": module})()
    vars(made).update(values)
    return made


def engine(optimizer: Any, **values: Any) -> Any:
    counters = {"global_steps": 3, "global_samples": 12, "skipped_steps": 1, "micro_steps": 6}
    made = kind("deepspeed.runtime.engine.DeepSpeedEngine", optimizer=optimizer, said=[], **{**counters, **values})
    type(made)._take_model_step = lambda self, _: self.said.append("step")
    return made


def zero(**values: Any) -> Any:
    parts = {"single_partition_of_fp32_groups": [torch.ones(4)], "real_dp_process_group": [None], "partition_size": [4],
             "loss_scaler": SimpleNamespace(cur_scale=2.0, dtype=torch.half), "optimizer": None}  # fmt: skip
    return kind("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer", **{**parts, **values})


def test_the_window_ends_before_the_engines_own_step_and_the_mark_follows_all_of_it():
    value = engine(zero())
    hooks = DeepSpeedExtractor().hook(value, lambda: value.said.append("before"), lambda its: its.said.append("after"))
    value._take_model_step(None)
    for hook in hooks:
        hook.remove()
    value._take_model_step(None)
    assert value.said == ["before", "step", "after", "step"]


def test_an_engine_is_known_by_its_name_and_zero_1_and_2_are_let_pass():
    value = engine(zero())
    found = extractor_of(value)
    assert isinstance(found, DeepSpeedExtractor)
    found.check("optimizer.0", value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (engine(kind("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3")), "DeepSpeedZeroOptimizer_Stage3"),
        (engine(zero(), has_moe_layers=True), "experts"),
        (engine(zero(cpu_offload=True)), "offloaded"),
        (engine(zero(), mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 2)), "tensor parallelism"),
    ],
)
def test_what_is_not_held_is_refused_by_name(value, said):
    with pytest.raises(UnsupportedState, match=said):
        DeepSpeedExtractor().check("optimizer.0", value)


def test_another_version_is_refused_with_the_one_that_was_tested():
    other = zero()
    del other.partition_size
    with pytest.raises(UnsupportedState, match=r"no 'partition_size'; reft was tested with 0\.19"):
        DeepSpeedExtractor().check("optimizer.0", engine(other))
