"""What can fail between us and Redis: a StoreError each time, in time, and nothing counted twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from ratelimit_kv.stores import StoreError
from ratelimit_kv.stores.redis_link import failure
from tests.servers import Sentinel, Server, start_sentinel, wait_until
from tests.stores.bench import Bench, counter, microseconds


@pytest.fixture(params=["django-redis", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


NO_TIMEOUTS = {
    "django-redis": {"SOCKET_TIMEOUT": None, "SOCKET_CONNECT_TIMEOUT": None},
    "redis": {"socket_timeout": None, "socket_connect_timeout": None},
}


@pytest.fixture
def server(own_redis: Callable[..., Server]) -> Server:
    return own_redis()


@pytest.fixture
def bench(kind: str, server: Server, use_cache: Callable[..., Any]) -> Bench:
    """As an alias is that sets no timeouts."""
    return Bench(kind, use_cache(kind, server=server, OPTIONS=NO_TIMEOUTS[kind]))


def error_of(action: Callable[[], Any]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        action()
    assert "rl:" not in str(caught.value), "names a key"
    return caught.value


# ── The server ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_hangs(bench: Bench, server: Server) -> None:
    hit = counter(limit=100)
    bench.hit(hit)
    with server.paused():
        for _ in range(3):
            start = time.perf_counter()
            error = error_of(lambda: bench.hit(hit))
            # 0.25 s where nothing is set; the rest is a busy machine.
            assert 0.2 < time.perf_counter() - start < 2
            assert error.outage
            assert "TimeoutError" in error.cause
        assert error_of(lambda: bench.peek(hit)).outage
        assert error_of(lambda: bench.store.reset([hit.key])).outage
        assert error_of(lambda: list(bench.store.scan("rl:"))).outage
    wait_until(lambda: redis.Redis(port=server.port).ping(), "the server")
    # The first hit was sent before anybody knew, and may count. It must not count twice, nor its reply be read as
    # that to another command.
    assert bench.used(hit)[0] in (1, 2)
    assert bench.used(counter("user:another")) == [0]


def test_a_timeout_of_the_alias(kind: str, server: Server, use_cache: Callable[..., Any]) -> None:
    settings = {"socket_timeout": 0.05, "socket_connect_timeout": 0.05}
    upper = {name.upper(): value for name, value in settings.items()}
    bench = Bench(kind, use_cache(kind, server=server, OPTIONS=settings if kind == "redis" else upper))
    bench.hit(counter())
    with server.paused():
        waits = []
        for _ in range(5):
            start = time.perf_counter()
            assert error_of(lambda: bench.hit(counter())).outage
            waits.append(time.perf_counter() - start)
        assert min(waits) < 0.2  # not the 0.25 s of ours; the shortest, for a busy machine has pauses of its own


def test_a_server_that_is_not_there(bench: Bench, server: Server) -> None:
    bench.hit(counter())
    server.kill()
    start = time.perf_counter()
    for _ in range(20):
        error = error_of(lambda: bench.hit(counter()))
        assert error.outage
    assert time.perf_counter() - start < 2
    server.start()
    assert bench.hit(counter())[0].allowed


def test_a_server_that_restarts(bench: Bench, server: Server) -> None:
    """It has closed our connection and lost the script, and nobody notices."""
    for _ in range(2):
        assert [bench.hit(counter(limit=2))[0].allowed for _ in range(3)] == [True, True, False]
        server.restart()


def test_a_full_server(bench: Bench, server: Server) -> None:
    hit = counter()
    bench.hit(hit)
    with redis.Redis(port=server.port) as admin:
        admin.config_set("maxmemory", 1)
        error = error_of(lambda: bench.hit(counter("user:new"), hit))
        assert error.outage
        assert "OutOfMemory" in error.cause
        admin.config_set("maxmemory", 0)
    assert bench.used(hit) == [1], "nothing of a hit is left behind that has failed"


def test_a_server_that_has_become_a_replica(bench: Bench, server: Server, redis_server: Server) -> None:
    bench.hit(counter())
    with redis.Redis(port=server.port) as admin:
        clients = {client["id"] for client in admin.client_list()}
        admin.replicaof(redis_server.host, redis_server.port)
        error = error_of(lambda: bench.hit(counter()))
        assert error.outage
        assert "ReadOnly" in error.cause
        admin.replicaof("NO", "ONE")
        assert bench.hit(counter())[0].allowed
        assert {client["id"] for client in admin.client_list()} != clients, "connects anew, perhaps elsewhere"


def test_a_password_that_has_changed(bench: Bench, server: Server) -> None:
    with redis.Redis(port=server.port) as admin:
        admin.config_set("requirepass", "s3cret")
    error = error_of(lambda: bench.hit(counter()))
    assert error.outage
    assert "s3cret" not in error.cause


def test_no_permission(kind: str, server: Server, use_cache: Callable[..., Any]) -> None:
    with redis.Redis(port=server.port) as admin:
        for name, keys, commands in (("noscripts", ["*"], ["+@all", "-@scripting"]), ("nokeys", ["x"], ["+@all"])):
            admin.acl_setuser(name, enabled=True, nopass=True, keys=keys, commands=commands)
            location = f"redis://{name}:x@{server.host}:{server.port}/0"
            use_cache("redis", server=server)  # empties it, which these may not
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("django.core.cache.backends.redis.RedisCache.clear", lambda self: None)
                bench = Bench("redis", use_cache("redis", server=server, LOCATION=location))
            for look in (bench.hit, bench.peek):
                error = error_of(lambda look=look: look(counter()))  # type: ignore[misc]
                assert error.outage, name
                assert "NoPermission" in error.cause


def test_a_server_without_scripts(own_redis: Callable[..., Server], use_cache: Callable[..., Any]) -> None:
    server = own_redis(rename_command="EVALSHA NOTHING")
    bench = Bench("django-redis", use_cache("django-redis", server=server))
    error = error_of(lambda: bench.hit(counter()))
    assert error.outage
    assert "unknown command" in error.cause


def test_credentials_that_cannot_be_had(use_cache: Callable[..., Any]) -> None:
    settings = {"CONNECTION_POOL_KWARGS": {"credential_provider": Expired()}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_redis.cache.RedisCache.clear", lambda self: None)
        bench = Bench("django-redis", use_cache("django-redis", OPTIONS=settings))
    error = error_of(lambda: bench.hit(counter()))
    assert error.outage
    assert error.cause == "cannot connect: LookupError"


class Expired(redis.CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        raise LookupError("secret")


# ── The process ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_interrupts_a_hit_leaves_no_reply_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal, the timeout of a greenlet: anything may be raised anywhere."""
    from redis.connection import Connection

    bench.hit(counter(limit=100))
    for interruption in (KeyboardInterrupt, SystemExit, MemoryError):
        with monkeypatch.context() as patch:

            def interrupted(*args: Any, what: type[BaseException] = interruption, **kwargs: Any) -> None:
                raise what

            patch.setattr(Connection, "read_response", interrupted)
            with pytest.raises(interruption):
                bench.hit(counter(limit=100))
        assert bench.used(counter("user:another")) == [0]
    assert bench.used(counter()) == [4], "each was sent, and once"


