"""Exchange of facts between all ranks during attach, with a deadline.

    rank 0 ─┐  {"ok": facts}                      ┌─► all facts, in the order of ranks
    rank 1 ─┼► gather, on a group of reft's own ──┤
    rank 2 ─┘  {"error": text}                    └─► AttachError on every rank, with the rank

If one rank fails, every rank raises that error. Facts are JSON in plain byte tensors; nothing is
unpickled. The group uses gloo: gloo works beside NCCL, and a wait for a missing rank can have a
deadline. After attach only the placement reviews use the group, in a thread of their own
(`reft.client.attach.reattach`).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reft.client.link.roll_call import absent_ranks
from reft.core.text import more
from reft.errors import AttachError, ReftError

# First all ranks send the length of their message and its first bytes, see `short_bytes`. Most
# messages end there, so their exchange is one all-gather, not two. With few ranks this holds for
# long messages, too.
LENGTH_BYTES, SHORT_MIN, HEADS_BYTES = 8, 56, 64 << 10
# The cost of one broadcast, in bytes that could move while it passes through thousands of ranks.
BROADCAST_BYTES = 1 << 20
# The most bytes from one rank: headers of a node's slots, or a manifest.
FACTS_MAX = 64 << 20
NAMES_SHOWN = 8  # of ranks that did not come


class RanksMissing(AttachError):
    """Some ranks did not come in time, or have ended. The group is of no more use."""


class RankGroup:
    """All ranks of one job.

    Args:
        deadline_s: the longest that one exchange may take.

    Attributes:
        group: reft's own process group; None if there is only one rank, and after `close`.

    Raises:
        AttachError: the group can't be made.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.group = None
        self._exchange = 0  # number of the newest exchange, the same on all ranks
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.world > 1:
            try:
                self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
            except RuntimeError as error:
                raise AttachError(
                    f"the ranks can't meet to attach: {error}.", "do all ranks call reft.attach?"
                ) from error

    def gather_or_raise(
        self, act: Callable[[], dict[str, Any]], extra_s: float = 0.0, deadline_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Runs `act` on every rank, and returns all results in the order of ranks.

        Args:
            act: returns this rank's facts.
            extra_s: time added to the deadline.
            deadline_s: the longest to wait; None means the group's deadline.

        Raises:
            ReftError: `act` raised this error on this rank.
            AttachError: `act` raised on another rank, or a rank missed the deadline. If `act`
                raised here, too, the message begins with that error.
        """
        own: ReftError | None = None
        try:
            message: dict[str, Any] = {"ok": act()}
        except Exception as error:
            own = error if isinstance(error, ReftError) else AttachError(f"{type(error).__name__}: {error}")
            own.__cause__ = None if own is error else error
            message = {"error": str(own)}
        try:
            replies = self._gather(json.dumps(message).encode(), (deadline_s or self._deadline_s) + extra_s)
        except RanksMissing as missing:
            if own is None:
                raise
            # The others may be late because of it: they waited for this rank inside `act`.
            text = f"{own.message.rstrip('.')}. After this error, {missing.message}"
            raise RanksMissing(text, own.hint or missing.hint) from own
        failed = {rank: reply["error"] for rank, reply in enumerate(replies) if "error" in reply}
        if own is not None:
            raise own
        if failed:
            rank, text = next(iter(failed.items()))
            raise AttachError(f"rank {rank}{more(len(failed) - 1, 'rank')} could not attach: {text}")
        return [reply["ok"] for reply in replies]

    def _gather(self, payload: bytes, deadline_s: float) -> list[dict[str, Any]]:
        if self.group is None:
            return [json.loads(payload)]
        if len(payload) > FACTS_MAX:
            payload = json.dumps({"error": f"facts of {len(payload)} bytes; the limit is {FACTS_MAX}"}).encode()
        self._exchange += 1
        try:
            messages = self._gather_bytes(payload, time.monotonic() + deadline_s)
        except RuntimeError as error:
            raise RanksMissing(
                f"{self._who_is_absent()} within {deadline_s:.0f} s: {error}.",
                "look at the ranks that did not attach; REFT_ATTACH_DEADLINE_S sets the limit",
            ) from error
        return [json.loads(message) for message in messages]

    def _gather_bytes(self, payload: bytes, end: float) -> list[bytes]:
        """Returns the messages of all ranks: first their short heads, then what is left of each."""
        short = short_bytes(self.world)
        head = len(payload).to_bytes(LENGTH_BYTES, "little") + payload[:short]
        heads = [part.numpy().tobytes() for part in self._all_gather(head, LENGTH_BYTES + short, end)]
        widths = [int.from_bytes(head[:LENGTH_BYTES], "little") for head in heads]
        rests = [max(width - short, 0) for width in widths]
        alone = broadcast_ranks(rests)
        widest = max((rest for rank, rest in enumerate(rests) if rank not in alone), default=0)
        rest_of_mine = payload[short:]
        parts = [torch.empty(0, dtype=torch.uint8, device="cpu")] * self.world
        if widest:
            parts = self._all_gather(b"" if self.rank in alone else rest_of_mine, widest, end)
        for rank in alone:
            own = rest_of_mine if rank == self.rank else bytes(rests[rank])
            parts[rank] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            work = dist.broadcast(parts[rank], rank, group=self.group, async_op=True)
            work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        return [
            head[LENGTH_BYTES:][:width] + part[:rest].numpy().tobytes()
            for head, width, part, rest in zip(heads, widths, parts, rests, strict=True)
        ]

    def _who_is_absent(self) -> str:
        """Returns the first words of an error: which ranks did not come."""
        assert self.group is not None, "an exchange without a group can't fail"
        absent = absent_ranks(self.group.get_group_store(), self._exchange, self.rank, self.world)
        if not absent:
            return f"not all {self.world} ranks came"
        rest = more(max(len(absent) - NAMES_SHOWN, 0), "rank")
        return f"rank {', '.join(map(str, absent[:NAMES_SHOWN]))}{rest} of {self.world} did not come"

    def _all_gather(self, data: bytes, width: int, end: float) -> list[torch.Tensor]:
        """Returns the bytes of all ranks, each padded to the width."""
        mine = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        parts = [torch.empty(width, dtype=torch.uint8, device="cpu") for _ in range(self.world)]
        work = dist.all_gather(parts, mine, group=self.group, async_op=True)
        work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        return parts

    def close(self) -> None:
        """Destroys the process group."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


def short_bytes(world: int) -> int:
    """Returns how many bytes of its message each rank sends at once."""
    return max(SHORT_MIN, HEADS_BYTES // world - LENGTH_BYTES)


def broadcast_ranks(widths: Sequence[int]) -> list[int]:
    """Chooses the ranks whose messages are broadcast one by one.

    An all-gather pads all messages to the length of the longest: one table of 200 kB would cost
    16,384 ranks 3 GB each. So the longest messages are broadcast.

    Args:
        widths: bytes of each rank's message.

    Returns:
        The ranks, ascending. They are chosen so that the fewest bytes move, with BROADCAST_BYTES
        added for each broadcast.
    """
    longest = sorted(range(len(widths)), key=lambda rank: -widths[rank])
    best, fewest, spoken = 0, len(widths) * max(widths, default=0), 0
    for count, rank in enumerate(longest, 1):
        spoken += widths[rank] + BROADCAST_BYTES
        rest = widths[longest[count]] if count < len(longest) else 0
        if spoken + len(widths) * rest < fewest:
            best, fewest = count, spoken + len(widths) * rest
    return sorted(longest[:best])


def text_of(data: bytes) -> str:
    """Encodes bytes as text for JSON."""
    return base64.b64encode(data).decode()


def bytes_of(text: str) -> bytes:
    """Decodes the text that `text_of` made."""
    return base64.b64decode(text)
