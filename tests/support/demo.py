"""Runs `reft-cli` with a demo whose agents import torch once for all workers: `python -m …`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from reft.cli.demo import cluster
from reft.cli.main import main

Spawn = Callable[..., "subprocess.Popen[bytes]"]


def forking(spawn: Spawn) -> Spawn:
    """Returns `cluster.spawn` with `tests.support.agent` in the place of torchrun."""

    def spawn_forking(command: Sequence[str], *arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        words = {"torch.distributed.run": "tests.support.agent"}
        return spawn([words.get(word, word) for word in command], *arguments, **named)

    return spawn_forking


if __name__ == "__main__":
    cluster.spawn = forking(cluster.spawn)
    main()
