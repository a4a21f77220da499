"""Tests the decisions about a job's slots, leases and epochs, with data only."""

from __future__ import annotations

import pytest

from reft.core.commit.capsules import DIGESTS_MAX
from reft.core.commit.slots import SlotState
from reft.core.commit.version import Version
from reft.errors import AlreadyAttached, AttachError, ConfigError, StaleEpoch
from reft.wire import messages
from reft.wire.process import Process
from reft.wire.slot_format import Geometry, Header
from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.slices import run_at_once
from reft_daemon.jobs.epochs import earlier_manifest, is_new, next_record
from reft_daemon.jobs.leases import Lease
from reft_daemon.jobs.leasing import check_request, check_trainer
from reft_daemon.jobs.slots import fitting_slots, is_superfluous, may_be_freed, may_be_written
from tests.support.jobs import epoch_of

ALIVE = object()  # stands for the watch of a living process
SMALL, LARGE = Geometry(4096, 4096, 4096), Geometry(4096, 3 * 4096, 4096)


def header(
    state: SlotState = SlotState.SEALED, step: int | None = 1, geometry: Geometry = SMALL, epoch: int = 1
) -> Header:
    return Header(geometry, "job", 0, state, None if step is None else Version(epoch_of(epoch), step))


EMPTY, WRITING, SEALED = header(SlotState.EMPTY, None), header(SlotState.WRITING), header()


def lease_of(watch: object = ALIVE, closed: bool = False, given: str = "slot") -> Lease:
    return Lease(Process(7, 70), 1, watch, closed, given_slots={given})  # type: ignore[arg-type]


# Slots


@pytest.mark.parametrize(
    ("is_current", "lease", "newer", "may"),
    [
        (True, lease_of(), [], True),
        (True, lease_of(), [SEALED], True),
        (False, lease_of(), [EMPTY, None], True),
        (False, lease_of(), [EMPTY, WRITING], False),
        (True, lease_of(watch=None), [], False),
        (True, lease_of(given="another"), [], False),
        (True, None, [], False),
    ],
)
def test_a_trainer_writes_slots_that_it_was_given_and_has_not_left(is_current, lease, newer, may):
    assert may_be_written("slot", is_current, lease, newer) is may


@pytest.mark.parametrize(
    ("slot_header", "may"),
    [(header(step=2), True), (header(step=3), False), (header(step=4), False), (EMPTY, True), (None, True)],
)
def test_a_retired_slot_goes_once_a_newer_version_is_whole(slot_header, may):
    newest = Version(epoch_of(1), 3)
    assert may_be_freed(slot_header, newest, {newest}) is may


def test_a_retired_slot_with_a_pinned_version_stays():
    newest, protected = Version(epoch_of(1), 3), Version(epoch_of(1), 1)
    assert not may_be_freed(header(step=1), newest, {newest, protected})
    assert may_be_freed(header(step=2), newest, {newest, protected})


def test_a_slot_of_an_earlier_epoch_goes_once_the_new_epoch_has_a_whole_version():
    assert may_be_freed(header(step=9), Version(epoch_of(2), 1), ())


BASE = Version(epoch_of(1), 5)


@pytest.mark.parametrize(
    ("slot_header", "base", "is_needless"),
    [
        (None, BASE, True),
        (EMPTY, BASE, True),
        (header(step=4), BASE, True),
        (header(step=6), BASE, True),
        (header(step=5), BASE, False),
        (header(step=5), Version(epoch_of(2), 5), True),
        (header(step=5), None, True),
        (header(step=5, epoch=3), BASE, False),
        (header(SlotState.WRITING, step=6, epoch=3), BASE, False),
        (header(step=6, epoch=3), None, False),
    ],
)
def test_the_base_and_versions_of_the_new_epoch_are_needed(slot_header, base, is_needless):
    assert is_superfluous(slot_header, epoch_of(3), {base}) is is_needless


@pytest.mark.parametrize(
    ("headers", "wanted", "count", "names"),
    [
        ({"a": SEALED, "b": EMPTY}, SMALL, 2, ["a", "b"]),
        ({"a": SEALED, "b": EMPTY, "c": SEALED}, SMALL, 2, ["a", "b"]),
        ({"a": SEALED, "b": None}, SMALL, 2, ["a"]),
        ({"a": SEALED, "b": None, "c": EMPTY}, SMALL, 2, ["a", "c"]),
        ({"a": SEALED, "b": EMPTY}, LARGE, 2, []),
        ({"a": header(geometry=LARGE), "b": header(geometry=LARGE)}, SMALL, 2, ["a", "b"]),
        ({}, SMALL, 0, []),
        ({}, SMALL, 1, []),
    ],
)
def test_slots_that_fit_are_leased_again(headers, wanted, count, names):
    assert fitting_slots(headers, wanted, count) == names


# Leases


