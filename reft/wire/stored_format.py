"""The files that describe a checkpoint on storage, as JSON. Nothing in them is ever executed.

    index.json       of one node: its files, each with length and digest of its head
    MANIFEST.json    of the whole checkpoint: the job's manifest without its token, the decision,
                     every node's folder with the digest of its index
    DECISION-…       of one attach: job, lineage, decision
    ENDED            of one lineage: job, lineage

    text   JSON ─► MAC of it, a line, only with a key ─► digest of all before

So a truncated or mixed file is not taken for a complete one. With a key a reader takes no text
without the right MAC (HMAC-SHA256). Without the key nobody can write a text that is taken, nor move
one to another kind, job or lineage.

The head of a rank's file is all before its data: headers, table, capsule and the digests of the
data's chunks. The index has a cryptographic digest of the head, so the MAC binds the head, too. The
chunks' own digests are fast ones: they show damage, and files of other checkpoints. They don't stop
one who makes other data with equal digests.

A reader bounds the length before it reads, checks each field's type and range, and takes names only
in the form of `reft.core.persist.stored_names`. So no name leads out of the checkpoint's folder.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import xxhash

from reft.core.commit.version import Epoch, Version
from reft.core.persist import stored_names
from reft.errors import FormatError

FORMAT: Final = 1
TEXT_MAX: Final = 64 << 20  # bytes of an index or a manifest
MESSAGE_MAX: Final = 256 << 20  # bytes of the job's manifest, decompressed
FILES_MAX: Final = 4096  # of one node
NODES_MAX: Final = 65_536
RUNS_MAX: Final = 1024  # of one file
_DIGEST_DIGITS: Final = 32
_MAC_BYTES: Final = 65  # 64 hex digits and a newline


class FileRun(NamedTuple):
    """Bytes of a rank's file that an object has; the object has no holes.

    Attributes:
        offset: in the file.
        nbytes: their number.
    """

    offset: int
    nbytes: int


@dataclass(frozen=True)
class StoredFile:
    """A rank's slot on storage.

    Attributes:
        rank: the rank that wrote the slot.
        nbytes: length of the file.
        head_digest: BLAKE2b of the bytes before the data, 16 bytes as hex digits.
        runs: where the bytes of an object lie in the file; none: a file, which has its holes.
    """

    rank: int
    nbytes: int
    head_digest: str
    runs: tuple[FileRun, ...] = ()


@dataclass(frozen=True)
class NodeIndex:
    """What one node wrote of a checkpoint.

    Attributes:
        version: the version.
        node: index of the node in the manifest.
        attempt: of the coordinator.
        files: of the node's ranks.
    """

    version: Version
    node: int
    attempt: int
    files: tuple[StoredFile, ...]

    @property
    def folder(self) -> str:
        """The node's folder in the checkpoint's."""
        return stored_names.node_folder(self.node, self.attempt)


@dataclass(frozen=True)
class StoredNode:
    """A node as the manifest of a checkpoint names it.

    Attributes:
        node: index of the node.
        attempt: that was completed.
        index_digest: the digest at the end of the node's index.
    """

    node: int
    attempt: int
    index_digest: str


@dataclass(frozen=True)
class StoredManifest:
    """The manifest of a checkpoint; with it the checkpoint is complete.

    Attributes:
        version: the version.
        job: name of the job.
        lineage: of the job.
        nonce: random; tells a writer whether a manifest is its own.
        job_manifest: the job's manifest, a serialized message without token.
        decision: under which the version was written, a serialized message.
        nodes: all nodes that wrote.
    """

    version: Version
    job: str
    lineage: str
    nonce: str
    job_manifest: bytes
    decision: bytes
    nodes: tuple[StoredNode, ...]


def head_digest(head: bytes | memoryview) -> str:
    """Returns the digest of a file's head."""
    return hashlib.blake2b(head, digest_size=16).hexdigest()


