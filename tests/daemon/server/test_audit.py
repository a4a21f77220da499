"""Tests the audit lines of a daemon: kills, purges, and jobs that the daemon frees by itself."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

from reft.core.commit.round import StepAnswer
from reft.wire import messages
from reft.wire.certificate_role import Role
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import RECORDS
from reft_daemon.server.callers import Caller, Door
from tests.support.certificates import Certificates, why_not
from tests.support.daemons import ROOT, DaemonProcess, until
from tests.support.jobs import Code, Job, refused, slot_path, write
from tests.support.trainer_forks import Trainer


def audit_lines(daemon: DaemonProcess) -> list[str]:
    """Returns the audit lines, from what happened on."""
    return re.findall(r" WARNING reft\.audit (.*)", daemon.log.read_text())


@pytest.mark.parametrize(
    ("caller", "text"),
    [
        (Caller(Door.LOCAL, pid=7, start=1), "pid 7"),
        (Caller(Door.REMOTE, address="10.0.0.7"), "10.0.0.7"),
        (Caller(Door.REMOTE, address="::1", role=Role("u", node="n7")), "::1, daemon of user u on node n7"),
    ],
)
def test_a_caller_is_named_by_what_is_known(caller, text):
    assert str(caller) == text


def test_a_kill_names_the_launch_and_the_process_that_asked(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    job.lease(0, trainer)
    fence = pb.InventoryRequest(job="job", launch="launch", end_orphans=True)
    daemon.call("Inventory", fence)
    kill = f'kill: pid={trainer.pid} rank=0 job=job launch=launch why="an orphan of an earlier attach" by="pid '
    assert audit_lines(daemon) == [f'{kill}{os.getpid()}"']
    daemon.call("Inventory", fence)
    assert len(audit_lines(daemon)) == 1, "a second process was killed, or the first one twice"


def test_a_launch_that_asks_is_one_field_of_the_line(daemon, trainer):
    launch = 'x by=root\nkill: pid=1"'
    job = Job([(daemon, [0])], launch=launch).decide()
    job.lease(0, trainer)
    daemon.call("Inventory", pb.InventoryRequest(job="job", launch=launch, end_orphans=True))
    (line,) = audit_lines(daemon)
    assert r' launch="x by=root\nkill: pid=1\"" why=' in line and line.endswith(f' by="pid {os.getpid()}"')


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_kill_names_the_address_and_the_certificate_that_asked(start, trainer, tmp_path):
    flags = Certificates(tmp_path).flags("ours")
    here, away = (start("--listen", "127.0.0.1:0", *flags) for _ in range(2))
    job = Job([(here, [0]), (away, [1])]).decide()
    job.lease(1, trainer)
    survey = pb.SurveyRequest(job="job", launch="launch", nodes=[job.manifest.nodes[1]], end_orphans=True)
    (answer,) = here.call("Survey", survey).nodes
    assert answer.HasField("reply") and not audit_lines(here)
    (line,) = audit_lines(away)
    assert line.startswith(f"kill: pid={trainer.pid} rank=1 job=job launch=launch ")
    assert line.endswith(' by="127.0.0.1, daemon of user alice on node test"')


def test_a_refused_fence_and_a_refused_purge_leave_no_line(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    job.lease(0, trainer)
    with refused(Code.ALREADY_EXISTS):
        daemon.call("Inventory", pb.InventoryRequest(job="job", launch="another", end_orphans=True))
    with refused(Code.INVALID_ARGUMENT, "is being trained"):
        daemon.call("Purge", pb.PurgeRequest(job="job"))
    assert not audit_lines(daemon) and trainer.process.poll() is None


def test_a_purge_names_the_process_that_asked(daemon):
    job = Job([(daemon, [0])]).decide()
    job.slots(0)
    job.close()
    freed = daemon.call("Purge", pb.PurgeRequest(job="job")).freed_bytes
    assert audit_lines(daemon) == [
        f'purge: job=job by="pid {os.getpid()}" whole_step=none freed_bytes={freed}'
    ] and freed  # fmt: skip


def test_a_purge_of_a_damaged_job_names_the_process_that_asked(daemon):
    job = Job([(daemon, [0])]).decide()
    job.slots(0)
    job.close()
    daemon.kill()
    for name in RECORDS:
        slot_path(daemon, name).write_bytes(b"no record")
    daemon.start()
    freed = daemon.call("Purge", pb.PurgeRequest(job="job")).freed_bytes
    assert audit_lines(daemon) == [
        f'purge: job=job by="pid {os.getpid()}" whole_step=unknown freed_bytes={freed}'
    ] and freed  # fmt: skip


def whole_job(daemon: DaemonProcess, trainer: Trainer, is_named: bool = True) -> tuple[Job, int]:
    """Returns a job whose step 3 is whole, and the bytes that it holds; its trainer lives."""
    job = Job([(daemon, [0])])
    job.manifest.named = is_named
    job.decide()
    write(job.slots(0, trainer)[0], job.version(3))
    job.report(0, {3: StepAnswer.SEALED})
    until(lambda: job.whole() == 3, what="whole(3)")
    return job, daemon.status(job.name).held_bytes


def freed(daemon: DaemonProcess) -> list[str]:
    """Waits until a job was freed; returns the audit lines."""
    return until(lambda: audit_lines(daemon), what="the line of a job that was freed")


@pytest.mark.parametrize(("is_closed", "flag"), [(True, "--ttl"), (False, "--ttl-failed")])
def test_a_job_whose_time_to_live_is_over_is_named_with_the_flag(start, trainer, is_closed, flag):
    daemon = start(flag, "1", "--ttl-failed" if is_closed else "--ttl", "1000")
    job, held = whole_job(daemon, trainer)
    if is_closed:
        job.close()
    trainer.kill()
    (line,) = freed(daemon)
    why = re.escape(f"its time to live of 1 s was over ({flag})")
    assert re.fullmatch(rf'freed: job=job why="{why}" ended_s=[1-9]\d* whole_step=3 freed_bytes={held}', line)


def test_a_job_that_makes_room_is_named_with_the_job_that_needed_its_memory(start, trainer):
    daemon = start("--memory", "5MiB")
    _, held = whole_job(daemon, trainer, is_named=False)
    trainer.kill()
    until(lambda: not daemon.status("job").ranks[0].alive, what="the end of the trainer")
    Job([(daemon, [0])], "new").decide().lease(0, data_bytes=1 << 20)
    (line,) = audit_lines(daemon)
    why = "job new needed its memory: jobs that ended and have no name make room"
    assert re.fullmatch(rf'freed: job=job why="{why}" ended_s=\d+ whole_step=3 freed_bytes={held}', line)


def test_jobs_freed_at_the_end_of_a_daemon_are_named(start, trainer):
    daemon = start("--purge")
    _, held = whole_job(daemon, trainer)
    damaged = Job([(daemon, [0])], "damaged").decide()
    damaged.slots(0)
    daemon.kill()
    for name in RECORDS:
        slot_path(daemon, name, "damaged").write_bytes(b"no record")
    daemon.start()
    bytes_of = {each.job: each.held_bytes for each in daemon.call("Status", pb.StatusRequest()).damaged}
    daemon.kill(signal.SIGTERM)
    why = 'why="this daemon ended, and was to free all jobs then (--purge)"'
    assert audit_lines(daemon) == [
        f"freed: job=job {why} ended_s=0 whole_step=3 freed_bytes={held}",
        f"freed: job=damaged {why} ended_s=0 whole_step=unknown freed_bytes={bytes_of['damaged']}",
    ]
    assert held and bytes_of["damaged"]


def test_the_daemon_signals_processes_in_one_place_which_writes_the_line():
    """A further place would end processes without an audit line."""
    senders = re.compile(r"os\.kill\(|killpg\(|pidfd_send_signal\(|\.send_signal\(|\.terminate\(")
    sources = (ROOT / "daemon" / "reft_daemon").rglob("*.py")
    assert [each.name for each in sources for _ in senders.findall(each.read_text())] == ["leases.py"]


def test_what_was_refused_stands_in_the_log_and_in_the_status(start):
    daemon = start("--listen", "127.0.0.1:0")
    assert daemon.call("Status", pb.StatusRequest()).HasField("refused")
    (address,) = daemon.call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL)).addresses
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 2)
        assert stranger.recv(1) == b""
    (reason,) = until(lambda: daemon.call("Status", pb.StatusRequest()).refused.reasons, what="the count")
    assert reason.reason.startswith("they did not speak HTTP/2") and (reason.total, reason.last_minute) == (1, 1)
    assert list(reason.addresses) == ["127.0.0.1"]
    (line,) = until(lambda: audit_lines(daemon), what="the line")
    assert line.startswith('refused at the doors: count=1 why="1 because they did not') and '"127.0.0.1 (1)"' in line
