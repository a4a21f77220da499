"""Bitwise equality in tests: losses, every tensor, and the next random numbers."""

from __future__ import annotations

from typing import Any


def assert_equal(after: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    """Fails unless each rank of a disturbed job ended like the undisturbed rank."""
    for mine, reference in zip(after, plain, strict=True):
        assert mine["losses"] == reference["losses"][mine["began"] :]
        assert mine["digests"] == reference["digests"]
        assert mine["random"] == reference["random"]
        assert mine["sealed"] == [True, len(reference["losses"])], (mine["sealed"], mine["said"])
