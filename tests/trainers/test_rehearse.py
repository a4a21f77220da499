"""`reft-cli rehearse` on the examples of other trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.daemons import ROOT

pytestmark = [pytest.mark.trainers, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("trainer", "script"),
    [("lightning", "lightning_fit.py"), ("hf", "hf_trainer.py"), ("hf", "accelerate_loop.py")],
)
def test_the_example_goes_on_bit_for_bit(trainer, script, tmp_path):
    python = ROOT / ".venv-trainers" / trainer / "bin/python"
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")]), "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "reft.cli.main", "rehearse", "--json", "--steps", "12", "--", str(python)]
    done = subprocess.run(
        [*command, f"examples/{script}"], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["outcome"], report["compared_through"], report["restored_from"]) == ("equal", 12, "memory")
