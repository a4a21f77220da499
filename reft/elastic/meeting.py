"""Members of a complete round see that all live, before torch counts on them.

    rank r ─── set here/r ────► store of the round ◄─── check here/1, here/2, … ─── rank 0
    rank r ─── check here/all ► store of the round ◄─── set here/all, after them ── rank 0

A complete round may have a member that is dead. An agent died while the round was open, and one
that came later can't know of that before it has heard the silence for the whole patience. What
torch's agents do next waits for every member in one call, and the launch ends if that call fails.

1. Who waits here looks at the shared state again and again. If a member is gone there, or another
   round runs, this one is given up, and its members join the next round.
2. Only rank 0 looks for all members. So an agent asks the store a few times, however many there
   are.
3. A member that dies after `here/all` was written is missed by the rules for running workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousTimeoutError

PREFIX = "reft/here/"
FIRST_PAUSE_S = 0.01
PAUSE_MAX_S = 0.1


def meet(info: RendezvousInfo, is_intact: Callable[[], bool], end_s: float) -> bool:
    """Returns whether all members of the round came; False: the round can't be used.

    Args:
        info: of the round.
        is_intact: reads the shared state, and returns whether all members are still in the round.
        end_s: when waiting ends; monotonic.

    Raises:
        RendezvousTimeoutError: a member lives and does not come.
    """
    store, rank = info.store, info.rank
    store.set(f"{PREFIX}{rank}", "here")
    expected, pause_s = 1, FIRST_PAUSE_S
    while True:
        if rank == 0:
            expected = _next_missing(store, expected, info.world_size)
            if expected == info.world_size:
                store.set(f"{PREFIX}all", "here")
                return True
        elif store.check([f"{PREFIX}all"]):
            return True
        # Asked last: once all were there, all go on, or the others would wait for this one.
        if not is_intact():
            return False
        if time.monotonic() > end_s:
            who = f"the agent of group rank {expected}" if rank == 0 else "an agent"
            raise RendezvousTimeoutError(
                f"{who} of this round lives, but did not come within join_timeout. Does it hang? Then end it."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _next_missing(store: Store, expected: int, world: int) -> int:
    """Returns the lowest rank, from `expected` on, that did not come yet; `world`: none."""
    while expected < world and store.check([f"{PREFIX}{expected}"]):
        expected += 1
    return expected
