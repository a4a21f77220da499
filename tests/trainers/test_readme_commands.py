"""Runs the trainers' commands of examples/README.md, each in an environment of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Reader
from tests.support.daemons import purge_and_stop

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(600)]
# torchtitan wants a GPU: Python's sitecustomize brings the replacements that its tests on the CPU
# use.
ON_CPU = """
import sys
if sys.orig_argv[-1].endswith("torchtitan_llama.py") and not any("torchrun" in word for word in sys.orig_argv):
    import tests.support.titan_on_cpu
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "command"),
    [
        ("hf", "REFT_JOB=run1 python examples/hf_trainer.py"),
        ("lightning", "REFT_JOB=run1 python examples/lightning_fit.py"),
        ("hf", "REFT_JOB=run1 python examples/accelerate_loop.py"),
        (
            "deepspeed",
            "DS_ACCELERATOR=cpu torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 "
            "examples/deepspeed_zero.py",
        ),
        (
            "megatron",
            "torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 "
            "examples/megatron_gpt.py --tp 2",
        ),
        (
            "torchtitan",
            "torchrun --nproc-per-node=2 --max-restarts=3 --rdzv-backend=reft --rdzv-id=run1 "
            "examples/torchtitan_llama.py",
        ),
    ],
)
def test_the_command_trains(trainer, command, tmp_path):
    environment = ROOT / ".venv-trainers" / trainer
    reader = Reader(
        tmp_path, PATH=f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", HF_HUB_OFFLINE="1",
        TORCH_EXTENSIONS_DIR=str(environment / "extensions"),
    )  # fmt: skip
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ON_CPU)
    reader.environment["PYTHONPATH"] += os.pathsep + os.pathsep.join([str(site), str(ROOT / "examples")])
    try:
        assert "nothing held, starting fresh" in reader.run(command, timeout=500)
    finally:
        for socket in Path(tmp_path / "run").glob("daemon.sock"):
            purge_and_stop(socket)
