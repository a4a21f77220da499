"""Tests that messages written before their fields were renamed still read the same.

The file was written with the stubs of commit 71512e3 (protocol 7), each message under its present
name. A message is read by its field numbers. So a renamed field must give the same bytes, and a
changed number gives others. Protocol 9 dropped one field: ReportReply and Outcome carry `whole` in
their pins. Protocol 11 dropped the process of LeaseRequest. The old numbers are reserved, and the
file lacks these fields.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from reft.wire.v1 import daemon_pb2 as pb

GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "golden" / "messages-7.json").read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_a_message_of_before_is_read_and_written_again(name):
    written = bytes.fromhex(GOLDEN[name])
    message = getattr(pb, name).FromString(written)
    assert not len(UnknownFieldSet(message)), "a field has lost its number"
    assert message.SerializeToString(deterministic=True) == written