def test_a_rank_of_another_node_gets_no_lease():
    with pytest.raises(AttachError, match=r"rank 3 is not one of this node's ranks \[0, 1\]"):
        check_request(pb.LeaseRequest(rank=3), [0, 1], False)
    check_request(pb.LeaseRequest(rank=1), [0, 1], False)


def test_digests_must_fit_into_a_capsule_only_if_capsules_are_sent():
    chunks = DIGESTS_MAX // 8
    check_request(pb.LeaseRequest(data_bytes=chunks * 4096, chunk_bytes=4096), [0], True)
    larger = pb.LeaseRequest(data_bytes=chunks * 4096 + 1, chunk_bytes=4096)
    check_request(larger, [0], False)
    with pytest.raises(ConfigError, match=f"{DIGESTS_MAX + 8} bytes of digests.*limit is {DIGESTS_MAX}"):
        check_request(larger, [0], True)


@pytest.mark.parametrize(
    ("lease", "pid", "error"),
    [
        (None, 7, None),
        (lease_of(), 7, None),
        (lease_of(), 8, AlreadyAttached),
        (lease_of(watch=None), 7, None),
        (lease_of(watch=None), 8, None),
        (lease_of(watch=None, closed=True), 7, AttachError),
        (lease_of(watch=None, closed=True), 8, None),
    ],
)
def test_only_the_trainer_or_its_successor_may_lease(lease, pid, error):
    process = Process(pid, 10 * pid)
    if error is None:
        check_trainer("job", 0, lease, process)
        return
    with pytest.raises(error) as raised:
        check_trainer("job", 0, lease, process)
    assert type(raised.value) is error


# Epochs


def decision(counter: int, base: Version | None = None) -> pb.Decision:
    message = pb.Decision(epoch=messages.epoch_to(epoch_of(counter)))
    if base is not None:
        message.base.CopyFrom(messages.version_to(base))
    return message


def manifest(script: str) -> pb.Manifest:
    return pb.Manifest(job="job", script=script)


def test_a_repeated_decision_is_not_new_and_an_older_one_is_stale():
    now = pb.JobRecord(manifest=manifest("now"), decision=decision(2))
    assert is_new(pb.JobRecord(manifest=manifest("now")), pb.DecideRequest(decision=decision(1)))
    assert is_new(now, pb.DecideRequest(decision=decision(3)))
    assert not is_new(now, pb.DecideRequest(decision=decision(2)))
    with pytest.raises(StaleEpoch, match="epoch 1 of job job is over; epoch 2 is in force"):
        is_new(now, pb.DecideRequest(decision=decision(1)))
    other = pb.DecideRequest(decision=pb.Decision(epoch=pb.Epoch(counter=2, ident=b"x" * 16)))
    with pytest.raises(StaleEpoch):
        is_new(now, other)


OF_1, OF_2 = Version(epoch_of(1), 5), Version(epoch_of(2), 7)


@pytest.mark.parametrize(
    ("record", "base", "script"),
    [
        (pb.JobRecord(manifest=manifest("new here")), OF_1, None),
        (pb.JobRecord(manifest=manifest("now"), decision=decision(2)), None, None),
        (pb.JobRecord(manifest=manifest("now"), decision=decision(2)), OF_2, "now"),
        (pb.JobRecord(manifest=manifest("now"), decision=decision(2, OF_1), base_manifest=manifest("base")), OF_1, "base"),
        (pb.JobRecord(manifest=manifest("now"), decision=decision(2, OF_1)), OF_1, None),
        (pb.JobRecord(manifest=manifest("now"), decision=decision(3, OF_2), base_manifest=manifest("base")), OF_1, None),
    ],
)  # fmt: skip
def test_the_manifest_of_the_base_is_found_in_earlier_decisions(record, base, script):
    found = earlier_manifest(record, pb.DecideRequest(), base)
    assert (found.script if found is not None else None) == script
    if base is None:
        return
    request = pb.DecideRequest(decision=decision(9, base), base_manifest=manifest("given"))
    given = earlier_manifest(record, request, base)
    assert given is not None and given.script == "given", "the decision knows best"


def test_the_next_record_remembers_that_a_version_was_whole():
    request = pb.DecideRequest(manifest=manifest("new"), decision=decision(3), node_index=0)
    earlier = pb.JobRecord(manifest=manifest("now"), decision=decision(2), had_whole=True)
    earlier.leases.add(rank=0, pid=7)
    record = run_at_once(next_record(earlier, request, [4, 5]))
    assert record.had_whole and list(record.holders) == [4, 5] and not record.leases
    assert record.manifest.script == "new" and not record.HasField("base_manifest")
    fresh = pb.JobRecord(manifest=manifest("now"))
    assert not run_at_once(next_record(fresh, request, [])).had_whole
    based = pb.DecideRequest(manifest=manifest("new"), decision=decision(3, OF_1))
    assert run_at_once(next_record(fresh, based, [])).had_whole
