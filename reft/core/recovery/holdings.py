"""Judges what the daemons hold of a job now: the one answer for `status`, `recover` and attach.

    inventories of all daemons that answer ─► Inventory ─┐
    recovery plan ───────────────────────────────────────┴─► judge_holdings ─► Holdings
                                                               status, status --check: health
                                                               recover: outcome, exit code
                                                               attach: base, fresh start, or error

    state         what is held                                  status   recover   attach
    EMPTY         no step was ever whole                        WARN     0         starts at step 0
    WHOLE         every rank's slot of the newest version       as else  0         restores
    RECOVERABLE   a version can be decoded; slots are lost      WARN     0         restores
    UNRECOVERABLE a step was whole, and no version can be had   ERR, 4   ERR, 4    stops

Invariants
  1. Only headers count that a daemon has just read. What a round once announced, and which base a
     decision names, say what was known, never what is held.
  2. The same inventories give the same judgement everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from reft.core.coding.placement import Placement
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.inventory import Inventory
from reft.core.recovery.recovery import RecoveryPlan, describe, is_replay
from reft.core.text import counted, every

REQUIRE = "REFT_RESTORE=require"
FRAME = "=" * 88
REASON_MAX = 300  # characters of the reason why a node is silent
RANKS_MAX = 8  # a line names at most so many ranks
UNPROVED = "its answer has no proof"  # begins the reason of a node that does not know the asking node's token
PARTIAL_MAX = 3  # versions that can't be restored and whose reason is given


class HoldingState(Enum):
    """What is held of a job; the values are the outcomes of `reft-cli recover`."""

    EMPTY = "empty"
    WHOLE = "whole"
    RECOVERABLE = "recoverable"
    UNRECOVERABLE = "unrecoverable"


@dataclass(frozen=True)
class Holdings:
    """What the daemons hold of a job now.

    Attributes:
        state: see the module.
        version: the newest version that can be restored; None if there is none.
        missing: sentences: why newer versions, or all, can't be restored.
        reason: a sentence on the state.
        remedy: what to do if no version can be restored; else empty.
    """

    state: HoldingState
    version: Version | None
    missing: tuple[str, ...]
    reason: str
    remedy: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether a step was whole, and none can be restored now."""
        return self.state is HoldingState.UNRECOVERABLE


def judge_holdings(
    job: str,
    inventory: Inventory,
    plan: RecoveryPlan,
    placements: Mapping[Epoch, Placement],
    erased: Collection[tuple[str, str, Version]] = (),
) -> Holdings:
    """Returns what is held of a job now.

    Args:
        job: name of the job.
        inventory: of all daemons that answered.
        plan: the recovery plan, made from the inventory.
        placements: as of `recovery.plan`.
        erased: (node, name, version) of slots and capsules that failed their digests.
    """
    missing = tuple(_missing(inventory, plan, placements, erased))
    if plan.base is None and may_start_fresh(inventory, erased):
        reason = "no version was ever whole: there is nothing to recover. A restart starts without a snapshot."
        return Holdings(HoldingState.EMPTY, None, missing, reason)
    if plan.base is None:
        silent = [f"Node {name} does not answer{_reason_of(why)}." for name, why in inventory.silent.items()]
        causes = " ".join([*missing, *silent]) or "no slots are left."
        reason = f"job {job} had a whole version, but no version is whole now: {causes}"
        return Holdings(HoldingState.UNRECOVERABLE, None, missing, reason, _remedy(job, inventory))
    if not plan.capsules:
        reason = f"nothing is lost: {plan.base} is held by {every(len(plan.sources), 'rank')}."
        return Holdings(HoldingState.WHOLE, plan.base, missing, reason + _on_guard(plan, placements))
    ranks = counted(len(plan.capsules), "rank")
    reason = f"the slots of {ranks} are lost, but {plan.base} can be restored completely."
    if plan.sections:
        placement = placements.get(plan.base.epoch)
        is_copied = placement is not None and any(lane.is_copies for lane in placement.guard_lanes)
        reason += f" Leaves that no other rank has are {'read from copies' if is_copied else 'decoded from parity'}."
    if plan.replays:
        reason += f" {replayed(plan)}"
    return Holdings(HoldingState.RECOVERABLE, plan.base, missing, reason)


def replayed(plan: RecoveryPlan) -> str:
    """Returns a sentence on the sections that ranks replay; the plan has such."""
    assert plan.base is not None, "a base"
    first = min((each.version.step for each in plan.replays.values()), default=plan.base.step)
    ranks = ", ".join(map(str, sorted(plan.replays)[:RANKS_MAX]))
    return (
        f"The optimizer state of {'rank' if len(plan.replays) == 1 else 'ranks'} {ranks} at step {plan.base.step} is "
        f"replayed from copies of step {first} and the gradients since, and compared with its digests."
    )


