"""What `recover` shows: findings and a plan ─► a view ─► lines for people, a document for machines. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reft.cli.status_text import aligned, spans, wrapped
from reft.core.budget import size
from reft.core.coding.placement import Placement
from reft.core.commit.version import Version
from reft.core.recovery import rebuild, recovery
from reft.core.recovery.recovery import RecoveryPlan
from reft.core.status.health import Health
from reft.core.text import counted, every, more
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb

CELLS_SHOWN = 8  # of a lost node; --json shows all
PARTIAL_MAX = 3  # versions that can't be restored, of which it is said why


@dataclass(frozen=True)
class CellView:
    """One cell of which a lost node had shards. Sizes in bytes.

    Attributes:
        leaves: the names of its leaves.
        read: (node, bytes) that are read there.
    """

    leaves: tuple[str, ...]
    read: tuple[tuple[str, int], ...]
    copied: int
    decoded: int
    parity: int


@dataclass(frozen=True)
class LostView:
    """One node of which slots are gone. Sizes in bytes.

    Attributes:
        ident: its id.
        answers: whether its daemon answers: then only its slots are damaged.
        cells: that it had shards of.
        capsules: the nodes from which its ranks' capsules come.
        onto: the replacement, empty if there is none yet.
    """

    node: str
    ident: str
    ranks: tuple[int, ...]
    answers: bool
    cells: tuple[CellView, ...]
    capsules: tuple[str, ...]
    data_bytes: int
    onto: str = ""

    @property
    def read(self) -> tuple[tuple[str, int], ...]:
        """(node, bytes) that are read there, over all cells; 0 where only a capsule comes from there."""
        found = dict.fromkeys(self.capsules, 0)
        for cell in self.cells:
            for name, nbytes in cell.read:
                found[name] = found.get(name, 0) + nbytes
        return tuple(sorted(found.items()))

    @property
    def moved(self) -> int:
        return sum(nbytes for _, nbytes in self.read)

    @property
    def copied(self) -> int:
        return sum(cell.copied for cell in self.cells)

    @property
    def decoded(self) -> int:
        return sum(cell.decoded for cell in self.cells)

    @property
    def parity(self) -> int:
        return sum(cell.parity for cell in self.cells)


@dataclass(frozen=True)
class RecoveryView:
    """Attributes:
    outcome: whole (nothing is lost), recoverable, rebuilt, unrecoverable, or empty (nothing was ever whole).
    version: that would be restored.
    newer: why newer versions can't be, and, if none can, why no version can.
    """

    job: str
    outcome: str
    health: Health
    reason: str
    version: Version | None
    silent: tuple[str, ...]
    lost: tuple[LostView, ...]
    newer: tuple[str, ...]


def recovery_view(
    job: str, job_survey: JobSurvey, plan: RecoveryPlan, erased: Collection[tuple[str, str, Version]]
) -> RecoveryView:
    """What was found, and what may be done."""
    newer = tuple(_why_not(job_survey, plan, erased))
    silent, base = job_survey.silent, plan.base
    if base is None and not (job_survey.inventory.had_whole or erased):
        reason = "nothing was whole yet: there is nothing to recover, and a restart begins anew."
        return RecoveryView(job, "empty", Health.WARN, reason, None, silent, (), newer)
    if base is None:
        reason = "no version is whole now: it can't be recovered from memory."
        return RecoveryView(job, "unrecoverable", Health.ERR, reason, None, silent, (), newer)
    lost = tuple(_lost(job_survey, plan))
    if not lost:
        reason = f"nothing is lost: {base} is held by {every(len(plan.sources), 'rank')}."
        return RecoveryView(job, "whole", Health.OK, reason, base, silent, (), newer)
    ranks = counted(sum(len(node.ranks) for node in lost), "rank")
    reason = f"the slots of {ranks} are gone; {base} can be restored in full without them."
    return RecoveryView(job, "recoverable", Health.WARN, reason, base, silent, lost, newer)


def with_targets(view: RecoveryView, targets: Mapping[str, str]) -> RecoveryView:
    """The view with the replacement of each lost node, by its id."""
    return replace(view, lost=tuple(replace(node, onto=targets.get(node.ident, "")) for node in view.lost))


def _lost(job_survey: JobSurvey, plan: RecoveryPlan) -> list[LostView]:
    assert plan.base is not None, "a plan without a base"
    placement, manifest = job_survey.placements[plan.base.epoch], job_survey.manifests[plan.base.epoch]
    found = []
    for node in manifest.nodes:
        ranks = [rank for rank in node.ranks if rank in plan.capsules]
        if not ranks:
            continue
        capsules = sorted({job_survey.names[plan.capsules[rank].node] for rank in ranks})
        found.append(
            LostView(
                job_survey.names[node.id],
                node.id,
                tuple(ranks),
                _holds(job_survey, node.id),
                tuple(
                    _cell(job_survey, plan, placement, cost) for cost in rebuild.costs(placement, plan.sources, ranks)
                ),
                tuple(capsules),
                sum(placement.part(rank).data_bytes for rank in ranks),
            )
        )
    return found


def _cell(job_survey: JobSurvey, plan: RecoveryPlan, placement: Placement, cost: rebuild.RebuildCost) -> CellView:
    read: dict[str, int] = {}
    for rank, nbytes in cost.read.items():
        name = job_survey.names[plan.sources[rank].node]
        read[name] = read.get(name, 0) + nbytes
    leaves = tuple(leaf.name for leaf in placement.division.cells[cost.cell].leaves)
    return CellView(leaves, tuple(sorted(read.items())), cost.copied, cost.decoded, cost.parity)


def _holds(job_survey: JobSurvey, ident: str) -> bool:
    return ident in job_survey.replies and job_survey.replies[ident].HasField("decision")


def _why_not(job_survey: JobSurvey, plan: RecoveryPlan, erased: Collection[tuple[str, str, Version]]) -> list[str]:
    """Why versions newer than the base can't be restored."""
    lines = []
    for shortfall in plan.partial[:PARTIAL_MAX]:
        epoch = shortfall.version.epoch
        manifest = job_survey.manifests.get(epoch, pb.Manifest())
        places = {rank: node.name for node in manifest.nodes for rank in node.ranks}
        lines += recovery.describe(shortfall, job_survey.placements.get(epoch), places)
    lines += [
        f"{version}, {slot} on {job_survey.names.get(node, node)}: damaged."
        for node, slot, version in sorted(erased, key=str)
    ]
    return lines


