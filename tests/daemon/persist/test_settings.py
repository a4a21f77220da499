"""The flags of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.core.persist.retention import RetentionSettings
from reft.errors import ConfigError
from reft_daemon.main import persist_settings
from reft_daemon.persist.persister import PersistSettings


def test_the_flags_as_documented(tmp_path):
    missing = tmp_path / "not mounted yet"
    assert persist_settings(str(missing), "30m", 3, "24h", True, "25s") == PersistSettings(
        missing, 1800.0, RetentionSettings(3, 86_400.0), True, 25.0
    )
    assert persist_settings("", "0", 3, "0", False, "25s") is None
    assert persist_settings("/nfs", "0", 1, "0", False, "0").root == Path("/nfs")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("s3://bucket/run", "30m", 3, "0", False, "25s"), r"can't write to s3:// yet"),
        (("runs", "30m", 3, "0", False, "25s"), r"--persist runs does not begin with /"),
        (("/nfs", "30", 3, "0", False, "25s"), r"'30' is not a duration"),
        (("/nfs", "30m", 0, "0", False, "25s"), r"--keep is 0"),
        (("", "30m", 3, "0", False, "25s"), r"need --persist"),
        (("", "0", 3, "0", True, "25s"), r"need --persist"),
    ],
)
def test_flags_that_contradict_are_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        persist_settings(*arguments)


def test_credentials_of_a_url_are_not_repeated():
    with pytest.raises(ConfigError) as error:
        persist_settings("s3://key:secret@host/bucket", "0", 3, "0", False, "25s")
    assert "secret" not in str(error.value)
