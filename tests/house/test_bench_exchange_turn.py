"""bench/exchange_turn.py computes ratios and goals from measured seconds, and its copies work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest

from bench import exchange_turn
from bench.exchange_turn import (
    HEADERS,
    MOVER,
    PLAIN,
    RAW,
    Copied,
    OneTurn,
    PlainMover,
    StepBlocks,
    TwoNodes,
    copy_rows,
    data_of,
    step_rows,
    turn_rows,
    two_nodes,
)  # fmt: skip
from bench.result import Row
from reft_daemon.mover.mover import Mover, MoverSettings, PullFailed
from tests.support.parity import mapped

GB = 10**9
S = 64 << 20


def by_name(rows: list[Row]) -> Mapping[str, Row]:
    return {row.name.partition(": ")[2]: row for row in rows}


def copies(**seconds: list[float]) -> dict[str, list[Copied]]:
    return {kind: [Copied(each, each / 2, each / 4, 0.1, 0.2) for each in values] for kind, values in seconds.items()}


def test_a_copy_is_compared_with_raw_sockets_of_its_round():
    rows = by_name(copy_rows(GB, copies(raw=[1, 2, 4], plain=[1, 4, 4], mover=[2, 4, 4])))
    mover = rows["mover"]
    assert (mover.value, mover.min, mover.max, mover.goal) == (0.5, 0.5, 1, ">= 0.55") and mover.is_missed
    plain = rows["mover without digests and XOR"]
    assert (plain.value, plain.min, plain.goal) == (1, 0.5, ">= 0.85") and not plain.is_missed
    assert rows["raw sockets"].value == 0.5


def test_processor_time_is_given_for_a_gb_and_side():
    rows = by_name(copy_rows(2 * GB, copies(raw=[1, 1], plain=[1, 1], mover=[4, 4])))
    assert rows["mover, source"].value == 1 and rows["mover, holder"].value == 0.5
    assert rows["zeroing the parity slot"].value == 0.05 and rows["digesting the parity slot"].value == 0.1


def copy_once(nodes: TwoNodes, kind: str, mover: type[Mover]) -> Copied:
    async def copy() -> Copied:
        nodes.movers[kind] = mover(MoverSettings()), mover(MoverSettings())
        try:
            return await nodes.copy(kind)
        finally:
            for each in nodes.movers[kind]:
                await each.close()

    return asyncio.run(copy())


def blocks() -> StepBlocks:
    stats = {"snapshots": 9.0, "skipped": 1.0}
    return StepBlocks(
        off=[[0.1, 0.1, 0.2], [0.2, 0.2, 0.2]], on=[[0.1, 0.11, 0.2], [0.2, 0.21, 0.3]],
        turns=[(GB, 1.0), (GB, 3.0)], cpu_s=3.0, daemons_s={"off": [0.012, 0.012], "on": [0.024, 0.024]}, on_s=4.0,
        stats={"off": stats, "on": stats},
    )  # fmt: skip


def test_steps_with_turns_are_compared_with_the_block_before():
    row = by_name(step_rows("free", blocks()))["step with turns over one without"]
    assert row.value == pytest.approx((1.1 + 1.05) / 2) and row.goal == "<= 1.02" and row.is_missed
    busy = by_name(step_rows("busy", blocks()))
    assert busy["step with turns over one without"].goal is None, "turns and training share the cores"
    assert (busy["step with turns"].value, busy["step with turns"].p99) == (pytest.approx(200), pytest.approx(300))


def test_turns_have_their_share_of_the_time_and_their_processor_time():
    rows = by_name(step_rows("free", blocks()))
    assert rows["a turn is under way"].value == 0.5, "two nodes had turns for 4 s of 2 x 4 s"
    assert rows["mover, sends and receives"].value == 1.5
    assert rows["a daemon, turns on"].value == pytest.approx(2), "24 ms of two daemons in 6 steps"
    assert rows["snapshots skipped, turns on"].value == 0.1


@pytest.mark.parametrize(("members", "kept"), [(2, 2), (4, 2 / 3), (8, 4 / 6)])
def test_a_turn_has_the_bytes_of_the_formulas(members, kept):
    slots = int(kept * S) + HEADERS
    sent = int(S * (7 / 6 if members == 8 else 1))
    rows = turn_rows(members, OneTurn(S, [sent] * members, [slots] * members, 3 * members * S))
    assert not any(row.is_missed for row in rows)
    named = by_name(rows)
    assert named["all bytes on loopback, a node"].value == 3
    assert named["the same by the formula, without headers"].value == pytest.approx(kept)
    assert turn_rows(members, OneTurn(S, [S, 2 * S], [slots], 0))[0].is_missed
    assert by_name(turn_rows(members, OneTurn(S, [S], [slots + S // 10], 0)))["parity kept a node"].is_missed


@pytest.mark.parametrize(("kind", "mover"), [(MOVER, Mover), (PLAIN, PlainMover)])
def test_a_copy_moves_the_bytes_and_only_the_plain_one_leaves_the_parity_empty(kind, mover):
    with two_nodes(1 << 20) as nodes:
        copied = copy_once(nodes, kind, mover)
        nodes.check(kind)
        assert data_of(nodes.parity).any() == (kind == MOVER)
        assert copied.seconds > 0 and copied.source_s > 0 and copied.holder_s > 0
        mapped(nodes.parity).data[-1] ^= 255
        with pytest.raises(RuntimeError, match="the parity is wrong"):
            nodes.check(kind)


def test_all_copies_of_a_round_have_their_times():
    times = exchange_turn.measure_copies(1 << 20, 1)
    assert {kind: len(each) for kind, each in times.items()} == {RAW: 1, PLAIN: 1, MOVER: 1}
    assert np.all([copied.seconds > 0 for each in times.values() for copied in each])


@pytest.mark.parametrize(("kind", "mover"), [(MOVER, Mover), (PLAIN, PlainMover)])
def test_only_the_plain_mover_sends_damaged_bytes(kind, mover):
    with two_nodes(1 << 20) as nodes:
        mapped(nodes.source).data[0] ^= 1
        if kind == MOVER:
            with pytest.raises(PullFailed, match="changed in memory"):
                copy_once(nodes, kind, mover)
        else:
            copy_once(nodes, kind, mover)
