"""``@rate_limit`` and ``@rate_limit_exempt``: on functions, methods, View classes, partials and callables, sync or async."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest

from . import door
from .accounts import RequestLimits, inner, limits_of
from .exceptions import RateLimited
from .limiter import aquick, quick
from .marks import EXEMPT, HERE, MARKS, Here, Mark, here
from .process import Runtime, runtime
from .scopes import NAME, OPTIONS, Defaults, Scope, did_you_mean, parse_cost, parse_family
from .steps import arun, run

__all__ = ["rate_limit", "rate_limit_exempt"]

View = TypeVar("View", bound=Callable[..., Any])

WORDS = ("algorithm", "timezone", *(option.lower() for option in OPTIONS if option not in ("PATHS", "URL_NAMES")))
"""What an inline limit may be told, the settings' options in lower case."""


def rate_limit(*rates_or_scopes: Any, scope: str | None = None, **options: Any) -> Callable[[View], View]:
    """Limit a view: by scopes of the settings, ``@rate_limit("ask", "ask-budget")``, or inline, ``@rate_limit("5/m", key="ip")``.

    Inline options are those of a scope in lower case, and ``scope`` gives it a name. A scope of the settings takes only
    ``cost`` and ``methods`` here. Raises TypeError or ValueError at once for what cannot be right.
    """
    mark = _mark(rates_or_scopes, scope, options)

    def decorate(view: View) -> View:
        if isinstance(view, type):
            return _on_class(view, mark)  # type: ignore[no-any-return]
        return _on_callable(view, mark)  # type: ignore[return-value]

    return decorate


def _mark(given: tuple[Any, ...], scope: str | None, options: dict[str, Any]) -> Mark:
    if len(given) == 1 and callable(given[0]) and not options and scope is None:
        raise TypeError('@rate_limit needs a rate or a scope: write @rate_limit("5/m") or @rate_limit("login").')
    if not given:
        raise TypeError(
            'rate_limit() needs a rate or a scope: write rate_limit("5/m", key="ip") or rate_limit("login").'
        )
    names = [one for one in given if isinstance(one, str) and NAME.match(one)]
    if len(names) == len(given):
        if scope is not None:
            raise TypeError(f"rate_limit({names[0]!r}, scope=...): {names[0]!r} is a scope of the settings already.")
        for word in options:
            if word not in ("cost", "methods"):
                raise TypeError(
                    f"rate_limit({names[0]!r}, {word}=...): a scope of the settings takes only cost and methods here. "
                    f"Write {word.upper()} into its settings."
                )
        methods = options.get("methods")
        return Mark(
            names=tuple(names),
            cost=None if options.get("cost") is None else parse_cost(options["cost"]),
            methods=None if methods is None else OPTIONS["METHODS"][1](methods),
        )
    if names and any("/" in str(one) for one in given):
        raise TypeError(f"rate_limit{given!r} mixes scopes and rates: use one decorator for each.")
    for word in options:
        if word not in WORDS:
            raise TypeError(f"rate_limit() has no option {word!r}.{did_you_mean(word, WORDS)}")
    upper = {word.upper(): value for word, value in options.items()}
    upper["RATE"] = given[0] if len(given) == 1 else list(given)
    # Parsed now, so that a mistake is found where it stands; the settings' defaults are not known yet.
    scopes, problems = parse_family("inline" if scope is None else scope, upper, Defaults(), "rate_limit()")
    if problems:
        raise ValueError("\n".join(map(str, problems)))
    return Mark(scopes=scopes, given=frozenset(upper), scope=scope or "")


def _on_class(view_class: Any, mark: Mark) -> Any:
    """A new ``dispatch`` on that very class."""
    if not hasattr(view_class, "dispatch"):
        raise TypeError(
            f"@rate_limit on {view_class.__qualname__}: it has no dispatch(). Decorate a View class, or its method."
        )
    inherited = view_class.dispatch

    if "dispatch" in view_class.__dict__:
        dispatch = _on_callable(inherited, mark)
    else:

        @functools.wraps(inherited)
        def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
            return super(view_class, self).dispatch(*args, **kwargs)

        dispatch = _on_callable(plain, mark)
    view_class.dispatch = dispatch
    return view_class


