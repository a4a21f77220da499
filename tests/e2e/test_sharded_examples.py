"""Sharded examples lose a rank, all ranks, or a node, in mid-copy, and end as undisturbed runs do, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from reft.cli.demo.records import Result, compare
from tests.support.nodes import Machine, Nodes, stop_at

STEPS = 40
pytestmark = pytest.mark.timeout(900)  # a start of all ranks may take a minute where the cores are shared
Loss = Callable[[Nodes, Machine, int], float]


def undisturbed(example: str, nodes: int, ranks: int) -> Result:
    with Nodes(nodes, ranks) as plain:
        plain.launch("plain", STEPS, script=["tests.support.record_example"], arguments=["--example", example])
        return plain.await_end()


def one_rank(nodes: Nodes, machine: Machine, rank: int) -> float:
    return nodes.kill_ranks(rank)


def all_ranks(nodes: Nodes, machine: Machine, rank: int) -> float:
    return nodes.kill_ranks(*range(nodes.world))


def a_node(nodes: Nodes, machine: Machine, rank: int) -> float:
    lost_s = nodes.lose(machine)
    nodes.replace()
    return lost_s


def disturbed(example: str, seed: int, count: int, ranks: int, losses: list[Loss]) -> Result:
    """Trains with these losses, one after the other: each when some rank stands in mid-copy of a step that the seed names."""
    chance = random.Random(seed)
    victims = [chance.randrange(count * ranks) for _ in losses]
    steps = [chance.randrange(*span) for span in ((8, 16), (22, 32))]
    points = [
        stop_at("snapshot.chunk", rank=rank, step=step, epoch=epoch, after=chance.randrange(3))
        for epoch, (rank, step) in enumerate(zip(victims, steps, strict=False), 1)
    ]
    with Nodes(count, ranks) as nodes:
        nodes.note(f"seed {seed}: {points}")
        nodes.launch(
            "job", STEPS, script=["tests.support.record_example"], arguments=["--example", example],
            failpoints=",".join(points),
        )  # fmt: skip
        for loss, rank in zip(losses, victims, strict=True):
            machine = nodes.await_stop()
            whole = nodes.whole("job")[1]
            assert whole > 0, "nothing was whole before the loss: the run would only start again"
            lost_s = loss(nodes, machine, rank)
            nodes.await_recovery(lost_s)
            result = nodes._training.result()
            bases = {
                next(a.base for a in tries if a.started_s > lost_s and a.steps) for tries in result.attempts.values()
            }
            assert len(bases) == 1 and min(bases) >= whole, (bases, whole)
        return nodes.await_end()


KINDS = [
    ("fsdp2", 1, 2, [one_rank, all_ranks]),
    ("zero1", 1, 2, [one_rank, all_ranks]),
    ("hsdp", 2, 2, [all_ranks, a_node]),
]


def check(example: str, count: int, ranks: int, losses: list[Loss], seeds: list[int]) -> None:
    plain = undisturbed(example, count, ranks)
    for seed in seeds:
        assert compare(disturbed(example, seed, count, ranks, losses), plain, STEPS).differences == []


@pytest.mark.parametrize(("example", "count", "ranks", "losses"), KINDS, ids=[kind[0] for kind in KINDS])
def test_it_goes_on_bit_for_bit(example, count, ranks, losses):
    check(example, count, ranks, losses, [0])


@pytest.mark.chaos
@pytest.mark.parametrize(("example", "count", "ranks", "losses"), KINDS, ids=[kind[0] for kind in KINDS])
def test_it_goes_on_from_other_moments(example, count, ranks, losses):
    check(example, count, ranks, [*losses[:1], *losses[1:]], [1, 2, 3])
