"""Tests of attach: refused arguments, messages, fenced trainers, restores of an older version."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import reft
from reft import errors
from reft.client.attach import report
from reft.client.attach import run as run_steps
from reft.client.attach.arguments import AttachArguments
from reft.client.attach.run import plan_restore, refuse_other_state
from reft.config import Config, Launch
from reft.wire.slot_format import PAGE, best_header
from reft.wire.v1 import daemon_pb2 as pb
from tests.scenarios.test_state_kinds import Keeper, step_once, train
from tests.support import attaches, scripts
from tests.support.daemons import purge_and_stop, until
from tests.support.guarded import GuardedJob
from tests.support.trainers import Spec, Trainers, run


def make(width=8):
    model = nn.Linear(width, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal, sys, torch, reft\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n" + body
    )
    return path


LOOP = """
session = reft.attach(model, optimizer)
print("began", session.step, session.restored_from, flush=True)
for step in session.steps(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("sealed", session.seal().whole)
"""


def execute(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("REFT_", "SLURM_", "TORCHELASTIC"))}
    return scripts.execute(path, {**kept, **environment})


# Refused arguments and state


def test_a_model_that_changed_shape_is_refused_with_the_differences(attach):
    model, optimizer = make()
    train(attach(model, optimizer), model, optimizer)
    with pytest.raises(
        errors.LayoutChanged, match=r"model\.0\.weight: held float32 \[4, 8\], float32 \[4, 16\] in the model"
    ):
        attach(*make(16))
    other, another = make()
    assert attach(other, another).step == 3, "a refused attach must not lose what is held"


def test_another_optimizer_is_refused(attach):
    model, optimizer = make()
    train(attach(model, optimizer), model, optimizer)
    with pytest.raises(errors.LayoutChanged):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("value", [object(), lambda: 0, {1, 2}, Path("x")])
def test_state_that_can_not_be_stored_is_refused_at_attach_with_its_path(attach, value):
    with pytest.raises(errors.UnsupportedState, match=r"state\['loader'\]\['value'\]\['sampler'\]"):
        attach(*make(), state={"loader": Keeper({"sampler": value})})


class Begun:
    """Keeps its own place once it was asked for it, as torchdata's `nodes.Loader` does."""

    def __init__(self) -> None:
        self.place, self.is_asked = 0, False

    def state_dict(self) -> dict[str, int]:
        self.is_asked = True
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.is_asked:
            self.place = state["place"]


def test_an_object_in_state_is_not_asked_before_it_is_restored(attach):
    model, optimizer = make()
    begun = Begun()
    session = attach(model, optimizer, state={"nodes": begun})
    begun.place = 3
    train(session, model, optimizer)
    again = Begun()
    attach(*make(), state={"nodes": again})
    assert again.place == 3


def test_state_that_can_not_be_stored_is_refused_after_a_restore_and_nothing_is_lost(attach):
    model, optimizer = make()
    train(attach(model, optimizer, state={"x": Keeper({"n": 1})}), model, optimizer)

    class Worse(Keeper):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({"value": object()})

    with pytest.raises(errors.UnsupportedState, match=r"state\['x'\]"):
        attach(*make(), state={"x": Worse({"n": 1})})
    assert attach(*make(), state={"x": Keeper({"n": 1})}).step == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"state": {"x": 3}}, "without state_dict"), ({"every": 0}, "from 1 to"), ({"protect": "raid"}, "not in this version"),
        ({"slots": 1}, "2 to 16"), ({"job": "../etc"}, "not allowed"), ({"daemon": "nowhere"}, "no unix socket"),
    ],
)  # fmt: skip
def test_bad_arguments(attach, arguments, text):
    with pytest.raises(errors.ConfigError, match=text):
        attach(*make(), **arguments)


@pytest.mark.parametrize("state", [["schedule"], [], nn.Linear(1, 1)], ids=["a list", "nothing", "one object"])
def test_state_without_names_is_refused(attach, state):
    with pytest.raises(errors.ConfigError, match=f"state is a {type(state).__name__}; it maps names") as refused:
        attach(*make(), state=state)
    assert refused.value.hint == 'state={"lr": schedule}'


