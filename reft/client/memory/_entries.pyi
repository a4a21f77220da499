from collections.abc import Iterable
from typing import Any

def are_same(sources: list[dict[Any, Any] | Iterable[Any]], entries: list[Any], /) -> bool: ...
