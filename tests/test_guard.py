"""What stands between a request and a store in trouble. Time is an argument here: ``ticks`` and ``now``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from itertools import pairwise
from typing import Any

import pytest
from django.core.cache import cache
from django.test import Client, RequestFactory
from freezegun import freeze_time

from ratelimit_kv import check, hit, settle
from ratelimit_kv.algorithms import FIXED, Counter
from ratelimit_kv.decisions import Decision, Reason
from ratelimit_kv.guard import Breaker, DeniedLog, DeniedMemory, LocalCounters, Throttle
from ratelimit_kv.process import forget, runtime
from tests.site import HALF_PAST, limit

ME = "ip:127.0.0.1"
SECOND = 1_000_000


# ------------------------------------------------------------------------------------------------------ the breaker

QUICK, SLOW = 0.001, 0.2
"""Seconds that a failure made somebody wait."""


def opened(seconds: float = 5.0, at: float = 100.0) -> Breaker:
    breaker = Breaker("default", 3, seconds)
    assert breaker.failed(at, SLOW)
    return breaker


def test_some_quick_failures_in_a_row_open_it() -> None:
    breaker = Breaker("default", 3, 5.0)
    assert [breaker.failed(100.0 + n, QUICK) for n in range(3)] == [False, False, True]
    assert breaker.is_open
    assert not breaker.allows(103.0)


def test_one_failure_that_somebody_waited_for_opens_it() -> None:
    breaker = Breaker("default", 3, 5.0)
    assert breaker.failed(100.0, SLOW)
    assert not breaker.allows(100.1)


def test_an_answer_in_between_starts_the_row_again() -> None:
    breaker = Breaker("default", 3, 5.0)
    for n in range(9):
        assert not breaker.failed(100.0 + 2 * n, QUICK)
        assert not breaker.failed(100.1 + 2 * n, QUICK)
        assert not breaker.succeeded(100.2 + 2 * n)
    assert breaker.allows(120.0)


def test_half_of_twenty_calls_open_it_if_they_are_not_long_ago() -> None:
    for pause, opens in ((0.1, True), (1.0, False)):
        breaker = Breaker("default", 3, 5.0)
        ticks = 100.0
        for _ in range(20):
            ticks += pause
            breaker.failed(ticks, QUICK)
            if breaker.is_open:
                break
            ticks += pause
            breaker.succeeded(ticks)
        assert breaker.is_open is opens


def test_while_it_is_open_one_caller_an_interval_is_let_through() -> None:
    breaker = opened(seconds=5.0, at=100.0)
    probes = [ticks for ticks in (100 + n / 10 for n in range(1, 200)) if breaker.allows(ticks)]
    assert 103.75 <= probes[0] <= 106.35, "five seconds, give or take a quarter"
    assert all(later - earlier >= 4.9 for earlier, later in pairwise(probes))


def test_the_probe_that_is_answered_closes_it() -> None:
    breaker = opened(at=100.0)
    assert breaker.allows(107.0)
    assert not breaker.allows(107.0), "the others do not wait for the probe"
    assert breaker.succeeded(107.1)
    assert not breaker.is_open
    assert breaker.allows(107.2)
    assert not breaker.succeeded(107.3), "it is said once"


def test_each_probe_that_fails_doubles_the_rest_up_to_half_a_minute() -> None:
    breaker = opened(seconds=5.0, at=0.0)
    ticks, rests = 0.0, []
    for _ in range(6):
        start = ticks
        while not breaker.allows(ticks):
            ticks += 0.25
        rests.append(ticks - start)
        assert not breaker.failed(ticks, SLOW), "it is open already"
    for rest, nominal in zip(rests, (5, 10, 20, 30, 30, 30), strict=True):
        assert nominal * 0.75 <= rest <= nominal * 1.25 + 0.25


def test_after_it_was_closed_the_rest_is_short_again() -> None:
    breaker = opened(seconds=5.0, at=0.0)
    assert breaker.allows(10.0)
    assert not breaker.failed(10.0, SLOW)
    assert breaker.allows(30.0)
    assert breaker.succeeded(30.0)
    assert breaker.failed(40.0, SLOW)
    assert breaker.allows(46.5)


def test_processes_do_not_probe_in_step() -> None:
    first = set()
    for _ in range(20):
        breaker = opened(seconds=5.0, at=0.0)
        first.add(next(n for n in range(700) if breaker.allows(n / 100)))
    assert len(first) > 1


def test_a_clock_that_steps_back_does_not_keep_it_open() -> None:
    assert opened(at=1_000_000.0).allows(5.0)


def test_it_says_when_it_is_worth_coming_back() -> None:
    assert Breaker("default", 3, 5.0).retry_after(100.0) == 1.0
    breaker = opened(seconds=20.0, at=100.0)
    assert 15.0 <= breaker.retry_after(100.0) <= 25.0
    assert breaker.retry_after(1000.0) == 1.0


# --------------------------------------------------------------------------------------------------- local counters


def counter(key: str, limit: int = 2) -> Counter:
    return Counter(key, FIXED, limit, 1, 60 * SECOND, 60 * SECOND, 120)


def test_local_counters_count_and_forget_the_oldest_first() -> None:
    local = LocalCounters(entries=3)
    assert [local.hit([counter("a")], 0)[0].allowed for _ in range(3)] == [True, True, False]
    for key in "bcd":
        local.hit([counter(key)], 0)
    assert len(local) == 3
    assert local.hit([counter("a")], 0)[0].allowed
    assert local.forget()
    assert not local.forget()
    assert len(local) == 0


# ------------------------------------------------------------------------------------------------ denied memory


def denial(cost: int = 1, wait: float | None = 60.0, identity: str = ME, scope: str = "ask", **more: Any) -> Decision:
    return Decision(
        scope=scope,
        identity=identity,
        allowed=False,
        limit=9,
        window=60,
        remaining=0,
        reset_after=wait or 0.0,
        retry_after=wait,
        cost=cost,
        reason=Reason.OVER_LIMIT,
        **more,
    )


TOKEN, NOW, TICKS = 7, 1000 * SECOND, 50.0


def remembered(wait: float = 60.0, cost: int = 1) -> DeniedMemory:
    memory = DeniedMemory(entries=10, seconds=5.0)
    memory.remember(denial(cost, wait), TOKEN, NOW, TICKS)
    return memory


@pytest.mark.parametrize(
    ("words", "is_known"),
    [
        ({}, True),
        ({"ticks": TICKS + 4.99, "now": NOW + 5 * SECOND - 1}, True),
        ({"ticks": TICKS + 5.0}, False),
        ({"now": NOW + 60 * SECOND}, False),
        ({"now": NOW + 60 * SECOND - 1}, True),
        ({"identity": "user:1"}, False),
        ({"scope": "other"}, False),
        ({"token": TOKEN + 1}, False),
        ({"cost": 2}, False),
        ({"cost": 2, "costliest": 9}, True),
        ({"cost": 10, "costliest": 9}, False),
        # No clock that steps makes a denial last longer.
        ({"ticks": TICKS - 1}, False),
        ({"ticks": TICKS + 1000}, False),
        ({"now": NOW - 2 * SECOND}, False),
        ({"now": NOW - 10**15}, False),
        ({"now": NOW + 10**15}, False),
    ],
)
def test_a_denial_answers_for_itself_and_not_for_long(words: dict[str, Any], is_known: bool) -> None:
    asked = {"scope": "ask", "identity": ME, "token": TOKEN, "cost": 1, "costliest": 0, "now": NOW, "ticks": TICKS}
    assert (remembered().find(**{**asked, **words}) is not None) is is_known


def test_a_short_wait_is_remembered_for_no_longer() -> None:
    memory = remembered(wait=0.5)
    assert memory.find("ask", ME, TOKEN, 1, 0, NOW, TICKS + 0.4)
    assert not memory.find("ask", ME, TOKEN, 1, 0, NOW, TICKS + 0.5)


@pytest.mark.parametrize("wait", [None, 0.0])
def test_what_no_wait_cures_is_not_remembered(wait: float | None) -> None:
    memory = DeniedMemory(entries=10, seconds=5.0)
    memory.remember(denial(wait=wait), TOKEN, NOW, TICKS)
    assert len(memory) == 0


def test_it_holds_so_many_and_forgets_the_oldest_first() -> None:
    memory = DeniedMemory(entries=3, seconds=5.0)
    for number in range(5):
        memory.remember(denial(identity=f"user:{number}"), TOKEN, NOW, TICKS)
    assert [("ask", f"user:{number}") in memory.known for number in range(5)] == [False, False, True, True, True]
    memory.forget("ask", "user:3")
    memory.forget("ask", "user:99")
    assert len(memory) == 2
    memory.clear()
    assert len(memory) == 0


# --------------------------------------------------------------------------------- the same, as a caller meets it


@pytest.fixture
def clock(use_cache: Callable[..., Any]) -> Iterator[Any]:
    """The clock stands still, and nothing has been counted yet."""
    use_cache("locmem")
    with freeze_time(HALF_PAST, real_asyncio=True) as frozen:
        yield frozen


@pytest.fixture
def store_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call of the store, as it happens."""
    from ratelimit_kv.stores.locmem import LocMemStore

    calls: list[str] = []
    for method in ("hit", "peek", "reset"):

        def spy(name: str, real: Any, self: Any, *args: Any) -> Any:
            calls.append(name)
            return real(self, *args)

        monkeypatch.setattr(LocMemStore, method, partialmethod(partial(spy, method, getattr(LocMemStore, method))))
    return calls


