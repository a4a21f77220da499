"""What the system refuses for now, mostly because no descriptor is free: it says nothing of what was asked for.

A process that could not be looked at is not dead for that, and a file that could not be opened is not damaged.
"""

from __future__ import annotations

import contextlib
import errno
import resource

from reft.errors import AttachError

_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_shortage(error: Exception) -> bool:
    """Whether the same may succeed later."""
    return isinstance(error, OSError) and error.errno in _SHORT


def told(error: OSError) -> AttachError:
    """What a caller is told for whom the system did not do what the daemon asked."""
    return AttachError(
        f"the daemon can't do this now: {error}.", "see the limits of reft-daemon (ulimit -n), or try again"
    )


def take_all_descriptors() -> None:
    """Raises this process's limit to what it may have: each slot, trainer and connection takes a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # it is above what the kernel grants by now: it stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
