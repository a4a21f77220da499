"""Nodes as namespaces that are lost, cut off and come back: what only a network of their own can show."""

from __future__ import annotations

import pytest

from reft.core.signals import Signal
from tests.support.daemons import until
from tests.support.netns import why_not
from tests.support.watched import Host, Watched

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"needs namespaces: {why_not()}")
WAIT_S = 60.0


def await_doubt(host: Host, other: Host, reason: str) -> None:
    name = other.node.name
    until(lambda: host.reason(name) == reason, WAIT_S, f"{host.node.name}'s reason to doubt {name}")
    assert host.seen()[name] is Signal.SUSPECT


def test_a_link_is_half_open_then_a_node_is_cut_off_and_comes_back_and_another_dies():
    with Watched(4) as nodes:
        nodes.begin_round()
        here, mute, cut, lost = nodes.living
        mute.place.mute()
        await_doubt(here, mute, "the link is half open: its daemon answers, but its own calls do not arrive.")
        await_doubt(mute, here, "the link is half open: its daemon calls, but does not answer.")
        mute.place.unmute()
        nodes.begin_round()
        names = {host.node.name for host in nodes.living}
        watching = nodes.watching(cut, Signal.OFFLINE)
        cut.place.cut()
        assert set(watching.result()) == names - {cut.node.name}
        # Who is cut off knows that it may be he, and calls nobody lost.
        until(lambda: set(cut.seen().values()) == {Signal.HEALTHY, Signal.SUSPECT}, WAIT_S, "doubts")
        cut.place.heal()
        until(lambda: cut.seen()[cut.node.name] is Signal.OFFLINE, WAIT_S, "the word that it was given up")
        assert [name for name, seen in nodes.living[0].seen().items() if seen is Signal.OFFLINE] == [cut.node.name]
        nodes.begin_round()  # with it: whoever comes back is welcome in the next round
        watching = nodes.watching(lost, Signal.OFFLINE)
        nodes.lose(lost)
        assert set(watching.result()) == names - {lost.node.name}
        for host in nodes.living:
            assert [name for name, seen in host.seen().items() if seen is Signal.OFFLINE] == [lost.node.name]
