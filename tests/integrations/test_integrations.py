"""The adapters without their trainers: their imports, and their errors for an unknown trainer."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

import reft
from reft.errors import ConfigError, UnsupportedState
from reft.integrations import checks, lightning, torchtitan, transformers
from tests.support.daemons import ROOT

MODULES = ["accelerate", "deepspeed", "lightning", "megatron", "torchtitan", "transformers"]


def test_importing_an_adapter_imports_no_trainer():
    """The trainers need not be installed."""
    lines = [f"import reft.integrations.{name}" for name in MODULES]
    lines += ["import sys", f"assert not set({MODULES!r}) & set(sys.modules), 'loaded'"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=100
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
