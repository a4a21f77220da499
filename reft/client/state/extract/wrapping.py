"""Wraps one method of one object with an instance attribute that hides the class's method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any


class WrappedMethod:
    """Runs reft's code around each call of one method of one object.

    The attribute is a bound method with the attributes of the hidden method. torch's LR schedulers
    read `step.__func__` and `step._wrapped_by_lr_sched`. A scheduler may keep the function for
    ever, so `remove` makes the function drop its reference to the object.

    Args:
        owner: the object that has the method.
        method: the name of the method.
        around: called with the object, the hidden method bound to the object, and the arguments.
    """

    def __init__(self, owner: Any, method: str, around: Callable[..., Any]) -> None:
        self._owner, self._method = owner, method
        self._around: Callable[..., Any] | None = around
        hidden = self._hidden = vars(owner).get(method)  # another wrapper, e.g. of an LR scheduler

        @functools.wraps(getattr(type(owner), method) if hidden is None else getattr(hidden, "__func__", hidden))
        def wrapper(instance: Any, *arguments: Any, **keywords: Any) -> Any:
            call = MethodType(getattr(type(instance), method), instance) if hidden is None else hidden
            if self._around is None:
                return call(*arguments, **keywords)
            return self._around(instance, call, *arguments, **keywords)

        self._attribute: MethodType | None = MethodType(wrapper, owner)
        setattr(owner, method, self._attribute)

    def remove(self) -> None:
        """Puts the hidden method back.

        If other code wrapped the method again, the wrapper stays and only passes calls on.
        """
        owner, attribute = self._owner, self._attribute
        self._owner = self._around = self._attribute = None
        if attribute is None or vars(owner).get(self._method) is not attribute:
            return
        if self._hidden is None:
            delattr(owner, self._method)
        else:
            setattr(owner, self._method, self._hidden)


def between(before: Callable[..., None], after: Callable[..., None]) -> Callable[..., Any]:
    """Returns an `around` for `WrappedMethod`.

    The function calls `before()`, the method, and then `after(owner)`.
    """

    def around(owner: Any, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        before()
        result = call(*arguments, **keywords)
        after(owner)
        return result

    return around
