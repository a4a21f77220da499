"""Signs what agents write into the rendezvous store, and refuses what others have written there.

    SharedState ─► JSON, with the next number ─► MAC, if there is a job key ─► entry in the store
    entry ─► MAC? newer than the last one? ─► JSON ─► SharedState
                └► no: refused, and said once

The MAC covers the state's launch, its round and its number. Its key follows from the job key and
from the id under which the job's agents meet (`reft.wire.job_key`). So an entry of another job, or
of a writer without the key, is foreign.

1. Agents write by compare-and-set, and give each entry the number after the last one that they
   accepted. So an entry with a lower number, or with the same number and other bytes, is a replay.
2. The last accepted entry is kept, so that an agent can write the state again after a stranger has
   written over it. If two agents do so, the greater number wins.
3. An agent that has accepted nothing yet can't know whether an entry is the newest.
4. Without a key nothing is signed, and every state that is well formed is accepted. A state that
   was deleted is written again with a key and without one.
"""

from __future__ import annotations

import hmac

from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from reft.console import say
from reft.elastic.shared_state import SharedState, decode, encode

MAGIC = b"reft-mac-1"
REMEDY = "all agents of a job need the same REFT_JOB_KEY_FILE"


class RefusedEntry(RendezvousStateError):
    """The store holds a foreign entry, an old one, or none any more."""


class EntrySeal:
    """Signs and judges the entries of one agent's job; see the module.

    Args:
        name: the id under which the job's agents meet.
        key: of the MACs; None: there is no job key.
    """

    def __init__(self, name: str, key: bytes | None) -> None:
        self._name, self._key = name, key
        self._number, self._accepted = 0, b""  # the newest entry that was accepted
        self._said: set[str] = set()

    @property
    def is_keyed(self) -> bool:
        """Whether entries are signed."""
        return self._key is not None

    def entry(self, state: SharedState) -> bytes:
        """Returns the entry for a state, which gets the next number."""
        state.number = self._number + 1
        body = encode(state)
        return body if self._key is None else b"%s %s %s" % (MAGIC, self._mac(body), body)

    def state(self, entry: bytes | None) -> SharedState:
        """Returns the state of an entry; None: the store holds no entry.

        Raises:
            RefusedEntry: the entry is foreign, or older than the last accepted one.
            RendezvousStateError: the entry holds no state.
        """
        if entry is None:
            if self._accepted:
                raise self._refusal("was deleted from the store")
            return SharedState()
        body = self._checked_body(entry)
        state = decode(body)
        if self._key is not None and state.number <= self._number and body != self._accepted:
            raise self._refusal("was replaced by an older one: somebody repeats what agents wrote earlier")
        self._number, self._accepted = state.number, body
        return state

    def last_state(self) -> SharedState | None:
        """Returns the state that was accepted last; None if there was none."""
        return decode(self._accepted) if self._accepted else None

    def say_once(self, error: RefusedEntry) -> None:
        """Prints a refusal, each kind once."""
        if str(error) not in self._said:
            self._said.add(str(error))
            say(f"{error} It is refused, and this agent writes the state again.")

    def _checked_body(self, entry: bytes) -> bytes:
        """Returns the JSON of an entry, which may still be too large or too deep.

        Raises:
            RefusedEntry: the MAC is wrong or missing, or there is one that can't be checked.
        """
        is_signed = entry.startswith(MAGIC)
        if self._key is None:
            if is_signed:
                raise RefusedEntry(
                    f"the rendezvous entry of job {self._name} was made with a job key, and this agent has none: {REMEDY}."
                )
            return entry
        mac, _, body = entry[len(MAGIC) + 1 :].partition(b" ")
        if not is_signed or not hmac.compare_digest(mac, self._mac(body)):
            raise self._refusal(
                f"was not made with this agent's job key: another agent has another key or none ({REMEDY}), or somebody else "
                "writes to the store"
            )
        return body

    def _refusal(self, why: str) -> RefusedEntry:
        return RefusedEntry(f"the rendezvous entry of job {self._name} {why}.")

    def _mac(self, body: bytes) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, body, "sha256").hex().encode()
