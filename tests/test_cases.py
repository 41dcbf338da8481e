"""Faults of rate limiters that people have met in production, one by one, and which test shows that we have not got it.

Most are tested where their room is; those that no room had are tested here.
"""

from __future__ import annotations

import ast
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.cache import cache
from django.core.cache.backends.base import memcache_key_warnings
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from freezegun import freeze_time
from rest_framework.authtoken.views import ObtainAuthToken

from ratelimit_kv import check, peek, rate_limit
from ratelimit_kv.signals import denied
from ratelimit_kv.stores import get_store
from tests import views
from tests.caches import child_environment
from tests.site import HALF_PAST, limit, statuses

CASES: dict[str, tuple[str, ...]] = {
    # Addresses and proxies.
    "C01": (
        "behind a proxy every visitor is one",
        "here",
        "test_client_ip::test_forwarded_headers_without_a_proxy_are_warned_of_once",
    ),
    "C02": (
        "no address behind a unix socket",
        "here",
        "test_client_ip::test_a_unix_socket",
    ),
    "C03": (
        "the whole forwarded chain as identity",
        "here",
        "test_client_ip::test_a_prefix_written_by_the_client_mints_no_identity",
    ),
    "C04": (
        "a forwarded header from anybody is believed",
        "here",
        "test_client_ip::test_an_untrusted_peer_is_the_client_whatever_it_sends",
    ),
    "C05": (
        "forwarded entries with a port",
        "test_client_ip::test_spellings_of_an_address",
        "test_client_ip::test_a_chain_is_walked_from_the_right",
    ),
    "C06": ("an IPv6 customer rotates in his own network", "here"),
    "C07": ("IPv6 peers and zones crash", "here"),
    "C08": ("a victim's id in a header burns his budget", "here"),
    "C09": (
        "proxy settings without an effect",
        "test_checks::test_E001_every_mistake_with_its_path",
        "test_client_ip::test_settings_that_cannot_be_used",
    ),
    # Keys.
    "C10": (
        "characters that memcached refuses",
        "here",
        "test_fuzz::test_nothing_raises_and_no_key_is_unsafe",
    ),
    "C11": (
        "keys that are too long",
        "here",
        "test_checks::test_E009_keys_that_are_too_long",
    ),
    "C12": ("a missing header is a 500", "here"),
    "C13": (
        "all without an identity share one counter",
        "test_limiter::test_missing_identities_do_not_share_one_counter",
        "test_scopes::test_what_may_not_be_written",
    ),
    "C14": ("users, headers and addresses collide", "here"),
    "C15": ("one token in many spellings", "here"),
    "C16": (
        "a made-up token is a new budget",
        "test_limiter::test_a_ceiling_stops_who_makes_himself_a_new_name_each_time",
        "test_checks::test_W013_clients_that_choose_their_counter",
    ),
    "C17": (
        "two views of one name share a counter",
        "test_decorators::test_views_of_one_name_in_two_modules_do_not_share_a_limit",
        "test_decorators::test_views_share_a_limit_of_one_name",
        "test_decorators::test_a_name_does_not_change_with_wrapping",
    ),
    "C18": (
        "two limits on one caller share a counter",
        "test_limiter::test_two_limits_on_one_caller_have_two_counters",
        "test_limiter::test_a_limit_that_was_raised_keeps_the_count",
    ),
    "C19": (
        "another spelling of the URL is another budget",
        "test_middleware::test_every_spelling_that_leads_to_a_view_shares_the_counter_of_its_name",
        "test_middleware::test_what_is_refused_before_it_reaches_a_view_is_counted",
    ),
    "C20": ("secrets readable in the cache and the log; by design users and addresses are readable", "here"),
    "C21": (
        "machine clients without a user",
        "here",
        "test_middleware::test_a_user_that_is_none_is_nobody",
    ),
    # Expiry and windows.
    "C22": (
        "counters inherit the cache's timeout",
        "test_limiter::test_a_new_window_starts_from_nothing_whatever_the_cache_thinks_of_expiry",
    ),
    "C23": (
        "incrementing moves the expiry",
        "stores/contract::test_a_new_window_starts_from_nothing",
        "stores/contract::test_the_expiry_is_set_once_and_not_moved",
    ),
    "C24": ("a key expires between add and incr", "stores/test_cache::test_a_key_that_expires_in_between"),
    "C25": (
        "a timeout that rounds to zero",
        "stores/contract::test_the_last_moment_of_a_window",
        "test_limiter::test_the_end_of_a_window_is_no_hole",
    ),
    "C26": (
        "refused requests push the release back",
        "test_limiter::test_refused_hits_are_not_counted_and_do_not_move_the_reset",
    ),
    "C27": ("two bursts around a turn", "test_budgets::test_a_sliding_window_has_no_double_burst_at_the_boundary"),
    "C28": ("negative numbers after a limit was lowered", "test_limiter::test_a_limit_that_was_lowered_holds_at_once"),
    "C29": (
        "what a day is; by design that of the calendar with TIMEZONE",
        "test_limiter::test_windows_are_those_of_utc",
        "test_budgets::test_calendar_windows_begin_at_local_midnight",
    ),
    # Counting at once.
    "C30": (
        "parallel requests overwrite each other",
        "stores/contract::test_threads",
        "test_doors::test_of_fifty_at_once_exactly_ten_get_in_under_wsgi",
    ),
    "C31": (
        "each process has counters of its own; by design the database counts exactly and is not warned of",
        "test_checks::test_W001_a_cache_of_one_process",
        "test_checks::test_a_project_in_order_hears_nothing",
        "test_checks::test_messages_can_be_silenced",
    ),
    "C32": (
        "async increments lose counts",
        "test_doors::test_of_fifty_at_once_exactly_ten_get_in_under_asgi",
        "stores/test_cache::test_none_of_the_asynchronous_methods_is_used",
    ),
    "C33": ("a lock of the process hides the race", "stores/contract::test_processes_on_one_counter"),
    "C34": (
        "edge services that refuse writes; by design not rejected, but warned of",
        "here",
        "test_checks::test_W004_a_cache_that_we_do_not_know",
    ),
    "C35": (
        "what one limit refuses is spent in another",
        "test_limiter::test_what_one_limit_refuses_costs_nothing_in_the_others",
        "test_limiter::test_a_scope_may_count_its_own_refusals",
        "test_http::test_of_several_limits_the_longest_wait_is_told",
    ),
    "C36": (
        "LocMem throws counters away",
        "here",
        "test_checks::test_W005_room_for_few",
        "test_checks::test_W006_an_alias_that_others_use",
    ),
    # Outages.
    "C37": ("a dead Redis is a 500", "test_outages::test_nobody_listens"),
    "C38": (
        "answers that are no numbers",
        "stores/test_cache::test_answers_that_are_no_numbers",
        "stores/test_cache::test_answers_of_add_that_are_no_answers",
    ),
    "C39": (
        "an outage looks like an empty window",
        "test_outages::test_nobody_listens",
        "test_outages::test_killed_in_mid_traffic_and_back",
        "test_ratelimit_inspect::test_a_store_that_does_not_answer",
    ),
    "C40": (
        "each request waits for a store that hangs",
        "test_outages::test_a_paused_server_makes_one_request_wait",
        "test_outages::test_killed_in_mid_traffic_and_back",
        "test_checks::test_W007_no_timeout",
    ),
    "C41": (
        "the fallback of a process grows without bound",
        "test_outages::test_local_counts_are_bounded",
        "test_outages::test_killed_in_mid_traffic_and_back",
    ),
    "C42": ("one policy for login and reading", "test_outages::test_nobody_listens"),
    # REST framework.
    "C43": (
        "bad credentials are refused before they count",
        "test_middleware::test_bad_credentials_are_counted_before_they_are_refused",
    ),
    "C44": ("the decorator does not find the request", "test_doors::test_every_door_lets_three_of_three_in"),
    "C45": ("a token view that opts out of throttling", "here"),
    "C46": (
        "API clients get a page",
        "test_http::test_json_is_a_problem_as_rfc_9457_has_it",
        "test_http::test_a_browser_gets_a_page",
    ),
    "C47": (
        "token users are anonymous in the middleware; by design it may stand above that of users",
        "test_middleware::test_a_limit_below_the_authentication_of_a_framework_tells_its_users_apart",
        "test_middleware::test_a_user_is_counted_as_one_wherever_he_comes_from",
        "test_checks::test_W016_users_who_are_known_only_in_the_view",
        "test_checks::test_W010_keys_that_nobody_answers",
    ),
    # Async.
    "C48": (
        "a decorated async view is not awaited",
        "test_doors::test_every_door_lets_three_of_three_in_under_asgi",
        "test_doors::test_a_coroutine_function_stays_one_and_no_other_becomes_one",
    ),
    "C49": (
        "the user is read in the event loop",
        "test_middleware::test_a_user_is_counted_under_asgi_without_a_blocking_read",
        "test_middleware::test_it_serves_both_worlds",
    ),
    # Doors.
    "C50": (
        "middleware and decorator count twice; by design a refused request costs nothing",
        "test_middleware::test_one_scope_counts_once_whoever_asks_for_it",
        "test_middleware::test_the_tightest_limit_is_told",
    ),
    "C51": ("the decorator does not refuse by itself", "test_decorators::test_it_refuses_without_being_told_to"),
    "C52": (
        "preflights spend the budget; by design ten times the limit where a view answers them itself",
        "test_middleware::test_options_are_free_where_django_answers_them",
        "test_middleware::test_options_have_a_counter_of_their_own_where_the_view_answers_them",
    ),
    "C53": (
        "the 429 lacks CORS headers",
        "test_middleware::test_a_middleware_outside_still_finishes_the_refusal",
        "test_checks::test_W012_refusals_that_scripts_cannot_read",
    ),
    "C54": (
        "health probes are refused",
        "test_middleware::test_the_exempt_are_never_refused_and_cost_nothing",
        "test_middleware::test_who_is_not_exempt_is_limited_beside_them",
    ),
    "C55": ("built-in exemptions are a way around", "test_middleware::test_an_exemption_is_no_wider_than_it_looks"),
    "C56": (
        "exemptions depend on the order of decorators",
        "test_decorators::test_exempt_is_exempt_from_every_limit_and_costs_nothing",
    ),
    # Headers.
    "C57": (
        "no Retry-After",
        "test_doors::test_every_door_lets_three_of_three_in",
        "test_doors::test_every_door_lets_three_of_three_in_under_asgi",
        "test_http::test_a_function_answers_instead",
    ),
    "C58": (
        "a wrong Retry-After",
        "here",
        "test_budgets::test_waiting_retry_after_is_enough_and_a_second_less_is_not",
    ),
    "C59": (
        "Reset is a time or a duration; by design a duration always",
        "here",
        "test_http::test_the_headers_come_in_a_style",
    ),
    "C60": (
        "403 instead of 429",
        "here",
        "test_decorators::test_it_is_not_a_permission_that_was_denied",
    ),
    "C61": (
        "the body cannot be changed",
        "test_http::test_two_scopes_answer_with_two_voices",
        "test_http::test_a_project_has_a_page_of_its_own",
    ),
    # Settings.
    "C62": (
        "a month is read as a minute",
        "test_rates::test_a_month_is_not_a_minute",
        "test_rates::test_a_good_rate",
        "test_rates::test_a_bad_rate_is_quoted_explained_and_shown_how_to_write",
    ),
    "C63": (
        "mistakes are found at the first hit; by design an unknown scope on a view is an error of the checks",
        "test_checks::test_E001_every_mistake_with_its_path",
        "test_checks::test_E002_an_unknown_scope_anywhere_in_the_urlconf",
        "test_conf::test_nothing_is_parsed_during_a_request",
    ),
    "C64": (
        "0 and None are mixed up",
        "test_middleware::test_unlimited_costs_nothing_and_zero_refuses_all",
        "test_limiter::test_a_rate_may_depend_on_the_request",
        "test_rates::test_a_bad_rate_is_quoted_explained_and_shown_how_to_write",
    ),
    "C65": (
        "checks complain of good caches",
        "test_checks::test_a_project_in_order_hears_nothing",
        "test_checks::test_nothing_is_said_when_limits_are_off",
        "test_checks::test_W002_a_cache_that_keeps_nothing",
    ),
    # In tests.
    "C66": (
        "counters leak between tests",
        "test_limiter::test_reset_all_removes_what_is_ours_and_nothing_else",
        "test_testing::test_the_fixture_starts_from_nothing",
        "test_testing::test_the_mixin_for_test_cases",
    ),
    "C67": (
        "the clock is captured at import",
        "here",
        "test_testing::test_time_may_be_frozen",
    ),
    "C68": (
        "the server's clock runs on",
        "here",
        "stores/contract::test_a_frozen_clock",
    ),
    "C69": (
        "override_settings has no effect",
        "test_limiter::test_settings_may_change_at_any_time",
        "test_conf::test_override_settings_takes_effect_and_is_undone",
    ),
    # Seeing what goes on.
    "C70": (
        "nobody can see who is limited; by design memcached is listed too",
        "test_ratelimit_inspect::test_another_process_sees_the_counters",
        "test_ratelimit_inspect::test_locmem_cannot_be_seen_from_another_process",
        "test_ratelimit_inspect::test_a_cache_that_cannot_list_still_answers_for_one_caller",
    ),
    "C71": (
        "listing blocks Redis",
        "test_ratelimit_inspect::test_redis_is_scanned_in_large_steps",
        "test_ratelimit_inspect::test_it_says_when_it_cut",
    ),
    "C72": (
        "one line of log for each refusal",
        "here",
        "test_outages::test_nobody_listens",
    ),
    "C73": ("nothing tells which limit fired", "here"),
    "C74": ("a peek counts or lies", "test_limiter::test_a_peek_writes_nothing_and_says_what_a_hit_would_be_told"),
    "C75": (
        "nobody can be unblocked",
        "test_limiter::test_who_is_reset_starts_from_nothing_and_nobody_else",
        "test_ratelimit_inspect::test_reset_of_a_caller",
    ),
    # Security, and counting by the outcome.
    "C76": (
        "a limit by account locks its owner out",
        "here",
        "test_recipes::test_login",
    ),
    "C77": (
        "only failures count",
        "test_limiter::test_only_failures_are_counted",
        "test_limiter::test_a_success_forgives_the_failures",
    ),
}
"""Case → what goes wrong elsewhere, then the tests which show that it does not here: ``file::test``, or "here"."""

