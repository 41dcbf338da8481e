"""A real server brought into each state of trouble: every answer is the view's or a 503, never a 500, never a hang."""

from __future__ import annotations

import contextlib
import logging
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import path

from ratelimit_kv import hit, rate_limit, signals
from ratelimit_kv.decisions import Decision, Reason
from ratelimit_kv.process import runtime, ticks
from ratelimit_kv.stores import get_store
from tests.caches import TABLE
from tests.servers import HOST, Server, free_port, wait_until

pytestmark = pytest.mark.urls(__name__)


def page(request: HttpRequest) -> HttpResponse:
    decision: Decision = request.rate_limit.decisions[0]  # type: ignore[attr-defined]
    return HttpResponse(decision.reason)


urlpatterns = [path(name, rate_limit(name)(page)) for name in ("open", "closed", "local")]

SCOPES = {
    "open": {"RATE": "3/h", "KEY": "ip"},
    "closed": {"RATE": "3/h", "KEY": "ip", "ON_ERROR": "deny"},
    "local": {"RATE": "4/h", "KEY": "ip", "ON_ERROR": "local"},
}


@pytest.fixture
def limited(settings: Any) -> Callable[..., None]:
    def on(cache: dict[str, Any], **options: Any) -> None:
        settings.CACHES = {"default": cache}
        settings.RATELIMIT_KV = {"SCOPES": SCOPES, **options}

    return on


def django_redis(port: int, **options: Any) -> dict[str, Any]:
    options = {"SOCKET_TIMEOUT": 0.1, "SOCKET_CONNECT_TIMEOUT": 0.1, **options}
    return {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"redis://{HOST}:{port}/0", "OPTIONS": options}


def builtin(port: int, **options: Any) -> dict[str, Any]:
    options = {"socket_timeout": 0.1, "socket_connect_timeout": 0.1, **options}
    return {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": f"redis://{HOST}:{port}/0",
        "OPTIONS": options,
    }


def memcached(port: int, **options: Any) -> dict[str, Any]:
    options = {"timeout": 0.1, "connect_timeout": 0.1, **options}
    return {
        "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
        "LOCATION": f"{HOST}:{port}",
        "OPTIONS": options,
    }


def assert_in_trouble(caplog: pytest.LogCaptureFixture) -> None:
    """Six requests of each kind: what the store's silence means to them."""
    client = Client()
    caplog.clear()
    for _ in range(6):
        response = client.get("/open")
        assert (response.status_code, response.content) == (200, b"store_error")
        assert "RateLimit" not in response.headers
        refused = client.get("/closed")
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.headers["Cache-Control"] == "no-store"
    assert [client.get("/local").status_code for _ in range(6)] == [200] * 4 + [429] * 2
    ours = [record for record in caplog.records if record.name == "ratelimit_kv"]
    for scope in SCOPES:  # one record a scope and interval, whatever comes
        assert sum("store error" in r.message and getattr(r, "scope", "") == scope for r in ours) == 1
    assert not [record for record in caplog.records if record.name == "django.request"]


# ----------------------------------------------------------------------------------------------------- each trouble


@pytest.mark.parametrize("kind", [django_redis, builtin, memcached])
def test_nobody_listens(limited: Callable[..., None], caplog: pytest.LogCaptureFixture, kind: Any) -> None:
    limited(kind(free_port()))
    assert_in_trouble(caplog)


