"""Forked workers: they equal workers of a cold start, and end in the same way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from reft.elastic.warm import fork_server, torch_patch, warm
from reft.elastic.warm.fork_server import ForkFailed
from reft.elastic.warm.torch_patch import ForkedProcess
from reft.elastic.warm.warm import ForkServer, WarmWorkers, can_fork
from reft.wire.process import oom_score
from tests.support import probe
from tests.support.daemons import ROOT, until
from tests.support.rendezvous import Agents

PROBE = str(Path(probe.__file__))
LIGHT = ["json"]  # a fast import: the tests do not depend on the modules


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Makes started processes import reft from this tree, installed or not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "daemon")]))


@pytest.fixture
def server(ours, tmp_path_factory) -> Iterator[ForkServer]:
    """Yields a fork server whose folder and environment differ from those of its workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        patch.setenv("ONLY_OF_THE_SERVER", "1")
        made = ForkServer(LIGHT, fork_server.place_of(PROBE, False))
    yield made
    made.close()


@pytest.fixture
def start(tmp_path, server) -> Callable[..., subprocess.Popen[bytes]]:
    """Returns start(is_warm, *words): runs Python with these words, output in files."""

    def make(is_warm: bool, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-u", *words]
        environment = {**os.environ, "RANK": "3", "TEXT": "a\nb ü"}
        kind = "warm" if is_warm else "cold"
        with (
            open(os.devnull) as null,
            open(tmp_path / f"{kind}.out", "w") as out,
            open(tmp_path / f"{kind}.err", "w") as err,
        ):
            if is_warm:
                pid = server.fork(command, environment, [null.fileno(), out.fileno(), err.fileno()])
                return ForkedProcess(command, pid)
            return subprocess.Popen(
                command, env=environment, stdin=null, stdout=out, stderr=err, start_new_session=True
            )

    return make


@pytest.mark.parametrize(
    "words", [[PROBE], ["tests/support/probe.py"], ["-m", "tests.support.probe"]], ids=["script", "relative", "module"]
)
def test_a_forked_worker_sees_what_a_cold_start_sees(tmp_path, start, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    reports = []
    for is_warm in (True, False):
        out = tmp_path / "said"
        assert start(is_warm, *words, str(out), "0", "--lr=1").wait(60) == 0
        report = json.loads(out.read_text())
        report["targets"] = [target.replace("warm.", "cold.") for target in report["targets"]]
        reports.append(report)
    warm_one, cold_one = reports
    for name in ("LC_CTYPE", "LINES", "COLUMNS"):  # python itself may add the first one
        warm_one["environment"].pop(name, None), cold_one["environment"].pop(name, None)
    assert warm_one == cold_one
    assert cold_one["parent"] == os.getpid() and cold_one["leads"] == [True, True]
    assert (tmp_path / "warm.out").read_text() == "printed\n"


def test_only_the_server_ends_first_when_memory_is_short(tmp_path, start, server):
    """A worker has the score of its agent, as in a cold start."""
    script = tmp_path / "score.py"
    script.write_text("import sys; open(sys.argv[1], 'w').write(open('/proc/self/oom_score_adj').read())")
    out = tmp_path / "score"
    assert start(True, str(script), str(out)).wait(60) == 0
    own = oom_score()
    assert int(out.read_text()) == own
    helper = server.process
    assert int(Path(f"/proc/{helper.pid}/oom_score_adj").read_text()) == max(own, fork_server.SERVER_OOM_SCORE)


GLOBALS = """
import json, sys
shown = {name: repr(value) for name, value in globals().items() if name not in ("__loader__", "__spec__")}
shown["loader"] = [type(__loader__).__name__, vars(__loader__)]
shown["spec"] = __spec__ and __spec__.name
with open(sys.argv[1], "w") as file:
    json.dump(shown, file)
"""


@pytest.mark.parametrize("words", [["shown.py"], ["-m", "shown"]], ids=["script", "module"])
def test_a_forked_worker_has_the_module_globals_of_a_cold_start(tmp_path, start, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown.py").write_text(GLOBALS)
    globals_by_start = []
    for is_warm in (True, False):
        out = tmp_path / "globals"
        assert start(is_warm, *words, str(out)).wait(60) == 0
        globals_by_start.append(json.loads(out.read_text()))
    warm_globals, cold_globals = globals_by_start
    assert warm_globals == cold_globals
    assert cold_globals["loader"] == ["SourceFileLoader", {"name": cold_globals["loader"][1]["name"],
                                                           "path": str(tmp_path / "shown.py")}]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "code"), [("0", 0), ("7", 7), ("say", 1), ("raise", 1), ("interrupt", -signal.SIGINT)]
)
def test_exit_code_and_stderr_equal_those_of_a_cold_start(tmp_path, start, what, code):
    for is_warm in (True, False):
        assert start(is_warm, PROBE, str(tmp_path / "said"), what).wait(60) == code
    # Python 3.11 and 3.12 draw ^^^^ under code that they can read from the file, also in a cold
    # start.
    texts = [re.sub(r"\n *[\^~]+", "", (tmp_path / f"{kind}.err").read_text()) for kind in ("warm", "cold")]
    if what == "interrupt":  # only the last line: the traceback of a cold start has fewer frames
        texts = [text.splitlines()[-1:] for text in texts]
    assert texts[0] == texts[1]


def test_a_worker_is_a_child_of_the_agent_and_shows_its_own_command(tmp_path, start):
    worker = start(True, PROBE, str(tmp_path / "said"), "wait")
    until(lambda: (tmp_path / "warm.out").read_text() == "printed\n", what="the worker")
    process = psutil.Process(worker.pid)
    assert process.ppid() == os.getpid()
    shown = b" ".join(Path(f"/proc/{worker.pid}/cmdline").read_bytes().split(b"\0")).decode()
    assert shown.strip() == f"{sys.executable} -u {PROBE} {tmp_path / 'said'} wait"
    assert worker.poll() is None
    os.killpg(worker.pid, signal.SIGKILL)
    assert worker.wait(60) == -signal.SIGKILL


def test_a_worker_without_go_never_runs(tmp_path, server):
    """The agent has ended, or it has started another process instead."""
    wait, go = os.pipe()
    said = tmp_path / "said"
    command = [sys.executable, "-u", PROBE, str(said), "0"]
    assert server._hear("ready", 60)
    with warm._adopting():
        order = {"command": command, "environment": dict(os.environ), "folder": "/"}
        fork_server.send(server._control, order, [0, 1, 2, wait])
        pid = int(server._hear("pid", 60))
    os.close(wait)
    worker = ForkedProcess(command, pid)
    assert worker.poll() is None
    os.close(go)
    assert worker.wait(60) == 1 and not said.exists()


def test_orphans_of_other_programs_are_not_adopted(server, tmp_path):
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=-3).pid)"
    server.fork([sys.executable, "-u", PROBE, str(tmp_path / "said"), "0"], dict(os.environ), [0, 1, 2])
    pid = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    try:
        assert psutil.Process(pid).ppid() != os.getpid()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_killed_server_causes_one_cold_start_and_is_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(warm, "MODULES", tuple(LIGHT))
    workers = WarmWorkers([], "")
    command, environment = [sys.executable, "-u", PROBE, str(tmp_path / "said"), "0"], dict(os.environ)
    try:
        assert workers.start(command, environment, [0, 1, 2]).wait(60) == 0
        first = workers._server
        first.process.kill()
        first.process.wait()
        assert workers.start(command, environment, [0, 1, 2]) is None
        assert "a worker is started cold, later workers are forked again" in capsys.readouterr().err
        assert workers.start(command, environment, [0, 1, 2]).wait(60) == 0
        assert workers._server is not first
        assert workers.start(["numactl", *command], environment, [0, 1, 2]) is None
        assert "numactl" in capsys.readouterr().err
    finally:
        workers.close()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ValueError('no device')", "importing heavy failed: ValueError: no device"),
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "started threads (1)",
        ),
    ],
)
def test_if_forks_are_impossible_all_workers_are_started_cold(tmp_path, monkeypatch, capsys, body, why):
    (tmp_path / "heavy.py").write_text(body)
    monkeypatch.setattr(warm, "MODULES", tuple(LIGHT))
    workers = WarmWorkers(["heavy"], str(tmp_path))
    server, command = workers._server, [sys.executable, "-u", PROBE, str(tmp_path / "said"), "0"]
    assert workers.start(command, {}, [0, 1, 2]) is None
    assert workers.start(command, {}, [0, 1, 2]) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line and "all later workers too" in line
    assert server.process.poll() is not None and not (tmp_path / "said").exists()


