"""A worker that costs nothing: says who it is, and stays until a file `done` lies in the folder. No torch.

python tests/support/idler.py --out FOLDER --steps N        (N is not used)
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

NODE = "REFT_TEST_NODE"


@dataclass(frozen=True)
class Idler:
    """What one worker said when it began: the last part of its node's mark, and the moment by the machine's clock."""

    node: str
    pid: int
    rank: int
    world: int
    round: int
    at_s: float


def idlers(folder: Path) -> list[Idler]:
    """Every worker that ever began, in order."""
    try:
        lines = (folder / "idlers").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [line.split(" ") for line in lines]
    return [Idler(r[0], int(r[1]), int(r[2]), int(r[3]), int(r[4]), float(r[5])) for r in rows if len(r) == 6]


def newest(folder: Path, world: int, after_s: float = 0.0) -> dict[str, Idler]:
    """node → its newest worker, if `world` of them began in the newest round and after that moment; else nothing."""
    said = [each for each in idlers(folder) if each.at_s > after_s]
    last = max((each.round for each in said), default=-1)
    found = {each.node: each for each in said if each.round == last and each.world == world}
    return found if len(found) == world else {}


def main() -> None:
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    me = [Path(os.environ.get(NODE, "here")).name, str(os.getpid())]
    me += [os.environ.get(name, "-1") for name in ("RANK", "WORLD_SIZE", "REFT_ROUND")]
    with open(out / "idlers", "a") as file:
        file.write(" ".join([*me, f"{time.monotonic():.3f}"]) + "\n")
    pause = threading.Event()
    while not (out / "done").exists():
        pause.wait(0.05)


if __name__ == "__main__":
    main()
