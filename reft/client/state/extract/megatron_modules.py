"""Megatron-core's models: names and regions as in its own distributed checkpoints.

    chunk (stage 1 of 2, tp 0 of 2) ─► sharded_state_dict: key, global shape, offset ─► name, region
      decoder.layers.0.mlp.linear_fc2.weight (32, 64)
          ─► decoder.layers.1.mlp.linear_fc2.weight (32, 128) at (0, 0)
      decoder.layers.0.input_layernorm.weight (32,)
          ─► decoder.layers.1.input_layernorm.weight, whole, on every tp rank
      output_layer.weight, tied to the first stage's
          ─► embedding.word_embeddings.weight, a replica of that
      decoder.layers.0.mlp.linear_fc1.weight, gated
          ─► no region: its halves lie apart; "[tp 0 of 2]" is in its name

Layers are numbered through all stages, also virtual ones, and experts through all their ranks. A
name does not depend on the rank or the chunk, except for such tags. Data parallel and context
parallel ranks have the same leaves. Megatron builds some tensors of several boxes: gated or fused
projections, and grouped experts. Such a tensor is one piece of its tensor- and expert-parallel
rank, and fits no other rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from reft.client.state.extract.dtensor import Region
from reft.client.state.extract.modules import ModuleExtractor, note_form, track_structure
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.tensors import TensorIndex
from reft.client.torch_internals import buffers_of, parameters_of
from reft.core.layout.flat_ranges import split_numbering_axes
from reft.core.layout.model_form import ModelForm
from reft.errors import UnsupportedState

TESTED = "0.16.1"
# One name for each layer and each expert, not one for a stack: gated tensors have no place in a
# stack.
SHARDED_STATE_DICT_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": True}


class MegatronModuleExtractor(ModuleExtractor):
    """Extracts the state of megatron.core.transformer.module.MegatronModule.

    The objects are model chunks, wrapped or not.
    """

    def check(self, prefix: str, value: nn.Module) -> None:
        """Refuses features that were never tried, by name."""
        from megatron.core import parallel_state

        if "FullyShardedDataParallel" in type(value).__name__:
            raise UnsupportedState(
                f"{prefix} is Megatron's {type(value).__name__}, which this version does not support.",
                "wrap it in megatron.core.distributed.DistributedDataParallel",
            )
        if not hasattr(unwrapped(value), "sharded_state_dict"):
            raise UnsupportedState(
                f"{prefix}: this megatron-core's {type(unwrapped(value)).__name__} has no 'sharded_state_dict'; reft was "
                f"tested with {TESTED}.",
                f"pip install megatron-core=={TESTED}",
            )
        if not parallel_state.model_parallel_is_initialized():
            raise UnsupportedState(
                f"{prefix} is a part of a model, and it is unknown which part.",
                "call megatron.core.parallel_state.initialize_model_parallel before attach",
            )

    def parameters(self, prefix: str, value: nn.Module, known: ParameterNames) -> Iterator[NamedParameter]:
        """Yields the parameters of any chunk, named as in Megatron's checkpoints."""
        regions = _names_and_regions(value)
        for module_tensor in self.slots(prefix, value, parameters_of):
            if id(module_tensor.tensor) not in regions:
                raise UnsupportedState(
                    f"{module_tensor.name} is not in {type(unwrapped(value)).__name__}.sharded_state_dict, so reft cannot "
                    "tell which part of the model it is.",
                    "give the tensor's module a sharded_state_dict",
                )
            name, box = regions[id(module_tensor.tensor)]
            yield NamedParameter(f"{_common(prefix)}.{name}", module_tensor.tensor, module_tensor.tensor, box)

    def bind(self, index: TensorIndex, prefix: str, value: nn.Module, names: ParameterNames) -> None:
        """Adds parameters, and buffers as staged leaves.

        Buffers that are not in checkpoints belong to their chunk and stage.
        """
        track_structure(index, [*value.named_modules()])
        for module_tensor in self.slots(prefix, value, parameters_of):
            named = names[id(module_tensor.tensor)]
            index.add(named.name, module_tensor.place, module_tensor.key, module_tensor.tensor, box=named.box)
        regions = _names_and_regions(value)
        for module_tensor in self.slots(prefix, value, buffers_of):
            shape = tuple(module_tensor.tensor.shape)
            default = (module_tensor.name, Region(shape, (0,) * len(shape), f"[{_stage()}]"))
            name, box = regions.get(id(module_tensor.tensor), default)
            full = name if name == module_tensor.name else f"{_common(prefix)}.{name}"
            added = index.add(full, module_tensor.place, module_tensor.key, module_tensor.tensor, staged=True, box=box)
            note_form(index, added, ModelForm(is_temporary=id(module_tensor.tensor) not in regions))


def unwrapped(module: Any) -> Any:
    """Returns the model inside Megatron's wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def _common(prefix: str) -> str:
    """Returns one prefix for all chunks of a model."""
    return re.sub(r"^model\.\d+$", "model.0", prefix)


def _names_and_regions(module: nn.Module) -> dict[int, tuple[str, Region | None]]:
    """Returns id of a parameter or buffer → name in the whole model, and region.

    The region is None if the tensor is whole.
    """
    regions: dict[int, tuple[str, Region | None]] = {}
    for each in unwrapped(module).sharded_state_dict(prefix="", metadata=dict(SHARDED_STATE_DICT_METADATA)).values():
        tensor = getattr(each, "data", None)
        if not isinstance(tensor, torch.Tensor):
            continue
        shape = tuple(tensor.shape)
        if hasattr(each, "global_offset"):
            name, whole, offset = split_numbering_axes(
                each.key, each.prepend_axis_num, each.global_shape, each.global_offset
            )
            regions[id(tensor)] = name, None if whole == shape else Region(whole, offset)
        else:
            regions[id(tensor)] = each.key, Region(shape, (0,) * len(shape), f"[{_rank_of(tensor)}]")
    return regions


def _rank_of(parameter: torch.Tensor) -> str:
    """Returns the parallel rank of a parameter that is not one box of a whole."""
    from megatron.core import parallel_state as ranks

    if getattr(parameter, "allreduce", True):
        return f"tp {ranks.get_tensor_model_parallel_rank()} of {ranks.get_tensor_model_parallel_world_size()}"
    tp, tps = ranks.get_expert_tensor_parallel_rank(), ranks.get_expert_tensor_parallel_world_size()
    ep, eps = ranks.get_expert_model_parallel_rank(), ranks.get_expert_model_parallel_world_size()
    return f"tp {tp} of {tps}, ep {ep} of {eps}"


def _stage() -> str:
    from megatron.core import parallel_state as ranks

    return f"pp {ranks.get_pipeline_model_parallel_rank()} of {ranks.get_pipeline_model_parallel_world_size()}"