def _on_callable(view: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
    standing = (mark, *here(view))  # limits stacked directly on each other are decided in one call
    place = door.place_of(view)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        request: Any = args[0] if args else None
        if is_partial or not isinstance(request, HttpRequest):
            # ``dispatch`` of a class with async handlers is no coroutine function, and returns a coroutine all the same.
            if _is_async_view(view, args):
                return async_wrapper(*args, **kwargs)
            request = _request_of(args, kwargs)
        return _around(view, standing, place, request, args, kwargs)

    async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
        return await _around_async(view, standing, place, _request_of(args, kwargs), args, kwargs)

    is_partial = isinstance(view, functools.partial)  # method_decorator hands us a partial of a method
    if iscoroutinefunction(view) or iscoroutinefunction(getattr(view, "func", None)):
        wrapper = markcoroutinefunction(async_wrapper)
    functools.update_wrapper(wrapper, view)
    setattr(wrapper, MARKS, (mark, *getattr(view, MARKS, ())))
    setattr(wrapper, HERE, Here(wrapper, standing))
    return wrapper


def _is_async_view(view: Any, args: tuple[Any, ...]) -> bool:
    if args and getattr(args[0], "view_is_async", False) is True:
        return True
    bound = getattr(getattr(view, "func", None), "__self__", None)
    return getattr(bound, "view_is_async", False) is True


def _request_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> HttpRequest:
    for candidate in (*args[:2], kwargs.get("request")):
        request = inner(candidate)
        if isinstance(request, HttpRequest):
            return request
    raise TypeError(
        "@rate_limit found no request among the first two arguments. It belongs on views: functions of a request, "
        "methods of (self, request), View classes."
    )


def _enter(
    view: Any, marks: tuple[Mark, ...], place: int, request: HttpRequest
) -> tuple[Runtime, RequestLimits, Sequence[Scope]]:
    """The state of the process, the request's record, and the scopes to decide here: none when an outer door has
    decided these marks."""
    rt = runtime()
    limits = limits_of(request)
    decided = limits.counted_here
    if limits.exempt or not rt.config.enabled or (decided and decided.issuperset(marks)):
        return rt, limits, ()
    match = request.resolver_match
    resolved = view if match is None else match.func
    plan = rt.views.get((marks, resolved, place)) or door.plan_of(rt, marks, resolved, view)
    if (plan.is_exempt or plan.exempt_methods) and plan.exempts(request.method):
        limits.exempt = True
        return rt, limits, ()
    scopes: Any = plan.all_scopes
    if decided:
        scopes = [scope for mark, own in zip(marks, plan.scopes, strict=True) if mark not in decided for scope in own]
        limits.counted_here = decided | plan.all_marks
    else:
        limits.counted_here = plan.all_marks
    if plan.counts_all and request.method != "OPTIONS":
        return rt, limits, scopes
    return rt, limits, door.applicable(rt.config, scopes, request, resolved)


def _around(
    view: Callable[..., Any],
    marks: tuple[Mark, ...],
    place: int,
    request: HttpRequest,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    rt, limits, scopes = _enter(view, marks, place, request)
    short: Any = quick(rt, request, limits, scopes) if scopes else True
    if short is False and (finished := door.refuse_again(rt.config, request, limits)) is not None:
        return finished
    refusal = None if short is True else run(door.begin(request, scopes, short))
    if limits.door:  # an outer door finishes
        return view(*args, **kwargs) if refusal is None else refusal
    limits.door = "decorator"
    if refusal is not None:
        return run(door.finish(request, refusal))
    try:
        response = view(*args, **kwargs)
    except RateLimited as error:
        response = run(door.refuse(request, error))
    except BaseException as error:
        run(door.fail(request, error))
        raise
    return response if door.tell(rt.config, request, response, limits) else run(door.finish(request, response))


async def _around_async(
    view: Callable[..., Any],
    marks: tuple[Mark, ...],
    place: int,
    request: HttpRequest,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    rt, limits, scopes = _enter(view, marks, place, request)
    short: Any = await aquick(rt, request, limits, scopes) if scopes else True
    if short is False and (finished := door.refuse_again(rt.config, request, limits)) is not None:
        return finished
    refusal = None if short is True else await arun(door.begin(request, scopes, short))
    if limits.door:  # an outer door finishes
        return await view(*args, **kwargs) if refusal is None else refusal
    limits.door = "decorator"
    if refusal is not None:
        return await arun(door.finish(request, refusal))
    try:
        response = await view(*args, **kwargs)
    except RateLimited as error:
        response = await arun(door.refuse(request, error))
    except BaseException as error:
        await arun(door.fail(request, error))
        raise
    return response if door.tell(rt.config, request, response, limits) else await arun(door.finish(request, response))


@overload
def rate_limit_exempt(view: View) -> View: ...
@overload
def rate_limit_exempt() -> Callable[[View], View]: ...
def rate_limit_exempt(view: Any = None) -> Any:
    """Exempt a view, function or class, from every scope: the middleware's and those of decorators above or below."""
    if view is None:
        return rate_limit_exempt
    if isinstance(view, type):
        setattr(view, EXEMPT, True)
        return view

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    if iscoroutinefunction(view):
        wrapper = markcoroutinefunction(wrapper)
    functools.update_wrapper(wrapper, view)
    setattr(wrapper, EXEMPT, True)
    return wrapper
