"""How bytes travel between the ranks of one job while they load: messages from memory to memory, by two ranks' agreement.

    rank a: send(data, to=b, tag) ──────► rank b: receive(into, source=a, tag)        both return at once; `wait` ends them

Invariants
  1. The bytes go from the caller's memory into the receiver's: neither side keeps a message, so what is under way costs nothing.
  2. Messages of one pair of ranks with one tag arrive in the order in which they were sent.
  3. Nothing waits for ever: a peer that died, or that gives no sign within the deadline, is a RestoreError.

Gloo is what there is. It takes CUDA state through host memory (see `reft.client.load`). An all-gather by NCCL from device to
device would be another class behind this seam; it has been neither written nor run.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from reft.errors import RestoreError
from reft.wire.slot_format import Bytes


class Work(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Returns once the memory that was handed in is free, or filled.

        Raises:
            RestoreError: the peer died or gave no sign within the deadline.
        """


class Transport(Protocol):
    """The seam between loading and what moves its bytes. Ranks are those of the job."""

    def send(self, data: Bytes, to: int, tag: int) -> Work:
        """Begins to send uint8[n]; the caller leaves it alone until `wait`.

        Raises:
            RestoreError: as `Work.wait`.
        """

    def receive(self, into: Bytes, source: int, tag: int) -> Work:
        """Begins to fill uint8[n], which must be as long as what is sent; the caller leaves it alone until `wait`.

        Raises:
            RestoreError: as `Work.wait`.
        """


class GlooTransport:
    """Messages over a gloo group that reft owns.

    Args:
        group: a gloo process group of all ranks of the job.
        deadline_s: the longest that one message may take once it is waited for.
    """

    def __init__(self, group: Any, deadline_s: float) -> None:
        self._group = group
        self._deadline_s = deadline_s

    def send(self, data: Bytes, to: int, tag: int) -> Work:
        try:
            work = dist.isend(torch.from_numpy(data), group=self._group, group_dst=to, tag=tag)
        except RuntimeError as error:
            raise _lost(to, error) from error
        return _GlooWork(work, to, self._deadline_s)

    def receive(self, into: Bytes, source: int, tag: int) -> Work:
        try:
            work = dist.irecv(torch.from_numpy(into), group=self._group, group_src=source, tag=tag)
        except RuntimeError as error:
            raise _lost(source, error) from error
        return _GlooWork(work, source, self._deadline_s)


class _GlooWork:
    def __init__(self, work: Any, peer: int, deadline_s: float) -> None:
        self._work = work
        self._peer = peer
        self._deadline = timedelta(seconds=deadline_s)

    def wait(self) -> None:
        try:
            self._work.wait(self._deadline)
        except RuntimeError as error:
            raise _lost(self._peer, error) from error


def _lost(peer: int, error: Exception) -> RestoreError:
    return RestoreError(
        f"rank {peer} stopped answering while state was loaded: {str(error).splitlines()[0]:.200}",
        "look at that rank's log; REFT_ATTACH_DEADLINE_S sets how long it is waited for",
    )
