"""Redis Cluster: which server has a key, and one hit over keys that no single server has.

All counters of one identity share a slot, by the braces in their keys, and are charged in one script. Those of other
identities may live elsewhere. A hit goes from slot to slot, in the order of its counters, and gives back what it took
when a later slot denies: never more than the limit pass, and for a moment fewer may.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..algorithms import COUNT_DENIED, DENY_ON_ERROR, FIXED, Counter, Unreadable, Verdict, transact
from ..decisions import Reason
from .base import StoreError, give_back
from .redis_link import Link, bounded, pack

__all__ = ["Cluster", "Slot", "hit_across", "is_redirection", "slot_of"]

SLOTS = 16384
REDIRECTIONS = 5
"""How many servers may pass on one command before we give up."""

Address = tuple[str, int]


def slot_of(key: bytes) -> int:
    """The slot of a key: a checksum of what stands between its first pair of braces, else of all of it."""
    start = key.find(b"{") + 1
    end = key.find(b"}", start)
    return crc_hqx(key[start:end] if start and end > start else key, 0) % SLOTS


class Cluster:
    """Links to all primaries of a cluster, made from the settings of a cluster client.

    Its own map of slots, since the client's is not for asking without its retries and its waiting.
    """

    def __init__(self, client: Any) -> None:
        connection = getattr(client, "get_redis_connection", None) or client.get_valkey_connection
        pool = connection(client.get_primaries()[0]).connection_pool
        self._connection_class = pool.connection_class
        self._settings = bounded(pool.connection_kwargs)
        self._most = pool.max_connections
        self._remap: Callable[[str, int], Address] = client.nodes_manager.remap_host_port
        self._seeds: list[Address] = [(node.host, node.port) for node in client.get_nodes()]
        self._links: dict[Address, Link] = {}
        self._map: list[Address | None] = []
        """The primary of each slot; empty when it has to be asked for."""
        self._suspect: Address | None = None
        """Who has failed last, and is asked last."""
        link = self._link_to(self._seeds[0])
        self.exceptions, self.errors = link.exceptions, link.errors

    def _link_to(self, address: Address) -> Link:
        link = self._links.get(address)
        if link is None:
            host, port = address
            settings = self._settings | {"host": host, "port": port}
            link = self._links.setdefault(address, Link(self._connection_class, settings, most=self._most))
        return link

    def _learn(self) -> list[Address | None]:
        """Ask one server after the other for the map."""
        known = dict.fromkeys([*self._links, *self._seeds])
        for address in sorted(known, key=lambda address: address == self._suspect):
            with suppress(StoreError, *self.errors):
                ranges = self._link_to(address).call(pack(b"CLUSTER", b"SLOTS"))
                found: list[Address | None] = [None] * SLOTS
                for first, last, (host, port, *_), *_ in ranges:
                    # A server that was not told its own name leaves it out.
                    primary = self._remap(host.decode() if host else address[0], port)
                    found[first : last + 1] = [primary] * (last + 1 - first)
                self._map = found
                return found
        raise self.exceptions.ConnectionError("no server of the cluster answers")

    def primaries(self) -> list[Link]:
        """A link to each server that has slots. Raises the library's errors."""
        return [self._link_to(address) for address in dict.fromkeys(self._map or self._learn()) if address]

    def call(self, slot: int, command: bytes) -> Any:
        """The reply to a packed command about keys of one slot, as :meth:`Link.call`.

        A server that passes a command on has not run it, so it is sent to the other one.
        """
        address = (self._map or self._learn())[slot]
        if address is None:
            raise self.exceptions.ConnectionError("no server has this slot")
        asking = False
        for _ in range(REDIRECTIONS):
            link = self._link_to(address)
            try:
                if not asking:
                    return link.call(command)
                reply = link.call_many([pack(b"ASKING"), command])[1]
                if isinstance(reply, Exception):
                    raise reply
                return reply
            except self.exceptions.ResponseError as error:
                redirection = _redirection(error)
                if redirection is None:
                    raise
                word, host, port = redirection
                address = self._remap(host or address[0], port)
                asking = word == "ASK"
                if not asking:
                    (self._map or self._learn())[slot] = address
            except Exception:
                # Perhaps a replica has taken over from it by now.
                self._map, self._suspect = [], address
                raise
        raise self.exceptions.ConnectionError("passed on from server to server")


