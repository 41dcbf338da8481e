"""Django's LocMemCache: a dictionary in this process, under the cache's own lock."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from django.core.cache import caches
from django.core.cache.backends.base import default_key_func

from ..algorithms import FIXED, MICROSECOND, SLIDING, Counter, Verdict, dump, load, observe, plain, transact
from .base import Entry, Store, start_of_keys, unpickle

__all__ = ["LocMemStore"]

COUNT = 24
"""Bytes that the pickle of a count has at most. Most counts are small, and met again and again."""
_pickled = lru_cache(4096)(pickle.dumps)
_unpickled = lru_cache(4096)(unpickle)


class LocMemStore(Store):
    """Exact among the threads of one process, unseen by every other."""

    name = "LocMemCache"
    is_shared = False
    outlives_process = False
    inline = True
    round_trips = "0"

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        # All of Django's cache objects of one LOCATION share one dictionary and one lock: one object serves all threads.
        self._cache: Any = caches.create_connection(alias)
        start = self._cache.make_key("")
        self._start = start if self._cache.key_func is default_key_func else None

    # The methods of LocMemCache take its lock, which is not reentrant, so these go through what they are made
    # of. It pickles its values and culls what was not used for long; so do we.

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache = self._cache
        with cache._lock:
            if self._start is not None:
                seconds = now / MICROSECOND
                keys = [self._start + counter.key for counter in counters]
                values = [_read(cache, key, seconds) for key in keys]
                short = plain(counters, values, now)
                if short is not None:
                    for counter, key, value, verdict in zip(counters, keys, values, short, strict=True):
                        pickled = _pickled(verdict.used, cache.pickle_protocol)
                        if value is not None:
                            cache._cache[key] = pickled
                        else:
                            cache._set(key, pickled)
                            cache._expire_info[key] = seconds + counter.ttl
                    return short
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
        cache = self._cache
        with cache._lock:
            states = _states(cache, counters, now)[1]
        return observe(counters, states, now)

    def reset(self, keys: Sequence[str]) -> int:
        cache = self._cache
        return sum(bool(cache.delete(key)) for key in keys)

    def scan(self, prefix: str) -> Iterator[Entry]:
        cache = self._cache
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
    pickled = cache._cache[key]
    return _unpickled(pickled) if len(pickled) <= COUNT else unpickle(pickled)
