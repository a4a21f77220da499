"""Turns a daemon's StatusReply into views, and views into the JSON document of `status`.

Lines for people: `status_text`. Pure functions: no clock, no socket, no terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from reft.core.coding.turn_pace import TurnPace
from reft.core.commit.version import Version
from reft.core.recovery.holdings import UNPROVED, Holdings, stored_remedy
from reft.core.recovery.inventory import marked_name
from reft.core.status.health import Health, JobFacts, RankFacts, held_version, judge, survival
from reft.core.status.loss_analysis import LossReport
from reft.core.status.protection import Protection
from reft.errors import split_remedy
from reft.wire import messages
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import holders_of_mismatched
from reft.wire.v1 import daemon_pb2 as pb

SCHEMA_VERSION = 1
MISMATCHED_MAX = 4  # names of leaves whose replicas differ
PAIRS_LISTED = 256  # pairs of nodes whose loss is fatal; with one parity shard every pair is fatal
_SEVERITY = (Health.OK, Health.WARN, Health.ERR)


@dataclass(frozen=True)
class RankView:
    """One rank's line.

    `state` is training, ended (the session was closed) or gone. A step is None if there is none.
    `wanted_slots` is 0 if unknown.
    """

    rank: int
    node: str
    state: str
    step: int | None
    sealed_step: int | None
    age_s: float | None
    nbytes: int
    pid: int
    trouble: str
    slots: int
    wanted_slots: int


@dataclass(frozen=True)
class NodeView:
    """One node's line: the oldest sealed step and the greatest age of all ranks of the node.

    `state` is that of a rank, or silent. `signal` is what the daemons report of the node, in lower
    case (`reft.core.membership.failure_detector`); empty if no daemon reports one.
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
class ReplayView:
    """How this node makes its copies of one lane: recomputed from gradients, or by the exchange.

    Attributes:
        lane: number of the lane.
        reason: why the exchange made the last turn; empty: the copies were recomputed.
        verified: newest step whose recomputed copies had the owners' digests; None: there is none.
        lag: steps from there to the newest whole step.
        marks: gradient records that the last replay folded.
        cpu_s: its CPU seconds.
        left_out: turns that the exchange still makes before the next attempt.
        log: newest step that a lost rank can replay from what is here; None: there is none.
        verdict: what auto has decided after the first turns; empty: nothing.
    """

    lane: int
    reason: str
    verified: int | None
    lag: int
    marks: int
    cpu_s: float
    left_out: int
    log: int | None = None
    verdict: str = ""

    @property
    def mode(self) -> str:
        """How the lane is kept.

        verified (recomputed here), log (exchanged, and replayed after a loss), or off (exchanged).
        """
        return "verified" if not self.reason else "off" if self.log is None else "log"


@dataclass(frozen=True)
class ExchangeView:
    """The exchange of one job, as the asked daemon sees it. A step is None if there is none.

    `turn_bytes` are what this node receives in a turn, and `received_bytes` what it has so far.
    `sent_bytes` are what it sends in a turn, at most at the `pace`. `extra_slot_bytes` is memory
    for slots that a job without exchange does not take. A lane is (step, lane, why it is not
    guarded). `choice` says what auto has chosen, and why.
    """

    protected: int | None
    protected_age_s: float
    turn: int | None
    turn_age_s: float
    turn_bytes: int
    received_bytes: int
    bytes_per_s: float
    last_turn_s: float
    sent_bytes: int
    pace: TurnPace
    parity_bytes: int
    extra_slot_bytes: int
    lanes: tuple[tuple[int, int, str], ...]
    replays: tuple[ReplayView, ...] = ()
    choice: str = ""


@dataclass(frozen=True)
class StorageView:
    """The checkpoints of one job, as its coordinator sees them. A step is None if there is none.

    `nbytes` and `took_s` are 0 if the coordinator has not written the newest checkpoint itself.
    """

    persisted: int | None
    age_s: float
    nbytes: int
    took_s: float
    step: int | None
    since_s: float
    written_bytes: int
    total_bytes: int
    trouble: str
    every_s: float

    @property
    def bytes_per_s(self) -> float:
        """How fast the newest checkpoint was written; 0: not known."""
        return self.nbytes / self.took_s if self.took_s else 0.0


