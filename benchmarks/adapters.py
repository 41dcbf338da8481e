"""Every limiter behind one small interface, each used as its own documentation says.

An adapter turns a view into a limited view. Nothing here measures, and no limiter is imported before a worker
process of its own has configured Django for it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from django.http import HttpRequest, HttpResponse

View = Callable[..., HttpResponse]
AsyncView = Callable[..., Awaitable[HttpResponse]]

DAY = 86_400
WIDE = 900_000
"""A limit that nobody reaches. (One of the limiters stops counting at 999,999.)"""


class Limit(NamedTuple):
    """So many hits a day for an address ("ip"), a user ("user") or all together ("everyone")."""

    name: str
    count: int
    who: str


# A day, so that hardly any run meets the end of a window.
LIMITS = {
    limit.name: limit
    for limit in (
        Limit("ip", WIDE, "ip"),
        Limit("user", WIDE, "user"),
        Limit("all", WIDE, "everyone"),
        Limit("ip3", 3, "ip"),
        Limit("user3", 3, "user"),
        Limit("all3", 3, "everyone"),
        Limit("ip100", 100, "ip"),
        Limit("all1000", 1000, "everyone"),
        Limit("lease1000", 1000, "everyone"),
    )
}


@dataclass(frozen=True)
class Backend:
    """Where the counters live, as Django settings and as an address for limiters with own clients."""

    name: str
    cache: Mapping[str, Any]
    """The entry "default" of CACHES."""
    databases: Mapping[str, Any]
    url: str = ""
    """The server as a URL, "" when there is none."""


LOCMEM, SQLITE, POSTGRES = "LocMem", "SQLite (WAL)", "PostgreSQL"
DJANGO_REDIS, REDIS_CACHE, MEMCACHED = "django-redis", "RedisCache", "memcached"
REDIS = (DJANGO_REDIS, REDIS_CACHE)


class NotSupported(Exception):
    """The limiter has no such thing. The message says why, or is empty."""


class Adapter:
    """One limiter. The defaults describe a decorator that works on any Django cache."""

    name: ClassVar[str]
    distribution: ClassVar[str | None] = None
    """On PyPI; None when it needs nothing beyond Django."""
    apps: ClassVar[tuple[str, ...]] = ()
    headers: ClassVar[bool] = False
    """Whether allowed responses carry rate-limit headers."""
    own_client: ClassVar[tuple[str, ...]] = ()
    """Backends that it reaches by a client of its own, not through the Django cache."""
    backends: ClassVar[tuple[str, ...]] = (LOCMEM, SQLITE, POSTGRES, DJANGO_REDIS, REDIS_CACHE, MEMCACHED)

    def __init__(self, backend: Backend, prefix: str) -> None:
        self.backend = backend
        self.prefix = prefix
        """Unique to the process, for those whose variants would share counters."""

    @classmethod
    def version(cls) -> str | None:
        """The installed version; None when it is not installed."""
        try:
            return importlib.metadata.version(cls.distribution) if cls.distribution else ""
        except importlib.metadata.PackageNotFoundError:
            return None

    def settings(self) -> dict[str, Any]:
        """What it adds to Django's settings."""
        return {}

    def prepare(self) -> None:
        """Make tables and the like, once."""

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        """The view under these limits; a denied request gets a response of status 429."""
        raise NotImplementedError

    def limited_async(self, view: AsyncView, limits: Sequence[Limit]) -> AsyncView:
        raise NotSupported("no async door")

    def installed(self, view: View, limits: Sequence[Limit]) -> tuple[View, list[str]]:
        """The view and the middleware of a whole project under these limits."""
        return self.limited(view, limits), []

    def middleware(self, get_response: View) -> Any:
        """Its middleware: "/assets/" exempt and, where that can be said, only "/everywhere/" limited."""
        raise NotSupported("no middleware")

    def can_pass(self, path: str) -> bool:
        """Whether that middleware leaves this path alone."""
        return False

    def bare(self, view: View) -> View:
        """The same view without the limit, for the floor."""
        return view


def too_many() -> HttpResponse:
    return HttpResponse("Too many requests", status=429)


