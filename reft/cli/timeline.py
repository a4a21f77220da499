"""`reft-cli timeline`: merges the traces of this node's trainers into one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft.cli.ask import job_status
from reft.errors import ReftError
from reft.wire import timeline_socket


@dataclass(frozen=True)
class CollectedTraces:
    """The merged traces of some ranks.

    Attributes:
        trace: in the format of Chrome's trace viewer and Perfetto.
        ranks: the ranks that gave a trace.
        silent: rank → the reason why the rank gave no trace.
    """

    trace: Mapping[str, Any]
    ranks: tuple[int, ...]
    silent: Mapping[int, str]


def collect(address: str, job: str, rank: int | None) -> CollectedTraces:
    """Collects traces of the job's living trainers on this node, or of one rank.

    Raises:
        ReftError: the daemon does not answer, holds no such job, or no trainer gives a trace.
    """
    status, node = job_status(address, job, deep=False)
    trainers = [
        trainer for trainer in status.ranks if trainer.node == node and trainer.alive and rank in (None, trainer.rank)
    ]
    if not trainers:
        where = f"on node {node} now"
        message = (
            f"no rank of job {job} trains {where}."
            if rank is None
            else f"rank {rank} of job {job} does not train {where}."
        )
        raise ReftError(message, "reft-cli status shows the node of each rank")
    traces: dict[int, dict[str, Any]] = {}
    silent: dict[int, str] = {}
    for trainer in trainers:
        try:
            traces[trainer.rank] = timeline_socket.fetch(trainer.pid)
        except ReftError as error:
            silent[trainer.rank] = str(error)
    if not traces:
        raise ReftError(" ".join(silent.values()))
    events = [event for trace in traces.values() for event in trace["traceEvents"]]
    metadata = {f"rank {number}": trace["otherData"] for number, trace in traces.items()}
    merged = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}
    return CollectedTraces(merged, tuple(traces), silent)


def write(trace: Mapping[str, Any], path: Path) -> None:
    """Writes the trace to a file: either the whole trace or nothing.

    A path that is not a plain file, such as /dev/stdout, is written to and never replaced.

    Raises:
        ReftError: the file can't be written.
    """
    text = json.dumps(trace)
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        target = path.resolve()  # keeps a symbolic link
        draft = target.with_name(f".{target.name}.part")
        try:
            draft.write_text(text)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ReftError(f"{path} can't be written: {error}.", "--output PATH") from error
