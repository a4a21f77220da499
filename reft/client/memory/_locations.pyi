from array import array
from typing import Any

import torch

def read_extents(
    exchange: Any,
    count_name: str,
    tensors: list[torch.Tensor],
    counted: list[torch.Tensor],
    addresses: array[int],
    extents: array[int],
    counts: array[int],
    /,
) -> bool: ...
