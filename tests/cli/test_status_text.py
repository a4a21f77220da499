"""Turns a daemon's reply into the lines and the document of `status`, without a daemon."""

from __future__ import annotations

import json

import pytest

from reft.cli import main, status_text, status_view
from reft.cli.main import coloured, marked
from reft.core.status.health import Health
from reft.errors import ConfigError
from reft.wire.inventory import JobSurvey
from reft.wire.v1 import daemon_pb2 as pb

EPOCH = pb.Epoch(counter=2, ident=bytes(16))


def rank(number: int, node: str = "node-a", **changes: object) -> pb.RankStatus:
    values = {
        "rank": number, "node": node, "alive": True, "step": 40, "sealed_age_s": 0.25, "bytes": 3 << 20,
        "pid": 100 + number, "sealed": pb.Version(epoch=EPOCH, step=40),
    }  # fmt: skip
    return pb.RankStatus(**{**values, **changes})


def job(*ranks: pb.RankStatus, **changes: object) -> pb.JobStatus:
    values = {
        "job": "run1", "named": True, "world": len(ranks), "epoch": EPOCH, "whole": 40, "ranks": ranks,
        "backing": "tmpfs", "up_s": 7980.0, "script": "train.py", "every": 1,
    }  # fmt: skip
    return pb.JobStatus(**{**values, **changes})


def reply(*jobs: pb.JobStatus) -> pb.StatusReply:
    return pb.StatusReply(node="node-a", version="0.1.0", pid=7, held_bytes=6 << 20, limit_bytes=1 << 30, jobs=jobs)


def lines_of(*jobs: pb.JobStatus) -> list[str]:
    return status_text.status_lines(reply(*jobs), [status_view.job_view(each) for each in jobs])


def test_the_lines_of_a_healthy_job():
    assert lines_of(job(rank(0), rank(1), rank(2, "node-b"))) == [
        "job     run1  train.py, 3 ranks on 2 nodes, up 2h13m",
        "health  OK  step 40 is held by all 3 ranks.",
        "",
        "NODE    STATE     SIGNAL  RANKS  SEALED   AGE     HELD",
        "node-a  training  -       0-1        40  0.2s  6.0 MiB",
        "node-b  training  -       2          40  0.2s  3.0 MiB",
        "",
        "RANK  NODE    STATE     STEP  SEALED   AGE     HELD",
        "0     node-a  training    40      40  0.2s  3.0 MiB",
        "1     node-a  training    40      40  0.2s  3.0 MiB",
        "2     node-b  training    40      40  0.2s  3.0 MiB",
        "",
        "LOSS OF                   SURVIVED  WHAT IS LOST",
        "any number of trainers    yes       steps after 40",
        "a daemon, trainers alive  yes       nothing",
        "daemons and trainers      yes       steps after 40",
        "a node                    NO        all steps of this run",
        "",
        "daemon  node-a, reft 0.1.0, pid 7, holds 6.0 MiB of 1.0 GiB",
    ]


def brief(*jobs: pb.JobStatus, survey: JobSurvey | None = None) -> list[str]:
    return status_text.brief_lines(reply(*jobs), [status_view.job_view(each, survey) for each in jobs])


def over(name: str, ended_s: float | None = 60.0, **changes: object) -> pb.JobStatus:
    """Returns a job whose trainers have ended."""
    return job(rank(0, alive=False, **{"closed": True, **changes}), job=name, ended_s=ended_s, kept_s=1740.0)


def test_no_job():
    assert lines_of()[0] == brief()[0] == "no job is held here."


def test_thirteen_ended_jobs_and_a_running_one_fit_a_screen():
    ended = [over(f"trial-{i}", 60.0 * (13 - i) ** 3, closed=i != 11) for i in range(13)]
    lines = brief(*ended, job(rank(0), rank(1)))
    assert lines[:8] == [
        "job     run1  train.py, 2 ranks on 1 node, up 2h13m",
        "health  OK  step 40 is held by all 2 ranks.",
        "losses  survived: any number of trainers; a daemon, trainers alive; daemons and",
        "        trainers. Not survived: a node.",
        "",
        "OVER      SCRIPT    STATE   HEALTH  STEP       ENDED  KEPT FOR",
        "trial-12  train.py  ended   OK        40   1m00s ago    29m00s",
        "trial-11  train.py  failed  WARN      40   8m00s ago    29m00s",
    ]
    assert lines[18:] == [
        "trial-0   train.py  ended   OK        40   1d12h ago    29m00s",
        "All of one job: reft-cli status JOB. To free its memory: reft-cli purge JOB.",
        "",
        "daemon  node-a, reft 0.1.0, pid 7, holds 6.0 MiB of 1.0 GiB",
    ]
    assert len(lines) == 22 and max(map(len, lines)) <= status_text.WIDTH


