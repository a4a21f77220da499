"""bench/gpu_stage.py runs on the CPU, and with only torch and numpy installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--device=cpu --stages=2 --stage=0 --microbatches=2 --steps=10 --width=32 --inner=64 --heads=2 --length=8 --replicas=4 "
    "--tolerate=1"
).split()
BARE = """
import runpy, sys
for name in {missing}:
    sys.modules[name] = None  # as if it were not installed
sys.argv = ["gpu_stage.py", *sys.argv[1:]]
runpy.run_path({script!r}, run_name="__main__")
"""


MISSING = ("grpc", "google.protobuf", "xxhash", "psutil")


@pytest.mark.slow
@pytest.mark.parametrize("missing", [pytest.param((), id="full"), pytest.param(MISSING, id="bare")])
def test_the_bench_of_one_stage_runs(missing, tmp_path):
    code = BARE.format(missing=missing, script=str(ROOT / "bench" / "gpu_stage.py"))
    target = tmp_path / "figures.json"
    command = [sys.executable, "-c", code, *SMALL, f"--json={target}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    details = json.loads(target.read_text())["details"]
    assert {mode: len(seconds) for mode, seconds in details["seconds"].items()} == {"alone": 9, "reft": 9, "at once": 9}
    assert details["share_of_state"] == pytest.approx(1 / 3, rel=0.2)  # |P| / (D - f), and padding
    assert details["idle_ms"] > 0 and len(details["substituted"]) == (2 if missing else 0)
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("alone", "reft", "at once"))]
