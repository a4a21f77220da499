"""Reads sealed slots in the background, and finds bytes that have changed in memory.

    a turn: the next chunks of one slot ─► digests ─► as at the seal?  yes: the next turn, paced
                                                                       no: the slot counts as lost

A slot may lie for a day until somebody starts its job again; a flipped bit would be found only by
that restart. A damaged slot counts as lost from the moment of the scrub: surveys leave it out, so
`status` says what is survivable without it, and an attach decodes it from other nodes. Once no
trainer of the job lives here, `reft_daemon/rebuild/repair.py` makes the slot again. Until then its
bytes stay, or until the slot is written again or freed. Parity slots are read like all others.

The scrub reads only slots of jobs that have sealed nothing for a minute, at a bounded rate. What a
turn reads is decided by functions of plain values, at the end of this module.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.errors import FormatError
from reft_daemon.arena.arena import SlotFile
from reft_daemon.arena.headers import header_of
from reft_daemon.jobs.changes import ChangeKind
from reft_daemon.jobs.job_record import JobRecord

log = logging.getLogger("reft.daemon")
TURN_BYTES = 16 << 20  # read in one turn
BYTES_PER_S = 64 << 20  # at most so much is read: below 1 % of a core and of the memory's speed
IDLE_S = 60.0  # a job is idle if no rank here has sealed a step for so long
AGAIN_S = 6 * 3600.0  # between two passes over one version of a slot
NOTHING_S = 5.0  # until the next look, if there is nothing to read

SlotKey = tuple[str, str]  # job, name of the slot


class SlotProgress(NamedTuple):
    """How far the scrub has come in one slot.

    Attributes:
        version: the version that was read.
        chunks: its first chunks, which were read in this pass.
        ended_s: when the last whole pass over this version ended; None if none did.
    """

    version: Version
    chunks: int
    ended_s: float | None


@dataclass
class ScrubCounts:
    """What the scrub has read and found since this daemon started.

    Attributes:
        read_bytes: bytes whose digests were compared.
        damaged: slots whose bytes had changed.
        repaired: damaged slots that were made again from other nodes.
    """

    read_bytes: int = 0
    damaged: int = 0
    repaired: int = 0
    progress: dict[SlotKey, SlotProgress] = field(default_factory=dict)


async def scrub_for_ever(jobs: Mapping[str, JobRecord], counts: ScrubCounts) -> None:
    """Takes turns until this daemon ends."""
    while True:
        began_s = time.monotonic()
        nbytes = 0
        try:
            nbytes = await take_turn(jobs, counts, began_s)
        except Exception:  # a bug that one slot meets, or no thread, must not end the scrub of the others
            log.exception("a turn of the scrub failed")
        await asyncio.sleep(pause_s(nbytes, time.monotonic() - began_s))


async def take_turn(jobs: Mapping[str, JobRecord], counts: ScrubCounts, now_s: float) -> int:
    """Reads the next chunks of one slot; returns how many bytes were read."""
    slots = {
        (job.id, slot.name): (slot, header.version)
        for job in jobs.values()
        if is_idle(now_s - max([job.since_s, *job.sealed_s.values()]))
        for slot in job.slots.readable.values()
        if (header := header_of(job.id, slot)) and header.state is SlotState.SEALED and header.version is not None
    }
    counts.progress = {key: progress for key, progress in counts.progress.items() if key in slots}
    key = next_slot({key: version for key, (_, version) in slots.items()}, counts.progress, now_s)
    if key is None:
        return 0
    slot, version = slots[key]
    begun = counts.progress.get(key)
    first = begun.chunks if begun is not None and begun.version == version else 0
    try:
        end, nbytes, bad = await asyncio.to_thread(_read_chunks, slot, first)
        is_whole = end >= slot.map.chunks
    except FormatError as error:
        end, nbytes, bad, is_whole = first, 0, [str(error)], True
    counts.read_bytes += nbytes
    counts.progress[key] = SlotProgress(version, 0 if is_whole else end, time.monotonic() if is_whole else None)
    # A trainer may have begun to write the slot meanwhile, or this daemon may have freed it.
    header = header_of(key[0], slot) if bad and slot.descriptor >= 0 else None
    if header is not None and header.state is SlotState.SEALED and header.version == version:
        slot.damaged = version
        counts.damaged += 1
        jobs[key[0]].changes.put(key[0], ChangeKind.OUTCOME)  # it may be part of what is protected
        log.error(
            "job=%s slot=%s, rank %d, %s has changed in memory: %s. It counts as lost. This daemon makes it again "
            "once no trainer lives here, or %s does, if other nodes hold enough.",
            key[0],
            slot.name,
            slot.rank,
            version,
            ", ".join(bad),
            "the next turn" if slot.is_parity else "an attach",
        )
    return nbytes


def _read_chunks(slot: SlotFile, first: int) -> tuple[int, int, Sequence[str]]:
    """Returns the end of a turn's chunks, their bytes, and the damaged ones.

    Raises:
        FormatError: the leaf table or the capsule is damaged, the slot was freed or cut, or a page
            of its memory has failed.
    """
    if not first and not slot.is_parity:  # parity has no leaves and no capsule
        slot.map.table()
        slot.map.capsule()
    size, digests = slot.map.header.geometry.chunk_bytes, slot.map.digests
    end = min(slot.map.chunks, first + max(TURN_BYTES // size, 1))
    found = enumerate(slot.map.digests_of(first, end), first)
    return end, (end - first) * size, [f"chunk {i}" for i, digest in found if digest != int(digests[i])]


# Decisions


def is_idle(since_seal_s: float) -> bool:
    """Whether the slots of a job may be read now. Those of a busy job are soon written again.

    Args:
        since_seal_s: time since a rank here sealed a step, or since the decision in force.
    """
    return since_seal_s > IDLE_S


def next_slot(
    versions: Mapping[SlotKey, Version], progress: Mapping[SlotKey, SlotProgress], now_s: float
) -> SlotKey | None:
    """Returns the slot to read next: one that was begun, else one never read, else the oldest pass.

    Args:
        versions: the sealed slots that may be read, and what they hold.
        progress: how far each slot was read.
        now_s: the present time.
    """

    def order(key: SlotKey) -> tuple[int, float]:
        known = progress.get(key)
        if known is None or known.version != versions[key]:
            return 1, 0.0
        return (0, 0.0) if known.ended_s is None else (2, known.ended_s)

    def is_due(key: SlotKey) -> bool:
        group, ended_s = order(key)
        return group < 2 or now_s - ended_s >= AGAIN_S

    return min(filter(is_due, versions), key=order, default=None)


def pause_s(nbytes: int, took_s: float) -> float:
    """Returns the seconds to wait after a turn: the rate is limited.

    Args:
        nbytes: what the turn has read.
        took_s: how long the turn took.
    """
    return max(nbytes / BYTES_PER_S - took_s, took_s) if nbytes else NOTHING_S
