"""The registration of a rank, and the steps of a restore, with fake leases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reft.client.attach import restore as module
from reft.client.attach.plan import make_plan, recover
from reft.client.attach.restore import give_up, lease, leases_of, registration, restore, restore_steps
from reft.client.memory.huge_pages import HugePageBuffer
from reft.client.restore import transport
from reft.client.restore.restore import RestoreResult
from reft.config import Launch
from reft.errors import AlreadyAttached, AttachError, ReftError
from tests.support.attaches import begun, context, description, introduction, survey_of

FIRST = begun()


class FakeLeases:
    """Leases that remember what was asked of them."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.acts = fails, []

    def _act(self, name: str) -> None:
        self.acts.append(name)
        if name in self.fails.split():
            raise AlreadyAttached(f"{name} failed.")

    def register(self) -> None:
        self._act("register")

    def release(self, is_refused: bool = False) -> None:
        self._act("refuse" if is_refused else "release")

    def lease(self, data_bytes: int, table_bytes: int) -> list[str]:
        self.acts.append((data_bytes, table_bytes))
        return ["slot"]


class OtherFails:
    """A rank group of two ranks; the act of the other rank fails."""

    rank, world = 1, 2

    def gather_or_raise(self, act, extra_s=0.0, deadline_s=None):
        act()
        raise AttachError("rank 1 could not attach")


def registered(leases: FakeLeases, rank: int = 0, rank_group: Any = None):
    """Returns the registration of a rank; the leases remember the decision, too."""
    daemon = SimpleNamespace(call=lambda method, request: leases._act(method))
    introduced: Any = replace(introduction("aa", rank=rank), daemon=daemon)
    own = context(rank) if rank_group is None else replace(context(rank), rank_group=rank_group)
    return registration(own, introduced, planned("aa"), leases)  # type: ignore[arg-type]


def test_a_registration_stays_after_a_success():
    leases = FakeLeases()
    with registered(leases):
        assert leases.acts == ["Decide"]
    assert leases.acts == ["Decide"]


def test_an_error_undoes_the_decision_and_is_raised():
    leases = FakeLeases(fails="refuse")
    with pytest.raises(ReftError, match="load failed"), registered(leases):
        raise ReftError("load failed.")
    assert leases.acts == ["Decide", "refuse"]


def test_an_error_of_another_rank_undoes_the_decision():
    """One rank of a node stores it, and each rank undoes it: any of them may be the last to end."""
    leases = FakeLeases()
    with pytest.raises(AttachError, match="rank 1"), registered(leases, 1, OtherFails()):
        raise AssertionError("no rank goes on")
    assert leases.acts == ["refuse"]


def test_a_rank_whose_decision_is_refused_undoes_the_decision_too():
    """It may be the only rank of its node; a daemon that did not answer may have the decision."""
    leases = FakeLeases(fails="Decide")
    with pytest.raises(AlreadyAttached), registered(leases):
        raise AssertionError("no rank goes on")
    assert leases.acts == ["Decide", "refuse"]


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_rank_whose_registration_is_refused_undoes_the_decision_and_opens_no_slot(is_fresh):
    leases, plan = FakeLeases(fails="register"), begun("aa") if is_fresh else planned("aa")
    with pytest.raises(AlreadyAttached), registered(leases):
        restore(context(), introduction("aa"), plan, leases, HugePageBuffer(0), {})  # type: ignore[arg-type]
    assert leases.acts == ["Decide", "register", "refuse"]


def test_after_damage_the_registration_ends_once(capsys):
    leases, plan = FakeLeases(), planned("ab")
    with registered(leases):
        give_up(context(), plan, leases, RestoreResult((1,)))
    assert leases.acts == ["Decide", "refuse"]
    assert f"{plan.base} of rank 1 is damaged" in capsys.readouterr().err


def planned(nodes: str):
    """Returns the plan of an attach on these nodes, after step 8 was whole on nodes a and b."""
    survey = survey_of(FIRST, {"a": [8], "b": [8]})
    return make_plan(description(introduction(nodes)), survey, recover("job", survey, (), False), [], b"i" * 16)