ME = "ip:127.0.0.1"

urlpatterns: list[Any] = []


@lru_cache(None)
def functions(file: str) -> set[str]:
    """Names of the functions and methods in a file of tests."""
    tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_case_is_in_the_table() -> None:
    assert list(CASES) == [f"C{number:02}" for number in range(1, 78)]


def test_where_the_table_points_is_a_test() -> None:
    for case, (_, *places) in CASES.items():
        own = any(name.startswith(f"test_{case.lower()}_") for name in globals())
        assert own is ("here" in places), case
        for file, _, name in (place.partition("::") for place in places if place != "here"):
            assert name in functions(file), f"{case}: {file}.py has no {name}"


@pytest.fixture(autouse=True)
def clock(use_cache: Callable[..., Any]) -> Iterator[Any]:
    """The clock stands still, and nothing has been counted yet."""
    use_cache("locmem")
    with freeze_time(HALF_PAST, real_asyncio=True) as frozen:
        yield frozen


@pytest.fixture
def site(settings: Any) -> Callable[..., None]:
    """``site(view)``: a site of just this view."""

    def use(view: Any) -> None:
        urlpatterns[:] = [path("", view, name="only")]
        settings.ROOT_URLCONF = __name__

    return use


def everywhere(settings: Any, rate: str, key: Any = "ip", *, top: Any = None, **options: Any) -> None:
    """One limit on the whole site."""
    scope = {"RATE": rate, "KEY": key, "PATHS": ["*"], **options}
    limit(settings, middleware=True, **(top or {}), ask=scope)


