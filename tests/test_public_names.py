"""Names that users import: they stay when names inside of reft change."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

ERRORS = (
    "AlreadyAttached AttachError ConfigError DaemonUnavailable ForkedSession FormatError LayoutChanged NoRoom ReftError "
    "RestoreError StaleEpoch UnsupportedState"
)
SCHEDULES = "Action Custom GPipe Gap Interleaved OneFOneB Times ZeroBubbleH1 ZeroBubbleV"


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("reft", "ResumableLoader Session attach"),
        ("reft.client", "Extractor register_extractor"),
        ("reft.config", "Config"),
        ("reft.errors", ERRORS),
        ("reft.schedules", SCHEDULES),
    ],
)
def test_public_names_stay(module, names):
    public = import_module(module)
    assert [name for name in names.split() if not hasattr(public, name)] == []


@pytest.mark.parametrize(
    "name",
    ["client.register_extractor", "config.Config", "integrations", "schedules.Custom"],
)
def test_a_public_module_is_reached_after_import_reft_alone(name):
    """The pages write `config=reft.config.Config(...)` in scripts that only import reft."""
    subprocess.run([sys.executable, "-c", f"import reft; reft.{name}"], check=True)


def test_import_reft_loads_no_torch():
    subprocess.run([sys.executable, "-c", "import reft, sys; assert 'torch' not in sys.modules"], check=True)