@dataclass(frozen=True)
class JobView:
    """One job with its health.

    `ended_s` is the time since its last trainer ended; None: not known, or a trainer lives.
    `kept_s` is how long the asked daemon keeps its slots yet; None: a trainer lives there.
    `other_formats` is the number and the bytes of slots that the asked daemon keeps and can't read.
    """

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
    held_bytes: int
    peak_bytes: int
    remedy: str
    exchange: ExchangeView | None = None
    storage: StorageView | None = None
    ended_s: float | None = None
    kept_s: float | None = None
    other_formats: tuple[int, int] = (0, 0)

    @property
    def state(self) -> str:
        """How the job is: training, lost, silent, waiting, failed or ended.

        Of a silent job a node does not answer, so trainers may live there. A waiting job had no
        trainer yet, for example in an attach. A trainer of a failed job did not close its session.
        """
        states = {rank.state for rank in self.ranks}
        if "training" in states:
            return "training"
        if self.health is Health.ERR:
            return "lost"
        if any(node.state == "silent" for node in self.nodes):
            return "silent"
        if not any(rank.pid for rank in self.ranks):
            return "waiting"
        return "failed" if "gone" in states else "ended"

    @property
    def is_over(self) -> bool:
        """Whether no trainer is left, and the state can be restored."""
        return self.state in ("failed", "ended")


def ordered(jobs: Iterable[JobView]) -> list[JobView]:
    """Returns the jobs for a reader: those that train first, then the newest end first."""

    def place(job: JobView) -> tuple[int, float, str]:
        rank = 0 if job.state == "training" else 2 if job.is_over else 1
        return rank, inf if job.ended_s is None else job.ended_s, job.job

    return sorted(jobs, key=place)


def worst(jobs: Sequence[JobView], damaged: Sequence[pb.DamagedJob] = ()) -> Health:
    """Returns the worst health of any job; ERR with a damaged job, OK without jobs."""
    if damaged:
        return Health.ERR
    return max((job.health for job in jobs), key=_SEVERITY.index, default=Health.OK)


def job_view(status: pb.JobStatus, job_survey: JobSurvey | None = None) -> JobView:
    """Returns the view of one job.

    Args:
        status: the job's status, as a daemon reports it.
        job_survey: the survey of the headers of all slots; None if there is none.
    """
    epoch = messages.epoch_from(status.epoch)
    base = messages.version_from(status.base) if status.HasField("base") else None
    # Until the first step after an attach is whole, the job holds the version that attach restored.
    announced = Version(epoch, status.whole) if status.whole >= 0 else base
    holdings = _holdings(status, job_survey) if job_survey else None
    whole = held_version(announced, holdings)
    entries = sorted(status.ranks, key=lambda rank: rank.rank)
    judged = job_survey.protection() if job_survey else None
    protection = judged[0] if judged else None
    mismatched = _leaves_of(status.mismatched, job_survey)
    facts = JobFacts(
        status.world, [_facts(entry) for entry in entries], whole, status.backing, list(status.silent_nodes),
        max(status.every, 1), protection, status.degraded, mismatched, holdings,
        status.storage.trouble if status.named else "",
        status.storage.persisted if status.HasField("storage") and status.storage.persisted >= 0 else None,
        [name for name in status.silent_nodes if job_survey and job_survey.silent.get(name, "").startswith(UNPROVED)],
    )  # fmt: skip
    health, sentence = judge(facts)
    reason, remedy = split_remedy(sentence)
    ranks = [_rank_view(entry) for entry in entries]
    own = holders_of_mismatched(job_survey.manifest) if job_survey and job_survey.manifest else ()
    return JobView(
        status.job, status.named, status.script, status.world, status.every, epoch.counter, status.up_s, status.backing,
        health, reason, whole.step if whole else None, base.step if base else None,
        _node_views(ranks, status), ranks, survival(facts), facts.word.value if facts.word else "",
        protection, status.degraded_s, mismatched, own, status.held_bytes, status.peak_bytes,
        remedy_of(status, job_survey, holdings) or remedy,
        _exchange_view(status.exchange) if status.HasField("exchange") else None,
        _storage_view(status.storage) if status.HasField("storage") else None,
        status.ended_s if status.HasField("ended_s") else None, status.kept_s if status.HasField("kept_s") else None,
        (status.other_format_slots, status.other_format_bytes),
    )  # fmt: skip


