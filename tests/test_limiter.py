"""check, hit, peek, settle and reset: what is counted, for whom, how often, and what comes back."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.core.cache import cache, caches
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path
from freezegun import freeze_time
from ninja import NinjaAPI
from rest_framework.views import APIView

from ratelimit_kv import (
    acheck,
    ahit,
    apeek,
    areset,
    asettle,
    check,
    hit,
    peek,
    rate_limit,
    reset,
    reset_all,
    settle,
)
from ratelimit_kv.accounts import limits_of
from ratelimit_kv.decisions import Reason
from ratelimit_kv.signals import denied, near_limit
from ratelimit_kv.stores import StoreError
from ratelimit_kv.stores.locmem import LocMemStore
from tests.servers import free_port
from tests.site import HALF_PAST, limit, statuses

ME = "ip:127.0.0.1"
MAX = 2**53 - 1

urlpatterns: list[Any] = []


@pytest.fixture(autouse=True)
def clock(use_cache: Callable[..., Any]) -> Iterator[Any]:
    """The clock stands still, and nothing has been counted yet."""
    use_cache("locmem")
    with freeze_time(HALF_PAST, real_asyncio=True) as frozen:
        yield frozen


@pytest.fixture(params=["locmem", "django-redis"])
def store(request: pytest.FixtureRequest, use_cache: Callable[..., Any]) -> str:
    use_cache(request.param)
    return str(request.param)


@pytest.fixture
def site(settings: Any) -> Callable[..., None]:
    """``site(view)``: a site of just this view."""

    def use(view: Any) -> None:
        urlpatterns[:] = [path("", view), path("<slug:slug>", view)]
        settings.ROOT_URLCONF = "tests.urls"
        settings.ROOT_URLCONF = __name__

    return use


def request(ip: str = "127.0.0.1", **more: Any) -> Any:
    return RequestFactory().get("/", REMOTE_ADDR=ip, **more)


def left(scope: str, who: Any = ME) -> int | None:
    return peek(scope, who).remaining


# ------------------------------------------------------------------------------------------------- check and hit


def test_a_request_is_checked_once_however_often_it_is_asked(settings: Any, store: str) -> None:
    limit(settings, ask="3/m")
    asked = request()
    decisions = [check(asked, "ask") for _ in range(5)]
    assert all(decision is decisions[0] for decision in decisions)
    assert left("ask") == 2


def test_a_hit_counts_every_time(settings: Any, store: str) -> None:
    limit(settings, ask="3/m")
    asked = request()
    assert [hit("ask", asked).allowed for _ in range(4)] == [True, True, True, False]
    assert [hit("ask", "user:42").allowed for _ in range(4)] == [True, True, True, False]


def test_a_decision_says_where_the_caller_stands(settings: Any) -> None:
    limit(settings, ask={"RATE": "5/m", "COST": 2})
    decision = check(request(), "ask")
    assert (decision.scope, decision.identity, decision.allowed) == ("ask", ME, True)
    assert (decision.limit, decision.window, decision.remaining) == (5, 60, 3)
    assert (decision.cost, decision.counted, decision.reason) == (2, 2, Reason.WITHIN)
    assert (decision.reset_after, decision.retry_after) == (30.0, None)


def test_several_scopes_are_answered_by_the_tightest(settings: Any) -> None:
    limit(settings, wide="9/m", narrow="3/m", other="8/m")
    assert check(request(), "wide", "narrow", "other").scope == "narrow"
    assert left("other") == 7, "all were counted"


def test_a_family_is_answered_as_one(settings: Any, rf: RequestFactory) -> None:
    limit(settings, signin={"PRESET": "login"})
    attempts = [check(rf.post("/", {"username": "anna"}), "signin") for _ in range(6)]
    assert [decision.allowed for decision in attempts] == [True] * 5 + [False]
    assert attempts[5].scope == "signin.account"
    assert peek("signin", ME).remaining == 15, "the tightest of those that count addresses"
    assert reset("signin", f"field:Anna +{ME}") == 5, "the account from here, the name, the address at three widths"
    assert check(rf.post("/", {"username": "anna"}), "signin").allowed


def test_without_scopes_there_is_nothing_to_deny(settings: Any) -> None:
    asked = request()
    assert check(asked).allowed
    assert limits_of(asked).allowed
    assert limits_of(asked).decisions == ()
    assert limits_of(asked).tightest is None


@pytest.mark.parametrize(
    "ask",
    [
        lambda: check(request(), "aks"),
        lambda: hit("aks", ME),
        lambda: peek("aks", ME),
        lambda: reset("aks", ME),
        lambda: reset_all("aks"),
    ],
)
def test_a_name_that_nobody_has_defined_is_an_error_that_helps(ask: Any, settings: Any) -> None:
    limit(settings, ask="3/m")
    with pytest.raises(ImproperlyConfigured, match=r"'aks'.* Did you mean 'ask'"):
        ask()


@pytest.mark.parametrize("cost", [-1, 1.0, True, "1", MAX + 1])
def test_a_cost_that_is_none_is_an_error_that_quotes_it(cost: Any, settings: Any) -> None:
    limit(settings, ask="3/m")
    decision = hit("ask", ME)
    asked = request()
    check(asked, "ask")
    for use in (
        lambda: hit("ask", ME, cost=cost),
        lambda: settle(decision, cost),
        lambda: asked.rate_limit.charge("ask", cost),
        lambda: asked.rate_limit.settle("ask", cost),
    ):
        with pytest.raises(ValueError, match=f"{cost!r} is not a cost"):
            use()


@pytest.mark.parametrize("who", ["", "anna", "user:", "email:anna", "ip:nowhere", "header:x", "ip", "+"])
def test_an_identity_that_this_scope_cannot_have_is_an_error_that_quotes_it(who: str, settings: Any) -> None:
    limit(settings, ask="3/m")
    for use in (lambda: hit("ask", who), lambda: peek("ask", who), lambda: reset("ask", who)):
        with pytest.raises(ValueError, match=r"identity|address"):
            use()


async def test_the_async_twins_say_the_same(settings: Any, store: str) -> None:
    limit(settings, ask="3/m")
    asked = request()
    assert (await acheck(asked, "ask")).remaining == 2
    assert (await acheck(asked, "ask")).remaining == 2
    decision = await ahit("ask", ME)
    assert decision.remaining == 1
    assert (await asettle(decision, 2)).remaining == 0
    assert (await apeek("ask", ME)).allowed is False
    await asked.rate_limit.arefund("ask")
    await asked.rate_limit.acharge("ask", 1)
    await asked.rate_limit.asettle("ask", 0)
    assert (await apeek("ask", ME)).remaining == 1
    assert await areset("ask", ME) == 1
    assert (await apeek("ask", ME)).remaining == 3


def test_two_limits_on_one_caller_have_two_counters(settings: Any, store: str) -> None:
    limit(settings, create="2/m", everything="10/h")
    assert [hit("create", ME).allowed for _ in range(3)] == [True, True, False]
    assert left("everything") == 10


# --------------------------------------------------------------------------------------------- peek and reset


def test_a_peek_writes_nothing_and_says_what_a_hit_would_be_told(settings: Any) -> None:
    limit(settings, ask="2/m")
    for used in range(3):
        for who in (ME, request()):
            before = dict(cache._cache)
            looked = peek("ask", who)
            assert dict(cache._cache) == before
            assert (looked.remaining, looked.allowed, looked.counted) == (2 - used, used < 2, 0)
        hit("ask", ME)


def test_after_a_peek_a_request_is_still_to_be_checked(settings: Any) -> None:
    limit(settings, ask="2/m")
    asked = request()
    assert peek("ask", asked).remaining == 2
    assert check(asked, "ask").remaining == 1
    assert check(asked, "ask").remaining == 1


@pytest.mark.parametrize("algorithm", ["fixed", "sliding", "bucket"])
def test_who_is_reset_starts_from_nothing_and_nobody_else(
    algorithm: str, settings: Any, store: str, clock: Any
) -> None:
    limit(settings, ask={"RATE": "2/m", "ALGORITHM": algorithm})
    for _ in range(3):
        hit("ask", "user:1"), hit("ask", "user:2")
    assert reset("ask", "user:1") == 1
    assert [hit("ask", "user:1").allowed for _ in range(3)] == [True, True, False]
    assert not hit("ask", "user:2").allowed
    assert reset("ask", "user:3") == 0


def test_a_reset_takes_the_window_before_with_it(settings: Any, store: str, clock: Any) -> None:
    limit(settings, ask={"RATE": "4/m", "ALGORITHM": "sliding"})
    hit("ask", "user:1", cost=4)
    clock.tick(35)
    assert left("ask", "user:1") == 0, "the window before still weighs"
    assert reset("ask", "user:1") == 1
    assert left("ask", "user:1") == 4


def test_a_ban_is_lifted_by_a_reset(settings: Any, store: str) -> None:
    limit(settings, ask={"RATE": "1/m", "BAN": {"AFTER": 1, "FOR": "1h"}})
    assert [hit("ask", "user:1").reason for _ in range(2)] == [Reason.WITHIN, Reason.BANNED]
    reset("ask", "user:1")
    assert hit("ask", "user:1").allowed


@pytest.mark.parametrize(
    ("key", "asked", "typed"),
    [
        ("ip", {"ip": "203.0.113.9"}, "ip:203.0.113.9"),
        ("ip", {"ip": "203.0.113.9"}, " ip:203.0.113.9:443 "),
        ("ip", {"ip": "2001:db8:1:2::7"}, "ip:2001:DB8:1:2:0:0:0:9"),
        ("ip", {"ip": "2001:db8:1:2::7"}, "ip:2001:db8:1:2::/64"),
        ("ip/48", {"ip": "2001:db8:1:2::7"}, "ip:2001:db8:1:9::1"),
        ("ip", {"ip": "::ffff:203.0.113.9"}, "ip:203.0.113.9"),
        ("ip", {"ip": ""}, "ip:unknown"),
        ("header:X-Api-Key|ip", {"HTTP_X_API_KEY": "s3cr3t key"}, "header:s3cr3t key"),
        ("cookie:anon+ip", {"HTTP_COOKIE": "anon=abc"}, "cookie:abc+ip:127.0.0.1"),
        ("cookie:anon+ip", {"HTTP_COOKIE": "anon=abc"}, "ip:127.0.0.1+cookie:abc"),
        ("cookie:anon+ip", {}, "ip:127.0.0.1"),
        ("header:X-Name+ip", {"HTTP_X_NAME": "a+b|c"}, "header:a+b|c+ip:127.0.0.1"),
        ("everyone", {}, "everyone"),
        ("tests.test_limiter.by_plan", {"HTTP_X_PLAN": "gold/é ü"}, "call:gold/é ü"),
    ],
)
def test_an_identity_is_found_again_as_a_person_types_it(key: str, asked: Any, typed: str, settings: Any) -> None:
    limit(settings, ask={"RATE": "2/m", "KEY": key})
    decision = check(request(**asked), "ask")
    assert peek("ask", typed).remaining == 1
    assert peek("ask", decision.identity).remaining == 1, "or as a list shows it"
    assert reset("ask", typed) == 1
    assert peek("ask", decision.identity).remaining == 2


def by_plan(asked: HttpRequest) -> str | None:
    return asked.headers.get("X-Plan")


def test_a_reset_where_the_rate_depends_on_the_request(settings: Any, store: str) -> None:
    limit(settings, ask={"RATE": lambda asked: "1/m", "KEY": "ip"})
    assert [check(request(), "ask").allowed for _ in range(2)] == [True, False]
    assert reset("ask", ME) == 1
    assert check(request(), "ask").allowed


def test_reset_all_removes_what_is_ours_and_nothing_else(settings: Any, store: str, use_cache: Any) -> None:
    use_cache("locmem", alias="apart")
    limit(settings, ask="1/m", mail={"RATE": "1/m", "CACHE": "apart"})
    cache.set("rlx:ask", "theirs", 60)
    hit("ask", ME), hit("ask", "user:1"), hit("mail", ME)
    assert reset_all("ask") == 2
    assert (left("ask"), left("mail")) == (1, 0)
    hit("ask", ME)
    assert reset_all() == 2
    assert (left("ask"), left("mail")) == (1, 1)
    assert cache.get("rlx:ask") == "theirs"


def test_after_reset_all_nobody_is_remembered_as_denied(settings: Any) -> None:
    limit(settings, ask="1/m")
    assert [hit("ask", ME).allowed for _ in range(3)] == [True, False, False]
    reset_all()
    assert hit("ask", ME).allowed


# -------------------------------------------------------------------------------------- charge, settle, refund


def test_a_hit_is_settled_up_and_down(settings: Any, store: str) -> None:
    limit(settings, tokens="100/h")
    decision = hit("tokens", "user:1", cost=10)
    up = settle(decision, 35)
    assert (up.counted, up.remaining, left("tokens", "user:1")) == (35, 65, 65)
    down = settle(up, 5)
    assert (down.counted, down.remaining, left("tokens", "user:1")) == (5, 95, 95)
    assert settle(down, 0).remaining == 100


def test_a_request_is_charged_settled_and_refunded(settings: Any, store: str) -> None:
    limit(settings, tokens="1000/h", ask="10/h")
    asked = request()
    check(asked, "tokens", "ask")
    asked.rate_limit.charge("tokens", 200)
    assert left("tokens") == 799
    asked.rate_limit.settle("tokens", 1250)
    assert left("tokens") == 0, "it may pass the limit"
    assert asked.rate_limit.allowed, "and never denies"
    asked.rate_limit.settle("tokens", 900)
    assert left("tokens") == 100
    asked.rate_limit.refund("tokens")
    assert (left("tokens"), left("ask")) == (1000, 9)
    asked.rate_limit.refund()
    assert left("ask") == 10


def test_what_cost_nothing_yet_can_be_charged(settings: Any, store: str) -> None:
    """A view looks first and knows the price afterwards."""
    limit(settings, tokens={"RATE": "100/h", "COST": 0})
    asked = request()
    assert check(asked, "tokens").allowed
    asked.rate_limit.charge("tokens", 30)
    assert left("tokens") == 70
    asked.rate_limit.refund()
    assert left("tokens") == 100
    assert settle(hit("tokens", ME, cost=0), 20).remaining == 80


def test_nothing_is_given_back_twice(settings: Any, store: str) -> None:
    limit(settings, ask="10/h")
    hit("ask", ME, cost=5)
    decision = hit("ask", ME, cost=2)
    for _ in range(3):
        settle(decision, 0)
    assert left("ask") == 5
    asked = request()
    check(asked, "ask")
    for _ in range(3):
        asked.rate_limit.refund()
        asked.rate_limit.settle("ask", 0)
    assert left("ask") == 5


def test_threads_that_give_back_at_once_give_back_once(settings: Any, store: str) -> None:
    limit(settings, ask="100/h")
    hit("ask", ME, cost=50)
    decision = hit("ask", ME, cost=10)
    barrier = threading.Barrier(8)

    def give_back(_: int) -> None:
        barrier.wait()
        settle(decision, 0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(give_back, range(8)))
    assert left("ask") == 50


@pytest.mark.parametrize("algorithm", ["fixed", "sliding", "bucket"])
@pytest.mark.parametrize("seed", range(5))
def test_a_request_never_gives_back_more_than_it_took(algorithm: str, seed: int, settings: Any, clock: Any) -> None:
    """Whatever it does, in whatever order, while others come and go: the count is what they hold together."""
    limit(settings, tokens={"RATE": "10000/h", "ALGORITHM": algorithm})
    dice = random.Random(seed)
    others, mine = 0, 1
    asked = request()
    check(asked, "tokens")
    for _ in range(40):
        number = dice.randrange(50)
        match dice.randrange(4):
            case 0:
                hit("tokens", ME, cost=number)
                others += number
            case 1:
                asked.rate_limit.charge("tokens", number)
                mine += number
            case 2:
                asked.rate_limit.settle("tokens", number)
                mine = number
            case 3:
                asked.rate_limit.refund("tokens")
                mine = 0
        assert left("tokens") == 10000 - others - mine


def test_hits_of_one_request_add_up(settings: Any, store: str) -> None:
    limit(settings, mail="10/h")
    hit("mail", ME)
    asked = request()
    check(asked, "mail")
    for _ in range(3):
        hit("mail", asked)
    asked.rate_limit.settle("mail", 2)
    assert left("mail") == 7
    asked.rate_limit.refund()
    assert left("mail") == 9


def test_a_denied_hit_leaves_what_was_charged_before(settings: Any) -> None:
    limit(settings, mail={"RATE": "2/h"})
    asked = request()
    assert [hit("mail", asked).allowed for _ in range(3)] == [True, True, False]
    asked.rate_limit.refund()
    assert left("mail") == 2


def test_giving_back_revives_no_counter(settings: Any, store: str) -> None:
    limit(settings, ask="10/h")
    decision = hit("ask", ME, cost=5)
    reset("ask", ME)
    settle(decision, 0)
    assert left("ask") == 10
    assert reset("ask", ME) == 0


def test_giving_back_goes_to_the_window_that_was_charged_and_more_to_the_current_one(
    settings: Any, store: str, clock: Any
) -> None:
    limit(settings, ask="10/m")
    decision = hit("ask", ME, cost=4)
    clock.tick(40)
    hit("ask", ME, cost=3)
    assert settle(decision, 1).counted == 1
    assert left("ask") == 7, "the new window has nothing to do with it"
    settle(decision, 3)
    assert left("ask") == 5
    settle(decision, 0)
    assert left("ask") == 7


def test_charges_beyond_all_bounds_stay_numbers(settings: Any, store: str) -> None:
    limit(settings, tokens="10/h")
    hit("tokens", ME, cost=5)
    asked = request()
    check(asked, "tokens")
    asked.rate_limit.charge("tokens", MAX)
    asked.rate_limit.charge("tokens", MAX)
    assert left("tokens") == 0
    asked.rate_limit.refund()
    assert left("tokens") <= 5, "what others took stays taken"  # type: ignore[operator]


@pytest.mark.parametrize("algorithm", ["fixed", "bucket"])
def test_a_charge_far_beyond_the_limit_is_given_back_without_anybody_elses(algorithm: str, settings: Any) -> None:
    """A bucket's debt is bounded, so less was charged than was asked."""
    limit(settings, tokens={"RATE": "10/h", "ALGORITHM": algorithm})
    hit("tokens", ME, cost=5)
    asked = request()
    check(asked, "tokens")
    asked.rate_limit.charge("tokens", 1000)
    asked.rate_limit.refund()
    assert left("tokens") <= 5  # type: ignore[operator]


