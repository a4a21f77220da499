"""The rendezvous in a real etcd."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.utils.store import barrier

from reft.elastic.stores.etcd import Etcd, EtcdBackend, EtcdStore, Keys, connect
from tests.support.etcd import EtcdCluster, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def cluster():
    with EtcdCluster(3) as cluster:
        yield cluster


@pytest.fixture
def etcd(cluster):
    cluster.heal()
    return Etcd(cluster.members, timeout_s=20)


@pytest.fixture
def keys(etcd, request):
    return Keys(etcd, request.node.name, 60)


def test_the_state_is_written_only_over_what_was_read(keys):
    backend = EtcdBackend(keys)
    assert backend.get_state() is None
    state, token, is_ours = backend.set_state(b"one")
    assert (state, is_ours) == (b"one", True) and backend.get_state() == (b"one", token)
    assert backend.set_state(b"two")[0] == b"one", "a writer that never read overwrites nothing"
    assert backend.set_state(b"two", token)[2]
    state, newer, is_ours = backend.set_state(b"three", token)
    assert (state, is_ours) == (b"two", False) and newer > token


def test_a_write_whose_answer_was_lost_is_not_done_twice(keys, etcd, monkeypatch):
    """etcd executes the call, but the answer is lost. The repeated call must change nothing."""
    real, lost = etcd._ask, []

    def ask(member, path, body):
        answer = real(member, path, body)
        if path == "kv/txn" and len(lost) % 2 == 0:
            lost.append(path)
            raise OSError("the answer was lost")
        lost.append("heard")
        return answer

    monkeypatch.setattr(etcd, "_ask", ask)
    assert keys.add("n", 5) == 5
    lost.clear()
    assert keys.add("n", 5) == 10
    lost.clear()
    assert keys.put_if("s", b"x", 0)[2]
    assert keys.get("n")[0] == b"10"


def test_jobs_with_similar_names_stay_apart(etcd):
    one, other = Keys(etcd, "job", 60), Keys(etcd, "job2", 60)
    one.put("state", b"mine")
    assert other.get("state") is None


def test_the_store_supports_what_torchs_agents_use(keys):
    store = EtcdStore(keys, timedelta(seconds=20))
    prefixed = PrefixStore("round.1", store)
    prefixed.set("a", b"1")
    assert prefixed.get("a") == b"1" and prefixed.add("n", 2) == 2 and prefixed.add("n", 1) == 3
    prefixed.multi_set(["x", "y"], ["1", "2"])
    assert prefixed.multi_get(["x", "y"]) == [b"1", b"2"]
    infos = [RendezvousStoreInfo.build(rank, prefixed, "127.0.0.1", 1234) for rank in (0, 1)]
    assert infos[0] == infos[1]
    threads = [threading.Thread(target=barrier, args=(prefixed, 3, "end")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(DistStoreError):
        store.get("nobody writes this")


def test_the_loss_of_the_leader_or_of_any_one_member_loses_nothing(cluster, etcd):
    for member in (cluster.leader(), 0):
        cluster.heal()
        keys = Keys(etcd, f"loss-{member}-{time.monotonic_ns()}", 60)
        revision = keys.put_if("state", b"before", 0)[1]
        cluster.kill(member)
        assert keys.get("state") == (b"before", revision)
        assert keys.put_if("state", b"after", revision)[2]
        assert keys.add("n", 1) == 1


def test_the_keys_of_an_unused_job_are_deleted(cluster, etcd):
    keys = Keys(etcd, "short", 2)
    keys.put("state", b"x")
    assert json.loads(urllib.request.urlopen(f"http://{cluster.members[0]}/version", timeout=5).read())["etcdserver"]
    end = time.monotonic() + 60
    while keys.get("state") is not None and time.monotonic() < end:
        pass
    assert keys.get("state") is None
    keys._renewed_s = time.monotonic()  # as if the lease were fresh
    keys.put("state", b"again")
    assert keys.get("state")[0] == b"again"


def test_a_silent_etcd_is_named_in_the_error():
    parameters = RendezvousParameters("reft", "etcd://127.0.0.1:1", "none", 1, 1, read_timeout=1)
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1"):
        connect(parameters, "job")