def test_all_lines_show_the_running_job_first_too():
    lines = lines_of(over("a"), job(rank(0)), over("b", None), over("c", 2.0))
    assert [line.split()[1] for line in lines if line.startswith("job ")] == ["run1", "c", "a", "b"]


def test_a_running_job_has_ten_lines_at_most():
    signals = [pb.NodeSignal(node=f"node-{i}", signal="SUSPECT", reason=f"reason {i}.") for i in range(9)]
    lines = brief(job(*(rank(i, f"node-{i}") for i in range(9)), signals=signals))
    assert lines[4:11] == [
        *(f"node    node-{i}: reason {i}." for i in range(5)), "more    4 lines: reft-cli status run1", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (job(rank(0), rank(1, alive=False)), "training"),
        (over("a"), "ended"),
        (over("a", closed=False), "failed"),
        (over("a", pid=0, closed=False), "waiting"),
        (job(rank(0, alive=False, closed=True), world=2, silent_nodes=["node-b"]), "silent"),
    ],
)
def test_only_a_job_that_is_surely_over_takes_one_line(status, state):
    view = status_view.job_view(status)
    assert view.state == state and view.is_over is (state in ("ended", "failed"))
    assert brief(status)[0].startswith("OVER " if view.is_over else "job ")
    (document,) = status_view.document(reply(status), [view], "x")["jobs"]
    times = None if state != "training" and not status.HasField("ended_s") else (60.0, 1740.0)
    times = (None, None) if state == "training" or times is None else times
    assert (document["state"], document["ended_s"], document["kept_s"]) == (state, *times)


def test_long_names_of_jobs_that_are_over_are_cut():
    status = over("j" * 200)
    status.script = "s" * 200
    assert max(map(len, brief(status))) <= status_text.WIDTH


def test_a_remedy_has_a_line_of_its_own():
    lines = lines_of(job(rank(0, trouble="the slot is full.\nFix: slots=4"), rank(1, trouble="the slot is full.")))
    assert lines[1:3] == [
        "health  WARN  rank 0 and 1 more rank skip snapshots: the slot is full. Step 40 is held.",
        "fix     slots=4",
    ]
    status = job(rank(0, trouble="full.\nFix: slots=4"))
    (document,) = status_view.document(reply(status), [status_view.job_view(status)], "x")["jobs"]
    assert (document["reason"], document["remedy"]) == (
        "rank 0 skips snapshots: full. Step 40 is held.", "slots=4",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "health", "word"),
    [
        (job(rank(0), rank(1, alive=False)), Health.WARN, "gone"),
        (job(rank(0, alive=False, closed=True)), Health.OK, "ended"),
        (job(rank(0), whole=-1), Health.WARN, "training"),
        (job(rank(0), rank(1, trouble="no space is left " * 20)), Health.WARN, "rank 1: no space"),
        (job(rank(0), world=2, silent_nodes=["node-b"]), Health.WARN, "silent"),
    ],
)
def test_each_problem_is_shown(status, health, word):
    assert status_view.job_view(status).health is health
    assert any(word in line for line in lines_of(status))


def test_before_the_first_whole_step_the_base_is_held():
    view = status_view.job_view(job(rank(0), whole=-1, base=pb.Version(epoch=pb.Epoch(counter=1), step=39)))
    assert (view.whole, view.base, view.health) == (39, 39, Health.OK)


def test_one_rank_is_singular():
    assert "held by the one rank" in status_view.job_view(job(rank(0), world=1)).reason


def test_no_line_is_wider_than_88_columns():
    long = "a-name-that-nobody-would-type-" * 4
    many = [rank(i, f"{long}{i}", trouble="t" * 200 if i % 3 == 0 else "") for i in range(40)]
    for status in (job(*many), job(*many[:3], job=long, script=long)):
        lines = lines_of(status)
        assert max(map(len, lines)) <= status_text.WIDTH
    assert "Not shown: 26 more ranks" in "\n".join(lines_of(job(*many)))


def test_the_document_is_json_with_the_version_first():
    status = reply(job(rank(0), rank(1, step=-1, trouble="full")))
    document = status_view.document(status, [status_view.job_view(each) for each in status.jobs], "unix:/run/x")
    text = json.dumps(document)
    assert text.startswith('{"schema_version": 1, "health": "WARN"')
    first = json.loads(text)["jobs"][0]
    assert (first["whole_step"], first["base_step"], first["every_steps"]) == (40, None, 1)
    assert first["ranks"][1] == {
        "rank": 1, "node": "node-a", "state": "training", "step": None, "sealed_step": 40, "age_s": 0.25,
        "bytes": 3 << 20, "pid": 101, "trouble": "full",
        "slots": 0, "wanted_slots": None,
    }  # fmt: skip
    assert first["nodes"] == [
        {
            "node": "node-a", "state": "training", "ranks": [0, 1], "sealed_step": 40, "age_s": 0.25, "bytes": 6 << 20,
            "signal": None, "signal_reason": None, "signal_age_s": None,
        }
    ]  # fmt: skip
    assert first["survives"][-1] == {"loss": "a node", "survives": False, "lost": "all steps of this run"}