def test_a_denied_caller_costs_no_store_call_for_five_seconds(
    settings: Any, clock: Any, store_calls: list[str]
) -> None:
    limit(settings, ask="1/m")
    hit("ask", ME), hit("ask", ME)
    store_calls.clear()
    for second in range(5):
        decision = hit("ask", ME)
        assert (decision.allowed, decision.reason) == (False, Reason.REMEMBERED)
        assert (decision.retry_after, decision.remaining) == (30.0 - second, 0)
        clock.tick(1)
    assert store_calls == []
    assert hit("ask", ME).reason is Reason.OVER_LIMIT
    assert store_calls == ["hit"]


def test_what_another_process_resets_is_seen_within_five_seconds(settings: Any, clock: Any) -> None:
    limit(settings, ask="1/m")
    assert [hit("ask", ME).allowed for _ in range(2)] == [True, False]
    cache.clear()
    clock.tick(4.9)
    assert not hit("ask", ME).allowed
    clock.tick(0.1)
    assert hit("ask", ME).allowed


def test_a_window_that_ends_is_not_outlasted(settings: Any, clock: Any) -> None:
    limit(settings, ask="1/m")
    clock.tick(29)
    assert [hit("ask", ME).allowed for _ in range(2)] == [True, False]
    clock.tick(1)
    assert hit("ask", ME).allowed


