"""One flow, two doors: a flow is a generator that yields each thing that may wait, and a driver does the waiting.

So sync and async differ in the driver alone, and no decision is written twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, TypeVar

__all__ = ["Step", "Steps", "arun", "run"]

T = TypeVar("T")


class Step(NamedTuple):
    """One thing that may wait, in both manners. Whatever it raises is raised at the flow's ``yield``."""

    run: Callable[..., Any]
    """Does it in a thread that may block."""
    arun: Callable[..., Awaitable[Any]]
    """Does it in an event loop that may not."""
    args: tuple[Any, ...] = ()
    """What either is called with."""


Steps = Generator[Step, Any, T]
"""A flow: yields steps, is sent their results, returns a ``T``."""


def run(steps: Steps[T]) -> T:
    """Drive a flow where blocking is allowed."""
    try:
        step = next(steps)
        while True:
            try:
                result = step.run(*step.args)
            except BaseException as error:  # noqa: BLE001  the flow decides whether it is handled
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def arun(steps: Steps[T]) -> T:
    """Drive a flow in an event loop."""
    try:
        step = next(steps)
        while True:
            try:
                result = await step.arun(*step.args)
            except BaseException as error:  # noqa: BLE001  a cancellation too, for the flow may have to give back
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
