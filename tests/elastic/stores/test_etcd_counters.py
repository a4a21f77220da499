"""A counter in etcd that holds no number: the error names the key, the value and the remedy."""

from __future__ import annotations

import base64

import pytest
from torch.distributed.elastic.rendezvous import RendezvousStateError

from reft.elastic.stores.etcd import Keys


class FakeEtcd:
    """Answers every read with one value."""

    def __init__(self, value: bytes) -> None:
        self.value = base64.b64encode(value).decode()

    def call(self, path, body):
        return {"kvs": [{"value": self.value, "mod_revision": "3"}]} if path == "kv/range" else {"succeeded": True}


@pytest.mark.parametrize("value", [b"not a number", b"", b"\xff\x00"])
def test_a_counter_that_holds_no_number_is_named_with_value_and_remedy(value):
    with pytest.raises(RendezvousStateError) as raised:
        Keys(FakeEtcd(value), "job", 60).add("store/n", 1)
    text = str(raised.value)
    assert "/reft/rendezvous/job/store/n" in text and repr(value) in text and "etcdctl del" in text


def test_a_counter_that_holds_a_number_is_added_to():
    assert Keys(FakeEtcd(b"41"), "job", 60).add("store/n", 1) == 42