@pytest.mark.parametrize(
    "options",
    [
        {"ALGORITHM": "concurrent", "RATE": "1"},
        {"COUNT_DENIED": True},
        {"COUNT_IF": lambda asked, response: True},
        {"RESET_IF": lambda asked, response: False},
        {"MODE": "shadow"},
    ],
)
def test_where_a_denial_may_be_over_before_its_time_the_store_is_asked(
    options: Any, settings: Any, clock: Any, store_calls: list[str]
) -> None:
    limit(settings, ask={"RATE": "1/m", **options})
    for _ in range(4):
        hit("ask", ME)
    assert store_calls == ["hit"] * 4


def test_the_memory_can_be_switched_off_or_made_small(settings: Any, clock: Any, store_calls: list[str]) -> None:
    limit(settings, REMEMBER_DENIED=None, ask="1/m")
    for _ in range(4):
        hit("ask", ME)
    assert store_calls == ["hit"] * 4
    limit(settings, REMEMBER_DENIED={"ENTRIES": 1, "SECONDS": 2}, ask="1/m")
    hit("ask", ME)
    store_calls.clear()
    assert hit("ask", ME).reason is Reason.REMEMBERED
    clock.tick(2)
    assert hit("ask", ME).reason is Reason.OVER_LIMIT


def test_a_cheaper_hit_still_asks(settings: Any, clock: Any) -> None:
    limit(settings, ask="10/m")
    hit("ask", ME, cost=8)
    assert not hit("ask", ME, cost=3).allowed
    assert not hit("ask", ME, cost=4).allowed
    assert hit("ask", ME, cost=2).allowed