def keys() -> list[str]:
    """The keys of all counters, as the store holds them."""
    return [cache.make_key(entry.key) for entry in get_store("default").scan("rl:")]


# ------------------------------------------------------------------------------------------- addresses and proxies


def forwarded(chain: str, peer: str = "127.0.0.1") -> dict[str, Any]:
    return {"REMOTE_ADDR": peer, "HTTP_X_FORWARDED_FOR": chain}


@pytest.mark.parametrize("trusted", [["127.0.0.1"], ["127.0.0.0/8"], 1])
def test_c01_visitors_behind_a_proxy_are_told_apart(trusted: Any, settings: Any, client: Client) -> None:
    everywhere(settings, "2/m", top={"TRUSTED_PROXIES": trusted})
    assert statuses(client, "/plain", 3, **forwarded("198.51.100.1")) == [200, 200, 429]
    assert statuses(client, "/plain", 1, **forwarded("198.51.100.2")) == [200]


def test_c02_without_an_address(settings: Any, client: Client) -> None:
    everywhere(settings, "2/m")
    assert statuses(client, "/plain", 3, REMOTE_ADDR="") == [200, 200, 429]
    everywhere(settings, "2/m", top={"TRUSTED_PROXIES": "unix"})
    assert statuses(client, "/plain", 3, **forwarded("198.51.100.1", "")) == [200, 200, 429]
    assert statuses(client, "/plain", 3, **forwarded("198.51.100.2", "")) == [200, 200, 429]


