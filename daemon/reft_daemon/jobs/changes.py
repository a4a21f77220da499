"""The queue of changes: services put changes of jobs, one consumer takes and tells them.

    who puts                             kind      who is told: senders  monitor  reports  turns
    rounds      a rank's report          RANKS                     x        x
    trainers    a trainer has ended      RANKS                     x        x
    rounds      the round has news       OUTCOME                   x        x        x       x
    scrub       a slot has changed       OUTCOME                   x        x        x       x
    epochs      a decision, or adoption  EPOCH                                       x       x
    monitor     the agent has ended      AGENT                              x

    services ── put ──► pending: job → kinds ── take ──► Registry.tell_changes
                                                   ├──► RoundReplicator: its senders
                                                   ├──► TurnService: turns of the exchange
                                                   ├──► HeartbeatService: judges the job's nodes
                                                   └──► JobRecord.news: waiting reports

Senders carry the round and capsules to other daemons. Services and the consumer run in one event
loop. No service knows who is told, and no service is called back: a put returns at once.

Invariants
  1. A change carries no state. The consumer reads the job's present state, so it always tells the
     newest, and telling twice does no harm.
  2. There is at most one pending entry for each job. A further put adds its kind to the entry, and
     the entry keeps its place. So the queue is bounded by the number of jobs.
  3. Jobs are told in the order of their first pending put. So no job waits behind another's storm.
  4. An entry leaves the queue before it is told. So a put during the telling makes a new entry.
  5. Telling puts nothing. So the queue becomes empty.

A *late* or *repeated* change tells the present state, which may be known already: each receiver
compares first. A change can't be *lost* while the daemon lives. If one were, the next change of the
job would tell the same; the monitor looks every 0.1 s anyway; and a waiting report is answered at
its deadline. The change of a job that was purged meanwhile finds no job, and tells nobody.

After `close`, `take` returns None at once: all receivers are being closed, too.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import NamedTuple


class ChangeKind(Enum):
    """What has changed in a job, see the module."""

    RANKS = auto()
    OUTCOME = auto()
    EPOCH = auto()
    AGENT = auto()


# Sets of plain members: each operation of enum.Flag takes some 2 µs, and each report puts a change.
TOLD_TO_SENDERS = frozenset({ChangeKind.RANKS, ChangeKind.OUTCOME})
TOLD_TO_MONITOR = frozenset({ChangeKind.RANKS, ChangeKind.OUTCOME, ChangeKind.AGENT})
TOLD_TO_TURNS = TOLD_TO_REPORTS = frozenset({ChangeKind.OUTCOME, ChangeKind.EPOCH})


class JobChange(NamedTuple):
    """The changes of one job since it was last told.

    Attributes:
        job: name of the job; for an agent's end the name that agents use.
        kinds: all that has changed.
    """

    job: str
    kinds: set[ChangeKind]


class ChangeQueue:
    """The changes that are still to be told; see the module."""

    def __init__(self) -> None:
        self._pending: dict[str, set[ChangeKind]] = {}
        self._has_arrived = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, job: str, kind: ChangeKind) -> None:
        """Notes a change of a job, and wakes the consumer."""
        self._pending.setdefault(job, set()).add(kind)
        self._has_arrived.set()

    async def take(self) -> JobChange | None:
        """Returns the oldest entry, and waits for one; None once the queue is closed."""
        while not self._pending and not self._is_closed:
            self._has_arrived.clear()
            await self._has_arrived.wait()
        if self._is_closed:
            return None
        job = next(iter(self._pending))
        return JobChange(job, self._pending.pop(job))

    def close(self) -> None:
        """Ends the consumer. Pending changes are dropped."""
        self._is_closed = True
        self._has_arrived.set()