def other_nodes(reply: pb.StatusReply, names: Iterable[str]) -> list[str]:
    """Returns the names of nodes, sorted, without the node of the daemon that replied."""
    return sorted({*names} - {reply.node, marked_name(reply.node, reply.node_id)})


def remedy_of(status: pb.JobStatus, job_survey: JobSurvey | None, holdings: Holdings | None) -> str:
    """Returns what to do if memory has no version of a job; else empty."""
    if holdings is None or job_survey is None or not holdings.is_lost:
        return ""
    if status.HasField("storage") and status.storage.persisted >= 0:
        return stored_remedy(status.storage.persisted, job_survey.silent)
    # Only the coordinator knows of storage. A purge would end the job there.
    coordinators = [job_survey.names[node.id] for node in job_survey.manifest.nodes[:1]] if job_survey.manifest else []
    if status.named and job_survey.silent.keys() & set(coordinators):
        return f"{holdings.remedy}. But if reft-cli list {status.job} names a step on storage, only start the job again"
    return holdings.remedy


def _exchange_view(exchange: pb.ExchangeStatus) -> ExchangeView:
    return ExchangeView(
        exchange.protected if exchange.protected >= 0 else None,
        exchange.protected_age_s,
        exchange.turn if exchange.turn >= 0 else None,
        exchange.turn_age_s,
        exchange.turn_bytes,
        exchange.received_bytes,
        exchange.bytes_per_s,
        exchange.last_turn_s,
        exchange.sent_bytes,
        TurnPace(exchange.pace_bytes_per_s, exchange.pace_reason),
        exchange.parity_bytes,
        exchange.extra_slot_bytes,
        tuple((lane.step, lane.lane, lane.words) for lane in exchange.lanes),
        tuple(
            ReplayView(
                each.lane, each.reason, each.verified if each.verified >= 0 else None, each.lag, each.marks, each.cpu_s,
                each.left_out, each.log if each.log >= 0 else None, each.verdict,
            )
            for each in exchange.replays
        ),
        exchange.choice,
    )  # fmt: skip


def _storage_view(storage: pb.StorageStatus) -> StorageView:
    return StorageView(
        storage.persisted if storage.persisted >= 0 else None, storage.age_s, storage.nbytes, storage.took_s,
        storage.step if storage.step >= 0 else None, storage.since_s, storage.written_bytes, storage.total_bytes,
        storage.trouble, storage.every_s,
    )  # fmt: skip


def _holdings(status: pb.JobStatus, job_survey: JobSurvey) -> Holdings | None:
    """Returns what is held; None if the survey of a training job has missed it.

    Slots change while they are read. So a survey of a job that trains may miss the version that all
    daemons have just found whole.
    """
    holdings = job_survey.holdings(status.job)
    is_training = any(rank.alive for rank in status.ranks) and not status.silent_nodes and status.whole >= 0
    return None if holdings.version is None and is_training else holdings


def _leaves_of(cells: Sequence[int], job_survey: JobSurvey | None) -> list[str]:
    """Returns the first leaf of each cell whose replicas differ."""
    placement = job_survey.placements.get(job_survey.decision.epoch) if job_survey and job_survey.decision else None
    cell_list = placement.division.cells if placement else ()
    return [cell_list[cell].leaves[0].name if cell < len(cell_list) else f"cell {cell}" for cell in cells][
        :MISMATCHED_MAX
    ]


def _facts(entry: pb.RankStatus) -> RankFacts:
    sealed = messages.version_from(entry.sealed) if entry.HasField("sealed") else None
    return RankFacts(entry.rank, entry.node, entry.alive, entry.closed, entry.step, sealed, entry.trouble)


def _rank_view(entry: pb.RankStatus) -> RankView:
    state = "ended" if entry.closed else "training" if entry.alive else "gone"
    is_sealed = entry.HasField("sealed")
    return RankView(
        entry.rank, entry.node, state, entry.step if entry.step >= 0 else None,
        entry.sealed.step if is_sealed else None, entry.sealed_age_s if is_sealed else None, entry.bytes, entry.pid,
        entry.trouble, entry.slots, entry.wanted_slots,
    )  # fmt: skip


