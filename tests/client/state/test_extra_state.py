"""Extra state is asked at every mark; a pickle, or what costs too much, is refused by name."""

from __future__ import annotations

import io
import struct

import pytest
import torch
from torch import nn

from reft.client.state import extra_state
from reft.client.state.extra_state import BYTES_MAX, ExtraState, check_cost, is_pickle
from reft.config import Config
from reft.errors import RestoreError, UnsupportedState
from tests.scenarios.test_state_kinds import step_once

ALLOWED = Config(allow_pickled_extra_state=True)


def pickled(value: float, protocol: int = 4) -> bytes:
    """Returns what `dumps` of the module pickle returns for a float, without frames."""
    if not protocol:
        return f"F{value!r}\n.".encode()
    return (bytes((0x80, protocol)) if protocol > 1 else b"") + b"G" + struct.pack(">d", value) + b"."


def bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Pickling(nn.Linear):
    """Pickles its scale once it has one, as Transformer Engine's layers do."""

    scale = None

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8) if self.scale is None else bytes_of(pickled(self.scale))

    def set_extra_state(self, state):
        (self.scale,) = struct.unpack(">d", state.numpy().tobytes()[3:11]) if state.numel() else (None,)


class Counting(nn.Linear):
    """Counts the questions, and answers with the count."""

    def __init__(self):
        super().__init__(2, 2)
        self.asked, self.set = 0, []

    def get_extra_state(self):
        self.asked += 1
        return self.asked

    def set_extra_state(self, state):
        self.set.append(state)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_each_mark_asks_and_holds_the_answer_of_its_step(attach):
    model = Counting()
    optimizer = sgd(model)
    session = attach(model, optimizer)
    before = model.asked
    for _ in session.steps(4):
        step_once(model, optimizer)
    assert model.asked == before + 4
    assert session.seal(timeout=60)
    other = Counting()
    assert attach(other, sgd(other)).step == 4
    assert other.set == [before + 4], "the answer of step 4, not an older one"


def zipped(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_any_protocol_is_found(protocol):
    assert is_pickle(pickled(1.5, protocol))


def test_a_torch_archive_is_found_and_plain_bytes_are_not():
    assert is_pickle(zipped({"scale": torch.ones(2)}))
    assert not is_pickle(b"") and not is_pickle(bytes(16)) and not is_pickle(bytes(range(1, 255)))


@pytest.mark.parametrize("wrapped", [bytes_of, lambda data: data, lambda data: {"nested": [bytes_of(data)]}])
def test_a_pickle_is_refused_when_taken_and_when_restored_unless_allowed(wrapped):
    model = nn.Linear(2, 2)
    answers, given = [wrapped(pickled(1.5))], []
    model.get_extra_state, model.set_extra_state = lambda: answers[0], given.append
    refuses, allows = ExtraState("model.0.up", model), ExtraState("model.0.up", model, allows_pickles=True)
    with pytest.raises(UnsupportedState, match=r"model\.0\.up: Linear\.get_extra_state returns a pickle") as refused:
        refuses.state_dict()
    assert "allow_pickled_extra_state=True" in str(refused.value)
    allows.state_dict()
    with pytest.raises(RestoreError, match=r"model\.0\.up: .* Linear\.set_extra_state may execute it"):
        refuses.load_state_dict({"extra_state": wrapped(pickled(1.5, 0))})
    assert not given
    allows.load_state_dict({"extra_state": answers[0]})
    assert len(given) == 1


def test_a_module_that_begins_to_pickle_gets_its_state_back_if_that_is_allowed(attach):
    model = nn.Sequential(Pickling(2, 2))
    optimizer = sgd(model)
    session = attach(model, optimizer, config=ALLOWED)
    for step in session.steps(3):
        step_once(model, optimizer)
        model[0].scale = 0.5**step
    assert session.seal(timeout=60)
    other = nn.Sequential(Pickling(2, 2))
    with pytest.raises(RestoreError, match=r"model\.0\.0: the snapshot's extra state is a pickle"):
        attach(other, sgd(other))
    assert other[0].scale is None
    assert attach(other, sgd(other), config=ALLOWED).step == 3, "the refusal has destroyed nothing"
    assert other[0].scale == 0.25


def test_snapshots_name_the_module_that_begins_to_pickle(attach, caplog):
    model = nn.Sequential(Pickling(2, 2))
    optimizer = sgd(model)
    session = attach(model, optimizer)
    for _ in session.steps(3):
        step_once(model, optimizer)
        model[0].scale = 1.0
    assert not session.seal(timeout=5)
    assert "model.0.0: Pickling.get_extra_state returns a pickle" in caplog.text


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_any_protocol_is_refused_at_attach(attach, protocol):
    """Marks know modern pickles only: an older one would be found when nothing else is left."""
    model = nn.Sequential(nn.Linear(2, 2), Counting())
    model[1].get_extra_state = lambda: bytes_of(pickled(1.5, protocol))
    with pytest.raises(UnsupportedState, match=r"model\.0\.1: Counting\.get_extra_state returns a pickle"):
        attach(model, sgd(model))
    assert attach(model, sgd(model), config=ALLOWED).step == 0


def test_an_answer_that_is_too_large_is_refused_by_name(attach):
    model = nn.Sequential(nn.Linear(2, 2), Counting())
    model[1].get_extra_state = lambda: torch.zeros(BYTES_MAX)
    with pytest.raises(
        UnsupportedState, match=r"of 1 modules returns \d+ bytes, \d+ of them for model\.0\.1"
    ) as refused:
        attach(model, sgd(model))
    assert "buffers" in str(refused.value)


def test_answers_that_take_too_long_need_a_longer_interval(monkeypatch):
    states = {name: ExtraState(name, Counting()) for name in ("a", "b")}
    monkeypatch.setattr(extra_state, "_seconds", lambda state: 0.03 if state.name == "a" else 0.04)
    with pytest.raises(
        UnsupportedState, match=r"takes 70 ms, 40 ms of them for b, at each mark; the limit is 50 ms"
    ) as refused:
        check_cost(states, every=1, adapts=False)
    assert "every=2, or every='auto'" in str(refused.value)
    check_cost(states, every=2, adapts=False)
    check_cost(states, every=1, adapts=True)


def test_extra_state_that_grows_over_its_budget_later_makes_snapshots_rarer(attach, caplog):
    model = nn.Sequential(nn.Linear(2, 2), Counting())
    optimizer = sgd(model)
    size, asked_at = [1], []

    def answer():
        asked_at.append(session.step)
        return torch.zeros(size[0], dtype=torch.uint8)

    def train(until):
        for _ in session.steps(until):
            step_once(model, optimizer)

    session = attach(model, optimizer)
    model[1].get_extra_state = answer
    train(4)
    assert asked_at == [1, 2, 3, 4]
    size[0] = int(1.5 * BYTES_MAX)
    train(12)
    assert asked_at[4:] == [5, 6, 8, 10, 12], "two snapshots over the budget, then one of two steps"
    said = [record.message for record in caplog.records if "extra state (get_extra_state) takes" in record.message]
    assert len(said) == 1 and f"and {size[0]} bytes at each snapshot, most of the time for model.0.1" in said[0]
    size[0] = 1
    train(18)
    assert asked_at[9:] == [14, 15, 16, 17, 18], "it costs less again"
    assert session.seal(timeout=60)
