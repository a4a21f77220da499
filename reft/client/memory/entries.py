"""Compares the entries of many containers with the objects that were found in them.

A mark does this for every container of the state, and most of them are dicts with one to three
entries. An iterator for each of these dicts costs more than the comparison, and counts references
to every entry. `_entries.c` needs neither. Where `_entries.c` could not be compiled, iterators of
the views serve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

END = object()  # equals no entry of any container
DICTS = (dict, defaultdict)  # other dicts may have another order than the loop in C


def _view(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container


try:
    from reft.client.memory import _entries
except ImportError:
    source_of = _view

    def are_same(sources: list[Iterable[Any]], entries: list[Any]) -> bool:
        """Returns whether the entries of all sources, in their order, are these very objects."""
        # END closes both lists: an added or removed entry shifts all entries after it.
        return all(map(is_, chain(chain.from_iterable(sources), (END,)), chain(entries, (END,))))

else:
    are_same = _entries.are_same

    def source_of(container: Any) -> Iterable[Any]:
        """Returns what `are_same` reads of a container, of which the values of a mapping count."""
        return container if type(container) in DICTS else _view(container)