def test_a_worker_forked_after_cuda_was_used_never_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "uses_cuda.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True")
    monkeypatch.setattr(warm, "MODULES", tuple(LIGHT))
    workers = WarmWorkers(["uses_cuda"], str(tmp_path))
    command = [sys.executable, "-u", PROBE, str(tmp_path / "said"), "0"]
    try:
        assert workers.start(command, {}, [0, 1, 2]) is None
        assert workers.start(command, {}, [0, 1, 2]) is None
    finally:
        workers.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "has used CUDA" in line and "all later workers too" in line and not (tmp_path / "said").exists()


def test_torch_is_patched_only_until_close(monkeypatch):
    monkeypatch.setattr(warm, "MODULES", tuple(LIGHT))
    before = torch_patch.api.get_subprocess_handler
    workers = WarmWorkers([], "")
    workers.install()
    assert torch_patch.api.get_subprocess_handler is not before
    workers.close()
    assert torch_patch.api.get_subprocess_handler is before


def test_a_torch_without_a_private_name_is_not_patched(monkeypatch, capsys):
    monkeypatch.setattr(warm, "MODULES", tuple(LIGHT))
    monkeypatch.delattr(torch_patch.SubprocessHandler, "_popen")
    workers = WarmWorkers([], "")
    before = torch_patch.api.get_subprocess_handler
    workers.install()
    assert torch_patch.api.get_subprocess_handler is before and workers.start([], {}, []) is None
    assert "SubprocessHandler._popen, so warm=yes has no effect" in capsys.readouterr().err


