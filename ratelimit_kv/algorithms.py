"""What a counter's value means: pure arithmetic on (counter, state, now), the same for every store.

Times are integers in microseconds since the epoch, below 2**53 until the year 2255, so that a Redis script,
whose only number is a double, computes the same. A *state* is what a store holds under a key, parsed:

=============== ==== ================================= ==================================================
algorithm       kind state                             allowed when
=============== ==== ================================= ==================================================
fixed window    f    count                             count + cost <= limit
sliding window  s    (count, count of window before)   count + cost + before * share left <= limit
bucket (GCRA)   b    time when it is full again        max(state, now) + cost * interval - now <= capacity
concurrent      c    expiries of those in flight       those in the future + cost <= limit
ban             x    (level, strikes, until, mark)     until <= now
=============== ==== ================================= ==================================================

``None`` is a key that is not there; an ``Unreadable`` is a value that somebody else wrote.
The sliding window is the two-counter approximation known from Cloudflare's "How we built rate limiting
capable of scaling to millions of domains"; the bucket is the Generic Cell Rate Algorithm of ITU-T I.371 in
its virtual scheduling form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .decisions import Reason

__all__ = [
    "BAN",
    "BUCKET",
    "CONCURRENT",
    "COUNT_DENIED",
    "DENY_ON_ERROR",
    "EXISTING",
    "FIXED",
    "FORCE",
    "MAX_COUNT",
    "MICROSECOND",
    "SLIDING",
    "Counter",
    "Outcome",
    "Unreadable",
    "Verdict",
    "dump",
    "interval",
    "load",
    "observe",
    "plain",
    "transact",
]

MAX_COUNT = 2**53 - 1
"""The largest count: the largest integer that JSON and Lua keep exact."""
MICROSECOND = 1_000_000
"""Microseconds in a second."""

FIXED, SLIDING, BUCKET, CONCURRENT, BAN = "f", "s", "b", "c", "x"

COUNT_DENIED = 1
"""Flag: charge the counter also when its own scope denies."""
DENY_ON_ERROR = 2
"""Flag: when the value cannot be read, the group is denied (``ON_ERROR: "deny"``)."""
FORCE = 4
"""Flag: charge whatever the limit says (charge, settle, refund, release)."""
EXISTING = 8
"""Flag: charge only a key that is there (refund, release)."""


class Counter(NamedTuple):
    """One (scope, rate, identity, window) and what a hit wants of it."""

    key: str
    """Key in the store, without the cache's own prefix."""
    kind: str
    """One of FIXED, SLIDING, BUCKET, CONCURRENT, BAN."""
    limit: int
    """Hits a window; for BAN the denied windows after which it falls."""
    cost: int
    """What to add: from 0, negative only with FORCE and EXISTING."""
    period: int
    """Microseconds: length of the window; CONCURRENT: how long one in flight holds; BAN: the first ban."""
    end: int
    """Microseconds since the epoch: end of the window; CONCURRENT: when the one taken now expires."""
    ttl: int
    """Whole seconds after which the store may forget a key written now."""
    previous: str = ""
    """SLIDING: key of the window before."""
    group: int = 0
    """Counters of one group are charged together or not at all."""
    flags: int = 0
    """Sum of COUNT_DENIED, DENY_ON_ERROR, FORCE, EXISTING."""
    scope: int = 0
    """Number of the scope in this hit: ties a ban to the rates that it watches."""
    growth: float = 1.0
    """BAN: factor from one ban to the next, from 1."""
    maximum: int = 0
    """BAN: microseconds that no ban exceeds, and after which a quiet caller is forgiven."""


class Unreadable(NamedTuple):
    """A value under our key that is not ours, or that the store refused to give."""

    cause: str
    """What is wrong, without the value itself: it may be anybody's."""


class Verdict(NamedTuple):
    """What a hit did to one counter."""

    allowed: bool
    """Whether this counter alone lets the hit through."""
    charged: bool
    """Whether the cost was added."""
    used: int
    """Count after the hit."""
    remaining: int
    """Hits left after the hit, from 0."""
    reset_after: int
    """Microseconds until all of the limit is there again."""
    retry_after: int | None
    """Microseconds until the same hit can pass: 0 when allowed, None when no wait helps."""
    reason: Reason
    """WITHIN, OVER_LIMIT, IMPOSSIBLE, BANNED or STORE_ERROR."""
    cause: str = ""
    """With STORE_ERROR: what was wrong with the value."""


class Outcome(NamedTuple):
    """What to answer and what to write."""

    verdicts: list[Verdict]
    """One for each counter, in order."""
    writes: dict[int, Any]
    """New state by position of the counter. Nothing else may be written."""


