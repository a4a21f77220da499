"""A small Llama: trained with reft and FSDP2, or loaded from an export without reft.

torchrun … exported_llama.py train OUT      trains; writes the logits of the last step
python -I exported_llama.py load PATH OUT   from_pretrained; compares the logits
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
TOKENS = torch.arange(24).reshape(2, 12) % SIZES["vocab_size"]


def train(out: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import reft

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = reft.attach(model, optimizer)
    for _ in session.steps(4):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert session.seal(timeout=60)
    with torch.no_grad():
        logits = model.eval()(input_ids=TOKENS).logits
    if dist.get_rank() == 0:
        with open(out, "wb") as file:  # numpy adds a suffix to names
            np.save(file, logits.numpy())
        CONFIG.save_pretrained(out.parent)
    session.close()
    dist.destroy_process_group()


class NoReft:
    """Refuses to import reft."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("reft", "reft_daemon"):
            raise ImportError(f"{name} is not installed here")


def load(path: Path, out: Path) -> None:
    sys.meta_path.insert(0, NoReft())
    model, found = LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    with torch.no_grad():
        logits = model.eval()(input_ids=TOKENS).logits
    assert np.array_equal(logits.numpy(), np.load(out))
    print("equal")


if __name__ == "__main__":
    train(Path(sys.argv[2])) if sys.argv[1] == "train" else load(Path(sys.argv[2]), Path(sys.argv[3]))
