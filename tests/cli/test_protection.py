"""What `status` and `recover` show of lost nodes: daemon replies become lines, without a daemon."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from click.testing import CliRunner

from reft.cli import recover, recover_view, status_text, status_view
from reft.cli.main import main
from reft.cli.recover import pairs_of
from reft.cli.recover_view import recovery_lines, recovery_view, with_targets
from reft.core.coding.placement import capsule_holders
from reft.core.commit.version import Epoch, Version
from reft.core.layout.layout import Leaf
from reft.core.recovery.holdings import UNPROVED
from reft.core.status.health import Health
from reft.errors import ConfigError
from reft.wire.inventory import JobSurvey
from reft.wire.manifest import placement_of
from reft.wire.rebuild_request import rebuild_request
from reft.wire.v1 import daemon_pb2 as pb
from tests.cli.test_status_text import job, rank, reply
from tests.support.manifests import described

EPOCH = pb.Epoch(counter=2, ident=bytes(16))
SIZE = 3 << 20


def job_survey(
    nodes: int, lost: set[int] = frozenset(), tolerate: int = 1, steps: tuple[int, ...] = (40,), racks: int = 0,
    mismatched: Sequence[str] = (), leaves: Sequence[str] = ("w",) * 6,
) -> JobSurvey:  # fmt: skip
    """Returns the replies of the nodes that are not lost. Each node has one rank.

    Args:
        nodes: how many nodes the job has.
        lost: numbers of the lost nodes.
        tolerate: how many lost failure domains the job is to survive.
        steps: the sealed steps.
        racks: how many failure domains there are, in turn; 0: each node is one.
        mismatched: names of leaves that differ between ranks.
        leaves: for each rank the names of its leaves, one letter each; all have one size.
    """
    layouts = [
        [Leaf(name, "uint8", (SIZE,), (1,), SIZE, False, (SIZE,), (0,)) for name in leaves[i]] for i in range(nodes)
    ]
    manifest = pb.Manifest(
        job="run1", world=nodes, protect="auto", tolerate=tolerate, chunk_bytes=4096, mismatched=mismatched,
        **described(*layouts), nodes=[pb.Node(name=f"node-{'abcdef'[i]}", id=f"id{i}", ranks=[i]) for i in range(nodes)],
    )  # fmt: skip
    for i, node in enumerate(manifest.nodes if racks else ()):
        node.domain = f"rack-{i % racks}"
    replies = {}
    for i in set(range(nodes)) - lost:
        inventory = pb.InventoryReply(
            manifest=manifest, decision=pb.Decision(epoch=EPOCH), had_whole=True, node_id=f"id{i}"
        )
        for step in steps:
            version = pb.Version(epoch=EPOCH, step=step)
            inventory.slots.add(rank=i, slot=f"rank-{i}.slot-{step % 2}", state=pb.SEALED, version=version)
            for other in range(nodes):
                if i in capsule_holders(other, range(nodes), tolerate):
                    inventory.capsules.add(rank=other, version=version)
        replies[f"id{i}"] = inventory
    return JobSurvey(replies, {f"node-{'abcdef'[i]}": "" for i in sorted(lost)})


def lines_of(survey: JobSurvey, **changes: object) -> list[str]:
    status = job(*(rank(i, node.name) for i, node in enumerate(survey.nodes.values())), **changes)
    return status_text.status_lines(reply(status), [status_view.job_view(status, survey)])


def test_a_protected_job():
    lines = lines_of(job_survey(4))
    assert lines[1:6] == [
        "health  OK  step 40 is held by all 4 ranks.",
        "protect PROTECTED  any 1 failure domain can be lost now.",
        "",
        "REDUNDANCY    FOR       DOMAINS  SHARDS  CAN LOSE  CELLS    BYTES",
        "erasure code  replicas        4     3+1         1      1  3.0 MiB",
    ]
    assert "a node                    yes       steps after 40" in lines
    assert "two nodes                 NO        all steps of this run" in lines


@pytest.mark.parametrize(
    ("storage", "left"),
    [
        (None, "leaves nothing."),
        (pb.StorageStatus(persisted=-1, step=-1), "leaves nothing until a checkpoint is on storage."),
        (pb.StorageStatus(persisted=32, step=-1), "leaves step 32 on storage."),
    ],
)
def test_one_node_alone_is_not_warned_of_what_can_not_be_otherwise(storage, left):
    lines = lines_of(job_survey(1), storage=storage)
    text = " ".join(" ".join(lines).split())
    assert lines[1] == "health  OK  step 40 is held by the one rank."
    assert "protect LOCAL trainers can be lost now. The loss of this node, the job's only one, " + left in text
    assert not any(line.startswith("exposed") for line in lines)
    parts = "steps after 32 (on storage)" if storage and storage.persisted >= 0 else "all steps of this run"
    assert f"a node                    NO        {parts}" in lines
    status = job(rank(0))
    view = status_view.job_view(status, job_survey(1))
    (document,) = status_view.document(reply(status), [view], "x")["jobs"]
    assert (document["health"], document["protection"]["word"]) == ("OK", "LOCAL")
    assert status_view.worst([view]) is Health.OK
    assert any(line.startswith("protect LOCAL") for line in status_text.brief_lines(reply(status), [view]))


def test_a_node_is_lost():
    lines = lines_of(job_survey(4, {2}), silent_nodes=["node-c"])
    assert lines[1:5] == [
        "health  WARN  no answer from the daemon of node-c; step 40 can be restored without it.",
        "protect DEGRADED  no failure domain can be lost now; 1 can be lost when the job is",
        "        PROTECTED.",
        "",
    ]
    assert "a node                    NO        all steps of this run" in lines
    lines = lines_of(job_survey(4, {1, 2}), silent_nodes=["node-b", "node-c"])
    text = " ".join(line.strip() for line in lines)
    assert lines[1].startswith("health  ERR  job run1 had a whole version, but no version is whole now: step 40")
    assert "Node node-b does not answer. Node node-c does not answer. fix     start node-b, node-c" in text


def test_the_time_in_degraded_is_shown():
    now = lines_of(job_survey(4), degraded=True, degraded_s=3.24)
    assert now[1:4] == [
        "health  WARN  step 40 is held, but it survives fewer losses than requested.",
        "protect DEGRADED  any 1 failure domain can be lost now. Degraded for 3.2s since the last",
        "        restore.",
    ]
    then = lines_of(job_survey(4), degraded=False, degraded_s=3.24)
    assert then[1].startswith("health  OK") and "Degraded for 3.2s" in " ".join(then)


def test_exposed_and_mismatched_state_is_shown():
    lines = lines_of(job_survey(4, tolerate=0), mismatched=[0])
    assert "health  WARN  replicas of w differ between ranks: such steps are not kept." in lines
    assert any(line.startswith("protect UNPROTECTED") for line in lines)
    assert any(line.startswith("exposed 3.0 MiB are stored only once") for line in lines)
    assert max(map(len, lines)) <= status_text.WIDTH


def test_the_largest_exposed_state_comes_first():
    view = status_view.job_view(job(*(rank(i) for i in range(4))), job_survey(4, tolerate=0))
    exposed = [replace(view.protection.exposed[0], what=f"{n} bytes.", nbytes=n) for n in (1, 3, 2)]
    lines = status_text.exposed_lines(replace(view, protection=replace(view.protection, exposed=tuple(exposed))))
    assert lines == ["exposed 3 bytes.", "exposed 2 bytes.", "exposed 1 bytes."]


def test_the_document_of_a_degraded_job():
    found = job_survey(4, {2})
    status = job(*(rank(i) for i in range(4)), degraded_s=1.5)
    (document,) = status_view.document(reply(status), [status_view.job_view(status, found)], "unix:/run/x")["jobs"]
    json.dumps(document)
    assert document["protection"] == {
        "word": "DEGRADED", "degraded_s": 1.5, "step": 40, "newest_step": 40, "tolerated_domains": 0,
        "meant_domains": 1,
        "fatal_nodes": ["node-a", "node-b", "node-d"], "exposed": [], "fatal_pairs": [], "fatal_pair_count": 0,
        "fatal_domains": ["node node-a", "node node-b", "node node-d"],
        "groups": [
            {"scheme": "aec", "reason": "replicas", "domains": 4, "data_shards": 3, "parity_shards": 1, "bytes": SIZE, "cells": 1}
        ],
    }  # fmt: skip
    assert document["unlike_leaves"] == document["own_leaves"] == []


def test_failure_domains_and_pairs_are_named():
    """Two racks with two nodes each.

    Copies lie in both racks. The next node, in the other rack, holds a node's capsule.
    """
    found = job_survey(4, racks=2)
    lines = lines_of(found)
    assert "a failure domain          yes       steps after 40" in lines
    assert "two nodes                 NO        all steps of this run, e.g. node-a and node-b" in lines
    (document,) = status_view.document(reply(job(rank(0))), [status_view.job_view(job(rank(0)), found)], "unix:/run/x")[
        "jobs"
    ]
    pairs = [["node-a", "node-b"], ["node-a", "node-d"], ["node-b", "node-c"], ["node-c", "node-d"]]
    assert document["protection"]["fatal_pairs"] == pairs and document["protection"]["fatal_domains"] == []
    lost = lines_of(job_survey(4, {1}, racks=2), silent_nodes=["node-b"])
    assert any(line.startswith("a failure domain          NO        all steps of this run") for line in lost)


@pytest.mark.parametrize(
    ("lose", "code"), [("rack-1", 0), ("node-a,node-c", 0), ("node-a,node-b", 4), ("rack-0,node-d", 4), ("rack-2", 2)]
)
def test_what_if_nodes_or_failure_domains_are_lost(monkeypatch, lose, code):
    monkeypatch.setattr("reft.cli.main.ask", lambda *_: reply(job(*(rank(i) for i in range(4)))))
    monkeypatch.setattr("reft.cli.main.steady", lambda *_: job_survey(4, racks=2))
    done = CliRunner().invoke(main, ["status", "--what-if", f"lose={lose}", "--daemon", "unix:/run/x"])
    assert done.exit_code == code, done.output
    if code == 2:
        assert "rack-0" in done.output and "node-d" in done.output


def test_leaves_that_differ_are_shown_with_their_ranks():
    found = job_survey(4, mismatched=["w"])
    assert "differs w is not the same on ranks 0-3: each rank keeps its own copy." in lines_of(found)
    (document,) = status_view.document(reply(job(rank(0))), [status_view.job_view(job(rank(0)), found)], "unix:/run/x")[
        "jobs"
    ]
    assert document["own_leaves"] == [{"leaf": "w", "ranks": [0, 1, 2, 3]}]


def test_nodes_with_the_same_name_get_their_id():
    found = job_survey(2)
    for reply_ in found.replies.values():
        for node in reply_.manifest.nodes:
            node.name = "host"
    assert sorted(JobSurvey(found.replies).names.values()) == ["host#id0", "host#id1"]


# recover


def test_the_plan_of_a_recovery():
    found = job_survey(4, {2})
    view = with_targets(recovery_view("run1", found, found.plan(()), ()), {"id2": "unix:/run/new.sock"})
    assert (view.outcome, view.health) == ("recoverable", Health.WARN)
    assert recovery_lines(view) == [
        "job     run1  step 40 (epoch 2)",
        "health  WARN  the slots of 1 rank are lost, but step 40 (epoch 2) can be restored",
        "        completely.",
        "silent  no answer from node-c",
        "",
        "NODE    RANKS  COPIED    DECODED     PARITY  TO READ",
        "node-c  2         0 B  768.0 KiB  256.0 KiB  3.0 MiB",
        "",
        "node-c  read from node-a (1.0 MiB), node-b (1.0 MiB), node-d (1.0 MiB); rebuilt on",
        "        unix:/run/new.sock.",
        "  cell  w: 768.0 KiB decoded, 256.0 KiB parity; read from node-a (1.0 MiB), node-b (1.0",
        "        MiB), node-d (1.0 MiB).",
    ]
    document = recover_view.document(view, 0, [])
    assert (document["step"], document["epoch"], document["outcome"]) == (40, 2, "recoverable")
    assert (
        document["lost_nodes"][0]["moved_bytes"] == SIZE and document["lost_nodes"][0]["onto"] == "unix:/run/new.sock"
    )
    (cell,) = document["lost_nodes"][0]["cells"]
    assert cell["leaves"] == ["w"] and [each["node"] for each in cell["read"]] == ["node-a", "node-b", "node-d"]


def test_the_sources_of_each_cell_are_shown():
    """Two pipeline stages with two replicas each, and one leaf that all ranks have."""
    found = job_survey(4, {2}, leaves=("an", "an", "zn", "zn"))
    view = recovery_view("run1", found, found.plan(()), ())
    (lost,) = view.lost
    by_leaf = {cell.leaves: cell for cell in lost.cells}
    assert set(by_leaf) == {("n",), ("z",)}  # the lost node held nothing of the first stage
    assert by_leaf[("z",)].read == (("node-d", SIZE),) and by_leaf[("z",)].copied == SIZE
    assert by_leaf[("n",)].decoded and [name for name, _ in by_leaf[("n",)].read] == ["node-a", "node-b", "node-d"]
    assert lost.moved == SIZE + sum(nbytes for _, nbytes in by_leaf[("n",)].read)
    assert any(
        line.startswith("  cell  z: 3.0 MiB copied; read from node-d (3.0 MiB).") for line in recovery_lines(view)
    )


def test_after_a_rebuild_a_person_hears_which_nodes_know_the_slots():
    found = job_survey(4)
    whole = recovery_view("run1", found, found.plan(()), ())
    command = recover.RecoverCommand("unix:/run/reft", "run1", {}, rebuilt=[{"node": "node-b", "onto": "node-e:29700"}])
    view = command._final_view(whole)
    assert view.outcome == "rebuilt"
    assert "Until then ask reft-cli there: the other nodes do not know these slots." in " ".join(
        line.strip() for line in recovery_lines(view)
    )


def test_a_whole_job_and_an_unrecoverable_job():
    found = job_survey(4)
    view = recovery_view("run1", found, found.plan(()), ())
    assert (view.outcome, view.health) == ("whole", Health.OK)
    assert "nothing is lost: step 40 (epoch 2) is held by all 4 ranks." in " ".join(recovery_lines(view))
    found = job_survey(4, {1, 2})
    view = recovery_view("run1", found, found.plan(()), ())
    assert (view.outcome, view.health, view.version) == ("unrecoverable", Health.ERR, None)
    text = " ".join(line.strip() for line in recovery_lines(view))
    assert "no sealed slot of ranks 1-2 (on node-b, node-c)" in text and "w can't be decoded: 2 of 4 slots" in text
    assert max(map(len, recovery_lines(view))) <= status_text.WIDTH


def test_a_job_that_was_never_whole():
    found = job_survey(2, steps=())
    for each in found.replies.values():
        each.had_whole = False
    assert recovery_view("run1", found, found.plan(()), ()).outcome == "empty"


def test_status_and_recover_say_the_same_of_a_total_loss():
    """All slots are gone. The daemons remember the base, which is no slot."""
    found = job_survey(2, steps=())
    for each in found.replies.values():
        each.decision.base.CopyFrom(pb.Version(epoch=EPOCH, step=40))
    status = job(rank(0, alive=False), rank(1, alive=False), whole=-1, base=pb.Version(epoch=EPOCH, step=40))
    view, recovery = status_view.job_view(status, found), recovery_view("run1", found, found.plan(()), ())
    assert view.health is recovery.health is Health.ERR
    assert view.reason == recovery.reason and "no version is whole now: no slots are left." in view.reason
    assert view.remedy == recovery.remedy == "reft-cli purge run1 --yes, then start from your checkpoint"
    assert view.whole is None and not any(survives for _, survives, _ in view.survives)
    text = status_text.status_lines(reply(status), [view])
    assert "fix     reft-cli purge run1 --yes, then start from your checkpoint" in text


@pytest.mark.parametrize("silent", [[], ["node-b"]])
def test_nobody_is_asked_to_purge_a_job_that_goes_on_from_storage(monkeypatch, silent):
    found = replace(job_survey(2, steps=()), silent=dict.fromkeys(silent, ""))
    for each in found.replies.values():
        each.decision.base.CopyFrom(pb.Version(epoch=EPOCH, step=40))
    storage = pb.StorageStatus(persisted=32, step=-1)
    status = job(rank(0, alive=False), rank(1, alive=False), whole=-1, storage=storage)
    monkeypatch.setattr(recover, "job_status", lambda *_: (status, "node-a"))
    monkeypatch.setattr(recover, "survey", lambda *_: (found, {}))
    remedy = status_view.job_view(status, found).remedy
    assert recover.RecoverCommand("unix:/x", "run1", {}).look()[0].remedy == remedy
    assert remedy.endswith("start the job again: it goes on from step 32, which is on storage")
    assert remedy.startswith("start node-b again if") is bool(silent) and "purge" not in remedy


def test_a_node_that_does_not_know_the_job_is_not_called_silent():
    found = replace(
        job_survey(4, {2}), silent={"node-c": f"{UNPROVED} (UNAUTHENTICATED, unproved: a proof is needed.)"}
    )
    view = status_view.job_view(job(*(rank(i) for i in range(4)), silent_nodes=["node-c"]), found)
    assert view.health is Health.WARN and view.reason == (
        "the daemon of node-c does not know this job, or not by this node's token; step 40 can be restored without it."
    )
    view = status_view.job_view(job(*(rank(i) for i in range(4)), silent_nodes=["node-b", "node-c"]), found)
    assert view.reason.startswith("no answer from the daemon of node-b; the daemon of node-c does not know")


def test_if_the_coordinator_is_silent_storage_is_to_be_looked_at_before_a_purge():
    found = replace(job_survey(2, {0}, steps=()), silent={"node-a": ""})
    view = status_view.job_view(job(rank(1, alive=False), whole=-1, silent_nodes=["node-a"]), found)
    assert view.remedy.endswith("But if reft-cli list run1 names a step on storage, only start the job again")


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_survey_that_misses_slots_of_a_job_in_training_is_no_loss(is_alive):
    found = job_survey(1, steps=())
    view = status_view.job_view(job(rank(0, alive=is_alive)), found)
    assert (view.health is Health.ERR) is not is_alive and (view.whole is None) is not is_alive


@pytest.mark.parametrize("wrong", [["a"], ["=unix:/x"], ["a=unix:/x", "a=unix:/y"], ["a=nonsense"]])
def test_wrong_onto_arguments(wrong):
    with pytest.raises(ConfigError):
        pairs_of(wrong)


def test_onto_arguments():
    assert pairs_of(["a=unix:/x", "b=h:1"]) == {"a": "unix:/x", "b": "h:1"}


def test_wrong_arguments_exit_with_2():
    for arguments in (["status", "--watch", "--what-if", "lose=a"], ["recover", "job", "--onto", "a"]):
        assert CliRunner().invoke(main, arguments, env={"REFT_DAEMON": "unix:/nowhere"}).exit_code == 2


# Jobs that exchange state


def exchanging(lost: set[int] = frozenset(), protected: int = 40, protect: str = "auto") -> JobSurvey:
    """Returns the replies of a job whose ranks have a leaf each. Steps 40 and 46 are whole."""
    found = job_survey(4, lost, steps=(40, 46), leaves=("a", "b", "c", "d"))
    for ident, inventory in found.replies.items():
        inventory.manifest.slots, inventory.manifest.protect = 4, protect
        for copy in inventory.capsules:
            copy.unreplicated_bytes = SIZE
        (lane,) = placement_of(inventory.manifest).guard_lanes
        rank = int(ident[2:])
        version = pb.Version(epoch=EPOCH, step=protected)
        inventory.slots.add(
            rank=rank, slot=f"parity-{rank}.slot-0", state=pb.SEALED, version=version, layout=lane.digest, parity=True
        )
    return JobSurvey(found.replies, found.silent)


def test_the_step_that_survives_processes_and_the_one_that_survives_nodes_are_shown():
    exchange = pb.ExchangeStatus(
        protected=40, protected_age_s=12.0, turn=46, turn_age_s=1.5, turn_bytes=3 << 20, received_bytes=1 << 20,
        bytes_per_s=2 << 20, last_turn_s=1.5, sent_bytes=3 << 20, pace_bytes_per_s=1 << 20, pace_reason="because",
        parity_bytes=5 << 20, extra_slot_bytes=6 << 20,
        lanes=[pb.UnguardedLane(step=46, lane=0, words="rank 2 has no slot of it.")],
    )  # fmt: skip
    lines = lines_of(exchanging(), whole=46, exchange=exchange)
    text = " ".join(" ".join(lines).split())
    assert "health OK step 46 is held by all 4 ranks. Step 46 survives processes, step 40 survives any node." in text
    assert "protect PROTECTED any 1 failure domain can be lost now. Step 46 survives processes, step 40" in text
    assert "exchange step 40 is protected, since 12.0s; the turn of step 46 has 1.0 MiB of 3.0 MiB here" in text
    assert "The last turn took 1.5s here, and received 2.0 MiB a second." in text
    assert "A turn sends 3.0 MiB from here, at most 1.0 MiB a second: because." in text
    assert "Memory here: 5.0 MiB of parity, and 6.0 MiB of slots beyond 3 a rank." in text
    assert "exposed lane 0 of the exchange is not guarded at step 46: rank 2 has no slot of it." in text
    assert "exchange one holder 4 3+1 1 1 12.0 MiB" in text
    assert "a node                    yes       steps after 40" in lines
    assert "any number of trainers    yes       steps after 46" in lines
    assert max(map(len, lines)) <= status_text.WIDTH
    status = job(*(rank(i) for i in range(4)), whole=46, exchange=exchange)
    (document,) = status_view.document(reply(status), [status_view.job_view(status, exchanging())], "x")["jobs"]
    assert (document["protection"]["step"], document["protection"]["newest_step"]) == (40, 46)
    assert document["exchange"] == {
        "protected_step": 40, "protected_age_s": 12.0, "turn_step": 46, "turn_age_s": 1.5, "turn_bytes": 3 << 20,
        "received_bytes": 1 << 20, "bytes_per_s": 2 << 20, "last_turn_s": 1.5, "sent_bytes": 3 << 20,
        "pace_bytes_per_s": 1 << 20, "pace_reason": "because", "parity_bytes": 5 << 20, "extra_slot_bytes": 6 << 20,
        "unguarded_lanes": [{"step": 46, "lane": 0, "reason": "rank 2 has no slot of it."}], "choice": None,
        "replays": [],
    }  # fmt: skip


def test_what_auto_has_chosen_and_judged_is_shown():
    exchange = pb.ExchangeStatus(protected=40, turn=-1, choice="copies, because.")
    exchange.replays.add(lane=0, verified=40, verdict="recomputed: 20 of 20 turns were verified, 0.1 CPU s a step")
    exchange.replays.add(lane=1, verified=-1, reason="It is slow.", verdict="given up: it is slow.")
    text = " ".join(" ".join(lines_of(exchanging(protect="aor"), whole=46, exchange=exchange)).split())
    assert "chosen copies, because." in text
    assert "s of a core. At the start: recomputed: 20 of 20 turns were verified" in text
    assert "the exchange makes lane 1. Copies are given up: it is slow." in text


def test_copies_of_what_exists_once_are_shown():
    exchange = pb.ExchangeStatus(protected=40, protected_age_s=12.0, turn=-1)
    exchange.replays.add(lane=0, verified=40, lag=6, marks=2, cpu_s=0.25, log=46)
    exchange.replays.add(lane=1, verified=-1, reason="mark 41 has no record.", left_out=2, log=-1)
    exchange.replays.add(lane=2, verified=-1, reason="it differs.", log=45)
    lines = lines_of(exchanging(protect="aor"), whole=46, exchange=exchange)
    text = " ".join(" ".join(lines).split())
    recomputed = "replay mode verified: lane 0 is recomputed here, and has its owners' digests at step 40, 6 steps"
    assert f"{recomputed} behind; 2 marks took 0.25 s" in text
    assert "mode off: the exchange makes lane 1: mark 41 has no record. The next attempt follows after 2 turns." in text
    assert "mode log: the exchange makes lane 2: it differs. A lost rank replays gradients up to step 45." in text
    assert max(map(len, lines)) <= status_text.WIDTH
    assert "copies elsewhere one holder 4 1+1 1 1 12.0 MiB" in text
    assert "protect PROTECTED any 1 failure domain can be lost now." in text
    status = job(*(rank(i) for i in range(4)), whole=46, exchange=exchange)
    (document,) = status_view.document(reply(status), [status_view.job_view(status, exchanging())], "x")["jobs"]
    first, second, third = document["exchange"]["replays"]
    assert (third["mode"], third["log_step"]) == ("log", 45)
    assert [first, second] == [
        {
            "lane": 0,
            "mode": "verified",
            "log_step": 46,
            "verified_step": 40,
            "lag": 6,
            "marks": 2,
            "cpu_s": 0.25,
            "reason": None,
            "left_out": 0,
            "verdict": None,
        },
        {
            "lane": 1,
            "mode": "off",
            "log_step": None,
            "verified_step": None,
            "lag": 0,
            "marks": 0,
            "cpu_s": 0.0,
            "reason": "mark 41 has no record.",
            "left_out": 2,
            "verdict": None,
        },
    ]


def test_what_if_says_what_would_be_replayed():
    version = Version(Epoch(1, b"e" * 16), 7)
    lines = status_text.what_if_lines("job", ["a"], version, version, None, "Rank 1 replays.")
    assert " ".join(lines) == "job job, step 7 (epoch 1): if a is lost, this step survives. Rank 1 replays."


def test_before_the_first_turn_nothing_is_protected():
    exchange = pb.ExchangeStatus(protected=-1, turn=-1)
    lines = lines_of(exchanging(protected=39), whole=46, exchange=exchange)
    assert "exchange no step of this attach is protected yet; no turn is under way." in lines
    assert any(line.startswith("protect DEGRADED  no failure domain can be lost now; 1 can be lost") for line in lines)
    assert "a node                    NO        all steps of this run" in lines


@pytest.mark.parametrize(
    ("protected", "lose", "code", "answer"),
    [
        (40, "node-b", 0, "if node-b is lost, the job goes back to step 40 (epoch 2)."),
        (46, "node-b", 0, "if node-b is lost, this step survives."),
        (39, "node-b", 4, "this step is lost too: leaves that only rank 1 held are gone."),
        (40, "node-b,node-c", 4, "this step is lost too: "),
    ],
)
def test_what_if_names_the_step_to_which_the_job_goes_back(monkeypatch, protected, lose, code, answer):
    monkeypatch.setattr("reft.cli.main.ask", lambda *_: reply(job(*(rank(i) for i in range(4)))))
    monkeypatch.setattr("reft.cli.main.steady", lambda *_: exchanging(protected=protected))
    command = ["status", "--what-if", f"lose={lose}", "--daemon", "unix:/run/x"]
    done = CliRunner().invoke(main, command)
    text = " ".join(done.output.split())
    assert done.exit_code == code and text.startswith("job run1, step 46 (epoch 2): ") and answer in text
    document = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)
    assert document["survives"] is (code == 0) and bool(document["lost"]) is (code == 4)
    assert document["restored_step"] == (None if code else protected) and document["step"] == 46


def test_recover_decodes_from_parity_and_says_so():
    found = exchanging({2})
    plan = found.plan(())
    view = recovery_view("run1", found, plan, ())
    text = " ".join(" ".join(recovery_lines(view)).split())
    assert plan.base is not None and plan.base.step == 40 and view.outcome == "recoverable"
    assert (
        "step 40 (epoch 2) can be restored completely. Leaves that no other rank has are decoded from parity." in text
    )
    assert "lost step 46 (epoch 2): no sealed slot of rank 2 (on node-c)." in text
    assert "cell c: 3.0 MiB decoded; read from node-a (3.0 MiB), node-b (3.0 MiB), node-d (3.0 MiB)." in text
    request = rebuild_request(found, plan, [2], {})
    assert [(each.rank, each.section) for each in request.lost] == [(2, True)]
    assert [(each.rank, each.slot) for each in request.parity] == [(r, f"parity-{r}.slot-0") for r in (0, 1, 3)]
    assert [request.nodes[each.node].id for each in request.parity] == ["id0", "id1", "id3"]


def test_recover_reads_from_copies_and_says_so():
    found = exchanging({2}, protect="aor")
    plan = found.plan(())
    view = recovery_view("run1", found, plan, ())
    text = " ".join(" ".join(recovery_lines(view)).split())
    assert "step 40 (epoch 2) can be restored completely. Leaves that no other rank has are read from copies." in text
    assert "cell c: 3.0 MiB copied; read from node-b (3.0 MiB)." in text
    request = rebuild_request(found, plan, [2], {})
    assert [(each.rank, each.slot) for each in request.parity] == [(1, "parity-1.slot-0")]


def test_checkpoints_on_storage_are_shown_and_a_failing_storage_is_a_warning():
    storage = pb.StorageStatus(
        persisted=40, age_s=12.0, nbytes=4 << 20, took_s=2.0, step=46, since_s=1.5, written_bytes=1 << 20,
        total_bytes=4 << 20, every_s=1800.0,
    )  # fmt: skip
    text = " ".join(" ".join(lines_of(job_survey(4), storage=storage)).split())
    assert (
        "storage step 40 is on storage, since 12.0s: 4.0 MiB in 2.0s, 2.0 MiB a second; step 46 is being written, "
        in text
    )
    assert "1.0 MiB of 4.0 MiB, since 1.5s; one each 30m00s." in text and "health OK" in text
    status = job(*(rank(i) for i in range(4)), storage=storage)
    (document,) = status_view.document(reply(status), [status_view.job_view(status, job_survey(4))], "x")["jobs"]
    assert document["storage"] == {
        "persisted_step": 40, "persisted_age_s": 12.0, "persisted_bytes": 4 << 20, "bytes_per_s": 2 << 20,
        "writing_step": 46, "writing_age_s": 1.5, "written_bytes": 1 << 20, "writing_bytes": 4 << 20,
        "every_s": 1800.0, "trouble": None,
    }  # fmt: skip
    broken = pb.StorageStatus(persisted=-1, step=-1, trouble="step 46 is not on storage: no space is left.")
    lines = lines_of(job_survey(4), storage=broken)
    assert "storage no checkpoint is known yet; only on request." in lines
    assert "trouble step 46 is not on storage: no space is left." in lines
    text = " ".join(" ".join(lines).split())
    assert "health WARN step 40 is held, but checkpoints fail: step 46 is not on storage: no space is left." in text
    assert "health OK" in " ".join(" ".join(lines_of(job_survey(4), storage=broken, named=False)).split())