def test_a_client_that_retries_is_not_followed(
    server: Server, use_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    pool = {"retry": Retry(NoBackoff(), 5), "retry_on_timeout": True, "socket_timeout": 0.1}
    bench = Bench("django-redis", use_cache("django-redis", server=server, OPTIONS={"CONNECTION_POOL_KWARGS": pool}))
    hit = counter(limit=100)
    bench.hit(hit)
    with server.paused():
        start = time.perf_counter()
        assert error_of(lambda: bench.hit(hit)).outage
        assert time.perf_counter() - start < 0.55  # each of five retries would take 0.1 s more
    assert bench.used(hit)[0] <= 2


# ── Sentinel ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def own_sentinel() -> Any:
    from tests.conftest import there

    sentinel = there(start_sentinel())
    yield sentinel
    sentinel.stop()


def test_a_failover(own_sentinel: Sentinel, use_cache: Callable[..., Any]) -> None:
    bench = Bench("django-redis-sentinel", use_cache("django-redis-sentinel", server=own_sentinel))
    hit = counter(limit=1000)
    bench.hit(hit)
    with redis.Redis(port=own_sentinel.master.port) as master:
        assert master.wait(1, 5000) == 1
    own_sentinel.master.kill()
    failures: list[StoreError] = []

    def works() -> bool:
        try:
            return bench.hit(hit)[0].allowed
        except StoreError as error:
            failures.append(error)
            return False

    wait_until(works, "the failover")
    assert {failure.outage for failure in failures} == {True}
    assert bench.used(hit) == [2], "what the replica had got, and the first hit that found it"
    with redis.Redis(port=own_sentinel.replica.port) as replica:
        assert replica.role()[0] == b"master"


def test_no_sentinel(own_sentinel: Sentinel, use_cache: Callable[..., Any]) -> None:
    changes = {"SENTINEL_KWARGS": {"socket_timeout": 0.2, "socket_connect_timeout": 0.2}}
    bench = Bench("django-redis-sentinel", use_cache("django-redis-sentinel", server=own_sentinel, OPTIONS=changes))
    hit = counter(limit=1000)
    bench.hit(hit)
    own_sentinel.sentinel.pause()
    bench.hit(hit)
    bench.store._link._hang_up()  # type: ignore[attr-defined]
    for _ in range(2):
        start = time.perf_counter()
        error = error_of(lambda: bench.hit(hit))
        assert error.outage
        assert "no Sentinel knows a primary" in error.cause
        assert time.perf_counter() - start < 2
    own_sentinel.sentinel.resume()
    assert bench.used(hit) == [2]


# ── Whose fault it is ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (redis.exceptions.ConnectionError("Error 111 connecting to 127.0.0.1:1. Connection refused."), True),
        (redis.exceptions.TimeoutError("Timeout reading from socket"), True),
        (redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"), True),
        (redis.exceptions.AuthenticationError("invalid username-password pair"), True),
        (redis.exceptions.NoPermissionError("this user has no permissions"), True),
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), True),
        (redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), True),
        (redis.exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"), True),
        (redis.exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (redis.exceptions.ResponseError("MASTERDOWN Link with MASTER is down"), True),
        (redis.exceptions.ClusterDownError("The cluster is down"), True),
        (redis.exceptions.RedisClusterException("no node"), True),
        (redis.exceptions.InvalidResponse("Protocol Error"), True),
        (OSError("broken"), True),
        (redis.exceptions.ResponseError("unknown command 'EVALSHA', with args beginning with: 'rl:a'"), True),
        (redis.exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), False),
        (redis.exceptions.ResponseError("CROSSSLOT Keys in request don't hash to the same slot"), False),
        (redis.exceptions.ClusterCrossSlotError("Keys in request don't hash to the same slot"), False),
        (redis.exceptions.ResponseError("Error running script: attempt to compare nil with number"), False),
        (redis.exceptions.ResponseError("ERR invalid expire time"), False),
        (redis.exceptions.ResponseError("value is not an integer or out of range"), False),
    ],
)
def test_only_the_server_can_open_the_breaker(error: Exception, outage: bool) -> None:
    found = failure(error)
    assert found.outage is outage
    assert found.cause.startswith(type(error).__name__)
    assert "rl:" not in found.cause


def test_a_failed_read_of_one_key_may_be_the_servers_fault(bench: Bench, server: Server) -> None:
    """The script goes on after a failed read. Only what is wrong with a key concerns that counter alone."""
    from ratelimit_kv.stores.redis import _states

    hits = [counter("user:1"), counter("user:2")]
    wrong = redis.exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    assert _states(hits, [b"1", wrong])[0] == 1
    down = redis.exceptions.ResponseError("MASTERDOWN Link with MASTER is down")
    assert error_of(lambda: _states(hits, [b"1", down])).outage
    assert bench.hit(*hits, now=microseconds())
