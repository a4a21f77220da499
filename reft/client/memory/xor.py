"""The operations of torch with which `reft.core.coding.erasure` runs XOR programs on tensors.

They run on the device where the tensors lie, and allocate nothing. On CUDA every step is one kernel
on the current stream, and the host does not wait.
"""

from __future__ import annotations

import torch

from reft.core.coding.erasure import ArrayFunctions

TORCH = ArrayFunctions(torch.bitwise_xor, torch.Tensor.copy_)
