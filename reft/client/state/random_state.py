"""The default random generators of Python, numpy and torch."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reft.client.state.serialization import from_plain
from reft.errors import RestoreError
from reft.wire.capsule_format import TensorBytes, encode


def capture() -> dict[str, Any]:
    """Returns the state of the default random generators of Python, numpy and torch."""
    return storable(take())


def take() -> dict[str, Any]:
    """Returns the states in the generators' own types. All of them are copies."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "cpu": torch.get_rng_state(),
        "cuda": [generator.get_state() for generator in _cuda_generators()],
    }


def storable(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a result of `take` in the form of a capsule. It may run later and in any thread."""
    kind, keys, gauss = states["python"]
    return {
        "python": [kind, np.frombuffer(array("I", keys), np.uint32), gauss],  # np.array takes three times as long
        "numpy": _numpy_state(states["numpy"]),
        "cpu": _bytes_of(states["cpu"]),
        "cuda": [_bytes_of(state) for state in states["cuda"]],
    }


def _numpy_state(state: Mapping[str, Any]) -> Any:
    """Returns numpy's own list for its usual generator; of any other one the dict."""
    if state["bit_generator"] != "MT19937":
        return state
    return ["MT19937", state["state"]["key"], state["state"]["pos"], state["has_gauss"], state["gauss"]]


def _bytes_of(state: torch.Tensor) -> TensorBytes:
    """Returns the same as `to_plain`, in a third of the time.

    Only valid for a copy of a generator's state: a uint8 tensor on the host.
    """
    return TensorBytes("uint8", tuple(state.shape), state.numpy().tobytes())


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> frozenset[str]:
    """Returns the kinds of generators whose states differ between two results of `take`."""
    first, second = storable(one), storable(other)
    return frozenset(kind for kind in first if encode(first[kind]) != encode(second[kind]))


def restore(saved: Mapping[str, Any]) -> None:
    """Restores the state of every default random generator.

    Raises:
        RestoreError: the saved state is of another number of CUDA devices, or of another kind of
            generator than numpy has now.
    """
    kind, keys, gauss = saved["python"]
    random.setstate((kind, tuple(int(key) for key in keys), gauss))
    numpy = saved["numpy"]
    try:
        np.random.set_state(numpy if isinstance(numpy, dict) else tuple(numpy))
    except ValueError as error:
        kind = numpy["bit_generator"] if isinstance(numpy, dict) else numpy[0]
        raise RestoreError(
            f"the snapshot has numpy's global generator as a {kind}, and this process has another kind.",
            "call np.random.set_bit_generator before reft.attach, as the run before did; or set REFT_GENERATORS=user",
        ) from error
    torch.set_rng_state(from_plain(saved["cpu"]))
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.init()  # the first use of CUDA may come later than attach, as it did before
    generators = _cuda_generators()
    if saved["cuda"] and len(generators) != len(saved["cuda"]):
        raise RestoreError(
            f"the snapshot has {len(saved['cuda'])} CUDA generators, this process has {len(generators)} devices."
        )
    for generator, state in zip(generators, saved["cuda"], strict=False):
        generator.set_state(from_plain(state))


def _cuda_generators() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()
