"""The rendezvous handler: torch's own dynamic rendezvous over a TCPStore, with a fault of its restarts worked around.

torch 2.13 keeps one store and one address for the workers over all rounds (`_shared_tcp_store_server` and
`_bootstrap_store_info`), while workers add no prefix of their own per attempt. After a restart they read what the round
before wrote: stale gloo addresses, or the address of a node that is gone. Most restarts then fail or hang. Both are
forgotten here before each round. Signals, sticky ranks and the detection of lost nodes are not in this version.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

CACHED = ("_bootstrap_store_info", "_shared_tcp_store_server")


class ReftRendezvousHandler(RendezvousHandler):
    """torch's dynamic rendezvous, made fit for restarts.

    Args:
        inner: torch's handler.
    """

    def __init__(self, inner: DynamicRendezvousHandler) -> None:
        self._inner = inner

    @property
    def use_agent_store(self) -> bool:
        return bool(self._inner.use_agent_store)

    def get_backend(self) -> str:
        """The name that --rdzv-backend must have."""
        return "reft"

    def next_rendezvous(self) -> RendezvousInfo:
        for name in CACHED:
            # A torch that no longer has these attributes no longer has the fault.
            if hasattr(self._inner, name):
                setattr(self._inner, name, None)
        return self._inner.next_rendezvous()

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        return bool(self._inner.shutdown())


def create(parameters: RendezvousParameters) -> Any:
    """The handler for one agent; takes the same --rdzv-conf keys as the c10d backend."""
    backend, store = create_backend(parameters)
    return ReftRendezvousHandler(create_handler(store, backend, parameters))
