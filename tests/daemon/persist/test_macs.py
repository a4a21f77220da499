"""Checkpoints with MACs, in a folder and in an object store: without the key none counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import xxhash

from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch
from reft.core.persist import stored_names
from reft.core.persist.retention import RetentionSettings
from reft.errors import FormatError
from reft.wire import stored_format as stored
from reft_daemon.persist.checkpoint_store import CheckpointStore
from reft_daemon.persist.storage_root import AnyFolder, open_root
from tests.daemon.persist.test_checkpoint_store import DECISION, EPOCH, LINEAGE, VERSION, Slot, _manifest, _persist
from tests.support.objects import object_server

KEY, OTHER = b"k" * 32, b"o" * 32
NAME = "e1-00010203-s40"
NEWER = replace(VERSION, step=50)


@pytest.fixture(scope="module", params=["folder", "objects"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Makes empty storages."""
    if request.param == "folder":
        yield lambda: str(tmp_path_factory.mktemp("storage"))
        return
    with object_server() as server:
        yield lambda: f"s3://{server.new_bucket()}"


@pytest.fixture
def root(place: Callable[[], str]) -> AnyFolder:
    return open_root(place())


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    made = [Slot(rank) for rank in range(4)]
    yield made
    for slot in made:
        os.close(slot.source.descriptor)


def strip(text: bytes) -> bytes:
    """Returns a text as one without the key writes it: no MAC, and a digest that fits."""
    body = text[:-32]
    assert not body.endswith(b"}\n"), "it has a MAC"
    return sign(body[:-65])


def sign(body: bytes) -> bytes:
    return body + xxhash.xxh3_128_hexdigest(body).encode()


def put(folder: AnyFolder, name: str, text: bytes) -> None:
    folder.remove(name)
    folder.write(name, text)


def lineage_of(root: AnyFolder, job: str = "run") -> AnyFolder:
    return root.folder(job).folder(LINEAGE)


def usable(root: AnyFolder, key: bytes | None = KEY) -> list[int]:
    """Returns the ranks of the newest checkpoint that a daemon with the key reads."""
    store = CheckpointStore(root, "run", key)
    listed = store.checkpoints(LINEAGE)
    return sorted(store.indexes(listed[0])) if listed else []


def test_right_key_reads_and_no_key_too(root: AnyFolder, slots: list[Slot]) -> None:
    _persist(CheckpointStore(root, "run", KEY), slots)
    assert usable(root) == usable(root, None) == [0, 1, 2, 3]
    assert CheckpointStore(root, "run", KEY).lineage(LINEAGE).restorable() == [VERSION]
    for folder, name in (
        (lineage_of(root), stored_names.decision_file(EPOCH)),
        (lineage_of(root).folder(NAME), stored_names.MANIFEST),
        (lineage_of(root).folder(NAME).folder("node-0.0"), stored_names.INDEX),
    ):
        text = folder.read(name, 1 << 20)
        assert KEY not in text and KEY.hex().encode() not in text
        strip(text)


@pytest.mark.parametrize("writer", [None, OTHER])
def test_set_without_the_right_key_is_refused(root: AnyFolder, slots: list[Slot], writer: bytes | None) -> None:
    _persist(CheckpointStore(root, "run", writer), slots)
    damages: dict[str, str] = {}
    store = CheckpointStore(root, "run", KEY)
    assert store.checkpoints(LINEAGE, lambda name, error: damages.setdefault(name, error.message)) == []
    assert ("no MAC" if writer is None else "MAC of another key") in damages[NAME]
    with pytest.raises(FormatError, match="is damaged: the decision has"):
        store.lineage(LINEAGE)
    with pytest.raises(FormatError):
        store.prune(LINEAGE, DECISION, RetentionSettings(1))
    with pytest.raises(FormatError):
        _persist(store, slots, NEWER)


@pytest.mark.parametrize("what", ["decision", "manifest", "index"])
def test_stripped_mac_is_refused(root: AnyFolder, slots: list[Slot], what: str) -> None:
    _persist(CheckpointStore(root, "run", KEY), slots)
    lineage = lineage_of(root)
    folder, name = {
        "decision": (lineage, stored_names.decision_file(EPOCH)),
        "manifest": (lineage.folder(NAME), stored_names.MANIFEST),
        "index": (lineage.folder(NAME).folder("node-1.0"), stored_names.INDEX),
    }[what]
    text = strip(folder.read(name, 1 << 20))
    put(folder, name, text)
    if what == "manifest":
        assert usable(root) == []
        return
    with pytest.raises(FormatError, match=f"the {what} has no MAC"):
        usable(root)
        CheckpointStore(root, "run", KEY).lineage(LINEAGE)