def text_digest(text: bytes) -> str:
    """Returns the digest at the end of an index or manifest, after a check.

    Raises:
        FormatError: the text is cut, or does not fit its digest.
    """
    body, digest = text[:-_DIGEST_DIGITS], text[-_DIGEST_DIGITS:]
    if xxhash.xxh3_128_hexdigest(body).encode() != digest:
        raise FormatError(f"{len(text)} bytes do not fit the digest at their end.")
    return digest.decode()


def encode_index(index: NodeIndex, key: bytes | None = None) -> bytes:
    """Returns the text of index.json, with a MAC if there is a key."""
    files = [[each.rank, each.nbytes, each.head_digest, *([each.runs] if each.runs else [])] for each in index.files]
    tree = {"version": _from_version(index.version), "node": index.node, "attempt": index.attempt, "files": files}
    return _sign("index", tree, key)


def decode_index(text: bytes, key: bytes | None = None) -> NodeIndex:
    """Reads index.json.

    Raises:
        FormatError: the text is damaged, or has impossible values, or not the MAC of the key.
    """
    tree = _read("index", text, key)
    try:
        files = tuple(_file_of(*_list(row, 4)) for row in _list(tree["files"], FILES_MAX))
        index = NodeIndex(_to_version(tree["version"]), _number(tree["node"]), _number(tree["attempt"]), files)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the index can't be read: {error!r}.") from error
    if len({each.rank for each in index.files}) != len(index.files):
        raise FormatError("the index names a rank twice.")
    return index


def _file_of(rank: object, nbytes: object, digest: object, rows: object = ()) -> StoredFile:
    size, runs, end = _number(nbytes), [], 0
    for row in _list(list(rows) if isinstance(rows, tuple) else rows, RUNS_MAX):
        offset, length = map(_number, _list(row, 2))
        if offset < end or not length or offset + length > size:
            raise ValueError(f"a run of {length} bytes at {offset} can't be in a file of {size} bytes")
        end = offset + length
        runs.append(FileRun(offset, length))
    return StoredFile(_number(rank), size, _hex(digest, 16), tuple(runs))


def encode_manifest(manifest: StoredManifest, key: bytes | None = None) -> bytes:
    """Returns the text of MANIFEST.json, with a MAC if there is a key."""
    return _sign(
        "manifest",
        {
            "version": _from_version(manifest.version),
            "job": manifest.job,
            "lineage": manifest.lineage,
            "nonce": manifest.nonce,
            "manifest": base64.b64encode(zlib.compress(manifest.job_manifest)).decode(),
            "decision": base64.b64encode(manifest.decision).decode(),
            "nodes": [[each.node, each.attempt, each.index_digest] for each in manifest.nodes],
        },
        key,
    )


def decode_manifest(text: bytes, key: bytes | None = None) -> StoredManifest:
    """Reads MANIFEST.json.

    Raises:
        FormatError: the text is damaged, or has impossible values, or not the MAC of the key.
    """
    tree = _read("manifest", text, key)
    try:
        rows = _list(tree["nodes"], NODES_MAX)
        nodes = tuple(StoredNode(_number(node), _number(attempt), _hex(digest, 16)) for node, attempt, digest in rows)
        manifest = StoredManifest(
            _to_version(tree["version"]),
            _text(tree["job"]),
            _hex(tree["lineage"], stored_names.LINEAGE_BYTES),
            _hex(tree["nonce"], 16),
            _decompress(base64.b64decode(_text(tree["manifest"]), validate=True)),
            base64.b64decode(_text(tree["decision"]), validate=True),
            nodes,
        )
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise FormatError(f"the manifest can't be read: {error!r}.") from error
    if len({each.node for each in manifest.nodes}) != len(manifest.nodes):
        raise FormatError("the manifest names a node twice.")
    return manifest


def encode_decision(decision: bytes, job: str, lineage: str, key: bytes | None = None) -> bytes:
    """Returns the text of a decision's file, with a MAC if there is a key.

    Args:
        decision: a serialized message.
        job: name of the job.
        lineage: of the job.
        key: for the MAC.
    """
    tree = {"job": job, "lineage": lineage, "decision": base64.b64encode(decision).decode()}
    return _sign("decision", tree, key)


