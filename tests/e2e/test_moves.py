"""Nodes leave, join and change places, with real daemons and trainers.

The held state is found, or decoded, or refused with the names of the missing parts.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reft.wire import messages
from reft.wire.slot_format import PAGE, best_header
from reft.wire.v1 import daemon_pb2 as pb
from tests.support.daemons import DaemonProcess, until, vanish
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

OPTIONS = {"seal_at": [4, 5, 6], "width": 96}
STOP_AT = 6
# A new layout is made beside training. Each step waits so long for it, so it is there before LATE.
SLOW: dict[str, Any] = {"layout_s": 1.0, "steps": 42}
LATE = 40
INVENTORY = pb.InventoryRequest(job="job")


@pytest.fixture(scope="module")
def plain():
    """Yields a function that returns an undisturbed run, by number of ranks.

    All its ranks run on one node: no sum depends on where ranks run.
    """
    results: dict[int, list] = {}
    daemon = DaemonProcess()

    def of(world: int) -> list:
        if world not in results:
            results[world] = run(Spec(daemon.address, job=f"plain-{world}", options=OPTIONS), world)
        return results[world]

    yield of
    daemon.close()


def spec_of(steps: int = 12, **options: object) -> Spec:
    return Spec("", steps=steps, options={**OPTIONS, **options})


def train(daemons: Sequence[DaemonProcess], **options: Any) -> list:
    """Trains to the end, one rank on each node; returns the results of all ranks."""
    return run(spec_of(**options), len(daemons), [daemon.address for daemon in daemons])


def stop(daemons: Sequence[DaemonProcess], failpoints: str = "", stop_step: int = STOP_AT, **options: Any) -> None:
    """Trains until step `at` is whole, and then kills all ranks. All ranks pause at that step."""
    spec = spec_of(pause_at=[stop_step], **options)
    spec.options["seal_at"] = [*OPTIONS["seal_at"], stop_step]
    spec.failpoints = failpoints
    trainers = Trainers(spec, len(daemons), [daemon.address for daemon in daemons])
    trainers.wait_for(stop_step)
    try:
        until(lambda: daemons[0].status("job").whole == stop_step, what=f"step {stop_step}")
    except AssertionError as error:
        texts = [f"{each.status('job')}\n{each.log.read_text()[-2000:]}" for each in daemons]
        raise AssertionError("\n".join([str(error), *texts, trainers.errors()])) from error
    trainers.kill()


def flip(daemon: DaemonProcess) -> None:
    """Flips one bit in the data of a node's newest slot."""
    headers = daemon.call("Inventory", pb.InventoryRequest(job="job")).slots
    newest = max(headers, key=lambda header: header.version.step)
    path: Path = daemon.folder / "job" / newest.slot
    with open(path, "r+b") as file:
        offset = best_header(np.frombuffer(file.read(2 * PAGE), np.uint8)).geometry.data_offset + 100
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_any_node_of_three_is_replaced(site, plain, lost):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[lost])
    nodes[lost] = site.add(1)[0]
    after = train(nodes)
    assert [each["from"] for each in after] == ["peers"] * 3 and after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


@pytest.mark.parametrize("ident", ["0" * 16, "f" * 16])  # sorted before, and behind, all other nodes
def test_a_rebooted_node_is_a_new_node_at_the_old_address(site, plain, ident):
    """Its memory is gone, so it is a new node. Its address is the address of the old node."""
    nodes = site.add(3)
    stop(nodes)
    hello = nodes[1].call("Hello", pb.HelloRequest(protocol=messages.PROTOCOL))
    vanish(nodes[1])
    nodes[1].folder.mkdir(mode=0o700)
    (nodes[1].folder / "node-id").write_text(ident)
    nodes[1].flags = ("--listen", hello.addresses[0])
    nodes[1].start()
    stop(nodes, stop_step=8)
    after = train(nodes)
    assert after[0]["began"] == 8
    assert_equal(after, plain(3))


def test_two_nodes_of_four_are_replaced_at_tolerate_2(site, plain):
    nodes = site.add(4)
    stop(nodes, tolerate=2)
    vanish(nodes[1], nodes[2])
    nodes[1:3] = site.add(2)
    after = train(nodes, tolerate=2)
    assert after[0]["began"] == STOP_AT
    assert_equal(after, plain(4))


def test_ranks_that_change_nodes_find_their_state(site, plain):
    nodes = site.add(3)
    stop(nodes)
    after = train([nodes[2], nodes[0], nodes[1]])
    assert after[0]["from"] == "peers" and after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


