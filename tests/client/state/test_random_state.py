"""The default random generators: a job that first uses CUDA after attach."""

from __future__ import annotations

import pytest
import torch

from reft.client.state import random_state
from reft.errors import RestoreError


@pytest.mark.parametrize("devices", [2, 1])
def test_a_restore_initialises_cuda_for_the_states_of_its_generators(monkeypatch, devices):
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    used: list[bool] = []
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(used))
    monkeypatch.setattr(torch.cuda, "init", lambda: used.append(True))
    assert random_state.capture()["cuda"] == []
    used.append(True)  # by the first batch, say
    saved, expected = random_state.capture(), [torch.rand(3, generator=each) for each in generators]
    used.clear()
    monkeypatch.setattr(torch.cuda, "default_generators", generators[:devices])
    if devices < 2:
        with pytest.raises(RestoreError, match="2 CUDA generators, this process has 1 devices"):
            random_state.restore(saved)
        return
    random_state.restore(saved)
    assert all(torch.equal(torch.rand(3, generator=g), e) for g, e in zip(generators, expected, strict=True))
