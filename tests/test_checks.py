"""The system checks: nothing for a project in order, and for each id a project that is not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.cache.backends.redis import RedisCache
from django.core.checks import CheckMessage, run_checks
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View

from ratelimit_kv import rate_limit
from ratelimit_kv.algorithms import FIXED
from ratelimit_kv.checks import CHECKS, check_rate_limits, checks_table_markdown
from ratelimit_kv.middleware import RateLimitMiddleware
from ratelimit_kv.stores.base import ALL_KINDS
from ratelimit_kv.stores.database import DatabaseStore
from ratelimit_kv.stores.redis import RedisStore

OURS = "ratelimit_kv.middleware.RateLimitMiddleware"
SECURITY = "django.middleware.security.SecurityMiddleware"
SESSIONS = "django.contrib.sessions.middleware.SessionMiddleware"
CSRF = "django.middleware.csrf.CsrfViewMiddleware"
AUTH = "django.contrib.auth.middleware.AuthenticationMiddleware"
DJANGO = "django.core.cache.backends"

REDIS = {
    "BACKEND": f"{DJANGO}.redis.RedisCache",
    "LOCATION": "redis://127.0.0.1:1/0",
    "OPTIONS": {"socket_timeout": 0.25, "socket_connect_timeout": 0.25},
}
DJANGO_REDIS = {
    "BACKEND": "django_redis.cache.RedisCache",
    "LOCATION": "redis://127.0.0.1:1/1",
    "OPTIONS": {"SOCKET_TIMEOUT": 0.25, "SOCKET_CONNECT_TIMEOUT": 0.25},
}
LOCMEM = {"BACKEND": f"{DJANGO}.locmem.LocMemCache"}
DATABASE = {
    "BACKEND": f"{DJANGO}.db.DatabaseCache",
    "LOCATION": "counters",
    "OPTIONS": {"MAX_ENTRIES": 1_000_000},
}
FILES = {"BACKEND": f"{DJANGO}.filebased.FileBasedCache", "LOCATION": "/nowhere", "OPTIONS": {"MAX_ENTRIES": 1_000_000}}
PYMEMCACHE = {
    "BACKEND": f"{DJANGO}.memcached.PyMemcacheCache",
    "LOCATION": "127.0.0.1:1",
    "OPTIONS": {"timeout": 0.25, "connect_timeout": 0.25},
}


def view(request: HttpRequest, **kwargs: Any) -> HttpResponse:
    return HttpResponse("ok")


def limited(*args: Any, **kwargs: Any) -> Callable[..., HttpResponse]:
    """A new view with such a limit."""

    def one(request: HttpRequest) -> HttpResponse:
        return HttpResponse("ok")

    return rate_limit(*args, **kwargs)(one)


def urlconf(*patterns: Any) -> ModuleType:
    module = ModuleType("urls_of_a_test")
    module.urlpatterns = list(patterns)  # type: ignore[attr-defined]
    return module


PLACES = (
    path("", view, name="home"),
    path("login/", view, name="login"),
    path("register/", view, name="register"),
    path("reset/", view, name="password_reset"),
    path("health", view, name="health"),
    path("api/<int:pk>/", view, name="api-item"),
    path("admin/", include(([path("login/", view, name="login")], "admin"))),
)
LIMITED = (
    path("ask/", limited("ask", "budget"), name="ask"),
    path("roast/", limited("roast"), name="roast"),
)


@pytest.fixture
def messages(settings: Any) -> Callable[..., list[CheckMessage]]:
    """What the checks say of a project in order, with these changes.

    ``cache`` is the alias "ratelimit", ``scopes`` replaces SCOPES, ``urls`` the URLconf (with other scopes it has no
    limited views); words in capitals are options of RATELIMIT_KV, ``django`` has settings of Django.
    """

    def run(
        *,
        cache: Any = REDIS,
        scopes: Any = None,
        urls: Any = None,
        middleware: Any = (SECURITY, OURS, SESSIONS, CSRF, AUTH),
        caches: Any = None,
        django: Any = None,
        **options: Any,
    ) -> list[CheckMessage]:
        settings.DEBUG = False
        settings.ROOT_URLCONF = urls or urlconf(*PLACES, *(LIMITED if scopes is None else ()))
        settings.MIDDLEWARE = list(middleware)
        settings.CACHES = {"default": LOCMEM, "ratelimit": cache, **(caches or {})}
        for name, value in (django or {}).items():
            setattr(settings, name, value)
        settings.RATELIMIT_KV = {
            "CACHE": "ratelimit",
            "TRUSTED_PROXIES": ["10.0.0.0/8"],
            "SCOPES": SCOPES if scopes is None else scopes,
            **options,
        }
        return run_checks(tags=["ratelimit_kv"])

    return run


@pytest.fixture
def ids(messages: Callable[..., list[CheckMessage]]) -> Callable[..., list[str]]:
    """The same, only the ids, without their common start."""

    def run(**changes: Any) -> list[str]:
        found = messages(**changes)
        for message in found:
            assert message.id in CHECKS
            assert message.hint, "each says what to do"
        return [str(message.id).removeprefix("ratelimit_kv.") for message in found]

    return run


SCOPES: dict[str, Any] = {
    "global": {
        "RATE": "200/m",
        "KEY": "ip",
        "PATHS": ["*"],
        "EXEMPT_PATHS": ["/health", "/assets/*", "/.well-known/*"],
    },
    "auth": {"RATE": "30/m", "KEY": "ip", "URL_NAMES": ["login", "register", "password_reset"], "METHODS": ["POST"]},
    "signin": {"PRESET": "login", "URL_NAMES": ["login", "admin:login"]},
    "roast": {"RATE": "5/day", "KEY": "cookie:anon+ip", "CEILING": 5},
    "ask": {"RATE": "20/h", "KEY": "user|ip", "MESSAGE": "You've asked a lot this hour. Come back in {retry_after}."},
    "budget": {"RATE": "100/day", "KEY": "everyone", "TIMEZONE": "Europe/Rome"},
    "short": "10/s",
}
ASK = {"ask": {"RATE": "20/h", "KEY": "ip"}}
"""One scope that nothing can be said about, whatever is around it."""
PLAIN_URLS = urlconf(path("", view, name="home"))


# ------------------------------------------------------------------------------------------------------------- silence


@pytest.mark.parametrize(
    "cache",
    [
        REDIS,
        DJANGO_REDIS,
        DATABASE,
        PYMEMCACHE,
        {"BACKEND": "django_valkey.cache.ValkeyCache", **{k: DJANGO_REDIS[k] for k in ("LOCATION", "OPTIONS")}},
        {**REDIS, "BACKEND": f"{__name__}.OwnRedis"},
        {**REDIS, "LOCATION": "redis://127.0.0.1:1/0?socket_timeout=1", "OPTIONS": {}},
        {**DJANGO_REDIS, "OPTIONS": {"CONNECTION_POOL_KWARGS": {"socket_timeout": 1}}},
    ],
    ids=lambda cache: cache["BACKEND"].rpartition(".")[2],
)
def test_a_project_in_order_hears_nothing(ids: Any, cache: Any) -> None:
    if cache["BACKEND"].endswith("PyMemcacheCache"):
        pytest.importorskip("ratelimit_kv.stores.memcached")
    assert ids(cache=cache) == []


class OwnRedis(RedisCache):
    """A subclass counts as what it is."""


def test_nothing_is_said_when_limits_are_off(ids: Any) -> None:
    dummy = {"BACKEND": f"{DJANGO}.dummy.DummyCache"}
    assert ids(cache=dummy, scopes={"x": {"RATE": "1/m", "PATHS": ["/nowhere"]}}, middleware=[], ENABLED=False) == []


def test_nothing_is_said_when_nothing_is_limited(ids: Any, settings: Any) -> None:
    assert ids(cache=LOCMEM, scopes={}, urls=PLAIN_URLS, middleware=[OURS, OURS]) == []
    del settings.RATELIMIT_KV
    assert check_rate_limits() == []


def test_a_decorated_view_is_enough_to_be_looked_at(ids: Any) -> None:
    assert "W001" in ids(cache=LOCMEM, scopes={}, urls=urlconf(path("", limited("5/m", key="ip"))))


def test_on_a_machine_of_ones_own_caches_are_a_matter_of_taste(ids: Any) -> None:
    for cache in (LOCMEM, FILES, {**REDIS, "OPTIONS": {}}, {"BACKEND": f"{__name__}.Strange"}):
        assert ids(cache=cache, scopes=ASK, django={"DEBUG": True}) == []


def test_messages_can_be_silenced(messages: Any, settings: Any) -> None:
    settings.SILENCED_SYSTEM_CHECKS = ["ratelimit_kv.W001", "ratelimit_kv.W005"]
    assert [message for message in messages(cache=LOCMEM) if not message.is_silenced()] == []


def test_a_broken_urlconf_is_left_to_django(messages: Any, settings: Any) -> None:
    for broken in ("no.such.module", urlconf(object())):
        settings.ROOT_URLCONF = broken
        settings.MIDDLEWARE = [OURS, AUTH]
        settings.RATELIMIT_KV = {"SCOPES": ASK, "CACHE": "default"}
        assert {message.id for message in check_rate_limits()} <= {"ratelimit_kv.W001", "ratelimit_kv.W005"}


def test_a_middleware_that_cannot_be_imported_is_left_to_django(ids: Any) -> None:
    assert ids(middleware=["no.such.Middleware", OURS, SESSIONS, AUTH]) == []


# --------------------------------------------------------------------------------------------------------- the table


def test_every_id_is_in_the_table_and_proven_here() -> None:
    source = Path(__file__).read_text("utf-8")
    tested = set(re.findall(r"\b([EW]0\d\d)\b", source))
    assert {f"ratelimit_kv.{number}" for number in tested} == set(CHECKS)


def test_the_table_for_people() -> None:
    lines = checks_table_markdown().splitlines()
    assert len(lines) == 2 + len(CHECKS)
    assert all(line.count("|") == 4 for line in lines)


# -------------------------------------------------------------------------------------------------------- the settings


def test_E001_every_mistake_with_its_path(messages: Any) -> None:
    found = messages(
        scopes={"ask": {"RATE": "20/hr", "KAY": "ip"}, "Bad": "1/m"}, TRUSTED_PROXIES=["10.0.0.0/33"], HEADERZ="draft"
    )
    assert {message.id for message in found} == {"ratelimit_kv.E001"}
    text = "\n".join(message.msg for message in found)
    assert 'RATELIMIT_KV["SCOPES"]["ask"]["RATE"]: ' in text
    assert "Did you mean '20/h'?" in text
    assert "RATELIMIT_KV[\"SCOPES\"][\"ask\"]: 'KAY' is not an option of a scope. Did you mean 'KEY'?" in text
    assert 'RATELIMIT_KV["SCOPES"]["Bad"]: \'Bad\' cannot be the name of a scope.' in text
    assert 'RATELIMIT_KV["TRUSTED_PROXIES"][0]: ' in text
    assert "RATELIMIT_KV: 'HEADERZ' is not an option. Did you mean 'HEADERS'?" in text
    assert len(found) == 5


def test_E001_also_when_limits_are_off(ids: Any) -> None:
    # The middleware does not start with such settings, and whoever switches limits on again should not find them then.
    assert ids(ENABLED=False, PREFIX="") == ["E001"]


def test_E002_an_unknown_scope_anywhere_in_the_urlconf(messages: Any, ids: Any) -> None:
    class Handlers(View):
        @rate_limit("asked")
        def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    @method_decorator(rate_limit("ask", "aks"), name="dispatch")
    class Dispatch(View):
        pass

    for one in (
        limited("asq"),
        login_required(limited("asq")),
        Handlers.as_view(),
        Dispatch.as_view(),
    ):
        inner = urlconf(path("in/", include(([path("x/", one)], "deep"))))
        (message,) = messages(scopes=ASK, urls=inner)
        assert message.id == "ratelimit_kv.E002"
        assert "Did you mean 'ask'?" in message.msg
    assert ids(scopes=ASK, urls=urlconf(path("", limited("ask")))) == []


def test_E003_two_definitions_of_one_name(ids: Any) -> None:
    def two(*views: Any) -> list[str]:
        return ids(scopes=ASK, urls=urlconf(*(path(f"{n}/", one) for n, one in enumerate(views))))  # type: ignore[no-any-return]

    assert two(limited("1/m", key="ip", scope="ask")) == ["E003"]
    assert two(limited("1/m", key="ip", scope="x"), limited("2/m", key="ip", scope="x")) == ["E003"]
    assert two(limited("1/m", key="ip", scope="x"), limited("1/m", key="ip", methods=["POST"], scope="x")) == ["E003"]
    # One limit for several views is what a name is for.
    assert two(limited("1/m", key="ip", scope="x"), limited("1/m", key="ip", scope="x")) == []
    assert two(limited("20/h", key="ip", scope="ask")) == []
    shared = limited("1/m", key="ip")
    assert two(shared, shared, limited("2/m", key="ip")) == []


def test_E003_members_of_families_too(ids: Any) -> None:
    same_name = path("x/", limited("1/m", key="ip", scope="signin.account"))
    assert ids(urls=urlconf(*PLACES, same_name)) == ["E003"]


def test_E004_places_without_the_middleware(ids: Any, messages: Any) -> None:
    assert "E004" in ids(middleware=[SESSIONS, AUTH])
    assert ids(scopes=ASK, middleware=[SESSIONS, AUTH]) == []
    assert ids(middleware=[f"{__name__}.OwnMiddleware", SESSIONS, AUTH]) == []
    (message,) = messages(scopes={"a": {"RATE": "1/m", "KEY": "ip", "URL_NAMES": ["home"]}}, middleware=[])
    assert message.id == "ratelimit_kv.E004"
    assert OURS in message.hint


class OwnMiddleware(RateLimitMiddleware):
    pass


def test_E005_the_middleware_twice(ids: Any) -> None:
    assert ids(middleware=[OURS, SESSIONS, AUTH, OURS]) == ["E005"]
    assert ids(middleware=[OURS, SESSIONS, AUTH, f"{__name__}.OwnMiddleware"]) == ["E005"]


# ---------------------------------------------------------------------------------------------------------- the caches


@pytest.mark.parametrize(
    "cache",
    [
        {"BACKEND": "no.such.Cache"},
        {},
        {**DJANGO_REDIS, "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"}},
        {**LOCMEM, "KEY_FUNCTION": "no.such.function"},
    ],
)
def test_E006_a_cache_that_cannot_be_used(ids: Any, cache: Any) -> None:
    assert ids(scopes=ASK, cache=cache) == ["E006"]


def test_E006_an_alias_that_only_a_decorator_names(messages: Any, ids: Any) -> None:
    (message,) = messages(scopes=ASK, urls=urlconf(path("", limited("1/m", key="ip", cache="ratelimits"))))
    assert message.id == "ratelimit_kv.E006"
    assert "Did you mean 'ratelimit'?" in message.msg
    assert ids(scopes=ASK, urls=urlconf(path("", limited("1/m", key="ip", cache="ratelimit")))) == []


@pytest.mark.parametrize("word", ["bucket", "concurrent"])
def test_E007_an_algorithm_that_the_cache_cannot_run(messages: Any, ids: Any, word: str) -> None:
    scopes = {"ask": {"RATE": "5" if word == "concurrent" else "5/m", "KEY": "ip", "ALGORITHM": word}}
    cache = {"BACKEND": f"{__name__}.Strange"}
    (message,) = (one for one in messages(scopes=scopes, cache=cache) if one.id == "ratelimit_kv.E007")
    assert word in message.msg
    assert "Redis" in message.hint
    assert ids(scopes=scopes) == []


def test_E007_a_ban_that_the_cache_cannot_run(ids: Any) -> None:
    scopes = {"ask": {"RATE": "5/m", "KEY": "ip", "BAN": {}}}
    assert ids(scopes=scopes, cache={"BACKEND": f"{__name__}.Strange"}) == ["E007", "W004"]
    assert ids(scopes=scopes) == []


def test_E007_what_the_hint_promises() -> None:
    assert RedisStore.kinds == DatabaseStore.kinds == ALL_KINDS
    assert FIXED in ALL_KINDS


class Strange(BaseCache):
    """A cache that nobody has heard of."""

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(params)


def test_E008_leases_of_all_processes(ids: Any) -> None:
    scopes = {"ask": {"RATE": "1000/h", "KEY": "ip", "LEASE": 100}}
    assert ids(scopes=scopes, PROCESSES=11) == ["E008"]
    assert ids(scopes=scopes, PROCESSES=10) == []
    assert ids(scopes=scopes) == []


@pytest.mark.parametrize("cache", [PYMEMCACHE, DATABASE])
def test_E009_keys_that_are_too_long(messages: Any, ids: Any, cache: Any) -> None:
    if cache is PYMEMCACHE:
        pytest.importorskip("ratelimit_kv.stores.memcached")
    long_prefix = {**cache, "KEY_PREFIX": "p" * 150}
    (message,) = messages(scopes=ASK, cache=long_prefix)
    assert message.id == "ratelimit_kv.E009"
    too_many = int(re.search(r"by (\d+) characters", message.hint)[1])  # type: ignore[index]
    assert ids(scopes=ASK, cache={**cache, "KEY_PREFIX": "p" * (150 - too_many)}) == []
    assert ids(scopes=ASK, cache={**cache, "KEY_PREFIX": "p" * (151 - too_many)}) == ["E009"]
    # C11: what people write fits.
    assert ids(cache={**cache, "KEY_PREFIX": "p" * 60, "VERSION": 12}) == []


def test_E009_as_the_project_makes_its_keys(ids: Any) -> None:
    for function in (long_key, f"{__name__}.long_key"):
        assert ids(scopes=ASK, cache={**DATABASE, "KEY_FUNCTION": function}) == ["E009"]
    assert ids(scopes=ASK, cache={**DATABASE, "KEY_FUNCTION": lambda key, prefix, version: key}) == []
    for cache in (REDIS, LOCMEM):
        assert "E009" not in ids(scopes=ASK, cache={**cache, "KEY_PREFIX": "p" * 300})


def long_key(key: str, prefix: str, version: int) -> str:
    return f"{key:>256}"


def test_E009_rates_that_a_function_says(ids: Any) -> None:
    scopes = {"ask": {"RATE": f"{__name__}.rate", "KEY": "ip"}, "off": {"RATE": None, "KEY": "ip"}}
    assert ids(scopes=scopes, cache={**DATABASE, "KEY_PREFIX": "p" * 200}) == ["E009"]
    assert ids(scopes=scopes, cache=DATABASE) == []


def rate(request: HttpRequest) -> str:
    return "5/m"


def test_W001_a_cache_of_one_process(messages: Any, ids: Any) -> None:
    for backend in (f"{DJANGO}.locmem.LocMemCache", f"{__name__}.OwnLocMem"):
        roomy = {"BACKEND": backend, "OPTIONS": {"MAX_ENTRIES": 100_000}}
        assert ids(cache=roomy) == ["W001"]
    (message,) = messages(cache=roomy)
    assert "CACHES['ratelimit']" in message.msg
    # A second alias that no scope uses is none of our business.
    assert ids(caches={"other": LOCMEM}) == []


class OwnLocMem(LocMemCache):
    pass


def test_W002_a_cache_that_keeps_nothing(ids: Any) -> None:
    for debug in (True, False):
        assert ids(cache={"BACKEND": f"{DJANGO}.dummy.DummyCache"}, scopes=ASK, django={"DEBUG": debug}) == ["W002"]


def test_W003_a_cache_of_one_host(ids: Any) -> None:
    assert ids(cache=FILES) == ["W003"]


def test_W004_a_cache_that_we_do_not_know(ids: Any) -> None:
    assert ids(cache={"BACKEND": f"{__name__}.Strange"}, scopes=ASK) == ["W004"]


@pytest.mark.parametrize("cache", [LOCMEM, DATABASE, FILES])
def test_W005_room_for_few(ids: Any, cache: Any) -> None:
    for options, expected in (
        ({}, True),
        ({"MAX_ENTRIES": 9_999}, True),
        ({"MAX_ENTRIES": "300"}, True),
        ({"MAX_ENTRIES": "many"}, True),
        ({"MAX_ENTRIES": 10_000}, False),
    ):
        assert ("W005" in ids(cache={**cache, "OPTIONS": options})) is expected
    assert "W005" not in ids(cache={**cache, "OPTIONS": {}, "max_entries": 10_000})


def test_W006_an_alias_that_others_use(messages: Any, ids: Any) -> None:
    assert ids(CACHE="default", caches={"default": DATABASE}) == ["W006"]
    for engine in ("cache", "cached_db"):
        django = {"SESSION_ENGINE": f"django.contrib.sessions.backends.{engine}", "SESSION_CACHE_ALIAS": "ratelimit"}
        (message,) = messages(cache=DATABASE, django=django)
        assert message.id == "ratelimit_kv.W006"
        assert "sessions" in message.msg
        assert ids(cache=DATABASE, django={**django, "SESSION_CACHE_ALIAS": "default"}) == []
    pages = [OURS, "django.middleware.cache.UpdateCacheMiddleware", SESSIONS, AUTH]
    assert ids(cache=DATABASE, django={"CACHE_MIDDLEWARE_ALIAS": "ratelimit"}, middleware=pages) == ["W006"]
    assert ids(cache=DATABASE, django={"CACHE_MIDDLEWARE_ALIAS": "default"}, middleware=pages) == []
    # Nothing is evicted there.
    assert ids(CACHE="default", caches={"default": REDIS}) == []


def test_W007_no_timeout(messages: Any, ids: Any) -> None:
    for cache in (REDIS, DJANGO_REDIS):
        assert ids(cache={**cache, "OPTIONS": {}}) == ["W007"]
        assert ids(cache={**cache, "OPTIONS": dict.fromkeys(cache["OPTIONS"], 30)}) == ["W007"]
        assert ids(cache={**cache, "OPTIONS": dict.fromkeys(cache["OPTIONS"], 5)}) == []
        (message,) = messages(cache={key: value for key, value in cache.items() if key != "OPTIONS"})
        assert next(iter(cache["OPTIONS"])) in message.hint, "in the words of that backend"


def test_W007_no_timeout_for_memcached(messages: Any) -> None:
    pytest.importorskip("ratelimit_kv.stores.memcached")
    for options in ({}, {"timeout": 1}, {"connect_timeout": 1}):
        (message,) = messages(cache={**PYMEMCACHE, "OPTIONS": options})
        assert message.id == "ratelimit_kv.W007"


def test_W008_one_pool_for_two_aliases(ids: Any) -> None:
    slow = {**DJANGO_REDIS, "OPTIONS": {"SOCKET_TIMEOUT": 5}}
    assert ids(cache=DJANGO_REDIS, caches={"default": slow}) == ["W008"]
    assert ids(cache=DJANGO_REDIS, caches={"default": {**slow, "LOCATION": ["redis://127.0.0.1:1/1"]}}) == ["W008"]
    assert ids(cache=DJANGO_REDIS, caches={"default": {**slow, "LOCATION": "redis://127.0.0.1:1/2"}}) == []
    assert ids(cache=DJANGO_REDIS, caches={"default": {**REDIS, "LOCATION": DJANGO_REDIS["LOCATION"]}}) == []
    # Options that the pool does not depend on, and Django's backend, which has a pool for each cache.
    other = {**DJANGO_REDIS, "OPTIONS": {**DJANGO_REDIS["OPTIONS"], "IGNORE_EXCEPTIONS": True}}
    assert ids(cache=DJANGO_REDIS, caches={"default": other}) == []
    assert ids(cache=REDIS, caches={"default": {**REDIS, "OPTIONS": {"socket_timeout": 5}}}) == []


@pytest.fixture
def atomic_requests() -> Any:
    before = connections.settings["default"].get("ATOMIC_REQUESTS")
    connections.settings["default"]["ATOMIC_REQUESTS"] = True
    yield
    connections.settings["default"]["ATOMIC_REQUESTS"] = before


def test_W009_hits_that_a_failing_view_takes_back(ids: Any, messages: Any, atomic_requests: None) -> None:
    decorated = urlconf(path("", limited("ask")))
    (message,) = messages(cache=DATABASE, scopes=ASK, urls=decorated, middleware=[])
    assert message.id == "ratelimit_kv.W009"
    assert OURS in message.hint
    assert ids(cache=DATABASE, scopes=ASK, urls=decorated) == []
    assert ids(cache=REDIS, scopes=ASK, urls=decorated, middleware=[]) == []


def test_W009_limits_inside_a_view(ids: Any, messages: Any, atomic_requests: None) -> None:
    # The middleware decides what stands outermost, before the transaction; the rest is counted where it stands.
    inside = login_required(limited("ask"))
    (message,) = messages(cache=DATABASE, scopes=ASK, urls=urlconf(path("", inside)))
    assert message.id == "ratelimit_kv.W009"
    assert "limited" in message.msg
    assert ids(cache=DATABASE, scopes=ASK, urls=urlconf(path("", transaction.non_atomic_requests(inside)))) == []


def test_W009_only_where_requests_are_atomic(ids: Any) -> None:
    assert ids(cache=DATABASE, scopes=ASK, urls=urlconf(path("", limited("ask"))), middleware=[]) == []


# --------------------------------------------------------------------------------------------------- the project around us


def test_W010_keys_that_nobody_answers(messages: Any, ids: Any) -> None:
    for key, missing in (("user", AUTH), ("user|ip", AUTH), ("session|ip", SESSIONS)):
        scopes = {"a": {"RATE": "1/m", "KEY": key, "PATHS": ["*"]}}
        (message,) = messages(scopes=scopes, middleware=[layer for layer in (OURS, SESSIONS, AUTH) if layer != missing])
        assert message.id == "ratelimit_kv.W010"
        assert missing in message.msg
        assert ids(scopes=scopes) == []
        # On a decorated view too.
        marked = urlconf(path("", limited("1/m", key=key)))
        assert ids(scopes={}, urls=marked, middleware=[OURS]) == ["W010"]
    assert ids(scopes={"a": {"RATE": "1/m", "KEY": "user"}}, middleware=[OURS]) == [], (
        "used in code only, as far as we see"
    )


def test_W010_a_project_without_users(ids: Any, settings: Any) -> None:
    settings.INSTALLED_APPS = ["ratelimit_kv"]
    assert ids(scopes={"a": {"RATE": "1/m", "PATHS": ["*"]}}, middleware=[OURS]) == []
    assert ids(scopes={"a": {"RATE": "1/m", "KEY": "user", "PATHS": ["*"]}}, middleware=[OURS]) == ["W010"]


def test_W010_a_subclass_is_as_good(ids: Any) -> None:
    from django.contrib.auth import middleware

    OwnAuth = type("OwnAuth", (middleware.AuthenticationMiddleware,), {"__module__": __name__})
    globals()["OwnAuth"] = OwnAuth
    assert ids(middleware=[OURS, SESSIONS, f"{__name__}.OwnAuth"]) == []


def test_W010_frameworks_know_the_user_by_themselves(ids: Any) -> None:
    rest = pytest.importorskip("rest_framework.decorators")

    @rest.api_view(["GET"])
    @rate_limit("1/m", key="user")
    def api(request: Any) -> HttpResponse:
        return HttpResponse()

    assert ids(scopes=ASK, urls=urlconf(path("", api)), middleware=[OURS]) == []


def test_W011_somebody_sees_the_view_before_us(messages: Any, ids: Any) -> None:
    (message,) = messages(middleware=[SECURITY, CSRF, OURS, SESSIONS, AUTH])
    assert message.id == "ratelimit_kv.W011"
    assert CSRF in message.msg
    login = "django.contrib.auth.middleware.LoginRequiredMiddleware"
    (message,) = messages(middleware=[SESSIONS, AUTH, CSRF, login, OURS])
    assert CSRF in message.msg
    assert login in message.msg
    assert ids(middleware=[SECURITY, SESSIONS, AUTH, OURS, CSRF, login]) == []


def test_W012_refusals_that_scripts_cannot_read(ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    corsheaders = ModuleType("corsheaders")
    inner = ModuleType("corsheaders.middleware")

    class CorsMiddleware:
        pass

    CorsMiddleware.__module__, CorsMiddleware.__qualname__ = "corsheaders.middleware", "CorsMiddleware"
    inner.CorsMiddleware = CorsMiddleware  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "corsheaders", corsheaders)
    monkeypatch.setitem(sys.modules, "corsheaders.middleware", inner)
    cors = "corsheaders.middleware.CorsMiddleware"
    assert ids(middleware=[OURS, cors, SESSIONS, AUTH]) == ["W012"]
    assert ids(middleware=[cors, OURS, SESSIONS, AUTH]) == []


# W013: a scope of the settings, what else there is, and whether it is bounded.
BOUNDS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"KEY": "header:X-Api-Key", "PATHS": ["*"]}, {}, False),
    ({"KEY": "cookie:anon+ip", "PATHS": ["*"]}, {}, False),
    ({"KEY": "field:email|ip", "URL_NAMES": ["login"]}, {}, False),
    ({"KEY": "header:X-Api-Key", "PATHS": ["*"], "CEILING": 5}, {}, True),
    ({"KEY": "header:X-Api-Key", "PATHS": ["*"], "MODE": "shadow"}, {}, True),
    ({"KEY": "header:X-Api-Key", "PATHS": ["*"], "MODE": "off"}, {}, True),
    ({"KEY": "header:X-Api-Key", "PATHS": ["*"], "RATE": None}, {}, True),
    ({"KEY": "user|ip", "PATHS": ["*"]}, {}, True),
    ({"KEY": "arg:pk", "PATHS": ["*"]}, {}, True),
    # Another limit by address, in the same place ...
    ({"KEY": "header:X-Api-Key", "PATHS": ["/api/*"]}, {"KEY": "ip", "PATHS": ["*"]}, True),
    ({"KEY": "header:X-Api-Key", "PATHS": ["/api/*"]}, {"KEY": "ip/56", "PATHS": ["/api/*", "/login"]}, True),
    ({"KEY": "field:email", "URL_NAMES": ["login"]}, {"KEY": "user|ip", "URL_NAMES": ["login", "register"]}, True),
    (
        {"KEY": "field:email", "URL_NAMES": ["login"], "METHODS": ["POST"]},
        {"KEY": "ip", "URL_NAMES": ["login"], "METHODS": ["POST", "PUT"]},
        True,
    ),
    # ... and in another one, or one that does not hold.
    ({"KEY": "header:X-Api-Key", "PATHS": ["/api/*"]}, {"KEY": "ip", "PATHS": ["/login"]}, False),
    ({"KEY": "field:email", "URL_NAMES": ["login"]}, {"KEY": "ip", "URL_NAMES": ["register"]}, False),
    ({"KEY": "field:email", "URL_NAMES": ["login"]}, {"KEY": "ip", "URL_NAMES": ["login"], "METHODS": ["POST"]}, False),
    (
        {"KEY": "field:email", "URL_NAMES": ["login"]},
        {"KEY": "ip", "PATHS": ["*"], "EXEMPT_URL_NAMES": ["login"]},
        False,
    ),
    ({"KEY": "header:X-Api-Key", "PATHS": ["*"]}, {"KEY": "ip", "PATHS": ["*"], "MODE": "shadow"}, False),
    ({"KEY": "header:X-Api-Key", "PATHS": ["*"]}, {"KEY": "everyone", "PATHS": ["*"]}, False),
    ({"KEY": "header:X-Api-Key", "PATHS": ["*"]}, {"KEY": "user+ip", "PATHS": ["*"]}, False),
    ({"KEY": "header:X-Api-Key", "PATHS": ["*"]}, {"KEY": "ip"}, False),
]


@pytest.mark.parametrize(("scope", "other", "is_bounded"), BOUNDS)
def test_W013_clients_that_choose_their_counter(ids: Any, scope: Any, other: Any, is_bounded: bool) -> None:
    scopes = {"own": {"RATE": "5/m", **scope}, **({"other": {"RATE": "50/m", **other}} if other else {})}
    assert ids(scopes=scopes) == ([] if is_bounded else ["W013"])


def test_W013_on_views(messages: Any, ids: Any) -> None:
    scopes = {"key": {"RATE": "5/m", "KEY": "header:X-Api-Key"}, "address": {"RATE": "50/m", "KEY": "ip"}}

    def on(one: Any, **more: Any) -> list[str]:
        return ids(scopes={**scopes, **more}, urls=urlconf(path("x/", one, name="x")))  # type: ignore[no-any-return]

    assert on(view) == [], "not used on any view"
    assert on(limited("key")) == ["W013"]
    assert on(limited("key", "address")) == []
    assert on(rate_limit("address")(limited("key"))) == []
    assert on(limited("5/m", key="cookie:anon")) == ["W013"]
    assert on(limited("5/m", key="cookie:anon", ceiling=3)) == []
    assert on(limited("key"), site={"RATE": "9/m", "KEY": "ip", "PATHS": ["*"]}) == []
    assert on(limited("key"), site={"RATE": "9/m", "KEY": "ip", "URL_NAMES": ["x"]}) == []
    assert on(limited("key"), site={"RATE": "9/m", "KEY": "ip", "PATHS": ["/x"]}) == []
    assert on(limited("key"), site={"RATE": "9/m", "KEY": "ip", "PATHS": ["/x"], "METHODS": ["GET"]}) == ["W013"]
    (message,) = messages(scopes=scopes, urls=urlconf(path("x/", limited("key"))))
    assert "header:x-api-key" in message.msg.lower()
    assert "CEILING" in message.hint


@pytest.mark.parametrize(
    ("option", "value", "guess"),
    [
        ("URL_NAMES", ["lgoin"], "'login'"),
        ("URL_NAMES", ["admin:logn"], "'admin:login'"),
        ("EXEMPT_URL_NAMES", ["helth"], "'health'"),
        ("PATHS", ["/logon"], ""),
        ("PATHS", ["/apis/*"], ""),
        ("PATHS", ["/login?next=/"], ""),
        ("EXEMPT_PATHS", ["/health/"], "'/health'"),
        ("EXEMPT_PATHS", ["/login"], "'/login/'"),
    ],
)
def test_W014_places_that_are_not_there(messages: Any, option: str, value: Any, guess: str) -> None:
    scopes = {"a": {"RATE": "1/m", "KEY": "ip", option: value}}
    (message,) = messages(scopes=scopes)
    assert message.id == "ratelimit_kv.W014"
    assert f'RATELIMIT_KV["SCOPES"]["a"]["{option}"]' in message.msg
    assert (f"Did you mean {guess}?" in message.msg) is bool(guess)


def test_W014_places_that_are_there(ids: Any, settings: Any) -> None:
    urls = urlconf(
        *PLACES,
        *LIMITED,
        path("unnamed/", view),
        re_path(r"^old/(?P<pk>\d+)/$", view, name="old"),
    )
    scopes = {
        **SCOPES,
        "a": {
            "RATE": "1/m",
            "KEY": "ip",
            "PATHS": [
                "/",
                "/login",
                "/login/",
                "/LOGIN",
                "/api/7",
                "/api/*",
                "/api*",
                "/api/7/*",
                "/old/*",
                "/old/7",
                "*",
            ],
            "URL_NAMES": ["admin:login", "old", f"{__name__}.view"],
            "EXEMPT_PATHS": ["/favicon.ico", "/login/", "/health", "/static/*"],
            "EXEMPT_URL_NAMES": ["health"],
        },
    }
    assert ids(scopes=scopes, urls=urls) == []


def test_W014_paths_without_their_language(ids: Any, settings: Any) -> None:
    from django.conf.urls.i18n import i18n_patterns

    settings.USE_I18N = True
    settings.LANGUAGES = [("en", "English"), ("it", "Italian")]
    urls = urlconf(*i18n_patterns(path("login/", view, name="login")), path("ask/", view))
    scopes = {"a": {"RATE": "1/m", "KEY": "ip", "PATHS": ["/login", "/it/login", "/log*"]}}
    assert ids(scopes=scopes, urls=urls) == []
    assert ids(scopes={"a": {"RATE": "1/m", "KEY": "ip", "PATHS": ["/logout"]}}, urls=urls) == ["W014"]


def test_W014_a_converter_that_fails_is_another_matter(ids: Any) -> None:
    from django.urls import register_converter

    class Failing:
        regex = "[0-9]+"

        def to_python(self, value: str) -> int:
            raise RuntimeError

        def to_url(self, value: Any) -> str:
            return str(value)

    register_converter(Failing, "failing_in_a_test")
    urls = urlconf(path("x/<failing_in_a_test:pk>/", view))
    assert ids(scopes={"a": {"RATE": "1/m", "KEY": "ip", "PATHS": ["/x/7"]}}, urls=urls) == []


def test_W015_everyone_is_trusted(messages: Any, ids: Any) -> None:
    for option in ("TRUSTED_PROXIES", "EXEMPT_IPS"):
        (message,) = messages(**{option: ["0.0.0.0/0", "10.0.0.0/8"]})
        assert message.id == "ratelimit_kv.W015"
        assert option in message.msg
    assert ids(TRUSTED_PROXIES=2) == []


def test_W016_users_who_are_known_only_in_the_view(messages: Any, ids: Any) -> None:
    rest = pytest.importorskip("rest_framework.decorators")
    from rest_framework.authentication import SessionAuthentication, TokenAuthentication
    from rest_framework.viewsets import ViewSet

    def api(*classes: Any) -> Any:
        @rest.api_view(["GET", "POST"])
        @rest.authentication_classes(list(classes))
        def one(request: Any) -> HttpResponse:
            return HttpResponse()

        return one

    class Things(ViewSet):
        authentication_classes = (TokenAuthentication,)

        def list(self, request: Any) -> HttpResponse:
            return HttpResponse()

    by_path = {"a": {"RATE": "1/m", "KEY": "user|ip", "PATHS": ["/api/*"]}}
    by_name = {"a": {"RATE": "1/m", "KEY": "user|ip", "URL_NAMES": ["api"]}}
    for scopes in (by_path, by_name):
        for one in (
            api(TokenAuthentication),
            api(SessionAuthentication, TokenAuthentication),
            Things.as_view({"get": "list"}),
        ):
            urls = urlconf(path("api/x/", one, name="api"))
            (message,) = messages(scopes=scopes, urls=urls)
            assert message.id == "ratelimit_kv.W016"
        # Django's session is known in time; others are not asked; other keys do not care; nor do other places.
        assert ids(scopes=scopes, urls=urlconf(path("api/x/", api(SessionAuthentication), name="api"))) == []
        assert ids(scopes=scopes, urls=urlconf(path("api/x/", api(), name="api"))) == []
        assert ids(scopes={"a": {**scopes["a"], "KEY": "ip"}}, urls=urls) == []
    regex = urlconf(re_path("^api/x/$", api(TokenAuthentication), name="x"))
    assert ids(scopes=by_path, urls=regex) == ["W016"]
    elsewhere = urlconf(path("api/", view, name="api"), path("x/", api(TokenAuthentication)))
    assert ids(scopes=by_path, urls=elsewhere) == []


@pytest.mark.parametrize(
    ("key", "better"),
    [("ip|user", "user|ip"), ("everyone|ip", "everyone"), ("session|ip/56|user", "session|user|ip/56")],
)
def test_W017_alternatives_that_are_never_asked(messages: Any, ids: Any, key: str, better: str) -> None:
    (message,) = messages(scopes={"a": {"RATE": "1/m", "KEY": key}}, urls=PLAIN_URLS)
    assert message.id == "ratelimit_kv.W017"
    assert repr(better) in message.hint
    assert ids(scopes={"a": {"RATE": "1/m", "KEY": better}}, urls=PLAIN_URLS) == []


def test_W018_switched_off_by_the_environment(messages: Any, ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE_LIMIT_ASK_MAX", "0")
    (message,) = messages(scopes=ASK, urls=PLAIN_URLS, ENV_PREFIX="RATE_LIMIT_")
    assert message.id == "ratelimit_kv.W018"
    assert "RATE_LIMIT_ASK_MAX" in message.msg
    monkeypatch.setenv("RATE_LIMIT_ASK_MAX", "7")
    assert ids(scopes=ASK, urls=PLAIN_URLS, ENV_PREFIX="RATE_LIMIT_") == []
