"""Django's LocMemCache: a dictionary in this process, under the cache's own lock."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from django.core.cache import caches

from ..algorithms import SLIDING, Counter, Verdict, dump, load, observe, transact
from .base import Entry, Store

__all__ = ["LocMemStore"]


class LocMemStore(Store):
    """Exact among the threads of one process, unseen by every other."""

    name = "LocMemCache"
    can_list = True
    is_shared = False
    outlives_process = False
    inline = True
    round_trips = "0"

    # TTLs are kept by the cache's own clock. ``get`` and ``set`` of LocMemCache take its lock, which is not reentrant,
    # so these go through what they are made of. It pickles its values; so do we, and ``cache.get(key)`` agrees.

    def _read(self, cache: Any, key: str) -> Any:
        made = cache.make_key(key)
        if cache._has_expired(made):
            return None
        stored = cache._cache[made]
        cache._cache.move_to_end(made, last=False)  # recently used: the last third is culled
        return _loads(stored)

    def _states(self, cache: Any, counters: Sequence[Counter]) -> list[Any]:
        return [
            load(
                counter,
                self._read(cache, counter.key),
                self._read(cache, counter.previous) if counter.kind == SLIDING else None,
            )
            for counter in counters
        ]

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache: Any = caches[self.alias]
        with cache._lock:
            states = self._states(cache, counters)
            verdicts, writes = transact(counters, states, now)
            for position, state in writes.items():
                counter = counters[position]
                made = cache.make_key(counter.key)
                value = pickle.dumps(dump(counter, state), cache.pickle_protocol)
                if made in cache._cache and counter.kind in "fs":
                    cache._cache[made] = value  # the expiry is set once and never moved
                else:
                    cache._set(made, value, counter.ttl)
        return verdicts

    def peek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache: Any = caches[self.alias]
        with cache._lock:
            states = self._states(cache, counters)
        return observe(counters, states, now)

    def reset(self, keys: Sequence[str]) -> int:
        cache: Any = caches[self.alias]
        return sum(bool(cache.delete(key)) for key in keys)

    def scan(self, prefix: str) -> Iterator[Entry]:
        cache: Any = caches[self.alias]
        start = cache.make_key(prefix)
        with cache._lock:
            found = [(made, cache._cache[made]) for made in cache._cache if made.startswith(start)]
        for made, stored in found:
            yield Entry(prefix + made[len(start) :], _loads(stored))


def _loads(stored: bytes) -> Any:
    try:
        return pickle.loads(stored)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError):
        return stored
