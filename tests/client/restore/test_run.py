"""The steps of a restore, which are the same in both shapes: their order, and what ends them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from reft.client.link.exchange import from_json, to_json
from reft.client.link.rank_group import RankGroup
from reft.client.restore.remote_slots import SlotOpener
from reft.client.restore.reshard_match import parts_to_publish
from reft.client.restore.run import (
    CapsuleFacts,
    LoadReport,
    OpenReport,
    RestoreResult,
    damaged_at_load,
    damaged_at_open,
    run_restore,
)
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.recovery import HeldCapsule, HeldSlot, RecoveryPlan
from reft.errors import LayoutChanged, RestoreError

SAME, OTHER = ((8, 0, 1), (7, 0, 5)), ((8, 0, 2),)
SOUND, LOADED = OpenReport(), LoadReport()
FACTS = CapsuleFacts(("a",), b"table", {"random": "d"}, 8, True)


@pytest.mark.parametrize("report", [OpenReport((1,), {0: SAME, 2: ()}, {0: FACTS}), LoadReport((3,), {1: 5})])
def test_a_report_survives_json(report):
    assert from_json(type(report), json.loads(json.dumps(to_json(report)))) == report


def test_damage_that_any_rank_finds_counts_on_all():
    reports = [OpenReport((3,), {0: SAME}), OpenReport((1, 3), {2: SAME}), OpenReport()]
    assert damaged_at_open(reports) == (1, 3)
    assert damaged_at_open([OpenReport((), {0: SAME}), OpenReport((), {1: SAME})]) == ()


def test_replicas_that_differ_make_all_ranks_unusable():
    """Nobody knows which of the replicas is right."""
    reports = [OpenReport((), {0: SAME, 1: ()}), OpenReport((2,), {3: OTHER})]
    assert damaged_at_open(reports) == (0, 1, 2, 3)


def test_an_older_step_may_show_that_replicas_differ():
    older = ((8, 0, 1), (7, 0, 6))
    assert damaged_at_open([OpenReport((), {0: SAME}), OpenReport((), {1: older})]) == (0, 1)


def test_a_damaged_slot_explains_wrongly_decoded_bytes():
    assert damaged_at_load([LoadReport((2,)), LoadReport((), {1: 5})]) == (2,)
    with pytest.raises(RestoreError, match="chunk 5 of rank 1, decoded from its peers, differs"):
        damaged_at_load([LoadReport(), LoadReport((), {3: 0, 1: 5})])


class Steps:
    """A restore that remembers its steps; each step returns what the next one expects."""

    remote_read_s = 0.0

    def __init__(self, opens: OpenReport = SOUND, loads: LoadReport = LOADED, fails: str = "") -> None:
        self.opens, self.loads, self.fails, self.steps = opens, loads, fails, []

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.fails:
            raise LayoutChanged(f"{name} failed.")

    def open(self) -> tuple[str, OpenReport]:
        self._step("open")
        return "opened", self.opens

    def match(self, opened: str, reports: Any, rank_group: RankGroup) -> str:
        assert (opened, reports) == ("opened", [self.opens])
        self._step("match")
        return "matched"

    def make(self, matched: str) -> dict[str, Any]:
        assert matched == "matched"
        self._step("make")
        return {"w": "tensor"}

    def load(self, matched: str, tensors: Any, transport: Any, at_chunk: Any) -> LoadReport:
        assert (matched, tensors, transport, at_chunk) == ("matched", {"w": "tensor"}, "transport", print)
        self._step("load")
        return self.loads

    def finish(self, matched: str, tensors: Any) -> RestoreResult:
        assert (matched, tensors) == ("matched", {"w": "tensor"})
        self._step("finish")
        return RestoreResult(tree={"step": 8}, lines=("line",))


def result_of(steps: Steps) -> RestoreResult:
    return run_restore(steps, RankGroup(1.0), lambda: "transport", print)  # type: ignore[arg-type, return-value]


def test_the_steps_follow_each_other():
    steps = Steps(OpenReport((), {0: SAME}))
    assert result_of(steps) == RestoreResult((), {"step": 8}, ("line",))
    assert steps.steps == ["open", "match", "make", "load", "finish"]


def test_nothing_is_made_if_a_slot_is_damaged_at_open():
    steps = Steps(opens=OpenReport((4,)))
    assert result_of(steps) == RestoreResult((4,)) and steps.steps == ["open"]


def test_nothing_is_finished_if_a_slot_is_damaged_at_load():
    steps = Steps(loads=LoadReport((4,)))
    assert result_of(steps) == RestoreResult((4,)) and steps.steps[-1] == "load"


@pytest.mark.parametrize("name", ["open", "match", "make", "load", "finish"])
def test_an_error_ends_the_steps(name):
    steps = Steps(fails=name)
    with pytest.raises(LayoutChanged):
        result_of(steps)
    assert steps.steps[-1] == name


# What a restore opens


def test_slots_of_this_node_are_mapped_and_closed_and_others_are_copied():
    base = Version(Epoch(1, b"e" * 16), 8)
    closed: list[str] = []
    mapped = lambda names, keeps: [SimpleNamespace(map=f"map of {names[0]}", close=lambda: closed.append(names[0]))]  # noqa: E731
    remote = SimpleNamespace(own="a", slot=lambda source: f"copy of {source.slot}", capsule=lambda *key: key)
    opener = SlotOpener(SimpleNamespace(take=mapped), remote)
    near, far = (HeldSlot(node, rank, f"slot-{rank}", SlotState.SEALED, base) for rank, node in enumerate("ab"))
    assert [opener.slot(near), opener.slot(far)] == ["map of slot-0", "copy of slot-1"]
    plan = RecoveryPlan(base, {}, {3: HeldCapsule("b", 3, base, 0)})
    assert opener.capsule(plan, 3) == ("b", 3, base)
    opener.close()
    assert closed == ["slot-0"]


# Host state in another shape


def facts(random: str, state: str) -> CapsuleFacts:
    return CapsuleFacts((), b"", {"random": random, "state.lr": state}, 8, True)


def published(facts_by_rank: list[CapsuleFacts], keepers: list[int], world: int) -> dict[int, list[tuple[int, str]]]:
    """Returns what each new rank publishes."""
    by_rank, keeper_of = dict(enumerate(facts_by_rank)), dict(enumerate(keepers))
    return {rank: list(parts_to_publish(by_rank, keeper_of, world, rank)) for rank in range(world)}


def test_each_value_is_published_once_by_the_keeper_of_the_lowest_rank_that_had_it():
    same = [facts("r", "s")] * 3
    assert published(same, [1, 0, 1], 2) == {0: [], 1: [(0, "random"), (0, "state.lr")]}
    two = [facts("r", "s"), facts("r", "t"), facts("r", "t")]
    assert published(two, [0, 1, 1], 2) == {0: [(0, "random"), (0, "state.lr")], 1: [(1, "state.lr")]}


def test_generators_that_no_other_rank_continues_are_not_published():
    own = [facts(f"r{old}", "s") for old in range(3)]
    assert published(own, [0, 0, 0], 2) == {0: [(0, "state.lr"), (1, "random")], 1: []}