def test_a_node_that_left_the_job_still_provides_its_slots(site, plain):
    """Two places change hands at f = 1.

    The state can only be decoded with the slots on the two nodes that left the job.
    """
    nodes = site.add(3)
    stop(nodes)
    after = train([*site.add(2), nodes[2]])
    assert after[0]["from"] == "peers" and after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


def test_attach_finds_a_node_that_only_another_node_knows(site):
    """The job runs on three pairs of nodes in turn.

    These are A and B, then B and C, then A and D. A never heard of C, and only C holds the newest
    step. With a job key all of them have the same token.
    """
    a, b, c, d = site.add(4)
    for steps, nodes in ((4, [a, b]), (6, [b, c]), (8, [a, d])):
        spec = spec_of(protect="none")
        spec.steps, spec.environment = steps, {"REFT_JOB_KEY": "key of the job, 32 bytes or more"}
        after = run(spec, 2, [each.address for each in nodes])
    assert after[0]["began"] == 6


def test_a_node_that_missed_a_whole_step_hears_nobody_without_a_job_key(site):
    """The token of A is older than the one that B takes, and nobody else knows that of B."""
    a, b, c, d = site.add(4)
    for steps, nodes in ((4, [a, b]), (6, [b, c])):
        spec = spec_of(protect="none", seal_at=[steps - 1])  # so each daemon knows of a whole step
        spec.steps = steps
        run(spec, 2, [each.address for each in nodes])
    trainers = Trainers(spec_of(protect="none"), 2, [each.address for each in (a, d)])
    codes, text = trainers.wait(), trainers.errors()
    assert codes == [1, 1] and "no version is whole now" in text, text
    spec = spec_of(protect="none")
    spec.steps = 8
    assert run(spec, 2, [each.address for each in (a, b)])[0]["began"] == 6, "the refused attach changed nothing"


def test_the_same_ranks_go_on_with_fewer_nodes(site, plain):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[2])
    after = train([nodes[0], nodes[1], nodes[1]])
    assert after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


def test_a_damaged_slot_is_decoded(site, plain):
    nodes = site.add(3)
    stop(nodes)
    flip(nodes[1])
    after = train(nodes)
    assert after[0]["began"] == STOP_AT, "the version is whole without the damaged slot"
    assert_equal(after, plain(3))


def test_a_damaged_capsule_is_read_from_another_node(site, plain):
    nodes = site.add(4)
    stop(nodes, tolerate=2)
    vanish(nodes[1])
    name = f"capsule-1.*-{STOP_AT}"
    keepers = [node for node in nodes if list((node.folder / "job").glob(name))]
    first = min(
        keepers, key=lambda node: (node.folder / "node-id").read_text()
    )  # the plan reads the capsule from this node
    (path,) = (first.folder / "job").glob(name)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    nodes[1] = site.add(1)[0]
    after = train(nodes, tolerate=2)
    assert len(keepers) == 2 and after[0]["began"] == STOP_AT
    assert_equal(after, plain(4))


def test_attach_refuses_one_lost_node_too_many_and_keeps_the_other_slots(site):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[1], nodes[2])
    new_nodes = [nodes[0], *site.add(2)]
    for _ in range(2):
        trainers = Trainers(spec_of(), 3, [daemon.address for daemon in new_nodes])
        assert 1 in trainers.wait()
        text = trainers.errors()
        assert "no version is whole now" in text and "the cell of" in text and f"step {STOP_AT}" in text


def test_a_second_node_may_be_lost_after_the_first_was_rebuilt(site, plain):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[0])
    nodes[0] = site.add(1)[0]
    trainers = Trainers(spec_of(pause_at=[STOP_AT]), 3, [daemon.address for daemon in nodes])
    trainers.wait_for(STOP_AT)  # before the first mark after the restore: the whole step is the restored one
    until(lambda: nodes[1].status("job").whole == STOP_AT, what="protection")
    trainers.kill()
    vanish(nodes[1])
    nodes[1] = site.add(1)[0]
    after = train(nodes)
    assert after[0]["began"] == STOP_AT
    assert_equal(after, plain(3))


def test_attach_refuses_a_second_lost_node_before_the_first_was_rebuilt(site):
    nodes = site.add(3)
    stop(nodes)
    vanish(nodes[0])
    nodes[0] = site.add(1)[0]
    spec = spec_of()
    spec.failpoints = "snapshot.begin:kill:epoch=2"  # the new epoch writes no snapshot
    Trainers(spec, 3, [daemon.address for daemon in nodes]).wait()
    vanish(nodes[1])
    nodes[1] = site.add(1)[0]
    trainers = Trainers(spec_of(), 3, [daemon.address for daemon in nodes])
    assert 1 in trainers.wait()
    assert "no version is whole now" in trainers.errors()


