"""Asks the store in a thread while workers run. The agent can then react to signals meanwhile.

    agent's loop, ten times a second ─► look ─► thread ─► torch's question ─► store
            ▲  signals, as flags         │ the answer; None until there is one
            └────────────────────────────┘

A store whose host is cut off blocks a call for minutes. Signals come from this node's own daemon,
and the agent reacts to them at once.

1. At most one question is pending. The next `look` waits for the same question.
2. torch's question holds the lock of torch's keep-alives. Calls that do not take that lock must
   wait until `settle` returns.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

PATIENCE_S = 0.2


class StorePoller:
    """Runs one question at a time in a thread; see the module.

    Args:
        ask: the question. It may block for any time, and may raise.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self._orders: queue.SimpleQueue[Future[int] | None] = queue.SimpleQueue()
        self._pending: Future[int] | None = None
        self._thread = threading.Thread(
            target=self._answer, daemon=True
        )  # a daemon thread: the agent can exit while the store blocks

    def look(self) -> int | None:
        """Returns the answer; None if there is none yet.

        Raises:
            Exception: raised by the question.
        """
        if not self._thread.is_alive():
            self._thread.start()
        if self._pending is None:
            self._pending = Future()
            self._orders.put(self._pending)
        if not self._is_answered(PATIENCE_S):
            return None
        answered, self._pending = self._pending, None
        return answered.result()

    def settle(self, patience_s: float | None = None) -> bool:
        """Waits for the end of a pending question and drops its answer.

        The result is False if that takes longer.

        Args:
            patience_s: the longest wait; None: no limit.
        """
        if self._pending is not None and not self._is_answered(patience_s):
            return False
        self._pending = None
        return True

    def close(self) -> None:
        """Ends the thread after the pending question."""
        self._orders.put(None)

    def _is_answered(self, patience_s: float | None) -> bool:
        assert self._pending is not None
        return bool(wait([self._pending], patience_s).done)

    def _answer(self) -> None:
        while (question := self._orders.get()) is not None:
            try:
                question.set_result(self._ask())
            except BaseException as error:
                question.set_exception(error)
