"""The adapters without their trainers: their imports, and their errors for an unknown trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import reft
from reft.errors import ConfigError, UnsupportedState
from reft.integrations import checks, deepspeed, lightning, torchtitan, transformers
from tests.support.daemons import ROOT

MODULES = ["accelerate", "deepspeed", "lightning", "megatron", "torchtitan", "transformers"]


def test_importing_an_adapter_imports_no_trainer():
    """The trainers need not be installed."""
    lines = [f"import reft.integrations.{name}" for name in MODULES]
    lines += ["import sys", f"assert not set({MODULES!r}) & set(sys.modules), 'loaded'"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_attribute_is_an_error_with_the_tested_version():
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(setup_data=None))
    tested = checks.Tested("no-such-package", "1.2.3")
    tested.need(trainer, "fit_loop", "fit_loop.setup_data")
    with pytest.raises(UnsupportedState, match=r"has no 'epoch_loop' in no-such-package .* tested with 1\.2\.3"):
        tested.need(trainer, "fit_loop.epoch_loop")


def test_a_missing_parameter_is_an_error():
    tested = checks.Tested("pytest", "1.2.3")
    tested.need_parameters(lambda epoch, batch: None, ["epoch"])
    with pytest.raises(UnsupportedState, match="does not take 'step' in pytest"):
        tested.need_parameters(lambda epoch: None, ["epoch", "step"])


@pytest.mark.parametrize("names", [(), ("model-parallel-rng",)])
def test_the_random_states_that_deepspeed_tracks_are_held(names, monkeypatch):
    states = {name: torch.zeros(4, dtype=torch.uint8) for name in names}
    tracker = SimpleNamespace(get_states=lambda: dict(states), set_states=states.update)
    module = SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    monkeypatch.setitem(sys.modules, deepspeed.CHECKPOINTING, module)
    attached = []
    monkeypatch.setattr(reft, "attach", lambda *_, **options: attached.append(options["state"]))
    deepspeed.attach(SimpleNamespace(global_rank=1, lr_scheduler=None, module=None))
    (held,) = attached
    assert held.keys() == ({"random"} if names else set())
    for name in names:
        saved = held["random"].state_dict()
        states[name] = torch.ones(4, dtype=torch.uint8)
        held["random"].load_state_dicts([saved, {"states": {}}])
        assert states[name].sum() == 0


def test_only_accelerates_wrapper_is_unwrapped():
    wrapper = type("AcceleratedOptimizer", (), {"__module__": "accelerate.optimizer", "optimizer": "inner"})
    other = type("AcceleratedOptimizer", (), {"optimizer": "inner"})()
    assert checks.inner_optimizer(wrapper()) == "inner"
    assert checks.inner_optimizer(other) is other


class Loader:
    """As torchdata's loader: state_dict makes the iterator. Subclasses pickle."""

    def __init__(self) -> None:
        self.iterators, self.state = 0, {"at": 3}

    def state_dict(self):
        self.iterators += 1
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_torchtitans_position_is_not_pickled_and_the_iterator_is_made_on_load():
    stateful = type(
        "StatefulDataLoader", (Loader,), {"__module__": "torchdata.stateful_dataloader.stateful_dataloader"}
    )
    stateful.state_dict, stateful.load_state_dict = Loader.state_dict, Loader.load_state_dict
    pickling = type("ParallelAwareDataloader", (stateful,), {"state_dict": lambda self: {"rank_0": b"pickled"}})
    loader = pickling()
    position = torchtitan.LoaderPosition(loader)
    assert position.state_dict() == {"at": 3}
    position.load_state_dict({"at": 5})
    assert loader.state == {"at": 5} and loader.iterators == 2
    plain = Loader()
    torchtitan.LoaderPosition(plain).load_state_dict({"at": 7})
    assert plain.state == {"at": 7} and plain.iterators == 0


