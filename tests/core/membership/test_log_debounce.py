"""What a log says of nodes: not every doubt that comes and goes.

What is said of a trouble that comes and goes.
"""

from __future__ import annotations

from reft.core.membership.failure_detector import FailureDetector, Signal, SignalChange
from reft.core.membership.log_debounce import AGAIN_S, LASTED_S, REMEMBERED_MAX, SignalLog, TroubleLog


class Log:
    """A node b as its neighbour a tells of it; moments in seconds."""

    def __init__(self) -> None:
        self.detector = FailureDetector("a", {"a": "a", "b": "b"}, 0.0)
        self.signal_log = SignalLog(self.detector)

    def becomes(self, now_s: float, signal: Signal, kind: str = "") -> list[tuple[str, str]]:
        member = self.detector.members["b"]
        change = SignalChange("b", member.signal, signal)
        member.signal, member.kind = signal, kind
        self.signal_log.heard([change], now_s)
        return self.says(now_s)

    def says(self, now_s: float) -> list[tuple[str, str]]:
        return [(each.before.name, each.after.name) for each in self.signal_log.due(now_s)]


def well() -> Log:
    log = Log()
    assert log.becomes(0.0, Signal.HEALTHY) == []
    assert log.says(LASTED_S) == [("JOINING", "HEALTHY")]
    return log


def test_a_doubt_that_passes_is_not_said():
    log = well()
    for at_s in range(2, 20, 2):
        assert log.becomes(at_s, Signal.SUSPECT, "daemon False") == []
        assert log.becomes(at_s + 0.9 * LASTED_S, Signal.HEALTHY) == []
    assert log.says(100.0) == []


def test_a_doubt_that_lasts_is_said_once_also_if_its_reason_changes():
    log = well()
    assert log.becomes(2.0, Signal.SUSPECT, "link") == []
    assert log.becomes(2.0 + 0.9 * LASTED_S, Signal.SUSPECT, "half") == []
    assert log.says(2.0 + LASTED_S) == [("HEALTHY", "SUSPECT")]
    assert log.says(50.0) == []
    assert log.becomes(60.0, Signal.SUSPECT, "agent") == []
    assert log.says(60.0 + LASTED_S) == [("SUSPECT", "SUSPECT")], "another reason that lasts is news"
    assert log.becomes(70.0, Signal.HEALTHY) == []
    assert log.says(70.0 + LASTED_S) == [("SUSPECT", "HEALTHY")]


def test_what_is_final_is_said_at_once_also_amid_doubts():
    log = well()
    assert log.becomes(2.0, Signal.SUSPECT, "daemon False") == []
    assert log.becomes(2.1, Signal.OFFLINE, "lost") == [("HEALTHY", "OFFLINE")]
    assert log.says(100.0) == []


def test_snapshots_are_not_told():
    log = well()
    assert log.becomes(2.0, Signal.SNAP) == []
    assert log.says(100.0) == []


def said(trouble_log: TroubleLog, *troubles: tuple[float, str]) -> list[str]:
    return [trouble for now_s, trouble in troubles if trouble_log.heard(trouble, now_s)]


def test_a_trouble_is_said_once_and_its_end_too():
    assert said(TroubleLog(), (0, ""), (1, "a"), (2, "a"), (3, "b"), (4, ""), (5, "")) == ["a", "b", ""]


def test_one_that_flickers_is_said_again_only_after_a_while():
    trouble_log = TroubleLog()
    flicker = [(float(i), "a" if i % 2 else "") for i in range(int(AGAIN_S))]
    assert said(trouble_log, *flicker) == ["a", ""]
    assert said(trouble_log, (AGAIN_S, "")) == []
    assert said(trouble_log, (AGAIN_S + 1, "a"), (AGAIN_S + 2, "")) == ["a", ""]


def test_another_trouble_between_is_not_hidden_and_its_end_is_said():
    trouble_log = TroubleLog()
    assert said(trouble_log, (0, "a"), (1, ""), (2, "a"), (3, "b"), (4, "a"), (5, "")) == ["a", "", "b", ""]


def test_it_remembers_a_bounded_number():
    trouble_log = TroubleLog()
    said(trouble_log, *((0.0, str(i)) for i in range(10 * REMEMBERED_MAX)))
    assert len(trouble_log._logged_s) == REMEMBERED_MAX
