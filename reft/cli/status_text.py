"""Makes lines of plain text, at most 88 columns wide, from views. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from reft.cli.status_view import ExchangeView, JobView, NodeView, RankView, ReplayView, StorageView, ordered
from reft.core.budget import SLOTS, format_bytes
from reft.core.coding.turn_pace import pace_words
from reft.core.commit.version import Version
from reft.core.recovery.holdings import survives
from reft.core.status.loss_analysis import LossReport
from reft.core.status.protection import ProtectionWord
from reft.core.text import counted
from reft.log_lines import escape, escape_lines
from reft.wire.v1 import daemon_pb2 as pb

WIDTH = 88
BRIEF_LINES = 10  # of a job that trains, unless all lines are asked for
SCRIPT_SHOWN = 16  # characters of a script's name in the table of jobs that are over
NO_JOB = "no job is held here."
HOW_TO_GO_ON = "All of one job: reft-cli status JOB. To free its memory: reft-cli purge JOB."
# A job with more ranks shows only the ranks that need attention. --json shows all ranks.
RANKS_SHOWN = 16
OWN_SHOWN = 4  # leaves that differ between ranks
NONE = "-"
SCHEMES = {"aec": "erasure code", "arc": "copies", "none": "none", "exchange": "exchange", "aor": "copies elsewhere"}
REFUSED_SHOWN = 3  # reasons why calls were refused
REFUSED_SHOWN_S = 600.0
ADDRESSES_SHOWN = 2  # that were refused for a reason
LANES_SHOWN = 4  # lanes of the exchange that are not guarded


def status_lines(reply: pb.StatusReply, jobs: Sequence[JobView]) -> list[str]:
    """Returns all lines of `status`: a block for each job, then the daemon."""
    if not jobs:
        return [*(damaged_lines(reply) or [NO_JOB]), *daemon_lines(reply)]
    lines = [line for job in ordered(jobs) for line in [*job_lines(job), ""]]
    return lines + damaged_lines(reply) + daemon_lines(reply)


def brief_lines(reply: pb.StatusReply, jobs: Sequence[JobView]) -> list[str]:
    """Returns the short lines of `status`.

    There are at most BRIEF_LINES for each job that trains or needs help, then one line for each job
    that is over.
    """
    if not jobs:
        return [*(damaged_lines(reply) or [NO_JOB]), *daemon_lines(reply)]
    lines = [line for job in ordered(jobs) if not job.is_over for line in [*brief_job_lines(job), ""]]
    over = [job for job in ordered(jobs) if job.is_over]
    if over:
        lines += [*over_table(over), HOW_TO_GO_ON, ""]
    return lines + damaged_lines(reply) + daemon_lines(reply)


def damaged_lines(reply: pb.StatusReply) -> list[str]:
    """Returns the lines about jobs whose records on this node are damaged."""
    lines = []
    for each in reply.damaged:
        lines += wrapped("job     ", each.job)
        lines += wrapped("health  ", f"ERR  the record of this job on {reply.node} is damaged: {each.reason}.")
        lines += wrapped(
            "memory  ",
            f"{format_bytes(each.held_bytes)} in {counted(each.slots, 'slot')}: kept, and not offered. To free it: "
            f"reft-cli purge {each.job}",
        )
        lines.append("")
    return lines


def daemon_lines(reply: pb.StatusReply) -> list[str]:
    """Returns the lines about the daemon that has answered."""
    limit = f" of {format_bytes(reply.limit_bytes)}" if reply.limit_bytes else ""
    daemon = (
        f"daemon  {reply.node}, reft {reply.version}, pid {reply.pid}, holds {format_bytes(reply.held_bytes)}{limit}"
    )
    if reply.spare_limit_bytes:
        daemon += f", {format_bytes(reply.spare_bytes)} of {format_bytes(reply.spare_limit_bytes)} spare memory ready"
    if reply.round_bytes_sent or reply.capsule_bytes_sent:
        daemon += f", sent {format_bytes(reply.round_bytes_sent)} for rounds"
        daemon += f" and {format_bytes(reply.capsule_bytes_sent)} for capsules"
    if reply.damaged_slots:
        daemon += f", found {counted(reply.damaged_slots, 'slot')} changed in memory"
        daemon += f" and repaired {reply.repaired_slots}" if reply.repaired_slots else ""
    return wrapped("", daemon) + refused_lines(reply.refused)


def refused_lines(refused: pb.RefusedStatus) -> list[str]:
    """Returns what the daemon has refused lately, a sentence for each reason."""
    recent = [each for each in refused.reasons if each.age_s <= REFUSED_SHOWN_S]
    lines = []
    for each in recent[:REFUSED_SHOWN]:
        count = each.last_minute or each.total
        times = f"{count:,} {'time' if count == 1 else 'times'}"
        when = (
            "in the last minute" if each.last_minute else f"since the daemon started, last {duration(each.age_s)} ago"
        )
        rest = len(each.addresses[ADDRESSES_SHOWN:]) + each.more_addresses
        by = ", ".join(each.addresses[:ADDRESSES_SHOWN]) + (f" and {rest} more" if rest else "")
        lines += wrapped("refused ", f"{times} {when}: {each.reason} ({by})")
    if recent:
        rest = len(recent) - REFUSED_SHOWN
        more = f"{counted(rest, 'more reason')}: --json. " if rest > 0 else ""
        lines += wrapped("        ", f"{more}What reasons mean, and what to do: daemon/SECURITY.md, Refusals.")
    return lines


def job_lines(job: JobView) -> list[str]:
    """Returns the lines of one job: identity, health, protection, nodes, ranks, survived losses."""
    lines = head_lines(job) + protection_lines(job)
    if job.storage is not None:
        lines += storage_lines(job.storage)
    lines += memory_lines(job)
    lines += ["", *node_table(job.nodes), "", *rank_table(job.ranks), "", *survival_table(job)]
    return lines


def brief_job_lines(job: JobView) -> list[str]:
    """Returns at most BRIEF_LINES lines of one job: held step, survived losses, troubles."""
    lines = head_lines(job) + protected_lines(job) + losses_lines(job)
    if job.storage is not None:
        lines += storage_lines(job.storage)
    lines += exposed_lines(job) + other_format_lines(job) + short_of_slots_lines(job)
    for node in job.nodes:
        lines += wrapped("node    ", f"{node.node}: {node.reason}") if node.reason else []
    if len(lines) > BRIEF_LINES:
        rest = len(lines) - BRIEF_LINES + 1
        lines = [*lines[: BRIEF_LINES - 1], cut(f"more    {counted(rest, 'line')}: reft-cli status {job.job}", WIDTH)]
    return lines


def over_table(jobs: Sequence[JobView]) -> list[str]:
    """Returns one line for each job that is over."""
    rows = [
        (job.job, cut(script_of(job) or NONE, SCRIPT_SHOWN), job.state, job.health.value, number(job.whole),
         NONE if job.ended_s is None else f"{duration(job.ended_s)} ago", NONE if job.kept_s is None else duration(job.kept_s))
        for job in jobs
    ]  # fmt: skip
    return aligned(("OVER", "SCRIPT", "STATE", "HEALTH", "STEP", "ENDED", "KEPT FOR"), rows, right=4)


def script_of(job: JobView) -> str:
    """Returns the script's name without its folder; empty if not known."""
    return job.script.rpartition("/")[2]


