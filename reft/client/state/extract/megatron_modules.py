"""Megatron-core's models: names and places as its own distributed checkpoints have them.

    chunk (stage 1 of 2, tp 0 of 2)                     sharded_state_dict ─► key, global shape, offset ─► name, box
      decoder.layers.0.mlp.linear_fc2.weight (32, 64)     decoder.layers.1.mlp.linear_fc2.weight   (32, 128) at (0, 0)
      decoder.layers.0.input_layernorm.weight (32,)       decoder.layers.1.input_layernorm.weight  whole, on every tp rank
      output_layer.weight, tied to the first stage's      embedding.word_embeddings.weight: a replica of that
      decoder.layers.0.mlp.linear_fc1.weight, gated       no box: its halves lie apart. "[tp 0 of 2]" is in its name

So layers are numbered through all stages, virtual ones too, experts through all their ranks, and a name never says on which
rank or in which chunk something lies; data parallel and context parallel ranks have the same. What Megatron builds of several
boxes (gated or fused projections, grouped experts) is one piece of its tensor- and expert-parallel rank, and fits no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from reft.client.state.extract.dtensor import Region
from reft.client.state.extract.modules import ModuleExtractor, note_structure
from reft.client.state.parameters import NamedParameter, ParameterNames
from reft.client.state.tensors import TensorIndex
from reft.core.layout.flat_ranges import placed
from reft.errors import UnsupportedState

TESTED = "0.16.1"
# A name for each layer, and for each expert, instead of one for a stack of them: what is gated has no place in a stack.
EACH = {"non_homogeneous_layers": True, "singleton_local_shards": True}


class MegatronModuleExtractor(ModuleExtractor):
    """For megatron.core.transformer.module.MegatronModule: model chunks, wrapped or not."""

    def check(self, prefix: str, value: nn.Module) -> None:
        """Refuses by name what was not tried."""
        from megatron.core import parallel_state

        if "FullyShardedDataParallel" in type(value).__name__:
            raise UnsupportedState(
                f"{prefix} is Megatron's {type(value).__name__}, which this version does not hold.",
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
                f"{prefix} is a part of a model, and nobody has said which.",
                "call megatron.core.parallel_state.initialize_model_parallel before attach",
            )

    def parameters(self, prefix: str, value: nn.Module, known: ParameterNames) -> Iterator[NamedParameter]:
        """As Megatron's checkpoints call them, whatever the chunk."""
        places = _places(value)
        for slot in self.slots(prefix, value, "_parameters"):
            if id(slot.tensor) not in places:
                raise UnsupportedState(
                    f"{slot.name} is not in {type(unwrapped(value)).__name__}.sharded_state_dict, so nobody can tell which "
                    "part of the model it is.",
                    "give the module that has it a sharded_state_dict",
                )
            name, box = places[id(slot.tensor)]
            yield NamedParameter(f"{_common(prefix)}.{name}", slot.tensor, slot.tensor, box)

    def bind(self, found: TensorIndex, prefix: str, value: nn.Module, names: ParameterNames) -> None:
        """Parameters, and buffers as staged leaves: those that checkpoints do not have belong to their chunk and stage."""
        note_structure(found, [*value.named_modules()])
        for slot in self.slots(prefix, value, "_parameters"):
            named = names[id(slot.tensor)]
            found.add(named.name, slot.place, slot.key, slot.tensor, box=named.box)
        places = _places(value)
        for slot in self.slots(prefix, value, "_buffers"):
            shape = tuple(slot.tensor.shape)
            own = (slot.name, Region(shape, (0,) * len(shape), f"[{_stage()}]"))
            name, box = places.get(id(slot.tensor), own)
            full = name if name == slot.name else f"{_common(prefix)}.{name}"
            found.add(full, slot.place, slot.key, slot.tensor, staged=True, box=box)


def unwrapped(module: Any) -> Any:
    """The model in Megatron's wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def _common(prefix: str) -> str:
    """One prefix for all chunks of a model: names are those of the whole model."""
    return re.sub(r"^model\.\d+$", "model.0", prefix)


def _places(module: nn.Module) -> dict[int, tuple[str, Region | None]]:
    """id of a parameter or buffer → its name in the whole model, and where it lies; None: it is the whole."""
    found: dict[int, tuple[str, Region | None]] = {}
    for each in unwrapped(module).sharded_state_dict(prefix="", metadata=dict(EACH)).values():
        tensor = getattr(each, "data", None)
        if not isinstance(tensor, torch.Tensor):
            continue
        shape = tuple(tensor.shape)
        if hasattr(each, "global_offset"):
            name, whole, offset = placed(each.key, each.prepend_axis_num, each.global_shape, each.global_offset)
            found[id(tensor)] = name, None if whole == shape else Region(whole, offset)
        else:
            found[id(tensor)] = each.key, Region(shape, (0,) * len(shape), f"[{_rank_of(tensor)}]")
    return found


def _rank_of(parameter: torch.Tensor) -> str:
    """Whose piece a parameter is that is no box of a whole one."""
    from megatron.core import parallel_state as ranks

    if getattr(parameter, "allreduce", True):
        return f"tp {ranks.get_tensor_model_parallel_rank()} of {ranks.get_tensor_model_parallel_world_size()}"
    tp, tps = ranks.get_expert_tensor_parallel_rank(), ranks.get_expert_tensor_parallel_world_size()
    ep, eps = ranks.get_expert_model_parallel_rank(), ranks.get_expert_model_parallel_world_size()
    return f"tp {tp} of {tps}, ep {ep} of {eps}"


def _stage() -> str:
    from megatron.core import parallel_state as ranks

    return f"pp {ranks.get_pipeline_model_parallel_rank()} of {ranks.get_pipeline_model_parallel_world_size()}"
