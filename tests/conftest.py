"""Servers and caches as fixtures. A server starts when the first test of a session asks for it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest

from tests import caches, servers
from tests.servers import Cluster, Missing, Sentinel, Server

T = TypeVar("T")

# No deadline: an example that takes long says that the machine is busy. In CI the same examples every time.
hypothesis.settings.register_profile(
    "ratelimit_kv", deadline=None, derandomize=os.environ.get("CI") == "true", database=None
)
hypothesis.settings.load_profile("ratelimit_kv")


def there(answer: T | Missing) -> T:
    """The answer, if it is there; else the test is skipped, or fails where all servers must be there."""
    if not isinstance(answer, Missing):
        return answer
    if os.environ.get("RATELIMIT_KV_REQUIRE_SERVERS") == "1":
        pytest.fail(f"{answer.reason}, and RATELIMIT_KV_REQUIRE_SERVERS=1", pytrace=False)
    pytest.skip(answer.reason)


@pytest.fixture(autouse=True)
def no_window_ends() -> None:
    """Windows are aligned to the clock: a test that uses one up must not begin at the very end of a minute."""
    # Not time.time(), which may be frozen by now.
    servers.wait_until(lambda: 60 - time.clock_gettime(time.CLOCK_REALTIME) % 60 > 2, "the next minute")


def _for_the_session(start: Callable[[], Any]) -> Iterator[Any]:
    server = there(start())
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    yield from _for_the_session(servers.start_redis)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Server]:
    yield from _for_the_session(servers.start_valkey)


@pytest.fixture(scope="session")
def memcached_server() -> Iterator[Server]:
    yield from _for_the_session(servers.start_memcached)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    yield from _for_the_session(servers.start_postgresql)


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[Server]:
    yield from _for_the_session(servers.start_mariadb)


@pytest.fixture(scope="session")
def sentinel() -> Iterator[Sentinel]:
    yield from _for_the_session(servers.start_sentinel)


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[Cluster]:
    yield from _for_the_session(servers.start_redis_cluster)


@pytest.fixture
def own_redis() -> Iterator[Callable[..., Server]]:
    """``own_redis(maxmemory="2mb")``: a Redis that this test may pause, kill and fill."""
    with contextlib.ExitStack() as stack:

        def start(**config: object) -> Server:
            server = there(servers.start_redis(**config))
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def use_cache(
    request: pytest.FixtureRequest, settings: Any, tmp_path: Path, django_db_blocker: Any
) -> Iterator[Callable[..., Any]]:
    """``use_cache("django-redis", KEY_PREFIX="shop")``: that kind of cache, empty, as an alias of CACHES.

    Starts the server, makes the table where there is one, and returns the cache. ``alias="..."`` is another
    alias than "default", ``server=`` another server than the session's; the rest is as for
    ``caches.cache_settings``.
    """
    with contextlib.ExitStack() as stack:

        def use(kind: str, *, alias: str = "default", server: Any = None, **overrides: Any) -> Any:
            from django.core.cache import caches as django_caches

            if missing := caches.missing_client(kind):
                there(missing)
            if server is None and kind in caches.SERVER_FIXTURES:
                server = request.getfixturevalue(caches.SERVER_FIXTURES[kind])
            if kind in caches.DATABASE_KINDS:
                stack.enter_context(django_db_blocker.unblock())
                entry = caches.database_settings(kind, server, path=tmp_path / "counters.sqlite3")
                table = overrides.get("location") or caches.TABLE
                stack.enter_context(caches.counters_database(entry, table))
            if kind in ("filebased", "locmem"):
                overrides.setdefault("location", tmp_path / alias)
            _forget_pools()
            settings.CACHES = {**settings.CACHES, alias: caches.cache_settings(kind, server, **overrides)}
            cache = django_caches[alias]
            cache.clear()
            stack.callback(cache.close)
            return cache

        yield use
        _forget_pools()


def _forget_pools() -> None:
    """django-redis keeps one pool a URL for ever, with the options of the first alias that asked for it."""
    with contextlib.suppress(ImportError):
        from django_redis.pool import ConnectionFactory

        for pool in ConnectionFactory._pools.values():
            pool.disconnect()
        ConnectionFactory._pools.clear()
