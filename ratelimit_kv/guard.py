"""What stands between a request and a store in trouble: breaker, local count, memory of denials, and the log's measure.

All of it is state of one process, bounded, and made for time as an argument: ``ticks`` are seconds of a monotonic clock,
``now`` is microseconds since the epoch.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from .algorithms import MICROSECOND, SLIDING, Counter, Verdict, dump, load, transact
from .decisions import Decision, Reason

__all__ = ["Breaker", "DeniedLog", "DeniedMemory", "LeaseBook", "LocalCounters", "Remembered", "Throttle"]

logger = logging.getLogger("ratelimit_kv")

WAITED = 0.05
"""Seconds: a failure that made somebody wait so long opens the breaker by itself, or every request would wait in turn."""
LONGEST_REST = 30.0
"""Seconds: the cap on the breaker's growing interval, unless the setting is larger."""
RECENT = 20
"""Calls among which half may fail before the breaker opens."""
RECENT_SECONDS = 10.0
"""Seconds that those calls may lie back."""
ERROR_INTERVAL = 60.0
"""Seconds between two log records about the same trouble of the same scope."""
DENIED_A_MINUTE = 20
"""Denials of a scope that are logged one by one in a minute; the rest make one summary line."""


class Breaker:
    """Stops asking a store that does not answer, and finds out when it does again.

    Opens after ``failures`` outages in a row, when half of twenty calls in ten seconds failed, or at once after a failure
    that somebody waited for. While open, one caller an interval is let through to probe; the others do not wait. The
    interval starts at ``seconds``, doubles with every failed probe up to a cap, and has jitter, so that processes do not
    probe in step. Safe under threads; in an event loop its locks are held for microseconds only.
    """

    def __init__(self, alias: str, failures: int, seconds: float) -> None:
        self.alias = alias
        self.failures = failures
        self.seconds = seconds
        self.is_open = False
        self.is_troubled = False
        """Whether there has been a failure that an answer should be told after."""
        self._in_a_row = 0
        self._recent: deque[tuple[float, bool]] = deque(maxlen=RECENT)
        self._probe_at = 0.0
        self._rest = seconds
        self._lock = threading.Lock()

    def allows(self, ticks: float) -> bool:
        """Whether the store may be asked now. While open, True makes the caller the probe: it must report back."""
        if not self.is_open:
            return True
        with self._lock:
            # Also due when the clock stepped back: no rest is longer than the cap.
            if self.is_open and not self._probe_at - self._cap * 1.5 <= ticks < self._probe_at:
                self._probe_at = ticks + max(self._rest, 1.0)  # until this probe reports, nobody else goes
                return True
            return not self.is_open

    @property
    def _cap(self) -> float:
        return max(LONGEST_REST, self.seconds)

    def retry_after(self, ticks: float) -> float:
        """Seconds until the next probe: what a 503 tells the client."""
        return max(self._probe_at - ticks, 1.0) if self.is_open else 1.0

    def succeeded(self, ticks: float) -> bool:
        """Report an answer. True when it closed the breaker."""
        if not self.is_troubled:
            return False
        with self._lock:
            self._in_a_row = 0
            if self.is_open:
                self.is_open = self.is_troubled = False
                self._rest = self.seconds
                self._recent.clear()
                return True
            self._recent.append((ticks, True))
            if all(ok for _, ok in self._recent):
                self._recent.clear()
                self.is_troubled = False
            return False

    def failed(self, ticks: float, waited: float) -> bool:
        """Report an outage that took ``waited`` seconds. True when it opened the breaker."""
        with self._lock:
            self.is_troubled = True
            self._in_a_row += 1
            self._recent.append((ticks, False))
            if self.is_open:
                self._rest = min(self._rest * 2, self._cap)
                self._probe_at = ticks + self._rest * random.uniform(0.75, 1.25)
                return False
            lately = [ok for at, ok in self._recent if ticks - at <= RECENT_SECONDS]
            half = len(lately) >= RECENT and lately.count(False) * 2 >= len(lately)
            if self._in_a_row < self.failures and waited < WAITED and not half:
                return False
            self.is_open = True
            self._rest = self.seconds
            self._probe_at = ticks + self._rest * random.uniform(0.75, 1.25)
            return True