def test_what_a_failing_store_did_not_take_is_not_given_back(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(settings, ask="10/h")
    hit("ask", ME, cost=5)
    decision = hit("ask", ME)

    def fails(self: Any, *args: Any) -> Any:
        raise StoreError("it is away", outage=False)

    with monkeypatch.context() as patched:
        patched.setattr(LocMemStore, "hit", fails)
        assert settle(decision, 4).counted == 1
    settle(decision, 0)
    assert left("ask") == 5


def test_who_was_given_back_to_is_no_longer_remembered_as_denied(settings: Any) -> None:
    limit(settings, ask="2/h")
    decision = hit("ask", ME, cost=2)
    assert not hit("ask", ME).allowed
    settle(decision, 1)
    assert hit("ask", ME).allowed


def test_accounts_of_what_was_never_asked_are_left_alone(settings: Any) -> None:
    limit(settings, ask="2/h", other="2/h")
    asked = request()
    check(asked, "ask")
    asked.rate_limit.charge("other", 1)
    assert left("other") == 2
    with pytest.raises(ImproperlyConfigured):
        asked.rate_limit.charge("aks", 1)


# ----------------------------------------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("order", [("burst", "daily"), ("daily", "burst")])
def test_what_one_limit_refuses_costs_nothing_in_the_others(
    order: tuple[str, str], settings: Any, store: str, clock: Any
) -> None:
    """Two a minute and five a day: the burst of five does not use up the day."""
    rates = {"burst": "2/m", "daily": "5/day"}
    limit(settings, **{name: rates[name] for name in order})
    passed = []
    for _ in range(4):
        passed.append(sum(check(request(), *order).allowed for _ in range(5)))
        clock.tick(60)
    assert passed == [2, 2, 1, 0]
    assert check(request(), *order).scope == "daily"


@pytest.mark.parametrize("order", [("mine", "everyones"), ("everyones", "mine")])
@pytest.mark.parametrize("aliases", [("default", "default"), ("default", "apart"), ("apart", "default")])
def test_a_caller_over_his_own_limit_leaves_everyones_budget_alone(
    order: tuple[str, str], aliases: tuple[str, str], settings: Any, use_cache: Any, store: str
) -> None:
    use_cache("locmem", alias="apart")
    scopes = {
        "mine": {"RATE": "2/m", "KEY": "ip", "CACHE": aliases[0]},
        "everyones": {"RATE": "9/m", "KEY": "everyone", "CACHE": aliases[1]},
    }
    limit(settings, REMEMBER_DENIED=None, **{name: scopes[name] for name in order})
    assert [check(request(), *order).allowed for _ in range(6)] == [True, True, False, False, False, False]
    assert left("everyones", "everyone") == 7


@pytest.mark.parametrize("order", [("mine", "everyones"), ("everyones", "mine")])
def test_what_everyones_limit_refuses_is_given_back_on_another_alias(
    order: tuple[str, str], settings: Any, use_cache: Any, store: str
) -> None:
    use_cache("locmem", alias="apart")
    scopes = {
        "mine": {"RATE": "9/m", "KEY": "ip"},
        "everyones": {"RATE": "2/m", "KEY": "everyone", "CACHE": "apart"},
    }
    limit(settings, REMEMBER_DENIED=None, **{name: scopes[name] for name in order})
    asked = [request() for _ in range(5)]
    assert [check(one, *order).allowed for one in asked] == [True, True, False, False, False]
    assert left("mine") == 7
    asked[4].rate_limit.refund()
    assert left("mine") == 7, "what was given back is not given back again"


@pytest.mark.parametrize("order", [("mine", "everyones"), ("everyones", "mine")])
@pytest.mark.parametrize("aliases", [("default", "away"), ("away", "default")])
@pytest.mark.parametrize(("on_error", "passes"), [("deny", False), ("allow", True)])
def test_what_a_missing_store_refuses_costs_nothing_on_another_alias(
    order: tuple[str, str], aliases: tuple[str, str], on_error: str, passes: bool, settings: Any
) -> None:
    redis = "django.core.cache.backends.redis.RedisCache"
    settings.CACHES = {**settings.CACHES, "away": {"BACKEND": redis, "LOCATION": f"redis://127.0.0.1:{free_port()}"}}
    scopes = {
        "mine": {"RATE": "9/m", "KEY": "ip", "CACHE": aliases[0], "ON_ERROR": on_error},
        "everyones": {"RATE": "9/m", "KEY": "everyone", "CACHE": aliases[1], "ON_ERROR": on_error},
    }
    limit(settings, **{name: scopes[name] for name in order})
    decisions = [check(request(), *order) for _ in range(3)]
    assert [decision.allowed for decision in decisions] == [passes] * 3
    here, who = ("mine", ME) if aliases[0] == "default" else ("everyones", "everyone")
    assert left(here, who) == (6 if passes else 9)


def test_refused_hits_are_not_counted_and_do_not_move_the_reset(settings: Any, store: str, clock: Any) -> None:
    limit(settings, ask={"RATE": "1/m", "KEY": "ip"})
    assert check(request(), "ask").allowed
    for second in range(29):
        decision = check(request(), "ask")
        assert (decision.allowed, decision.retry_after, decision.reset_after) == (False, 30.0 - second, 30.0 - second)
        clock.tick(1)
    clock.tick(1)
    assert check(request(), "ask").allowed


def test_a_scope_may_count_its_own_refusals(settings: Any, store: str) -> None:
    limit(settings, ask={"RATE": "2/h", "COUNT_DENIED": True}, other="9/h")
    for _ in range(5):
        check(request(), "ask", "other")
    assert cache.get(next(key for key in keys("ask"))) == 5
    assert left("other") == 7


def keys(scope: str) -> list[str]:
    from ratelimit_kv.stores import get_store

    return [entry.key for entry in get_store("default").scan(f"rl:{scope}:")]


def test_a_shadow_scope_is_judged_apart(settings: Any, store: str) -> None:
    limit(settings, real="3/h", shadow={"RATE": "1/h", "MODE": "shadow"})
    asked = [request() for _ in range(5)]
    assert [check(one, "shadow", "real").allowed for one in asked] == [True, True, True, False, False]
    reasons = [one.rate_limit.by_name["shadow"].reason for one in asked if "shadow" in one.rate_limit.by_name]
    assert reasons[:3] == [Reason.WITHIN, Reason.SHADOW, Reason.SHADOW]
    assert left("real") == 0


# ----------------------------------------------------------------------------------------------------- the options


def test_a_scope_that_is_off_is_not_there(settings: Any) -> None:
    limit(settings, ask={"RATE": "0/m", "MODE": "off"})
    assert check(request(), "ask").reason is Reason.EXEMPT
    assert hit("ask", ME).allowed
    assert keys("ask") == []


def test_limits_are_off_for_all_while_not_enabled(settings: Any) -> None:
    limit(settings, ENABLED=False, ask="0/m")
    asked = request()
    assert check(asked, "ask").allowed
    assert hit("ask", asked).allowed
    assert hit("ask", ME).allowed
    asked.rate_limit.charge("ask", 5)
    assert keys("ask") == []


@pytest.mark.parametrize(
    ("rate", "answers"),
    [
        ("2/m", [True, True, False]),
        (["2/m", "1/h"], [True, False, False]),
        ("0/m", [False, False, False]),
        (None, [True, True, True]),
    ],
)
@pytest.mark.parametrize("manner", ["sync", "async"])
def test_a_rate_may_depend_on_the_request(rate: Any, answers: list[bool], manner: str, settings: Any) -> None:
    async def async_rate(asked: HttpRequest) -> Any:
        return rate

    limit(settings, ask={"RATE": async_rate if manner == "async" else lambda asked: rate, "KEY": "ip"})
    assert [check(request(), "ask").allowed for _ in range(3)] == answers


def fails(asked: HttpRequest) -> Any:
    raise LookupError


WRONG_RATES = [
    lambda asked: "5/month",
    lambda asked: 5,
    lambda asked: object(),
    lambda asked: [],
    lambda asked: "",
    fails,
]
WRONG_COSTS = [lambda asked: -1, lambda asked: "1", lambda asked: 1.5, lambda asked: True, lambda asked: None, fails]


@pytest.mark.parametrize(
    "options",
    [
        *({"RATE": function} for function in WRONG_RATES),
        *({"RATE": "1/m", "COST": function} for function in WRONG_COSTS),
    ],
)
@pytest.mark.parametrize(("on_error", "allowed"), [("allow", True), ("deny", False), ("local", True)])
def test_a_function_that_fails_is_what_on_error_says(
    options: Any, on_error: str, allowed: bool, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    limit(settings, ask={**options, "ON_ERROR": on_error})
    decisions = [check(request(), "ask") for _ in range(3)]
    assert {(decision.allowed, decision.reason) for decision in decisions} == {(allowed, Reason.CALLABLE_ERROR)}
    assert decisions[0].status == 503
    assert [record.levelname for record in caplog.records] == ["ERROR"], "said once"
    assert "scope ask" in caplog.text


@pytest.mark.parametrize("cost", [0, 1, 3, 4, MAX])
def test_a_cost_is_taken_whole_or_not_at_all(cost: int, settings: Any, store: str) -> None:
    limit(settings, ask={"RATE": "3/m", "COST": cost})
    decision = check(request(), "ask")
    assert decision.allowed is (cost <= 3)
    assert left("ask") == 3 - (cost if cost <= 3 else 0)
    if cost > 3:
        assert (decision.reason, decision.retry_after) == (Reason.IMPOSSIBLE, None)


def test_a_function_is_called_once_a_request(settings: Any) -> None:
    calls: list[str] = []

    def noted(name: str, answer: Any) -> Any:
        def function(asked: HttpRequest) -> Any:
            calls.append(name)
            return answer

        return function

    key, rate, cost = noted("key", "anna"), noted("rate", "9/m"), noted("cost", 2)
    scope = {"KEY": key, "RATE": rate, "COST": cost}
    limit(settings, EXEMPT=noted("exempt", False), one=scope, two=scope)
    asked = request()
    check(asked, "one", "two"), check(asked, "one"), hit("two", asked)
    assert sorted(calls) == ["cost", "exempt", "key", "rate"]
    assert asked.rate_limit.by_name["two"].remaining == 5


@pytest.mark.parametrize("ceiling", [None, 5])
def test_a_ceiling_stops_who_makes_himself_a_new_name_each_time(
    ceiling: int | None, settings: Any, client: Client
) -> None:
    limit(settings, middleware=True, roast={"RATE": "1/m", "KEY": "header:X-Name", "CEILING": ceiling, "PATHS": ["*"]})
    answers = [client.get("/plain", headers={"x-name": str(n)}).status_code for n in range(10)]
    assert answers == ([200] * 10 if ceiling is None else [200] * 5 + [429] * 5)
    assert len(keys("roast")) == (10 if ceiling is None else 5), "whoever is refused leaves no key"


def test_missing_identities_do_not_share_one_counter(settings: Any) -> None:
    limit(settings, ask={"RATE": "1/m", "KEY": "header:X-Api-Key"})
    assert [check(request(ip), "ask").allowed for ip in ("203.0.113.1", "203.0.113.2", "203.0.113.1")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("on_missing", "answers", "reason"),
    [
        ("ip", [True, False], Reason.OVER_LIMIT),
        ("skip", [True, True], Reason.MISSING),
        ("deny", [False, False], Reason.MISSING),
    ],
)
def test_who_has_no_identity_is_what_on_missing_says(
    on_missing: str, answers: list[bool], reason: Reason, settings: Any
) -> None:
    limit(settings, ask={"RATE": "1/m", "KEY": "header:X-Api-Key", "ON_MISSING": on_missing})
    decisions = [check(request(), "ask") for _ in range(2)]
    assert [decision.allowed for decision in decisions] == answers
    assert decisions[1].reason is reason


# -------------------------------------------------------------------------- what counts only when it is known


def answering(asked: HttpRequest, slug: str = "200") -> HttpResponse:
    if slug == "boom":
        raise ValueError(slug)
    return HttpResponse(status=int(slug))


async def answering_async(asked: HttpRequest, slug: str = "200") -> HttpResponse:
    return answering(asked, slug)


def is_failure(asked: HttpRequest, response: HttpResponse) -> bool:
    return response.status_code >= 400


async def is_failure_async(asked: HttpRequest, response: HttpResponse) -> bool:
    return is_failure(asked, response)


def is_success(asked: HttpRequest, response: HttpResponse) -> bool:
    return response.status_code < 400


@pytest.mark.parametrize("middleware", [True, False])
@pytest.mark.parametrize("view", [answering, answering_async])
@pytest.mark.parametrize("count_if", [is_failure, is_failure_async])
def test_only_failures_are_counted(
    view: Any, count_if: Any, middleware: bool, settings: Any, site: Any, client: Client
) -> None:
    site(rate_limit("3/m", scope="login", count_if=count_if)(view))
    limit(settings, middleware=middleware)
    client.raise_request_exception = False
    paths = ["/200", "/401", "/302", "/boom", "/200", "/404", "/200"]
    assert [client.get(one).status_code for one in paths] == [200, 401, 302, 500, 200, 404, 429]


@pytest.mark.parametrize("middleware", [True, False])
async def test_only_failures_are_counted_under_asgi(
    middleware: bool, settings: Any, site: Any, async_client: AsyncClient
) -> None:
    site(rate_limit("3/m", scope="login", count_if=is_failure)(answering_async))
    limit(settings, middleware=middleware)
    async_client.raise_request_exception = False
    paths = ["/200", "/401", "/302", "/boom", "/200", "/404", "/200"]
    assert [(await async_client.get(one)).status_code for one in paths] == [200, 401, 302, 500, 200, 404, 429]


@pytest.mark.parametrize("middleware", [True, False])
@pytest.mark.parametrize("rate", ["3/m", lambda asked: "3/m"])
def test_a_success_forgives_the_failures(rate: Any, middleware: bool, settings: Any, site: Any, client: Client) -> None:
    site(rate_limit(rate, scope="login", count_if=is_failure, reset_if=is_success)(answering))
    limit(settings, middleware=middleware)
    paths = ["/401", "/401", "/200", "/401", "/401", "/401", "/200"]
    assert [client.get(one).status_code for one in paths] == [401, 401, 200, 401, 401, 401, 429]


def test_what_cannot_be_judged_counts(settings: Any, site: Any, client: Client) -> None:
    def wrong(asked: HttpRequest, response: HttpResponse) -> bool:
        raise LookupError

    site(rate_limit("2/m", scope="login", count_if=wrong, reset_if=wrong)(answering))
    assert statuses(client, "/", 3) == [200, 200, 429]


@pytest.mark.parametrize("middleware", [True, False])
def test_whoever_is_in_flight_twice_lands_twice(middleware: bool, settings: Any, site: Any, client: Client) -> None:
    @rate_limit("2", scope="flights", algorithm="concurrent")
    def view(asked: HttpRequest, slug: str = "") -> HttpResponse:
        assert hit("flights", asked).allowed
        assert not hit("flights", "ip:127.0.0.1").allowed
        if slug == "boom":
            raise ValueError(slug)
        return HttpResponse()

    site(view)
    limit(settings, middleware=middleware)
    client.raise_request_exception = False
    assert [client.get(one).status_code for one in ("/", "/boom", "/", "/")] == [200, 500, 200, 200]


@pytest.mark.parametrize("middleware", [True, False])
async def test_a_client_that_goes_away_frees_his_place_and_has_counted(
    middleware: bool, settings: Any, site: Any
) -> None:
    entered = asyncio.Event()

    @rate_limit("1", scope="flights", algorithm="concurrent")
    @rate_limit("9/m", scope="ask", count_if=is_failure)
    async def view(asked: HttpRequest, slug: str = "") -> HttpResponse:
        if slug == "slow":
            entered.set()
            await asyncio.Event().wait()
        return HttpResponse()

    site(view)
    limit(settings, middleware=middleware)
    client = AsyncClient()
    slow = asyncio.create_task(client.get("/slow"))
    await entered.wait()
    assert (await client.get("/")).status_code == 429
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert (await client.get("/")).status_code == 200
    assert (await apeek("ask", ME)).remaining == 8


@pytest.mark.parametrize("middleware", [True, False])
def test_a_worker_that_ends_frees_the_place_too(middleware: bool, settings: Any, site: Any, client: Client) -> None:
    @rate_limit("1", scope="flights", algorithm="concurrent")
    def view(asked: HttpRequest, slug: str = "") -> HttpResponse:
        if slug == "ends":
            raise SystemExit
        return HttpResponse()

    site(view)
    limit(settings, middleware=middleware)
    with pytest.raises(SystemExit):
        client.get("/ends")
    assert client.get("/").status_code == 200


# ---------------------------------------------------------------------------------------- the clock and the limit


@pytest.mark.parametrize("algorithm", ["fixed", "sliding"])
def test_a_limit_that_was_lowered_holds_at_once(algorithm: str, settings: Any, store: str, clock: Any) -> None:
    limit(settings, ask={"RATE": "10/m", "ALGORITHM": algorithm})
    hit("ask", ME, cost=5)
    limit(settings, ask={"RATE": "3/m", "ALGORITHM": algorithm})
    decision = hit("ask", ME)
    assert not decision.allowed
    assert decision.remaining == 0
    assert 1 <= math.ceil(decision.retry_after or 0) <= 120


@pytest.mark.parametrize("algorithm", ["fixed", "sliding"])
def test_a_limit_that_was_raised_keeps_the_count(algorithm: str, settings: Any, store: str) -> None:
    limit(settings, ask={"RATE": "3/m", "ALGORITHM": algorithm})
    assert not [hit("ask", ME).allowed for _ in range(4)][3]
    limit(settings, ask={"RATE": "10/m", "ALGORITHM": algorithm})
    assert hit("ask", ME).remaining == 6


def test_a_new_window_starts_from_nothing_whatever_the_cache_thinks_of_expiry(
    settings: Any, store: str, clock: Any, use_cache: Any
) -> None:
    use_cache(store, TIMEOUT=1)
    limit(settings, ask="1/h")
    assert hit("ask", ME).allowed
    clock.tick(2)
    assert not hit("ask", ME).allowed, "it does not inherit the cache's own timeout"
    clock.tick(3600)
    assert hit("ask", ME).allowed
    use_cache(store, TIMEOUT=None)
    hit("ask", ME)
    if store == "django-redis":
        assert cache.ttl(keys("ask")[0]) >= 60  # type: ignore[attr-defined]


def test_the_end_of_a_window_is_no_hole(settings: Any, store: str, clock: Any) -> None:
    limit(settings, ask="1/m")
    clock.tick(29.6)
    assert [hit("ask", ME).allowed for _ in range(2)] == [True, False]


def test_windows_are_those_of_utc(settings: Any, clock: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    limit(settings, ask="1/day")
    clock.move_to("2026-03-01 23:59:59")
    assert [hit("ask", ME).allowed for _ in range(2)] == [True, False]
    clock.move_to("2026-03-02 00:00:01")
    assert hit("ask", ME).allowed


# --------------------------------------------------------------------------------------- settings and their tests


def test_settings_may_change_at_any_time(settings: Any, use_cache: Any) -> None:
    use_cache("locmem", alias="apart")
    limit(settings, middleware=True, ask={"RATE": "1/m", "KEY": "ip", "PATHS": ["*"]})
    given = settings.RATELIMIT_KV
    client = Client()
    seen = {"REMOTE_ADDR": "10.0.0.1", "HTTP_X_FORWARDED_FOR": "203.0.113.9"}
    assert statuses(client, "/plain", 2) == [200, 429]
    with override_settings(RATELIMIT_KV={**given, "ENABLED": False}):
        assert statuses(client, "/plain", 1) == [200]
    with override_settings(RATELIMIT_KV={"SCOPES": {"ask": {**given["SCOPES"]["ask"], "RATE": "2/m"}}}):
        assert statuses(client, "/plain", 2) == [200, 429]
    with override_settings(RATELIMIT_KV={**given, "CACHE": "apart"}):
        assert statuses(client, "/plain", 2) == [200, 429]
    with override_settings(RATELIMIT_KV={**given, "TRUSTED_PROXIES": ["10.0.0.0/8"]}):
        assert client.get("/who", **seen).json() == {"ask": "ip:203.0.113.9"}
    with override_settings(CACHES={**settings.CACHES, "default": caches.settings["apart"]}):
        assert statuses(client, "/plain", 1) == [429]
    assert statuses(client, "/plain", 1) == [429]
    assert client.get("/who", **seen).json() == {"ask": "ip:10.0.0.1"}


# --------------------------------------------------------------------------------------------------- signals


@pytest.fixture
def heard() -> Iterator[list[tuple[str, Any, Any]]]:
    """What the signals said: name, request, decision. One of their receivers fails."""
    told: list[tuple[str, Any, Any]] = []

    def on_denied(sender: Any, request: Any, decision: Any, **kwargs: Any) -> None:
        told.append(("denied", request, decision))

    def on_near(sender: Any, request: Any, decision: Any, **kwargs: Any) -> None:
        told.append(("near", request, decision))

    def broken(**kwargs: Any) -> None:
        raise LookupError

    pairs = [(denied, broken), (near_limit, broken), (denied, on_denied), (near_limit, on_near)]
    for signal, receiver in pairs:
        signal.connect(receiver)
    yield told
    for signal, receiver in pairs:
        signal.disconnect(receiver)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"RATE": "1/m"}, [None, Reason.OVER_LIMIT, Reason.REMEMBERED]),
        ({"RATE": "1/m", "MODE": "shadow"}, [None, Reason.SHADOW, Reason.SHADOW]),
        ({"RATE": "0/m"}, [Reason.IMPOSSIBLE] * 3),
        ({"RATE": "9/m", "KEY": "header:X", "ON_MISSING": "deny"}, [Reason.MISSING] * 3),
        ({"RATE": fails, "ON_ERROR": "deny"}, [Reason.CALLABLE_ERROR] * 3),
        ({"RATE": "1/m", "BAN": {"AFTER": 1, "FOR": "1h"}}, [None, Reason.BANNED, Reason.REMEMBERED]),
    ],
)
def test_every_denial_is_heard_of(options: Any, reasons: Any, settings: Any, heard: list[Any]) -> None:
    limit(settings, ask={"NEAR": 1.0, **options})
    asked = [request() for _ in range(3)]
    for one in asked:
        check(one, "ask")
    told = [(who, decision.reason) for name, who, decision in heard if name == "denied"]
    assert told == [(one, reason) for one, reason in zip(asked, reasons, strict=True) if reason]


