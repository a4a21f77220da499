"""Messages on stderr for the user that started the job.

torchrun shows no other log. If the script configures no logging, Python prints warnings without a
name. Then nobody could tell that "rank 0 skips snapshots" comes from reft, so reft adds the name.
"""

from __future__ import annotations

import contextlib
import logging
import sys

from reft.log_lines import escape


def say(text: str) -> None:
    """Writes lines to stderr, each with the name of reft before it.

    Names of nodes and reasons of errors come from other nodes: characters of control are escaped.
    Where stderr takes nothing, for example on a full disk, the lines are lost.
    """
    # A line that can't be shown must not end the launch or the trainer that says it.
    with contextlib.suppress(OSError, ValueError):
        print("\n".join(f"[reft] {escape(line)}" for line in text.split("\n")), file=sys.stderr, flush=True)


class _Bare(logging.Handler):
    """Prints warnings of reft while no other handler does."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or logging.getLogger("reft").handlers != [self]:
            return
        try:
            say(self.format(record))
        except Exception:
            self.handleError(record)


def name_warnings() -> None:
    """Puts "[reft]" before the warnings of reft, if the script configures no logging."""
    log = logging.getLogger("reft")
    if not log.handlers:
        log.addHandler(_Bare(logging.WARNING))
