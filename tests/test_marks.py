"""What a decorator leaves on a view: names that are the same in every process, and what may be decided beforehand."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from ratelimit_kv import rate_limit, rate_limit_exempt
from ratelimit_kv.conf import get_config
from ratelimit_kv.marks import Mark, here, hoistable, is_exempt, marks_of, view_name, views
from ratelimit_kv.scopes import NAME, Scope

HERE = __name__


def plain(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


def a_rate(request: HttpRequest) -> str:
    return "5/m"


def mark_of(*args: Any, **kwargs: Any) -> Mark:
    (mark,) = marks_of(rate_limit(*args, **kwargs)(plain))
    return mark


# -------------------------------------------------------------------------------------------------- names and rates

SCOPES_NAMED: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("login",), ("login",)),
    (("ask", "ask-budget"), ("ask", "ask-budget")),
    (("signin.account",), ("signin.account",)),
]


@pytest.mark.parametrize(("given", "names"), SCOPES_NAMED)
def test_names_of_scopes(given: Any, names: Any) -> None:
    mark = mark_of(*given)
    assert mark.names == names
    assert not mark.is_inline
    assert mark.scopes == ()


def test_a_named_scope_takes_cost_and_methods() -> None:
    mark = mark_of("login", cost=2, methods=["post"])
    assert mark.cost == 2
    assert mark.methods == {"POST"}
    assert mark_of("login", cost=None, methods=None).cost is None


@pytest.mark.parametrize(
    ("given", "options", "rates"),
    [
        (("5/m",), {}, ["5/m"]),
        (("5 / m", "100/day"), {}, ["5/m", "100/day"]),
        ((["5/m", "100/day"],), {}, ["5/m", "100/day"]),
        (("5",), {"algorithm": "concurrent"}, ["5/5m"]),
        ((5,), {"algorithm": "concurrent"}, ["5/5m"]),
        ((None,), {"key": "ip"}, None),
    ],
)
def test_rates(given: Any, options: Any, rates: Any) -> None:
    mark = mark_of(*given, **options)
    (scope,) = mark.scopes
    assert mark.is_inline
    assert (None if scope.rates is None else [str(rate) for rate in scope.rates]) == rates


def test_a_rate_that_a_function_says() -> None:
    assert mark_of(a_rate, key="ip").scopes[0].rate == mark_of(a_rate, scope="x").scopes[0].rate
    with pytest.raises(TypeError, match="needs a rate or a scope"):
        rate_limit(a_rate)  # a bare @rate_limit looks just so


@pytest.mark.parametrize("value", [{}, {"5/m": 1}, {"5/m"}, b"5/m", 5, 5.5, object(), [[]], ["5/m", {}]])
def test_what_is_neither(value: Any) -> None:
    with pytest.raises(ValueError, match=r"rate_limit\(\)\[\"RATE\"\]: "):
        rate_limit(value)


@pytest.mark.parametrize(
    "options",
    [
        {"key": []},
        {"key": {}},
        {"cost": []},
        {"methods": {}},
        {"methods": [[]]},
        {"algorithm": []},
        {"timezone": []},
        {"ban": []},
        {"on_error": {}},
        {"response": []},
        {"message": []},
        {"exempt_paths": [{}]},
        {"scope": []},
        {"scope": ""},
        {"scope": "x.options"},
    ],
)
def test_values_of_the_wrong_kind(options: Any) -> None:
    with pytest.raises(ValueError, match=r"rate_limit\(\)"):
        rate_limit("5/m", **options)
    if options.keys() & {"cost", "methods"}:
        with pytest.raises(ValueError, match=r"."):
            rate_limit("login", **options)


@pytest.mark.parametrize(
    ("word", "guess"),
    [("kee", "key"), ("KEY", "key"), ("metods", "methods"), ("onerror", "on_error"), ("url_names", ""), ("preset", "")],
)
def test_options_that_do_not_exist(word: str, guess: str) -> None:
    with pytest.raises(TypeError) as caught:
        rate_limit("5/m", **{word: "ip"})
    assert f"no option {word!r}" in str(caught.value)
    assert (f"Did you mean {guess!r}?" in str(caught.value)) is bool(guess)


# ------------------------------------------------------------------------------------------------- names of the inline


def test_names_follow_the_view() -> None:
    class Shop(View):
        pass

    assert view_name(plain) == f"{HERE}.plain"
    assert view_name(Shop.as_view()) == f"{HERE}.test_names_follow_the_view.Shop"
    assert view_name(functools.partial(functools.partial(plain), x=1)) == f"{HERE}.plain"
    assert view_name(csrf_exempt(plain)) == f"{HERE}.plain"
    assert view_name(lambda request: None) == f"{HERE}.test_names_follow_the_view.lambda"
    mark = mark_of("5/m")
    assert mark.name_on(plain) == f"{HERE}.plain.{mark.suffix}"
    assert mark_of("5/m", scope="signup").name_on(plain) == "signup"
    assert NAME.match(mark.name_on(Shop.as_view()))


DIFFERENT = [
    {},
    {"key": "ip"},
    {"methods": ["GET"]},
    {"methods": ["POST"]},
    {"algorithm": "sliding"},
    {"algorithm": "bucket"},
    {"timezone": "Europe/Rome"},
    {"timezone": "UTC"},
]


def test_limits_that_differ_have_different_names() -> None:
    names = [mark_of("5/day", **options).suffix for options in DIFFERENT if options.get("algorithm") != "bucket"]
    names += [mark_of("6/day").suffix, mark_of("5/day", "9/week").suffix, mark_of(a_rate, key="user|ip").suffix]
    assert len(set(names)) == len(names)


def test_limits_that_mean_the_same_have_the_same_name() -> None:
    def suffix(*args: Any, **kwargs: Any) -> str:
        return mark_of(*args, **kwargs).suffix

    assert suffix("5/m") == suffix("5 / 60s") == suffix(["5/m"]) == suffix("5/m", key="user|ip", algorithm="fixed")
    assert suffix("5/m", methods=["put", "POST"]) == suffix("5/m", methods={"POST", "PUT"})
    # What does not say who is counted, and how, may change without a new counter.
    assert suffix("5/m") == suffix("5/m", message="Later.", on_error="deny", mode="shadow", cost=3)


def test_names_are_the_same_in_every_process() -> None:
    program = (
        "import django; django.setup()\n"
        f"from {HERE} import a_rate, mark_of, plain\n"
        "print(mark_of(a_rate, key=a_rate, methods={'POST', 'PUT', 'PATCH', 'GET'}).name_on(plain))\n"
    )
    root = str(Path(__file__).resolve().parent.parent)
    names = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
                "DJANGO_SETTINGS_MODULE": "tests.settings",
            },
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(names) == 1
    assert names == {f"{HERE}.plain.{mark_of(a_rate, key=a_rate, methods=['GET', 'PATCH', 'POST', 'PUT']).suffix}\n"}


def test_scopes_of_a_mark(settings: Any) -> None:
    settings.RATELIMIT_KV = {
        "PREFIX": "shop",
        "ON_ERROR": "deny",
        "SCOPES": {"ask": "5/m", "pair": {"PRESET": "login"}},
    }
    config = get_config()

    def scopes(*args: Any, **kwargs: Any) -> tuple[Scope, ...]:
        mark = mark_of(*args, **kwargs)
        found = config.of_mark(mark, plain)
        assert config.of_mark(mark, plain) is found, "made once"
        return found

    (own, ceiling) = scopes("5/m", key="cookie:a", ceiling=2)
    assert (own.prefix, own.on_error, own.origin) == ("shop", "deny", f"{HERE}.plain")
    assert ceiling.name == f"{own.name}.ceiling"
    assert ceiling.family == own.family == own.name
    assert [scope.name for scope in scopes("ask", "pair")] == [
        *("ask", "pair.account", "pair.name", "pair.ip64", "pair.ip56", "pair.ip48")
    ]
    (costly,) = scopes("ask", cost=3, methods=["GET"])
    assert (costly.cost, costly.methods, costly.name) == (3, {"GET", "HEAD"}, "ask")
    assert config.family("ask")[0].cost == 1


# ------------------------------------------------------------------------------------------------------ decided beforehand


def of_class(decorate: Any = None, method: Any = None) -> Any:
    class Shop(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

        if method is not None:
            get = method(get)

    return decorate(Shop) if decorate else Shop


def of_inherited(decorate: Any) -> Any:
    class Child(decorate(of_class())):  # type: ignore[misc]
        pass

    return Child


def of_overridden(decorate: Any) -> Any:
    class Child(decorate(of_class())):  # type: ignore[misc]
        def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(request, *args, **kwargs)

    return Child


LIMIT = rate_limit("5/m", key="ip")
OTHER = rate_limit("9/m", key="ip")
DISPATCH = method_decorator(LIMIT, name="dispatch")

# What stands in the URLconf; how many marks can be found on it; how many of these the middleware decides.
HOISTED: list[tuple[str, Any, int, int]] = [
    ("a function", LIMIT(plain), 1, 1),
    ("two limits on a function", OTHER(LIMIT(plain)), 2, 2),
    ("a plain function", plain, 0, 0),
    ("login_required around it", login_required(LIMIT(plain)), 1, 0),
    ("login_required inside it", LIMIT(login_required(plain)), 1, 1),
    ("login_required between two", OTHER(login_required(LIMIT(plain))), 2, 1),
    ("csrf_exempt around it", csrf_exempt(LIMIT(plain)), 1, 0),
    ("a partial", LIMIT(functools.partial(plain)), 1, 1),
    ("a partial of it", functools.partial(LIMIT(plain)), 0, 0),
    ("a class", LIMIT(of_class()).as_view(), 1, 1),
    ("two limits on a class", OTHER(LIMIT(of_class())).as_view(), 2, 2),
    ("a class that inherits the limit", of_inherited(LIMIT).as_view(), 1, 1),
    ("a class that calls a limited dispatch", of_overridden(LIMIT).as_view(), 0, 0),
    ("around as_view", LIMIT(of_class().as_view()), 1, 1),
    ("around as_view of a limited class", OTHER(LIMIT(of_class()).as_view()), 2, 1),
    ("login_required around as_view", login_required(LIMIT(of_class()).as_view()), 1, 0),
    ("login_required by method_decorator", method_decorator(login_required, name="dispatch")(LIMIT(of_class())).as_view(), 1, 0),
    # Which of several decorators stands outermost can't be seen there, so it is decided in dispatch.
    ("method_decorator", DISPATCH(of_class()).as_view(), 1, 0),
    ("method_decorator with others", method_decorator([login_required, LIMIT], name="dispatch")(of_class()).as_view(), 1, 0),
    ("a handler", of_class(method=LIMIT).as_view(), 1, 0),
    ("a handler by method_decorator", of_class(method=method_decorator(LIMIT)).as_view(), 1, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "view", "found", "hoisted"), HOISTED, ids=lambda value: value if type(value) is str else ""
)
def test_what_is_decided_before_the_view(what: str, view: Any, found: int, hoisted: int) -> None:
    assert len(marks_of(view)) == found
    assert len(hoistable(view)) == hoisted
    assert set(hoistable(view)) <= set(marks_of(view))


def test_views_of_rest_framework_authenticate_first() -> None:
    api_view = pytest.importorskip("rest_framework.decorators").api_view
    from rest_framework.views import APIView
    from rest_framework.viewsets import ViewSet

    class Things(ViewSet):
        @LIMIT
        def list(self, request: Any) -> HttpResponse:
            return HttpResponse()

    class Limited(APIView):
        @LIMIT
        def get(self, request: Any) -> HttpResponse:
            return HttpResponse()

    for view in (
        LIMIT(api_view(["GET"])(plain)),
        LIMIT(Limited).as_view(),
        Limited.as_view(),
        Things.as_view({"get": "list"}),
    ):
        assert marks_of(view)
        assert hoistable(view) == ()
    assert view_name(Things.as_view({"get": "list"})).endswith(".Things")


def test_marks_that_stand_directly_on_a_callable() -> None:
    limited = LIMIT(plain)
    assert here(limited) == marks_of(limited)
    assert here(login_required(limited)) == ()
    assert here(plain) == here(None) == ()


# ----------------------------------------------------------------------------------------------------------- the URLconf


def urlconf(*patterns: Any) -> ModuleType:
    module = ModuleType("urls_of_a_test")
    module.urlpatterns = list(patterns)  # type: ignore[attr-defined]
    return module


def test_every_view_of_the_urlconf() -> None:
    inner = ([path("b/", plain, name="b"), re_path("^c/$", plain)], "app")
    found = list(views(urlconf(path("", plain, name="home"), path("a/<int:pk>/", include(inner, namespace="x")))))
    assert found == [("/", "home", plain), ("/a/<int:pk>/b/", "x:b", plain), ("/a/<int:pk>/^c/$", "", plain)]


def test_operations_of_ninja(settings: Any) -> None:
    ninja = pytest.importorskip("ninja")
    api = ninja.NinjaAPI(urls_namespace="of-a-test")

    @api.get("/things")
    @rate_limit("5/m", key="ip", scope="things")
    def things(request: HttpRequest) -> str:
        return ""

    @api.post("/things")
    @rate_limit("missing")
    def add(request: HttpRequest) -> str:
        return ""

    module = urlconf(path("api/", api.urls))
    found = {view_name(view): marks_of(view) for route, _, view in views(module) if route == "/api/things"}
    assert [mark.names or mark.scope for marks in found.values() for mark in marks] == ["things", ("missing",)]
    settings.ROOT_URLCONF = module
    assert "things" in get_config().members


# ------------------------------------------------------------------------------------------------------------- exemptions


def test_exempt() -> None:
    assert is_exempt(rate_limit_exempt(plain))
    assert is_exempt(csrf_exempt(rate_limit_exempt(plain)))
    assert is_exempt(rate_limit_exempt(of_class()).as_view())
    assert is_exempt(rate_limit_exempt(LIMIT(of_class())).as_view())
    assert not is_exempt(plain)
    assert not is_exempt(of_class().as_view())
