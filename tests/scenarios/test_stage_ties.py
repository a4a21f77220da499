"""A pipeline with a tied embedding comes back, although the new stages have other seeds."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import reft
from reft.schedules import OneFOneB
from tests.support.trainers import Spec, Trainers


def digest_of(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def train_stage(spec: dict[str, Any]) -> None:
    """Trains one stage; the embedding gets the summed gradient of both stages."""
    rank = spec["rank"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(spec["port"]), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    torch.manual_seed(spec["options"]["seeds"][rank])
    model = nn.Module()
    model.embed = nn.Embedding(64, 16)
    model.add_module(("up", "down")[rank], nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = reft.attach(model, optimizer, OneFOneB(rank, 2, 4), job=spec["job"], daemon=spec["daemon"], tolerate=0)
    began, digest = session.step, digest_of(model)
    for step in session.steps(spec["steps"]):
        sum((p * (step + 1)).square().sum() for p in model.parameters()).backward()
        dist.all_reduce(model.embed.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    whole = bool(session.seal(timeout=60))
    result = {"began": began, "digest": digest, "end": digest_of(model), "whole": whole}
    Path(spec["out"]).write_text(json.dumps(result))
    session.close()
    dist.destroy_process_group()


class StageTrainers(Trainers):
    target = staticmethod(train_stage)


def trained(address: str, steps: int, seeds: list[int]) -> list[dict[str, Any]]:
    trainers = StageTrainers(Spec(address, steps=steps, options={"seeds": seeds}), 2)
    assert trainers.wait() == [0, 0], trainers.errors()[-3000:]
    return trainers.results()


def test_a_tied_embedding_comes_back_into_stages_of_different_seeds(daemon):
    first = trained(daemon.address, 4, [1, 1])
    second = trained(daemon.address, 6, [2, 3])
    for before, after in zip(first, second, strict=True):
        assert before["whole"] and after["whole"]
        assert after["began"] == 4 and after["digest"] == before["end"]


def test_embeddings_that_the_base_has_apart_stay_apart_although_the_new_ones_are_equal(daemon):
    first = trained(daemon.address, 4, [1, 2])
    second = trained(daemon.address, 6, [3, 3])
    for before, after in zip(first, second, strict=True):
        assert after["began"] == 4 and after["digest"] == before["end"]