def decide_on_one_node(node: DaemonProcess, index: int) -> None:
    """Leaves an attach's decision on one node only, and stops that node's daemon.

    So the attach died after it had told one daemon its decision, and then the node was cut off.
    """
    inventory = node.call("Inventory", INVENTORY)
    epoch = pb.Epoch(
        counter=inventory.decision.epoch.counter + 1, ident=b"\xff" * 16
    )  # the greatest of all epochs with this counter
    base = pb.Version(epoch=inventory.decision.epoch, step=STOP_AT)
    decision = pb.Decision(epoch=epoch, base=base, known=[inventory.decision.epoch])
    node.call(
        "Decide",
        pb.DecideRequest(
            manifest=inventory.manifest, decision=decision, node_index=index, base_manifest=inventory.manifest
        ),
    )
    node.kill(signal.SIGSTOP)


def go_on(nodes: Sequence[DaemonProcess], upto: int) -> None:
    """Trains until step `upto` is whole, and then kills all ranks."""
    spec = spec_of(pause_at=[upto], seal_at=list(range(STOP_AT + 1, upto + 1)))
    trainers = Trainers(spec, len(nodes), [daemon.address for daemon in nodes])
    trainers.wait_for(upto)
    until(lambda: nodes[0].status("job").whole == upto, what=f"step {upto}")
    trainers.kill()


def test_an_epoch_decided_on_one_node_does_not_replace_the_job_that_went_on(site, plain):
    nodes = site.add(3)
    stop(nodes)
    decide_on_one_node(nodes[2], index=2)
    go_on([*nodes[:2], *site.add(1)], 9)
    nodes[2].kill(signal.SIGCONT)
    after = train(nodes)
    assert after[0]["began"] == 9
    assert_equal(after, plain(3))


def test_an_epoch_decided_on_one_node_does_not_win_after_the_other_node_is_lost(site, plain):
    a, b, c = site.add(3)
    stop([a, b])
    decide_on_one_node(b, index=1)
    go_on([a, c], 9)
    vanish(a)
    b.kill(signal.SIGCONT)
    after = train([b, c])
    assert after[0]["began"] == 9
    assert_equal(after, plain(2))


def test_attach_refuses_two_separate_histories_until_one_is_purged(site, plain):
    """The job runs on three pairs of nodes in turn.

    It runs on A and B, on A and C while B is silent, and on B and D while A and C are silent. Then
    all nodes answer.
    """
    a, b, c, d = site.add(4)
    stop([a, b])
    b.kill(signal.SIGSTOP)
    go_on([a, c], 9)
    for node, number in ((a, signal.SIGSTOP), (c, signal.SIGSTOP), (b, signal.SIGCONT)):
        node.kill(number)
    go_on([b, d], 8)
    for node in (a, c):
        node.kill(signal.SIGCONT)
    trainers = Trainers(spec_of(), 2, [daemon.address for daemon in (a, b)])
    assert 1 in trainers.wait()
    text = trainers.errors()
    assert "went on more than once" in text and "up to step 9" in text and "up to step 8" in text
    for node in (b, d):
        node.call("Purge", pb.PurgeRequest(job="job"))
    after = train([a, b])
    assert after[0]["began"] == 9, "the refused attach changed nothing"
    assert_equal(after, plain(2))


def restart(nodes: Sequence[DaemonProcess], failpoints: str) -> None:
    """Restarts the daemons with these failpoints."""
    for daemon in nodes:
        daemon.environment = {"REFT_FAILPOINTS": failpoints}
        daemon.kill()
        daemon.start()


def test_a_sealed_version_without_replicated_capsules_is_protected_before_new_snapshots(site, plain):
    """The sealed version is newer than the whole one, so it becomes the base.

    The snapshots that follow overwrite the older version.
    """
    nodes = site.add(3)
    restart(nodes, "capsules.send:drop:after=4")
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
    assert whole < base, "all ranks had sealed a version that had not become whole"
    vanish(nodes[1])
    restart([nodes[0], nodes[2]], "")
    nodes[1] = site.add(1)[0]
    after = train(nodes)
    assert after[0]["began"] >= base
    assert_equal(after, plain(3))


def test_state_unknown_at_attach_is_protected_by_a_new_layout(site, plain):
    """An optimizer that cannot step on `meta`: attach sees no state of it.

    Its first step creates the state.
    """
    undisturbed = train(site.add(1) * 3, hidden=True, protect="none", steps=SLOW["steps"])
    nodes = site.add(3)
    stop(nodes, hidden=True, stop_step=LATE, **SLOW)
    vanish(nodes[1])
    nodes[1] = site.add(1)[0]
    after = train(nodes, hidden=True, steps=SLOW["steps"])
    assert [each["from"] for each in after] == ["peers"] * 3 and after[0]["began"] == LATE
    assert_equal(after, undisturbed, seals_last=False)


