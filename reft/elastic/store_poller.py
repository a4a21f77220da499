"""What the store says while workers run, asked for in a thread: an agent that stands in a call hears nothing else meanwhile.

    agent's loop, ten times a second ─► look ─► thread ─► torch's question ─► store
            ▲  signals, by flags         │ the answer; None as long as there is none
            └────────────────────────────┘

A store whose host is cut off keeps a call for minutes. Signals come from the node's own daemon, and are acted on at once.

1. One question is under way at most; the next `look` goes on waiting for it.
2. torch's question holds the lock of its keep-alives. What does not take that lock comes after `settle`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

PATIENCE_S = 0.2


class StorePoller:
    """See the module.

    Args:
        ask: the question; may take as long as it likes, and raise.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._orders: queue.SimpleQueue[Future[int] | None] = queue.SimpleQueue()
        self._asked: Future[int] | None = None
        self._thread = threading.Thread(target=self._answer, daemon=True)  # the end of the agent waits for no store

    def look(self) -> int | None:
        """The answer; None if there is none yet.

        Raises:
            Exception: what the question raised.
        """
        if not self._thread.is_alive():
            self._thread.start()
        if self._asked is None:
            self._asked = Future()
            self._orders.put(self._asked)
        if not self._is_answered(PATIENCE_S):
            return None
        asked, self._asked = self._asked, None
        return asked.result()

    def settle(self, patience_s: float | None = None) -> bool:
        """Waits for the end of a question that is under way, and forgets it; False if that takes longer."""
        if self._asked is not None and not self._is_answered(patience_s):
            return False
        self._asked = None
        return True

    def close(self) -> None:
        """Ends the thread, after the question that is under way."""
        self._orders.put(None)

    def _is_answered(self, patience_s: float | None) -> bool:
        assert self._asked is not None
        return bool(wait([self._asked], patience_s).done)

    def _answer(self) -> None:
        while (asked := self._orders.get()) is not None:
            try:
                asked.set_result(self._ask())
            except BaseException as error:
                asked.set_exception(error)
