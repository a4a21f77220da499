"""Tests which changes of nodes and which recurring troubles are logged."""

from __future__ import annotations

from reft.core.membership.failure_detector import FailureDetector, Signal, SignalChange
from reft.core.membership.log_debounce import AGAIN_S, LASTED_S, REMEMBERED_MAX, SignalLog, TroubleLog


class Log:
    """The log lines of node a about its neighbour b; times in seconds."""

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


def test_a_short_doubt_is_not_logged():
    log = well()
    for at_s in range(2, 20, 2):
        assert log.becomes(at_s, Signal.SUSPECT, "daemon False") == []
        assert log.becomes(at_s + 0.9 * LASTED_S, Signal.HEALTHY) == []
    assert log.says(100.0) == []


def test_a_lasting_doubt_is_logged_once_even_if_its_reason_changes():
    log = well()
    assert log.becomes(2.0, Signal.SUSPECT, "link") == []
    assert log.becomes(2.0 + 0.9 * LASTED_S, Signal.SUSPECT, "half") == []
    assert log.says(2.0 + LASTED_S) == [("HEALTHY", "SUSPECT")]
    assert log.says(50.0) == []
    assert log.becomes(60.0, Signal.SUSPECT, "agent") == []
    assert log.says(60.0 + LASTED_S) == [("SUSPECT", "SUSPECT")], "another reason that lasts is news"
    assert log.becomes(70.0, Signal.HEALTHY) == []
    assert log.says(70.0 + LASTED_S) == [("SUSPECT", "HEALTHY")]


def test_a_final_signal_is_logged_at_once():
    log = well()
    assert log.becomes(2.0, Signal.SUSPECT, "daemon False") == []
    assert log.becomes(2.1, Signal.OFFLINE, "lost") == [("HEALTHY", "OFFLINE")]
    assert log.says(100.0) == []


def test_snapshots_are_not_logged():
    log = well()
    assert log.becomes(2.0, Signal.SNAP) == []
    assert log.says(100.0) == []


def logged(trouble_log: TroubleLog, *troubles: tuple[float, str]) -> list[str]:
    return [trouble for now_s, trouble in troubles if trouble_log.heard(trouble, now_s)]


def test_a_trouble_and_its_end_are_logged_once():
    assert logged(TroubleLog(), (0, ""), (1, "a"), (2, "a"), (3, "b"), (4, ""), (5, "")) == ["a", "b", ""]


def test_a_recurring_trouble_is_logged_again_only_after_a_while():
    trouble_log = TroubleLog()
    flicker = [(float(i), "a" if i % 2 else "") for i in range(int(AGAIN_S))]
    assert logged(trouble_log, *flicker) == ["a", ""]
    assert logged(trouble_log, (AGAIN_S, "")) == []
    assert logged(trouble_log, (AGAIN_S + 1, "a"), (AGAIN_S + 2, "")) == ["a", ""]


def test_a_trouble_that_must_last_is_logged_if_it_is_heard_again_after_that_time():
    trouble_log = TroubleLog()

    def heard(*troubles: tuple[float, str]) -> list[float]:
        return [now_s for now_s, trouble in troubles if trouble_log.heard(trouble, now_s, 2.0 if trouble else 0.0)]

    assert heard((0, "a"), (1, "a"), (1.5, ""), (2, "a"), (3.9, "a"), (4, "")) == []
    assert heard((5, "a"), (6, "b"), (7.5, "a"), (9.5, "a"), (10, "a"), (11, "")) == [9.5, 11]


def test_another_trouble_in_between_and_its_end_are_logged():
    trouble_log = TroubleLog()
    assert logged(trouble_log, (0, "a"), (1, ""), (2, "a"), (3, "b"), (4, "a"), (5, "")) == ["a", "", "b", ""]


def test_the_number_of_remembered_troubles_is_bounded():
    trouble_log = TroubleLog()
    logged(trouble_log, *((0.0, str(i)) for i in range(10 * REMEMBERED_MAX)))
    assert len(trouble_log._logged_s) == REMEMBERED_MAX
