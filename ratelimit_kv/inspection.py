"""What is in force and what is counted right now: for the command, the admin, and whoever wants a list."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from os.path import commonprefix
from typing import Any, NamedTuple

from . import marks
from .algorithms import BAN, BUCKET, CONCURRENT, MAX_COUNT, MICROSECOND, SLIDING, Counter, Verdict, load, observe
from .conf import Config
from .decisions import Reason
from .identity import parse_key
from .limiter import aliases, reset, reset_all
from .process import now
from .rates import MAX_CONCURRENT, MAX_PERIOD, Rate, ceil_seconds
from .scopes import ALGORITHMS, Ban, Scope
from .stores import CannotList, Store, StoreError, get_store, store_classes

__all__ = [
    "Gap",
    "Listing",
    "LiveCounter",
    "ScopeInForce",
    "State",
    "StoreFacts",
    "counted_as",
    "duration",
    "facts_table_markdown",
    "fullest",
    "live_counters",
    "lookup",
    "remove",
    "scopes_in_force",
    "store_facts",
]

BATCH = 200
"""Counters that are judged at once: a sliding one has two keys, and databases have a limit on the words of a query."""
PACE = 1000
"""Keys between two calls of ``watch``."""


# ------------------------------------------------------------------------------------------------------ one counter


class State(StrEnum):
    """Where a counter stands."""

    WITHIN = "within"
    """The next hit that costs 1 passes."""
    OVER = "over"
    """The next hit that costs 1 is denied."""
    BANNED = "banned"
    """Every hit is denied until the ban is over."""


@dataclass(frozen=True, slots=True)
class LiveCounter:
    """A counter that counts for something now. The names of the fields are what ``--format json`` prints."""

    scope: str
    identity: str
    """In the encoded form of the store's key: what ``reset`` and ``peek`` also take."""
    count: int | None
    """Hits that count now, from 1; 0 for a ban, None for a bucket whose limit is unknown."""
    limit: int | None
    """Hits a window; 0 for a ban, None when the settings do not say (a scope that is gone, a rate from a function)."""
    window: int
    """Length of the window in whole seconds, 0 for a concurrency limit; for a ban the length of the first."""
    remaining: int | None
    """Hits left, from 0; None when the limit is unknown."""
    resets_in: int
    """Whole seconds until all of the limit is there again, rounded up, from 1."""
    state: State

    @property
    def share(self) -> float:
        """How much of the limit is used, 1.0 for all of it; infinite for a ban, -1 when the limit is unknown."""
        if self.state is State.BANNED:
            return float("inf")
        if self.limit is None or self.count is None:
            return -1.0
        return self.count / self.limit if self.limit else 1.0

    @property
    def percent(self) -> int | None:
        """The share in whole percent, rounded down so that 100 means used up; None for a ban and an unknown limit."""
        return None if self.share in (-1.0, float("inf")) else int(self.share * 100)

    def as_dict(self) -> dict[str, Any]:
        """The fields, as plain types."""
        return {**asdict(self), "state": self.state.value}


class _Head(NamedTuple):
    """What all keys of one rate of one scope have in common, as of one moment."""

    scope: str
    template: Counter
    """Of a hit that costs 1, without an identity."""
    window: int
    limit: int | None
    current: str
    """How the key of the current window goes on behind the identity."""
    previous: str
    """The same of the window before, for sliding windows."""

    def row(self, identity: str, verdict: Verdict, over: bool = False) -> LiveCounter | None:
        """The counter as people see it, None when there is nothing in it, or nothing ``over`` the limit."""
        if over and (verdict.allowed or self.limit is None):
            return None
        if self.template.kind == BAN:
            if verdict.reason is not Reason.BANNED:
                return None
            wait = ceil_seconds(verdict.reset_after / MICROSECOND)
            return LiveCounter(self.scope, identity, 0, 0, self.window, 0, wait, State.BANNED)
        if not verdict.used:
            return None
        is_known = self.limit is not None
        return LiveCounter(
            scope=self.scope,
            identity=identity,
            count=verdict.used if is_known or self.template.kind != BUCKET else None,
            limit=self.limit,
            window=self.window,
            remaining=verdict.remaining if is_known else None,
            resets_in=ceil_seconds(verdict.reset_after / MICROSECOND),
            state=State.WITHIN if verdict.allowed or not is_known else State.OVER,
        )