def _on_guard(plan: RecoveryPlan, placements: Mapping[Epoch, Placement]) -> str:
    """Returns a sentence on the steps that survive processes and nodes; empty without exchange."""
    assert plan.base is not None, "a base"
    placement = placements.get(plan.base.epoch)
    if placement is None or not placement.guard_lanes:
        return ""
    if plan.guard is None:
        return f" Step {plan.base.step} survives processes, no step survives any node."
    return f" {survives(plan.base.step, plan.guard.step)}."


def survives(newest: int, protected: int, nodes: int = 1) -> str:
    """Returns the words on the newest step, and on the newest protected one.

    Args:
        newest: the newest step that survives lost processes.
        protected: the newest step that survives lost nodes.
        nodes: how many lost nodes, whichever they are.
    """
    loss = "any node" if nodes == 1 else f"any {nodes} nodes"
    if newest == protected:
        return f"Step {newest} survives {loss}"
    return f"Step {newest} survives processes, step {protected} survives {loss}"


def may_start_fresh(inventory: Inventory, erased: Collection[tuple[str, str, Version]]) -> bool:
    """Returns whether an attach may start without a base: if no step was ever whole."""
    return not (inventory.had_whole or erased)


def fresh_start_block(job: str, inventory: Inventory) -> str:
    """Returns lines for a job that starts anew although a step was whole.

    They are empty if nobody knows of a whole step.
    """
    if not inventory.known:
        return ""
    steps = [
        f"  {f'step {each.step}' if each.step >= 0 else 'a step'} was whole, says {each.source}."
        for each in inventory.known
    ]
    return "\n".join([
        FRAME,
        f"job {job} STARTS FROM STEP 0, although it had trained before:",
        *steps,
        f"No daemon of the {counted(len(inventory.reports), 'node')} of this start holds a slot of the job now: "
        "the memory was freed,",
        "removed, or lost with its nodes.",
        f"To go on from a checkpoint, end this run and load it. To stop instead of a start from step 0: {REQUIRE}",
        FRAME,
    ])  # fmt: skip


def stored_remedy(step: int, silent: Collection[str]) -> str:
    """Returns what to do if only storage has a step that can be restored.

    A purge would end the job on storage.

    Args:
        step: the newest one on storage.
        silent: names of the nodes that do not answer.
    """
    first = f"start {', '.join(silent)} again if the memory there may hold a newer step; then " if silent else ""
    return f"{first}start the job again: it goes on from step {step}, which is on storage"


def _missing(
    inventory: Inventory,
    plan: RecoveryPlan,
    placements: Mapping[Epoch, Placement],
    erased: Collection[tuple[str, str, Version]],
) -> list[str]:
    lines = []
    for shortfall in plan.partial[:PARTIAL_MAX]:
        epoch = shortfall.version.epoch
        members = inventory.manifests[epoch].members if epoch in inventory.manifests else ()
        places = {rank: member.name for member in members for rank in member.ranks}
        lines += describe(shortfall, placements.get(epoch), places)
    lines += [
        f"{name} from the copies of {version} on node {inventory.names.get(node, node)} was refused."
        for node, name, version in sorted(erased, key=lambda each: (each[0], each[1]))
        if is_replay(name)
    ]
    damaged = sorted(erased, key=lambda each: (each[2].order, each[0]), reverse=True)
    lines += [
        f"{version} on node {inventory.names.get(node, node)} is damaged ({name})."
        for node, name, version in damaged
        if not is_replay(name)
    ]
    return lines + [
        f"The memory of node {name} is gone: the daemon there began with an empty folder." for name in inventory.emptied
    ]


def _reason_of(silence: str) -> str:
    """Returns a reason in brackets; "" if none is known."""
    return f" ({silence[:REASON_MAX]})" if silence else ""


def _remedy(job: str, inventory: Inventory) -> str:
    """Returns what to do if no version can be restored."""
    purge = f"reft-cli purge {job} --yes, then start from your checkpoint"
    if not inventory.silent:
        return purge
    if refusing := [name for name, why in inventory.silent.items() if why.startswith(UNPROVED)]:
        return (
            f"look at reft-cli status {job} on {refusing[0]}: the daemon there answers, and does not know this node's token. "
            f"If the job is held there, it went on without this node, and nothing is lost; if not: {purge}"
        )
    nodes = ", ".join(inventory.silent)
    its = "its" if len(inventory.silent) == 1 else "their"
    cut_off = ""
    if len(inventory.reports) == 1 and not any("refused" in why for why in inventory.silent.values()):
        cut_off = (
            f"look at reft-cli status {job} on {next(iter(inventory.silent))} first: if that node is well, the network "
            "between cuts this node off, and nothing is lost. Else "
        )
    return (
        f"{cut_off}start {nodes} and {its} reft-daemon again with the old slots, then start the job; "
        f"if that memory is gone: {purge}"
    )
