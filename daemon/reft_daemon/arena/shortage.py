"""Recognises calls that the system refuses for now, mostly because no descriptor is free.

Such a refusal says nothing about the object of the call. A process that could not be examined may
live. A file that could not be opened may be intact.
"""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

from reft.errors import AttachError

SHORTAGE_HINT = "see the limits of reft-daemon (ulimit -n), or try again"
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_shortage(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    return isinstance(error, OSError) and error.errno in _SHORT


def shortage_error(error: OSError) -> AttachError:
    """Returns the error for a caller: the system refused a call that the daemon needed."""
    return AttachError(f"the daemon can't do this now: {error}.", SHORTAGE_HINT)


@contextlib.contextmanager
def remedied(what: str, folder: Path, remedy: str) -> Iterator[None]:
    """Turns an error of the file system in the block into one with a remedy.

    Args:
        what: the files that the block makes.
        folder: where it makes them.
        remedy: what to do about it.

    Raises:
        AttachError: the file system takes no file there.
    """
    try:
        yield
    except OSError as error:
        if is_shortage(error):
            raise
        raise AttachError(f"{what} can't be made in {folder}: {error.strerror or error}.", remedy) from error


def take_all_descriptors() -> None:
    """Raises this process's limit of descriptors to the hard limit.

    Each slot, trainer and connection takes a descriptor.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # the hard limit is above the kernel's own limit by now: leave the soft limit
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
