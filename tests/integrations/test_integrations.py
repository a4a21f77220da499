"""Adapters without their trainers: what they import, and what they say to a trainer that is not the one they know."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from reft.errors import UnsupportedState
from reft.integrations import checks
from tests.support.daemons import ROOT

MODULES = ["accelerate", "deepspeed", "lightning", "megatron", "transformers"]


def test_importing_an_adapter_imports_no_trainer():
    """Nor does it need one: none is installed here, or all are."""
    lines = [f"import reft.integrations.{name}" for name in MODULES]
    lines += ["import sys", f"assert not set({MODULES!r}) & set(sys.modules), 'loaded'"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_missing_is_said_with_the_tested_version():
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(setup_data=None))
    tested = checks.Tested("no-such-package", "1.2.3")
    tested.need(trainer, "fit_loop", "fit_loop.setup_data")
    with pytest.raises(UnsupportedState, match=r"has no 'epoch_loop' in no-such-package .* tested with 1\.2\.3"):
        tested.need(trainer, "fit_loop.epoch_loop")


def test_a_parameter_that_is_missing_is_said():
    tested = checks.Tested("pytest", "1.2.3")
    tested.need_parameters(lambda epoch, batch: None, ["epoch"])
    with pytest.raises(UnsupportedState, match="does not take 'step' in pytest"):
        tested.need_parameters(lambda epoch: None, ["epoch", "step"])


def test_accelerates_wrapper_is_looked_through_and_no_other():
    wrapper = type("AcceleratedOptimizer", (), {"__module__": "accelerate.optimizer", "optimizer": "inner"})
    other = type("AcceleratedOptimizer", (), {"optimizer": "inner"})()
    assert checks.inner_optimizer(wrapper()) == "inner"
    assert checks.inner_optimizer(other) is other
