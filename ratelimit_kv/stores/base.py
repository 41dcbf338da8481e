"""What a store is: somewhere to check and charge counters, all or nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from asgiref.sync import sync_to_async

from ..algorithms import EXISTING, FORCE, Counter, Unreadable, Verdict

__all__ = [
    "ALL_KINDS",
    "CannotList",
    "Entry",
    "Store",
    "StoreError",
    "give_back",
    "start_of_keys",
    "unpickle",
]

ALL_KINDS = frozenset("fsbcx")
"""Every algorithm: fixed, sliding, bucket, concurrent and ban."""


class StoreError(Exception):
    """The store did not answer with a number.

    ``outage`` is True when the connection or the server failed, which is the breaker's business, and False
    when one key, value or argument did, which is not: a single client must not be able to open the breaker
    for everybody.
    """

    def __init__(self, cause: str, *, outage: bool) -> None:
        super().__init__(cause)
        self.cause = cause
        self.outage = outage


class CannotList(Exception):
    """The store cannot say which counters it holds. The message tells a person why and what works instead."""


class Entry(NamedTuple):
    """One key found by :meth:`Store.scan`."""

    key: str
    """Without the cache's own prefix."""
    value: Any
    """As stored; ``algorithms.load`` makes a state of it."""


class Store:
    """Counters of one cache alias. A subclass says how they are read and written together.

    Objects live as long as the process and are shared by its threads and event loops, so a subclass looks up
    ``caches[alias]`` at each use where Django's cache objects belong to a thread.
    """

    kinds: ClassVar[frozenset[str]] = ALL_KINDS
    """Algorithms that it runs atomically."""
    can_list: ClassVar[bool] = True
    """Whether :meth:`scan` finds every counter, from any process."""
    is_shared: ClassVar[bool] = True
    """Whether all processes (of one host at least) see the same counters."""
    is_exact: ClassVar[bool] = True
    """Whether exactly N of N + 1 concurrent hits pass; when not, never more than N."""
    outlives_process: ClassVar[bool] = True
    """Whether counters are still there after a restart of the web server."""
    inline: ClassVar[bool] = False
    """Whether a hit never waits, so that an event loop may do it without a thread."""
    round_trips: ClassVar[str] = "1"
    """Trips to the server for all counters of one request, in words for people."""
    name: ClassVar[str] = ""
    """What people call it."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        """Check all, then charge all or none (``algorithms.transact``). ``now``: microseconds since 1970.

        The only way to count; refunds, charges and releases are hits with FORCE. Raises StoreError when no
        counter could be judged; a single unreadable one is a verdict with STORE_ERROR.
        """
        raise NotImplementedError

    def peek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        """What a hit would be answered (``algorithms.observe``). Writes nothing. Raises StoreError."""
        raise NotImplementedError

    def reset(self, keys: Sequence[str]) -> int:
        """Remove these keys and say how many were there. Raises StoreError."""
        raise NotImplementedError

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Every key that starts with ``prefix``, as a stream, in no order. Raises CannotList, StoreError.

        Keys of windows that are over may still be among them: the window number is in the key.
        """
        raise NotImplementedError

    async def ahit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        """:meth:`hit` for an event loop: one thread hop."""
        return await sync_to_async(self.hit)(counters, now)

    async def apeek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        """:meth:`peek` for an event loop."""
        return await sync_to_async(self.peek)(counters, now)

    async def areset(self, keys: Sequence[str]) -> int:
        """:meth:`reset` for an event loop."""
        return await sync_to_async(self.reset)(keys)


def give_back(counters: Sequence[Counter], verdicts: Sequence[Verdict]) -> list[Counter]:
    """The hit that undoes a hit, for counters that cannot be charged in one transaction."""
    return [
        counter._replace(cost=-counter.cost, flags=FORCE | EXISTING, group=position)
        for position, (counter, verdict) in enumerate(zip(counters, verdicts, strict=True))
        if verdict.charged
    ]


def start_of_keys(cache: Any, prefix: str) -> str:
    """How the keys of a cache begin whose part that is ours begins with ``prefix``.

    Raises CannotList when the cache's KEY_FUNCTION does more than to put something in front.
    """
    start = str(cache.make_key(prefix))
    if str(cache.make_key(prefix + "x")) != start + "x":
        raise CannotList(
            "The KEY_FUNCTION of this cache does more than to put something in front of a key, so keys can't "
            "be found by how they begin. Use one that ends in the key itself; single counters can still be "
            "looked up."
        )
    return start


def unpickle(pickled: bytes) -> Any:
    """The object that a cache of Django has pickled, an Unreadable when it cannot be loaded."""
    try:
        return pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - somebody else's object runs his code, which may raise anything
        return Unreadable("a pickle that cannot be loaded")
