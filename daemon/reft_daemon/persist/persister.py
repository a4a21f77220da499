"""The daemon's side of its persister: sends commands, and awaits their answers.

    daemon                                        persister (`persist/child.py`)
      look    whether storage is there ──────►
      write   a node's slots, + descriptors ─►      node-<i>.<attempt>/…, index.json
              ◄───────────────────────── moved      0 bytes: a thread has begun the command
              ◄───────────────────────── moved      bytes of a block, each time
      decide  the decision of an attach ─────►      DECISION-…
      commit  manifest as a memfd, decision ─►      MANIFEST.json
      discard attempts that failed ──────────►      removes what nodes wrote in them
      prune   what is kept ──────────────────►      removes older checkpoints
      end     a lineage ─────────────────────►      ENDED
              ◄────────────────────────── done      each command, once

A command that makes no progress for its patience is given up: the process is killed, and all its
commands fail. A command that still waits for a thread is not impatient: those that have the threads
are watched. A process that waits for storage in the kernel does not end then. It stays alone:
nothing waits for it, and each command fails at once until the process has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from reft.core.commit.decision import Decision
from reft.core.commit.version import Version
from reft.core.persist.retention import RetentionSettings
from reft.core.text import counted
from reft.errors import AttachError
from reft.wire import messages
from reft.wire import stored_format as stored
from reft_daemon.arena.threads import begin_in_thread, run_to_end
from reft_daemon.child.child_process import ChildGone, ChildProcess, RunningProcess, close_untaken
from reft_daemon.child.control_channel import DESCRIPTORS_MAX, ControlMessage, fields_of, version_of
from reft_daemon.persist.child import text_of
from reft_daemon.persist.slot_copy import SlotSource

STALL_S: Final = 60.0  # without progress of a command
COMMIT_S: Final = 180.0  # LOOKUP_S for an index, and a stall; the next checkpoint waits for a discard
PRUNE_S: Final = 600.0  # large files are removed slowly
LOOK_S: Final = 0.25  # between two looks at a command's progress
LINGER_S: Final = 2.0  # in which a killed process that does not wait for storage ends
_FOREVER_S: Final = 1e7


class StorageFailed(AttachError):
    """Storage has refused something, or does not answer."""


class StoredStep(NamedTuple):
    """The newest complete checkpoint of a lineage.

    Attributes:
        version: the version.
        time_s: when it was completed, by the storage's clock.
    """

    version: Version
    time_s: float


class PersistSettings(NamedTuple):
    """How checkpoints are written.

    Attributes:
        root: a folder, or the address of an object store. Only the persister's process opens it.
        every_s: seconds between two checkpoints of a job; 0: only on request.
        retention: how many checkpoints stay.
        flushes: whether the newest whole step is persisted when a job ends, or this daemon.
        grace_s: how long this daemon may take for that after SIGTERM.
        key_file: with the key for MACs; None: there are none.
    """

    root: str
    every_s: float = 0.0
    retention: RetentionSettings = RetentionSettings()
    flushes: bool = False
    grace_s: float = 25.0
    key_file: Path | None = None


class Persister:
    """The persister of this daemon.

    Args:
        root: see `PersistSettings`.
        key_file: see `PersistSettings`. Only the persister's process reads it.
    """

    def __init__(self, root: str | Path, key_file: Path | None = None) -> None:
        self.root = str(root)
        keys = ["--key-file", str(key_file)] if key_file else []
        command = ["-m", "reft_daemon.persist", "--root", self.root, *keys]
        # Storage may take a block slowly: no reason to kill the process and other jobs' work.
        self.child = ChildProcess("persister", command, cancel_s=STALL_S)

    async def write(
        self, job: str, lineage: str, version: Version, folder: tuple[int, int], slots: Sequence[SlotSource],
        note: Callable[[int], None],
    ) -> str:  # fmt: skip
        """Writes this node's slots of a version; returns the digest of the node's index.

        Args:
            job: name of the job.
            lineage: of the job.
            version: that the slots hold.
            folder: index of this node, and the attempt.
            slots: of this node's ranks.
            note: gets how many bytes are written, now and then.

        Raises:
            StorageFailed: not all bytes are on storage.
        """
        if len(slots) > DESCRIPTORS_MAX:
            raise StorageFailed(
                f"{counted(len(slots), 'rank')} of job {job} train on this node; at most {DESCRIPTORS_MAX} can be persisted."
            )
        node, attempt = folder
        message = {
            "do": "write", "job": job, "lineage": lineage, "version": fields_of(version), "node": node,
            "attempt": attempt, "slots": [(each.rank, list(each.ranges)) for each in slots],
        }  # fmt: skip
        answer = await self._call(message, STALL_S, [each.descriptor for each in slots], note)
        digest: str = answer["index_digest"]
        return digest

    async def decide(self, job: str, lineage: str, decision: Decision) -> None:
        """Keeps the decision of an attach.

        Raises:
            StorageFailed: it is not on storage.
        """
        await self._call({"do": "decide", "job": job, "lineage": lineage, "decision": _hex(decision)}, STALL_S)

    async def look(self) -> None:
        """Looks whether storage can be listed.

        Raises:
            StorageFailed: it can't, or does not answer.
        """
        await self._call({"do": "look"}, STALL_S)

    async def newest(self, job: str, lineage: str) -> StoredStep | None:
        """Returns the newest checkpoint of a lineage; None: there is none. Clocks may jump.

        Raises:
            StorageFailed: storage can't be listed.
        """
        answer = await self._call({"do": "list", "job": job, "lineage": lineage}, STALL_S)
        (descriptor,) = answer["descriptors"]
        try:
            lineages = json.loads(await run_to_end(begin_in_thread(text_of, descriptor)))
        finally:
            os.close(descriptor)
        steps = [
            StoredStep(version_of(each["version"]), each["time_s"])
            for found in lineages
            if found["ident"] == lineage  # an empty one asks for all
            for each in found["checkpoints"]
        ]
        return max(steps, key=lambda step: step.version.order, default=None)

    async def commit(self, manifest: stored.StoredManifest, decision: Decision) -> None:
        """Completes a checkpoint.

        Raises:
            StorageFailed: it is not complete.
        """
        descriptor = os.memfd_create("reft-manifest", os.MFD_CLOEXEC)
        try:
            await run_to_end(begin_in_thread(_fill, descriptor, stored.encode_manifest(manifest)))
            message = {"do": "commit", "job": manifest.job, "decision": _hex(decision)}
            await self._call(message, COMMIT_S, [descriptor])
        finally:
            os.close(descriptor)

    async def discard(self, job: str, lineage: str, version: Version, attempts: range) -> None:
        """Removes what nodes wrote in attempts that failed, as far as storage lets it.

        Raises:
            StorageFailed: there is no answer.
        """
        message = {
            "do": "discard", "job": job, "lineage": lineage, "version": fields_of(version),
            "attempts": (attempts.start, attempts.stop),
        }  # fmt: skip
        await self._call(message, COMMIT_S)

    async def prune(self, job: str, lineage: str, decision: Decision, retention: RetentionSettings) -> int:
        """Removes the checkpoints that are not kept; returns their number.

        Raises:
            StorageFailed: some may be left.
        """
        message = {
            "do": "prune", "job": job, "lineage": lineage, "decision": _hex(decision), "keep": retention.keep,
            "keep_each_s": retention.keep_each_s,
        }  # fmt: skip
        removed: int = (await self._call(message, PRUNE_S))["removed"]
        return removed

    async def end(self, job: str, lineage: str, decision: Decision | None = None) -> bool:
        """Marks a lineage as ended on purpose.

        Returns whether it is marked; see `CheckpointStore.end`.

        Raises:
            StorageFailed: it is not marked.
        """
        message = {"do": "end", "job": job, "lineage": lineage, "decision": _hex(decision) if decision else ""}
        marked: bool = (await self._call(message, STALL_S))["marked"]
        return marked

    def close(self) -> None:
        """Ends the persister; does not wait for it."""
        if self.child.running is not None:
            self.child.end(self.child.running)

    async def _call(
        self, message: Mapping[str, Any], patience_s: float, descriptors: Sequence[int] = (),
        note: Callable[[int], None] | None = None,
    ) -> ControlMessage:  # fmt: skip
        """Returns the answer to a command.

        Raises:
            StorageFailed: the answer is an error, or there is none.
        """
        answer = await self.ask(message, patience_s, descriptors, note)
        if "error" in answer:
            raise StorageFailed(answer["error"])
        return answer

    async def ask(
        self, message: Mapping[str, Any], patience_s: float, descriptors: Sequence[int] = (),
        note: Callable[[int], None] | None = None,
    ) -> ControlMessage:  # fmt: skip
        """Returns the answer to a command, perhaps an error.

        Raises:
            StorageFailed: there is no answer.
        """
        try:
            running, number = await self._ensure(), self.child.next_number()
            call = asyncio.ensure_future(self.child.call(running, message, _FOREVER_S, number, descriptors))
            try:
                await self._watch(running, number, call, patience_s, note)
            except asyncio.CancelledError:
                call.cancel()
                await asyncio.wait({call})
                close_untaken(call)
                raise
            return call.result()
        except ChildGone as error:
            raise StorageFailed(error.message, "look at this daemon's log") from error

    async def _ensure(self) -> RunningProcess:
        end_s = time.monotonic() + LINGER_S
        while self.child.lingers:
            if time.monotonic() > end_s:
                raise StorageFailed(
                    f"a process of this daemon still waits for {self.root}.",
                    "repair the storage, or unmount it by force",
                )
            await asyncio.sleep(0.02)
        return await self.child.ensure()

    async def _watch(
        self, running: RunningProcess, number: int, call: asyncio.Future[ControlMessage], patience_s: float,
        note: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """Returns once a command has its answer, or is given up."""
        moved, moved_s = 0, time.monotonic()
        while not (await asyncio.wait({call}, timeout=min(LOOK_S, patience_s)))[0]:
            now_s, now_moved = time.monotonic(), running.progress.get(number, 0)
            if now_moved != moved:
                moved, moved_s = now_moved, now_s
                if note is not None:
                    note(moved)
            elif number not in running.progress and running.progress:
                moved_s = now_s
            elif now_s - moved_s > patience_s:
                self.child.end(running)
                await asyncio.wait({call})
                close_untaken(call)
                raise StorageFailed(
                    f"{self.root} takes nothing for {patience_s:g} s.", "check the storage; training is not affected"
                )


def _fill(descriptor: int, text: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text)


def _hex(decision: Decision) -> str:
    return messages.decision_to(decision).SerializeToString().hex()
