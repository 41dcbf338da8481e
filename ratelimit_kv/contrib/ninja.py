"""Ninja: a throttle that counts scopes of the settings, after the framework's own authentication."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from django.db import connections
from django.http import HttpRequest
from ninja.throttling import BaseThrottle

from .. import door, http
from ..accounts import RequestLimits, limits_of
from ..decisions import tightest
from ..exceptions import RateLimited
from ..identity import Part
from ..limiter import check_flow
from ..process import logger, runtime, ticks
from ..scopes import NAME
from ..steps import Steps, run

__all__ = ["RateLimitThrottle"]


class RateLimitThrottle(BaseThrottle):
    """``throttle=RateLimitThrottle("api", "budget")``: counts these scopes together, all or nothing, each once a request.

    A denial is answered by the middleware, in full; without it by Ninja, as its 429 with Retry-After. Raises TypeError
    for what is not the name of a scope.
    """

    def __init__(self, *scopes: str) -> None:
        if not scopes or not all(isinstance(name, str) and NAME.match(name) for name in scopes):
            raise TypeError(f'RateLimitThrottle{scopes!r} needs scopes of the settings: RateLimitThrottle("api").')
        self.scopes = scopes
        # One throttle serves all requests; Ninja asks for the wait at once, in the thread that was told to.
        self._answer = threading.local()

    def allow_request(self, request: HttpRequest) -> bool:
        """Whether no scope denies. Raises RateLimited where a door of ours is there to answer it."""
        rt = runtime()
        named = [scope for name in self.scopes for scope in rt.config.family(name)]
        scopes = door.applicable(rt.config, named, request, None)
        limits = limits_of(request)
        limits.memo.pop(Part("user"), None)  # who was asked for before the framework authenticated
        for scope in scopes:
            if scope.gives_back and not limits.door and rt.throttle.due(("door", scope.name), ticks()):
                logger.warning(
                    "scope %s gives hits back after the view, which RateLimitMiddleware does, and it is not there",
                    scope.name,
                    extra={"scope": scope.name},
                )
        _run(check_flow(request, scopes))
        found = (limits.by_name.get(scope.name) for scope in scopes)
        denied = tightest(decision for decision in found if decision is not None and not decision.allowed)
        if denied is None:
            return True
        if limits.door:
            raise RateLimited(denied)
        self._answer.wait = http.wait_of(denied, limits.scopes[denied.scope])
        return False

    def wait(self) -> int | None:
        """Whole seconds until the same request can pass, None when no wait helps."""
        return getattr(self._answer, "wait", None)


def _run(steps: Steps[RequestLimits]) -> None:
    """Drive a flow, also in an event loop: Ninja does not await its throttles, not even those of async operations.

    There it blocks the loop as long as the store takes, in a thread of its own, for a database refuses to be asked in a
    loop's.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run(steps)
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(copy_context().run, _run_and_leave, steps).result()


def _run_and_leave(steps: Steps[RequestLimits]) -> None:
    try:
        run(steps)
    finally:
        connections.close_all()  # this thread's alone, which ends here