def head_lines(job: JobView) -> list[str]:
    """Returns the lines that say which job this is, and how the job is."""
    ranks = f"{counted(job.world, 'rank')} on {counted(len(job.nodes), 'node')}"
    every = f", every {job.every} steps" if job.every > 1 else ""
    name = script_of(job)
    lines = wrapped("job     ", f"{job.job}  {name + ', ' if name else ''}{ranks}{every}, up {duration(job.up_s)}")
    lines += wrapped("health  ", f"{job.health.value}  {job.reason}")
    if job.remedy:
        lines += wrapped("fix     ", job.remedy)
    return lines


def protected_lines(job: JobView) -> list[str]:
    """Returns the word of protection, and how many losses the state survives now."""
    protection = job.protection
    if protection is None:
        return []
    if protection.version is None:
        sentence = "no step can be restored now."
    elif job.word == ProtectionWord.LOCAL.value:
        sentence = f"trainers can be lost now. The loss of this node, the job's only one, {left_by_the_node(job)}."
    else:
        sentence = (
            f"any {counted(protection.tolerated, 'failure domain')} can be lost now."
            if protection.tolerated > 0
            else "no failure domain can be lost now."
        )
        if protection.tolerated < protection.meant:
            sentence = f"{sentence[:-1]}; {protection.meant} can be lost when the job is PROTECTED."
        if protection.newest is not None and protection.version.is_older_than(protection.newest):
            sentence += f" {survives(protection.newest.step, protection.version.step, protection.tolerated)}."
    if job.degraded_s:
        sentence += f" Degraded for {age(job.degraded_s)} since the last restore."
    return wrapped("protect ", f"{job.word}  {sentence}")


