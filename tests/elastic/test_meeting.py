"""Members of a complete round make sure that all are there."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousTimeoutError

from reft.elastic.meeting import PREFIX, meet
from reft.elastic.stores.sealed import SealedStore
from tests.support.daemons import until


def begin(store, rank: int, world: int, is_intact=lambda: True, wait_s: float = 30.0) -> Future[bool]:
    future: Future[bool] = Future()

    def run() -> None:
        try:
            future.set_result(meet(RendezvousInfo(store, rank, world, None), is_intact, time.monotonic() + wait_s))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture(params=[False, True], ids=["plain", "with a job key"])
def store(request):
    held = SealedStore(HashStore(), b"k" * 32) if request.param else HashStore()
    yield PrefixStore("round", held)  # torch's does not keep a store of Python alive


@pytest.mark.parametrize("world", [1, 4])
def test_all_go_on_once_all_have_come(store, world):
    first = [begin(store, rank, world) for rank in range(world - 1)]
    assert not any(future.done() for future in first)
    last = begin(store, world - 1, world)
    assert [future.result(20) for future in (*first, last)] == [True] * world


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_that_a_member_left_is_given_up(store, rank):
    has_left = threading.Event()
    waiting = begin(store, rank, 3, lambda: not has_left.is_set())
    until(lambda: store.check([f"{PREFIX}{rank}"]), what="the member that came")
    has_left.set()
    assert waiting.result(20) is False
    assert not store.check([f"{PREFIX}all"])


def test_who_looks_late_goes_on_with_the_others(store):
    """Otherwise the others would wait for it, and their launch would end."""
    others = [begin(store, rank, 3) for rank in range(2)]
    assert begin(store, 2, 3).result(20)
    assert all(future.result(20) for future in others)
    assert begin(store, 2, 3, is_intact=lambda: False).result(20)


def test_a_member_that_does_not_come_is_named_at_the_end(store):
    begin(store, 1, 3)
    with pytest.raises(RendezvousTimeoutError, match="agent of group rank 2"):
        begin(store, 0, 3, wait_s=0.2).result(20)
