"""``python -m benchmarks.redis_scale``: counters on Redis and Valkey by the hundred thousand, on servers of its own.

Two tables. *Listing*: the seconds to find our counters among foreign keys, beside a bare SCAN of the same keyspace in
the same run, with the memory of the process that lists. *Memory*: the bytes that a counter takes, of each algorithm,
beside a bare key of the same name and value. ``--quick`` takes a tenth of everything.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import django
from django.conf import settings

from tests.servers import Missing, Server, start_redis, start_valkey

FOREIGN, OWN, IDENTITIES = 1_000_000, 100_000, 100_000
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.redis_scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    part = 10 if parser.parse_args(arguments).quick else 1
    listings, bytes_each = [], []
    for name, start in (("Redis", start_redis), ("Valkey", start_valkey)):
        server = start()
        if isinstance(server, Missing):
            print(f"{name} is left out: {server.reason}", file=sys.stderr)
            continue
        try:
            configure(server)
            listings.append([name, *listing(server, FOREIGN // part, OWN // part)])
            bytes_each += [[name, *row] for row in memory(server, IDENTITIES // part)]
        finally:
            server.stop()
    print(f"\nListing {OWN // part:,} counters among {FOREIGN // part:,} foreign keys, best of {ROUNDS}\n")
    table(["server", "bare SCAN, s", "scan(), s", "ratio", "peak memory, MiB", "commands"], listings)
    print(f"\nMemory, {IDENTITIES // part:,} identities\n")
    table(["server", "algorithm", "key", "bytes a counter", "bytes a bare key"], bytes_each)
    return 0


def configure(server: Server) -> None:
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url, "OPTIONS": {"SOCKET_TIMEOUT": 30}}
    if not settings.configured:
        settings.configure(CACHES={"default": cache}, INSTALLED_APPS=["ratelimit_kv"], SECRET_KEY="benchmarks")
        django.setup()
        return
    from django.core.cache import caches
    from django.test.signals import setting_changed

    caches.close_all()
    settings.CACHES = {"default": cache}
    setting_changed.send(sender=None, setting="CACHES", value=settings.CACHES, enter=True)


def listing(server: Server, foreign: int, own: int) -> list[str]:
    from ratelimit_kv.stores import get_store

    client = raw(server)
    fill(client, (f":1:session:{number:012x}" for number in range(foreign)))
    fill(client, (f":1:rl:login:f3600:{{user:{number}}}:497222" for number in range(own)))
    store = get_store("default")

    def bare() -> int:
        cursor, found = 0, 0
        while True:
            cursor, keys = client.scan(cursor, match=":1:rl:*", count=1000)
            found += len(keys)
            if not cursor:
                return found

    def ours() -> int:
        return sum(1 for _ in store.scan("rl:"))

    best = {bare: float("inf"), ours: float("inf")}
    for _ in range(ROUNDS):
        for way in best:
            start = time.perf_counter()
            assert way() == own
            best[way] = min(best[way], time.perf_counter() - start)
    client.config_resetstat()
    tracemalloc.start()
    ours()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    calls = {name.removeprefix("cmdstat_"): stats["calls"] for name, stats in client.info("commandstats").items()}
    sent = ", ".join(f"{calls[name]:,} {name.upper()}" for name in ("scan", "mget", "get", "keys") if name in calls)
    client.execute_command("FLUSHALL", "SYNC")
    seconds = (best[bare], best[ours])
    return [f"{seconds[0]:.2f}", f"{seconds[1]:.2f}", f"{seconds[1] / seconds[0]:.2f}", f"{peak / 2**20:.1f}", sent]


def memory(server: Server, identities: int) -> Iterable[list[str]]:
    from django.core.cache import caches

    from ratelimit_kv.algorithms import BAN, BUCKET, CONCURRENT, FIXED, SLIDING, Counter
    from ratelimit_kv.stores import get_store

    client = raw(server)
    store = get_store("default")
    prefix = caches["default"].make_key("")
    now = 1_790_000_000_000_000
    minute = 60_000_000
    for kind, name in {
        FIXED: "fixed",
        SLIDING: "sliding",
        BUCKET: "bucket",
        CONCURRENT: "concurrent",
        BAN: "ban",
    }.items():
        window = f":{now // minute}" if kind in (FIXED, SLIDING) else ""

        def one(number: int, kind: str = kind, window: str = window) -> Counter:
            key = f"rl:login:{kind}60:{{user:{number:06}}}{window}"
            before = f"{key}-" if kind == SLIDING else ""
            return Counter(
                key, kind, 100, 0 if kind == BAN else 1, minute, now + minute, 600, before, maximum=10 * minute
            )

        def hit(one: Callable[[int], Counter] = one, kind: str = kind) -> None:
            for number in range(identities):
                counters = [one(number)]
                if kind == BAN:  # it is written when a rate of its scope denies
                    counters.append(Counter("rl:full", CONCURRENT, 1, 1, minute, now + minute, 600))
                store.hit(counters, now)

        def bare(one: Callable[[int], Counter] = one, value: str = "1") -> None:
            fill(client, (prefix + one(number).key for number in range(identities)), value)

        if kind == BAN:
            store.hit([Counter("rl:full", CONCURRENT, 1, 1, minute, now + minute, 600)], now)
        ours = grown(client, hit) / identities
        plain = grown(client, bare) / identities
        yield [name, one(0).key, f"{ours:.0f}", f"{plain:.0f}"]


def grown(client: Any, action: Callable[[], None]) -> int:
    """Bytes that the server has more of afterwards; empties it then."""
    before = client.info("memory")["used_memory"]
    action()
    after: int = client.info("memory")["used_memory"]
    client.execute_command("FLUSHALL", "SYNC")
    return after - before


def raw(server: Server) -> Any:
    import redis

    return redis.Redis(host=server.host, port=server.port)


def fill(client: Any, keys: Iterable[str], value: str = "1") -> None:
    pipe = client.pipeline(transaction=False)
    for number, key in enumerate(keys):
        pipe.set(key, value, ex=600)
        if number % 5000 == 4999:
            pipe.execute()
    pipe.execute()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    raise SystemExit(main())