def _node_views(ranks: Sequence[RankView], status: pb.JobStatus) -> list[NodeView]:
    signals = {each.node: each for each in status.signals}
    views = []
    for name in sorted({rank.node for rank in ranks}):
        own_ranks = [rank for rank in ranks if rank.node == name]
        states = {rank.state for rank in own_ranks}
        sealed = [rank.sealed_step for rank in own_ranks]
        view = NodeView(
            name,
            next(state for state in ("gone", "training", "ended") if state in states),
            tuple(rank.rank for rank in own_ranks),
            None if None in sealed else min(step for step in sealed if step is not None),
            max((rank.age_s for rank in own_ranks if rank.age_s is not None), default=None),
            sum(rank.nbytes for rank in own_ranks),
        )
        views.append(_with_signal(view, signals.get(name)))
    silent = [NodeView(name, "silent", (), None, None, 0) for name in sorted(status.silent_nodes)]
    return views + [_with_signal(view, signals.get(view.node)) for view in silent]


def _with_signal(view: NodeView, node_signal: pb.NodeSignal | None) -> NodeView:
    if node_signal is None:
        return view
    # The next reft's daemon, in an upgrade, may have a signal that this one does not know.
    is_known = node_signal.signal in pb.Signal.values()
    word = pb.Signal.Name(node_signal.signal).lower() if is_known else f"signal {node_signal.signal}"
    return replace(view, signal=word, reason=node_signal.reason, signal_age_s=node_signal.age_s)


def document(reply: pb.StatusReply, jobs: Sequence[JobView], address: str) -> dict[str, Any]:
    """Returns the document of `status --json`. The README documents its fields as a contract."""
    return {
        "schema_version": SCHEMA_VERSION,
        "health": worst(jobs, reply.damaged).value,
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
            "scrubbed_bytes": reply.scrubbed_bytes,
            "damaged_slots": reply.damaged_slots,
            "repaired_slots": reply.repaired_slots,
            "directory": reply.directory,
            "round_bytes_sent": reply.round_bytes_sent,
            "capsule_bytes_sent": reply.capsule_bytes_sent,
            "refused": _refused_document(reply.refused) if reply.HasField("refused") else None,
        },
        "jobs": [_job_document(job) for job in jobs],
        "damaged_jobs": [
            {"job": each.job, "reason": each.reason, "held_bytes": each.held_bytes, "slots": each.slots}
            for each in reply.damaged
        ],
    }


def _refused_document(refused: pb.RefusedStatus) -> dict[str, Any]:
    return {
        "total": refused.total,
        "last_minute": refused.last_minute,
        "reasons": [
            {
                "reason": each.reason,
                "total": each.total,
                "last_minute": each.last_minute,
                "age_s": _rounded(each.age_s),
                "addresses": list(each.addresses),
                "more_addresses": each.more_addresses,
            }
            for each in refused.reasons
        ],
        "more_reasons": refused.more_reasons,
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
        "state": job.state,
        "ended_s": None if job.state == "training" else _rounded(job.ended_s),
        "kept_s": None if job.state == "training" else _rounded(job.kept_s),
        "backing": job.backing,
        "health": job.health.value,
        "reason": job.reason,
        "remedy": job.remedy or None,
        "whole_step": job.whole,
        "base_step": job.base,
        "held_bytes": job.held_bytes,
        "peak_bytes": job.peak_bytes,
        "other_format_slots": job.other_formats[0],
        "other_format_bytes": job.other_formats[1],
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
                "slots": rank.slots,
                "wanted_slots": rank.wanted_slots or None,
            }
            for rank in job.ranks
        ],
        "survives": [{"loss": loss, "survives": held, "lost": lost} for loss, held, lost in job.survives],
        "protection": _protection_document(job),
        "exchange": _exchange_document(job.exchange),
        "storage": _storage_document(job.storage),
        "unlike_leaves": list(job.mismatched),
        "own_leaves": [{"leaf": name, "ranks": list(ranks)} for name, ranks in job.own],
    }


