"""Reads the key of `--persist-key-file`, with which checkpoints get their MACs."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from reft.errors import ConfigError

KEY_MIN: Final = 32  # bytes
KEY_MAX: Final = 4096


def read_key(path: Path) -> bytes:
    """Returns the bytes of the key's file, all of them.

    Raises:
        ConfigError: others can read the file, it is not this user's, too short, too long, or can't
            be read.
    """
    remedy = "make one for all nodes: umask 077; openssl rand -hex 32 > FILE"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise ConfigError(
                    f"--persist-key-file {path} does not belong to user {os.getuid()}, or is no regular file.",
                    f"chown {os.getuid()} {path}; or {remedy}",
                )
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"--persist-key-file {path} has mode {stat.S_IMODE(status.st_mode):04o}, so others can use it.",
                    f"chmod 600 {path}",
                )
            key = file.read(KEY_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--persist-key-file {path} can't be read: {error.strerror}.", remedy) from error
    if not KEY_MIN <= len(key) <= KEY_MAX:
        raise ConfigError(
            f"--persist-key-file {path} has {len(key)} bytes{'' if len(key) < KEY_MIN else ' or more'}; a key has "
            f"{KEY_MIN} to {KEY_MAX}.",
            remedy,
        )
    return key
