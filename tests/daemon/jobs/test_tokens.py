"""A job's token changes with each attach. Nodes that missed an attach are still heard."""

from __future__ import annotations

import pytest

from reft.core.commit.round import StepAnswer
from reft.wire import messages
from reft.wire.messages import earlier_tokens
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.jobs import Code, Job, refused, tcp_call, write

TOKENS = [bytes([number]) * 32 for number in range(1, 5)]


@pytest.fixture
def three(start) -> Job:
    daemons = [start("--listen", "127.0.0.1:0") for _ in range(3)]
    job = Job([(daemon, [rank]) for rank, daemon in enumerate(daemons)], job_mark=b"m" * 16)
    return attach(job, TOKENS[0], [0, 1, 2])


def attach(job: Job, token: bytes, nodes: list[int]) -> Job:
    """Sends the decision of a new attach to some of the nodes."""
    earlier = earlier_tokens((job.manifest.token, *job.manifest.earlier_tokens), token)
    job.manifest.token, job.manifest.earlier_tokens[:] = token, earlier if job.counter else []
    job.counter += 1
    for node in nodes:
        request = pb.DecideRequest(manifest=job.manifest, decision=job.decision(), node_index=node)
        job.daemons[node].call("Decide", request)
    return job


def accepted(job: Job, node: int) -> list[int]:
    """Returns the numbers of the tokens with which a node answers over TCP."""
    numbers = []
    for number, token in enumerate(TOKENS):
        try:
            tcp_call(job.hellos[node].addresses[0], "Inventory", pb.InventoryRequest(job="job"), token)
            numbers.append(number)
        except Exception as error:
            assert error.code() is Code.UNAUTHENTICATED
    return numbers


def make_whole(job: Job, step: int) -> None:
    """Lets the only rank of a job seal a step."""
    write(job.slots(0)[0], job.version(step))
    job.report(0, {step: StepAnswer.SEALED})
    assert job.whole() == step


def hears(job: Job, asker: int, node: int) -> bool:
    """Returns whether one node's daemon gets an answer from another node of the job."""
    request = pb.SurveyRequest(job="job", nodes=[job.manifest.nodes[node]], again=True)
    (surveyed,) = job.daemons[asker].call("Survey", request).nodes
    return surveyed.HasField("reply")


def test_the_token_before_counts_until_a_version_of_the_new_epoch_is_whole(start):
    job = Job([(start("--listen", "127.0.0.1:0"), [0])], job_mark=b"m" * 16)
    attach(job, TOKENS[0], [0])
    assert accepted(job, 0) == [0]
    attach(job, TOKENS[1], [0])
    assert accepted(job, 0) == [0, 1]
    make_whole(job, 1)
    assert accepted(job, 0) == [1]
    attach(job.close(), TOKENS[2], [0])
    assert accepted(job, 0) == [1, 2], "the first token does not come back"


def test_the_token_before_counts_after_a_restart_of_the_daemon(start):
    daemon = start("--listen", "127.0.0.1:0")
    job = Job([(daemon, [0])], job_mark=b"m" * 16)
    attach(attach(job, TOKENS[0], [0]), TOKENS[1], [0])
    daemon.kill()
    daemon.start()
    job.hellos[0] = daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL))
    assert accepted(job, 0) == [0, 1]


def test_a_refused_attach_takes_its_token_with_it(start):
    job = Job([(start("--listen", "127.0.0.1:0"), [0])], job_mark=b"m" * 16)
    make_whole(attach(job, TOKENS[0], [0]), 1)
    attach(job.close(), TOKENS[1], [0])
    assert accepted(job, 0) == [0, 1]
    job.call(0, "Release", pb.ReleaseRequest(job="job", epoch=job.epoch, rank=0, refused=True))
    assert accepted(job, 0) == [0]


def test_nodes_hear_each_other_after_a_leader_died_between_two_decisions(three):
    attach(three, TOKENS[1], [0])
    assert [accepted(three, node) for node in range(3)] == [[0, 1], [0], [0]]
    for asker, node in ((0, 1), (1, 0), (1, 2), (2, 0)):
        assert hears(three, asker, node), (asker, node)


def test_a_node_that_was_away_for_two_attaches_is_heard_and_taken_in(three):
    for token in TOKENS[1:3]:
        attach(three, token, [0, 1])
    assert hears(three, 0, 2) and hears(three, 2, 1)
    attach(three, TOKENS[3], [0, 1, 2])
    assert [accepted(three, node) for node in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 3]]


def test_a_manifest_with_too_many_or_wrong_tokens_is_refused(start):
    job = Job([(start(), [0])], job_mark=b"m" * 16)
    for changes, text in (
        ({"earlier_tokens": [b"t" * 32] * 9}, "9 earlier tokens"),
        ({"earlier_tokens": [b"t" * 31]}, "1 earlier tokens"),
        ({"job_mark": b"m"}, "a mark of 1;"),
    ):
        manifest = pb.Manifest()
        manifest.CopyFrom(job.manifest)
        manifest.MergeFrom(pb.Manifest(**changes))
        with refused(Code.INVALID_ARGUMENT, text):
            job.daemons[0].call("Decide", pb.DecideRequest(manifest=manifest, decision=job.decision()))