@pytest.mark.parametrize("algorithm", ["fixed", "sliding", "bucket"])
def test_a_costlier_hit_is_told_its_own_wait(algorithm: str, settings: Any, clock: Any) -> None:
    """However often it is denied, waiting as long as it is told to is enough, and a second less is not."""
    limit(settings, ask={"RATE": "10/m", "ALGORITHM": algorithm})
    hit("ask", ME, cost=10)
    for cost in (1, 5, 1, 5, 10):
        with freeze_time(clock()) as later:
            assert not hit("ask", ME, cost=cost).allowed
            wait = hit("ask", ME, cost=cost).retry_after
            assert wait == pytest.approx(hit("ask", ME, cost=cost).retry_after)
            later.tick(wait - 1)
            assert not hit("ask", ME, cost=cost).allowed
            later.tick(1.001)
            decision = hit("ask", ME, cost=cost)
            assert decision.allowed
            settle(decision, 0)


def test_a_dear_denial_does_not_keep_a_cheap_hit_out(settings: Any, clock: Any) -> None:
    limit(settings, ask={"RATE": "10/10s", "ALGORITHM": "bucket"})
    hit("ask", ME, cost=10)
    assert hit("ask", ME, cost=1).retry_after == 1.0
    assert hit("ask", ME, cost=4).retry_after == 4.0
    clock.tick(1)
    assert hit("ask", ME, cost=1).allowed


def test_what_costs_more_than_the_limit_is_impossible_also_for_whom_is_remembered(settings: Any, clock: Any) -> None:
    limit(settings, ask="3/m")
    hit("ask", ME, cost=3)
    assert [hit("ask", ME).reason for _ in range(2)] == [Reason.OVER_LIMIT, Reason.REMEMBERED]
    assert hit("ask", ME, cost=4).reason is Reason.IMPOSSIBLE


def test_an_old_denial_says_nothing_about_a_new_one(settings: Any, clock: Any) -> None:
    """After five seconds another process may have reset the caller: what was denied then is no longer known."""
    limit(settings, ask="10/m")
    hit("ask", ME, cost=10)
    assert not hit("ask", ME, cost=1).allowed
    clock.tick(6)
    cache.clear()
    hit("ask", ME, cost=8)
    assert not hit("ask", ME, cost=3).allowed
    assert hit("ask", ME, cost=1).allowed


def test_a_limit_that_was_raised_lets_in_who_is_remembered(settings: Any, clock: Any) -> None:
    asked = RequestFactory()
    limit(settings, ask={"RATE": lambda request: request.GET["rate"], "KEY": "ip"})
    assert [check(asked.get("/?rate=1/m"), "ask").allowed for _ in range(3)] == [True, False, False]
    assert check(asked.get("/?rate=5/m"), "ask").allowed


