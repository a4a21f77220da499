"""Reads of storage that hangs."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from reft.client.link import timed_read
from reft.client.link.timed_read import in_time, preadv_in_time
from reft.errors import FormatError, RestoreError
from reft.wire.slot_format import read_head, slot_of_head
from tests.daemon.persist.test_checkpoint_store import Slot


def test_value_and_error_come_back() -> None:
    assert in_time(lambda: 7, "it") == 7
    for error in (OSError(5, "broken"), TimeoutError("of a soft mount"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised:
            in_time(lambda error=error: (_ for _ in ()).throw(error), "it")  # type: ignore[misc]
        assert raised.value is error


def test_slot_on_storage_that_hangs_is_an_error_and_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    slot, released = Slot(3), threading.Event()
    descriptor = slot.source.descriptor
    stored = slot_of_head(read_head(descriptor)[0], descriptor, preadv_in_time)
    into = np.empty(5000, np.uint8)
    monkeypatch.setattr(timed_read, "READ_BYTES", 1024)
    stored.read(100, into[:3000], into[3000:])
    assert np.array_equal(into, slot.map.data[100:5100])
    monkeypatch.setattr(timed_read, "STALL_S", 0.01)
    monkeypatch.setattr(os, "preadv", lambda *_: released.wait(10))
    with pytest.raises(RestoreError, match="gave nothing of a checkpoint's file for 0 s"):
        stored.read(0, into)
    released.set()
    monkeypatch.setattr(timed_read, "STALL_S", 60.0)
    monkeypatch.setattr(os, "preadv", lambda *_: os.read(-1, 1))
    with pytest.raises(FormatError, match="can't be read"):
        stored.read(0, into)
    os.close(descriptor)