def test_what_new_users_pass_in_the_wrong_place_is_refused_with_the_right_place(attach):
    model, optimizer = make()
    with pytest.raises(errors.ConfigError) as refused:
        attach(model, optimizer, state={"best": 1e9})
    assert refused.value.hint == 'loop = reft.Values(best=...), state={"loop": loop}, and use loop.best in the loop'
    with pytest.raises(errors.ConfigError) as refused:
        attach(model, optimizer, state={"data": torch.utils.data.DataLoader(range(4))})
    assert refused.value.hint.endswith("for a data loader, reft.ResumableLoader(loader), and iterate that")
    with pytest.raises(errors.ConfigError) as refused:
        attach(model, optimizer, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    assert refused.value.hint.endswith('a learning rate scheduler goes into state={"lr": schedule}')


def test_a_wrapper_around_an_optimizer_is_refused_and_its_optimizer_named(attach):
    model, optimizer = make()
    scheduled = type("ScheduledOptim", (), {})()
    with pytest.raises(errors.ConfigError, match="optimizer is a ScheduledOptim; it must be") as refused:
        attach(model, scheduled)
    assert refused.value.hint == ""
    scheduled._optimizer, scheduled.n = optimizer, 0
    with pytest.raises(errors.ConfigError) as refused:
        attach(model, scheduled)
    assert (
        refused.value.hint
        == "pass its ._optimizer; if the ScheduledOptim keeps values of its own, hold these in state="
    )


def test_meta_and_sparse_tensors_are_refused_by_name(attach):
    with pytest.raises(errors.UnsupportedState, match=r"model\.0\.weight lies on device meta"):
        attach(nn.Linear(2, 2, device="meta"), make()[1])


class Around(torch.optim.Optimizer):
    """An optimizer whose own state stays empty, such as Accelerate's."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.optim = inner


def test_an_optimizer_with_state_elsewhere_is_refused(attach):
    model, optimizer = make()
    with pytest.raises(errors.UnsupportedState, match="keeps its state in another optimizer"):
        attach(model, Around(optimizer))
    optimizer.state["global"]["momentum"] = torch.zeros(3)
    with pytest.raises(errors.UnsupportedState, match="under 'global', which is not a parameter"):
        attach(model, optimizer)


def test_a_named_daemon_that_does_not_answer(tmp_path):
    with pytest.raises(errors.DaemonUnavailable, match="no daemon answers"):
        reft.attach(*make(), daemon=f"unix:{tmp_path}/none.sock")


def test_world_size_without_a_process_group(attach, monkeypatch):
    monkeypatch.setattr(Launch, "load", classmethod(lambda cls: Launch(0, 4, "", "")))
    with pytest.raises(errors.AttachError, match="init_process_group"):
        attach(*make())


def test_switched_off_means_nothing_happens(capfd):
    model, optimizer = make()
    session = reft.attach(model, optimizer, config=Config(mode="off"))
    for _ in session.steps(3):
        step_once(model, optimizer)
    assert session.step == 3 and not session.seal() and session.stats()["snapshots"] == 0
    assert "switched off" in capfd.readouterr().err


# Who may attach


def test_a_second_attach_of_this_process(attach, shared_daemon):
    model, optimizer = make()
    session = reft.attach(model, optimizer, daemon=shared_daemon.address, job="twice")
    with pytest.raises(errors.AlreadyAttached, match="close the earlier session"):
        reft.attach(model, optimizer, daemon=shared_daemon.address, job="twice")
    train(session, model, optimizer)  # the first is not disturbed
    session.close()


def test_a_second_trainer_of_a_living_rank_is_refused(daemon):
    first = Trainers(Spec(daemon.address, options={"pause_at": [5]}))
    first.wait_for(5)
    second = Trainers(Spec(daemon.address))
    assert second.wait() == [1]
    assert "AlreadyAttached" in second.errors() and "which lives" in second.errors()
    first.let_go(5)
    assert first.wait() == [0]


def test_an_orphan_of_the_same_launch_is_ended_by_the_next_attach(daemon):
    """A killed torchrun agent leaves a worker that trains on. Both runs have the same launch."""
    same = {"TORCHELASTIC_RUN_ID": "none"}  # the parent of both, the fork server, passes for their agent
    options = {"seal_at": [4, 5], "pause_at": [5]}  # step 4 is whole, so there is a slot for 5
    orphan = Trainers(Spec(daemon.address, steps=10_000, options=options, environment=same))
    orphan.wait_for(5)
    after = run(Spec(daemon.address, environment=same))
    assert orphan.wait() == [-signal.SIGKILL]
    assert after[0]["from"] == "memory" and after[0]["began"] == 5


def test_a_session_begins_without_a_shared_connection(attach, shared_daemon, monkeypatch):
    """Threads of the session call the daemon while attach ends, and training forks."""
    shared: list[bool] = []

    def recorded(context: Any, *arguments: Any) -> Any:
        with context.calls.channel(shared_daemon.address) as one, context.calls.channel(shared_daemon.address) as other:
            shared.append(one is other)
        return begin(context, *arguments)

    begin = run_steps.begin
    monkeypatch.setattr(run_steps, "begin", recorded)
    attach(*make())
    assert shared == [False]


def test_a_forked_child_may_not_use_the_session(attach):
    model, optimizer = make()
    session = attach(model, optimizer)
    train(session, model, optimizer)
    pid = os.fork()
    if pid == 0:
        try:
            if not torch.cuda.is_available():  # else torch itself can't step in a fork
                step_once(model, optimizer)  # hooks do nothing in the child
            session.step_end()
        except errors.ForkedSession:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    train(session, model, optimizer)
    assert session.step == 6


def test_workers_of_a_data_loader_do_not_disturb(attach):
    model, optimizer = make()
    session = attach(model, optimizer)
    loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8, num_workers=2)
    batches = iter(loader)
    for _ in session.steps(8):
        model(next(batches)).sum().backward()
        optimizer.step()
    assert session.seal(timeout=60)
    counts = session.stats()  # on a busy machine the round's news may come too late for a slot
    assert counts["snapshots"] + counts["skipped"] == 8


# Jobs with and without a name


def test_a_named_job_resumes_and_an_unnamed_one_starts_fresh_and_names_the_earlier_run(tmp_path, daemon):
    command = script(tmp_path, LOOP)
    first = execute(command, REFT_DAEMON=daemon.address)
    assert "began 0 None" in first.stdout and "sealed True" in first.stdout, first.stderr
    again = execute(command, REFT_DAEMON=daemon.address)
    assert "began 0 None" in again.stdout
    job = next(word for word in again.stderr.split() if word.startswith("REFT_JOB=")).removeprefix("REFT_JOB=")
    assert "step 5 of an earlier run" in again.stderr
    resumed = execute(command, REFT_DAEMON=daemon.address, REFT_JOB=job)
    assert "began 5 memory" in resumed.stdout


def test_a_restore_leaves_no_slot_descriptor_open(tmp_path, daemon):
    links = "[os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')]"
    command = script(tmp_path, LOOP + f"print('open', sum('slot-' in link for link in {links}))\n")
    kept = {"REFT_DAEMON": daemon.address, "REFT_JOB": "named"}
    first, second = (execute(command, **kept).stdout for _ in range(2))
    assert "began 0 None" in first and "began 5 memory" in second
    assert first.splitlines()[-1] == second.splitlines()[-1] == "open 0", "a mapping holds none, a restore leaves none"


def test_without_a_daemon_one_is_started_and_outlives_the_trainer(tmp_path):
    home = tmp_path / "run"
    environment = {"REFT_RUNTIME_DIR": str(home), "REFT_JOB": "auto", "HOME": "/nonexistent"}
    dying = script(
        tmp_path,
        LOOP.replace("    optimizer.step()\n", "    optimizer.step()\n    step == 3 and os.kill(os.getpid(), 9)\n"),
    )
    try:
        killed = execute(dying, **environment)
        assert killed.returncode == -9, killed.stderr
        resumed = execute(script(tmp_path, LOOP), **environment)
        assert "began 3 memory" in resumed.stdout, resumed.stderr
    finally:
        purge_and_stop(home / "daemon.sock")


def test_a_daemon_that_attach_had_started_and_that_died_is_started_again(tmp_path):
    home = tmp_path / "run"
    pid = "daemon_launcher.hello(address).pid"
    loop = LOOP.replace(
        "    optimizer.step()\n", f"    optimizer.step()\n    step == 3 and os.kill({pid}, signal.SIGKILL)\n"
    )
    address = f"import signal, threading; from reft.wire import daemon_launcher; address = 'unix:{home}/daemon.sock'\n"
    more = f"print('whole', session.seal(timeout=60).step, session.step, {pid} > 0)\n"
    # It may seal before the thread that had it started says so; the end of the process would cut
    # that thread short.
    more += "[thread.join() for thread in threading.enumerate() if thread.name == 'reft-revive']\n"
    try:
        done = execute(script(tmp_path, address + loop + more), REFT_RUNTIME_DIR=str(home), REFT_JOB="auto")
        assert "whole 5 5 True" in done.stdout, done.stderr
        assert "the daemon had died" in done.stderr
    finally:
        purge_and_stop(home / "daemon.sock")


# Damage


def flip(folder: Path, name: str) -> None:
    """Turns one bit of a slot's data."""
    with open(folder / name, "r+b") as file:
        at = best_header(np.frombuffer(file.read(2 * PAGE), np.uint8)).geometry.data_offset + 1000
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_after_a_damaged_slot_all_ranks_restore_the_version_before(daemon):
    plain = run(Spec(daemon.address, job="plain"), 2)
    # Each of these steps is waited for: steps of a millisecond outrun the round, and then there is
    # no version before.
    trainers = Trainers(Spec(daemon.address, options={"pause_at": [8], "seal_at": [5, 6, 7, 8]}), 2)
    trainers.wait_for(8)
    until(lambda: daemon.status("job").whole == 8, what="step 8")
    trainers.kill()
    headers = daemon.call("Inventory", pb.InventoryRequest(job="job")).slots
    newest = next(header for header in headers if header.rank == 1 and header.version.step == 8)
    flip(daemon.folder / "job", newest.slot)
    after = run(Spec(daemon.address), 2)
    assert after[0]["began"] == after[1]["began"] < 8
    for mine, reference in zip(after, plain, strict=True):
        assert mine["digests"] == reference["digests"]


def test_state_missing_in_the_older_version_is_removed(daemon):
    """A parameter is trained from step 8 on, and step 8 is damaged.

    State that was made to restore step 8 must not prevent the restore of step 7.
    """
    options = {"thaws_at": 7, "seal_at": [6, 7, 8]}
    plain = run(Spec(daemon.address, job="plain", options=options))
    trainers = Trainers(Spec(daemon.address, options={**options, "pause_at": [8]}))
    trainers.wait_for(8)
    trainers.kill()
    for header in daemon.call("Inventory", pb.InventoryRequest(job="job")).slots:
        if header.version.step == 8:
            flip(daemon.folder / "job", header.slot)
    after = run(Spec(daemon.address, options=options))
    assert after[0]["began"] == 7 and after[0]["digests"] == plain[0]["digests"]


def test_if_all_newer_versions_are_damaged_the_restored_base_is_found_again(daemon):
    """The first decision of this attach is stored before any slot is read.

    The epoch of the base would not count under that decision.
    """
    for options in ({"pause_at": [8], "seal_at": [7, 8]}, {"pause_at": [9], "seal_at": [9]}):
        trainers = Trainers(Spec(daemon.address, options=options))
        trainers.wait_for(options["pause_at"][0])
        trainers.kill()
    for header in daemon.call("Inventory", pb.InventoryRequest(job="job")).slots:
        if header.version.epoch.counter == 2:
            flip(daemon.folder / "job", header.slot)
    assert run(Spec(daemon.address))[0]["began"] == 8


def test_a_truncated_slot_is_an_erasure(daemon):
    """Reading a mapping past the end of the file kills a process. Daemon and attach survive."""
    trainers = Trainers(Spec(daemon.address, options={"pause_at": [8], "seal_at": [6, 7, 8]}))
    trainers.wait_for(8)
    trainers.kill()
    headers = daemon.call("Inventory", pb.InventoryRequest(job="job")).slots
    newest = max(headers, key=lambda header: header.version.step)
    os.truncate(daemon.folder / "job" / newest.slot, 5000)
    after = run(Spec(daemon.address))
    assert after[0]["from"] == "memory" and 5 < after[0]["began"] < newest.version.step
    assert after[0]["sealed"] == [True, 12]


def test_if_all_versions_are_damaged_attach_fails(daemon):
    run(Spec(daemon.address))
    for path in (daemon.folder / "job").glob("rank-0.slot-*"):
        flip(daemon.folder / "job", path.name)
    trainers = Trainers(Spec(daemon.address))
    assert trainers.wait() == [1]
    assert "RestoreError" in trainers.errors() and "damaged" in trainers.errors()


def test_another_number_of_ranks_restores_the_state(daemon):
    run(Spec(daemon.address), 2)
    trainers = Trainers(Spec(daemon.address, steps=14))
    assert trainers.wait() == [0], trainers.errors()
    assert trainers.results()[0]["began"] == 12 and trainers.results()[0]["from"] == "peers"


def test_state_that_grew_after_the_first_step_is_restored(daemon):
    """Attach predicts one gradient in the cell, the snapshot has three: they are unreplicated.

    No step becomes whole while the ranks make a layout for them, so the newest steps may be void.
    """
    options = {"growing": True}
    plain = run(Spec(daemon.address, job="plain", options=options), 2)
    run(Spec(daemon.address, steps=8, options=options), 2)
    after = run(Spec(daemon.address, options=options), 2)
    for mine, reference in zip(after, plain, strict=True):
        assert 1 < mine["began"] <= 8 and mine["digests"] == reference["digests"]


def test_an_error_of_one_rank_is_raised_on_all(daemon, pair_of_models):
    codes = pair_of_models.wait()
    assert codes.count(0) == 0
    assert "rank 1 could not attach" in pair_of_models.errors()


@pytest.fixture
def pair_of_models(daemon):
    """Two ranks; reft can't hold the state of the second."""
    return Trainers(Spec(daemon.address, options={"bad_rank": 1}), 2)


# Mismatched replicas


def test_ranks_with_different_arguments_are_refused(daemon):
    """The ranks would place shards by different manifests; a version can't be decoded then."""
    trainers = Trainers(Spec(daemon.address, options={"odd_rank": 1, "tolerate": 1}), 2)
    assert trainers.wait().count(0) == 0
    assert "rank 0 has tolerate 1, rank 1 2.\nFix: give all ranks the same" in trainers.errors()


def test_ranks_that_train_separately_are_no_replicas(daemon):
    """The ranks are equal at attach, then train on other data without exchanging gradients.

    A restore from shards of both would give a state that no rank ever had.
    """
    trainers = Trainers(Spec(daemon.address, options={"apart": True, "seal_s": 2}), 2)
    assert trainers.wait() == [0, 0]
    assert all(result["sealed"] == [False, -1] for result in trainers.results())
    assert "ranks hold different bytes where they should be replicas" in trainers.errors()


def test_ranks_whose_replicas_always_differed_start_fresh_again(daemon):
    """Both ranks have sealed step 1, but no step was ever whole: a fresh start loses nothing."""
    spec = Spec(daemon.address, steps=1, options={"apart": True, "seal_s": 2})
    for _ in range(2):
        trainers = Trainers(spec, 2)
        assert trainers.wait() == [0, 0], trainers.errors()
        assert [result["began"] for result in trainers.results()] == [0, 0]
    assert "differs from its replicas" in trainers.errors()


def test_ranks_that_train_separately_keep_their_state_with_protect_none(daemon):
    options = {"apart": True, "protect": "none"}
    plain = run(Spec(daemon.address, job="plain", options=options), 2)
    assert plain[0]["digests"] != plain[1]["digests"]
    Trainers(Spec(daemon.address, options={**options, "seal_at": [5, 6], "die_at": 6}), 2).wait()
    after = run(Spec(daemon.address, options=options), 2)
    assert after[0]["began"] > 0
    for mine, reference in zip(after, plain, strict=True):
        assert mine["digests"] == reference["digests"]


def test_every_rank_keeps_leaves_that_are_mismatched_at_attach(daemon):
    """Random weights without a common seed: every rank keeps its own copy of mismatched leaves."""
    options = {"apart": True, "seed_by_rank": True}
    plain = run(Spec(daemon.address, job="plain", options=options), 2)
    assert plain[0]["sealed"] == [True, 12] and plain[0]["digests"] != plain[1]["digests"]


def test_uncovered_state_is_reported(attach, capsys):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    attach(model, optimizer)
    assert "not covered: the LR scheduler of an optimizer; pass it in state=" in capsys.readouterr().err
    position = SimpleNamespace(state_dict=dict, load_state_dict=dict)
    attach(model, optimizer, state={"data": position}, job="another")
    assert "not covered: the LR scheduler" in capsys.readouterr().err, "another object does not hide that"
    wrapped = SimpleNamespace(state_dict=dict, load_state_dict=dict, scheduler=scheduler)
    several = SimpleNamespace(state_dict=dict, load_state_dict=dict, schedulers=[scheduler])  # as torchtitan's
    for number, held in enumerate((scheduler, wrapped, several)):
        attach(model, optimizer, state={"lr": held}, job=f"covered-{number}")
        said = capsys.readouterr().err
        assert "not covered: " not in said and "in no optimizer" not in said
    attach(*make(), job="plain")
    assert "not covered: " not in capsys.readouterr().err, "attach can't see a loader, and says nothing"


def test_trainable_parameters_without_an_optimizer_are_reported(attach, capsys):
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("frozen", "trained", "forgotten")})
    model["frozen"].requires_grad_(False)
    average = torch.optim.swa_utils.AveragedModel(model)
    attach(model, torch.optim.SGD(model["trained"].parameters(), lr=0.1), state={"average": average})
    said = capsys.readouterr().err
    assert "2 trainable parameters in no optimizer that was passed, e.g. model.0.forgotten.weight" in said
    masters = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
    attach(model, torch.optim.SGD(masters, lr=0.1), job="copies")
    assert "in no optimizer" not in capsys.readouterr().err


