"""`reft-cli rehearse` with a stand-in for the trainer: real processes, real SIGKILLs, no torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from reft.cli.demo import clean_up
from reft.cli.rehearse.run import kill_step
from tests.support.daemons import ROOT, until

TRAINER = (sys.executable, "-m", "tests.support.rehearsed")
STEPS = "12"


@pytest.fixture
def rehearse(tmp_path, monkeypatch):
    """Yields a function that runs `reft-cli rehearse`; all files go to a folder of the test."""
    temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short, so that no socket lies elsewhere
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary), "REFT_PERSIST": "/nowhere"}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "reft.cli.main", "rehearse", "--steps", STEPS, *arguments]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        process = start(*arguments)
        output, errors = process.communicate(timeout=250)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    run.start, run.temporary = start, temporary
    yield run
    shutil.rmtree(temporary)


def left(folder: Path) -> list[str]:
    """Returns what a rehearsal left: folders, and processes of its runs."""
    processes = [each for path in folder.glob("reft-rehearse-*") for each in clean_up.marked(path)]
    return [path.name for path in folder.iterdir()] + [str(each) for each in processes]


def test_an_equal_run_leaves_nothing(rehearse, tmp_path):
    done = rehearse("--json", "--", *TRAINER)
    assert (done.returncode, done.stderr.count("run ")) == (0, 2), done.stderr
    report = json.loads(done.stdout)
    assert (report["outcome"], report["difference"], report["causes"]) == ("equal", None, [])
    assert report["killed_after"] in (5, 6) and report["restored_step"] in (4, 5) and report["compared_through"] == 12
    assert (report["steps"], report["ranks"], report["restored_from"], report["logs"]) == (12, 1, "memory", None)
    absent = {"state": "not reached", "after_step": None, "how": None}
    validated = {"state": "reached", "after_step": 8, "how": "a forward in eval mode"}
    assert report["reached"] == {
        "before_kill": {"validation": absent, "epoch_end": absent, "checkpoint": absent},
        "after_kill": {"validation": validated, "epoch_end": absent, "checkpoint": absent},
    }
    assert left(rehearse.temporary) == []


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("prefetch", 1, ["DIFFERENT", "an input of the model", "fetched before the mark is lost", "reft.Values"]),
        ("random", 2, ["NOT DETERMINISTIC BY ITSELF", "step 1, rank 0: an input of the model", "nothing seeds"]),
        pytest.param("fresh", 1, ["DIFFERENT", "attach restored nothing"], marks=pytest.mark.slow),
        ("forgotten", 1, ["FORGOTTEN: bit-equal through step 12", 'state={"ema": ema}']),
    ],
)
def test_a_difference_is_named_and_its_logs_are_kept(rehearse, fault, code, words):
    done = rehearse("--", *TRAINER, "--fault", fault)
    assert done.returncode == code, done.stdout + done.stderr
    shown = " ".join(done.stdout.split())  # without the breaks between lines
    assert [word for word in words if word not in shown] == []
    (logs,) = rehearse.temporary.iterdir()
    assert f"Logs and records are in {logs}." in done.stdout
    assert {path.name for path in logs.iterdir()} == {"a.log", "b.log", "a.0.jsonl", "b.0.jsonl"}


def test_a_script_that_fails_by_itself(rehearse):
    done = rehearse("--json", "--", *TRAINER, "--fault", "crash")
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (done.returncode, done.stdout, error["exit_code"]) == (1, "", 1)
    assert "run A: the command ended with code 1" in error["message"] and "not a number" in error["message"]
    (logs,) = rehearse.temporary.iterdir()
    assert f"Logs and records are in {logs}." in error["message"]


@pytest.mark.parametrize(
    ("fault", "words", "remedy"),
    [
        ("older-a", "run A began from step 3 of an older run.", "remove daemon= and job="),
        pytest.param(
            "older-b", "run B began from step 3 of an older run.", "remove daemon= and job=", marks=pytest.mark.slow
        ),
        ("own-daemon", "the script names a daemon of its own.", "remove daemon="),
    ],
)
def test_a_script_that_is_bound_to_another_run(rehearse, fault, words, remedy):
    done = rehearse("--", *TRAINER, "--fault", fault)
    assert done.returncode == 1 and words in done.stderr and remedy in done.stderr, done.stderr


def test_inputs_that_nothing_saw_are_named(rehearse):
    done = rehearse("--", *TRAINER, "--fault", "unseen")
    assert done.returncode == 0 and "bit-equal through step 12" in done.stdout, done.stdout + done.stderr
    assert "not seen    inputs of the model, on 1 rank" in done.stdout
    assert "not seen    before and after the kill: validation (a rank has no forward" in done.stdout
    assert "writes its outputs twice, here. --cwd DIR" in done.stdout


def test_ranks_that_live_on_hear_their_agent_though_they_stand_still_in_a_copy(rehearse):
    done = rehearse("--json", "--timeout", "60", "--", *TRAINER, "--agent", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2


def test_the_kill_is_not_where_short_epochs_end():
    assert [kill_step(steps) for steps in (30, 12, 6, 4)] == [13, 5, 2, 1]


@pytest.mark.slow
def test_a_shorter_script_is_rehearsed_as_far_as_it_goes(rehearse):
    done = rehearse("--", *TRAINER, "--steps", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The script has only 8 steps." in done.stdout and "bit-equal through step 8" in done.stdout
    assert "not reached" in done.stdout and "--steps to reach" not in done.stdout, "the script has no more"


def test_a_script_without_marks(rehearse):
    done = rehearse("--", sys.executable, "-c", "print('no reft here')")
    assert done.returncode == 1
    assert "run A ended after 0 steps" in done.stderr and "no reft here" in done.stderr
    assert "call reft.attach" in done.stderr


def test_a_script_that_never_attaches_is_told_so_at_the_deadline(rehearse):
    done = rehearse("--timeout", "1", "--", sys.executable, "-c", "import signal; signal.pause()")
    assert done.returncode == 1
    assert "run A: reft.attach has not returned on any rank within 1 s." in done.stderr
    assert "call reft.attach on all ranks" in done.stderr


def test_a_script_with_too_few_steps_is_not_told_to_attach(rehearse):
    done = rehearse("--", *TRAINER, "--steps", "3")
    assert done.returncode == 1 and "run A ended after 3 steps of all ranks" in done.stderr
    assert "train 4 steps or more" in done.stderr and "call reft.attach" not in done.stderr


def test_a_script_that_attaches_again_is_not_judged(rehearse):
    """The steps of its second attach would be found equal: the first run has no such steps."""
    done = rehearse("--", *TRAINER, "--fault", "again")
    assert done.returncode == 1 and "run A: rank 0 has attached 2 times" in done.stderr, done.stdout + done.stderr


def test_a_kill_before_the_first_whole_step_is_explained(rehearse):
    done = rehearse("--", *TRAINER, "--fault", "unheld")
    assert done.returncode == 1 and "the kill comes after step 5, and no step is whole by then" in done.stderr
    assert "every=N" in done.stderr


def test_a_script_that_can_not_start_again_is_explained(rehearse):
    done = rehearse("--", *TRAINER, "--fault", "once")
    assert done.returncode == 1 and "the folder of outputs exists" in done.stderr
    assert "run B: started again after the kill, the command ended with code 1." in done.stderr


def test_a_wrapper_that_hides_the_kill_is_explained(rehearse):
    done = rehearse("--", "sh", "-c", f"{' '.join(TRAINER)}; exit 0")
    assert done.returncode == 1
    assert "ended with code 0 after the kill, and no rank began again" in done.stderr and "wrapper" in done.stderr


@pytest.mark.slow
def test_a_run_has_a_deadline(rehearse):
    done = rehearse("--timeout", "4", "--", *TRAINER, "--step-s", "30")
    assert done.returncode == 1
    assert "run A reached step 0 of 12 within 4 s." in done.stderr and "--timeout" in done.stderr


@pytest.mark.parametrize(
    ("kill", "words"),
    [
        pytest.param("rank", ["agent begins", "agent restarts", "daemon lives"], marks=pytest.mark.slow),
        ("all", ["agent begins", "agent begins", "daemon lives"]),
        ("daemon", ["agent begins", "agent restarts", "daemon is dead"]),
    ],
)
def test_each_kill_ends_what_it_names(rehearse, kill, words):
    done = rehearse("--kill", kill, "--", *TRAINER, "--agent", "--fault", "forgotten")  # so the logs are kept
    assert done.returncode == 1 and "FORGOTTEN" in done.stdout, done.stdout + done.stderr
    (logs,) = rehearse.temporary.iterdir()
    assert (logs / "b.log").read_text().splitlines() == words


def test_each_run_gets_a_fresh_folder(rehearse, tmp_path):
    (tmp_path / "in.txt").write_text("here")
    done = rehearse("--cwd", "runs", "--", *TRAINER, "--outputs", "out.txt")
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = [tmp_path / "runs" / name / "out.txt" for name in ("a", "b")]
    assert [path.read_text() for path in outputs] == ["REFT_REHEARSAL=1"] * 2
    assert not (tmp_path / "out.txt").exists() and "twice" not in done.stdout
    assert "  not tried   what comes after step 12\n" in done.stdout
    shown = " ".join(done.stdout.split())
    assert "reached after the kill: validation (a forward in eval mode, after step 8) not reached before" in shown
    assert "(no torch.save of tensors). Raise --steps to reach more." in shown
    again = rehearse("--cwd", "runs", "--", *TRAINER)
    assert (again.returncode, again.stdout.count("run A")) == (2, 0)
    assert "name a fresh folder" in again.stderr


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_leaves_nothing(rehearse, number, code):
    process = rehearse.start("--", *TRAINER)
    until(lambda: any(rehearse.temporary.rglob("a.0.jsonl")), 60, "that run A trains")
    runs = [path for path in rehearse.temporary.glob("reft-rehearse-*") if "logs" not in path.name]
    assert len(clean_up.marked(runs[0])) >= 2  # the trainer and its daemon
    process.send_signal(number)
    process.communicate(timeout=60)
    assert (process.returncode, left(rehearse.temporary)) == (code, [])
    assert clean_up.marked(runs[0]) == []


@pytest.mark.slow
def test_a_killed_rehearsal_leaves_only_its_logs(rehearse):
    process = rehearse.start("--", *TRAINER)
    until(lambda: any(rehearse.temporary.rglob("a.0.jsonl")), 60, "that run A trains")
    process.kill()
    process.communicate(timeout=60)

    def remaining() -> bool:
        return [name.startswith("reft-rehearse-logs-") for name in left(rehearse.temporary)] == [True]

    until(remaining, 60, "that the clean-up has ended")


def test_a_command_with_a_long_text_runs_in_a_fresh_folder(rehearse):
    done = rehearse("--cwd", "runs", "--", sys.executable, "-c", f"print({'a' * 300!r})")
    assert done.returncode == 1 and "run A ended after 0 steps" in done.stderr


def test_folders_are_free_again_if_the_command_can_not_start(rehearse, tmp_path):
    for _ in range(2):
        done = rehearse("--cwd", "runs", "--", "no-such-program")
        assert done.returncode == 2 and "can't be started" in done.stderr
    (tmp_path / "runs" / "a").mkdir()
    done = rehearse("--cwd", "runs", "--", "no-such-program")
    assert "a exists" in done.stderr and (tmp_path / "runs" / "a").exists(), "a folder of the user's stays"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "torchrun", "--nnodes=2", "x.py"], "needs 2 nodes"),
        (["--", "torchrun", "--nnodes", "2:4", "x.py"], "needs 2 nodes"),
        (["--", "no-such-program"], "can't be started"),
        (["--kill", "node", "--", "x"], "node"),
        ([], "COMMAND"),
    ],
)
def test_what_can_not_be_rehearsed_is_wrong_usage(rehearse, arguments, words):
    done = rehearse(*arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert left(rehearse.temporary) == []
