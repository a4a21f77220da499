"""Names that users import: they stay when names inside of reft change."""

from __future__ import annotations

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
