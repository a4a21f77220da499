"""The files that describe a checkpoint on storage, as JSON. Nothing in them is ever executed.

    index.json       of one node: its files, each with length and digest of its head
    MANIFEST.json    of the whole checkpoint: the job's manifest without its token, the decision,
                     every node's folder with the digest of its index

Each text ends with the digest of all before it, so a truncated or mixed file is not taken for a
complete one. The head of a rank's file is all before its data: headers, table, capsule and the
digests of the data's chunks. So two digests stand for every byte of a checkpoint.

A reader bounds the length before it reads, checks each field's type and range, and takes names only
in the form of `reft.core.persist.stored_names`. So no name leads out of the checkpoint's folder.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from reft.core.commit.version import Epoch, Version
from reft.core.persist import stored_names
from reft.errors import FormatError

FORMAT: Final = 1
TEXT_MAX: Final = 64 << 20  # bytes of an index or a manifest
MESSAGE_MAX: Final = 256 << 20  # bytes of the job's manifest, decompressed
FILES_MAX: Final = 4096  # of one node
NODES_MAX: Final = 65_536
_DIGEST_DIGITS: Final = 32


@dataclass(frozen=True)
class StoredFile:
    """A rank's slot on storage.

    Attributes:
        rank: the rank that wrote the slot.
        nbytes: length of the file.
        head_digest: xxh3_128 of the bytes before the data, as hex digits.
    """

    rank: int
    nbytes: int
    head_digest: str


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
    return xxhash.xxh3_128_hexdigest(head)


def text_digest(text: bytes) -> str:
    """Returns the digest at the end of an index or manifest, after a check.

    Raises:
        FormatError: the text is cut, or does not fit its digest.
    """
    body, digest = text[:-_DIGEST_DIGITS], text[-_DIGEST_DIGITS:]
    if xxhash.xxh3_128_hexdigest(body).encode() != digest:
        raise FormatError(f"{len(text)} bytes do not fit the digest at their end.")
    return digest.decode()


def encode_index(index: NodeIndex) -> bytes:
    """Returns the text of index.json."""
    files = [[each.rank, each.nbytes, each.head_digest] for each in index.files]
    return _sign(
        {"version": _from_version(index.version), "node": index.node, "attempt": index.attempt, "files": files}
    )


def decode_index(text: bytes) -> NodeIndex:
    """Reads index.json.

    Raises:
        FormatError: the text is damaged, or has impossible values.
    """
    tree = _read(text)
    try:
        rows = _list(tree["files"], FILES_MAX)
        files = tuple(StoredFile(_number(rank), _number(nbytes), _hex(digest, 16)) for rank, nbytes, digest in rows)
        index = NodeIndex(_to_version(tree["version"]), _number(tree["node"]), _number(tree["attempt"]), files)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the index can't be read: {error!r}.") from error
    if len({each.rank for each in index.files}) != len(index.files):
        raise FormatError("the index names a rank twice.")
    return index


def encode_manifest(manifest: StoredManifest) -> bytes:
    """Returns the text of MANIFEST.json."""
    return _sign(
        {
            "version": _from_version(manifest.version),
            "job": manifest.job,
            "lineage": manifest.lineage,
            "nonce": manifest.nonce,
            "manifest": base64.b64encode(zlib.compress(manifest.job_manifest)).decode(),
            "decision": base64.b64encode(manifest.decision).decode(),
            "nodes": [[each.node, each.attempt, each.index_digest] for each in manifest.nodes],
        }
    )


def decode_manifest(text: bytes) -> StoredManifest:
    """Reads MANIFEST.json.

    Raises:
        FormatError: the text is damaged, or has impossible values.
    """
    tree = _read(text)
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


def _sign(tree: Mapping[str, object]) -> bytes:
    body = json.dumps({"format": FORMAT, **tree}, indent=1).encode() + b"\n"
    return body + xxhash.xxh3_128_hexdigest(body).encode()


def _read(text: bytes) -> dict[str, Any]:
    if len(text) > TEXT_MAX:
        raise FormatError(f"{len(text)} bytes are more than the {TEXT_MAX} of an index or manifest.")
    text_digest(text)
    try:
        tree = json.loads(text[:-_DIGEST_DIGITS])
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