def address(request: HttpRequest) -> str:
    return request.META["REMOTE_ADDR"]


# -- ours ----------------------------------------------------------------------------------------------------


class Ours(Adapter):
    name = "ratelimit_kv, headers off"
    apps = ("ratelimit_kv",)
    header_style: ClassVar[str] = "none"

    def settings(self) -> dict[str, Any]:
        scopes: dict[str, Any] = {
            limit.name: {"RATE": f"{limit.count}/day", "KEY": limit.who} for limit in LIMITS.values()
        }
        scopes["lease1000"]["LEASE"] = 20
        scopes["elsewhere"] = {
            "RATE": "900000/day",
            "KEY": "ip",
            "PATHS": ["/everywhere/*", "/assets/*"],
            "EXEMPT_PATHS": ["/assets/*"],
        }
        return {"RATELIMIT_KV": {"PREFIX": self.prefix, "HEADERS": self.header_style, "SCOPES": scopes}}

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        from ratelimit_kv import rate_limit

        return rate_limit(*(limit.name for limit in limits))(view)

    limited_async = limited

    def installed(self, view: View, limits: Sequence[Limit]) -> tuple[View, list[str]]:
        return self.limited(view, limits), ["ratelimit_kv.middleware.RateLimitMiddleware"]

    def middleware(self, get_response: View) -> Any:
        from ratelimit_kv.middleware import RateLimitMiddleware

        return RateLimitMiddleware(get_response)

    def can_pass(self, path: str) -> bool:
        return True


class OursWithHeaders(Ours):
    name = "ratelimit_kv, headers on"
    headers = True
    header_style = "draft"


# -- the bare store ------------------------------------------------------------------------------------------

COUNT_SCRIPT = """
local n = redis.call('INCR', KEYS[1])
local left = redis.call('PTTL', KEYS[1])
if left < 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]); left = tonumber(ARGV[1]) end
return {n, left}
"""


class RawIncr(Adapter):
    """redis-py and INCR: no expiry, no more than a number."""

    name = "raw redis-py INCR"
    distribution = "redis"
    own_client = backends = (DJANGO_REDIS,)

    def count(self, key: str) -> int:
        return self.client.incr(key)

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        import redis

        self.client = redis.Redis.from_url(self.backend.url, socket_timeout=0.25)

        def call(request: HttpRequest) -> HttpResponse:
            for limit in limits:
                if self.count(f"{self.prefix}:{limit.name}:{WHO[limit.who](request)}") > limit.count:
                    return too_many()
            return view(request)

        return call


class RawEvalsha(RawIncr):
    """redis-py and a script that counts, sets the expiry and tells the time left."""

    name = "raw redis-py EVALSHA"

    def count(self, key: str) -> int:
        return self.client.evalsha(self.sha, 1, key, DAY * 1000)[0]

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        call = super().limited(view, limits)
        self.sha = self.client.script_load(COUNT_SCRIPT)
        return call

    def limited_async(self, view: AsyncView, limits: Sequence[Limit]) -> AsyncView:
        import redis.asyncio

        client = redis.asyncio.Redis.from_url(self.backend.url, socket_timeout=0.25)
        sha = None

        async def call(request: HttpRequest) -> HttpResponse:
            nonlocal sha
            sha = sha or await client.script_load(COUNT_SCRIPT)
            for limit in limits:
                key = f"{self.prefix}:{limit.name}:{WHO[limit.who](request)}"
                if (await client.evalsha(sha, 1, key, DAY * 1000))[0] > limit.count:
                    return too_many()
            return await view(request)

        return call


WHO: dict[str, Callable[[HttpRequest], str]] = {
    "ip": address,
    "user": lambda request: str(request.user.pk),
    "everyone": lambda request: "everyone",
}


# -- the others ----------------------------------------------------------------------------------------------


class DjangoRatelimit(Adapter):
    name = "django-ratelimit"
    distribution = "django-ratelimit"

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        from django_ratelimit.decorators import ratelimit
        from django_ratelimit.exceptions import Ratelimited

        keys = {"ip": "ip", "user": "user", "everyone": lambda group, request: "everyone"}
        for limit in reversed(limits):
            view = ratelimit(group=limit.name, key=keys[limit.who], rate=f"{limit.count}/d")(view)

        def call(request: HttpRequest) -> HttpResponse:
            try:
                return view(request)
            except Ratelimited:
                return too_many()

        return call


