"""The end of a step of an optimizer that is no torch.optim.Optimizer, and so has no hooks: its method, on the instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Wrapped:
    """A method as an attribute of its instance, in front of the class's.

    Args:
        owner: the object that is stepped.
        method: its name.
        before: called first.
        after: called with the owner once the method has returned.
    """

    def __init__(self, owner: Any, method: str, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._owner, self._method = owner, method
        self._own = vars(owner).get(method)  # somebody else's wrapper
        call = getattr(owner, method)

        def stepped(*arguments: Any, **named: Any) -> Any:
            before()
            result = call(*arguments, **named)
            after(owner)
            return result

        self._stepped = stepped
        setattr(owner, method, stepped)

    def remove(self) -> None:
        """Puts back what was there, unless it was wrapped again since."""
        if vars(self._owner).get(self._method) is not self._stepped:
            return
        if self._own is None:
            delattr(self._owner, self._method)
        else:
            setattr(self._owner, self._method, self._own)
