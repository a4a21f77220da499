"""A line for the person who started the job: torchrun shows no log of others."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line on stderr."""
    print(f"[reft] {text}", file=sys.stderr, flush=True)
