"""The steps of a restore, which are the same in both shapes: their order, and what ends them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from reft.client.link.exchange import from_json, to_json
from reft.client.link.rank_group import RankGroup
from reft.client.restore.executor import NO_RANK, LoadReport
from reft.client.restore.opened import CapsuleFacts, OpenReport
from reft.client.restore.remote_slots import SlotOpener
from reft.client.restore.replay import ReplayReport
from reft.client.restore.reshard import parts_to_publish
from reft.client.restore.restore import RestoreResult, damaged_at_load, damaged_at_open, run_restore
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.recovery.recovery import HeldCapsule, HeldSlot, RecoveryPlan
from reft.errors import AttachError, LayoutChanged, RestoreError

SAME, OTHER = ((8, 0, 1), (7, 0, 5)), ((8, 0, 2),)
SOUND, LOADED = OpenReport(), LoadReport()
FACTS = CapsuleFacts(("a",), b"table", {"random": "d"}, 8, True)


@pytest.mark.parametrize("report", [OpenReport((1,), {0: SAME, 2: ()}, {0: FACTS}), LoadReport((3,), {"text": 5})])
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


def test_a_damaged_slot_explains_all_faults():
    reports = [LoadReport((2,)), LoadReport((), {"chunk 5 of rank 1": NO_RANK, "bytes of rank 0 changed": 0})]
    assert damaged_at_load(reports, False) == damaged_at_load(reports, True) == (2,)


def test_after_faults_all_ranks_load_once_more():
    assert damaged_at_load([LoadReport(), LoadReport((), {"bytes of rank 3 changed": 3})], False) == ()
    assert damaged_at_load([LoadReport((), {"chunk 5 of rank 1": NO_RANK})], False) == ()


def test_the_source_of_bytes_that_change_again_counts_as_damaged():
    reports = [LoadReport((), {"bytes of rank 3 changed": 3, "chunk 5 of rank 1": NO_RANK}), LoadReport()]
    assert damaged_at_load(reports, True) == (3,)


def test_faults_without_another_source_are_an_error():
    with pytest.raises(RestoreError, match="chunk 5 of rank 1, twice") as error:
        damaged_at_load([LoadReport(), LoadReport((), {"chunk 5 of rank 1": NO_RANK})], True)
    assert "checkpoint" in str(error.value)


class Steps:
    """A restore that remembers its steps; each step returns what the next one expects."""

    remote_read_s = 0.0

    def __init__(
        self, opens: OpenReport = SOUND, *loads: LoadReport, fails: str = "", replays: ReplayReport | None = None
    ) -> None:
        self.replays, self.replay_s = replays, 0.0 if replays is None else 1.0
        self.opens, self.loads, self.fails, self.steps = opens, list(loads or [LOADED]), fails, []

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.fails:
            raise LayoutChanged(f"{name} failed.")

    def open(self) -> tuple[str, OpenReport]:
        self._step("open")
        return "opened", self.opens

    def replay(self) -> tuple[dict[int, str], ReplayReport | None]:
        self._step("replay")
        return {5: "slot"}, self.replays

    def publish(self, opened: str, reports: Any, rank_group: RankGroup) -> str:
        assert (opened, reports) == ("opened", [self.opens])
        return "published"

    def match(self, opened: str, reports: Any, published: str) -> str:
        assert (opened, reports, published) == ("opened", [self.opens], "published")
        self._step("match")
        return "matched"

    def make(self, matched: str) -> SimpleNamespace:
        assert matched == "matched"
        self._step("make")
        return SimpleNamespace(tensors={"w": "tensor"})

    def load(self, matched: str, tensors: Any, transport: Any, at_chunk: Any, replayed: Any) -> LoadReport:
        assert replayed == ({5: "slot"} if "replay" in self.steps else {})
        assert (matched, tensors, transport, at_chunk) == ("matched", {"w": "tensor"}, "transport", print)
        self._step("load")
        return self.loads.pop(0)

    @contextlib.contextmanager
    def secure(self) -> Iterator[None]:
        self._step("secure")
        yield
        self._step("secured")

    def finish(self, matched: str, made: Any) -> RestoreResult:
        assert (matched, made.tensors) == ("matched", {"w": "tensor"})
        self._step("finish")
        return RestoreResult(tree={"step": 8}, lines=("line",))


def result_of(steps: Steps, rank_group: Any = None) -> RestoreResult:
    return run_restore(
        steps, rank_group or RankGroup(1.0), lambda: "transport", print,  # type: ignore[arg-type, return-value]
        register=lambda: steps._step("register"), secure=steps.secure,
    )  # fmt: skip


def test_the_steps_follow_each_other():
    steps = Steps(OpenReport((), {0: SAME}))
    assert result_of(steps) == RestoreResult((), {"step": 8}, ("line",))
    assert steps.steps == ["register", "open", "match", "secure", "make", "secured", "load", "finish"]


def test_nothing_is_secured_or_made_if_a_slot_is_damaged_at_open():
    steps = Steps(opens=OpenReport((4,)))
    assert result_of(steps) == RestoreResult((4,)) and steps.steps == ["register", "open"]


class FailsIn(RankGroup):
    """A rank group in which another rank fails in the exchange of this number."""

    def __init__(self, number: int) -> None:
        super().__init__(1.0)
        self.left = number

    def gather_or_raise(self, act: Any, *arguments: Any, **keywords: Any) -> Any:
        self.left -= 1
        gathered = super().gather_or_raise(act, *arguments, **keywords)
        if not self.left:
            raise AttachError("rank 1 could not attach: it failed.")
        return gathered


class Tells(RankGroup):
    """A rank group that remembers the errors that its exchanges tell the other ranks."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.told: list[str] = []

    def gather_or_raise(self, act: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().gather_or_raise(act, *arguments, **keywords)
        except LayoutChanged as error:
            self.told.append(error.message)
            raise


@pytest.mark.parametrize("name", ["register", "open", "match", "secure", "make", "secured", "load", "finish"])
def test_an_error_of_each_step_is_told_to_the_other_ranks(name):
    """Else they wait for this rank in the next exchange, until their deadline."""
    rank_group = Tells()
    with pytest.raises(LayoutChanged):
        result_of(Steps(fails=name), rank_group)
    assert rank_group.told == [f"{name} failed."]


def test_no_rank_has_restored_before_all_have_finished():
    """Daemons free older versions for the leases that follow."""
    with pytest.raises(AttachError, match="rank 1"):
        result_of(Steps(), FailsIn(4))


@pytest.mark.parametrize(("number", "last"), [(1, "open"), (2, "secured")])
def test_no_rank_goes_on_before_all_are_registered_and_all_capsules_are_secured(number, last):
    """The exchange of `open` tells that all are registered; that of `make` that all are secured."""
    steps = Steps()
    with pytest.raises(AttachError, match="rank 1"):
        result_of(steps, FailsIn(number))
    assert steps.steps[-1] == last and "load" not in steps.steps


@pytest.mark.parametrize(("fails", "missing"), [("register", "open"), ("secure", "make"), ("secured", "load")])
def test_a_rank_that_is_refused_does_no_more(fails, missing):
    steps = Steps(fails=fails)
    with pytest.raises(LayoutChanged, match=fails):
        result_of(steps)
    assert steps.steps[-1] == fails and missing not in steps.steps


def test_replays_come_before_the_load():
    steps = Steps(replays=ReplayReport())
    assert result_of(steps).tree == {"step": 8}
    assert steps.steps == ["register", "open", "replay", "match", "secure", "make", "secured", "load", "finish"]


def test_nothing_is_made_if_a_replay_is_refused():
    steps = Steps(replays=ReplayReport({5: "rank 1 differs.", 4: "a gap."}))
    assert result_of(steps) == RestoreResult((4, 5), reasons=("a gap.", "rank 1 differs."))
    assert steps.steps == ["register", "open", "replay"]


def test_nothing_is_finished_if_a_slot_is_damaged_at_load():
    steps = Steps(SOUND, LoadReport((4,)))
    assert result_of(steps) == RestoreResult((4,)) and steps.steps[-1] == "load"


FAULT = LoadReport((), {"bytes of rank 3 changed on their way": 3})
DECODE_FAULT = LoadReport((), {"chunk 5 of rank 1 differs": NO_RANK})


@pytest.mark.parametrize("first", [FAULT, DECODE_FAULT])
def test_faults_that_do_not_come_back_cost_one_more_load(first, capsys):
    steps = Steps(SOUND, first, LOADED)
    assert result_of(steps) == RestoreResult((), {"step": 8}, ("line",))
    assert steps.steps == ["register", "open", "match", "secure", "make", "secured", "load", "load", "finish"]
    assert f"{min(first.faults)}. All ranks load again." in capsys.readouterr().err


def test_a_source_that_is_faulty_twice_counts_as_damaged():
    steps = Steps(SOUND, FAULT, FAULT)
    assert result_of(steps) == RestoreResult((3,))
    assert steps.steps == ["register", "open", "match", "secure", "make", "secured", "load", "load"]


def test_bytes_that_are_decoded_wrongly_twice_are_an_error():
    steps = Steps(SOUND, DECODE_FAULT, DECODE_FAULT)
    with pytest.raises(RestoreError, match="chunk 5 of rank 1 differs, twice"):
        result_of(steps)
    assert steps.steps[-2:] == ["load", "load"]


@pytest.mark.parametrize("name", ["open", "match", "make", "load", "finish"])
def test_an_error_ends_the_steps(name):
    steps = Steps(fails=name)
    with pytest.raises(LayoutChanged):
        result_of(steps)
    assert steps.steps[-1] == name


# What a restore opens


def test_slots_of_this_node_are_mapped_and_closed_and_others_are_read_there():
    base = Version(Epoch(1, b"e" * 16), 8)
    closed: list[str] = []
    mapped = lambda names, keeps: [SimpleNamespace(map=f"map of {names[0]}", close=lambda: closed.append(names[0]))]  # noqa: E731
    remote = SimpleNamespace(
        own="a", address="unix:/nowhere", slot=lambda source, channel: channels.append(channel) or f"far {source.slot}",
        capsule=lambda *key: key,
    )  # fmt: skip
    channels: list[grpc.Channel] = []
    opener = SlotOpener(SimpleNamespace(take=mapped, pins_for=None, rank=0), remote)
    near, far = (HeldSlot(node, rank, f"slot-{rank}", SlotState.SEALED, base) for rank, node in enumerate("ab"))
    assert [opener.slot(near), opener.slot(far)] == ["map of slot-0", "far slot-1"]
    plan = RecoveryPlan(base, {}, {3: HeldCapsule("b", 3, base, 0)})
    assert opener.capsule(plan, 3) == ("b", 3, base)
    assert replace(opener, capsules={3: "read before"}).capsule(plan, 3) == "read before"
    opener.close()
    assert closed == ["slot-0"]
    with pytest.raises(ValueError, match="closed channel"):
        channels[0].unary_unary("/any")(b"")


@pytest.mark.parametrize(("rank", "device", "pins"), [(0, "cuda:0", ["cuda:0"]), (1, "cuda:0", []), (0, None, [])])
def test_a_rank_pins_its_own_slot_if_its_state_is_on_a_device(rank, device, pins):
    pinned = []
    slot = SimpleNamespace(map="map", register=pinned.append)
    leases = SimpleNamespace(take=lambda names, keeps: [slot], pins_for=device, rank=0)
    opener = SlotOpener(leases, SimpleNamespace(own="a"))
    opener.slot(HeldSlot("a", rank, "slot", SlotState.SEALED, Version(Epoch(1, b"e" * 16), 8)))
    assert pinned == pins


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