@pytest.mark.parametrize("trusted", [["127.0.0.1"], 1])
def test_c03_what_stands_before_the_address_mints_no_budget(trusted: Any, settings: Any, client: Client) -> None:
    everywhere(settings, "3/m", top={"TRUSTED_PROXIES": trusted})
    forged = [forwarded(f"{lie}, 203.0.113.9") for lie in ("junk", "1.2.3.4", "10.0.0.1", "::1", "", "127.0.0.1")]
    assert [client.get("/plain", **extra).status_code for extra in forged] == [200] * 3 + [429] * 3


def test_c04_without_a_proxy_nobody_forwards(settings: Any, client: Client) -> None:
    everywhere(settings, "3/m")
    forged = [forwarded(f"198.51.100.{number}", "203.0.113.9") for number in range(5)]
    assert [client.get("/plain", **extra).status_code for extra in forged] == [200, 200, 200, 429, 429]


def test_c06_a_network_of_one_customer_is_one_caller(settings: Any, client: Client) -> None:
    everywhere(settings, "2/m")
    peers = [f"2001:db8:1:2::{number}" for number in (1, 2, 3)]
    assert [client.get("/plain", REMOTE_ADDR=peer).status_code for peer in peers] == [200, 200, 429]
    assert client.get("/plain", REMOTE_ADDR="2001:db8:1:3::1").status_code == 200


