"""transformers loads an export of a Llama that was trained with FSDP2; its logits are equal."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from reft.cli.main import main
from tests.support.daemons import ROOT, DaemonProcess, until

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(600)]
HF = ROOT / ".venv-trainers/hf/bin"
SCRIPT = str(ROOT / "tests/support/exported_llama.py")


def test_llama_of_transformers_has_the_same_logits(tmp_path: Path) -> None:
    daemon = DaemonProcess()
    environment = {
        **os.environ, "REFT_DAEMON": daemon.address, "REFT_JOB": "llama", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "daemon"))),
    }  # fmt: skip
    try:
        torchrun = [
            str(HF / "torchrun"),
            "--standalone",
            "--nproc-per-node=2",
            SCRIPT,
            "train",
            str(tmp_path / "logits"),
        ]
        done = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        until(lambda: not any(rank.alive for rank in daemon.status("llama").ranks), what="the trainers' end")
        command = ["export", "llama", "--to", str(tmp_path / "hf"), "--only", "weights", "--daemon", daemon.address]
        exported = CliRunner().invoke(main, command, catch_exceptions=False)
        assert exported.exit_code == 0, exported.output
    finally:
        daemon.close()
    shutil.copy(tmp_path / "config.json", tmp_path / "hf")
    load = [str(HF / "python"), "-I", SCRIPT, "load", str(tmp_path / "hf"), str(tmp_path / "logits")]
    done = subprocess.run(load, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "equal", done.stderr[-3000:]
