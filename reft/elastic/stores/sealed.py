"""Signs what torch's agents exchange in a round: the address of the workers' store, and ranks.

    torch's agent ── set(key, value) ─► value with a MAC over key and value ─► TCPStore or etcd
    torch's agent ◄─ get(key) ────────── MAC? no: an error that names the key ◄──┘

The key has the number of the round, so a value of another round is refused, too. Counters can't be
signed, since the store itself adds to them. They say how many agents have come, and nothing else.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, Store

MAC_BYTES = 32


class ForeignEntry(DistStoreError):
    """A value was not made with this agent's job key."""


class SealedStore(Store):
    """A store whose values are signed; see the module.

    Args:
        store: holds the values.
        key: of the MACs.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self._store, self._key = store, key

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long `get` and `wait` wait."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._mac(key, data) + data)

    def get(self, key: str) -> bytes:
        entry = bytes(self._store.get(key))
        mac, data = entry[:MAC_BYTES], entry[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, data)):
            raise ForeignEntry(
                f"the value of {key} in the rendezvous store was not made with this agent's job key: another agent has "
                "another key or none, or somebody else writes to the store."
            )
        return data

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def _mac(self, key: str, data: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._key, b"value %d " % len(name) + name + data, "sha256")
