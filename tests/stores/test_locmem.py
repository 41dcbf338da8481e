"""LocMemStore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.cache import caches

from ratelimit_kv.stores import get_store
from tests.stores.bench import SECOND, Bench, counter, in_threads, microseconds
from tests.stores.contract import StoreContract


class TestLocMem(StoreContract):
    kind = "locmem"


@pytest.mark.parametrize("frequency", [0, 1, 3])
@pytest.mark.parametrize("entries", [0, 1, 3, 9])
def test_culled_as_the_cache_does(use_cache: Callable[..., Any], entries: int, frequency: int) -> None:
    bench = Bench("locmem", use_cache("locmem", OPTIONS={"MAX_ENTRIES": entries, "CULL_FREQUENCY": frequency}))
    now = microseconds()
    for number in range(50):
        hits = [counter(f"user:{number % 7}", kind=kind, now=now, limit=99) for kind in "fsb"]
        assert all(verdict.charged for verdict in bench.hit(*hits, now=now))
        bench.peek(*hits, now=now)
    assert len(bench.cache._cache) <= max(entries, frequency, 1)
    assert bench.cache._cache.keys() == bench.cache._expire_info.keys()


def test_what_is_used_is_culled_last(use_cache: Callable[..., Any]) -> None:
    bench = Bench("locmem", use_cache("locmem", OPTIONS={"MAX_ENTRIES": 30}))
    now = microseconds()
    mine = counter("user:mine", now=now, limit=100)
    for number in range(50):
        bench.hit(mine, now=now)
        bench.hit(counter(f"user:{number}", now=now), now=now)
    assert bench.used(mine, now=now) == [50]


def test_expired_keys_go_when_they_are_met(use_cache: Callable[..., Any]) -> None:
    bench = Bench("locmem", use_cache("locmem"))
    now = microseconds()
    hit = counter(now=now, ttl=60)
    bench.hit(hit, now=now)
    assert bench.used(hit, now=now + 61 * SECOND) == [0]
    assert not bench.cache._cache


def test_two_aliases_of_one_memory(use_cache: Callable[..., Any]) -> None:
    use_cache("locmem", location="shared")
    use_cache("locmem", location="shared", alias="other")
    hit = counter(limit=60)

    def work(thread: int) -> int:
        store = get_store(("default", "other")[thread % 2])
        return sum(store.hit([hit], microseconds())[0].allowed for _ in range(40))

    assert sum(in_threads(4, work)) == 60
    assert caches["other"].get(hit.key) == 60
