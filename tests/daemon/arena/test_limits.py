"""Tests the limits on the arena: machine, --memory, and cgroups of both versions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from reft.core.budget import refusal
from reft.errors import NoRoom
from reft_daemon.arena import limits
from reft_daemon.arena.arena import Arena

GIB = 1 << 30


def free_of(tmp_path: Path, line: str, groups: dict[str, dict[str, str]]) -> dict[str, int]:
    """Returns folder → free bytes, for each limit that a cgroup sets, if nothing is kept free."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(line)
    for folder, files in groups.items():
        (cgroups / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (cgroups / folder / name).write_text(text)
    found = limits.limits(0, 0, proc, cgroups, margin=0.0)
    prefix = f"the memory limit of the cgroup {cgroups}"
    return {
        limit.name.removeprefix(prefix): limit.free_bytes
        for limit in found
        if limit.name.startswith("the memory limit")
    }


def test_the_machines_free_memory_is_a_limit_with_a_margin(tmp_path):
    (machine,) = limits.limits(0, 0, tmp_path, tmp_path)
    facts = psutil.virtual_memory()
    assert machine.free_bytes < facts.available
    assert machine.free_bytes == pytest.approx(facts.available - limits.MARGIN * facts.total, abs=2 * GIB)


def test_a_capsule_may_use_the_margin_and_slots_may_not(tmp_path, monkeypatch):
    """Otherwise no step becomes whole once training leaves less than the margin free."""
    short = SimpleNamespace(total=1000 * GIB, available=40 * GIB)
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: short)
    arena = Arena(tmp_path / "arena", 0)
    with pytest.raises(NoRoom, match=r"the slots need 1\.0 KiB, but the machine's free memory leaves 0 B"):
        arena.check_room(1024, slots=1)
    arena.check_room(1024)
    short.available = 1000
    with pytest.raises(NoRoom, match=r"the capsule needs 1\.0 KiB"):
        arena.check_room(1024)
    arena.close()


def test_memory_flag_limits_what_is_not_yet_held(tmp_path):
    flag = limits.limits(5 * GIB, 2 * GIB, tmp_path, tmp_path)[1]
    assert (flag.name, flag.free_bytes) == ("--memory", 3 * GIB)


def test_version_2_counts_every_ancestor_and_gives_page_cache_back(tmp_path):
    groups = {
        "": {},
        "pod": {"memory.max": str(8 * GIB), "memory.current": str(3 * GIB)},
        "pod/box": {
            "memory.max": str(4 * GIB), "memory.current": str(3 * GIB),
            "memory.stat": f"anon {GIB}\nfile {2 * GIB}\nshmem {GIB}\n",
        },
        "pod/box/leaf": {"memory.max": "max", "memory.current": "7"},
    }  # fmt: skip
    found = free_of(tmp_path, "0::/pod/box/leaf\n", groups)
    assert found == {"/pod": 5 * GIB, "/pod/box": 2 * GIB}  # a tmpfs file can't be given back


def test_version_1(tmp_path):
    groups = {
        "memory": {"memory.limit_in_bytes": str((1 << 63) - 4096), "memory.usage_in_bytes": "5"},
        "memory/box": {
            "memory.limit_in_bytes": str(GIB), "memory.usage_in_bytes": str(GIB // 2),
            "memory.stat": f"total_cache {GIB // 4}\ntotal_shmem 0\n",
        },
    }  # fmt: skip
    assert free_of(tmp_path, "5:cpu:/x\n4:memory:/box\n", groups) == {"/memory/box": GIB // 2 + GIB // 4}


def test_a_container_that_sees_itself_as_the_root(tmp_path):
    groups = {"": {"memory.max": str(GIB), "memory.current": "0"}}
    assert free_of(tmp_path, "0::/host/path/that/is/not/mounted\n", groups) == {"": GIB}


def test_slots_leave_memory_for_the_daemons_child_processes(tmp_path):
    """Else the kernel kills each persister, and no checkpoint is ever complete."""
    groups = {"": {"memory.max": str(170 << 20), "memory.current": str(20 << 20)}}
    assert free_of(tmp_path, "0::/\n", groups) == {"": 150 << 20}, "for capsules"
    (bound,) = limits.limits(0, 0, tmp_path / "proc", tmp_path / "cgroup")[1:]
    assert bound.free_bytes == (150 << 20) - limits.CHILDREN_BYTES
    text = refusal(142 << 20, [bound])
    assert "need 142.0 MiB" in text and "less 96.0 MiB for the daemon's child processes, leaves 54.0 MiB" in text


def test_no_cgroup_gives_no_limit(tmp_path):
    assert free_of(tmp_path, "0::/\n", {"": {}}) == {}


def test_is_tmpfs():
    assert limits.is_tmpfs(Path("/dev/shm")) and limits.is_tmpfs(Path("/dev/shm/not/there"))
    assert not limits.is_tmpfs(Path("/proc"))
    assert limits.file_system_free(Path("/dev/shm")) > 0
