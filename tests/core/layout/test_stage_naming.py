"""Names of the leaves of pipeline stages: equal only for one tensor."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from reft.core.layout.stage_naming import CONSTANT, StageNames, StageNaming, equal_names, name_stages, tie_candidates

W, V = "float32 [8, 8]", "float32 [4]"


def named(stages: dict[int, StageNames], values=None, together=()) -> StageNaming:
    """Returns the naming. By default the bytes are equal and not constant."""
    possible = tie_candidates(stages, together)
    values = values or {i: {n: "x" for n in possible if n in s.parameters} for i, s in stages.items()}
    return name_stages(stages, equal_names(possible, values))


def stage(*names: str, buffers=(), **kinds: str) -> StageNames:
    return StageNames(dict.fromkeys(names, W) | kinds, frozenset(buffers))


def test_names_of_the_whole_model_stay():
    stages = {0: stage("embed.weight", "layers.0.weight"), 1: stage("layers.1.weight"), 2: stage("head.weight")}
    assert named(stages) == StageNaming(True)


def test_numbered_names_get_the_stage_even_if_bytes_are_equal():
    both = {0: stage("0.weight", "0.bias", "first.weight"), 1: stage("0.weight", "0.bias", "last.weight")}
    found = named(both, {i: {"0.weight": "same", "0.bias": "same"} for i in both})
    assert not found.is_global and not found.ties
    assert all(found.has_stage(name) for name in ("0.weight", "0.bias", "first.weight"))


def test_tied_embeddings_are_one_leaf_and_leave_the_names_of_the_whole_model_alone():
    stages = {
        0: stage("embed.weight", "layers.0.weight"),
        1: stage("layers.1.weight"),
        2: stage("embed.weight", "norm.weight"),
    }
    assert tie_candidates(stages) == {"embed.weight"}
    assert named(stages) == StageNaming(True, frozenset({"embed.weight"}))


def test_tied_embeddings_stay_one_leaf_if_stages_are_numbered():
    stages = {
        0: stage("embed.weight", "layers.0.weight"),
        1: stage("layers.0.weight"),
        2: stage("embed.weight", "layers.0.weight"),
    }
    assert tie_candidates(stages) == frozenset(), (
        "the last stage has nothing of its own, so it may be the first once more"
    )
    stages[0], stages[2] = (
        stage("embed.weight", "layers.0.weight", "pos"),
        stage("embed.weight", "layers.0.weight", "head"),
    )
    found = named(stages)
    assert found.ties == {"embed.weight"} and not found.is_global
    assert [found.has_stage(name) for name in ("embed.weight", "layers.0.weight", "head")] == [False, True, True]


def test_parameters_that_are_no_tie():
    first, middle = ("embed", "a"), stage("m")
    assert named({0: stage(*first), 1: middle, 2: stage("embed", "b")}).ties == {"embed"}
    assert not named({0: stage(*first), 1: stage("embed"), 2: stage("embed", "b")}).ties, "in a third stage"
    assert not named({0: stage(*first), 1: middle, 2: stage("b", embed=V)}).ties, "of another shape"
    assert not named({0: stage("embed"), 1: middle, 2: stage("embed")}).ties, "nothing of their own"
    assert not named({0: stage(*first), 1: middle, 2: stage("embed", "b")}, together=[frozenset({0, 2})]).ties
    for digests in ({0: "x", 2: "y"}, {0: CONSTANT + "x", 2: CONSTANT + "x"}, {}):
        values = {index: {"embed": digest} for index, digest in digests.items()} or {0: {}}
        found = named({0: stage(*first), 1: middle, 2: stage("embed", "b")}, values) if digests else None
        assert found is None or (not found.ties and found.has_stage("embed") and found.has_stage("m"))


def test_only_repeated_buffers_get_the_stage():
    stages = {0: stage("a", buffers=["freqs", "mean"]), 1: stage("b", buffers=["freqs"])}
    found = named(stages)
    assert found.is_global and [found.has_stage(name) for name in ("a", "freqs", "mean")] == [False, True, False]
    assert not named({0: stage("a"), 1: stage("b", buffers=["a"])}).is_global, (
        "a parameter in one stage, a buffer in another"
    )


def test_one_stage_is_no_pipeline():
    assert named({0: stage("0.weight")}) == StageNaming(True) and named({}) == StageNaming(True)


NAMES = st.sampled_from(["embed", "norm", "0.w", "layers.0.w", "head", "freqs"])
STAGES = st.lists(
    st.tuples(st.dictionaries(NAMES, st.sampled_from([W, V])), st.frozensets(NAMES, max_size=2)), min_size=1, max_size=4
)


@settings(deadline=None)
@given(STAGES, st.dictionaries(NAMES, st.tuples(*[st.sampled_from(["x", "y", CONSTANT + "x"])] * 4)), st.randoms())
def test_no_two_tensors_get_one_name_unless_they_are_a_tie(rows, digests, order):
    stages = {
        i: StageNames({n: k for n, k in kinds.items() if n not in buffers}, buffers)
        for i, (kinds, buffers) in enumerate(rows)
    }
    shuffled = list(stages)
    order.shuffle(shuffled)
    possible = tie_candidates(stages)
    values = {i: {n: digests.get(n, "xxxx")[i] for n in possible & stages[i].parameters.keys()} for i in stages}
    found = name_stages(stages, equal_names(possible, values))
    assert found == name_stages({i: stages[i] for i in shuffled}, equal_names(possible, values))
    owners: dict[object, list[int]] = {}
    for index, each in stages.items():
        for name in (*each.parameters, *each.buffers):
            owners.setdefault((index, name) if found.has_stage(name) else name, []).append(index)
    for name, holders in owners.items():
        if len(holders) > 1:
            assert name in found.ties and holders == [0, max(stages)]
            assert values[0][name] == values[max(stages)][name] and not values[0][name].startswith(CONSTANT)
