"""The lines of a rehearsed trainer, read while they are written; and how a command is prepared."""

from __future__ import annotations

import json
import os
import tempfile

import pytest
from click.testing import CliRunner

from reft.cli.demo.cluster import short_folder
from reft.cli.main import main
from reft.cli.rehearse.records import RecordReader, RehearsalError, parse
from reft.cli.rehearse.report import difference_words
from reft.cli.rehearse.training import LONGEST_SOCKET, check_one_host, command_in, own_environment
from reft.core.rehearsal.compare import DifferenceKind, MarkDifference
from reft.core.rehearsal.records import (
    AliveObject,
    AliveRecord,
    AttachRecord,
    ForwardKind,
    MarkRecord,
    MoveRecord,
    UntracedRecord,
)
from reft.errors import ConfigError, FormatError
from reft.wire import rpc

ATTACH = {
    "kind": "attach", "rank": 0, "step": 3, "world": 2, "pid": 7, "restored_from": "memory", "time": 1.5,
    "generators": {"torch": "g"}, "state": ["lr"], "regroups": True, "hash": 5, "digests": "xxh3_64",
}  # fmt: skip
MARK = {
    "kind": "mark", "rank": 0, "step": 4, "time": 2.5, "inputs": ["i"], "at_batch": {"torch": "b"}, "at_forward": None,
    "generators": {}, "groups": {"optimizer.0.0": {"lr": 0.1}}, "state": {"lr": "s"}, "leaves": {"w": "l"},
    "forwards": ["eval"], "epoch_ends": None, "saves": ["torch.save at train.py:5"],
}  # fmt: skip


def line(entry: dict) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode()


def test_each_kind_of_line():
    assert parse(line(ATTACH)) == AttachRecord(0, 2, 7, 3, "memory", 1.5, {"torch": "g"}, ("lr",), True, 5)
    assert parse(line(MARK)) == MarkRecord(
        4, 2.5, ("i",), {"torch": "b"}, None, {}, {"optimizer.0.0": {"lr": 0.1}}, {"lr": "s"}, {"w": "l"},
        (ForwardKind.EVAL,), None, ["torch.save at train.py:5"],
    )  # fmt: skip
    moved = {"generator": "torch", "file": "train.py", "line": 41, "code": "iter(loader)"}
    assert parse(line({"kind": "moved", **moved})) == MoveRecord("torch", "train.py", 41, "iter(loader)")
    assert parse(line({"kind": "usual", **moved})) == MoveRecord("torch", "train.py", 41, "iter(loader)", True)
    alive = {"kind": "alive", "objects": [{"kind": "ema", "type": "AveragedModel", "name": "ema"}]}
    assert parse(line(alive)) == AliveRecord([AliveObject("ema", "AveragedModel", "ema")])
    assert parse(line({"kind": "untraced", "reason": "a debugger"})) == UntracedRecord("a debugger")
    assert parse(line({"kind": "of a newer recorder"})) is None


def test_a_trainer_that_could_not_record_ends_the_rehearsal():
    with pytest.raises(RehearsalError, match="could not record the rehearsal: OSError: full"):
        parse(line({"kind": "failed", "error": "OSError: full"}))


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"kind": "mark"}', b"{}"])
def test_other_lines_are_refused(text):
    with pytest.raises(FormatError, match="can't be read"):
        parse(text)


def test_lines_are_read_once_they_are_whole(tmp_path):
    path, reader = tmp_path / "a.0.jsonl", RecordReader(tmp_path / "a")
    whole = line(ATTACH) + b"\n" + line(MARK)
    path.write_bytes(whole)
    (tmp_path / "ab.1.jsonl").write_bytes(line(ATTACH) + b"\n")  # of another run
    reader.poll()
    assert [len(each) for each in reader.records.values()] == [1]
    path.write_bytes(whole + b"\n")
    reader.poll()
    reader.poll()
    assert [list(each[0].marks) for each in reader.attempts().values()] == [[4]]


def test_a_line_that_sigkill_cut_is_left_out(tmp_path):
    path, reader = tmp_path / "a.0.jsonl", RecordReader(tmp_path / "a")
    path.write_bytes(line(ATTACH) + b"\n" + line(MARK)[:20] + line(ATTACH) + b"\n" + line(MARK) + b"\n")
    reader.poll()
    assert [list(each.marks) for each in reader.attempts()[0]] == [[], [4]]