def test_c07_ipv6_and_zones(settings: Any, client: Client) -> None:
    everywhere(settings, "9/m")
    seen = [[client.get("/who", REMOTE_ADDR=peer).json() for _ in range(2)] for peer in ("2001:db8::7", "fe80::1%eth0")]
    assert seen == [[{"ask": "ip:2001:db8::/64"}] * 2, [{"ask": "ip:fe80::/64"}] * 2]


def test_c08_who_writes_a_victims_name_burns_nothing_of_it(
    settings: Any, client: Client, django_user_model: Any, db: None
) -> None:
    everywhere(settings, "3/m", "user|ip")
    victim = django_user_model.objects.create_user("victim", pk=42)
    forged = {"headers": {"x-user-id": "42", "authorization": "42", "cookie": "sessionid=42"}}
    statuses(client, "/plain", 10, REMOTE_ADDR="198.51.100.1", **forged)
    client.force_login(victim)
    assert statuses(client, "/plain", 4, REMOTE_ADDR="198.51.100.1") == [200, 200, 200, 429]


# ------------------------------------------------------------------------------------------------------------ keys

HOSTILE = [
    "198.51.100.1, 10.0.0.2",
    "anna\nbert",
    "a\tb",
    "a b",
    "\x00",
    "\x7f",
    "é ü",
    "💣",
    "\ud800",
    "x" * 10_000,
    "%20",
]
ROOMY = "p" * 60
"""A KEY_PREFIX that leaves little of memcached's 250 characters."""


