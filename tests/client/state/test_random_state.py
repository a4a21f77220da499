"""The default random generators: a job that first uses CUDA after attach."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from reft.client.state import random_state
from reft.errors import RestoreError
from reft.wire import capsule_format


@pytest.fixture
def any_numpy() -> Iterator[None]:
    """Puts numpy's global generator back."""
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_another_global_generator_of_numpy_comes_back(any_numpy, kind, recwarn):
    np.random.set_bit_generator(kind(5))
    np.random.randn(3)  # an odd number: one more is kept
    saved = capsule_format.decode(capsule_format.encode(random_state.capture()))
    expected = np.random.randn(3).tolist()
    np.random.set_bit_generator(kind(6))
    random_state.restore(saved)
    assert np.random.randn(3).tolist() == expected and not recwarn.list


@pytest.mark.parametrize(("before", "after"), [("PCG64", "MT19937"), ("MT19937", "PCG64")])
def test_another_kind_of_generator_is_refused_by_its_name(any_numpy, before, after):
    np.random.set_bit_generator(getattr(np.random, before)(5))
    saved = random_state.capture()
    np.random.set_bit_generator(getattr(np.random, after)(5))
    with pytest.raises(
        RestoreError, match=f"numpy's global generator as a {before}, and this process has another"
    ) as refused:
        random_state.restore(saved)
    assert "np.random.set_bit_generator before reft.attach" in str(refused.value)


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