class Storage:
    """Stands for torchtitan's own checkpoint manager and its Config."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def build(self, **given):
        self.given = given
        return self

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name) or True


@pytest.mark.parametrize(("restored_from", "calls"), [("memory", []), (None, ["load"])])
def test_torchtitans_storage_is_read_only_if_memory_holds_nothing(monkeypatch, restored_from, calls):
    marks: list[str] = []
    session = SimpleNamespace(
        restored_from=restored_from, begin_marking=lambda: marks.append("marking"), step_end=lambda: marks.append("mark"),
        close=lambda: marks.append("close"),
    )  # fmt: skip
    attached = []
    monkeypatch.setattr(reft, "attach", lambda *given, **options: attached.append((given, options)) or session)
    storage = Storage()
    config = SimpleNamespace(enable=True, storage=storage, job="j", tolerate=None, protect="auto", every=2, slots=None)
    trainer, rates, loader = Loader(), Loader(), Loader()
    manager = torchtitan._Manager(
        config, dataloader=loader, model_parts=["part"], optimizers=SimpleNamespace(optimizers=["inner"]),
        lr_schedulers=rates, states={"train_state": trainer}, sd_adapter=None, base_folder="f",
    )  # fmt: skip
    assert manager._load() is True
    assert storage.calls == calls and marks == ["marking"]
    (given, options) = attached[0]
    assert given == (["part"], ["inner"]) and options["every"] == 2 and options["job"] == "j"
    assert options["state"]["train_state"] is trainer and options["state"]["lr"] is rates and "data" in options["state"]
    assert storage.given["base_folder"] == "f" and storage.given["dataloader"] is loader
    manager._save(1)
    manager._maybe_wait_for_staging()
    manager._close()
    assert marks == ["marking", "mark", "close"]
    assert storage.calls == [*calls, "save", "maybe_wait_for_staging", "close"]


@dataclass(kw_only=True)
class TitanConfig:
    """The options of torchtitan's checkpoints that these tests set, and those of reft."""

    enable: bool = True
    interval: int = 1
    load_step: int = -1
    initial_load_path: str | None = None
    exclude_from_loading: list[str] = field(default_factory=list)
    job: str | None = None
    tolerate: int | None = None
    protect: str = "auto"
    every: int | None = None
    slots: int | None = None
    storage: Any = None


def titan_manager(config: TitanConfig) -> Any:
    return torchtitan._Manager(
        config, dataloader=Loader(), model_parts=["part"], optimizers=SimpleNamespace(optimizers=["inner"]),
        lr_schedulers=Loader(), states={},
    )  # fmt: skip


@pytest.mark.parametrize(("option", "value"), [("initial_load_path", "/weights"), ("load_step", 500)])
def test_options_of_torchtitans_checkpoints_that_reft_does_not_read_are_refused(option, value):
    """Else the run would train from random weights."""
    with pytest.raises(ConfigError, match=rf"checkpoint\.{option} is .*reft does not read it"):
        titan_manager(TitanConfig(**{option: value}))
    titan_manager(TitanConfig(interval=100, job="j"))


@pytest.mark.parametrize(("own", "of_storage", "loaded"), [(-1, 500, 500), (7, 500, 7), (-1, -1, -1)])
def test_the_step_that_torchtitans_storage_is_to_load_is_loaded(own, of_storage, loaded, monkeypatch):
    """torchtitan's trainer reads `load_step` of reft's Config only."""
    monkeypatch.setattr(
        reft, "attach", lambda *_, **__: SimpleNamespace(restored_from=None, begin_marking=lambda: None)
    )
    steps: list[int] = []
    storage = SimpleNamespace(load_step=of_storage, load=lambda step: not steps.append(step))
    storage.build = lambda **_: storage
    assert titan_manager(TitanConfig(storage=storage, load_step=own))._load(own)
    assert steps == [loaded]


def test_state_of_another_training_of_this_process_is_not_restored():
    """An example is the previous fold, under the same job name.

    A Trainer that continues its own training already has its steps.
    """
    fresh = SimpleNamespace(state=SimpleNamespace(global_step=0, is_world_process_zero=False))
    held = {"process": checks.this_process(), "state": {"global_step": 48}}
    with pytest.raises(ConfigError, match="this process has trained under this job's name before"):
        transformers.TrainerPosition(fresh).load_state_dict(held)
    loop = SimpleNamespace(state_dict=dict)
    with pytest.raises(ConfigError, match="this process has trained under this job's name before"):
        lightning.FitPosition(SimpleNamespace(global_step=0, fit_loop=loop)).load_state_dict(held)
    checks.refuse_own(checks.this_process() + "1")


def test_persistent_workers_are_named_as_a_gap():
    """Their random draws go on from epoch to epoch, so a restarted worker draws other numbers."""
    data = list(range(4))
    plain, workers = DataLoader(data), DataLoader(data, num_workers=1)
    assert not checks.has_persistent_workers([plain, workers, object()])
    assert checks.has_persistent_workers([plain, DataLoader(data, num_workers=1, persistent_workers=True)])


@pytest.mark.parametrize(("count", "persistent", "is_named"), [(2, True, True), (2, False, False), (0, True, False)])
def test_trainer_names_persistent_workers(count, persistent, is_named):
    arguments = SimpleNamespace(
        ignore_data_skip=False, world_size=1, dataloader_num_workers=count, dataloader_persistent_workers=persistent
    )
    trainer = SimpleNamespace(args=arguments, callback_handler=SimpleNamespace(train_dataloader=None))
    assert (checks.PERSISTENT_WORKERS in transformers._gaps(trainer)) == is_named


