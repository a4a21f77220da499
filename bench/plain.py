"""Lets a bench run in a plain checkout, with substitutes for two packages.

The copy engine digests its bytes with xxhash, and describes slots with protobuf. Neither changes
the cost of copying. On a machine with torch and numpy only, zlib's crc32 makes the digests (at a
quarter of the speed, beside training), and a slot's table is empty. reft cannot read such slots. So
only benches that keep their slots to themselves may use this module.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import zlib
from typing import Any


class _Crc:
    """The part of xxhash.xxh3_64 that the engine uses."""

    def __init__(self, data: Any = b"") -> None:
        self._value = zlib.crc32(data)

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


def substitute() -> list[str]:
    """Installs substitutes for missing packages; returns their names for the output."""
    missing = []
    if importlib.util.find_spec("xxhash") is None:
        module: Any = types.ModuleType("xxhash")
        module.xxh3_64 = _Crc
        module.xxh3_64_intdigest = zlib.crc32
        sys.modules["xxhash"] = module
        missing.append("xxhash (crc32 instead: digests take longer, beside training)")
    if not _has_protobuf():
        stubs: Any = types.ModuleType("reft.wire.v1.daemon_pb2")
        stubs.UNREPLICATED, stubs.CELL, stubs.INLINE = range(3)
        messages: Any = types.ModuleType("reft.wire.messages")
        messages.table_to = lambda layout, places=None: b""
        sys.modules |= {"reft.wire.messages": messages, "reft.wire.v1.daemon_pb2": stubs}
        import reft.wire.v1

        reft.wire.v1.daemon_pb2 = stubs  # type: ignore[attr-defined]
        missing.append("protobuf (slots have no table)")
    return missing


def _has_protobuf() -> bool:
    try:
        return importlib.util.find_spec("google.protobuf") is not None
    except ModuleNotFoundError:  # the package google is missing, too
        return False
