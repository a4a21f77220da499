"""Tests rounds among real daemons: announced to all, not delayed, and carried over TLS."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from reft.core.commit.snapshot_interval import LEAD
from reft.core.commit.version import Version
from reft.errors import AttachError
from reft.wire import messages
from reft.wire.messages import outcome_from
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from reft_daemon.peers import round_replicator
from reft_daemon.peers.channels import UnprovedReply
from reft_daemon.peers.round_replicator import KEEP_DEADLINE_S, SECURE_DEADLINE_S
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import DaemonProcess, until
from tests.support.jobs import Job, epoch_of, tcp_call, write
from tests.support.trainer_forks import Trainer

SEALED, VOID = StepAnswer.SEALED, StepAnswer.VOID


@pytest.fixture
def three(start, trainer) -> Job:
    """A job with one rank on each of three daemons. They reach each other over TCP."""
    return leased([(start("--listen", "127.0.0.1:0"), [rank]) for rank in range(3)], trainer)


def leased(nodes: list[tuple[DaemonProcess, list[int]]], trainer: Trainer) -> Job:
    job = Job(nodes)
    job.decide()
    for rank in job.home:
        job.lease(rank, trainer, slots=0)
    return job


def all_whole(job: Job, step: int) -> None:
    until(lambda: all(job.whole(i) == step for i in range(len(job.daemons))), what=f"whole({step}) everywhere")


def test_whole_is_announced_to_all(three):
    for rank in range(3):
        assert three.whole(0) == -1
        three.report(rank, {1: SEALED})
    all_whole(three, 1)


def test_a_report_is_answered_when_its_step_is_decided(three):
    """The reply comes with the outcome, long before its deadline."""
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(three.report, 1, {1: SEALED}, wait_ms=9000)
        three.report(0, {1: SEALED})
        three.report(2, {1: SEALED})
        assert waiting.result().pins.whole == 1
        assert time.monotonic() - began < 5


def test_the_agreed_interval_is_the_greatest_requested_one(three):
    for rank, requested_every in enumerate((2, 9, 4)):
        three.report(rank, {1: SEALED}, requested_every=requested_every)
    all_whole(three, 1)
    replies = [
        three.report(rank, {2: SEALED}, wait_ms=9000 * (rank == 2), requested_every=requested_every)
        for rank, requested_every in enumerate((2, 9, 4))
    ]
    assert (replies[2].every, replies[2].interval_start) == (9, 1 + LEAD)
    for rank in range(3):
        until(
            lambda rank=rank: three.report(rank, {2: SEALED}, requested_every=3).every == 9,
            what="the agreed interval at every rank",
        )
    assert three.daemons[0].status("job").every == 9


def test_a_void_is_announced_to_all_and_later_steps_go_on(three):
    three.report(2, {1: VOID})
    for rank in (0, 1):
        until(lambda rank=rank: outcome_from(three.report(rank, {1: SEALED})).voids(1), what="void(1)")
    for rank in range(3):
        three.report(rank, {2: SEALED})
    all_whole(three, 2)


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_stopped_daemon_delays_no_report_and_the_round_recovers(three, stopped):
    living = [i for i in range(3) if i != stopped]
    three.daemons[stopped].kill(signal.SIGSTOP)
    took_s = []
    for step in (1, 2):
        for rank in living:
            began = time.monotonic()
            assert not three.report(rank, {step: SEALED}, wait_ms=300).pins.HasField("whole")
            took_s.append(time.monotonic() - began)
    assert min(took_s) < 2  # a busy machine may delay one of them
    deep = three.daemons[living[0]].call("Status", pb.StatusRequest(job="job", deep=True)).jobs[0]
    assert list(deep.silent_nodes) == [f"n{stopped}"]
    with pytest.raises(TimeoutError):
        three.report(stopped, {1: SEALED, 2: SEALED}, timeout=0.5)
    three.daemons[stopped].kill(signal.SIGCONT)
    three.report(stopped, {1: SEALED, 2: SEALED})
    all_whole(three, 2)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_daemon_that_was_killed_learns_the_round_again(three, killed):
    """Trainers repeat reports without a known outcome. Daemons below in the tree do the same."""
    for rank in range(3):
        if rank != killed:
            three.report(rank, {1: SEALED})
    daemon = three.daemons[killed]
    daemon.kill()
    daemon.start()  # at its earlier port, although port 0 allows any: other nodes call it there

    def repeated() -> bool:
        return min(three.report(rank, {1: SEALED}).pins.whole for rank in range(3)) == 1

    until(repeated, what="whole(1) for every rank")


def test_a_restarted_coordinator_gets_the_reports_again(three):
    for rank in (1, 2):
        three.report(rank, {1: SEALED})
        daemon = three.daemons[rank]
        until(
            lambda daemon=daemon: daemon.call("Status", pb.StatusRequest()).round_bytes_sent,
            what="the coordinator's answer",
        )
    three.daemons[0].kill()
    three.daemons[0].start()
    three.report(0, {1: SEALED})
    all_whole(three, 1)


def test_sealed_steps_that_a_restarted_daemon_finds_reach_the_others(start, trainer):
    """The trainer does not report the step again: it reported the step to the daemon that died."""
    job = leased([(start("--listen", "127.0.0.1:0"), [rank]) for rank in range(2)], trainer)
    write(job.slots(1, trainer)[0], job.version(1))
    job.report(0, {1: SEALED})
    job.daemons[1].kill()
    job.daemons[1].start()
    all_whole(job, 1)


@pytest.mark.parametrize("left", [SlotState.LANDED, SlotState.SEALED])
def test_mismatched_replicas_are_found_when_a_daemon_reports_for_a_trainer(start, trainer, left):
    """The report was lost with the daemon, or was never sent. The capsule has the digests."""
    job = leased([(start("--listen", "127.0.0.1:0"), [rank]) for rank in range(2)], trainer)
    for rank in (0, 1):
        write(job.slots(rank, trainer)[0], job.version(1), left, compared={3: rank})
    job.daemons[1].kill()
    if left is SlotState.LANDED:
        trainer.kill()
    else:
        said = pb.StepReport(until=1, sealed=[pb.SealedStep(step=1, cells=[pb.CellDigest(cell=3, digest=0)])])
        job.send_report(0, pb.ReportRequest(job="job", epoch=job.epoch, rank=0, steps=said))
    job.daemons[1].start()
    until(lambda: job.daemons[0].status("job").mismatched == [3], what="the difference")
    assert job.whole(0) == -1


def test_a_daemon_that_listens_is_called_only_at_that_address(start, trainer):
    """On another host its socket's path leads to another daemon."""
    job = Job([(start("--listen", "127.0.0.1:0"), [rank]) for rank in range(2)])
    assert [len(hello.addresses) for hello in job.hellos] == [1, 1]
    job.decide()
    away, other = job.daemons[1], start("--listen", "127.0.0.1:0")
    away.kill()
    away.socket.unlink()
    away.socket.symlink_to(other.socket)
    seen = job.daemons[0].call("Survey", pb.SurveyRequest(job="job", nodes=job.manifest.nodes[1:]))
    assert not seen.nodes[0].HasField("reply") and "refused" in seen.nodes[0].trouble


