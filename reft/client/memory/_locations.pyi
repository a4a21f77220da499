from array import array
from typing import Any

import torch

def read(
    exchange: Any,
    count_name: str,
    tensors: list[torch.Tensor],
    counted: list[torch.Tensor],
    addresses: array[int],
    sizes: array[int],
    counts: array[int],
    /,
) -> bool: ...
