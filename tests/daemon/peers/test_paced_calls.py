"""Thousands of calls are started little by little, and silent nodes hold up no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from reft_daemon.peers import channels
from reft_daemon.peers.channels import STARTED_MAX, call_paced
from tests.support.instruction_count import counted_callbacks


class CallCounter:
    """Counts the calls that are under way."""

    def __init__(self) -> None:
        self.now = self.most = self.all = self.cancelled = 0

    async def wait(self, answer: asyncio.Event) -> None:
        self.now, self.all = self.now + 1, self.all + 1
        self.most = max(self.most, self.now)
        try:
            await answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks run until a condition is true."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition is still false")


async def test_results_come_in_the_order_of_the_nodes():
    async def call(node: int) -> int:
        for _ in range(node % 7):
            await asyncio.sleep(0)
        return -node

    assert await call_paced(call, range(300)) == [-node for node in range(300)]
    assert await call_paced(call, []) == []


async def test_few_calls_are_under_way_where_all_answer(monkeypatch):
    monkeypatch.setattr(channels, "SLOW_S", 60.0)
    counter = CallCounter()

    async def call(_: int) -> None:
        answer = asyncio.Event()
        asyncio.get_running_loop().call_soon(answer.set)
        await counter.wait(answer)

    await call_paced(call, range(500))
    assert counter.all == 500 and counter.most <= STARTED_MAX


async def test_silent_nodes_keep_no_place(monkeypatch):
    monkeypatch.setattr(channels, "SLOW_S", 0.0)
    counter, answer = CallCounter(), asyncio.Event()

    async def call(node: int) -> int:
        await counter.wait(answer)
        return node

    calling = asyncio.ensure_future(call_paced(call, range(3 * STARTED_MAX)))
    await until(lambda: counter.all == 3 * STARTED_MAX)
    assert counter.now == 3 * STARTED_MAX
    answer.set()
    assert await calling == list(range(3 * STARTED_MAX))


async def test_a_failure_or_a_cancelled_caller_cancels_all_calls(monkeypatch):
    monkeypatch.setattr(channels, "SLOW_S", 0.0)
    counter, answer = CallCounter(), asyncio.Event()

    async def call(node: int) -> None:
        await counter.wait(answer)

    calling = asyncio.ensure_future(call_paced(call, range(100)))
    await until(lambda: counter.all == 100)
    calling.cancel()
    await asyncio.wait([calling])
    await asyncio.sleep(0)
    assert calling.cancelled() and counter.cancelled == 100 and counter.now == 0

    async def fail(node: int) -> None:
        if node == 90:
            raise ValueError("a call")
        await counter.wait(answer)

    with pytest.raises(ValueError, match="a call"):
        await call_paced(fail, range(100))
    await asyncio.sleep(0)
    assert counter.now == 0


async def test_each_call_has_a_callback_of_its_own():
    """Also calls that end at once, as those of nodes without an address."""

    async def call(node: int) -> int:
        return sum(range(node % 3))

    with counted_callbacks() as counts:
        await asyncio.ensure_future(call_paced(call, range(1000)))
    assert max(counts) < 0.1 * sum(counts)
