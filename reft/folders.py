"""Folders that only this user can write, also where another user was faster.

    BASE, such as /tmp/reft-1000
      ├ this user's ─► BASE
      ├ another user's ─► with a lock: BASE-RANDOM that is this user's, else a new one, mode 0700
      └ missing ─► BASE-RANDOM if there is one, else BASE

In /tmp and /dev/shm anybody may take any name. All processes of a user must find the same folder,
so two of them must not make one each: the folder above is locked meanwhile. A BASE-RANDOM stays in
use when the other user's BASE is gone, since a daemon may live there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from reft.errors import ConfigError

LOCK_DEADLINE_S: Final = 2.0
_LOCK_PAUSE_S: Final = 0.01


def make_folder(folder: Path) -> None:
    """Makes a folder and the missing ones above it, mode 0700 whatever the umask is.

    Raises:
        OSError: a folder can't be made.
    """
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.mkdir(each, 0o700)


def claim_folder(folder: Path) -> Path:
    """Makes the folder if it is missing. It checks that only this user can write the folder.

    Raises:
        ConfigError: the folder is a link, belongs to another user, or others may write it.
        OSError: the folder can't be made.
    """
    make_folder(folder)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError(f"{folder} is not a folder.", "name another path")
    if facts.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} belongs to uid {facts.st_uid}, you are {os.getuid()}.", "name a folder of your own"
        )
    if facts.st_mode & 0o022:
        raise ConfigError(f"others may write {folder} (mode {facts.st_mode & 0o777:o}).", f"chmod 700 {folder}")
    return folder


def usable_folder(base: Path) -> Path:
    """Returns `base`, or the folder in its place if another user has it.

    `base` itself is not made.

    Raises:
        ConfigError: the folder in place of `base` can't be made.
    """
    if _is_own(base):
        return base
    if not os.path.lexists(base):
        return _find(base) or base
    if base.lstat().st_uid == os.getuid():
        return base  # a file, a link or an open folder of this user: `claim_folder` says what to do
    try:
        with _locked(base.parent):
            return _find(base) or Path(tempfile.mkdtemp(prefix=f"{base.name}-", dir=base.parent))
    except OSError as error:
        raise ConfigError(
            f"{base} belongs to somebody else, and no folder can be made beside it: {error}.", "set REFT_RUNTIME_DIR"
        ) from error


def _find(base: Path) -> Path | None:
    """Returns the folder that was made in place of `base`; None if there is none."""
    try:
        names = sorted(name for name in os.listdir(base.parent) if name.startswith(f"{base.name}-"))
    except OSError:
        return None
    return next((path for name in names if _is_own(path := base.parent / name, 0o077)), None)


def _is_own(path: Path, forbidden: int = 0o022) -> bool:
    """Whether a path is a real folder of this user, without the `forbidden` permissions."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & forbidden


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes that do the same.

    Raises:
        TimeoutError: another process has held the lock for LOCK_DEADLINE_S.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end_s = time.monotonic() + LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"another process has locked {folder} for {LOCK_DEADLINE_S:g} s") from None
                time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(descriptor)
