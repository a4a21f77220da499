"""A daemon's answer as `status` shows it: StatusReply ─► views ─► a document for machines (lines for people: `tables`).

Pure: no clock, no socket, no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reft.core.commit.version import Version
from reft.core.status.health import Health, JobFacts, RankFacts, judge, survival
from reft.core.status.loss_analysis import LossReport
from reft.core.status.protection import Protection
from reft.wire import messages
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import holders_of_unequal
from reft.wire.v1 import daemon_pb2 as pb

SCHEMA_VERSION = 1
UNLIKE_MAX = 4  # leaves whose replicas differ that are named
PAIRS_LISTED = 256  # of nodes whose loss would be fatal; with one parity shard every pair is
_SEVERITY = (Health.OK, Health.WARN, Health.ERR)


@dataclass(frozen=True)
class RankView:
    """One rank's line. `state` is training, ended (it closed its session) or gone; steps are None if there are none."""

    rank: int
    node: str
    state: str
    step: int | None
    sealed_step: int | None
    age_s: float | None
    nbytes: int
    pid: int
    trouble: str


@dataclass(frozen=True)
class NodeView:
    """All ranks of one node: the oldest sealed step and the greatest age of any. `state` may also be silent.

    `signal` is what the daemons say of it, in lower case (`reft.core.membership.failure_detector`); empty if none is known.
    """

    node: str
    state: str
    ranks: tuple[int, ...]
    sealed_step: int | None
    age_s: float | None
    nbytes: int
    signal: str = ""
    reason: str = ""
    signal_age_s: float | None = None


@dataclass(frozen=True)
class JobView:
    """One job, judged."""

    job: str
    named: bool
    script: str
    world: int
    every: int
    epoch: int
    up_s: float
    backing: str
    health: Health
    reason: str
    whole: int | None
    base: int | None
    nodes: Sequence[NodeView]
    ranks: Sequence[RankView]
    survives: Sequence[tuple[str, bool, str]]
    word: str
    protection: Protection | None
    degraded_s: float
    mismatched: Sequence[str]
    own: Sequence[tuple[str, Sequence[int]]]


def worst(jobs: Sequence[JobView]) -> Health:
    """The worst health of any job; OK if there is none."""
    return max((job.health for job in jobs), key=_SEVERITY.index, default=Health.OK)


def job_view(status: pb.JobStatus, found: JobSurvey | None = None) -> JobView:
    """What one job's status says, and what follows from the headers of all its slots if they were asked for."""
    epoch = messages.epoch_from(status.epoch)
    base = messages.version_from(status.base) if status.HasField("base") else None
    # Until the first step of an attach is whole, the version that it started from is what is held.
    whole = Version(epoch, status.whole) if status.whole >= 0 else base
    entries = sorted(status.ranks, key=lambda rank: rank.rank)
    judged = found.protection() if found else None
    protection = judged[0] if judged else None
    mismatched = _leaves_of(status.mismatched, found)
    facts = JobFacts(
        status.world, [_facts(entry) for entry in entries], whole, status.backing, list(status.silent_nodes),
        max(status.every, 1), protection, status.degraded, mismatched,
    )  # fmt: skip
    health, reason = judge(facts)
    ranks = [_rank_view(entry) for entry in entries]
    return JobView(
        status.job, status.named, status.script, status.world, status.every, epoch.counter, status.up_s, status.backing,
        health, reason, whole.step if whole else None, base.step if base else None,
        _node_views(ranks, status), ranks, survival(facts), facts.word.value if facts.word else "",
        protection, status.degraded_s, mismatched, holders_of_unequal(found.manifest) if found and found.manifest else (),
    )  # fmt: skip


def _leaves_of(cells: Sequence[int], found: JobSurvey | None) -> list[str]:
    """The first leaves of cells whose replicas differ."""
    placement = found.placements.get(found.decision.epoch) if found and found.decision else None
    known = placement.division.cells if placement else ()
    return [known[cell].leaves[0].name if cell < len(known) else f"cell {cell}" for cell in cells][:UNLIKE_MAX]


def _facts(entry: pb.RankStatus) -> RankFacts:
    sealed = messages.version_from(entry.sealed) if entry.HasField("sealed") else None
    return RankFacts(entry.rank, entry.node, entry.alive, entry.closed, entry.step, sealed, entry.trouble)


def _rank_view(entry: pb.RankStatus) -> RankView:
    state = "ended" if entry.closed else "training" if entry.alive else "gone"
    is_sealed = entry.HasField("sealed")
    return RankView(
        entry.rank, entry.node, state, entry.step if entry.step >= 0 else None,
        entry.sealed.step if is_sealed else None, entry.sealed_age_s if is_sealed else None, entry.bytes, entry.pid,
        entry.trouble,
    )  # fmt: skip


