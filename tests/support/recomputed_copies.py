"""Trains torch's ZeRO, whose moments nodes copy, and waits until each step is protected."""

from __future__ import annotations

import faulthandler
import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import reft
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.daemons import until

MARKS = 6
DEADLINE_S = 200.0  # of all cases of a rank; shortly before, the rank writes where it stands
WIDTH = 200  # a moment of such a layer is too large for a capsule
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"kind": torch.optim.AdamW},
    "adam-l2": {"kind": torch.optim.Adam, "weight_decay": 0.1, "amsgrad": True},
    "sgd": {"kind": torch.optim.SGD, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}

DRIFTING = "drifting"  # a case whose owner does what no replay repeats


def work(
    rank: int, world: int, port: int, daemon: str, out: str, cases: Sequence[str] = tuple(CASES), job: str = "",
    pause: int = 0, protect: str = "aor", marks: int = MARKS, held_from: int = 1 << 30, failpoints: str = "",
    device: str = "cpu",
) -> None:  # fmt: skip
    """Runs cases in one process of the group, and writes how each turn was made.

    Args:
        rank, world, port: of the process group.
        daemon: this node's.
        out: folder for the results.
        cases: names of cases.
        job: name of the job; empty: that of the case.
        pause: stands still once this step is protected, until a file "go" is in the folder.
        held_from: the first step that the test's daemons don't protect; such steps become whole.
        failpoints: of this process.
        device: of the model; ranks may share one.
        protect: how the moments are protected.
        marks: number of steps to train.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), REFT_DAEMON=daemon)
    os.environ.update(REFT_FAILPOINTS=failpoints, RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with open(Path(out, f"{rank}.log"), "wb") as log:
        os.dup2(log.fileno(), 2)  # what reft says
    faulthandler.dump_traceback_later(DEADLINE_S - 10)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    try:
        dist.init_process_group("gloo")
        for name in cases:
            paused = Path(out, f"{rank}.paused") if pause else None
            results[name] = train(name, job or name, pause, paused, protect, marks, held_from, device)
        dist.destroy_process_group()
    except BaseException:
        results["error"] = traceback.format_exc()
    Path(out, f"{rank}.json").write_text(json.dumps(results))


def train(
    case: str, name: str, pause: int, paused: Path | None, protect: str, marks: int, held_from: int, device: str
) -> dict[str, Any]:
    """Returns how each turn was made on this node, and a digest of the last state."""
    torch.manual_seed(3)
    world = dist.get_world_size()
    layers = (nn.Linear(WIDTH, WIDTH) for _ in range(max(4, world)))  # each rank has moments
    model = nn.Sequential(*layers).to(device)
    ddp = DistributedDataParallel(model, find_unused_parameters=world > 2)  # else DDP regroups sums
    values = CASES.get(case, CASES["adamw"])
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), values["kind"], lr=1e-3, **{k: v for k, v in values.items() if k != "kind"}
    )
    if case == DRIFTING:
        optimizer.optim.register_step_post_hook(drift)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    turns = []
    with reft.attach(ddp, optimizer, state={"scheduler": scheduler}, job=name, protect=protect) as session:
        first = session.step
        for step in session.steps(marks):
            if step >= held_from:
                await_whole(session, step)
            elif step > first:
                turns.append(await_protected(name, step))
            if paused is not None and step == pause:
                paused.write_text(turns[-1])
                until(paused.with_name("go").exists, 200, "go")
            optimizer.zero_grad()
            torch.manual_seed(1000 * step + dist.get_rank())
            ddp(torch.randn(8, WIDTH).to(device)).square().sum().backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if world > 1:  # else nothing is exchanged
            turns.append(await_protected(name, marks))
        restored, stats = session.restored_from, session.stats()
    state = [*model.parameters(), *(each for held in optimizer.optim.state.values() for each in held.values())]
    digest = xxhash.xxh3_128()
    for tensor in state:
        digest.update(tensor.detach().cpu().numpy().tobytes())
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    moments = {
        str(numbers[id(parameter)]): [xxhash.xxh3_64_hexdigest(each.cpu().numpy().tobytes()) for each in held.values()]
        for parameter, held in optimizer.optim.state.items()
    }
    return {
        "moments": moments, "turns": turns, "restored": restored, "first": first, "state": digest.hexdigest(),
        "records": stats["records"],
    }  # fmt: skip


def await_whole(session: reft.Session, step: int) -> None:
    """Waits until a step is whole, and its record is sealed."""
    assert session.seal()
    until(lambda: session.stats()["recorded_mark"] == step, 100, f"the record of mark {step}")


def drift(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Changes the moments after each step."""
    for state in optimizer.state.values():
        state["exp_avg"].mul_(1.5)


def await_protected(job: str, step: int) -> str:
    """Waits until a step is protected; returns why this node did not recompute it."""
    with rpc.channel(os.environ["REFT_DAEMON"]) as channel:
        stub = pb_grpc.DaemonStub(channel)

        def exchange() -> pb.ExchangeStatus | None:
            found = stub.Status(pb.StatusRequest(job=job), timeout=20).jobs[0].exchange
            return found if found.protected >= step else None

        replays = until(exchange, 100, f"protected({step})").replays
        return replays[0].reason if replays else "the lanes have parity."
