"""Every error that reft raises, drawn as a tree. One class per reaction that a caller can have.

    ReftError
    ├── ConfigError          a value that you gave can't be used: correct it
    ├── AttachError          attach or restore can't go on, on any rank: the message says why and what to do
    │   ├── DaemonUnavailable    no daemon answers where one was named, or none could be started
    │   ├── AlreadyAttached      another living process trains this rank of this job
    │   ├── LayoutChanged        the held state has other tensors than the model: the differences are listed
    │   ├── UnsupportedState     something in the state can't be held: its key path is named
    │   └── NoRoom               the slots don't fit into memory
    ├── RestoreError         held state was found but can't be brought back, and nothing was guessed
    ├── StaleEpoch           a newer attach of this job exists: this process is an orphan of an older one
    ├── FormatError          bytes that are not a slot, a capsule or a message of a version that we read
    └── ForkedSession        a session was used in a child of the process that attached it

Inside a training step none of these is raised: a failure there means "no snapshot this time".
"""

from __future__ import annotations


class ReftError(Exception):
    """Base of all errors of reft.

    Args:
        message: what is wrong, with the value and the limit.
        hint: the next thing for a person to do, as a command or a line to change.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} Fix: {hint}" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(ReftError):
    """A value given by argument, environment or file can't be used."""


class AttachError(ReftError):
    """Attach can't go on; raised on every rank of the job alike."""


class DaemonUnavailable(AttachError):
    """No daemon answers where one was named, or none could be started."""


class AlreadyAttached(AttachError):
    """Another living process trains this rank of this job."""


class LayoutChanged(AttachError):
    """The held state has other tensors than the model and optimizer that were passed."""


class UnsupportedState(AttachError):
    """Something in the state can't be held as bytes; the key path is in the message."""


class NoRoom(AttachError):
    """The slots don't fit into the memory that the daemon may use."""


class RestoreError(ReftError):
    """Held state exists, but can't be brought back whole."""


class StaleEpoch(ReftError):
    """A newer attach of the same job exists."""


class FormatError(ReftError):
    """Bytes that are not what their place says, or of a newer major version."""


class ForkedSession(ReftError):
    """A session was used in a forked child of the process that attached it."""
