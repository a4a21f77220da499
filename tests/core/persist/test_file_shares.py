"""Which node opens which file of a checkpoint."""

from reft.core.persist.file_shares import deal_files
from reft.core.recovery.inventory import ManifestNode

WROTE = (ManifestNode("a", "node-a", ranks=(0, 1)), ManifestNode("b", "node-b", ranks=(2, 3)))


def test_node_opens_what_it_wrote() -> None:
    assert deal_files(range(4), WROTE, {"b": "node-b", "a": "node-a"}) == {"a": (0, 1), "b": (2, 3)}


def test_node_with_new_memory_is_known_by_its_name() -> None:
    assert deal_files(range(4), WROTE, {"x": "node-b", "y": "node-a"}) == {"x": (2, 3), "y": (0, 1)}
    assert deal_files(range(4), WROTE, {"x": "same", "y": "same"}) == {"x": (0, 2), "y": (1, 3)}


def test_files_of_absent_nodes_are_dealt_in_turn() -> None:
    shares = deal_files(range(4), WROTE, {"a": "node-a", "c": "node-c", "d": "node-d"})
    assert shares == {"a": (0, 1), "c": (2,), "d": (3,)}
    assert deal_files(range(4), WROTE, {"z": "node-z"}) == {"z": (0, 1, 2, 3)}


def test_every_file_is_opened_once() -> None:
    for count in range(1, 6):
        shares = deal_files(range(7), WROTE, {str(i): f"n{i}" for i in range(count)})
        assert sorted(rank for share in shares.values() for rank in share) == list(range(7))
