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
from .process import runtime
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
        if limits.finished:
            return response
        if (limits.asks or limits.by_name or not limits.resolved) and not door.tell(request, response, limits):
            response = run(self._after(request, response, limits))
        return response

    async def _call_async(self, request: HttpRequest) -> HttpResponseBase:
        limits = self._open(request)
        try:
            response = await self.get_response(request)
        except BaseException as error:  # Django answers exceptions further in: this is the client gone
            await arun(door.fail(request, error))
            raise
        if limits.finished:
            return response  # type: ignore[no-any-return]
        if (limits.asks or limits.by_name or not limits.resolved) and not door.tell(request, response, limits):
            response = await arun(self._after(request, response, limits))
        return response  # type: ignore[no-any-return]

    def process_view(self, request: HttpRequest, view: Any, args: Any, kwargs: Any) -> HttpResponseBase | None | Any:
        """Decide the settings' scopes and the view's own marks in one call."""
        limits = limits_of(request)
        scopes = self._applying(request, view, limits)
        if not scopes:
            return None
        short = quick(request, limits, scopes)
        if short is False and (finished := door.refuse_again(request, limits)) is not None:
            return finished
        return None if short is True else run(door.begin(request, scopes, short))

    async def _process_view_async(
        self, request: HttpRequest, view: Any, args: Any, kwargs: Any
    ) -> HttpResponseBase | None:
        limits = limits_of(request)
        scopes = self._applying(request, view, limits)
        if not scopes:
            return None
        short = await aquick(request, limits, scopes)
        if short is False and (finished := door.refuse_again(request, limits)) is not None:
            return finished
        return None if short is True else await arun(door.begin(request, scopes, short))

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponseBase | None:
        """Answer a RateLimited that the view raised."""
        return run(door.refuse(inner(request), error)) if isinstance(error, RateLimited) else None

    def _open(self, request: HttpRequest) -> RequestLimits:
        limits = limits_of(request)
        limits.door = "middleware"
        return limits

    def _applying(self, request: HttpRequest, view: Any, limits: RequestLimits) -> Any:
        """The scopes that apply to a request, each once."""
        limits.resolved = True
        rt = runtime()
        config = rt.config
        if not config.enabled:
            return ()
        plan = rt.views.get(view)
        if plan is None:
            plan = door.plan_of(rt, hoistable(view), view, view)
            if len(rt.views) < door.MOST_VIEWS:
                rt.views[view] = plan
        if plan.exempts(request.method):
            limits.exempt = True
            return ()
        scopes: tuple[Scope, ...] = ()
        if config.site:
            match = request.resolver_match
            url_name = match.view_name if match is not None else ""
            scopes = config.scopes_for(request.path_info, url_name, request.method or "")
        if not plan.marks:
            return door.applicable(config, scopes, request, view) if scopes else ()
        limits.counted_here = limits.counted_here.union(plan.marks)
        # The view's word on a scope goes before that of settings, for the methods that it speaks of.
        applying = door.applicable(config, (*plan.all_scopes, *scopes), request, view)
        return tuple({scope.name: scope for scope in reversed(applying)}.values())[::-1]

    def _went_astray(self, limits: RequestLimits, response: Any) -> bool:
        """Whether this is a refusal of what never reached a view: a 404, a host that isn't allowed, another middleware's."""
        return not limits.resolved and response.status_code >= 400

    def _after(self, request: HttpRequest, response: Any, limits: RequestLimits) -> Steps[Any]:
        if self._went_astray(limits, response):
            config = get_config()
            if config.enabled and config.site:
                everywhere = config.scopes_for(request.path_info, None, request.method or "")
                scopes = door.applicable(config, everywhere, request, None)
                refusal = (yield from door.begin(request, scopes)) if scopes else None
                if refusal is not None:
                    response = refusal
                    if callable(render := getattr(refusal, "render", None)):  # Django renders what comes from views
                        response = yield Step(render, sync_to_async(render))
        return (yield from door.finish(request, response))