def test_a_child_process_starts_from_nothing(settings: Any, clock: Any) -> None:
    limit(settings, ask="1/m")
    hit("ask", ME), hit("ask", ME)
    runtime().breaker("default").failed(1.0, SLOW)
    assert len(runtime().memory or ()) == 1
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, f"{len(runtime().memory or ())} {runtime().breaker('default').is_open}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "0 False"
    os.waitpid(child, 0)
    assert runtime().breaker("default").is_open, "the parent's own is left alone"
    forget()
    assert not runtime().breaker("default").is_open


# -------------------------------------------------------------------------------------------------------- the log


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if record.name == "ratelimit_kv"]


def test_a_throttle_lets_one_of_a_kind_through_an_interval() -> None:
    throttle = Throttle(60.0)
    assert [throttle.due("a", ticks) for ticks in (0.0, 1.0, 59.9, 60.0, 61.0)] == [True, False, False, True, False]
    assert throttle.due("b", 1.0)
    assert throttle.due("a", 5.0), "a clock that steps back does not silence it"


def test_ten_refusals_are_one_warning_and_the_next_window_is_one_more(
    settings: Any, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limit(settings, ask="1/m")
    with caplog.at_level(logging.DEBUG):
        for _ in range(11):
            hit("ask", ME)
        assert levels(caplog) == ["WARNING"] + ["DEBUG"] * 9
        clock.tick(60)
        for _ in range(3):
            hit("ask", ME)
    assert levels(caplog).count("WARNING") == 2
    assert caplog.records[0].getMessage() == (
        "denied: scope ask, identity ip:127.0.0.1, over_limit, limit 1 in 60 s, retry after 30.0 s"
    )


def test_a_crowd_of_the_denied_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    log = DeniedLog()
    for number in range(500):
        log.record(denial(identity=f"ip:{number}"), NOW, TICKS + number / 100)
    assert levels(caplog) == ["WARNING"] * 21
    assert "more callers of scope ask are being denied" in caplog.text
    caplog.clear()
    log.record(denial(identity="ip:new"), NOW, TICKS + 60)
    log.record(denial(scope="other"), NOW, TICKS + 5)
    assert levels(caplog) == ["WARNING", "WARNING"]


def test_a_clock_that_steps_back_does_not_silence_a_caller(caplog: pytest.LogCaptureFixture) -> None:
    log = DeniedLog()
    log.record(denial(), NOW, TICKS)
    log.record(denial(), NOW - 3600 * SECOND, TICKS + 1)
    assert levels(caplog) == ["WARNING", "WARNING"]


# ------------------------------------------------------------------------------------------------------- the spray


def test_who_comes_under_many_names_leaves_no_more_behind_than_ten_thousand() -> None:
    memory, log, local = DeniedMemory(10_000, 5.0), DeniedLog(), LocalCounters()
    logging.getLogger("ratelimit_kv").disabled = True
    costs = []
    for start in range(0, 50_000, 10_000):
        begun = time.process_time()
        for number in range(start, start + 10_000):
            decision = denial(identity=f"ip:{number}")
            memory.remember(decision, TOKEN, NOW, TICKS)
            log.record(decision, NOW, TICKS)
            local.hit([counter(f"rl:ask:f60:{{ip:{number}}}:1")], 0)
        costs.append(time.process_time() - begun)
    logging.getLogger("ratelimit_kv").disabled = False
    assert len(memory) == len(local) == len(log) == 10_000
    assert costs[-1] < 10 * costs[0], "no caller pays for those before him"


def test_many_names_from_one_address_cost_no_more_than_the_address(
    settings: Any, clock: Any, client: Client, store_calls: list[str]
) -> None:
    """Of those that a ceiling stops no key is written and no call is made."""
    limit(settings, middleware=True, roast={"RATE": "1/m", "KEY": "cookie:anon", "CEILING": 5, "PATHS": ["*"]})
    for number in range(300):
        client.cookies["anon"] = str(number)
        client.get("/plain")
    assert len(cache._cache) == 6
    assert len(store_calls) <= 7
