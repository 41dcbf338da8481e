"""``python -m benchmarks.simulate``: the tables of docs/scale.md, in Markdown, within a minute.

Two kinds of figures: arithmetic on constants that ``python -m benchmarks`` measures, and simulations that drive this
package's own lease book, with a counter in place of the store. ``--results results.json`` takes the constants from a
run of yours.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.adapters import DJANGO_REDIS, Ours, OursWithHeaders
from benchmarks.report import table
from ratelimit_kv.algorithms import FIXED, Counter
from ratelimit_kv.guard import LeaseBook


@dataclass(frozen=True)
class Constants:
    """What was measured. The defaults are rounded from one full run; the README of benchmarks says how to repeat it."""

    server_us: float = 52.0
    """Processor time of Redis for one allowed request under one limit."""
    server_three_us: float = 69.0
    """The same under three limits, which is still one command."""
    added_us: float = 160.0
    """What one limit, with headers, adds to a request in the web process."""
    identity_bytes: float = 133.0
    """Of Redis, for one counter: its key, a small count, its expiry, its share of the tables."""

    @classmethod
    def of(cls, results: dict[str, Any]) -> Constants:
        """From the results.json of a run."""
        name = OursWithHeaders.name
        return cls(
            server_us=results["server"][Ours.name]["1"],
            server_three_us=results["server"][Ours.name]["3"],
            added_us=results["times"]["backends"][DJANGO_REDIS][name]["allowed"]["added_us"],
            identity_bytes=results["memory"][name]["bytes"],
        )


BUSY = 0.7
"""The part of a core that Redis should be busy at most: beyond, the queue before it grows without bound."""
REMEMBERED = 5
"""Seconds for which a process remembers a denial (REMEMBER_DENIED)."""
PER_CORE = (100, 1_000, 10_000)
PROCESSES = (10, 100, 1_000)


def capacity(microseconds: float) -> float:
    """Requests a second that one core of Redis takes."""
    return BUSY * 1e6 / microseconds


def measured(constants: Constants) -> str:
    """The constants, and what measures them."""
    return table(
        ["constant", "value", "measure of benchmarks/"],
        [
            ["processor time of Redis, one limit", f"{constants.server_us:g} µs", "server"],
            ["the same, three limits in one command", f"{constants.server_three_us:g} µs", "server"],
            ["added to a request, headers on, django-redis", f"{constants.added_us:g} µs", "times"],
            ["memory of one counter", f"{constants.identity_bytes:g} bytes", "memory"],
        ],
    )


# -- arithmetic ---------------------------------------------------------------------------------------------------------


def operations(constants: Constants) -> str:
    """Every request asks the store: how many cores of Redis are full?"""
    rows = []
    for rate in PER_CORE:
        share = rate * constants.added_us / 1e6
        cells = []
        for processes in PROCESSES:
            asked = rate * processes
            cores = math.ceil(asked / capacity(constants.server_us))
            cells.append(f"{asked:,}/s: {cores:,} core{'s' if cores > 1 else ''}")
        rows.append([f"{rate:,}/s", f"{share:.0%}", *cells])
    return table(
        ["requests a core", "of its time in the limiter", *(f"{processes:,} processes" for processes in PROCESSES)],
        rows,
    )


def memory(constants: Constants) -> str:
    """One key a caller and window; a key of the window before lives on for a minute."""
    rows = []
    for power in range(4, 9):
        identities = 10**power
        cells = [_bytes(identities * constants.identity_bytes * (1 + 60 / window)) for window in (60, 3600, 86_400)]
        rows.append([f"10^{power}", *cells])
    return table(["callers in each window", "a minute", "an hour", "a day"], rows)


def _bytes(count: float) -> str:
    thousands = min(int(math.log10(count) // 3), 3)
    return f"{count / 1000**thousands:.3g} {('B', 'kB', 'MB', 'GB')[thousands]}"


# -- skewed callers -------------------------------------------------------------------------------------------------------


def ranks(count: int) -> Iterator[tuple[float, float]]:
    """Callers by rank, those of similar rank together: (rank, how many)."""
    first = 1
    while first <= count:
        last = min(count, max(first, int(first * 1.05)))
        yield (first + last) / 2, last - first + 1
        first = last + 1


def skewed(processes: int, rate: float, callers: int, limit: int, window: int) -> tuple[float, float]:
    """The share of requests that are denied and the share that reaches the store, when the n-th caller is 1/n as busy.

    A process that was told of a denial asks again for that caller when it has forgotten it and meets him next.
    """
    weight = sum(many / rank for rank, many in ranks(callers))
    denied = asked = 0.0
    for rank, many in ranks(callers):
        own = rate / rank / weight  # requests a second of one such caller
        sent = own * window
        passed = min(sent, limit)
        refused = sent - passed
        rest = window - passed / own
        denied += many * refused
        asked += many * (passed + min(refused, processes * rest / (REMEMBERED + processes / own)))
    return denied / (rate * window), asked / (rate * window)


def denials() -> str:
    rows = []
    for processes in PROCESSES:
        for callers in (10**4, 10**6, 10**8):
            denied, asked = skewed(processes, 1_000 * processes, callers, limit=60, window=60)
            rows.append([f"{processes:,}", f"10^{round(math.log10(callers))}", f"{denied:.0%}", f"{asked:.0%}"])
    return table(["processes", "callers", "denied", "reach the store"], rows)


# -- leases -----------------------------------------------------------------------------------------------------------


class Shared:
    """The counter in the store, and how often it was asked."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.asked = 0

    def hit(self, cost: int) -> bool:
        self.asked += 1
        if self.used + cost > self.limit:
            return False
        self.used += cost
        return True


