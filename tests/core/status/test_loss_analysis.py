"""Compares every result of the loss analysis with the recovery plan after that loss."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.coding.placement import Placement, capsule_holders, holders_among, place
from reft.core.commit.decision import Decision
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Epoch, Version
from reft.core.layout.cells import divide
from reft.core.layout.layout import Leaf, pack
from reft.core.recovery.recovery import HeldCapsule, HeldParity, HeldSlot, plan
from reft.core.status import loss_analysis
from reft.core.status.loss_analysis import LossAnalysis, PairLosses

EPOCH = Epoch(1, b"e" * 16)
VERSION = Version(EPOCH, 1)


def placed(domains: Collection[int], f: int | None, scheme: str = "aec", stages: int = 1) -> Placement:
    """Returns a placement in which rank r holds the leaf of stage r mod stages.

    So a cell has every `stages`-th rank.
    """
    layouts = [
        pack([Leaf(f"w{i}", "float32", (1 << 16,), (1,), 1 << 18, False, (1 << 16,), (0,))]) for i in range(stages)
    ]
    keys = [layout.digest for layout in layouts]
    division = divide(dict(zip(keys, layouts, strict=True)), [keys[r % stages] for r in range(len(domains))])
    return place(division, list(domains), scheme, f, 64)


def intact(per_node: int, nodes: int, f: int, scheme: str = "aec", racks: int = 1, stages: int = 1) -> LossAnalysis:
    """Returns the analysis of an intact job: so many nodes a rack, capsules with f holders."""
    domain = [node // racks for node in range(nodes)]
    placement = placed([domain[rank // per_node] for rank in range(nodes * per_node)], f, scheme, stages)
    slots = {rank: f"n{rank // per_node}" for rank in range(nodes * per_node)}
    copies = {rank: {f"n{node}" for node in capsule_holders(rank // per_node, domain, f)} for rank in slots}
    return LossAnalysis(placement, slots, copies, {}, {f"n{node}": f"rack {domain[node]}" for node in range(nodes)})


def by_plan(it: LossAnalysis, lost: Collection[str]) -> bool:
    """Returns whether recovery finds the version after that loss."""
    held = [HeldSlot(n, r, f"{r}", SlotState.SEALED, VERSION) for r, n in it.slots.items() if n not in lost]
    copies = [
        HeldCapsule(n, r, VERSION, it.unreplicated.get(r, 0))
        for r, nodes in it.copies.items()
        for n in nodes
        if n not in lost
    ]
    parity = [
        HeldParity(n, r, f"p{r}", SlotState.SEALED, VERSION, it.placement.guard_lanes[where[0]].digest)
        for r, n in it.parity.items()
        if n not in lost and (where := it.placement.guard_lane_of(r))
    ]
    return plan(held, copies, {EPOCH: it.placement}, Decision(EPOCH, None), parity=parity).base is not None


def check(it: LossAnalysis) -> None:
    """Checks all results by brute force."""
    assert {verdict.unit: verdict.survives for verdict in it.nodes()} == {n: by_plan(it, {n}) for n in it.all_nodes}
    fatal = tuple(pair for pair in itertools.combinations(it.all_nodes, 2) if not by_plan(it, pair))
    assert it.pairs() == PairLosses(not fatal, fatal, True)
    members: dict[str, set[str]] = {}
    for node in it.all_nodes:
        members.setdefault(it.domains.get(node, f"node {node}"), set()).add(node)
    verdicts = {name: by_plan(it, nodes) for name, nodes in members.items()}
    assert {verdict.unit: verdict.survives for verdict in it.each_domain()} == verdicts
    assert it.tolerated() == greatest(it, members)
    for lost in [(), *itertools.combinations(it.all_nodes, 1), *itertools.combinations(it.all_nodes, 3)]:
        loss = it.what_if(lost)
        assert (loss is None) == by_plan(it, lost)
        assert loss is None or (loss.words and (loss.lanes or loss.bare or loss.unreplicated))


def greatest(it: LossAnalysis, members: Mapping[str, set[str]]) -> int:
    for f in range(len(members) + 1):
        if not all(by_plan(it, set().union(*lost)) for lost in itertools.combinations(members.values(), f)):
            return f - 1
    raise AssertionError("nothing is ever lost")


@pytest.mark.parametrize(
    "shape",
    [
        (1, 3, 1), (1, 6, 2), (2, 4, 1), (1, 5, 1, "arc"), (1, 7, 2, "arc"), (1, 6, 1, "aec", 2), (2, 6, 2, "aec", 2),
        (2, 6, 1, "aec", 1, 3), (1, 3, 0), (2, 2, 1, "none"), (4, 1, 0), (1, 8, 1, "aec", 3), (2, 4, 1, "aec", 1, 4),
    ],
)  # fmt: skip
def test_intact_jobs(shape):
    check(intact(*shape))


def test_an_intact_job_tolerates_the_requested_losses():
    for nodes, f in [(3, 1), (6, 2), (8, 3)]:
        assert intact(2, nodes, f).tolerated() == f
    assert intact(1, 6, 1, racks=2).tolerated() == 1
    assert intact(2, 2, 0, "none").tolerated() == 0


def test_after_a_loss_fewer_losses_are_tolerated():
    it = intact(1, 6, 2)
    after = LossAnalysis(it.placement, {r: n for r, n in it.slots.items() if r != 2}, it.copies, {}, it.domains)
    check(after)
    assert it.tolerated() == 2 and after.tolerated() == 1
    gone = LossAnalysis(it.placement, {r: n for r, n in it.slots.items() if r > 2}, it.copies, {}, it.domains)
    check(gone)
    assert gone.tolerated() == -1 and not any(verdict.survives for verdict in gone.nodes())


def test_unreplicated_leaves_and_missing_capsules_are_named():
    it = intact(1, 4, 1)
    check(kept := LossAnalysis(it.placement, it.slots, it.copies, {2: 9}, it.domains))
    assert [v.words for v in kept.nodes()] == ["", "", "leaves that only rank 2 held are gone", ""]
    assert kept.tolerated() == 0 and kept.what_if(["n2"]).unreplicated == (2,)
    check(bare := LossAnalysis(it.placement, it.slots, {**it.copies, 1: ()}, {}, it.domains))
    assert [v.words for v in bare.nodes()] == ["", "no capsule of rank 1 is left", "", ""]
    loss = it.what_if(["n0", "n1"])
    assert (
        loss.lanes == (0,) and loss.bare == (0,) and loss.words == "w0 can't be decoded; no capsule of rank 0 is left"
    )
    assert bare.what_if(["n0"]) is None


def test_results_count_the_lost_lanes_and_ranks():
    it = intact(2, 2, 0, "none", stages=2)
    assert (
        it.nodes()[0].words == "w0 and other leaves (2 lanes) can't be decoded; no capsule of rank 0 and 1 more is left"
    )
    assert it.nodes()[0].words == it.what_if(["n0"]).words


NAMES = st.sampled_from(["n0", "n1", "n2", "n3", "n4"])


@settings(max_examples=150)
@given(
    st.sampled_from([(1, "aec"), (2, "aec"), (2, "arc"), (1, "arc"), (0, "none")]),
    st.dictionaries(st.integers(0, 5), NAMES, min_size=3),
    st.dictionaries(st.integers(0, 5), st.frozensets(NAMES, min_size=1, max_size=3), min_size=5),
    st.dictionaries(st.integers(0, 5), st.sampled_from([0, 0, 0, 7]), max_size=2),
    st.dictionaries(NAMES, st.sampled_from(["r0", "r1", "r2"]), max_size=3),
)
def test_any_arrangement_of_slots_and_capsules(code, slots, copies, kept, domains):
    """Also tries slots of several domains on one node, which no placement makes."""
    check(LossAnalysis(placed(range(6), *code), slots, copies, kept, domains))


OWN_BYTES = 1 << 17


def guarded(
    per_node: int, nodes: int, others: Collection[str] = ("shared",), f: int = 1, scheme: str = "auto"
) -> Placement:
    """Returns a placement in which each rank has a leaf of its own, and all have the others."""
    shared = [Leaf(name, "uint8", (4096,), (1,), 4096, False, (4096,), (0,)) for name in others]
    layouts = [
        pack([*shared, Leaf(f"own{r}", "uint8", (OWN_BYTES,), (1,), OWN_BYTES, False, (OWN_BYTES,), (0,))])
        for r in range(per_node * nodes)
    ]
    keys = [layout.digest for layout in layouts]
    division = divide(dict(zip(keys, layouts, strict=True)), keys)
    return place(division, [rank // per_node for rank in range(per_node * nodes)], scheme, f, 4096, slots=4)


def exchanged(per_node: int, nodes: int, f: int = 1, scheme: str = "auto") -> LossAnalysis:
    """Returns the analysis of an intact job that exchanges unreplicated leaves."""
    placement = guarded(per_node, nodes, f=f, scheme=scheme)
    where = {rank: f"n{rank // per_node}" for rank in range(per_node * nodes)}
    ranks_of = [[rank for rank in where if rank // per_node == node] for node in range(nodes)]
    holders = [holders_among(placement, ranks_of, range(nodes), node) for node in range(nodes)]
    copies = {rank: {f"n{node}" for node in holders[rank // per_node]} for rank in where}
    return LossAnalysis(placement, where, copies, dict.fromkeys(where, OWN_BYTES), {}, where)


each_scheme = pytest.mark.parametrize("scheme", ["auto", "aor"])


@each_scheme
@pytest.mark.parametrize(("per_node", "nodes"), [(1, 2), (1, 5), (2, 3), (3, 2)])
def test_jobs_that_exchange_survive_any_node(per_node, nodes, scheme):
    check(it := exchanged(per_node, nodes, scheme=scheme))
    assert it.tolerated() == 1 and not any(verdict.words for verdict in it.nodes())


@pytest.mark.parametrize(("per_node", "nodes", "f"), [(1, 3, 2), (1, 5, 2), (2, 4, 2), (1, 5, 3), (1, 6, 2)])
@each_scheme
def test_jobs_that_exchange_for_f_losses_survive_any_f_nodes(per_node, nodes, f, scheme):
    check(it := exchanged(per_node, nodes, f, scheme))
    assert it.tolerated() == f and it.pairs().survives
    check(after := replace(it, slots={rank: n for rank, n in it.slots.items() if n != "n1"}))
    assert after.tolerated() == f - 1
    check(replace(it, parity={rank: n for rank, n in it.parity.items() if rank % 3}))


def test_without_parity_a_node_is_lost_with_its_leaves():
    it = exchanged(1, 3)
    check(bare := replace(it, parity={}))
    assert bare.tolerated() == 0 and bare.what_if(["n1"]).unreplicated == (1,)
    check(partly := replace(it, parity={0: "n0", 1: "n1"}))
    assert [verdict.survives for verdict in partly.nodes()] == [False, False, True]
    assert partly.nodes()[0].words == "leaves that only rank 0 held are gone"
    check(after := replace(it, slots={0: "n0", 2: "n2"}, parity={0: "n0", 2: "n2"}))
    assert after.tolerated() == 0 and after.what_if(()) is None, "rank 1 is lost, and can be decoded"
    check(unforeseen := replace(it, unreplicated={**it.unreplicated, 2: OWN_BYTES + 4}))
    assert [verdict.survives for verdict in unforeseen.nodes()] == [True, True, False]


NODES_OF_THREE = st.sampled_from(["n0", "n1", "n2", "n3"])


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([
        guarded(2, 3), guarded(2, 3, ()), guarded(3, 2), guarded(2, 3, (), 2), guarded(1, 6, (), 2),
        guarded(2, 3, scheme="aor"), guarded(1, 6, (), 2, "aor"),
    ]),
    st.dictionaries(st.integers(0, 5), NODES_OF_THREE, min_size=4),
    st.dictionaries(st.integers(0, 5), NODES_OF_THREE, min_size=3),
    st.dictionaries(st.integers(0, 5), st.frozensets(NODES_OF_THREE, min_size=1, max_size=2), min_size=5),
    st.dictionaries(st.integers(0, 5), st.sampled_from([0, OWN_BYTES, OWN_BYTES, OWN_BYTES + 1]), min_size=4),
)  # fmt: skip
def test_any_arrangement_of_parity(placement, slots, parity, copies, kept):
    check(LossAnalysis(placement, slots, copies, kept, {}, parity))


def test_wide_stripes():
    """Tests groups wider than a stripe, with f = 1: only two losses near each other are fatal."""
    it = intact(1, 70, 1)
    lane = it.placement.lanes[0]
    assert lane.code.k + lane.code.f == 64 < lane.D
    fatal = set(it.pairs().fatal)
    for i, j in [(0, 1), (0, 35), (0, 63), (0, 64), (3, 69)]:
        names = tuple(sorted((f"n{i}", f"n{j}")))
        assert (names in fatal) != by_plan(it, names)
    assert it.tolerated() == 1 and it.pairs().is_listed


def test_beyond_the_limit_pairs_are_judged_by_the_formula(monkeypatch):
    monkeypatch.setattr(loss_analysis, "PAIRS_MAX", 4)
    assert intact(1, 6, 2).pairs() == PairLosses(True, (), False)
    assert intact(1, 6, 1).pairs() == PairLosses(False, (), False)
    assert intact(1, 4, 1).pairs().is_listed
