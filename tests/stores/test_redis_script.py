"""hit.lua against its twin: the script on Redis and on Valkey, the function on a dict, and LocMemStore.

The same hits must give the same verdicts and leave the same values behind, everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.core.cache import caches
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from ratelimit_kv.algorithms import (
    BAN,
    BUCKET,
    CONCURRENT,
    COUNT_DENIED,
    DENY_ON_ERROR,
    EXISTING,
    FIXED,
    FORCE,
    MAX_COUNT,
    SLIDING,
    Counter,
    Unreadable,
    Verdict,
    dump,
    load,
    observe,
    transact,
)
from ratelimit_kv.stores import get_store
from ratelimit_kv.stores.base import Store
from tests.caches import cache_settings
from tests.stores.bench import SECOND

NOON = 1_800_000_000 * SECOND
AGES = 10**9
"""Seconds: no key expires, which is tested elsewhere. Some stores would by the time here, others by the real one."""

FOREIGN = [
    "",
    "0",
    "00",
    "007",
    "12",
    "-3",
    "+3",
    " 3",
    "3 ",
    "1.5",
    "1e3",
    "0x10",
    "inf",
    "nan",
    "twelve",
    "\u0663",
    "1,2",
    "1,2,3,4",
    "1,,2,3",
    "1,2,3,4,",
    ",",
    "0,01,0,0",
    f"1,0,{NOON + 5 * SECOND},0",
    f"3,1,{NOON + 10**9 * SECOND},{NOON + 10**9 * SECOND}",
    f"{NOON + 5 * SECOND},{NOON + 10**9 * SECOND}",
    str(NOON + 10**9 * SECOND),
    str(MAX_COUNT),
    str(MAX_COUNT + 1),
    "9" * 16,
    "9" * 17,
    "1," * 40_000 + "1",
]
"""What somebody else may have written under our keys, or ourselves under another clock."""


@st.composite
def counters(draw: st.DrawFn, now: int) -> Counter:
    kind = draw(st.sampled_from(FIXED + SLIDING + BUCKET + CONCURRENT + BAN))
    length = draw(st.sampled_from([1, 3, 60, 86400])) * SECOND + draw(st.sampled_from([0, 0, 1, 999_999]))
    number = now // length
    name = f"rl:{draw(st.sampled_from('ab'))}:{kind}{length}:{{user:1}}"
    fields: dict[str, Any] = {"ttl": AGES}
    if kind in (FIXED, SLIDING):
        fields |= {"key": f"{name}:{number}", "end": (number + 1) * length}
        if kind == SLIDING:
            fields["previous"] = f"{name}:{number - 1}"
    else:
        fields |= {"key": name, "end": now + length}
    fields["limit"] = draw(st.one_of(st.integers(0, 7), st.sampled_from([100, 10**6 + 7, MAX_COUNT])))
    if kind in (BUCKET, CONCURRENT):
        fields["limit"] = min(fields["limit"], 10**6 + 7)
    if kind == BAN:
        fields["limit"] = draw(st.integers(1, 3))
        fields["growth"] = draw(st.sampled_from([1.0, 1.5, 2.0, 1.1, 10.0]))
        fields["maximum"] = length * draw(st.sampled_from([1, 4, 1000]))
        fields["flags"] = draw(st.sampled_from([0, 0, 0, FORCE]))
        fields["cost"] = 0
    elif draw(st.integers(0, 9)) == 0:
        fields["cost"] = -draw(st.integers(1, 9))
        fields["flags"] = FORCE | EXISTING
        if kind == CONCURRENT:  # what is released says when it would have expired
            fields["end"] -= draw(st.sampled_from([0, 1, SECOND]))
    else:
        large = st.sampled_from([20, 10**6, MAX_COUNT - 1, MAX_COUNT])
        fields["cost"] = draw(st.one_of(st.integers(0, 3), st.integers(0, 9) if kind == CONCURRENT else large))
        fields["flags"] = draw(
            st.sampled_from([0, 0, 0, COUNT_DENIED, FORCE, DENY_ON_ERROR, COUNT_DENIED | DENY_ON_ERROR])
        )
    fields["group"] = draw(st.sampled_from([0, 0, 0, 1]))
    fields["scope"] = draw(st.integers(0, 2))
    return Counter(kind=kind, period=length, **fields)


@dataclass
class Step:
    """One thing that happens to the stores."""

    now: int
    counters: list[Counter]
    peek: bool = False
    foreign: str | None = None
    """Written beforehand under the key of the first counter."""


@st.composite
def stories(draw: st.DrawFn) -> list[Step]:
    now = NOON + draw(st.integers(0, 10**6))
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        leap = draw(st.sampled_from([0, 0, 1, 1000, SECOND // 3, SECOND, 3 * SECOND, 60 * SECOND, 100_000 * SECOND]))
        now += draw(st.sampled_from([leap, leap, leap, -leap]))  # clocks are also set back
        hits = draw(st.lists(counters(now), min_size=1, max_size=4, unique_by=lambda each: each.key))
        if draw(st.integers(0, 3)) == 0:  # what is most common has a short way through the script
            hits = [hit._replace(flags=0, group=0, cost=abs(hit.cost)) for hit in hits if hit.kind == FIXED] or hits
        steps.append(
            Step(
                now,
                hits,
                peek=draw(st.integers(0, 4)) == 0,
                foreign=draw(st.sampled_from(FOREIGN)) if draw(st.integers(0, 7)) == 0 else None,
            )
        )
    return steps


@dataclass
class Reference:
    """The function on a dict."""

    values: dict[str, int | str] = field(default_factory=dict)

    def hit(self, counters: list[Counter], now: int) -> list[Verdict]:
        verdicts, writes = transact(counters, self._states(counters), now)
        self.values |= {counters[n].key: dump(counters[n], state) for n, state in writes.items()}
        return verdicts

    def peek(self, counters: list[Counter], now: int) -> list[Verdict]:
        return observe(counters, self._states(counters), now)

    def _states(self, counters: list[Counter]) -> list[Any]:
        return [load(each, self.values.get(each.key), self.values.get(each.previous)) for each in counters]


@dataclass
class Real:
    """A store, and how to read and write what lies in it."""

    store: Store
    cache: Any
    raw: Any = None
    """The client of a server."""

    def write(self, key: str, value: str) -> None:
        if self.raw is None:
            self.cache.set(key, value, AGES)
        else:
            self.raw.set(self.cache.make_key(key), value, ex=AGES)

    def read(self, key: str) -> str | None:
        if self.raw is None:
            found = self.cache.get(key)
            return None if found is None else str(found)
        found = self.raw.get(self.cache.make_key(key))
        return None if found is None else found.decode()


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Iterator[list[Real]]:
    from django.test import override_settings

    entries = {
        "memory": cache_settings("locmem", location="script"),
        "redis": cache_settings("django-redis", request.getfixturevalue("redis_server"), db=9),
        "valkey": cache_settings("django-valkey", request.getfixturevalue("valkey_server"), db=9),
    }
    with override_settings(CACHES={**entries, "default": entries["memory"]}):
        yield [
            Real(
                get_store(alias),
                caches[alias],
                (alias != "memory" and caches[alias].client.get_client(write=True)) or None,
            )
            for alias in entries
        ]


example_number = itertools.count()


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(story=stories())
def test_the_script_and_its_twin(real: list[Real], story: list[Step]) -> None:
    # Each example has keys of its own, which is quicker than to empty three stores.
    mark = f"{next(example_number)}:"
    reference = Reference()
    keys = set()
    for step in story:
        hits = [
            hit._replace(key=mark + hit.key, previous=mark + hit.previous if hit.previous else "")
            for hit in step.counters
        ]
        keys |= {hit.key for hit in hits}
        if step.foreign is not None:
            reference.values[hits[0].key] = step.foreign
            for each in real:
                each.write(hits[0].key, step.foreign)
        expected = (reference.peek if step.peek else reference.hit)(hits, step.now)
        for each in real:
            note(f"{each.store.name} at {step.now}: {hits}")
            assert (each.store.peek if step.peek else each.store.hit)(hits, step.now) == expected
    for key in keys:
        value = reference.values.get(key)
        for each in real:
            assert each.read(key) == (None if value is None else str(value)), key


def test_a_foreign_value_is_read_alike(real: list[Real]) -> None:
    for position, (value, kind) in enumerate(itertools.product(FOREIGN, FIXED + SLIDING + BUCKET + CONCURRENT + BAN)):
        one = Counter(f"foreign:{position}", kind, 5, 0 if kind == BAN else 1, 60 * SECOND, NOON + 60 * SECOND, AGES)
        one = one._replace(previous=f"foreign:{position}:before", maximum=10**6 * SECOND)
        other = Counter(f"other:{position}", FIXED, 5, 1, 60 * SECOND, NOON + 60 * SECOND, AGES, scope=1)
        reference = Reference({one.key: value})
        expected = reference.hit([one, other], NOON)
        for each in real:
            each.write(one.key, value)
            assert each.store.hit([one, other], NOON) == expected, (value, kind)
            assert each.read(one.key) == str(reference.values[one.key])
        if type(load(one, value)) is Unreadable:
            assert reference.values[one.key] == value
