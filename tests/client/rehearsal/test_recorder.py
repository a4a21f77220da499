"""Tests of the records of a rehearsal: their fields, restored runs, two ranks, failures."""

from __future__ import annotations

import io
import json
import linecache
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from reft.client.data.loader import ResumableLoader
from reft.client.rehearsal import recorder
from reft.client.rehearsal.digests import generator_digests, plain_digest, tensor_digest
from reft.client.rehearsal.recorder import RecordFile, groups_of, leaf_digests
from reft.client.state.serialization import to_plain
from reft.config import Config
from tests.support import scripts
from tests.support.trainers import Spec, run


def records(prefix, rank=0):
    """Returns the records of a rank; each line is whole."""
    text = Path(f"{prefix}.{rank}.jsonl").read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["rank"] for line in lines} == {rank}
    return lines


def of_kind(lines, kind):
    return [line for line in lines if line["kind"] == kind]


def make():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, StepLR(optimizer, 1, 0.5)


def step_once(model, optimizer, *then):
    model(torch.randn(4, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for each in then:
        each()


@pytest.fixture
def rehearse(attach, tmp_path):
    """Attaches with a recording in tmp_path/run."""
    return lambda *objects, **arguments: attach(*objects, config=Config(rehearse=str(tmp_path / "run")), **arguments)


def test_a_mark_has_digests_of_all_state_and_of_the_inputs(rehearse, tmp_path):
    model, optimizer, schedule = make()
    session = rehearse(model, optimizer, state={"lr": schedule, "ema": AveragedModel(model)})
    at_attach, inputs = generator_digests(), []
    for _ in session.steps(3):
        x = torch.randn(4, 4)
        at_forward = generator_digests()
        inputs.append(tensor_digest(x))
        model(x).square().sum().backward()
        optimizer.step()
        schedule.step()
        at_mark = generator_digests()
        state, groups = (
            plain_digest(to_plain(schedule.state_dict())),
            groups_of(SimpleNamespace(optimizers=[optimizer])),
        )
        leaves = {f"model.0.{name}": tensor_digest(each) for name, each in model.state_dict().items()}
    first, *marks = records(tmp_path / "run")
    assert first == {
        "kind": "attach", "rank": 0, "world": 1, "pid": os.getpid(), "step": 0, "restored_from": None, "digests": "xxh3_64",
        "script": Path(sys.argv[0]).name, "time": first["time"], "hash": hash("reft"), "generators": at_attach,
        "state": ["lr", "ema"], "regroups": False,
    }  # fmt: skip
    marks = of_kind(marks, "mark")
    assert [mark["step"] for mark in marks] == [1, 2, 3] and [mark["inputs"] for mark in marks] == [
        [each] for each in inputs
    ]
    last = marks[-1]
    assert last["at_forward"] == at_forward and last["generators"] == at_mark and at_forward != at_mark
    assert (
        last["groups"] == groups == {"optimizer.0.0": {**groups["optimizer.0.0"], "lr": 0.0125, "betas": [0.9, 0.999]}}
    )
    assert last["state"] == {"lr": state} and first["time"] < last["time"]
    assert {name: last["leaves"][name] for name in leaves} == leaves
    moments = {f"optimizer.0.exp_avg.model.0.{name}" for name, _ in model.named_parameters()}
    assert moments < last["leaves"].keys() and any(name.startswith("state.ema.") for name in last["leaves"])
    assert marks[0]["leaves"]["model.0.0.weight"] != last["leaves"]["model.0.0.weight"]
    assert of_kind(records(tmp_path / "run"), "alive")[0]["objects"] == []


def test_a_restored_run_appends_and_begins_where_the_first_one_was(rehearse, tmp_path):
    model, optimizer, schedule = make()
    session = rehearse(model, optimizer, state={"lr": schedule})
    for _ in session.steps(3):
        step_once(model, optimizer, schedule.step)
    assert session.seal(timeout=60)
    session.close()
    model, optimizer, schedule = make()
    session = rehearse(model, optimizer, state={"lr": schedule})
    torch.rand(9)  # put back by session.steps
    random.random()  # put back too
    for _ in session.steps(5):
        step_once(model, optimizer, schedule.step)
    lines = records(tmp_path / "run")
    fresh, restored = of_kind(lines, "attach")
    assert (fresh["restored_from"], restored["restored_from"], restored["step"]) == (None, "memory", 3)
    marks = of_kind(lines, "mark")
    assert [mark["step"] for mark in marks] == [1, 2, 3, 4, 5]
    assert restored["generators"] == marks[2]["generators"], "as restored"
    moved = [(each["step"], each["code"]) for each in of_kind(lines, "moved")]
    assert moved == [(step, "model(torch.randn(4, 4)).square().sum().backward()") for step in (0, 3)]
    assert marks[3]["at_forward"] != marks[2]["generators"]


def test_what_moves_a_generator_before_the_first_forward_is_named_with_its_line(rehearse, tmp_path):
    model, optimizer, _ = make()
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
    session = rehearse(model, optimizer)
    random.random()  # moves
    batches = iter(loader)  # draws a seed
    for _ in session.steps(3):
        (x,) = next(batches)
        model(x).sum().backward()  # draws dropout
        optimizer.step()
    assert sys.gettrace() is None
    moved = of_kind(records(tmp_path / "run"), "moved")
    assert [(move["generator"], move["code"]) for move in moved] == [
        ("python", "random.random()  # moves"), ("torch", "batches = iter(loader)  # draws a seed")
    ]  # fmt: skip
    assert all(move["step"] == 0 and move["line"] > 100 and move["file"].endswith("test_recorder.py") for move in moved)


@pytest.mark.parametrize("kind", ["reft", "torch", "own"])
def test_the_first_batch_of_a_step_is_recorded(rehearse, tmp_path, kind):
    model, optimizer, _ = make()
    plain = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    loader = ResumableLoader(plain) if kind == "reft" else plain
    session = rehearse(model, optimizer, state={"data": loader} if kind == "reft" else {})
    batches = {"reft": ResumableLoader.endless, "torch": iter, "own": lambda _: iter(torch.randn(4, 1, 4, 4))}[kind](
        loader
    )
    at_batch = []
    for _ in session.steps(4):
        (x,) = next(batches)
        at_batch.append(generator_digests())
        torch.rand(1)
        model(x).sum().backward()
        optimizer.step()
    session.close()
    marks = of_kind(records(tmp_path / "run"), "mark")
    recorded = {"reft": at_batch, "torch": [at_batch[0], None, at_batch[2], None], "own": [None] * 4}[kind]
    assert [mark["at_batch"] for mark in marks] == recorded  # only the first and the third step are traced
    assert at_batch[0] != at_batch[1] and [mark["at_forward"] for mark in marks] != at_batch
    assert kind != "reft" or loader._on_batch is None


def test_what_moves_generators_in_each_step_is_recorded_as_usual(rehearse, tmp_path):
    model, optimizer, _ = make()
    session = rehearse(model, optimizer)
    for _ in session.steps(4):
        x = torch.randn(4, 4)  # the batch
        model(x).sum().backward()
        optimizer.step()
    lines = records(tmp_path / "run")
    batch = ("torch", "x = torch.randn(4, 4)  # the batch")
    assert [(each["generator"], each["code"], each["step"]) for each in of_kind(lines, "usual")] == [(*batch, 2)]
    assert [(each["generator"], each["code"], each["step"]) for each in of_kind(lines, "moved")] == [(*batch, 0)]


def test_a_clean_loop_has_nothing_to_report(rehearse, tmp_path):
    model, optimizer, schedule = make()
    batches = torch.randn(6, 4, 4)
    ema = AveragedModel(model)
    session = rehearse(model, optimizer, state={"lr": schedule, "ema": ema})
    for step in session.steps(6):
        model(batches[step]).sum().backward()
        optimizer.step()
        schedule.step()
        ema.update_parameters(model)
    lines = records(tmp_path / "run")
    kinds = [line["kind"] for line in lines]
    assert kinds == ["attach", "mark", "mark", "alive", "mark", "mark", "mark", "mark"]


@pytest.mark.parametrize("kind", ["reft", "torch", "own"])
def test_a_mark_has_what_the_script_reached_since_the_mark_before(rehearse, tmp_path, kind):
    model, optimizer, _ = make()
    plain = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
    loader = ResumableLoader(plain) if kind == "reft" else plain
    passes = {"reft": lambda: loader.epochs(2), "torch": lambda: range(2), "own": lambda: range(2)}[kind]
    session = rehearse(model, optimizer, state={"data": loader} if kind == "reft" else {})
    for _ in passes():
        for (x,) in loader if kind != "own" else torch.randn(4, 1, 4, 4):
            model(x).sum().backward()
            optimizer.step()
            session.step_end()
        with torch.no_grad():
            model.eval()(torch.ones(1, 4))
            model.train()
        torch.save(model.state_dict(), io.BytesIO())  # the save
    session.close()
    torch.save(model.state_dict(), io.BytesIO())
    marks = of_kind(records(tmp_path / "run"), "mark")
    assert [mark["forwards"] for mark in marks] == [*[["training"]] * 4, ["eval", "training"], *[["training"]] * 3]
    (call,) = marks[4]["saves"]
    code = linecache.getline(__file__, int(call.rpartition(":")[2]))
    assert call.startswith("torch.save at ") and code.endswith("# the save\n")
    assert [mark["saves"] for mark in marks if mark is not marks[4]] == [[]] * 7
    ends = {"reft": [[]] * 4 + [["epoch 0 of a ResumableLoader"]] + [[]] * 3, "own": [None] * 8}
    ends["torch"] = [None, [], [], [], ["a pass over a DataLoader"], *[None] * 3]
    assert [mark["epoch_ends"] for mark in marks] == ends[kind]


def test_forgotten_objects_are_named_once_at_the_second_mark(rehearse, tmp_path):
    model, optimizer, schedule = make()
    ema = AveragedModel(model)
    session = rehearse(model, optimizer)
    for _ in session.steps(4):
        step_once(model, optimizer, schedule.step, lambda: ema.update_parameters(model))
    (alive,) = of_kind(records(tmp_path / "run"), "alive")
    assert alive["step"] == 2
    assert {"kind": "scheduler", "type": "StepLR", "name": "schedule"} in alive["objects"]
    assert {"kind": "ema", "type": "AveragedModel", "name": "ema"} in alive["objects"]


def test_steps_without_a_snapshot_are_recorded_too(rehearse, tmp_path):
    model, optimizer, _ = make()
    for _ in rehearse(model, optimizer, every=3).steps(4):
        step_once(model, optimizer)
    assert [mark["step"] for mark in of_kind(records(tmp_path / "run"), "mark")] == [1, 2, 3, 4]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_trains_with_inputs_if_something_calls_hooks(rehearse, tmp_path, in_place):
    model, optimizer, _ = make()
    compiled = model if in_place else torch.compile(model, backend="eager", fullgraph=True)
    if in_place:
        model.compile(backend="eager", fullgraph=True)
    session = rehearse(model, optimizer)
    for _ in session.steps(3):
        step_once(compiled, optimizer)
    lines = records(tmp_path / "run")
    marks = of_kind(lines, "mark")
    assert [(len(mark["inputs"]), mark["at_forward"] is None) for mark in marks] == [(1 - in_place, in_place)] * 3
    assert {line["kind"] for line in lines} == {"attach", "moved", "mark", "alive", "usual"}
    assert sys.gettrace() is None


def test_a_debugger_is_left_alone_and_the_records_say_so(rehearse, tmp_path):
    model, optimizer, _ = make()
    own = lambda *_: None  # noqa: E731
    sys.settrace(own)
    try:
        session = rehearse(model, optimizer)
        step_once(model, optimizer, session.step_end)
        assert sys.gettrace() is own
    finally:
        sys.settrace(None)
    lines = records(tmp_path / "run")
    assert "debugger" in of_kind(lines, "untraced")[0]["reason"] and len(of_kind(lines, "mark")) == 1


def test_a_failure_ends_the_recording_and_no_step(rehearse, tmp_path, monkeypatch, caplog):
    model, optimizer, _ = make()
    session = rehearse(model, optimizer)
    for step in session.steps(4):
        if step == 2:
            monkeypatch.setattr(recorder, "leaf_digests", lambda _: 1 / 0)
        step_once(model, optimizer)
    assert session.step == 4 and session.seal(timeout=60)
    lines = records(tmp_path / "run")
    assert lines[-1] == {"kind": "failed", "rank": 0, "step": 3, "error": "ZeroDivisionError: division by zero"}
    assert len(of_kind(lines, "mark")) == 2 and caplog.text.count("not recorded any more: ZeroDivisionError") == 1
    assert sys.gettrace() is None and not model._forward_pre_hooks


def test_a_folder_that_is_missing_is_logged_and_nothing_is_recorded(attach, tmp_path, caplog):
    model, optimizer, _ = make()
    session = attach(model, optimizer, config=Config(rehearse=str(tmp_path / "none/run")))
    step_once(model, optimizer, session.step_end)
    assert session.step == 1 and "not recorded any more: FileNotFoundError" in caplog.text


def test_a_closed_session_records_nothing_more(rehearse, tmp_path):
    model, optimizer, _ = make()
    session = rehearse(model, optimizer)
    step_once(model, optimizer, session.step_end)
    session.close()
    step_once(model, optimizer, session.step_end)
    assert len(of_kind(records(tmp_path / "run"), "mark")) == 1 and not model._forward_pre_hooks


def test_without_the_setting_the_recorder_is_not_even_imported(shared_daemon, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, reft\n"
        "model = torch.nn.Linear(4, 4)\n"
        "reft.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)).step_end()\n"
        "print([name for name in sys.modules if 'rehearsal' in name])\n"
    )
    environment = {"REFT_DAEMON": shared_daemon.address, "REFT_JOB": "plain"}
    assert scripts.execute(script, {**os.environ, **environment}).stdout.splitlines() == ["[]"]


def test_a_killed_rank_leaves_whole_lines(shared_daemon, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, reft\n"
        "def main():\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    session = reft.attach(model, optimizer)\n"
        "    noise = torch.rand(2, 4)\n"
        "    for step in session.steps(9):\n"
        "        model(noise).sum().backward()\n"
        "        optimizer.step()\n"
        "        step == 3 and os.kill(os.getpid(), 9)\n"
        "main()\n"
    )
    environment = {"REFT_DAEMON": shared_daemon.address, "REFT_JOB": "killed", "REFT_REHEARSE": str(tmp_path / "run")}
    assert scripts.execute(script, {**os.environ, **environment}).returncode == -9
    lines = records(tmp_path / "run")
    assert [mark["step"] for mark in of_kind(lines, "mark")] == [1, 2, 3]
    (moved,) = of_kind(lines, "moved")
    assert (moved["file"], moved["line"], moved["code"]) == ("train.py", 6, "noise = torch.rand(2, 4)")
    assert lines[0]["script"] == "train.py"


def test_each_rank_has_a_file_of_its_own(shared_daemon, tmp_path):
    environment = {"REFT_REHEARSE": str(tmp_path / "run")}
    run(Spec(shared_daemon.address, job="two-ranks", steps=3, environment=environment), world=2)
    first, second = (records(tmp_path / "run", rank) for rank in (0, 1))
    assert [(lines[0]["world"], len(of_kind(lines, "mark"))) for lines in (first, second)] == [(2, 3), (2, 3)]
    leaves = [of_kind(lines, "mark")[-1]["leaves"]["model.0.0.weight"] for lines in (first, second)]
    inputs = [of_kind(lines, "mark")[-1]["inputs"] for lines in (first, second)]
    assert leaves[0] == leaves[1] and inputs[0] != inputs[1]


def test_a_line_has_at_most_so_many_leaves(monkeypatch):
    monkeypatch.setattr(recorder, "LEAVES_MAX", 2)
    tensors = {name: torch.ones(index) for index, name in enumerate("abcd")}
    digests = leaf_digests(SimpleNamespace(tensors=tensors))
    assert [*digests] == ["a", "b", "2 more leaves"]
    tensors["d"].add_(1)
    assert leaf_digests(SimpleNamespace(tensors=tensors))["2 more leaves"] != digests["2 more leaves"]


def test_half_a_line_is_an_error(tmp_path, monkeypatch):
    file = RecordFile(tmp_path / "a.jsonl")
    monkeypatch.setattr(os, "write", lambda _, line: len(line) - 1)
    with pytest.raises(OSError, match="of 11 bytes of a record"):
        file.write({"kind": 1})
    file.close()