@pytest.mark.parametrize("kind", ["locmem", "pymemcache"])
def test_c10_no_identity_makes_a_key_that_memcached_refuses(
    kind: str, settings: Any, client: Client, use_cache: Any
) -> None:
    use_cache(kind, KEY_PREFIX=ROOMY, VERSION=1000)
    asked = iter(HOSTILE)
    everywhere(settings, "1/m", lambda request: next(asked))
    assert statuses(client, "/plain", len(HOSTILE)) == [200] * len(HOSTILE)
    assert len(keys()) == len(HOSTILE)
    assert [warning for key in keys() for warning in memcache_key_warnings(key)] == []


def test_c11_long_headers_on_memcached(settings: Any, client: Client, use_cache: Any) -> None:
    use_cache("pymemcache", KEY_PREFIX=ROOMY)
    everywhere(settings, "1/m", "header:X-Api-Key", CEILING=5)
    long = "k" * 10_000
    assert [statuses(client, "/plain", 2, headers={"x-api-key": long + end}) for end in "ab"] == [[200, 429]] * 2
    assert len(keys()) == 3, "two callers and their address"
    assert all(len(key) < 250 for key in keys())


@pytest.mark.parametrize("key", ["header:User-Agent", "cookie:anon", "field:name", "arg:slug", "claim:sub", "session"])
def test_c12_what_is_missing_is_no_500(key: str, settings: Any, client: Client) -> None:
    everywhere(settings, "1/m", key)
    assert statuses(client, "/plain", 2) == [200, 429]


def as_user(get_response: Any) -> Any:
    """Somebody else's authentication."""

    def middleware(request: HttpRequest) -> Any:
        if name := request.headers.get("X-User"):
            request.user = SimpleNamespace(is_authenticated=True, pk=name)  # type: ignore[assignment]
        return get_response(request)

    return middleware


def test_c14_identities_of_different_kinds_do_not_collide(settings: Any, client: Client) -> None:
    everywhere(settings, "1/m", "user|header:X-Api-Key|cookie:anon|ip")
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.as_user"]
    one = "203.0.113.9"
    for extra in (
        {"headers": {"x-user": one}},
        {"headers": {"x-api-key": one}},
        {"headers": {"cookie": f"anon={one}"}},
        {"REMOTE_ADDR": one},
    ):
        assert statuses(client, "/plain", 2, **extra) == [200, 429]
    everywhere(settings, "1/m", "header:X-A+header:X-B", ON_MISSING="deny")
    for a, b in (("ab", "c"), ("a", "bc"), ("a+b", "c"), ("a", "b+c"), ("c", "ab")):
        assert statuses(client, "/plain", 2, headers={"x-a": a, "x-b": b}) == [200, 429]


def token(request: HttpRequest) -> str | None:
    """As the authentication reads it: the last word, whatever stands before."""
    words = request.headers.get("Authorization", "").split()
    return words[-1] if words else None


def test_c15_spellings_of_a_token_share_a_counter(settings: Any, client: Client) -> None:
    everywhere(settings, "2/m", token)
    spellings = ["Bearer K", "x Bearer K", "bearer  K"]
    answers = [client.get("/plain", headers={"authorization": spelling}) for spelling in spellings]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


