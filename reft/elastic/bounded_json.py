"""Reads JSON that others may have written: size and depth are bounded before it is parsed."""

from __future__ import annotations

import json
import re
from typing import Any

# A string, with its escapes. Brackets inside strings open nothing.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def parse(data: bytes, bytes_max: int, depth_max: int) -> Any:
    """Returns the value that a JSON text stands for.

    Args:
        data: the text.
        bytes_max: the most bytes that the text may have.
        depth_max: how many arrays and objects may lie in one another.

    Raises:
        ValueError: the text is too large or too deep, or no JSON.
    """
    if len(data) > bytes_max:
        raise ValueError(f"{len(data)} bytes; {bytes_max} are allowed")
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        if depth > depth_max:
            raise ValueError(f"more than {depth_max} arrays and objects in one another")
    return json.loads(data, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