# ---------------------------------------------------------------------------------------- values in the store


def load(counter: Counter, value: Any, before: Any = None) -> Any:
    """The state in a stored value (an int, ASCII digits, or text that :func:`dump` made), or an Unreadable.

    A value that the store itself could not read is passed in as the Unreadable that comes out.
    """
    kind = counter.kind
    if kind == SLIDING:
        now, earlier = _count(value), _count(before)
        if type(now) is Unreadable:
            return now
        if type(earlier) is Unreadable:
            return earlier
        return None if now is None and earlier is None else (now, earlier or 0)
    if kind in (FIXED, BUCKET):
        return _count(value)
    if value is None or type(value) is Unreadable:
        return value
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    if type(value) is not str:
        return Unreadable(f"{type(value).__name__} instead of text")
    numbers = tuple(map(_integer, value.split(","))) if len(value) <= 65536 else (None,)
    if None in numbers:
        return Unreadable("text that is not ours")
    if kind == BAN and len(numbers) != 4:
        return Unreadable("text that is not a ban")
    return numbers


def _count(value: Any) -> Any:
    if value is None:
        return None
    kind = type(value)
    if kind is Unreadable:
        return value
    if kind is int:
        return value if 0 <= value <= MAX_COUNT else Unreadable("an integer out of range")
    if kind is bytes or kind is str:
        number = _integer(value)
        return Unreadable("text instead of an integer") if number is None else number
    return Unreadable(f"{kind.__name__} instead of an integer")


def _integer(text: str | bytes) -> int | None:
    """The integer in digits as we write them: no zero in front, with which Redis and memcached would not count."""
    if len(text) > 16 or not (text.isdigit() and text.isascii()) or (text[0] in (48, "0") and len(text) > 1):
        return None
    number = int(text)
    return number if number <= MAX_COUNT else None


_number = lru_cache(4096)(_integer)
"""Most counts are small, and met again and again."""


def dump(counter: Counter, state: Any) -> int | str:
    """The value to store for a state: a plain integer for fixed, sliding and bucket, text for the others."""
    kind = counter.kind
    if kind in (FIXED, BUCKET):
        return state  # type: ignore[no-any-return]
    if kind == SLIDING:
        return state[0]  # type: ignore[no-any-return]
    return ",".join(map(str, state))


# ------------------------------------------------------------------------------------------------ one counter


class _Judgement(NamedTuple):
    allowed: bool
    used: int
    """Before the hit."""
    retry_after: int | None
    reason: Reason


def _judge(counter: Counter, state: Any, now: int) -> _Judgement:
    kind = counter.kind
    cost, limit = counter.cost, counter.limit
    if kind == BAN:
        until = _ban(counter, state, now)[2]
        if until > now and not counter.flags & FORCE:
            return _Judgement(False, 0, until - now, Reason.BANNED)
        return _Judgement(True, 0, 0, Reason.WITHIN)
    used = _used(counter, state, now)
    if cost <= 0 or counter.flags & FORCE:
        return _Judgement(True, used, 0, Reason.WITHIN)
    if cost > limit:
        return _Judgement(False, used, None, Reason.IMPOSSIBLE)
    if kind == FIXED:
        if used + cost <= limit:
            return _Judgement(True, used, 0, Reason.WITHIN)
        wait = counter.end - now
    elif kind == SLIDING:
        if _fits(counter, state, now):
            return _Judgement(True, used, 0, Reason.WITHIN)
        wait = _sliding_wait(counter, state, now)
    elif kind == BUCKET:
        wait = _filled(counter, state, now) + cost * interval(counter) - limit * interval(counter)
        if wait <= 0:
            return _Judgement(True, used, 0, Reason.WITHIN)
    else:
        if used + cost <= limit:
            return _Judgement(True, used, 0, Reason.WITHIN)
        wait = MICROSECOND  # nobody knows when one in flight will land
    return _Judgement(False, used, max(wait, 1), Reason.OVER_LIMIT)


