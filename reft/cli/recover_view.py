"""Shows a recovery: a survey and a plan become a view; a view becomes lines or a document.

A *survey* is what the daemons of a job answered. A *plan* says which version can be restored, and
from where. All functions are pure. Lines are for people, the document is for machines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reft.cli.status_text import aligned, spans, wrapped
from reft.core.budget import format_bytes
from reft.core.coding.placement import Placement
from reft.core.commit.version import Version
from reft.core.recovery import rebuild_plan
from reft.core.recovery.holdings import HoldingState
from reft.core.recovery.recovery import RecoveryPlan
from reft.core.recovery.stripes import NO_CELL
from reft.core.status.health import Health
from reft.core.text import counted, more
from reft.wire.inventory import JobSurvey

CELLS_SHOWN = 8  # cells of a lost node; --json shows all cells
HEALTH = {
    HoldingState.EMPTY: Health.WARN,
    HoldingState.WHOLE: Health.OK,
    HoldingState.RECOVERABLE: Health.WARN,
    HoldingState.UNRECOVERABLE: Health.ERR,
}


@dataclass(frozen=True)
class CellView:
    """One cell of which a lost node had shards, or its unreplicated leaves. Sizes are in bytes.

    Attributes:
        leaves: names of the cell's leaves.
        read: (node, bytes to read from the node).
        copied: bytes that are copied from a replica.
        decoded: bytes that are decoded.
        parity: bytes of parity that are made again.
    """

    leaves: tuple[str, ...]
    read: tuple[tuple[str, int], ...]
    copied: int
    decoded: int
    parity: int


@dataclass(frozen=True)
class LostView:
    """One node that has lost slots. Sizes are in bytes.

    Attributes:
        node: the node's name.
        ident: the node's id.
        ranks: the node's ranks that have no sealed slot of the version.
        answers: whether the node's daemon answers and knows the job. Then the node lives, and only
            the slots of `ranks` are missing or damaged.
        cells: the cells of which the node had shards.
        capsules: nodes that hold the capsules of the node's ranks.
        data_bytes: size of the data in the slots of `ranks`; "slot_bytes" in the document.
        onto: address of the replacement; empty if none is named.
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
        """The bytes to read on each node over all cells, as (node, bytes).

        Bytes of capsules are not counted: a node that only gives a capsule has 0 bytes.
        """
        read_bytes = dict.fromkeys(self.capsules, 0)
        for cell in self.cells:
            for name, nbytes in cell.read:
                read_bytes[name] = read_bytes.get(name, 0) + nbytes
        return tuple(sorted(read_bytes.items()))

    @property
    def moved(self) -> int:
        """Bytes that are read from other nodes to rebuild the slots; shown as "TO READ"."""
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
    """A view of a job's possible recovery.

    Attributes:
        outcome: "whole": no slot of `version` is lost. "recoverable": lost slots can be rebuilt.
            "rebuilt": `recover --yes` has rebuilt them; reft/cli/recover.py sets this value.
            "unrecoverable": no version can be restored. "empty": no version was ever whole.
        version: the version that would be restored.
        silent: names of the nodes that do not answer.
        newer: sentences: why each version newer than `version` can't be restored. If `version` is
            None, why no version can. Lines call them "lost", the document "missing".
        remedy: what to do if no version can be restored; else empty.
    """

    job: str
    outcome: str
    health: Health
    reason: str
    version: Version | None
    silent: tuple[str, ...]
    lost: tuple[LostView, ...]
    newer: tuple[str, ...]
    remedy: str = ""


def recovery_view(
    job: str, job_survey: JobSurvey, plan: RecoveryPlan, erased: Collection[tuple[str, str, Version]]
) -> RecoveryView:
    """Returns the view of a survey and its plan.

    Args:
        job: the job's name.
        job_survey: what the daemons hold.
        plan: made from the survey.
        erased: (node, slot, version) of slots and capsules that failed their digests.
    """
    holdings = job_survey.holdings(job, erased, plan)
    lost = tuple(_lost(job_survey, plan)) if plan.capsules else ()
    return RecoveryView(
        job, holdings.state.value, HEALTH[holdings.state], holdings.reason, holdings.version, tuple(job_survey.silent), lost,
        holdings.missing, holdings.remedy,
    )  # fmt: skip


def with_targets(view: RecoveryView, targets: Mapping[str, str]) -> RecoveryView:
    """Returns the view with the replacement of each lost node (id → address)."""
    return replace(view, lost=tuple(replace(node, onto=targets.get(node.ident, "")) for node in view.lost))


