"""The wrappers that replace upstream's functions and methods: they are pickled, copied and inspected like these."""

from __future__ import annotations

import copy
import inspect
from pkgutil import resolve_name
from typing import Any

import wrapt

from ..settings import FLAG


class BoundFunctionWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """A wrapped method, accessed through an object or its class."""

    def __reduce_ex__(self, _: Any) -> Any:
        if self._self_instance is None:
            return _by_name(self)
        return getattr, (self._self_instance, self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        instance = self._self_instance
        return self if instance is None else getattr(copy.deepcopy(instance, memo), self.__name__)


class FunctionWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapped function, or a method in the dictionary of its class.

    A process without `patch()` that gets it in a pickle has the original function.
    """

    __bound_function_wrapper__ = BoundFunctionWrapper

    def __reduce_ex__(self, _: Any) -> Any:
        return _by_name(self)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        return self


def _by_name(function: Any) -> Any:
    """How to pickle a function: by where it is, as Python does."""
    return resolve_name, (f"{function.__module__}:{function.__qualname__}",)


class BoundInitWrapper(BoundFunctionWrapper):
    """The constructor accessed through the class or an instance; wrapt 1.16 ignores the signature of its parent."""

    @property
    def __signature__(self) -> inspect.Signature:
        signature: inspect.Signature = self._self_parent.__signature__
        bound = self._self_instance is not None
        return signature.replace(parameters=list(signature.parameters.values())[bound:])

    @property
    def __func__(self) -> Any:
        """For `inspect`, which looks at it instead of a bound method; from Python 3.13 on for a class too."""
        return self._self_parent


class InitWrapper(FunctionWrapper):
    """A wrapped constructor that shows the argument it adds to `inspect`, and so to LightningCLI."""

    __bound_function_wrapper__ = BoundInitWrapper

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__wrapped__)
        parameters = [p for p in signature.parameters.values() if p.name != FLAG]
        # None, not upstream's False: LightningCLI passes on every default, and a default is not a choice.
        flag = inspect.Parameter(FLAG, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None)
        end = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        return signature.replace(parameters=[*parameters[:end], flag, *parameters[end:]])
