"""Tests turns of the exchange among real daemons: parity as the oracle says, faults, limits."""

from __future__ import annotations

import signal

import psutil
import pytest

from reft.wire import messages
from reft.wire.v1 import daemon_pb2 as pb
from reft.wire.v1 import daemon_pb2_grpc as pb_grpc
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import DaemonProcess, until
from tests.support.exchange import SEALED, SIZES, SLOTS, ShardedJob
from tests.support.jobs import Code, Job, epoch_of, refused, tcp_call
from tests.support.processes import children_with
from tests.support.trainer_forks import Trainer


@pytest.fixture
def three(start, trainer) -> ShardedJob:
    return three_nodes(start, trainer)


def three_nodes(start, trainer, protect: str = "auto") -> ShardedJob:
    daemons = [start("--listen", "127.0.0.1:0") for _ in range(3)]
    return ShardedJob(daemons, SIZES, trainer, protect=protect).begin()


def movers(daemon: DaemonProcess) -> list[psutil.Process]:
    return children_with(daemon.process.pid, "reft_daemon.mover")


def test_each_whole_step_becomes_protected_by_parity_as_drawn(three):
    for step in (1, 2, 3):
        three.seal(step)
        three.await_protected(step)
        three.check_parity(step)
    status = three.exchange()
    assert status.turn == -1 and not status.lanes
    held = {header.slot for header in three.parity_headers(1)}
    assert held == {"parity-1.slot-0", "parity-1.slot-1"}


def test_each_whole_step_becomes_protected_by_copies_of_the_next_members(start, trainer):
    three = three_nodes(start, trainer, "aor")
    for step in (1, 2, 3):
        three.seal(step)
        three.await_protected(step)
        three.check_parity(step)
    assert three.parity(0, 3).startswith(three.section(1, 3)), "node 0 keeps all of rank 1"


def test_parity_is_no_slot_of_a_trainer(three):
    three.seal(1)
    three.await_protected(1)
    reply = three.report(0, {1: SEALED})
    assert not reply.slots_missing
    assert three.daemons[0].status("job").ranks[0].slots == SLOTS
    assert three.lease_all(0) == [f"rank-0.slot-{i}" for i in range(SLOTS)]


def test_a_damaged_source_is_named_and_nothing_wrong_is_sealed(three):
    three.seal(1)
    three.await_protected(1)
    slots = [three.write(rank, 2) for rank in three.home]
    section = three.placement.rank_placement(1).unreplicated_offset
    slots[1].data[section] ^= 1
    for rank in three.home:
        three.report(rank, {2: SEALED})
    until(
        lambda: "rank 1 on node n1 has bytes that changed in memory" in log_of(three, 2), what="the damage in the log"
    )
    until(lambda: three.exchange().turn == -1, what="the end of the turn")
    assert three.exchange().protected == 1
    sealed = [header.version.step for node in range(3) for header in three.parity_headers(node) if header.state == 3]
    assert set(sealed) <= {1, 2} and sealed.count(1) == 3, "the protected parity stays"
    assert 2 not in [each.version.step for each in three.parity_headers(2) if each.state == 3]
    three.seal(3)
    three.await_protected(3)
    three.check_parity(3)


def log_of(job: ShardedJob, node: int) -> str:
    return job.daemons[node].log.read_text()


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_mover_costs_no_turn(three, node):
    three.seal(1)
    three.await_protected(1)
    for step in (2, 3):
        (mover,) = movers(three.daemons[node])
        for rank in three.home:
            three.write(rank, step)
        mover.kill()
        for rank in three.home:
            three.report(rank, {step: SEALED})
        three.await_protected(step)
        three.check_parity(step)


@pytest.mark.parametrize("node", [0, 1])
def test_a_restarted_daemon_takes_its_parity_over(three, node):
    three.seal(1)
    three.await_protected(1)
    before = three.parity(node, 1)
    three.daemons[node].kill()
    three.daemons[node].start()
    three.await_protected(1, [node])
    assert three.parity(node, 1) == before
    three.seal(2)
    three.await_protected(2)
    three.check_parity(2)


def test_lost_parity_is_reported_and_made_again(three):
    three.seal(1)
    three.await_protected(1)
    daemon = three.daemons[2]
    daemon.kill()
    for path in (daemon.folder / "job").glob("parity-*"):
        path.unlink()
    daemon.start()
    until(lambda: three.parity_headers(2), what="another turn of the same step")
    three.await_protected(1)
    three.check_parity(1)
    three.seal(2)
    three.await_protected(2)
    three.check_parity(2)


def test_a_step_without_a_slot_takes_no_protected_step_away(start, trainer):
    """So it is after `recover` made a slot of the protected step: the turn of a newer step goes on.

    The other node has copies of the lost slot already, so no holder misses it.
    """
    failing = start("--listen", "127.0.0.1:0", environment={"REFT_FAILPOINTS": "turn.ticket:drop:step=2"})
    two = ShardedJob([start("--listen", "127.0.0.1:0"), failing], SIZES[:2], trainer, protect="aor").begin()
    two.seal(1)
    two.await_protected(1)
    two.seal(2)
    until(lambda: "parity of step 2 (epoch 1) is sealed here" in log_of(two, 0), what="copies on the first node")
    reply = failing.call("Inventory", pb.InventoryRequest(job=two.name))
    (lost,) = [slot.slot for slot in reply.slots if slot.version.step == 2 and slot.state == 3 and not slot.parity]
    failing.kill()
    (failing.folder / "job" / lost).unlink()
    failing.environment = {}
    failing.start()
    until(lambda: "is not guarded: the slot of rank 1 is gone" in log_of(two, 1), what="the end of the turn")
    until(lambda: two.exchange().turn == -1, what="pins without that turn")
    assert two.exchange().protected == 1
    two.check_parity(1)


