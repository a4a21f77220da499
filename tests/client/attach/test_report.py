"""What attach prints: the remedy where no version is whole any more."""

from __future__ import annotations

from types import SimpleNamespace

from reft.client.attach import report


def test_the_remedy_names_silent_nodes_only_if_there_are_any():
    damaged, silent = SimpleNamespace(silent=()), SimpleNamespace(silent=("node-b",))
    assert report.lost_remedy("job", damaged) == "reft-cli purge job --yes, then start from your checkpoint"
    assert report.lost_remedy("job", silent).startswith("start node-b and its reft-daemon again with the old slots")
