"""Redis and Valkey through each client of Django's: alone, under Sentinel and as a Cluster."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from ratelimit_kv.algorithms import BUCKET, CONCURRENT, FIXED, SLIDING, Counter, Unreadable, load
from ratelimit_kv.decisions import Reason
from ratelimit_kv.stores import get_store
from ratelimit_kv.stores.redis import SCRIPT, RedisStore
from ratelimit_kv.stores.redis_async import Loops
from ratelimit_kv.stores.redis_link import TIMEOUT, bounded
from tests.servers import Server, free_port
from tests.stores.bench import Bench, counter, in_threads, microseconds
from tests.stores.contract import StoreContract
from tests.stores.wire import Wire, wire_to


class TestDjangoRedis(StoreContract):
    kind = "django-redis"


class TestRedisCache(StoreContract):
    kind = "redis"


class TestDjangoValkey(StoreContract):
    kind = "django-valkey"


class TestSentinel(StoreContract):
    kind = "django-redis-sentinel"
    # SentinelClient reads from replicas, so that `cache.get` would be late. We ask the primary, whichever client.
    settings: ClassVar[dict[str, Any]] = {"OPTIONS": {"CLIENT_CLASS": "django_redis.client.DefaultClient"}}


class OnACluster(StoreContract):
    # A hit there is several, one for each slot: a ban hears only of denials in its own. What holds instead is tested
    # in test_redis_cluster.
    test_same_answers_as_a_dictionary = None  # type: ignore[assignment]


class TestCluster(OnACluster):
    kind = "django-redis-cluster"


class TestValkeyCluster(OnACluster):
    kind = "django-valkey-cluster"


@pytest.fixture(params=["django-redis", "redis", "django-valkey"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def bench(kind: str, use_cache: Callable[..., Any]) -> Bench:
    return Bench(kind, use_cache(kind))


def options(kind: str, **settings: Any) -> dict[str, Any]:
    """OPTIONS that give these arguments to the client's connection pool."""
    return settings if kind == "redis" else {"CONNECTION_POOL_KWARGS": settings}


# ── On the wire ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def wire(kind: str, request: pytest.FixtureRequest) -> Iterator[Wire]:
    server: Server = request.getfixturevalue("valkey_server" if kind == "django-valkey" else "redis_server")
    with wire_to(server.host, server.port) as wire:
        yield wire


@pytest.fixture
def through_the_wire(kind: str, wire: Wire, use_cache: Callable[..., Any]) -> Bench:
    location = f"{'valkey' if kind == 'django-valkey' else 'redis'}://127.0.0.1:{wire.port}/5"
    return Bench(kind, use_cache(kind, LOCATION=location))


def test_a_hit_is_one_command_and_one_round_trip(through_the_wire: Bench, wire: Wire) -> None:
    bench = through_the_wire
    now = microseconds()
    every = [counter(kind=kind, scope=f"s{kind}", now=now) for kind in FIXED + SLIDING + BUCKET + CONCURRENT]
    hits = [counter("user:1", now=now), counter("ip:203.0.113.9", now=now), counter("everyone", now=now)]
    bench.hit(*hits, now=now)  # connects, and brings the script where it has not been
    for what in (hits[:1], hits, every, hits):
        for look in (bench.hit, bench.peek):
            wire.log.clear()
            look(*what, now=now)
            assert (wire.commands, wire.round_trips) == ([b"EVALSHA"], 1)
    wire.log.clear()
    assert bench.store.reset([hit.key for hit in hits]) == 3
    assert (wire.commands, wire.round_trips) == ([b"UNLINK"], 1)
    connections = wire.connections
    for _ in range(20):
        bench.hit(*hits, now=now)
        caches.close_all()
    assert wire.connections == connections


def test_the_script_is_sent_in_full_where_it_is_unknown(through_the_wire: Bench, wire: Wire) -> None:
    bench = through_the_wire
    hit = counter(limit=10)
    bench.hit(hit)
    raw = client(bench)
    for loses_it in (raw.script_flush, lambda: None):
        loses_it()
        wire.log.clear()
        bench.hit(hit)
        expected = [b"EVALSHA"] if loses_it != raw.script_flush else [b"EVALSHA", b"EVAL"]
        assert wire.commands[-len(expected) :] == expected
    assert bench.used(hit) == [3]


def client(bench: Bench) -> Any:
    """The raw client of the cache."""
    if bench.kind == "redis":
        return bench.cache._cache.get_client(None, write=True)
    return bench.cache.client.get_client(write=True)