def _heads_of(scope: Scope, at: int, *, is_known: bool = True) -> Iterator[tuple[str, _Head]]:
    """The heads of a scope by how their keys begin."""
    if scope.plan is not None:
        counters = scope.counters(scope.plan, "", 1, at, 0, 0)
        for rate, head, counter in zip(scope.plan.rates, scope.plan.heads, counters, strict=False):
            yield (
                head,
                _Head(
                    scope.name,
                    counter,
                    0 if counter.kind == CONCURRENT else rate.period,
                    counter.limit if is_known else None,
                    counter.key.removeprefix(head),
                    counter.previous.removeprefix(head),
                ),
            )
    if scope.ban is not None:
        yield scope.ban_head, _Head(scope.name, scope.ban_counter(""), scope.ban.length, 0, "}", "")


_STRANGER = re.compile(
    r"(?P<scope>[a-z][a-z0-9_.-]*):(?P<kind>[fsbcx])(?:(?P<seconds>\d+)|(?P<calendar>\w+)@(?P<zone>[^:{}]+)):\{"
)
_NOMINAL = {"day": 86400, "week": 604800, "month": 31 * 86400}


def _stranger(config: Config, head: str, at: int) -> _Head | None:
    """The head of a key of ours whose limit the settings do not tell. None for what is no key of ours.

    It is read by giving it a scope with a limit that nobody reaches.
    """
    prefix = f"{config.defaults.prefix}:"
    match = _STRANGER.fullmatch(head.removeprefix(prefix))
    if match is None:
        return None
    name, kind = match["scope"], match["kind"]
    if kind == BAN:
        if match["seconds"] is None or name in config.members:  # a ban that the settings no longer speak of bans nobody
            return None
        scope = Scope(name=name, prefix=config.defaults.prefix, ban=Ban(1, int(match["seconds"]), 1.0, MAX_PERIOD))
    else:
        # A bucket's content cannot be told in hits without its limit; its time until full can, with any limit.
        limit = {BUCKET: 1, CONCURRENT: MAX_CONCURRENT}.get(kind, MAX_COUNT)
        try:
            if match["seconds"] is not None:
                rate = Rate(limit, int(match["seconds"]))
            else:
                multiple, unit = re.fullmatch(r"(\d*)(.*)", match["calendar"]).groups()  # type: ignore[union-attr]
                rate = Rate(limit, int(multiple or 1) * _NOMINAL.get(unit, 0), match["calendar"], match["zone"])
        except ValueError:
            return None
        scope = Scope(name=name, prefix=config.defaults.prefix, algorithm=kind, rates=(rate,))
    return dict(_heads_of(scope, at, is_known=False)).get(head)


# --------------------------------------------------------------------------------------------------- live counters


Watch = Callable[[int], bool]
"""Called with the number of keys seen so far, now and then; False ends the listing there."""


def live_counters(
    config: Config,
    scope: str | None = None,
    identity: str | None = None,
    *,
    over: bool = False,
    alias: str | None = None,
    watch: Watch | None = None,
) -> Iterator[LiveCounter]:
    """Every counter that counts for something now, as a stream, in no order, in constant memory.

    ``scope``: only those of this scope or family. ``identity``: only this caller, written as for ``reset``. ``over``:
    only those whose next hit is denied. ``alias``: only this cache, else all that hold counters.

    A cache that changes meanwhile may show a counter twice. Raises ImproperlyConfigured for an unknown scope, ValueError
    for an identity that is none, CannotList and StoreError for a cache that cannot list or does not answer.
    """
    names = None if scope is None else {one.name for one in config.family(scope)}
    wanted = None if identity is None else _callers(config, names, identity)
    at = now()
    for one in _aliases(config, names) if alias is None else (alias,):
        yield from _scan(config, one, names, identity, wanted, at, over, watch or (lambda seen: True))


def lookup(config: Config, scope: str, identity: str, *, alias: str | None = None) -> Iterator[LiveCounter]:
    """The live counters of one caller in one scope or family: one trip a scope, also where a cache cannot list.

    Only a scope whose rates come from a function has to be listed. Raises as :func:`live_counters`.
    """
    at = now()
    scopes = config.family(scope)
    callers = _callers(config, [one.name for one in scopes], identity)
    for one in scopes:
        who = callers.get(one.name)
        if who is None or (alias is not None and one.cache != alias):
            continue
        if one.rate is not None:
            yield from _scan(config, one.cache, {one.name}, identity, callers, at, False, lambda seen: True)
            continue
        heads = [head for _, head in _heads_of(one, at)]
        if heads:
            counters = [_counter(head, who) for head in heads]
            for head, verdict in zip(heads, get_store(one.cache).peek(counters, at), strict=True):
                row = head.row(who, verdict)
                if row is not None:
                    yield row


