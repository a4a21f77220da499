"""`reft-cli persist`: asks for a checkpoint, and follows it until it is complete or given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from reft.cli.ask import ask
from reft.core.budget import format_bytes
from reft.errors import AttachError, split_remedy
from reft.wire.v1 import daemon_pb2 as pb

POLL_S: Final = 0.5
CALL_S: Final = 15.0  # a daemon passes the question on to the coordinator's


def persist_job(address: str, job: str, show: Callable[[pb.StorageStatus], None]) -> pb.PersistJobReply:
    """Returns the last reply: a checkpoint of `step`, or of a newer one, is complete.

    Args:
        address: of a daemon of the job.
        job: name of the job.
        show: gets the state of the storage, now and then.

    Raises:
        ReftError: no daemon answers, the job is not persisted, or the checkpoint was given up.
    """
    reply = ask(address, "PersistJob", pb.PersistJobRequest(job=job), CALL_S)
    while not reply.done:
        if reply.trouble:
            trouble, remedy = split_remedy(reply.trouble)
            raise AttachError(trouble, remedy or "look at the storage, then run this command again")
        show(reply.storage)
        time.sleep(POLL_S)
        request = pb.PersistJobRequest(job=job, step=reply.step, epoch=reply.epoch)
        reply = ask(address, "PersistJob", request, CALL_S)
    return reply


def progress_text(storage: pb.StorageStatus) -> str:
    """Returns one line on the checkpoint that is being written."""
    if storage.step < 0:
        return "waiting for the storage"
    written, total = format_bytes(storage.written_bytes), format_bytes(storage.total_bytes)
    return f"step {storage.step}: {written} of {total}"
