"""Django's LocMemCache: a dictionary in this process, under the cache's own lock."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from django.core.cache import caches

from ..algorithms import FIXED, MICROSECOND, SLIDING, Counter, Verdict, dump, load, observe, transact
from .base import Entry, Store, start_of_keys, unpickle

__all__ = ["LocMemStore"]


class LocMemStore(Store):
    """Exact among the threads of one process, unseen by every other."""

    name = "LocMemCache"
    is_shared = False
    outlives_process = False
    inline = True
    round_trips = "0"

    # The methods of LocMemCache take its lock, which is not reentrant, so these go through what they are made
    # of. It pickles its values and culls what was not used for long; so do we.

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache: Any = caches[self.alias]
        with cache._lock:
            keys, states = _states(cache, counters, now)
            verdicts, writes = transact(counters, states, now)
            for position, state in writes.items():
                counter, key = counters[position], keys[position]
                value = pickle.dumps(dump(counter, state), cache.pickle_protocol)
                if key in cache._cache and counter.kind in (FIXED, SLIDING):
                    cache._cache[key] = value  # the expiry of a window is set once and never moved
                else:
                    cache._set(key, value)
                    cache._expire_info[key] = now / MICROSECOND + counter.ttl
        return verdicts

    def peek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache: Any = caches[self.alias]
        with cache._lock:
            states = _states(cache, counters, now)[1]
        return observe(counters, states, now)

    def reset(self, keys: Sequence[str]) -> int:
        cache: Any = caches[self.alias]
        return sum(bool(cache.delete(key)) for key in keys)

    def scan(self, prefix: str) -> Iterator[Entry]:
        cache: Any = caches[self.alias]
        start = start_of_keys(cache, prefix)
        with cache._lock:
            found = [(key, pickled) for key, pickled in cache._cache.items() if key.startswith(start)]
        for key, pickled in found:
            yield Entry(prefix + key[len(start) :], unpickle(pickled))


def _states(cache: Any, counters: Sequence[Counter], now: int) -> tuple[list[str], list[Any]]:
    """Keys as the cache has them, and the states of the counters."""
    seconds = now / MICROSECOND
    keys, states = [], []
    for counter in counters:
        key = cache.make_key(counter.key)
        keys.append(key)
        value = _read(cache, key, seconds)
        before = _read(cache, cache.make_key(counter.previous), seconds) if counter.kind == SLIDING else None
        states.append(load(counter, value, before))
    return keys, states


def _read(cache: Any, key: str, seconds: float) -> Any:
    expiry = cache._expire_info.get(key, 0)
    if expiry is not None and expiry <= seconds:
        cache._delete(key)
        return None
    cache._cache.move_to_end(key, last=False)
    return unpickle(cache._cache[key])