def _aliases(config: Config, names: Iterable[str] | None) -> tuple[str, ...]:
    if names is None:
        return aliases(config)
    return tuple(dict.fromkeys(config.members[name].cache for name in names))


def counted_as(config: Config, scope: str, identity: str) -> str | None:
    """The identity of a caller in a scope's keys, None when no such scope counts such callers. Raises ValueError."""
    one = config.members.get(scope)
    return None if one is None else one.key.find(identity, config.identities, ip_stands_in=one.on_missing == "ip")


def _callers(config: Config, names: Iterable[str] | None, identity: str) -> Mapping[str, str]:
    """The identity of a caller by the scopes that count such callers; without ``names`` of all, and it may be of none.

    Raises ValueError for what is no identity.
    """
    among = tuple(config.members if names is None else names)
    found = {name: who for name in among if (who := counted_as(config, name, identity)) is not None}
    if not found:
        keys = [config.members[name].key for name in among] if names is not None else [parse_key("ip")]
        keys[0].canonical(identity, config.identities)
        if names is not None:
            counts = " and ".join(sorted({repr(key.text) for key in keys}))
            raise ValueError(f"{identity!r} is no identity that is counted here: this scope counts by {counts}.")
    return found


def _counter(head: _Head, identity: str) -> Counter:
    """The counter of a caller in the current window."""
    template = head.template
    start = template.key.removesuffix(head.current) + identity
    previous = f"{start}{head.previous}" if template.kind == SLIDING else ""
    return template._replace(key=start + head.current, previous=previous)


class _Found(NamedTuple):
    """A key that may belong to a live counter."""

    head: _Head
    identity: str
    value: Any
    is_current: bool
    """Whether it is of the current window, and not of the one before."""


def _scan(
    config: Config,
    alias: str,
    names: set[str] | None,
    identity: str | None,
    wanted: Mapping[str, str] | None,
    at: int,
    over: bool,
    watch: Watch,
) -> Iterator[LiveCounter]:
    store = get_store(alias)
    found = _find(config, store, names, identity, wanted, at, watch)
    while batch := list(itertools.islice(found, BATCH)):
        yield from _judge(store, batch, at, over)


def _find(
    config: Config,
    store: Store,
    names: set[str] | None,
    identity: str | None,
    wanted: Mapping[str, str] | None,
    at: int,
    watch: Watch,
) -> Iterator[_Found]:
    heads: dict[str, _Head | None] = dict(
        found for scope in config.members.values() if scope.cache == store.alias for found in _heads_of(scope, at)
    )
    prefix = f"{config.defaults.prefix}:"
    if names is not None:
        prefix = commonprefix([f"{prefix}{name}:" for name in names])  # noqa: RUF071 - by characters is what is meant
    for seen, (key, value) in enumerate(store.scan(prefix)):
        if seen % PACE == 0 and not watch(seen):
            return
        start, brace, rest = key.partition("{")
        who, end, window = rest.partition("}")
        start, window = start + brace, end + window
        try:
            head = heads[start]
        except KeyError:
            head = _stranger(config, start, at)
            if head is not None:  # foreign keys may be without number; these are as few as scopes were
                heads[start] = head
        if head is None or (names is not None and head.scope not in names):
            continue
        if wanted is not None and who != wanted.get(head.scope, identity):
            continue
        if window == head.current or (head.previous and window == head.previous):
            yield _Found(head, who, value, window == head.current)


def _judge(store: Store, batch: list[_Found], at: int, over: bool) -> Iterator[LiveCounter]:
    plain = [found for found in batch if found.head.template.kind != SLIDING]
    counters = [found.head.template for found in plain]
    states = [load(counter, found.value) for counter, found in zip(counters, plain, strict=True)]
    for found, verdict in zip(plain, observe(counters, states, at), strict=True):
        row = found.head.row(found.identity, verdict, over)
        if row is not None:
            yield row
    # Sliding windows weigh the window before, whose key may come at any time: both are read again, together.
    sliding = [found for found in batch if found.head.template.kind == SLIDING]
    counters = [_counter(found.head, found.identity) for found in sliding]
    verdicts = store.peek(counters, at) if counters else []
    for found, counter, verdict in zip(sliding, counters, verdicts, strict=True):
        # Told once: by the key of the current window when it holds something, else by the one before.
        if (verdict.reset_after > counter.end - at) is found.is_current:
            row = found.head.row(found.identity, verdict, over)
            if row is not None:
                yield row


