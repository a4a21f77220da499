"""Nodes go, come, and change places, with real daemons and trainers: what was held is found, decoded, or refused by name."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from reft.cli.recover import RecoverCommand
from reft.errors import AttachError
from reft.wire import messages
from reft.wire.slot_format import PAGE, best_header
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess, until, vanish
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

OPTIONS = {"seal_at": [4, 5, 6], "width": 96}
STOP_AT = 6
INVENTORY = pb.InventoryRequest(job="job")


@pytest.fixture(scope="module")
def plain():
    """Undisturbed runs by number of ranks, on one node each: no sum can see where ranks run."""
    found: dict[int, list] = {}
    daemon = DaemonProcess()

    def of(world: int) -> list:
        if world not in found:
            found[world] = run(Spec(daemon.address, job=f"plain-{world}", options=OPTIONS), world)
        return found[world]

    yield of
    daemon.close()


def spec_of(**options: object) -> Spec:
    return Spec("", options={**OPTIONS, **options})


def train(daemons: Sequence[DaemonProcess], **options: object) -> list:
    """Trains to the end, one rank on each node."""
    return run(spec_of(**options), len(daemons), [daemon.address for daemon in daemons])


def stop(daemons: Sequence[DaemonProcess], failpoints: str = "", at: int = STOP_AT, **options: object) -> None:
    """Trains until the mark after step `at`, which is whole by then, and ends all ranks."""
    spec = spec_of(pause_at=[at], **options)
    spec.options["seal_at"] = [*OPTIONS["seal_at"], at]
    spec.failpoints = failpoints
    trainers = Trainers(spec, len(daemons), [daemon.address for daemon in daemons])
    trainers.wait_for(at)
    try:
        until(lambda: daemons[0].status("job").whole == at, what=f"step {at}")
    except AssertionError as error:
        said = [f"{each.status('job')}\n{each.log.read_text()[-2000:]}" for each in daemons]
        raise AssertionError("\n".join([str(error), *said, trainers.errors()])) from error
    trainers.kill()


def flip(daemon: DaemonProcess) -> None:
    """Turns one bit in the data of a node's newest slot."""
    headers = daemon.call("Inventory", pb.InventoryRequest(job="job")).slots
    newest = max(headers, key=lambda header: header.version.step)
    path: Path = daemon.folder / "job" / newest.slot
    with open(path, "r+b") as file:
        at = best_header(np.frombuffer(file.read(2 * PAGE), np.uint8)).geometry.data_offset + 100
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_any_node_of_three_is_replaced(site, plain, lost):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[lost])
    nodes[lost] = site.add(1)[0]
    after = train(nodes)
    assert [each["from"] for each in after] == ["peers"] * 3 and after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


@pytest.mark.parametrize("ident", ["0" * 16, "f" * 16])  # before and behind all others
def test_a_node_that_was_rebooted_is_not_taken_for_two(site, plain, ident):
    """Its memory is gone, so it is another node; it is called where it was called before."""
    nodes = site.add(3)
    stop(nodes)
    hello = nodes[1].call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL))
    vanish(nodes[1])
    nodes[1].folder.mkdir(mode=0o700)
    (nodes[1].folder / "node-id").write_text(ident)
    nodes[1].flags = ("--listen", hello.addresses[0])
    nodes[1].start()
    stop(nodes, at=8)
    after = train(nodes)
    assert after[0]["began"] == 8
    assert_equal(after, plain(3))


def test_two_nodes_of_four_are_replaced_if_that_was_asked_for(site, plain):
    nodes = site.add(4)
    stop(nodes, tolerate=2)
    vanish(nodes[1], nodes[2])
    nodes[1:3] = site.add(2)
    after = train(nodes, tolerate=2)
    assert after[0]["began"] == STOP_AT
    assert_equal(after, plain(4))


def test_ranks_that_change_places_find_what_they_had(site, plain):
    nodes = site.add(3)
    stop(nodes)
    after = train([nodes[2], nodes[0], nodes[1]])
    assert after[0]["from"] == "peers" and after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


def test_a_node_that_takes_no_part_any_more_still_gives_what_it_holds(site, plain):
    """Two places change hands at f = 1: without the memory of the nodes that were left out nothing could be decoded."""
    nodes = site.add(3)
    stop(nodes)
    after = train([*site.add(2), nodes[2]])
    assert after[0]["from"] == "peers" and after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


