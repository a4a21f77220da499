"""Sends bytes between the ranks of one job during a load, from memory to memory.

    rank a: send(data, to=b, tag) ──────► rank b: receive(into, source=a, tag)
    both return at once; `wait` completes them

Invariants
  1. Bytes go from the sender's memory into the receiver's. Neither side keeps a copy, so messages
     under way take no memory.
  2. Messages of one pair of ranks with one tag arrive in the order in which they were sent.
  3. No call waits for ever: a peer that died, or is silent past the deadline, is a RestoreError.

Gloo sends from host memory to host memory. For state on CUDA devices, NCCL can be chosen
(REFT_LOAD_TRANSPORT=nccl): a message is copied to the device, sent from device to device, and
copied back. This was only tested with gloo instead of NCCL, in one process and between processes,
never on GPUs. So attach uses gloo by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from reft.errors import ConfigError, RestoreError
from reft.wire.slot_format import Bytes


class Work(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Returns after the passed memory may be reused, or is filled.

        Raises:
            RestoreError: the peer died, or was silent past the deadline.
        """


class Transport(Protocol):
    """The interface between loading and the transport of bytes. Ranks are those of the job.

    Attributes:
        name: what carries the messages, for people.
    """

    name: str

    def send(self, data: Bytes, to: int, tag: int) -> Work:
        """Begins to send uint8[n]; the caller must not change the memory until `wait`.

        Raises:
            RestoreError: see `Work.wait`.
        """

    def receive(self, into: Bytes, source: int, tag: int) -> Work:
        """Begins to fill uint8[n]; the caller must not use the memory until `wait`.

        The length must be that of the sent message.

        Raises:
            RestoreError: see `Work.wait`.
        """

    def close(self) -> None:
        """Frees what was made for the load. All ranks call it after they have ended the load."""


class GroupTransport:
    """Messages over a process group that reft owns, with all ranks of the job.

    NCCL has no tags. So both ranks of a pair must post all their messages, in both directions, in
    the same order. The order of `reft.core.recovery.plan` is the same on all ranks.

    Args:
        group: gloo; or a group that sends between devices.
        deadline_s: the longest wait for one message.
        device: None: the group sends host memory. Else this device holds messages while they
            travel; that takes as many bytes as are under way.
    """

    def __init__(self, group: Any, deadline_s: float, device: torch.device | None = None) -> None:
        self.name = "gloo" if device is None else "nccl"
        self._group, self._deadline_s, self._device = group, deadline_s, device

    def send(self, data: Bytes, to: int, tag: int) -> Work:
        message = torch.from_numpy(data)
        if self._device is not None:
            # Copy even if the device is the host: the group reads the tensor until `wait`.
            message, tag = message.to(self._device, copy=True), 0
        return self._begin(partial(dist.isend, message, group_dst=to, tag=tag), to)

    def receive(self, into: Bytes, source: int, tag: int) -> Work:
        target = torch.from_numpy(into)
        if self._device is None:
            return self._begin(partial(dist.irecv, target, group_src=source, tag=tag), source)
        staged = torch.empty(len(into), dtype=torch.uint8, device=self._device)
        return self._begin(partial(dist.irecv, staged, group_src=source), source, lambda: target.copy_(staged))

    def close(self) -> None:
        """Destroys the group if it was made for this load, which all ranks have ended."""
        if self._device is not None:
            dist.destroy_process_group(self._group)

    def _begin(self, post: Callable[..., Any], peer: int, then: Callable[[], object] = lambda: None) -> Work:
        try:
            return _Work(post(group=self._group), peer, timedelta(seconds=self._deadline_s), then)
        except RuntimeError as error:
            raise _lost(peer, error) from error


def transport_of(kind: str, group: Any, device: torch.device, deadline_s: float) -> Transport:
    """Returns the transport of one load; all ranks call it together.

    Args:
        kind: gloo or nccl.
        group: reft's own gloo group.
        device: the device of this rank's state.
        deadline_s: the longest wait for one message.

    Raises:
        ConfigError: nccl was requested, but this rank's state lies on no CUDA device.
    """
    if kind == "gloo":
        return GroupTransport(group, deadline_s)
    if device.type != "cuda":
        raise ConfigError(
            f"NCCL sends state on CUDA devices; this rank's state lies on {device}.", "REFT_LOAD_TRANSPORT=gloo"
        )
    nccl_group = dist.new_group(backend="nccl", timeout=timedelta(seconds=deadline_s))
    return GroupTransport(nccl_group, deadline_s, device)


@dataclass(frozen=True)
class _Work:
    """A message of a process group; `then` is called once it has arrived."""

    work: Any
    peer: int
    deadline: timedelta
    then: Callable[[], object]

    def wait(self) -> None:
        try:
            is_done = self.work.wait(self.deadline)
        except RuntimeError as error:
            raise _lost(self.peer, error) from error
        if not is_done:
            raise _lost(self.peer, TimeoutError(f"no message for {self.deadline.total_seconds():.0f} s"))
        self.then()


def _lost(peer: int, error: Exception) -> RestoreError:
    return RestoreError(
        f"rank {peer} stopped answering during the load: {str(error).splitlines()[0]:.200}",
        "look at that rank's log; REFT_ATTACH_DEADLINE_S sets how long reft waits for a rank",
    )