def duration(seconds: int) -> str:
    """For people, in its two largest units: ``45s``, ``15m``, ``59m 12s``, ``1d 3h``."""
    words = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        words.append(f"{count}{unit}" if count else "")
    first = next((position for position, word in enumerate(words) if word), 3)
    return " ".join(filter(None, words[first : first + 2])) or "0s"


# ---------------------------------------------------------------------------------------------------- the fullest


class Gap(NamedTuple):
    """A cache of which a listing does not tell all."""

    alias: str
    message: str
    """For people: why, and what helps."""
    is_outage: bool
    """Whether it should have answered; else it never can."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The fullest counters there are."""

    rows: tuple[LiveCounter, ...]
    """By share of the limit used, bans first."""
    total: int
    """How many there were, with those that were cut off."""
    gaps: tuple[Gap, ...]
    is_complete: bool
    """False when ``watch`` ended it."""


def fullest(
    config: Config,
    scope: str | None = None,
    identity: str | None = None,
    *,
    over: bool = False,
    limit: int = 1000,
    watch: Watch | None = None,
) -> Listing:
    """The counters that are used up furthest, at most ``limit``, in memory for as many; of all caches that answer.

    With scope and identity it looks them up, which every cache can do. Raises ImproperlyConfigured for an unknown scope
    and ValueError for an identity that is none.
    """
    gaps: list[Gap] = []
    total = itertools.count()
    is_complete = True
    names = None if scope is None else {one.name for one in config.family(scope)}
    is_lookup = scope is not None and identity is not None

    def go_on(seen: int) -> bool:
        nonlocal is_complete
        is_complete = watch is None or watch(seen)
        return is_complete

    def rows() -> Iterator[LiveCounter]:
        for alias in _aliases(config, names):
            if not is_complete:
                return
            found = 0
            try:
                if scope is not None and identity is not None:
                    stream = lookup(config, scope, identity, alias=alias)
                else:
                    stream = live_counters(config, scope, identity, over=over, alias=alias, watch=go_on)
                for row in stream:
                    found += 1
                    if not over or row.state is not State.WITHIN:
                        next(total)
                        yield row
            except StoreError as error:
                gaps.append(Gap(alias, f"The cache {alias!r} does not answer: {error.cause}.", True))
            except CannotList as error:
                gaps.append(Gap(alias, f"The counters of the cache {alias!r} cannot be listed. {error}", False))
            else:
                if not get_store(alias).is_shared and not (is_lookup and found):
                    gaps.append(Gap(alias, unseen(alias), False))

    best = heapq.nlargest(limit, rows(), key=lambda row: (row.share, row.count or 0))
    unique = sorted(
        dict.fromkeys(best), key=lambda row: (-row.share, -(row.count or 0), row.scope, row.identity, row.window)
    )
    return Listing(tuple(unique), next(total) - len(best) + len(unique), tuple(gaps), is_complete)


def unseen(alias: str) -> str:
    """Why the counters of a cache are not all there, for people."""
    return (
        f"The counters of the cache {alias!r} ({get_store(alias).name}) live inside each server process: those of other "
        "processes cannot be seen from here. Count in a cache that processes share (Redis, memcached, a database, files) "
        "to see them all."
    )


def remove(config: Config, scope: str | None = None, identity: str | None = None) -> int:
    """Forget a caller in one scope or in all, or all callers of one scope. Returns how many keys were removed.

    Raises ImproperlyConfigured, ValueError, CannotList and StoreError as :func:`live_counters`.
    """
    if identity is None:
        if scope is None:
            raise ValueError("Say which: a scope, an identity, or both.")
        return reset_all(scope)
    if scope is not None:
        return reset(scope, identity)
    scopes = [config.members[name] for name in _callers(config, None, identity)]
    return sum(reset(one.name, identity) for one in scopes if one.plan is not None or one.rate is not None)


# ------------------------------------------------------------------------------------------------ scopes in force


@dataclass(frozen=True, slots=True)
class Decorated:
    """A view that a scope stands on."""

    view: str
    """Module and qualified name."""
    route: str
    """As written in the URLconf, from the root."""
    url_name: str
    """"" when it has none."""
    methods: tuple[str, ...] | None
    """None for all."""


