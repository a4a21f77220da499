"""Entries of the rendezvous store: foreign, older and deleted ones, with and without a job key."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout, _NodeDesc

from reft.elastic import entry_seal
from reft.elastic.bounded_json import parse
from reft.elastic.entry_seal import EntrySeal, RefusedEntry
from reft.elastic.rounds import StateHolder
from reft.elastic.shared_state import AgentFacts, SharedState, decode, encode
from reft.elastic.stores.tcp import NOTHING, TcpBackend

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
ME, OTHER = _NodeDesc("me", 1, 0), _NodeDesc("other", 2, 0)
SETTINGS = RendezvousSettings("job", 1, 2, RendezvousTimeout(), timedelta(seconds=5), 3)


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(entry_seal, "say", said.append)
    return said


@pytest.fixture
def store():
    return HashStore()


def holder(store, key=KEY, node=ME) -> StateHolder:
    return StateHolder(TcpBackend(store, "job"), SETTINGS, node, lambda facts, seen_s: False, EntrySeal("job", key))


def write(state_holder: StateHolder, **changes: object) -> SharedState:
    """Changes the state as an agent does, and writes it."""
    state_holder.sync(fresh=True)
    for name, value in {"launch": "launch", **changes}.items():
        setattr(state_holder.state, name, value)
    state_holder.state.last_heartbeats[state_holder._node] = datetime.now(timezone.utc)
    state_holder.mark_dirty()
    assert state_holder.sync()
    return state_holder.state


def raw(store) -> bytes:
    return TcpBackend(store, "job").get_state()[0]


def put(store, entry: bytes) -> None:
    """Writes as somebody who reaches the store, with no regard for what it holds."""
    store.set("torch.rendezvous.job", entry)


@pytest.mark.parametrize("key", [KEY, None])
def test_agents_of_one_job_read_what_the_others_wrote(store, key):
    one, other = holder(store, key), holder(store, key, OTHER)
    write(one, round=1)
    other.sync(fresh=True)
    assert other.state.round == 1
    write(other, round=2)
    one.sync(fresh=True)
    assert one.state.round == 2 and (one.state.number == 2 or key is None)


def forgeries(entry: bytes) -> dict[str, bytes]:
    body = entry.rpartition(b" ")[2]
    newer = decode(body)
    newer.round, newer.number = newer.round + 1, newer.number + 1
    return {
        "a newer round, not signed": encode(newer),
        "a newer round, with an old MAC": entry[: -len(body)] + encode(newer),
        "signed with another key": EntrySeal("job", OTHER_KEY).entry(newer),
        "of another job": EntrySeal("job2", OTHER_KEY).entry(newer),
        "no MAC": entry_seal.MAGIC,
        "an empty one": b"",
        "no text": b"\xff\xfe\x00",
        "nothing": NOTHING,
    }


@pytest.mark.parametrize("what", list(forgeries(EntrySeal("job", KEY).entry(SharedState()))))
def test_a_foreign_entry_is_refused_said_once_and_written_over(store, lines, what):
    mine, other = holder(store), holder(store, node=OTHER)
    write(mine, round=3)
    other.sync(fresh=True)
    forged = forgeries(raw(store))[what]
    for _ in range(3):
        put(store, forged)
        other.sync(fresh=True)
        assert other.state.round == 3
        assert other.sync(), "the accepted state is written again"
        mine.sync(fresh=True)
        assert mine.state.round == other.state.round == 3
    assert len(lines) == 1 and "job job " in lines[0] and "refused" in lines[0]


def test_an_older_entry_is_refused(store, lines):
    mine, other = holder(store), holder(store, node=OTHER)
    write(mine, round=3)
    old = raw(store)
    write(mine, round=4)
    newest = raw(store)
    other.sync(fresh=True)
    put(store, old)
    other.sync(fresh=True)
    assert other.state.round == 4 and "older" in lines[0]
    put(store, newest)
    other.sync(fresh=True)
    assert other.state.round == 4 and len(lines) == 1, "the newest entry itself is accepted"


def test_an_entry_with_the_same_number_and_other_bytes_is_refused(store, lines):
    """Two agents write at once, and one loses. Somebody on the network keeps the loser's entry."""
    mine, seal = holder(store), EntrySeal("job", KEY)
    loser = SharedState()
    loser.round = 9
    lost = seal.entry(loser)
    write(mine, round=1)
    put(store, lost)
    mine.sync(fresh=True)
    assert mine.state.round == 1 and lines


def test_after_a_stranger_wrote_the_newest_copy_of_all_agents_counts(store, lines):
    behind, ahead = holder(store), holder(store, node=OTHER)
    write(behind, round=1)
    write(ahead, round=2)  # which `behind` has not read
    put(store, b"garbage")
    behind.sync(fresh=True)
    behind.sync()  # writes its own older copy
    ahead.sync(fresh=True)
    assert ahead.state.round == 2
    ahead.sync()
    behind.sync(fresh=True)
    assert behind.state.round == 2


def test_a_change_that_was_not_written_is_forgotten_with_a_refusal(store, lines):
    mine = holder(store)
    write(mine, round=1)
    mine.state.round = 7
    mine.mark_dirty()
    put(store, b"garbage")
    assert not mine.sync()
    assert mine.state.round == 1


