"""What torch's agents exchange is signed: values of strangers, other keys and other rounds."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.utils.store import barrier, synchronize

from reft.elastic.stores.sealed import SealedStore

KEY = b"k" * 32


@pytest.fixture
def inner():
    return HashStore()


@pytest.fixture
def store(inner):
    return SealedStore(inner, KEY)


def test_it_does_all_that_torchs_agents_use(store):
    prefixed = PrefixStore("round.1", store)
    infos = [RendezvousStoreInfo.build(rank, prefixed, "127.0.0.1", 1234) for rank in (0, 1)]
    assert infos[0] == infos[1] and infos[0].master_port == 1234
    prefixed.multi_set(["x", "y"], ["1", "2"])
    assert prefixed.multi_get(["x", "y"]) == [b"1", b"2"]
    assert prefixed.add("n", 2) == 2 and prefixed.add("n", 1) == 3
    seen = []
    threads = [
        threading.Thread(target=lambda rank=rank: seen.append(synchronize(prefixed, b"%d" % rank, rank, 3, "all")))
        for rank in range(3)
    ] + [threading.Thread(target=barrier, args=(prefixed, 3, "end")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [[b"0", b"1", b"2"]] * 3
    store.set_timeout(timedelta(seconds=0.1))
    assert store.timeout == timedelta(seconds=0.1)
    with pytest.raises(DistStoreError):
        store.wait(["nobody writes this"])
    store.set("gone", "value")
    assert store.check(["gone"]) and store.delete_key("gone") and not store.check(["gone"])


@pytest.mark.parametrize("forged", [b"", b"10.0.0.66", b"m" * 32 + b"10.0.0.66"])
def test_a_value_of_a_stranger_is_refused_by_its_key(store, inner, forged):
    store.set("MASTER_ADDR", "10.0.0.1")
    inner.set("MASTER_ADDR", forged)
    with pytest.raises(DistStoreError, match=r"MASTER_ADDR.*job key"):
        store.get("MASTER_ADDR")


def test_a_value_of_another_key_or_of_another_round_is_refused(store, inner):
    SealedStore(inner, b"o" * 32).set("1/MASTER_ADDR", "10.0.0.66")
    store.set("0/MASTER_ADDR", "10.0.0.1")
    inner.set("2/MASTER_ADDR", inner.get("0/MASTER_ADDR"))
    for name in ("1/MASTER_ADDR", "2/MASTER_ADDR"):
        with pytest.raises(DistStoreError, match=name):
            store.get(name)
