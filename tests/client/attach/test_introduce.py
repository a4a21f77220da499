"""The steps introduce and describe, with data: refusals, a rank's info, and the new manifest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reft.client.attach import introduce as module
from reft.client.attach.introduce import (
    AGENTS_KEY,
    NodeDaemon,
    RestoreMemory,
    check_process_group,
    compare,
    describe,
    leader_of,
    make_secrets,
    rank_info,
    short_table,
    symbolic_table,
)
from reft.client.attach.rank_table import LayoutFacts
from reft.client.link.rank_group import RankGroup
from reft.config import Config, Launch
from reft.errors import AttachError, ConfigError, DaemonUnavailable
from reft.wire import daemon_launcher
from reft.wire.job_key import JobKey
from reft.wire.manifest import layouts_of
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.attaches import IDENTITY, SECRETS, context, daemon, description, introduction, leaves, state


@pytest.mark.parametrize(("launched", "reached"), [(1, 1), (4, 4), (1, 4)])
def test_ranks_that_torch_reaches_may_attach(launched, reached):
    check_process_group(Launch(0, launched, "", ""), reached)
    assert context().rank_group.world == 1


def test_several_ranks_without_a_process_group_are_refused():
    with pytest.raises(AttachError, match=r"WORLD_SIZE is 4, .*\nFix: call init_process_group before reft\.attach"):
        check_process_group(Launch(0, 4, "", ""), 1)


@pytest.mark.parametrize(
    ("unattended", "remedy"),
    [(True, "start the job again: attach starts a daemon"), (False, "start reft-daemon --socket")],
)
def test_a_daemon_that_ended_during_attach_is_started_by_who_had_started_it(tmp_path, unattended, remedy):
    one = replace(daemon(), address=f"unix:{tmp_path}/daemon.sock")
    one.hello.unattended = unattended
    with pytest.raises(DaemonUnavailable, match="no daemon answers at") as refused:
        one.call("Status", pb.StatusRequest())
    assert refused.value.hint.startswith(remedy)


@pytest.mark.parametrize("run_id", ["", "run"])
def test_only_a_worker_of_an_agent_waits_for_a_named_daemon_to_come_back(run_id, monkeypatch):
    found: list[bool] = []

    def find(settings, job, call, is_restart):
        found.append(is_restart)
        raise DaemonUnavailable("no daemon answers.", "none")

    monkeypatch.setattr(daemon_launcher, "find", find)
    with pytest.raises(DaemonUnavailable):
        NodeDaemon.find(context(launch=Launch(0, 1, run_id, "")), "job")
    assert found == [bool(run_id)]


def test_a_rank_tells_what_its_daemon_and_its_state_say():
    own = state(leaves())
    info = rank_info(context(rank=1), own, daemon("b"), IDENTITY)
    assert (info.node.name, info.node.id, info.node.addresses) == ("name-b", "b", ("b:1",))
    assert info.process.pid == 70, "as the daemon sees it"
    assert info.identity is IDENTITY and info.agreed.protect == "arc"
    assert info.layout == LayoutFacts.of(own.predicted, own.symbolic) and info.layout.layout == own.predicted.digest


def test_only_rank_0_makes_secrets_enough_for_all_tries():
    own, slots = state(leaves()), 3
    first = rank_info(context(slots=slots), own, daemon(), IDENTITY)
    assert rank_info(context(rank=1), own, daemon(), IDENTITY).secrets is None
    assert first.secrets.tries == slots + 1, "each slot may hold a damaged version"
    idents = [first.secrets.ident(number) for number in range(first.secrets.tries)]
    assert all(len(ident) == 16 for ident in idents) and len(set(idents)) == slots + 1
    assert make_secrets(2) != make_secrets(2)
    chosen = rank_info(context(), own, daemon(), IDENTITY)
    assert (first.slots, chosen.slots, chosen.secrets.tries) == (slots, 0, 6), "the most that reft chooses, and one"


def test_the_token_follows_from_the_agents_key_or_from_the_ranks_own(monkeypatch):
    own, keyed = state(leaves()), daemon()
    monkeypatch.setenv("REFT_JOB_KEY", "the key of this job")
    key = JobKey(b"the key of this job")
    info = rank_info(context(), own, keyed, IDENTITY)
    assert info.secrets.token == key.job_token("job") and info.key_mark == key.mark
    assert rank_info(context(rank=1), own, keyed, IDENTITY).key_mark == key.mark
    keyed.hello.job_token = b"a" * 32
    info = rank_info(context(), own, keyed, IDENTITY)
    assert info.secrets.token == b"a" * 32 and info.key_mark == AGENTS_KEY
    assert "aaaa" not in repr(info), "a token stands in no text"
    monkeypatch.setenv("REFT_JOB_KEY", "too short")
    with pytest.raises(ConfigError, match="REFT_JOB_KEY has 9 bytes"):
        rank_info(context(), own, daemon(), IDENTITY)


def test_one_rank_of_each_node_speaks_to_its_daemon():
    introductions = [introduction("abab", rank) for rank in range(4)]
    assert [each.is_leader for each in introductions] == [True, True, False, False]
    assert [each.node.id for each in introductions] == list("abab")
    assert introductions[0].ranks_by_node == {"a": [0, 2], "b": [1, 3]}
    assert [leader_of(node) for node in introductions[3].nodes] == [0, 1]


def test_the_manifest_has_the_facts_of_all_ranks():
    introduced = introduction("ab")
    manifest = description(introduced).manifest
    assert (manifest.job, manifest.named, manifest.world) == ("job", True, 2)
    assert [(node.id, list(node.ranks)) for node in manifest.nodes] == [("a", [0]), ("b", [1])]
    assert (manifest.protect, manifest.tolerate, manifest.every) == ("arc", 1, 1)
    assert manifest.token == SECRETS.token and manifest.launch == IDENTITY.launch
    assert manifest.chunk_bytes == Config().chunk_bytes and manifest.slots == 0
    layouts, index = layouts_of(manifest)
    assert index == [0, 0] and layouts[0] == introduced.state.predicted


def test_an_automatic_tolerance_stays_open_in_the_manifest():
    own = context()
    introduced = introduction("a")
    automatic = replace(own, request=replace(own.request, tolerate=None))
    assert describe(automatic, introduced).manifest.tolerate == -1
    assert describe(own, introduced).manifest.tolerate == 1


def test_a_rank_alone_has_no_mismatched_leaves():
    introduced = introduction("a")
    described = describe(context(), introduced)
    assert described.manifest == description(introduced).manifest
    assert compare(context(), introduced, described) == []


class CountsExchanges(RankGroup):
    """The group of one rank; counts the exchanges."""

    count = 0

    def gather_or_raise(self, *arguments, **keywords):
        self.count += 1
        return super().gather_or_raise(*arguments, **keywords)


@pytest.mark.parametrize("fits", [True, False])
def test_tables_that_came_with_the_inventory_are_not_exchanged_again(monkeypatch, fits):
    """A longer table would exceed the most that a rank may send at once."""
    introduced, rank_group = introduction("a"), CountsExchanges(1.0)
    monkeypatch.setattr(module, "SHORT_TABLE", len(symbolic_table(introduced)) - (not fits))
    came = [short_table(introduced)]
    described = describe(replace(context(), rank_group=rank_group), introduced, came)
    assert described.manifest == description(introduced).manifest
    assert (rank_group.count, came != [b""]) == (0 if fits else 1, fits)


def test_memory_is_made_for_missing_leaves_and_freed():
    memory = RestoreMemory()
    assert memory.buffer.nbytes == 0
    memory.make(state(leaves(1 << 20)))
    assert memory.buffer.nbytes >= 8 << 20
    memory.close()
    assert memory.buffer.nbytes == 0
