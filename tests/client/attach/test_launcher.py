import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reft.client.attach.launcher import agents_command, chosen_run_id, dropped_backend, launch_mark
from reft.config import Launch

WORKER = Launch(0, 2, "run", "")
AGENT = ["python", "torchrun", "--nproc-per-node=2"]


@pytest.mark.parametrize(
    ("launch", "flags", "is_told"),
    [
        (WORKER, ["--standalone", "--rdzv-backend=reft"], True),
        (WORKER, ["--standalone", "--rdzv_backend", "reft"], True),
        (replace(WORKER, backend="reft"), ["--standalone"], True),
        (WORKER, ["--standalone"], False),
        (WORKER, ["--rdzv-backend=reft"], False),
        (replace(WORKER, launch="x"), ["--standalone", "--rdzv-backend=reft"], False),
        (Launch.load({}), ["--standalone", "--rdzv-backend=reft"], False),
    ],
)
def test_who_asked_for_the_backend_and_did_not_get_it_is_told(launch, flags, is_told):
    assert bool(dropped_backend(launch, [*AGENT, *flags, "train.py"])) is is_told


DRAWN = replace(WORKER, run_id="0b0a3c0e-7a34-4d6c-9a51-0a3f3f1f2b11")


@pytest.mark.parametrize(
    ("launch", "flags", "name"),
    [
        (DRAWN, ["--rdzv-id=run1"], "run1"),
        (DRAWN, ["--rdzv_id", "run1"], "run1"),
        (replace(DRAWN, asked_id="run1"), [], "run1"),
        (DRAWN, [], "none"),
        (DRAWN, [f"--rdzv-id={DRAWN.run_id}"], DRAWN.run_id),
        (replace(DRAWN, asked_id=DRAWN.run_id), [], DRAWN.run_id),
        (WORKER, ["--rdzv-id=other"], "run"),
    ],
)
def test_a_name_that_torchrun_drew_is_nobodys_choice(launch, flags, name):
    assert chosen_run_id(launch, [*AGENT, *flags, "train.py"]) == name
    assert chosen_run_id(launch, ["bash", "wrapper", *flags]) == launch.run_id, "that is no torchrun"


def test_torchruns_own_default_keeps_the_name(tmp_path):
    """torch 2.13 for real: one node, no backend."""
    script = tmp_path / "train.py"
    script.write_text(
        "from reft.client.attach.rank_table import identity_facts; from reft.config import Config, Launch\n"
        "launch = Launch.load(); print(len(launch.run_id), identity_facts(Config.load(), launch)['run_id'])"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--rdzv-id=run1", str(script)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "36 run1\n"


def test_the_agents_command_line_is_read():
    code = "from reft.client.attach.launcher import agents_command; print(agents_command())"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    said = subprocess.run([sys.executable, "-c", middle, "--standalone"], capture_output=True, text=True).stdout
    assert "--standalone" in said


def test_an_agent_of_another_user_says_nothing(monkeypatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert agents_command() == []


def test_a_launch_is_the_rendezvous_launch_if_there_is_one_else_its_agent():
    assert launch_mark(replace(WORKER, launch="abc")) == "abc"
    assert launch_mark(WORKER) != launch_mark(Launch.load({}))