def decode_decision(text: bytes, job: str, lineage: str, key: bytes | None = None) -> bytes:
    """Reads a decision's file; returns the serialized message.

    Raises:
        FormatError: the text is damaged, of another job or lineage, or has not the MAC of the key.
    """
    tree = _read("decision", text, key)
    try:
        place = _text(tree["job"]), _hex(tree["lineage"], stored_names.LINEAGE_BYTES)
        decision = base64.b64decode(_text(tree["decision"]), validate=True)
    except (KeyError, ValueError, binascii.Error) as error:
        raise FormatError(f"the decision can't be read: {error!r}.") from error
    if place != (job, lineage):
        raise FormatError(f"it belongs to job {place[0]}, lineage {place[1]}.")
    return decision


def encode_end(job: str, lineage: str, nonce: str, key: bytes | None = None) -> bytes:
    """Returns the text that marks a lineage as ended. With a key it has a MAC.

    Args:
        job: name of the job.
        lineage: of the job.
        nonce: random; tells a writer whether the mark is its own.
        key: for the MAC.
    """
    return _sign("end", {"job": job, "lineage": lineage, "nonce": nonce}, key)


def check_end(text: bytes, job: str, lineage: str, key: bytes) -> None:
    """Checks the text that marks a lineage as ended.

    Raises:
        FormatError: the text is damaged, of another job or lineage, or has not the MAC of the key.
    """
    tree = _read("end", text, key)
    if (tree.get("job"), tree.get("lineage")) != (job, lineage):
        raise FormatError(f"it belongs to job {tree.get('job')!r:.80}, lineage {tree.get('lineage')!r:.40}.")


def _sign(kind: str, tree: Mapping[str, object], key: bytes | None) -> bytes:
    body = json.dumps({"format": FORMAT, **tree}, indent=1).encode() + b"\n"
    if key is not None:
        body += _mac(kind, body, key)
    return body + xxhash.xxh3_128_hexdigest(body).encode()


def _mac(kind: str, body: bytes, key: bytes) -> bytes:
    return hmac.new(key, f"reft {kind}\n".encode() + body, hashlib.sha256).hexdigest().encode() + b"\n"


def _read(kind: str, text: bytes, key: bytes | None) -> dict[str, Any]:
    if len(text) > TEXT_MAX:
        raise FormatError(f"{len(text)} bytes are more than the {TEXT_MAX} of an index or manifest.")
    text_digest(text)
    body, mac = text[:-_DIGEST_DIGITS], b""
    if not body.endswith(b"}\n"):
        body, mac = body[:-_MAC_BYTES], body[-_MAC_BYTES:]
    if key is not None and not hmac.compare_digest(mac, _mac(kind, body, key)):
        raise FormatError(
            f"the {kind} has {'a MAC of another key' if mac else 'no MAC'}, and --persist-key-file asks for one.",
            "give the key that it was written with; without --persist-key-file anybody's checkpoints are taken",
        )
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the text is no JSON: {error}.") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise FormatError("the text has another format.", f"read it with a reft that knows formats above {FORMAT}")
    return tree


def _decompress(data: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    result = decompressor.decompress(data, MESSAGE_MAX)
    if not decompressor.eof:
        raise ValueError(f"the job's manifest is cut, or longer than {MESSAGE_MAX} bytes")
    return result


def _from_version(version: Version) -> list[object]:
    return [version.epoch.counter, version.epoch.ident.hex(), version.step]


def _to_version(row: object) -> Version:
    counter, ident, step = _list(row, 3)
    return Version(Epoch(_number(counter), bytes.fromhex(_hex(ident, 16))), _number(step))


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is no number from 0 on")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _hex(value: object, nbytes: int) -> str:
    text = _text(value)
    if len(bytes.fromhex(text)) != nbytes or len(text) != 2 * nbytes or text.lower() != text:
        raise ValueError(f"{text!r:.80} is not {2 * nbytes} hex digits")
    return text


def _list(value: object, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"{value!r:.40} must be a list with at most {limit} entries")
    return value