@pytest.mark.parametrize(("under_agent", "run_id"), [(False, ""), (True, "run")])
def test_leases_name_the_rank_under_the_new_epoch(under_agent, run_id):
    plan = planned("ab")
    leases = leases_of(context(rank=1, launch=Launch(1, 2, run_id, "")), introduction("ab", rank=1), plan)
    assert (leases.job, leases.epoch, leases.rank) == ("job", plan.decision.epoch, 1)
    assert leases.under_agent is under_agent and leases.pins_for is None


def test_the_shape_chooses_the_steps_of_the_restore():
    plan, epoch = planned("ab"), FIRST.decision.epoch
    same = restore_steps(context(), introduction("ab"), plan, SimpleNamespace(), HugePageBuffer(0))
    assert same.change is None and [leaf.name for leaf in same.predicted] == ["model.0.w", "model.0.b"]
    other = restore_steps(context(), introduction("a"), planned("a"), SimpleNamespace(), HugePageBuffer(0))
    assert other.change is not None and (len(other.change.before), len(other.change.after)) == (2, 1)
    assert same.context.placement is plan.survey.placements[epoch], "the one that the base was written with"


def test_a_fresh_start_registers_the_rank_and_restores_nothing():
    leases = FakeLeases()
    assert restore(context(), introduction(), begun(), leases, HugePageBuffer(0), {}) == RestoreResult()  # type: ignore[arg-type]
    assert leases.acts == ["register"]


@pytest.mark.parametrize(("kind", "destroyed"), [("nccl", ["nccl 0", "nccl 1"]), ("gloo", [])])
def test_a_group_that_was_made_for_a_load_is_destroyed_after_the_restore(monkeypatch, kind, destroyed):
    """It holds memory of the device. The load is repeated here, so there are two groups."""
    acts, made = [], []

    def new_group(backend: str, timeout: timedelta) -> str:
        made.append(f"{backend} {len(made)}")
        return made[-1]

    def run_restore(steps, rank_group, transport, at_chunk, register, secure) -> RestoreResult:
        assert transport() is not transport() and not acts
        return RestoreResult(tree={})

    groups = SimpleNamespace(new_group=new_group, destroy_process_group=acts.append)
    monkeypatch.setattr(transport, "dist", groups)
    monkeypatch.setattr(module, "run_restore", run_restore)
    monkeypatch.setattr(module, "restore_steps", lambda *_: None)
    here, own = context(load_transport=kind), introduction("ab")
    here.rank_group.group = "gloo"
    own = replace(own, state=SimpleNamespace(device=torch.device("cuda")))
    assert restore(here, own, planned("ab"), FakeLeases(), HugePageBuffer(0), {}).tree == {}
    assert acts == destroyed


@pytest.mark.parametrize(
    ("nodes", "rank", "is_fresh", "called"),
    [("aab", 0, False, ["Secure"]), ("aab", 1, False, []), ("aab", 0, True, []), ("aa", 0, False, [])],
)
def test_one_rank_a_node_secures_the_capsules_of_the_base_if_another_node_can_hold_them(
    monkeypatch, nodes, rank, is_fresh, called
):
    """A restore does so, and a lease no more: a lease lets the daemon free older versions."""
    calls, ended = [], []

    def run_restore(steps, rank_group, transport, at_chunk, register, secure) -> RestoreResult:
        register()
        assert steps.context.opener.capsules == {1: "record"}
        with secure():
            assert [method for method, _ in calls] == called and not ended
        return RestoreResult(tree={})

    @contextlib.contextmanager
    def run(method: str, request: Any) -> Iterator[None]:
        calls.append((method, request))
        yield
        ended.append(method)

    monkeypatch.setattr(module, "run_restore", run_restore)
    daemon = SimpleNamespace(begun=run, address="unix:/s")
    introduced, leases = replace(introduction(nodes, rank=rank), daemon=daemon), FakeLeases()
    plan = begun(nodes) if is_fresh else planned(nodes)
    restore(context(rank=rank), introduced, plan, leases, HugePageBuffer(0), {1: "record"})  # type: ignore[arg-type, dict-item]
    assert leases.acts == ["register"] and ended == called
    assert all(request.epoch.counter == 2 for _, request in calls)
    assert lease(context(rank=rank), introduced, plan, leases) == ["slot"] and len(calls) == len(called)
    assert leases.acts[1:] == [(plan.placement.rank_placement(rank).data_bytes, len(introduced.state.table))]