@pytest.mark.parametrize("persistent", [True, False])
def test_lightning_names_persistent_workers(persistent, monkeypatch):
    monkeypatch.setattr(lightning, "_savers", lambda trainer: [])  # it needs Lightning itself
    loader = DataLoader(list(range(4)), num_workers=1, persistent_workers=persistent)
    loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[loader]))
    trainer = SimpleNamespace(num_training_batches=4, fit_loop=loop, reload_dataloaders_every_n_epochs=0, callbacks=[])
    assert (checks.PERSISTENT_WORKERS in lightning._gaps(trainer)) == persistent


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {
                "num_training_batches": float("inf"),
                "fit_loop": SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[Loader()])),
            },
            "reads a batch ahead",
        ),
        ({"reload_dataloaders_every_n_epochs": 2}, "with reload_dataloaders_every_n_epochs"),
        ({"callbacks": [type("Own", (type("StochasticWeightAveraging", (), {}),), {})()]}, "StochasticWeightAveraging"),
    ],
)
def test_lightning_names_what_a_restart_changes(changed, named, monkeypatch):
    monkeypatch.setattr(lightning, "_savers", lambda trainer: [])  # it needs Lightning itself
    loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[DataLoader(list(range(4)))]))
    usual = {"num_training_batches": 4, "fit_loop": loop, "reload_dataloaders_every_n_epochs": 0, "callbacks": []}
    said = lambda changes: " ".join(lightning._gaps(SimpleNamespace(**usual | changes))).lower()  # noqa: E731
    assert named.lower() in said(changed) and named.lower() not in said({})


def test_another_release_is_an_error_with_both_tested_versions():
    tested = checks.Tested("pytest", "5.2.0", also="4.5.6")
    tested.need_release(version("pytest"))
    with pytest.raises(UnsupportedState, match=r"in pytest .* tested with 5\.2\.0 and 4\.5\.6"):
        tested.need_release("4.5")


def test_a_missing_local_variable_is_an_error():
    def loop(steps):
        place = steps

        return place

    tested = checks.Tested("pytest", "1.2.3")
    tested.need_locals(loop, ["steps", "place"])
    with pytest.raises(UnsupportedState, match="loop has no variable 'epoch' in pytest"):
        tested.need_locals(loop, ["place", "epoch"])


class State:
    """Stands for TrainerState of transformers 4.57."""

    def __init__(self, **values: Any) -> None:
        fields = {
            **dict.fromkeys(transformers.STATE, 0),
            "max_steps": 0,
            "log_history": [],
            "is_world_process_zero": True,
        }
        vars(self).update({**fields, **values})


