import os
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
        (replace(WORKER, restarts=3), [], True),
        (replace(WORKER, restarts=3), ["--standalone"], True),
        (replace(WORKER, restarts=3), ["--rdzv-backend=c10d"], True),
        (replace(WORKER, restarts=3, launch="x"), ["--rdzv-backend=reft"], False),
        (replace(Launch.load({}), restarts=3), [], False),
    ],
)
def test_a_dropped_backend_gives_a_notice(launch, flags, is_told):
    assert bool(dropped_backend(launch, [*AGENT, *flags, "train.py"])) is is_told


def test_restarts_without_the_rendezvous_of_reft_are_told_with_the_remedy():
    text = dropped_backend(Launch.load({"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_MAX_RESTARTS": "3"}), AGENT)
    assert "up to 3 times" in text and "torchrun --rdzv-backend=reft" in text


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
def test_a_random_run_id_is_replaced_by_the_users_id(launch, flags, name):
    assert chosen_run_id(launch, [*AGENT, *flags, "train.py"]) == name
    assert chosen_run_id(launch, ["bash", "wrapper", *flags]) == launch.run_id, "that is no torchrun"


def test_a_real_torchrun_keeps_the_users_run_id(tmp_path):
    """Runs a real torchrun (tried with torch 2.13): one node, no backend."""
    script = tmp_path / "train.py"
    script.write_text(
        "from reft.client.attach.rank_table import IdentityFacts; from reft.config import Config, Launch\n"
        "launch = Launch.load(); print(len(launch.run_id), IdentityFacts.of(Config.load(), launch).run_id)"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--rdzv-id=run1", str(script)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "36 run1\n"


def test_agents_command_returns_the_parents_command_line():
    code = "from reft.client.attach.launcher import agents_command; print(agents_command())"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    said = subprocess.run([sys.executable, "-c", middle, "--standalone"], capture_output=True, text=True).stdout
    assert "--standalone" in said


def test_an_unreadable_command_line_is_empty(monkeypatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert agents_command() == []


def test_launch_mark_is_the_rendezvous_launch_else_the_agent():
    assert launch_mark(replace(WORKER, launch="abc")) == "abc"
    assert launch_mark(WORKER) != launch_mark(Launch.load({}))


WRITING = """
import os, signal, sys
from reft.client.attach.launcher import complete_error_file
complete_error_file()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write(sys.argv[1])
    if sys.argv[2:]:
        os.kill(os.getpid(), signal.SIGTERM)
if not os.fork():
    sys.exit()  # a child of the trainer gives the agent nothing
os.wait()
assert not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].removesuffix(".incomplete"))
"""


@pytest.mark.parametrize(
    ("text", "is_ended"), [('{"message": "m"}', False), ('{"message": ', True)], ids=["whole", "ended by a handler"]
)
def test_the_agent_finds_a_whole_error_file_or_none(tmp_path, text, is_ended):
    path = tmp_path / "error.json"
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    done = subprocess.run([sys.executable, "-c", WRITING, text, *["end"] * is_ended], env=environment)
    assert done.returncode == (143 if is_ended else 0)
    assert (path.read_text() if path.exists() else None) == (None if is_ended else text)
