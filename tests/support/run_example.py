"""Runs an unchanged example, then writes its final state: `run_example.py OUT SCRIPT [ARGUMENT…]`.

OUT.RANK.json holds the losses by step, and a digest of every parameter, buffer and tensor of the
optimizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import torch


def local(value: Any) -> Any:
    """Returns this rank's part of a DTensor; a plain tensor unchanged."""
    return getattr(value, "_local_tensor", value)


def digest(value: Any) -> str:
    """Returns a digest of a tensor's bytes, or the repr of another value."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if hasattr(type(value), "__tensor_flatten__"):  # torchao's: the bytes of its inner tensors
        return " ".join(digest(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def of_optimizer(optimizer: Any) -> dict[str, str]:
    """Returns a digest of every value of an optimizer's state, and its groups."""
    content = optimizer.state_dict()
    digests = {f"{i}.{key}": digest(value) for i, state in content["state"].items() for key, value in state.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in content["param_groups"]]
    return {**digests, "groups": repr(groups)}


def of_transformers(names: dict[str, Any]) -> dict[str, Any]:
    trainer = names["trainer"]
    speeds = ("runtime", "_per_second")
    logs = [{k: v for k, v in entry.items() if not any(s in k for s in speeds)} for entry in trainer.state.log_history]
    scaler = trainer.accelerator.scaler
    scale = {"scale": scaler.get_scale()} if scaler is not None else {}
    return {"losses": logs, "optimizer": of_optimizer(trainer.optimizer), "model": trainer.model, **scale}


def of_lightning(names: dict[str, Any]) -> dict[str, Any]:
    return {"losses": names["model"].losses, "optimizer": of_optimizer(names["trainer"].optimizers[0]),
            "model": names["model"]}  # fmt: skip


def of_loop(names: dict[str, Any]) -> dict[str, Any]:
    return {"losses": names["losses"], "optimizer": of_optimizer(names["optimizer"]), "model": names["model"]}


def of_deepspeed(names: dict[str, Any]) -> dict[str, Any]:
    engine = names["engine"]
    zero, ended = engine.optimizer, {"losses": names["losses"], "model": engine.module}
    if hasattr(zero, "fp16_partitioned_groups_flat"):
        return {**ended, "optimizer": dict(of_partitions(zero)), "model": None}
    flat = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_groups")
    masters_by_group = next((getattr(zero, name) for name in flat if hasattr(zero, name)), [])
    masters = [each for group in masters_by_group for each in (group if isinstance(group, list) else [group])]
    digests = {f"master{i}": digest(each) for i, each in enumerate(masters)}
    core = zero if isinstance(zero, torch.optim.Optimizer) else zero.optimizer
    return {**ended, "optimizer": {**of_optimizer(core), **digests}}


def of_partitions(zero: Any) -> Iterator[tuple[str, str]]:
    """Yields digests of this rank's runs under ZeRO-3: parameters, masters, moments.

    Not of padding.
    """
    for s, (master, parameters) in enumerate(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)):
        flats = {"master": master, **zero.optimizer.state[master]}
        yield from ((f"{s}.{key}", digest(value)) for key, value in flats.items() if value.shape != master.shape)
        at = 0
        for parameter in parameters:
            shard = parameter.ds_tensor
            size = min(shard.numel(), max(parameter.ds_numel - parameter.ds_zero_partition_rank * shard.numel(), 0))
            name = f"{s}.{zero.param_names[parameter]}"
            yield f"{name}.weight", digest(shard[:size])
            for key, value in flats.items():
                if value.shape == master.shape:
                    yield f"{name}.{key}", digest(value[at : at + size])
            at += shard.numel()


def of_titan(names: dict[str, Any]) -> dict[str, Any]:
    from tests.support import titan_on_cpu

    trainer = names["trainer"]
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    tensors = {f"{i}.{key}": digest(local(value)) for i, state in enumerate(states) for key, value in state.items()}
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    counts = {"rates": repr(rates), "trainer": repr(trainer.state_dict())}
    # Not from model.state_dict(): it would gather, and the process group is gone.
    (model,) = trainer.model_parts
    weights = {name: digest(local(value)) for name, value in (*model.named_parameters(), *model.named_buffers())}
    return {"losses": titan_on_cpu.LOSSES, "optimizer": {**tensors, **counts, **weights}, "model": None}


