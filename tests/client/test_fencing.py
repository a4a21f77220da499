import subprocess
import sys
from dataclasses import replace

import pytest

from reft.client.fencing import dropped_backend, launch_mark
from reft.config import Launch

WORKER = Launch(0, 2, 0, "run", "", 0)
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


def test_the_agents_command_line_is_read():
    code = "from reft.client.fencing import agents_command; print(agents_command())"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    said = subprocess.run([sys.executable, "-c", middle, "--standalone"], capture_output=True, text=True).stdout
    assert "--standalone" in said


def test_a_launch_is_the_rendezvous_launch_if_there_is_one_else_its_agent():
    assert launch_mark(replace(WORKER, launch="abc")) == "abc"
    assert launch_mark(WORKER) != launch_mark(Launch.load({}))
