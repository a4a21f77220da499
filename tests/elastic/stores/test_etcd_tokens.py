"""A token that is no revision of etcd writes nothing. The answer is the current state."""

from __future__ import annotations

import pytest

from reft.elastic.stores.etcd import EtcdBackend


class Keys:
    """One key, written at revision 7."""

    def get(self, key):
        return b"now", 7

    def put_if(self, key, value, revision):
        return (value, 8, True) if revision == 7 else (b"now", 7, False)


class NoKeys(Keys):
    def get(self, key):
        return None


@pytest.mark.parametrize("token", ["an etcd v2 token", b"\xff", object(), [7]])
def test_a_foreign_token_writes_nothing(token):
    assert EtcdBackend(Keys()).set_state(b"new", token) == (b"now", 7, False)
    assert EtcdBackend(NoKeys()).set_state(b"new", token) is None


def test_a_current_token_writes_and_a_stale_one_does_not():
    assert EtcdBackend(Keys()).set_state(b"new", 7) == (b"new", 8, True)
    assert EtcdBackend(Keys()).set_state(b"new", "7") == (b"new", 8, True)
    assert EtcdBackend(Keys()).set_state(b"new", 6) == (b"now", 7, False)
    assert EtcdBackend(Keys()).set_state(b"new") == (b"now", 7, False)