def test_state_of_a_communication_hook_is_reported_as_uncovered():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        request = AttachArguments(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None, {}, None, "auto", 1)
        said = lambda: " ".join(report.not_covered(request, request.tracked(), 1))  # noqa: E731
        assert "communication hook" not in said()
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
        assert "not covered: the PowerSGDState of DDP's communication hook" in said()
    finally:
        dist.destroy_process_group()


def test_an_optimizer_with_its_own_state_dict_is_reported(attach, capsys):
    class Counting(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "count": 0}

    model, optimizer = make()
    attach(model, [optimizer, Counting([nn.Parameter(torch.zeros(1))], lr=0.1)])
    assert "not covered: anything that Counting.state_dict adds to torch's" in capsys.readouterr().err
    attach(model, optimizer, job="another")
    assert "state_dict adds" not in capsys.readouterr().err


def test_own_state_that_no_gradient_gives_is_refused_where_it_would_be_copied():
    introduction: Any = SimpleNamespace(state=SimpleNamespace(tracked=SimpleNamespace(items=list)))
    copied, exchanged = (GuardedJob(2, scheme=scheme).placement for scheme in ("aor", "auto"))
    with pytest.raises(errors.UnsupportedState, match=r"only this rank holds own0\.0 and 1 more leaf; with"):
        refuse_other_state(attaches.context(), introduction, copied)
    for placement in (exchanged, replace(copied, slots=3), replace(copied, tolerate=0)):
        refuse_other_state(attaches.context(), introduction, placement)


def test_such_state_is_refused_at_a_fresh_start_and_stops_no_job_that_goes_on(monkeypatch):
    def planned(base: object) -> object:
        plan = SimpleNamespace(base=base, placement=GuardedJob(2, scheme="aor").placement)
        monkeypatch.setattr("reft.client.attach.run.make_plan", lambda *_: plan)
        monkeypatch.setattr("reft.client.attach.run.compare", lambda *_: [])
        monkeypatch.setattr("reft.client.attach.run.manifest_of_base", lambda *_: base)
        tracked = SimpleNamespace(items=list)
        secrets = SimpleNamespace(ident=lambda number: b"")
        parts: Any = SimpleNamespace(
            state=SimpleNamespace(tracked=tracked), ranks=SimpleNamespace(secrets=secrets), base=base, mismatched=(),
            number=0, buffer=SimpleNamespace(nbytes=1), job=SimpleNamespace(id="job"), close=lambda: None,
        )  # fmt: skip
        return plan_restore(attaches.context(), parts, parts, parts, parts, parts, parts) is plan

    with pytest.raises(errors.UnsupportedState, match="only this rank holds"):
        planned(None)
    assert planned(SimpleNamespace(mismatched=()))
