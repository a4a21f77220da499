from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Hides the objects of torch and of earlier tests: scans take milliseconds."""
    gc.freeze()
    yield
    gc.unfreeze()
