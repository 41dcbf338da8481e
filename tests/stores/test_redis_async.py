"""Redis in event loops: those that live long and share a connection, and those that are made for one request."""

from __future__ import annotations

import asyncio
import gc
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from ratelimit_kv.algorithms import BUCKET, CONCURRENT, FIXED, SLIDING, Counter
from ratelimit_kv.decisions import Reason
from ratelimit_kv.stores import StoreError
from ratelimit_kv.stores.redis_async import Loops, _Incomplete, _reply
from tests.servers import Server, wait_until
from tests.stores.bench import Bench, counter, microseconds
from tests.stores.test_redis import client, options
from tests.stores.wire import Wire, wire_to


@pytest.fixture(params=["django-redis", "redis", "django-valkey"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def bench(kind: str, use_cache: Callable[..., Any]) -> Bench:
    return Bench(kind, use_cache(kind))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loop gets a connection of its own at its second use."""
    monkeypatch.setattr(Loops, "uses", 0)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """In a loop of its own, which must not leave anything behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return asyncio.run(coroutine)


def connections(bench: Bench) -> int:
    return len(client(bench).client_list())


# ── Loops that live long ───────────────────────────────────────────────────────────────────────────────────


def test_the_same_as_in_a_thread(bench: Bench, at_once: None) -> None:
    now = microseconds()
    hits = [counter(kind=kind, scope=f"s{kind}", now=now) for kind in FIXED + SLIDING + BUCKET + CONCURRENT]
    bench.hit(counter("user:first"))

    async def story() -> None:
        store = bench.store
        for allowed in (True, True, True, False):
            verdicts = await store.ahit(hits, now)
            assert [verdict.allowed for verdict in verdicts] == [allowed] * 4
            assert await store.apeek(hits, now) == bench.peek(*hits, now=now)
        client(bench).script_flush()
        assert [verdict.used for verdict in await store.apeek(hits, now)] == [3] * 4
        client(bench).rpush(bench.cache.make_key("rl:wrong"), "1")
        wrong = Counter("rl:wrong", FIXED, 1, 1, 1, now + 1, 60)
        assert (await store.ahit([wrong], now))[0].reason is Reason.STORE_ERROR
        assert await store.areset([hit.key for hit in hits]) == 4
        assert store._loops.link() is not None  # type: ignore[attr-defined]

    run(story())


def test_many_at_once_are_exact_and_share_a_connection(bench: Bench, at_once: None) -> None:
    hit = counter(limit=100)
    bench.hit(hit._replace(cost=0))
    before = connections(bench)

    async def work() -> int:
        admitted = 0
        for _ in range(50):
            admitted += (await bench.store.ahit([hit], microseconds()))[0].allowed
        return admitted

    async def story() -> int:
        admitted = sum(await asyncio.gather(*(work() for _ in range(8))))
        assert connections(bench) <= before + 1
        return admitted

    assert run(story()) == 100
    assert bench.used(hit) == [100]
    assert connections(bench) <= before, "closed with its loop"


def test_one_trip_and_none_but_the_one(
    kind: str, at_once: None, request: pytest.FixtureRequest, use_cache: Any
) -> None:
    server = request.getfixturevalue("valkey_server" if kind == "django-valkey" else "redis_server")
    with wire_to(server.host, server.port) as wire:
        scheme = "valkey" if kind == "django-valkey" else "redis"
        bench = Bench(kind, use_cache(kind, LOCATION=f"{scheme}://127.0.0.1:{wire.port}/5"))
        hits = [counter("user:1", limit=99), counter("ip:203.0.113.9", limit=99), counter("everyone", limit=99)]
        bench.hit(*hits)

        async def story() -> None:
            for _ in range(3):
                wire.log.clear()
                await bench.store.ahit(hits, microseconds())
            assert (wire.commands, wire.round_trips) == ([b"EVALSHA"], 1)
            trips = []
            for _ in range(10):
                wire.log.clear()
                await asyncio.gather(*(bench.store.ahit(hits, microseconds()) for _ in range(20)))
                assert wire.commands == [b"EVALSHA"] * 20
                trips.append(wire.round_trips)
            # On a busy machine the proxy may see each command answered before it reads the next.
            assert min(trips) < 20, "one waits for no other"

        run(story())


def test_who_is_cancelled_leaves_no_reply_to_others(
    kind: str, at_once: None, own_redis: Callable[..., Server], use_cache: Callable[..., Any]
) -> None:
    server = own_redis()
    bench = Bench(kind, use_cache(kind, server=server))
    hit, other = counter(limit=100), counter("user:another", limit=100)
    bench.hit(hit)

    async def story() -> None:
        for _ in range(2):
            await bench.store.ahit([hit], microseconds())
        line = bench.store._loops.link()._line  # type: ignore[attr-defined]
        with server.paused():
            tasks = [asyncio.ensure_future(bench.store.ahit([hit], microseconds())) for _ in range(3)]
            waiting = asyncio.ensure_future(bench.store.ahit([other], microseconds()))
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
        assert (await waiting)[0].used == 1
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert bench.store._loops.link()._line is line, "as good as before"  # type: ignore[attr-defined]
        assert (await bench.store.ahit([other], microseconds()))[0].used == 2

    run(story())
    assert bench.used(hit) == [6], "what was sent has counted"


def test_cancelled_while_it_connects(bench: Bench, at_once: None) -> None:
    hit = counter(limit=100)
    bench.hit(hit)

    async def story() -> None:
        first = asyncio.ensure_future(bench.store.ahit([hit], microseconds()))
        second = asyncio.ensure_future(bench.store.ahit([hit], microseconds()))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second)[0].used == 2, "the first was never sent"
        assert first.cancelled()

    run(story())


async def be_busy(turns: int, seconds: float) -> None:
    """Hold up the loop in each of these turns, as a burst of requests with much to compute does."""
    for _ in range(turns):
        time.sleep(seconds)  # noqa: ASYNC251  which is what is wrong with it
        await asyncio.sleep(0)


def test_a_loop_that_is_busy_is_no_server_that_hangs(kind: str, at_once: None, use_cache: Callable[..., Any]) -> None:
    bench = Bench(kind, use_cache(kind, OPTIONS=options(kind, socket_timeout=0.1, socket_connect_timeout=0.1)))
    hit = counter(limit=100)
    bench.hit(hit)

    async def story() -> None:
        connects = asyncio.ensure_future(bench.store.ahit([hit], microseconds()))
        await asyncio.gather(connects, be_busy(8, 0.15))
        waits = asyncio.ensure_future(bench.store.ahit([hit], microseconds()))
        await asyncio.gather(waits, be_busy(3, 0.15))

    run(story())
    assert bench.used(hit) == [3]


def test_a_server_that_is_slow_is_no_server_that_hangs(
    kind: str, at_once: None, request: pytest.FixtureRequest, use_cache: Callable[..., Any]
) -> None:
    server = request.getfixturevalue("valkey_server" if kind == "django-valkey" else "redis_server")
    scheme = "valkey" if kind == "django-valkey" else "redis"
    with wire_to(server.host, server.port) as wire:
        wire.delay = 0.35  # for each of the handshake's replies; all of them take longer than one may
        given = options(kind, socket_timeout=0.5, socket_connect_timeout=0.5)
        bench = Bench(kind, use_cache(kind, LOCATION=f"{scheme}://127.0.0.1:{wire.port}/5", OPTIONS=given))
        hit = counter(limit=100)
        bench.hit(hit)  # by a thread
        wire.log.clear()
        assert run(bench.store.ahit([hit], microseconds()))[0].used == 2
        assert wire.round_trips >= 2, "with a handshake of its own"


def test_late_replies_are_waited_for_no_longer_because_others_come(
    kind: str, at_once: None, request: pytest.FixtureRequest, use_cache: Callable[..., Any]
) -> None:
    server = request.getfixturevalue("valkey_server" if kind == "django-valkey" else "redis_server")
    scheme = "valkey" if kind == "django-valkey" else "redis"

    async def story() -> list[Any]:
        for _ in range(2):
            await bench.store.ahit([hit], microseconds())
        wire.delay, wire.chunk = 0.002, 12  # about a reply at a time
        return await asyncio.gather(
            *(bench.store.ahit([hit], microseconds()) for _ in range(500)), return_exceptions=True
        )

    with wire_to(server.host, server.port) as wire:
        given = options(kind, socket_timeout=0.25)
        bench = Bench(kind, use_cache(kind, LOCATION=f"{scheme}://127.0.0.1:{wire.port}/5", OPTIONS=given))
        hit = counter(limit=100)
        results = run(story())
    late = [result for result in results if isinstance(result, StoreError)]
    assert late, "nobody waits for more than the timeout"
    assert len(late) < 500


def test_a_server_that_hangs(kind: str, at_once: None, own_redis: Callable[..., Server], use_cache: Any) -> None:
    server = own_redis()
    upper = kind != "redis"
    none = {name.upper() if upper else name: None for name in ("socket_timeout", "socket_connect_timeout")}
    bench = Bench(kind, use_cache(kind, server=server, OPTIONS=none))
    hit = counter(limit=100)
    bench.hit(hit)
    stalls: list[float] = []

    async def watch() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.005)
            stalls.append(time.perf_counter() - start)

    async def story() -> None:
        for _ in range(3):
            await bench.store.ahit([hit], microseconds())
        watcher = asyncio.ensure_future(watch())
        with server.paused():
            for _ in range(2):
                start = time.perf_counter()
                results = await asyncio.gather(
                    *(bench.store.ahit([hit], microseconds()) for _ in range(10)), return_exceptions=True
                )
                assert {type(result) for result in results} == {StoreError}
                assert all(result.outage for result in results if isinstance(result, StoreError))
                assert 0.2 < time.perf_counter() - start < 2
        watcher.cancel()
        wait_until(lambda: client(bench).ping(), "the server")
        assert (await bench.store.apeek([counter("user:another")], microseconds()))[0].used == 0

    run(story())
    assert len(stalls) > 20, "the loop went on"
    assert bench.used(hit)[0] in (4, 14), "those sent before anybody knew may count, and once"