def _lost(job_survey: JobSurvey, plan: RecoveryPlan) -> list[LostView]:
    assert plan.base is not None, "a plan without a base"
    placement, manifest = job_survey.placements[plan.base.epoch], job_survey.manifests[plan.base.epoch]
    lost_nodes, world = [], len(placement.domains)
    for node in manifest.nodes:
        # The plan names a capsule only for a rank without a sealed slot of the base: a lost rank.
        ranks = [rank for rank in node.ranks if rank in plan.capsules]
        if not ranks:
            continue
        capsules = sorted({job_survey.names[plan.capsules[rank].node] for rank in ranks})
        sections = [rank for rank in plan.sections if rank in ranks]
        lost_nodes.append(
            LostView(
                job_survey.names[node.id],
                node.id,
                tuple(ranks),
                _holds(job_survey, node.id),
                tuple(
                    _cell(job_survey, plan, placement, ranks, cost)
                    for cost in rebuild_plan.costs(placement, plan.numbers(world), ranks, sections)
                ),
                tuple(capsules),
                sum(placement.rank_placement(rank).data_bytes for rank in ranks),
            )
        )
    return lost_nodes


def _cell(
    job_survey: JobSurvey,
    plan: RecoveryPlan,
    placement: Placement,
    ranks: Sequence[int],
    cost: rebuild_plan.RebuildCost,
) -> CellView:
    read: dict[str, int] = {}
    for number, nbytes in cost.read.items():
        name = job_survey.names[plan.source(number, len(placement.domains)).node]
        read[name] = read.get(name, 0) + nbytes
    if cost.cell == NO_CELL:
        sections = (placement.rank_placement(rank).unreplicated for rank in ranks if rank in plan.sections)
        leaves = tuple(leaf.name for section in sections for leaf in section.leaves)
    else:
        leaves = tuple(leaf.name for leaf in placement.division.cells[cost.cell].leaves)
    return CellView(leaves, tuple(sorted(read.items())), cost.copied, cost.decoded, cost.parity)


def _holds(job_survey: JobSurvey, ident: str) -> bool:
    return ident in job_survey.replies and job_survey.replies[ident].HasField("decision")


def recovery_lines(view: RecoveryView) -> list[str]:
    """Returns the lines for people, at most 88 columns wide."""
    lines = wrapped("job     ", f"{view.job}  {view.version or 'no version'}")
    lines += wrapped("health  ", f"{view.health.value}  {view.reason}")
    if view.silent:
        lines += wrapped("silent  ", f"no answer from {', '.join(view.silent)}")
    if view.remedy:  # the reason says what is missing
        lines += wrapped("fix     ", view.remedy)
    else:
        for line in view.newer:
            lines += wrapped("lost    ", line)
    if view.lost:
        rows = [
            (
                node.node,
                spans(node.ranks),
                format_bytes(node.copied),
                format_bytes(node.decoded),
                format_bytes(node.parity),
                format_bytes(node.moved),
            )
            for node in view.lost
        ]
        lines += ["", *aligned(("NODE", "RANKS", "COPIED", "DECODED", "PARITY", "TO READ"), rows, right=2), ""]
    for node in view.lost:
        read = ", ".join(f"{name} ({format_bytes(nbytes)})" if nbytes else name for name, nbytes in node.read)
        target = f"rebuilt on {node.onto}" if node.onto else f"no replacement yet: --onto {node.node}=HOST:PORT"
        lines += wrapped(f"{node.node}  ", f"read from {read or 'no node'}; {target}.")
        if node.answers:
            lines += wrapped("  ", f"The daemon of {node.node} answers: a restart of the job rebuilds these slots too.")
        for cell in node.cells[:CELLS_SHOWN]:
            lines += wrapped("  cell  ", _cell_line(cell))
        if len(node.cells) > CELLS_SHOWN:
            lines += wrapped("  ", f"and {counted(len(node.cells) - CELLS_SHOWN, 'more cell')}; --json lists all.")
    return lines


def _cell_line(cell: CellView) -> str:
    sizes = {"copied": cell.copied, "decoded": cell.decoded, "parity": cell.parity}
    amounts = ", ".join(f"{format_bytes(nbytes)} {word}" for word, nbytes in sizes.items() if nbytes)
    leaves = f"{cell.leaves[0]}{more(len(cell.leaves) - 1, 'leaf', 'leaves')}"
    return f"{leaves}: {amounts}; read from {', '.join(f'{name} ({format_bytes(n)})' for name, n in cell.read)}."


def document(view: RecoveryView, exit_code: int, rebuilt: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the document of `recover --json`, without schema_version.

    daemon/README.md documents its fields ("`recover`"). Programs rely on the names.
    """
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
        "remedy": view.remedy or None,
        "rebuilt": list(rebuilt),
        "exit_code": exit_code,
    }
