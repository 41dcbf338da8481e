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


@dataclass(frozen=True)
class Shape:
    """What a counter keeps from step to step."""

    kind: str
    name: str
    limit: int
    length: int
    scope: int
    growth: float
    maximum: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kind = draw(st.sampled_from(FIXED + SLIDING + BUCKET + CONCURRENT + BAN))
    length = draw(st.sampled_from([SECOND, 3 * SECOND, 60 * SECOND, 60 * SECOND + 1, 86400 * SECOND - 1]))
    if kind == BAN:
        limit = draw(st.integers(1, 2))
    elif kind in (FIXED, SLIDING):
        limit = draw(st.one_of(st.integers(0, 5), st.sampled_from([100, MAX_COUNT])))
    else:
        limit = draw(st.one_of(st.integers(0, 5), st.sampled_from([100, 10**6 + 7])))
    return Shape(
        kind,
        f"{kind}{length}:{{user:{draw(st.integers(1, 2))}}}",
        limit,
        length,
        draw(st.integers(0, 1)),
        draw(st.sampled_from([1.0, 1.5, 2.0, 10.0])),
        length * draw(st.sampled_from([1, 4, 1000])),
    )


def counters(draw: st.DrawFn, shape: Shape, now: int) -> Counter:
    kind, length = shape.kind, shape.length
    fields: dict[str, Any] = {"key": shape.name, "end": now + length, "cost": 0, "growth": shape.growth}
    if kind in (FIXED, SLIDING):
        number = now // length
        fields |= {"key": f"{shape.name}:{number}", "end": (number + 1) * length}
        if kind == SLIDING:
            fields["previous"] = f"{shape.name}:{number - 1}"
    if kind == BAN:
        fields["flags"] = draw(st.sampled_from([0, 0, 0, 0, FORCE]))
    elif draw(st.integers(0, 7)) == 0:
        fields |= {"cost": -draw(st.integers(1, 9)), "flags": FORCE | EXISTING}
        if kind == CONCURRENT:  # what is released says when it would have expired
            fields["end"] -= draw(st.sampled_from([0, 1, SECOND]))
    else:
        large = st.integers(0, 9) if kind == CONCURRENT else st.sampled_from([20, 10**6, MAX_COUNT - 1, MAX_COUNT])
        fields["cost"] = draw(st.sampled_from([0, 1, 1, 1, 1, 1, 2, 3])) if draw(st.integers(0, 7)) else draw(large)
        flags = [0, 0, 0, 0, COUNT_DENIED, FORCE, DENY_ON_ERROR, COUNT_DENIED | DENY_ON_ERROR]
        fields["flags"] = draw(st.sampled_from(flags))
    group = draw(st.sampled_from([0, 0, 0, 1]))
    return Counter(
        kind=kind,
        limit=shape.limit,
        period=length,
        ttl=AGES,
        group=group,
        scope=shape.scope,
        maximum=shape.maximum,
        **fields,
    )


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
    palette = draw(st.lists(shapes(), min_size=1, max_size=4, unique_by=lambda shape: shape.name))
    lengths = [shape.length for shape in palette]
    steps = []
    for _ in range(draw(st.integers(1, 10))):
        leap = draw(st.sampled_from([0, 0, 0, 1, 1000, SECOND // 3, SECOND, lengths[0], lengths[-1] * 5 // 2]))
        now += draw(st.sampled_from([leap, leap, leap, -leap, -100 * leap]))  # clocks are also set back
        chosen = draw(st.lists(st.sampled_from(palette), min_size=1, unique=True))
        hits = [counters(draw, shape, now) for shape in chosen]
        if draw(st.integers(0, 3)) == 0:  # what is most common has a short way through the script
            hits = [hit._replace(flags=0, group=0, cost=abs(hit.cost)) for hit in hits if hit.kind == FIXED] or hits
        steps.append(
            Step(
                now,
                hits,
                peek=draw(st.integers(0, 9)) == 0,
                foreign=draw(st.sampled_from(FOREIGN)) if draw(st.integers(0, 9)) == 0 else None,
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


@pytest.mark.parametrize("limits", [*itertools.product((0, 1, 3), repeat=3)])
def test_fixed_windows_alike(real: list[Real], limits: tuple[int, ...]) -> None:
    """The common case has a short way through the script."""
    reference = Reference()
    minute = 60 * SECOND
    for cost in (0, 1, 1, 2, 1, 1, 0):
        hits = [
            Counter(
                f"fixed:{limits[0]}{limits[1]}{limits[2]}:{number}", FIXED, limit, cost, minute, NOON + minute, AGES
            )
            for number, limit in enumerate(limits)
        ]
        expected = reference.hit(hits, NOON)
        for each in real:
            assert each.store.hit(hits, NOON) == expected
            for hit in hits:
                assert each.read(hit.key) == (str(reference.values[hit.key]) if hit.key in reference.values else None)


@pytest.mark.parametrize("growth", [1.0, 1.5, 10.0])
@pytest.mark.parametrize("strikes", [1, 3])
def test_bans_grow_alike(real: list[Real], growth: float, strikes: int) -> None:
    mark = f"bans:{growth}:{strikes}:"
    minute = 60 * SECOND
    reference = Reference()
    now = NOON
    bans = set()
    for step in range(60):
        # Now and then the clock is set back, or all is forgiven.
        now += {30: -90 * minute, 40: 10**5 * minute, 50: -(10**6) * minute}.get(step, 40 * SECOND)
        end = now // minute * minute + minute
        limit = Counter(f"{mark}f:{end}", FIXED, 1, 1, minute, end, AGES)
        wide = Counter(f"{mark}b", BUCKET, 1, 1, minute, end, AGES)
        ban = Counter(f"{mark}x", BAN, strikes, 0, 3 * minute, 0, AGES, growth=growth, maximum=100 * minute)
        for hits in ([limit, ban], [ban, limit, wide], [limit._replace(cost=2), ban]):
            expected = reference.hit(hits, now)
            bans.add(reference.values.get(ban.key))
            for each in real:
                assert each.store.hit(hits, now) == expected
                assert each.read(ban.key) == reference.values.get(ban.key)
        # On to the end of the ban, or to just before.
        now += (reference.peek([ban], now)[0].retry_after or 0) - step % 2
    assert len(bans) > 12, "bans fell and ended"


def test_a_foreign_value_is_read_alike(real: list[Real]) -> None:
    kinds = FIXED + SLIDING + BUCKET + CONCURRENT + BAN
    for position, (value, kind, flags) in enumerate(itertools.product(FOREIGN, kinds, (0, DENY_ON_ERROR))):
        one = Counter(f"foreign:{position}", kind, 5, 0 if kind == BAN else 1, 60 * SECOND, NOON + 60 * SECOND, AGES)
        one = one._replace(previous=f"foreign:{position}:before", maximum=10**6 * SECOND, flags=flags)
        other = Counter(f"other:{position}", FIXED, 5, 1, 60 * SECOND, NOON + 60 * SECOND, AGES, scope=1)
        reference = Reference({one.key: value})
        expected = reference.hit([one, other], NOON)
        for each in real:
            each.write(one.key, value)
            assert each.store.hit([one, other], NOON) == expected, (value, kind)
            assert each.read(one.key) == str(reference.values[one.key])
        if type(load(one, value)) is Unreadable:
            assert reference.values[one.key] == value
        if kind == SLIDING:
            one = one._replace(key=f"{one.key}:new", previous=one.key)
            expected = reference.hit([one, other], NOON)
            for each in real:
                assert each.store.hit([one, other], NOON) == expected, value
                assert each.read(one.key) == (str(reference.values[one.key]) if one.key in reference.values else None)
