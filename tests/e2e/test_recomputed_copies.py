"""protect="aor": copies of torch's ZeRO are recomputed from gradients, and proved."""

from __future__ import annotations

import json
import multiprocessing.process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reft.cli.demo.cluster import free_port
from reft.core.coding.copy_choice import COPIES
from reft.core.commit.gradient_records import record_slots
from reft.core.commit.replay_trials import JUDGED_TURNS
from tests.support import trainers
from tests.support.daemons import DaemonProcess, Site, until, vanish
from tests.support.processes import children_with
from tests.support.recomputed_copies import CASES, DEADLINE_S, DRIFTING, MARKS, work

WORLD = 2
pytestmark = pytest.mark.timeout(600)  # a start of all ranks may take a minute where the cores are shared


def start(nodes: Sequence[DaemonProcess], out: Path, *settings: Any) -> list[multiprocessing.process.BaseProcess]:
    """Starts a rank on each node."""
    port, processes = free_port(), []
    out.mkdir()
    for rank, node in enumerate(nodes):
        arguments = (rank, len(nodes), port, node.address, str(out), *settings)
        processes.append(trainers.FORKS.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
    return processes


def finish(processes: Sequence[multiprocessing.process.BaseProcess], out: Path) -> list[dict[str, Any]]:
    """Returns what each rank has written."""
    for process in processes:
        process.join(DEADLINE_S)
        process.kill()
    missing = [rank for rank in range(len(processes)) if not (out / f"{rank}.json").exists()]
    assert not missing, "\n".join((out / f"{rank}.log").read_text() for rank in missing)
    results = [json.loads((out / f"{rank}.json").read_text()) for rank in range(len(processes))]
    assert not [result["error"] for result in results if "error" in result], results
    return results


def test_copies_of_torchs_zero_are_recomputed_and_proved(site: Site, tmp_path):
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    results = finish(start(nodes, tmp_path / "run"), tmp_path / "run")
    for name in CASES:
        for rank, node in enumerate(nodes):
            first, *others = results[rank][name]["turns"]
            assert first and others == [""] * (MARKS - 1), (name, results)
            (replay,) = node.status(name).exchange.replays
            assert (replay.reason, replay.verified, replay.lag, replay.marks) == ("", MARKS, 0, 1)
            assert replay.cpu_s > 0


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.slow] * (each != "adamw")) for each in CASES])
def test_a_lost_node_comes_back_from_recomputed_copies(case, site: Site, tmp_path):
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    plain = finish(start(nodes, tmp_path / "plain", [case], "plain"), tmp_path / "plain")
    ranks = start(nodes, tmp_path / "lost", [case], "job", 4)
    paused = [tmp_path / "lost" / f"{rank}.paused" for rank in range(WORLD)]
    until(lambda: all(path.exists() for path in paused), 200, "step 4 is protected")
    assert [path.read_text() for path in paused] == [""] * WORLD, "the copies of step 4 were recomputed"
    for process in ranks:
        process.kill()
        process.join()
    vanish(nodes[1])
    nodes[1] = site.add(1, "--node", "node-2")[0]
    results = finish(start(nodes, tmp_path / "again", [case], "job"), tmp_path / "again")
    for rank in range(WORLD):
        assert results[rank][case]["restored"] == "peers" and len(results[rank][case]["turns"]) == MARKS - 4
        assert results[rank][case]["state"] == plain[rank][case]["state"]


def test_a_killed_replayer_and_a_restarted_daemon_cost_bytes_at_most(site: Site, tmp_path):
    """Between two turns of a job: later steps are recomputed again, with the owners' digests."""
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    plain = finish(start(nodes, tmp_path / "plain", ["adam-l2"], "plain"), tmp_path / "plain")
    ranks = start(nodes, tmp_path / "run", ["adam-l2"], "job", 3)
    paused = [tmp_path / "run" / f"{rank}.paused" for rank in range(WORLD)]
    until(lambda: all(path.exists() for path in paused), 200, "step 3 is protected")
    (replayer,) = children_with(nodes[0].process.pid, "reft_replayer")
    replayer.kill()
    nodes[1].kill()
    nodes[1].start()
    (tmp_path / "run" / "go").touch()
    results = finish(ranks, tmp_path / "run")
    for rank, node in enumerate(nodes):
        turns = results[rank]["adam-l2"]["turns"]
        assert turns[-1] == "" and results[rank]["adam-l2"]["state"] == plain[rank]["adam-l2"]["state"], turns
        (replay,) = node.status("job").exchange.replays
        assert (replay.reason, replay.verified) == ("", MARKS)