def left_by_the_node(job: JobView) -> str:
    """Returns what the loss of the job's only node leaves."""
    if job.storage is None:
        return "leaves nothing"
    if job.storage.persisted is None:
        return "leaves nothing until a checkpoint is on storage"
    return f"leaves step {job.storage.persisted} on storage"


def losses_lines(job: JobView) -> list[str]:
    """Returns which losses the state survives, and which not, in one sentence each."""
    held, lost = ([loss for loss, survives, _ in job.survives if survives is each] for each in (True, False))
    words = [f"survived: {'; '.join(held)}."] if held else []
    words += [f"Not survived: {'; '.join(lost)}."] if lost else []
    return wrapped("losses  ", " ".join(words))


def exposed_lines(job: JobView) -> list[str]:
    """Returns what is not protected as requested, the most bytes first; nothing for LOCAL."""
    if job.protection is None or job.word == ProtectionWord.LOCAL.value:
        return []
    exposed = sorted(job.protection.exposed, key=lambda exposure: -exposure.nbytes)
    return [line for exposure in exposed for line in wrapped("exposed ", exposure.what)]


def protection_lines(job: JobView) -> list[str]:
    """Returns lines about the job's protection now.

    They tell how good the protection is, by which codes, and which parts lack it.
    """
    protection = job.protection
    if protection is None:
        return []
    lines = protected_lines(job)
    if job.exchange is not None:
        lines += exchange_lines(job.exchange)
    lines += exposed_lines(job)
    for name, ranks in job.own[:OWN_SHOWN]:
        lines += wrapped("differs ", f"{name} is not the same on ranks {spans(ranks)}: each rank keeps its own copy.")
    if len(job.own) > OWN_SHOWN:
        lines.append(f"differs {counted(len(job.own) - OWN_SHOWN, 'more leaf', 'more leaves')}; --json lists all.")
    rows = [
        (
            SCHEMES[group.scheme],
            group.reason,
            str(group.domains),
            f"{group.k}+{group.f}",
            str(group.f),
            str(group.cells),
            format_bytes(group.nbytes),
        )
        for group in protection.groups
    ]
    if rows:
        lines += ["", *aligned(("REDUNDANCY", "FOR", "DOMAINS", "SHARDS", "CAN LOSE", "CELLS", "BYTES"), rows, right=2)]
    return lines


def exchange_lines(exchange: ExchangeView) -> list[str]:
    """Returns lines about the exchange: the protected step, the turn, and lanes not guarded."""
    if exchange.protected is None:
        text = "no step of this attach is protected yet"
    else:
        text = f"step {exchange.protected} is protected, since {age(exchange.protected_age_s)}"
    if exchange.turn is None:
        text += "; no turn is under way."
    else:
        text += (
            f"; the turn of step {exchange.turn} has {format_bytes(exchange.received_bytes)} of "
            f"{format_bytes(exchange.turn_bytes)} here, since {age(exchange.turn_age_s)}."
        )
    if exchange.last_turn_s:
        text += (
            f" The last turn took {age(exchange.last_turn_s)} here, and received "
            f"{format_bytes(int(exchange.bytes_per_s))} a second."
        )
    if exchange.sent_bytes:
        text += f" A turn sends {format_bytes(exchange.sent_bytes)} from here, {pace_words(exchange.pace)}."
        text += (
            f" Memory here: {format_bytes(exchange.parity_bytes)} of parity, and {format_bytes(exchange.extra_slot_bytes)} "
            f"of slots beyond {SLOTS} a rank."
        )
    lines = wrapped("exchange ", text)
    if exchange.choice:
        lines += wrapped("chosen ", exchange.choice)
    for replay in exchange.replays[:LANES_SHOWN]:
        lines += wrapped("replay ", replay_words(replay))
    for step, lane, words in exchange.lanes[:LANES_SHOWN]:
        lines += wrapped("exposed ", f"lane {lane} of the exchange is not guarded at step {step}: {words}")
    if len(exchange.lanes) > LANES_SHOWN:
        lines.append(f"exposed {counted(len(exchange.lanes) - LANES_SHOWN, 'more lane')}; --json lists all.")
    return lines