def test_an_orphans_decision_does_not_stop_the_round(three):
    """A stale decision is refused, and the round of the epoch in force goes on."""
    old = pb.Decision(epoch=pb.Epoch(counter=1, ident=b"o" * 16))
    for i, daemon in enumerate(three.daemons):
        with pytest.raises(grpc.RpcError):
            daemon.call("Decide", pb.DecideRequest(manifest=three.manifest, decision=old, node_index=i))
    for rank in range(3):
        three.report(rank, {1: SEALED})
    all_whole(three, 1)


def test_messages_of_an_older_epoch_do_not_reach_the_new_round(three):
    old = three.epoch
    three.close().decide()
    for rank in range(3):
        three.lease(rank, slots=0)
    address, token = three.hellos[0].addresses[0], three.manifest.token
    sealed = pb.StepReport(until=1, sealed=[pb.SealedStep(step=1)])
    for request, method in (
        (pb.GatherRequest(job="job", epoch=old, node_index=1, steps=sealed), "Gather"),
        (pb.Outcome(job="job", epoch=old, pins=pb.Pins(whole=9)), "Announce"),
    ):
        with pytest.raises(grpc.RpcError) as stale:
            tcp_call(address, method, request, token, pb_grpc.PeerStub)
        assert stale.value.code() is grpc.StatusCode.ABORTED
    assert three.whole(0) == -1
    with pytest.raises(grpc.RpcError) as stranger:
        request = pb.GatherRequest(job="job", epoch=three.epoch, node_index=7, steps=sealed)
        tcp_call(address, "Gather", request, token, pb_grpc.PeerStub)
    assert stranger.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Callable[[str], tuple[str, ...]]:
    """Makes a daemon's TLS flags; the CA of that name signs its certificate."""
    if why_not():
        pytest.skip(why_not())
    return Certificates(tmp_path_factory.mktemp("tls")).flags


