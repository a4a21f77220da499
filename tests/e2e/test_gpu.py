"""Trainings on a real GPU are killed, and go on bit for bit. Skipped without one.

Elsewhere stand-ins for CUDA run the same code (tests/support/streams.py, cuda_runtime.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.test_recomputed_copies import WORLD, finish, start
from tests.e2e.test_rehearse import TORCHRUN, passed, rehearsed
from tests.support.daemons import ROOT, DaemonProcess, Site, until, vanish
from tests.support.gpu_loop import KINDS
from tests.support.recomputed_copies import MARKS

DEVICE = "cuda"
STEPS, KILLED_FROM = 400, 60
LOOP = ("-m", "tests.support.gpu_loop", "--device", DEVICE)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(600),
]


def begin(kind: str, world: int, out: Path, daemon: DaemonProcess, mode: str = "auto") -> subprocess.Popen[bytes]:
    """Starts a run; its output goes to a file beside its losses."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    environment = {**os.environ, "PYTHONPATH": path, "REFT_DAEMON": daemon.address, "REFT_JOB": kind, "REFT_MODE": mode,
                   "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    launcher = [
        *TORCHRUN[1:3],
        f"--nproc-per-node={world}",
        "--max-restarts=2",
        "--rdzv-backend=reft",
        f"--rdzv-id={kind}",
    ]
    command = [
        sys.executable,
        *(launcher if world else ()),
        *LOOP,
        "--kind",
        kind,
        "--steps",
        str(STEPS),
        "--out",
        str(out),
    ]
    with open(out.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def lines(out: Path, rank: int = 0) -> list[list[str]]:
    """Returns the complete lines of a rank's file, as words."""
    path = Path(f"{out}.{rank}")
    text = path.read_text() if path.exists() else ""
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]


def end(process: subprocess.Popen[bytes], out: Path) -> None:
    try:
        assert process.wait(300) == 0, out.with_suffix(".log").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def compare(plain: Path, out: Path, rank: int) -> list[int]:
    """Asserts that all losses and the final state are the plain run's; returns restored steps."""
    wanted = {words[0]: words[1] for words in lines(plain, rank)}
    trained = lines(out, rank)
    assert set(wanted) == {"begins", "ends", *map(str, range(STEPS))}
    differing = [words[:2] for words in trained if words[0] != "begins" and wanted[words[0]] != words[1]]
    assert differing == [], (len(differing), len(trained), [words for words in trained if words[0] == "begins"])
    assert trained[-1][0] == "ends"
    return [int(words[1]) for words in trained if words[0] == "begins"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_on_a_gpu_goes_on_bit_for_bit(kind, daemon, tmp_path):
    world = {"ddp": 2, "fsdp2": 1}.get(kind, 0)  # gloo on two ranks, because NCCL refuses two ranks of one device
    end(begin(kind, world, tmp_path / "plain", daemon, "off"), tmp_path / "plain")
    out = tmp_path / "killed"
    process = begin(kind, world, out, daemon)
    until(lambda: len(lines(out)) > KILLED_FROM or process.poll() is not None, 200, "steps")
    assert process.poll() is None, out.with_suffix(".log").read_text()[-3000:]
    os.kill(int(lines(out)[0][2]), signal.SIGKILL)
    if not world:
        process.wait()
        process = begin(kind, world, out, daemon)
    end(process, out)
    for rank in range(world or 1):
        starts = compare(tmp_path / "plain", out, rank)
        assert len(starts) == 2 and 0 < starts[1] < STEPS, (starts, out.with_suffix(".log").read_text()[-3000:])
    print("restored", starts[1], "of", KILLED_FROM, "and more;", *lines(out)[-1][2:])


def test_a_rehearsal_on_a_gpu_passes(tmp_path):
    command = (sys.executable, *LOOP, "--kind", "fused", "--steps", "200")
    assert passed(rehearsed(tmp_path, *command))


def test_copies_of_moments_on_gpus_are_proved_or_not_used(site: Site, tmp_path):
    """The host's bits may differ from the device's: then the daemons copy the moments."""
    more = (0, "aor", MARKS, 1 << 30, "", DEVICE)
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    plain = finish(start(nodes, tmp_path / "plain", ["adamw"], "plain", *more), tmp_path / "plain")
    ranks = start(nodes, tmp_path / "lost", ["adamw"], "job", 4, *more[1:])
    paused = [tmp_path / "lost" / f"{rank}.paused" for rank in range(WORLD)]
    until(lambda: all(path.exists() for path in paused), 200, "step 4 is protected")
    for process in ranks:
        process.kill()
        process.join()
    vanish(nodes[1])
    nodes[1] = site.add(1, "--node", "node-2")[0]
    results = finish(start(nodes, tmp_path / "again", ["adamw"], "job", *more), tmp_path / "again")
    for rank in range(WORLD):
        assert results[rank]["adamw"]["restored"] == "peers"
        assert results[rank]["adamw"]["state"] == plain[rank]["adamw"]["state"]
    print("turns:", json.dumps([result["adamw"]["turns"] for result in plain]))
