"""The files that describe a checkpoint on storage."""

import hashlib
import json
import zlib
from dataclasses import replace

import pytest
import xxhash

from reft.core.commit.version import Epoch, Version
from reft.errors import FormatError
from reft.wire import stored_format as stored

VERSION = Version(Epoch(3, bytes(range(16))), 1200)
INDEX = stored.NodeIndex(VERSION, 2, 1, (stored.StoredFile(4, 8192, "ab" * 16), stored.StoredFile(5, 0, "cd" * 16)))
MANIFEST = stored.StoredManifest(
    VERSION,
    "run 1",
    "0123456789abcdef",
    "ef" * 16,
    b"manifest" * 99,
    b"decision",
    (stored.StoredNode(0, 0, "ab" * 16),),
)


def _signed(tree: dict[str, object]) -> bytes:
    body = json.dumps({"format": stored.FORMAT, **tree}).encode()
    return body + xxhash.xxh3_128_hexdigest(body).encode()


def _tree(text: bytes) -> dict[str, object]:
    tree: dict[str, object] = json.loads(text[:-32])
    return tree


def test_both_read_back() -> None:
    assert stored.decode_index(stored.encode_index(INDEX)) == INDEX
    assert stored.decode_manifest(stored.encode_manifest(MANIFEST)) == MANIFEST
    assert INDEX.folder == "node-2.1"


def test_head_is_bound_by_a_cryptographic_digest() -> None:
    assert stored.head_digest(b"head") == hashlib.blake2b(b"head", digest_size=16).hexdigest()


def test_every_cut_and_every_flip_is_refused() -> None:
    text = stored.encode_index(INDEX)
    for end in range(len(text)):
        with pytest.raises(FormatError):
            stored.decode_index(text[:end])
    for at in range(len(text)):
        flipped = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
        with pytest.raises(FormatError):
            stored.decode_index(flipped)


@pytest.mark.parametrize(
    "change",
    [
        {"node": -1}, {"node": True}, {"node": "../0"}, {"attempt": 1.0}, {"version": [1, "00", 1]}, {"version": [1, "0" * 32]},
        {"files": {}}, {"files": [[4, 8192]]}, {"files": [[4, 8192, "../../etc"]]}, {"files": [[4, 1 << 63, "ab" * 16]]},
        {"files": [[4, 1, "ab" * 16], [4, 1, "ab" * 16]]}, {"format": 2},
    ],
)  # fmt: skip
def test_impossible_values_of_an_index_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        stored.decode_index(_signed(_tree(stored.encode_index(INDEX)) | change))


@pytest.mark.parametrize(
    "change",
    [
        {"lineage": "../a"}, {"lineage": "0123456789ABCDEF"}, {"nonce": ""}, {"manifest": "!"}, {"manifest": "AAAA"},
        {"decision": None}, {"nodes": [[0, 0, "ab" * 16], [0, 1, "ab" * 16]]}, {"job": 7},
    ],
)  # fmt: skip
def test_impossible_values_of_a_manifest_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        stored.decode_manifest(_signed(_tree(stored.encode_manifest(MANIFEST)) | change))


def test_a_bomb_is_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MESSAGE_MAX", 1 << 16)
    bomb = replace(MANIFEST, job_manifest=bytes(1 << 20))
    assert len(zlib.compress(bomb.job_manifest)) < 1 << 12
    with pytest.raises(FormatError, match="longer than 65536"):
        stored.decode_manifest(stored.encode_manifest(bomb))


def test_length_is_bounded_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "TEXT_MAX", 100)
    with pytest.raises(FormatError, match="more than the 100"):
        stored.decode_index(stored.encode_index(INDEX))
