"""The checkpoints of one job on storage: written in two phases, listed, and removed.

    each node's persister      node-<i>.<attempt>/rank-<r>.slot … ─► index.json        (phase 1)
    coordinator's persister    every index by its exact name: there, and as it was reported
                               no decision that the coordinator does not know
                               ─► MANIFEST.json, put if absent                          (phase 2)
    readers                    MANIFEST.json fits its own digest ─► the checkpoint is complete

Invariants
  1. A process that dies at any write, fsync or link leaves a complete checkpoint, or none. No
     folder is renamed.
  2. A manifest names the attempt of each node. Folders of other attempts do not count.
  3. Retention begins after a newer manifest is durable. It removes a manifest first, and makes that
     durable, then the files. So an incomplete checkpoint never has a manifest.
     One whose manifest can't be read is not incomplete: it stays, since a person may repair it, or
     storage may give other bytes the next time.
  4. A coordinator that finds a decision which it does not know neither commits nor removes.
  5. Only names of `reft.core.persist.stored_names` are read or removed.

Two coordinators may commit one version: the first manifest stays, and is as good as the second.
Each call may block as long as storage does. Only the persister's process calls.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from reft.core.commit.decision import Decision
from reft.core.commit.version import Version
from reft.core.persist import retention, stored_names
from reft.core.persist.stored_lineages import StoredLineage, unknown_decisions
from reft.errors import AttachError, FormatError
from reft.wire import messages
from reft.wire import stored_format as stored
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.persist.slot_copy import SlotSource, copy_slot
from reft_daemon.persist.storage_root import AnyFolder

log = logging.getLogger("reft.persister")
DECISION_MAX: Final = 1 << 20
LOOKUP_S: Final = 90.0  # NFS may keep for this long that a name was not there
LOOKUP_PAUSE_S: Final = 0.5
_NONCE_BYTES: Final = 16


class StaleCoordinator(AttachError):
    """Storage has a decision that this coordinator does not know: another attach went on."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A complete checkpoint.

    Attributes:
        name: of its folder.
        manifest: its manifest.
        time_s: when the manifest was written, by the storage's clock.
    """

    name: str
    manifest: stored.StoredManifest
    time_s: float


class CheckpointStore:
    """The lineages of one job on storage.

    Args:
        root: what `--persist` names.
        job: name of the job.
        key: for MACs; None: texts have none, and none is asked for.
        note: gets the bytes of each text that was read: storage answers. It gets 0 now and then in
            long work. It may raise, and ends the work so.
    """

    def __init__(
        self, root: AnyFolder, job: str, key: bytes | None = None,
        note: Callable[[int], object] = lambda nbytes: None,
    ) -> None:  # fmt: skip
        self._root = root
        self._folder = root.folder(job)
        self._key = key
        self._note = note
        self.job = job

    # Decisions

    def put_decision(self, lineage: str, decision: Decision) -> None:
        """Keeps the decision of an attach; again for the same one changes nothing.

        A new attach goes on with a lineage that was ended on purpose: another node's memory had
        the job. So the lineage has not ended. The mark goes before the decision comes: the next try
        after a failure finds no decision, or one without the mark. A mark that comes later stays.

        Raises:
            OSError: storage does not take it.
        """
        folder = self._folder.folder(lineage)
        folder.make()
        name = stored_names.decision_file(decision.epoch)
        message = messages.decision_to(decision).SerializeToString(deterministic=True)
        text = stored.encode_decision(message, self.job, lineage, self._key)
        try:
            found = self._decision(folder, name)
        except FileNotFoundError:
            folder.remove(stored_names.ENDED)  # durable before the decision: `put_if_absent` syncs the folder first
            found = decision if folder.put_if_absent(name, text) else self._decision(folder, name)
        if found != decision:
            raise AttachError(f"storage has another decision under the name {name}.")

    def decisions(self, lineage: str) -> list[Decision]:
        """Returns all decisions of a lineage.

        Raises:
            OSError: storage can't be listed or read.
            FormatError: a decision is damaged. The order of the others is not known without it.
        """
        folder = self._folder.folder(lineage)
        names = [name for name in folder.names() if stored_names.decided_epoch(name)]
        return [self._decision(folder, name) for name in names]

    def _decision(self, folder: AnyFolder, name: str) -> Decision:
        text = self._read(folder, name, DECISION_MAX)
        try:
            message = stored.decode_decision(text, self.job, folder.name, self._key)
            decision = messages.decision_from(pb.Decision.FromString(message))
        except (DecodeError, ValueError, FormatError) as error:
            words = error.message if isinstance(error, FormatError) else f"{error}."
            hint = (error.hint if isinstance(error, FormatError) else "") or "remove it if no such attach exists"
            raise FormatError(f"{folder.address(name)} is damaged: {words}", hint) from error
        if decision.epoch != stored_names.decided_epoch(name):
            raise FormatError(f"{folder.address(name)} has the decision of another epoch.")
        return decision

    def _read(self, folder: AnyFolder, name: str, limit: int) -> bytes:
        text = folder.read(name, limit)
        self._note(len(text))
        return text

    # Phase 1, on each node

    def write_node(
        self, lineage: str, version: Version, node: int, attempt: int, slots: Sequence[SlotSource]
    ) -> Generator[int, None, stored.StoredNode]:
        """Writes the slots of a node; yields how many bytes were written.

        It returns the node.

        Args:
            lineage: of the job.
            version: that the slots hold.
            node: index of the node in the manifest.
            attempt: of the coordinator. Another attempt writes another folder.
            slots: of the node's ranks.

        Raises:
            FormatError: a slot has changed.
            OSError: storage does not take it, or has this attempt already.
        """
        folder = self._checkpoint(lineage, version).folder(stored_names.node_folder(node, attempt))
        folder.make()
        files = []
        with ThreadPoolExecutor(1, "reft-storage") as writer:
            for slot in slots:
                file = folder.create(stored_names.rank_file(slot.rank), os.fstat(slot.descriptor).st_size)
                try:
                    files.append((yield from copy_slot(slot, version, file, writer)))
                finally:
                    file.abandon()
        index = stored.NodeIndex(version, node, attempt, tuple(files))
        text = stored.encode_index(index, self._key)
        folder.write(stored_names.INDEX, text)
        return stored.StoredNode(node, attempt, stored.text_digest(text))

    def discard_node(self, lineage: str, version: Version, node: int, attempt: int) -> None:
        """Removes the files of a failed attempt, as far as storage lets it: it may be full."""
        checkpoint = self._checkpoint(lineage, version)
        name = stored_names.node_folder(node, attempt)
        with contextlib.suppress(OSError, FormatError):
            _empty(checkpoint.folder(name))
            checkpoint.remove_folder(name)

    # Phase 2, on the coordinator

    def commit(self, manifest: stored.StoredManifest, decision: Decision) -> None:
        """Completes a checkpoint, once every node's index is there as the manifest names it.

        Raises:
            StaleCoordinator: another attach went on.
            FormatError: an index differs from what its node reported.
            OSError: an index is missing after LOOKUP_S, or storage fails.
        """
        checkpoint = self._checkpoint(manifest.lineage, manifest.version)
        end_s = time.monotonic() + LOOKUP_S
        for node in manifest.nodes:
            self._check_index(checkpoint, node, manifest.version, end_s)
        self.refuse_stale(manifest.lineage, decision)
        if not checkpoint.put_if_absent(stored_names.MANIFEST, stored.encode_manifest(manifest, self._key)):
            # Another coordinator of this version, or an earlier try of this one, has committed.
            self._manifest(checkpoint, manifest.lineage)

    def _check_index(
        self, checkpoint: AnyFolder, node: stored.StoredNode, version: Version, end_s: float
    ) -> stored.NodeIndex:
        folder = checkpoint.folder(stored_names.node_folder(node.node, node.attempt))
        while True:
            try:
                index = stored.decode_index(text := self._read(folder, stored_names.INDEX, stored.TEXT_MAX), self._key)
                break
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > end_s:
                    raise
            self._note(0)
            time.sleep(LOOKUP_PAUSE_S)
        if stored.text_digest(text) != node.index_digest or index.version != version or index.node != node.node:
            raise FormatError(f"the index in {folder.address()} is not the one that node {node.node} has reported.")
        return index

    def refuse_stale(self, lineage: str, decision: Decision) -> None:
        """Raises StaleCoordinator if storage has a decision that `decision` does not know.

        Raises:
            OSError, FormatError: the decisions can't be read.
        """
        if unknown := unknown_decisions(self.decisions(lineage), decision):
            newest = max(each.epoch.counter for each in unknown)
            raise StaleCoordinator(
                f"job {self.job} went on in epoch {newest}; this is epoch {decision.epoch.counter}, which writes nothing "
                "to storage any more."
            )

    # Reading

    def lineages(self) -> list[str]:
        """Returns the names of the job's lineages; storage without the job has none.

        Raises:
            OSError: storage can't be listed. Then nobody knows whether it is empty.
        """
        try:
            names = self._folder.names()
        except FileNotFoundError:
            self._root.names()  # not there either: the storage itself is missing
            return []
        return [name for name in names if stored_names.is_lineage(name)]

    def checkpoints(
        self, lineage: str, note: Callable[[str, FormatError], object] | None = None
    ) -> list[ListedCheckpoint]:
        """Returns the complete checkpoints of a lineage. One with a damaged manifest is left out.

        Args:
            lineage: its name.
            note: gets the name and the damage of each that is left out; None: the log gets it.

        Raises:
            OSError: storage can't be listed or read.
        """
        folder, listed = self._folder.folder(lineage), []
        for name in folder.names():
            if stored_names.checkpoint_name(name) is None:
                continue
            try:
                listed.append(self.checkpoint(lineage, name))
            except (FileNotFoundError, NotADirectoryError):
                continue  # not complete, or removed meanwhile
            except FormatError as error:
                if note is not None:
                    note(name, error)
                else:
                    log.error("%s is not used: %s", folder.address(name), error.message)
        return listed

    def checkpoint(self, lineage: str, name: str) -> ListedCheckpoint:
        """Returns the complete checkpoint of a name.

        Raises:
            OSError: it is not complete, or storage can't be read.
            FormatError: its manifest is damaged.
        """
        checkpoint = self._folder.folder(lineage).folder(name)
        manifest = self._manifest(checkpoint, lineage)
        return ListedCheckpoint(name, manifest, checkpoint.time_s(stored_names.MANIFEST))

    def _manifest(self, checkpoint: AnyFolder, lineage: str) -> stored.StoredManifest:
        manifest = stored.decode_manifest(self._read(checkpoint, stored_names.MANIFEST, stored.TEXT_MAX), self._key)
        if (manifest.job, manifest.lineage) != (self.job, lineage):
            raise FormatError(f"it belongs to job {manifest.job}, lineage {manifest.lineage}.")
        if str(stored_names.CheckpointName.of(manifest.version)) != checkpoint.name:
            raise FormatError(f"it belongs to {manifest.version}.")
        return manifest

    def lineage(self, name: str, listed: Sequence[ListedCheckpoint] | None = None) -> StoredLineage:
        """Returns what storage holds of a lineage.

        Args:
            name: of the lineage.
            listed: its checkpoints; None: they are read.

        Raises:
            OSError, FormatError: it can't be read.
        """
        versions = tuple(each.manifest.version for each in (self.checkpoints(name) if listed is None else listed))
        return StoredLineage(
            name, tuple(self.decisions(name)), versions, has_ended(self._folder.folder(name), self.job, self._key)
        )

    def indexes(self, listed: ListedCheckpoint) -> Mapping[int, tuple[AnyFolder, stored.StoredFile]]:
        """Returns rank → folder and file of a complete checkpoint.

        Raises:
            OSError: an index can't be read.
            FormatError: an index is damaged, of another checkpoint, or two have the same rank.
        """
        checkpoint = self._folder.folder(listed.manifest.lineage).folder(listed.name)
        files: dict[int, tuple[AnyFolder, stored.StoredFile]] = {}
        for node in listed.manifest.nodes:
            folder = checkpoint.folder(stored_names.node_folder(node.node, node.attempt))
            for file in self._check_index(checkpoint, node, listed.manifest.version, 0.0).files:
                if file.rank in files:
                    raise FormatError(f"two nodes of {listed.name} have rank {file.rank}.")
                files[file.rank] = folder, file
        return files

    @staticmethod
    def open(folder: AnyFolder, file: stored.StoredFile, note: Callable[[int], object] = lambda nbytes: None) -> int:
        """Opens a rank's file, read-only; returns the descriptor.

        Args:
            folder: of the file, see `indexes`.
            file: the file.
            note: gets how many bytes were fetched, now and then, from an object store.

        Raises:
            OSError: the file can't be opened.
            FormatError: the file has another length.
            NoRoom: an object does not fit into memory.
        """
        return folder.open(stored_names.rank_file(file.rank), file.nbytes, file.runs, note)

    # Removing

    def end(self, lineage: str, decision: Decision | None = None) -> bool:
        """Marks a lineage as ended on purpose: a later attach does not find it by itself.

        A lineage that has nothing on storage gets no mark: its job never had a whole step.

        Returns whether the lineage has ended. It has not if another attach went on with it: the
        memory that is freed is older than the job, which may train elsewhere.

        Args:
            lineage: its name.
            decision: the newest one that the freed memory knows; None: it is not asked for.

        Raises:
            OSError: storage does not take it, can't be read, or is not there.
            FormatError: storage has a mark without the MAC of the key.
        """
        folder = self._folder.folder(lineage)
        try:
            if decision is not None:
                with contextlib.suppress(FormatError):  # nobody can go on with damaged decisions
                    if unknown_decisions(self.decisions(lineage), decision):
                        return False
            text = stored.encode_end(self.job, lineage, os.urandom(_NONCE_BYTES).hex(), self._key)
            is_marked = folder.put_if_absent(stored_names.ENDED, text)
        except FileNotFoundError:
            self._root.names()  # fails where storage is not mounted
            return True
        if not is_marked:
            has_ended(folder, self.job, self._key)
        return True

    def prune(self, lineage: str, decision: Decision, settings: retention.RetentionSettings) -> list[str]:
        """Removes what `settings` do not keep; returns the names of the removed folders.

        Raises:
            StaleCoordinator: another attach went on.
            OSError, FormatError: storage fails, or can't be read.
        """
        self.refuse_stale(lineage, decision)
        folder = self._folder.folder(lineage)
        damages: dict[str, FormatError] = {}
        listed = {each.name: each for each in self.checkpoints(lineage, damages.__setitem__)}
        for name, damage in damages.items():
            log.error("%s is neither used nor removed: %s", folder.address(name), damage.message)
        found = StoredLineage(
            lineage, tuple(self.decisions(lineage)), tuple(e.manifest.version for e in listed.values())
        )
        order = [str(stored_names.CheckpointName.of(version)) for version in found.restorable()]
        entries = [
            retention.StoredEntry(name, listed[name].time_s if name in listed else folder.time_s(name), name in listed)
            for name in folder.names()
            if stored_names.checkpoint_name(name) is not None and name not in damages
        ]
        now_s = max((each.time_s for each in entries), default=0.0)  # the storage's clock, as far as it is known
        removed = retention.to_remove(entries, order, settings, now_s)
        for name in removed:
            self._note(0)
            _remove(folder, name)
        return removed

    def _checkpoint(self, lineage: str, version: Version) -> AnyFolder:
        return self._folder.folder(lineage).folder(str(stored_names.CheckpointName.of(version)))


def has_ended(lineage: AnyFolder, job: str, key: bytes | None) -> bool:
    """Whether a lineage was ended on purpose. Without a key any mark counts.

    Args:
        lineage: its folder.
        job: name of the job.
        key: for MACs, see `CheckpointStore`.

    Raises:
        OSError: storage can't be listed or read.
        FormatError: the mark has not the MAC of the key.
    """
    if stored_names.ENDED not in lineage.names():
        return False
    if key is None:
        return True
    try:
        stored.check_end(lineage.read(stored_names.ENDED, DECISION_MAX), job, lineage.name, key)
    except FileNotFoundError:
        return False  # a new attach went on meanwhile
    except FormatError as error:
        hint = error.hint or "delete that file if the job was not purged"
        raise FormatError(f"{lineage.address(stored_names.ENDED)} is damaged: {error.message}", hint) from error
    return True


def discard_attempts(lineage: AnyFolder, version: Version, attempts: range) -> None:
    """Removes what all nodes wrote in the attempts of a checkpoint that was given up.

    No manifest names such an attempt. It stays, as other remains do, where storage does not let it
    go. The folder of the checkpoint goes if it is empty then.

    Args:
        lineage: its folder.
        version: of the checkpoint.
        attempts: those of the coordinator's run.
    """
    checkpoint = lineage.folder(str(stored_names.CheckpointName.of(version)))
    with contextlib.suppress(OSError, FormatError):
        for name in checkpoint.names():
            found = stored_names.node_attempt(name)
            if found is not None and found[1] in attempts:
                _empty(checkpoint.folder(name))
                checkpoint.remove_folder(name)
        lineage.remove_folder(checkpoint.name)


def _remove(lineage: AnyFolder, name: str) -> None:
    checkpoint = lineage.folder(name)
    checkpoint.remove(stored_names.MANIFEST)
    checkpoint.sync()
    for node in checkpoint.names():
        if stored_names.node_attempt(node) is not None:
            _empty(checkpoint.folder(node))
            checkpoint.remove_folder(node)
        elif node.startswith(f".{stored_names.MANIFEST}."):
            checkpoint.remove(node)
    lineage.remove_folder(name)


def _empty(folder: AnyFolder) -> None:
    """Removes the files of a node. Its index goes first: without it they do not count."""
    names = folder.names()
    for file in sorted(names, key=lambda name: stored_names.rank_of(name) is not None):
        if stored_names.rank_of(file) is not None or file.lstrip(".").startswith(stored_names.INDEX):
            folder.remove(file)
