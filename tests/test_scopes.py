"""Definitions of scopes: what may be written, what it means, and what is said about everything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_kv.algorithms import BUCKET, CONCURRENT, FIXED, MAX_COUNT, SLIDING
from ratelimit_kv.callables import Function, load_function
from ratelimit_kv.identity import parse_key
from ratelimit_kv.rates import Rate, parse_rate
from ratelimit_kv.scopes import (
    FIRST,
    NAME,
    OPTIONS,
    Ban,
    Defaults,
    Problem,
    Scope,
    changed,
    did_you_mean,
    digest_name,
    is_failure,
    is_success,
    parse_family,
    placed,
    quote,
)

PATH = 'RATELIMIT_KV["SCOPES"]["ask"]'


def a_rate(request: HttpRequest) -> str:
    return "5/m"


def a_response(request: HttpRequest, response: Any) -> bool:
    return True


HERE = __name__


def parse(definition: Any, name: Any = "ask") -> tuple[tuple[Scope, ...], list[Problem]]:
    return parse_family(name, definition, Defaults(), PATH)


def scope_of(definition: Any) -> Scope:
    (scope,), problems = parse(definition)
    assert problems == []
    return scope


def problems_of(definition: Any, name: Any = "ask") -> list[tuple[str, str]]:
    """(path below the scope, message) of each problem."""
    return [(problem.path.removeprefix(PATH), problem.message) for problem in parse(definition, name)[1]]


# ---------------------------------------------------------------------------------------------------- good definitions

GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"key": parse_key("user|ip"), "cost": 1, "methods": None, "algorithm": FIXED, "near": 0.8, "lease": 1}),
    ({}, {"on_error": "allow", "on_missing": "ip", "mode": "enforce", "ban": None, "ceiling": None, "quiet": False}),
    ({"RATE": "100/h"}, {"rates": (Rate(100, 3600),)}),
    ({"RATE": ["5/m", "100/d"]}, {"rates": (Rate(5, 60), Rate(100, 86400))}),
    ({"RATE": ("5/m",)}, {"rates": (Rate(5, 60),)}),
    ({"RATE": "0/m"}, {"rates": (Rate(0, 60),)}),
    ({"RATE": None}, {"rates": None, "rate": None, "plan": None}),
    ({"RATE": a_rate}, {"rate": Function(a_rate), "rates": None}),
    ({"RATE": f"{HERE}.a_rate"}, {"rate": Function(a_rate)}),
    ({"KEY": " cookie:anon + ip "}, {"key": parse_key("cookie:anon+ip")}),
    ({"KEY": a_rate}, {"key": parse_key(a_rate)}),
    ({"COST": 0}, {"cost": 0}),
    ({"COST": MAX_COUNT}, {"cost": MAX_COUNT}),
    ({"COST": a_rate}, {"cost": Function(a_rate)}),
    ({"COST": f"{HERE}.a_rate"}, {"cost": Function(a_rate)}),
    ({"METHODS": None}, {"methods": None}),
    ({"METHODS": ["post", "PUT"]}, {"methods": frozenset({"POST", "PUT"})}),
    ({"METHODS": ("GET",)}, {"methods": frozenset({"GET", "HEAD"})}),
    ({"METHODS": {"OPTIONS"}}, {"methods": frozenset({"OPTIONS"})}),
    ({"METHODS": ["PROPFIND", "VERSION-CONTROL", "REPORT", "LOCK"]}, {}),
    ({"PATHS": ["*"]}, {"paths": ("*",), "has_where": True}),
    ({"PATHS": ["/api/*", "/login", "/"]}, {"paths": ("/api/*", "/login", "/")}),
    ({"PATHS": []}, {"paths": (), "has_where": False}),
    ({"URL_NAMES": ["login", "admin:login"]}, {"url_names": frozenset({"login", "admin:login"}), "has_where": True}),
    ({"EXEMPT_PATHS": ["/health", "/assets/*"]}, {"exempt_paths": ("/health", "/assets/*"), "has_where": False}),
    ({"EXEMPT_URL_NAMES": {"health"}}, {"exempt_url_names": frozenset({"health"})}),
    ({"ALGORITHM": "fixed"}, {"algorithm": FIXED}),
    ({"ALGORITHM": "sliding"}, {"algorithm": SLIDING}),
    ({"ALGORITHM": "bucket"}, {"algorithm": BUCKET}),
    ({"ALGORITHM": "concurrent", "RATE": "5"}, {"algorithm": CONCURRENT, "rates": (Rate(5, 300),)}),
    ({"ALGORITHM": "concurrent", "RATE": 5}, {"rates": (Rate(5, 300),)}),
    ({"ALGORITHM": "concurrent", "RATE": ["5"], "LEASE": 1, "BAN": None, "COUNT_DENIED": False}, {}),
    ({"RATE": "9/day", "TIMEZONE": "Europe/Rome"}, {"rates": (parse_rate("9/day", timezone="Europe/Rome"),)}),
    ({"RATE": "9/month", "TIMEZONE": "UTC"}, {"timezone": "UTC"}),
    ({"RATE": ["5/m", "9/week"], "TIMEZONE": "Asia/Tokyo"}, {"timezone": "Asia/Tokyo"}),
    ({"TIMEZONE": None}, {"timezone": ""}),
    ({"SAFETY_MARGIN": 0.1, "RATE": "10/m"}, {"safety_margin": 0.1}),
    ({"NEAR": 1}, {"near": 1.0}),
    ({"NEAR": 0}, {"near": 0.0}),
    *[({"ON_ERROR": word}, {"on_error": word}) for word in ("allow", "deny", "local")],
    *[({"ON_MISSING": word}, {"on_missing": word}) for word in ("ip", "skip", "deny")],
    *[({"MODE": word}, {"mode": word}) for word in ("enforce", "shadow", "off")],
    ({"COUNT_IF": a_response}, {"count_if": Function(a_response), "gives_back": True}),
    ({"RESET_IF": f"{HERE}.a_response"}, {"reset_if": Function(a_response), "gives_back": True}),
    ({"COUNT_IF": None, "RESET_IF": None, "RESPONSE": None, "MESSAGE": None}, {"count_if": None, "gives_back": False}),
    ({"COUNT_DENIED": True}, {"count_denied": True}),
    ({"RESPONSE": a_response}, {"response": Function(a_response)}),
    ({"MESSAGE": "Wait {retry_after}: {limit} of {scope}, {{so}}."}, {}),
    ({"MESSAGE": ""}, {"message": ""}),
    ({"QUIET": True}, {"quiet": True}),
    ({"CACHE": "other"}, {"cache": "other"}),
    ({"LEASE": 10, "RATE": "100/m"}, {"lease": 10}),
    ({"BAN": {}}, {"ban": Ban(3, 3600, 2.0, 86400)}),
    ({"BAN": {"AFTER": 1, "FOR": "90s", "GROWTH": 1.5, "MAX": 600}}, {"ban": Ban(1, 90, 1.5, 600)}),
    ({"BAN": None}, {"ban": None}),
]


@pytest.mark.parametrize(("options", "expected"), GOOD)
def test_what_may_be_written(options: dict[str, Any], expected: dict[str, Any]) -> None:
    scope = scope_of({"RATE": "5/m", **options})
    assert {name: getattr(scope, name) for name in expected} == expected


def test_every_option_is_in_the_tables() -> None:
    good = {option for options, _ in GOOD for option in options} | {"CEILING", "PRESET"}
    bad = {option for option, _, _ in BAD}
    assert good == bad == {*FIRST, *OPTIONS}


def test_a_bare_rate() -> None:
    assert scope_of("10/s") == scope_of({"RATE": "10/s"})
    assert scope_of(["10/s", "99/m"]) == scope_of({"RATE": ["10/s", "99/m"]})
    assert scope_of(f"{HERE}.a_rate") == scope_of({"RATE": a_rate})
    assert scope_of(a_rate) == scope_of({"RATE": a_rate})
    assert scope_of("10/s").key == parse_key("user|ip")


def test_a_message_in_the_language_of_the_request() -> None:
    message: Any = gettext_lazy("Wait {retry_after}.")
    assert scope_of({"RATE": "5/m", "MESSAGE": message}).message is message


def test_the_defaults_of_the_settings() -> None:
    defaults = Defaults(cache="counters", prefix="shop", on_error="deny")
    (scope,), _ = parse_family("ask", "5/m", defaults, PATH)
    assert (scope.cache, scope.prefix, scope.on_error) == ("counters", "shop", "deny")
    (scope,), _ = parse_family("ask", {"RATE": "5/m", "CACHE": "mine", "ON_ERROR": "local"}, defaults, PATH)
    assert (scope.cache, scope.on_error) == ("mine", "local")


# ----------------------------------------------------------------------------------------------------- bad definitions

# Option, value, what its message must hold.
BAD: list[tuple[str, Any, str]] = [
    ("RATE", "5", "'5'"),
    ("RATE", "", "''"),
    ("RATE", "5/fortnight", "'5/fortnight'"),
    ("RATE", "5/M", "may be minutes or months"),
    ("RATE", "-1/m", "a limit is not negative"),
    ("RATE", "5/month", "they need a time zone"),
    ("RATE", "five per minute", "'five per minute'"),
    ("RATE", "1.5/m", "'1.5/m'"),
    ("RATE", "5.5", "'5.5'"),
    ("RATE", 5, "5"),
    ("RATE", True, "True"),
    ("RATE", [], "an empty list"),
    ("RATE", ["5/m", None], "None"),
    ("RATE", ["5/m", "6/60s"], "two rates with the period 60"),
    ("RATE", {"5/m"}, "{'5/m'}"),
    ("RATE", "no.such.function", "cannot be imported"),
    ("RATE", f"{HERE}.HERE", "is not callable"),
    ("KEY", "usr", "Did you mean 'user'?"),
    ("KEY", "ip|usr+ip", "'usr'"),
    ("KEY", "header", "unknown"),
    ("KEY", "header:", "needs a name"),
    ("KEY", "hedaer:X-Api-Key", "Did you mean 'header'?"),
    ("KEY", "user|", "''"),
    ("KEY", "", "''"),
    ("KEY", None, "None"),
    ("KEY", ["ip"], "['ip']"),
    ("KEY", "ip/8", "from ip/32"),
    ("KEY", "no.such.function", "cannot be imported"),
    ("CEILING", 0, "from 1 to 1000"),
    ("CEILING", "5", "'5' is not an integer"),
    ("CEILING", True, "True"),
    ("CEILING", 1.5, "1.5"),
    ("COST", -1, "from 0 to"),
    ("COST", MAX_COUNT + 1, "from 0 to"),
    ("COST", "2", "or a function of the request"),
    ("COST", None, "None"),
    ("COST", 1.0, "1.0"),
    ("COST", "no.such.function", "cannot be imported"),
    ("METHODS", "POST", "Write ['POST']"),
    ("METHODS", [], "an empty list"),
    ("METHODS", ["PSOT"], "Did you mean 'POST'?"),
    ("METHODS", ["GETS"], "Did you mean 'GET'?"),
    ("METHODS", ["PO ST"], "not an HTTP method"),
    ("METHODS", [None], "None"),
    ("METHODS", 5, "not a list"),
    ("PATHS", "/login", "Write ['/login']"),
    ("PATHS", ["login"], "is not a path"),
    ("PATHS", ["/api/*/x"], "a star only at the end"),
    ("PATHS", ["^/api/$"], "is not a path"),
    ("PATHS", [""], "''"),
    ("PATHS", None, "not a list"),
    ("PATHS", {"/login": True}, "not a list"),
    ("URL_NAMES", "login", "Write ['login']"),
    ("URL_NAMES", [7], "7 in the list"),
    ("URL_NAMES", None, "not a list"),
    ("EXEMPT_PATHS", "/health", "Write ['/health']"),
    ("EXEMPT_PATHS", ["health"], "is not a path"),
    ("EXEMPT_URL_NAMES", "health", "Write ['health']"),
    ("ALGORITHM", "slidng", "Did you mean 'sliding'?"),
    ("ALGORITHM", "FIXED", "Did you mean 'fixed'?"),
    ("ALGORITHM", None, "Write one of 'fixed', 'sliding', 'bucket', 'concurrent'"),
    ("ALGORITHM", ["fixed"], "['fixed']"),
    ("TIMEZONE", "Europe/Roma", "Did you mean 'Europe/Rome'?"),
    ("TIMEZONE", "", "''"),
    ("TIMEZONE", 0, "0 is not a time zone"),
    ("TIMEZONE", "UTC", "no rate of this scope is by day"),
    ("SAFETY_MARGIN", 0.95, "from 0 to 0.9"),
    ("SAFETY_MARGIN", -0.1, "-0.1"),
    ("SAFETY_MARGIN", float("nan"), "nan"),
    ("SAFETY_MARGIN", "0.1", "'0.1'"),
    ("SAFETY_MARGIN", True, "True"),
    ("SAFETY_MARGIN", 0.9, "leaves nothing of the limit"),
    ("NEAR", 80, "from 0 to 1"),
    ("NEAR", None, "None"),
    ("ON_ERROR", "allwo", "Did you mean 'allow'?"),
    ("ON_ERROR", False, "False"),
    ("ON_MISSING", "drop", "'ip', 'skip', 'deny'"),
    ("MODE", "shade", "Did you mean 'shadow'?"),
    ("MODE", False, "'enforce', 'shadow', 'off'"),
    ("COUNT_IF", "no.such.function", "cannot be imported"),
    ("COUNT_IF", 400, "is not callable"),
    ("RESET_IF", True, "is not callable"),
    ("COUNT_DENIED", 1, "Write True or False"),
    ("COUNT_DENIED", None, "Write True or False"),
    ("RESPONSE", "no.such.function", "cannot be imported"),
    ("RESPONSE", "429.html", "cannot be imported"),
    ("MESSAGE", "Wait {retry}.", "{retry_after}, {limit} and {scope}"),
    ("MESSAGE", "Wait {}.", "cannot be filled in"),
    ("MESSAGE", "Wait {", "cannot be filled in"),
    ("MESSAGE", "{limit[0]}", "cannot be filled in"),
    ("MESSAGE", "{limit:d}", "cannot be filled in"),
    ("MESSAGE", "{scope.name}", "cannot be filled in"),
    ("MESSAGE", b"Wait", "is not text"),
    ("QUIET", "yes", "Write True or False"),
    ("CACHE", "", "alias"),
    ("CACHE", None, "alias"),
    ("LEASE", 0, "from 1 to"),
    ("LEASE", "10", "'10'"),
    ("LEASE", 2, "more than a tenth of the limit"),
    ("BAN", True, 'Write {"AFTER": 3, "FOR": "1h"}'),
    ("BAN", {"AFTR": 3}, "Did you mean 'AFTER'?"),
    ("BAN", {"AFTER": 0}, "AFTER 0"),
    ("BAN", {"FOR": "soon"}, "'soon'"),
    ("BAN", {"FOR": "2d"}, "longer than MAX"),
    ("BAN", {"GROWTH": 0.5}, "GROWTH 0.5"),
    ("BAN", {"GROWTH": float("inf")}, "GROWTH inf"),
    ("BAN", {"MAX": None}, "None"),
    ("PRESET", "lgoin", "Did you mean 'login'?"),
    ("PRESET", ["login"], "['login']"),
    ("PRESET", None, "None"),
]


@pytest.mark.parametrize(("option", "value", "words"), BAD)
def test_what_may_not_be_written(option: str, value: Any, words: str) -> None:
    ((path, message),) = problems_of({"RATE": "5/m", option: value})
    assert path == f'["{option}"]'
    assert words in message


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        (None, "not a scope"),
        (5, "not a scope"),
        ({"5/m"}, "not a scope"),
        ({}, "has no RATE"),
        ({"KEY": "ip"}, "has no RATE"),
        ({"RATE": "5/m", "RAET": "6/m"}, "'RAET' is not an option of a scope. Did you mean 'RATE'?"),
        ({"RATE": "5/m", "rate": "6/m"}, "'rate' is not an option of a scope. Did you mean 'RATE'?"),
        ({"RATE": "5/m", 7: 8}, "7 is not an option of a scope."),
        ({"RATE": "5/m", "URL_NAME": ["login"]}, "Did you mean 'URL_NAMES'?"),
    ],
)
def test_what_is_no_scope_at_all(definition: Any, words: str) -> None:
    ((path, message),) = problems_of(definition)
    assert path == ""
    assert words in message


@pytest.mark.parametrize(
    "name", ["", "Ask", "1st", "a b", "ask/er", "ä", "a" * 65, "a\n", None, 7, ("ask",), "ask.options", "ask.ceiling"]
)
def test_names_that_cannot_be(name: Any) -> None:
    ((path, message),) = problems_of("5/m", name)
    assert path == ""
    assert quote(name) in message


@pytest.mark.parametrize("name", ["a", "ask", "ask-2", "ask.me_now", "a" * 64])
def test_names_that_can_be(name: str) -> None:
    assert problems_of("5/m", name) == []


def test_everything_that_is_wrong_is_said_at_once() -> None:
    found = problems_of({"RATE": "5/hr", "KEY": "usr", "MODE": "of", "NEER": 1, "TIMEZONE": "Mars"})
    assert [path for path, _ in found] == ["", '["TIMEZONE"]', '["RATE"]', '["KEY"]', '["MODE"]']


# ------------------------------------------------------------------------------------------------------ contradictions

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"BAN": {}, "KEY": "everyone"}, "BAN"),
    ({"BAN": {}, "KEY": "field:username"}, "BAN"),
    ({"BAN": {}, "KEY": "user|arg:slug"}, "BAN"),
    ({"CEILING": 5, "KEY": "ip"}, "CEILING"),
    ({"CEILING": 5, "KEY": "everyone"}, "CEILING"),
    ({"ALGORITHM": "concurrent", "RATE": "5/m"}, "RATE"),
    ({"ALGORITHM": "concurrent", "RATE": ["5", "6"]}, "RATE"),
    ({"ALGORITHM": "concurrent", "RATE": "5", "BAN": {}}, "BAN"),
    ({"ALGORITHM": "concurrent", "RATE": "50", "SAFETY_MARGIN": 0.1}, "SAFETY_MARGIN"),
    ({"ALGORITHM": "concurrent", "RATE": "5", "COUNT_DENIED": True}, "COUNT_DENIED"),
    ({"ALGORITHM": "concurrent", "RATE": "5", "COUNT_IF": a_response}, "COUNT_IF"),
    ({"ALGORITHM": "concurrent", "RATE": "5", "RESET_IF": a_response}, "RESET_IF"),
    ({"ALGORITHM": "bucket", "RATE": "5/day", "TIMEZONE": "UTC"}, "RATE"),
    ({"ALGORITHM": "bucket", "RATE": "2_000_000/s"}, "RATE"),
    ({"ALGORITHM": "sliding", "RATE": "100/m", "LEASE": 2}, "LEASE"),
    ({"RATE": "100/m", "LEASE": 2, "COUNT_IF": a_response}, "LEASE"),
    ({"RATE": "100/m", "LEASE": 2, "MODE": "shadow"}, "LEASE"),
    ({"RATE": ["1000/h", "10/m"], "LEASE": 2}, "LEASE"),
]


@pytest.mark.parametrize(("options", "option"), CONTRADICTIONS)
def test_options_that_contradict_each_other(options: dict[str, Any], option: str) -> None:
    assert [path for path, _ in problems_of({"RATE": "5/m", **options})] == [f'["{option}"]']


@pytest.mark.parametrize(
    "options",
    [
        {"BAN": {}, "KEY": "field:username+ip"},
        {"CEILING": 5, "KEY": "user|ip"},
        {"ALGORITHM": "sliding", "RATE": "5/day", "TIMEZONE": "UTC"},
        {"RATE": a_rate, "TIMEZONE": "UTC"},
        {"RATE": "0/m", "SAFETY_MARGIN": 0.9},
    ],
)
def test_options_that_look_like_it(options: dict[str, Any]) -> None:
    assert problems_of({"RATE": "5/m", **options}) == []


# --------------------------------------------------------------------------------------------------------- what follows


def test_a_ceiling_makes_a_companion() -> None:
    (own, ceiling), problems = parse({"RATE": ["5/day", "2/m"], "KEY": "cookie:anon+ip", "CEILING": 5, "CACHE": "c"})
    assert problems == []
    assert (own.name, own.family) == ("ask", "ask")
    assert (ceiling.name, ceiling.family, ceiling.key.text) == ("ask.ceiling", "ask", "ip")
    assert ceiling.rates == (Rate(25, 86400), Rate(10, 60))
    assert (ceiling.ceiling, ceiling.cache, ceiling.lease, ceiling.ban) == (None, "c", 1, None)


def test_a_companion_needs_room_in_the_name() -> None:
    ((path, message),) = problems_of({"RATE": "5/m", "KEY": "cookie:a", "CEILING": 2}, "a" * 60)
    assert path == ""
    assert "too long" in message


def test_the_login_preset() -> None:
    scopes, problems = parse({"PRESET": "login", "URL_NAMES": ["login"]}, "signin")
    assert problems == []
    assert [(scope.name, [str(rate) for rate in scope.rates or ()], scope.key.text) for scope in scopes] == [
        ("signin.account", ["5/15m"], "field:username+ip/48"),
        ("signin.name", ["20/15m"], "field:username"),
        ("signin.ip64", ["20/15m"], "ip/64"),
        ("signin.ip56", ["60/15m"], "ip/56"),
        ("signin.ip48", ["200/15m"], "ip/48"),
    ]
    for scope in scopes:
        assert scope.family == "signin"
        assert scope.methods == {"POST"}
        assert scope.url_names == {"login"}
        assert scope.count_if == Function(is_failure)
        assert (scope.on_error, scope.quiet) == ("local", True)
    account, name, ip64, ip56, ip48 = scopes
    assert account.on_missing == name.on_missing == "deny"
    assert account.algorithm == name.algorithm == BUCKET
    assert ip64.ban == Ban(3, 1800, 2.0, 86400)
    # An account alone is only slowed down.
    assert account.ban is ip56.ban is ip48.ban is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"METHODS": ["POST", "PUT"]}, {"methods": frozenset({"POST", "PUT"})}),
        ({"PATHS": ["/login"]}, {"paths": ("/login",)}),
        ({"EXEMPT_PATHS": ["/login/sso"]}, {"exempt_paths": ("/login/sso",)}),
        ({"MESSAGE": "Later."}, {"message": "Later."}),
        ({"MODE": "shadow"}, {"mode": "shadow"}),
        ({"CACHE": "other"}, {"cache": "other"}),
        ({"ON_ERROR": "deny"}, {"on_error": "deny"}),
        ({"QUIET": False}, {"quiet": False}),
        ({"COUNT_IF": a_response}, {"count_if": Function(a_response)}),
        ({"COUNT_IF": None}, {"count_if": None}),
        ({"RESPONSE": a_response}, {"response": Function(a_response)}),
        ({"NEAR": 0.5}, {"near": 0.5}),
        ({"COST": 2}, {"cost": 2}),
    ],
)
def test_what_a_preset_lets_one_change(options: dict[str, Any], expected: dict[str, Any]) -> None:
    scopes, problems = parse({"PRESET": "login", **options})
    assert problems == []
    assert len(scopes) == 5
    for scope in scopes:
        assert {name: getattr(scope, name) for name in expected} == expected


def test_a_success_resets_the_account_of_a_preset_and_no_address() -> None:
    scopes, problems = parse({"PRESET": "login", "RESET_IF": is_success})
    assert problems == []
    assert [scope.reset_if for scope in scopes] == [Function(is_success)] * 2 + [None] * 3


def test_the_ban_of_a_preset_is_that_of_an_address() -> None:
    scopes, problems = parse({"PRESET": "login", "BAN": {"AFTER": 5}})
    assert problems == []
    assert [scope.ban for scope in scopes] == [None, None, Ban(after=5), None, None]
    scopes, problems = parse({"PRESET": "login", "BAN": None})
    assert problems == []
    assert [scope.ban for scope in scopes] == [None] * 5


@pytest.mark.parametrize("option", ["RATE", "KEY", "CEILING", "ALGORITHM", "TIMEZONE", "LEASE"])
def test_what_a_preset_does_not_let_one_change(option: str) -> None:
    ((path, message),) = problems_of({"PRESET": "login", option: "5/m"})
    assert path == f'["{option}"]'
    assert "the preset sets it" in message


def test_a_mistake_in_a_preset_is_said_once() -> None:
    assert len(problems_of({"PRESET": "login", "METHODS": ["PSOT"]})) == 1
    assert len(problems_of({"PRESET": "login", "BAN": {"AFTER": -1}})) == 1
    assert len(problems_of({"PRESET": "login", "URLNAMES": ["login"]})) == 1


@pytest.mark.parametrize(
    ("status", "kind", "succeeded"),
    [
        (302, "text/html", True),
        (200, "text/html; charset=utf-8", False),
        (200, "application/json", True),
        (204, "", True),
        (400, "application/json", False),
        (401, "application/json", False),
        (403, "text/html", False),
        (500, "text/html", False),
    ],
)
def test_what_a_login_makes_of_a_response(status: int, kind: str, succeeded: bool) -> None:
    response = HttpResponse(status=status, content_type=kind)
    assert is_success(None, response) is succeeded
    assert is_failure(None, response) is not succeeded


def test_scopes_get_their_place_without_being_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"RATE": "5/m", "KEY": "cookie:a", "CEILING": 2}
    scopes, _ = parse_family("inline", options, Defaults(), "rate_limit()")
    settings = Defaults("counters", "shop", "deny")
    there = placed(scopes, "app.view", settings, set(options), "app.view")
    assert there == tuple(
        replace(scope, origin="app.view", family="app.view")
        for scope in parse_family("app.view", options, settings, "", "app.view")[0]
    )
    (kept,) = placed(
        parse_family("inline", {"RATE": "5/m", "CACHE": "mine", "ON_ERROR": "local"}, Defaults(), "")[0],
        *("x", settings, {"RATE", "CACHE", "ON_ERROR"}, "x"),
    )
    assert (kept.cache, kept.on_error, kept.prefix) == ("mine", "local", "shop")
    assert kept.plan is not None
    assert kept.plan.heads == ("shop:x:f60:{",)


def test_what_differs_from_the_defaults() -> None:
    assert changed(scope_of({"RATE": "5/m", "KEY": "user|ip", "QUIET": True})) == {
        "family": "ask",
        "rates": (Rate(5, 60),),
        "quiet": True,
    }


# ------------------------------------------------------------------------------------------------------------ for people


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("RAET", " Did you mean 'RATE'?"),
        ("rates", " Did you mean 'RATE'?"),
        ("zzz", ""),
        ("", ""),
        (None, ""),
        (7, ""),
        (("RATE",), " Did you mean 'RATE'?"),
        ("RATE" * 10_000, ""),
    ],
)
def test_did_you_mean(word: Any, expected: str) -> None:
    assert did_you_mean(word, (option for option in ("RATE", "KEY", "CACHE"))) == expected


def test_quotes_are_short_and_always_possible() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError

    assert quote("x" * 1000) == f"'{'x' * 79}..."
    assert quote(Mute()) == "this Mute"
    assert quote(10**10_000) == "this int"


@given(st.text())
def test_any_text_can_become_a_name(text: str) -> None:
    name = digest_name(text)
    assert NAME.match(name)
    assert digest_name(text) == name


def test_long_names_are_told_apart_by_a_digest() -> None:
    one, other = digest_name("app.views." + "x" * 80 + "one"), digest_name("app.views." + "x" * 80 + "two")
    assert one != other
    assert len(one) <= 64


# ------------------------------------------------------------------------------------------------------ whatever is given

WORDS = st.sampled_from(
    [
        "5/m",
        "5",
        "ip",
        "user|ip",
        "login",
        "*",
        "/x",
        "GET",
        "allow",
        "UTC",
        "no.such.thing",
        "fixed",
        "concurrent",
        "1h",
        "é",
    ]
)
ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5) | WORDS
JUNK = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(ATOMS, inner, max_size=3)
        | st.frozensets(ATOMS, max_size=3)
    ),
    max_leaves=6,
)
ANY_OPTION = st.sampled_from([*FIRST, *OPTIONS]) | ATOMS


@given(st.dictionaries(ANY_OPTION, JUNK, max_size=6) | JUNK, st.sampled_from(["ask"]) | JUNK)
def test_no_definition_raises(definition: Any, name: Any) -> None:
    scopes, problems = parse(definition, name)
    assert all(isinstance(problem, Problem) and str(problem) for problem in problems)
    assert scopes or problems


@pytest.mark.parametrize("option", [*FIRST, *OPTIONS])
@given(value=JUNK)
def test_no_value_raises(option: str, value: Any) -> None:
    for problem in parse({"RATE": "5/m", option: value})[1]:
        assert problem.path.startswith(PATH)
        assert len(problem.message) < 2000


def test_a_module_that_fails_while_it_is_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_while_imported.py").write_text("1 / 0", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    ((path, message),) = problems_of({"RATE": "5/m", "COUNT_IF": "failing_while_imported.f"})
    assert path == '["COUNT_IF"]'
    assert "ZeroDivisionError" in message
    with pytest.raises(ValueError, match="cannot be imported"):
        load_function("..x")