def test_what_joins_a_run_to_another_daemon_is_left_out(monkeypatch):
    for name in ("DAEMON", "PERSIST", "JOB", "RUNTIME_DIR", "RESTORE", "DIR", "FAILPOINTS", "REHEARSE", "SLOTS"):
        monkeypatch.setenv(f"REFT_{name}", "2")
    kept = [name for name in own_environment() if name.startswith("REFT_")]
    assert kept == ["REFT_SLOTS"] and "PATH" in own_environment()


def test_files_are_named_from_where_the_user_is(tmp_path):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "out").mkdir()
    arguments = ["python", "train.py", "out", "--steps"]
    here = command_in(arguments, tmp_path, None)
    assert (here.arguments, here.folder, here.import_path) == (arguments, tmp_path, "")
    moved = command_in(arguments, tmp_path, tmp_path / "runs/a")
    assert moved.arguments == ["python", str(tmp_path / "train.py"), "out", "--steps"]
    assert moved.folder == tmp_path / "runs/a" and moved.folder.is_dir()
    assert moved.import_path.split(":")[0] == str(tmp_path)
    with pytest.raises(ConfigError, match=r"a can't be made: .*File exists"):
        command_in(arguments, tmp_path, tmp_path / "runs/a")


@pytest.mark.parametrize("is_file", [True, False])
def test_a_folder_that_is_unusable_is_wrong_usage_and_nothing_is_left(tmp_path, monkeypatch, is_file):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    runs = tmp_path / "runs"
    if is_file:
        runs.write_text("")
    else:
        (runs / "b").mkdir(parents=True)
    refused = CliRunner().invoke(main, ["rehearse", "--cwd", str(runs), "--", "true"])
    assert refused.exit_code == 2 and "Fix: name a fresh folder: --cwd DIR" in refused.stderr
    words = "a can't be made: " if is_file else "b exists."
    assert f"{runs}/{words}" in refused.stderr
    left = [path for path in tmp_path.rglob("*") if path not in (runs, tmp_path / "tmp", runs / "b")]
    assert not left


def test_a_folder_for_logs_that_can_not_be_made_is_wrong_usage(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    refused = CliRunner().invoke(main, ["rehearse", "--", "true"])
    assert (
        refused.exit_code == 2 and "none/reft-rehearse-logs-" in refused.stderr and "Fix: TMPDIR=DIR" in refused.stderr
    )


def test_a_program_is_found_in_path_or_by_its_own_path(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("python", "bin/python"):
        (tmp_path / name).write_text("")
    assert command_in(["python"], tmp_path, tmp_path / "a").arguments == ["python"]
    assert command_in(["bin/python"], tmp_path, tmp_path / "b").arguments == [str(tmp_path / "bin/python")]


def test_a_loader_can_listen_in_the_folder_of_a_run(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = short_folder("reft-rehearse-", LONGEST_SOCKET)
    folder.rmdir()
    assert not folder.is_relative_to(long) and len(os.fsencode(folder / LONGEST_SOCKET)) <= rpc.UNIX_PATH_MAX


@pytest.mark.parametrize(("values", "fits"), [([], True), (["--nnodes=1"], True), (["--nnodes", "1:4"], True),
                                              (["--nnodes=2"], False), (["--nnodes", "2:4"], False)])  # fmt: skip
def test_one_host_only(values, fits, monkeypatch):
    if fits:
        check_one_host(["torchrun", *values, "x.py"])
    else:
        with pytest.raises(ConfigError, match="needs 2 nodes"):
            check_one_host(["torchrun", *values, "x.py"])
    monkeypatch.setenv("PET_NNODES", "3")
    with pytest.raises(ConfigError, match="needs 3 nodes"):
        check_one_host(["torchrun", "x.py"])


def test_many_names_are_counted():
    difference = MarkDifference(5, 1, DifferenceKind.LEAVES, ["a", "b", "c", "d", "e"], frozenset())
    assert difference_words(difference) == "step 5, rank 1: a tensor of model or optimizer (a, b, c and 2 more names)"
