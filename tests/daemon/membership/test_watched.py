"""Tests nodes in network namespaces: lost nodes, and nodes that are cut off and come back."""

from __future__ import annotations

import pytest

from reft.core.membership.failure_detector import Signal
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import until
from tests.support.netns import why_not
from tests.support.watched import Host, Watched

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"needs namespaces: {why_not()}")
WAIT_S = 60.0
SURVEYS = 5  # of three seconds each: TCP alone would send again 13 s and 25 s after the cut


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
        # The cut-off node knows that the fault may be its own, so it calls no other node lost.
        until(lambda: set(cut.seen().values()) == {Signal.HEALTHY, Signal.SUSPECT}, WAIT_S, "doubts")
        cut.place.heal()
        until(lambda: cut.seen()[cut.node.name] is Signal.OFFLINE, WAIT_S, "the news that it was given up")
        assert [name for name, seen in nodes.living[0].seen().items() if seen is Signal.OFFLINE] == [cut.node.name]
        nodes.begin_round()  # with the node that came back: it may join the next round
        watching = nodes.watching(lost, Signal.OFFLINE)
        nodes.lose(lost)
        assert set(watching.result()) == names - {lost.node.name}
        for host in nodes.living:
            assert [name for name, seen in host.seen().items() if seen is Signal.OFFLINE] == [lost.node.name]


def test_a_node_cut_off_for_long_is_heard_as_soon_as_the_link_is_back():
    """The connection must not wait for TCP, which repeats data at ever longer intervals."""
    with Watched(2) as nodes:
        here, cut = nodes.living
        manifest = pb.Manifest(job="job", named=True, token=bytes(32), world=2, every=1, launch="launch")
        for rank, host in enumerate(nodes.living):
            manifest.nodes.add().CopyFrom(host.node)
            manifest.nodes[rank].ranks.append(rank)
        decision = pb.Decision(epoch=pb.Epoch(counter=1, ident=bytes(16)))
        for index, host in enumerate(nodes.living):
            host.ask("Decide", pb.DecideRequest(manifest=manifest, decision=decision, node_index=index))
        survey = pb.SurveyRequest(job="job", nodes=manifest.nodes[1:])

        def answers() -> bool:
            return here.ask("Survey", survey, 20.0).nodes[0].HasField("reply")

        assert answers()
        cut.place.cut()
        assert not any(answers() for _ in range(SURVEYS))
        cut.place.heal()
        assert answers()