def test_a_server_that_restarts_and_one_that_is_not_there(
    kind: str, at_once: None, own_redis: Callable[..., Server], use_cache: Callable[..., Any]
) -> None:
    server = own_redis()
    bench = Bench(kind, use_cache(kind, server=server))
    hit = counter(limit=100)
    bench.hit(hit)

    async def story() -> None:
        for expected in (2, 3, 4):
            assert (await bench.store.ahit([hit], microseconds()))[0].used == expected
        server.restart()
        await asyncio.sleep(0.01)
        assert (await bench.store.ahit([hit], microseconds()))[0].used == 1
        server.kill()
        await asyncio.sleep(0.01)
        for _ in range(3):
            with pytest.raises(StoreError) as caught:
                await bench.store.ahit([hit], microseconds())
            assert caught.value.outage
        server.start()
        assert (await bench.store.ahit([hit], microseconds()))[0].used == 1

    run(story())


def test_a_server_that_has_become_a_replica(
    kind: str, at_once: None, own_redis: Callable[..., Server], redis_server: Server, use_cache: Callable[..., Any]
) -> None:
    bench = Bench(kind, use_cache(kind, server=own_redis()))
    hit = counter(limit=100)
    bench.hit(hit)

    async def story() -> None:
        for _ in range(2):
            await bench.store.ahit([hit], microseconds())
        line = bench.store._loops.link()._line  # type: ignore[attr-defined]
        client(bench).replicaof(redis_server.host, redis_server.port)
        with pytest.raises(StoreError, match="ReadOnly") as caught:
            await bench.store.ahit([hit], microseconds())
        assert caught.value.outage
        assert line.closed
        client(bench).replicaof("NO", "ONE")
        await bench.store.ahit([hit], microseconds())

    run(story())


