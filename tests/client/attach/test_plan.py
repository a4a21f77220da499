"""The steps plan and decide, with data: base, fresh start, damage, loss, and each node's part."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import replace

import pytest

from reft.client.attach import run
from reft.client.attach.inventory import Erasure
from reft.client.attach.local_state import RestoreMemory
from reft.client.attach.plan import (
    AttachPlan,
    AttachTry,
    decide_request,
    make_plan,
    manifest_of_base,
    recover,
    recover_at_start,
    refuse_few_slots,
    refuse_fresh_start,
    slots_of,
)
from reft.client.restore.restore import RestoreResult
from reft.config import Config
from reft.core.budget import format_bytes
from reft.core.coding.placement import exposures
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.holdings import may_start_fresh
from reft.core.recovery.recovery import HeldCapsule, HeldParity, RecoveryPlan, SectionReplay
from reft.errors import AttachError, ConfigError, RestoreError
from reft.wire import messages
from reft.wire.inventory import JobSurvey, StoredHistory
from reft.wire.manifest import placement_of
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.attaches import SECRETS, begun, context, description, introduction, reply, sealed, survey_of

FIRST = begun()
EPOCH = FIRST.decision.epoch
IDENT = b"i" * 16


def planned(survey: JobSurvey, erased: Collection[Erasure] = (), nodes: str = "ab", width: int = 3000) -> AttachPlan:
    """Returns the plan of an attach with one rank on each of these nodes."""
    recovery = recover("job", survey, erased, may_start_fresh(survey.inventory, erased))
    base = manifest_of_base(survey, recovery)
    mismatched = base.mismatched if base else ["model.0.w"]
    return make_plan(description(introduction(nodes, width=width)), survey, recovery, mismatched, IDENT)


def test_a_new_job_starts_fresh():
    attached = introduction()
    plan = planned(JobSurvey({node: reply(node) for node in "ab"}))
    assert plan.base is None and plan.base_manifest is None
    assert plan.decision.epoch == Epoch(1, IDENT)
    assert plan.manifest.token == attached.ranks.secrets.token
    assert list(plan.manifest.mismatched) == ["model.0.w"], "the leaves that differ now"
    assert plan.restored_from(attached.nodes) is None and not plan.must_protect_again and not plan.is_reshaped


def test_the_newest_whole_version_is_the_base():
    plan = planned(survey_of(FIRST, {"a": [7, 8, 9], "b": [7, 8]}))
    assert plan.base == Version(EPOCH, 8)
    assert plan.decision.epoch.counter == 2 and plan.decision.known == (EPOCH,)
    assert plan.manifest.job_mark == b"first mark", "a job keeps its mark"
    assert plan.manifest.token == SECRETS.token, "each attach has another token"
    assert list(plan.manifest.earlier_tokens) == [b"first token"]
    assert (plan.manifest.trained_s, plan.manifest.failures) == (60.0, 1)
    assert plan.restored_from(introduction().nodes) == "memory" and not plan.must_protect_again


def test_replicas_are_compared_at_a_fresh_start_only(monkeypatch):
    """It reads all replicated bytes of every rank. In a restore the base's leaves count."""
    compared = []
    monkeypatch.setattr(run, "compare", lambda *_: compared.append(True) or ["model.0.w"])
    introduced, base = introduction(), begun(mismatched=["model.0.b"])

    def mismatched(survey: JobSurvey) -> list[str]:
        recovery = recover("job", survey, (), True)
        plan = run.plan_restore(
            context(), introduced, description(introduced), survey, recovery, AttachTry(), RestoreMemory()
        )
        return list(plan.manifest.mismatched)

    assert mismatched(survey_of(base, {"a": [8], "b": [8]})) == ["model.0.b"] and not compared
    assert mismatched(JobSurvey({node: reply(node) for node in "ab"})) == ["model.0.w"] and compared


