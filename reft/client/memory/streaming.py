"""Copies bytes past the caches, so that training's data stays there.

An ordinary store first reads the line that it overwrites, and leaves the line in the cache. So one
of three bytes that cross the memory bus is read for nothing. A non-temporal store writes whole
lines past the caches. glibc's memcpy uses such stores only for copies larger than most of the
last-level cache, and numpy never does. A chunk is far smaller, because it must stay in the core's
cache until it is digested. So `_streaming.c` has a loop of such stores. Where `_streaming.c` could
not be compiled, numpy copies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reft.wire.slot_format import Bytes

Copy = Callable[[Bytes, Bytes], None]

try:
    from reft.client.memory import _streaming
except ImportError:
    copy: Copy = np.copyto
    is_past_caches = False
else:
    copy, is_past_caches = _streaming.copy, bool(_streaming.PAST_CACHES)