def test_signals_of_nodes_are_shown_with_reasons():
    signals = [
        pb.NodeSignal(node="node-a", signal="SNAP", age_s=2.0),
        pb.NodeSignal(node="node-b", signal="OFFLINE", reason="nothing was heard of it for 0.9 s.", age_s=61.0),
    ]
    status = job(rank(0), world=2, silent_nodes=["node-b"], signals=signals)
    lines = lines_of(status)
    assert "node-a  training  snap     0          40  0.2s  3.0 MiB" in lines
    assert "node-b  silent    offline  -           -     -    0 B" in [
        line.replace("      0 B", "    0 B") for line in lines
    ]
    assert "  node-b: nothing was heard of it for 0.9 s. (1m01s)" in lines
    document = status_view.document(reply(status), [status_view.job_view(status)], "unix:/run/x")
    shown = {
        node["node"]: (node["signal"], node["signal_reason"], node["signal_age_s"])
        for node in document["jobs"][0]["nodes"]
    }
    assert shown["node-a"] == ("snap", None, 2.0)
    assert shown["node-b"] == ("offline", "nothing was heard of it for 0.9 s.", 61.0)


def test_a_signal_of_a_later_reft_is_shown_by_its_number():
    """In an upgrade the next daemon may answer an earlier reft-cli."""
    status = job(rank(0), world=1, signals=[pb.NodeSignal(node="node-a", signal=99, reason="it is new.")])
    assert "signal 99" in "\n".join(lines_of(status))


def test_worst_health_of_all_jobs():
    views_of = [status_view.job_view(job(rank(0))), status_view.job_view(job(rank(0), whole=-1))]
    assert status_view.worst(views_of) is Health.WARN
    assert status_view.worst([]) is Health.OK


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (725, "12m05s"), (7980, "2h13m"), (273600, "3d04h")]
)
def test_durations(seconds, text):
    assert status_text.duration(seconds) == text


@pytest.mark.parametrize(("numbers", "text"), [([], "-"), ([3], "3"), ([0, 1, 2, 3, 8, 10, 11], "0-3,8,10-11")])
def test_runs_of_ranks(numbers, text):
    assert status_text.spans(numbers) == text


def test_only_the_word_of_health_is_coloured():
    assert coloured("health  WARN  step 4 [OK]") == "health  \x1b[33m\x1b[1mWARN\x1b[0m  step 4 [OK]"
    assert marked("health  OK  a[b]") == "health  [bold green]OK[/]  a\\[b]"
    assert coloured("job     OK  x") == "job     OK  x"


def test_names_and_reasons_from_other_nodes_give_no_orders_to_a_terminal(monkeypatch, capsys):
    evil, shown = "n\x1b[2J\r\x9b31m", "n\\x1b[2J\\r\\x9b31m"
    assert coloured(f"node    {evil}") == f"node    {shown}"
    status = reply(job(rank(0, node=evil)))
    monkeypatch.setattr(main, "ask", lambda *_: status)
    monkeypatch.setattr(main, "surveys", lambda *_: {})
    lines = main._lines_now("unix:/s", pb.StatusRequest())
    assert any(shown in line for line in lines) and all(line.isprintable() for line in lines)
    with pytest.raises(SystemExit), main.failing(as_json=False):
        raise ConfigError(f"node {evil} is silent.", "start it")
    assert capsys.readouterr().err == f"reft-cli: node {shown} is silent.\nFix: start it\n"


def test_the_memory_of_a_change_of_shape_is_shown():
    few = [rank(0, slots=2, wanted_slots=3), rank(1, slots=2, wanted_slots=3), rank(2, slots=3, wanted_slots=3)]
    status = job(*few, held_bytes=6 << 20, peak_bytes=9 << 20)
    lines = lines_of(status)
    assert lines[2:4] == [
        "memory  6.0 MiB held, at most 9.0 MiB in a change of shape.",
        "slots   ranks 0-1 run on 2 of 3 slots since the layout changed.",
    ]
    document = status_view.document(reply(status), [status_view.job_view(status)], "unix:/s")
    (found,) = document["jobs"]
    assert (found["held_bytes"], found["peak_bytes"]) == (6 << 20, 9 << 20)
    assert [(each["slots"], each["wanted_slots"]) for each in found["ranks"]] == [(2, 3), (2, 3), (3, 3)]


