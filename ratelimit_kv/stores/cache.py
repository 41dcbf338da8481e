"""Any cache of Django, by what all of them have: get_many, add, incr, decr, delete. Never their ``a...`` twins.

A hit reads, decides, and charges one counter after the other. What ``incr`` returns is judged again: who finds
that others have taken the room in between gives back what he took, and looks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from django.core.cache import caches

from ..algorithms import EXISTING, FIXED, SLIDING, Counter, Unreadable, Verdict, load, observe, transact
from .base import CannotList, Entry, Store, StoreError, give_back

__all__ = ["CacheStore", "Outrun"]

ATTEMPTS = 100
"""Each fails only because another hit got through."""


_LOST = frozenset(("OSError", "EOFError", "ConnectionError", "TimeoutError", "OperationalError", "InterfaceError"))
"""How the exceptions of a lost server are called in the clients' families. All others blame a key or an argument: a
cache that refuses one key must not open the breaker for everybody."""


class Outrun(Exception):
    """Another hit was quicker. Nothing is charged to the counter that says so."""


class CacheStore(Store):
    """Never more than N where ``incr`` of the cache is atomic, which is the cache's word and not ours.

    Where it is not (BaseCache's own ``incr`` is a get and a set), hits that meet can be lost.
    """

    kinds = frozenset((FIXED, SLIDING))
    can_list = False
    is_exact = False
    name = "any other cache"
    round_trips = "1 when denied, else 1 more for each counter, 2 for a new one"

    outages: ClassVar[tuple[type[Exception], ...]] = ()
    """What the client raises when the server or the connection failed, beside what every client calls so."""

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache: Any = caches[self.alias]
        for _ in range(ATTEMPTS):
            with self._errors():
                states = self.states(cache, counters)
            verdicts, writes = transact(counters, states, now)
            taken: list[int] = []
            try:
                # In the order given: the narrowest first, so that most who are denied are denied there.
                for position, state in writes.items():
                    counter, before = counters[position], states[position]
                    with self._errors():
                        verdicts[position] = self.write(cache, counter, before, state, verdicts[position], now)
                    taken.append(position)
            except Outrun:
                self._give_back(counters, verdicts, taken, now)
            except BaseException:
                with suppress(StoreError):
                    self._give_back(counters, verdicts, taken, now)
                raise
            else:
                return verdicts
        raise StoreError(f"outrun by other requests {ATTEMPTS} times", outage=False)

    def _give_back(
        self, counters: Sequence[Counter], verdicts: Sequence[Verdict], taken: Sequence[int], now: int
    ) -> None:
        back = give_back([counters[position] for position in taken], [verdicts[position] for position in taken])
        if back:
            self.hit(back, now)

    def peek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        with self._errors():
            states = self.states(caches[self.alias], counters)
        return observe(counters, states, now)

    def reset(self, keys: Sequence[str]) -> int:
        cache: Any = caches[self.alias]
        with self._errors():
            return sum(bool(cache.delete(key)) for key in keys)

    def scan(self, prefix: str) -> Iterator[Entry]:
        raise CannotList(
            "This cache has no way to say which keys it holds. Counters can be looked up and reset one by one, by "
            "scope and identity; to list them all, count in Redis, Valkey, memcached or a database."
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (StoreError, Outrun):
            raise
        except Exception as error:
            outage = isinstance(error, self.outages) or not _LOST.isdisjoint(
                cls.__name__ for cls in type(error).__mro__
            )
            raise StoreError(f"{type(error).__name__}: {error}", outage=outage) from error

    # ── What a subclass does better ────────────────────────────────────────────────────────────────────────

    def states(self, cache: Any, counters: Sequence[Counter]) -> list[Any]:
        """The states of the counters, in one trip."""
        keys = {counter.key for counter in counters if counter.kind in self.kinds}
        keys |= {counter.previous for counter in counters if counter.kind == SLIDING}
        values = cache.get_many(list(keys))
        return [
            load(counter, values.get(counter.key), values.get(counter.previous))
            if counter.kind in self.kinds
            else Unreadable(f"{self.name} does not run algorithm {counter.kind!r}")
            for counter in counters
        ]

    def write(self, cache: Any, counter: Counter, before: Any, state: Any, verdict: Verdict, now: int) -> Verdict:
        """Change the counter from the state before to the new one, as others may do at the same time.

        Returns the verdict as it came to be. Raises Outrun when the hit does not fit any more.
        """
        sliding = counter.kind == SLIDING
        old = before[0] if sliding and before else before
        change = (state[0] if sliding else state) - (old or 0)
        count = self.add_up(cache, counter, change, is_there=old is not None)
        if count == (old or 0) + change:
            return verdict
        found: Any = None if count is None else count - change
        if sliding:
            found = (found, state[1])
        again = transact([counter], [found], now).verdicts[0]
        if verdict.allowed and not again.allowed:
            self.add_up(cache, counter, -change, is_there=True)
            raise Outrun
        return again

    def add_up(self, cache: Any, counter: Counter, change: int, *, is_there: bool) -> int | None:
        """The count after the change, never below zero; None where there is nothing to take away from."""
        only_existing = change < 0 or bool(counter.flags & EXISTING)
        for _ in range(ATTEMPTS):
            if not is_there and not only_existing:
                # Anything but False would be an outage that the cache keeps to itself.
                added = cache.add(counter.key, change, counter.ttl)
                if added is True:
                    return change
                if added is not False:
                    raise StoreError(f"add() returned {type(added).__name__}", outage=True)
            try:
                count = cache.incr(counter.key, change) if change >= 0 else cache.decr(counter.key, -change)
            except ValueError:  # expired in between
                if only_existing:
                    return None
                is_there = False
                continue
            if type(count) is not int:
                raise StoreError(f"incr() returned {type(count).__name__}", outage=count in (None, False))
            return count if count >= 0 else self.add_up(cache, counter, -count, is_there=True)
        raise StoreError(f"neither there nor to be added {ATTEMPTS} times", outage=False)
