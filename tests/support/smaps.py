"""Reads /proc/self/smaps for one mapping of this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from reft.wire.shm import huge_bytes

_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")


def bytes_of(address: int, field: str) -> int:
    """Returns a field, such as "Rss" or "ShmemPmdMapped", of the mapping that holds `address`.

    Raises:
        KeyError: there is no such mapping, or no such field.
    """
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(each, 16) for each in head.split("-"))
            is_inside = begin <= address < end
        elif is_inside and head == f"{field}:":
            return int(line.split()[1]) << 10
    raise KeyError(f"no mapping at {address:#x} with {field}")


def need_huge_pages() -> None:
    """Skips a test if the kernel makes no huge pages in shared memory: before 6.1, or forbidden."""
    major, minor = (int(part) for part in Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2])
    setting = _SYSTEM / "shmem_enabled"
    if (major, minor) < (6, 1) or not setting.exists() or "[deny]" in setting.read_text() or huge_bytes() > 4 << 20:
        pytest.skip("no huge pages of shared memory on this kernel")
