"""Wraps one method of one object: an attribute of the instance hides the method of the class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any


class WrappedMethod:
    """Runs our code around each call of one method of one object.

    The attribute is a bound method with the marks of what it hides: torch's LR schedulers read `step.__func__` and
    `step._wrapped_by_lr_sched`. A scheduler may keep the function for ever, so the function lets go of the object on `remove`.

    Args:
        owner: the object that has the method.
        method: the name of the method.
        around: gets the object, the hidden method bound to the object, and the arguments of the call.
    """

    def __init__(self, owner: Any, method: str, around: Callable[..., Any]) -> None:
        self._owner, self._method = owner, method
        self._around: Callable[..., Any] | None = around
        hidden = self._hidden = vars(owner).get(method)  # the wrapper of somebody else, e.g. of an LR scheduler

        @functools.wraps(getattr(type(owner), method) if hidden is None else getattr(hidden, "__func__", hidden))
        def wrapper(its: Any, *arguments: Any, **named: Any) -> Any:
            call = MethodType(getattr(type(its), method), its) if hidden is None else hidden
            if self._around is None:
                return call(*arguments, **named)
            return self._around(its, call, *arguments, **named)

        self._attribute: MethodType | None = MethodType(wrapper, owner)
        setattr(owner, method, self._attribute)

    def remove(self) -> None:
        """Puts back what was hidden. If somebody wrapped the method again, the wrapper stays and only passes calls on."""
        owner, attribute = self._owner, self._attribute
        self._owner = self._around = self._attribute = None
        if attribute is None or vars(owner).get(self._method) is not attribute:
            return
        if self._hidden is None:
            delattr(owner, self._method)
        else:
            setattr(owner, self._method, self._hidden)


def between(before: Callable[..., None], after: Callable[..., None]) -> Callable[..., Any]:
    """For `WrappedMethod`: calls `before` first, and `after` with the object once the method has returned."""

    def around(owner: Any, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        before()
        result = call(*arguments, **named)
        after(owner)
        return result

    return around