def lease(processes: int, size: int, limit: int, load: float, window: int = 60) -> tuple[float, float]:
    """One counter for everyone: calls to the store a request, and the part of the limit that was admitted."""
    pick = random.Random(1)
    counter = Counter("everyone", FIXED, limit, 1, window * 10**6, window * 10**6, window)
    books = [LeaseBook(processes) for _ in range(processes)]
    forgets = [0.0] * processes  # when each forgets that it was denied
    shared = Shared(limit)
    requests = int(limit * load)
    admitted = 0
    for number in range(requests):
        now = window * number / requests
        process = pick.randrange(processes)
        if now < forgets[process]:
            continue
        book = books[process]
        if size > 1 and book.spend([counter], 1) is not None:
            admitted += 1
            continue
        take = book.size(counter, size) if size > 1 else 1
        if shared.hit(take):
            admitted += 1
            if take > 1:
                book.keep(counter, take - 1, shared.used)
        elif take > 1 and shared.hit(1):  # no room to take ahead, but for this hit
            admitted += 1
        else:
            forgets[process] = now + REMEMBERED
    return shared.asked / requests, admitted / limit


def leases() -> str:
    rows = []
    for processes, limit in ((8, 1_000), (8, 100_000), (100, 100_000), (1_000, 100_000)):
        for load in (0.5, 1, 2, 10):
            plain, _ = lease(processes, 1, limit, load)
            leased, admitted = lease(processes, 20, limit, load)
            rows.append(
                [f"{processes:,}", f"{limit:,}", f"{load:g} ×", f"{plain:.2f}", f"{leased:.3f}", f"{admitted:.1%}"]
            )
    return table(["processes", "limit", "load", "calls, no lease", "calls, lease 20", "admitted of the limit"], rows)


# -- clusters ------------------------------------------------------------------------------------------------------------


def busiest(masters: int, callers: int = 10**6) -> float:
    """The share of the busiest master when callers, the n-th 1/n as busy but capped by his limit, fall into slots."""
    slot_of = random.Random(2)
    loads = [0.0] * masters
    cap = 1e-4  # nobody is admitted more often than this part of all requests; the denied are remembered
    for rank, many in ranks(callers):
        weight = min(1 / rank / math.log(callers), cap)
        if many > 50:
            for master in range(masters):
                loads[master] += many * weight / masters
        else:
            for _ in range(int(many)):
                loads[slot_of.randrange(16_384) * masters // 16_384] += weight
    return max(loads) / sum(loads)


def clusters(constants: Constants) -> str:
    """Requests a second until the busiest core of Redis is full."""
    one = capacity(constants.server_us)
    calls, _ = lease(100, 20, 100_000, 0.5)
    rows = []
    for masters in (1, 3, 6, 12):
        share = busiest(masters)
        callers_only = one / share
        # One server takes all counters in one command. In a cluster everyone's counter is a command of its own, and
        # the core that has it may be the one with the busiest callers too.
        together = capacity(constants.server_three_us) if masters == 1 else one / (share + 1)
        leased = callers_only if masters == 1 else one / (share + calls)
        apart, apart_leased = min(callers_only, one), min(callers_only, one / calls)
        rows.append([masters, *map(_thousands, (callers_only, together, leased, apart, apart_leased))])
    return table(
        [
            "masters",
            "limits per caller only",
            "and one for everyone",
            "that one with LEASE 20",
            "on an alias of its own",
            "both",
        ],
        rows,
    )


def _thousands(rate: float) -> str:
    return f"{rate / 1000:,.0f},000/s" if rate >= 1000 else f"{rate:,.0f}/s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description="The tables of docs/scale.md.")
    parser.add_argument("--results", type=Path, metavar="FILE", help="constants from the results.json of a run")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this file, between its marks")
    options = parser.parse_args(arguments)
    constants = Constants.of(json.loads(options.results.read_text())) if options.results else Constants()
    tables = {
        "constants": measured(constants),
        "operations": operations(constants),
        "memory": memory(constants),
        "denials": denials(),
        "leases": leases(),
        "clusters": clusters(constants),
    }
    if options.write:
        text = options.write.read_text()
        for name, rows in tables.items():
            mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
            text = re.sub(mark, lambda found, rows=rows: f"{found[1]}\n{rows}\n\n{found[2]}", text, flags=re.DOTALL)
        options.write.write_text(text)
    else:
        for name, rows in tables.items():
            sys.stdout.write(f"{name}\n\n{rows}\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
