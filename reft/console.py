"""What reft writes on stderr for the person who started the job: torchrun shows no log of others.

Where a script configures no logging, Python prints warnings bare, and nobody could tell whose "rank 0 skips snapshots" is.
"""

from __future__ import annotations

import logging
import sys


def say(text: str) -> None:
    """One line."""
    print(f"[reft] {text}", file=sys.stderr, flush=True)


class _Bare(logging.Handler):
    """Says warnings as long as nobody else does."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or logging.getLogger("reft").handlers != [self]:
            return
        try:
            say(self.format(record))
        except Exception:
            self.handleError(record)


def name_warnings() -> None:
    """Has warnings of reft carry its name where the script configures no logging."""
    log = logging.getLogger("reft")
    if not log.handlers:
        log.addHandler(_Bare(logging.WARNING))
