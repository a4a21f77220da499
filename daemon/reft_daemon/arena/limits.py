"""Computes how much memory an arena may take: limits of machine, container, and --memory."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from reft.core.budget import MemoryLimit, format_bytes

# share of the machine's memory that stays free: the kernel kills processes before all memory is
# used
MARGIN = 0.05
# Stays free in a cgroup, for mover and persister. A persister takes some 60 MiB while it writes. It
# begins after the slots are made, and the kernel would kill that process at the cgroup's limit.
CHILDREN_BYTES = 96 << 20
_UNLIMITED = 1 << 60


def limits(
    budget_bytes: int,
    held_bytes: int,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    spare_bytes: int = 0,
    margin: float = MARGIN,
) -> list[MemoryLimit]:
    """Returns all limits on the memory that may be reserved now.

    Args:
        budget_bytes: --memory; 0 means no limit of our own.
        held_bytes: bytes that the arena holds already.
        proc: the proc file system.
        cgroups: where the cgroup file system is mounted.
        spare_bytes: bytes of spare files that the new reservation would use; the machine has given
            them already.
        margin: share of the machine's memory that stays free; 0: cgroups keep nothing free either.
    """
    memory = psutil.virtual_memory()
    bounds = [
        MemoryLimit(
            "the machine's free memory",
            memory.available - int(margin * memory.total) + spare_bytes,
            "free memory on this node, or attach with fewer slots",
        )
    ]
    if budget_bytes:
        bounds.append(
            MemoryLimit(
                "--memory",
                budget_bytes - held_bytes,
                "start reft-daemon with a larger --memory, or attach with fewer slots",
            )
        )
    kept_bytes = CHILDREN_BYTES if margin else 0
    kept_words = f", less {format_bytes(kept_bytes)} for the daemon's child processes," if kept_bytes else ""
    for group in _groups(proc, cgroups):
        free = _group_free(group)
        if free is not None:
            bounds.append(
                MemoryLimit(
                    f"the memory limit of the cgroup {group}{kept_words}",
                    free - kept_bytes + spare_bytes,
                    "raise the container's memory limit, or attach with fewer slots",
                )
            )
    return bounds


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Returns the folders of this process's memory cgroup and of its ancestors.

    Cgroups may have version 1 or 2.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = cgroups / "memory" if controllers else cgroups
            leaf = root / path.lstrip("/")
            folders = [folder for folder in (leaf, *leaf.parents) if root in (folder, *folder.parents)]
            if any(_group_free(folder) is not None for folder in folders):
                return folders
    return []


def _group_free(group: Path) -> int | None:
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = (group / limit_name).read_text().strip()
            usage = int((group / usage_name).read_text())
        except OSError:
            continue
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        return int(limit) - (usage - _reclaimable(group))
    return None


def _reclaimable(group: Path) -> int:
    """Returns the bytes of page cache that the kernel gives back under pressure.

    The cgroup counts page cache of files as used. Pages of a tmpfs can't be given back.
    """
    try:
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    cache = int(rows.get("file", rows.get("total_cache", 0)))
    return max(cache - int(rows.get("shmem", rows.get("total_shmem", 0))), 0)


def file_system_free(folder: Path | int) -> int:
    """Returns the free bytes of the file system of `folder`, or of an open file."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def is_tmpfs(folder: Path) -> bool:
    """Whether `folder` lies on a tmpfs, by the longest mount point above it."""
    resolved = folder.resolve()
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, name, *_ = line.split(" ")
        if len(point) >= len(best) and Path(point) in (resolved, *resolved.parents):
            best, kind = point, name
    return kind in ("tmpfs", "ramfs", "hugetlbfs")
