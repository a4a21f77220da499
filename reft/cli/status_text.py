"""Lines of plain text for people, at most 88 columns wide. Pure: views in, lines out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from reft.cli.status_view import JobView, NodeView, RankView
from reft.core.budget import size
from reft.core.commit.version import Version
from reft.core.status.loss_analysis import LossReport
from reft.core.text import counted
from reft.wire.v1 import daemon_pb2 as pb

WIDTH = 88
RANKS_SHOWN = 16  # lines; a job of more ranks shows those that need attention, --json shows all
OWN_SHOWN = 4  # leaves that differ between ranks
NONE = "-"
SCHEMES = {"aec": "coded", "arc": "copied", "none": "stored once"}


def status_lines(reply: pb.StatusReply, jobs: Sequence[JobView]) -> list[str]:
    """Everything that `status` prints: each job's block, then the daemon."""
    limit = f" of {size(reply.limit_bytes)}" if reply.limit_bytes else ""
    daemon = f"daemon  {reply.node}, reft {reply.version}, pid {reply.pid}, holds {size(reply.held_bytes)}{limit}"
    if reply.spare_limit_bytes:
        daemon += f", has {size(reply.spare_bytes)} of {size(reply.spare_limit_bytes)} spare"
    if reply.round_bytes_sent or reply.capsule_bytes_sent:
        daemon += f", sent {size(reply.round_bytes_sent)} of rounds and {size(reply.capsule_bytes_sent)} of capsules"
    if not jobs:
        return ["no job is held here.", daemon]
    return [line for job in jobs for line in [*job_lines(job), ""]] + wrapped("", daemon)


def job_lines(job: JobView) -> list[str]:
    """One job: what it is, how it is, where its state lies, and what that survives."""
    ranks = f"{counted(job.world, 'rank')} on {counted(len(job.nodes), 'node')}"
    every = f", every {job.every} steps" if job.every > 1 else ""
    name = job.script.rpartition("/")[2]
    lines = wrapped("job     ", f"{job.job}  {name + ', ' if name else ''}{ranks}{every}, up {duration(job.up_s)}")
    lines += wrapped("health  ", f"{job.health.value}  {job.reason}")
    lines += protection_lines(job)
    lines += ["", *node_table(job.nodes), "", *rank_table(job.ranks), "", *survival_table(job)]
    return lines


def protection_lines(job: JobView) -> list[str]:
    """How well the job is protected now, how its state is shared out, and what of it is not protected."""
    found = job.protection
    if found is None:
        return []
    if found.version is None:
        now = "nothing can be restored as it is."
    else:
        now = (
            f"any {counted(found.tolerated, 'failure domain')} may vanish now."
            if found.tolerated > 0
            else "no failure domain may vanish now."
        )
        if found.tolerated < found.meant:
            now = f"{now[:-1]}, {found.meant} when all is well."
    if job.degraded_s:
        now += f" Degraded for {age(job.degraded_s)} since the last restore."
    lines = wrapped("protect ", f"{job.word}  {now}")
    for each in found.exposed:
        lines += wrapped("exposed ", each.what)
    for name, ranks in job.own[:OWN_SHOWN]:
        lines += wrapped("unlike  ", f"{name} differs between ranks {spans(ranks)}: each keeps its own.")
    if len(job.own) > OWN_SHOWN:
        lines.append(f"unlike  {counted(len(job.own) - OWN_SHOWN, 'more leaf', 'more leaves')}; --json has them all.")
    rows = [
        (
            SCHEMES[group.scheme],
            str(group.domains),
            f"{group.k}+{group.f}",
            str(group.f),
            str(group.cells),
            size(group.nbytes),
        )
        for group in found.groups
    ]
    if rows:
        lines += ["", *aligned(("CELLS THAT ARE", "DOMAINS", "SHARDS", "MAY LOSE", "CELLS", "BYTES"), rows, right=1)]
    return lines


def what_if_lines(job: str, lose: Sequence[str], version: Version | None, loss: LossReport | None) -> list[str]:
    """The answer to "what if these nodes vanish"."""
    question = f"if {', '.join(lose)} vanish{'es' * (len(lose) == 1)}"
    if version is None:
        return wrapped("", f"job {job}: nothing can be restored as it is.")
    answer = f"it is lost: {loss.words}." if loss else "it survives."
    return wrapped("", f"job {job}, {version}: {question}, {answer}")


def node_table(nodes: Sequence[NodeView]) -> list[str]:
    """One line for each node, and a sentence for each of which something is to be said."""
    rows = [
        (node.node, node.state, node.signal or NONE, spans(node.ranks), number(node.sealed_step), age(node.age_s),
         size(node.nbytes))
        for node in nodes
    ]  # fmt: skip
    lines = aligned(("NODE", "STATE", "SIGNAL", "RANKS", "SEALED", "AGE", "HELD"), rows, right=4)
    for node in nodes:
        since = f" ({age(node.signal_age_s)})" if node.signal_age_s is not None else ""
        lines += wrapped(f"  {node.node}: ", f"{node.reason}{since}") if node.reason else []
    return lines


def rank_table(ranks: Sequence[RankView]) -> list[str]:
    """One line for each rank, or for those that need attention if there are many."""
    shown = list(ranks)
    if len(ranks) > RANKS_SHOWN:
        shown = [rank for rank in ranks if rank.state == "gone" or rank.trouble][:RANKS_SHOWN]
    rows = [
        (str(rank.rank), rank.node, rank.state, number(rank.step), number(rank.sealed_step), age(rank.age_s),
         size(rank.nbytes))
        for rank in shown
    ]  # fmt: skip
    lines = aligned(("RANK", "NODE", "STATE", "STEP", "SEALED", "AGE", "HELD"), rows, right=3) if rows else []
    for rank in shown:
        lines += wrapped(f"  rank {rank.rank}: ", rank.trouble) if rank.trouble else []
    if len(shown) < len(ranks):
        lines.append(f"Not shown: {counted(len(ranks) - len(shown), 'more rank')}; --json has them all.")
    return lines


def survival_table(job: JobView) -> list[str]:
    """What may be lost without losing what is held, and what would be trained again."""
    rows = [(loss, "yes" if held else "NO", lost) for loss, held, lost in job.survives]
    return aligned(("LOSS OF", "SURVIVED", "WHAT IS LOST"), rows, right=9)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], right: int) -> list[str]:
    """Columns two spaces apart; those from index `right` on end flush. A cell too long for the line is cut."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    # The first column gives way: names of nodes are the only cells without a natural bound.
    widest = widths.index(max(widths))
    widths[widest] = max(min(widths[widest], WIDTH - 2 * (len(head) - 1) - sum(widths) + widths[widest]), 4)
    lines = []
    for row in table:
        cells = [cut(cell, width) for cell, width in zip(row, widths, strict=True)]
        padded = [
            cell.rjust(width) if i >= right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def wrapped(label: str, text: str) -> list[str]:
    """The text after its label, later lines set in below it."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False
    ) or [label.rstrip()]


def cut(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as runs: "0-3, 8"."""
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or NONE


def number(value: int | None) -> str:
    """A number, or a dash."""
    return NONE if value is None else str(value)


def age(seconds: float | None) -> str:
    """How long ago, or a dash."""
    return NONE if seconds is None else f"{seconds:.1f}s" if seconds < 60 else duration(seconds)


def duration(seconds: float) -> str:
    """Seconds as a person reads them: "45s", "12m05s", "2h13m", "3d04h"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"
