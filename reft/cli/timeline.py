"""`reft-cli timeline`: the traces of the trainers of this node, laid side by side in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft.cli.ask import ask
from reft.errors import ReftError
from reft.wire import timeline_socket
from reft.wire.v1 import daemon_pb2 as pb


@dataclass(frozen=True)
class CollectedTraces:
    """Traces of some ranks.

    Attributes:
        trace: in the format of Chrome's trace viewer and Perfetto.
        ranks: whose.
        silent: rank → why it gives none.
    """

    trace: Mapping[str, Any]
    ranks: tuple[int, ...]
    silent: Mapping[int, str]


def collect(address: str, job: str, rank: int | None) -> CollectedTraces:
    """Asks every living trainer of the job on this node, or one.

    Raises:
        ReftError: the daemon does not answer, holds no such job, or no trainer gives a trace.
    """
    reply = ask(address, "Status", pb.StatusRequest(job=job))
    (found,) = reply.jobs
    here = [each for each in found.ranks if each.node == reply.node and each.alive and rank in (None, each.rank)]
    if not here:
        where = f"on node {reply.node} now"
        said = (
            f"no rank of job {job} trains {where}."
            if rank is None
            else f"rank {rank} of job {job} does not train {where}."
        )
        raise ReftError(said, "reft-cli status shows where ranks are")
    traces: dict[int, dict[str, Any]] = {}
    silent: dict[int, str] = {}
    for each in here:
        try:
            traces[each.rank] = timeline_socket.fetch(each.pid)
        except ReftError as error:
            silent[each.rank] = str(error)
    if not traces:
        raise ReftError(" ".join(silent.values()))
    events = [event for trace in traces.values() for event in trace["traceEvents"]]
    others = {f"rank {number}": trace["otherData"] for number, trace in traces.items()}
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": others}
    return CollectedTraces(whole, tuple(traces), silent)


def write(trace: Mapping[str, Any], path: Path) -> None:
    """Writes a trace, whole or not at all. What is no plain file, such as /dev/stdout, is written to, never replaced.

    Raises:
        ReftError: the file can't be written.
    """
    text = json.dumps(trace)
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        target = path.resolve()  # a link stays one
        aside = target.with_name(f".{target.name}.part")
        try:
            aside.write_text(text)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ReftError(f"{path} can't be written: {error}.", "--output PATH") from error
