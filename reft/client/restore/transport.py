"""How bytes travel between the ranks of one job while they load: messages from memory to memory, by two ranks' agreement.

    rank a: send(data, to=b, tag) ──────► rank b: receive(into, source=a, tag)        both return at once; `wait` ends them

Invariants
  1. The bytes go from the caller's memory into the receiver's: neither side keeps a message, so what is under way costs nothing.
  2. Messages of one pair of ranks with one tag arrive in the order in which they were sent.
  3. Nothing waits for ever: a peer that died, or that gives no sign within the deadline, is a RestoreError.

Gloo goes from host memory to host memory. For state on CUDA devices there is NCCL too, by choice (REFT_LOAD_TRANSPORT=nccl):
a message is put on the device, travels from device to device, and is taken off again. It was run with gloo in NCCL's place
only, in one process's memory and among processes, never on GPUs: so gloo is what attach takes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from reft.errors import ConfigError, RestoreError
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
        return _Work(work, to, self._deadline_s)

    def receive(self, into: Bytes, source: int, tag: int) -> Work:
        try:
            work = dist.irecv(torch.from_numpy(into), group=self._group, group_src=source, tag=tag)
        except RuntimeError as error:
            raise _lost(source, error) from error
        return _Work(work, source, self._deadline_s)


class DeviceTransport:
    """Messages over a group whose members reach one another's devices: NCCL.

    NCCL knows no tags. All messages of one pair of ranks, in both directions, are posted in one order by both, which is what
    `reft.client.restore.executor` does: the list of pieces is the same on all ranks.

    Args:
        group: a process group of all ranks of the job, reft's own.
        device: where messages lie while they travel; as many bytes as are under way.
        deadline_s: the longest that one message may take once it is waited for.
    """

    def __init__(self, group: Any, device: torch.device, deadline_s: float) -> None:
        self._group = group
        self._device = device
        self._deadline_s = deadline_s

    def send(self, data: Bytes, to: int, tag: int) -> Work:
        # A tensor of its own also where device and host are one: the group reads it until `wait`.
        staged = torch.from_numpy(data).to(self._device, copy=True)
        try:
            work = dist.isend(staged, group=self._group, group_dst=to)
        except RuntimeError as error:
            raise _lost(to, error) from error
        return _Work(work, to, self._deadline_s)

    def receive(self, into: Bytes, source: int, tag: int) -> Work:
        staged = torch.empty(len(into), dtype=torch.uint8, device=self._device)
        try:
            work = dist.irecv(staged, group=self._group, group_src=source)
        except RuntimeError as error:
            raise _lost(source, error) from error
        return _Work(work, source, self._deadline_s, lambda: torch.from_numpy(into).copy_(staged))


def transport_of(kind: str, group: Any, device: torch.device, deadline_s: float) -> Transport:
    """The transport of one load; all ranks call it together.

    Args:
        kind: gloo, or nccl.
        group: reft's own gloo group.
        device: of this rank's state.
        deadline_s: the longest that one message may take.

    Raises:
        ConfigError: nccl was asked for, and this rank's state lies on no CUDA device.
    """
    if kind == "gloo":
        return GlooTransport(group, deadline_s)
    if device.type != "cuda":
        raise ConfigError(f"NCCL carries CUDA state; this rank's lies on {device}.", "REFT_LOAD_TRANSPORT=gloo")
    own = dist.new_group(backend="nccl", timeout=timedelta(seconds=deadline_s))
    return DeviceTransport(own, device, deadline_s)


class _Work:
    def __init__(self, work: Any, peer: int, deadline_s: float, then: Callable[[], object] = lambda: None) -> None:
        self._work = work
        self._peer = peer
        self._deadline = timedelta(seconds=deadline_s)
        self._then = then

    def wait(self) -> None:
        try:
            is_done = self._work.wait(self._deadline)
        except RuntimeError as error:
            raise _lost(self._peer, error) from error
        if not is_done:
            raise _lost(self._peer, TimeoutError(f"no sign for {self._deadline.total_seconds():.0f} s"))
        self._then()


def _lost(peer: int, error: Exception) -> RestoreError:
    return RestoreError(
        f"rank {peer} stopped answering while state was loaded: {str(error).splitlines()[0]:.200}",
        "look at that rank's log; REFT_ATTACH_DEADLINE_S sets how long it is waited for",
    )
