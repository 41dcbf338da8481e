"""What the tests of all stores share: counters as the limiter makes them, and a look at what is really stored."""

from __future__ import annotations

import itertools
import json
import pickle
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from django.core.cache import caches
from django.utils import timezone
from django.utils.module_loading import import_string

from ratelimit_kv.algorithms import BAN, EXISTING, FIXED, FORCE, SLIDING, Counter, Verdict
from ratelimit_kv.stores import Store, get_store
from tests.caches import child_environment
from tests.servers import wait_until

SECOND = 1_000_000
ALIAS = "default"


def microseconds() -> int:
    return time.time_ns() // 1000


def counter(
    identity: str = "ip:203.0.113.9",
    *,
    kind: str = FIXED,
    limit: int = 3,
    now: int | None = None,
    cost: int = 1,
    period: int = 3600,
    scope: str = "login",
    **fields: Any,
) -> Counter:
    """A counter with the key, the end and the lifetime that the limiter gives it; ``period`` in seconds."""
    now = microseconds() if now is None else now
    length = period * SECOND
    name = f"rl:{scope}:{kind}{period}:{{{identity}}}"
    if kind in (FIXED, SLIDING):
        number = now // length
        end = (number + 1) * length
        left = -(-(end - now) // SECOND)
        fields.setdefault("ttl", left + 60 + (period if kind == SLIDING else 0))
        if kind == SLIDING:
            fields.setdefault("previous", f"{name}:{number - 1}")
        name = f"{name}:{number}"
    elif kind == BAN:
        end = 0
        fields.setdefault("maximum", 8 * length)
        fields.setdefault("growth", 2.0)
        fields.setdefault("ttl", 2 * 8 * period + 60)
    else:
        end = now + length
        fields.setdefault("ttl", 2 * period + 60)
    fields.setdefault("end", end)
    fields.setdefault("key", name)
    return Counter(kind=kind, limit=limit, cost=cost, period=length, **fields)


def refund(taken: Counter, cost: int | None = None) -> Counter:
    """The hit that gives back what ``taken`` took."""
    return taken._replace(cost=-(taken.cost if cost is None else cost), flags=FORCE | EXISTING)


@dataclass
class Bench:
    """One store over one cache, and the instruments to look at both."""

    kind: str
    cache: Any
    store_class: str = ""
    """Dotted name, where it is not the one that ``get_store`` takes for the cache."""

    @property
    def store(self) -> Store:
        return import_string(self.store_class)(ALIAS) if self.store_class else get_store(ALIAS)

    def hit(self, *counters: Counter, now: int | None = None) -> list[Verdict]:
        return self.store.hit(counters, microseconds() if now is None else now)

    def peek(self, *counters: Counter, now: int | None = None) -> list[Verdict]:
        return self.store.peek(counters, microseconds() if now is None else now)

    def used(self, *counters: Counter, now: int | None = None) -> list[int]:
        return [verdict.used for verdict in self.peek(*counters, now=now)]

    def admitted(self, counters: Iterable[Counter], now: int | None = None) -> int:
        return sum(self.hit(each, now=now)[0].allowed for each in counters)

    def keys(self, prefix: str = "rl:") -> list[str]:
        return sorted(entry.key for entry in self.store.scan(prefix))

    def wait_for_expiry(self, key: str) -> None:
        """Real time has to pass where the server has its own clock."""
        wait_until(lambda: self.cache.get(key) is None, f"{key} to expire")

    def seconds_left(self, key: str) -> float | None:
        """Until the cache forgets the key, by what the cache itself has noted down; None when it is not there."""
        made = self.cache.make_key(key)
        if self.kind == "locmem":
            expiry = self.cache._expire_info.get(made)
            return None if expiry is None else expiry - time.time()
        if self.kind == "filebased":
            path = Path(self.cache._key_to_file(key))
            return float(pickle.loads(path.read_bytes())) - time.time() if path.exists() else None
        if self.kind.startswith("database"):
            return _row_expiry(self.cache, made)
        if self.kind in ("pymemcache", "pylibmc"):
            host, port = self.cache._servers[0].split(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"mg {made} t\r\n".encode())
                answer = connection.recv(100).split()
            return float(answer[1][1:]) if answer[0] == b"HD" else None
        if self.kind == "redis":
            left = self.cache._cache.get_client(None, write=True).pttl(made)
        else:
            left = self.cache.client.get_client(write=True).pttl(str(made))
        assert left != -1, f"{key} never expires"
        return None if left == -2 else left / 1000


def _row_expiry(cache: Any, made: str) -> float | None:
    from django.db import connections, models, router

    connection = connections[router.db_for_read(cache.cache_model_class)]
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT expires FROM {cache._table} WHERE cache_key = %s", [made])
        row = cursor.fetchone()
    if row is None:
        return None
    field = models.Expression(output_field=models.DateTimeField())
    expires: datetime = row[0]
    for convert in connection.ops.get_db_converters(field):
        expires = convert(expires, field, connection)
    return (expires - timezone.now()).total_seconds()


# ── Many at once ───────────────────────────────────────────────────────────────────────────────────────────


def in_threads(number: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(0)``, ``work(1)``, ... return, each in a thread, started together."""
    from django.db import connections

    results: list[Any] = [None] * number
    gate = threading.Barrier(number)

    def run(position: int) -> None:
        try:
            gate.wait(30)
            results[position] = work(position)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            results[position] = error
        finally:
            caches[ALIAS].close()
            connections.close_all()

    threads = [threading.Thread(target=run, args=(position,)) for position in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed := next((result for result in results if isinstance(result, BaseException)), None):
        raise failed
    return results


# Forked from one process that has nothing open yet: eight that start from scratch take longer than the test.
WORKERS = """
import json, multiprocessing, sys, time
import django
django.setup()
from ratelimit_kv.algorithms import Counter
from ratelimit_kv.stores import get_store
from django.utils.module_loading import import_string

plan = json.load(sys.stdin)
fork = multiprocessing.get_context("fork")
gate, results = fork.Barrier(len(plan["counters"])), fork.SimpleQueue()

def work(counters):
    store = import_string(plan["store"])("default") if plan["store"] else get_store("default")
    store.peek(counters, time.time_ns() // 1000)
    gate.wait()
    admitted, times = 0, []
    for _ in range(plan["hits"]):
        start = time.perf_counter_ns()
        verdicts = store.hit(counters, time.time_ns() // 1000)
        times.append(time.perf_counter_ns() - start)
        admitted += all(verdict.allowed for verdict in verdicts)
    results.put((admitted, times))

processes = [
    fork.Process(target=work, args=([Counter(*fields) for fields in counters],)) for counters in plan["counters"]
]
for process in processes:
    process.start()
print(json.dumps([results.get() for _ in processes]))
"""


@dataclass
class Run:
    """What several processes together were given."""

    admitted: int
    times: list[int]
    """Nanoseconds of each hit, shortest first."""

    def __str__(self) -> str:
        median = statistics.median(self.times) / 1000
        late = self.times[-max(len(self.times) // 100, 1)] / 1000
        return f"{self.admitted} admitted, a hit took {median:.0f} us (p99 {late:.0f})"


def in_processes(plans: Sequence[Sequence[Counter]], hits: int, store_class: str = "") -> Run:
    """``hits`` hits in a process of its own for each plan, all started together."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WORKERS],
        env=child_environment(INSTALLED_APPS=[]),
        input=json.dumps({"counters": plans, "hits": hits, "store": store_class}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    times = sorted(itertools.chain.from_iterable(times for _, times in results))
    return Run(sum(admitted for admitted, _ in results), times)


# ── Key functions ──────────────────────────────────────────────────────────────────────────────────────────


def piped_key(key: str, key_prefix: str, version: int) -> str:
    """A KEY_FUNCTION that puts something else in front."""
    return f"{version}|{key_prefix}|{key}"


def reversed_key(key: str, key_prefix: str, version: int) -> str:
    """A KEY_FUNCTION whose keys do not begin alike when ours do."""
    return f"{key}|{key_prefix}|{version}"
