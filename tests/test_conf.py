"""Settings: every option, every mistake with its path, the environment, and when they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path
from django.views import View
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ratelimit_kv import (
    callables,
    client_ip,
    conf,
    decorators,
    hit,
    identity,
    peek,
    rate_limit,
    rates,
    reset_all,
    scopes,
)
from ratelimit_kv.callables import Function
from ratelimit_kv.client_ip import ClientIP
from ratelimit_kv.conf import SETTING, TOP, Config, Remember, as_given, get_config, load, read_project
from ratelimit_kv.middleware import RateLimitMiddleware
from ratelimit_kv.scopes import Problem
from tests.test_scopes import JUNK

HERE = __name__
LOCMEM = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "OPTIONS": {"MAX_ENTRIES": 100_000}}


@pytest.fixture(autouse=True)
def caches(settings: Any) -> None:
    settings.CACHES = {
        "default": {**LOCMEM, "LOCATION": "conf-default"},
        "ratelimit": {**LOCMEM, "LOCATION": "conf-ratelimit"},
    }


@pytest.fixture
def loaded(settings: Any) -> Callable[[Any], tuple[Config, list[Problem]]]:
    """The Config and the problems of such a RATELIMIT_KV."""

    def run(given: Any) -> tuple[Config, list[Problem]]:
        settings.RATELIMIT_KV = given
        return load()

    return run


@pytest.fixture
def config_of(loaded: Any) -> Callable[[Any], Config]:
    def run(given: Any) -> Config:
        config, problems = loaded(given)
        assert problems == []
        return config  # type: ignore[no-any-return]

    return run


def somebody(request: HttpRequest) -> bool:
    return False


# -------------------------------------------------------------------------------------------------------- the top level


def test_without_settings(settings: Any) -> None:
    del settings.RATELIMIT_KV
    assert as_given() == {}
    config, problems = load()
    assert problems == []
    assert config.enabled
    assert config.families == {}
    assert config.defaults == ("default", "rl", "allow")
    assert config.headers == "draft"
    assert config.remember == Remember(10_000, 5.0)
    assert (config.breaker_failures, config.breaker_seconds) == (3, 5.0)
    assert config.processes is config.response is config.exempt is None
    assert config.identities.client_ip == ClientIP.build()


GOOD: list[tuple[str, Any, Callable[[Config], Any], Any]] = [
    ("ENABLED", False, lambda config: config.enabled, False),
    ("CACHE", "ratelimit", lambda config: config.defaults.cache, "ratelimit"),
    ("PREFIX", "shop.v2_x-1", lambda config: config.defaults.prefix, "shop.v2_x-1"),
    ("SCOPES", {"ask": "5/m"}, lambda config: [scope.name for scope in config.scopes], ["ask"]),
    ("SCOPES", {}, lambda config: config.scopes, ()),
    ("ON_ERROR", "deny", lambda config: config.defaults.on_error, "deny"),
    ("ON_ERROR", "local", lambda config: config.defaults.on_error, "local"),
    *[("HEADERS", word, lambda config: config.headers, word) for word in ("draft", "legacy", "none")],
    ("TRUSTED_PROXIES", ["10.0.0.0/8", "unix"], lambda config: config.identities.client_ip.unix, True),
    ("TRUSTED_PROXIES", 2, lambda config: config.identities.client_ip.hops, 2),
    ("TRUSTED_PROXIES", "10.0.0.1, 10.0.0.2", lambda config: len(config.identities.client_ip.networks), 2),
    ("CLIENT_IP_HEADER", None, lambda config: config.identities.client_ip.header, ""),
    ("IPV4_PREFIX", 24, lambda config: config.identities.client_ip.ipv4_prefix, 24),
    ("IPV6_PREFIX", 48, lambda config: config.identities.client_ip.ipv6_prefix, 48),
    ("HASH_IDENTITIES", True, lambda config: config.identities.hash_all, True),
    ("HASH_KEY", None, lambda config: len(config.identities.digest_key), 32),
    ("REMEMBER_DENIED", None, lambda config: config.remember, None),
    ("REMEMBER_DENIED", {"SECONDS": 0.5}, lambda config: config.remember, Remember(10_000, 0.5)),
    ("REMEMBER_DENIED", {"ENTRIES": 1, "SECONDS": 60}, lambda config: config.remember, Remember(1, 60.0)),
    ("BREAKER", {"FAILURES": 1}, lambda config: (config.breaker_failures, config.breaker_seconds), (1, 5.0)),
    ("BREAKER", {"SECONDS": 30}, lambda config: (config.breaker_failures, config.breaker_seconds), (3, 30.0)),
    ("PROCESSES", 8, lambda config: config.processes, 8),
    ("RESPONSE", f"{HERE}.somebody", lambda config: config.response, Function(somebody)),
    ("EXEMPT", somebody, lambda config: config.exempt, Function(somebody)),
    ("EXEMPT_IPS", ["192.0.2.0/24"], lambda config: config.has_exempt_ips, True),
    ("EXEMPT_IPS", (), lambda config: config.has_exempt_ips, False),
    ("ENV_PREFIX", "NOBODY_SETS_THIS_", lambda config: config.switched_off, ()),
    ("ENV_PREFIX", None, lambda config: config.switched_off, ()),
]


@pytest.mark.parametrize(("option", "value", "read", "expected"), GOOD)
def test_what_may_be_written(config_of: Any, option: str, value: Any, read: Any, expected: Any) -> None:
    assert read(config_of({option: value})) == expected


BAD: list[tuple[str, Any, str]] = [
    ("ENABLED", "no", "Write True or False"),
    ("ENABLED", None, "Write True or False"),
    ("ENABLED", 0, "Write True or False"),
    ("CACHE", "ratelimits", "Did you mean 'ratelimit'? There are default, ratelimit."),
    ("CACHE", None, "None"),
    ("CACHE", ["ratelimit"], "not an alias"),
    ("PREFIX", "", "''"),
    ("PREFIX", "rl:", "'rl:'"),
    ("PREFIX", "p" * 33, "1 to 32"),
    ("PREFIX", "rl\n", "1 to 32"),
    ("PREFIX", None, "None"),
    ("SCOPES", [], "Write {'ask': '20/h'}"),
    ("SCOPES", None, "is not a dict"),
    ("SCOPES", "5/m", "is not a dict"),
    ("ON_ERROR", "block", "'allow', 'deny', 'local'"),
    ("HEADERS", "legcy", "Did you mean 'legacy'?"),
    ("HEADERS", None, "None"),
    ("HEADERS", True, "True"),
    ("TRUSTED_PROXIES", None, "None"),
    ("TRUSTED_PROXIES", True, "True"),
    ("TRUSTED_PROXIES", "2", "without quotes"),
    ("TRUSTED_PROXIES", -1, "-1"),
    ("TRUSTED_PROXIES", {"10.0.0.0/8": True}, "is not a list"),
    ("CLIENT_IP_HEADER", "CF-Connecting-IP", "no proxy is trusted"),
    ("CLIENT_IP_HEADER", "", "''"),
    ("CLIENT_IP_HEADER", 7, "7"),
    ("IPV4_PREFIX", 8, "from 16 to 32"),
    ("IPV4_PREFIX", "24", "'24'"),
    ("IPV6_PREFIX", 32, "from 48 to 128"),
    ("IPV6_PREFIX", None, "None"),
    ("HASH_IDENTITIES", "yes", "Write True or False"),
    ("HASH_KEY", "", "''"),
    ("HASH_KEY", b"secret", "is not text"),
    ("REMEMBER_DENIED", False, 'Write {"ENTRIES": 10000, "SECONDS": 5}'),
    ("REMEMBER_DENIED", {"SECOND": 5}, "Did you mean 'SECONDS'?"),
    ("REMEMBER_DENIED", {"ENTRIES": 0}, "ENTRIES 0"),
    ("REMEMBER_DENIED", {"SECONDS": 61}, "SECONDS 61"),
    ("REMEMBER_DENIED", {"SECONDS": None}, "SECONDS None"),
    ("BREAKER", None, 'Write {"FAILURES": 3, "SECONDS": 5}'),
    ("BREAKER", {"FAILS": 3}, "'FAILS' is unknown"),
    ("BREAKER", {"FAILURES": 1.5}, "FAILURES 1.5"),
    ("BREAKER", {"SECONDS": float("nan")}, "SECONDS nan"),
    ("PROCESSES", 0, "or None"),
    ("PROCESSES", "auto", "'auto'"),
    ("RESPONSE", "no.such.function", "cannot be imported"),
    ("EXEMPT", True, "is not callable"),
    ("EXEMPT", "somebody", "cannot be imported"),
    ("EXEMPT_IPS", None, "None"),
    ("ENV_PREFIX", "", "''"),
    ("ENV_PREFIX", "RATE_LIMIT", "end in _"),
    ("ENV_PREFIX", "RATE LIMIT_", "end in _"),
    ("ENV_PREFIX", True, "True"),
]


@pytest.mark.parametrize(("option", "value", "words"), BAD)
def test_what_may_not_be_written(loaded: Any, option: str, value: Any, words: str) -> None:
    _, problems = loaded({option: value})
    ((where, message),) = problems
    assert where == f'RATELIMIT_KV["{option}"]'
    assert words in message


def test_every_option_is_in_the_tables() -> None:
    assert {option for option, *_ in GOOD} == {option for option, *_ in BAD} == set(TOP)


@pytest.mark.parametrize(
    ("given", "where", "words"),
    [
        (
            {"TRUSTED_PROXIES": ["10.0.0.0/8", "10.0.0.1/8"]},
            'RATELIMIT_KV["TRUSTED_PROXIES"][1]',
            "Did you mean '10.0.0.0/8'?",
        ),
        ({"EXEMPT_IPS": ["office"]}, 'RATELIMIT_KV["EXEMPT_IPS"][0]', "'office' is not an address or network."),
        ({"SCOPE": {}}, "RATELIMIT_KV", "'SCOPE' is not an option. Did you mean 'SCOPES'?"),
        ({"scopes": {}}, "RATELIMIT_KV", "Did you mean 'SCOPES'?"),
        ({7: 7}, "RATELIMIT_KV", "7 is not an option."),
        ([], "RATELIMIT_KV", "Write RATELIMIT_KV = {'SCOPES': {...}}."),
        (None, "RATELIMIT_KV", "None is not a dict."),
        ({"SCOPES": {7: "5/m"}}, 'RATELIMIT_KV["SCOPES"][7]', "7 cannot be the name of a scope."),
        (
            {"SCOPES": {"ask": {"RATE": "5/m", "CACHE": "ratelimits"}}},
            'RATELIMIT_KV["SCOPES"]["ask"]["CACHE"]',
            "Did you mean 'ratelimit'?",
        ),
        (
            {"SCOPES": {"signin": {"PRESET": "login"}, "signin.account": "5/m"}},
            'RATELIMIT_KV["SCOPES"]["signin.account"]',
            "is also made by 'signin'",
        ),
    ],
)
def test_each_mistake_has_its_path(loaded: Any, given: Any, where: str, words: str) -> None:
    _, ((path_of_it, message),) = loaded(given)
    assert path_of_it == where
    assert words in message


def test_everything_that_is_wrong_is_said_at_once(loaded: Any) -> None:
    given = {
        "CACHE": "nope",
        "HEADERZ": "none",
        "PREFIX": ":",
        "TRUSTED_PROXIES": ["x", "y"],
        "IPV4_PREFIX": 0,
        "SCOPES": {"ask": "5/hr", "Bad": "5/m", "c": {"RATE": "5/m", "CACHE": "other"}},
    }
    _, problems = loaded(given)
    assert [problem.path for problem in problems] == [
        "RATELIMIT_KV",
        'RATELIMIT_KV["CACHE"]',
        'RATELIMIT_KV["PREFIX"]',
        'RATELIMIT_KV["TRUSTED_PROXIES"][0]',
        'RATELIMIT_KV["TRUSTED_PROXIES"][1]',
        'RATELIMIT_KV["IPV4_PREFIX"]',
        'RATELIMIT_KV["SCOPES"]["ask"]["RATE"]',
        'RATELIMIT_KV["SCOPES"]["Bad"]',
        'RATELIMIT_KV["SCOPES"]["c"]["CACHE"]',
    ]


def test_the_keys_of_digests(config_of: Any, loaded: Any, settings: Any) -> None:
    by_default = config_of({}).identities.digest_key
    settings.SECRET_KEY = "another"
    assert config_of({}).identities.digest_key != by_default
    own = config_of({"HASH_KEY": "own"}).identities.digest_key
    settings.SECRET_KEY = "and another"
    assert config_of({"HASH_KEY": "own"}).identities.digest_key == own
    # Django takes bytes as well.
    settings.SECRET_KEY = b"bytes \xff"
    assert config_of({}).identities.digest_key != by_default
    settings.SECRET_KEY = ""
    _, ((where, message),) = loaded({})
    assert where == 'RATELIMIT_KV["HASH_KEY"]'
    assert "no SECRET_KEY" in message
    assert config_of({"HASH_KEY": "own"}).identities.digest_key == own


@pytest.mark.parametrize("option", list(TOP))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JUNK)
def test_no_value_raises(option: str, value: Any) -> None:
    with override_settings(RATELIMIT_KV={option: value}):
        for problem in load()[1]:
            assert problem.path.startswith(f'RATELIMIT_KV["{option}"]')


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JUNK | st.dictionaries(st.sampled_from(list(TOP)) | st.text(), JUNK, max_size=5))
def test_no_settings_raise(value: Any) -> None:
    with override_settings(RATELIMIT_KV=value):
        config, problems = load()
    assert all(str(problem) for problem in problems)
    if not problems:
        assert config.identities is not None


# -------------------------------------------------------------------------------------------------------- the environment

SCOPES = {
    "auth": {"RATE": "30/m", "KEY": "ip", "URL_NAMES": ["login"]},
    "ask-budget": "100/day",
    "roast": {"RATE": "5/h", "KEY": "cookie:anon", "CEILING": 5},
    "leased": {"RATE": "1000/h", "KEY": "ip", "LEASE": 100},
    "open": {"RATE": "5", "KEY": "ip", "ALGORITHM": "concurrent"},
    "local": {"RATE": "5/day", "KEY": "ip", "TIMEZONE": "Europe/Rome"},
    "two": ["5/m", "50/h"],
    "unlimited": {"RATE": None},
    "computed": {"RATE": somebody},
    "signin": {"PRESET": "login"},
    "as.k": "1/m",
    "as_k": "1/m",
}


@pytest.fixture
def with_environment(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Config, list[Problem]]]:
    """The Config and the problems with these variables, each RATE_LIMIT_..."""

    def run(**variables: str) -> tuple[Config, list[Problem]]:
        for name, value in variables.items():
            monkeypatch.setenv(f"RATE_LIMIT_{name}", value)
        return loaded({"SCOPES": SCOPES, "ENV_PREFIX": "RATE_LIMIT_"})  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize(
    ("variables", "name", "expected"),
    [
        ({}, "auth", ["30/m"]),
        ({"AUTH_MAX": "10"}, "auth", ["10/m"]),
        ({"AUTH_WINDOW": "3600"}, "auth", ["30/h"]),
        ({"AUTH_MAX": "10", "AUTH_WINDOW": "30"}, "auth", ["10/30s"]),
        ({"ASK_BUDGET_MAX": "7"}, "ask-budget", ["7/day"]),
        ({"ASK_BUDGET_WINDOW": "60"}, "ask-budget", ["100/m"]),
        # What follows from a rate follows from the new one.
        ({"ROAST_MAX": "8"}, "roast", ["8/h", "40/h"]),
        # Together they are in order, one by one they would not be.
        ({"LEASED_MAX": "5000", "LEASED_WINDOW": "60"}, "leased", ["5000/m"]),
    ],
)
def test_the_environment_overrides(with_environment: Any, variables: Any, name: str, expected: list[str]) -> None:
    config, problems = with_environment(**variables)
    assert problems == []
    assert [str(rate) for scope in config.families[name] for rate in scope.rates] == expected
    assert config.families["auth"][0].url_names == {"login"}, "the rest is as it was"


def test_the_environment_overrides_what_may_be_in_flight(with_environment: Any) -> None:
    config, problems = with_environment(OPEN_MAX="9")
    assert problems == []
    assert [rate.limit for rate in config.families["open"][0].rates] == [9]


def test_the_environment_switches_off(with_environment: Any, caplog: pytest.LogCaptureFixture, settings: Any) -> None:
    with caplog.at_level(logging.WARNING, "ratelimit_kv"):
        config, problems = with_environment(SIGNIN_MAX="0", TWO_MAX="00", AUTH_MAX="0", AUTH_WINDOW="60")
        assert problems == []
        assert {scope.mode for name in ("signin", "two", "auth") for scope in config.families[name]} == {"off"}
        assert config.families["roast"][0].mode == "enforce"
        assert config.site == ()
        get_config()
    assert sorted(record.getMessage() for record in caplog.records) == [
        "RATE_LIMIT_AUTH_MAX=0 switches the rate limit scope auth off",
        "RATE_LIMIT_SIGNIN_MAX=0 switches the rate limit scope signin off",
        "RATE_LIMIT_TWO_MAX=0 switches the rate limit scope two off",
    ]
    assert hit("auth", "ip:192.0.2.1").allowed


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("AUHT_MAX", "5", "Did you mean 'RATE_LIMIT_AUTH_MAX'?"),
        ("AUTH_MX", "5", "Did you mean 'RATE_LIMIT_AUTH_MAX'?"),
        ("AUTH", "5", "names no scope and option"),
        ("ENABLED", "5", "names no scope and option"),
        ("", "5", "names no scope and option"),
        ("AUTH_MAX", "", "'' is not a whole number"),
        ("AUTH_MAX", "5/m", "'5/m' is not a whole number"),
        ("AUTH_MAX", "-1", "'-1' is not a whole number"),
        ("AUTH_MAX", "5.0", "'5.0'"),
        ("AUTH_MAX", "\u0665", "is not a whole number"),
        ("AUTH_MAX", "9" * 5000, "is not a whole number"),
        ("AUTH_MAX", "9" * 16, "9007199254740991"),
        ("AUTH_WINDOW", "0", "the period is not"),
        ("AUTH_WINDOW", "999999999", "the period is not"),
        ("TWO_MAX", "5", "not exactly one plain rate"),
        ("LOCAL_MAX", "5", "not exactly one plain rate"),
        ("UNLIMITED_MAX", "5", "not exactly one plain rate"),
        ("COMPUTED_MAX", "5", "not exactly one plain rate"),
        ("SIGNIN_MAX", "5", "not exactly one plain rate"),
        ("OPEN_WINDOW", "60", "not exactly one plain rate"),
        ("LEASED_MAX", "500", "more than a tenth of the limit"),
        ("AS_K_MAX", "5", "may mean 'as.k' or 'as_k'"),
    ],
)
def test_variables_that_cannot_be_right(with_environment: Any, variable: str, value: str, words: str) -> None:
    _, ((where, message),) = with_environment(**{variable: value})
    assert where.startswith(f"RATE_LIMIT_{variable}")
    assert words in message


def test_variables_of_others_are_left_alone(with_environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE_LIMITED", "yes")
    monkeypatch.setenv("AUTH_MAX", "yes")
    assert with_environment()[1] == []


def test_variables_of_a_scope_that_is_wrong_itself(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE_LIMIT_ASK_MAX", "5")
    _, problems = loaded({"SCOPES": {"ask": "5/hr", 7: "5/m"}, "ENV_PREFIX": "RATE_LIMIT_"})
    assert [problem.path for problem in problems] == [
        'RATELIMIT_KV["SCOPES"]["ask"]["RATE"]',
        'RATELIMIT_KV["SCOPES"][7]',
    ]
    _, problems = loaded({"SCOPES": None, "ENV_PREFIX": "RATE_LIMIT_"})
    assert [problem.path for problem in problems] == ['RATELIMIT_KV["SCOPES"]']


# ------------------------------------------------------------------------------------------------------ when they are read


def test_wrong_settings_stop_the_server_at_its_start(settings: Any) -> None:
    settings.RATELIMIT_KV = {"SCOPES": {"ask": {"RATE": "5/hr"}}, "PREFIX": ""}
    with pytest.raises(ImproperlyConfigured) as caught:
        RateLimitMiddleware(lambda request: HttpResponse())
    assert str(caught.value) == "\n".join(map(str, load()[1])), "in the words of the check"
    assert 'RATELIMIT_KV["SCOPES"]["ask"]["RATE"]: ' in str(caught.value)


def test_one_config_until_a_setting_changes(settings: Any) -> None:
    settings.RATELIMIT_KV = {"SCOPES": {"ask": "5/m"}}
    config = get_config()
    assert get_config() is config
    with override_settings(MEDIA_URL="/files/"):
        assert get_config() is config
    for name, value in (
        (SETTING, {"SCOPES": {"ask": "6/m"}}),
        ("CACHES", {"default": LOCMEM}),
        ("DEBUG", True),
        ("MIDDLEWARE", []),
        ("ROOT_URLCONF", "tests.urls"),
        ("SECRET_KEY", "another"),
        ("SESSION_COOKIE_NAME", "another"),
        ("USE_I18N", False),
        ("LANGUAGES", [("it", "Italian")]),
    ):
        with override_settings(**{name: value}):
            inside = get_config()
            assert inside is not config
        assert get_config() is not inside


@pytest.fixture
def site(settings: Any) -> Iterator[Client]:
    """A client of a site with views of every kind, at `/ask`, `/inline`, `/class` and `/wrapped`."""

    @rate_limit("ask")
    def ask(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @rate_limit("2/m", "9/h", key="ip")
    def inline(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @rate_limit("2/m", key="header:X-Key|ip", ceiling=3)
    class Class(View):
        @rate_limit("3/m", key="ip", cost=2)
        def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    def wrapped(request: HttpRequest) -> HttpResponse:
        return inline(request)

    module = ModuleType("urls_of_a_test")
    module.urlpatterns = [  # type: ignore[attr-defined]
        path("ask", ask),
        path("inline", inline),
        path("class", Class.as_view()),
        path("wrapped", wrapped),
    ]
    settings.ROOT_URLCONF = module
    settings.MIDDLEWARE = ["ratelimit_kv.middleware.RateLimitMiddleware"]
    settings.RATELIMIT_KV = {
        "SCOPES": {"ask": {"RATE": "2/m", "KEY": "ip"}, "site": {"RATE": "1000/m", "KEY": "ip", "PATHS": ["*"]}},
        "TRUSTED_PROXIES": ["127.0.0.1"],
    }
    reset_all()
    yield Client()
    reset_all()


PARSERS: list[tuple[Any, str]] = [
    *[(module, "parse_family") for module in (scopes, conf, decorators)],
    *[(scopes, name) for name in ("parse_key", "parse_rate", "parse_bare", "parse_duration", "did_you_mean")],
    *[(rates, "parse_rate"), (identity, "parse_key"), (identity, "_parse_part")],
    *[(callables, "load_function"), (scopes, "load_function"), (conf, "load_function"), (identity, "load_function")],
    *[(conf, "load"), (client_ip, "problems"), (client_ip, "ip_network")],
]


def test_nothing_is_parsed_during_a_request(site: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    site.handler.load_middleware()  # the server starts
    called: list[str] = []

    def spy(module: Any, name: str) -> None:
        original = getattr(module, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            called.append(f"{module.__name__}.{name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, spied)

    for module, name in PARSERS:
        spy(module, name)
    for address in ("/ask", "/inline", "/class", "/wrapped", "/nowhere"):
        statuses = [site.get(address).status_code for _ in range(3)]
        assert statuses[2] == (404 if address == "/nowhere" else 429)
        site.options(address)
    assert called == []


def test_override_settings_takes_effect_and_is_undone(site: Client, settings: Any) -> None:
    def statuses(number: int = 3, **headers: str) -> list[int]:
        return [site.get("/ask", headers=headers).status_code for _ in range(number)]  # type: ignore[arg-type]

    def options(**changes: Any) -> Any:
        return override_settings(RATELIMIT_KV={**settings.RATELIMIT_KV, **changes})

    assert statuses() == [200, 200, 429]
    with options(SCOPES={"ask": {"RATE": "4/m", "KEY": "ip"}}):
        assert statuses() == [200, 200, 429]
    assert statuses(1) == [429]
    with options(ENABLED=False):
        assert statuses() == [200] * 3
    assert statuses(1) == [429]
    with options(CACHE="ratelimit"):
        assert statuses() == [200, 200, 429]
    assert statuses(1) == [429]
    elsewhere = {alias: {**LOCMEM, "LOCATION": f"elsewhere-{alias}"} for alias in settings.CACHES}
    with override_settings(CACHES=elsewhere):
        assert statuses() == [200, 200, 429]
    assert statuses(1) == [429]
    with options(TRUSTED_PROXIES=()):
        assert statuses(1, **{"X-Forwarded-For": "192.0.2.1"}) == [429]
    assert statuses(**{"X-Forwarded-For": "192.0.2.1"}) == [200, 200, 429]
    assert peek("ask", "ip:127.0.0.1").remaining == 0
    with options(PREFIX="another"):
        assert peek("ask", "ip:127.0.0.1").remaining == 2


def test_what_the_checks_ask_of_the_project(settings: Any) -> None:
    settings.DEBUG = True
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.cached_db"
    settings.SESSION_CACHE_ALIAS = "sessions"
    project = read_project()
    assert project.debug
    assert project.session_cache == "sessions"
    assert project.page_cache == "default"
    assert project.middleware == tuple(settings.MIDDLEWARE)
    assert project.caches is settings.CACHES
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.db"
    assert read_project().session_cache is None
