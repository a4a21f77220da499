"""What the persister's process asks of storage for a command, and what it tells meanwhile."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch
from reft.wire import messages
from reft.wire import stored_format as stored
from reft_daemon.child.control_channel import ControlMessage, send_message
from reft_daemon.persist import checkpoint_store
from reft_daemon.persist.child import THREADS, StorageServer, text_of
from reft_daemon.persist.storage_folder import StorageFolder
from reft_daemon.persist.storage_root import AnyFolder
from tests.daemon.persist.test_checkpoint_store import EPOCH, LINEAGE, VERSION, Slot, _manifest, _persist, _store
from tests.support.daemons import until

STEPS = (40, 41, 42)
EPOCHS = (EPOCH, *(Epoch(counter, bytes(16)) for counter in range(2, 6)))
LATER = [Decision(EPOCHS[i], replace(VERSION, step=STEPS[-1]), EPOCHS[:i]) for i in range(1, len(EPOCHS))]
NAME = "e1-00010203-s41"


class CountedFolder(StorageFolder):
    """Counts the texts that are read, below the folder `root`."""

    read_texts: ClassVar[Counter[str]] = Counter()

    def folder(self, name: str) -> CountedFolder:
        return CountedFolder(self.path / name, self._calls, self._root)

    def read(self, name: str, limit: int) -> bytes:
        self.read_texts[str((self.path / name).relative_to(self._root))] += 1
        return super().read(name, limit)


class HeardServer(StorageServer):
    """Keeps what it tells the daemon.

    Attributes:
        moved: numbers of the commands that have made progress, each time.
        texts: of the last answer's memfds.
        told: all messages.
    """

    def __init__(self, root: StorageFolder) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(theirs, root)  # type: ignore[arg-type]
        self.moved: list[int] = []
        self.texts: list[bytes] = []
        self.told: list[ControlMessage] = []

    def _tell(self, message: ControlMessage, descriptors: Sequence[int] = ()) -> None:
        self.told.append(message)
        if "moved" in message:
            self.moved += [message["moved"]] * (message["bytes"] > 0)  # the daemon sees a changed sum
        else:
            self.texts, self.answer = [text_of(each) for each in descriptors], message

    def ask(self, do: str, *descriptors: int, **fields: Any) -> dict[str, Any]:
        """Returns the answer to a command."""
        self.moved.clear()
        self._root.read_texts.clear()  # type: ignore[union-attr]
        self._answer({"do": do, "id": 7, "job": "run", **fields}, descriptors)
        answer: dict[str, Any] = self.answer
        return answer

    def close(self) -> None:
        self._pool.shutdown()
        self._channel.close()
        self._ours.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HeardServer]:
    """The persister of a job with several decisions and checkpoints of two nodes."""
    slots = [Slot(rank) for rank in range(4)]
    store = _store(tmp_path)
    for step in STEPS:
        for slot in slots:
            slot.seal(replace(VERSION, step=step))
        _persist(store, slots, replace(VERSION, step=step))
    for slot in slots:
        os.close(slot.source.descriptor)
    for decision in LATER:
        store.put_decision(LINEAGE, decision)
    server = HeardServer(CountedFolder(tmp_path))
    yield server
    server.close()


def test_listing_reads_each_text_once_and_tells_of_each(server: HeardServer) -> None:
    """Storage that answers slowly is not taken for one that hangs."""
    assert "error" not in server.ask("list")
    (lineage,) = json.loads(server.texts[0])
    assert len(lineage["decisions"]) == len(EPOCHS) and len(lineage["checkpoints"]) == len(STEPS)
    texts = server._root.read_texts  # type: ignore[union-attr]
    assert set(texts.values()) == {1} and len(texts) == len(EPOCHS) + len(STEPS)
    assert server.moved == [7] * len(texts)


def test_damaged_checkpoint_stops_a_start_unless_its_lineage_has_ended(server: HeardServer, tmp_path: Path) -> None:
    """After a purge, what it left on storage must not stop a fresh start."""
    for path in tmp_path.glob("run/*/e*/MANIFEST.json"):
        path.write_bytes(b"{")
    assert "is the only checkpoint" in server.ask("list")["error"]
    _store(tmp_path).end(LINEAGE)
    assert "error" not in server.ask("list")
    (lineage,) = json.loads(server.texts[0])
    assert lineage["has_ended"] and not lineage["checkpoints"]


def test_damaged_decision_of_another_lineage_stops_no_job_that_knows_its_own(
    server: HeardServer, tmp_path: Path
) -> None:
    other = "fedcba9876543210"
    _store(tmp_path).put_decision(other, LATER[0])
    (decision,) = (tmp_path / "run" / other).iterdir()
    decision.write_bytes(b"{")
    assert "is damaged" in server.ask("list")["error"], "nobody knows which lineage is the job's"
    assert "is damaged" in server.ask("list", lineage=other)["error"]
    assert "error" not in server.ask("list", lineage=LINEAGE)
    assert [each["ident"] for each in json.loads(server.texts[0])] == [LINEAGE]
    _store(tmp_path).end(other)
    assert "error" not in server.ask("list")
    assert [each["ident"] for each in json.loads(server.texts[0])] == [LINEAGE]
    assert "is damaged" in server.ask("list", lineage=other)["error"], "a node that was away knows this one"


@pytest.mark.parametrize(("do", "heads"), [("load", 0), ("open", 2)])
def test_one_checkpoint_is_read_without_the_others(server: HeardServer, do: str, heads: int) -> None:
    assert "error" not in server.ask(do, lineage=LINEAGE, name=NAME, ranks=[0, 3])
    place = f"run/{LINEAGE}/{NAME}"
    assert server._root.read_texts == Counter(  # type: ignore[union-attr]
        [f"{place}/MANIFEST.json", f"{place}/node-0.0/index.json", f"{place}/node-1.0/index.json"]
    )
    assert server.moved == [7] * (3 + heads)


def test_cancelled_command_ends_at_the_next_text(server: HeardServer) -> None:
    server._cancelled.add(7)
    assert server.ask("list")["error"] == "it was cancelled."
    assert server._root.read_texts.total() == 1 and not server.moved  # type: ignore[union-attr]


def test_command_that_no_thread_has_begun_is_cancelled_at_once(server: HeardServer) -> None:
    """Else the daemon would wait for the long ones, and kill the process."""
    gate, told = threading.Event(), server.told
    acts: list[int] = []

    def stand(message: ControlMessage, _: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        acts.append(message["id"])
        gate.wait(30)
        return {}, []

    server._stand = stand  # type: ignore[attr-defined]
    reading, writing = os.pipe()
    serving = threading.Thread(target=server.run)
    serving.start()
    for number in range(1, THREADS + 2):
        send_message(server._ours, {"do": "stand", "id": number}, [writing] if number > THREADS else [])
    os.close(writing)
    until(lambda: len(acts) == THREADS, what="a command in each thread")
    assert sorted(each["moved"] for each in told[1:] if each["bytes"] == 0) == list(range(1, THREADS + 1))
    send_message(server._ours, {"do": "cancel", "command": THREADS + 1})
    until(lambda: told[-1].get("done") == THREADS + 1, what="the answer")
    assert told[-1]["error"] == "it was cancelled." and os.read(reading, 1) == b"", "its descriptor is closed"
    os.close(reading)
    gate.set()
    server._ours.shutdown(socket.SHUT_WR)
    serving.join(30)
    server._pool.shutdown()
    assert sorted(acts) == list(range(1, THREADS + 1)) and not server._submitted


def test_cancelled_commit_does_not_wait_for_an_index(server: HeardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "LOOKUP_S", 5.0)
    server._cancelled.add(7)
    manifest = os.memfd_create("manifest")
    with open(manifest, "wb", closefd=False) as file:
        file.write(stored.encode_manifest(_manifest([stored.StoredNode(1, 9, "ab" * 16)])))
    assert server.ask("commit", manifest, decision=_hex(LATER[-1]))["error"] == "it was cancelled."


def test_cancelled_removal_ends_at_the_next_checkpoint(server: HeardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []

    def remove(_: AnyFolder, name: str) -> None:
        removed.append(name)
        server._cancelled.add(7)

    monkeypatch.setattr(checkpoint_store, "_remove", remove)
    answer = server.ask("prune", lineage=LINEAGE, decision=_hex(LATER[-1]), keep=1, keep_each_s=0)
    assert answer["error"] == "it was cancelled." and len(removed) == 1 < len(STEPS) - 1


def _hex(decision: Decision) -> str:
    return messages.decision_to(decision).SerializeToString().hex()