def of_megatron(names: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for i, member in enumerate(names["optimizer"].chained_optimizers):
        kept = {f"{i}.{k}": v for k, v in of_optimizer(member.optimizer).items()}
        mains = [main for group in member.optimizer.param_groups for main in group["params"]]
        values |= kept | {f"{i}.main{k}": digest(main) for k, main in enumerate(mains)}
    states = names["tensor_parallel"].get_cuda_rng_tracker().get_states()
    values["runs"] = runs_of_megatron(names["model"], names["optimizer"])
    model = torch.nn.ModuleList(chunk.module.module for chunk in names["model"])
    return {"losses": names["losses"], "optimizer": values, "model": model,
            "states": {name: digest(state) for name, state in states.items()}}  # fmt: skip


def runs_of_megatron(chunks: Any, optimizer: Any) -> dict[str, Any]:
    """Returns this rank's run of each tensor, by its name in the whole model.

    For DistributedOptimizer.

    Returns:
        name → [first element, bytes in hex].
    """

    def raw(tensor: torch.Tensor) -> str:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()

    names: dict[int, str] = {}
    runs: dict[str, Any] = {}
    for chunk in chunks:
        model = chunk.module.module
        for name, parameter in model.named_parameters():
            kind, _, rest = name.partition("decoder.layers.")
            if rest and not kind:
                index, _, rest = rest.partition(".")
                name = f"layer {model.decoder.layers[int(index)].layer_number} {rest}"
            names[id(parameter)] = "embedding.word_embeddings.weight" if name == "output_layer.weight" else name
            runs[f"weight {names[id(parameter)]}"] = [0, raw(parameter)]
    for member in optimizer.chained_optimizers:
        groups = zip(member.model_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
        for parameter, main in ((p, m) for models, mains in groups for p, m in zip(models, mains, strict=True)):
            first = member._get_model_param_range_map(parameter)["param"].start
            held = {"main": main, **member.optimizer.state[main]}
            for key in ("main", "exp_avg", "exp_avg_sq"):
                runs[f"{key} {names[id(parameter)]}"] = [first, raw(held[key])]
    return runs


KINDS = {
    "megatron_gpt.py": of_megatron,
    "torchtitan_llama.py": of_titan,
    "deepspeed_zero.py": of_deepspeed,
    "deepspeed_pipeline.py": of_deepspeed,
    "accelerate_loop.py": of_loop,
    "hf_trainer.py": of_transformers,
    "lightning_fit.py": of_lightning,
    "lightning_hooks.py": of_lightning,
    "lightning_iterable.py": of_lightning,
    "lightning_resumed.py": of_lightning,
    "lightning_unfreezing.py": of_lightning,
    "resumed_trainer.py": of_transformers,
    "scaled_trainer.py": of_transformers,
    "trainer_low_bit.py": of_transformers,
    "torchao_low_bit.py": of_loop,
    "expert_parallel.py": of_loop,
}


def main() -> None:
    out, script, *arguments = sys.argv[1:]
    # "first;second": the faults of each start. Epochs don't count starts: a new layout takes an
    # epoch, too.
    faults = os.environ.get("REFT_FAILPOINTS", "").split(";")
    starts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    os.environ["REFT_FAILPOINTS"] = faults[starts] if starts < len(faults) else ""
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))  # as Python does
    if os.path.basename(script) == "torchtitan_llama.py":
        from tests.support import titan_on_cpu  # noqa: F401
    names = runpy.run_path(script, run_name="__main__")
    ended = KINDS[os.path.basename(script)](names)
    model = ended.pop("model")
    ended["tensors"] = {name: digest(local(value)) for name, value in (model.state_dict() if model else {}).items()}
    ended["random"] = torch.rand(1).item().hex()
    with open(f"{out}.{os.environ.get('RANK', '0')}.json", "w") as file:
        json.dump(ended, file)
    sys.stdout.flush()
    # Ends without destructors. In torch 2.13, the destructor of a DDP reducer waits for gloo's
    # thread with the interpreter's lock, and gloo's thread may wait for that lock to free its last
    # work. Seen in one of some ten runs on busy cores, also without reft.
    os._exit(0)


if __name__ == "__main__":
    main()
