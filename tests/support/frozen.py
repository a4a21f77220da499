"""A small ext4 file system in a file. Root may freeze it: then writes wait in the kernel."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZE_BYTES = 256 << 20
TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")


@contextlib.contextmanager
def loop_disk() -> Iterator[Path]:
    """Yields the folder where the file system is mounted; thaws and unmounts it at the end."""
    if os.getuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"freezing a file system needs root, and {', '.join(TOOLS)}")
    home = Path(tempfile.mkdtemp(prefix="reft-test-"))
    folder, image = home / "disk", home / "image"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(SIZE_BYTES)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False).returncode:
            pytest.skip("this kernel mounts no file here")
        try:
            yield folder
        finally:
            thaw(folder)
            subprocess.run(["umount", "-l", str(folder)], check=True)
    finally:
        shutil.rmtree(home)


def freeze(folder: Path) -> None:
    """Makes all writes to a mounted file system wait."""
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True, timeout=60)


def thaw(folder: Path) -> None:
    """Lets the writes go on; a file system that is not frozen stays as it is."""
    subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=False, capture_output=True, timeout=60)
