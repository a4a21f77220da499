"""`reft-cli rehearse` on the examples of other trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.daemons import ROOT

pytestmark = [pytest.mark.trainers, pytest.mark.slow, pytest.mark.timeout(2500)]
# The trainers' environments have no reft, and so no rendezvous of it.
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2", "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--rdzv-id=run1")  # fmt: skip
# torchtitan wants a GPU; this brings what replaces it.
ON_CPU = ("tests/support/run_example.py", "OUT")


@pytest.mark.parametrize(
    ("trainer", "command"),
    [
        ("lightning", ("examples/lightning_fit.py",)),
        ("hf", ("examples/hf_trainer.py",)),
        ("hf", ("examples/accelerate_loop.py",)),
        ("deepspeed", (*TORCHRUN, "examples/deepspeed_zero.py")),
        ("megatron", (*TORCHRUN, "examples/megatron_gpt.py", "--tp", "2")),
        ("megatron", (*TORCHRUN, "examples/megatron_gpt.py", "--pp", "2")),
        ("torchtitan", (*TORCHRUN, *ON_CPU, "examples/torchtitan_llama.py")),
    ],
    ids=["lightning", "hf", "accelerate", "deepspeed", "megatron-tp", "megatron-pp", "torchtitan"],
)
def test_the_example_goes_on_bit_for_bit(trainer, command, tmp_path):
    own = ROOT / ".venv-trainers" / trainer
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon")]), "TMPDIR": str(tmp_path),
        "PATH": f"{own / 'bin'}{os.pathsep}{os.environ['PATH']}",  # DeepSpeed looks for ninja
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else torch may hang after a restart
        "TORCH_EXTENSIONS_DIR": str(own / "extensions"),  # compiled by make trainers
    }  # fmt: skip
    rehearse = [sys.executable, "-m", "reft.cli.main", "rehearse", "--json", "--steps", "12", "--timeout", "1200", "--"]
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    done = subprocess.run(
        [*rehearse, str(own / "bin/python"), *words], capture_output=True, text=True, env=environment, cwd=ROOT,
        timeout=2450,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["outcome"], report["compared_through"], report["restored_from"]) == ("equal", 12, "memory")
    assert report["not_seen"] == []
