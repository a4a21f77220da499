"""Tests of what ranks tell about themselves, and of the conclusions that all ranks draw."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from reft.client.attach.arguments import AttachArguments
from reft.client.attach.rank_table import (
    AgreedSettings,
    IdentityFacts,
    JobSecrets,
    LayoutFacts,
    NodeIdentity,
    ProcessFacts,
    RankInfo,
    RankTable,
)
from reft.client.link.exchange import from_json, to_json
from reft.config import Config
from reft.errors import ConfigError
from reft.wire import messages

REQUEST = AttachArguments(None, (), None, {}, None, "auto", 1)
SETTINGS = Config()
INFO = RankInfo(
    node=NodeIdentity("name-a", "a", ("unix:/a",), "rack"),
    process=ProcessFacts(7, 1, "1"),
    identity=IdentityFacts(job="job", run_id="", slurm="", script="s.py", user=0, launch="l", unnamed=""),
    layout=LayoutFacts(b"l" * 16, "table", (1, 2)),
    agreed=AgreedSettings.of(REQUEST, SETTINGS),
)


def job_of(other: AgreedSettings, **identity: Any) -> str:
    """Returns the job of two ranks with different facts."""
    info = replace(INFO, agreed=other, identity=replace(INFO.identity, **identity))
    return RankTable([INFO, info]).job().id


def on(node: str, layout: str = "l", table: str = "t") -> RankInfo:
    """Returns the info of a rank on a node, with a layout."""
    facts = LayoutFacts(layout.encode() * 16, table, (ord(layout),))
    return replace(INFO, node=NodeIdentity(f"name-{node}", node, (), ""), layout=facts)


@pytest.mark.parametrize("secrets", [None, JobSecrets(b"i" * 48, b"t" * 32)])
def test_an_info_survives_json(secrets):
    info = replace(INFO, secrets=secrets)
    assert from_json(RankInfo, json.loads(json.dumps(to_json(info)))) == info


def test_ranks_with_equal_facts_have_one_job():
    others = replace(SETTINGS, slots=2, rpc_deadline_s=1.0, failpoints="x")  # may differ by rank
    assert job_of(AgreedSettings.of(REQUEST, others)) == "job"


def test_the_job_has_the_fewest_slots_that_a_rank_asks_for():
    infos = [replace(INFO, slots=slots) for slots in (0, 5, 4, 0)]
    assert RankTable(infos).fewest_slots == 4
    assert RankTable(infos[:1]).fewest_slots == 0, "no rank asks for a number"


def test_a_job_with_a_name_is_persisted_where_a_daemon_can():
    named, unnamed = INFO, replace(INFO, identity=replace(INFO.identity, job=""))
    for info, is_persisted in ((named, True), (unnamed, False)):
        assert RankTable([info, replace(info, persists=True)]).are_persisted == is_persisted
        assert not RankTable([info, info]).are_persisted


def test_the_first_rank_names_the_job_and_other_names_are_refused():
    assert job_of(INFO.agreed, run_id="another", launch="m") == "job"
    with pytest.raises(ConfigError, match="rank 0 names the job 'job', rank 1 'other'"):
        job_of(INFO.agreed, job="other")


@pytest.mark.parametrize("marks", [("", "ab"), ("ab", ""), ("ab", "cd")])
def test_ranks_with_different_job_keys_are_refused(marks):
    infos = [replace(INFO, key_mark=mark) for mark in marks]
    with pytest.raises(ConfigError, match="rank 0 and rank 1 have different job keys") as refused:
        RankTable(infos).job()
    assert "REFT_JOB_KEY_FILE" in str(refused.value) and not any(
        f" {mark}" in str(refused.value) for mark in ("ab", "cd")
    )


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
    other = AgreedSettings.of(replace(REQUEST, **request_changes), replace(SETTINGS, **settings_changes))
    with pytest.raises(ConfigError, match=re.escape(f"rank 0 has {text}\nFix: give all ranks the same arguments")):
        job_of(other)


def test_a_node_with_another_protocol_version_is_refused():
    other = replace(INFO.agreed, protocol=7)
    assert messages.PROTOCOL == 11
    with pytest.raises(ConfigError, match=r"rank 0 has protocol 11, rank 1 7\."):
        job_of(other)


def test_nodes_are_in_the_order_of_their_lowest_ranks():
    nodes = RankTable([on("b"), on("a"), on("b")]).nodes()
    assert [(node.id, node.name, list(node.ranks)) for node in nodes] == [("b", "name-b", [0, 2]), ("a", "name-a", [1])]


def test_the_first_rank_with_a_table_publishes_it_and_each_layout_is_listed_once():
    ranks = RankTable([on("a", "l", "t"), on("a", "m", "t"), on("b", "l", "t"), on("b", "n", "u")])
    assert [ranks.describes(rank) for rank in range(4)] == [True, False, False, True]
    tables, layouts, index = ranks.layouts([b"T", b"", b"", b"U"])
    assert tables == [b"T", b"U"] and index == [0, 1, 0, 2]
    assert [(each.table, each.digest[:1], list(each.cuts)) for each in layouts] == [
        (0, b"l", [ord("l")]), (0, b"m", [ord("m")]), (1, b"n", [ord("n")]),
    ]  # fmt: skip


def test_each_try_has_an_epoch_id_of_its_own():
    secrets = JobSecrets(bytes(range(48)), b"")
    assert [secrets.ident(number) for number in range(3)] == [bytes(range(16 * i, 16 * i + 16)) for i in range(3)]