def test_slots_of_an_ended_rank_are_not_said_to_be_few():
    ended = rank(0, slots=2, wanted_slots=3, alive=False, closed=True)
    assert not any(line.startswith("slots") for line in lines_of(job(ended)))


def test_a_job_whose_record_is_damaged_is_an_error_with_its_remedy():
    damaged = pb.DamagedJob(job="run2", reason="copy 0: its checksum is wrong", held_bytes=3 << 20, slots=3)
    answer = reply(job(rank(0)))
    answer.damaged.append(damaged)
    views = [status_view.job_view(each) for each in answer.jobs]
    wanted = (
        "job run2 health ERR the record of this job on node-a is damaged: copy 0: its checksum is wrong. "
        "memory 3.0 MiB in 3 slots: kept, and not offered. To free it: reft-cli purge run2 daemon node-a"
    )
    for lines in (status_text.status_lines, status_text.brief_lines):
        assert f"{wanted}, reft" in " ".join(" ".join(lines(answer, views)).split())
    answer.ClearField("jobs")
    for lines in (status_text.status_lines, status_text.brief_lines):
        assert " ".join(" ".join(lines(answer, [])).split()).startswith(wanted)
    assert status_view.worst([], answer.damaged) is Health.ERR
    document = status_view.document(answer, [], "unix:/s")
    assert document["health"] == "ERR" and document["damaged_jobs"] == [
        {"job": "run2", "reason": "copy 0: its checksum is wrong", "held_bytes": 3 << 20, "slots": 3}
    ]


def test_slots_of_another_format_are_named():
    message = job(rank(0), other_format_slots=2, other_format_bytes=5 << 20)
    wanted = "2 slots of another format, 5.0 MiB: kept for the reft that wrote them. To free this memory: reft-cli purge run1"
    for lines in (status_text.status_lines, status_text.brief_lines):
        views = [status_view.job_view(message)]
        assert wanted in " ".join(" ".join(lines(reply(message), views)).split())
    assert not any("another format" in line for line in lines_of(job(rank(0))))


def refused(
    reason: str, total: int, last_minute: int, age_s: float, *addresses: str, more: int = 0
) -> pb.RefusedReason:
    return pb.RefusedReason(
        reason=reason, total=total, last_minute=last_minute, age_s=age_s, addresses=addresses, more_addresses=more
    )


def test_what_was_refused_lately_is_shown_and_nothing_older():
    now = refused("they lied", 5000, 1204, 0.4, *(f"10.0.0.{i}" for i in range(5)), more=3)
    before = refused("they slept", 1, 0, 125.0, "pid 7")
    old = refused("they left", 9, 0, 601.0, "10.0.0.9")
    answer = reply(job(rank(0)))
    answer.refused.CopyFrom(pb.RefusedStatus(total=5016, last_minute=1204, reasons=[now, before, old]))
    views = [status_view.job_view(each) for each in answer.jobs]
    for lines in (status_text.status_lines, status_text.brief_lines):
        assert lines(answer, views)[-4:] == [
            "daemon  node-a, reft 0.1.0, pid 7, holds 6.0 MiB of 1.0 GiB",
            "refused 1,204 times in the last minute: they lied (10.0.0.0, 10.0.0.1 and 6 more)",
            "refused 1 time since the daemon started, last 2m05s ago: they slept (pid 7)",
            "        What reasons mean, and what to do: daemon/SECURITY.md, Refusals.",
        ]
    answer.refused.CopyFrom(pb.RefusedStatus(total=9, reasons=[old]))
    assert status_text.brief_lines(answer, views)[-1].startswith("daemon  ")
    document = status_view.document(answer, views, "unix:/s")
    assert document["health"] == "OK" and document["daemon"]["refused"] == {
        "total": 9, "last_minute": 0, "more_reasons": 0,
        "reasons": [
            {
                "reason": "they left", "total": 9, "last_minute": 0, "age_s": 601.0, "addresses": ["10.0.0.9"],
                "more_addresses": 0,
            }
        ],
    }  # fmt: skip


def test_many_refusals_take_few_lines():
    many = [refused("their words are long " * 4, 1, 1, 0.0, *["f" * 39] * 5, more=1000) for _ in range(8)]
    lines = status_text.refused_lines(pb.RefusedStatus(reasons=many, more_reasons=90))
    assert len(lines) <= 11 and max(map(len, lines)) <= status_text.WIDTH
    assert "5 more reasons: --json." in " ".join(lines)


def test_a_daemon_that_does_not_tell_what_it_refused_is_shown():
    answer = pb.StatusReply.FromString(reply(job(rank(0))).SerializeToString())
    assert not answer.HasField("refused") and status_text.refused_lines(answer.refused) == []
    assert status_view.document(answer, [], "unix:/s")["daemon"]["refused"] is None
