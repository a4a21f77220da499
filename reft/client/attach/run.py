"""The steps of attach, which all ranks take together.

    name        the names of pipeline stages; tensors that may be tied count as tied
    introduce   find or start this node's daemon; every rank learns the facts of all ranks
    inventory   one rank a node: end orphans, read the headers of all held slots and capsules;
                one rank surveys absent nodes
    describe    for each symbolic table one rank publishes the table, at the start together with the
                inventory
    storage     if memory has no base, or storage a newer history: one rank a node opens its share
                of a checkpoint, then inventory again
    ties        with such tensors: the base's manifest says which are tied, or without a base
                their bytes; if not all are, introduce and describe are taken again
    structure   frozen parameters and groups of optimizers become like the base's; if any rank's
                were others, introduce and describe are taken again
    plan        the same pure functions on every rank: base version and readers, or a fresh start;
                the new placement
    compare     a fresh start, before the placement: all ranks find mismatched leaves
    choose      with protect="auto", before the placement: copies or parity of state of one rank
    decide      one rank a node: store the decision, before any rank loads
    open, load  every rank: register as trainer, slots ─► live tensors; between open and load one
                rank a node: store the base's capsules with their holders again
                (after a damaged slot: back to inventory, without that slot)
    lease       every rank: slots for the next snapshots, every page touched; then, where nodes copy
                other ranks' state, slots for gradient records
    begin       host state, random generators last; if a node of the base was lost, take the first
                snapshot now

Each step takes the results of the steps before it, and returns its own. A result never changes.
What a step decides is a function of data. What a step does with a daemon ends with an exchange: an
error of one rank is raised on all ranks within a deadline, so no rank hangs.

    Introduction ─► JobSurvey ─► Description ─► AttachPlan ─► RestoreResult ─► AttachResult

A re-attach (`reft.client.attach.reattach`) takes most of these steps, with decisions of its own.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from reft.client.attach import stage_names
from reft.client.attach.arguments import AttachContext
from reft.client.attach.begin import begin
from reft.client.attach.copy_choice import choose
from reft.client.attach.introduce import Description, Introduction, compare, describe, introduce
from reft.client.attach.inventory import take_first_inventory, take_inventory
from reft.client.attach.local_state import RestoreMemory
from reft.client.attach.plan import (
    AttachPlan,
    AttachTry,
    make_plan,
    manifest_of_base,
    recover_at_start,
    refuse_few_slots,
    refuse_fresh_start,
)
from reft.client.attach.records import lease_records
from reft.client.attach.restore import give_up, lease, leases_of, registration, restore
from reft.client.attach.storage import take_storage
from reft.client.attach.structure import rebuild_structure
from reft.client.link.exchange import together
from reft.client.session import Session
from reft.client.state.extract import recomputable
from reft.client.state.structure import group_counts
from reft.console import say
from reft.core.coding.placement import Placement
from reft.core.recovery.recovery import RecoveryPlan
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb


@dataclass(frozen=True)
class AttachResult:
    """The session of this rank, and the manifest of its epoch."""

    session: Session
    manifest: pb.Manifest


def run_attach(context: AttachContext) -> AttachResult:
    """Runs all steps in order, with another base after a damaged one.

    Raises:
        ReftError: attach failed on some rank; this rank is no longer registered.
    """
    stages = stage_names.introduce_stages(context.rank_group, context.request.tracked)
    with contextlib.closing(RestoreMemory()) as memory:
        ties = stages.candidates  # until the survey says what the base has
        introduction = introduce(context, stages.tracked(ties), memory)
        survey, tables = take_first_inventory(context, introduction)
        description = describe(context, introduction, tables)
        counts = group_counts(introduction.state.tracked)
        attempt = AttachTry()
        while True:
            if attempt.number:
                survey = take_inventory(context, introduction, attempt.erased, attempt.first_survey)
            survey = take_storage(context, introduction, survey, attempt)
            recovery = recover_at_start(context.settings, introduction.job.id, survey, attempt)
            ties, before = agreed_ties(context, stages, survey, recovery), ties
            built = rebuild_structure(context, introduction, stages.tracked(ties), survey, recovery, counts)
            if ties != before or built.changes:
                if built.changes and context.rank == 0:
                    say(f"the objects are made like those of the snapshot: {'; '.join(built.changes)}.")
                memory.close()
                introduction = introduce(context, stages.tracked(ties), memory)
                description = describe(context, introduction)
            plan = plan_restore(context, introduction, description, survey, recovery, attempt, memory)
            leases = leases_of(context, introduction, plan)
            with registration(context, introduction, plan, leases):
                result = restore(context, introduction, plan, leases, memory.buffer, built.capsules)
                if not result.damaged:
                    slots = lease(context, introduction, plan, leases)
                    records = lease_records(context, introduction, plan, leases)
                    context.calls.close()  # threads of the session may call from here on, each by its own connection
                    session = begin(context, introduction, plan, result, leases, slots, counts, records)
                    return AttachResult(session, plan.manifest)
                give_up(context, plan, leases, result)
            # Remove the state that this try has made: an older version may not have it.
            introduction.state.tracked.bind().rollback_to(introduction.state.tensor_index)
            memory.close()
            attempt = attempt.after(plan, result, introduction.ranks.secrets.tries)


def agreed_ties(
    context: AttachContext, stages: stage_names.StageFacts, survey: JobSurvey, recovery: RecoveryPlan
) -> frozenset[str]:
    """Returns the ties between pipeline stages: those of the base, or equal bytes without a base.

    Before a restore the bytes of the new model say nothing: the stages may have other seeds.
    """
    if not stages.candidates:
        return frozenset()
    base = recovery.base
    if base is None:
        return stages.ties_now(context.rank_group)
    return stages.ties_of_base(survey.layouts[base.epoch][0].names)


def plan_restore(
    context: AttachContext,
    introduction: Introduction,
    description: Description,
    survey: JobSurvey,
    recovery: RecoveryPlan,
    attempt: AttachTry,
    memory: RestoreMemory,
) -> AttachPlan:
    """Returns the plan of a try; makes memory for the state, or frees the memory.

    Replicas are compared at a fresh start only. Before a restore the model has random values, so
    the base's mismatched leaves count.

    Raises:
        ConfigError: the slots are too few for a job that starts fresh; see `refuse_few_slots`.
        UnsupportedState: see `refuse_other_state`.
    """
    if recovery.base is None:
        refuse_fresh_start(context.settings, introduction.job.id, survey)
        memory.close()
    elif not attempt.number and not memory.buffer.nbytes:
        memory.make(introduction.state)
    base = manifest_of_base(survey, recovery)
    mismatched = compare(context, introduction, description) if base is None else base.mismatched
    description = choose(context, introduction, description, survey, mismatched)
    plan = make_plan(description, survey, recovery, mismatched, introduction.ranks.secrets.ident(attempt.number))
    if plan.base is None:
        refuse_few_slots(plan.placement)
        refuse_other_state(context, introduction, plan.placement)
    return plan


def refuse_other_state(context: AttachContext, introduction: Introduction, placement: Placement) -> None:
    """Raises UnsupportedState for state that other nodes shall compute, and can't.

    All ranks call it together, at a fresh start. A job that goes on is not stopped: copies of such
    state are sent.
    """
    if any(lane.is_copies for lane in placement.guard_lanes):
        is_copied = placement.guard_lane_of(context.rank) is not None
        leaves = placement.rank_placement(context.rank).unreplicated.leaves if is_copied else ()
        together(context.rank_group, lambda: recomputable.check_section(leaves, introduction.state.tracked.items()))
