"""Trains torch's ZeRO under protect="aor", and compares its gradient records with its gradients."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import reft
from reft.wire.record_format import GradientRecord, read_record
from reft.wire.slot_format import SlotMap
from tests.support.gradient_records import bytes_of, gradient_of, parameter_of
from tests.support.trainers import Trainers

MARKS = 6
WIDTH = 200  # a moment of such a layer is too large for a capsule
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"kind": torch.optim.AdamW},
    "adam with L2": {"kind": torch.optim.Adam, "weight_decay": 0.1},
    "buckets": {"kind": torch.optim.AdamW, "gradient_as_bucket_view": True},
    "every third step": {"kind": torch.optim.SGD, "momentum": 0.9, "every": 3},
}


def work(spec: dict[str, Any]) -> None:
    """Runs all cases in one process of the group, and writes what was found."""
    rank, world = str(spec["rank"]), str(spec["world"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spec["port"]), REFT_DAEMON=spec["daemon"])
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {name: train(name, **case) for name, case in CASES.items()}
    dist.destroy_process_group()
    Path(spec["out"]).write_text(json.dumps(results))


class RecordingRanks(Trainers):
    """The ranks of all cases."""

    target = staticmethod(work)


def train(
    name: str, kind: type, gradient_as_bucket_view: bool = False, every: int = 1, **values: Any
) -> dict[str, Any]:
    """Returns what is recorded of a job, and which of it differs from its gradients."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), kind, lr=1e-3, **values)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    names = {f"model.0.{name}": parameter for name, parameter in model.named_parameters()}
    seen: dict[int, tuple[dict[str, tuple[bytes, bytes]], float]] = {}
    differs: list[str] = []
    records: set[int] = set()
    with reft.attach(
        ddp, optimizer, state={"scheduler": scheduler}, job=name.replace(" ", "-"), protect="aor", every=every
    ) as session:
        recorder = session._window.snapshots.recorder
        owned = {item.name for item in recorder._plan.layout.items}
        for step in session.steps(MARKS):
            if step:
                collect(recorder, records, seen, differs)
            optimizer.zero_grad()
            torch.manual_seed(1000 * step + dist.get_rank())
            ddp(torch.randn(8, WIDTH)).square().sum().backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            taken = {each: (bytes_of(names[each].grad), bytes_of(names[each])) for each in owned}
            seen[step + 1] = taken, optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
        collect(recorder, records, seen, differs)
        stats = session.stats()
        slots = sorted(slot.name for slot in recorder._writer._slots.mapped)
    own = {f"model.0.{name}" for name, each in model.named_parameters() if each in optimizer.optim.state}
    return {
        "differs": differs, "records": sorted(records), "slots": slots, "both": sorted(owned & own),
        "owned": len(owned), "stats": {key: value for key, value in stats.items() if key.startswith("record")},
    }  # fmt: skip


def collect(recorder: Any, records: set[int], seen: dict[int, Any], differs: list[str]) -> None:
    """Compares the newest records with the gradients that training had."""
    recorder._writer.idle().result(30)
    for slot in recorder._writer._slots.mapped:
        header = slot.map.reread()
        if header.state.name == "SEALED" and header.version.step not in records:
            records.add(header.version.step)
            differs += differences(read_record(slot.map)[0], slot.map, *seen[header.version.step])


def differences(record: GradientRecord, slot: SlotMap, taken: dict[str, tuple[bytes, bytes]], lr: float) -> list[str]:
    (update,) = record.updates
    found = [f"chunk {i} of mark {record.mark}" for i in slot.bad_chunks()]
    if update.groups[0]["lr"] != lr or {leaf.name for leaf in update.leaves} != taken.keys():
        found.append(f"mark {record.mark}: {update}")
    for leaf in update.leaves:
        gradient, parameter = taken[leaf.name]
        if gradient_of(leaf, slot) != gradient or leaf.owner == dist.get_rank():
            found.append(f"gradient of {leaf.name} of mark {record.mark}")
        if leaf.param_offset >= 0 and parameter_of(leaf, slot) != parameter:
            found.append(f"parameter {leaf.name} of mark {record.mark}")
    return found
