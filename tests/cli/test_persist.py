"""`reft-cli persist`: follows a checkpoint to its end."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from reft.cli import main, persist
from reft.cli.ask import NoSuchJob
from reft.cli.export.start import progress
from reft.errors import AttachError, ConfigError, DaemonUnavailable
from reft.wire.v1 import daemon_pb2 as pb

WRITING = pb.StorageStatus(persisted=-1, step=7, written_bytes=1 << 20, total_bytes=4 << 20)
WRITTEN = pb.StorageStatus(persisted=8, step=-1, nbytes=4 << 20, took_s=2.0)


@pytest.fixture
def answers(monkeypatch):
    """The daemon's answers, in turn; what was asked."""
    replies, asked = [], []

    def ask(address, method, request, deadline_s):
        assert method == "PersistJob"
        asked.append(request)
        reply = replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    monkeypatch.setattr(persist, "ask", ask)
    monkeypatch.setattr(persist, "POLL_S", 0)
    return replies, asked


def test_the_checkpoint_is_followed_until_it_is_complete(answers):
    replies, asked = answers
    epoch = pb.Epoch(counter=3)
    waiting = pb.PersistJobReply(step=7, epoch=epoch, storage=WRITING)
    replies += [waiting, waiting, pb.PersistJobReply(step=7, epoch=epoch, done=True, storage=WRITTEN)]
    shown = []
    reply = persist.persist_job("unix:x", "run1", lambda storage: shown.append(persist.progress_text(storage)))
    assert reply.done and shown == ["step 7: 1.0 MiB of 4.0 MiB"] * 2
    assert not asked[0].HasField("step") and all((each.step, each.epoch) == (7, epoch) for each in asked[1:])
    assert persist.progress_text(WRITTEN) == "waiting for the storage"


@pytest.mark.parametrize(
    ("reply", "code", "text"),
    [
        (pb.PersistJobReply(done=True, storage=WRITTEN), 0, "job run1: step 8 is on storage."),
        (pb.PersistJobReply(trouble="step 7 is not on storage: it is full."), 1, "it is full"),
        (AttachError("no step of job run1 is whole yet."), 1, "no step"),
        (NoSuchJob("this daemon holds no job 'run1'."), main.EXIT_NO_JOB, "holds no job"),
        (DaemonUnavailable("no daemon answers."), main.EXIT_NO_DAEMON, "no daemon answers"),
        (KeyboardInterrupt(), main.EXIT_INTERRUPTED, ""),
    ],
)
def test_exit_codes(answers, reply, code, text):
    answers[0].append(reply)
    result = CliRunner().invoke(main.main, ["persist", "run1", "--daemon", "unix:/x"])
    assert (result.exit_code, text in result.output) == (code, True)


def test_the_result_as_json(answers):
    answers[0].append(pb.PersistJobReply(done=True, storage=WRITTEN))
    result = CliRunner().invoke(main.main, ["persist", "run1", "--json", "--daemon", "unix:/x"])
    assert json.loads(result.output) == {
        "schema_version": 1, "job": "run1", "step": 8, "bytes": 4 << 20, "took_s": 2.0,
    }  # fmt: skip


def test_closed_standard_streams_are_no_terminals(answers, monkeypatch, capsys):
    """Python has None for a stream that the caller closed, as a supervisor may."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="stdin is no terminal"):
        main._confirm("Free it?", as_json=False)
    monkeypatch.setattr(sys, "stderr", None)
    answers[0].append(pb.PersistJobReply(done=True, storage=WRITTEN))
    main.persist.callback("run1", as_json=False, daemon="unix:/d")
    assert "step 8 is on storage" in capsys.readouterr().out
    with progress(as_json=False) as show:
        show(0, 1)
