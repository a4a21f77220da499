"""Tests of pipeline stages in attach: stage numbers of models, and common names of leaves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from reft.client.attach.arguments import AttachArguments
from reft.client.attach.stage_names import introduce_stages, modules_of
from reft.errors import ConfigError
from reft.schedules import Custom, Interleaved, OneFOneB, ZeroBubbleV
from tests.client.snapshot.test_replica_check import Exchange


def stage(index: int, module: nn.Module) -> SimpleNamespace:
    """A stand-in for torch's PipelineStage, which needs a process group."""
    return SimpleNamespace(submod=module, stage_index=index, num_stages=4)


def request(model, schedule=None, **optimizer) -> AttachArguments:
    models = model if isinstance(model, list) else [model]
    parameters = dict.fromkeys(p for each in models for p in getattr(each, "submod", each).parameters())
    return AttachArguments(model, [torch.optim.AdamW(parameters)], schedule, {}, None, "auto", 1)


def agreed(requests: list[AttachArguments]) -> list[list[str]]:
    """Returns the names of all leaves of each rank, with the predicted optimizer state."""
    rank_group = Exchange(len(requests))

    def one(rank: int):
        stages = introduce_stages(rank_group.of(rank), requests[rank].tracked)
        tracked = stages.tracked(stages.ties_now(rank_group.of(rank)))
        return [leaf.name for leaf in (*tracked.bind().leaves(), *tracked.predict(tracked.names()))]

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, range(len(requests))))


def block(bias: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 4, bias=bias)


def test_each_model_gets_its_stage_number():
    a, b, c = (block() for _ in range(3))
    assert modules_of([a], None) == {"model.0": a}
    assert modules_of([a, b], Custom()) == {"model.0": a, "model.1": b}
    assert modules_of([a], OneFOneB(2, 4, 8)) == {"model.stage2": a}
    assert modules_of([a, b], Interleaved(1, 4, 8)) == {"model.stage1": a, "model.stage5": b}
    assert modules_of([a, b], ZeroBubbleV(1, 4, 8)) == {"model.stage1": a, "model.stage6": b}
    single = SimpleNamespace(_stage=stage(3, a))
    assert modules_of([a, b], single) == {"model.stage3": a, "model.1": b}
    several = SimpleNamespace(_stages=[stage(0, a), stage(3, b)])
    assert modules_of([b, c, a], several) == {"model.stage3": b, "model.1": c, "model.stage0": a}
    assert modules_of([stage(2, a), stage(5, b)], None) == {"model.stage2": a, "model.stage5": b}
    compiled = nn.Module()
    compiled._orig_mod = a
    compiled.__class__ = type("OptimizedModule", (nn.Module,), {})
    assert modules_of([a], SimpleNamespace(_stage=stage(1, compiled))) == {"model.stage1": a}


def test_a_schedule_with_other_models_is_refused():
    with pytest.raises(ConfigError, match="were not passed as model"):
        modules_of([block()], SimpleNamespace(_stage=stage(3, block())))
    with pytest.raises(ConfigError, match="2 parts of the model a process; 1 were passed"):
        modules_of([block()], Interleaved(1, 4, 8))


def test_names_of_the_whole_model_are_kept():
    first, second = nn.Module(), nn.Module()
    first.layers, second.layers = nn.ModuleDict({"0": block()}), nn.ModuleDict({"1": block()})
    names = agreed([request(first, OneFOneB(0, 2, 4)), request(second, OneFOneB(1, 2, 4))])
    assert names[0][0] == "model.0.layers.0.weight" and names[1][0] == "model.0.layers.1.weight"
    assert "optimizer.0.exp_avg.model.0.layers.1.weight" in names[1]
    assert not any("stage" in name for each in names for name in each)


def test_layers_numbered_per_stage_are_never_replicas():
    names = agreed([request(nn.Sequential(block(seed=0)), OneFOneB(rank // 2, 2, 4)) for rank in range(4)])
    assert names[0] == names[1] and names[2] == names[3] and not set(names[0]) & set(names[2])
    assert names[2][0] == "model.stage1.0.weight"
    assert "optimizer.0.exp_avg.model.stage1.0.weight" in names[2]


def tied(own: str, seed: int = 0) -> nn.Module:
    made = nn.Module()
    torch.manual_seed(seed)
    made.embed = nn.Embedding(8, 4)
    made.add_module(own, block(True))
    made.layers = nn.ModuleList([block(seed=seed + 1)])
    return made


def test_tied_embeddings_stay_replicas_if_their_bytes_are_equal():
    for seed, together in ((0, True), (9, False)):
        names = agreed([request(tied("a"), OneFOneB(0, 2, 4)), request(tied("b", seed), OneFOneB(1, 2, 4))])
        both = set(names[0]) & set(names[1])
        found = {name for name in both if "embed" in name}
        assert both == found and bool(found) == together
        assert ("optimizer.0.exp_avg.model.0.embed.weight" in both) == together


def test_ties_of_a_base_do_not_depend_on_the_bytes():
    requests = [
        request(tied("up", seed=1), OneFOneB(0, 2, 4)),
        request(tied("down", seed=2), OneFOneB(1, 2, 4)),
    ]
    rank_group = Exchange(2)

    def one(rank: int) -> tuple[list[frozenset[str]], frozenset[str], bool]:
        facts = introduce_stages(rank_group.of(rank), requests[rank].tracked)
        (name,) = facts.candidates
        bases = [
            {f"model.0.{name}"},
            {f"model.stage0.{name}", f"model.stage1.{name}"},
            {f"model.0.{name}", f"model.stage1.{name}"},
            set(),
        ]
        found = [facts.ties_of_base(base) for base in bases]
        names = {leaf.name for leaf in facts.tracked(found[0]).bind().leaves()}
        return found, facts.ties_now(rank_group.of(rank)), f"model.0.{name}" in names

    with ThreadPoolExecutor(2) as pool:
        for found, now, is_named in pool.map(one, range(2)):
            assert [len(ties) for ties in found] == [1, 0, 0, 0]
            assert not now
            assert is_named


def test_several_stages_of_a_process_share_tensors():
    """A V schedule: one process has the first and the last stage.

    The two stages share an embedding, and each has its own buffer.
    """
    first, last = nn.Module(), nn.Module()
    first.embed = last.embed = nn.Embedding(8, 4)
    for part, own in ((first, "a"), (last, "b")):
        part.add_module(own, block())
        part.register_buffer("freqs", torch.ones(3))
    middle = [nn.ModuleDict({name: block()}) for name in "cd"]
    names = agreed([request([first, last], ZeroBubbleV(0, 2, 4)), request(middle, ZeroBubbleV(1, 2, 4))])
    assert [name for name in names[0] if name.startswith("model")] == [
        "model.0.embed.weight", "model.0.a.weight", "model.stage0.freqs", "model.0.b.weight", "model.stage3.freqs",
    ]  # fmt: skip


def test_a_rank_without_stages_is_refused():
    rank_group = [request(block(), OneFOneB(0, 1, 4)), request(block())]
    with pytest.raises(ConfigError, match="rank 1 has no pipeline stage"):
        agreed(rank_group)
    with pytest.raises(ConfigError, match=r"stages \[0, 2\]"):
        agreed([request(block(), OneFOneB(rank, 3, 4)) for rank in (0, 2)])
    assert agreed([request(block()), request(block())])[1][0] == "model.0.weight"


def test_stages_themselves_may_be_passed():
    names = agreed([request(stage(rank, nn.Sequential(block()))) for rank in range(2)])
    assert [each[0] for each in names] == ["model.stage0.0.weight", "model.stage1.0.weight"]
