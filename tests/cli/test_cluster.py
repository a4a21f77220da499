"""Training on the pretend nodes survives a stopped daemon and a killed rank."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from reft.cli.demo import cluster as demo
from reft.cli.demo.cluster import Cluster, DemoError
from reft.cli.demo.records import TrainedStep
from tests.support.daemons import until
from tests.support.demo import forking


@pytest.fixture
def forked(monkeypatch):
    """Lets agents fork their workers, so that torch is imported once."""
    monkeypatch.setattr(demo, "spawn", forking(demo.spawn))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_training_continues_after_a_stopped_daemon_and_a_killed_rank():
    with Cluster(nodes=2, ranks_per_node=1) as cluster:
        training = cluster.launch("job", 400, arguments=["--batch", "2"])

        def await_progress() -> None:
            before = training.result().completed
            until(lambda: training.result().completed >= before + 3, 60, "progress of the training")

        await_progress()
        stopped = cluster.nodes[0].daemon
        stopped.send_signal(signal.SIGSTOP)
        await_progress()
        assert list(cluster.pids("job")) == [1]
        stopped.send_signal(signal.SIGCONT)
        until(lambda: len(cluster.pids("job")) == 2)
        assert list(cluster.signal_ranks("job", [1], signal.SIGKILL)) == [1]
        assert training.wait(100) == [0, 0]
        result = training.result()
        assert [[a.restored_from for a in result.attempts[rank]] for rank in (0, 1)] == [[None, "memory"]] * 2
        assert isinstance(result.attempts[0][0].steps[-1], TrainedStep) and result.completed == 400
        with pytest.raises(DemoError, match=r"ranks \[0\] of job job have no trainer now"):
            cluster.signal_ranks("job", [0], signal.SIGKILL)
        folders = [cluster.folder, cluster.slots]
        assert all(folder.exists() for folder in folders)
    assert not any(folder.exists() for folder in folders)


def test_a_daemon_that_does_not_start_is_named_in_the_error(tmp_path: Path):
    cluster = Cluster(nodes=1, keep=tmp_path, daemon_environment={"REFT_MEMORY": "nonsense"})
    with pytest.raises(DemoError, match="daemon of node-a did not start"), cluster:
        raise AssertionError("it started")
    assert not cluster.folder.exists() and (tmp_path / "node-a.daemon.log").exists()
