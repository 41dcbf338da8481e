"""Redis and Valkey: all counters of a request in one round trip, by one script."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.core.cache.backends.base import default_key_func
from django.core.exceptions import ImproperlyConfigured

from ..algorithms import BUCKET, FIXED, SLIDING, Counter, Unreadable, Verdict, interval, load, observe, transact
from .base import Entry, Store, StoreError, start_of_keys
from .redis_async import AsyncLink, Loops
from .redis_cluster import Cluster, Slot, hit_across, slot_of
from .redis_link import Link, failure, link_to, pack

__all__ = ["RedisStore"]

T = TypeVar("T")

SCRIPT = Path(__file__).with_name("hit.lua").read_text("utf-8")
_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_BY_SHA = f"$7\r\nEVALSHA\r\n$40\r\n{_SHA}\r\n".encode()
_IN_FULL = f"$4\r\nEVAL\r\n${len(SCRIPT.encode())}\r\n{SCRIPT}\r\n".encode()

BATCH = 1000
"""Keys looked at in one go when listing: a server is busy with that for less than a millisecond."""


def _text(text: str) -> str:
    """An argument of a command as it goes over the wire."""
    return f"${len(text) if text.isascii() else len(text.encode())}\r\n{text}\r\n"


@lru_cache(4096)
def _number(number: int) -> str:
    return _text(str(number))


class RedisStore(Store):
    """Exact among all processes; on a Cluster among the counters of one slot, which all of one identity are.

    Works with django-redis, Django's RedisCache and django-valkey, with Sentinel and Cluster, and talks to the server
    that writes go to. Neither serializer nor compressor of the cache is used: a counter is its digits.
    """

    name = "Redis"

    def __init__(self, alias: str) -> None:
        """Raises ImproperlyConfigured for a cache whose server cannot be told. Connects at the first use only."""
        super().__init__(alias)
        cache: Any = caches[alias]
        ancestry = {ancestor.__name__ for ancestor in type(getattr(cache, "client", cache)).__mro__}
        if "ShardClient" in ancestry:
            raise ImproperlyConfigured(
                f"CACHES[{alias!r}] spreads its keys by ShardClient, where several counters cannot be charged together. "
                "Give the limiter an alias of its own, with one LOCATION or on a Redis Cluster."
            )
        self._key = _key_maker(cache)
        self._link: Link | Cluster | None = None
        self._loops = Loops(None)

    @property
    def is_exact(self) -> bool:  # type: ignore[override]
        """False on a Cluster: counters in several slots are charged one after the other, and given back.

        Exact for the counters of one identity, which share a slot, also there. Connects when nothing has before.
        """
        try:
            return not isinstance(self._link or self._connect(), Cluster)
        except StoreError:
            return False  # only the client of a Cluster connects when it is made

    # ------------------------------------------------------------------------------------------------------- the server

    def _connect(self) -> Link | Cluster:
        try:
            client = _client(caches[self.alias])
        except Exception as error:
            # The client of a Cluster connects when it is made.
            if type(error).__module__.partition(".")[0] in ("redis", "valkey"):
                raise failure(error) from error
            raise
        if hasattr(client, "nodes_manager"):
            self._link = Cluster(client)
        else:
            link = link_to(client.connection_pool)
            self._loops = Loops(link)
            self._link = link
        return self._link

    def _run(self, link: Link | Slot, count: int, command: bytes) -> list[Any]:
        """The answer of the script to ``count`` arguments, the first of which is the number of keys."""
        try:
            try:
                return link.call(b"*%d\r\n%b%b" % (count + 2, _BY_SHA, command))  # type: ignore[no-any-return]
            except link.exceptions.NoScriptError:  # a new or restarted server: nothing has been run
                return link.call(b"*%d\r\n%b%b" % (count + 2, _IN_FULL, command))  # type: ignore[no-any-return]
        except link.errors as error:
            raise failure(error) from error

    # ---------------------------------------------------------------------------------------------------------- to count

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        link = self._link or self._connect()
        if isinstance(link, Cluster):
            return hit_across(self._by_slot(link, counters), self._hit, counters, now)
        return self._hit(link, counters, now)

    def _hit(self, link: Link | Slot, counters: Sequence[Counter], now: int) -> list[Verdict]:
        values = self._run(link, *self._hit_command(counters, now))
        return transact(counters, _states(counters, values), now).verdicts

    def peek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        link = self._link or self._connect()
        if not isinstance(link, Cluster):
            return self._peek(link, counters, now)
        verdicts: list[Any] = [None] * len(counters)
        for slot, positions in self._by_slot(link, counters):
            answers = self._peek(slot, [counters[position] for position in positions], now)
            for position, verdict in zip(positions, answers, strict=True):
                verdicts[position] = verdict
        return verdicts

    def _peek(self, link: Link | Slot, counters: Sequence[Counter], now: int) -> list[Verdict]:
        values = self._run(link, *self._command(counters, ["peek"]))
        return observe(counters, _states(counters, values), now)

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

    # -------------------------------------------------------------------------------------------- in an event loop

    async def ahit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        link = self._loops.link()
        if link is None:
            return await self._in_a_thread(self.hit, counters, now)
        values = await self._arun(link, *self._hit_command(counters, now))
        return transact(counters, _states(counters, values), now).verdicts

    async def apeek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        link = self._loops.link()
        if link is None:
            return await self._in_a_thread(self.peek, counters, now)
        values = await self._arun(link, *self._command(counters, ["peek"]))
        return observe(counters, _states(counters, values), now)

    async def areset(self, keys: Sequence[str]) -> int:
        return await self._in_a_thread(self.reset, keys)

    async def _arun(self, link: AsyncLink, count: int, command: bytes) -> list[Any]:
        """:meth:`_run` for an event loop."""
        try:
            try:
                return await link.call(b"*%d\r\n%b%b" % (count + 2, _BY_SHA, command))  # type: ignore[no-any-return]
            except link.exceptions.ResponseError as error:
                if not str(error).startswith("NOSCRIPT"):
                    raise
                return await link.call(b"*%d\r\n%b%b" % (count + 2, _IN_FULL, command))  # type: ignore[no-any-return]
        except link.errors as error:
            raise failure(error) from error

    async def _in_a_thread(self, method: Callable[..., T], *arguments: Any) -> T:
        # In a loop made by async_to_sync, the thread that waits for it has time. In a server's, that thread is the one
        # for all sync code: any other is better.
        return await sync_to_async(method, thread_sensitive=self._loops.is_new())(*arguments)

    def _by_slot(self, cluster: Cluster, counters: Sequence[Counter]) -> list[tuple[Slot, list[int]]]:
        positions: dict[int, list[int]] = {}
        for position, counter in enumerate(counters):
            positions.setdefault(slot_of(self._key(counter.key).encode()), []).append(position)
        return [(Slot(cluster, slot), those) for slot, those in positions.items()]

    def _hit_command(self, counters: Sequence[Counter], now: int) -> tuple[int, bytes]:
        key = self._key
        keys, arguments = [], []
        group = counters[0].group if counters else 0
        for counter in counters:
            if counter.kind != FIXED or counter.flags or counter.group != group:
                return self._any_hit_command(counters, now)
            keys.append(_text(key(counter.key)))
            arguments.append(_number(counter.limit) + _number(counter.cost) + _number(counter.ttl))
        count = len(keys)
        return 2 + 4 * count, f"{_number(count)}{''.join(keys)}$5\r\nfixed\r\n{''.join(arguments)}".encode()

    def _any_hit_command(self, counters: Sequence[Counter], now: int) -> tuple[int, bytes]:
        arguments = ["hit", str(now)]
        for counter in counters:
            kind, limit, cost, period, end, ttl = counter[1:7]
            factor = interval(counter) if kind == BUCKET else counter.growth
            rest = (counter.flags, counter.group, counter.scope, factor, counter.maximum)
            arguments += map(str, (kind, limit, cost, period, end, ttl, *rest))
        return self._command(counters, arguments)

    def _command(self, counters: Sequence[Counter], arguments: list[str]) -> tuple[int, bytes]:
        keys = []
        for counter in counters:
            keys.append(self._key(counter.key))
            if counter.kind == SLIDING:
                keys.append(self._key(counter.previous))
        words = [str(len(keys)), *keys, *arguments]
        return len(words), "".join(map(_text, words)).encode()

    # ----------------------------------------------------------------------------------------------------------- to list

    def scan(self, prefix: str) -> Iterator[Entry]:
        """Every key that starts with ``prefix``, as a stream. Raises CannotList, StoreError.

        The server walks over all of its keys, a thousand at a time, and serves others in between. It may come by a key
        twice while it grows or shrinks its table; so may the stream.
        """
        start = start_of_keys(caches[self.alias], prefix)
        link = self._link or self._connect()
        try:
            for each in link.primaries() if isinstance(link, Cluster) else [link]:
                yield from _entries(each, start, prefix, one_by_one=isinstance(link, Cluster))
        except link.errors as error:
            raise failure(error) from error


def _entries(link: Link, start: str, prefix: str, *, one_by_one: bool) -> Iterator[Entry]:
    pattern = re.sub(r"([*?\[\]\\])", r"\\\1", start).encode() + b"*"
    skip = len(start.encode())
    cursor = b"0"
    found: dict[bytes, None] = {}
    while True:
        cursor, keys = link.call(pack(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % BATCH))
        found |= dict.fromkeys(keys)
        if found and (len(found) >= BATCH or cursor == b"0"):
            for key, value in zip(found, _read(link, list(found), one_by_one), strict=True):
                if value is not None:
                    yield Entry(prefix + key[skip:].decode("utf-8", "replace"), value)
            found = {}
        if cursor == b"0":
            return


def _read(link: Link, keys: list[bytes], one_by_one: bool) -> list[Any]:
    """The values under these keys, None where there is none, an Unreadable for what is no text."""
    # A Cluster has no MGET for keys of several slots; and MGET is silent about a list or a hash.
    values: list[Any] = [None] * len(keys) if one_by_one else link.call(pack(b"MGET", *keys))
    silent = [position for position, value in enumerate(values) if value is None]
    answers = link.call_many([pack(b"GET", keys[position]) for position in silent]) if silent else []
    for position, value in zip(silent, answers, strict=True):
        values[position] = _refused(value) if isinstance(value, Exception) else value
    return values


def _states(counters: Sequence[Counter], values: list[Any]) -> list[Any]:
    states = []
    position = 0
    for counter in counters:
        value = values[position]
        position += 1
        before = None
        if counter.kind == SLIDING:
            before = values[position]
            position += 1
        state = load(counter, value, before)
        if type(state) is Unreadable:
            for each in (value, before):
                if isinstance(each, Exception):
                    state = _refused(each)
        states.append(state)
    return states


def _refused(error: Exception) -> Unreadable:
    """What the server's refusal to read one key means: another type under it, or else that nothing works."""
    if "WRONGTYPE" in str(error):
        return Unreadable("a list, hash, set or the like")
    raise failure(error) from error


def _key_maker(cache: Any) -> Callable[[str], str]:
    """``cache.make_key`` without the cache, which belongs to one thread and is slower."""
    make, prefix, version = cache.key_func, cache.key_prefix, cache.version
    if make is default_key_func:
        start = make("", prefix, version)
        return lambda key: start + key
    return lambda key: str(make(key, prefix, version))


def _client(cache: Any) -> Any:
    """The client that writes: made once, for its settings."""
    if hasattr(cache, "client"):  # django-redis, django-valkey
        return cache.client.get_client(write=True)
    return cache._cache.get_client(None, write=True)
