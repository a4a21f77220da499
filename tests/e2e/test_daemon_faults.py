"""Daemons die, stop or lose messages, and snapshots of a rank fail.

Training never waits, and the last whole version stays.
"""

from __future__ import annotations

import signal

import pytest

from tests.support.daemons import DaemonProcess, until
from tests.support.equality import assert_equal
from tests.support.trainers import Spec, Trainers, run

STEPS = 80
# A step that waits for a call would last until this deadline.
LONG_DEADLINE = {"REFT_RPC_DEADLINE_S": "60"}
# A step takes a millisecond. Even on busy cores no step takes this long without such a call.
WAIT_S = 20.0


@pytest.fixture(scope="module")
def undisturbed():
    process = DaemonProcess()
    yield {world: run(Spec(process.address, job=f"plain-{world}", steps=STEPS), world) for world in (1, 2)}
    process.close()


@pytest.fixture
def pair():
    """Yields two daemons: two nodes."""
    processes = [DaemonProcess("--listen", "127.0.0.1:0") for _ in range(2)]
    yield processes
    for process in processes:
        process.close()


def test_training_goes_on_without_a_daemon_and_the_next_daemon_takes_over_the_slots(daemon, undisturbed):
    # Steps take 2 ms. A busy daemon's first round, or a new connection, takes longer, so seal
    # waits.
    options = {"pause_at": [5, 30, 60], "seal_at": [5, 45, 58]}
    trainers = Trainers(Spec(daemon.address, steps=STEPS, options=options))
    trainers.wait_for(5)
    daemon.kill()
    trainers.let_go(5)
    trainers.wait_for(30)  # 25 steps without a daemon
    daemon.start()
    sealed_step = daemon.status("job").ranks[0].sealed.step
    assert 5 <= sealed_step < 30
    trainers.let_go(30)
    trainers.wait_for(60)
    until(lambda: daemon.status("job").whole >= 55, what="snapshots under the restarted daemon")
    trainers.kill()
    after = run(Spec(daemon.address, steps=STEPS))
    assert after[0]["from"] == "memory" and after[0]["began"] >= 55
    assert_equal(after, undisturbed[1])


def test_a_daemon_and_its_trainer_killed_together(daemon, undisturbed):
    options = {"pause_at": [20], "seal_at": [19]}  # step 19 is decided, so step 20 gets a slot
    trainers = Trainers(Spec(daemon.address, steps=STEPS, options=options))
    trainers.wait_for(20)
    daemon.kill()
    trainers.kill()
    daemon.start()
    after = run(Spec(daemon.address, steps=STEPS))
    assert after[0]["began"] in (19, 20)
    assert_equal(after, undisturbed[1])


def test_a_job_finds_its_daemon_again_after_the_sockets_were_removed(daemon, undisturbed):
    """A script that clears /tmp after a job removes the sockets.

    The next attach must not begin afresh, and no lock may shut it out.
    """
    trainers = Trainers(Spec(daemon.address, steps=STEPS, options={"pause_at": [20, 40], "seal_at": [38]}))
    trainers.wait_for(20)
    for path in daemon.home.glob("d.sock*"):
        path.unlink()
    trainers.let_go(20)
    trainers.wait_for(40)
    trainers.kill()
    until(daemon.socket.exists, what="a new socket")
    after = run(Spec(daemon.address, steps=STEPS))
    assert after[0]["from"] == "memory" and after[0]["began"] >= 38
    assert_equal(after, undisturbed[1])


def test_no_step_waits_for_a_stopped_daemon(daemon, undisturbed):
    trainers = Trainers(Spec(daemon.address, steps=STEPS, options={"pause_at": [5, 60]}, environment=LONG_DEADLINE))
    trainers.wait_for(5)
    daemon.kill(signal.SIGSTOP)
    trainers.let_go(5)
    trainers.wait_for(60)
    daemon.kill(signal.SIGCONT)
    trainers.let_go(60)
    assert trainers.wait() == [0], trainers.errors()
    result = trainers.results()
    assert result[0]["longest_step_s"] < WAIT_S
    assert_equal(result, undisturbed[1])


def test_attaching_to_a_stopped_daemon_ends_at_the_deadline(daemon):
    run(Spec(daemon.address, steps=3))
    daemon.kill(signal.SIGSTOP)
    trainers = Trainers(Spec(daemon.address, steps=3, environment={"REFT_ATTACH_DEADLINE_S": "3"}))
    assert trainers.wait() == [1]
    assert "DaemonUnavailable" in trainers.errors()