class LocalCounters:
    """This process's own count while the store is away (``ON_ERROR: "local"``). Bounded: the oldest go first."""

    def __init__(self, entries: int = 10_000) -> None:
        self._values: OrderedDict[str, Any] = OrderedDict()
        self._entries = entries
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        """As ``Store.hit``, in memory."""
        values = self._values
        with self._lock:
            states = [
                load(
                    counter, values.get(counter.key), values.get(counter.previous) if counter.kind == SLIDING else None
                )
                for counter in counters
            ]
            verdicts, writes = transact(counters, states, now)
            for position, state in writes.items():
                key = counters[position].key
                values[key] = dump(counters[position], state)
                values.move_to_end(key)
                if len(values) > self._entries:
                    values.popitem(last=False)
        return verdicts

    def forget(self) -> bool:
        """Start from nothing. True when there was something."""
        if not self._values:
            return False
        with self._lock:
            self._values.clear()
        return True


class LeaseBook:
    """Hits that this process took ahead of time and has not spent (``LEASE``). Bounded: the oldest go first.

    Whatever is in here is already charged in the store, so that spending it admits nobody beyond the limit, and what is
    never spent ends with its window, whose number is in the key.
    """

    def __init__(self, processes: int | None, entries: int = 10_000) -> None:
        self._share = 2 * (processes or 8)
        self._entries = entries
        self._left: OrderedDict[str, tuple[int, int]] = OrderedDict()  # key -> hits left, count in the store when taken
        self._lock = threading.Lock()

    def size(self, counter: Counter, lease: int) -> int:
        """How many hits to take: up to ``lease``, less when the limit is near, at least the cost of this one."""
        known = self._left.get(counter.key)
        room = counter.limit if known is None else counter.limit - known[1]
        return max(counter.cost, min(lease, room // self._share))

    def spend(self, counters: Sequence[Counter], cost: int) -> list[Verdict] | None:
        """Spend from what is there. None when it is not enough: then the store has to be asked."""
        key = counters[0].key
        with self._lock:
            left, used = self._left.get(key, (0, 0))
            if left < cost:
                return None
            self._left[key] = (left - cost, used)
        spent = used - left + cost
        return [Verdict(True, True, spent, max(one.limit - spent, 0), one.end, 0, Reason.WITHIN) for one in counters]

    def keep(self, counter: Counter, left: int, used: int) -> None:
        """Put hits there that were charged and not spent. ``used`` is the count in the store, 0 when it is unknown."""
        with self._lock:
            before, known = self._left.pop(counter.key, (0, 0))
            self._left[counter.key] = (before + left, max(used, known))
            if len(self._left) > self._entries:
                self._left.popitem(last=False)


class Remembered(NamedTuple):
    """A denial that need not be asked for again."""

    token: int
    """Of the plan that was denied: a changed limit is another plan."""
    cost: int
    """The smallest cost that was denied; a cheaper hit still asks."""
    forget_at: float
    """Ticks."""
    since: float
    """Ticks; a clock before it has stepped."""
    until: int
    """Now, in microseconds, from which the hit can pass."""
    before: int
    """Now, in microseconds, when it was denied, less a second; a clock before it has stepped back."""
    reset_at: int
    """Now, in microseconds, at which all of the limit is there again."""
    decision: Decision
    """What was answered."""
    refusal: list[Any]
    """A place for the doors to keep what they made of it."""

    def holds(self, now: int, ticks: float) -> bool:
        """Whether it is still true. A wall clock that stepped back must not stretch the wait that a client is told."""
        return self.before <= now < self.until and self.since <= ticks < self.forget_at


class DeniedMemory:
    """Callers that were denied a moment ago: they cost no store call. O(1) everywhere, the oldest go first."""

    def __init__(self, entries: int, seconds: float) -> None:
        self._entries = entries
        self._seconds = seconds
        self.known: OrderedDict[tuple[str, str], Remembered] = OrderedDict()
        """By scope and identity, whatever it is worth by now. Only to be read."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.known)

    def find(
        self, scope: str, identity: str, token: int, cost: int, costliest: int, now: int, ticks: float
    ) -> Remembered | None:
        """The denial that answers this hit, None when the store has to be asked.

        It answers for the cost that was denied, and for costlier hits up to ``costliest``.
        """
        known = self.known.get((scope, identity))
        if known is None or known.token != token or not (cost == known.cost or known.cost < cost <= costliest):
            return None
        return known if known.holds(now, ticks) else None

    def remember(self, decision: Decision, token: int, now: int, ticks: float) -> None:
        """Remember a denial for as long as it lasts, at most ``seconds``."""
        wait = decision.retry_after
        if not wait:
            return
        key = (decision.scope, decision.identity)
        with self._lock:
            before = self.known.get(key)
            if (
                before is not None
                and before.cost < decision.cost
                and self.find(*key, token, before.cost, 0, now, ticks) is before
            ):
                return  # a costlier hit has to wait longer than the one that is remembered
            self.known.pop(key, None)
            self.known[key] = Remembered(
                token,
                decision.cost,
                ticks + min(wait, self._seconds),
                ticks,
                now + int(wait * MICROSECOND),
                now - MICROSECOND,
                now + int(decision.reset_after * MICROSECOND),
                decision,
                [],
            )
            if len(self.known) > self._entries:
                self.known.popitem(last=False)

    def forget(self, scope: str, identity: str) -> None:
        """One caller of one scope: something was given back or reset."""
        if self.known:
            with self._lock:
                self.known.pop((scope, identity), None)

    def clear(self) -> None:
        """Everybody."""
        with self._lock:
            self.known.clear()


class Throttle:
    """At most one of each kind of record an interval. Bounded by the number of scopes and aliases."""

    def __init__(self, seconds: float = ERROR_INTERVAL) -> None:
        self._seconds = seconds
        self._last: dict[Any, float] = {}
        self._lock = threading.Lock()

    def due(self, what: Any, ticks: float) -> bool:
        """Whether it is time for another record of this kind; the answer True starts a new interval."""
        with self._lock:
            last = self._last.get(what)
            if last is not None and 0 <= ticks - last < self._seconds:
                return False
            self._last[what] = ticks
            return True


class DeniedLog:
    """Logs transitions, not events: a caller once a window at WARNING, then DEBUG; a scope at most twenty a minute."""

    def __init__(self, entries: int = 10_000) -> None:
        self._until: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._minute: dict[str, tuple[float, int]] = {}
        self._entries = entries
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._until)

    def record(self, decision: Decision, now: int, ticks: float) -> None:
        """Log a denial, at the level that it deserves."""
        key = (decision.scope, decision.identity)
        level, extra = logging.WARNING, ""
        with self._lock:
            until = self._until.get(key, 0)
            if now < until <= now + int(decision.reset_after * MICROSECOND) + MICROSECOND:
                level = logging.DEBUG
            else:
                self._until.pop(key, None)
                self._until[key] = now + int(max(decision.retry_after or 0, decision.reset_after) * MICROSECOND)
                if len(self._until) > self._entries:
                    self._until.popitem(last=False)
                start, count = self._minute.get(decision.scope, (ticks, 0))
                if not 0 <= ticks - start < 60:
                    start, count = ticks, 0
                count += 1
                self._minute[decision.scope] = (start, count)
                if count > DENIED_A_MINUTE:
                    level = logging.DEBUG
                    if count == DENIED_A_MINUTE + 1:
                        extra = f"more callers of scope {decision.scope} are being denied; the rest of this minute is not logged"
        if extra:
            logger.warning("%s", extra, extra={"scope": decision.scope})
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "denied: scope %s, identity %s, %s, limit %s in %s s, retry after %s s",
                decision.scope,
                decision.identity,
                decision.reason,
                decision.limit,
                decision.window,
                None if decision.retry_after is None else round(decision.retry_after, 3),
                extra={"scope": decision.scope, "identity": decision.identity, "reason": str(decision.reason)},
            )
