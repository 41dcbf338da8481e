"""Budgets, not only counters: algorithms, calendars, costs, outcomes, bans, plans, leases, on three kinds of store."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.test import RequestFactory
from freezegun import freeze_time

from ratelimit_kv import Decision, hit, peek, rate_limit, reset, settle
from ratelimit_kv.decisions import Reason
from ratelimit_kv.stores import get_store
from tests import caches

NOON = "2026-03-02 12:00:20"

pytestmark = pytest.mark.django_db(databases="__all__", transaction=False)


@pytest.fixture(params=["locmem", "database-sqlite", "django-redis"])
def store(request: pytest.FixtureRequest, use_cache: Callable[..., Any]) -> str:
    use_cache(request.param)
    return str(request.param)


@pytest.fixture
def scopes(settings: Any) -> Callable[..., None]:
    def define(**definitions: Any) -> None:
        settings.RATELIMIT_KV = {"SCOPES": definitions}

    return define


def hits(count: int, scope: str = "it", who: str = "user:1", **words: Any) -> list[bool]:
    return [hit(scope, who, **words).allowed for _ in range(count)]


# ---------------------------------------------------------------------------------------------------- algorithms


@pytest.mark.parametrize("algorithm", ["fixed", "sliding", "bucket"])
@pytest.mark.parametrize("rate", ["3/m", "7/100s", "5/h"])
def test_waiting_retry_after_is_enough_and_a_second_less_is_not(
    store: str, scopes: Callable[..., None], algorithm: str, rate: str
) -> None:
    scopes(it={"RATE": rate, "ALGORITHM": algorithm})
    limit = int(rate.partition("/")[0])
    with freeze_time(NOON) as clock:
        assert hits(limit) == [True] * limit
        for _ in range(limit + 2):  # also for the waits that follow, where sliding windows weigh the one before
            denied = hit("it", "user:1")
            if denied.allowed:
                continue
            assert denied.retry_after is not None
            wait = math.ceil(denied.retry_after)
            clock.tick(wait - 1)
            assert not hit("it", "user:1").allowed
            clock.tick(1)
            assert hit("it", "user:1").allowed


def test_a_sliding_window_has_no_double_burst_at_the_boundary(store: str, scopes: Callable[..., None]) -> None:
    scopes(fixed="10/m", sliding={"RATE": "10/m", "ALGORITHM": "sliding"})
    with freeze_time("2026-03-02 12:00:59") as clock:
        assert sum(hits(10, "fixed")) == sum(hits(10, "sliding")) == 10
        clock.tick(2)
        assert sum(hits(10, "fixed")) == 10
        assert sum(hits(10, "sliding")) == 0
        clock.tick(30)
        assert sum(hits(10, "sliding")) == 5


def test_a_bucket_takes_a_burst_and_refills_steadily(store: str, scopes: Callable[..., None]) -> None:
    scopes(it={"RATE": "6/m", "ALGORITHM": "bucket"})
    with freeze_time(NOON) as clock:
        assert sum(hits(9)) == 6
        clock.tick(10)
        assert hits(2) == [True, False]
        clock.tick(600)
        assert sum(hits(9)) == 6


def test_all_rates_of_a_scope_hold_in_any_order(store: str, scopes: Callable[..., None]) -> None:
    for who, rates in (("user:1", ["2/m", "5/day"]), ("user:2", ["5/day", "2/m"])):
        scopes(it=rates)
        with freeze_time(NOON) as clock:
            assert sum(hits(5, who=who)) == 2  # the day pays for two, not for five
            clock.tick(60)
            assert sum(hits(5, who=who)) == 2
            clock.tick(60)
            assert hits(2, who=who) == [True, False]
            denied = hit("it", who)
            assert denied.window == 86400
            assert [state.remaining for state in sorted(denied.rates, key=lambda s: s.window)] == [1, 0]


# ------------------------------------------------------------------------------------------------------ calendars


@pytest.mark.parametrize(
    ("zone", "local", "rate", "hours"),
    [
        ("Europe/Rome", "2026-03-29 00:00", "1/day", 23),
        ("Europe/Rome", "2026-10-25 00:00", "1/day", 25),
        ("America/New_York", "2026-03-08 00:00", "1/day", 23),
        ("Asia/Tokyo", "2026-12-31 00:00", "1/day", 24),
        ("Europe/London", "2026-03-23 00:00", "1/week", 7 * 24 - 1),
        ("Europe/Rome", "2028-02-01 00:00", "1/month", 29 * 24),
        ("America/Sao_Paulo", "2026-12-01 00:00", "1/month", 31 * 24),
    ],
)
def test_calendar_windows_begin_at_local_midnight(
    store: str, scopes: Callable[..., None], zone: str, local: str, rate: str, hours: int
) -> None:
    scopes(it={"RATE": rate, "TIMEZONE": zone})
    start = datetime.fromisoformat(local).replace(tzinfo=ZoneInfo(zone))
    with freeze_time(datetime.fromtimestamp(start.timestamp(), ZoneInfo("UTC"))) as clock:
        assert hits(2) == [True, False]
        assert hit("it", "user:1").retry_after == hours * 3600
        clock.tick(hours * 3600 - 1)
        assert not hit("it", "user:1").allowed
        clock.tick(1)
        assert hit("it", "user:1").allowed


# ---------------------------------------------------------------------------------------------- costs and accounts


def test_reserve_then_settle(store: str, scopes: Callable[..., None]) -> None:
    scopes(tokens="1000/h")
    reserved = hit("tokens", "user:1", cost=400)
    settled = settle(reserved, 150)
    assert (settled.counted, settled.remaining) == (150, 850)
    settle(reserved, 150)  # saying it twice changes nothing
    assert peek("tokens", "user:1").remaining == 850
    over = settle(settled, 1250)
    assert (over.counted, over.remaining) == (1250, 0)
    assert not hit("tokens", "user:1", cost=1).allowed
    settle(over, 0)
    settle(over, 0)
    settle(reserved, 0)
    assert peek("tokens", "user:1").remaining == 1000


def test_a_hit_above_the_limit_is_impossible_and_counts_nothing(store: str, scopes: Callable[..., None]) -> None:
    scopes(it="10/h")
    decision = hit("it", "user:1", cost=11)
    assert (decision.allowed, decision.reason, decision.retry_after) == (False, Reason.IMPOSSIBLE, None)
    assert peek("it", "user:1").remaining == 10
    assert hit("it", "user:1", cost=10).allowed
    assert hit("it", "user:1", cost=0).allowed  # costs nothing, so it passes


def test_giving_back_goes_to_the_window_that_was_charged(store: str, scopes: Callable[..., None]) -> None:
    scopes(it="3/m")
    with freeze_time(NOON) as clock:
        charged = hit("it", "user:1", cost=2)
        clock.tick(60)
        assert hit("it", "user:1").remaining == 2
        settle(charged, 0)
        assert peek("it", "user:1").remaining == 2
        later = settle(charged, 1)  # more is charged where the clock is now
        assert later.counted == 1
        assert peek("it", "user:1").remaining == 1


@pytest.mark.parametrize(
    "kind", ["locmem", "django-redis"]
)  # a database's connection is the test's own, for one thread
def test_concurrent_reservations_overspend_by_their_errors_at_most(
    kind: str, use_cache: Callable[..., Any], scopes: Callable[..., None]
) -> None:
    use_cache(kind)
    scopes(tokens="1000/h")
    spent: list[int] = []

    def work() -> None:
        for _ in range(10):
            decision = hit("tokens", "user:1", cost=50)
            if decision.allowed:
                settle(decision, 60)
                spent.append(60)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 950 < sum(spent) <= 1000 + 4 * 10 + 50


# -------------------------------------------------------------------------------------------------------- outcomes


def request_from(address: str = "203.0.113.9") -> HttpRequest:
    return RequestFactory().get("/", REMOTE_ADDR=address)


def test_only_failures_count_and_a_parallel_burst_does_not_slip_through(
    store: str, settings: Any, scopes: Callable[..., None]
) -> None:
    inside: list[int] = []

    @rate_limit("2/h", key="ip", count_if=lambda request, response: response.status_code >= 400)
    def view(request: HttpRequest, depth: int = 0) -> HttpResponse:
        if depth:
            inside.append(view(request_from(), depth - 1).status_code)
        return HttpResponse(status=200 if depth else 401)

    scopes()
    # Three at once, none of them finished: the third is refused, though none has failed yet.
    assert view(request_from(), 2).status_code == 200
    assert inside == [429, 200]
    assert [view(request_from()).status_code for _ in range(4)] == [401, 401, 429, 429]


def test_a_success_clears_the_failures(store: str, scopes: Callable[..., None]) -> None:
    @rate_limit(
        "3/h",
        key="ip",
        count_if=lambda request, response: response.status_code == 401,
        reset_if=lambda request, response: response.status_code == 302,
    )
    def login(request: HttpRequest, status: int) -> HttpResponse:
        return HttpResponse(status=status)

    scopes()
    statuses = [login(request_from(), status).status_code for status in (401, 401, 302, 401, 401, 401, 401)]
    assert statuses == [401, 401, 302, 401, 401, 401, 429]


def test_a_view_that_raises_counts_as_its_status(store: str, scopes: Callable[..., None]) -> None:
    @rate_limit("1/h", key="ip", count_if=lambda request, response: response.status_code != 500)
    def view(request: HttpRequest) -> HttpResponse:
        raise RuntimeError("a bug of ours is not the visitor's")

    scopes()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            view(request_from())


# ------------------------------------------------------------------------------------------------------------ bans


def test_bans_grow_are_forgiven_and_lifted(store: str, scopes: Callable[..., None]) -> None:
    scopes(it={"RATE": "1/m", "KEY": "user", "BAN": {"AFTER": 2, "FOR": "10m", "GROWTH": 3, "MAX": "2h"}})

    def be_banned(clock: Any) -> float:
        for _ in range(10):
            while hit("it", "user:1").allowed:
                pass
            decision = hit("it", "user:1")
            if (decision.retry_after or 0) > 60:
                return decision.retry_after or 0
            clock.tick(60)
        raise AssertionError("never banned")

    with freeze_time("2026-03-02 12:00:00") as clock:
        for minutes in (10, 30, 90, 120, 120):
            wait = be_banned(clock)
            assert round(wait / 60) == minutes
            clock.tick(wait - 1)
            denied = hit("it", "user:1")
            assert not denied.allowed
            assert hit("it", "user:2").allowed or True
            clock.tick(1)
        clock.tick(2 * 3600 + 120)  # quiet for MAX
        assert round(be_banned(clock) / 60) == 10
        assert reset("it", "user:1") >= 1
        assert hit("it", "user:1").allowed


def test_a_ban_costs_callers_without_one_no_extra_trip(
    store: str, scopes: Callable[..., None], monkeypatch: Any
) -> None:
    scopes(it={"RATE": "5/m", "KEY": "user", "BAN": {"AFTER": 1, "FOR": "1h"}})
    trips: list[int] = []
    mine = get_store("default")
    whole = mine.hit
    monkeypatch.setattr(mine, "hit", lambda counters, now: (trips.append(len(counters)), whole(counters, now))[1])
    hits(3)
    assert trips == [2, 2, 2]


# ------------------------------------------------------------------------------------------- rollout, plans, ceilings


def test_a_shadow_scope_counts_and_changes_nothing(store: str, scopes: Callable[..., None]) -> None:
    scopes(watch={"RATE": "2/h", "KEY": "ip", "MODE": "shadow"}, real={"RATE": "5/h", "KEY": "ip"})

    @rate_limit("watch", "real")
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    responses = [view(request_from()) for _ in range(6)]
    assert [response.status_code for response in responses] == [200] * 5 + [429]
    assert all("watch" not in response.headers.get("RateLimit-Policy", "") for response in responses)
    assert peek("watch", "ip:203.0.113.9").reason is Reason.SHADOW


def test_a_plan_is_changed_in_mid_window(store: str, scopes: Callable[..., None]) -> None:
    plan = {"rate": "2/h"}

    def rate(request: HttpRequest) -> str | None:
        return plan["rate"]

    @rate_limit(rate, key="ip", scope="plans")
    def view(request: HttpRequest) -> HttpResponse:
        decision: Decision = request.rate_limit.decisions[0]  # type: ignore[attr-defined]
        return HttpResponse(str(decision.remaining))

    scopes()
    with freeze_time(NOON):
        assert [view(request_from()).status_code for _ in range(3)] == [200, 200, 429]
        plan["rate"] = "5/h"  # at once, though the denial was remembered
        assert [view(request_from()).content for _ in range(2)] == [b"2", b"1"]
        plan["rate"] = "1/h"
        refused = view(request_from())
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        plan["rate"] = None  # type: ignore[assignment]
        assert view(request_from()).content == b"None"


def test_a_ceiling_stops_minted_identities_and_writes_no_key_for_them(store: str, scopes: Callable[..., None]) -> None:
    scopes(it={"RATE": "2/h", "KEY": "header:X-Device", "CEILING": 3})

    @rate_limit("it")
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    def spray(count: int) -> list[int]:
        return [
            view(RequestFactory().get("/", headers={"X-Device": f"{count}-{number}"})).status_code
            for number in range(count)
        ]

    assert spray(9) == [200] * 6 + [429] * 3
    before = len(list(get_store("default").scan("rl:")))
    assert spray(20) == [429] * 20
    assert len(list(get_store("default").scan("rl:"))) == before


# ---------------------------------------------------------------------------------------------------------- leases

LEASING = """
import django
django.setup()
from ratelimit_kv import hit
from ratelimit_kv.stores import get_store
store, calls = get_store("default"), 0
whole = store.hit
def counted(counters, now):
    global calls
    calls += 1
    return whole(counters, now)