@pytest.mark.parametrize(
    "extra",
    [{"protocol": 2}, {"protocol": 3}, {"decode_responses": True}, {"client_name": "x"}, {"health_check_interval": 1}],
    ids=str,
)
def test_settings_of_the_connection(
    kind: str, extra: dict[str, Any], at_once: None, use_cache: Callable[..., Any]
) -> None:
    bench = Bench(kind, use_cache(kind, OPTIONS=options(kind, **extra)))
    hit = counter()
    bench.hit(hit)

    async def story() -> None:
        assert [(await bench.store.ahit([hit], microseconds()))[0].allowed for _ in range(3)] == [True, True, False]
        assert bench.store._loops.link() is not None  # type: ignore[attr-defined]

    run(story())


# ── Loops that do not ──────────────────────────────────────────────────────────────────────────────────────


def test_a_loop_for_one_request_opens_no_connection(bench: Bench) -> None:
    hit = counter(limit=1000)
    hits = async_to_sync(bench.store.ahit)
    hits([hit], microseconds())
    before = client(bench).info("stats")["total_connections_received"]
    for _ in range(10):
        hits([hit], microseconds())
        assert asyncio.run(bench.store.apeek([hit], microseconds()))[0].allowed
    after = client(bench).info("stats")["total_connections_received"]
    # The raw client of the cache may have opened one.
    assert after - before <= 1
    assert len(bench.store._loops._known) <= 1, "loops that have ended are forgotten"  # type: ignore[attr-defined]


def test_a_loop_that_comes_back_gets_a_connection(bench: Bench) -> None:
    async def story() -> None:
        await bench.store.ahit([counter()], microseconds())
        loops = bench.store._loops  # type: ignore[attr-defined]
        for _ in range(Loops.uses):
            assert loops.is_new()
            assert loops.link() is None
        assert loops.link() is not None
        assert not loops.is_new()

    run(story())


