"""Exchanges of a rank group: every rank gets all messages, and short ones cost one all-gather."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reft.client.link import rank_group as module
from reft.client.link.rank_group import BROADCAST_BYTES, SHORT_MIN, RankGroup, RanksMissing, short_bytes
from reft.errors import RestoreError

DEADLINE_S = 60.0
OVERHEAD = len('{"ok": {"text": ""}}')


class ThreadRanks:
    """Ranks that are threads of this process, with the collectives that a rank group calls."""

    def __init__(self, world: int) -> None:
        self.names: list[str] = []  # of the collectives, as rank 0 calls them
        self._tensors: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=DEADLINE_S)

    def all_gather(self, parts: list[torch.Tensor], mine: torch.Tensor, group: int, async_op: bool) -> Any:
        for part, each in zip(parts, self._exchange("all_gather", mine, group), strict=True):
            assert part.shape == each.shape, "gloo would not gather tensors of several sizes"
            part.copy_(each)
        return SimpleNamespace(wait=lambda _: None)

    def broadcast(self, tensor: torch.Tensor, source: int, group: int, async_op: bool) -> Any:
        tensor.copy_(self._exchange("broadcast", tensor, group)[source])
        return SimpleNamespace(wait=lambda _: None)

    def _exchange(self, name: str, tensor: torch.Tensor, rank: int) -> list[torch.Tensor]:
        if rank == 0:
            self.names.append(name)
        self._tensors[rank] = tensor.clone()
        self._barrier.wait()
        tensors = list(self._tensors)
        self._barrier.wait()
        return tensors


def texts_at_each_rank(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> tuple[list[list[str]], list[str]]:
    """Returns the texts that each rank got, and the names of the collectives."""
    ranks = ThreadRanks(len(texts))
    monkeypatch.setattr(module, "dist", ranks)

    def meet(rank: int) -> list[str]:
        rank_group: Any = object.__new__(RankGroup)
        vars(rank_group).update(group=rank, rank=rank, world=len(texts), _deadline_s=DEADLINE_S, _exchange=0)
        return [each["text"] for each in rank_group.gather_or_raise(lambda: {"text": texts[rank]})]

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(meet, range(len(texts)))), ranks.names


@pytest.mark.parametrize(
    ("lengths", "names"),
    [
        ([0, 3, short_bytes(3) - OVERHEAD], ["all_gather"]),
        ([0, short_bytes(2) - OVERHEAD + 1], ["all_gather", "all_gather"]),
        ([500, 2, 70], ["all_gather"]),
        ([30_000, 2, 70], ["all_gather", "all_gather"]),
        ([2 * BROADCAST_BYTES, 0, 0, 0], ["all_gather", "broadcast"]),
        ([0, 5 * BROADCAST_BYTES, 0, 20_000, 0], ["all_gather", "all_gather", "broadcast"]),
    ],
)
def test_every_rank_gets_every_message_and_short_ones_in_one_all_gather(monkeypatch, lengths, names):
    texts = [chr(ord("a") + rank) * length for rank, length in enumerate(lengths)]
    got, called = texts_at_each_rank(monkeypatch, texts)
    assert got == [texts] * len(texts)
    assert called == names


@pytest.mark.parametrize("world", [2, 64, 16384])
def test_a_rank_receives_little_at_once_however_many_ranks_there_are(world):
    assert SHORT_MIN <= short_bytes(world) <= max(SHORT_MIN, (64 << 10) // world)


@pytest.mark.parametrize("hint", ["", "look at node b"])
def test_a_rank_that_failed_before_others_were_missed_still_says_why(monkeypatch, hint):
    """The others waited for its messages, and so came too late to hear of its error."""

    def time_out(*_: Any, **__: Any) -> None:
        raise RuntimeError("timed out")

    def fail() -> dict[str, Any]:
        raise RestoreError("the data of rank 2 can't be read.", hint)

    monkeypatch.setattr(module, "dist", SimpleNamespace(all_gather=time_out))
    monkeypatch.setattr(module, "absent_ranks", lambda *_: [1])
    rank_group: Any = object.__new__(RankGroup)
    group = SimpleNamespace(get_group_store=lambda: None)
    vars(rank_group).update(group=group, rank=0, world=2, _deadline_s=DEADLINE_S, _exchange=0)
    with pytest.raises(RanksMissing, match=r"^rank 1 of 2 did not come within 60 s: timed out"):
        rank_group.gather_or_raise(dict)
    with pytest.raises(RanksMissing) as raised:
        rank_group.gather_or_raise(fail)
    text = "the data of rank 2 can't be read. After this error, rank 1 of 2 did not come within 60 s: timed out."
    assert raised.value.message == text and isinstance(raised.value.__cause__, RestoreError)
    assert raised.value.hint == hint or "REFT_ATTACH_DEADLINE_S" in raised.value.hint
