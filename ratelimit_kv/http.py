"""Decisions as HTTP: the refusal and the headers. Nothing else builds a response or writes a header.

Headers follow draft-ietf-httpapi-ratelimit-headers-11, the refusal RFC 6585 (429), RFC 9110 (Retry-After) and, for clients
that prefer JSON, RFC 9457 (problem details).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from django.core.exceptions import (
    BadRequest,
    PermissionDenied,
    RequestDataTooBig,
    SuspiciousOperation,
    TooManyFieldsSent,
)
from django.http import Http404, HttpRequest, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from django.template import loader
from django.utils.translation import get_language

from .accounts import RequestLimits
from .algorithms import MAX_COUNT, MICROSECOND
from .callables import CallableError
from .conf import Config
from .deciding import Ask
from .decisions import Decision, Reason, tightest
from .identity import preferred_type
from .process import runtime, ticks
from .rates import ceil_seconds
from .scopes import Scope
from .steps import Steps

__all__ = ["again", "complete", "phrase", "refuse", "response_of", "write_headers"]

logger = logging.getLogger("ratelimit_kv")

PROBLEM_TYPE = "https://iana.org/assignments/http-problem-types#quota-exceeded"
"""The problem type that the draft registers."""
TITLES = {
    429: "Too many requests",
    503: "Temporarily unavailable",
    400: "Bad request",
}
KINDS = ("text/html", "application/problem+json", "application/json", "text/plain")
TEMPLATES = ("429.html", "ratelimit_kv/429.html")
QUIET_WAIT = 60
"""Seconds: a QUIET scope rounds the wait up to whole minutes."""


def phrase(seconds: float | None) -> str:
    """A wait for people, in English, rounded up: "45 seconds", "12 minutes", "3 hours", "2 days"."""
    if seconds is None:
        return "a while"
    whole = ceil_seconds(seconds)
    for size, limit, word in ((1, 120, "second"), (60, 7200, "minute"), (3600, 172_800, "hour"), (86400, 0, "day")):
        if whole < limit or not limit:
            count = -(-whole // size)
            return f"{count} {word}" if count == 1 else f"{count} {word}s"
    raise AssertionError


def wait_of(decision: Decision, scope: Scope | None) -> int | None:
    """The seconds of Retry-After: whole, from 1; None when no wait helps."""
    if decision.status == 400:
        return None
    if decision.retry_after is None:
        return None if decision.reason is Reason.IMPOSSIBLE else 1
    wait = ceil_seconds(decision.retry_after)
    if scope is not None and scope.quiet:
        wait = -(-wait // QUIET_WAIT) * QUIET_WAIT
    return wait


def refuse(config: Config, request: HttpRequest, limits: RequestLimits, decision: Decision) -> Steps[HttpResponseBase]:
    """The response for a denial: the scope's RESPONSE, else the project's, else MESSAGE or our own words."""
    scope = limits.scopes.get(decision.scope)
    wait = wait_of(decision, scope)
    response: Any = None
    function = (scope.response if scope is not None else None) or config.response
    if function is not None:
        try:
            response = yield function.step(request, decision)
        except CallableError as error:
            if _due("response", decision.scope):
                logger.error("scope %s: %s", decision.scope, error, exc_info=error.__cause__)
        else:
            if not isinstance(response, HttpResponseBase):
                if _due("response", decision.scope):
                    logger.error(
                        "scope %s: %s returned %s, not a response",
                        decision.scope,
                        function.name,
                        type(response).__name__,
                    )
                response = None
    if response is None:
        response = _own(request, decision, scope, wait)
    _refused(response, wait)
    return response  # type: ignore[no-any-return]


def again(config: Config, request: HttpRequest, limits: RequestLimits) -> HttpResponse | None:
    """The refusal of a denial from memory, kept with it while the words are the same. None where the long way makes it."""
    assert limits.known is not None
    scope, known, at = limits.known
    kind = preferred(request)
    if kind == "html" or scope.response is not None or config.response is not None:
        return None
    # A MESSAGE may be a lazy translation: it is another text for who reads another language.
    language = get_language() if scope.message is not None else None
    words = (kind, language, max(1, -(-(known.until - at) // MICROSECOND)))
    made = known.refusal[0] if known.refusal else None
    if made is None or made[0] != words:
        decision = limits.by_name[scope.name]
        wait = wait_of(decision, scope)
        first = _own(request, decision, scope, wait)
        _refused(first, wait)
        write_headers(config, request, first, limits)
        made = (words, first.content, dict(first.headers._store))
        known.refusal[:] = [made]
    response: Any = HttpResponse(made[1], status=429)
    response.headers._store.update(made[2])
    response._has_been_logged = True
    return response  # type: ignore[no-any-return]


def complete(response: Any, limits: RequestLimits) -> None:
    """Give a refusal that a framework made of our denial what ours have: the wait, no storing, no line in Django's log."""
    decision = tightest([decision for decision in limits.decisions if not decision.allowed])
    if decision is None or response.status_code != decision.status:
        return
    _refused(response, wait_of(decision, limits.scopes.get(decision.scope)))