@pytest.mark.parametrize("lost", [[], [1]])
def test_steps_taken_after_replicas_differ_are_never_restored(site, plain, lost):
    """All slots of these steps are sealed and undamaged.

    Until there is a new layout, only the round knows that these steps are not whole.
    """
    nodes = site.add(3)
    trainers = Trainers(
        spec_of(drift_at=4, pause_at=[STOP_AT], seal_at=[3, 4, 5, 6]), 3, [daemon.address for daemon in nodes]
    )
    trainers.wait_for(STOP_AT)
    slots = [slot for node in nodes for slot in node.call("Inventory", INVENTORY).slots]
    sealed = {slot.version.step for slot in slots if slot.state == pb.SEALED}
    assert 4 in sealed and 6 not in sealed, "ranks seal nothing from the report of the difference on"
    trainers.kill()
    vanish(*(nodes[i] for i in lost))
    for i in lost:
        nodes[i] = site.add(1)[0]
    after = train(nodes)
    assert [each["began"] for each in after] == [4] * 3
    assert_equal(after, plain(3))


@pytest.mark.parametrize("world", [2, 1])
def test_steps_sealed_before_ranks_learn_of_a_difference_are_never_restored(site, world):
    """Ranks compare all bytes of step 2, and find the difference.

    Of step 3 they compare only a window of bytes, without the difference.
    """
    nodes = site.add(2)
    spec = Spec("", options={"width": 512, "seal_at": [1], "drift_at": 1, "pause_at": [1, 3]})
    trainers = Trainers(spec, 2, [daemon.address for daemon in nodes])
    trainers.wait_for(1)
    nodes[1].kill(signal.SIGSTOP)
    trainers.let_go(1)
    trainers.wait_for(3)
    nodes[1].kill(signal.SIGCONT)
    until(lambda: nodes[0].status("job").mismatched, what="the report of the difference")
    trainers.kill()
    assert nodes[0].status("job").whole == 1
    assert {slot.version.step for slot in nodes[1].call("Inventory", INVENTORY).slots} == {1, 2, 3}
    after = run(Spec("", steps=4, options={"width": 512}), world, [daemon.address for daemon in nodes[:world]])
    assert [each["began"] for each in after] == [1] * world


def test_steps_taken_after_replicas_differ_are_never_restored_by_fewer_ranks(site):
    nodes = site.add(3)
    trainers = Trainers(
        spec_of(drift_at=4, pause_at=[STOP_AT], seal_at=[3, 4, 5, 6]), 3, [daemon.address for daemon in nodes]
    )
    trainers.wait_for(STOP_AT)
    trainers.kill()
    after = train(nodes[:2])
    assert [each["began"] for each in after] == [4] * 2


@pytest.mark.parametrize(
    "drift, began", [({"drift_at": 2, "seal_at": [2, 3]}, 2), ({"drift_at": 0, "seal_at": [1]}, 0)]
)
def test_a_new_layout_never_treats_mismatched_replicas_as_whole(site, drift, began):
    """All ranks die in the first snapshot of the new layout.

    There are two slots, so only one other version is left then.
    """
    nodes = site.add(2)
    spec = spec_of(slots=2, **drift, **SLOW)
    spec.failpoints = "snapshot.chunk:kill:epoch=2"
    trainers = Trainers(spec, 2, [each.address for each in nodes])
    assert -9 in trainers.wait(), trainers.errors()
    assert "the placement was made anew" in trainers.errors()
    assert train(nodes, slots=2)[0]["began"] == began


def test_each_rank_keeps_its_own_bytes_of_a_mismatched_leaf(site):
    """Only this leaf loses its protection against the loss of a node.

    All other leaves keep it, and steps become whole again.
    """
    nodes = site.add(3)
    spec = spec_of(drift_at=1, pause_at=[LATE], seal_at=[2, LATE], **SLOW)
    undisturbed = run(spec_of(SLOW["steps"], drift_at=1, protect="none"), 3, [site.add(1)[0].address] * 3)
    trainers = Trainers(spec, 3, [daemon.address for daemon in nodes])
    trainers.wait_for(LATE)
    until(lambda: nodes[0].status("job").whole == LATE, what="a whole step after the ranks differ")
    assert "the placement was made anew; ranks differ in model.0.0.weight" in trainers.errors()
    trainers.kill()
    after = train(nodes, drift_at=1, steps=SLOW["steps"])
    assert after[0]["began"] == LATE
    assert_equal(after, undisturbed)
