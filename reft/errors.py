"""All errors that reft raises. There is one class for each reaction that a caller can have.

    ReftError
    ├── ConfigError          a value that you passed can't be used: correct it
    ├── AttachError          attach failed on all ranks: the message names cause and remedy
    │   ├── DaemonUnavailable    the named daemon does not answer, or none could be started
    │   ├── AlreadyAttached      another living process trains this rank of this job
    │   ├── LayoutChanged        snapshot and model have other tensors: the message lists them
    │   ├── UnsupportedState     reft can't hold a part of the state: the message has its key path
    │   └── NoRoom               the slots don't fit into memory
    ├── RestoreError         a snapshot was found but can't be restored; nothing was guessed
    ├── StaleEpoch           a newer attach of this job exists: this process is an orphan
    ├── FormatError          bytes are no slot, capsule or message of a version that reft reads
    └── ForkedSession        a session was used in a child of the process that attached it

Inside a training step none of these is raised: a failure there only means that a snapshot is
    missing.
"""

from __future__ import annotations

FIX = "\nFix: "  # between the message and its remedy


class ReftError(Exception):
    """The base class of all errors of reft.

    Args:
        message: the problem, with the value and the limit.
        hint: the remedy, as a command or a line to change.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}{FIX}{hint}" if hint else message)
        self.message = message
        self.hint = hint


def remedy(error: BaseException) -> str:
    """Returns the line with an error's remedy, after a line break. It is empty without a remedy.

    A text that continues after the error's message puts this line at its end.
    """
    return f"{FIX}{error.hint}" if isinstance(error, ReftError) and error.hint else ""


def split_remedy(text: str) -> tuple[str, str]:
    """Returns the message and the remedy in the text of an error. The remedy may be empty."""
    message, _, hint = text.partition(FIX)
    return message, hint


def message(error: BaseException) -> str:
    """Returns the text of an error without its remedy."""
    return error.message if isinstance(error, ReftError) else str(error)


class ConfigError(ReftError):
    """A value from an argument, the environment or a file can't be used."""


class AttachError(ReftError):
    """Attach failed. The error is raised on every rank of the job."""


class DaemonUnavailable(AttachError):
    """The named daemon does not answer, or no daemon could be started."""


class AlreadyAttached(AttachError):
    """Another living process trains this rank of this job."""


class LayoutChanged(AttachError):
    """The snapshot has other tensors than the passed model and optimizer."""


class UnsupportedState(AttachError):
    """A part of the state can't be stored as bytes. The message has the key path."""


class NoRoom(AttachError):
    """The slots don't fit into the memory that the daemon may use."""


class RestoreError(ReftError):
    """A snapshot exists, but can't be restored completely."""


class StaleEpoch(ReftError):
    """A newer attach of the same job exists."""


class FormatError(ReftError):
    """Bytes do not have the expected format, or have a newer major version."""


class ForkedSession(ReftError):
    """A session was used in a forked child of the process that attached it."""