def test_forged_index_is_refused(root: AnyFolder, slots: list[Slot]) -> None:
    """The forger writes an index, and a manifest that names it, with old MACs or none."""
    _persist(CheckpointStore(root, "run", KEY), slots)
    checkpoint = lineage_of(root).folder(NAME)
    node, text = checkpoint.folder("node-0.0"), checkpoint.read(stored_names.MANIFEST, 1 << 20)
    index = stored.decode_index(node.read(stored_names.INDEX, 1 << 20))
    forged = stored.encode_index(replace(index, files=index.files[:1]))
    put(node, stored_names.INDEX, forged)
    with pytest.raises(FormatError):
        usable(root)
    manifest = stored.decode_manifest(text)
    nodes = (stored.StoredNode(0, 0, stored.text_digest(forged)), *manifest.nodes[1:])
    body = stored.encode_manifest(replace(manifest, nodes=nodes))[:-32]
    for mac in (b"", text[-97:-32], b"0" * 64 + b"\n"):
        put(checkpoint, stored_names.MANIFEST, sign(body + mac))
        assert usable(root) == [], "a manifest that another one has signed"
        assert len(usable(root, None)) == 3


def test_swapped_indexes_are_refused(root: AnyFolder, slots: list[Slot]) -> None:
    """Each has a right MAC: of another node, of another checkpoint."""
    store = CheckpointStore(root, "run", KEY)
    _persist(store, slots)
    for slot in slots:
        slot.seal(NEWER)
    _persist(store, slots, NEWER)
    newer = lineage_of(root).folder("e1-00010203-s50")
    nodes = [newer.folder(f"node-{number}.0") for number in range(2)]
    mine, other = (node.read(stored_names.INDEX, 1 << 20) for node in nodes)
    earlier = lineage_of(root).folder(NAME).folder("node-0.0").read(stored_names.INDEX, 1 << 20)
    listed = store.checkpoints(LINEAGE)
    for text in (other, earlier):
        put(nodes[0], stored_names.INDEX, text)
        with pytest.raises(FormatError, match="not the one"):
            store.indexes(next(each for each in listed if each.manifest.version == NEWER))
    put(nodes[0], stored_names.INDEX, mine)
    assert len(store.indexes(listed[0])) == 4


def test_texts_of_another_place_are_refused(root: AnyFolder, slots: list[Slot]) -> None:
    """Each has a right MAC: of another job, lineage or kind."""
    store = CheckpointStore(root, "run", KEY)
    _persist(store, slots)
    lineage, name = lineage_of(root), stored_names.decision_file(EPOCH)
    decision = lineage.read(name, 1 << 20)
    manifest = lineage.folder(NAME).read(stored_names.MANIFEST, 1 << 20)
    with pytest.raises(FormatError, match="belongs to job run"):
        stored.decode_decision(decision, "other", LINEAGE, KEY)
    with pytest.raises(FormatError, match="belongs to job run"):
        stored.decode_decision(decision, "run", "f" * 16, KEY)
    with pytest.raises(FormatError, match="MAC of another key"):
        stored.decode_decision(manifest, "run", LINEAGE, KEY)
    with pytest.raises(FormatError, match="MAC of another key"):
        stored.decode_index(manifest, KEY)


def test_decision_of_a_forger_does_not_make_a_coordinator_stale(root: AnyFolder, slots: list[Slot]) -> None:
    """It stops the coordinator, but names the forged file; it does not pass for an attach."""
    store = CheckpointStore(root, "run", KEY)
    _persist(store, slots)
    later = Decision(Epoch(2, bytes(16)), VERSION, (EPOCH,))
    CheckpointStore(root, "run").put_decision(LINEAGE, later)
    with pytest.raises(FormatError, match=r"DECISION-2-0+ is damaged: the decision has no MAC"):
        store.commit(_manifest([], NEWER), DECISION)


def test_mark_of_an_end_needs_the_key(root: AnyFolder, slots: list[Slot]) -> None:
    """A forged mark stops the job with the reason; it does not pass for a purge."""
    store, other = CheckpointStore(root, "run", KEY), "fedcba9876543210"
    _persist(store, slots)
    store.put_decision(other, DECISION)
    store.end(LINEAGE)
    store.end(LINEAGE)
    assert store.lineage(LINEAGE).has_ended and CheckpointStore(root, "run").lineage(LINEAGE).has_ended
    elsewhere = lineage_of(root).read(stored_names.ENDED, 1 << 20)
    forged = stored.encode_end("run", other, "0" * 32)
    for text, words in ((elsewhere, "lineage .0123"), (forged, "the end has no MAC"), (b"x" * 16, "do not fit")):
        put(root.folder("run").folder(other), stored_names.ENDED, text)
        assert CheckpointStore(root, "run").lineage(other).has_ended, "without a key any mark counts"
        for act in (store.lineage, store.end):
            with pytest.raises(FormatError, match=f"ENDED is damaged: .*{words}"):
                act(other)
    store.put_decision(LINEAGE, replace(DECISION, epoch=Epoch(2, bytes(16))))
    assert not store.lineage(LINEAGE).has_ended, "a new attach goes on"


def test_keys_differ_by_each_byte() -> None:
    text = stored.encode_decision(b"x", "run", LINEAGE, KEY)
    assert stored.decode_decision(text, "run", LINEAGE, KEY) == b"x"
    for key in (KEY[:-1], KEY + b"k", KEY[:-1] + b"l"):
        with pytest.raises(FormatError, match="another key"):
            stored.decode_decision(text, "run", LINEAGE, key)
    for at in range(len(text) - 32):
        changed = sign(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 : -32])
        with pytest.raises(FormatError):
            stored.decode_decision(changed, "run", LINEAGE, KEY)
