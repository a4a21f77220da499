"""Runs XOR programs on torch tensors, on the device where the tensors lie.

`reft.core.coding.erasure` makes the programs. Running one allocates nothing. On CUDA every step is
one kernel on the current stream, and the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reft.core.coding.erasure import XorProgram, registers


def run(
    program: XorProgram,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    scratch: Sequence[torch.Tensor],
) -> None:
    """Runs the program on tensors: uint8 or int64, all of one shape, on one device.

    Args:
        program: the XOR steps to run.
        inputs: the registers that are read.
        outputs: the registers that are written; earlier contents are ignored. They must not overlap
            other registers.
        scratch: the registers for intermediate results, written as outputs are.

    Raises:
        ValueError: the registers do not fit the program.
    """
    by_index = registers(program, inputs, outputs, scratch)
    for target, left, right in program.steps:
        if right is None:
            by_index[target].copy_(by_index[left])
        else:
            torch.bitwise_xor(by_index[left], by_index[right], out=by_index[target])