def _used(counter: Counter, state: Any, now: int) -> int:
    """How many hits count now, rounded up."""
    if state is None:
        return 0
    kind = counter.kind
    if kind == FIXED:
        return state  # type: ignore[no-any-return]
    if kind == SLIDING:
        count, before = state
        return (count or 0) + math.ceil(float(before) * float(counter.end - now) / float(counter.period))
    if kind == BUCKET:
        step = interval(counter)
        return -(-_filled(counter, state, now) // step) if step else 0
    return len(_in_flight(counter, state, now))


def interval(counter: Counter) -> int:
    """Microseconds in which one hit comes back into a bucket.

    Rounded up, so that no more than the limit ever passes: a bucket refills by at most one hit a microsecond.
    """
    return -(-counter.period // counter.limit) if counter.limit else 0


def _filled(counter: Counter, state: int | None, now: int) -> int:
    """How full the bucket is, in microseconds of refill."""
    if state is None or state <= now:
        return 0
    capacity = interval(counter) * counter.limit
    filled = state - now
    # Debt from a charge may reach one capacity more. Only a clock that stepped can have written more.
    return filled if filled <= 2 * capacity else capacity


def _fits(counter: Counter, state: tuple[int | None, int] | None, now: int) -> bool:
    count, before = state or (0, 0)
    room = counter.limit - (count or 0) - counter.cost
    # Doubles on both sides, as in the script, so that both round alike.
    return room >= 0 and float(before) * float(counter.end - now) <= float(room) * float(counter.period)


def _sliding_wait(counter: Counter, state: tuple[int | None, int] | None, now: int) -> int:
    count, before = state or (0, 0)
    rest = counter.end - now
    room = counter.limit - (count or 0) - counter.cost
    if room >= 0:  # the weight of the window before has to shrink
        return _shrink(before, room, counter.period, rest)
    # Even without it there is no room: in the next window this one is the window before.
    return rest + _shrink(count or 0, counter.limit - counter.cost, counter.period, counter.period)


def _shrink(before: int, room: int, period: int, rest: int) -> int:
    """Microseconds until ``before * rest <= room * period`` in doubles."""
    left = min(rest, room * period // before) if before else rest
    while left > 0 and float(before) * float(left) > float(room) * float(period):
        left -= 1
    return rest - left


def _in_flight(counter: Counter, state: tuple[int, ...] | None, now: int) -> tuple[int, ...]:
    # An expiry further ahead than two holds comes from a clock that stepped: its owner is never seen again.
    return tuple(at for at in state or () if now < at <= now + 2 * counter.period)


def _ban(counter: Counter, state: tuple[int, int, int, int] | None, now: int) -> tuple[int, int, int, int]:
    """(level, strikes, until, mark), forgiven after ``maximum`` of quiet, clamped to what a ban can be."""
    if state is None or now > max(state[2], state[3]) + counter.maximum:
        return (0, 0, 0, 0)
    level, strikes, until, mark = state
    return (level, strikes, min(until, now + counter.maximum), mark)


def _strike(counter: Counter, state: Any, now: int, window_end: int) -> tuple[int, int, int, int] | None:
    """The ban's state after a denied window, None when this window has been counted."""
    level, strikes, until, mark = _ban(counter, state, now)
    if now < mark <= window_end or until > now:
        return None
    strikes += 1
    if strikes >= counter.limit:
        level, strikes = level + 1, 0
        # Grown step by step in doubles, as in the script; the cap ends it long before the level is large.
        length = float(counter.period)
        for _ in range(level - 1):
            length *= counter.growth
            if length >= counter.maximum or counter.growth == 1.0:
                break
        until = now + min(int(length), counter.maximum)
    return (level, strikes, until, window_end)


def _charge(counter: Counter, state: Any, now: int) -> Any:
    """The state with the cost in it, None when nothing is to be written."""
    cost, kind = counter.cost, counter.kind
    if not cost or (state is None and counter.flags & EXISTING):
        return None
    if kind == FIXED:
        return min(max((state or 0) + cost, 0), MAX_COUNT)
    if kind == SLIDING:
        count, before = state or (None, 0)
        if count is None and counter.flags & EXISTING:
            return None
        return (min(max((count or 0) + cost, 0), MAX_COUNT), before)
    if kind == BUCKET:
        step = interval(counter)
        full = now + _filled(counter, state, now) + cost * step
        return min(max(full, now), now + 2 * step * counter.limit)
    if kind == CONCURRENT:
        flying = list(_in_flight(counter, state, now))
        if cost > 0:
            return (*flying, *(counter.end,) * cost)
        for _ in range(-cost):
            if counter.end not in flying:
                break
            flying.remove(counter.end)
        return tuple(flying) or (0,)
    return None


def _reset_after(counter: Counter, state: Any, now: int) -> int:
    kind = counter.kind
    if kind == FIXED:
        return counter.end - now
    if kind == SLIDING:
        return counter.end - now + (counter.period if state and state[0] else 0)
    if kind == BUCKET:
        return _filled(counter, state, now)
    if kind == CONCURRENT:
        return MICROSECOND if _in_flight(counter, state, now) else 0
    return max(_ban(counter, state, now)[2] - now, 0)


def _window_end(counter: Counter, now: int) -> int:
    """Until when further denials belong to the same denied window."""
    return counter.end if counter.kind in (FIXED, SLIDING) else now + counter.period


# ------------------------------------------------------------------------------------------- all of a request


def transact(counters: Sequence[Counter], states: Sequence[Any], now: int) -> Outcome:
    """Check all, then charge all or none: what every store does under its lock, transaction or script.

    A group is charged when each of its counters allows the hit. Independent of the order of the counters.
    """
    judged: list[_Judgement | None] = []
    denied_groups: set[int] = set()
    denied_scopes: dict[int, int] = {}  # scope -> end of its denied window
    for counter, state in zip(counters, states, strict=True):
        if type(state) is Unreadable:
            judged.append(None)
            if counter.flags & DENY_ON_ERROR:
                denied_groups.add(counter.group)
            continue
        first = _judge(counter, state, now)
        judged.append(first)
        if not first.allowed:
            denied_groups.add(counter.group)
            if first.reason is Reason.OVER_LIMIT:
                end = _window_end(counter, now)
                denied_scopes[counter.scope] = max(denied_scopes.get(counter.scope, 0), end)
            else:
                denied_scopes.setdefault(counter.scope, 0)
    verdicts: list[Verdict] = []
    writes: dict[int, Any] = {}
    for position, (counter, state, judgement) in enumerate(zip(counters, states, judged, strict=True)):
        if judgement is None:
            verdicts.append(Verdict(False, False, 0, 0, 0, None, Reason.STORE_ERROR, state.cause))
            continue
        if counter.kind == BAN:
            struck = None
            if judgement.allowed and denied_scopes.get(counter.scope):
                struck = _strike(counter, state, now, denied_scopes[counter.scope])
            if struck is not None:
                writes[position] = state = struck
                judgement = _judge(counter, state, now)
            elif state is not None and state[2] > now + counter.maximum:
                writes[position] = _ban(counter, state, now)  # heal, or it would never end before that clock comes
            reset_after = _reset_after(counter, state, now)
            verdicts.append(
                Verdict(judgement.allowed, False, 0, 0, reset_after, judgement.retry_after, judgement.reason)
            )
            continue
        charged = counter.cost != 0 and (
            counter.group not in denied_groups or bool(counter.flags & COUNT_DENIED and counter.scope in denied_scopes)
        )
        new = _charge(counter, state, now) if charged else None
        if new is None:
            charged = False
            capacity = interval(counter) * counter.limit
            if counter.kind == BUCKET and state is not None and state - now > 2 * capacity:
                # Healed, or the clamp would last until that clock is right.
                writes[position] = now + _filled(counter, state, now)
        else:
            writes[position] = state = new
        used = _used(counter, state, now)
        verdicts.append(
            Verdict(
                judgement.allowed,
                charged,
                used,
                max(counter.limit - used, 0),
                _reset_after(counter, state, now),
                judgement.retry_after,
                judgement.reason,
            )
        )
    return Outcome(verdicts, writes)


def plain(counters: Sequence[Counter], values: Sequence[Any], now: int) -> list[Verdict] | None:
    """What :func:`transact` answers to the hit that almost every request is, in short: fixed windows, room in each.

    None for every other hit, and for values that are not counts: the long way has the answer. All are charged; the
    new counts are the verdicts' ``used``.
    """
    verdicts = []
    whole = counters[0][8]
    for (_, kind, limit, cost, _, end, _, _, group, flags, _, _, _), value in zip(counters, values, strict=True):
        if kind != FIXED or flags & ~DENY_ON_ERROR or group != whole:
            return None
        if value is None:
            used = cost
        else:
            count = _number(value) if type(value) is bytes and len(value) <= 16 else value
            if type(count) is not int:
                return None
            used = count + cost
        if not 0 < cost <= used <= limit:
            return None
        # As Verdict(...), without a Python frame: this is every hit's way.
        verdicts.append(tuple.__new__(Verdict, (True, True, used, limit - used, end - now, 0, Reason.WITHIN, "")))
    return verdicts


def observe(counters: Sequence[Counter], states: Sequence[Any], now: int) -> list[Verdict]:
    """What :func:`transact` would answer, with nothing charged: a peek."""
    verdicts: list[Verdict] = []
    for counter, state in zip(counters, states, strict=True):
        if type(state) is Unreadable:
            verdicts.append(Verdict(False, False, 0, 0, 0, None, Reason.STORE_ERROR, state.cause))
            continue
        allowed, used, retry_after, reason = _judge(counter, state, now)
        verdicts.append(
            Verdict(
                allowed,
                False,
                used,
                0 if counter.kind == BAN else max(counter.limit - used, 0),
                _reset_after(counter, state, now),
                retry_after,
                reason,
            )
        )
    return verdicts