def test_the_last_whole_step_stays_while_snapshots_of_one_rank_fail(daemon, undisturbed):
    failing = "snapshot.begin:raise:rank=1:from=10:until=60:epoch=1"
    options = {"pause_at": [40], "seal_at": [6, 7, 8, 9]}  # sealed, so that no step is skipped
    trainers = Trainers(Spec(daemon.address, steps=STEPS, failpoints=failing, options=options), world=2)
    trainers.wait_for(40)
    assert daemon.status("job").whole == 9
    trainers.kill()
    after = run(Spec(daemon.address, steps=STEPS), world=2)
    assert [result["began"] for result in after] == [9, 9]
    assert_equal(after, undisturbed[2])


def test_training_never_waits_for_a_rank_whose_snapshots_fail(daemon, undisturbed):
    failing = "snapshot.begin:raise:rank=1:from=10:until=60:epoch=1"
    after = run(Spec(daemon.address, steps=STEPS, failpoints=failing, environment=LONG_DEADLINE), world=2)
    assert after[1]["stats"]["skipped"] >= 51
    assert max(result["longest_step_s"] for result in after) < WAIT_S
    assert_equal(after, undisturbed[2])


def test_slots_stay_while_messages_of_the_round_are_lost(pair, undisturbed):
    """The second node's answers never arrive.

    No step is known to be whole, so no slot is overwritten.
    """
    pair[1].kill()
    pair[1].environment = {"REFT_FAILPOINTS": "round.send:drop"}
    pair[1].start()
    addresses = [process.address for process in pair]
    # Each snapshot has ended before the next step, so no rank leaves out a step of the first three.
    trainers = Trainers(Spec("", steps=STEPS, options={"pause_at": [40], "step_s": 0.05}), 2, addresses)
    trainers.wait_for(40)
    assert pair[0].status("job").whole == -1
    trainers.kill()
    after = run(Spec("", steps=STEPS, options={"seal_s": 0.1}, environment=LONG_DEADLINE), 2, addresses)
    assert [result["began"] for result in after] == [3, 3]  # three slots, three steps
    assert [result["sealed"] for result in after] == [[False, 3], [False, 3]]
    for result, reference in zip(after, undisturbed[2], strict=True):
        assert result["digests"] == reference["digests"]
        assert result["longest_step_s"] < WAIT_S


@pytest.mark.slow
def test_steps_become_whole_again_after_a_daemon_was_stopped_many_times(pair):
    """A daemon that runs briefly hears only some messages, and late.

    It runs for a few milliseconds at a time. So ranks fill different slots meanwhile.
    """
    trainers = Trainers(Spec("", steps=1800, options={"pause_at": [2]}), 2, [process.address for process in pair])
    trainers.wait_for(2)
    trainers.let_go(2)

    def step() -> int:
        return pair[0].status("job").ranks[0].step

    for _ in range(20):
        pair[1].kill(signal.SIGSTOP)
        first_step = step()
        # Training may end while this test waits.
        until(
            lambda first_step=first_step: step() >= min(first_step + 60, 1800), what="steps beside the stopped daemon"
        )
        pair[1].kill(signal.SIGCONT)
        step()  # the daemon runs for the time of this call
    assert trainers.wait(120) == [0, 0], trainers.errors()
    assert [result["sealed"] for result in trainers.results()] == [[True, 1800]] * 2


def check_two_nodes(pair, undisturbed, **trainer_options):
    """Fails unless two nodes agree, lose all their trainers, and restore.

    Args:
        pair: the daemons of the two nodes.
        undisturbed: results of undisturbed runs, by number of ranks.
        trainer_options: more options of all trainers.
    """
    addresses = [process.address for process in pair]
    options = {"pause_at": [40], "seal_at": [37, 38, 39, 40], **trainer_options}  # sealed, so that no step is skipped
    trainers = Trainers(Spec("", steps=STEPS, options=options), 2, addresses)
    trainers.wait_for(40)
    for process in pair:
        until(lambda process=process: process.status("job").whole == 40, what="the outcome on both nodes")
    trainers.kill()
    after = run(Spec("", steps=STEPS, options=trainer_options), 2, addresses)
    assert [(r["from"], r["began"]) for r in after] == [("memory", 40)] * 2
    assert_equal(after, undisturbed[2])


def test_two_nodes_agree_and_restore(pair, undisturbed):
    check_two_nodes(pair, undisturbed)


def test_ranks_that_change_nodes_find_their_state(pair, undisturbed):
    addresses = [process.address for process in pair]
    trainers = Trainers(Spec("", steps=STEPS, options={"pause_at": [40]}), 2, addresses)
    trainers.wait_for(40)
    trainers.kill()
    after = run(Spec("", steps=STEPS), 2, addresses[::-1])
    assert [result["from"] for result in after] == ["peers", "peers"]
    assert_equal(after, undisturbed[2])
