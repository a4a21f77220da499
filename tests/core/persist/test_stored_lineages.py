"""Which checkpoint on storage counts, and whose it is."""

import pytest

from reft.core.commit.decision import Decision, counts
from reft.core.commit.version import Epoch, Version
from reft.core.persist.stored_lineages import (
    StoredLineage,
    lineage_of,
    newer_than_memory,
    refuse_rival,
    unknown_decisions,
)
from reft.errors import AttachError

ONE, TWO, OTHER = Epoch(1, bytes(16)), Epoch(2, bytes([1]) * 16), Epoch(2, bytes([2]) * 16)
FIRST = Decision(ONE, None)


def test_newest_version_of_one_history_comes_first() -> None:
    second = Decision(TWO, Version(ONE, 40), (ONE,))
    lineage = StoredLineage("a" * 16, (second, FIRST), (Version(ONE, 20), Version(TWO, 60), Version(ONE, 40)))
    assert lineage.restorable() == [Version(TWO, 60), Version(ONE, 40), Version(ONE, 20)]


def test_history_that_went_back_beats_greater_steps() -> None:
    back = Decision(TWO, Version(ONE, 500), (ONE,))
    lineage = StoredLineage("a" * 16, (FIRST, back), (Version(ONE, 900), Version(ONE, 500), Version(TWO, 510)))
    assert lineage.restorable() == [Version(TWO, 510), Version(ONE, 500)]


def test_two_histories_are_refused_by_name() -> None:
    left, right = Decision(TWO, Version(ONE, 5), (ONE,)), Decision(OTHER, Version(ONE, 5), (ONE,))
    lineage = StoredLineage("a" * 16, (FIRST, left, right), (Version(ONE, 5), Version(TWO, 9), Version(OTHER, 7)))
    with pytest.raises(AttachError, match=r"step 7 .*step 9"):
        lineage.restorable()


def test_decision_without_any_checkpoint_does_not_hide_older_ones() -> None:
    started_fresh = Decision(TWO, None, ())
    lineage = StoredLineage("a" * 16, (FIRST, started_fresh), (Version(ONE, 5),))
    assert lineage.restorable() == [Version(ONE, 5)]


def test_without_decisions_all_checkpoints_count() -> None:
    assert StoredLineage("a" * 16, (), (Version(ONE, 5),)).restorable() == [Version(ONE, 5)]


def test_checkpoint_of_some_attaches_ago_counts() -> None:
    """Failures may come more often than checkpoints."""
    three, four = Epoch(3, bytes([3]) * 16), Epoch(4, bytes([4]) * 16)
    chain = (
        FIRST,
        Decision(TWO, Version(ONE, 40), (ONE,)),
        Decision(three, Version(TWO, 50), (TWO, ONE)),
        Decision(four, Version(three, 60), (three, TWO, ONE)),
    )
    lineage = StoredLineage("a" * 16, chain, (Version(ONE, 30), Version(ONE, 45), Version(TWO, 48), Version(TWO, 55)))
    assert lineage.restorable() == [Version(TWO, 48), Version(ONE, 30)]


def test_refused_attach_does_not_make_two_histories() -> None:
    """Its decision stays on storage, and the next attach may not have seen it."""
    refused, then = Decision(TWO, Version(ONE, 5), (ONE,)), Decision(OTHER, Version(ONE, 5), (ONE,))
    lineage = StoredLineage("a" * 16, (FIRST, refused, then), (Version(ONE, 5), Version(OTHER, 7)))
    assert lineage.history() == then


def test_going_back_ends_later_versions_in_memory() -> None:
    second = Decision(TWO, Version(ONE, 40), (ONE,), guard=Version(ONE, 39))
    lineage = StoredLineage("a" * 16, (FIRST, second), (Version(ONE, 20), Version(TWO, 60)))
    assert lineage.back_to(Version(TWO, 60)) == second
    back = lineage.back_to(Version(ONE, 20))
    assert back == Decision(TWO, Version(ONE, 20), (ONE,))
    assert counts(Version(ONE, 20), back) and not counts(Version(ONE, 30), back)


def test_memory_and_storage_that_went_apart_are_refused() -> None:
    left, right = Decision(TWO, Version(ONE, 5), (ONE,)), Decision(OTHER, Version(ONE, 5), (ONE,))
    apart = StoredLineage("a" * 16, (FIRST, right), (Version(ONE, 5), Version(OTHER, 7)))
    with pytest.raises(AttachError, match=r"epoch 2 in memory, and epoch 2 on storage, lineage a{16}, up to step 7"):
        refuse_rival("run", left, apart)
    refuse_rival("run", None, apart)
    refuse_rival("run", FIRST, apart)
    refuse_rival("run", right, apart)
    refuse_rival("run", left, StoredLineage("a" * 16, (FIRST, right), (Version(ONE, 5),)))


def test_only_lineage_goes_on() -> None:
    lineage = StoredLineage("a" * 16, (FIRST,), (Version(ONE, 5),))
    ended = StoredLineage("b" * 16, (FIRST,), (Version(ONE, 9),), has_ended=True)
    empty = StoredLineage("c" * 16, (FIRST,))
    assert lineage_of("run", (lineage, ended, empty)) == lineage
    assert lineage_of("run", (ended, empty)) is None


def test_two_lineages_are_refused_unless_one_is_known_or_asked() -> None:
    lineages = [StoredLineage(name * 16, (FIRST,), (Version(ONE, step),)) for name, step in (("a", 5), ("b", 7))]
    with pytest.raises(AttachError, match=r"a{16} up to step 5 .*b{16} up to step 7"):
        lineage_of("run", lineages)
    assert lineage_of("run", lineages, known="b" * 16) == lineages[1]
    assert lineage_of("run", lineages, known="b" * 16, asked="a" * 16) == lineages[0]
    assert lineage_of("run", lineages, known="c" * 16) is None
    with pytest.raises(AttachError, match="no lineage cccc"):
        lineage_of("run", lineages, asked="c" * 16)


def test_memory_is_older_if_storage_knows_its_end() -> None:
    later = StoredLineage("a" * 16, (Decision(TWO, Version(ONE, 5), (ONE,)),))
    assert newer_than_memory(FIRST, later)
    assert newer_than_memory(None, later)
    assert not newer_than_memory(Decision(TWO, None, (ONE,)), later)
    assert not newer_than_memory(Decision(OTHER, None, (ONE,)), later)


def test_stale_coordinator_sees_the_decision_it_does_not_know() -> None:
    later = Decision(TWO, Version(ONE, 5), (ONE,))
    assert unknown_decisions([FIRST, later], FIRST) == [later]
    assert unknown_decisions([FIRST, later], later) == []