def test_a_node_is_found_that_only_another_node_knows_of(site):
    """A and B, B and C, then A and D: A never heard of C, which has what nobody else keeps."""
    a, b, c, d = site.add(4)
    for steps, nodes in ((4, [a, b]), (6, [b, c]), (8, [a, d])):
        spec = spec_of(protect="none")
        spec.steps = steps
        after = run(spec, 2, [each.address for each in nodes])
    assert after[0]["began"] == 6


def test_fewer_nodes_hold_the_same_ranks(site, plain):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[2])
    after = train([nodes[0], nodes[1], nodes[1]])
    assert after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


def test_a_damaged_slot_is_decoded_not_given_up(site, plain):
    nodes = site.add(3)
    stop(nodes)
    flip(nodes[1])
    after = train(nodes)
    assert after[0]["began"] == STOP_AT, "the version is whole without that slot"
    assert_equal(after, plain(3))


def test_a_damaged_capsule_is_taken_from_another_keeper(site, plain):
    nodes = site.add(4)
    stop(nodes, tolerate=2)
    vanish(nodes[1])
    name = f"capsule-1.*-{STOP_AT}"
    keepers = [node for node in nodes if list((node.folder / "job").glob(name))]
    first = min(keepers, key=lambda node: (node.folder / "node-id").read_text())  # the plan takes it from there
    (path,) = (first.folder / "job").glob(name)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    nodes[1] = site.add(1)[0]
    after = train(nodes, tolerate=2)
    assert len(keepers) == 2 and after[0]["began"] == STOP_AT
    assert_equal(after, plain(4))


def test_one_node_too_many_is_refused_and_what_is_left_stays(site):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[1], nodes[2])
    again = [nodes[0], *site.add(2)]
    for _ in range(2):
        trainers = Trainers(spec_of(), 3, [daemon.address for daemon in again])
        assert 1 in trainers.wait()
        said = trainers.errors()
        assert "no version is whole now" in said and "the cell of" in said and f"step {STOP_AT}" in said


def test_a_second_loss_is_survived_once_the_first_is_made_good(site, plain):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[0])
    nodes[0] = site.add(1)[0]
    trainers = Trainers(spec_of(pause_at=[STOP_AT]), 3, [daemon.address for daemon in nodes])
    trainers.wait_for(STOP_AT)  # the first mark after the restore is still to come: what is whole is the restored step
    until(lambda: nodes[1].status("job").whole == STOP_AT, what="protection")
    trainers.kill()
    vanish(nodes[1])
    nodes[1] = site.add(1)[0]
    after = train(nodes)
    assert after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


def test_a_second_loss_before_that_is_refused(site):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[0])
    nodes[0] = site.add(1)[0]
    spec = spec_of()
    spec.failpoints = "snapshot.begin:kill:epoch=2"  # nothing of the new epoch is written
    Trainers(spec, 3, [daemon.address for daemon in nodes]).wait()
    vanish(nodes[1])
    nodes[1] = site.add(1)[0]
    trainers = Trainers(spec_of(), 3, [daemon.address for daemon in nodes])
    assert 1 in trainers.wait()
    assert "no version is whole now" in trainers.errors()


def told_alone(node: DaemonProcess, index: int) -> None:
    """An attach dies when it has told one daemon its decision, and just that node is cut off then."""
    held = node.call("Inventory", INVENTORY)
    epoch = pb.Epoch(counter=held.decision.epoch.counter + 1, ident=b"\xff" * 16)  # of equal counters, the greatest
    base = pb.Version(epoch=held.decision.epoch, step=STOP_AT)
    decision = pb.Decision(epoch=epoch, base=base, known=[held.decision.epoch])
    node.call(
        "Decide",
        pb.DecideRequest(manifest=held.manifest, decision=decision, node_index=index, base_manifest=held.manifest),
    )
    node.kill(signal.SIGSTOP)