def test_a_loop_that_stays_gets_a_connection(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loops, "seconds", 0.05)

    async def story() -> None:
        await bench.store.ahit([counter()], microseconds())
        loops = bench.store._loops  # type: ignore[attr-defined]
        assert loops.link() is None
        await asyncio.sleep(0.06)
        assert not loops.is_new()
        assert loops.link() is not None

    run(story())


def test_servers_without_an_asynchronous_connection(use_cache: Callable[..., Any], at_once: None) -> None:
    for kind in ("django-redis-sentinel", "django-redis-cluster"):
        bench = Bench(kind, use_cache(kind))
        hit = counter(limit=2)

        async def story(bench: Bench = bench, hit: Counter = hit) -> None:
            now = microseconds()
            assert [(await bench.store.ahit([hit], now))[0].allowed for _ in range(3)] == [True, True, False]
            assert bench.store._loops.link() is None  # type: ignore[attr-defined]
            assert not bench.store._loops.is_new()  # type: ignore[attr-defined]
            assert await bench.store.areset([hit.key]) == 1

        run(story())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_dropped(bench: Bench, at_once: None) -> None:
    """Closed without the courtesies of ``asyncio.run``, as some test runners do: the garbage collector has it."""
    bench.hit(counter())
    before = connections(bench)
    loop = asyncio.new_event_loop()
    for _ in range(3):
        loop.run_until_complete(bench.store.ahit([counter()], microseconds()))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    del loop
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        run(bench.store.apeek([counter()], microseconds()))
        gc.collect()
    wait_until(lambda: connections(bench) <= before, "the connection to be closed")


# ── The protocol ───────────────────────────────────────────────────────────────────────────────────────────


REPLIES: list[tuple[bytes, Any]] = [
    (b"$2\r\n17\r\n", b"17"),
    (b"$0\r\n\r\n", b""),
    (b"$4\r\n\r\n\r\n\r\n", b"\r\n\r\n"),
    (b"$-1\r\n", None),
    (b"_\r\n", None),
    (b":-3\r\n", -3),
    (b"*0\r\n", []),
    (b"*3\r\n$1\r\na\r\n$-1\r\n*2\r\n:1\r\n_\r\n", [b"a", None, [1, None]]),
    (b"-ERR no\r\n", ("ERR no",)),
    (b"*2\r\n-WRONGTYPE no\r\n$1\r\n1\r\n", [("WRONGTYPE no",), b"1"]),
]


@pytest.mark.parametrize(("data", "expected"), REPLIES, ids=[repr(data) for data, _ in REPLIES])
def test_replies_in_pieces(data: bytes, expected: Any) -> None:
    def plain(reply: Any) -> Any:
        if isinstance(reply, list):
            return [plain(item) for item in reply]
        return reply.args if isinstance(reply, Exception) else reply

    reply, end = _reply(data + b"$1\r\nx\r\n", 0, ValueError)
    assert (plain(reply), end) == (expected, len(data))
    for cut in range(len(data)):
        with pytest.raises(_Incomplete):
            _reply(data[:cut], 0, ValueError)


@pytest.mark.parametrize(
    "data", [b"hello\r\n", b"HTTP/1.1 400 Bad Request\r\n", b"$x\r\n", b">1\r\n", b"\x15\x03\x01\r\n"]
)
def test_what_is_no_reply(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no reply|invalid literal"):
        _reply(data, 0, ValueError)


@pytest.fixture
def chatty(redis_server: Server) -> Iterator[Wire]:
    with wire_to(redis_server.host, redis_server.port) as wire:
        yield wire


def test_a_server_that_says_what_nobody_asked(chatty: Wire, at_once: None, use_cache: Callable[..., Any]) -> None:
    bench = Bench("django-redis", use_cache("django-redis", LOCATION=f"redis://127.0.0.1:{chatty.port}/5"))
    hit = counter(limit=100)
    bench.hit(hit)

    async def story() -> None:
        for _ in range(2):
            await bench.store.ahit([hit], microseconds())
        line = bench.store._loops.link()._line  # type: ignore[attr-defined]
        to_us = chatty._sockets[-2]
        to_us.sendall(b"$1\r\n9\r\n")
        await asyncio.to_thread(wait_until, lambda: line.closed, "the line to be closed")
        assert (await bench.store.ahit([hit], microseconds()))[0].used == 4
        line = bench.store._loops.link()._line  # type: ignore[attr-defined]
        waiting = asyncio.ensure_future(bench.store.ahit([hit], microseconds()))
        await asyncio.sleep(0)
        line.data_received(b"nonsense\r\n")
        with pytest.raises(StoreError, match="InvalidResponse"):
            await waiting

    run(story())