def test_a_torch_that_does_not_tell_a_workers_outputs_starts_the_worker(monkeypatch, capsys):
    monkeypatch.setattr(warm, "MODULES", tuple(LIGHT))
    workers = WarmWorkers([], "")
    workers.install()
    handler_class = torch_patch.api.get_subprocess_handler
    handler = object.__new__(handler_class)  # without __init__: no _stdout, no _stderr
    monkeypatch.setattr(torch_patch.SubprocessHandler, "_popen", lambda self, args, env: "started by torch")
    try:
        assert handler._popen(("true",), {}) == handler._popen(("true",), {}) == "started by torch"
    finally:
        workers.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "started cold: this torch has no SubprocessHandler._stdout or ._stderr" in line


def test_a_server_ends_with_its_agent(server):
    assert server._hear("ready", 60)
    server._control.close()  # as the kernel does at the agent's end
    assert server.process.wait(60) == 0


def test_a_server_whose_agent_ended_during_its_imports_ends_without_a_traceback(server):
    server._control.close()
    assert server.process.wait(60) == 0


def test_workers_draw_different_random_numbers(tmp_path, monkeypatch):
    """numpy and torch seed themselves on import, which the server did for all workers.

    OpenBLAS also starts threads on import.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "draw.py"
    script.write_text(
        "import sys; assert {'numpy.random', 'torch'} <= set(sys.modules); import random, numpy, torch\n"
        "print(random.random(), numpy.random.rand(), torch.rand(1).item(), sep='\\n')"
    )
    server = ForkServer(["numpy.random", "torch"], str(tmp_path))
    try:
        for name in "ab":
            with open(tmp_path / name, "w") as out:
                command = [sys.executable, "-u", str(script)]
                assert (
                    ForkedProcess(command, server.fork(command, dict(os.environ), [0, out.fileno(), 2])).wait(60) == 0
                )
    finally:
        server.close()
    drawn = [(tmp_path / name).read_text().split() for name in "ab"]
    assert len(drawn[0]) == 3 and not set(drawn[0]) & set(drawn[1])


def test_only_scripts_run_by_this_python_are_forked():
    me = sys.executable
    assert can_fork([me, "-u", "a.py"]) and can_fork([me, "-u", "-m", "a", "b"])
    for command in ([me, "-u", "-m"], [me, "a.py"], ["other", "-u", "a.py"], [me, "-u", "a.zip"], [me, "-u"]):
        assert not can_fork(command)


def test_a_server_that_does_not_answer_is_a_failure_and_not_a_hang(server):
    assert server._hear("ready", 60)
    with pytest.raises(OSError):
        server._hear("pid", 0.01)
    os.kill(server.process.pid, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "FORK_S", 0.05)
        server.is_ready = True
        with pytest.raises(ForkFailed, match="does not answer"):
            server.fork([sys.executable, "-u", PROBE, "x", "0"], {}, [0, 1, 2])


SCRIPT = """
import os, signal, sys
warm = "torch._dynamo" in sys.modules and "reft.client.attach.api" in sys.modules
import torch, torch.distributed as dist
dist.init_process_group("gloo")
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"rank {dist.get_rank()} restart {restart} warm {warm} {sys.argv[1:]} parent {os.getppid()}\\n".encode())
dist.barrier()
if restart == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def test_torchruns_workers_are_forked_killed_and_forked_again(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=reft", "--local-addr=127.0.0.1",
        "--rdzv-conf=daemon=off,warm=yes", "--max-restarts=1", f"--log-dir={tmp_path}", "--redirects=1", str(script), "--lr", "1",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REFT_RUNTIME_DIR": str(tmp_path)}
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    _, said = agent.communicate(timeout=250)
    assert agent.returncode == 0, said[-3000:]
    assert "exitcode: -9" in said and "started cold" not in said
    lines = {line for out in tmp_path.glob("**/stdout.log") for line in out.read_text().splitlines()}
    assert lines == {
        f"rank {rank} restart {restart} warm True ['--lr', '1'] parent {agent.pid}"
        for rank in (0, 1)
        for restart in (0, 1)
    }


@pytest.mark.slow
def test_forked_workers_and_server_end_with_a_killed_agent(tmp_path):
    with Agents(tmp_path, "--rdzv-backend=reft", "--rdzv-conf=daemon=off,warm=yes", "--nproc-per-node=2") as agents:
        agent = agents.start("a", "--local-addr=127.0.0.1")
        until(lambda: len(agents.workers()) == 2 or agent.poll() is not None, 90, "workers")
        process = psutil.Process(agent.pid)
        below = process.children(recursive=True)
        assert {row[1] for row in agents.workers()} < {each.pid for each in process.children()}
        # The agent sends the workers to the orphan reaper in its next loop.
        switches = process.num_ctx_switches().voluntary
        until(lambda: process.num_ctx_switches().voluntary > switches + 50, 30, "the agent's next loop")
        living = [each for each in below if "reft.elastic.stores.store_host" not in " ".join(each.cmdline())]
        agent.kill()
        agent.wait()
        until(lambda: not any(each.is_running() for each in living), 60, "the end of all processes")
