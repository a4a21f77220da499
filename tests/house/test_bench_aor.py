"""bench/aor.py computes ratios and goals from measured seconds."""

from __future__ import annotations

import pytest

from bench.aor import AOR, EXCHANGE, MODES, NONE, ModeFigures, rows_of


def figures(aor_s: float, moved_bytes: int) -> dict[str, ModeFigures]:
    """Returns figures of two rounds; the second is twice as slow in all modes."""
    seconds = dict(zip(MODES, (0.1, 0.11, 0.12, aor_s), strict=True))
    made = {
        mode: ModeFigures([[s, s, 5 * s], [2 * s, 2 * s, 2 * s]], [0.01, 0.02, 0.03]) for mode, s in seconds.items()
    }
    made[AOR].moved_bytes, made[AOR].whole = moved_bytes, 4
    made[EXCHANGE].moved_bytes, made[EXCHANGE].whole = 8_000_000, 4
    made[AOR].stats = {"records": 6.0, "records_torn": 1.0, "records_missed": 1.0}
    return made


@pytest.mark.parametrize(("aor_s", "moved_bytes", "missed"), [(0.102, 0, 0), (0.103, 0, 1), (0.102, 8, 1)])
def test_ratios_are_of_one_round_and_goals_are_those_of_recomputed_copies(aor_s, moved_bytes, missed):
    rows = {row.name: row for row in rows_of(figures(aor_s, moved_bytes))}
    assert rows[f"{NONE}: step over one without reft"].value == pytest.approx(1.1)
    assert rows[f"{AOR}: step over one without reft"].value == pytest.approx(aor_s / 0.1)
    assert rows[f"{EXCHANGE}: sent by a node for a whole step"].value == pytest.approx(1.0)
    assert rows[f"{EXCHANGE}: a node's daemon and children"].value == pytest.approx(20)
    assert rows["aor: marks without a record"].value == pytest.approx(0.25)
    assert sum(row.is_missed for row in rows.values()) == missed
