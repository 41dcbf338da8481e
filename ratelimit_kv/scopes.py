"""A scope: rates, who is counted, where it applies, what a denial does. Parsed once, from settings or from a decorator."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from django.utils.functional import Promise

from .algorithms import (
    BAN,
    BUCKET,
    CONCURRENT,
    COUNT_DENIED,
    DENY_ON_ERROR,
    FIXED,
    MAX_COUNT,
    MICROSECOND,
    SLIDING,
    Counter,
)
from .callables import Function, load_function
from .identity import Key, parse_key
from .rates import Rate, Window, parse_bare, parse_duration, parse_rate

__all__ = [
    "ALGORITHMS",
    "OPTIONS",
    "Ban",
    "Defaults",
    "Plan",
    "Problem",
    "Scope",
    "did_you_mean",
    "parse_family",
    "placed",
    "quote",
]

NAME = re.compile(r"[a-z][a-z0-9_.-]{0,63}\Z")
"""What a scope may be called."""
ALGORITHMS = {"fixed": FIXED, "sliding": SLIDING, "bucket": BUCKET, "concurrent": CONCURRENT}
HOLD = 300
"""Seconds after which one in flight that was never released (its process died) no longer counts."""
TTL_MARGIN = 60
"""Seconds that a key outlives its use: the expiry is only the broom, and clocks differ."""
OPTIONS_FACTOR = 10
"""OPTIONS requests have a counter of their own, at so many times the limit."""
OWN_ENDINGS = (".ceiling", ".options")
"""How the names of companions end."""


class Problem(NamedTuple):
    """Something wrong with a setting."""

    path: str
    """Where, for example ``RATELIMIT_KV["SCOPES"]["ask"]["RATE"]``."""
    message: str
    """What was given, what is wrong, what to write instead."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class Defaults(NamedTuple):
    """What a scope takes from the top level of the settings."""

    cache: str = "default"
    prefix: str = "rl"
    on_error: str = "allow"


@dataclass(frozen=True, slots=True)
class Ban:
    """A denial that outlasts its window."""

    after: int = 3
    """Denied windows until it falls, from 1 to 1000."""
    length: int = 3600
    """Seconds of the first ban."""
    growth: float = 2.0
    """Factor from one ban to the next, from 1 to 100."""
    maximum: int = 86400
    """Seconds that no ban exceeds, and of quiet after which everything is forgiven."""


