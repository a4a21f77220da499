"""Bitwise equality in tests: losses, every tensor, and the next random numbers."""

from __future__ import annotations

from typing import Any


def assert_equal(after: list[dict[str, Any]], plain: list[dict[str, Any]], seals_last: bool = True) -> None:
    """Fails unless each rank of a disturbed job ended like the undisturbed rank.

    Args:
        after: results of the disturbed ranks.
        plain: of the undisturbed ones.
        seals_last: whether the last step must be sealed; while a new layout is made it need not be.
    """
    for mine, reference in zip(after, plain, strict=True):
        assert mine["losses"] == reference["losses"][mine["began"] :]
        assert mine["digests"] == reference["digests"]
        assert mine["random"] == reference["random"]
        assert not seals_last or mine["sealed"] == [True, len(reference["losses"])], (mine["sealed"], mine["said"])
