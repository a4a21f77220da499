"""A rank that can't replay a section says so to all ranks, whatever it met."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reft.client.restore.replay import replay_sections
from reft.errors import RestoreError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RestoreError("node b is gone.", "start it"), "node b is gone."),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), "OutOfMemoryError: CUDA out of memory."),
    ],
)
def test_any_error_of_a_replay_refuses_it(error: Exception, reason: str) -> None:
    def capsule(*_: object) -> None:
        raise error

    way = SimpleNamespace(rank=1, capsule=SimpleNamespace(node="b", version=None))
    context: Any = SimpleNamespace(
        plan=SimpleNamespace(replays={1: way}), readers=SimpleNamespace(keeper_of={1: 0}), rank=0,
        placement=SimpleNamespace(domains=["a", "b"]), opener=SimpleNamespace(remote=SimpleNamespace(capsule=capsule)),
    )  # fmt: skip
    made, report = replay_sections(context, {1: ()})
    assert made == {} and report.refused == {5: reason}