class DjangoFastRatelimit(Adapter):
    name = "django-fast-ratelimit"
    distribution = "django-fast-ratelimit"
    keys: ClassVar[dict[str, Any]] = {"ip": "ip", "user": "user", "everyone": b"everyone"}

    def decorated(self, view: Any, limits: Sequence[Limit]) -> Any:
        from django_fast_ratelimit import decorate

        for limit in reversed(limits):
            view = decorate(group=limit.name, key=self.keys[limit.who], rate=f"{limit.count}/d", block=True)(view)
        return view

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        from django_fast_ratelimit import RatelimitExceeded

        decorated = self.decorated(view, limits)

        def call(request: HttpRequest) -> HttpResponse:
            try:
                return decorated(request)
            except RatelimitExceeded:
                return too_many()

        return call

    def limited_async(self, view: AsyncView, limits: Sequence[Limit]) -> AsyncView:
        from django_fast_ratelimit import RatelimitExceeded

        decorated = self.decorated(view, limits)

        async def call(request: HttpRequest) -> HttpResponse:
            try:
                return await decorated(request)
            except RatelimitExceeded:
                return too_many()

        return call


class DjangoSmartRatelimit(Adapter):
    name = "django-smart-ratelimit"
    distribution = "django-smart-ratelimit"
    apps = ("django_smart_ratelimit",)
    headers = True
    own_client = (LOCMEM, DJANGO_REDIS, MEMCACHED, SQLITE, POSTGRES)
    backends = (LOCMEM, SQLITE, POSTGRES, DJANGO_REDIS, MEMCACHED)

    def settings(self) -> dict[str, Any]:
        kind = {LOCMEM: "memory", DJANGO_REDIS: "redis", MEMCACHED: "memcached"}.get(self.backend.name, "database")
        settings: dict[str, Any] = {
            "RATELIMIT_BACKEND": kind,
            "RATELIMIT_ALGORITHM": "fixed_window",
            "RATELIMIT_MEMORY_MAX_KEYS": 10_000_000,
            "RATELIMIT_MIDDLEWARE": {"DEFAULT_RATE": "900000/d", "SKIP_PATHS": ["/assets/"]},
        }
        if kind == "redis":
            host, _, port = self.backend.url.removeprefix("redis://").partition(":")
            settings["RATELIMIT_REDIS"] = {
                "host": host,  # its async backend fails when given a "url"
                "port": int(port),
                "socket_timeout": 0.25,
                "socket_connect_timeout": 0.25,
            }
        elif kind == "memcached":
            settings["RATELIMIT_MEMCACHED"] = {"SERVERS": [self.backend.url]}
        return settings

    def prepare(self) -> None:
        if self.backend.name in (SQLITE, POSTGRES):
            from django.core.management import call_command

            call_command("migrate", "django_smart_ratelimit", verbosity=0)

    @staticmethod
    def key(limit: Limit) -> Callable[..., str]:
        from django_smart_ratelimit.key_functions import get_ip_key, get_user_key

        who = {"ip": get_ip_key, "user": get_user_key, "everyone": lambda request: "everyone"}[limit.who]
        return lambda request, *args, **kwargs: f"{limit.name}:{who(request)}"

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        from django_smart_ratelimit.decorator import rate_limit, ratelimit_batch

        if len(limits) == 1:
            return rate_limit(key=self.key(limits[0]), rate=f"{limits[0].count}/d")(view)
        return ratelimit_batch([{"key": self.key(limit), "rate": f"{limit.count}/d"} for limit in limits])(view)

    def limited_async(self, view: AsyncView, limits: Sequence[Limit]) -> AsyncView:
        from django_smart_ratelimit.decorator import aratelimit

        for limit in reversed(limits):
            view = aratelimit(key=self.key(limit), rate=f"{limit.count}/d")(view)
        return view

    def middleware(self, get_response: View) -> Any:
        from django_smart_ratelimit.middleware import RateLimitMiddleware

        return RateLimitMiddleware(get_response)

    def can_pass(self, path: str) -> bool:
        return path.startswith("/assets/")


