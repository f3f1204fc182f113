"""Answers that an object works out once."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def memoized(method: Method) -> Method:
    """The method, worked out once for the same arguments, which come by place: `cached_property` for what takes some."""
    name = f"{method.__qualname__}()"  # no attribute's, and not that of a method which it overrides

    @wraps(method)
    def asked(self: object, *given: Hashable) -> Any:
        try:
            return self.__dict__[name][given]
        except KeyError:
            found = self.__dict__.setdefault(name, {})[given] = method(self, *given)
            return found

    return cast(Method, asked)
