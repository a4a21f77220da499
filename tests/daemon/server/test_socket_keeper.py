"""Tests a daemon whose sockets are removed. Scripts that clear /tmp after a job do so."""

from __future__ import annotations

import shutil

from reft.core.commit.round import StepAnswer
from reft.core.commit.slots import SlotState
from tests.daemon.test_start import run
from tests.support.daemons import until
from tests.support.jobs import Job, write

AGAIN = "they were made again"


def clear(daemon) -> None:
    times = daemon.log.read_text().count(AGAIN)
    for path in daemon.home.iterdir():
        if path != daemon.log:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    until(lambda: daemon.log.read_text().count(AGAIN) > times, what="new sockets")


def test_the_sockets_are_made_again_and_the_slots_are_kept(daemon, trainer):
    job = Job([(daemon, [0])]).decide()
    names = job.lease(0, trainer)
    slots = job.maps(0, names)
    for step in (1, 2):  # also the second time
        clear(daemon)
        assert daemon.answers()
        assert len(job.maps(0, names)) == len(names)  # these are sent over the local socket
        write(slots[step - 1], job.version(step), SlotState.SEALED)
        assert job.report(0, {step: StepAnswer.SEALED}).pins.whole == step
    assert {path.name for path in daemon.home.iterdir()} >= {"d.sock", "d.sock.ln", "d.sock.lock"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in daemon.home.glob("d.sock*"))


def test_no_second_daemon_can_serve_there_afterwards(daemon, tmp_path):
    clear(daemon)
    code, text = run("--socket", daemon.socket, "--dir", tmp_path / "arena")
    assert code == 1 and f"pid {daemon.process.pid}" in text and "socket" in text


def test_the_daemons_end_leaves_no_socket(daemon):
    clear(daemon)
    daemon.process.terminate()
    assert daemon.process.wait(60) == 0
    assert not list(daemon.home.glob("d.sock")) and not list(daemon.home.glob("d.sock.ln"))
    assert "Traceback" not in daemon.log.read_text()
