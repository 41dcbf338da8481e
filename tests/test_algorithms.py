"""The arithmetic of every algorithm, without any store."""

from __future__ import annotations

import collections
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
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
    Outcome,
    Unreadable,
    Verdict,
    dump,
    interval,
    load,
    observe,
    transact,
)
from ratelimit_kv.decisions import Reason
from ratelimit_kv.rates import ceil_seconds
from tests.stores.bench import SECOND, counter, refund

START = 1_785_024_000 * SECOND
"""The start of an hour, of a minute and of a second."""


class Memory:
    """The store that all others are measured by: a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def states(self, counters: Sequence[Counter]) -> list[Any]:
        return [load(each, self.values.get(each.key), self.values.get(each.previous)) for each in counters]

    def hit(self, *counters: Counter, now: int) -> list[Verdict]:
        verdicts, writes = transact(counters, self.states(counters), now)
        for position, state in writes.items():
            self.values[counters[position].key] = dump(counters[position], state)
        return verdicts

    def peek(self, *counters: Counter, now: int) -> list[Verdict]:
        return observe(counters, self.states(counters), now)


# ── Stories ────────────────────────────────────────────────────────────────────────────────────────────────


class Story(NamedTuple):
    name: str
    kind: str
    limit: int
    period: int
    hits: str
    """Seconds from the start, `*cost`, and what is answered: `+` or the seconds to wait, `!` for no wait."""


STORIES = [
    Story("a fixed window", FIXED, 3, 60, "0+ 10+ 59+ 59:1 60+ 61+ 62+ 62:58 119.5:1 120+"),
    Story("a denied hit moves nothing", FIXED, 1, 60, "0+ 1:59 30:30 59:1 60+ 60:60"),
    Story("costs", FIXED, 5, 60, "0*3+ 0*3:60 0*2+ 0*1:60 0*0+ 0*6! 60*5+"),
    Story("nothing is allowed", FIXED, 0, 60, "0! 0*0+ 60!"),
    Story("the window before weighs by its share", SLIDING, 4, 60, "0*4+ 30:45 60:15 74:1 75+ 75:15 90+ 104:1 105+ 119:1 120+"),
    Story("all at the end of a window", SLIDING, 10, 100, "99*10+ 100:10 105:5 110+ 110:10 199*8+ 199:1 200+ 200:12 212+"),
    Story("a large hit waits for the window after", SLIDING, 10, 100, "0*10+ 0*10:200 100*10:100 199*10:1 200*10+"),
    Story("a burst, then as it refills", BUCKET, 4, 40, "0+ 0+ 0+ 0+ 0:10 9:1 10+ 10:10 30*2+ 30:10 70*4+ 70*4:40 70*5!"),
    Story("a bucket that was full for long is full", BUCKET, 2, 10, "0+ 0+ 1000+ 1000+ 1000:5"),
    Story("intervals that are no whole numbers", BUCKET, 3, 10, "0*3+ 0:4 3:1 4+ 4:3 6:1 7+"),
    Story("holds that expire by themselves", CONCURRENT, 2, 60, "0+ 5+ 10:1 59:1 60+ 61:1 65+"),
]  # fmt: skip


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_story(story: Story) -> None:
    memory = Memory()
    for step in story.hits.split():
        sign = next(sign for sign in "+:!" if sign in step)
        when, _, answer = step.partition(sign)
        seconds, _, cost = when.partition("*")
        now = START + int(float(seconds) * SECOND)
        hit = counter(kind=story.kind, limit=story.limit, period=story.period, now=now, cost=int(cost or 1))
        (looked,) = memory.peek(hit, now=now)
        (verdict,) = memory.hit(hit, now=now)
        assert looked.allowed == verdict.allowed == (sign == "+"), step
        if sign == "+":
            assert (verdict.retry_after, verdict.charged) == (0, hit.cost > 0), step
        elif sign == "!":
            assert (verdict.retry_after, verdict.reason) == (None, Reason.IMPOSSIBLE), step
        else:
            assert verdict.retry_after is not None
            assert ceil_seconds(verdict.retry_after / SECOND) == int(answer), step
            assert (verdict.charged, verdict.reason) == (False, Reason.OVER_LIMIT), step


@pytest.mark.parametrize("kind", [FIXED, SLIDING, BUCKET])
def test_the_answer_of_each_hit(kind: str) -> None:
    memory = Memory()
    verdicts = [memory.hit(counter(kind=kind, limit=2, period=60, now=START), now=START)[0] for _ in range(3)]
    assert [verdict.used for verdict in verdicts] == [1, 2, 2]
    assert [verdict.remaining for verdict in verdicts] == [1, 0, 0]
    full_again = {FIXED: [60, 60, 60], SLIDING: [120, 120, 120], BUCKET: [30, 60, 60]}[kind]
    assert [verdict.reset_after for verdict in verdicts] == [seconds * SECOND for seconds in full_again]


# ── Retry-After ────────────────────────────────────────────────────────────────────────────────────────────

traffic = st.lists(
    st.tuples(st.integers(0, 5 * SECOND), st.integers(0, 6)), min_size=1, max_size=40
)  # microseconds since the hit before, cost


@pytest.mark.parametrize("kind", [FIXED, SLIDING, BUCKET])
@given(traffic=traffic, limit=st.integers(1, 12), period=st.integers(1, 20), cost=st.integers(1, 12))
@settings(max_examples=200)
def test_waiting_as_long_as_was_said_passes_and_a_second_less_does_not(
    kind: str, traffic: list[tuple[int, int]], limit: int, period: int, cost: int
) -> None:
    assume(cost <= limit)
    memory = Memory()

    def hit(at: int, cost: int = cost) -> Counter:
        return counter(kind=kind, limit=limit, period=period, now=at, cost=cost)

    now = START
    for pause, weight in traffic:
        now += pause
        memory.hit(hit(now, weight), now=now)
    (denied,) = memory.peek(hit(now), now=now)
    if denied.allowed:
        assert denied.retry_after == 0
        return
    assert denied.retry_after
    for microseconds in (denied.retry_after, ceil_seconds(denied.retry_after / SECOND) * SECOND):
        later = now + microseconds
        assert memory.peek(hit(later), now=later)[0].allowed, microseconds
    seconds_less = (ceil_seconds(denied.retry_after / SECOND) - 1) * SECOND
    for microseconds in (denied.retry_after - 1, seconds_less):
        later = now + microseconds
        assert not memory.peek(hit(later), now=later)[0].allowed, microseconds


@given(
    count=st.integers(0, MAX_COUNT),
    before=st.integers(0, MAX_COUNT),
    limit=st.integers(1, MAX_COUNT),
    period=st.integers(1, 3653 * 86400),
    rest=st.floats(0, 1, exclude_min=True),
)
def test_a_wait_of_a_sliding_window_is_found_at_any_size(
    count: int, before: int, limit: int, period: int, rest: float
) -> None:
    length = period * SECOND
    now = START
    hit = Counter("key", SLIDING, limit, 1, length, now + max(1, int(length * rest)), 60)
    ((verdict,), _) = transact([hit], [(count, before)], now)
    assert verdict.retry_after is not None
    assert 0 <= verdict.retry_after <= 2 * length
    assert verdict.allowed == (verdict.retry_after == 0)


# ── Never more than the limit ──────────────────────────────────────────────────────────────────────────────


def admitted(kind: str, limit: int, period: int, times: Iterable[int]) -> list[int]:
    """When hits were let through."""
    memory = Memory()
    return [
        now for now in times if memory.hit(counter(kind=kind, limit=limit, period=period, now=now), now=now)[0].allowed
    ]


def most_within(length: int, times: Sequence[int]) -> int:
    """The most hits in any time of this length (its start included, its end not)."""
    most, first = 0, 0
    for last, time in enumerate(times):
        while times[first] <= time - length:
            first += 1
        most = max(most, last - first + 1)
    return most


@given(
    pauses=st.lists(st.integers(0, 3 * SECOND), max_size=60),
    limit=st.integers(1, 10),
    period=st.integers(1, 20),
)
def test_bounds_within_any_period(pauses: list[int], limit: int, period: int) -> None:
    times = [START + later for later in itertools.accumulate(pauses)]
    length = period * SECOND
    assert most_within(length, admitted(FIXED, limit, period, times)) <= 2 * limit
    assert most_within(length, admitted(SLIDING, limit, period, times)) < max(2 * limit, 2)
    through = admitted(BUCKET, limit, period, times)
    step = interval(counter(kind=BUCKET, limit=limit, period=period))
    for width in (1, step, length, 3 * length):
        assert most_within(width, through) <= limit + -(-width // step) - (width == 1)
    windows = [time // length for time in admitted(FIXED, limit, period, times)]
    assert max(map(windows.count, windows), default=0) <= limit


def let_through_by_a_log(limit: int, length: int, times: Iterable[int]) -> int:
    """How many hits the exact algorithm lets through, which remembers every one."""
    log: collections.deque[int] = collections.deque()
    through = 0
    for now in times:
        while log and log[0] <= now - length:
            log.popleft()
        if len(log) < limit:
            log.append(now)
            through += 1
    return through


@pytest.mark.parametrize("load_factor", [0.9, 1.1, 2, 10])
def test_a_sliding_window_is_near_an_exact_log(load_factor: float) -> None:
    """Random traffic at so many times the limit of 100 a minute, for half an hour."""
    limit, period = 100, 60
    dice = random.Random(int(load_factor * 10))
    mean = period * SECOND / (limit * load_factor)
    times, now = [], START
    while now < START + 30 * period * SECOND:
        now += int(dice.expovariate(1 / mean)) + 1
        times.append(now)
    through = admitted(SLIDING, limit, period, times)
    wanted = let_through_by_a_log(limit, period * SECOND, times)
    most = most_within(period * SECOND, through)
    assert most <= 1.12 * limit, "in any minute"
    assert abs(len(through) - wanted) <= 0.05 * wanted, "in all"


def test_the_worst_that_can_be_done_to_a_sliding_window() -> None:
    """All at the end of a window, then each as soon as it fits: nearly twice the limit, over a period."""
    limit, period = 100, 60
    burst = [START + 60 * SECOND - 1] * limit
    trickle = range(START + 60 * SECOND, START + 120 * SECOND - 2, SECOND // 10)
    through = admitted(SLIDING, limit, period, [*burst, *trickle])
    assert 1.9 * limit < most_within(period * SECOND, through) < 2 * limit
    assert most_within(period * SECOND // 10, through) <= 1.1 * limit + 1, "but never at once"


# ── Buckets ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_bucket_never_refills_faster_than_its_rate() -> None:
    assert interval(counter(kind=BUCKET, limit=3, period=10)) == 3_333_334
    assert interval(counter(kind=BUCKET, limit=0, period=10)) == 0


def test_debt_of_a_bucket_is_one_capacity_at_most() -> None:
    memory = Memory()
    hit = counter(kind=BUCKET, limit=4, period=40, now=START)
    (verdict,) = memory.hit(hit._replace(cost=1000, flags=FORCE), now=START)
    assert (verdict.used, verdict.remaining, verdict.reset_after) == (8, 0, 80 * SECOND)
    (verdict,) = memory.peek(hit, now=START)
    assert verdict.retry_after == 50 * SECOND


def test_a_bucket_that_a_wrong_clock_has_filled_is_healed() -> None:
    memory = Memory()
    hit = counter(kind=BUCKET, limit=4, period=40, now=START)
    memory.values[hit.key] = START + 365 * 86400 * SECOND
    (verdict,) = memory.hit(hit, now=START)
    assert (verdict.allowed, verdict.retry_after) == (False, 10 * SECOND)
    assert memory.values[hit.key] == START + 40 * SECOND
    later = START + 10 * SECOND
    assert memory.hit(hit, now=later)[0].allowed


# ── In flight ──────────────────────────────────────────────────────────────────────────────────────────────


def test_each_one_in_flight_lands_once() -> None:
    memory = Memory()

    def hit(at: int, cost: int = 1) -> Counter:
        return counter(kind=CONCURRENT, limit=3, period=60, now=at, cost=cost)

    first, twin, third = hit(START), hit(START), hit(START + 5)
    for each in (first, twin, third):
        assert memory.hit(each, now=START + 5)[0].charged
    assert not memory.hit(hit(START + 6), now=START + 6)[0].allowed
    assert [memory.hit(refund(first), now=START + 7)[0].used for _ in range(3)] == [2, 1, 1]
    assert memory.hit(refund(third, 9), now=START + 7)[0].used == 0
    assert memory.hit(refund(third), now=START + 7)[0].used == 0
    assert memory.hit(hit(START + 8, 3), now=START + 8)[0].allowed
    assert memory.hit(refund(hit(START + 8, 3)), now=START + 9)[0].used == 0
    assert memory.values[first.key] == "0", "a value that can be read again"


def test_what_never_lands_expires() -> None:
    memory = Memory()
    hit = counter(kind=CONCURRENT, limit=1, period=60, now=START)
    memory.hit(hit, now=START)
    later = hit._replace(end=hit.end + 60 * SECOND)
    assert not memory.hit(later, now=START + 60 * SECOND - 1)[0].allowed
    assert memory.hit(later, now=START + 60 * SECOND)[0].allowed
    assert memory.values[hit.key] == str(later.end), "the expired ones are gone"


def test_what_a_wrong_clock_has_taken_does_not_count() -> None:
    memory = Memory()
    hit = counter(kind=CONCURRENT, limit=1, period=60, now=START)
    memory.values[hit.key] = f"{START + 3600 * SECOND},{START + 121 * SECOND}"
    assert memory.hit(hit, now=START)[0].used == 1


# ── Bans ───────────────────────────────────────────────────────────────────────────────────────────────────


class Banned:
    """One hit a minute is allowed; ``after`` denied minutes are answered by a ban."""

    def __init__(self, after: int, seconds: int = 600, growth: float = 2, maximum: int = 3600) -> None:
        self.memory = Memory()
        self.ban = counter(kind=BAN, limit=after, period=seconds, growth=growth, maximum=maximum * SECOND, now=START)

    def hit(self, second: float) -> Verdict:
        now = START + int(second * SECOND)
        return self.memory.hit(counter(limit=1, period=60, now=now), self.ban, now=now)[1]

    def denied_minute(self, second: float) -> Verdict:
        self.hit(second)
        return self.hit(second)

    def state(self) -> tuple[int, ...]:
        return tuple(map(int, self.memory.values[self.ban.key].split(",")))


def test_only_the_first_denial_of_a_window_is_a_strike() -> None:
    bans = Banned(after=2)
    for second in (0, 1, 2, 3, 59):
        assert bans.hit(second).allowed
    assert bans.state()[:2] == (0, 1)
    assert bans.hit(60).allowed
    banned = bans.hit(61)
    assert (banned.allowed, banned.reason, banned.retry_after) == (False, Reason.BANNED, 600 * SECOND)
    assert bans.hit(660.999999).retry_after == 1
    assert bans.hit(661).allowed


def test_denials_during_a_ban_do_not_lengthen_it() -> None:
    bans = Banned(after=1)
    assert bans.denied_minute(0).retry_after == 600 * SECOND
    for second in range(1, 600, 7):
        assert bans.hit(second).retry_after == (600 - second) * SECOND
    assert bans.hit(600).allowed


def test_each_ban_is_longer_up_to_a_maximum() -> None:
    bans = Banned(after=1, seconds=600, growth=2, maximum=3600)
    second, lengths = 0.0, []
    for _ in range(6):
        retry_after = bans.denied_minute(second).retry_after
        assert retry_after is not None
        lengths.append(retry_after / SECOND)
        second += lengths[-1] + 60
    assert lengths == [600, 1200, 2400, 3600, 3600, 3600]


def test_a_quiet_caller_is_forgiven() -> None:
    bans = Banned(after=1, seconds=600, growth=2, maximum=3600)
    bans.denied_minute(0)
    assert bans.denied_minute(600 + 3600).retry_after == 1200 * SECOND, "not quite yet"
    end_of_ban = 600 + 3600 + 1200
    assert bans.denied_minute(end_of_ban + 3600.000001).retry_after == 600 * SECOND
    strikes = Banned(after=3, maximum=3600)
    strikes.denied_minute(0)
    strikes.denied_minute(60)
    strikes.denied_minute(120 + 3600.000001)
    assert strikes.state()[:2] == (0, 1)


def test_a_growth_that_is_out_of_this_world_stays_below_the_maximum() -> None:
    bans = Banned(after=1, seconds=1, growth=1e300, maximum=86400)
    bans.memory.values[bans.ban.key] = f"999999999999999,0,0,{START}"
    assert bans.denied_minute(0).retry_after == 86400 * SECOND
    level = Banned(after=1, seconds=60, growth=1.0)
    level.memory.values[level.ban.key] = f"999999999999999,0,0,{START}"
    assert level.denied_minute(0).retry_after == 60 * SECOND


def test_a_ban_that_a_wrong_clock_has_set_is_clamped() -> None:
    bans = Banned(after=1, maximum=3600)
    bans.memory.values[bans.ban.key] = f"1,0,{START + 365 * 86400 * SECOND},{START}"
    assert bans.hit(0).retry_after == 3600 * SECOND
    far_mark = Banned(after=2)
    far_mark.memory.values[far_mark.ban.key] = f"0,1,0,{START + 365 * 86400 * SECOND}"
    assert far_mark.denied_minute(0).retry_after == 600 * SECOND, "a window of that clock is none of ours"


def test_a_ban_denies_its_group_and_counts_nothing() -> None:
    bans = Banned(after=1)
    bans.denied_minute(0)
    now = START + 60 * SECOND
    rate, beside = counter(limit=1, period=60, now=now), counter("user:2", limit=1, period=60, now=now, group=1)
    verdicts = bans.memory.hit(rate, bans.ban, beside._replace(scope=1), now=now)
    assert [verdict.charged for verdict in verdicts] == [False, False, True]
    assert [verdict.used for verdict in verdicts] == [0, 0, 1]


def test_what_is_impossible_is_no_strike() -> None:
    bans = Banned(after=1)
    rate = counter(limit=1, cost=2, period=60, now=START)
    assert bans.memory.hit(rate, bans.ban, now=START)[1].allowed
    assert bans.ban.key not in bans.memory.values


def test_a_ban_watches_its_own_scope() -> None:
    bans = Banned(after=1)
    rate = counter(limit=1, period=60, now=START)._replace(scope=1)
    for _ in range(2):
        verdicts = bans.memory.hit(rate, bans.ban, now=START)
    assert [verdict.allowed for verdict in verdicts] == [False, True]


@pytest.mark.parametrize("kind", [BUCKET, CONCURRENT])
def test_a_ban_over_what_has_no_window(kind: str) -> None:
    memory = Memory()
    ban = counter(kind=BAN, limit=2, period=600, now=START)

    def hit(second: int) -> Verdict:
        now = START + second * SECOND
        return memory.hit(counter(kind=kind, limit=1, period=60, now=now), ban, now=now)[1]

    hit(0)
    assert [hit(second).allowed for second in (1, 30, 59)] == [True] * 3, "one strike in a period"
    hit(61)
    assert not hit(62).allowed


# ── All of a request ───────────────────────────────────────────────────────────────────────────────────────


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Counter], list[Any]]:
    """Counters of every kind with any state, of several scopes and groups."""
    counters, states = [], []
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from([FIXED, SLIDING, BUCKET, CONCURRENT, BAN]))
        flags = draw(st.sampled_from([0, 0, 0, COUNT_DENIED, DENY_ON_ERROR, FORCE, FORCE | EXISTING]))
        cost = draw(st.integers(-3 if flags & EXISTING and kind != BAN else 0, 6))
        each = counter(
            f"user:{number}",
            kind=kind,
            limit=draw(st.integers(0, 6)) + (kind == BAN),
            period=draw(st.integers(1, 100)),
            cost=cost,
            now=START,
            group=draw(st.integers(0, 2)),
            flags=flags,
        )._replace(scope=draw(st.integers(0, 2)))
        moment = st.integers(START - 200 * SECOND, START + 200 * SECOND)
        small = st.integers(0, 8)
        state: st.SearchStrategy[Any] = {
            FIXED: small,
            SLIDING: st.tuples(st.none() | small, small),
            BUCKET: moment,
            CONCURRENT: st.lists(moment, min_size=1, max_size=6).map(tuple),
            BAN: st.tuples(small, small, moment, moment),
        }[kind]
        counters.append(each)
        states.append(draw(st.none() | st.just(Unreadable("not ours")) | state))
    return counters, states


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_the_order_changes_nothing(situation: tuple[list[Counter], list[Any]], dice: random.Random) -> None:
    counters, states = situation
    verdicts, writes = transact(counters, states, START)
    order = list(range(len(counters)))
    dice.shuffle(order)
    again = transact([counters[at] for at in order], [states[at] for at in order], START)
    assert again.verdicts == [verdicts[at] for at in order]
    assert {order[at]: state for at, state in again.writes.items()} == writes


@given(situations())
@settings(max_examples=200)
def test_what_always_holds(situation: tuple[list[Counter], list[Any]]) -> None:
    counters, states = situation
    verdicts, writes = transact(counters, states, START)
    denied = {
        each.group
        for each, verdict in zip(counters, verdicts, strict=True)
        if not verdict.allowed and (verdict.reason is not Reason.STORE_ERROR or each.flags & DENY_ON_ERROR)
    }
    for at, (each, state, verdict) in enumerate(zip(counters, states, verdicts, strict=True)):
        if verdict.charged:
            assert at in writes
            assert each.group not in denied or each.flags & COUNT_DENIED
        elif at in writes:
            assert each.kind in (BAN, BUCKET)
        if type(state) is Unreadable:
            assert verdict.reason is Reason.STORE_ERROR
            assert at not in writes
            continue
        if state is None and each.flags & EXISTING and each.kind != BAN:  # a ban is not charged
            assert at not in writes
        assert verdict.used >= 0
        assert verdict.remaining >= 0
        assert verdict.reset_after >= 0
        assert verdict.allowed == (verdict.reason is Reason.WITHIN)
        assert (verdict.retry_after is None) == (verdict.reason is Reason.IMPOSSIBLE)
        assert verdict.allowed == (verdict.retry_after == 0)
        if at in writes:
            written = dump(each, writes[at])
            before = dump(each._replace(kind=FIXED), writes[at][1]) if each.kind == SLIDING else None
            assert load(each, written, before) == writes[at], "what is written can be read"
        if verdict.allowed and verdict.charged and not each.flags & FORCE:
            assert verdict.used <= each.limit


@given(situations())
def test_peek_is_what_a_hit_would_be_answered(situation: tuple[list[Counter], list[Any]]) -> None:
    counters, states = situation
    looked = observe(counters, states, START)
    verdicts = transact(counters, states, START).verdicts
    for each, peek, hit in zip(counters, looked, verdicts, strict=True):
        assert not peek.charged
        if each.kind == BAN:  # a hit may be the strike that makes it fall
            assert peek.allowed or not hit.allowed
        else:
            assert (peek.allowed, peek.reason, peek.retry_after) == (hit.allowed, hit.reason, hit.retry_after)


def test_a_group_is_charged_together_or_not_at_all() -> None:
    full, room = counter("user:1", limit=1, now=START), counter("user:2", now=START)
    apart = counter("user:3", now=START, group=1)
    outcome = transact([room, full, apart], [0, 1, 0], START)
    assert [verdict.charged for verdict in outcome.verdicts] == [False, False, True]
    assert outcome.writes == {2: 1}


def test_count_denied_counts_the_denials_of_its_own_scope() -> None:
    counting = [
        counter("user:1", limit=1, now=START, flags=COUNT_DENIED),
        counter("user:1", limit=9, period=86400, now=START, flags=COUNT_DENIED),
    ]
    other = counter("user:1", limit=9, now=START, scope="other", flags=COUNT_DENIED)._replace(scope=1)
    outcome = transact([*counting, other], [1, 1, 1], START)
    assert outcome.writes == {0: 2, 1: 2}
    assert [verdict.allowed for verdict in outcome.verdicts] == [False, True, True]
    assert [verdict.remaining for verdict in outcome.verdicts] == [0, 7, 8]


def test_what_cannot_be_read_denies_only_where_it_should() -> None:
    broken, room = counter("user:1", now=START), counter("user:2", now=START)
    states = [Unreadable("text instead of an integer"), 0]
    verdicts = transact([broken, room], states, START).verdicts
    assert [verdict.charged for verdict in verdicts] == [False, True]
    assert verdicts[0].cause == "text instead of an integer"
    verdicts = transact([broken._replace(flags=DENY_ON_ERROR), room], states, START).verdicts
    assert [verdict.charged for verdict in verdicts] == [False, False]


# ── Values in the store ────────────────────────────────────────────────────────────────────────────────────

READABLE: list[tuple[str, Any, Any]] = [
    (FIXED, None, None),
    (FIXED, 0, 0),
    (FIXED, 7, 7),
    (FIXED, MAX_COUNT, MAX_COUNT),
    (FIXED, b"7", 7),
    (FIXED, "7", 7),
    (BUCKET, b"1785024000000000", START),
    (CONCURRENT, None, None),
    (CONCURRENT, "0", (0,)),
    (CONCURRENT, b"1,2", (1, 2)),
    (BAN, "1,2,3,4", (1, 2, 3, 4)),
]
UNREADABLE: list[tuple[str, Any]] = [
    *(
        (FIXED, value)
        for value in (
            -1,
            MAX_COUNT + 1,
            True,
            1.0,
            "",
            "x",
            " 7",
            "7 ",
            "+7",
            "\N{ARABIC-INDIC DIGIT SEVEN}",
            "²",
            b"",
            b"x",
        )
    ),
    *((FIXED, value) for value in ([], {}, object(), "1" * 17, b"9" * 16)),
    *(
        (CONCURRENT, value)
        for value in (7, "", ",", "1,", "1,x", "1, 2", "-1", b"\xff", "\N{ARABIC-INDIC DIGIT SEVEN}", [1], "1" * 17)
    ),
    (CONCURRENT, ",".join(["1785024000000000"] * 4000)),
    *((BAN, value) for value in ("1", "1,2,3", "1,2,3,4,5", 7, b"a,b,c,d")),
]


@pytest.mark.parametrize(("kind", "value", "state"), READABLE)
def test_readable(kind: str, value: Any, state: Any) -> None:
    found = load(counter(kind=kind), value)
    assert (type(found), found) == (type(state), state)


@pytest.mark.parametrize(("kind", "value"), UNREADABLE)
def test_unreadable(kind: str, value: Any) -> None:
    found = load(counter(kind=kind), value)
    assert type(found) is Unreadable
    assert found.cause


def test_a_sliding_window_has_two_values() -> None:
    sliding = counter(kind=SLIDING)
    assert load(sliding, None, None) is None
    assert load(sliding, b"3", None) == (3, 0)
    assert load(sliding, None, 4) == (None, 4)
    assert type(load(sliding, "x", 4)) is type(load(sliding, 4, "x")) is Unreadable


def test_what_the_store_could_not_read_stays_so() -> None:
    for kind in (FIXED, SLIDING, BUCKET, CONCURRENT, BAN):
        assert load(counter(kind=kind), Unreadable("torn")) == Unreadable("torn")


def test_the_largest_numbers() -> None:
    hit = counter(limit=MAX_COUNT, cost=MAX_COUNT, now=START)
    assert transact([hit], [None], START).writes == {0: MAX_COUNT}
    assert transact([hit._replace(flags=FORCE)], [MAX_COUNT], START).writes == {0: MAX_COUNT}
    assert transact([refund(hit)], [5], START).writes == {0: 0}


def test_an_outcome_names_only_what_is_to_be_written() -> None:
    outcome: Outcome = transact([counter(now=START), counter("user:2", limit=0, now=START, group=1)], [0, 0], START)
    assert outcome.writes == {0: 1}
    assert math.isfinite(outcome.verdicts[0].reset_after)
