"""`python -m reft_daemon.persist.audit list|verify|read ROOT`: what storage holds.

Only `reft-cli` starts it. No daemon is needed, so it also reads storage that outlived its cluster.

    list     one line of JSON: all jobs, with their lineages and checkpoints
    verify   a line now and then: bytes so far, and in all; a line for each checkpoint
    error    a line with "error" and the remedy, exit code 1; exit code 2: wrong usage
    read     frames, of one checkpoint: first JSON with its version, manifest and ranks; then
             answers to requests on stdin, see `file_reader`
"""

from __future__ import annotations

import argparse
import base64
import errno
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError

from reft.core.membership.job_identity import JOB_NAME
from reft.core.persist.stored_lineages import StoredLineage
from reft.errors import FormatError, ReftError
from reft.wire import stored_format as stored
from reft.wire.range_pipe import write_answer, write_error
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.persist.checkpoint_store import CheckpointStore, ListedCheckpoint
from reft_daemon.persist.file_reader import CheckpointFileReader, error_row, serve
from reft_daemon.persist.node_writer import stored_ranges
from reft_daemon.persist.persist_key import read_key
from reft_daemon.persist.slot_copy import SlotRange, verify_file
from reft_daemon.persist.storage_root import AnyFolder, open_root

TELL_BYTES: Final = 64 << 20  # between two lines of progress
_OF_ONE_JOB: Final = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP)


def main() -> None:
    """Prints what storage holds, or compares every byte with its digest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("list", "verify", "read"))
    parser.add_argument("root")
    parser.add_argument("--job", default="")
    parser.add_argument("--lineage", default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--key-file", type=Path)
    settings = parser.parse_args()
    try:
        key = read_key(settings.key_file) if settings.key_file else None
        found = stores(open_root(settings.root), settings.job, key)
        if settings.verb == "list":
            tell({"jobs": [job_row(store, is_asked=bool(settings.job)) for store in found]})
        elif settings.verb == "read":
            store = CheckpointStore(open_root(settings.root), settings.job, key)
            read_files(store, settings.lineage, settings.name)
        else:
            for store in found:
                verify_job(store, is_asked=bool(settings.job))
    except (ReftError, OSError) as error:
        if settings.verb == "read":
            write_error(sys.stdout.buffer, error_row(error))
        else:
            tell(error_row(error))
        sys.exit(1)


def tell(document: Mapping[str, Any]) -> None:
    """Prints one line."""
    print(json.dumps(document), flush=True)


def stores(root: AnyFolder, job: str, key: bytes | None) -> Iterator[CheckpointStore]:
    """Yields the checkpoints of each job, or of the job that was asked for.

    Raises:
        OSError: storage can't be listed.
    """
    for name in [job] if job else root.names():
        if JOB_NAME.fullmatch(name):
            store = CheckpointStore(root, name, key)
            try:
                is_job = bool(store.lineages())
            except (FormatError, OSError) as error:
                if isinstance(error, NotADirectoryError) and not job:
                    continue  # a file beside the jobs
                is_job = bool(job) or _is_of_one_job(error)  # who reads it next meets the same error
                if not is_job:
                    raise
            if is_job:
                yield store


def job_row(store: CheckpointStore, is_asked: bool) -> dict[str, Any]:
    """Returns what storage holds of a job, the newest checkpoint of each lineage first.

    Args:
        store: of the job.
        is_asked: whether the job was named. Else it must not hide the others if it can't be read.
    """
    try:
        return {
            "job": store.job, "lineages": [lineage_row(store, ident) for ident in store.lineages()], "trouble": "",
        }  # fmt: skip
    except (FormatError, OSError) as error:
        if is_asked or not _is_of_one_job(error):
            raise
        return {"job": store.job, "lineages": [], "trouble": _words_of_job(error)}


def _is_of_one_job(error: FormatError | OSError) -> bool:
    """Whether an error says nothing of the storage's other jobs; several users may share it."""
    return isinstance(error, FormatError) or error.errno in _OF_ONE_JOB


def _words_of_job(error: FormatError | OSError) -> str:
    return f"the job can't be read: {error.message if isinstance(error, FormatError) else error}"