@pytest.mark.parametrize(
    "options", [{"IGNORE_EXCEPTIONS": True}, {"IGNORE_EXCEPTIONS": False}], ids=["swallowed", "raised"]
)
def test_errors_that_the_cache_would_swallow(
    limited: Callable[..., None], caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    limited(django_redis(free_port(), **options))
    assert_in_trouble(caplog)


def test_a_memcached_client_that_answers_false(limited: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    limited(memcached(free_port(), ignore_exc=True))
    assert_in_trouble(caplog)


@pytest.mark.parametrize("kind", [django_redis, builtin])
def test_full(
    limited: Callable[..., None], caplog: pytest.LogCaptureFixture, own_redis: Callable[..., Server], kind: Any
) -> None:
    server = own_redis(maxmemory="2mb", **{"maxmemory-policy": "noeviction"})
    limited(kind(server.port))
    fill(server)
    assert_in_trouble(caplog)


def fill(server: Server) -> None:
    import redis

    with redis.Redis(port=server.port) as client:
        for number in range(10_000):
            try:
                client.set(f"ballast:{number}", "x" * 10_000)
            except redis.exceptions.OutOfMemoryError:
                return


def test_read_only_replica(
    limited: Callable[..., None], caplog: pytest.LogCaptureFixture, own_redis: Callable[..., Server]
) -> None:
    server = own_redis(replicaof=f"{HOST} {free_port()}")
    limited(django_redis(server.port))
    assert_in_trouble(caplog)


def test_wrong_password(
    limited: Callable[..., None], caplog: pytest.LogCaptureFixture, own_redis: Callable[..., Server]
) -> None:
    server = own_redis(requirepass="correct")
    limited(django_redis(server.port, PASSWORD="wrong"))
    assert_in_trouble(caplog)
    assert "correct" not in caplog.text
    assert "wrong " not in caplog.text


class Babbler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("kind", [django_redis, memcached])
def test_a_peer_that_speaks_something_else(
    limited: Callable[..., None], caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    with socketserver.ThreadingTCPServer((HOST, 0), Babbler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        limited(kind(server.server_address[1]))
        assert_in_trouble(caplog)
        server.shutdown()


def test_still_loading(
    limited: Callable[..., None], caplog: pytest.LogCaptureFixture, own_redis: Callable[..., Server]
) -> None:
    import redis

    server = own_redis(
        **{"key-load-delay": "2000", "loading-process-events-interval-bytes": "1024", "enable-debug-command": "yes"}
    )
    with redis.Redis(port=server.port) as client:
        with client.pipeline() as pipe:
            for number in range(20_000):
                pipe.set(f"ballast:{number}", "x" * 100)
            pipe.execute()
        client.save()
    limited(django_redis(server.port))

    def reload() -> None:
        with (
            contextlib.suppress(redis.exceptions.RedisError),
            redis.Redis(port=server.port, socket_timeout=120) as client,
        ):
            client.execute_command("DEBUG", "RELOAD", "NOSAVE")

    threading.Thread(target=reload, daemon=True).start()

    def loading() -> bool:
        with redis.Redis(port=server.port, socket_timeout=5) as client:
            try:
                client.get("x")
            except redis.exceptions.BusyLoadingError:
                return True
            return False

    wait_until(loading, "the server to load", 20)
    assert_in_trouble(caplog)


# ---------------------------------------------------------------------------------------------------------- hanging


@pytest.mark.parametrize("kind", [django_redis, builtin])
def test_a_paused_server_makes_one_request_wait(
    limited: Callable[..., None], own_redis: Callable[..., Server], kind: Any
) -> None:
    """Two hundred requests: with a socket timeout of 0.1 s, those that open the breaker wait, the others do not."""
    server = own_redis()
    limited(kind(server.port), BREAKER={"FAILURES": 3, "SECONDS": 60})
    client = Client()
    assert client.get("/open").content == b"within"
    waits = []
    with server.paused():
        for _ in range(200):
            began = time.monotonic()
            assert client.get("/open").status_code == 200
            waits.append(time.monotonic() - began)
    # Without the breaker all two hundred wait. The bound leaves a busy machine its own pauses.
    assert sum(wait > 0.09 for wait in waits) <= 40


def test_a_paused_server_without_any_timeout_of_its_own(
    limited: Callable[..., None], own_redis: Callable[..., Server]
) -> None:
    server = own_redis()
    cache = django_redis(server.port)
    del cache["OPTIONS"]
    limited(cache)
    client = Client()
    assert client.get("/open").content == b"within"
    with server.paused():
        began = time.monotonic()
        assert [client.get("/open").content for _ in range(5)] == [b"store_error"] * 5
        assert time.monotonic() - began < 3  # ours is 0.25 s, where the client's own is 5 s or none


def test_work_after_the_view_is_guarded_too(limited: Callable[..., None], own_redis: Callable[..., Server]) -> None:
    server = own_redis()
    limited(django_redis(server.port), BREAKER={"FAILURES": 3, "SECONDS": 60})

    @rate_limit("open")
    def view(request: HttpRequest) -> HttpResponse:
        server.pause()
        request.rate_limit.refund()  # type: ignore[attr-defined]
        request.rate_limit.charge("open", 2)  # type: ignore[attr-defined]
        return HttpResponse("done")

    request = HttpRequest()
    request.META["REMOTE_ADDR"] = "203.0.113.9"
    request.method = "GET"
    try:
        assert view(request).content == b"done"
        assert runtime().breaker("default").is_open
    finally:
        server.resume()


# ------------------------------------------------------------------------------------------------ death and recovery


@pytest.fixture
def heard() -> Iterator[list[str]]:
    said: list[str] = []

    def failed(alias: str, **kwargs: Any) -> None:
        said.append(f"failed {alias}")

    def recovered(alias: str, **kwargs: Any) -> None:
        said.append(f"recovered {alias}")

    signals.store_failed.connect(failed)
    signals.store_recovered.connect(recovered)
    yield said
    signals.store_failed.disconnect(failed)
    signals.store_recovered.disconnect(recovered)


def test_killed_in_mid_traffic_and_back(
    limited: Callable[..., None],
    own_redis: Callable[..., Server],
    heard: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = own_redis()
    limited(django_redis(server.port), BREAKER={"FAILURES": 3, "SECONDS": 0.1})
    client = Client()
    assert client.get("/open").content == b"within"
    server.kill()
    with caplog.at_level(logging.WARNING, "ratelimit_kv"):
        assert [client.get("/open").status_code for _ in range(50)] == [200] * 50
        assert [client.get("/closed").status_code for _ in range(50)] == [503] * 50
        assert [client.get("/local").status_code for _ in range(6)] == [200] * 4 + [429] * 2
    assert heard == ["failed default"]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 8
    server.restart()
    wait_until(lambda: client.get("/closed").status_code == 200, "the probe", 30)
    assert heard == ["failed default", "recovered default"]
    # The server came back with nothing, and so does this process: what it counted by itself is forgotten.
    assert client.get("/local").content == b"within"
    assert [client.get("/open").status_code for _ in range(4)] == [200, 200, 200, 429]


def test_processes_share_the_local_limit(limited: Callable[..., None]) -> None:
    limited(django_redis(free_port()), PROCESSES=2)
    client = Client()
    assert [client.get("/local").status_code for _ in range(4)] == [200, 200, 429, 429]
    assert client.get("/local").status_code == 429


def test_local_counts_are_bounded(limited: Callable[..., None]) -> None:
    limited(django_redis(free_port()))
    for number in range(12_000):
        hit("local", f"ip:10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(runtime().local("default")) == 10_000


def test_one_bad_key_opens_nothing_for_anybody(limited: Callable[..., None], own_redis: Callable[..., Server]) -> None:
    import redis

    server = own_redis()
    limited(django_redis(server.port))
    first = hit("open", "ip:203.0.113.9")
    assert first.allowed
    with redis.Redis(port=server.port) as client:
        for key in client.keys("*rl:open*"):
            client.delete(key)
            client.rpush(key, "a list")
    for _ in range(30):
        assert hit("open", "ip:203.0.113.9").reason is Reason.STORE_ERROR
        assert hit("open", "ip:203.0.113.10").reason in (Reason.WITHIN, Reason.OVER_LIMIT, Reason.REMEMBERED)
    assert not runtime().breaker("default").is_open


def test_a_database_that_is_locked_away(settings: Any, tmp_path: Any, use_cache: Callable[..., Any]) -> None:
    use_cache("database-sqlite")
    from django.db import connections

    settings.RATELIMIT_KV = {"SCOPES": SCOPES}
    assert hit("open", "ip:203.0.113.9").reason is Reason.WITHIN
    with connections["counters"].cursor() as cursor:
        cursor.execute(f"DROP TABLE {TABLE}")
    assert hit("open", "ip:203.0.113.9").reason is Reason.STORE_ERROR
    assert hit("closed", "ip:203.0.113.9").status == 503


def test_an_answer_counts_for_the_breaker_also_when_others_failed_while_it_was_under_way(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RATELIMIT_KV = {"SCOPES": SCOPES}
    store, breaker = get_store("default"), runtime().breaker("default")
    whole = store.hit

    def hit_while_others_fail(*args: Any) -> Any:
        breaker.failed(ticks(), 0.0)
        return whole(*args)

    @rate_limit("open")
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")

    with monkeypatch.context() as patch:
        patch.setattr(store, "hit", hit_while_others_fail)
        assert view(RequestFactory().get("/")).status_code == 200
    for _ in range(breaker.failures - 1):
        breaker.failed(ticks(), 0.0)
    assert not breaker.is_open
