"""The flags of checkpoints."""

from __future__ import annotations

import os

import pytest

from reft.core.persist.retention import RetentionSettings
from reft.errors import ConfigError
from reft_daemon.persist import storage_root
from reft_daemon.persist.persister import PersistSettings
from reft_daemon.server.settings import persist_settings


def test_the_flags_as_documented(tmp_path):
    missing = tmp_path / "not mounted yet"
    assert persist_settings(str(missing), "30m", 3, "24h", True, "25s") == PersistSettings(
        str(missing), 1800.0, RetentionSettings(3, 86_400.0), True, 25.0
    )
    assert persist_settings("", "0", 3, "0", False, "25s") is None
    assert persist_settings("/nfs", "0", 1, "0", False, "0").root == "/nfs"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("ftp://bucket/run", "30m", 3, "0", False, "25s"), r"can't write to ftp://"),
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


def key_file(folder, text=b"k" * 32, mode=0o600):
    path = folder / "key"
    path.write_bytes(text)
    path.chmod(mode)
    return path


def test_key_is_looked_at_at_the_start(tmp_path):
    path = key_file(tmp_path)
    settings = persist_settings("s3://bucket/run/", "0", 3, "0", False, "25s", path)
    assert (settings.root, settings.key_file) == ("s3://bucket/run", path)
    with pytest.raises(ConfigError, match="need --persist"):
        persist_settings("", "0", 3, "0", False, "25s", path)
    for text, mode, words in (
        (b"k" * 31, 0o600, "has 31 bytes"),
        (b"k" * 5000, 0o600, "4097 bytes or more"),
        (b"k" * 32, 0o640, "mode 0640"),
        (b"k" * 32, 0o604, "mode 0604"),
    ):
        path.unlink()
        with pytest.raises(ConfigError, match=words) as error:
            persist_settings("/nfs", "0", 3, "0", False, "25s", key_file(tmp_path, text, mode))
        assert "kkkk" not in str(error.value)
    with pytest.raises(ConfigError, match="can't be read"):
        persist_settings("/nfs", "0", 3, "0", False, "25s", tmp_path / "none")
    with pytest.raises(ConfigError, match="can't be read"):
        persist_settings("/nfs", "0", 3, "0", False, "25s", tmp_path)


def test_key_of_another_user_is_refused(tmp_path, monkeypatch):
    path = key_file(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="does not belong to user 12345"):
        persist_settings("/nfs", "0", 3, "0", False, "25s", path)


def test_missing_package_is_said_at_the_start(monkeypatch):
    monkeypatch.setattr(storage_root, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'torch-reft\[object\]'"):
        persist_settings("s3://bucket/run", "0", 3, "0", False, "25s")
