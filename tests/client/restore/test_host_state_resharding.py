"""Host state for a job of another shape: every rule, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from reft.client.restore import host_state_resharding
from reft.client.restore.host_state_resharding import HostStateResharding
from reft.errors import LayoutChanged


def tree(rank: int, **changes: Any) -> dict[str, Any]:
    """Returns the host state of an old rank."""
    groups = [{"params": ["model.a"], "values": {"lr": 0.1}}, {"params": ["model.b"], "values": {"lr": 0.2}}]
    optimizer = {"class": "SGD", "groups": groups, "scalars": {"model.a": {"n": 1}}}
    state = {
        "step": 7, "marked": True, "random": host_state_resharding.seeded(rank, 0), "scalers": {}, "state": {"lr": {"last": 7}},
        "subjects": {"model.0": {}, "optimizer.0": optimizer},
    }  # fmt: skip
    return state | changes


def reshard(
    trees: list[dict[str, Any]], rank: int, world: int, live: Any = None, **options: Any
) -> HostStateResharding:
    parts = [host_state_resharding.parts(each) for each in trees]
    digests = [{part: host_state_resharding.digest(value) for part, value in each.items()} for each in parts]
    values = {host_state_resharding.digest(value): value for each in parts for value in each.values()}
    live = live or tree(0)
    return HostStateResharding(
        rank, world, digests, values, {each: live[each] for each in ("subjects", "random")},  # as HostState.live_settings
        options.get("generators", ()), options.get("takes_all", ()),
        [name for name in live["state"] if name.endswith(".extra_state")],
    )  # fmt: skip


def same(one: Any, other: Any) -> bool:
    return host_state_resharding.digest(one) == host_state_resharding.digest(other)


def test_generators_follow_their_rank_and_new_ranks_get_derived_seeds():
    trees = [tree(rank) for rank in range(3)]
    generators = [reshard(trees, rank, 5).tree(7, True)["random"] for rank in range(5)]
    assert all(same(generators[rank], trees[rank]["random"]) for rank in range(3))
    assert len({host_state_resharding.digest(each) for each in generators}) == 5
    again = reshard(trees, 4, 5)
    assert same(again.tree(7, True)["random"], generators[4]), "each restore of this version gives the same state"
    assert again.lines[0].startswith("new ranks 3-4: random generators start from seeds")
    fewer = reshard(trees, 1, 2)
    assert same(fewer.tree(7, True)["random"], trees[1]["random"])
    assert not any("generators" in line for line in fewer.lines)


def test_generators_equal_on_all_ranks_stay_equal():
    trees = [tree(0)] * 2
    resharding = reshard(trees, 2, 3)
    assert same(resharding.tree(7, True)["random"], trees[0]["random"]) and not any(
        "seeds" in line for line in resharding.lines
    )


def test_state_equal_on_all_ranks_goes_to_every_rank():
    resharding = reshard([tree(0), tree(1)], 2, 3)
    whole = resharding.tree(7, True)
    assert whole["state"] == {"lr": {"last": 7}} and whole["step"] == 7 and whole["marked"]
    assert "state['lr'] was the same on all 2 old ranks: every rank gets this state." in resharding.lines


def test_objects_that_differ_are_refused_unless_they_take_all_states_or_the_ranks_match():
    trees = [tree(rank, state={"data": {"at": rank}}) for rank in range(2)]
    with pytest.raises(
        LayoutChanged, match=r"(?s)state\.data differs among the 2 ranks.*this job has 3 ranks.*load_state_dicts"
    ):
        reshard(trees, 0, 3).tree(7, True)
    assert reshard(trees, 1, 2).tree(7, True)["state"] == {"data": {"at": 1}}
    resharding = reshard(trees, 2, 3, takes_all=["data"])
    resharding.tree(7, True)
    assert resharding.lists == {"data": [{"at": 0}, {"at": 1}]}
    own = reshard(trees, 1, 2, takes_all=["data"])
    assert own.tree(7, True)["state"] == {"data": {"at": 1}} and not own.lists


def test_a_generator_in_state_is_treated_as_a_generator():
    trees = [tree(rank, state={"g": host_state_resharding.seeded(rank, 0)["cpu"]}) for rank in range(2)]
    assert same(reshard(trees, 1, 3, generators=["g"]).tree(7, True)["state"]["g"], trees[1]["state"]["g"])
    new = reshard(trees, 2, 3, generators=["g"]).tree(7, True)["state"]["g"]
    assert not any(same(new, each["state"]["g"]) for each in trees)


def stage(names: list[str], lr: float) -> dict[str, Any]:
    groups = [{"params": names, "values": {"lr": lr}}]
    scalars = {name: {"n": len(name)} for name in names}
    return {"subjects": {"optimizer.0": {"class": "SGD", "groups": groups, "scalars": scalars}}}


def test_groups_of_stages_are_merged_by_their_parameters():
    trees = [tree(0, **stage(["a", "b"], 0.1)), tree(1, **stage(["c"], 0.1))]
    live = tree(0, **stage(["c", "a", "b"], 9.0))
    optimizer = reshard(trees, 0, 1, live).tree(7, True)["subjects"]["optimizer.0"]
    assert optimizer["groups"] == [{"params": ["c", "a", "b"], "values": {"lr": 0.1}}]
    assert optimizer["scalars"] == {name: {"n": 1} for name in "abc"}


def test_groups_with_different_settings_are_not_merged():
    trees = [tree(0, **stage(["a"], 0.1)), tree(1, **stage(["c"], 0.3))]
    with pytest.raises(LayoutChanged, match=r"optimizer\.0, group 0: the old groups .* different settings"):
        reshard(trees, 0, 1, tree(0, **stage(["a", "c"], 9.0))).tree(7, True)
    with pytest.raises(LayoutChanged, match=r"1 of its parameters were in no group, e\.g\. d"):
        reshard(trees, 0, 1, tree(0, **stage(["a", "d"], 9.0))).tree(7, True)


def test_scalers_that_differ_are_refused():
    trees = [tree(rank, scalers={"s": {"growth": rank}}) for rank in range(2)]
    with pytest.raises(LayoutChanged, match=r"scalers\.s differs"):
        reshard(trees, 0, 1).tree(7, True)


def of_stages(rank: int, stages: list[int], **more: Any) -> dict[str, Any]:
    """Returns the host state of a rank of a pipeline with these stages."""
    optimizer = stage([f"model.{each}.w" for each in stages], 0.1)["subjects"]
    return tree(rank, subjects={**{f"model.stage{each}": {} for each in stages}, **optimizer, **more})


@pytest.mark.parametrize(
    ("before", "after"),
    [([[0], [1]], [[0, 1]]), ([[0], [0], [1], [1]], [[0], [1]]), ([[0, 1]], [[0], [1]]), ([[0, 1], [2, 3]], [[0, 1, 2, 3]]),
     ([[0, 1]], [[0], [1], [2]])],
)  # fmt: skip
def test_a_rank_gets_the_state_of_its_own_stages(before, after):
    trees = [of_stages(rank, stages) for rank, stages in enumerate(before)]
    for rank, stages in enumerate(after):
        live = of_stages(rank, stages)
        if stages == [2]:  # no old rank had it; a model of new stages has other names of leaves
            live["subjects"]["optimizer.0"] = of_stages(rank, [0])["subjects"]["optimizer.0"]
        subjects = reshard(trees, rank, len(after), live).tree(7, True)["subjects"]
        assert subjects.keys() == live["subjects"].keys()
        assert subjects["optimizer.0"]["groups"] == live["subjects"]["optimizer.0"]["groups"]


def test_extra_state_follows_its_stage():
    """Each stage has modules of its own: rank 0 need not have those of the others."""

    def of_stage(stage: int, rank: int, scale: float | None = None) -> dict[str, Any]:
        own = {f"model.stage{stage}.fc.extra_state": {"extra_state": scale or stage + 0.5}}
        return tree(rank, subjects={f"model.stage{stage}": {}}, state={"lr": {"last": 7}} | own)

    old = [of_stage(rank % 2, rank) for rank in range(4)]
    for rank in range(2):
        state = reshard(old, rank, 2, live=of_stage(rank, rank)).tree(7, True)["state"]
        assert state == old[rank]["state"]
    with pytest.raises(LayoutChanged, match=r"no old rank held state\.model\.stage2\.fc\.extra_state"):
        reshard(old, 0, 2, live=of_stage(2, 0)).tree(7, True)
    with pytest.raises(LayoutChanged, match=r"stage1\.fc\.extra_state differs among the 4 ranks"):
        reshard([*old[:3], of_stage(1, 3, 9.0)], 1, 2, live=of_stage(1, 1)).tree(7, True)


def test_objects_with_settings_must_be_on_both_sides():
    settings = stage(["model.0.w"], 0.1)["subjects"]["optimizer.0"]
    trees = [of_stages(0, [0]), of_stages(1, [1], **{"optimizer.1": settings})]
    for own, live in ((trees, of_stages(0, [0, 1])), (trees[:1], of_stages(0, [0], **{"optimizer.1": settings}))):
        with pytest.raises(LayoutChanged, match=r"optimizer\.1 has settings, and is on one side only"):
            reshard(own, 0, 1, live).tree(7, True)
