"""What the exchange sends, counted by the kernel: the formula's bytes, or none without need.

State of one holder: a turn sends (D - 1) / (D - f) of each section, and nothing of it twice. State
with replicas: no mover runs, no parity is kept, and there are three slots, as without the exchange.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_example_losses import DEADLINE_S, Example, Run
from tests.e2e.test_recomputed_copies import WORLD, finish, start
from tests.e2e.test_traffic import BEAT_FRAMES, sent_by
from tests.support.daemons import DaemonProcess, until
from tests.support.limits import own_network
from tests.support.processes import children_with
from tests.support.recomputed_copies import WIDTH as WIDTH_OF_ZERO
from tests.support.trainers import Spec, Trainers

D, WIDTH = 4, 512
# Only the weight of width x width and its two moments are too large for a capsule.
SECTION = 3 * 4 * WIDTH * WIDTH
FROM, UPTO = 5, 13  # the steps between which bytes are counted
PACKETS = 0.02  # bytes of headers and acknowledgements, as a share
STEP_BYTES = 3200 * (D - 1) * D  # HTTP/2 frames and replies of one step among all nodes
PULL_BYTES = 6000  # a ticket, a connection with its opening, heads of ranges: for one source
WAIT_BYTES = 32 << 10  # of pings and polls, where busy cores make a run longer; far less than a section
ATTACH_BYTES = 200 << 10  # of one node, beside what its daemon counts: manifest, inventories
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def network() -> Iterator[str]:
    """Yields a network namespace in which nothing else runs."""
    with own_network() as path:
        yield path


def network_bytes(daemon: DaemonProcess) -> int:
    """Returns the bytes that the loopback of the daemon's network has carried."""
    (line,) = [line for line in Path(f"/proc/{daemon.process.pid}/net/dev").read_text().splitlines() if "lo:" in line]
    return int(line.split()[9])


def turns_of(daemons: Sequence[DaemonProcess]) -> int:
    """Returns how many turns the nodes have ended."""
    counts = {daemon.log.read_text().count("is sealed here") for daemon in daemons}
    assert len(counts) == 1, counts
    return counts.pop()


def movers(daemon: DaemonProcess) -> list[psutil.Process]:
    return children_with(daemon.process.pid, "reft_daemon.mover")


def test_a_turn_sends_the_bytes_of_the_formula(network):
    daemons = [DaemonProcess("--listen", "127.0.0.1:0", network=network) for _ in range(D)]
    try:
        options = {"own": True, "apart": True, "width": WIDTH, "network": network, "pause_at": [FROM, UPTO],
                   "seal_at": list(range(1, UPTO + 1))}  # fmt: skip
        trainers = Trainers(Spec("", steps=UPTO + 1, options=options), D, [daemon.address for daemon in daemons])
        counts = []
        for step in (FROM, UPTO):
            trainers.wait_for(step)
            for daemon in daemons:
                until(lambda daemon=daemon, step=step: daemon.status("job").exchange.protected == step, what=f"{step}")
            sent = [sent_by(daemon) for daemon in daemons]
            own = sum(each.capsules + each.round + each.beats + BEAT_FRAMES * each.beat_count for each in sent)
            counts.append((network_bytes(daemons[0]), own, sum(each.beat_count for each in sent), turns_of(daemons)))
            trainers.let_go(step)
        assert trainers.wait() == [0] * D, trainers.errors()[-3000:]
        assert all(len(movers(daemon)) == 1 for daemon in daemons)
    finally:
        for daemon in daemons:
            daemon.close()
    (before, own_before, _, turns_before), (after, own_after, _, turns_after) = counts
    turns, steps = turns_after - turns_before, UPTO - FROM
    assert turns >= 2
    owed = turns * D * SECTION
    own = own_after - own_before + steps * STEP_BYTES + turns * D * (D - 1) * PULL_BYTES
    assert owed <= after - before <= (owed + own) * (1 + PACKETS)


ZERO_SECTION = 2 * 2 * 4 * WIDTH_OF_ZERO**2  # two moments of two layers


