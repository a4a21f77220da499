"""Runs coding programs on torch tensors, on the device where they lie.

The tables are those of `reft.core.coding.erasure`; this is the executor for tensors. It makes no temporaries: on CUDA every step
is one kernel on the current stream, and nothing waits.
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
        program: what to run.
        inputs: read.
        outputs: written; what they hold before is ignored. They must not overlap any other register.
        scratch: written, like outputs.

    Raises:
        ValueError: the registers do not fit the program.
    """
    found = registers(program, inputs, outputs, scratch)
    for target, left, right in program.steps:
        if right is None:
            found[target].copy_(found[left])
        else:
            torch.bitwise_xor(found[left], found[right], out=found[target])
