"""Functions of the project that the settings name: imported at start, called in either world, blamed when they fail."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.utils.module_loading import import_string

from .steps import Step

__all__ = ["CallableError", "Function", "load_function"]


class CallableError(Exception):
    """A function of the project raised, or returned what it must not. ``__cause__`` is what it raised."""

    def __init__(self, function: Function, problem: str) -> None:
        super().__init__(f"{function.name} {problem}")
        self.function = function


class Function:
    """A sync or async function of the project, called by the limiter."""

    __slots__ = ("call", "is_async", "name")

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        named = call
        while isinstance(named, functools.partial):
            named = named.func
        self.is_async = iscoroutinefunction(named) or iscoroutinefunction(getattr(named, "__call__", None))  # noqa: B004
        self.name = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self.call == other.call

    def __hash__(self) -> int:
        return hash(self.call)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def step(self, *args: Any) -> Step:
        """The call, to be yielded by a flow. Raises CallableError there, whatever the function raises."""
        return Step(self._run, self._arun, args)

    def _run(self, *args: Any) -> Any:
        try:
            if self.is_async:
                return async_to_sync(self.call)(*args)
            result = self.call(*args)
            if inspect.isawaitable(result):
                return async_to_sync(_await)(result)
            return result
        except Exception as error:  # whatever the project's function does, the scope's ON_ERROR decides
            raise CallableError(self, f"raised {type(error).__name__}") from error

    async def _arun(self, *args: Any) -> Any:
        try:
            if self.is_async:
                return await self.call(*args)
            result = await sync_to_async(self.call)(*args)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:  # whatever the project's function does, the scope's ON_ERROR decides
            raise CallableError(self, f"raised {type(error).__name__}") from error


async def _await(awaitable: Any) -> Any:
    return await awaitable


def load_function(value: Any) -> Function:
    """A callable, or the dotted path of one. Raises ValueError that says what was given and what is wrong."""
    if isinstance(value, str):
        try:
            found = import_string(value)
        except Exception as error:  # importing runs the project's code, which may raise anything
            reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{value!r} cannot be imported: {reason}. Write the dotted path of a function.") from error
    else:
        found = value
    if not callable(found):
        raise ValueError(f"{value!r} is not callable. Write a function or its dotted path.")
    return Function(found)
