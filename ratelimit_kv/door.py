"""What every door does: decide before the view, give back and tell after it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from . import http
from .accounts import RequestLimits, give_back_flow, limits_of
from .algorithms import CONCURRENT
from .callables import CallableError
from .conf import Config, get_config
from .conf import is_exempt as is_exempt_from
from .decisions import Decision, tightest
from .exceptions import RateLimited
from .limiter import check_flow, reset_flow
from .marks import Mark, exempt_methods, is_exempt, shows, view_class_of
from .process import Runtime, logger, runtime, ticks
from .scopes import Scope
from .steps import Steps, run

__all__ = ["ViewPlan", "applicable", "begin", "fail", "finish", "place_of", "plan_of", "refuse", "refuse_again", "tell"]

STOCK_OPTIONS = ("django.views.generic.base", "rest_framework.views")
"""Modules whose ``options()`` only describes the view."""
MOST_VIEWS = 10_000
"""Views whose plans are kept: a project that makes views as it goes shall not grow us."""


class ViewPlan(NamedTuple):
    """What marks on a view mean: found out once a view, in one Config."""

    is_exempt: bool
    exempt_methods: frozenset[str]
    """Methods whose handlers in the view's class are exempt."""
    marks: tuple[Mark, ...]
    scopes: tuple[tuple[Scope, ...], ...]
    """For each mark."""
    all_marks: frozenset[Mark]
    all_scopes: tuple[Scope, ...]
    """Of all marks, each once, the outermost first."""
    counts_all: bool
    """Whether the scopes count every request: none minds the method or exempts a path."""

    def exempts(self, method: str | None) -> bool:
        """Whether the view is exempt for a method."""
        return self.is_exempt or (bool(self.exempt_methods) and method in self.exempt_methods)


def place_of(view: Any) -> int:
    """What tells a view from others that the same marks stand on: one mark may stand on several handlers."""
    # method_decorator wraps a handler anew at each request.
    return id(getattr(view, "__wrapped__", view) if type(view) is partial else view)


def plan_of(rt: Runtime, marks: tuple[Mark, ...], resolved: Any, view: Any) -> ViewPlan:
    """The plan for marks, met on ``view``, of a request that Django resolved to ``resolved``.

    Inline scopes are named after the resolved view; where that does not show the mark (Ninja has one view for all
    operations), after the one that the mark stands on. It is kept in ``rt.views``, by marks, resolved view and place.
    """
    scopes = tuple(tuple(rt.config.of_mark(mark, resolved if shows(resolved, mark) else view)) for mark in marks)
    every = {scope.name: scope for one in reversed(scopes) for scope in reversed(one)}
    plan = ViewPlan(
        is_exempt(resolved) or is_exempt(view),
        exempt_methods(resolved),
        marks,
        scopes,
        frozenset(marks),
        tuple(every.values())[::-1],
        not any(scope.methods or scope.exempt_paths or scope.exempt_url_names for scope in every.values()),
    )
    if len(rt.views) < MOST_VIEWS:
        rt.views[marks, resolved, place_of(view)] = plan
    return plan


def applicable(config: Config, scopes: Iterable[Scope], request: HttpRequest, view: Any) -> Sequence[Scope]:
    """Those of the scopes that count this request: its method, and no exemption of theirs."""
    method = request.method or ""
    match = request.resolver_match
    url_name = match.view_name if match is not None else None
    scopes = [
        scope
        for scope in scopes
        if not (scope.exempt_paths or scope.exempt_url_names) or not is_exempt_from(scope, request.path_info, url_name)
    ]
    if method != "OPTIONS":
        return [scope for scope in scopes if scope.methods is None or method in scope.methods]
    # A preflight never spends the caller's budget. Where answering it costs what a request costs, it has its own.
    if getattr(getattr(view_class_of(view), "options", None), "__module__", "") in STOCK_OPTIONS:
        return [scope for scope in scopes if scope.methods is not None and method in scope.methods]
    return [
        config.for_options(scope) if scope.methods is None else scope
        for scope in scopes
        if scope.methods is None or method in scope.methods
    ]


def begin(
    request: HttpRequest, scopes: Sequence[Scope], started: Steps[RequestLimits] | Literal[False] | None = None
) -> Steps[HttpResponseBase | None]:
    """Decide the scopes. The refusal if one denied, None when the view may go on.

    ``started``: what ``limiter.quick`` has done already.
    """
    if started is False:
        limits = limits_of(request)
    else:
        limits = yield from (check_flow(request, scopes) if started is None else started)
    if not limits.has_denied:
        return None
    names = {scope.name for scope in scopes}
    denied = [decision for decision in limits.decisions if not decision.allowed and decision.scope in names]
    if not denied:
        return None
    return (yield from _refusal(get_config(), request, limits, denied))


