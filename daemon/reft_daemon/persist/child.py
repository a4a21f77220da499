"""The persister's process: carries out its daemon's commands on storage, see `persister.py`.

    main thread         reads commands
    reft-persist_N      at most THREADS: one command each; storage may stop any of them for ever

A large answer is the text of a memfd, whose descriptor is passed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from reft.core.budget import format_bytes
from reft.core.commit.decision import Decision
from reft.core.persist.retention import RetentionSettings
from reft.errors import FormatError, ReftError
from reft.wire import messages
from reft.wire import stored_format as stored
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.child.control_channel import (
    ControlMessage,
    check_descriptors,
    fields_of,
    receive_message,
    send_message,
    version_of,
)
from reft_daemon.persist.checkpoint_store import CheckpointStore, ListedCheckpoint, discard_attempts, has_ended
from reft_daemon.persist.slot_copy import SlotRange, SlotSource, read_head
from reft_daemon.persist.storage_root import AnyFolder

log = logging.getLogger("reft.persister")
THREADS: Final = 4
CANCELLED: Final = "it was cancelled."
TELL_BYTES: Final = 64 << 20  # between two news of a command
Answer = tuple[dict[str, Any], list[int]]  # fields, and descriptors that the daemon gets


class Cancelled(ReftError):
    """The daemon gave the command up."""


class StorageServer:
    """Carries out the daemon's commands.

    Args:
        channel: to the daemon.
        root: what `--persist` names.
        key: for MACs, see `CheckpointStore`.
    """

    def __init__(self, channel: socket.socket, root: AnyFolder, key: bytes | None = None) -> None:
        self._channel = channel
        self._root = root
        self._key = key
        self._pool = ThreadPoolExecutor(THREADS, "reft-persist")
        self._cancelled: set[int] = set()
        self._submitted: dict[int, tuple[Future[None], Sequence[int]]] = {}  # until they have ended
        self._lock = threading.Lock()

    def run(self) -> None:
        """Carries out commands until the channel ends."""
        self._tell({"ready": True})
        while received := receive_message(self._channel):
            message, descriptors = received
            if message["do"] == "cancel":
                self._cancel(message["command"])
                continue
            number = message["id"]
            work = self._pool.submit(self._answer, message, descriptors)
            self._submitted[number] = work, descriptors
            work.add_done_callback(functools.partial(self._forget, number))

    def _forget(self, number: int, _: Future[None]) -> None:
        self._submitted.pop(number, None)

    def _cancel(self, number: int) -> None:
        """Ends a command at its next progress; at once if no thread has it."""
        self._cancelled.add(number)
        work, descriptors = self._submitted.get(number, (None, ()))
        if work is None or not work.cancel():
            return
        self._cancelled.discard(number)
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell({"done": number, "error": CANCELLED, "damaged": False, "errno": 0})

    def _answer(self, message: ControlMessage, descriptors: Sequence[int]) -> None:
        act: Callable[[ControlMessage, Sequence[int]], Answer] = getattr(self, f"_{message['do']}")
        passed: list[int] = []
        self._tell({"moved": message["id"], "bytes": 0})
        try:
            check_descriptors(message)
            fields, passed = act(message, descriptors)
        except (ReftError, OSError) as error:
            fields = {
                "error": error.message if isinstance(error, ReftError) else str(error),
                "damaged": isinstance(error, FormatError),
                "errno": error.errno if isinstance(error, OSError) else 0,
            }
        except Exception as error:  # a bug that one command meets must not end the others
            log.exception("command %d has failed", message["id"])
            fields = {"error": str(error) or type(error).__name__, "damaged": False, "errno": 0}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._cancelled.discard(message["id"])
        self._tell({"done": message["id"], **fields}, passed)
        for descriptor in passed:
            os.close(descriptor)

    def _tell(self, message: ControlMessage, descriptors: Sequence[int] = ()) -> None:
        with self._lock, contextlib.suppress(OSError):  # the daemon has ended, and `run` ends too
            send_message(self._channel, message, descriptors)

    def _store(self, message: ControlMessage) -> CheckpointStore:
        return CheckpointStore(self._root, message["job"], self._key, functools.partial(self._note, message["id"]))

    # Commands

    def _look(self, message: ControlMessage, _: Sequence[int]) -> Answer:
        self._root.names()
        return {}, []

    def _decide(self, message: ControlMessage, _: Sequence[int]) -> Answer:
        self._store(message).put_decision(message["lineage"], decision_of(message["decision"]))
        return {}, []

    def _write(self, message: ControlMessage, descriptors: Sequence[int]) -> Answer:
        slots = [
            SlotSource(rank, descriptor, [SlotRange(*each) for each in ranges])
            for (rank, ranges), descriptor in zip(message["slots"], descriptors, strict=True)
        ]
        store = self._store(message)
        place = message["lineage"], version_of(message["version"]), message["node"], message["attempt"]
        try:
            node = self._follow(message["id"], store.write_node(*place, slots))
        except (ReftError, OSError) as error:
            if not isinstance(error, FileExistsError):  # else the files are another writer's
                store.discard_node(*place)
            if (no_room := no_room_error(error, self._root.address(), descriptors)) is not None:
                raise no_room from error
            raise
        return {"index_digest": node.index_digest}, []

    def _commit(self, message: ControlMessage, descriptors: Sequence[int]) -> Answer:
        manifest = stored.decode_manifest(text_of(descriptors[0]))
        self._store(message).commit(manifest, decision_of(message["decision"]))
        return {}, []

    def _discard(self, message: ControlMessage, _: Sequence[int]) -> Answer:
        lineage = self._root.folder(message["job"]).folder(message["lineage"])
        discard_attempts(lineage, version_of(message["version"]), range(*message["attempts"]))
        return {}, []

    def _prune(self, message: ControlMessage, _: Sequence[int]) -> Answer:
        settings = RetentionSettings(message["keep"], message["keep_each_s"])
        removed = self._store(message).prune(message["lineage"], decision_of(message["decision"]), settings)
        return {"removed": len(removed)}, []

    def _end(self, message: ControlMessage, _: Sequence[int]) -> Answer:
        store, decision = self._store(message), decision_of(message["decision"]) if message["decision"] else None
        lineages = [message["lineage"]] if message["lineage"] else store.lineages()
        marked = [store.end(lineage, decision) for lineage in lineages]
        return {"marked": all(marked)}, []

    def _list(self, message: ControlMessage, _: Sequence[int]) -> Answer:
        """Answers with all lineages, or with the one that is asked for.

        Damage of other lineages stops no job that knows its own; that of an ended one stops none.
        """
        store, lineages, asked = self._store(message), [], message.get("lineage", "")
        for name in (each for each in store.lineages() if asked in ("", each)):
            damages: dict[str, FormatError] = {}
            listed = store.checkpoints(name, damages.__setitem__)
            try:
                lineage = store.lineage(name, listed)
            except FormatError as damage:
                if asked or not has_ended(self._root.folder(store.job).folder(name), store.job, self._key):
                    raise
                log.error("job=%s lineage %s was ended, and is not used: %s", store.job, name, damage.message)
                continue
            checkpoints = [
                {"name": each.name, "version": fields_of(each.manifest.version), "time_s": each.time_s}
                for each in listed
            ]
            for damaged, error in damages.items():
                log.error("job=%s %s is not used: %s", store.job, damaged, error.message)
                if not checkpoints and not lineage.has_ended:  # else the job would start anew, as if there were none
                    raise FormatError(f"{damaged} is the only checkpoint, or as bad as all others: {error.message}")
            decisions = [messages.decision_to(each).SerializeToString().hex() for each in lineage.decisions]
            lineages.append(
                {"ident": name, "has_ended": lineage.has_ended, "decisions": decisions, "checkpoints": checkpoints}
            )
        return {}, [_memfd(json.dumps(lineages).encode())]

    def _load(self, message: ControlMessage, _: Sequence[int]) -> Answer:
        """Answers with the manifest and the ranks of a checkpoint."""
        store = self._store(message)
        listed = self._listed(message)
        ranks = sorted(store.indexes(listed))
        return {"ranks": len(ranks)}, [
            _memfd(stored.encode_manifest(listed.manifest)),
            _memfd(json.dumps(ranks).encode()),
        ]

    def _open(self, message: ControlMessage, _: Sequence[int]) -> Answer:
        """Answers with the descriptors of the files of some ranks, each followed by its head."""
        store = self._store(message)
        files = store.indexes(self._listed(message))
        opened: list[int] = []
        fetched_bytes = 0

        def note(nbytes: int) -> None:
            nonlocal fetched_bytes
            fetched_bytes += nbytes
            self._note(message["id"], nbytes)

        try:
            for rank in message["ranks"]:
                if rank not in files:
                    raise FormatError(f"the checkpoint has no file of rank {rank}.")
                descriptor = store.open(*files[rank], note)
                opened.append(descriptor)
                head, _header = read_head(descriptor)
                self._note(message["id"], len(head))
                if stored.head_digest(head) != files[rank][1].head_digest:
                    raise FormatError(f"the head of rank {rank}'s file does not fit its digest.")
                opened.append(_memfd(head))
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return {"fetched_bytes": fetched_bytes}, opened

    def _listed(self, message: ControlMessage) -> ListedCheckpoint:
        try:
            return self._store(message).checkpoint(message["lineage"], message["name"])
        except (FileNotFoundError, NotADirectoryError):
            raise FormatError(f"storage has no complete checkpoint {message['name']} any more.") from None

    def _follow(self, number: int, work: Any) -> Any:
        """Runs work to its end; tells how many bytes it has moved."""
        while True:
            try:
                self._note(number, next(work))
            except StopIteration as end:
                return end.value

    def _note(self, number: int, nbytes: int) -> None:
        """Tells that a command makes progress: without any for a while, this process is killed."""
        if number in self._cancelled:
            raise Cancelled(CANCELLED)
        self._tell({"moved": number, "bytes": nbytes})


def _memfd(text: bytes) -> int:
    descriptor = os.memfd_create("reft-answer", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text)
    return descriptor


def no_room_error(error: Exception, root: str, descriptors: Sequence[int]) -> OSError | None:
    """Returns the error of a full folder, with what is needed and free; None: it is not full.

    Call it once the files of the failed try are removed: the next one has that room, too.
    """
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    try:
        free = os.statvfs(root)
    except OSError:  # an object store
        return None
    need = format_bytes(sum(os.fstat(each).st_size for each in descriptors))
    return OSError(
        error.errno,
        f"{error.strerror}: this node's part takes up to {need}, and {format_bytes(free.f_bavail * free.f_frsize)} are free "
        f"in {root}. Make room there; an old checkpoint goes only after a newer one is complete",
    )


def text_of(descriptor: int) -> bytes:
    """Returns the bytes of an answer's or a command's memfd."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def decision_of(text: str) -> Decision:
    """Returns the decision of a message's field."""
    return messages.decision_from(pb.Decision.FromString(bytes.fromhex(text)))