def test_a_daemon_restarted_without_its_memfds_hears_the_pins_at_once(three):
    three.seal(1)
    three.await_protected(1)
    daemon = three.daemons[2]
    daemon.kill()
    for path in (daemon.folder / "job").glob("*slot-*"):
        path.unlink()  # as memfds, which trainers give back with their next snapshot only
    daemon.start()
    until(lambda: daemon.status("job").whole == 1, what="the pins")


def test_a_stopped_daemon_delays_its_turn_and_no_step(three):
    three.seal(1)
    three.await_protected(1)
    for rank in three.home:
        three.write(rank, 2)
    three.report(2, {2: SEALED})
    three.daemons[2].kill(signal.SIGSTOP)
    for rank in (0, 1):
        three.report(rank, {2: SEALED})
    assert three.exchange().protected == 1
    three.daemons[2].kill(signal.SIGCONT)
    three.await_protected(2)
    three.check_parity(2)


@pytest.mark.parametrize("node", [0, 1])
def test_a_daemon_killed_in_a_turn_goes_on_with_it(three, node):
    three.seal(1)
    three.await_protected(1)
    three.seal(2)
    three.daemons[node].kill()
    three.daemons[node].start()
    three.await_protected(2)
    three.check_parity(2)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_movers_of_daemons_with_certificates_use_them_at_any_address(start, trainer, tmp_path):
    certificates = Certificates(tmp_path)
    more = [("--bulk", "127.0.0.2"), ("--protect-bandwidth", "1G/s"), ()]
    daemons = [
        start("--node", name, "--listen", "127.0.0.1:0", *certificates.flags("ours", name), *flags)
        for name, flags in zip(("n0", "n1", "n2"), more, strict=True)
    ]
    job = ShardedJob(daemons, SIZES, trainer).begin()
    job.seal(1)
    job.await_protected(1)
    job.check_parity(1)
    (mover,) = movers(daemons[0])
    listening = [each.laddr.ip for each in mover.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.2"]
    assert "--tls" in mover.cmdline()


def test_a_job_without_state_to_exchange_starts_no_mover(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    job.lease(0, trainer)
    job.report(0, {1: SEALED})
    assert not movers(daemon) and not daemon.status("job").HasField("exchange")


def test_parity_that_does_not_fit_is_refused_before_a_page_is_touched(start, trainer):
    daemons = [start("--listen", "127.0.0.1:0", *(["--memory", "7MiB"] if rank == 1 else [])) for rank in range(3)]
    job = ShardedJob(daemons, SIZES, trainer)
    job.decide()
    with refused(Code.RESOURCE_EXHAUSTED, "the slots and the exchange's parity slots need"):
        job.lease_all(1)
    assert daemons[1].status("job").held_bytes == 0


def test_tickets_are_for_this_job_and_epoch(three):
    address = three.manifest.nodes[1].addresses[0]

    def ask(token: bytes, counter: int = 1) -> object:
        request = pb.OpenBulkRequest(job="job", epoch=messages.epoch_to(epoch_of(counter)))
        return tcp_call(address, "OpenBulk", request, token, pb_grpc.PeerStub)

    reply = ask(three.manifest.token)
    assert len(reply.ticket) == 32 and reply.port and not reply.address
    assert ask(three.manifest.token).ticket != reply.ticket
    with refused(Code.UNAUTHENTICATED):
        ask(b"x" * 32)
    with refused(Code.ABORTED):
        ask(three.manifest.token, counter=2)


def test_no_turn_begins_between_an_attach_and_its_decision(three):
    three.seal(1)
    three.await_protected(1)
    address, request = three.manifest.nodes[1].addresses[0], pb.OpenBulkRequest(job="job", epoch=three.epoch)
    three.daemons[1].call("Inventory", pb.InventoryRequest(job="job", launch="launch"))
    tcp_call(address, "OpenBulk", request, three.manifest.token, pb_grpc.PeerStub)
    three.daemons[1].call("Inventory", pb.InventoryRequest(job="job", end_orphans=True, launch="launch"))
    with refused(Code.FAILED_PRECONDITION, "is being attached"):
        tcp_call(address, "OpenBulk", request, three.manifest.token, pb_grpc.PeerStub)
    for node in (0, 2):
        three.daemons[node].call("Inventory", pb.InventoryRequest(job="job", end_orphans=True, launch="launch"))
    again = Trainer()
    try:
        three.trainer = again
        three.decide(base=three.version(1))
        for rank in three.home:
            three.maps_of[rank] = three.maps(rank, three.lease_all(rank))
        assert {header.version.step for node in range(3) for header in three.parity_headers(node)} == {0, 1}
        three.seal(2)
        three.await_protected(2)
        three.check_parity(2)
    finally:
        again.kill()


def test_a_purge_frees_parity(three, trainer):
    three.seal(1)
    three.await_protected(1)
    trainer.kill()
    daemon = three.daemons[1]
    until(lambda: not daemon.status("job").ranks[0].alive, what="the news")
    freed = daemon.call("Purge", pb.PurgeRequest(job="job")).freed_bytes
    slot_bytes = sum(1 for _ in three.maps_of[1]) * three.maps_of[1][0].header.geometry.file_bytes
    assert freed >= slot_bytes + three.lane.buffers_bytes
    assert not (daemon.folder / "job").exists()


def test_a_stopped_mover_dies_with_its_daemon(three):
    three.seal(1)
    three.await_protected(1)
    (mover,) = movers(three.daemons[1])
    mover.suspend()
    three.daemons[1].kill()
    gone, _ = psutil.wait_procs([mover], 30)
    assert gone == [mover]