# ── Values ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_other_types_under_our_keys(bench: Bench) -> None:
    now = microseconds()
    raw = client(bench)
    makers: dict[str, Callable[[str], Any]] = {
        "list": lambda key: raw.rpush(key, "1", "2"),
        "hash": lambda key: raw.hset(key, "1", "2"),
        "set": lambda key: raw.sadd(key, "1"),
        "zset": lambda key: raw.zadd(key, {"1": 2}),
        "stream": lambda key: raw.xadd(key, {"1": "2"}),
    }
    sound = counter("user:sound", now=now, limit=99)
    for position, (name, make) in enumerate(makers.items()):
        for algorithm in FIXED + SLIDING + BUCKET + CONCURRENT:
            wrong = counter(f"user:{name}", kind=algorithm, now=now)
            make(bench.cache.make_key(wrong.key))
            if algorithm == SLIDING:
                make(bench.cache.make_key(wrong.previous))
            for look in (bench.hit, bench.peek):
                unread, fine = look(wrong, sound, now=now)
                assert (unread.reason, unread.charged) == (Reason.STORE_ERROR, False)
                assert fine.allowed
                assert "WRONGTYPE" not in unread.cause
        assert bench.used(sound, now=now) == [4 * (position + 1)]
    found = {entry.key: load(sound, entry.value) for entry in bench.store.scan("rl:")}
    assert len(found) == 5 * len(makers) + 1
    assert {type(value) for key, value in found.items() if key != sound.key} == {Unreadable}
    assert found[sound.key] == 4 * len(makers)
    assert bench.store.reset(list(found)) == len(found)


def test_a_key_without_expiry_gets_one_where_each_hit_writes_it(bench: Bench) -> None:
    raw = client(bench)
    for algorithm in BUCKET + CONCURRENT:
        hit = counter(kind=algorithm, limit=9)
        bench.hit(hit)
        raw.persist(bench.cache.make_key(hit.key))
        bench.hit(hit)
        assert bench.seconds_left(hit.key)


# ── Listing ────────────────────────────────────────────────────────────────────────────────────────────────


def test_listing_is_bounded_by_the_scan_and_sends_no_keys(bench: Bench) -> None:
    raw = client(bench)
    pipe = raw.pipeline(transaction=False)
    for number in range(20_000):
        pipe.set(f"session:{number}", "x")
    now = microseconds()
    own = [counter(f"user:{number}", now=now) for number in range(1000)]
    for hit in own:
        pipe.set(bench.cache.make_key(hit.key), 2)
    pipe.execute()
    raw.config_resetstat()
    assert {entry.key for entry in bench.store.scan("rl:")} == {hit.key for hit in own}
    calls = {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in raw.info("commandstats").items()}
    assert "keys" not in calls
    assert 21 <= calls["scan"] <= 40
    assert calls["mget"] <= 2
    assert "get" not in calls


def test_listing_is_a_stream(bench: Bench) -> None:
    now = microseconds()
    raw = client(bench)
    raw.mset({bench.cache.make_key(counter(f"user:{number}", now=now).key): 1 for number in range(5000)})
    raw.config_resetstat()
    entries = bench.store.scan("rl:")
    next(entries)
    assert raw.info("commandstats")["cmdstat_scan"]["calls"] <= 3
    assert len({entry.key for entry in entries}) == 4999


# ── Configurations ─────────────────────────────────────────────────────────────────────────────────────────


def test_no_timeout_but_a_bounded_one() -> None:
    nothing = bounded({"host": "a", "db": 3})
    assert (nothing["socket_timeout"], nothing["socket_connect_timeout"]) == (TIMEOUT, TIMEOUT)
    assert (nothing["host"], nothing["db"]) == ("a", 3)
    one = bounded({"socket_timeout": 2, "retry": object(), "retry_on_timeout": True})
    assert (one["socket_timeout"], one["socket_connect_timeout"]) == (2, 2)
    assert (one["retry"], one["retry_on_error"], one["retry_on_timeout"]) == (None, [], False)
    both = bounded({"socket_timeout": 2, "socket_connect_timeout": 0.1, "maint_notifications_config": object()})
    assert (both["socket_timeout"], both["socket_connect_timeout"]) == (2, 0.1)
    assert "maint_notifications_config" not in both


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "RESP2": {"protocol": 2},
    "RESP3": {"protocol": 3},
    "decoded": {"decode_responses": True},
    "decoded, RESP3": {"decode_responses": True, "protocol": 3},
    "name": {"client_name": "shop"},
    "health checks": {"health_check_interval": 1},
    "retries": {"retry_on_timeout": True},
}


