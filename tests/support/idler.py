"""A cheap worker without torch: writes who it is, and stays until a file `done` lies in the folder.

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
    """What one worker wrote when it began.

    Attributes:
        node: the last part of its node's mark.
        at_s: when it began, by the machine's monotonic clock.
    """

    node: str
    pid: int
    rank: int
    world: int
    round: int
    at_s: float


def idlers(folder: Path) -> list[Idler]:
    """Returns every worker that ever began, in order."""
    try:
        lines = (folder / "idlers").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [line.split(" ") for line in lines]
    return [Idler(r[0], int(r[1]), int(r[2]), int(r[3]), int(r[4]), float(r[5])) for r in rows if len(r) == 6]


def newest(folder: Path, world: int, after_s: float = 0.0) -> dict[str, Idler]:
    """Returns node → newest worker.

    Empty unless `world` workers of the newest round began after `after_s`.
    """
    recent = [each for each in idlers(folder) if each.at_s > after_s]
    last_round = max((each.round for each in recent), default=-1)
    by_node = {each.node: each for each in recent if each.round == last_round and each.world == world}
    return by_node if len(by_node) == world else {}


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
