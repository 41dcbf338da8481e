"""REST framework: a throttle that counts scopes of the settings, after the framework's own authentication."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.http import HttpRequest
from rest_framework.exceptions import APIException
from rest_framework.throttling import BaseThrottle

from .. import door, http
from ..accounts import inner, limits_of
from ..decisions import Decision, tightest
from ..identity import Part
from ..limiter import check_flow
from ..process import logger, runtime, ticks
from ..steps import run

__all__ = ["RateLimitThrottle", "Refused"]


class Refused(APIException):
    """A denial that is no 429: 503 where ``ON_ERROR`` denies, 400 where ``ON_MISSING`` does."""

    def __init__(self, decision: Decision, wait: int | None) -> None:
        super().__init__(http.TITLES[decision.status], str(decision.reason))
        self.status_code = decision.status
        self.wait = wait
        """Seconds, of which REST framework makes Retry-After."""


class RateLimitThrottle(BaseThrottle):
    """Counts the scopes that a view names in ``rate_limit_scopes`` (else in ``throttle_scope``), or those of a subclass.

    The scopes of all such throttles of a view are asked together, all or nothing, and each counts once a request, whoever
    else asks for it. A denial is REST framework's own ``Throttled``.
    """

    scopes: str | tuple[str, ...] = ()
    """For subclasses: names of scopes, in place of what the view names."""

    denied: Decision | None = None
    """What stands in the way of the request."""

    _wait: int | None = None

    def scopes_of(self, view: Any) -> tuple[str, ...]:
        """The names of the scopes that this throttle counts on a view."""
        names = self.scopes or getattr(view, "rate_limit_scopes", ()) or getattr(view, "throttle_scope", None) or ()
        return (names,) if isinstance(names, str) else tuple(names)

    def allow_request(self, request: Any, view: Any) -> bool:
        """Whether no scope denies. Raises :class:`Refused` for a denial that is no 429."""
        _ = request.successful_authenticator  # authenticates, where a view has put that off
        throttles = (self, *(one for one in view.get_throttles() if isinstance(one, RateLimitThrottle)))
        names = dict.fromkeys(name for throttle in throttles for name in throttle.scopes_of(view))
        plain = inner(request)
        self.denied = denied = _denial(plain, names, type(view))
        if denied is None:
            return True
        self._wait = wait = http.wait_of(denied, limits_of(plain).scopes[denied.scope])
        # REST framework builds the response, by an exception handler that the project may have replaced.
        headers = {"Cache-Control": "no-store"} | ({} if wait is None else {"Retry-After": str(wait)})
        view.headers = {**getattr(view, "headers", {}), **headers}
        if denied.status != 429:
            raise Refused(denied, wait)
        return False

    def wait(self) -> int | None:
        """Whole seconds until the same request can pass, None when no wait helps."""
        return self._wait


def _denial(request: HttpRequest, names: Iterable[str], view_class: type) -> Decision | None:
    """The denial of these scopes with the longest wait. None if the request may pass."""
    rt = runtime()
    view = request.resolver_match.func if request.resolver_match is not None else view_class
    if door.plan_of(rt, (), view, view).exempts(request.method):
        return None
    named = [scope for name in names for scope in rt.config.family(name)]
    scopes = door.applicable(rt.config, named, request, view)
    limits = limits_of(request)
    limits.memo.pop(Part("user"), None)  # who was asked for before the framework authenticated

    def denial() -> Decision | None:
        found = (limits.by_name.get(scope.name) for scope in scopes)
        return tightest(decision for decision in found if decision is not None and not decision.allowed)

    # What another throttle of the view was denied is denied: asking for the others would count them.
    if (denied := denial()) is not None:
        return denied
    for scope in scopes:
        if scope.gives_back and not limits.door and rt.throttle.due(("door", scope.name), ticks()):
            logger.warning(
                "scope %s gives hits back after the view, which RateLimitMiddleware does, and it is not there",
                scope.name,
                extra={"scope": scope.name},
            )
    run(check_flow(request, scopes))
    return denial()