def replay_words(replay: ReplayView) -> str:
    """Returns a sentence about the copies of one lane, which gradients may give."""
    if replay.verdict and replay.reason:
        return f"the exchange makes lane {replay.lane}. Copies are {replay.verdict}"
    if replay.reason:
        pause = f" The next attempt follows after {counted(replay.left_out, 'turn')}." if replay.left_out else ""
        log = "" if replay.log is None else f" A lost rank replays gradients up to step {replay.log}."
        return f"mode {replay.mode}: the exchange makes lane {replay.lane}: {replay.reason}{pause}{log}"
    verdict = f" At the start: {replay.verdict}." if replay.verdict else ""
    return (
        f"mode verified: lane {replay.lane} is recomputed here, and has its owners' digests at step {replay.verified}, "
        f"{counted(replay.lag, 'step')} behind; {counted(replay.marks, 'mark')} took {replay.cpu_s:.2f} s of a core.{verdict}"
    )


def storage_lines(storage: StorageView) -> list[str]:
    """Returns lines about the checkpoints on storage."""
    if storage.persisted is None:
        text = "no checkpoint is known yet"
    else:
        text = f"step {storage.persisted} is on storage, since {age(storage.age_s)}"
        if storage.bytes_per_s:
            speed = format_bytes(int(storage.bytes_per_s))
            text += f": {format_bytes(storage.nbytes)} in {age(storage.took_s)}, {speed} a second"
    if storage.step is not None:
        written, total = format_bytes(storage.written_bytes), format_bytes(storage.total_bytes)
        text += f"; step {storage.step} is being written, {written} of {total}, since {age(storage.since_s)}"
    text += f"; one each {duration(storage.every_s)}." if storage.every_s else "; only on request."
    lines = wrapped("storage ", text)
    if storage.trouble:
        lines += wrapped("trouble ", storage.trouble)
    return lines


def memory_lines(job: JobView) -> list[str]:
    """Returns lines about the job's memory, now and in a change of shape."""
    lines = []
    if job.peak_bytes:
        held, peak = format_bytes(job.held_bytes), format_bytes(job.peak_bytes)
        lines += wrapped("memory  ", f"{held} held, at most {peak} in a change of shape.")
    return lines + other_format_lines(job) + short_of_slots_lines(job)


def other_format_lines(job: JobView) -> list[str]:
    """Returns a sentence on the slots that another reft wrote, and this one can't read."""
    count, nbytes = job.other_formats
    if not count:
        return []
    return wrapped(
        "slots   ",
        f"{counted(count, 'slot')} of another format, {format_bytes(nbytes)}: kept for the reft that wrote "
        f"{'it' if count == 1 else 'them'}. To free this memory: reft-cli purge {job.job}",
    )


def short_of_slots_lines(job: JobView) -> list[str]:
    """Returns a sentence on the ranks that have fewer slots than they want."""
    short = [rank for rank in job.ranks if rank.state == "training" and rank.slots < rank.wanted_slots]
    if not short:
        return []
    which = f"{'rank' if len(short) == 1 else 'ranks'} {spans([rank.rank for rank in short])}"
    verb = "runs" if len(short) == 1 else "run"
    few, wanted = min(rank.slots for rank in short), max(rank.wanted_slots for rank in short)
    return wrapped("slots   ", f"{which} {verb} on {few} of {wanted} slots since the layout changed.")