def test_a_description_does_not_change_with_a_plan():
    described = description(introduction())
    before = described.manifest.SerializeToString(deterministic=True)
    survey = survey_of(FIRST, {"a": [8], "b": [8]})
    make_plan(described, survey, recover("job", survey, (), False), ["model.0.w"], IDENT)
    assert described.manifest.SerializeToString(deterministic=True) == before


def test_a_lost_slot_is_decoded_with_its_capsule_and_protected_again():
    plan = planned(survey_of(FIRST, {"a": [8]}, a=[(1, 8)]), nodes="ac")
    assert plan.base == Version(EPOCH, 8) and set(plan.recovery.capsules) == {1}
    assert plan.restored_from(introduction("ac").nodes) == "peers" and plan.must_protect_again


def test_a_base_that_lost_a_slot_is_protected_again_on_the_same_nodes():
    plan = planned(survey_of(FIRST, {"a": [8], "b": []}, a=[(1, 8)]))
    assert plan.must_protect_again and plan.restored_from(introduction().nodes) == "peers"


def test_a_slot_on_another_node_comes_from_peers():
    plan = planned(survey_of(FIRST, {"a": [8], "b": [8]}), nodes="ba")
    assert not plan.recovery.capsules and not plan.is_reshaped
    assert plan.restored_from(introduction("ba").nodes) == "peers"
    assert plan.must_protect_again, "the ranks lie on other nodes, so the placement has changed"


def test_another_number_of_ranks_is_another_shape_and_another_model_is_not():
    survey = survey_of(FIRST, {"a": [8], "b": [8]})
    plan = planned(survey, nodes="a")
    assert plan.is_reshaped and plan.restored_from(introduction("a").nodes) == "peers"
    assert not planned(survey, width=2999).is_reshaped, "the restore refuses the model, with its leaves"


def test_an_erased_slot_makes_an_older_version_the_base():
    erased = {("b", "rank-1.slot-8", Version(EPOCH, 8))}
    plan = planned(survey_of(FIRST, {"a": [7, 8], "b": [7, 8]}), erased)
    assert plan.base == Version(EPOCH, 7)


def test_a_job_that_had_a_whole_version_does_not_start_fresh():
    with pytest.raises(RestoreError, match="job job had a whole version, but no version is whole now") as error:
        planned(survey_of(FIRST, {"a": [8]}))
    assert "reft-cli purge job" in str(error.value)


def test_a_fresh_start_is_refused_if_a_restore_is_required():
    survey = JobSurvey({"a": reply("a"), "b": reply("b")})
    refuse_fresh_start(Config(), "job", survey)
    survey.replies["b"].known.add(step=7, source="the agent")
    with pytest.raises(RestoreError, match=r"no step of job job is held\. Whole was step 7, says the agent\."):
        refuse_fresh_start(Config(restore="require"), "job", survey)


def test_a_job_with_erased_slots_does_not_start_fresh():
    nothing = JobSurvey({"a": reply("a")})
    assert may_start_fresh(nothing.inventory, ())
    assert not may_start_fresh(nothing.inventory, {("a", "rank-0.slot-8", Version(EPOCH, 8))})
    assert not may_start_fresh(survey_of(FIRST, {"a": []}).inventory, ())


def looping(count: int, reached: int = -1) -> JobSurvey:
    """Returns a survey of a job that was restored so often from step 8."""
    survey = survey_of(FIRST, {"a": [6, 7, 8], "b": [6, 7, 8]})
    survey.replies["a"].restores.CopyFrom(pb.RestoreCount(step=8, count=count))
    survey.replies["b"].reached = reached
    return survey


def base_of(survey: JobSurvey, restore: str = "auto") -> int:
    return recover_at_start(Config(restore=restore), "job", survey, AttachTry()).base.step


