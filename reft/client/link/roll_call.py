"""Finds the ranks that did not come to an exchange, after the exchange has failed.

    exchange fails on the ranks that came ─► each writes its rank into the store of the group
                                          ─► each reads who wrote; the others did not come

An exchange that succeeds costs nothing. As soon as one rank gives up, gloo ends the exchange of all
ranks that came. So they write within moments.
"""

from __future__ import annotations

import threading
import time

from torch.distributed import Store

ANSWER_S = 2.0
WORLD_MAX = 1024  # each rank asks the store for each rank


def absent_ranks(store: Store, exchange: int, rank: int, world: int, deadline_s: float = ANSWER_S) -> list[int]:
    """Returns the ranks that did not come, ascending; none if that can't be found.

    Args:
        store: of the process group.
        exchange: number of the exchange that failed; the same on all ranks.
        rank: this rank, which came.
        world: number of ranks.
        deadline_s: how long the other ranks may take to write.
    """
    absent = list(range(world)) if world <= WORLD_MAX else []

    def call() -> None:
        nonlocal absent
        try:
            store.set(f"reft/came/{exchange}/{rank}", "")
            end, pause = time.monotonic() + deadline_s, threading.Event()
            while absent and time.monotonic() < end:
                absent = [each for each in absent if not store.check([f"reft/came/{exchange}/{each}"])]
                pause.wait(0.05)
        except RuntimeError:  # the store has ended with its rank, and others could not write any more
            absent = []

    # The store may lie in the process of a rank that stands still: then a call takes half an hour.
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(deadline_s + 1.0)
    return absent if not thread.is_alive() and rank not in absent else []
