"""The plug-in of torchrun's agent for `torchrun --rdzv-backend=reft` (`torchrun.handlers`).

torchrun imports this module in every run on the machine, with any backend, and prints a traceback
if the import fails. So only the standard library is imported here, and the rest on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get_handler() -> Callable[[Any], Any]:
    """Returns the function that torchrun registers under the name "reft"."""
    return create


def create(parameters: Any) -> Any:
    """Returns the rendezvous handler of one agent; see `reft.elastic.handler`."""
    from reft.elastic.handler import create as create_handler

    return create_handler(parameters)
