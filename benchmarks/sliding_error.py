"""``python -m benchmarks.sliding_error``: what the algorithms let through, next to an exact log of every hit.

The decisions are those of ``ratelimit_kv.algorithms``, the clock is the test's. Nothing is timed, and the same table
comes out each time. One caller, 100 hits a minute allowed, twenty minutes of traffic for each row.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ratelimit_kv.algorithms import BUCKET, FIXED, MICROSECOND, SLIDING, Counter, transact

LIMIT = 100
PERIOD = 60 * MICROSECOND
WINDOWS = 20
START = 1_700_000_040 * MICROSECOND
"""A multiple of the period."""


def steady(share: float) -> Callable[[], Iterator[int]]:
    """A steady rate, as a share of the limit."""

    def times() -> Iterator[int]:
        count = int(LIMIT * WINDOWS * share)
        return (START + number * PERIOD * WINDOWS // count for number in range(count))

    return times


def chance(share: float) -> Callable[[], Iterator[int]]:
    """Requests that know nothing of each other (Poisson), at a mean rate."""

    def times() -> Iterator[int]:
        dice, at = random.Random(1), 0.0
        while at < WINDOWS:
            at += dice.expovariate(LIMIT * share)
            yield START + int(at * PERIOD)

    return times


def bursts() -> Iterator[int]:
    """Twice the limit within a second, every 45 seconds."""
    return (
        START + burst * 45 * MICROSECOND + number * MICROSECOND // (2 * LIMIT)
        for burst in range(WINDOWS * 4 // 3)
        for number in range(2 * LIMIT)
    )


def around_the_turn() -> Iterator[int]:
    """The limit in the last second of a window, and the limit again in the first second of the next; then a rest."""
    for window in range(1, WINDOWS, 3):
        turn = START + window * PERIOD
        for number in range(LIMIT):
            yield turn - MICROSECOND + number * MICROSECOND // LIMIT
        for number in range(LIMIT):
            yield turn + number * MICROSECOND // LIMIT


def late_then_patient() -> Iterator[int]:
    """The limit in the last second of a window, then ten a second: who knows the arithmetic, and when windows turn."""
    for window in range(1, WINDOWS, 3):
        turn = START + window * PERIOD
        for number in range(LIMIT):
            yield turn - MICROSECOND + number * MICROSECOND // LIMIT
        for number in range(600):
            yield turn + number * MICROSECOND // 10


TRAFFIC: dict[str, Callable[[], Iterator[int]]] = {
    "steady, 0.9 of the limit": steady(0.9),
    "steady, 1.1 of the limit": steady(1.1),
    "steady, 10 × the limit": steady(10),
    "by chance, 0.9 of the limit": chance(0.9),
    "by chance, 1.5 × the limit": chance(1.5),
    "2 × the limit in 1 s, every 45 s": bursts,
    "two bursts around a turn": around_the_turn,
    "a burst before a turn, then 10/s": late_then_patient,
}


def passes(kind: str) -> Callable[[int], tuple[bool, int]]:
    """A limiter of one caller: time -> (allowed, what it believed to be used before)."""
    states: dict[int, Any] = {}

    def ask(now: int) -> tuple[bool, int]:
        window = 0 if kind == BUCKET else now // PERIOD
        counter = Counter("key", kind, LIMIT, 1, PERIOD, (window + 1) * PERIOD, 60)
        state: Any = states.get(window)
        if kind == SLIDING:
            state = (state, states.get(window - 1, 0))
        [verdict], writes = transact([counter], [state], now)
        if writes:
            states[window] = writes[0][0] if kind == SLIDING else writes[0]
        return verdict.allowed, verdict.used - verdict.charged

    return ask


def most_within(times: list[int], length: int) -> float:
    """The most hits in any stretch of time of this length, in limits."""
    return max((bisect_right(times, at + length - 1) - first for first, at in enumerate(times)), default=0) / LIMIT


class Measured(NamedTuple):
    """What a limiter did with some traffic."""

    admitted: int
    in_a_period: float
    in_two_seconds: float
    errors: list[float]
    """Of what it believed to be used, against a log of what it admitted in the last minute, in percent of the limit."""


def measure(times: list[int], kind: str) -> Measured:
    """Let a limiter judge the traffic, and keep an exact log of what it admits."""
    ask = passes(kind)
    admitted: list[int] = []
    errors: list[float] = []
    for now in times:
        in_log = len(admitted) - bisect_right(admitted, now - PERIOD)
        allowed, used = ask(now)
        errors.append(100 * (used - in_log) / LIMIT)
        if allowed:
            admitted.append(now)
    return Measured(len(admitted), most_within(admitted, PERIOD), most_within(admitted, 2 * MICROSECOND), errors)


def logged(times: list[int]) -> int:
    """What an exact log admits of this traffic."""
    admitted: list[int] = []
    for now in times:
        if len(admitted) - bisect_right(admitted, now - PERIOD) < LIMIT:
            admitted.append(now)
    return len(admitted)


HEAD = (
    "twenty minutes at 100 a minute",
    "hits",
    "an exact log admits",
    "`fixed`",
    "`sliding`",
    "`bucket`",
    "most in any 2 seconds",
    "most in any minute",
    "`sliding`: mean error, lowest, highest",
)


def table() -> str:
    """The table in README, as Markdown. Triples are fixed, sliding, bucket, in limits; errors are percent of the limit."""
    lines = [f"| {' | '.join(HEAD)} |", f"|---{'|--:' * (len(HEAD) - 1)}|"]
    for name, make in TRAFFIC.items():
        times = list(make())
        three = [measure(times, kind) for kind in (FIXED, SLIDING, BUCKET)]
        errors = three[1].errors
        mean = sum(map(abs, errors)) / len(errors)
        cells = [
            name,
            str(len(times)),
            str(logged(times)),
            *(str(one.admitted) for one in three),
            " · ".join(f"{one.in_two_seconds:.2f}" for one in three),
            " · ".join(f"{one.in_a_period:.2f}" for one in three),
            f"{mean:.1f} %, {min(errors):+.0f} %, {max(errors):+.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