def test_a_step_that_is_restored_again_and_again_is_given_up():
    assert [base_of(looping(count)) for count in (1, 2, 3, 5)] == [8, 8, 7, 7]
    with pytest.raises(
        RestoreError, match=r"6 restores of job job .* ended before step 9.*\nFix: .*REFT_RESTORE=newest"
    ):
        base_of(looping(6))
    assert base_of(looping(6), "newest") == 8, "a person has decided"
    assert base_of(looping(6, reached=9)) == 8, "a rank got past the step"
    alone = survey_of(FIRST, {"a": [8], "b": [8]})
    alone.replies["a"].restores.CopyFrom(pb.RestoreCount(step=8, count=3))
    with pytest.raises(RestoreError, match="No older version is held in memory") as error:
        base_of(alone)
    assert "checkpoint" not in str(error.value)
    with pytest.raises(RestoreError, match=r"or go back to an older checkpoint: .* reft-cli recover job --step N"):
        base_of(replace(alone, storage=StoredHistory(())))


def test_two_histories_are_refused():
    replies = {
        "a": reply("a", begun("a", b"1" * 16), [sealed(0, 8, Epoch(1, b"1" * 16))]),
        "b": reply("b", begun("b", b"2" * 16), [sealed(0, 9, Epoch(1, b"2" * 16))]),
    }
    with pytest.raises(AttachError, match=r"epoch 1 on name-a, up to step 8"):
        planned(JobSurvey(replies))


# Tries


def test_after_damage_older_versions_are_tried_until_none_is_left():
    survey, damaged = survey_of(FIRST, {"a": [6, 7, 8], "b": [6, 7, 8]}), [1]
    attempt, bases = AttachTry(), []
    with pytest.raises(RestoreError, match=r"no version is whole now.* on node name-b is damaged"):
        while True:
            plan = planned(survey, attempt.erased)
            assert plan.base is not None
            bases.append(plan.base.step)
            attempt = attempt.after(plan, RestoreResult(tuple(damaged)), tries=6)
            survey = JobSurvey(survey.replies, before=attempt.first_survey)
    assert bases == [8, 7, 6] and attempt.number == 3
    assert {slot for _, slot, _ in attempt.erased} == {f"rank-1.slot-{step}" for step in (6, 7, 8)}


def test_a_damaged_capsule_is_erased_under_its_own_name():
    plan = planned(survey_of(FIRST, {"a": [8]}, a=[(1, 8)]), nodes="ac")
    assert AttachTry().after(plan, RestoreResult((1,)), tries=4).erased == {("a", "capsule-1", Version(EPOCH, 8))}


def test_a_refused_replay_is_erased_with_the_version_of_its_copies():
    plan = planned(survey_of(FIRST, {"a": [8]}, a=[(1, 8)]), nodes="ac")
    protected = Version(EPOCH, 6)
    copies, capsule = (
        HeldParity("a", 0, "parity-0.slot-0", SlotState.SEALED, protected),
        HeldCapsule("a", 1, protected, 4),
    )
    replays = {1: SectionReplay(1, copies, capsule, ())}
    refused = replace(plan, recovery=replace(plan.recovery, replays=replays))
    assert AttachTry().after(refused, RestoreResult((5,)), tries=4).erased == {("a", "replay-1", protected)}


def test_after_the_last_try_attach_fails():
    plan = planned(survey_of(FIRST, {"a": [8], "b": [8]}))
    attempt = AttachTry()
    for _ in range(2):
        attempt = attempt.after(plan, RestoreResult((0,)), tries=3)
    with pytest.raises(
        RestoreError, match=r"every version of job job that was tried is damaged.\nFix: reft-cli purge job"
    ):
        attempt.after(plan, RestoreResult((0,)), tries=3)


def test_later_tries_remember_the_first_survey():
    first = planned(survey_of(FIRST, {"a": [7, 8], "b": [7, 8]}))
    attempt = AttachTry().after(first, RestoreResult((1,)), tries=4)
    second = planned(JobSurvey(first.survey.replies, before=attempt.first_survey), attempt.erased)
    assert attempt.after(second, RestoreResult((1,)), tries=4).first_survey is first.survey


# The decision


