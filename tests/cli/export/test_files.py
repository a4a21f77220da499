"""The folder of an export has its name only when all is there, and no half of it is ever left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reft.cli.export import files
from reft.cli.export.files import named_at_the_end, reserve, safetensors_files
from reft.core.layout.layout import Leaf, strides_of
from reft.core.recovery.export_match import ExportTensor
from reft.errors import AttachError, ConfigError, UnsupportedState
from tests.support.commands import ROOT

PROGRAM = """
import sys, time
from pathlib import Path
from reft.cli.export.files import named_at_the_end
from reft.cli.signals import unwinding
with unwinding(), named_at_the_end(Path(sys.argv[1])) as folder:
    (folder / "model.safetensors").write_bytes(b"half")
    print("begun", flush=True)
    sys.stdin.read()
"""


def tensor(name: str, shape: tuple[int, ...] = (2,), dtype: str = "float32") -> ExportTensor:
    nbytes = 4
    for size in shape:
        nbytes *= size
    leaf = Leaf(f"model.0.{name}", dtype, shape, strides_of(shape), nbytes, False, shape, (0,) * len(shape))
    return ExportTensor(name, leaf, shape, dtype, True)


def test_folder_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with named_at_the_end(path) as folder:
        (folder / "a").write_text("a")
        assert not path.exists() and folder.parent == tmp_path and folder.name.startswith(".out.")
    assert os.listdir(path) == ["a"] and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), named_at_the_end(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
        raise error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "left"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGKILL, 1)]
)
def test_signal_leaves_nothing_under_the_name(tmp_path: Path, number: signal.Signals, left: int) -> None:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "daemon")))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "out")]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        process.send_signal(number)
        assert process.wait(60) != 0
    names = os.listdir(tmp_path)
    assert len(names) == left and all(name.startswith(".out.") for name in names)


def test_all_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(path.name.partition(".")[2] or path.name))
    monkeypatch.setattr(files.os, "rename", lambda old, new: synced.append("rename"))
    with named_at_the_end(tmp_path / "out") as folder:
        (folder / "x.a").write_text("a")
        (folder / "x.b").write_text("b")
        hidden = folder.name.partition(".")[2]
    assert synced == ["a", "b", hidden, "rename", tmp_path.name]


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("link", "."):
        with pytest.raises(ConfigError, match="exists"), named_at_the_end(tmp_path / name):
            raise AssertionError
    with pytest.raises(ConfigError, match="no folder"), named_at_the_end(tmp_path / "a" / "b"):
        raise AssertionError


def test_full_disk_is_an_error_before_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        reserve(tmp_path / "file", b"head", 1 << 20)


def test_disk_that_takes_no_file_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match=r"can't be written to .*/out: .*No space") as caught:
        with named_at_the_end(tmp_path / "out"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "--to" in caught.value.hint and os.listdir(tmp_path) == []


def test_of_two_exports_to_one_path_the_slower_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was made meanwhile"), named_at_the_end(tmp_path / "out") as folder:
        (folder / "file").touch()
        with named_at_the_end(tmp_path / "out") as faster:
            (faster / "file").write_text("faster")
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "faster"


def test_shards_hold_whole_tensors(tmp_path: Path) -> None:
    ranges = safetensors_files(tmp_path, [tensor(name) for name in "abc"], shard_bytes=16)
    assert [(each.tensor.name, each.path.name) for each in ranges] == [
        ("a", "model-00001-of-00002.safetensors"), ("b", "model-00001-of-00002.safetensors"),
        ("c", "model-00002-of-00002.safetensors"),
    ]  # fmt: skip
    one = safetensors_files(tmp_path, [tensor("large", (100,))], shard_bytes=16)
    assert one[0].path.name == "model.safetensors" and one[0].begin % 8 == 0


def test_dtype_that_safetensors_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match="w is complex128"):
        safetensors_files(tmp_path, [tensor("w", dtype="complex128")], 1 << 30)
    assert os.listdir(tmp_path) == []