def test_a_denial_without_a_request_is_heard_of_too(settings: Any, heard: list[Any]) -> None:
    limit(settings, ask="0/m")
    decision = hit("ask", "user:1")
    assert heard == [("denied", None, decision)]


def test_coming_near_a_limit_is_heard_of_once(settings: Any, heard: list[Any]) -> None:
    limit(settings, ask="10/m")
    for _ in range(10):
        check(request(), "ask")
    assert [(name, decision.remaining) for name, _, decision in heard] == [("near", 2)]


# --------------------------------------------------------------------------------------------- RateLimited in views


def asks(request: HttpRequest) -> HttpResponse:
    check(request, "ask").raise_if_denied()
    return HttpResponse()


async def asks_async(request: HttpRequest) -> HttpResponse:
    (await acheck(request, "ask")).raise_if_denied()
    return HttpResponse()


class AsksInDRF(APIView):
    def get(self, asked: Any) -> HttpResponse:
        return asks(asked)


class WithHandlerOfItsOwn(AsksInDRF):
    def handle_exception(self, exc: Exception) -> HttpResponse:
        raise exc


def ninja_view(function: Any) -> Any:
    api = NinjaAPI(urls_namespace=function.__name__, docs_url=None)
    api.get("/ask")(function)
    return next(pattern.callback for pattern in api.urls[0] if str(pattern.pattern) == "ask")


@pytest.mark.parametrize(
    "view",
    [asks, asks_async, AsksInDRF.as_view(), WithHandlerOfItsOwn.as_view(), ninja_view(asks), ninja_view(asks_async)],
    ids=["function", "async", "DRF", "DRF with a handler", "Ninja", "async Ninja"],
)
@pytest.mark.parametrize("world", ["WSGI", "ASGI"])
async def test_a_denial_that_a_view_raises_is_answered_by_the_middleware(
    view: Any, world: str, settings: Any, site: Any
) -> None:
    from asgiref.sync import sync_to_async

    site(view)
    limit(settings, middleware=True, ask={"RATE": "1/m", "KEY": "ip"})
    if world == "ASGI":
        client = AsyncClient()
        answers = [await client.get("/") for _ in range(2)]
    else:
        blocking = Client()
        answers = [await sync_to_async(blocking.get)("/") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1]["Retry-After"] == "30"
    assert answers[1]["Cache-Control"] == "no-store"
    assert answers[0]["RateLimit"] == '"ask";r=0;t=30'