@pytest.mark.parametrize("which", CONFIGURATIONS)
@pytest.mark.parametrize("parser", ["C", "Python"])
def test_settings_of_the_connection(kind: str, which: str, parser: str, use_cache: Callable[..., Any]) -> None:
    settings = options(kind, **CONFIGURATIONS[which])
    if parser == "Python":
        library = "valkey" if kind == "django-valkey" else "redis"
        resp = "3" if CONFIGURATIONS[which].get("protocol") == 3 else "2"
        path = f"{library}._parsers._RESP{resp}Parser"
        settings["parser_class" if kind == "redis" else "PARSER_CLASS"] = path
    bench = Bench(kind, use_cache(kind, OPTIONS=settings))
    now = microseconds()
    hits = [counter(kind=algorithm, scope=f"s{algorithm}", now=now) for algorithm in FIXED + SLIDING + CONCURRENT]
    assert [bench.hit(*hits, now=now)[0].allowed for _ in range(4)] == [True, True, True, False]
    assert bench.used(*hits, now=now) == [3, 3, 3]
    assert len(bench.keys()) == 3
    raw = client(bench)
    raw.rpush(bench.cache.make_key("rl:wrong"), "1")
    wrong = Counter("rl:wrong", FIXED, 1, 1, 1, now + 1, 60)
    assert bench.hit(wrong, now=now)[0].reason is Reason.STORE_ERROR
    raw.script_flush()
    assert bench.used(*hits, now=now) == [3, 3, 3]


@pytest.mark.skipif(sys.platform == "win32", reason="no such sockets")
def test_a_unix_socket(own_redis: Callable[..., Server], kind: str, use_cache: Callable[..., Any]) -> None:
    if kind == "django-valkey":
        pytest.skip("one of the two libraries is enough")
    server = own_redis()
    path = server.directory / "redis.sock"
    server.kill()
    command = server.command
    server.command = lambda port: [*command(port), "--unixsocket", str(path)]
    server.start()
    bench = Bench(kind, use_cache(kind, server=server, LOCATION=f"unix://{path}?db=2"))
    assert bench.admitted([counter()] * 5) == 3
    assert len(bench.keys()) == 1


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")
def test_tls(own_redis: Callable[..., Server], tmp_path: Path, use_cache: Callable[..., Any]) -> None:
    import redis

    certificate, key = str(tmp_path / "certificate"), str(tmp_path / "key")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *subject]
    subprocess.run(make, check=True, capture_output=True)
    server = own_redis()
    port = free_port()
    with redis.Redis(port=server.port) as admin:
        files = {"tls-cert-file": certificate, "tls-key-file": key, "tls-ca-cert-file": certificate}
        admin.config_set("tls-auth-clients", "no", *(word for pair in files.items() for word in pair))
        admin.config_set("tls-port", port)
    location = f"rediss://127.0.0.1:{port}/0"
    settings = options("django-redis", ssl_ca_certs=certificate)
    bench = Bench("django-redis", use_cache("django-redis", server=server, LOCATION=location, OPTIONS=settings))
    assert bench.admitted([counter()] * 5) == 3
    with redis.Redis(port=server.port) as admin:
        before = admin.info("stats")["total_connections_received"]
        bench.hit(counter())
        assert admin.info("stats")["total_connections_received"] == before, "what TLS says by itself is no goodbye"

    async def story() -> list[bool]:
        for _ in range(Loops.uses + 1):
            await bench.store.apeek([counter()], microseconds())
        hits = [bench.store.ahit([counter("user:loop")], microseconds()) for _ in range(5)]
        return [verdicts[0].allowed for verdicts in await asyncio.gather(*hits)]

    assert sorted(asyncio.run(story())) == [False, False, True, True, True]


def test_a_password_and_a_database(own_redis: Callable[..., Server], use_cache: Callable[..., Any]) -> None:
    server = own_redis()
    import redis

    with redis.Redis(port=server.port) as admin:
        admin.acl_setuser(
            "limiter", enabled=True, passwords=["+s3cret"], keys=["*"], commands=["+@all"], reset_passwords=True
        )
    location = f"redis://limiter:s3cret@{server.host}:{server.port}/4"
    bench = Bench("django-redis", use_cache("django-redis", server=server, LOCATION=location))
    assert bench.admitted([counter()] * 5) == 3
    with redis.Redis(port=server.port, db=4) as admin:
        assert admin.dbsize() == 1


def test_serializers_and_compressors_have_no_part_in_it(use_cache: Callable[..., Any]) -> None:
    for changes in (
        {"SERIALIZER": "django_redis.serializers.json.JSONSerializer"},
        {"COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor"},
        {"CLIENT_CLASS": "django_redis.client.HerdClient"},
        {"IGNORE_EXCEPTIONS": True},
    ):
        bench = Bench("django-redis", use_cache("django-redis", OPTIONS=changes))
        assert bench.admitted([counter()] * 5) == 3
        assert client(bench).get(bench.cache.make_key(counter().key)) == b"3"