store.hit = counted
admitted = sum(hit("hot", "user:1").allowed for _ in range({each}))
print(admitted, calls)
"""


def test_leases_admit_the_limit_at_most_for_a_tenth_of_the_calls(use_cache: Callable[..., Any], settings: Any) -> None:
    use_cache("django-redis")
    settings.RATELIMIT_KV = {
        "PROCESSES": 8,
        "REMEMBER_DENIED": None,
        "SCOPES": {"hot": {"RATE": "4000/day", "KEY": "user", "LEASE": 20}},
    }

    def crowd(each: int) -> tuple[int, int]:
        env = caches.child_environment(RATELIMIT_KV=settings.RATELIMIT_KV)
        env["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        children = [
            subprocess.Popen(
                [sys.executable, "-c", LEASING.format(each=each)], env=env, stdout=subprocess.PIPE, text=True
            )
            for _ in range(8)
        ]
        rows = [child.communicate(timeout=120)[0].split() for child in children]
        return sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows)

    admitted, calls = crowd(250)  # half of the limit
    assert admitted == 2000
    assert calls <= 2000 / 8
    more, _ = crowd(500)  # twice what is left
    assert 0.95 * 4000 <= admitted + more <= 4000


def test_a_lease_admits_the_limit_and_asks_seldom(store: str, scopes: Callable[..., None], monkeypatch: Any) -> None:
    scopes(hot={"RATE": "200/day", "KEY": "user", "LEASE": 20})
    calls: list[int] = []
    mine = get_store("default")
    whole = mine.hit
    monkeypatch.setattr(mine, "hit", lambda counters, now: (calls.append(1), whole(counters, now))[1])
    with freeze_time(NOON):
        assert hits(100, "hot") == [True] * 100
        assert len(calls) <= 20
        assert sum(hits(150, "hot")) == 100


# ---------------------------------------------------------------------------------------------------- safety margin


def test_a_safety_margin_denies_below_the_limit(store: str, scopes: Callable[..., None]) -> None:
    scopes(it={"RATE": "20/day", "SAFETY_MARGIN": 0.1})
    with freeze_time(NOON):
        assert sum(hits(25)) == 18
        assert hit("it", "user:1").limit == 18


def test_a_safety_margin_on_a_cache_that_lags(settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": "tests.edge_cache.EdgeCache", "LOCATION": "edge", "OPTIONS": {"LAG": 5}}}
    settings.RATELIMIT_KV = {"SCOPES": {"it": {"RATE": "20/h", "SAFETY_MARGIN": 0.1}}}
    passed = 0
    with freeze_time("2026-03-02 12:00:00") as clock:
        for _ in range(600):  # ten minutes of two requests a second
            clock.tick(0.5)
            passed += hit("it", "user:1").reason is Reason.WITHIN
        clock.tick(10)
        denied = hit("it", "user:1")
        assert (denied.allowed, denied.limit) == (False, 18)  # sustained abuse is stopped
        # A read is up to five seconds old, and each second takes a write: so much can be counted as one.
        assert 18 <= passed <= 18 * 6
        refused = hit("it", "user:2")
        assert refused.allowed
        assert hit("it", "user:2").reason is Reason.STORE_ERROR  # one write a second, and that was the second


# -------------------------------------------------------------------------------------------------------- in flight


def test_at_most_n_in_flight_released_at_the_end_streams_included(store: str, scopes: Callable[..., None]) -> None:
    statuses: list[int] = []

    @rate_limit("2", key="ip", algorithm="concurrent", scope="jobs")
    def view(request: HttpRequest, depth: int = 0) -> HttpResponse:
        if depth:
            statuses.append(view(request_from(), depth - 1).status_code)
        return HttpResponse()

    @rate_limit("1", key="ip", algorithm="concurrent", scope="streams")
    def stream(request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(iter([b"a", b"b"]))

    scopes()
    assert view(request_from(), 2).status_code == 200
    assert statuses == [429, 200]
    assert view(request_from()).status_code == 200  # all have been released
    running = stream(request_from())
    assert stream(request_from()).status_code == 429
    assert b"".join(running.streaming_content) == b"ab"  # type: ignore[arg-type]
    running.close()
    assert stream(request_from()).status_code == 200


def test_what_a_dead_process_held_comes_back(store: str, scopes: Callable[..., None]) -> None:
    scopes(jobs={"RATE": "1", "ALGORITHM": "concurrent"})
    with freeze_time(NOON) as clock:
        assert hits(2, "jobs") == [True, False]  # nobody releases the first
        clock.tick(299)
        assert hits(1, "jobs") == [False]
        clock.tick(2)
        assert hits(1, "jobs") == [True]
