"""Names on storage."""

import pytest

from reft.core.commit.version import Epoch, Version
from reft.core.persist import stored_names as names

EPOCH = Epoch(7, bytes(range(16)))


def test_names_read_back() -> None:
    name = names.CheckpointName.of(Version(EPOCH, 1200))
    assert str(name) == "e7-00010203-s1200"
    assert names.checkpoint_name(str(name)) == name
    assert names.decided_epoch(names.decision_file(EPOCH)) == EPOCH
    assert names.node_attempt(names.node_folder(3, 12)) == (3, 12)
    assert names.rank_of(names.rank_file(41)) == 41
    assert names.is_lineage("0123456789abcdef")


@pytest.mark.parametrize(
    "text", ["", "..", "e7-00010203-s1200/..", "e7-0001020-s1", "e-1-00010203-s1", "e7-00010203-s1\n", "E7-00010203-s1"]
)
def test_other_names_are_not_read(text: str) -> None:
    assert names.checkpoint_name(text) is None
    assert names.decided_epoch(text) is None
    assert names.node_attempt(text) is None
    assert names.rank_of(text) is None
    assert not names.is_lineage(text)