def refuse_again(config: Config, request: HttpRequest, limits: RequestLimits) -> HttpResponseBase | None:
    """The finished refusal for a denial from memory that ``limiter.quick`` found; None when it takes a flow to make."""
    response = http.again(config, request, limits)
    if response is not None:
        limits.finished = True
    return response


def refuse(request: HttpRequest, error: RateLimited) -> Steps[HttpResponseBase]:
    """The refusal for a RateLimited that a view raised."""
    return _refusal(get_config(), request, limits_of(request), error.decisions)


def _refusal(
    config: Config, request: HttpRequest, limits: RequestLimits, denied: Sequence[Decision]
) -> Steps[HttpResponseBase]:
    decision = tightest(denied)
    assert decision is not None
    if decision.scope not in limits.scopes:
        # Asked without this request: its own scope still says how the refusal looks.
        limits.record([scope for scope in config.scopes if scope.name == decision.scope], [])
    return (yield from http.refuse(config, request, limits, decision))


def finish(request: HttpRequest, response: Any) -> Steps[Any]:
    """After the view: give back what should not count, release what is in flight, tell the numbers."""
    limits = limits_of(request)
    if (limits.finished and not limits.asks) or not limits.by_name:
        return response
    limits.finished = True
    config = get_config()
    try:
        yield from _outcomes(request, response, limits)
    except asyncio.CancelledError:  # the client goes while we give back: what is in flight lands all the same
        yield from _land(limits)
        raise
    if isinstance(response, HttpResponseBase):
        if limits.has_denied:
            http.complete(response, limits)
        http.write_headers(config, request, response, limits)
    return response


def tell(config: Config, request: HttpRequest, response: Any, limits: RequestLimits) -> bool:
    """The short end of a request that went the short way: nothing to give back, only numbers to tell.

    False when there is more to do, which is :func:`finish`'s.
    """
    asks = limits.asks
    if not asks or limits._by_name or not isinstance(response, HttpResponseBase):
        return False
    limits.finished = True
    return http.write_numbers(config, request, response, asks)


def fail(request: HttpRequest, error: BaseException) -> Steps[None]:
    """After a view that raised: it counts as the status that Django makes of the exception.

    A view that was cancelled, its client gone or its worker ending, has counted; only what is in flight is released.
    """
    limits = limits_of(request)
    if not limits.by_name or limits.finished:
        return
    limits.finished = True
    if isinstance(error, Exception):
        yield from _outcomes(request, http.response_of(error), limits)
    else:
        yield from _land(limits)


def _land(limits: RequestLimits) -> Steps[None]:
    """End what a request has in flight."""
    for name in list(limits.by_name):
        if limits.scopes[name].algorithm == CONCURRENT:
            yield from give_back_flow(limits, name)


def _outcomes(request: HttpRequest, response: Any, limits: RequestLimits) -> Steps[None]:
    # A Ninja operation returns data, a view with a bug nothing: there is no response to judge, so it counts.
    can_judge = isinstance(response, HttpResponseBase)
    for name, decision in list(limits.by_name.items()):
        scope = limits.scopes[name]
        if not scope.gives_back:
            continue
        if scope.algorithm == CONCURRENT:
            if getattr(response, "streaming", False) and limits.charged(name):
                _release_when_closed(limits, name, response)
            else:
                yield from give_back_flow(limits, name)
            continue
        if can_judge and scope.count_if is not None and limits.charged(name):
            counts = yield from _judge(scope, scope.count_if, request, response, True)
            if not counts:
                yield from give_back_flow(limits, name)
        if can_judge and scope.reset_if is not None and decision.allowed and decision.identity:
            resets = yield from _judge(scope, scope.reset_if, request, response, False)
            if resets:
                yield from reset_flow(scope, decision)


def _judge(scope: Scope, function: Any, request: HttpRequest, response: Any, default: bool) -> Steps[bool]:
    try:
        answer = yield function.step(request, response)
    except CallableError as error:
        if runtime().throttle.due(("callable", scope.name), ticks()):
            logger.error("scope %s: %s", scope.name, error, exc_info=error.__cause__, extra={"scope": scope.name})
        return default
    return bool(answer)


def _release_when_closed(limits: RequestLimits, name: str, response: Any) -> None:
    """In flight until the stream ends: servers close every response, also when the client has gone."""

    class Release:
        def close(self) -> None:
            run(give_back_flow(limits, name))

    response._resource_closers.append(Release().close)
