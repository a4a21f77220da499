"""Decides how fast a node sends its bytes of a turn of the exchange.

    --protect-bandwidth   all turns of the node together          one job's turn
      off                 no limit                                not paced
      200M/s              200 MiB a second                        at most the limit
      auto                a tenth of the link, if that is known   and spread over SPREAD_S

Invariants
  1. A turn that the limit lets end in less than a second is not paced: it sends no more than the
     limit permits in a second. Several such turns may follow one another within a second.
  2. `auto` never spreads a turn over more than SPREAD_S by the second rule alone, and never paces
     it below SPREAD_LEAST by that rule: ranges of pulls have a deadline.
  3. Where the speed of the link is unknown, only the second rule limits a turn. Then a turn counts
     as over in less than a second if a tenth of UNKNOWN_LINK sends it so.
"""

from __future__ import annotations

from typing import NamedTuple

from reft.core.budget import format_bytes

LINK_PARTS = 10  # the exchange takes one of so many parts of a link
SPREAD_S = 30
SPREAD_LEAST = 8 << 20  # bytes per second: each of 8 pulls at a time gets a range of 4 MiB in 4 s
UNKNOWN_LINK = 10**10 // 8  # bytes per second


class BandwidthLimit(NamedTuple):
    """What the turns of a node may send.

    Attributes:
        bytes_per_s: of all turns together; 0: no limit.
        spread_s: seconds over which each turn is spread; 0: turns are not spread.
        origin: where the limit comes from, in words.
    """

    bytes_per_s: int
    spread_s: int
    origin: str


class TurnPace(NamedTuple):
    """How fast one node sends in the turns of one job.

    Attributes:
        bytes_per_s: at most; 0: as fast as it goes.
        reason: why, in words.
    """

    bytes_per_s: int
    reason: str


NO_LIMIT = BandwidthLimit(0, 0, "--protect-bandwidth is off")


def fixed_limit(bytes_per_s: int) -> BandwidthLimit:
    """Returns the limit that a person chose."""
    return BandwidthLimit(bytes_per_s, 0, "--protect-bandwidth")


def automatic_limit(interface: str, link_bytes_per_s: int | None) -> BandwidthLimit:
    """Returns the limit of `auto`.

    Args:
        interface: name of the network interface that sends; empty: unknown.
        link_bytes_per_s: speed of its link; None: unknown.
    """
    if link_bytes_per_s is None:
        return BandwidthLimit(0, SPREAD_S, f"the speed of {interface or 'the link'} is unknown")
    return BandwidthLimit(link_bytes_per_s // LINK_PARTS, SPREAD_S, f"a tenth of {interface}'s speed")


def turn_pace(limit: BandwidthLimit, sent_bytes: int) -> TurnPace:
    """Returns how fast a node sends in a turn of a job.

    Args:
        limit: of the node.
        sent_bytes: that the node sends in one turn of the job.
    """
    if not limit.bytes_per_s and not limit.spread_s:
        return TurnPace(0, limit.origin)
    if sent_bytes < (limit.bytes_per_s or UNKNOWN_LINK // LINK_PARTS):
        return TurnPace(0, "a turn fits into one second of the limit")
    if limit.spread_s:
        spread = max(-(-sent_bytes // limit.spread_s), SPREAD_LEAST)
        if not limit.bytes_per_s or spread < limit.bytes_per_s:
            return TurnPace(spread, f"a turn is spread over {sent_bytes / spread:.0f} s")
    return TurnPace(limit.bytes_per_s, limit.origin)


def pace_words(pace: TurnPace) -> str:
    """Returns a pace as people read it: "at most 3.3 GiB a second: a turn is spread over 30 s"."""
    return f"{f'at most {format_bytes(pace.bytes_per_s)} a second' if pace.bytes_per_s else 'not paced'}: {pace.reason}"