class DjangoTrafficwatch(Adapter):
    """Its decorator only marks the view, its middleware limits. On Redis its Lua backend, else "fixed"."""

    name = "django-trafficwatch"
    distribution = "django-trafficwatch"
    apps = ("django_trafficwatch",)
    headers = True

    def settings(self) -> dict[str, Any]:
        return {
            "TRAFFICWATCH": {
                "BACKEND": "redis" if self.backend.name in REDIS else "fixed",
                "MAX_REQUESTS": WIDE,
                "WINDOW_SECONDS": DAY,
                "EXEMPT_PATHS": ["/assets/"],
            }
        }

    @staticmethod
    def key(limit: Limit) -> Callable[[HttpRequest], str]:
        from django_trafficwatch.keys import client_ip, user_or_ip

        return {
            "ip": lambda request: f"ip:{client_ip(request)}",
            "user": user_or_ip,
            "everyone": WHO["everyone"],
        }[limit.who]

    def marked(self, view: Any, limits: Sequence[Limit]) -> Any:
        from django_trafficwatch import trafficwatch_rule

        def marked(request: HttpRequest) -> Any:
            return view(request)

        for limit in reversed(limits):
            marked = trafficwatch_rule(DAY, limit.count, name=limit.name, key_func=self.key(limit))(marked)
        return marked

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        return through(self.middleware, self.marked(view, limits))

    def limited_async(self, view: AsyncView, limits: Sequence[Limit]) -> AsyncView:
        from asgiref.sync import sync_to_async

        marked = self.marked(view, limits)

        async def inner(request: HttpRequest) -> HttpResponse:
            # As Django's handler adapts a process_view that is not a coroutine function.
            response = await sync_to_async(middleware.process_view, thread_sensitive=True)(request, marked, (), {})
            return response or await marked(request)

        middleware = self.middleware(inner)
        return middleware

    def installed(self, view: View, limits: Sequence[Limit]) -> tuple[View, list[str]]:
        return self.marked(view, limits), ["django_trafficwatch.middleware.TrafficWatchMiddleware"]

    def middleware(self, get_response: View) -> Any:
        from django_trafficwatch.middleware import TrafficWatchMiddleware

        return TrafficWatchMiddleware(get_response)

    def can_pass(self, path: str) -> bool:
        return path.startswith("/assets/")


class DjangoRatelatch(Adapter):
    name = "django-ratelatch"
    distribution = "django-ratelatch"
    own_client = backends = (LOCMEM, DJANGO_REDIS)

    def settings(self) -> dict[str, Any]:
        return {
            "RATE_LIMITER": {
                "ALGORITHM": "fixed_window",
                "LIMIT": WIDE,
                "WINDOW_SECONDS": DAY,
                "KEY_FUNCTION": f"{__name__}.address",
                "BACKEND": "memory" if self.backend.name == LOCMEM else "redis",
                "REDIS_URL": self.backend.url,
                "REDIS_SOCKET_TIMEOUT": 0.25,
                "REDIS_CONNECT_TIMEOUT": 0.25,
            }
        }

    def limited(self, view: Any, limits: Sequence[Limit]) -> Any:
        from django.conf import settings
        from django.test import override_settings
        from django_ratelatch.integrations.decorator import rate_limit

        for limit in reversed(limits):
            # One key function a project, read when decorating: so a setting of its own for each.
            function = f"{__name__}.latch_{limit.name}"
            globals()[f"latch_{limit.name}"] = lambda request, limit=limit: f"{limit.name}:{WHO[limit.who](request)}"
            with override_settings(RATE_LIMITER={**settings.RATE_LIMITER, "KEY_FUNCTION": function}):
                view = rate_limit(f"{limit.count}/24h")(view)
        return view

    limited_async = limited


