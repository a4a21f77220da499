"""Reads the headers of a job's slots. A damaged slot counts as lost, and is logged."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.errors import FormatError
from reft.wire import messages
from reft.wire.slot_format import Header
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.arena import SlotFile

log = logging.getLogger("reft.daemon")


def header_of(job: str, slot: SlotFile) -> Header | None:
    """Returns a slot's header; None if the slot is damaged."""
    try:
        slot.check_size()
        header = slot.map.reread()
    except FormatError as error:
        log.error("job=%s slot=%s is damaged: %s", job, slot.name, error)
        return None
    # The scrub has logged this damage. A slot that is written again is sound.
    is_damaged = slot.damaged is not None and header.state is SlotState.SEALED and header.version == slot.damaged
    return None if is_damaged else header


def sealed_versions(job: str, slots: Iterable[SlotFile]) -> list[Version]:
    """Returns the versions that the slots hold SEALED, oldest first."""
    headers = [header_of(job, slot) for slot in slots]
    versions = [h.version for h in headers if h and h.state is SlotState.SEALED and h.version is not None]
    return sorted(versions, key=lambda version: version.order)


def header_messages(job: str, slots: Iterable[SlotFile]) -> list[pb.SlotHeader]:
    """Returns the headers of all undamaged slots, as messages for an inventory."""
    slot_headers = []
    for slot in slots:
        header = header_of(job, slot)
        if header is None:
            continue
        message = pb.SlotHeader(
            rank=header.rank,
            slot=slot.name,
            state=pb.SlotState.Name(header.state),
            layout=header.layout,
            data_bytes=header.data_bytes,
            parity=slot.is_parity,
            stored=slot.is_stored,
        )
        if header.version:
            message.version.CopyFrom(messages.version_to(header.version))
        slot_headers.append(message)
    return slot_headers
