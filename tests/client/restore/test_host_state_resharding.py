"""Who gets which small host state in a job of another shape: every rule, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from reft.client.restore import host_state_resharding
from reft.client.restore.host_state_resharding import HostStateResharding
from reft.errors import LayoutChanged


def tree(rank: int, **changes: Any) -> dict[str, Any]:
    """What an old rank had."""
    groups = [{"params": ["model.a"], "values": {"lr": 0.1}}, {"params": ["model.b"], "values": {"lr": 0.2}}]
    optimizer = {"class": "SGD", "groups": groups, "scalars": {"model.a": {"n": 1}}}
    whole = {
        "step": 7, "marked": True, "random": host_state_resharding.seeded(rank, 0), "scalers": {}, "state": {"lr": {"last": 7}},
        "subjects": {"model.0": {}, "optimizer.0": optimizer},
    }  # fmt: skip
    return whole | changes


def inherit(trees: list[dict[str, Any]], rank: int, world: int, live: Any = None, **given: Any) -> HostStateResharding:
    parts = [host_state_resharding.parts(each) for each in trees]
    digests = [{part: host_state_resharding.digest(value) for part, value in each.items()} for each in parts]
    values = {host_state_resharding.digest(value): value for each in parts for value in each.values()}
    live = live or tree(0)
    return HostStateResharding(
        rank, world, digests, values, live, given.get("generators", ()), given.get("takes_all", ())
    )


def same(one: Any, other: Any) -> bool:
    return host_state_resharding.digest(one) == host_state_resharding.digest(other)


def test_generators_follow_their_rank_and_new_ranks_get_seeds_that_follow():
    trees = [tree(rank) for rank in range(3)]
    found = [inherit(trees, rank, 5).tree(7, True)["random"] for rank in range(5)]
    assert all(same(found[rank], trees[rank]["random"]) for rank in range(3))
    assert len({host_state_resharding.digest(each) for each in found}) == 5
    again = inherit(trees, 4, 5)
    assert same(again.tree(7, True)["random"], found[4]), "each restore of this version gives the same"
    assert again.lines[0].startswith("new ranks 3-4: random generators start from seeds")
    fewer = inherit(trees, 1, 2)
    assert same(fewer.tree(7, True)["random"], trees[1]["random"])
    assert not any("generators" in line for line in fewer.lines)


def test_generators_that_all_ranks_had_alike_stay_alike():
    trees = [tree(0)] * 2
    found = inherit(trees, 2, 3)
    assert same(found.tree(7, True)["random"], trees[0]["random"]) and not any("seeds" in line for line in found.lines)


def test_what_all_ranks_had_alike_every_rank_gets():
    found = inherit([tree(0), tree(1)], 2, 3)
    whole = found.tree(7, True)
    assert whole["state"] == {"lr": {"last": 7}} and whole["step"] == 7 and whole["marked"]
    assert "state['lr'] was the same on all 2 old ranks: every rank gets this state." in found.lines


def test_unlike_objects_are_refused_by_name_unless_they_take_all_or_each_rank_has_its_own_again():
    trees = [tree(rank, state={"data": {"at": rank}}) for rank in range(2)]
    with pytest.raises(
        LayoutChanged, match=r"state\.data differs among the 2 ranks.*this job has 3 ranks.*load_state_dicts"
    ):
        inherit(trees, 0, 3).tree(7, True)
    assert inherit(trees, 1, 2).tree(7, True)["state"] == {"data": {"at": 1}}
    given = inherit(trees, 2, 3, takes_all=["data"])
    given.tree(7, True)
    assert given.lists == {"data": [{"at": 0}, {"at": 1}]}
    own = inherit(trees, 1, 2, takes_all=["data"])
    assert own.tree(7, True)["state"] == {"data": {"at": 1}} and not own.lists


def test_a_generator_among_the_objects_is_a_generator():
    trees = [tree(rank, state={"g": host_state_resharding.seeded(rank, 0)["cpu"]}) for rank in range(2)]
    assert same(inherit(trees, 1, 3, generators=["g"]).tree(7, True)["state"]["g"], trees[1]["state"]["g"])
    new = inherit(trees, 2, 3, generators=["g"]).tree(7, True)["state"]["g"]
    assert not any(same(new, each["state"]["g"]) for each in trees)


def stage(names: list[str], lr: float) -> dict[str, Any]:
    groups = [{"params": names, "values": {"lr": lr}}]
    scalars = {name: {"n": len(name)} for name in names}
    return {"subjects": {"optimizer.0": {"class": "SGD", "groups": groups, "scalars": scalars}}}


def test_groups_of_stages_are_put_together_by_their_parameters():
    trees = [tree(0, **stage(["a", "b"], 0.1)), tree(1, **stage(["c"], 0.1))]
    live = tree(0, **stage(["c", "a", "b"], 9.0))
    found = inherit(trees, 0, 1, live).tree(7, True)["subjects"]["optimizer.0"]
    assert found["groups"] == [{"params": ["c", "a", "b"], "values": {"lr": 0.1}}]
    assert found["scalars"] == {name: {"n": 1} for name in "abc"}


def test_groups_with_unlike_settings_are_not_put_together():
    trees = [tree(0, **stage(["a"], 0.1)), tree(1, **stage(["c"], 0.3))]
    with pytest.raises(LayoutChanged, match=r"optimizer\.0, group 0: the old groups .* different settings"):
        inherit(trees, 0, 1, tree(0, **stage(["a", "c"], 9.0))).tree(7, True)
    with pytest.raises(LayoutChanged, match=r"1 of its parameters were in no group, e\.g\. d"):
        inherit(trees, 0, 1, tree(0, **stage(["a", "d"], 9.0))).tree(7, True)


def test_unlike_scalers_are_refused():
    trees = [tree(rank, scalers={"s": {"growth": rank}}) for rank in range(2)]
    with pytest.raises(LayoutChanged, match=r"scalers\.s differs"):
        inherit(trees, 0, 1).tree(7, True)
