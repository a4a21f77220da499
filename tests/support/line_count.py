"""Counts work in lines of Python."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


def lines_run(work: Any) -> int:
    """Counts the Python lines that some work runs; a clock would depend on the machine."""
    count = 0

    def each(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return each

    before = sys.gettrace()
    sys.settrace(each)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