def recovery_lines(view: RecoveryView) -> list[str]:
    """For people, at most 88 columns."""
    lines = wrapped("job     ", f"{view.job}  {view.version or 'no version'}")
    lines += wrapped("health  ", f"{view.health.value}  {view.reason}")
    if view.silent:
        lines += wrapped("silent  ", ", ".join(view.silent))
    for line in view.newer:
        lines += wrapped("lost    ", line)
    if view.lost:
        rows = [
            (node.node, spans(node.ranks), size(node.copied), size(node.decoded), size(node.parity), size(node.moved))
            for node in view.lost
        ]
        lines += ["", *aligned(("NODE", "RANKS", "COPIED", "DECODED", "PARITY", "TO MOVE"), rows, right=2), ""]
    for node in view.lost:
        read = ", ".join(f"{name} ({size(nbytes)})" if nbytes else name for name, nbytes in node.read)
        lines += wrapped(f"{node.node} ", f"is read from {read or 'nobody'}, rebuilt on {node.onto or 'nobody yet'}.")
        if node.answers:
            lines += wrapped("  ", "Its daemon answers: a restart decodes its slots by itself too.")
        for cell in node.cells[:CELLS_SHOWN]:
            lines += wrapped("  cell  ", _cell_line(cell))
        if len(node.cells) > CELLS_SHOWN:
            lines += wrapped("  ", f"and {counted(len(node.cells) - CELLS_SHOWN, 'more cell')}: --json lists them.")
    return lines


def _cell_line(cell: CellView) -> str:
    sizes = {"copied": cell.copied, "decoded": cell.decoded, "parity": cell.parity}
    made = ", ".join(f"{size(nbytes)} {word}" for word, nbytes in sizes.items() if nbytes)
    leaves = f"{cell.leaves[0]}{more(len(cell.leaves) - 1, 'leaf', 'leaves')}"
    return f"{leaves}: {made}, from {', '.join(f'{name} ({size(n)})' for name, n in cell.read)}."


def document(view: RecoveryView, exit_code: int, rebuilt: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document that `recover --json` prints, after schema_version; a contract, documented in daemon/README.md."""
    return {
        "job": view.job,
        "outcome": view.outcome,
        "health": view.health.value,
        "reason": view.reason,
        "step": view.version.step if view.version else None,
        "epoch": view.version.epoch.counter if view.version else None,
        "silent_nodes": list(view.silent),
        "lost_nodes": [
            {
                "node": node.node,
                "ranks": list(node.ranks),
                "answers": node.answers,
                "read": [{"node": name, "bytes": nbytes} for name, nbytes in node.read],
                "cells": [
                    {
                        "leaves": list(cell.leaves),
                        "read": [{"node": name, "bytes": nbytes} for name, nbytes in cell.read],
                        "copied_bytes": cell.copied,
                        "decoded_bytes": cell.decoded,
                        "parity_bytes": cell.parity,
                    }
                    for cell in node.cells
                ],
                "copied_bytes": node.copied,
                "decoded_bytes": node.decoded,
                "parity_bytes": node.parity,
                "moved_bytes": node.moved,
                "slot_bytes": node.data_bytes,
                "onto": node.onto or None,
            }
            for node in view.lost
        ],
        "missing": list(view.newer),
        "rebuilt": list(rebuilt),
        "exit_code": exit_code,
    }