@pytest.mark.parametrize(("protect", "turn_bytes"), [("auto", 0), ("aec", ZERO_SECTION)], ids=["copies", "parity"])
def test_a_step_of_torchs_zero_sends_capsules_where_copies_are_recomputed(protect, turn_bytes, network, tmp_path):
    """The same job with parity sends a section of each rank in each turn beside."""
    nodes = [DaemonProcess("--listen", "127.0.0.1:0", "--node", f"n{i}", network=network) for i in range(WORLD)]
    try:
        ranks = start(nodes, tmp_path / "run", ["adamw"], "job", FROM, protect, UPTO)
        paused = [tmp_path / "run" / f"{rank}.paused" for rank in range(WORLD)]
        until(lambda: all(path.exists() for path in paused), DEADLINE_S, f"step {FROM} is protected")
        before = network_bytes(nodes[0]), owned_bytes(nodes)
        (tmp_path / "run" / "go").touch()
        turns = [result["adamw"]["turns"] for result in finish(ranks, tmp_path / "run")]
        after = network_bytes(nodes[0]), owned_bytes(nodes)
    finally:
        for node in nodes:
            node.close()
    steps, links = UPTO - FROM, WORLD * (WORLD - 1)
    assert [each[FROM:] for each in turns] == [["" if protect == "auto" else "the lanes have parity."] * steps] * WORLD
    owed, sent = steps * WORLD * turn_bytes, after[0] - before[0]
    own = after[1] - before[1] + steps * 3200 * links + (steps * links * PULL_BYTES if turn_bytes else 0)
    assert owed <= sent <= (owed + own) * (1 + PACKETS) + WAIT_BYTES, (owed, sent, own)
    assert own + WAIT_BYTES < ZERO_SECTION, "the limit is too wide to notice one section"


def owned_bytes(nodes: Sequence[DaemonProcess]) -> int:
    """Returns the bytes of capsules, rounds and heartbeats that nodes have sent."""
    sent = [sent_by(node) for node in nodes]
    return sum(each.capsules + each.round + each.beats + BEAT_FRAMES * each.beat_count for each in sent)


def assert_nothing_exchanged(nodes: Sequence[DaemonProcess]) -> int:
    """Fails if a node has a mover, parity or a fourth slot, or sends bytes of the state.

    Returns the bytes that a node may send uncounted.
    """
    most = 0
    for node in nodes:
        status = node.status("job")
        assert not status.HasField("exchange") and {rank.slots for rank in status.ranks} == {3}
        assert movers(node) == [] and list((node.folder / "job").glob("parity-*")) == []
        if shutil.which("ss"):
            sent = sent_by(node)
            frames = ATTACH_BYTES + BEAT_FRAMES * sent.beat_count + 3200 * status.ranks[0].step * len(nodes)
            counted = sent.capsules + sent.round + sent.beats
            assert counted <= sum(sent.sockets.values()) <= counted + frames
            most = max(most, frames)
    return most


def test_ddp_exchanges_nothing(site):
    nodes = site.add(3)
    trainers = Trainers(Spec("", options={"pause_at": [10], "seal_at": [10], "width": WIDTH}), 3,
                        [node.address for node in nodes])  # fmt: skip
    trainers.wait_for(10)
    assert assert_nothing_exchanged(nodes) < SECTION, "the limit is too wide to notice one exchanged section"
    trainers.kill()


@pytest.mark.slow
def test_hsdp_exchanges_nothing(site, tmp_path):
    nodes = site.add(2)
    run = Run(Example("hsdp", 2, 2, False), tmp_path / "hsdp", nodes)
    ranks = run.start("snapshot.chunk:stop:rank=1:from=12", 11)
    victim = psutil.Process(ranks.processes[1].pid)
    until(lambda: victim.status() == psutil.STATUS_STOPPED, DEADLINE_S, "a stop in the copy of step 12")
    assert nodes[0].status("job").whole >= 11
    assert_nothing_exchanged(nodes)
    ranks.kill()