def test_each_node_gets_the_decision_its_place_and_its_dropped_slots():
    plan = planned(survey_of(FIRST, {"a": [8, 9], "b": [8]}))
    requests = [decide_request(introduction(rank=rank), plan) for rank in range(2)]
    assert [request.node_index for request in requests] == [0, 1]
    assert [list(request.dropped) for request in requests] == [["rank-0.slot-9"], []]
    for request in requests:
        assert request.counts_on_slots
        assert request.manifest == plan.manifest and request.base_manifest == FIRST.manifest
        assert messages.decision_from(request.decision) == plan.decision


def test_only_the_daemons_that_told_of_slots_in_memory_must_still_hold_them():
    survey = survey_of(FIRST, {"a": [8], "b": [8]})
    replies = {**survey.replies, "b": pb.InventoryReply()}
    replies["b"].CopyFrom(survey.replies["b"])
    for slot in replies["b"].slots:
        slot.stored = True
    plan = planned(survey)
    requests = [
        decide_request(introduction(rank=rank), dataclasses.replace(plan, survey=JobSurvey(told)))
        for rank, told in ((0, replies), (1, replies), (1, {"a": replies["a"]}))
    ]
    assert [request.counts_on_slots for request in requests] == [True, False, False]


def test_a_fresh_start_has_no_manifest_of_a_base():
    plan = planned(JobSurvey({"a": reply("a")}))
    request: pb.DecideRequest = decide_request(introduction(), plan)
    assert not request.HasField("base_manifest") and not request.decision.HasField("base")
    assert not request.counts_on_slots


# The number of slots

OWN_BYTES = (1 << 15) * 2 * 4  # of model.0.w, which differs by rank


def with_slots(requested: int, nodes: str = "abcd", protect: str = "arc", own: bool = True) -> AttachPlan:
    """Returns the plan of a fresh start. With `own`, each rank has a leaf that no other has."""
    described = description(introduction(nodes, width=1 << 15))
    described.manifest.slots, described.manifest.protect = requested, protect
    return make_plan(described, JobSurvey({}), RecoveryPlan(None), ["model.0.w"] if own else [], IDENT)


@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        ({}, 4), ({"own": False}, 3), ({"nodes": "aaaa"}, 3), ({"protect": "none"}, 3),
        ({"requested": 5}, 5), ({"requested": 2, "own": False}, 2), ({"requested": 2}, 2),
    ],
)  # fmt: skip
def test_a_rank_has_one_slot_more_where_state_is_exchanged(arguments, slots):
    plan = with_slots(**{"requested": 0, **arguments})
    assert plan.manifest.slots == plan.placement.slots == slots
    lanes = plan.placement.guard_lanes
    assert placement_of(plan.manifest).guard_lanes == lanes, "all who have the manifest know the same"
    assert [lane.members for lane in lanes] == ([(0, 1, 2, 3)] if arguments in ({}, {"requested": 5}) else [])
    assert slots_of(Config(slots=0), plan.manifest) == slots and slots_of(Config(slots=7), plan.manifest) == 7


@pytest.mark.parametrize(("own", "requested", "slots"), [(False, 0, 4), (True, 0, 5), (True, 3, 3)])
def test_a_rank_has_one_slot_more_where_checkpoints_go_to_storage(own, requested, slots):
    described = description(introduction("abcd", width=1 << 15))
    described.manifest.lineage, described.manifest.slots = "0123456789abcdef", requested
    plan = make_plan(described, JobSurvey({}), RecoveryPlan(None), ["model.0.w"] if own else [], IDENT)
    assert plan.manifest.slots == slots and plan.manifest.lineage == "0123456789abcdef"


@pytest.mark.parametrize(
    ("before", "now", "kept"), [("a" * 16, "b" * 16, "a" * 16), ("a" * 16, "", "a" * 16), ("", "b" * 16, "b" * 16)]
)
def test_a_job_keeps_its_lineage(before, now, kept):
    first = begun()
    first.manifest.lineage = before
    described = description(introduction())
    described.manifest.lineage = now
    survey = survey_of(first, {"a": [8], "b": [8]})
    assert make_plan(described, survey, survey.plan(()), [], IDENT).manifest.lineage == kept