@dataclass(frozen=True, slots=True)
class ScopeInForce:
    """A scope as it is in force, and where, in words that JSON knows."""

    scope: str
    family: str
    """The name to ask for it by in Python, where it is not its own: that of the preset or ceiling it belongs to."""
    origin: str
    """``settings``, or the decorated view that defines it."""
    rates: tuple[str, ...] | None
    """As written: ``100/h``; None for no limit."""
    rate_function: str | None
    """The function that says the rates."""
    key: str
    cost: int | str
    algorithm: str
    mode: str
    on_error: str
    cache: str
    methods: tuple[str, ...] | None
    """None for all."""
    paths: tuple[str, ...]
    url_names: tuple[str, ...]
    exempt_paths: tuple[str, ...]
    exempt_url_names: tuple[str, ...]
    ban: str | None
    """In words."""
    views: tuple[Decorated, ...]
    """The views it is put on."""

    def as_dict(self) -> dict[str, Any]:
        """The fields, as plain types."""
        return asdict(self)


def scopes_in_force(config: Config) -> tuple[ScopeInForce, ...]:
    """The settings' scopes, then those that decorated views define, with where each of them applies.

    Raises ImproperlyConfigured when a view names a scope that does not exist.
    """
    scopes = {scope.name: scope for scope in config.scopes}
    places: dict[str, list[Decorated]] = {}
    for route, url_name, view in config.views():
        for mark in marks.marks_of(view):
            for scope in config.of_mark(mark, view):
                scopes.setdefault(scope.name, scope)
                place = Decorated(marks.view_name(view), route, url_name, _listed(scope.methods))
                if place not in places.setdefault(scope.name, []):
                    places[scope.name].append(place)
    return tuple(_in_force(scope, places.get(scope.name, ())) for scope in scopes.values())


def _in_force(scope: Scope, places: Iterable[Decorated]) -> ScopeInForce:
    is_concurrent = scope.algorithm == CONCURRENT
    rates = None
    if scope.rates is not None:
        rates = tuple(str(rate.limit) if is_concurrent else str(rate) for rate in scope.rates)
    ban = scope.ban
    return ScopeInForce(
        scope=scope.name,
        family=scope.family or scope.name,
        origin=scope.origin,
        rates=rates,
        rate_function=scope.rate.name if scope.rate else None,
        key=scope.key.text,
        cost=scope.cost if isinstance(scope.cost, int) else scope.cost.name,
        algorithm=next(word for word, kind in ALGORITHMS.items() if kind == scope.algorithm),
        mode=scope.mode,
        on_error=scope.on_error,
        cache=scope.cache,
        methods=_listed(scope.methods),
        paths=scope.paths,
        url_names=tuple(sorted(scope.url_names)),
        exempt_paths=scope.exempt_paths,
        exempt_url_names=tuple(sorted(scope.exempt_url_names)),
        ban=None
        if ban is None
        else f"{duration(ban.length)} after {ban.after} denied windows, at most {duration(ban.maximum)}",
        views=tuple(places),
    )


def _listed(methods: frozenset[str] | None) -> tuple[str, ...] | None:
    return None if methods is None else tuple(sorted(methods))


# ------------------------------------------------------------------------------------------------------ store facts


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a store can do."""

    alias: str
    """Of CACHES; "" for a kind of store as such."""
    store: str
    """What people call it."""
    exact: bool
    """Whether exactly N of N + 1 concurrent hits pass; else never more than N."""
    shared: bool
    """Whether all processes see the same counters."""
    survives_restart: bool
    """Whether the counters are still there after a restart of the web server."""
    lists: bool
    """Whether all counters can be listed, from any process."""
    round_trips: str
    """To the server, for all counters of one request."""

    def as_dict(self) -> dict[str, Any]:
        """The fields, as plain types."""
        return asdict(self)


def store_facts(alias: str) -> StoreFacts:
    """What the store of a cache alias can do. Asks no server."""
    return _facts(get_store(alias), alias)


def _facts(store: Store | type[Store], alias: str = "") -> StoreFacts:
    return StoreFacts(
        alias,
        store.name,
        store.is_exact,
        store.is_shared,
        store.outlives_process,
        store.can_list and store.is_shared,
        store.round_trips,
    )


def facts_table_markdown() -> str:
    """README's table of stores."""
    titles = ("Store", "Exact", "Shared between processes", "Survives a restart", "Can list", "Round trips a request")
    lines = [titles, ("---",) * len(titles)]
    for facts in map(_facts, store_classes()):
        answers = (facts.exact, facts.shared, facts.survives_restart, facts.lists)
        lines.append((facts.store, *("yes" if answer else "no" for answer in answers), facts.round_trips))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