def _refused(response: Any, wait: int | None) -> None:
    headers = response.headers._store
    if wait is not None and "retry-after" not in headers:
        headers["retry-after"] = ("Retry-After", str(wait))
    headers["cache-control"] = ("Cache-Control", "no-store")
    # Our log has the transition; Django's would have a line, and ADMINS a mail, for every single refusal.
    response._has_been_logged = True


def _due(what: str, scope: str) -> bool:
    """Whether a mistake in how refusals look is to be logged: not once for every request of an attack."""
    return runtime().throttle.due((what, scope), ticks())


def _own(request: HttpRequest, decision: Decision, scope: Scope | None, wait: int | None) -> HttpResponse:
    status = decision.status
    kind = preferred(request)
    text = _words(decision, scope, wait)
    if kind == "html":
        html = _page(status, text, decision, scope, wait)
        if html is not None:
            return HttpResponse(html, status=status)
    elif kind == "json":
        violated: tuple[str, ...] = ()
        if scope is None or not scope.quiet:
            states = zip(policy_names(decision), decision.rates, strict=True)
            violated = tuple([name for name, state in states if not state.allowed]) or (decision.scope,)
        return HttpResponse(
            _problem(status, text, violated, wait), content_type="application/problem+json", status=status
        )
    return HttpResponse(f"{text}\n", content_type="text/plain; charset=utf-8", status=status)


@lru_cache(maxsize=1024)
def _problem(status: int, text: str, violated: tuple[str, ...], wait: int | None) -> bytes:
    """RFC 9457. The same for all who wait as long for the same."""
    body: dict[str, Any] = {"type": "about:blank", "title": TITLES[status], "status": status, "detail": text}
    if status == 429:
        body["type"] = PROBLEM_TYPE
        if violated:
            body["violated-policies"] = violated
    if wait is not None:
        body["retry_after"] = wait
    return json.dumps(body).encode()


def _words(decision: Decision, scope: Scope | None, wait: int | None) -> str:
    status = decision.status
    if status == 429 and scope is not None and scope.message is not None:
        limit = decision.limit if decision.limit is not None else ""
        try:
            return scope.message.format(retry_after=phrase(wait), limit=limit, scope=decision.scope)
        except (LookupError, ValueError, TypeError, AttributeError):  # a translation that asks for something else
            if _due("message", decision.scope):
                logger.exception("scope %s: its MESSAGE could not be filled in", decision.scope)
    if status == 503:
        return "This is not available right now. Please try again in a moment."
    if status == 400:
        return "This request does not say who is asking."
    if wait is None:
        return "This request asks for more than is allowed at once."
    return f"Too many requests. Please try again in {phrase(wait)}."


def _page(status: int, text: str, decision: Decision, scope: Scope | None, wait: int | None) -> str | None:
    # Without the request: context processors would touch the session and the user of somebody who is being refused.
    context = {
        "status": status,
        "title": TITLES[status],
        "message": text,
        "decision": decision,
        "scope": decision.scope if scope is None or not scope.quiet else "",
        "limit": decision.limit,
        "retry_after": wait,
        "retry_after_phrase": phrase(wait),
    }
    try:
        return str(loader.select_template(TEMPLATES).render(context))
    except Exception:  # the project's template may do anything; a refusal must not become a 500
        if _due("page", ""):
            logger.exception("the page for refused requests (%s) could not be rendered", " or ".join(TEMPLATES))
        return None


def preferred(request: HttpRequest) -> str:
    """``html``, ``json`` or ``text``, by Accept; a client that takes anything gets JSON if it sent JSON."""
    kind = preferred_type(request, KINDS)
    if kind is None:
        return "json" if (request.content_type or "").endswith("json") else "text"
    return {"text/html": "html", "text/plain": "text"}.get(kind, "json")


# --------------------------------------------------------------------------------------------------------- headers


def policy_names(decision: Decision) -> tuple[str, ...]:
    """The names of a scope's policies: the scope's, with the window where it has several rates."""
    if len(decision.rates) == 1:
        return (decision.scope,)
    return tuple(f"{decision.scope}.{state.window}s" for state in decision.rates)


@lru_cache(maxsize=4096)
def _policy(name: str, limit: int, window: int) -> str:
    return f'"{name}";q={limit};w={window}' if window else f'"{name}";q={limit}'