def test_too_few_slots_for_the_exchange_are_refused_at_a_fresh_start():
    text = re.escape(
        f"slots is 3; {format_bytes(4 * OWN_BYTES)} of the state exist once, and nodes exchange parity of them only with "
        "4 slots or more.\nFix: slots=4, or protect='none'"
    )
    with pytest.raises(ConfigError, match=text):
        refuse_few_slots(with_slots(3).placement)
    for accepted in ({"requested": 4}, {"own": False}, {"protect": "none"}, {"nodes": "aaaa"}):
        refuse_few_slots(with_slots(**{"requested": 2, **accepted}).placement)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_job_that_goes_on_is_not_refused(is_fresh):
    """It may have trained so for days, and its state may have become its ranks' own in mid-run."""
    first = with_slots(2, nodes="ab")
    survey = JobSurvey({}) if is_fresh else survey_of(first, {"a": [8], "b": [8]})
    described = description(introduction("ab", width=1 << 15))
    described.manifest.slots = 2
    recovery = recover("job", survey, (), may_start_fresh=True)
    introduced = introduction("ab", width=1 << 15)
    facts = context(), introduced, described, survey, recovery, AttachTry(1), RestoreMemory()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "compare", lambda *_: ["model.0.w"])
        if is_fresh:
            with pytest.raises(ConfigError, match="slots is 2"):
                run.plan_restore(*facts)
            return
        plan = run.plan_restore(*facts)
    assert plan.base and [each.reason for each in exposures(plan.placement)] == ["slots"]


# The exchange

WIDTH = 60_000  # of a leaf that does not fit into a capsule


def guarded_survey(protected: int) -> tuple[AttachPlan, JobSurvey]:
    """Returns an attach whose ranks keep own copies of a leaf, and what its daemons hold: step 8.

    Args:
        protected: the step of the parity.
    """
    new = description(introduction(width=WIDTH))
    first = make_plan(new, JobSurvey({}), RecoveryPlan(None), ["model.0.w"], b"e" * 16)
    (lane,) = first.placement.guard_lanes
    survey = survey_of(first, {"a": [6, 8], "b": [6, 8]}, a=[(1, 6), (1, 8)], b=[(0, 6), (0, 8)])
    for rank, each in enumerate(survey.replies.values()):
        for copy in each.capsules:
            copy.unreplicated_bytes = lane.sizes[rank]
        version = messages.version_to(Version(first.decision.epoch, protected))
        each.slots.add(
            rank=rank, slot=f"parity-{rank}.slot-0", state=pb.SEALED, version=version, layout=lane.digest, parity=True
        )
    return first, survey


def test_the_decision_names_the_guard_only_if_the_new_epoch_exchanges():
    first, survey = guarded_survey(6)
    plan = planned(survey, width=WIDTH)
    assert plan.placement.guard_lanes and plan.base == Version(first.decision.epoch, 8)
    assert plan.decision.guard == Version(first.decision.epoch, 6)
    _, both = guarded_survey(8)
    assert planned(both, width=WIDTH).decision.guard == planned(both, width=WIDTH).base
    alone = planned(survey, nodes="a", width=WIDTH)
    assert not alone.placement.guard_lanes and alone.decision.guard is None, "nothing would ever replace it"
    _, none = guarded_survey(5)
    assert planned(none, width=WIDTH).decision.guard is None


def test_damaged_parity_is_given_up_in_the_next_try():
    _, survey = guarded_survey(8)
    del survey.replies["b"]
    plan = planned(survey, width=WIDTH)
    assert plan.recovery.sections == (1,) and plan.base is not None
    attempt = AttachTry().after(plan, RestoreResult((2 + 0,)), 3)
    assert attempt.erased == {("a", "parity-0.slot-0", plan.base)}
    assert survey.plan(attempt.erased).base is None