def _exchange_document(exchange: ExchangeView | None) -> dict[str, Any] | None:
    if exchange is None:
        return None
    has_turn = exchange.turn is not None
    return {
        "protected_step": exchange.protected,
        "protected_age_s": _rounded(exchange.protected_age_s) if exchange.protected is not None else None,
        "turn_step": exchange.turn,
        "turn_age_s": _rounded(exchange.turn_age_s) if has_turn else None,
        "turn_bytes": exchange.turn_bytes,
        "received_bytes": exchange.received_bytes if has_turn else None,
        "bytes_per_s": _rounded(exchange.bytes_per_s),
        "last_turn_s": _rounded(exchange.last_turn_s) or None,
        "sent_bytes": exchange.sent_bytes,
        "pace_bytes_per_s": exchange.pace.bytes_per_s or None,
        "pace_reason": exchange.pace.reason,
        "parity_bytes": exchange.parity_bytes,
        "extra_slot_bytes": exchange.extra_slot_bytes,
        "unguarded_lanes": [{"step": step, "lane": lane, "reason": words} for step, lane, words in exchange.lanes],
        "choice": exchange.choice or None,
        "replays": [
            {
                "lane": each.lane, "mode": each.mode, "log_step": each.log, "verified_step": each.verified,
                "lag": each.lag, "marks": each.marks, "cpu_s": _rounded(each.cpu_s), "reason": each.reason or None,
                "left_out": each.left_out, "verdict": each.verdict or None,
            }
            for each in exchange.replays
        ],
    }  # fmt: skip


def _storage_document(storage: StorageView | None) -> dict[str, Any] | None:
    if storage is None:
        return None
    is_writing = storage.step is not None
    return {
        "persisted_step": storage.persisted,
        "persisted_age_s": _rounded(storage.age_s) if storage.persisted is not None else None,
        "persisted_bytes": storage.nbytes or None,
        "bytes_per_s": _rounded(storage.bytes_per_s) or None,
        "writing_step": storage.step,
        "writing_age_s": _rounded(storage.since_s) if is_writing else None,
        "written_bytes": storage.written_bytes if is_writing else None,
        "writing_bytes": storage.total_bytes if is_writing else None,
        "every_s": _rounded(storage.every_s) or None,
        "trouble": storage.trouble or None,
    }


def _protection_document(job: JobView) -> dict[str, Any] | None:
    protection = job.protection
    if protection is None:
        return None
    return {
        "word": job.word,
        "degraded_s": _rounded(job.degraded_s),
        "step": protection.version.step if protection.version else None,
        "newest_step": protection.newest.step if protection.newest else None,
        "tolerated_domains": protection.tolerated,
        "meant_domains": protection.meant,
        "fatal_nodes": list(protection.fatal),
        "fatal_pairs": None
        if protection.fatal_pairs is None
        else [list(pair) for pair in protection.fatal_pairs[:PAIRS_LISTED]],
        "fatal_pair_count": None if protection.fatal_pairs is None else len(protection.fatal_pairs),
        "fatal_domains": list(protection.fatal_domains),
        "groups": [
            {
                "scheme": group.scheme,
                "reason": group.reason,
                "domains": group.domains,
                "data_shards": group.k,
                "parity_shards": group.f,
                "bytes": group.nbytes,
                "cells": group.cells,
            }
            for group in protection.groups
        ],
        "exposed": [
            {"reason": exposure.reason, "what": exposure.what, "ranks": list(exposure.ranks), "bytes": exposure.nbytes}
            for exposure in protection.exposed
        ],
    }


def what_if_document(
    job: str, lose: Sequence[str], version: Version | None, after: Version | None, loss: LossReport | None
) -> dict[str, Any]:
    """Returns the document of `status --what-if --json`, without schema_version.

    Args:
        job: name of the job.
        lose: names of the lost nodes and domains.
        version: the newest version that can be restored now.
        after: the newest version that can be restored after the loss.
        loss: the parts that are lost if no version can be restored.
    """
    return {
        "job": job,
        "lose": list(lose),
        "step": version.step if version else None,
        "epoch": version.epoch.counter if version else None,
        "survives": after is not None,
        "restored_step": after.step if after else None,
        "lost": None if after else loss.words if loss else "no step can be restored now",
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
