"""Reads exports as somebody without reft would; also a program, which refuses to import reft.

python -I exported.py FOLDER WORLD    loads FOLDER into WORLD ranks; prints digests as JSON
                      FOLDER 0        loads it by safetensors alone
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing

warnings.filterwarnings("ignore", "torch.distributed is disabled")


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(each) for name, each in sorted(tensors.items())}


def reader_of(folder: Path) -> Any:
    if (folder / ".metadata").exists():
        return dcp.FileSystemReader(folder)
    return dcp.HuggingFaceStorageReader(str(folder))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint of torch, or of safetensors, by torch's own loader."""
    entries = reader_of(folder).read_metadata().state_dict_metadata
    targets = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "chunks")
    }
    dcp.load(targets, storage_reader=reader_of(folder), no_dist=True)
    return targets


def safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of safetensors files, with the names that `loaded` gives to DCP's."""
    from safetensors.torch import load_file

    return {
        f"{path.name.partition('.')[0].partition('-')[0]}.{name}": each
        for path in sorted(folder.glob("*.safetensors"))
        for name, each in load_file(path).items()
    }


def sharded(rank: int, folder: str, world: int, store: str, out: str) -> None:
    """Loads into a rank's shards, of all tensors along their first dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    entries = reader_of(Path(folder)).read_metadata().state_dict_metadata
    targets = {
        name: distribute_tensor(zeros, mesh, [Shard(0)]) if zeros.dim() else zeros
        for name, entry in entries.items()
        for zeros in [torch.zeros(entry.size, dtype=entry.properties.dtype)]
    }
    dcp.load(targets, storage_reader=reader_of(Path(folder)))
    whole = {name: each.full_tensor() if each.dim() else each for name, each in targets.items()}
    if rank == 0:
        Path(out).write_text(json.dumps(digests(whole)))
    dist.barrier()
    dist.destroy_process_group()


class NoReft:
    """Refuses to import reft."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("reft", "reft_daemon"):
            raise ImportError(f"{name} is not installed here")


def main() -> None:
    sys.meta_path.insert(0, NoReft())
    folder, world = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        if world < 2:
            print(json.dumps(digests(loaded(Path(folder)) if world else safetensors(Path(folder)))))
            return
        out = f"{scratch}/out"
        multiprocessing.spawn(sharded, (folder, world, f"{scratch}/store", out), nprocs=world)
        print(Path(out).read_text())


if __name__ == "__main__":
    main()