_tokens = itertools.count()
_FixedWindow: TypeAlias = tuple[str, str, int, int, int, int]
"""Key before and after the identity, limit, microseconds of its length, its end, seconds to keep the key."""
_Second: TypeAlias = tuple[int, int, tuple[_FixedWindow, ...]]
"""Microseconds from which and until which the windows are these."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that can be known of a scope's counters before anybody asks."""

    rates: tuple[Rate, ...]
    limits: tuple[int, ...]
    """The limits that count: those of the rates, less the safety margin."""
    heads: tuple[str, ...]
    """Keys up to the identity, one a rate."""
    periods: tuple[int, ...]
    """Microseconds, one a rate."""
    token: int = field(default_factory=lambda: next(_tokens), compare=False)
    """Tells this plan from every other of the process: what is remembered of one does not hold for another."""
    second: list[_Second] = field(init=False, default_factory=lambda: [(0, 0, ())], compare=False, repr=False)
    """What :meth:`windows` has found for the latest second. As in Rate, an item of a list is replaced without a lock."""

    def windows(self, now: int) -> tuple[_FixedWindow, ...]:
        """The fixed windows that a hit now falls into, one a rate: the same for all hits of a second."""
        seconds = now // MICROSECOND
        found = []
        for rate, limit, head, period in zip(self.rates, self.limits, self.heads, self.periods, strict=True):
            window = rate.window(seconds)
            ttl = window.end - seconds + TTL_MARGIN
            found.append((head, f"}}:{window.number}", limit, period, window.end * MICROSECOND, ttl))
        windows = tuple(found)
        self.second[0] = (seconds * MICROSECOND, (seconds + 1) * MICROSECOND, windows)
        return windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A named limit, as it is in force."""

    name: str
    family: str = ""
    """The name that it was written under, when one definition makes several scopes (PRESET, CEILING)."""
    origin: str = "settings"
    """``settings``, or the view that the decorator stands on."""
    prefix: str = "rl"
    cache: str = "default"
    rates: tuple[Rate, ...] | None = None
    """None when unlimited, or when ``rate`` says."""
    rate: Function | None = None
    key: Key = field(default_factory=lambda: parse_key("user|ip"))
    cost: int | Function = 1
    methods: frozenset[str] | None = None
    paths: tuple[str, ...] = ()
    url_names: frozenset[str] = frozenset()
    exempt_paths: tuple[str, ...] = ()
    exempt_url_names: frozenset[str] = frozenset()
    algorithm: str = FIXED
    timezone: str = ""
    safety_margin: float = 0.0
    near: float = 0.8
    on_error: str = "allow"
    on_missing: str = "ip"
    mode: str = "enforce"
    count_if: Function | None = None
    reset_if: Function | None = None
    count_denied: bool = False
    response: Function | None = None
    message: str | None = None
    quiet: bool = False
    lease: int = 1
    ban: Ban | None = None
    ceiling: int | None = None
    factor: int = 1
    """What the rates of a callable are multiplied with: the CEILING, for its companion."""

    plan: Plan | None = field(init=False, repr=False, compare=False)
    """Of fixed rates; None when unlimited or when a callable says."""
    ban_head: str = field(init=False, repr=False, compare=False)
    flags: int = field(init=False, repr=False, compare=False)
    """Of its counters."""
    gives_back: bool = field(init=False, repr=False, compare=False)
    """Whether an outcome can take hits back, so that a denial may be over before its window."""
    remembers: bool = field(init=False, repr=False, compare=False)
    """Whether a denial may be answered from memory."""
    is_plain: bool = field(init=False, repr=False, compare=False)
    """Whether a hit needs nothing but its counters: fixed windows and a fixed cost, enforced, nothing to wait for."""
    tells: bool = field(init=False, repr=False, compare=False)
    """Whether responses may tell its numbers: they are the caller's own business, and not to be kept from him."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", self.make_plan(self.rates) if self.rates is not None else None)
        object.__setattr__(self, "ban_head", f"{self.prefix}:{self.name}:{BAN}{self.ban.length if self.ban else 0}:{{")
        flags = (COUNT_DENIED if self.count_denied else 0) | (DENY_ON_ERROR if self.on_error == "deny" else 0)
        object.__setattr__(self, "flags", flags)
        gives_back = self.count_if is not None or self.reset_if is not None or self.algorithm == CONCURRENT
        object.__setattr__(self, "gives_back", gives_back)
        is_plain = (
            self.algorithm == FIXED
            and self.rate is None
            and bool(self.rates)
            and type(self.cost) is int
            and self.cost > 0
            and self.mode == "enforce"
            and self.lease == 1
            and self.ban is None
            and not (gives_back or self.count_denied)
        )
        object.__setattr__(self, "is_plain", is_plain)
        object.__setattr__(self, "tells", self.key.is_private and not self.quiet and self.mode == "enforce")
        object.__setattr__(self, "remembers", not (gives_back or self.count_denied or self.mode == "shadow"))

    @property
    def has_where(self) -> bool:
        """Whether settings say where it applies; otherwise only where it is named."""
        return bool(self.paths or self.url_names)

    def make_plan(self, rates: Sequence[Rate]) -> Plan:
        """The plan for these rates: the scope's own, or what a callable returned."""
        rates = tuple(rates)
        return Plan(
            rates,
            tuple(math.floor(rate.limit * (1.0 - self.safety_margin) + 1e-9) for rate in rates),
            tuple(f"{self.prefix}:{self.name}:{self.algorithm}{rate.label}:{{" for rate in rates)
            if self.algorithm != CONCURRENT
            else (f"{self.prefix}:{self.name}:{CONCURRENT}{HOLD}:{{",),
            tuple(rate.period * MICROSECOND for rate in rates),
        )

    def with_rates(self, value: Any) -> Plan | None:
        """The plan for what a RATE callable returned: text, a list of texts, or None. Raises ValueError otherwise."""
        if value is None:
            return None
        if isinstance(value, str | int) and not isinstance(value, bool):
            value = (value,)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str | int) for v in value):
            raise ValueError(f"{value!r} is not a rate")
        return _plan_of(self, tuple(value))

    def counters(
        self, plan: Plan, identity: str, cost: int, now: int, number: int, group: int, share: int = 1
    ) -> list[Counter]:
        """The counters of one hit. ``now`` in microseconds; ``number`` of the scope in the hit, ``group`` as in Counter.

        ``share``: each limit is divided by it, rounded up (one process's part of the limit).
        """
        flags, kind = self.flags, self.algorithm
        counters: list[Counter] = []
        if kind == FIXED:
            since, until, windows = plan.second[0]
            if not since <= now < until:
                windows = plan.windows(now)
            for head, tail, limit, period, end, ttl in windows:
                if share != 1:
                    limit = -(-limit // share)
                key = f"{head}{identity}{tail}"
                # As Counter(...), without a Python frame: this is almost every hit's way.
                values = (key, FIXED, limit, cost, period, end, ttl, "", group, flags, number, 1.0, 0)
                counters.append(tuple.__new__(Counter, values))
            if self.ban is not None:
                counters.append(self.ban_counter(identity, number, group, flags))
            return counters
        seconds = now // MICROSECOND
        for rate, limit, head, period in zip(plan.rates, plan.limits, plan.heads, plan.periods, strict=True):
            if share != 1:
                limit = -(-limit // share)
            if kind == SLIDING:
                window = rate.window(seconds)
                end = window.end * MICROSECOND
                ttl = window.end - seconds + TTL_MARGIN
                key = f"{head}{identity}}}:{window.number}"
                before = rate.window(window.start - 1).number
                counters.append(
                    Counter(
                        key,
                        kind,
                        limit,
                        cost,
                        (window.end - window.start) * MICROSECOND,
                        end,
                        ttl + window.end - window.start,
                        f"{head}{identity}}}:{before}",
                        group,
                        flags,
                        number,
                    )
                )
            elif kind == BUCKET:
                ttl = 2 * rate.period + TTL_MARGIN
                counters.append(
                    Counter(f"{head}{identity}}}", kind, limit, cost, period, 0, ttl, "", group, flags, number)
                )
            else:
                hold = HOLD * MICROSECOND
                counters.append(
                    Counter(
                        f"{head}{identity}}}",
                        kind,
                        limit,
                        cost,
                        hold,
                        now + hold,
                        HOLD + TTL_MARGIN,
                        "",
                        group,
                        flags,
                        number,
                    )
                )
        if self.ban is not None:
            counters.append(self.ban_counter(identity, number, group, flags))
        return counters

    def ban_counter(self, identity: str, number: int = 0, group: int = 0, flags: int = 0) -> Counter:
        """The counter that holds the ban of an identity. Only for scopes with BAN."""
        ban = self.ban
        assert ban is not None
        return Counter(
            f"{self.ban_head}{identity}}}",
            BAN,
            ban.after,
            0,
            ban.length * MICROSECOND,
            0,
            2 * ban.maximum + TTL_MARGIN,
            "",
            group,
            flags,
            number,
            ban.growth,
            ban.maximum * MICROSECOND,
        )

    def keys(self, plan: Plan, identity: str, now: int) -> list[str]:
        """Every key of an identity that can matter now: this window and the one before, bucket, in flight, ban."""
        found = [f"{self.ban_head}{identity}}}"] if self.ban else []
        for rate, head in zip(plan.rates, plan.heads, strict=True):
            if self.algorithm in (FIXED, SLIDING):
                window: Window = rate.window(now // MICROSECOND)
                before = rate.window(window.start - 1)
                found += [f"{head}{identity}}}:{window.number}", f"{head}{identity}}}:{before.number}"]
            else:
                found.append(f"{head}{identity}}}")
        return found

    def for_options(self) -> Scope:
        """The counter for OPTIONS requests: its own, at ten times the limit."""
        if self.rates is None and self.rate is None:
            return self
        return _multiplied(
            self, f"{self.name}.options", OPTIONS_FACTOR, cost=1, count_if=None, reset_if=None, ban=None, lease=1
        )

    def __hash__(self) -> int:
        return hash((self.name, self.family))


@lru_cache(maxsize=1024)
def _plan_of(scope: Scope, texts: tuple[str | int, ...]) -> Plan:
    rates = _parse_rates(list(texts), scope.algorithm, scope.timezone)
    if rates is None:
        raise ValueError(f"{texts!r} is not a rate")
    return scope.make_plan([_times(rate, scope.factor) for rate in rates])


def _times(rate: Rate, factor: int) -> Rate:
    return rate if factor == 1 else Rate(min(rate.limit * factor, MAX_COUNT), rate.period, rate.calendar, rate.timezone)


def _multiplied(scope: Scope, name: str, factor: int, **changes: Any) -> Scope:
    """A companion of a scope: the same limits times a factor, counted apart."""
    rates = None if scope.rates is None else tuple(_times(rate, factor) for rate in scope.rates)
    if scope.algorithm == CONCURRENT and rates:
        rates = tuple(replace(rate, limit=min(rate.limit, 1000)) for rate in rates)
    return replace(scope, name=name, rates=rates, factor=scope.factor * factor, **changes)


# --------------------------------------------------------------------------------------------------------- parsing


def did_you_mean(word: Any, words: Iterable[Any]) -> str:
    """A hint for a word that is not among the known ones, "" when none is close."""
    known = {str(one).lower(): str(one) for one in words}
    close = difflib.get_close_matches(str(word)[:100].lower(), known, 1, 0.6)
    return f" Did you mean {known[close[0]]!r}?" if close else ""


def quote(value: Any) -> str:
    """What was given, for a message: not all of it when it is long."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - anything may stand in settings; Python itself refuses to write huge ints
        return f"this {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _parse_rates(value: Any, algorithm: str, timezone: str) -> tuple[Rate, ...] | None:
    if value is None:
        return None
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise ValueError("an empty list is not a rate. Write '100/h', or None for no limit.")
    if algorithm == CONCURRENT:
        if len(values) > 1:
            raise ValueError(f"{value!r}: a concurrent scope has one limit. Write how many may be in flight, like '5'.")
        return (Rate(parse_bare(values[0]), HOLD),)
    rates = tuple(parse_rate(one, timezone=timezone) for one in values)
    labels = [rate.label for rate in rates]
    for rate in rates:
        if labels.count(rate.label) > 1:
            raise ValueError(f"{value!r} has two rates with the period {rate.label}. Keep the smaller one.")
        if algorithm == BUCKET and (rate.calendar or rate.limit > rate.period * MICROSECOND):
            raise ValueError(
                f"{str(rate)!r}: a bucket refills steadily: no TIMEZONE, and at most a million hits a second."
            )
    return rates


def one_of(*words: str) -> Callable[[Any], str]:
    """A parser for one of some words."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(
                f"{quote(value)} is unknown.{did_you_mean(value, words)} Write one of {', '.join(map(repr, words))}."
            )
        return value

    return parse


def boolean(value: Any) -> bool:
    """A parser for True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{quote(value)} is not a yes or no. Write True or False.")
    return value


def number(low: float, high: float, what: str = "", *, or_else: str = "") -> Callable[[Any], float]:
    """A parser for a number from ``low`` to ``high``. ``what`` names it in messages, ``or_else`` says what else may be."""

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{what}{quote(value)} is not a number. Write one from {low} to {high}{or_else}.")
        return float(value)

    return parse


def integer(low: int, high: int, what: str = "", *, or_else: str = "") -> Callable[[Any], int]:
    """The same for an int."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{what}{quote(value)} is not an integer. Write one from {low} to {high}{or_else}.")
        return value

    return parse


def or_none(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same parser, for a value that may also be None."""
    return lambda value: None if value is None else parse(value)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError(f"{quote(value)} is not a list. Write [{quote(value)}].")
    if not isinstance(value, list | tuple | set | frozenset):
        raise ValueError(f"{quote(value)} is not a list of texts.")
    for text in value:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{quote(text)} in the list is not text.")
    return tuple(value)


def _paths(value: Any) -> tuple[str, ...]:
    paths = _texts(value)
    for path in paths:
        if "*" in path[:-1] or not (path.startswith("/") or path == "*"):
            raise ValueError(f"{quote(path)} is not a path. Write '/api/*', '/login' or '*': a star only at the end.")
    return paths


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def _methods(value: Any) -> frozenset[str]:
    methods = {method.upper() for method in _texts(value)}
    if not methods:
        raise ValueError("an empty list would count nothing. Leave it out for all methods.")
    for method in methods:
        # Methods are an open list (RFC 9110), but a misspelt one would leave a hole that nobody sees.
        close = [] if method in METHODS else difflib.get_close_matches(method[:100], METHODS, 1, 0.75)
        if close or not re.fullmatch(r"[A-Z]+(-[A-Z]+)*", method):
            guess = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{quote(method)} is not an HTTP method.{guess} Write ['POST', 'PUT'].")
    return frozenset(methods | ({"HEAD"} if "GET" in methods else set()))


def parse_cost(value: Any) -> int | Function:
    """COST: an int from 0 to 2**53 - 1 or a function of the request. Raises ValueError."""
    if callable(value) or (isinstance(value, str) and "." in value):
        return load_function(value)
    return integer(0, MAX_COUNT, or_else=", or a function of the request")(value)


def _message(value: Any) -> str:
    if isinstance(value, Promise):  # gettext_lazy: what it says depends on the language of the request
        return value  # type: ignore[return-value]
    if not isinstance(value, str):
        raise ValueError(f"{quote(value)} is not text.")
    try:
        for limit in (0, ""):  # the limit may be unknown
            value.format(retry_after="", limit=limit, scope="")
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{quote(value)} cannot be filled in ({error}). It may hold {{retry_after}}, {{limit}} and {{scope}}."
        ) from error
    return value


def _ban_option(value: Any) -> Ban:
    if not isinstance(value, Mapping):
        raise ValueError(f'{quote(value)} is not a ban. Write {{"AFTER": 3, "FOR": "1h"}}.')
    words = ("AFTER", "FOR", "GROWTH", "MAX")
    for word in value:
        if word not in words:
            raise ValueError(f"{quote(word)} is unknown.{did_you_mean(word, words)} A ban has {', '.join(words)}.")
    after = integer(1, 1000, "AFTER ")(value.get("AFTER", 3))
    length, maximum = parse_duration(value.get("FOR", "1h")), parse_duration(value.get("MAX", "1d"))
    growth = number(1, 100, "GROWTH ")(value.get("GROWTH", 2))
    if length > maximum:
        raise ValueError(f"FOR ({length} s) is longer than MAX ({maximum} s). Raise MAX.")
    return Ban(after, length, growth, maximum)


def _timezone(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{quote(value)} is not a time zone. Write an IANA name such as 'Europe/Rome'.")
    parse_rate("1/day", timezone=value)
    return value


def _cache_alias(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{quote(value)} is not the alias of a cache.")
    return value


OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "KEY": ("key", parse_key),
    "CEILING": ("ceiling", or_none(integer(1, 1000))),
    "COST": ("cost", parse_cost),
    "METHODS": ("methods", or_none(_methods)),
    "PATHS": ("paths", _paths),
    "URL_NAMES": ("url_names", lambda value: frozenset(_texts(value))),
    "EXEMPT_PATHS": ("exempt_paths", _paths),
    "EXEMPT_URL_NAMES": ("exempt_url_names", lambda value: frozenset(_texts(value))),
    "SAFETY_MARGIN": ("safety_margin", number(0, 0.9)),
    "NEAR": ("near", number(0, 1)),
    "ON_ERROR": ("on_error", one_of("allow", "deny", "local")),
    "ON_MISSING": ("on_missing", one_of("ip", "skip", "deny")),
    "MODE": ("mode", one_of("enforce", "shadow", "off")),
    "COUNT_IF": ("count_if", or_none(load_function)),
    "RESET_IF": ("reset_if", or_none(load_function)),
    "COUNT_DENIED": ("count_denied", boolean),
    "RESPONSE": ("response", or_none(load_function)),
    "MESSAGE": ("message", or_none(_message)),
    "QUIET": ("quiet", boolean),
    "CACHE": ("cache", _cache_alias),
    "LEASE": ("lease", integer(1, 100_000)),
    "BAN": ("ban", or_none(_ban_option)),
}
"""Option -> field of Scope and its parser, which raises ValueError. RATE, ALGORITHM, TIMEZONE and PRESET come first."""
FIRST = ("RATE", "ALGORITHM", "TIMEZONE", "PRESET")


def parse_family(
    name: str, options: Any, defaults: Defaults, path: str, origin: str = "settings"
) -> tuple[tuple[Scope, ...], list[Problem]]:
    """The scopes that one definition makes (one, or more with PRESET and CEILING), and what is wrong with it.

    ``options`` is a rate or a dict of the options of a scope in upper case. ``path`` is what problems are reported under.
    """
    if not isinstance(name, str) or not NAME.match(name):
        how = "Write a lower-case letter, then up to 63 of a-z 0-9 _ . -"
        return (), [Problem(path, f"{quote(name)} cannot be the name of a scope. {how}")]
    if name.endswith(OWN_ENDINGS):
        return (), [Problem(path, f"{name!r}: names that end so are our own. Choose another one.")]
    options = as_options(options)
    if options is None:
        return (), [Problem(path, "this is not a scope. Write a rate like '100/h' or a dict with RATE and KEY.")]
    problems: list[Problem] = []
    known = (*FIRST, *OPTIONS)
    for option in options:
        if option not in known:
            problems.append(Problem(path, f"{quote(option)} is not an option of a scope.{did_you_mean(option, known)}"))
    if "PRESET" in options:
        scopes = _preset(name, options, defaults, path, origin, problems)
    else:
        one = _parse_one(name, options, defaults, path, origin, problems)
        scopes = (one,) if one is not None else ()
    found: list[Scope] = []
    for scope in scopes:
        found.append(scope)
        if scope.ceiling is not None:
            found.append(
                _multiplied(
                    scope,
                    f"{scope.name}.ceiling",
                    scope.ceiling,
                    key=parse_key("ip"),
                    family=name,
                    ceiling=None,
                    ban=None,
                    lease=1,
                )
            )
    for scope in found:
        if not NAME.match(scope.name):
            problems.append(
                Problem(path, f"the name {scope.name!r} that follows from {name!r} is too long. Shorten it.")
            )
    return tuple(found), list(dict.fromkeys(problems))  # the members of a preset share options, and their mistakes


def as_options(definition: Any) -> Mapping[Any, Any] | None:
    """A scope's definition as a dict of options: a bare rate (text, list or function) is its RATE. None for others."""
    if isinstance(definition, Mapping):
        return definition
    if isinstance(definition, str | list | tuple) or callable(definition):
        return {"RATE": definition}
    return None


def placed(
    scopes: tuple[Scope, ...], name: str, defaults: Defaults, given: Collection[str], origin: str
) -> tuple[Scope, ...]:
    """Scopes that were parsed before their name and the settings' defaults were known, with both. Parses nothing.

    ``given``: the options that were written down, which are stronger than the defaults.
    """
    own: dict[str, Any] = {"family": name, "prefix": defaults.prefix, "origin": origin}
    if "CACHE" not in given:
        own["cache"] = defaults.cache
    if "ON_ERROR" not in given:
        own["on_error"] = defaults.on_error
    return tuple(replace(scope, name=name + scope.name.removeprefix(scope.family), **own) for scope in scopes)


def _parse_one(
    name: str, options: Mapping[str, Any], defaults: Defaults, path: str, origin: str, problems: list[Problem]
) -> Scope | None:
    before = len(problems)
    values: dict[str, Any] = {
        "name": name,
        "family": name,
        "origin": origin,
        "prefix": defaults.prefix,
        "cache": defaults.cache,
        "on_error": defaults.on_error,
    }

    def parse(option: str, parser: Callable[[Any], Any]) -> Any:
        try:
            return parser(options[option])
        except (ValueError, TypeError) as error:
            problems.append(Problem(f'{path}["{option}"]', str(error)))
            return None

    if "ALGORITHM" in options:
        word = parse("ALGORITHM", one_of(*ALGORITHMS))
        if word is not None:
            values["algorithm"] = ALGORITHMS[word]
    algorithm = values.get("algorithm", FIXED)
    timezone = values["timezone"] = (parse("TIMEZONE", or_none(_timezone)) if "TIMEZONE" in options else None) or ""
    if "RATE" not in options:
        problems.append(
            Problem(path, f"the scope {name!r} has no RATE. Write \"RATE\": '100/h', or None for no limit.")
        )
    elif callable(options["RATE"]) or (isinstance(options["RATE"], str) and _looks_like_path(options["RATE"])):
        values["rate"] = parse("RATE", load_function)
    else:
        values["rates"] = parse("RATE", lambda value: _parse_rates(value, algorithm, timezone))
    for option, (attribute, parser) in OPTIONS.items():
        if option in options:
            value = parse(option, parser)
            if value is not None:
                values[attribute] = value
    if len(problems) > before:
        return None
    scope = Scope(**values)
    problems.extend(_contradictions(scope, path))
    return scope


def _looks_like_path(text: str) -> bool:
    """Whether it is the dotted path of a function, and not a rate."""
    words = text.split(".")
    return len(words) > 1 and all(word.isidentifier() for word in words)


def _contradictions(scope: Scope, path: str) -> list[Problem]:
    found: list[Problem] = []

    def problem(option: str, message: str) -> None:
        found.append(Problem(f'{path}["{option}"]', message))

    kinds = [{part.kind for part in alternative} for alternative in scope.key.alternatives]
    if scope.ban and any(kind <= {"everyone", "field", "arg"} for kind in kinds):
        problem(
            "BAN", f"the key {scope.key.text!r} is not a caller's own, so a ban would be a weapon. Add +ip to the KEY."
        )
    if scope.ceiling and kinds[0] <= {"ip", "everyone"}:
        problem(
            "CEILING", f"the key {scope.key.text!r} counts no less than the address; a ceiling on it says nothing more."
        )
    if scope.algorithm == CONCURRENT:
        for option, used in (
            ("BAN", scope.ban),
            ("LEASE", scope.lease > 1),
            ("SAFETY_MARGIN", scope.safety_margin),
            ("COUNT_DENIED", scope.count_denied),
            ("TIMEZONE", scope.timezone),
            ("COUNT_IF", scope.count_if),
            ("RESET_IF", scope.reset_if),
        ):
            if used:
                problem(option, "has no meaning for a concurrent scope. Leave it out.")
    if scope.plan and any(
        rate.limit and not limit for rate, limit in zip(scope.plan.rates, scope.plan.limits, strict=True)
    ):
        problem("SAFETY_MARGIN", f"{scope.safety_margin} leaves nothing of the limit. Write less, or raise the rate.")
    if scope.timezone and scope.rates and not any(rate.calendar for rate in scope.rates):
        problem("TIMEZONE", "no rate of this scope is by day, week or month. Leave it out.")
    if scope.lease > 1:
        if scope.algorithm != FIXED:
            problem("LEASE", "only fixed windows can be leased.")
        if scope.count_if or scope.reset_if or scope.ban or scope.count_denied or scope.mode == "shadow":
            problem(
                "LEASE", "a leased hit cannot be given back: no COUNT_IF, RESET_IF, BAN, COUNT_DENIED or shadow mode."
            )
        if scope.rates and any(rate.limit and scope.lease * 10 > rate.limit for rate in scope.rates):
            problem("LEASE", f"{scope.lease} is more than a tenth of the limit. Lease less, or leave it out.")
    return found


# ------------------------------------------------------------------------------------------------------------ presets


def is_failure(request: Any, response: Any) -> bool:
    """COUNT_IF of the login preset: everything but a success. Django's own login views redirect after one."""
    return not is_success(request, response)


def is_success(request: Any, response: Any) -> bool:
    """Whether a login succeeded: a redirect, or 2xx for an API. A form shown again has status 200 and HTML."""
    if 300 <= response.status_code < 400:
        return True
    kind = str(response.headers.get("Content-Type", ""))
    return 200 <= response.status_code < 300 and not kind.startswith("text/html")


PRESETS = ("login",)


def _preset(
    name: str, options: Mapping[str, Any], defaults: Defaults, path: str, origin: str, problems: list[Problem]
) -> tuple[Scope, ...]:
    try:
        one_of(*PRESETS)(options["PRESET"])
    except ValueError as error:
        problems.append(Problem(f'{path}["PRESET"]', str(error)))
        return ()
    own = ("RATE", "KEY", "CEILING", "ALGORITHM", "TIMEZONE", "LEASE")
    problems.extend(
        Problem(f'{path}["{option}"]', "the preset sets it. Write a scope of your own to change it.")
        for option in own
        if option in options
    )
    common: dict[str, Any] = {
        "METHODS": ["POST"],
        "COUNT_IF": is_failure,
        "ON_ERROR": "local",
        "QUIET": True,
        **{option: value for option, value in options.items() if option not in (*own, "PRESET", "BAN")},
    }
    ban = options.get("BAN", {"AFTER": 3, "FOR": "30m", "GROWTH": 2, "MAX": "1d"})
    # OWASP, Authentication Cheat Sheet ("Account Lockout") and Bot Management: accounts and addresses are limited
    # independently. Anybody can fail in somebody else's name, so the hard limit on an account is for each network apart,
    # and four networks have to fail without end to keep its owner out, not one. Both are buckets: their wait is short and
    # decays, where a window's lasts until its end.
    by_name = {"ALGORITHM": "bucket", "ON_MISSING": "deny"}
    members: dict[str, dict[str, Any]] = {
        "account": {"RATE": "5/15m", "KEY": "field:username+ip/48", **by_name},
        "name": {"RATE": "20/15m", "KEY": "field:username", **by_name},
        "ip64": {"RATE": "20/15m", "KEY": "ip/64", "BAN": ban},
        "ip56": {"RATE": "60/15m", "KEY": "ip/56"},
        "ip48": {"RATE": "200/15m", "KEY": "ip/48"},
    }
    found = []
    for member, rest in members.items():
        given = {**rest, **common}
        if "field:" not in rest["KEY"]:  # a success of an account of one's own must not clear one's address
            given.pop("RESET_IF", None)
        parsed = _parse_one(f"{name}.{member}", given, defaults, path, origin, problems)
        if parsed is not None:
            found.append(replace(parsed, family=name))
    return tuple(found)


def digest_name(text: str) -> str:
    """A scope name made of any text: lower-cased, other characters as ``-``, cut to 64 with a digest."""
    name = re.sub(r"[^a-z0-9_.-]+", "-", text.lower()).strip("-.") or "view"
    if not name[0].isalpha():
        name = f"v-{name}"
    if len(name) <= 64:
        return name
    return f"{name[-50:].lstrip('-._0123456789')}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def changed(scope: Scope) -> dict[str, Any]:
    """The fields of a scope that differ from the defaults, for people."""
    plain = Scope(name=scope.name)
    return {
        one.name: getattr(scope, one.name)
        for one in fields(Scope)
        if one.init and getattr(scope, one.name) != getattr(plain, one.name)
    }
