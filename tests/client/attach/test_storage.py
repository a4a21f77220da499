"""The step storage as data: who reads what, which lineage, and what counts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from reft.client.attach.plan import AttachTry, make_plan
from reft.client.attach.rank_table import RankTable
from reft.client.attach.storage import StorageReader, lineage_in, refuse_unopened
from reft.client.attach.structure import readers_of
from reft.core.commit.decision import Decision
from reft.core.commit.version import Epoch, Version
from reft.core.recovery import recovery
from reft.core.recovery.recovery import RecoveryPlan
from reft.errors import AttachError, RestoreError
from reft.wire import messages
from reft.wire.inventory import JobSurvey, StoredHistory
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.attaches import begun, context, description, introduction, reply, sealed, survey_of

PLAN = begun("ab")
BASE = Version(PLAN.decision.epoch, 3)
SURVEY = survey_of(PLAN, {"a": [3], "b": [3]})


def test_capsule_in_a_checkpoint_is_read_where_the_file_is_open() -> None:
    on_a = {slot.rank: replace(slot, node="a", is_stored=True) for slot in SURVEY.held}
    assert readers_of(introduction("ab"), SURVEY, RecoveryPlan(BASE, on_a)) == {1: 0}
    in_memory = {slot.rank: slot for slot in SURVEY.held}
    assert readers_of(introduction("ab"), SURVEY, RecoveryPlan(BASE, in_memory)) == {}


def test_memory_is_read_rather_than_storage() -> None:
    stored = [replace(slot, node="0", is_stored=True) for slot in SURVEY.held]
    plan = recovery.plan([*stored, *SURVEY.held], SURVEY.copies, SURVEY.placements, SURVEY.decision)
    assert plan.base == BASE and not any(source.is_stored for source in plan.sources.values())


def test_new_epoch_is_above_all_of_storage() -> None:
    header = sealed(0, 3, PLAN.decision.epoch)
    header.stored = True
    empty = {"a": reply("a"), "b": reply("b")}
    empty["a"].slots.extend([header])
    later = Decision(Epoch(7, b"7" * 16), BASE, (PLAN.decision.epoch,))
    manifest = pb.Manifest()
    manifest.CopyFrom(PLAN.manifest)
    manifest.token, manifest.lineage = b"t" * 32, "0123456789abcdef"
    storage = StoredHistory((PLAN.decision, later), later, BASE, manifest)
    survey = JobSurvey(empty, storage=storage)
    assert survey.decision == later and survey.inventory.history.failures == 0
    plan = make_plan(description(introduction("ab")), survey, RecoveryPlan(BASE), (), b"n" * 16)
    assert plan.decision.epoch.counter == 8
    assert plan.decision.known == (later.epoch, PLAN.decision.epoch)
    assert (plan.manifest.job_mark, plan.manifest.lineage) == (manifest.job_mark, manifest.lineage)


@pytest.mark.parametrize("ranks", [(), (0,), (0, 1)])
def test_a_checkpoint_that_is_not_whole_after_it_was_opened_is_no_fresh_start(ranks: tuple[int, ...]) -> None:
    """One of its files, or both, are closed again, since a daemon has ended."""
    replies = {"a": reply("a"), "b": reply("b")}
    for rank in ranks:
        header = sealed(rank, 3, PLAN.decision.epoch)
        header.stored = True
        replies["a"].slots.extend([header])
    survey = JobSurvey(replies, storage=StoredHistory((PLAN.decision,), PLAN.decision, BASE, PLAN.manifest))
    if len(ranks) == 2:
        refuse_unopened("job", survey, BASE, AttachTry())
        return
    with pytest.raises(RestoreError, match=rf"job job was opened, .* open are {ranks[0] if ranks else 'none'}\."):
        refuse_unopened("job", survey, BASE, AttachTry())


def test_asked_lineage_must_be_that_of_memory() -> None:
    decision = messages.decision_to(PLAN.decision)
    version = messages.version_to(BASE)
    listing = pb.StoredReply(
        lineages=[
            pb.StoredLineage(ident=ident * 16, decisions=[decision], checkpoints=[pb.StoredCheckpoint(version=version)])
            for ident in "ab"
        ]
    )
    memory = pb.Manifest(lineage="a" * 16)
    known = lineage_in("job", listing, memory, "")
    assert known is not None and known.ident == "a" * 16
    with pytest.raises(AttachError, match=r"asks for lineage b{16} .* memory holds lineage a{16}"):
        lineage_in("job", listing, memory, "b" * 16)
    with pytest.raises(AttachError, match="2 lineages"):
        lineage_in("job", listing, None, "")


@pytest.mark.parametrize("damage", ["", "a head does not fit its digest"])
def test_an_attach_asks_for_early_answers_and_asks_on_until_the_files_are_open(damage: str) -> None:
    """An answer that comes only once all is fetched may come after the call's deadline."""
    requests: list[pb.OpenStoredRequest] = []
    replies = [pb.OpenStoredReply(opening=True, fetched_bytes=each) for each in (1, 2)]
    replies.append(pb.OpenStoredReply(damage=damage))

    def call(method: str, asked: pb.OpenStoredRequest, deadline_s: float) -> pb.OpenStoredReply:
        assert method == "OpenStored"
        requests.append(asked)
        return replies[len(requests) - 1]

    introduced = introduction("a")
    ranks = RankTable([replace(each, persists=True) for each in introduced.ranks.infos])
    introduced = replace(introduced, ranks=ranks, daemon=SimpleNamespace(call=call))  # type: ignore[arg-type]
    stored = pb.StoredReply(manifest=pb.Manifest(nodes=[pb.Node(id="a", name="name-a", ranks=[0])]), ranks=[0])
    assert StorageReader(context(), introduced).open("0123456789abcdef", BASE, stored) == damage
    assert len(requests) == 3 and all(each.asks_again and each == requests[0] for each in requests)
    assert list(requests[0].ranks) == [0]
