"""Any cache of Django, by what all of them have: get_many, add, incr, decr, delete. Never their ``a...`` twins.

A hit reads, decides, and charges one counter after the other. What ``incr`` returns is judged again: who finds
that others have taken the room in between gives back what he took, and looks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from django.core.cache import caches

from ..algorithms import EXISTING, FIXED, SLIDING, Counter, Unreadable, Verdict, load, observe, transact
from .base import CannotList, Entry, Store, StoreError, give_back

__all__ = ["CacheStore", "Outrun", "count_in"]

_ATTEMPTS = 100
"""Each fails only because another hit got through."""
_EXPIRIES = 5
"""How often a key may expire between two commands before that is no longer believed."""


class Outrun(Exception):
    """Another hit was quicker. Nothing is charged to the counter that says so."""


class CacheStore(Store):
    """Never more than N where ``incr`` of the cache is atomic, which is the cache's word and not ours.

    Where it is not (BaseCache's own ``incr`` is a get and a set) hits that meet can be lost.
    """

    kinds = frozenset((FIXED, SLIDING))
    can_list = False
    is_exact = False
    name = "any other cache"
    round_trips = "1 when denied, else 1 more for each counter, 2 for a new one"

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache = self.cache()
        for _ in range(_ATTEMPTS):
            with self.errors():
                states, tokens = self.read(cache, counters)
            verdicts, writes = transact(counters, states, now)
            taken: list[int] = []
            try:
                # In the order given: the narrowest first, so that most who are denied are denied there.
                for position, state in writes.items():
                    with self.errors():
                        verdicts[position] = self.write(
                            cache,
                            counters[position],
                            states[position],
                            tokens[position],
                            state,
                            verdicts[position],
                            now,
                        )
                    taken.append(position)
            except BaseException as error:
                back = give_back([counters[position] for position in taken], [verdicts[position] for position in taken])
                if isinstance(error, Outrun):
                    self._hit_all(back, now)
                    continue
                with suppress(StoreError):
                    self._hit_all(back, now)
                raise
            return verdicts
        raise StoreError(f"outrun by other requests {_ATTEMPTS} times", outage=False)

    def _hit_all(self, counters: Sequence[Counter], now: int) -> None:
        if counters:
            self.hit(counters, now)

    def peek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        with self.errors():
            states, _ = self.read(self.cache(), counters)
        return observe(counters, states, now)

    def reset(self, keys: Sequence[str]) -> int:
        cache = self.cache()
        with self.errors():
            return sum(bool(cache.delete(key)) for key in keys)

    def scan(self, prefix: str) -> Iterator[Entry]:
        raise CannotList(
            "This cache has no way to say which keys it holds. Counters can be looked up and reset one by one, "
            "by scope and identity; to list them all, count in Redis, Valkey, memcached or a database."
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What a cache raises comes out as a StoreError."""
        try:
            yield
        except (StoreError, CannotList, Outrun):
            raise
        except Exception as error:
            raise StoreError(f"{type(error).__name__}: {error}", outage=self.is_outage(error)) from error

    # ── What a subclass does better ────────────────────────────────────────────────────────────────────────

    def cache(self) -> Any:
        """Django's cache object for this thread."""
        return caches[self.alias]

    def is_outage(self, error: Exception) -> bool:
        """Whether the server or the connection is to blame, and not a key or an argument."""
        return not isinstance(error, ValueError | TypeError)  # InvalidCacheKey is a ValueError

    def read(self, cache: Any, counters: Sequence[Counter]) -> tuple[list[Any], list[Any]]:
        """The states of the counters, in one trip, and for each what :meth:`write` wants to know of it."""
        keys = {counter.key for counter in counters if counter.kind in self.kinds}
        keys |= {counter.previous for counter in counters if counter.kind == SLIDING}
        values = cache.get_many(list(keys))
        states = [
            load(counter, values.get(counter.key), values.get(counter.previous))
            if counter.kind in self.kinds
            else Unreadable(f"{self.name} does not run algorithm {counter.kind!r}")
            for counter in counters
        ]
        return states, [None] * len(states)

    def write(
        self, cache: Any, counter: Counter, before: Any, token: Any, state: Any, verdict: Verdict, now: int
    ) -> Verdict:
        """Change the counter from the state before to the new one, as others may do at the same time.

        Returns the verdict as it came to be. Raises Outrun when the hit does not fit any more.
        """
        old = count_in(counter, before)
        change = count_in(counter, state) - (old or 0)
        count = self._add_up(cache, counter, change, is_there=old is not None)
        if count == (old or 0) + change:
            return verdict
        found: Any = None if count is None else count - change
        if counter.kind == SLIDING:
            found = (found, state[1])
        again = transact([counter], [found], now).verdicts[0]
        if verdict.allowed and not again.allowed:
            self._add_up(cache, counter, -change, is_there=True)
            raise Outrun
        return again

    def _add_up(self, cache: Any, counter: Counter, change: int, *, is_there: bool) -> int | None:
        """The count after the change, never below zero; None where there is nothing to take away from."""
        only_existing = change < 0 or bool(counter.flags & EXISTING)
        for _ in range(_EXPIRIES):
            if not is_there and not only_existing:
                # Anything but False is an outage that the cache keeps to itself.
                added = cache.add(counter.key, change, counter.ttl)
                if added is True:
                    return change
                if added is not False:
                    raise StoreError(f"add() returned {type(added).__name__}", outage=True)
            try:
                count = cache.incr(counter.key, change) if change >= 0 else cache.decr(counter.key, -change)
            except ValueError:  # it has expired in between
                if only_existing:
                    return None
                is_there = False
                continue
            if type(count) is not int:
                raise StoreError(f"incr() returned {type(count).__name__}", outage=True)
            # Others may have given back too. Only memcached stops at zero by itself.
            return count if count >= 0 else self._add_up(cache, counter, -count, is_there=True)
        raise StoreError("the key is neither there nor can it be added", outage=True)


def count_in(counter: Counter, state: Any) -> Any:
    """The count of the window in the state of a fixed or a sliding window, None when there is none yet."""
    return state[0] if counter.kind == SLIDING and state is not None else state
