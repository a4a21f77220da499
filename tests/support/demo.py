"""`reft-cli`, but the agents that its demo starts import torch once, for themselves and all their workers: `python -m …`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from reft.cli.demo import cluster
from reft.cli.main import main

Spawn = Callable[..., "subprocess.Popen[bytes]"]


def forking(spawn: Spawn) -> Spawn:
    """`cluster.spawn` with `tests.support.agent` in the place of torchrun."""

    def started(command: Sequence[str], *arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        words = {"torch.distributed.run": "tests.support.agent"}
        return spawn([words.get(word, word) for word in command], *arguments, **named)

    return started


if __name__ == "__main__":
    cluster.spawn = forking(cluster.spawn)
    main()