def write_headers(config: Config, request: HttpRequest, response: Any, limits: RequestLimits) -> None:
    """RateLimit-Policy and RateLimit (or the X- headers), if the response is this caller's alone."""
    style = config.headers
    if style == "none":
        return
    scopes = limits.scopes
    mine = [
        decision
        for decision in limits.by_name.values()
        if decision.remaining is not None and scopes[decision.scope].tells
    ]
    headers = response.headers._store
    if not mine or _is_shared(request, headers):
        return
    best = mine[0] if len(mine) == 1 else tightest(mine)
    assert best is not None
    if style == "legacy":
        if "x-ratelimit-limit" not in headers:
            headers["x-ratelimit-limit"] = ("X-RateLimit-Limit", str(best.limit))
            headers["x-ratelimit-remaining"] = ("X-RateLimit-Remaining", str(best.remaining))
            headers["x-ratelimit-reset"] = ("X-RateLimit-Reset", str(ceil_seconds(best.reset_after)))
        return
    if "ratelimit" in headers or "ratelimit-policy" in headers:
        return
    if len(mine) == 1 and len(best.rates) == 1:
        state = best.rates[0]
        name = best.scope
        policy = _policy(name, state.limit, state.window)
    else:
        policy = ", ".join(
            _policy(name, state.limit, state.window)
            for decision in mine
            for name, state in zip(policy_names(decision), decision.rates, strict=True)
        )
        name = best.scope
        for candidate, state in zip(policy_names(best), best.rates, strict=True):
            if state.limit == best.limit and state.window == best.window:
                name = candidate
    # Past ResponseHeaders.__setitem__, which looks for what cannot be in ours, and costs as much as all the rest here.
    headers["ratelimit-policy"] = ("RateLimit-Policy", policy)
    after = best.retry_after if best.retry_after is not None and not best.allowed else best.reset_after
    headers["ratelimit"] = ("RateLimit", f'"{name}";r={best.remaining};t={ceil_seconds(after)}')


def write_numbers(config: Config, request: HttpRequest, response: Any, asks: Sequence[Ask]) -> bool:
    """As :func:`write_headers`, for hits that passed: without making decisions of them. False if it cannot."""
    style = config.headers
    if style != "draft":
        return style == "none"
    headers = response.headers._store
    if len(headers) == 1 and "content-type" in headers:  # most have no other
        if getattr(request, "_cache_update_cache", False):
            return True
    elif "ratelimit" in headers or "ratelimit-policy" in headers or _is_shared(request, headers):
        return True
    said = name = ""
    least = reset_after = MAX_COUNT
    for ask in asks:
        names, policy = _told.get(ask.plan.token) or _tell(ask)
        if names:
            said = f"{said}, {policy}" if said else policy
            for own, (_, _, _, left, wait, _, _, _) in zip(names, ask.verdicts, strict=False):
                if left < least:
                    name, least, reset_after = own, left, wait
    if said:
        headers["ratelimit-policy"] = ("RateLimit-Policy", said)
        headers["ratelimit"] = ("RateLimit", f'"{name}";r={least};t={-(-reset_after // MICROSECOND)}')
    return True


_told: dict[int, tuple[tuple[str, ...], str]] = {}
"""By the token of a plan: the names of its policies, and what is said of them; no names when they are not to be told."""


def _tell(ask: Ask) -> tuple[tuple[str, ...], str]:
    name, plan = ask.scope.name, ask.plan
    names: tuple[str, ...] = ()
    if ask.scope.tells:
        names = (name,) if len(plan.rates) == 1 else tuple(f"{name}.{rate.period}s" for rate in plan.rates)
    said = ", ".join(
        _policy(own, limit, rate.period) for own, limit, rate in zip(names, plan.limits, plan.rates, strict=False)
    )
    if len(_told) > 4096:  # plans come and go with the answers of RATE callables
        _told.clear()
    told = _told[plan.token] = (names, said)
    return told


def _is_shared(request: HttpRequest, headers: Mapping[str, tuple[str, str]]) -> bool:
    """Whether others may be given a response: one caller's numbers must not stand in it."""
    if "cdn-cache-control" in headers or "surrogate-control" in headers:
        return True  # these go before Cache-Control in the caches that they are for (RFC 9213)
    if "cache-control" in headers:
        control = headers["cache-control"][1].lower()
        if "private" in control or "no-store" in control:
            return False
        if any(word in control for word in ("public", "max-age", "s-maxage")):
            return True
    # Without max-age a cache goes by Expires. Or Django's own is about to keep it.
    return "expires" in headers or bool(getattr(request, "_cache_update_cache", False))


def response_of(error: BaseException) -> HttpResponse:
    """The status that Django makes of a view's exception, as an empty response for COUNT_IF to look at."""
    status = getattr(error, "status_code", None)  # REST framework's and Ninja's own exceptions carry theirs
    if not isinstance(status, int) or not 400 <= status <= 599:
        if isinstance(error, Http404):
            status = 404
        elif isinstance(error, PermissionDenied):
            status = 403
        elif isinstance(error, RequestDataTooBig | TooManyFieldsSent):
            status = 413 if isinstance(error, RequestDataTooBig) else 400
        elif isinstance(error, BadRequest | SuspiciousOperation | MultiPartParserError):
            status = 400
        else:
            status = 500
    return HttpResponse(status=status)