class Slot:
    """Like a :class:`Link`, to whichever server has one slot."""

    def __init__(self, cluster: Cluster, slot: int) -> None:
        self._cluster = cluster
        self._slot = slot
        self.exceptions, self.errors = cluster.exceptions, cluster.errors

    def call(self, command: bytes) -> Any:
        """As :meth:`Link.call`."""
        return self._cluster.call(self._slot, command)


def _redirection(error: Exception) -> tuple[str, str, int] | None:
    """("MOVED" or "ASK", host, port), if that is what the reply says."""
    # Some parsers of the library make a class of the code and cut it off, others leave it in the text.
    words = str(error).split()
    word = {"MovedError": "MOVED", "AskError": "ASK"}.get(type(error).__name__, words[0] if words else "")
    if word not in ("MOVED", "ASK"):
        return None
    host, _, port = words[-1].rpartition(":")
    return word, host, int(port)


def is_redirection(error: Exception) -> bool:
    """Whether the reply says that another server has the key, or will have it."""
    return _redirection(error) is not None


def hit_across(
    parts: Sequence[tuple[Any, Sequence[int]]],
    hit: Callable[[Any, Sequence[Counter], int], list[Verdict]],
    counters: Sequence[Counter],
    now: int,
) -> list[Verdict]:
    """One hit over several places. ``parts``: each place with the positions of its counters; ``hit``: at one place.

    A group that one place denies is judged by the others, but not charged there any more, and given back where it was.
    A place that fails is a verdict with STORE_ERROR for each of its counters. Raises StoreError when all fail.
    """
    verdicts: list[Any] = [None] * len(counters)
    denied_groups: set[int] = set()
    denied_scopes: set[int] = set()
    error = None
    failed = 0
    for place, positions in parts:
        own = [counters[position] for position in positions]
        # Nothing fits into a limit of 0: this denies the groups here that were denied elsewhere. It writes no key.
        barred = denied_groups.intersection(counter.group for counter in own)
        bars = [
            Counter(f"{own[0].key}:", FIXED, limit=0, cost=1, period=1, end=now, ttl=1, group=group, scope=-1)
            for group in barred
        ]
        try:
            answers = hit(place, own + bars, now)
        except StoreError as failure:
            error = failure
            failed += 1
            answers = transact(own, [Unreadable(failure.cause)] * len(own), now).verdicts
        for position, counter, verdict in zip(positions, own, answers, strict=False):
            verdicts[position] = verdict
            unreadable = verdict.reason is Reason.STORE_ERROR
            if not verdict.allowed and (not unreadable or counter.flags & DENY_ON_ERROR):
                denied_groups.add(counter.group)
                if not unreadable:
                    denied_scopes.add(counter.scope)
    if error is not None and failed == len(parts):
        raise error
    for place, positions in parts:
        taken = [
            position
            for position in positions
            if verdicts[position].charged
            and counters[position].group in denied_groups
            and not (counters[position].flags & COUNT_DENIED and counters[position].scope in denied_scopes)
        ]
        if not taken:
            continue
        # Where this fails a denied hit stays counted: too strict for one window, never too lax.
        with suppress(StoreError):
            back = give_back([counters[p] for p in taken], [verdicts[p] for p in taken])
            for position, after in zip(taken, hit(place, back, now), strict=True):
                verdicts[position] = verdicts[position]._replace(
                    charged=False, used=after.used, remaining=after.remaining, reset_after=after.reset_after
                )
    return verdicts