class LoopTrainer:
    """Stands for Trainer of transformers 4.57: one loop, with the local variables of the real one.

    Args:
        max_steps: the limit.

    Attributes:
        seen: what the loop did, in order.
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.args = SimpleNamespace(device="cpu", gradient_accumulation_steps=2, auto_find_batch_size=False)
        self.state, self.control = State(), SimpleNamespace(should_training_stop=False, should_epoch_stop=False)
        self.callback_handler = SimpleNamespace(callbacks=[], train_dataloader=None)
        self.accelerator = self.model_wrapped = self.lr_scheduler = self.optimizer = None
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False
        self.current_flos = 0.0
        self.seen: list[str] = []

    def is_world_process_zero(self) -> bool:
        return True

    def _load_scaler(self, checkpoint: str | None) -> None:
        self.seen.append("scaler")

    def _maybe_log_save_evaluate(self, loss: torch.Tensor) -> None:
        self.seen.append(f"log since {self._globalstep_last_logged}")
        self._globalstep_last_logged = self.state.global_step - self.state.global_step % 2

    def _inner_training_loop(self, run: Any, resume_from_checkpoint: str | None = None) -> None:
        num_update_steps_per_epoch, epochs_trained, steps_trained_in_current_epoch, max_steps = 3, 0, 0, self.max_steps
        num_train_epochs = -(-max_steps // num_update_steps_per_epoch)
        self._load_scaler(resume_from_checkpoint)
        path = Path(str(resume_from_checkpoint)) / "trainer_state.json"
        if path.is_file():
            self.state = State(**json.loads(path.read_text()))
            epochs_trained, updates = divmod(self.state.global_step, num_update_steps_per_epoch)
            steps_trained_in_current_epoch = 2 * updates
        self.state.max_steps = max_steps
        tr_loss = torch.zeros(())
        self._total_loss_scalar, self._globalstep_last_logged = 0.0, self.state.global_step
        run.train_begins()
        for epoch in range(epochs_trained, num_train_epochs):
            run.epoch_begins()
            order = torch.rand(()).item()  # drawn when the epoch begins
            for update in range(steps_trained_in_current_epoch // 2, num_update_steps_per_epoch):
                run.step_begins()
                tr_loss = tr_loss + torch.rand(())
                self.state.global_step += 1
                self.seen.append(f"{epoch}.{update} {tr_loss:.6f} {order:.6f}")
                self.control.should_training_stop = self.state.global_step >= max_steps
                self._maybe_log_save_evaluate(tr_loss)
                if self.control.should_training_stop:
                    break
            steps_trained_in_current_epoch = 0
            run.epoch_ends()
            self._maybe_log_save_evaluate(tr_loss)
            if self.control.should_training_stop:
                break


def trained(
    monkeypatch, held: Any = None, checkpoint: Path | None = None, max_steps: int = 6
) -> tuple[list[str], list[Any]]:
    """Trains a LoopTrainer of three steps an epoch, from a held mark if there is one.

    Returns:
        what the loop did, and each mark: the position, the sum of losses and the generators.
    """
    trainer, marks = LoopTrainer(max_steps), []
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Trainer=LoopTrainer))
    monkeypatch.setattr(checks.Tested, "need_release", lambda *_: None)
    monkeypatch.setattr(
        State, "load_from_json", lambda path: State(**json.loads(Path(path).read_text())), raising=False
    )
    monkeypatch.setattr(
        transformers, "_write_place", lambda state, step, path: Path(path).write_text(json.dumps({"global_step": step}))
    )

    def attach(model, optimizer, *, state):
        def step_end():
            marks.append((state["trainer"].state_dict(), state["loss"].sum.clone(), torch.get_rng_state()))

        if held is not None:
            state["trainer"].load_state_dict({**held[0], "process": "another"})
            state["loss"].sum.copy_(held[1])
            torch.set_rng_state(held[2])
        return SimpleNamespace(restored_from=held and "memory", step_end=step_end)

    monkeypatch.setattr(reft, "attach", attach)
    torch.manual_seed(0)
    run = transformers._LoopRun(trainer, {})
    trainer._inner_training_loop(run, resume_from_checkpoint=checkpoint and str(checkpoint))
    assert trainer._inner_training_loop == run._loop and trainer._load_scaler == run._load_scaler
    return trainer.seen, marks


@pytest.mark.parametrize("mark", range(6))
def test_the_loop_of_trainer_4_goes_on_from_each_mark(mark, monkeypatch):
    plain, marks = trained(monkeypatch)
    assert [(held["epoch"], held["updates"]) for held, *_ in marks] == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    after, later = trained(monkeypatch, marks[mark])
    assert after[:1] == ["scaler"] and after[1:] == plain[len(plain) - len(after) + 1 :]
    kept = ("epoch", "updates", "state", "counters")
    for (held, *_), (expected, *_) in zip(later, marks[mark + 1 :], strict=True):
        assert {key: held[key] for key in kept} == {key: expected[key] for key in kept}


def test_the_loop_of_trainer_4_reads_a_checkpoint_and_leaves_it_alone(monkeypatch, tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    seen, marks = trained(monkeypatch, checkpoint=tmp_path)
    assert seen[1].startswith("1.1 ") and (marks[0][0]["epoch"], marks[0][0]["updates"]) == (1, 2)
    trained(monkeypatch, marks[0], checkpoint=tmp_path)
    assert json.loads((tmp_path / "trainer_state.json").read_text()) == {"global_step": 4}


def test_a_training_that_had_stopped_does_not_go_on_with_trainer_4(monkeypatch):
    _, marks = trained(monkeypatch)
    held, loss, generators = marks[2]
    assert trained(monkeypatch, ({**held, "stops": True}, loss, generators))[0] == ["scaler"]


@pytest.mark.parametrize("limit", [3, 4], ids=["the end of an epoch", "within an epoch"])
def test_a_training_that_reached_its_limit_goes_on_with_a_higher_one(limit, monkeypatch):
    plain, _ = trained(monkeypatch)
    _, marks = trained(monkeypatch, max_steps=limit)
    assert trained(monkeypatch, marks[-1], max_steps=limit)[0] == ["scaler"]
    after, _ = trained(monkeypatch, marks[-1])
    steps = lambda seen: [each for each in seen if not each.startswith(("log", "scaler"))]  # noqa: E731
    assert steps(after) == steps(plain)[limit:]