def go_on(nodes: Sequence[DaemonProcess], upto: int) -> None:
    """Trains until a later step is whole, and ends all ranks."""
    spec = spec_of(pause_at=[upto], seal_at=list(range(STOP_AT + 1, upto + 1)))
    trainers = Trainers(spec, len(nodes), [daemon.address for daemon in nodes])
    trainers.wait_for(upto)
    until(lambda: nodes[0].status("job").whole == upto, what=f"step {upto}")
    trainers.kill()


def test_a_node_that_alone_was_told_of_an_attach_does_not_outrank_those_who_went_on(site, plain):
    nodes = site.add(3)
    stop(nodes)
    told_alone(nodes[2], index=2)
    go_on([*nodes[:2], *site.add(1)], 9)
    nodes[2].kill(signal.SIGCONT)
    after = train(nodes)
    assert after[0]["began"] == 9
    assert_equal(after, plain(3))


def test_nor_where_nobody_is_left_who_could_have_been_told_too(site, plain):
    a, b, c = site.add(3)
    stop([a, b])
    told_alone(b, index=1)
    go_on([a, c], 9)
    vanish(a)
    b.kill(signal.SIGCONT)
    after = train([b, c])
    assert after[0]["began"] == 9
    assert_equal(after, plain(2))


def test_two_histories_that_know_nothing_of_each_other_are_left_to_a_person(site, plain):
    """A and B, A and C while B is silent, B and D while those are; then all answer."""
    a, b, c, d = site.add(4)
    stop([a, b])
    b.kill(signal.SIGSTOP)
    go_on([a, c], 9)
    for node, does in ((a, signal.SIGSTOP), (c, signal.SIGSTOP), (b, signal.SIGCONT)):
        node.kill(does)
    go_on([b, d], 8)
    for node in (a, c):
        node.kill(signal.SIGCONT)
    trainers = Trainers(spec_of(), 2, [daemon.address for daemon in (a, b)])
    assert 1 in trainers.wait()
    said = trainers.errors()
    assert "went on more than once" in said and "up to step 9" in said and "up to step 8" in said
    with pytest.raises(AttachError, match="went on more than once"):
        RecoverCommand(a.address, "job", {}).look()
    for node in (b, d):
        node.call("Purge", pb.PurgeRequest(job="job"))
    after = train([a, b])
    assert after[0]["began"] == 9, "nothing was changed by the attach that was refused"
    assert_equal(after, plain(2))


def restarted(nodes: Sequence[DaemonProcess], failpoints: str) -> None:
    """Daemons as they are after a restart, with these failpoints."""
    for daemon in nodes:
        daemon.environment = {"REFT_FAILPOINTS": failpoints}
        daemon.kill()
        daemon.start()


def test_a_version_sealed_by_all_whose_capsules_never_left_is_made_safe_before_anything_is_written(site, plain):
    """It is newer than what was whole, so it is the base; the snapshots that follow write over the older one."""
    nodes = site.add(3)
    restarted(nodes, "capsules.send:drop:after=4")
    spec = spec_of(seal_at=[2, 3], pause_at=[6, 9], seal_s=1)
    trainers = Trainers(spec, 3, [daemon.address for daemon in nodes])
    trainers.wait_for(6)
    trainers.kill()
    whole = nodes[0].status("job").whole
    trainers = Trainers(spec, 3, [daemon.address for daemon in nodes])
    trainers.wait_for(6)
    trainers.let_go(6)
    trainers.wait_for(9)
    trainers.kill()
    base = nodes[0].status("job").base.step
    assert whole < base, "the newest version that all ranks sealed had not become whole"
    vanish(nodes[1])
    restarted([nodes[0], nodes[2]], "")
    nodes[1] = site.add(1)[0]
    after = train(nodes)
    assert after[0]["began"] >= base
    assert_equal(after, plain(3))


def test_state_that_nobody_foresaw_is_protected_from_the_first_review_on(site, plain):
    """An optimizer that refuses to step on `meta`: attach sees no state of it, its first step makes some."""
    undisturbed = train(site.add(1) * 3, hidden=True, protect="none")
    nodes = site.add(3)
    stop(nodes, hidden=True)
    vanish(nodes[1])
    nodes[1] = site.add(1)[0]
    after = train(nodes, hidden=True)
    assert [each["from"] for each in after] == ["peers"] * 3 and after[0]["began"] == STOP_AT
    assert_equal(after, undisturbed)


