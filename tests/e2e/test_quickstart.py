"""The README's first run, typed line by line: a run is killed, and goes on bit for bit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Reader
from tests.support.daemons import purge_and_stop

pytestmark = pytest.mark.timeout(600)
EPOCH = re.compile(r"^epoch .*$", re.M)
# A short training, as "python examples/quickstart.py" would be a minute long.
SHORT = {"examples/quickstart.py": "examples/quickstart.py --epochs 5 --chars 50000"}


def epochs_of(output: str) -> list[str]:
    return EPOCH.findall(output)


@pytest.fixture
def reader(environment, tmp_path) -> Iterator[Reader]:
    """A reader in this environment, or in an empty one, into which they install reft."""
    reader = in_empty_environment(tmp_path) if environment == "empty" else Reader(tmp_path, SHORT)
    yield reader
    for socket in Path(reader.environment["REFT_RUNTIME_DIR"]).glob("daemon.sock"):  # if the test failed
        purge_and_stop(socket)


def in_empty_environment(folder: Path) -> Reader:
    checkout = folder / "checkout"
    subprocess.run(["git", "clone", "-q", ROOT, checkout], check=True)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([folder / "venv/bin/pip", "install", "-q", "torch==2.13.0"], check=True, timeout=500)
    (folder / "reader").mkdir()
    path = os.pathsep.join([str(folder / "venv/bin"), "/usr/bin", "/bin"])
    reader = Reader(folder / "reader", SHORT, PATH=path, PYTHONPATH="")
    reader.folder = checkout
    reader.run("pip install .", timeout=550)
    return reader


def kill(reader: Reader, command: str, training: subprocess.Popen[str], folder: Path) -> None:
    """Types pkill, which looks only at this test's training, not at others on this machine."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "pkill"
    script.write_text(f'#!/bin/sh\nexec /usr/bin/pkill "$@" -s {training.pid}\n')
    script.chmod(0o755)
    words, reader.words = reader.words, {}
    reader.run(command, PATH=f"{script.parent}:{reader.environment['PATH']}")
    reader.words = words
    training.wait()
    # A worker that was forked after pkill had looked would keep stdout open.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(training.pid, signal.SIGKILL)


@pytest.mark.parametrize("environment", ["this", pytest.param("empty", marks=pytest.mark.slow)])
def test_the_first_run_of_the_readme(environment, reader, tmp_path):
    train = "REFT_JOB=first python examples/quickstart.py"
    plain = epochs_of(reader.run(train, REFT_MODE="off"))
    first, seen = reader.start(train), ""
    assert first.stdout is not None
    while len(epochs_of(seen)) < 2:
        line = first.stdout.readline()
        assert line, seen
        seen += line
    kill(reader, "pkill -9 -f examples/quickstart.py", first, tmp_path)
    seen += first.communicate(timeout=60)[0]
    assert re.search(r"^first +quickstart.py +\S+ +\S+ +\d+ ", reader.run("reft-cli status"), re.M)
    output = reader.run(train)
    assert re.search(r"job first: restored step \d+", output), output
    again = epochs_of(output)
    assert 1 <= len(again) < len(plain) and {*epochs_of(seen), *again} == {*plain}, (plain, seen, again)
    assert "bit-equal" in reader.run("reft-cli rehearse -- python examples/quickstart.py", timeout=300)
    reader.run("reft-cli purge --all --yes")
    assert not Path(reader.environment["REFT_RUNTIME_DIR"]).exists()
