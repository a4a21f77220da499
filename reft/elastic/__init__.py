"""What runs in torchrun's agent: `torchrun --rdzv-backend=reft`, through the entry point `torchrun.handlers`.

torchrun loads this module in every run on the machine, also in those that use another backend, and prints a traceback if
that fails. So only the standard library is imported here, and the rest when a job asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def get_handler() -> Callable[[Any], Any]:
    """What torchrun registers under the name "reft"."""
    return create


def create(parameters: Any) -> Any:
    """The rendezvous handler for one agent; see `reft.elastic.handler`."""
    from reft.elastic.handler import create as create_handler

    return create_handler(parameters)