def test_auto_recomputes_copies_and_judges_them(site: Site, tmp_path):
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    marks = JUDGED_TURNS + 2
    results = finish(start(nodes, tmp_path / "run", ["adamw"], "job", 0, "auto", marks), tmp_path / "run")
    for rank, node in enumerate(nodes):
        first, *others = results[rank]["adamw"]["turns"]
        assert first and others == [""] * (marks - 1), results
        exchange = node.status("job").exchange
        assert exchange.choice == COPIES
        assert exchange.replays[0].verdict.startswith(
            f"recomputed: {JUDGED_TURNS} of {JUDGED_TURNS} turns were verified"
        )


@pytest.mark.slow
def test_auto_keeps_parity_where_copies_and_records_do_not_fit(site: Site, tmp_path):
    """A node with a byte less than copies would take, beside one with all memory."""
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    finish(start(nodes, tmp_path / "copies", ["adamw"], "job", 0, "auto", 2), tmp_path / "copies")
    names = [f"{kind}-0.slot-{i}" for kind in ("rank", "parity", "record") for i in range(record_slots(1))]
    files = [nodes[0].folder / "job" / name for name in names]
    need = sum(path.stat().st_size for path in files if path.exists())
    cramped = [site.add(1, "--node", "cramped", "--memory", str(need - 1))[0], nodes[1]]
    results = finish(start(cramped, tmp_path / "parity", ["adamw"], "other", 0, "auto", 2), tmp_path / "parity")
    exchange = cramped[0].status("other").exchange
    assert exchange.choice.startswith("parity: slots, copies and gradient records need "), exchange.choice
    assert "on node cramped" in exchange.choice and exchange.protected == 2 and not exchange.replays
    assert [result["adamw"]["records"] for result in results] == [0] * WORLD


def test_auto_gives_up_copies_that_differ_and_remembers(site: Site, tmp_path):
    """The owners' moments are not those of their gradients: no copy is ever recomputed.

    The job goes on with copies that are sent, and records nothing more. Later it begins with
    parity, though all daemons were restarted meanwhile.
    """
    nodes = [site.add(1, "--node", f"node-{i}")[0] for i in range(WORLD)]
    end, reason = MARKS + 3, "recomputing failed again and again"
    plain = finish(start(nodes, tmp_path / "plain", [DRIFTING], "plain", 0, "aec", end), tmp_path / "plain")
    first = finish(start(nodes, tmp_path / "first", [DRIFTING], "job", 0, "auto"), tmp_path / "first")
    for rank, node in enumerate(nodes):
        assert all(first[rank][DRIFTING]["turns"]) and first[rank][DRIFTING]["records"] < MARKS, first
        exchange = node.status("job").exchange
        assert exchange.choice == COPIES and exchange.protected == MARKS
        assert exchange.replays[0].verdict.startswith(f"given up: {reason}")
        node.kill()
        node.start()
    again = finish(start(nodes, tmp_path / "again", [DRIFTING], "job", 0, "auto", end), tmp_path / "again")
    for rank, node in enumerate(nodes):
        exchange = node.status("job").exchange
        assert exchange.choice.startswith(f"parity: copies of this job were given up: {reason}")
        assert exchange.protected == end and not exchange.replays
        assert again[rank][DRIFTING]["state"] == plain[rank][DRIFTING]["state"]
        assert again[rank][DRIFTING]["restored"] and again[rank][DRIFTING]["records"] == 0


# The slots and the copies of a rank need 14.9 MiB, the record slots some more.
SHORT = "15.5MiB"


@pytest.mark.slow
def test_record_slots_without_room_are_refused_by_name(site: Site, tmp_path):
    nodes = [site.add(1, "--node", f"node-{i}", "--memory", SHORT)[0] for i in range(WORLD)]
    ranks = start(nodes, tmp_path / "run", ["adamw"], "job")
    for process in ranks:
        process.join(200)
        process.kill()
    for rank in range(WORLD):
        error = json.loads((tmp_path / "run" / f"{rank}.json").read_text())["error"]
        assert "NoRoom: the slots for gradient records need" in error and "a larger --memory" in error, error


@pytest.mark.slow
def test_auto_takes_parity_where_record_slots_have_no_room(site: Site, tmp_path):
    nodes = [site.add(1, "--node", f"node-{i}", "--memory", SHORT)[0] for i in range(WORLD)]
    results = finish(start(nodes, tmp_path / "run", ["adamw"], "job", 0, "auto", 2), tmp_path / "run")
    for rank, node in enumerate(nodes):
        assert [*results[rank]["adamw"]["turns"]] == ["the lanes have parity."] * 2
        assert f"which has {SHORT[:4]} MiB for them" in node.status("job").exchange.choice