@pytest.mark.parametrize("lost", [[], [1]])
def test_what_ranks_held_since_they_differed_is_never_put_together(site, plain, lost):
    """Every slot of it is sealed and sound; between two reviews only the round knew that it was no version."""
    nodes = site.add(3)
    trainers = Trainers(
        spec_of(drift_at=4, pause_at=[STOP_AT], seal_at=[3, 4, 5, 6]), 3, [daemon.address for daemon in nodes]
    )
    trainers.wait_for(STOP_AT)
    assert nodes[0].status("job").whole == 4
    held = {slot.version.step for node in nodes for slot in node.call("Inventory", INVENTORY).slots}
    assert {4, 5} <= held and 6 not in held, "once they know, ranks take none until a review"
    trainers.kill()
    vanish(*(nodes[i] for i in lost))
    for i in lost:
        nodes[i] = site.add(1)[0]
    after = train(nodes)
    assert [each["began"] for each in after] == [4] * 3
    assert_equal(after, plain(3))


@pytest.mark.parametrize("world", [2, 1])
def test_nor_what_they_sealed_before_they_heard_of_it(site, world):
    """Step 2 is compared in whole and differs, of step 3 only a window without the difference."""
    nodes = site.add(2)
    spec = Spec("", options={"width": 512, "seal_at": [1], "drift_at": 1, "pause_at": [1, 3]})
    trainers = Trainers(spec, 2, [daemon.address for daemon in nodes])
    trainers.wait_for(1)
    nodes[1].kill(signal.SIGSTOP)
    trainers.let_go(1)
    trainers.wait_for(3)
    nodes[1].kill(signal.SIGCONT)
    until(lambda: nodes[0].status("job").mismatched, what="news of the difference")
    trainers.kill()
    assert nodes[0].status("job").whole == 1
    assert {slot.version.step for slot in nodes[1].call("Inventory", INVENTORY).slots} == {1, 2, 3}
    after = run(Spec("", steps=4, options={"width": 512}), world, [daemon.address for daemon in nodes[:world]])
    assert [each["began"] for each in after] == [1] * world


def test_nor_by_another_number_of_ranks(site):
    nodes = site.add(3)
    trainers = Trainers(
        spec_of(drift_at=4, pause_at=[STOP_AT], seal_at=[3, 4, 5, 6]), 3, [daemon.address for daemon in nodes]
    )
    trainers.wait_for(STOP_AT)
    trainers.kill()
    after = train(nodes[:2])
    assert [each["began"] for each in after] == [4] * 2


@pytest.mark.parametrize(
    "drifts, began", [({"drift_at": 2, "seal_at": [2, 3]}, 2), ({"drift_at": 0, "seal_at": [1]}, 0)]
)
def test_a_review_takes_no_unlike_replicas_for_a_whole_version(site, drifts, began):
    """All die in the first snapshot after it; with two slots, only one other version is left then."""
    nodes = site.add(2)
    spec = spec_of(slots=2, **drifts)
    spec.failpoints = "snapshot.chunk:kill:epoch=2"
    trainers = Trainers(spec, 2, [each.address for each in nodes])
    assert -9 in trainers.wait(), trainers.errors()
    assert "the placement was made anew" in trainers.errors()
    assert train(nodes, slots=2)[0]["began"] == began


def test_a_leaf_in_which_ranks_begin_to_differ_is_kept_by_each_for_itself(site):
    """That leaf is not covered any more, alone: all others are, and steps become whole again."""
    nodes = site.add(3)
    spec = spec_of(drift_at=1, pause_at=[STOP_AT], seal_at=[2, 4, 5])
    undisturbed = run(spec_of(drift_at=1, protect="none"), 3, [site.add(1)[0].address] * 3)
    trainers = Trainers(spec, 3, [daemon.address for daemon in nodes])
    trainers.wait_for(STOP_AT)
    until(lambda: nodes[0].status("job").whole == STOP_AT, what="a whole step after the ranks differ")
    assert "step 4: the placement was made anew; ranks differ in model.0.0.weight" in trainers.errors()
    trainers.kill()
    after = train(nodes, drift_at=1)
    assert after[0]["began"] == STOP_AT
    assert_equal(after, undisturbed)
