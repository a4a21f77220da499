"""The README's first run, typed line by line: a run is killed, and goes on bit for bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Reader

pytestmark = pytest.mark.timeout(600)
EPOCH = re.compile(r"^epoch .*$", re.M)
# A short training, as "python examples/quickstart.py" would be a minute long.
SHORT = {"examples/quickstart.py": "examples/quickstart.py --epochs 5 --chars 50000"}


def epochs_of(output: str) -> list[str]:
    return EPOCH.findall(output)


def typed(reader: Reader, folder: Path, install: str = "") -> None:
    """Types the section of the README, as it stands there."""
    train = "REFT_JOB=first python examples/quickstart.py"
    if install:
        reader.run(install, timeout=550)
    plain = epochs_of(reader.run(train, REFT_MODE="off"))
    first = reader.start(train)
    assert first.stdout is not None
    seen = ""
    while len(epochs_of(seen)) < 2:
        line = first.stdout.readline()
        assert line, seen
        seen += line
    words, reader.words = reader.words, {}
    # Only this test's training may end, not others that run beside this test.
    reader.run("pkill -9 -f examples/quickstart.py", PATH=f"{own_pkill(folder, first)}:{reader.environment['PATH']}")
    reader.words = words
    seen += first.communicate(timeout=60)[0]
    assert re.search(r"^first +quickstart.py +\S+ +\S+ +\d+ ", reader.run("reft-cli status"), re.M)
    output = reader.run(train)
    assert re.search(r"job first: .*step \d+ .*restored|restored step \d+", output), output
    again = epochs_of(output)
    assert 1 <= len(again) < len(plain) and {*epochs_of(seen), *again} == {*plain}, (plain, seen, again)
    assert "bit-equal" in reader.run("reft-cli rehearse -- python examples/quickstart.py", timeout=300)
    reader.run("reft-cli purge --all --yes")
    assert not Path(reader.environment["REFT_RUNTIME_DIR"]).exists()


def own_pkill(folder: Path, process: subprocess.Popen[str]) -> Path:
    """Returns a folder with a pkill that looks only at the processes of one session."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "pkill"
    script.write_text(f'#!/bin/sh\nexec /usr/bin/pkill "$@" -s {process.pid}\n')
    script.chmod(0o755)
    return script.parent


def test_the_first_run_of_the_readme(tmp_path):
    typed(Reader(tmp_path, SHORT), tmp_path)


@pytest.mark.slow
def test_the_first_run_of_the_readme_from_an_empty_venv(tmp_path):
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "-q", ROOT, checkout], check=True)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([tmp_path / "venv/bin/pip", "install", "-q", "torch==2.13.0"], check=True, timeout=500)
    (tmp_path / "reader").mkdir()
    path = os.pathsep.join([str(tmp_path / "venv/bin"), "/usr/bin", "/bin"])
    reader = Reader(tmp_path / "reader", PATH=path, PYTHONPATH="", HOME=str(tmp_path))
    reader.folder = checkout
    typed(reader, tmp_path, "pip install .")