@pytest.mark.parametrize("kind", ["header:X-Api-Key", "cookie:key", "field:key", "arg:slug"])
def test_c20_secrets_are_nowhere_to_be_read(
    kind: str, settings: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "sk-live-0123456789abcdef"
    everywhere(settings, "1/m", kind, CEILING=5)
    client.cookies["key"] = secret
    with caplog.at_level(logging.DEBUG):
        answers = [client.post(f"/item/{secret}", {"key": secret}, HTTP_X_API_KEY=secret) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    held = {name: pickle.loads(value) for name, value in cache._cache.items()}
    ours = [record for record in caplog.records if record.name == "ratelimit_kv"]
    assert held
    assert ours
    told = [(answer.content, answer.headers) for answer in answers]
    assert secret not in repr((held, [record.__dict__ for record in ours], told))


def machine(get_response: Any) -> Any:
    """The client of an API has shown who it is, and is no user."""

    def middleware(request: HttpRequest) -> Any:
        request.user = None  # type: ignore[assignment]
        request.auth = {"client_id": request.headers["X-Client"]}  # type: ignore[attr-defined]
        return get_response(request)

    return middleware


def client_id(request: HttpRequest) -> str:
    return request.auth["client_id"]  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("key", [client_id, "user|claim:client_id"])
def test_c21_machines_without_a_user(key: Any, settings: Any, client: Client) -> None:
    everywhere(settings, "1/m", key)
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.machine"]
    for name in ("one", "two"):
        assert statuses(client, "/plain", 2, headers={"x-client": name}) == [200, 429]


# ----------------------------------------------------------------------------------------------- caches that do less


def test_c34_a_service_that_takes_one_write_a_second(
    settings: Any, client: Client, caplog: pytest.LogCaptureFixture, clock: Any
) -> None:
    settings.CACHES = {"default": {"BACKEND": "tests.edge_cache.EdgeCache", "LOCATION": "one-write"}}
    everywhere(settings, "3/10s")
    answers = [client.get("/plain") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert ["RateLimit" in answer for answer in answers] == [True, False, False]
    assert [record.message[:11] for record in caplog.records if record.levelname == "WARNING"] == ["store error"]


def test_c36_a_counter_that_was_thrown_away_is_no_500(settings: Any, client: Client, use_cache: Any) -> None:
    use_cache("locmem", OPTIONS={"MAX_ENTRIES": 3})
    everywhere(settings, "1/m", top={"REMEMBER_DENIED": None})
    assert statuses(client, "/plain", 2) == [200, 429]
    for number in range(20):
        assert statuses(client, "/plain", 1, REMOTE_ADDR=f"203.0.113.{number}") == [200]
    assert statuses(client, "/plain", 2) == [200, 429]


# --------------------------------------------------------------------------------------------------- REST framework


def test_c45_a_view_of_tokens_that_opts_out_of_throttling(settings: Any, client: Client, site: Any, db: None) -> None:
    site(ObtainAuthToken.as_view())
    limit(settings, middleware=True, ask={"RATE": "5/m", "KEY": "ip", "URL_NAMES": ["only"]})
    guess = {"username": "anna", "password": "guess"}
    assert [client.post("/", guess).status_code for _ in range(6)] == [400] * 5 + [429]


# ---------------------------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize("algorithm", ["fixed", "sliding", "bucket"])
@pytest.mark.parametrize("rate", ["1/m", "3/m", ["2/10s", "3/m"]])
def test_c58_a_client_that_waits_as_told_gets_in_and_not_a_second_earlier(
    algorithm: str, rate: Any, settings: Any, client: Client, clock: Any
) -> None:
    everywhere(settings, rate, ALGORITHM=algorithm)
    clock.tick(0.3)
    waits = 0
    for _ in range(20):
        answer = client.get("/plain")
        if answer.status_code == 200:
            continue
        waits += 1
        clock.tick(int(answer["Retry-After"]) - 1)
        assert client.get("/plain").status_code == 429
        clock.tick(1)
        assert client.get("/plain").status_code == 200
    assert waits >= 5


def test_c59_reset_is_what_retry_after_is(settings: Any, client: Client) -> None:
    everywhere(settings, "1/m", top={"HEADERS": "legacy"})
    statuses(client, "/plain", 1)
    answer = client.get("/plain")
    assert answer["X-RateLimit-Reset"] == answer["Retry-After"] == "30"


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    raise AssertionError("nobody was forbidden anything")


handler403 = forbidden


def asks(request: HttpRequest) -> HttpResponse:
    check(request, "ask").raise_if_denied()
    return HttpResponse()


@pytest.mark.parametrize("view", [rate_limit("ask")(views.plain), asks])
def test_c60_a_refusal_is_no_403(view: Any, settings: Any, client: Client, site: Any) -> None:
    site(view)
    limit(settings, middleware=True, ask="1/m")
    assert statuses(client, "/", 2) == [200, 429]


# -------------------------------------------------------------------------------------------------------- the clock

IN_THE_FREEZE = """
from freezegun import freeze_time
with freeze_time("2026-03-01 12:00:30") as clock:
    import django; django.setup()
    from ratelimit_kv import hit
    said = [hit("ask", "user:1").allowed for _ in range(2)]
    clock.tick(29)
    said += [hit("ask", "user:1").allowed]
    clock.tick(1)
    said += [hit("ask", "user:1").allowed]
print(said)
"""


def test_c67_imported_while_the_clock_is_frozen(settings: Any) -> None:
    limit(settings, ask="1/m")
    said = subprocess.check_output([sys.executable, "-c", IN_THE_FREEZE], env=child_environment(), text=True)
    assert said == "[True, False, False, True]\n"


@pytest.mark.parametrize("kind", ["redis", "django-redis", "pymemcache"])
def test_c68_a_server_whose_clock_runs_on(
    kind: str, settings: Any, client: Client, use_cache: Any, clock: Any, request: pytest.FixtureRequest
) -> None:
    """Its time has nothing to do with ours, so the key outlives the window by far and has the window's number in it."""
    use_cache(kind)
    everywhere(settings, "1/s", top={"REMEMBER_DENIED": None})
    assert statuses(client, "/plain", 2) == [200, 429]
    (key,) = keys()
    if kind != "pymemcache":
        raw = request.getfixturevalue("redis_server")
        import redis

        with redis.Redis(host=raw.host, port=raw.port) as server:
            assert server.pttl(key) >= 60_000
    clock.tick(1)
    assert statuses(client, "/plain", 2) == [200, 429]
    clock.tick(3600)
    assert statuses(client, "/plain", 2) == [200, 429]


# -------------------------------------------------------------------------------------------- seeing what goes on


@pytest.mark.parametrize("top", [{}, {"REMEMBER_DENIED": None}], ids=["remembered", "asked each time"])
def test_c72_one_warning_a_caller_and_window(
    top: Any, settings: Any, client: Client, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    everywhere(settings, "1/m", top=top)
    for expected in (1, 2):
        assert statuses(client, "/plain", 11) == [200] + [429] * 10
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == expected
        assert (warnings[-1].scope, warnings[-1].identity) == ("ask", ME)  # type: ignore[attr-defined]
        clock.tick(60)


def test_c73_the_application_hears_which_limit_it_was(settings: Any, client: Client, site: Any) -> None:
    seen: list[Any] = []

    def look(request: HttpRequest, where: str) -> None:
        limits = request.rate_limit  # type: ignore[attr-defined]
        seen.append((where, limits.allowed, {one.scope: one.remaining for one in limits.decisions}))

    def view(request: HttpRequest) -> HttpResponse:
        look(request, "view")
        return HttpResponse()

    def refused(request: HttpRequest, decision: Any) -> HttpResponse:
        look(request, f"handler of {decision.scope}")
        return HttpResponse(status=429)

    def heard(sender: Any, request: HttpRequest, decision: Any, **kwargs: Any) -> None:
        seen.append((f"signal of {decision.scope}", decision.limit, decision.remaining))

    site(view)
    both = {"KEY": "ip", "PATHS": ["*"]}
    limit(settings, middleware=True, RESPONSE=refused, wide={"RATE": "9/m", **both}, ask={"RATE": "1/m", **both})
    denied.connect(heard)
    try:
        answers = [client.get("/") for _ in range(2)]
    finally:
        denied.disconnect(heard)
    assert seen == [
        ("view", True, {"wide": 8, "ask": 0}),
        ("signal of ask", 1, 0),
        ("handler of ask", False, {"wide": 8, "ask": 0}),
    ]
    for answer in answers:
        assert re.findall(r'"([\w-]+)"', answer["RateLimit"]) == ["ask"]


# ---------------------------------------------------------------------------------------------------------- security


def test_c76_an_attacker_locks_nobody_out(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, login={"RATE": "3/m", "KEY": "field:username+ip", "URL_NAMES": ["login"]})
    alice = {"username": "alice"}
    attacker, home = ({"REMOTE_ADDR": peer} for peer in ("198.51.100.1", "203.0.113.9"))
    assert [client.post("/login/", alice, **attacker).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert client.post("/login/", {"username": " ALICE"}, **attacker).status_code == 429, (
        "another spelling helps nobody"
    )
    assert client.post("/login/", alice, **home).status_code == 200
    assert peek("login", "field:alice+ip:203.0.113.9").remaining == 2
