"""MemcachedStore through both clients of Django."""

from __future__ import annotations

import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache

from ratelimit_kv.stores import CannotList, StoreError, memcached
from tests import servers
from tests.caches import child_environment
from tests.conftest import there
from tests.servers import Server
from tests.stores.bench import Bench, counter, in_threads, microseconds
from tests.stores.contract import StoreContract

KINDS = ("pymemcache", "pylibmc")


class TestPyMemcache(StoreContract):
    kind = "pymemcache"


class TestPyLibMC(StoreContract):
    kind = "pylibmc"


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, use_cache: Callable[..., Any]) -> Bench:
    return Bench(request.param, use_cache(request.param))


@pytest.fixture
def own_memcached() -> Iterator[Callable[..., Server]]:
    """A memcached that this test may pause and kill."""
    started: list[Server] = []

    def start(**config: object) -> Server:
        started.append(there(servers.start_memcached(**config)))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize("algorithm", ["f", "s", "b", "c"])
def test_a_hit_that_is_outrun_looks_again(bench: Bench, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = microseconds()
    hit = counter(kind=algorithm, now=now, limit=3)
    first = counter(now=now, limit=9, scope="first")
    read = memcached.MemcachedStore.read
    meanwhile = [hit, hit._replace(cost=2)]

    def read_and_be_outrun(store: Any, *args: Any) -> Any:
        found = read(store, *args)
        if meanwhile:
            bench.hit(meanwhile.pop(0), now=now)
        return found

    monkeypatch.setattr(memcached.MemcachedStore, "read", read_and_be_outrun)
    assert [verdict.charged for verdict in bench.hit(first, hit, now=now)] == [False, False]
    assert bench.used(first, hit, now=now) == [0, 3], "what was taken first was given back"


def test_a_key_that_goes_between_reading_and_replacing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    hit = counter(kind="b")
    bench.hit(hit)
    bench.hit(hit)
    read = memcached.MemcachedStore.read
    deleted: list[bool] = []

    def read_and_lose(store: Any, *args: Any) -> Any:
        found = read(store, *args)
        if not deleted:
            deleted.append(cache.delete(hit.key))
        return found

    monkeypatch.setattr(memcached.MemcachedStore, "read", read_and_lose)
    assert bench.hit(hit)[0].used == 1
    assert deleted == [True]


def test_a_change_too_large_for_one_command_may_be_outrun(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    hit = counter(limit=2**40, cost=2**33)
    bench.hit(hit)
    read = memcached.MemcachedStore.read
    others: list[Any] = [counter(limit=2**40)]

    def read_and_be_outrun(store: Any, *args: Any) -> Any:
        found = read(store, *args)
        if others:
            bench.hit(others.pop())
        return found

    monkeypatch.setattr(memcached.MemcachedStore, "read", read_and_be_outrun)
    assert bench.hit(hit)[0].used == 2**34 + 1


def test_other_errors_of_replacing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    hit = counter(kind="b")
    bench.hit(hit)

    class Client:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def cas(self, *args: Any) -> None:
            raise OSError("lost")

    client = bench.cache._cache
    monkeypatch.setitem(bench.cache.__dict__, "_cache", Client())
    with pytest.raises(StoreError, match="lost") as caught:
        bench.hit(hit)
    assert caught.value.outage


# ── Failures ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_gone(kind: str, own_memcached: Callable[..., Server], use_cache: Callable[..., Any]) -> None:
    server = own_memcached()
    bench = Bench(kind, use_cache(kind, server=server))
    bench.hit(counter())
    server.kill()
    # pymemcache raises at first and then, for a second, answers from nowhere that there is nothing.
    for _ in range(3):
        for look in (bench.hit, bench.peek):
            with pytest.raises(StoreError) as caught:
                look(counter(), counter(kind="b"))
            assert caught.value.outage
    with pytest.raises(StoreError) as caught:
        list(bench.store.scan("rl:"))
    assert caught.value.outage


def test_a_client_that_ignores_errors(own_memcached: Callable[..., Server], use_cache: Callable[..., Any]) -> None:
    server = own_memcached()
    bench = Bench("pymemcache", use_cache("pymemcache", server=server, OPTIONS={"ignore_exc": True}))
    hits = [counter(), counter(kind="b"), counter(kind="s")]
    bench.hit(*hits)
    server.kill()
    for _ in range(3):
        for look in (bench.hit, bench.peek):
            with pytest.raises(StoreError, match="does not talk to its server") as caught:
                look(*hits)
            assert caught.value.outage


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_hangs(kind: str, own_memcached: Callable[..., Server], use_cache: Callable[..., Any]) -> None:
    server = own_memcached()
    options: dict[str, Any] = {"timeout": 0.1, "connect_timeout": 0.1}
    if kind == "pylibmc":
        # poll_timeout in milliseconds, the others in microseconds.
        options = {"behaviors": {"connect_timeout": 100, "_poll_timeout": 100, "receive_timeout": 100_000}}
    bench = Bench(kind, use_cache(kind, server=server, OPTIONS=options))
    bench.hit(counter())
    with server.paused(), pytest.raises(StoreError) as caught:
        bench.hit(counter())
    assert caught.value.outage


def test_a_key_that_memcached_does_not_take(bench: Bench) -> None:
    for identity in ("user:" + "x" * 250, "user:a b"):
        for look in (bench.hit, bench.peek):
            with pytest.raises(StoreError, match="InvalidCacheKey") as caught:
                look(counter(identity))
            assert not caught.value.outage


def test_a_command_that_the_server_refuses(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class MemcacheClientError(Exception):
        pass

    def refuse(*args: Any) -> None:
        raise MemcacheClientError("bad data chunk")

    monkeypatch.setattr(memcached, "_gets", refuse)
    with pytest.raises(StoreError, match="bad data chunk") as caught:
        bench.hit(counter())
    assert not caught.value.outage


# ── Processes and threads ──────────────────────────────────────────────────────────────────────────────────

FORK = """
import multiprocessing, time
import django
django.setup()
from django.core.cache import cache
from ratelimit_kv.algorithms import Counter
from ratelimit_kv.stores import get_store
store = get_store("default")
now = time.time_ns() // 1000
hit = Counter("rl:login:f60:{user:1}:1", "f", 10**6, 1, 60_000_000, now + 60_000_000, 120)
store.hit([hit], now)
fork = multiprocessing.get_context("fork")
processes = [fork.Process(target=lambda: [store.hit([hit], now) for _ in range(100)]) for _ in range(4)]
for process in processes:
    process.start()
for _ in range(100):
    store.hit([hit], now)
for process in processes:
    process.join(30)
assert [process.exitcode for process in processes] == [0] * 4
print(store.peek([hit], now)[0].used, cache.get(hit.key))
"""


def test_a_fork_does_not_share_the_socket(bench: Bench) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    environment = child_environment(INSTALLED_APPS=[])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["501", "501"], done.stderr


@pytest.mark.parametrize("options", [{}, {"use_pooling": True}])
def test_threads_do_not_share_a_client(use_cache: Callable[..., Any], options: dict[str, Any]) -> None:
    bench = Bench("pymemcache", use_cache("pymemcache", OPTIONS=options))
    clients: set[int] = set()
    kept: list[Any] = []

    def work(thread: int) -> None:
        for _ in range(20):
            bench.hit(counter(f"user:{thread}"))
            client = memcached.MemcachedStore("default").cache()._cache
            kept.append(client)
            clients.add(id(client))

    in_threads(4, work)
    assert len(clients) == 4


# ── Listing ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("server", ["unix:{path}", "{path}"])
def test_a_connection_of_our_own_to_a_socket(server: str) -> None:
    with tempfile.TemporaryDirectory() as directory:  # the path of such a socket has to be short
        path = str(Path(directory, "socket"))
        with answering(b"key=rl%3Ax exp=-1 la=1\r\nEND\r\n", path):
            assert list(memcached._dump(server.format(path=path), {})) == ["rl:x"]


def test_a_connection_of_our_own_with_tls() -> None:
    class Context:
        def wrap_socket(self, connection: Any, server_hostname: str) -> Any:
            hosts.append(server_hostname)
            return connection

    hosts: list[str] = []
    with answering(b"END\r\n") as address:
        assert list(memcached._dump(address, {"tls_context": Context()})) == []
    assert hosts == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("answer", "quoted"),
    [
        (b"ERROR\r\n", "'ERROR'"),
        (b"CLIENT_ERROR lru crawler disabled\r\n", "lru crawler disabled"),
        (b"BUSY currently processing crawler request\r\n", "BUSY"),
        (b"", "nothing"),
    ],
)
def test_a_server_that_does_not_list(bench: Bench, answer: bytes, quoted: str) -> None:
    with answering(answer) as address:
        bench.cache._servers = [address]
        with pytest.raises(CannotList, match=quoted):
            list(bench.store.scan("rl:"))


def test_an_older_server_lists_otherwise() -> None:
    with answering(b"CLIENT_ERROR bad class id\r\n", then=b"key=rl%3Ax exp=-1\nEND\r\n") as address:
        assert list(memcached._dump(address, {})) == ["rl:x"]


class answering:  # noqa: N801 - reads as a word
    """A server that gives this answer to whatever it is asked."""

    def __init__(self, answer: bytes, path: str = "", then: bytes | None = None) -> None:
        answers = [answer, answer if then is None else then]

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.rfile.readline()
                self.wfile.write(answers.pop(0))

        if path:
            self.server: Any = socketserver.UnixStreamServer(path, Handler)
            self.address = path
        else:
            self.server = socketserver.TCPServer(("127.0.0.1", 0), Handler)
            self.address = f"127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> str:
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self.address

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
