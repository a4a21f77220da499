"""The files of an export: first holes for all tensors, under a hidden name.

.PATH.<random>/   all files, at their sizes ─► the bytes of the tensors ─► fsync ─► PATH
                  an error, Ctrl-C: removed again

safetensors   8 bytes: length of the JSON | JSON: name → dtype, shape, begin, end | tensors
              several files, if they have more than `shard_bytes`, with an index as JSON
dcp           made by a process with torch (`reft.client.state.dcp_skeleton`)
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from reft.config import child_environment
from reft.core.budget import format_bytes
from reft.core.recovery.export_match import ExportTensor
from reft.errors import AttachError, ConfigError, UnsupportedState

SAFETENSORS: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
SKELETON_S: Final = 300.0
LENGTH: Final = struct.Struct("<Q")


class TensorRange(NamedTuple):
    """Where the bytes of a tensor go.

    Attributes:
        tensor: the tensor.
        path: the file, which exists at its size.
        begin: offset of the first byte.
        nbytes: in the export's dtype.
    """

    tensor: ExportTensor
    path: Path
    begin: int
    nbytes: int


@contextmanager
def named_at_the_end(path: Path) -> Iterator[Path]:
    """Gives a hidden folder beside `path`; it is renamed to `path` if nothing is raised.

    Raises:
        ConfigError: `path` is there already, or its folder is not.
        AttachError: the folder can't be made, or the files can't be brought to the disk.
    """
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists.", "another --to; an export never overwrites anything")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder.", "make it first, or correct --to")
    with _saying_where(path):
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            os.chmod(folder, 0o777 & ~_umask())
            yield folder
            for each in sorted(folder.iterdir()):
                sync(each)
            sync(folder)
            os.rename(folder, path)
            sync(path.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _saying_where(path: Path) -> Iterator[None]:
    """Turns an error of the file system into one with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ConfigError(f"{path} was made meanwhile, perhaps by another export.", "another --to") from error
        raise AttachError(
            f"the export can't be written to {path}: {error}.", "make room or repair the disk, or name another --to"
        ) from error


def sync(path: Path) -> None:
    """Brings a file or a folder to the disk.

    Raises:
        OSError: it can't be brought there.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(path: Path, head: bytes, nbytes: int) -> None:
    """Makes a file of `nbytes` that begins with `head`. No later write lacks a block.

    Raises:
        OSError: the file system has no room.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if nbytes:
            reserve_blocks(descriptor, nbytes)
        if os.pwrite(descriptor, head, 0) != len(head):
            raise OSError(f"{path} took a part of {len(head)} bytes")
    finally:
        os.close(descriptor)


def reserve_blocks(descriptor: int, nbytes: int) -> None:
    """Gives an open file `nbytes` of blocks. Without them a write through a mapping is a SIGBUS.

    Raises:
        OSError: the file system has no room; the message says how much there is.
    """
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        free = os.fstatvfs(descriptor)
        room = f"a file of the export takes {format_bytes(nbytes)}, and {format_bytes(free.f_bavail * free.f_frsize)} are free"
        raise OSError(error.errno, f"{error.strerror}: {room}") from error


def nbytes_of(tensor: ExportTensor) -> int:
    """Returns the size of a tensor in the export."""
    held = math.prod(tensor.leaf.shape)
    return tensor.leaf.nbytes if tensor.dtype == tensor.leaf.dtype else held * _item_bytes(tensor.dtype)


def safetensors_files(folder: Path, tensors: Sequence[ExportTensor], shard_bytes: int) -> list[TensorRange]:
    """Makes the files of an export as safetensors: weights, and beside them optimizer state.

    Raises:
        UnsupportedState: a tensor has a dtype that safetensors has not.
        OSError: a file can't be made.
    """
    wrong = next((each for each in tensors if each.dtype not in SAFETENSORS), None)
    if wrong is not None:
        raise UnsupportedState(f"{wrong.name} is {wrong.dtype}, which safetensors has not.", "--format dcp")
    ranges = []
    for stem, is_weight in (("model", True), ("optimizer", False)):
        ranges += _family(folder, stem, [each for each in tensors if each.is_weight == is_weight], shard_bytes)
    return ranges


def _family(folder: Path, stem: str, tensors: Sequence[ExportTensor], shard_bytes: int) -> list[TensorRange]:
    shards: list[list[ExportTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or room < nbytes_of(tensor):
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= nbytes_of(tensor)
    count, ranges = len(shards), []
    for number, shard in enumerate(shards, 1):
        name = f"{stem}.safetensors" if count == 1 else f"{stem}-{number:05}-of-{count:05}.safetensors"
        ranges += _safetensors_file(folder / name, shard)
    if count > 1:
        total = sum(each.nbytes for each in ranges)
        weight_map = {each.tensor.name: each.path.name for each in ranges}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return ranges


def _safetensors_file(path: Path, tensors: Sequence[ExportTensor]) -> list[TensorRange]:
    """Makes one file. Larger items come first, so each tensor lies at a multiple of its item."""
    ordered = sorted(tensors, key=lambda each: (-(nbytes_of(each) // max(math.prod(each.shape), 1)), each.name))
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for tensor in ordered:
        begins.append(end)
        end += nbytes_of(tensor)
        table[tensor.name] = {
            "dtype": SAFETENSORS[tensor.dtype], "shape": tensor.shape, "data_offsets": [begins[-1], end],
        }  # fmt: skip
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = LENGTH.pack(len(text)) + text
    reserve(path, head, len(head) + end)
    return [
        TensorRange(tensor, path, len(head) + begin, nbytes_of(tensor))
        for tensor, begin in zip(ordered, begins, strict=True)
    ]


def dcp_files(folder: Path, tensors: Sequence[ExportTensor]) -> list[TensorRange]:
    """Makes the files of an export for torch.distributed.checkpoint.

    Raises:
        AttachError: the process with torch failed, or did not end in time.
        OSError: the disk is full.
    """
    rows = [[f"{'model' if each.is_weight else 'optimizer'}.{each.name}", each.dtype, each.shape] for each in tensors]
    environment = child_environment(PYTHONPATH=os.pathsep.join(os.path.abspath(each) for each in sys.path if each))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "reft.client.state.dcp_skeleton", str(folder)], input=json.dumps(rows), text=True,
            capture_output=True, env=environment, timeout=SKELETON_S, check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise AttachError(f"torch did not make the files within {SKELETON_S:g} s.", "--format safetensors") from error
    except subprocess.CalledProcessError as error:
        if not os.statvfs(folder).f_bavail:  # torch's own words about a full disk help nobody
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise AttachError(
            f"torch did not make the files: {error.stderr.strip()[-500:]}", "--format safetensors"
        ) from error
    places = json.loads(done.stdout)
    ranges = []
    for tensor, (name, begin) in zip(tensors, places, strict=True):
        path = folder / name
        reserve(path, b"", path.stat().st_size)
        ranges.append(TensorRange(tensor, path, begin, nbytes_of(tensor)))
    return ranges


def _item_bytes(dtype: str) -> int:
    from reft.cli.export.casts import ITEM_BYTES

    return ITEM_BYTES[dtype]


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
