"""How long attach and each mark take to find the state, for FSDP2 with AdamW.

    python bench/extract.py [PARAMETERS] [--json FILE]

One process takes the part of rank 0 of 8 (torch's fake process group), so nothing is sent. attach
finds the names, the tensors, the state predicted on `meta`, and the layout. A mark checks whether
the index of the tensors is still current. CPU seconds of one thread, the least of three.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import result
from bench.options import count, output
from bench.result import Row
from reft.client.state.host_state import HostState
from reft.client.state.tracked_objects import TrackedObjects
from reft.core.layout.layout import pack


def least(work: Callable[[], Any]) -> float:
    """Returns the least CPU seconds of three runs."""
    times = []
    for _ in range(3):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("parameters", type=count, nargs="?", default=500)
    parser.add_argument("--json", type=output, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,))
    block = lambda: nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), nn.LayerNorm(64))  # noqa: E731
    model = nn.Sequential(*(block() for _ in range(options.parameters // 6)))
    for each in model:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tracked = TrackedObjects({"model.0": model}, [optimizer], {})
    names = tracked.names()
    parameters = len(list(model.parameters()))
    attach = {
        "names": least(tracked.names),
        "bindings": least(tracked.bind),
        "foreseen state": least(lambda: tracked.predict(names)),
        "layout, all included": least(lambda: pack([*tracked.bind().leaves(), *tracked.predict(names)]).digest),
    }
    print(f"{parameters} parameters")
    print("attach: " + ", ".join(f"{name} {value:.3f} s" for name, value in attach.items()))
    host = HostState(tracked, {})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensor_index = tracked.bind()
    mark = {
        "holds": 1000 * least(tensor_index.is_current),
        "versions": 1000 * least(tensor_index.versions),
        "host state": 1000 * least(lambda: host.capture(0)),
    }
    print(
        f"each mark, {len(tensor_index.tensors)} leaves: "
        + ", ".join(f"{name} {value:.1f} ms" for name, value in mark.items())
    )
    if options.json:
        rows = [Row(f"attach: {name}", "s of a core", None, value) for name, value in attach.items()]
        rows += [Row(f"each mark: {name}", "ms of a core", None, value) for name, value in mark.items()]
        notes = [f"{len(tensor_index.tensors)} leaves. The least of three measurements each."]
        result.write(options.json, __file__, f"Finding the state, FSDP2, {parameters} parameters", rows, notes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
