"""Redis and Valkey: all counters of a request in one round trip, by one script."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.core.cache.backends.base import default_key_func
from django.core.exceptions import ImproperlyConfigured

from .. import algorithms
from ..algorithms import BUCKET, FIXED, SLIDING, Counter, Unreadable, Verdict
from .base import Entry, Store, StoreError, start_of_keys
from .redis_async import AsyncLink, Loops
from .redis_cluster import Cluster, Slot, hit_across, is_redirection, slot_of
from .redis_link import Link, failure, link_to, pack

__all__ = ["RedisStore"]

T = TypeVar("T")

SCRIPT = Path(__file__).with_name("hit.lua").read_text("utf-8")
_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_BY_SHA = f"$7\r\nEVALSHA\r\n$40\r\n{_SHA}\r\n"
_IN_FULL = f"$4\r\nEVAL\r\n${len(SCRIPT.encode())}\r\n{SCRIPT}\r\n"

BATCH = 1000
"""Keys looked at in one go when listing: a server is busy with these for less than a millisecond."""


def _text(text: str) -> str:
    """An argument as it goes over the wire."""
    return f"${len(text) if text.isascii() else len(text.encode())}\r\n{text}\r\n"


@lru_cache(4096)
def _number(number: int) -> str:
    return _text(f"{number:d}")  # True, too, is 1, here as in the keys of this memory


@lru_cache(4096)
def _numbers(limit: int, cost: int, ttl: int) -> str:
    return _number(limit) + _number(cost) + _number(ttl)


class _Depends(Generic[T]):
    """What is one thing of the class, and perhaps another of a store, which has to look at its client first.

    The client of a Cluster connects when it is made; any other does not.
    """

    def __init__(self, usually: T, on_a_cluster: T) -> None:
        self._usually, self._on_a_cluster = usually, on_a_cluster

    def __get__(self, store: RedisStore | None, owner: type[RedisStore]) -> T:
        return self._on_a_cluster if store is not None and store.is_on_a_cluster() else self._usually


class RedisStore(Store):
    """Exact among all processes, by one script in one round trip.

    For django-redis, Django's RedisCache and django-valkey, also with Sentinel and on a Cluster. It talks to the
    server that is written to, over connections of its own with the settings of the alias (``redis_link``), and a
    counter is plain digits there: the serializer and the compressor of the cache have no part in it.
    """

    name = "Redis"
    is_exact = _Depends(True, on_a_cluster=False)
    """False on a Cluster: counters in several slots are charged one after the other, and given back when a later one
    denies, so that now and then a hit is denied for another that was denied too. Never do more pass.

    The counters of one identity share a slot and are exact there also.
    """
    round_trips = _Depends("1", on_a_cluster="1 for each identity")

    def __init__(self, alias: str) -> None:
        """Raises ImproperlyConfigured for a client that it cannot work with. Connects at the first use, not here."""
        super().__init__(alias)
        cache: Any = caches[alias]
        ancestry = {ancestor.__name__ for ancestor in type(getattr(cache, "client", cache)).__mro__}
        if "ShardClient" in ancestry:
            raise ImproperlyConfigured(
                f"CACHES[{alias!r}] spreads its keys over servers by ShardClient, and the counters of a request "
                "have to be charged together. Give the limiter an alias with one LOCATION, or a Redis Cluster."
            )
        self._key = _key_maker(cache)
        self._link: Link | Cluster | None = None
        self._loops = Loops(None)

    def is_on_a_cluster(self) -> bool:
        """Whether it talks to a Redis Cluster, or would if that answered."""
        try:
            return isinstance(self._link or self._connect(), Cluster)
        except StoreError:
            return True

    def _connect(self) -> Link | Cluster:
        try:
            client = _client(caches[self.alias])
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("redis", "valkey"):
                raise failure(error) from error
            raise
        # Two threads may both come here first. One of the links is then forgotten before it has connected.
        if hasattr(client, "nodes_manager"):
            self._link = Cluster(client)
        else:
            link = link_to(client.connection_pool)
            self._loops = Loops(link)
            self._link = link
        return self._link

    # ------------------------------------------------------------------------------------------------ in a thread

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        link = self._link or self._connect()
        if isinstance(link, Cluster):
            return hit_across(self._by_slot(link, counters), self._hit, counters, now)
        return self._hit(link, counters, now)

    def _hit(self, link: Link | Slot, counters: Sequence[Counter], now: int) -> list[Verdict]:
        return _verdicts(counters, self._run(link, self._hit_command(counters, now)), now)

    def peek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        link = self._link or self._connect()
        if not isinstance(link, Cluster):
            return self._peek(link, counters, now)
        verdicts: dict[int, Verdict] = {}
        for slot, positions in self._by_slot(link, counters):
            answers = self._peek(slot, [counters[position] for position in positions], now)
            verdicts.update(zip(positions, answers, strict=True))
        return [verdicts[position] for position in range(len(counters))]

    def _peek(self, link: Link | Slot, counters: Sequence[Counter], now: int) -> list[Verdict]:
        values = self._run(link, self._command(counters, 1, "$4\r\npeek\r\n"))
        return algorithms.observe(counters, _states(counters, values), now)

    def reset(self, keys: Sequence[str]) -> int:
        link = self._link or self._connect()
        made = [self._key(key).encode() for key in keys]
        try:
            if isinstance(link, Cluster):
                return sum(link.call(slot_of(key), pack(b"UNLINK", key)) for key in made)
            batches = [made[start : start + BATCH] for start in range(0, len(made), BATCH)]
            return sum(link.call(pack(b"UNLINK", *batch)) for batch in batches)
        except link.errors as error:
            raise failure(error) from error

    def _run(self, link: Link | Slot, command: str) -> list[Any]:
        """The script's answer."""
        try:
            try:
                return link.call(command.encode())  # type: ignore[no-any-return]
            except link.exceptions.NoScriptError:  # a new server, or restarted: nothing has been run
                return link.call(command.replace(_BY_SHA, _IN_FULL, 1).encode())  # type: ignore[no-any-return]
        except link.errors as error:
            raise failure(error) from error

    # ------------------------------------------------------------------------------------------- in an event loop

    async def ahit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        """:meth:`hit` over a connection of the running event loop, in a thread while that is new (``Loops``)."""
        link = self._loops.link()
        if link is None:
            return await self._in_a_thread(self.hit, counters, now)
        return _verdicts(counters, await self._arun(link, self._hit_command(counters, now)), now)

    async def apeek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        """:meth:`peek`, as :meth:`ahit`."""
        link = self._loops.link()
        if link is None:
            return await self._in_a_thread(self.peek, counters, now)
        values = await self._arun(link, self._command(counters, 1, "$4\r\npeek\r\n"))
        return algorithms.observe(counters, _states(counters, values), now)

    async def areset(self, keys: Sequence[str]) -> int:
        """:meth:`reset` in a thread."""
        return await self._in_a_thread(self.reset, keys)

    async def _arun(self, link: AsyncLink, command: str) -> list[Any]:
        """:meth:`_run` for an event loop."""
        try:
            try:
                return await link.call(command.encode())  # type: ignore[no-any-return]
            except link.exceptions.NoScriptError:
                return await link.call(command.replace(_BY_SHA, _IN_FULL, 1).encode())  # type: ignore[no-any-return]
        except link.errors as error:
            raise failure(error) from error

    async def _in_a_thread(self, method: Callable[..., T], *arguments: Any) -> T:
        # In a loop that async_to_sync has made, the thread that waits for its end has time. Under ASGI, that would be
        # the one thread for everybody's sync code.
        return await sync_to_async(method, thread_sensitive=self._loops.is_new())(*arguments)

    # --------------------------------------------------------------------------------------------------- commands

    def _hit_command(self, counters: Sequence[Counter], now: int) -> str:
        """The script and its arguments, packed."""
        make, group = self._key, counters[0].group if counters else 0
        keys = arguments = ""
        for key, kind, limit, cost, _, _, ttl, _, own_group, flags, _, _, _ in counters:
            if kind != FIXED or flags or own_group != group:
                return self._long_hit_command(counters, now)
            key = make(key)
            # As _text(key), without a Python frame: this is almost every hit's way.
            keys += f"${len(key) if key.isascii() else len(key.encode())}\r\n{key}\r\n"
            arguments += _numbers(limit, cost, ttl)
        number = len(counters)
        return f"*{4 + 4 * number}\r\n{_BY_SHA}{_number(number)}{keys}$5\r\nfixed\r\n{arguments}"

    def _long_hit_command(self, counters: Sequence[Counter], now: int) -> str:
        arguments = f"$3\r\nhit\r\n{_text(str(now))}"
        for counter in counters:
            _, kind, limit, cost, period, end, ttl, _, group, flags, scope, growth, maximum = counter
            factor = algorithms.interval(counter) if kind == BUCKET else growth
            arguments += (
                f"$1\r\n{kind}\r\n{_numbers(limit, cost, period)}{_text(str(end))}{_number(ttl)}"
                f"{_numbers(flags, group, scope)}{_text(str(factor))}{_number(maximum)}"
            )
        return self._command(counters, 2 + 11 * len(counters), arguments)

    def _command(self, counters: Sequence[Counter], count: int, arguments: str) -> str:
        keys = []
        for counter in counters:
            keys.append(_text(self._key(counter.key)))
            if counter.kind == SLIDING:
                keys.append(_text(self._key(counter.previous)))
        number = len(keys)
        return f"*{3 + number + count}\r\n{_BY_SHA}{_number(number)}{''.join(keys)}{arguments}"

    def _by_slot(self, cluster: Cluster, counters: Sequence[Counter]) -> list[tuple[Slot, list[int]]]:
        """The positions of the counters in each slot, in the order of the first of each."""
        positions: dict[int, list[int]] = {}
        for position, counter in enumerate(counters):
            positions.setdefault(slot_of(self._key(counter.key).encode()), []).append(position)
        return [(Slot(cluster, slot), those) for slot, those in positions.items()]

    # ---------------------------------------------------------------------------------------------------- listing

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Every key that starts with ``prefix``, as a stream. Raises CannotList, StoreError.

        The server goes through all of its keys, a thousand at a time, and serves others in between. While its table
        of keys grows or shrinks it may come by one twice, and so may the stream.
        """
        start = start_of_keys(caches[self.alias], prefix)
        link = self._link or self._connect()
        is_cluster = isinstance(link, Cluster)
        try:
            for each in link.primaries() if isinstance(link, Cluster) else [link]:
                for key, value in _walk(each, start.encode(), is_cluster):
                    yield Entry(prefix + key[len(start.encode()) :].decode("utf-8", "replace"), value)
        except link.errors as error:
            raise failure(error) from error


def _walk(link: Link, start: bytes, is_cluster: bool) -> Iterator[tuple[bytes, Any]]:
    """Keys of one server that begin so, and their values."""
    pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", start) + b"*"
    cursor = b"0"
    found: dict[bytes, None] = {}
    while True:
        cursor, keys = link.call(pack(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % BATCH))
        found |= dict.fromkeys(keys)
        if found and (len(found) >= BATCH or cursor == b"0"):
            for key, value in zip(found, _read(link, list(found), is_cluster), strict=True):
                if value is not None:
                    yield key, value
            found = {}
        if cursor == b"0":
            return


def _read(link: Link, keys: list[bytes], is_cluster: bool) -> list[Any]:
    """The value under each key: None when it is gone by now, an Unreadable when it is no text."""
    # A Cluster has no MGET over several slots. Elsewhere, MGET is silent about a list or a hash: ask for it alone.
    values: list[Any] = [None] * len(keys) if is_cluster else link.call(pack(b"MGET", *keys))
    silent = [position for position, value in enumerate(values) if value is None]
    answers = link.call_many([pack(b"GET", keys[position]) for position in silent]) if silent else []
    for position, value in zip(silent, answers, strict=True):
        if not isinstance(value, Exception):
            values[position] = value
        elif not is_redirection(value):
            values[position] = _refused(value)
    return values


def _verdicts(counters: Sequence[Counter], values: list[Any], now: int) -> list[Verdict]:
    """What the script has decided, from what it has found."""
    if counters and len(values) == len(counters):
        short = algorithms.plain(counters, values, now)
        if short is not None:
            return short
    return algorithms.transact(counters, _states(counters, values), now).verdicts


def _states(counters: Sequence[Counter], values: list[Any]) -> list[Any]:
    """The states in what the script has answered. Raises StoreError when a read failed, and not because of its key."""
    states = []
    rest = iter(values)
    for counter in counters:
        value = next(rest)
        before = next(rest) if counter.kind == SLIDING else None
        state = algorithms.load(counter, value, before)
        if type(state) is Unreadable:
            for each in (before, value):
                if isinstance(each, Exception):
                    state = _refused(each)
        states.append(state)
    return states


def _refused(error: Exception) -> Unreadable:
    if "WRONGTYPE" in str(error):
        return Unreadable("a list, hash, set or the like")
    raise failure(error) from error


def _key_maker(cache: Any) -> Callable[[str], str]:
    """``cache.make_key`` without the cache, which belongs to one thread and takes longer."""
    make, prefix, version = cache.key_func, cache.key_prefix, cache.version
    if make is default_key_func:
        start: str = make("", prefix, version)
        return start.__add__
    return lambda key: str(make(key, prefix, version))


def _client(cache: Any) -> Any:
    """The cache's own client of the server that is written to."""
    if hasattr(cache, "client"):  # django-redis, django-valkey
        return cache.client.get_client(write=True)
    return cache._cache.get_client(None, write=True)
