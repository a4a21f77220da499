"""Daemons of an exchanging job die, stop, come back, or lack memory.

No step waits, the protected step stays, and turns go on afterwards. Three nodes, one rank each; no
leaf has a replica. Each test ends with a lost node: the parity that was made is what restores it.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest

from reft.wire.v1 import daemon_pb2 as pb
from reft_daemon.arena.job_files import PINS_APART, newest_copy
from tests.e2e.test_total_loss import asked
from tests.support.daemons import DaemonProcess, Site, until, vanish
from tests.support.equality import assert_equal
from tests.support.limits import cramped_daemon
from tests.support.trainers import Spec, Trainers, run

STEPS = 60
OWN: dict[str, Any] = {"own": True, "apart": True, "width": 256}
SLOW: dict[str, Any] = {"step_s": 0.02}  # so that some steps become whole before the next pause
P = 10  # the step that is protected before the fault
LONG_DEADLINE = {"REFT_RPC_DEADLINE_S": "60"}  # a step that waits for a call would last until then
WAIT_S = 20.0  # even on busy cores no step takes this long without such a call
SOAK_S = 120.0  # that a daemon stands in make soak
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def plain():
    """Yields the results of an undisturbed run."""
    daemon = DaemonProcess()
    yield run(Spec(daemon.address, job="plain", steps=STEPS, options=OWN), 3)
    daemon.close()


def spec_of(**options: Any) -> Spec:
    return Spec("", steps=STEPS, options={**OWN, **options}, environment=LONG_DEADLINE)


def begin(nodes: Sequence[DaemonProcess], **options: Any) -> Trainers:
    """Trains until step P is protected, and pauses there."""
    spec = spec_of(**options)
    spec.options |= {name: [P, *options.get(name, ())] for name in ("seal_at", "pause_at")}
    trainers = Trainers(spec, 3, [node.address for node in nodes])
    trainers.wait_for(P)
    await_protected(nodes, P)
    return trainers


def protected(node: DaemonProcess) -> int:
    return node.status("job").exchange.protected


def await_protected(nodes: Sequence[DaemonProcess], step: int) -> None:
    """Waits until a step as new as this is protected, as each of the nodes says."""
    for node in nodes:
        until(lambda node=node: protected(node) >= step, what=f"protected({step})")


def lose(site: Site, nodes: list[DaemonProcess], node: int, plain: list[dict[str, Any]], **options: Any) -> int:
    """Replaces a node and trains to the end, like an undisturbed run; returns the first step."""
    vanish(nodes[node])
    nodes[node] = site.add(1)[0]
    after = run(spec_of(**options), 3, [each.address for each in nodes])
    assert [each["from"] for each in after] == ["peers"] * 3
    assert_equal(after, plain)
    return after[0]["began"]


def recorded_pins(node: DaemonProcess) -> pb.Pins:
    data = (node.folder / "job" / "pins").read_bytes()
    copy, wrong = newest_copy((data[:PINS_APART], data[PINS_APART:]))
    assert not wrong
    return pb.PinsRecord.FromString(copy.body).pins


@pytest.mark.parametrize(
    ("node", "failpoint"),
    [
        pytest.param(1, f"turn.ticket:kill:from={P + 1}:after=1", id="in a turn"),
        pytest.param(0, f"turn.ticket:kill:from={P + 1}:after=1", id="coordinator in a turn", marks=pytest.mark.chaos),
        pytest.param(0, f"record.pins:kill:from={P + 1}", id="coordinator before it announces"),
    ],
)
def test_a_daemon_killed_in_a_turn_goes_on_after_its_restart(site, plain, node, failpoint):
    nodes = [site.add(1, environment={"REFT_FAILPOINTS": failpoint if i == node else ""})[0] for i in range(3)]
    trainers = begin(nodes, pause_at=[40], **SLOW)
    trainers.let_go(P)
    nodes[node].process.wait(60)
    trainers.wait_for(40)
    other = nodes[2]
    assert protected(other) == P and other.status("job").exchange.turn > P, "announced before the kill"
    recorded = recorded_pins(nodes[0])
    assert recorded.turn > P or recorded.protected > P
    nodes[node].environment = {}
    nodes[node].start()
    assert protected(nodes[node]) in (-1, P) or node == 0
    if node == 0:
        assert protected(nodes[0]) >= recorded.protected >= P
    await_protected(nodes, P + 1)
    reached = protected(other)
    trainers.kill()
    assert lose(site, nodes, 2, plain) >= reached


def is_stopped(node: DaemonProcess) -> bool:
    return psutil.Process(node.process.pid).status() == psutil.STATUS_STOPPED


def stand(site: Site, plain: list[dict[str, Any]], *pauses: int, **options: Any) -> None:
    """Trains to the last pause while a daemon stands in a turn, then lets it go on.

    At the first pause a step is whole, and its turn stops the daemon.
    """
    failpoint = {"REFT_FAILPOINTS": f"turn.ticket:stop:from={P + 1}:after=1:times=1"}
    nodes = [*site.add(1), *site.add(1, environment=failpoint), *site.add(1)]
    trainers = begin(nodes, pause_at=pauses, **options)
    for before, pause in itertools.pairwise((P, *pauses)):
        trainers.let_go(before)
        trainers.wait_for(pause)
        until(lambda: is_stopped(nodes[1]), what="the daemon's stop in a turn")
    assert [protected(nodes[0]), protected(nodes[2])] == [P, P]
    nodes[1].kill(signal.SIGCONT)
    await_protected(nodes, P + 1)
    trainers.let_go(pauses[-1])
    assert trainers.wait(300) == [0] * 3, trainers.errors()
    results = trainers.results()
    assert max(each["longest_step_s"] for each in results) < WAIT_S
    assert_equal(results, plain)


def test_no_step_waits_for_a_daemon_that_stands_in_a_turn(site, plain):
    stand(site, plain, 20, STEPS - 1, **SLOW)


@pytest.mark.soak
def test_no_step_waits_for_a_daemon_that_stands_in_a_turn_for_two_minutes(site, plain):
    stand(site, plain, 20, 40, STEPS - 1, step_s=SOAK_S / (STEPS - 1 - P))


def test_a_node_that_comes_back_with_old_parity(site, plain):
    """Its daemon was away while the others went on with a replacement, which is lost then."""
    nodes = site.add(3)
    begin(nodes).kill()
    away = nodes[2]
    away.kill()
    nodes[2] = site.add(1)[0]
    trainers = Trainers(spec_of(seal_at=[20], pause_at=[20]), 3, [node.address for node in nodes])
    trainers.wait_for(20)
    await_protected(nodes, 20)
    trainers.kill()
    vanish(nodes[2])
    away.start()
    nodes[2] = away
    after = run(spec_of(), 3, [node.address for node in nodes])
    assert [(each["began"], each["from"]) for each in after] == [(20, "peers")] * 3
    assert_equal(after, plain)


def test_parity_of_a_foreign_history_is_never_used(site, plain):
    """Another run of the same name has protected the same step, of another state, elsewhere."""
    nodes, foreign = site.add(3), site.add(3)
    begin(nodes).kill()
    begin(foreign, seed=5).kill()
    vanish(nodes[2])
    nodes[2] = foreign[2]
    trainers = Trainers(spec_of(), 3, [node.address for node in nodes])
    assert 1 in trainers.wait()
    assert "went on more than once" in trainers.errors()
    for node in foreign:
        node.call("Purge", pb.PurgeRequest(job="job"))
    after = run(spec_of(), 3, [node.address for node in nodes])
    assert [(each["began"], each["from"]) for each in after] == [(P, "peers")] * 3
    assert_equal(after, plain)


def test_attach_refuses_a_node_without_memory_for_its_parity(site):
    nodes = [*site.add(2), *site.add(1, "--memory", "5MiB")]
    trainers = Trainers(spec_of(), 3, [node.address for node in nodes])
    assert 1 in trainers.wait()
    assert "the slots and the exchange's parity slots need" in trainers.errors()
    assert not [job for job in nodes[2].call("Status", pb.StatusRequest()).jobs if job.held_bytes]


@pytest.fixture
def cramped() -> Iterator[DaemonProcess]:
    """A node whose folder has space for its records, but not for a slot: all slots are memfds."""
    with cramped_daemon("512k", "--listen", "127.0.0.1:0") as process:
        yield process


def test_parity_in_memfds_ends_with_its_daemon_and_is_made_again(site, cramped, plain):
    held_off = {"REFT_FAILPOINTS": f"turn.ticket:drop:from={P + 1}"}
    nodes = [*site.add(1), cramped, *site.add(1, environment=held_off)]
    trainers = begin(nodes, pause_at=[20], seal_at=[18])  # ranks give memfds back at a snapshot
    assert cramped.status("job").backing == "memfd"
    cramped.kill()
    cramped.start()
    trainers.let_go(P)
    trainers.wait_for(20)
    until(lambda: protected(nodes[0]) == -1, what="the end of the protection")
    _, document = asked(nodes[0], "status")
    assert document["jobs"][0]["exchange"]["protected_step"] is None
    nodes[2].kill()
    nodes[2].environment = {}
    nodes[2].start()
    await_protected(nodes, P + 1)
    reached = protected(nodes[0])
    trainers.kill()
    assert lose(site, nodes, 2, plain) >= reached
