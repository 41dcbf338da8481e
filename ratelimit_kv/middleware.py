"""The middleware: decides when the view is known and before it runs, and answers what never reached a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from . import door
from .accounts import RequestLimits, inner, limits_of
from .conf import get_config
from .exceptions import RateLimited
from .limiter import aquick, quick
from .marks import hoistable
from .process import Runtime, runtime
from .scopes import Scope
from .steps import Step, Steps, arun, run

__all__ = ["RateLimitMiddleware"]


class RateLimitMiddleware:
    """Stands first in MIDDLEWARE, after SecurityMiddleware. Raises ImproperlyConfigured at start for wrong settings."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        get_config()
        self.get_response = get_response
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)
            # Django asks the bound method whether it is a coroutine function: no thread hop when nothing applies.
            self.process_view = self._process_view_async  # type: ignore[method-assign]

    def __call__(self, request: HttpRequest) -> Any:
        if self.is_async:
            return self._call_async(request)
        limits = self._open(request)
        try:
            response = self.get_response(request)
        except BaseException as error:  # Django answers exceptions further in: this is the worker ending
            run(door.fail(request, error))
            raise
        if self._is_over(request, response, limits):
            return response
        return run(self._after(request, response, limits))

    async def _call_async(self, request: HttpRequest) -> HttpResponseBase:
        limits = self._open(request)
        try:
            response = await self.get_response(request)
        except BaseException as error:  # Django answers exceptions further in: this is the client gone
            await arun(door.fail(request, error))
            raise
        if self._is_over(request, response, limits):
            return response  # type: ignore[no-any-return]
        return await arun(self._after(request, response, limits))

    def process_view(self, request: HttpRequest, view: Any, args: Any, kwargs: Any) -> HttpResponseBase | None | Any:
        """Decide the settings' scopes and the view's own marks in one call."""
        rt, limits = runtime(), limits_of(request)
        scopes = self._applying(rt, request, view, limits)
        if not scopes:
            return None
        short = quick(rt, request, limits, scopes)
        if short is False and (finished := door.refuse_again(rt.config, request, limits)) is not None:
            return finished
        return None if short is True else run(door.begin(request, scopes, short))

    async def _process_view_async(
        self, request: HttpRequest, view: Any, args: Any, kwargs: Any
    ) -> HttpResponseBase | None:
        rt, limits = runtime(), limits_of(request)
        scopes = self._applying(rt, request, view, limits)
        if not scopes:
            return None
        short = await aquick(rt, request, limits, scopes)
        if short is False and (finished := door.refuse_again(rt.config, request, limits)) is not None:
            return finished
        return None if short is True else await arun(door.begin(request, scopes, short))

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponseBase | None:
        """Answer a RateLimited that the view raised."""
        return run(door.refuse(inner(request), error)) if isinstance(error, RateLimited) else None

    def _open(self, request: HttpRequest) -> RequestLimits:
        limits = limits_of(request)
        limits.door = "middleware"
        return limits

    def _applying(self, rt: Runtime, request: HttpRequest, view: Any, limits: RequestLimits) -> Any:
        """The scopes that apply to a request, each once."""
        limits.resolved = True
        config = rt.config
        if not config.enabled:
            return ()
        plan = rt.views.get(view)
        if plan is None:
            plan = door.plan_of(rt, hoistable(view), view, view)
            if len(rt.views) < door.MOST_VIEWS:
                rt.views[view] = plan
        if (plan.is_exempt or plan.exempt_methods) and plan.exempts(request.method):
            limits.exempt = True
            return ()
        scopes: tuple[Scope, ...] = ()
        if config.site:
            match: Any = request.resolver_match
            scopes = config.scopes_for(request.path_info, "" if match is None else match.view_name, request.method)
        if not plan.marks:
            # For every other method it has been asked already which of them minds it or exempts the request.
            return door.applicable(config, scopes, request, view) if request.method == "OPTIONS" else scopes
        limits.counted_here = limits.counted_here.union(plan.marks)
        # The view's word on a scope goes before that of settings, for the methods that it speaks of.
        applying = door.applicable(config, (*plan.all_scopes, *scopes), request, view)
        return tuple({scope.name: scope for scope in reversed(applying)}.values())[::-1]

    def _is_over(self, request: HttpRequest, response: Any, limits: RequestLimits) -> bool:
        """Whether nothing is left to be done for a response, perhaps because its numbers have just been told."""
        if limits.finished:
            return True
        if not limits.asks:
            return limits.resolved and not limits.by_name
        return door.tell(get_config(), request, response, limits)

    def _went_astray(self, limits: RequestLimits, response: Any) -> bool:
        """Whether this is a refusal of what never reached a view: a 404, a host that isn't allowed, another middleware's."""
        return not limits.resolved and response.status_code >= 400

    def _after(self, request: HttpRequest, response: Any, limits: RequestLimits) -> Steps[Any]:
        if self._went_astray(limits, response):
            config = get_config()
            if config.enabled and config.site:
                everywhere = config.scopes_for(request.path_info, None, request.method)
                scopes = door.applicable(config, everywhere, request, None)
                refusal = (yield from door.begin(request, scopes)) if scopes else None
                if refusal is not None:
                    response = refusal
                    if callable(render := getattr(refusal, "render", None)):  # Django renders what comes from views
                        response = yield Step(render, sync_to_async(render))
        return (yield from door.finish(request, response))
