"""Folders of this user in places where every user may take any name."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from reft import folders
from reft.config import Config, runtime_dir, slots_folder
from reft.errors import ConfigError
from reft.folders import claim_folder, make_folder, usable_folder
from tests.support.trainers import FORKS

STRANGER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")


def squat(base: Path) -> Path:
    """Makes `base` as another user does."""
    base.mkdir()
    os.chown(base, STRANGER, STRANGER)
    return base


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_parents_are_private_whatever_the_umask_is(tmp_path, umask):
    earlier = os.umask(umask)
    try:
        claim_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(earlier)
    assert {mode(tmp_path / name) for name in ("a", "a/b", "a/b/c")} == {0o700}


def test_a_folder_that_exists_keeps_its_permissions(tmp_path):
    (tmp_path / "a").mkdir(mode=0o755)
    make_folder(tmp_path / "a" / "b")
    assert mode(tmp_path / "a") == 0o755 and mode(tmp_path / "a" / "b") == 0o700


def test_a_free_name_and_a_folder_of_ones_own_are_taken(tmp_path):
    base = tmp_path / "reft-1"
    assert usable_folder(base) == base and not base.exists()
    base.mkdir()
    assert usable_folder(base) == base


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_what_this_user_put_there_is_named_and_not_avoided(tmp_path, kind):
    base = tmp_path / "reft-1"
    if kind == "link":
        base.symlink_to(tmp_path)
    elif kind == "file":
        base.touch()
    else:
        base.mkdir()
        base.chmod(0o777)
    assert usable_folder(base) == base
    with pytest.raises(ConfigError, match=r"is not a folder|others may write"):
        claim_folder(base)


@needs_root
def test_a_taken_name_is_avoided_by_all_processes_alike(tmp_path):
    base = squat(tmp_path / "reft-1")
    # Not forked from this process: its threads may hold locks, which then stay locked in the fork.
    with FORKS.Pool(8) as pool:
        found = set(pool.map(usable_folder, [base] * 32))
    (other,) = found
    assert other.name.startswith("reft-1-") and mode(other) == 0o700 and other.lstat().st_uid == os.getuid()
    base.rmdir()
    assert usable_folder(base) == other, "a daemon may live there"
    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        claim_folder(squat(base))


@needs_root
def test_what_others_can_reach_is_not_taken_in_place_of_a_taken_name(tmp_path):
    base = squat(tmp_path / "reft-1")
    squat(tmp_path / "reft-1-a")
    (tmp_path / "reft-1-b").symlink_to(tmp_path)
    (tmp_path / "reft-1-c").mkdir(mode=0o755)
    (tmp_path / "reft-1-d").touch()
    assert usable_folder(base).name not in {f"reft-1-{each}" for each in "abcd"}


@needs_root
def test_a_lock_that_never_ends_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    base = squat(tmp_path / "reft-1")
    monkeypatch.setattr(folders, "LOCK_DEADLINE_S", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process has locked") as refused:
            usable_folder(base)
        assert refused.value.hint == "set REFT_RUNTIME_DIR"
    finally:
        os.close(descriptor)


@needs_root
def test_daemon_and_trainers_find_the_folder_in_place_of_a_taken_one(tmp_path, monkeypatch):
    monkeypatch.setattr("reft.config.os.access", lambda *_: False)  # as where /tmp can't be written
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    squat(tmp_path / f"reft-{os.getuid()}")
    assert runtime_dir() == runtime_dir() == Path(Config.load({}).runtime_dir)
    assert runtime_dir().parent == tmp_path and claim_folder(runtime_dir())
    # another socket has other slots, so a stranger can't foresee their name
    assert slots_folder(runtime_dir() / "daemon.sock") != slots_folder(tmp_path / f"reft-{os.getuid()}" / "daemon.sock")
