"""Tests surveys: silent nodes are named, orphans end, and manifests are not sent twice."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest

from reft.core.commit.slots import SlotState
from reft.core.recovery.survey_timeout import WHOLE_S
from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.jobs.leases import FENCE_DEADLINE_S
from reft_daemon.peers.survey_dedup import digests_of
from reft_daemon.server.service import DaemonService
from tests.daemon.jobs.test_capsules import all_whole, held_job, seal
from tests.support.jobs import CHUNK, Code, Job, refused, write


@pytest.fixture
def job(start, trainer) -> Job:
    """Two daemons with one rank each; each daemon keeps the other's capsules."""
    return held_job([start("--listen", "127.0.0.1:0") for _ in range(2)])


def test_a_survey_names_silent_nodes(start, job, trainer):
    seal(job, trainer, 1)
    all_whole(job, 1)
    stopped, dead = start("--listen", "127.0.0.1:0"), start("--listen", "127.0.0.1:0")
    hellos = [each.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)) for each in (stopped, dead)]
    gone = [pb.Node(name=f"gone-{i}", id=hello.node_id, addresses=hello.addresses) for i, hello in enumerate(hellos)]
    stopped.kill(signal.SIGSTOP)
    dead.kill()
    nowhere = pb.Node(name="nowhere", id="x")
    began = time.monotonic()
    request = pb.SurveyRequest(job="job", nodes=[job.manifest.nodes[1], *gone, nowhere])
    found = job.daemons[0].call("Survey", request).nodes
    assert time.monotonic() - began < 6
    assert [each.node.id for each in found] == [node.id for node in request.nodes]
    assert [each.HasField("reply") for each in found] == [True, False, False, False]
    assert all(bool(each.trouble) != each.HasField("reply") for each in found) and "no address" in found[3].trouble
    reply = found[0].reply
    assert (reply.node_id, reply.node) == (job.hellos[1].node_id, "test")
    assert [(copy.rank, copy.version.step, copy.unreplicated_bytes) for copy in reply.capsules] == [(0, 1, 2 * CHUNK)]
    assert reply.decision.epoch == job.epoch and len(reply.slots) == 3
    with refused(Code.NOT_FOUND):
        job.daemons[0].call("Survey", pb.SurveyRequest(job="none"))
    empty = start().call("Inventory", pb.InventoryRequest(job="job"))
    assert empty.node_id and empty.node == "test" and not empty.HasField("manifest")


def test_manifests_that_the_asker_has_are_not_sent(job):
    """For two thousand nodes they would be gigabytes, held until the last node has answered."""
    record = pb.JobRecord(manifest=job.manifest, decision=job.decision())
    request = pb.InventoryRequest(job="job", known=digests_of(record))
    reply = job.daemons[1].call("Inventory", request)
    assert not reply.HasField("manifest") and reply.decision == record.decision
    record.decision.epoch.counter += 1  # the same manifest of another epoch: not known yet
    for known in ([], digests_of(record), [7]):
        request = pb.InventoryRequest(job="job", known=known)
        assert job.daemons[1].call("Inventory", request).manifest == job.manifest
    surveyed = job.daemons[0].call("Survey", pb.SurveyRequest(job="job", nodes=job.manifest.nodes[1:]))
    assert not surveyed.nodes[0].reply.HasField("manifest")


def test_a_survey_ends_orphans_on_other_nodes(job, trainer):
    write(job.slots(1, trainer)[0], job.version(1), SlotState.LANDED)
    request = pb.SurveyRequest(job="job", nodes=job.manifest.nodes[1:], launch="another launch", end_orphans=True)
    (refusal,) = job.daemons[0].call("Survey", request).nodes
    assert "which lives" in refusal.trouble and trainer.process.poll() is None
    request.launch = "launch"
    (surveyed,) = job.daemons[0].call("Survey", request).nodes
    assert trainer.process.wait(60) == -9
    assert [slot.state for slot in surveyed.reply.slots if slot.version.step == 1] == [pb.SEALED]


async def test_a_node_that_answers_gets_time_to_end_its_orphans(job):
    """A process that frees much memory takes seconds to die.

    A node that does not answer is given up long before.
    """
    asked = []

    class Peers:
        def is_self(self, node):
            return False

        async def call(self, node, token, service, method, request, deadline_s, reconnect):
            asked.append((node.name, request.end_orphans, deadline_s))
            if node.name == "gone":
                raise ConnectionError("gone")
            return pb.InventoryReply(node=node.name)

    service = DaemonService(SimpleNamespace(peers=Peers()), None, None)
    request = pb.SurveyRequest(job="job", launch="launch", end_orphans=True)
    for name in ("alive", "gone"):
        await service._survey(pb.Node(name=name, addresses=["h:1", "h:2"]), b"", request, [], WHOLE_S)
    (first, second, third) = asked
    assert first[:2] == ("alive", False) and second[:2] == ("alive", True) and third[:2] == ("gone", False)
    assert second[2] > FENCE_DEADLINE_S > first[2]
