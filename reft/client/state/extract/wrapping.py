"""Wraps one method of one object with an instance attribute that hides the earlier method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any


class WrappedMethod:
    """Runs reft's code around each call of one method of one object.

    The *hidden method* is what a call ran before: an instance attribute, else the class's method.
    The attribute is a bound method and copies the attributes of the hidden method. torch's LR
    schedulers need both. They wrap `step.__func__`, which a plain function lacks. They read the
    mark `step._wrapped_by_lr_sched`, wrap no step twice, and warn if the mark is gone.

    An LR scheduler may keep `wrapper` for ever. `wrapper` refers to this WrappedMethod, which
    refers to the owner. So `remove` clears this reference; else the optimizer is never freed.

    Args:
        owner: the object that has the method.
        method: the name of the method.
        around: runs instead of the method, and returns its result. Gets the object, the hidden
            method bound to the object, and the arguments of the call.
    """

    def __init__(self, owner: Any, method: str, around: Callable[..., Any]) -> None:
        self._owner, self._method = owner, method
        self._around: Callable[..., Any] | None = around
        hidden = self._hidden = vars(owner).get(method)  # None: only the class has it

        @functools.wraps(getattr(type(owner), method) if hidden is None else getattr(hidden, "__func__", hidden))
        def wrapper(instance: Any, *arguments: Any, **keywords: Any) -> Any:
            # The class's method is read at each call: torch may replace it later. `instance` is not
            # always `owner`: other code may bind `__func__` to another object.
            call = MethodType(getattr(type(instance), method), instance) if hidden is None else hidden
            if self._around is None:
                return call(*arguments, **keywords)
            return self._around(instance, call, *arguments, **keywords)

        self._attribute: MethodType | None = MethodType(wrapper, owner)
        setattr(owner, method, self._attribute)

    def remove(self) -> None:
        """Puts the hidden method back.

        If other code wrapped the method again, that code still calls `wrapper`. Then `wrapper` is
        not removed, and calls the hidden method without reft's code.
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
    """Returns an `around` for `WrappedMethod`: the method runs between `before` and `after`.

    The function calls `before()`, the method, and then `after(owner)`. If the method raises,
    `after` is not called. Both are those of `Extractor.hook`, in registry.py.
    """

    def around(owner: Any, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        before()
        result = call(*arguments, **keywords)
        after(owner)
        return result

    return around
