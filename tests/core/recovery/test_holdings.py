"""Tests the one judgement of what daemons hold: state, sentences and remedy."""

from __future__ import annotations

import pytest

from reft.core.commit.decision import Decision
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.holdings import UNPROVED, HoldingState, fresh_start_block, judge_holdings
from reft.core.recovery.inventory import Inventory, KnownStep, NodeInventory
from reft.core.recovery.recovery import HeldCapsule, HeldParity, HeldSlot, RecoveryPlan, SectionReplay, Shortfall

EPOCH = Epoch(1, b"e" * 16)
V8 = Version(EPOCH, 8)
SLOT = HeldSlot("a", 0, "rank-0.slot-0", SlotState.SEALED, V8)
CAPSULE = HeldCapsule("a", 1, V8, 0)
PURGE = "reft-cli purge job --yes, then start from your checkpoint"


def inventory(had_whole: bool = True, **missing: tuple[str, ...]) -> Inventory:
    return Inventory({"a": NodeInventory("n0", Decision(EPOCH, None), had_whole=had_whole)}, {}, **missing)


@pytest.mark.parametrize(
    ("plan", "had_whole", "state", "reason"),
    [
        (RecoveryPlan(None), False, HoldingState.EMPTY, "no version was ever whole"),
        (RecoveryPlan(V8, {0: SLOT}), True, HoldingState.WHOLE, "nothing is lost: step 8 (epoch 1) is held by the one"),
        (RecoveryPlan(V8, {0: SLOT}, {1: CAPSULE}), True, HoldingState.RECOVERABLE, "the slots of 1 rank are lost"),
        (RecoveryPlan(None), True, HoldingState.UNRECOVERABLE, "no version is whole now: no slots are left."),
    ],
)
def test_the_state_follows_from_what_is_held(plan, had_whole, state, reason):
    holdings = judge_holdings("job", inventory(had_whole), plan, {})
    assert (holdings.state, holdings.version) == (state, plan.base) and reason in holdings.reason
    assert holdings.is_lost is bool(holdings.remedy) is (state is HoldingState.UNRECOVERABLE)


def test_a_decision_with_a_base_is_no_holding():
    """A daemon that lost all slots still remembers which step the last attach restored."""
    remembered = Inventory({"a": NodeInventory("n0", Decision(EPOCH, V8), had_whole=True)}, {})
    assert judge_holdings("job", remembered, RecoveryPlan(None), {}).is_lost


def test_damage_alone_makes_no_fresh_start():
    holdings = judge_holdings("job", inventory(had_whole=False), RecoveryPlan(None), {}, {("a", "rank-0.slot-0", V8)})
    assert holdings.is_lost and holdings.missing == ("step 8 (epoch 1) on node n0 is damaged (rank-0.slot-0).",)


def test_a_silent_node_may_bring_back_what_is_missing():
    holdings = judge_holdings("job", inventory(silent={"n1": "", "n2": "Connection refused"}), RecoveryPlan(None), {})
    assert holdings.reason.endswith(
        "no version is whole now: Node n1 does not answer. Node n2 does not answer (Connection refused)."
    )
    assert holdings.remedy == (
        "start n1, n2 and their reft-daemon again with the old slots, then start the job; "
        f"if that memory is gone: {PURGE}"
    )


def test_a_node_that_hears_no_other_may_be_the_one_that_is_cut_off():
    start, look = "start n1, n2 and their reft-daemon again", "look at reft-cli status job on n1 first"
    silent = {"n1": "no answer in time", "n2": ""}
    remedy = judge_holdings("job", inventory(silent=silent), RecoveryPlan(None), {}).remedy
    assert remedy.startswith(look) and "nothing is lost. Else " + start in remedy
    both = Inventory({each: NodeInventory(each, Decision(EPOCH, None), had_whole=True) for each in "ab"}, {}, silent)
    assert judge_holdings("job", both, RecoveryPlan(None), {}).remedy.startswith(start)


def test_a_node_that_refuses_the_token_is_to_be_asked_for_the_status():
    silent = {"n1": "", "n2": f"{UNPROVED} (UNAUTHENTICATED, unproved: a proof is needed.)"}
    holdings = judge_holdings("job", inventory(silent=silent), RecoveryPlan(None), {})
    assert holdings.remedy.startswith("look at reft-cli status job on n2: the daemon there answers")
    assert holdings.remedy.endswith(f"if not: {PURGE}") and "start n1" not in holdings.remedy


def test_nobody_is_asked_to_start_a_daemon_that_has_answered():
    holdings = judge_holdings("job", inventory(emptied=("n0",)), RecoveryPlan(None), {})
    assert holdings.remedy == PURGE and "The memory of node n0 is gone" in holdings.reason


def test_a_loss_is_explained_without_a_known_placement():
    plan = RecoveryPlan(None, partial=(Shortfall(V8, is_placed=False),))
    holdings = judge_holdings("job", inventory(), plan, {})
    assert "no daemon that answers knows how its bytes were placed" in holdings.reason


def test_a_fresh_start_names_everybody_who_knows_of_a_whole_step():
    known = {"a": KnownStep(182, "the agent of n0"), "b": KnownStep(-1, "the daemon of n1"), "c": KnownStep(190, "C")}
    reports = {node: NodeInventory(node, known=(each,)) for node, each in known.items()}
    lines = fresh_start_block("run1", Inventory(reports, {})).split("\n")
    assert lines[1] == "job run1 STARTS FROM STEP 0, although it had trained before:"
    assert lines[2:5] == [
        "  step 190 was whole, says C.",
        "  step 182 was whole, says the agent of n0.",
        "  a step was whole, says the daemon of n1.",
    ]
    assert any("REFT_RESTORE=require" in line for line in lines)
    assert fresh_start_block("run1", Inventory({"a": NodeInventory("a")}, {})) == ""


def test_a_replay_is_announced_and_a_refused_one_named():
    copies = HeldParity("a", 0, "parity-0.slot-0", SlotState.SEALED, Version(EPOCH, 5))
    way = SectionReplay(1, copies, HeldCapsule("a", 1, Version(EPOCH, 5), 64), ())
    plan = RecoveryPlan(V8, {0: SLOT}, {1: HeldCapsule("a", 1, V8, 64)}, replays={1: way})
    words = "The optimizer state of rank 1 at step 8 is replayed from copies of step 5 and the gradients since"
    assert words in judge_holdings("job", inventory(), plan, {}).reason
    erased = {(way.node, way.slot, way.version)}
    assert judge_holdings("job", inventory(), RecoveryPlan(None), {}, erased).missing == (
        "replay-1 from the copies of step 5 (epoch 1) on node n0 was refused.",
    )
