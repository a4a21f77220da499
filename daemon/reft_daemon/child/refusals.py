"""Counts what the daemon refuses at its doors, for the log and for `status`.

    count ─► by reason and address ─┬─ say, each second: is the last line a minute old? ─► log
                                    └─ status ─► callers at the unix socket

A flood must not flood the log. So one line has the reasons with their counts, and a few addresses.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from reft.log_lines import audit
from reft.wire.v1 import daemon_pb2 as pb

SAID_EACH_S: Final = 60.0
MINUTE: Final = 60  # seconds
ADDRESSES_MAX: Final = 1000  # counted one by one; later ones count as OTHERS
ADDRESSES_SAID: Final = 5
REASONS_MAX: Final = 100  # counted one by one; later ones count as OTHER_REASONS
REASONS_SAID: Final = 8
OTHERS: Final = "others"
OTHER_REASONS: Final = "of other reasons"


@dataclass
class _ReasonCounts:
    """What was refused for one reason.

    Attributes:
        total: since the start.
        noted: part of the total that `seconds` has or had.
        last_s: about when the last one was refused.
        seconds: time in whole seconds → count, of the last minute.
        new: address → count, since the last line.
        said: address → count, in the last line that had this reason.
    """

    total: int = 0
    noted: int = 0
    last_s: float = 0.0
    seconds: Counter[int] = field(default_factory=Counter)
    new: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)

    def note_time(self, now_s: float) -> None:
        """Notes that all that is not yet noted was refused just now."""
        if self.total > self.noted:
            self.seconds[int(now_s)] += self.total - self.noted
            self.noted, self.last_s = self.total, now_s
        for second in [each for each in self.seconds if each <= int(now_s) - MINUTE]:
            del self.seconds[second]


class RefusalCounts:
    """Counts refusals by reason and address. Any thread may call it."""

    def __init__(self) -> None:
        self._reasons: dict[str, _ReasonCounts] = {}
        self._said_s = float("-inf")
        self._lock = threading.Lock()

    @property
    def totals(self) -> Counter[str]:
        """Counts since the start, by reason."""
        with self._lock:
            return Counter({reason: counts.total for reason, counts in self._reasons.items()})

    def count(self, reason: str, address: str) -> None:
        """Counts one refusal.

        Args:
            reason: a sentence about the callers without its end, e.g. "they did not speak HTTP/2".
                Nothing that a caller sent may be in it.
            address: of the caller: a host, or a pid.
        """
        with self._lock:
            if reason not in self._reasons and len(self._reasons) >= REASONS_MAX:
                reason = OTHER_REASONS
            counts = self._reasons.setdefault(reason, _ReasonCounts())
            counts.total += 1
            counts.new[address if address in counts.new or len(counts.new) < ADDRESSES_MAX else OTHERS] += 1

    def say(self, now_s: float) -> None:
        """Logs what is new, if the last line is old enough. Call it each second."""
        with self._lock:
            for counts in self._reasons.values():
                counts.note_time(now_s)
            new = Counter({reason: counts.new.total() for reason, counts in self._reasons.items() if counts.new})
            if not new or now_s - self._said_s < SAID_EACH_S:
                return
            self._said_s = now_s
            callers: Counter[str] = Counter()
            for reason in new:
                counts = self._reasons[reason]
                callers.update(counts.new)
                counts.said, counts.new = counts.new, Counter()
        first = new.most_common(REASONS_SAID)
        why = [f"{count} because {reason}" for reason, count in first]
        if rest := new.total() - sum(count for _, count in first):
            why.append(f"{rest} because {OTHER_REASONS}")
        most = [f"{address} ({count})" for address, count in callers.most_common(ADDRESSES_SAID)]
        more = len(callers) - len(most)
        by = ", ".join(most) + (f" and {more} more" if more else "")
        audit("refused at the doors", count=new.total(), why=", ".join(why), by=by)

    def status(self, now_s: float) -> pb.RefusedStatus:
        """Returns what was refused: all in sum, and the reasons of the last minute first."""
        with self._lock:
            reasons = [_reason_status(reason, counts, now_s) for reason, counts in self._reasons.items()]
        reasons.sort(key=lambda each: (-each.last_minute, each.age_s))
        return pb.RefusedStatus(
            total=sum(each.total for each in reasons),
            last_minute=sum(each.last_minute for each in reasons),
            reasons=reasons[:REASONS_SAID],
            more_reasons=len(reasons[REASONS_SAID:]),
        )


def _reason_status(reason: str, counts: _ReasonCounts, now_s: float) -> pb.RefusedReason:
    counts.note_time(now_s)
    lately = counts.said + counts.new
    return pb.RefusedReason(
        reason=reason,
        total=counts.total,
        last_minute=counts.seconds.total(),
        age_s=max(now_s - counts.last_s, 0.0),
        addresses=[address for address, _ in lately.most_common(ADDRESSES_SAID)],
        more_addresses=max(len(lately) - ADDRESSES_SAID, 0),
    )