def lineage_row(store: CheckpointStore, ident: str) -> dict[str, Any]:
    """Returns what storage holds of a lineage."""
    listed, damages = read_checkpoints(store, ident)
    lineage, trouble = StoredLineage(ident), ""
    try:
        lineage = store.lineage(ident, listed)
        order = lineage.restorable()
    except ReftError as error:
        order, trouble = [], error.message
    rows = [
        {
            "name": each.name,
            "step": each.manifest.version.step,
            "epoch": each.manifest.version.epoch.counter,
            "age_s": max(time.time() - each.time_s, 0.0),
            "nodes": len(each.manifest.nodes),
            "counts": each.manifest.version in order,
        }
        for each in sorted(listed, key=lambda each: (each.manifest.version.order, each.name), reverse=True)
    ]
    rows.sort(key=lambda row: not row["counts"])
    return {
        "lineage": ident, "ended": lineage.has_ended, "checkpoints": rows, "damaged": damages, "trouble": trouble,
    }  # fmt: skip


def read_files(store: CheckpointStore, lineage: str, name: str) -> None:
    """Answers requests for bytes of a checkpoint's files.

    Raises:
        FormatError: there is no such checkpoint, or its manifest or an index is damaged.
        OSError: storage can't be read, or nobody reads the answers.
    """
    listed, damages = read_checkpoints(store, lineage)
    found = next((each for each in listed if each.name == name), None)
    if found is None:
        raise FormatError(f"there is no checkpoint {name} of job {store.job}: {damages.get(name, 'not found')}")
    files, version = store.indexes(found), found.manifest.version
    first = {
        "version": [version.epoch.counter, version.epoch.ident.hex(), version.step],
        "manifest": base64.b64encode(found.manifest.job_manifest).decode(),
        "ranks": sorted(files),
    }
    write_answer(sys.stdout.buffer, json.dumps(first).encode())
    serve(CheckpointFileReader(files), sys.stdin.buffer, sys.stdout.buffer)


def read_checkpoints(store: CheckpointStore, lineage: str) -> tuple[list[ListedCheckpoint], dict[str, str]]:
    """Returns the complete checkpoints of a lineage; and name → damage, of the others."""
    damages: dict[str, str] = {}
    listed = store.checkpoints(lineage, lambda name, error: damages.setdefault(name, error.message))
    return listed, damages


def verify_job(store: CheckpointStore, is_asked: bool) -> None:
    """Compares each byte of a job's checkpoints with its digest; prints the result of each.

    Args:
        store, is_asked: see `job_row`.
    """
    try:
        _verify_job(store)
    except (FormatError, OSError) as error:
        if is_asked or not _is_of_one_job(error):
            raise
        _tell_result(store.job, "", "", _words_of_job(error))


def _verify_job(store: CheckpointStore) -> None:
    for lineage in store.lineages():
        listed, damages = read_checkpoints(store, lineage)
        for each in listed:
            damage = ""
            try:
                verify_checkpoint(store, each)
            except (FormatError, OSError) as error:
                damage = error.message if isinstance(error, FormatError) else str(error)
            _tell_result(store.job, lineage, each.name, damage)
        for name, damage in damages.items():
            _tell_result(store.job, lineage, name, damage)


def verify_checkpoint(store: CheckpointStore, listed: ListedCheckpoint) -> None:
    """Compares every byte of a checkpoint with its digest; prints how far it is.

    Raises:
        FormatError: a byte differs, or a rank has no file.
        OSError: a file can't be read.
    """
    try:
        manifest = pb.Manifest.FromString(listed.manifest.job_manifest)
        ranges = {
            rank: each for node in range(len(manifest.nodes)) for rank, each in stored_ranges(manifest, node).items()
        }
    except (DecodeError, ValueError) as error:
        raise FormatError(f"the job's manifest can't be read: {error}.") from error
    files = store.indexes(listed)
    if wrong := set(ranges).symmetric_difference(files):
        raise FormatError(f"the checkpoint has no file of rank {min(wrong)}, or no such rank.")
    total, done, told = sum(file.nbytes for _, file in files.values()), 0, 0
    for rank, (folder, file) in sorted(files.items()):
        for nbytes in verify_open(store, folder, file, ranges[rank]):
            done += nbytes
            if done - told >= TELL_BYTES:
                told = done
                tell({"name": listed.name, "done_bytes": done, "total_bytes": total})


def verify_open(
    store: CheckpointStore, folder: AnyFolder, file: stored.StoredFile, ranges: list[SlotRange]
) -> Iterator[int]:
    """Opens one file, and compares its bytes with its digests; yields how many were compared."""
    with open(store.open(folder, file), "rb", buffering=0) as opened:
        yield from verify_file(opened.fileno(), file, ranges)


def _tell_result(job: str, lineage: str, name: str, damage: str) -> None:
    tell({"job": job, "lineage": lineage, "name": name, "sound": not damage, "damage": damage})


if __name__ == "__main__":
    main()
