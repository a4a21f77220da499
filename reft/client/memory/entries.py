"""Compares the entries of many containers with the objects that were found in them.

A mark does this for every container of the state, and most of them are dicts with one to three
entries. An iterator for each of these dicts costs more than the comparison, and counts references
to every entry. `_entries.c` needs neither. Where `_entries.c` could not be compiled, iterators of
the views serve.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from operator import is_
from typing import Any

END = object()  # stands behind the entries of each container, and is an entry of none
DICTS = (dict, defaultdict)  # other dicts may have another order than the loop in C


def _view(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container


def _are_same(sources: list[Iterable[Any]], entries: list[Any], end: object, /) -> bool:
    live = chain.from_iterable(chain.from_iterable(zip(sources, repeat((end,)))))
    return all(map(is_, chain(live, (sources,)), chain(entries, (sources,))))  # both end at once, or differ


def _dict_or_view(container: Any) -> Iterable[Any]:
    return container if type(container) in DICTS else _view(container)


# source_of(container): what `are_same` reads of it. Of a mapping the values count.
# are_same(sources, entries, END): whether each source has these very objects, in their order. END
# follows the entries of each, so that an entry that goes to the next container is noticed.
source_of: Callable[[Any], Iterable[Any]] = _view
are_same: Callable[[list[Iterable[Any]], list[Any], object], bool] = _are_same
with contextlib.suppress(ImportError):
    from reft.client.memory import _entries

    source_of, are_same = _dict_or_view, _entries.are_same
