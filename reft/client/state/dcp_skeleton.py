"""`python -m reft.client.state.dcp_skeleton FOLDER`: a DCP checkpoint with holes for the bytes.

Only `reft-cli export --format dcp` starts it: torch writes its own format, which reft never reads.

    stdin    JSON: [name, dtype, shape] of each tensor
    FOLDER   one file of each tensor, as torch.save writes it, without its bytes; .metadata
    stdout   JSON: [file, offset of the bytes] of each tensor
"""

from __future__ import annotations

import json
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.storage import WriteResult

from reft.client.torch_internals import storage_info

LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of an entry of a zip archive; the last: lengths of name and extra field
DATA = "/data/0"  # the only storage in the archive of one tensor


class SkeletonWriter(checkpoint.FileSystemWriter):
    """Writes each tensor into a file of its own, without its bytes.

    Attributes:
        files: name of the tensor → its file.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)
        self._folder = folder
        self.files: dict[str, str] = {}

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Makes the files of a plan."""
        results = []
        for number, item in enumerate(plan.items):
            name = self.files[item.index.fqn] = f"__0_{number}.distcp"
            with torch.serialization.skip_data():
                torch.save(planner.resolve_data(item), self._folder / name)
            nbytes = (self._folder / name).stat().st_size
            results.append(WriteResult(item.index, nbytes, storage_info(name, nbytes)))
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done


def main() -> None:
    """Writes the files, and prints where the bytes go."""
    folder, rows = Path(sys.argv[1]), json.load(sys.stdin)
    # Memory of these tensors is never touched, so it takes no room.
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in rows}
    writer = SkeletonWriter(folder)
    checkpoint.save(tensors, storage_writer=writer, no_dist=True)
    print(json.dumps([[writer.files[name], data_offset(folder / writer.files[name])] for name in tensors]))


def data_offset(path: Path) -> int:
    """Returns where the bytes of a tensor begin in the file that torch.save has written."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        (info,) = (each for each in archive.infolist() if each.filename.endswith(DATA))
        file.seek(info.header_offset)
        fields = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    return info.header_offset + LOCAL_HEADER.size + fields[-2] + fields[-1]


if __name__ == "__main__":
    main()