def test_an_agent_with_another_key_or_without_one_is_told_so(store):
    write(holder(store), round=1)
    for key, words in ((OTHER_KEY, "another key or none"), (None, "this agent has none")):
        with pytest.raises(RefusedEntry, match=words) as refused:
            holder(store, key, OTHER).sync(fresh=True)
        assert "REFT_JOB_KEY_FILE" in str(refused.value) and "job job " in str(refused.value)
    unkeyed = HashStore()
    write(holder(unkeyed, None), round=1)
    with pytest.raises(RefusedEntry, match="another key or none"):
        holder(unkeyed).sync(fresh=True)


@pytest.mark.parametrize("key", [KEY, None])
def test_a_deleted_state_is_written_again(store, lines, key):
    mine = holder(store, key)
    write(mine, round=5)
    store.delete_key("torch.rendezvous.job")
    mine.sync(fresh=True)
    assert mine.state.round == 5 and mine.sync()
    fresh = holder(store, key, OTHER)
    fresh.sync(fresh=True)
    assert fresh.state.round == 5 and "deleted" in lines[0]


def test_a_state_has_no_secret_if_there_is_a_key(store):
    write(holder(store), round=1)
    assert KEY not in raw(store) and KEY.hex().encode() not in raw(store)
    assert not decode(raw(store).rpartition(b" ")[2]).token


@pytest.mark.parametrize("state", [b"\xff\xfe\x00", b"x" * 100, b"\x80\x04N."])
def test_without_a_key_bytes_that_are_no_state_are_an_error_that_agents_survive(store, state):
    mine = holder(store, None)
    write(mine, round=1)
    put(store, state)
    with pytest.raises(RendezvousStateError):
        mine.sync(fresh=True)
    mine.mark_dirty()  # as the next keep-alive does
    assert mine.sync() and mine.state.round == 1


def test_a_store_that_fails_is_an_error_of_the_rendezvous(store):
    class Failing(HashStore):
        def compare_set(self, *_):
            raise RuntimeError("on purpose")

    with pytest.raises(RendezvousConnectionError, match="on purpose"):
        TcpBackend(Failing(), "job").get_state()


def test_a_token_of_another_backend_writes_nothing(store):
    backend = TcpBackend(store, "job")
    assert backend.set_state(b"new", 7) is None and backend.get_state() is None
    assert backend.set_state(b"one")[2] and backend.set_state(b"two", 7) == (b"one", b"one", False)
    assert backend.set_state(b"two", b"one") == (b"two", b"two", True)
    assert backend.set_state(b"three", b"one") == (b"two", b"two", False)


# JSON within bounds

VALID = SharedState()
VALID.last_heartbeats = {ME: datetime.now(timezone.utc)}
VALID.facts, VALID.participants, VALID.wait_list = {ME: AgentFacts()}, {ME: 0}, {ME}
TEXT = encode(VALID)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"round":0', b'"round":-1'),
        (b'"round":0', b'"round":1e999'),
        (b'"round":0', b'"round":NaN'),
        (b'"round":0', b'"round":true'),
        (b'"round":0', b'"round":%d' % (1 << 63)),
        (b'"round":0', b'"round":' + b"9" * 5000),
        (b'"round":0', b'"round":[]'),
        (b'"token":""', b'"token":"abcd"'),
        (b'"token":""', b'"token":"' + b"g" * 64 + b'"'),
        (b'"launch":""', b'"launch":7'),
        (b'"launch":""', b'"launch":"' + b"x" * 1025 + b'"'),
        (b'"participants":[[0,0]]', b'"participants":[[-1,0]]'),
        (b'"participants":[[0,0]]', b'"participants":[[1,0]]'),
        (b'"waiting":[0]', b'"waiting":{"0":0}'),
        (b'"waiting":[0]', b'"waiting":[' + b"0," * 20000 + b"0]"),
        (b'"addresses":[]', b'"addresses":["a","a","a","a","a","a","a","a","a"]'),
        (b'"addresses":[]', b'"addresses":[[]]'),
        (b'"deadline":null', b'"deadline":"never"'),
        (b'"deadline":null', b'"deadline":' + b"[" * 100_000),
        (b'"format":2', b'"format":1'),
    ],
)
def test_a_state_with_values_that_no_agent_writes_is_refused(before, after):
    assert vars(decode(TEXT)) == vars(VALID) and before in TEXT
    with pytest.raises(RendezvousStateError):
        decode(TEXT.replace(before, after))


def test_depth_and_size_are_bounded_before_json_is_parsed(monkeypatch):
    assert parse(b'{"a":["[[[[","\\"[[[["]}', 100, 2) == {"a": ["[[[[", '"[[[[']}
    monkeypatch.setattr("json.loads", lambda *_: pytest.fail("parsed"))
    for data, words in ((b"[" * 3, "more than 2"), (b'"\\\\"[[[', "more than 2"), (b"1" * 101, "101 bytes")):
        with pytest.raises(ValueError, match=words):
            parse(data, 100, 2)


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
def test_what_python_alone_reads_as_json_is_refused(constant):
    with pytest.raises(ValueError, match="is not a JSON number"):
        parse(b'{"a":[%s]}' % constant, 100, 2)