def _node_views(ranks: Sequence[RankView], status: pb.JobStatus) -> list[NodeView]:
    signals = {each.node: each for each in status.signals}
    found = []
    for name in sorted({rank.node for rank in ranks}):
        mine = [rank for rank in ranks if rank.node == name]
        states = {rank.state for rank in mine}
        sealed = [rank.sealed_step for rank in mine]
        view = NodeView(
            name,
            next(state for state in ("gone", "training", "ended") if state in states),
            tuple(rank.rank for rank in mine),
            None if None in sealed else min(step for step in sealed if step is not None),
            max((rank.age_s for rank in mine if rank.age_s is not None), default=None),
            sum(rank.nbytes for rank in mine),
        )
        found.append(_with_signal(view, signals.get(name)))
    silent = [NodeView(name, "silent", (), None, None, 0) for name in sorted(status.silent_nodes)]
    return found + [_with_signal(view, signals.get(view.node)) for view in silent]


def _with_signal(view: NodeView, found: pb.NodeSignal | None) -> NodeView:
    if found is None:
        return view
    word = pb.Signal.Name(found.signal).lower()
    return replace(view, signal=word, reason=found.reason, signal_age_s=found.age_s)


def document(reply: pb.StatusReply, jobs: Sequence[JobView], address: str) -> dict[str, Any]:
    """The document that `status --json` prints; its fields are a contract, documented in daemon/README.md."""
    return {
        "schema_version": SCHEMA_VERSION,
        "health": worst(jobs).value,
        "daemon": {
            "address": address,
            "node": reply.node,
            "node_id": reply.node_id,
            "version": reply.version,
            "pid": reply.pid,
            "held_bytes": reply.held_bytes,
            "limit_bytes": reply.limit_bytes or None,
            "spare_bytes": reply.spare_bytes,
            "spare_limit_bytes": reply.spare_limit_bytes,
            "directory": reply.directory,
            "round_bytes_sent": reply.round_bytes_sent,
            "capsule_bytes_sent": reply.capsule_bytes_sent,
        },
        "jobs": [_job_document(job) for job in jobs],
    }


def _job_document(job: JobView) -> dict[str, Any]:
    return {
        "job": job.job,
        "named": job.named,
        "script": job.script,
        "world": job.world,
        "every_steps": job.every,
        "epoch": job.epoch,
        "up_s": _rounded(job.up_s),
        "backing": job.backing,
        "health": job.health.value,
        "reason": job.reason,
        "whole_step": job.whole,
        "base_step": job.base,
        "nodes": [
            {
                "node": node.node,
                "state": node.state,
                "ranks": list(node.ranks),
                "sealed_step": node.sealed_step,
                "age_s": _rounded(node.age_s),
                "bytes": node.nbytes,
                "signal": node.signal or None,
                "signal_reason": node.reason or None,
                "signal_age_s": _rounded(node.signal_age_s),
            }
            for node in job.nodes
        ],
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.node,
                "state": rank.state,
                "step": rank.step,
                "sealed_step": rank.sealed_step,
                "age_s": _rounded(rank.age_s),
                "bytes": rank.nbytes,
                "pid": rank.pid or None,
                "trouble": rank.trouble or None,
            }
            for rank in job.ranks
        ],
        "survives": [{"loss": loss, "survives": held, "lost": lost} for loss, held, lost in job.survives],
        "protection": _protection_document(job),
        "unlike_leaves": list(job.mismatched),
        "own_leaves": [{"leaf": name, "ranks": list(ranks)} for name, ranks in job.own],
    }


def _protection_document(job: JobView) -> dict[str, Any] | None:
    found = job.protection
    if found is None:
        return None
    return {
        "word": job.word,
        "degraded_s": _rounded(job.degraded_s),
        "step": found.version.step if found.version else None,
        "tolerated_domains": found.tolerated,
        "meant_domains": found.meant,
        "fatal_nodes": list(found.fatal),
        "fatal_pairs": None if found.fatal_pairs is None else [list(pair) for pair in found.fatal_pairs[:PAIRS_LISTED]],
        "fatal_pair_count": None if found.fatal_pairs is None else len(found.fatal_pairs),
        "fatal_domains": list(found.fatal_domains),
        "groups": [
            {
                "scheme": group.scheme,
                "domains": group.domains,
                "data_shards": group.k,
                "parity_shards": group.f,
                "bytes": group.nbytes,
                "cells": group.cells,
            }
            for group in found.groups
        ],
        "exposed": [
            {"reason": each.reason, "what": each.what, "ranks": list(each.ranks), "bytes": each.nbytes}
            for each in found.exposed
        ],
    }


def what_if_document(job: str, lose: Sequence[str], version: Version | None, loss: LossReport | None) -> dict[str, Any]:
    """The document that `status --what-if --json` prints, after schema_version."""
    return {
        "job": job,
        "lose": list(lose),
        "step": version.step if version else None,
        "epoch": version.epoch.counter if version else None,
        "survives": version is not None and loss is None,
        "lost": loss.words if loss else None if version else "nothing can be restored as it is",
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
