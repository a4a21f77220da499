"""Tests of the facts that must be equal on all ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from reft.client.attach.arguments import AttachArguments
from reft.client.attach.rank_table import RankTable, agreed_facts
from reft.config import Config
from reft.errors import ConfigError
from reft.wire import messages

REQUEST = AttachArguments(None, (), None, {}, None, "auto", 1)
SETTINGS = Config()
WHO = {"job": "job", "run_id": "", "slurm": "", "script": "s.py", "user": 0, "launch": "l", "unnamed": ""}


def job_of(other: dict[str, object]) -> str:
    """Returns the job of two ranks with different facts."""
    return RankTable([{**WHO, **agreed_facts(REQUEST, SETTINGS)}, {**WHO, **other}]).job().id


def test_ranks_with_equal_facts_have_one_job():
    others = replace(SETTINGS, slots=2, rpc_deadline_s=1.0, failpoints="x")  # may differ by rank
    assert job_of(agreed_facts(REQUEST, others)) == "job"


@pytest.mark.parametrize(
    "request_changes, settings_changes, text",
    [
        ({"tolerate": 2}, {}, "tolerate None, rank 1 2."),
        ({"protect": "arc"}, {}, "protect 'auto', rank 1 'arc'."),
        ({"every": 4}, {}, "every 1, rank 1 4."),
        ({"adapts": True}, {}, "every 1, rank 1 'auto'."),
        ({}, {"chunk_bytes": 8192}, "chunk_bytes 262144, rank 1 8192."),
        ({}, {"load_transport": "nccl"}, "load_transport 'gloo', rank 1 'nccl'."),
    ],
)
def test_a_differing_setting_is_named(request_changes, settings_changes, text):
    other = agreed_facts(replace(REQUEST, **request_changes), replace(SETTINGS, **settings_changes))
    with pytest.raises(ConfigError, match=re.escape(f"rank 0 has {text}\nFix: give all ranks the same arguments")):
        job_of(other)


def test_a_node_with_another_protocol_version_is_refused(monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(messages, "PROTOCOL", 6)
        other = agreed_facts(REQUEST, SETTINGS)
    with pytest.raises(ConfigError, match=r"rank 0 has protocol 7, rank 1 6\."):
        job_of(other)