class DjangoRestFramework(Adapter):
    """UserRateThrottle on an APIView; its floor is an APIView without throttles."""

    name = "DRF UserRateThrottle"
    distribution = "djangorestframework"
    apps = ("rest_framework",)

    def settings(self) -> dict[str, Any]:
        return {"REST_FRAMEWORK": {"DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"]}}

    def api_view(self, view: View, throttles: Sequence[type]) -> View:
        from rest_framework.authentication import BaseAuthentication
        from rest_framework.views import APIView

        class AsDjangoSays(BaseAuthentication):
            def authenticate(self, request: Any) -> tuple[Any, None] | None:
                user = request._request.user
                return (user, None) if user.is_authenticated else None

        class Api(APIView):
            authentication_classes = (AsDjangoSays,)
            permission_classes = ()
            throttle_classes = throttles

            def get(self, request: Any) -> HttpResponse:
                return view(request)

        return Api.as_view()

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        from rest_framework.throttling import UserRateThrottle

        def throttle(limit: Limit) -> type:
            members: dict[str, Any] = {"rate": f"{limit.count}/day", "scope": limit.name}
            if limit.who == "everyone":  # else its own: the user, or the address of whoever is not signed in
                members["get_cache_key"] = lambda self, request, view: f"throttle_{limit.name}_everyone"
            return type(f"Throttle_{limit.name}", (UserRateThrottle,), members)

        return self.api_view(view, [throttle(limit) for limit in limits])

    def bare(self, view: View) -> View:
        return self.api_view(view, ())


class Limits(Adapter):
    """The library, in the decorator that one writes by hand: no headers, no request context."""

    name = "limits, by hand"
    distribution = "limits"
    own_client = backends = (LOCMEM, DJANGO_REDIS, MEMCACHED)

    @property
    def storage(self) -> tuple[str, dict[str, Any]]:
        return {
            LOCMEM: ("memory://", {}),
            DJANGO_REDIS: (self.backend.url, {"socket_timeout": 0.25, "socket_connect_timeout": 0.25}),
            MEMCACHED: (f"memcached://{self.backend.url}", {}),
        }[self.backend.name]

    def limited(self, view: View, limits: Sequence[Limit]) -> View:
        from limits import RateLimitItemPerDay
        from limits.storage import storage_from_string
        from limits.strategies import FixedWindowRateLimiter

        url, options = self.storage
        hit = FixedWindowRateLimiter(storage_from_string(url, **options)).hit
        items = [(RateLimitItemPerDay(limit.count), limit.name, WHO[limit.who]) for limit in limits]

        def call(request: HttpRequest) -> HttpResponse:
            for item, name, who in items:
                if not hit(item, name, who(request)):
                    return too_many()
            return view(request)

        return call

    def limited_async(self, view: AsyncView, limits: Sequence[Limit]) -> AsyncView:
        from limits import RateLimitItemPerDay
        from limits.aio.strategies import FixedWindowRateLimiter
        from limits.storage import storage_from_string

        url, options = self.storage
        if self.backend.name == MEMCACHED:
            raise NotSupported("needs another client")
        if self.backend.name == DJANGO_REDIS:
            options = {**options, "implementation": "redispy"}
        hit = FixedWindowRateLimiter(storage_from_string(f"async+{url}", **options)).hit
        items = [(RateLimitItemPerDay(limit.count), limit.name, WHO[limit.who]) for limit in limits]

        async def call(request: HttpRequest) -> HttpResponse:
            for item, name, who in items:
                if not await hit(item, name, who(request)):
                    return too_many()
            return await view(request)

        return call


def through(middleware: Callable[[View], Any], view: View) -> View:
    """The view behind a middleware, with ``process_view`` called where Django's handler calls it."""

    def inner(request: HttpRequest) -> HttpResponse:
        return process_view(request, view, (), {}) or view(request)

    outer = middleware(inner)
    process_view = getattr(outer, "process_view", None) or (lambda *args: None)
    return outer


ADAPTERS: dict[str, type[Adapter]] = {
    adapter.name: adapter
    for adapter in (
        Ours,
        OursWithHeaders,
        RawIncr,
        RawEvalsha,
        Limits,
        DjangoTrafficwatch,
        DjangoRatelimit,
        DjangoFastRatelimit,
        DjangoSmartRatelimit,
        DjangoRatelatch,
        DjangoRestFramework,
    )
}
OURS = (Ours.name, OursWithHeaders.name)
