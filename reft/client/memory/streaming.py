"""Copies bytes past the caches, so that training keeps its own data there.

An ordinary store reads the line that it will overwrite, and leaves it in the cache: of three bytes that cross the memory bus,
one is read for nothing. A non-temporal store writes whole lines past the caches. glibc's memcpy uses such stores only for
copies larger than most of the last cache, and numpy never does. A chunk is far smaller, since it is digested in the core's
cache. So `_streaming.c` has that loop. Where it could not be compiled, numpy copies.
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
