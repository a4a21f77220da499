"""The interpreter gives the same bytes with torch as with numpy, and takes no memory of its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reft.client.memory.xor import TORCH
from reft.core.coding.erasure import ErasureCode, XorProgram, code_for, encode_program, run
from tests.support.codes import decode_program

SHAPES = [(1, 2), (3, 1), (2, 2), (4, 2), (6, 2), (2, 3), (5, 3), (3, 4)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def programs(code: ErasureCode) -> list[XorProgram]:
    """Returns the programs for every parity, and for every loss of f shards."""
    made = [encode_program(code, parity) for parity in range(code.f)]
    for lost in itertools.combinations(range(code.k + code.f), code.f):
        have = [j for j in range(code.f) if code.k + j not in lost]
        made.append(decode_program(code, [i for i in lost if i < code.k], have))
    return made


def random_groups(program: XorProgram, nbytes: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(len(program.ops))
    counts = (len(program.inputs), len(program.outputs), program.scratch)
    return [[rng.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(count)] for count in counts]


class Count(TorchDispatchMode):
    """Records the operators that run, and the addresses of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.results: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func.__name__)
        self.results.add(result.data_ptr())
        return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize(("k", "f"), SHAPES)
def test_torch_computes_the_same_as_numpy(k, f, dtype, device):
    for program in programs(code_for(k, f)):
        groups = random_groups(program, 33 if dtype == torch.uint8 else 40)
        tensors = [[torch.from_numpy(each.copy()).to(device).view(dtype) for each in group] for group in groups]
        run(program, *groups)
        run(program, *tensors, TORCH)
        # Inputs too: they must be unchanged.
        for group, results in zip(groups, tensors, strict=True):
            for expected, result in zip(group, results, strict=True):
                assert np.array_equal(result.cpu().view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize(("k", "f"), SHAPES)
def test_no_temporaries(k, f):
    """There is one operator a step. Every result lies in a register that was passed."""
    for program in programs(code_for(k, f)):
        tensors = [[torch.from_numpy(each) for each in group] for group in random_groups(program, 64)]
        before = [each.data_ptr() for group in tensors for each in group]
        with Count() as count:
            run(program, *tensors, TORCH)
        assert [each.data_ptr() for group in tensors for each in group] == before
        assert count.results == set(before[len(program.inputs) :])
        assert len(count.names) == len(program.steps)
        assert set(count.names) <= {"bitwise_xor.Tensor_out", "copy_.default"}


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(5, dtype=torch.uint8),  # torch would resize it
        torch.zeros(4, dtype=torch.int64),  # torch would convert
    ],
)
def test_registers_that_do_not_fit_are_refused(wrong):
    inputs = [torch.zeros(4, dtype=torch.uint8) for _ in range(3)]
    with pytest.raises(ValueError, match="all must have one shape and dtype"):
        run(encode_program(code_for(3, 1), 0), inputs, [wrong], [], TORCH)
