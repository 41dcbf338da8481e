"""Switches for the tests of projects that use rate limits."""

from __future__ import annotations

import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import Client, SimpleTestCase, TestCase, override_settings
from django.urls import path
from freezegun import freeze_time

from ratelimit_kv import hit, peek, rate_limit
from ratelimit_kv.conf import get_config
from ratelimit_kv.process import runtime
from ratelimit_kv.stores import CannotList, StoreError, get_store
from ratelimit_kv.testing import (
    RateLimits,
    RateLimitTestMixin,
    empty_store,
    merged,
    no_limits,
    no_rate_limits,  # noqa: F401
    override_rate_limits,
    rate_limits,  # noqa: F401
)

BASE = {
    "CACHE": "default",
    "SCOPES": {"ask": {"RATE": "2/h", "KEY": "ip"}, "short": "1/h"},
}


@rate_limit("ask")
def ask(request: HttpRequest) -> HttpResponse:
    return HttpResponse("an answer")


urlpatterns = [path("ask/", ask)]


@pytest.fixture(autouse=True)
def project(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    settings.RATELIMIT_KV = BASE


def statuses(times: int) -> list[int]:
    return [Client().get("/ask/").status_code for _ in range(times)]


def run_case(case: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def assert_passes(case: type[unittest.TestCase], tests: int) -> None:
    result = run_case(case)
    assert not [text for _, text in (*result.errors, *result.failures)]
    assert result.testsRun == tests


# ── Settings ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "scopes"),
    [
        ({"SCOPES": {"ask": "9/m"}}, {"ask": {"RATE": "9/m", "KEY": "ip"}, "short": "1/h"}),
        ({"SCOPES": {"ask": {"MODE": "shadow"}}}, {"ask": {**BASE["SCOPES"]["ask"], "MODE": "shadow"}, "short": "1/h"}),
        ({"SCOPES": {"short": {"KEY": "ip"}}}, {**BASE["SCOPES"], "short": {"RATE": "1/h", "KEY": "ip"}}),
        ({"SCOPES": {"short": ["1/s", "2/m"]}}, {**BASE["SCOPES"], "short": {"RATE": ["1/s", "2/m"]}}),
        ({"SCOPES": {"new": "3/m"}}, {**BASE["SCOPES"], "new": "3/m"}),
        ({"ENABLED": False}, BASE["SCOPES"]),
    ],
)
def test_what_is_not_named_stays(options: dict[str, Any], scopes: Any) -> None:
    result = merged(BASE, options)
    assert result == {**BASE, **options, "SCOPES": scopes}
    assert BASE["SCOPES"]["ask"] == {"RATE": "2/h", "KEY": "ip"}, "what was given is left alone"


def test_without_settings_there_is_nothing_to_merge_into() -> None:
    assert merged(None, {"SCOPES": {"a": "1/m"}}) == {"SCOPES": {"a": "1/m"}}
    assert merged({}, {"SCOPES": "wrong"}) == {"SCOPES": "wrong"}


def test_overrides_nest_and_end() -> None:
    def limits() -> tuple[int, str]:
        (scope,) = get_config().family("ask")
        assert scope.rates is not None
        return scope.rates[0].limit, scope.on_error

    with override_rate_limits(SCOPES={"ask": "9/m"}):
        assert limits() == (9, "allow")
        with override_rate_limits(ON_ERROR="deny"):
            assert limits() == (9, "deny")
        assert limits() == (9, "allow")
    assert limits() == (2, "allow")


def test_a_wrong_override_fails_where_it_is_written() -> None:
    with (
        pytest.raises(ImproperlyConfigured, match="Did you mean 'KEY'"),
        override_rate_limits(SCOPES={"ask": {"KEYS": "ip"}}),
    ):
        pytest.fail("not reached")
    assert get_config().family("ask")[0].key.text == "ip"


def test_no_limits_for_a_block_and_a_function(rate_limits: RateLimits) -> None:  # noqa: F811
    @no_limits()
    def unlimited() -> list[int]:
        return statuses(4)

    assert unlimited() == [200] * 4
    with no_limits():
        assert statuses(3) == [200] * 3
    assert statuses(3) == [200, 200, 429], "nothing was counted"


async def test_no_limits_for_an_async_function() -> None:
    @no_limits()
    async def enabled() -> bool:
        return get_config().enabled

    assert not await enabled()
    assert get_config().enabled


def test_no_limits_for_a_class() -> None:
    @no_limits()
    class Case(SimpleTestCase):
        def test_first(self) -> None:
            assert statuses(4) == [200] * 4

        @override_rate_limits(ENABLED=True, SCOPES={"ask": "1/h"})
        def test_second(self) -> None:
            with empty_store():
                assert statuses(2) == [200, 429]

        @override_settings(RATELIMIT_KV={"SCOPES": {"ask": "0/h"}})
        def test_third(self) -> None:
            assert statuses(1) == [429]

    assert_passes(Case, 3)
    assert get_config().enabled


def test_a_class_that_is_no_test_case_is_refused() -> None:
    with pytest.raises(TypeError, match="TestCase"):

        @no_limits()
        class Plain:
            pass


# ── An empty store ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["locmem", "database-sqlite", "redis"])
def test_a_block_starts_and_ends_with_nothing(kind: str, use_cache: Callable[..., Any]) -> None:
    cache = use_cache(kind)
    cache.set("foreign", "stays", 600)
    assert statuses(3) == [200, 200, 429]
    for _ in range(2):
        with empty_store():
            assert statuses(3) == [200, 200, 429]
            assert len(runtime().memory or ()) == 1
    assert statuses(1) == [200], "what was counted before is gone too, and so is what this process remembered"
    assert cache.get("foreign") == "stays"


@pytest.mark.parametrize("kind", ["locmem", "redis"])
def test_nothing_is_left_behind(kind: str, use_cache: Callable[..., Any]) -> None:
    use_cache(kind)
    prefixes = []
    with empty_store():
        hit("ask", "ip:192.0.2.1")
        prefixes.append(get_config().defaults.prefix)
        assert len(list(get_store("default").scan(prefixes[0]))) == 1
    assert list(get_store("default").scan("rl:")) == []
    assert list(get_store("default").scan(prefixes[0])) == []


def test_settings_that_were_replaced_inside_are_of_no_harm(use_cache: Callable[..., Any]) -> None:
    use_cache("redis")
    for _ in range(2):
        with empty_store(), override_settings(RATELIMIT_KV=BASE):
            assert statuses(3) == [200, 200, 429]


def test_a_cache_that_cannot_list_is_empty_all_the_same(use_cache: Callable[..., Any], monkeypatch: Any) -> None:
    use_cache("redis")

    def cannot(self: Any, prefix: str) -> Iterator[Any]:
        raise CannotList("not this one")

    monkeypatch.setattr(type(get_store("default")), "scan", cannot)
    for _ in range(2):
        with empty_store():
            assert statuses(3) == [200, 200, 429]


def test_a_cache_that_is_down_says_so_before_and_keeps_quiet_after(
    own_redis: Callable[..., Any], use_cache: Callable[..., Any]
) -> None:
    server = own_redis()
    use_cache("redis", server=server)
    with empty_store():
        server.stop()
        assert statuses(1) == [200]
    with pytest.raises(StoreError), empty_store():
        pytest.fail("not reached")


@pytest.mark.django_db
def test_the_mixin_for_test_cases(use_cache: Callable[..., Any]) -> None:
    use_cache("locmem")

    class Case(RateLimitTestMixin, TestCase):
        def setUp(self) -> None:
            super().setUp()
            self.before = peek("ask", "ip:127.0.0.1")

        def test_first(self) -> None:
            assert self.before.remaining == 2
            assert statuses(3) == [200, 200, 429]

        test_second = test_first

        @override_rate_limits(SCOPES={"ask": "1/h"})
        def test_third(self) -> None:
            assert statuses(2) == [200, 429]

        async def test_async(self) -> None:
            assert [(await self.async_client.get("/ask/")).status_code for _ in range(3)] == [200, 200, 429]

        @freeze_time("2026-03-10 12:00:00", as_kwarg="clock")
        def test_frozen(self, clock: Any) -> None:
            assert statuses(3) == [200, 200, 429]
            clock.tick(3599)
            assert statuses(1) == [429]
            clock.tick(1)
            assert statuses(1) == [200]

    assert_passes(Case, 5)
    assert peek("ask", "ip:127.0.0.1").remaining == 2


# ── pytest ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("turn", range(2))
@pytest.mark.usefixtures("use_cache")
def test_the_fixture_starts_from_nothing(turn: int, rate_limits: RateLimits) -> None:  # noqa: F811
    assert statuses(3) == [200, 200, 429]
    assert rate_limits.reset("ask") == 1
    assert statuses(1) == [200]
    rate_limits.override(SCOPES={"ask": "1/h"})
    assert statuses(1) == [429]
    rate_limits.override(SCOPES={"short": "7/h"})
    assert statuses(1) == [429], "the first override still holds"
    rate_limits.off()
    assert statuses(4) == [200] * 4


def test_limits_can_be_off_for_a_test(no_rate_limits: None) -> None:  # noqa: F811
    assert statuses(4) == [200] * 4


def test_a_wrong_override_fails_in_the_test(rate_limits: RateLimits) -> None:  # noqa: F811
    with pytest.raises(ImproperlyConfigured):
        rate_limits.override(SCOPES={"ask": "often"})
    rate_limits.override(SCOPES={"ask": "3/h"})


def test_time_may_be_frozen(rate_limits: RateLimits) -> None:  # noqa: F811
    with freeze_time("2026-03-10 12:00:00") as clock:
        assert statuses(3) == [200, 200, 429]
        clock.tick(3600)
        assert statuses(3) == [200, 200, 429]


OWN_SUITE = """
import pytest
from django.conf import settings
if not settings.configured:
    settings.configure(
        SECRET_KEY="x", ALLOWED_HOSTS=["*"], ROOT_URLCONF="test_own", INSTALLED_APPS=["ratelimit_kv"],
        RATELIMIT_KV={"SCOPES": {"ask": "2/h"}},
    )
    import django
    django.setup()

from ratelimit_kv import hit
from ratelimit_kv.conf import get_config
from ratelimit_kv.testing import no_rate_limits, rate_limits

urlpatterns = []

def test_with_settings(rate_limits, request):
    if request.config.pluginmanager.hasplugin("django"):
        request.getfixturevalue("settings").DEBUG = True
    rate_limits.override(SCOPES={"ask": "1/h"})
    assert [hit("ask", "user:1").allowed for _ in range(2)] == [True, False]

def test_it_was_undone():
    assert settings.RATELIMIT_KV == {"SCOPES": {"ask": "2/h"}}
    assert not settings.DEBUG
    assert [hit("ask", "user:1").allowed for _ in range(3)] == [True, True, False]

def test_off(no_rate_limits):
    assert not get_config().enabled

def test_on():
    assert get_config().enabled
"""


@pytest.mark.parametrize("options", [[], ["-p", "no:django"]], ids=["with pytest-django", "without"])
def test_a_suite_of_its_own(options: list[str], tmp_path: Any) -> None:
    (tmp_path / "test_own.py").write_text(OWN_SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_own.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_a_project_without_pytest_can_use_the_rest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from django.conf import settings; settings.configure()\n"
        "from ratelimit_kv import testing\n"
        "assert not hasattr(testing, 'rate_limits')\n"
        "print(sorted(testing.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'no_limits'" in done.stdout
