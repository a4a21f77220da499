"""Tests parity that is made again outside a turn: alone, against turns and attaches."""

from __future__ import annotations

import asyncio

import pytest

from reft.core.commit.version import Version
from reft.errors import AttachError
from reft_daemon.jobs import parity
from reft_daemon.peers.turns import LaneUnguardable
from tests.daemon.peers.test_turn_service import Nodes, play
from tests.support.exchange import SLOTS
from tests.support.parity import mapped

__all__ = ["play"]  # a fixture


async def damaged_parity(nodes: Nodes) -> Version:
    """Makes parity of step 1; that of node 0 counts as damaged then. Returns the version."""
    await nodes.attach()
    nodes.write(1)
    nodes.pins(whole=1, turn=1)
    await nodes.settled()
    nodes.pins(turn=-1, protected=1)
    await nodes.settled()
    version = Version(nodes.jobs[0].epoch, 1)
    slot = parity.sealed_parity(nodes.jobs[0], parity.local_lanes(nodes.jobs[0])[0], version)
    assert slot is not None
    slot.damaged = version
    nodes.unguarded.clear()
    return version


def make_again(nodes: Nodes, version: Version) -> asyncio.Future[None]:
    job = nodes.jobs[0]
    return asyncio.ensure_future(nodes.services[0].make_again(job, parity.local_lanes(job)[0], version))


def test_it_is_as_drawn_and_says_nothing_to_the_round(play):
    async def act(nodes: Nodes) -> None:
        version = await damaged_parity(nodes)
        guarded = list(nodes.guarded)
        await make_again(nodes, version)
        nodes.check_parity(1)
        assert nodes.guarded == guarded and not nodes.unguarded
        assert nodes.services[0].status(nodes.jobs[0]).turn_bytes == 0
        nodes.write(2)
        nodes.pins(whole=2, turn=2)
        await nodes.settled()
        nodes.check_parity(2)
        nodes.check_parity(1)

    play(act)


def test_a_damaged_source_ends_it_without_a_word_to_the_round(play):
    async def act(nodes: Nodes) -> None:
        version = await damaged_parity(nodes)
        begin = nodes.placement.rank_placement(1).unreplicated_offset
        mapped(nodes.jobs[1].slots.current[f"rank-1.slot-{1 % SLOTS}"]).data[begin:] ^= 1
        with pytest.raises(LaneUnguardable, match="rank 1 on node n1 has bytes that changed"):
            await make_again(nodes, version)
        assert not nodes.unguarded
        assert parity.sealed_parity(nodes.jobs[0], parity.local_lanes(nodes.jobs[0])[0], version) is None

    play(act)


@pytest.mark.parametrize("comes", ["an attach", "a turn"])
def test_what_comes_meanwhile_goes_first(play, comes):
    async def act(nodes: Nodes) -> None:
        version = await damaged_parity(nodes)
        was_asked = asyncio.Event()

        async def asked(node: int) -> None:
            was_asked.set()
            await asyncio.sleep(3600)

        nodes.asked = asked
        making = make_again(nodes, version)
        await was_asked.wait()
        nodes.asked = None
        if comes == "an attach":
            await nodes.services[0].hold(nodes.jobs[0])
        else:
            nodes.write(2)
            nodes.pins(whole=2, turn=2)
        with pytest.raises(AttachError, match="has begun meanwhile"):
            await making
        if comes == "an attach":
            with pytest.raises(AttachError, match="is under way"):
                await make_again(nodes, version)
        else:
            await nodes.settled()
            nodes.check_parity(2)

    play(act)


def test_news_without_a_turn_does_not_end_it(play):
    async def act(nodes: Nodes) -> None:
        version = await damaged_parity(nodes)

        async def asked(node: int) -> None:
            nodes.services[0].wake(nodes.jobs[0])
            await asyncio.sleep(0)  # a cancelled task ends here

        nodes.asked = asked
        await make_again(nodes, version)
        nodes.check_parity(1)

    play(act)


def test_it_waits_for_no_turn(play):
    async def act(nodes: Nodes) -> None:
        version = await damaged_parity(nodes)
        nodes.write(2)
        nodes.pins(whole=2, turn=2)
        with pytest.raises(AttachError, match="is under way"):
            await make_again(nodes, version)
        await nodes.settled()
        nodes.check_parity(2)

    play(act)
