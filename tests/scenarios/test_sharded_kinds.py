"""Sharded state of every family comes back in bits, into tensors of the same kind: four processes, one round trip each."""

from __future__ import annotations

import json

import pytest

from reft.cli.demo.cluster import free_port
from tests.support import trainers
from tests.support.sharded import BUILDERS, work

WORLD = 4


@pytest.fixture(scope="module")
def round_trips(shared_daemon, tmp_path_factory):
    """Every rank's findings, by family; all families in one start of the processes."""
    folder = tmp_path_factory.mktemp("sharded")
    port = free_port()
    processes = []
    for rank in range(WORLD):
        arguments = (rank, WORLD, port, shared_daemon.address, list(BUILDERS), str(folder))
        process = trainers.FORKS.Process(target=work, args=arguments, daemon=True)
        process.start()
        processes.append(process)
    for process in processes:
        process.join(100)
        process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("family", BUILDERS)
def test_a_round_trip_is_exact(round_trips, family):
    errors = [found["error"] for found in round_trips if "error" in found]
    assert not errors, errors[0]
    for found in (each[family] for each in round_trips):
        assert found["sealed"] and found["restored"] == [3, "memory"] and found["skipped"] == 0
        assert found["found"] == found["expected"]
        assert found["losses"][0] == found["losses"][1]
        assert found["after"][0] == found["after"][1]