def test_a_round_over_tls(start, trainer, certificates):
    flags = certificates("ours")
    job = leased([(start("--listen", "127.0.0.1:0", *flags), [rank]) for rank in range(2)], trainer)
    for rank in range(2):
        job.report(rank, {1: SEALED})
    all_whole(job, 1)
    address, token = job.hellos[0].addresses[0], job.manifest.token
    with pytest.raises(grpc.RpcError) as plain:
        tcp_call(address, "Status", pb.StatusRequest(job="job"), token)
    assert plain.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_daemon_with_another_authoritys_certificate_is_refused(start, trainer, certificates):
    nodes = [
        (start("--listen", "127.0.0.1:0", *certificates(ca)), [rank]) for rank, ca in enumerate(("ours", "theirs"))
    ]
    job = leased(nodes, trainer)
    for rank in range(2):
        job.report(rank, {1: SEALED})
    until(lambda: "does not answer in the round" in job.daemons[1].log.read_text(), what="the refusal")
    assert job.whole(0) == job.whole(1) == -1


class Holder:
    """Channels to a node that keeps capsules, after the given errors; notes the deadlines."""

    def __init__(self, *errors: grpc.RpcError) -> None:
        self.errors, self.deadlines_s = list(errors), []

    async def call(
        self, node: pb.Node, tokens: object, stub: type, method: str, request: object, deadline_s: float, **_: bool
    ) -> None:
        self.deadlines_s.append(deadline_s)
        if self.errors:
            raise self.errors.pop(0)


def job_with_a_holder(messages_of_base: int) -> SimpleNamespace:
    """Returns as much of a job as sends its base to its only holder."""
    decision = messages.decision_to(Decision(epoch_of(2), Version(epoch_of(1), 3)))
    record = SimpleNamespace(holders=[1], decision=decision, manifest=pb.Manifest(nodes=[pb.Node(), pb.Node()]))
    batches = SimpleNamespace(batches_of_version=lambda slots, version: [[pb.CapsuleRecord()]] * messages_of_base)
    slots = SimpleNamespace(all={})
    return SimpleNamespace(record=record, epoch=epoch_of(2), id="job", slots=slots, capsule_replication=batches)


def unavailable(text: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=text)


async def test_attach_waits_longer_for_a_holder_than_training_does():
    """A holder that is only slow must not refuse the attach, and burn a restart."""
    holder = Holder()
    await round_replicator.send_base_again(job_with_a_holder(messages_of_base=2), holder)
    assert len(holder.deadlines_s) == 2
    assert all(KEEP_DEADLINE_S < each <= SECURE_DEADLINE_S for each in holder.deadlines_s)


@pytest.mark.parametrize("text", ["Stream removed (recvmsg:Connection timed out (110))", "connect() timed out"])
async def test_attach_asks_a_holder_again_that_was_cut_off(text, monkeypatch):
    """gRPC gives up a connection after 3 to 10 s; the network may be back within the deadline."""
    monkeypatch.setattr(round_replicator, "RETRY_S", 0.0)
    holder = Holder(unavailable(text), unavailable(text))
    await round_replicator.send_base_again(job_with_a_holder(messages_of_base=1), holder)
    assert len(holder.deadlines_s) == 3
    assert holder.deadlines_s == sorted(holder.deadlines_s, reverse=True), "all tries share one deadline"


@pytest.mark.parametrize(
    "error",
    [
        unavailable("connect failed: Connection refused"),
        unavailable("CERTIFICATE_VERIFY_FAILED"),
        UnprovedReply(grpc.StatusCode.OK, "a reply"),
    ],
)
async def test_attach_does_not_wait_for_a_holder_that_is_gone_or_a_stranger(error):
    holder = Holder(error)
    with pytest.raises(AttachError, match="does not keep the capsules of step 3"):
        await round_replicator.send_base_again(job_with_a_holder(messages_of_base=1), holder)
    assert len(holder.deadlines_s) == 1


async def test_attach_stops_waiting_for_a_holder_at_the_deadline(monkeypatch):
    monkeypatch.setattr(round_replicator, "SECURE_DEADLINE_S", 0.1)
    holder = Holder(unavailable("connect() timed out"))
    with pytest.raises(AttachError, match="and the network to it"):
        await round_replicator.send_base_again(job_with_a_holder(messages_of_base=1), holder)
