"""Remedies that are commands: each is typed as the error says it, and then the request succeeds."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from click.testing import CliRunner, Result

from reft.cli.main import main
from reft.errors import ConfigError, ReftError
from reft.folders import claim_folder
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.persist.persist_key import read_key
from reft_daemon.server.settings import persist_settings
from tests.cli.test_main import make_job
from tests.support.daemons import ROOT, DaemonProcess, until
from tests.support.trainers import Spec, run

TOKEN = bytes(31) + b"1"


def typed(command: str, address: str, *more: str) -> Result:
    """Types a command of `reft-cli`, without the program's name."""
    return CliRunner().invoke(main, [*command.split(), *more], env={"REFT_DAEMON": address}, catch_exceptions=False)


def hint_of(command: str, address: str) -> str:
    """Returns the remedy of a command that fails."""
    failed = typed(command, address, "--json")
    assert failed.exit_code
    hint = json.loads(failed.stderr)["error"]["hint"]
    assert isinstance(hint, str)
    return hint


def command_in(hint: str) -> str:
    """Returns the first command of a remedy, without the program's name."""
    (command, *_) = re.findall(r"reft-cli ([\w-]+(?: (?:--)?[\w./=-]+)*)", hint)
    return str(command)


def decide(daemon: DaemonProcess, token: bytes) -> None:
    node = pb.Node(name="test", id="0", addresses=[daemon.address], ranks=[0])
    manifest = pb.Manifest(job="run1", named=True, token=token, world=1, nodes=[node], every=1)
    request = pb.DecideRequest(manifest=manifest, decision=pb.Decision(epoch=pb.Epoch(counter=1, ident=bytes(16))))
    rpc.call(daemon.address, "Decide", request, 30)


def test_a_job_that_is_not_there(daemon):
    make_job(daemon, "run1")
    for command in ("status other", "purge other --yes", "recover other", "list other"):
        assert hint_of(command, daemon.address).startswith("reft-cli status lists the jobs")
    assert "run1" in typed("status", daemon.address).stdout


def test_a_purge_that_can_not_ask(daemon):
    make_job(daemon, "run1")
    assert hint_of("purge run1", daemon.address) == "add --yes"
    assert typed("purge run1 --yes", daemon.address).exit_code == 0


def test_a_what_if_among_several_jobs(daemon):
    for name in ("run1", "run2"):
        make_job(daemon, name)
    assert hint_of("status --what-if lose=test", daemon.address) == "reft-cli status JOB --what-if …"
    assert "needs one job" not in typed("status run1 --what-if lose=test", daemon.address).stderr


def test_a_name_that_another_job_has(daemon):
    make_job(daemon, "run1")
    with pytest.raises(ReftError, match="holds another job of the name run1") as refused:
        decide(daemon, TOKEN)
    assert typed(command_in(refused.value.hint), daemon.address, "--yes").exit_code == 0
    decide(daemon, TOKEN)


def test_a_daemon_that_does_not_run(tmp_path):
    address = f"unix:{tmp_path}/d.sock"
    hint = hint_of("status", address)
    (arguments,) = re.findall(r"^start reft-daemon (--socket \S+) on this node", hint)
    command = [sys.executable, "-m", "reft_daemon", *arguments.split(), "--dir", str(tmp_path / "slots")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as daemon:
        try:
            until(lambda: typed("status", address).exit_code == 0, what="an answer")
        finally:
            with suppress(ProcessLookupError):
                daemon.send_signal(signal.SIGTERM)


def test_the_daemon_of_attach_that_does_not_run(tmp_path):
    failed = CliRunner().invoke(main, ["status"], env={"REFT_RUNTIME_DIR": str(tmp_path), "REFT_DAEMON": ""})
    assert (failed.exit_code, "\nFix: start a job: attach starts this daemon" in failed.stderr) == (10, True)


def test_the_daemon_of_attach_answers_without_storage(tmp_path, daemon):
    run(Spec(daemon.address, steps=4))
    (tmp_path / "daemon.sock").symlink_to(daemon.socket)  # where attach starts a daemon
    environment = {"REFT_RUNTIME_DIR": str(tmp_path), "REFT_DAEMON": ""}
    listed, *unknown = (
        CliRunner().invoke(main, command.split(), env=environment)
        for command in ("list job", "list nosuch", "recover nosuch --step 3")
    )
    assert listed.exit_code == 0 and "memory" in listed.stdout and "no storage (--persist)" in listed.stdout
    assert [each.exit_code for each in unknown] == [11, 11]


def test_files_that_others_can_read_or_write(tmp_path):
    folder, key = tmp_path / "slots", tmp_path / "key"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    key.write_bytes(bytes(32))
    key.chmod(0o644)
    for path, take in ((folder, claim_folder), (key, read_key)):
        with pytest.raises(ConfigError) as refused:
            take(path)
        subprocess.run(refused.value.hint.split(), check=True)
        assert take(path)


@pytest.mark.parametrize(
    ("root", "every", "keep"), [("", "30m", 3), ("/shared/reft", "30m", 0)], ids=["without a folder", "none kept"]
)
def test_flags_of_checkpoints(root, every, keep):
    with pytest.raises(ConfigError) as refused:
        persist_settings(root, every, keep, "0", False, "25s")
    option, value = refused.value.hint.removeprefix("add ").split()
    given = {"--persist": "/shared/reft" if value == "DIR" else value} if option == "--persist" else {"--keep": value}
    assert persist_settings(given.get("--persist", root), every, int(given.get("--keep", keep)), "0", False, "25s")
