from collections.abc import Iterable
from typing import Any

def are_same(sources: list[Iterable[Any]], entries: list[Any], end: object, /) -> bool: ...
