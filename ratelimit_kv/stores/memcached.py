"""Memcached, through pymemcache or pylibmc.

Windows are counted by ``incr``, which keeps their expiry and never has to be repeated; what has no window is
replaced by ``cas`` as long as it is what was read. Memcached knows no transaction over several keys, so several
counters are charged one after the other and given back when a later one denies.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import unquote

from ..algorithms import FIXED, SLIDING, Counter, Verdict, dump, load
from .base import ALL_KINDS, CannotList, Entry, StoreError, start_of_keys
from .cache import CacheStore, Outrun, count_in

__all__ = ["MemcachedStore"]

_BATCH = 1000
_LARGEST_CHANGE = 2**31 - 1
"""What pylibmc can add at once."""
_PATIENCE = 10
"""Seconds that a server may take for the next piece of its list."""


class MemcachedStore(CacheStore):
    """Each counter is exact; several in one hit are compensated, and let through never more than N.

    Memcached forgets what was not used for long when its memory is full, counters too.
    """

    kinds = ALL_KINDS
    can_list = True
    is_exact = True
    outlives_process = True
    name = "Memcached"
    round_trips = "1 when denied, else 1 more for each counter, 2 for a new one"

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._process = os.getpid()
        self._of_the_parent: list[Any] = []

    def cache(self) -> Any:
        cache = super().cache()
        if self._process != os.getpid():
            # A forked process has its parent's sockets, and would read what is meant for the parent. They are
            # kept and not closed: pylibmc says "quit" when it closes, and that would be in the parent's name.
            self._process = os.getpid()
            self._of_the_parent.append(cache.__dict__.pop("_cache", None))
        return cache

    def is_outage(self, error: Exception) -> bool:
        names = {cls.__name__ for cls in type(error).__mro__}
        return super().is_outage(error) and "MemcacheClientError" not in names

    def read(self, cache: Any, counters: Sequence[Counter]) -> tuple[list[Any], list[Any]]:
        made = cache.make_and_validate_key
        keys = [made(counter.key) for counter in counters]
        before = [made(counter.previous) if counter.kind == SLIDING else "" for counter in counters]
        with_token = [key for key, counter in zip(keys, counters, strict=True) if not _has_window(counter)]
        found = _gets(cache._cache, {*keys, *filter(None, before)}, with_token)
        values = {key: value for key, (value, _) in found.items()}
        states = [
            load(counter, values.get(key), values.get(previous))
            for counter, key, previous in zip(counters, keys, before, strict=True)
        ]
        return states, [found.get(key, (None, None))[1] for key in keys]

    def write(
        self, cache: Any, counter: Counter, before: Any, token: Any, state: Any, verdict: Verdict, now: int
    ) -> Verdict:
        key, value = cache.make_and_validate_key(counter.key), dump(counter, state)
        if _has_window(counter):
            count = count_in(counter, before)
            if abs(count_in(counter, state) - (count or 0)) <= _LARGEST_CHANGE:
                return super().write(cache, counter, before, token, state, verdict, now)
            # The price of so large a change is that the key lives on for its full lifetime from now.
            found, token = _gets(cache._cache, {key}, [key]).get(key, (None, None))
            if found != count:
                raise Outrun
            before = count
        if before is None:
            done = cache.add(counter.key, value, counter.ttl)
        else:
            done = _cas(cache._cache, key, value, token, cache.get_backend_timeout(counter.ttl))
        if not done:
            raise Outrun
        return verdict

    # ── Listing ────────────────────────────────────────────────────────────────────────────────────────────

    def scan(self, prefix: str) -> Iterator[Entry]:
        cache = self.cache()
        start = start_of_keys(cache, prefix)
        with self.errors():
            # All keys first: a server does not wait for long for who looks up values in between.
            keys = [
                key for server in cache.client_servers for key in _dump(server, cache._options) if key.startswith(start)
            ]
        for position in range(0, len(keys), _BATCH):
            with self.errors():
                values = cache._cache.get_multi(keys[position : position + _BATCH])
            for key, value in values.items():
                yield Entry(prefix + key[len(start) :], value)


def _has_window(counter: Counter) -> bool:
    return counter.kind in (FIXED, SLIDING)


# ── The two clients ────────────────────────────────────────────────────────────────────────────────────────


def _gets(client: Any, keys: set[str], with_token: list[str]) -> dict[str, tuple[Any, Any]]:
    """Value and CAS token of each key that is there; pylibmc has tokens only where they are asked for."""
    if hasattr(client, "gets_many"):
        found: dict[str, tuple[Any, Any]] = client.gets_many(list(keys))
        if not found and client.gets(min(keys)) is None:
            # A client that waits for its server to come back says so in no other way: it finds nothing, and
            # not even that it has found nothing, which would be (None, None).
            raise StoreError("the client does not talk to its server for now", outage=True)
        return found
    plain = keys.difference(with_token)
    found = {key: (value, None) for key, value in client.get_multi(list(plain)).items()} if plain else {}
    for key in with_token:
        try:
            value, token = client.gets(key)
        except ValueError:
            client.behaviors = {"cas": True}
            value, token = client.gets(key)
        if token is not None:
            found[key] = (value, token)
    return found


def _cas(client: Any, key: str, value: Any, token: Any, timeout: int) -> bool:
    try:
        return bool(client.cas(key, value, token, timeout))
    except Exception as error:
        if type(error).__name__ == "NotFound":  # pylibmc's, for a key that has expired in between
            return False
        raise


# ── Which keys a server holds ──────────────────────────────────────────────────────────────────────────────

_LINE = re.compile(rb"key=(\S+) exp=")


def _dump(server: Any, options: dict[str, Any]) -> Iterator[str]:
    """Every key that a server has, as it says itself. Raises CannotList, OSError."""
    # "hash" walks the hash table, newer servers only; "all" walks the lists of what was used when, and misses
    # what is used, and so moved, while it walks.
    for how in ("hash", "all"):
        with closing(_connect(server, options)) as connection, connection.makefile("rb") as answer:
            connection.sendall(f"lru_crawler metadump {how}\r\n".encode())
            refusal = "nothing"
            for line in answer:
                if key := _LINE.match(line):
                    yield unquote(key[1].decode())
                elif line.startswith(b"END"):
                    return
                else:
                    refusal = repr(line.decode(errors="replace").strip())
                    break
    raise CannotList(
        f"The memcached server {server} does not list its keys: it answered {refusal} to 'lru_crawler metadump'. "
        "Memcached 1.4.31 does, unless it was started without its LRU crawler. Counters can be looked up and "
        "reset one by one, by scope and identity."
    )


def _connect(server: Any, options: dict[str, Any]) -> socket.socket:
    """A connection of our own, as the client's is somewhere inside the client."""
    timeout = options.get("timeout") or _PATIENCE
    host, _, port = str(server).removeprefix("unix:").rpartition(":")
    if not host or "/" in host:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        connection.connect(str(server).removeprefix("unix:"))
        return connection
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout)
    if context := options.get("tls_context"):
        return context.wrap_socket(connection, server_hostname=host)  # type: ignore[no-any-return]
    return connection