def what_if_lines(
    job: str,
    lose: Sequence[str],
    version: Version | None,
    after: Version | None,
    loss: LossReport | None,
    replayed: str = "",
) -> list[str]:
    """Returns the answer to "does the job survive the loss of these nodes?".

    For the other arguments see `status_view.what_if_document`.

    Args:
        replayed: a sentence on state that would be replayed; empty: none would be.
    """
    if version is None:
        return wrapped("", f"job {job}: no step can be restored now.")
    condition = f"if {', '.join(lose)} {'is' if len(lose) == 1 else 'are'} lost"
    if after is None:
        answer = f"this step is lost too: {loss.words if loss else 'no slot is left'}."
    else:
        answer = f"the job goes back to {after}." if after.is_older_than(version) else "this step survives."
        answer += f" {replayed}" if replayed else ""
    return wrapped("", f"job {job}, {version}: {condition}, {answer}")


def node_table(nodes: Sequence[NodeView]) -> list[str]:
    """Returns one line for each node, and one sentence for each node with a reason."""
    rows = [
        (node.node, node.state, node.signal or NONE, spans(node.ranks), number(node.sealed_step), age(node.age_s),
         format_bytes(node.nbytes))
        for node in nodes
    ]  # fmt: skip
    lines = aligned(("NODE", "STATE", "SIGNAL", "RANKS", "SEALED", "AGE", "HELD"), rows, right=4)
    for node in nodes:
        since = f" ({age(node.signal_age_s)})" if node.signal_age_s is not None else ""
        lines += wrapped(f"  {node.node}: ", f"{node.reason}{since}") if node.reason else []
    return lines


def rank_table(ranks: Sequence[RankView]) -> list[str]:
    """Returns one line for each rank; with many ranks, for those that need attention."""
    shown = list(ranks)
    if len(ranks) > RANKS_SHOWN:
        shown = [rank for rank in ranks if rank.state == "gone" or rank.trouble][:RANKS_SHOWN]
    rows = [
        (str(rank.rank), rank.node, rank.state, number(rank.step), number(rank.sealed_step), age(rank.age_s),
         format_bytes(rank.nbytes))
        for rank in shown
    ]  # fmt: skip
    lines = aligned(("RANK", "NODE", "STATE", "STEP", "SEALED", "AGE", "HELD"), rows, right=3) if rows else []
    for rank in shown:
        lines += wrapped(f"  rank {rank.rank}: ", rank.trouble) if rank.trouble else []
    if len(shown) < len(ranks):
        lines.append(f"Not shown: {counted(len(ranks) - len(shown), 'more rank')}. --json lists all ranks.")
    return lines


def survival_table(job: JobView) -> list[str]:
    """Returns for each kind of loss whether the state survives, and which steps are lost."""
    rows = [(loss, "yes" if held else "NO", lost) for loss, held, lost in job.survives]
    return aligned(("LOSS OF", "SURVIVED", "WHAT IS LOST"), rows, right=9)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], right: int) -> list[str]:
    """Returns a table with columns two spaces apart.

    Columns from index `right` on are right-aligned. A cell that is too long for the line is cut.
    """
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    # The widest column is cut: it holds names of nodes, the only cells without a limit.
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
    """Returns the text after its label, with later lines indented below the text."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False
    ) or [label.rstrip()]


def cut(text: str, width: int) -> str:
    """Returns the text, or the beginning of the text and an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def spans(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as ranges: "0-3,8"."""
    ranges: list[list[int]] = []
    for value in numbers:
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges) or NONE


def number(value: int | None) -> str:
    """Returns the number as text, or a dash for None."""
    return NONE if value is None else str(value)


def age(seconds: float | None) -> str:
    """Returns an age as text, or a dash for None."""
    return NONE if seconds is None else f"{seconds:.1f}s" if seconds < 60 else duration(seconds)


def duration(seconds: float) -> str:
    """Returns seconds as a person reads them: "45s", "12m05s", "2h13m", "3d04h"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def safe(line: str) -> str:
    """Returns a line for a terminal: names from other nodes give no orders to it."""
    return escape(line)


def safe_lines(text: str) -> str:
    """Returns a text for a terminal, with its line breaks; see `safe`."""
    return escape_lines(text)