@pytest.mark.parametrize("library", ["redis", "valkey"])
def test_sentinel_clients_that_read_from_replicas(library: str, use_cache: Callable[..., Any]) -> None:
    backend = {"redis": "django_redis.cache.RedisCache", "valkey": "django_valkey.cache.ValkeyCache"}[library]
    changes = {
        "CLIENT_CLASS": f"django_{library}.client.SentinelClient",
        "CONNECTION_FACTORY": f"django_{library}.pool.SentinelConnectionFactory",
    }
    with pytest.MonkeyPatch.context() as patch:
        # django-valkey writes to a replica then, and fails.
        patch.setattr("django_valkey.cache.ValkeyCache.clear", lambda self: None)
        location = f"{library}://mymaster/7"
        cache = use_cache("django-redis-sentinel", BACKEND=backend, LOCATION=location, OPTIONS=changes)
    bench = Bench("django-redis-sentinel", cache)
    hit = counter(f"user:{library}", limit=50)
    for number in range(60):
        assert bench.hit(hit)[0].allowed == (number < 50)
        assert bench.used(hit) == [min(number + 1, 50)]
    assert bench.keys() == [hit.key]
    assert bench.store.reset([hit.key]) == 1


def test_shards_are_refused_with_a_hint(use_cache: Callable[..., Any]) -> None:
    use_cache("django-redis", OPTIONS={"CLIENT_CLASS": "django_redis.client.ShardClient"}, alias="default")
    with pytest.raises(ImproperlyConfigured, match=r"CACHES\['default'\].*ShardClient.*one LOCATION"):
        get_store("default")


def test_the_pool_of_the_cache_is_left_alone(use_cache: Callable[..., Any]) -> None:
    cache = use_cache("django-redis", OPTIONS={"SOCKET_TIMEOUT": None, "SOCKET_CONNECT_TIMEOUT": None})
    pool = cache.client.get_client(write=True).connection_pool
    before = dict(pool.connection_kwargs)
    bench = Bench("django-redis", cache)
    bench.hit(counter())
    assert pool.connection_kwargs == before
    assert "socket_timeout" not in before
    link = bench.store._link  # type: ignore[attr-defined]
    assert link.settings["socket_timeout"] == TIMEOUT


# ── Connections ────────────────────────────────────────────────────────────────────────────────────────────


def connections(bench: Bench) -> int:
    return len(client(bench).client_list())


def test_connections_are_kept_for_all_threads(bench: Bench) -> None:
    hit = counter(limit=1000)
    in_threads(8, lambda _: [bench.hit(hit) for _ in range(5)])
    before = connections(bench)
    for _ in range(5):
        in_threads(8, lambda _: [bench.store.hit([hit], microseconds()) for _ in range(5)])
    assert connections(bench) - before <= 8
    assert bench.used(hit) == [240]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_connections_of_its_own(bench: Bench) -> None:
    mine, its = counter("user:parent", limit=1000), counter("user:child", limit=1000)
    bench.hit(mine, its)

    def work(hit: Counter) -> bool:
        return all(bench.store.hit([hit], microseconds())[0].used == 2 + number for number in range(200))

    child = os.fork()
    if child == 0:
        os._exit(0 if work(its) else 1)
    right = work(mine)
    assert os.waitpid(child, 0)[1] == 0, "the child got what was meant for the parent"
    assert right
    assert bench.used(mine, its) == [201, 201]


def test_exhausted_connections(kind: str, own_redis: Callable[..., Server], use_cache: Callable[..., Any]) -> None:
    from ratelimit_kv.stores import StoreError

    server = own_redis()
    bench = Bench(kind, use_cache(kind, server=server, OPTIONS=options(kind, max_connections=1)))
    hit = counter(limit=10)
    bench.hit(hit)
    failures: list[StoreError] = []
    with server.paused():
        busy = threading.Thread(target=bench.hit, args=(hit,))
        busy.start()
        while not failures:
            try:
                bench.store.peek([hit], microseconds())
            except StoreError as error:
                failures.append(error)
    busy.join()
    assert "all 1 connections are in use" in failures[0].cause
    assert failures[0].outage
    assert bench.used(hit) == [2]


def test_a_blocking_pool_waits(use_cache: Callable[..., Any]) -> None:
    settings = {"CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool", **options("django-redis", max_connections=2)}
    bench = Bench("django-redis", use_cache("django-redis", OPTIONS=settings))
    hit = counter(limit=1000)
    in_threads(8, lambda _: [bench.store.hit([hit], microseconds()) for _ in range(20)])
    assert bench.used(hit) == [160]
    assert isinstance(bench.store, RedisStore)


def test_the_script_says_what_it_twins() -> None:
    assert "algorithms.transact" in SCRIPT
    assert "TIME'" not in SCRIPT
