"""One limit, every kind of view, both worlds, with and without the middleware: the same answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction
from django.test import AsyncClient, Client
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_exempt
from freezegun import freeze_time

from ratelimit_kv import rate_limit
from ratelimit_kv.signals import near_limit
from tests import views
from tests.site import HALF_PAST, limit

DOORS = {
    "function": "/door/function",
    "async function": "/door/async-function",
    "class": "/door/class",
    "async class": "/door/async-class",
    "dispatch": "/door/dispatch",
    "async dispatch": "/door/async-dispatch",
    "handler": "/door/handler",
    "async handler": "/door/async-handler",
    "decorated handler": "/door/decorated-handler",
    "partial": "/door/partial",
    "async partial": "/door/async-partial",
    "object": "/door/object",
    "async object": "/door/async-object",
    "method of AdminSite": "/admin/login/",
    "APIView": "/door/drf-class",
    "handler of APIView": "/door/drf-handler",
    "above @api_view": "/door/drf-above",
    "below @api_view": "/door/drf-below",
    "Ninja operation": "/door/ninja/sync",
    "async Ninja operation": "/door/ninja/async",
}
"""Views with ``@rate_limit("door")`` on them."""

WHERE = {
    "URL_NAMES": ("/plain", {"URL_NAMES": ["plain"]}),
    "URL_NAMES, async": ("/plain-async", {"URL_NAMES": ["plain-async"]}),
    "URL_NAMES, REST framework": ("/drf", {"URL_NAMES": ["drf"]}),
    "PATHS": ("/class", {"PATHS": ["/class"]}),
    "PATHS with a star": ("/item/tea", {"PATHS": ["/item/*"]}),
}
"""Views that only settings limit."""


@pytest.fixture(autouse=True)
def clock(use_cache: Callable[..., Any]) -> Iterator[Any]:
    """The clock stands still, and nothing has been counted yet."""
    use_cache("locmem")
    with freeze_time(HALF_PAST, real_asyncio=True) as frozen:
        yield frozen


def is_refused_after_three(answers: list[Any], *, headers: bool = True) -> None:
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    for answer in answers[3:]:
        assert answer["Retry-After"] == "30"
        assert answer["Cache-Control"] == "no-store"
    if headers:
        assert [answer["RateLimit"] for answer in answers] == [f'"door";r={left};t=30' for left in (2, 1, 0, 0, 0)]
        assert {answer["RateLimit-Policy"] for answer in answers} == {'"door";q=3;w=60'}


@pytest.mark.parametrize("middleware", [False, True], ids=["alone", "with middleware"])
@pytest.mark.parametrize("door", DOORS)
def test_every_door_lets_three_of_three_in(door: str, middleware: bool, settings: Any, client: Client) -> None:
    limit(settings, middleware=middleware, door={"RATE": "3/m", "KEY": "ip"})
    answers = [client.get(DOORS[door]) for _ in range(5)]
    is_refused_after_three(answers, headers=middleware or "Ninja" not in door)


@pytest.mark.parametrize("middleware", [False, True], ids=["alone", "with middleware"])
@pytest.mark.parametrize("door", DOORS)
async def test_every_door_lets_three_of_three_in_under_asgi(
    door: str, middleware: bool, settings: Any, async_client: AsyncClient
) -> None:
    limit(settings, middleware=middleware, door={"RATE": "3/m", "KEY": "ip"})
    answers = [await async_client.get(DOORS[door]) for _ in range(5)]
    is_refused_after_three(answers, headers=middleware or "Ninja" not in door)


@pytest.mark.parametrize("where", WHERE)
async def test_settings_alone_limit_a_view(
    where: str, settings: Any, client: Client, async_client: AsyncClient
) -> None:
    path, options = WHERE[where]
    limit(settings, middleware=True, door={"RATE": "3/m", "KEY": "ip", **options})
    is_refused_after_three([await async_client.get(path) for _ in range(5)])


@pytest.mark.parametrize("where", WHERE)
def test_settings_alone_limit_a_view_under_wsgi(where: str, settings: Any, client: Client) -> None:
    path, options = WHERE[where]
    limit(settings, middleware=True, door={"RATE": "3/m", "KEY": "ip", **options})
    is_refused_after_three([client.get(path) for _ in range(5)])


def test_all_doors_of_one_scope_share_its_counter(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, door={"RATE": "3/m", "KEY": "ip"})
    paths = ["/door/function", "/door/async-class", "/door/drf-below", "/door/ninja/sync", "/door/object"]
    assert [client.get(path).status_code for path in paths] == [200, 200, 200, 429, 429]


@pytest.mark.parametrize(
    ("view", "is_async"),
    [
        (views.function, False),
        (views.async_function, True),
        (views.part, False),
        (views.async_part, True),
        (views.feed, False),
        (views.async_feed, True),
        (views.OnClass.as_view(), False),
        (views.OnAsyncClass.as_view(), True),
        (views.OnAsyncDispatch.as_view(), True),
        (views.OnHandler.get, False),
        (views.OnAsyncHandler.get, True),
        (views.above_api_view, False),
    ],
)
def test_a_coroutine_function_stays_one_and_no_other_becomes_one(view: Any, is_async: bool) -> None:
    assert iscoroutinefunction(view) is is_async


SCOPES: dict[str, dict[str, Any]] = {
    "one rate": {"door": {"RATE": "3/m", "KEY": "ip"}},
    "several rates": {"door": {"RATE": ["3/m", "4/h"], "KEY": "ip"}},
    "sliding": {"door": {"RATE": "3/m", "KEY": "ip", "ALGORITHM": "sliding"}},
    "bucket": {"door": {"RATE": "3/m", "KEY": "ip", "ALGORITHM": "bucket"}},
    "concurrent": {"door": {"RATE": "3", "KEY": "ip", "ALGORITHM": "concurrent"}},
    "costs": {"door": {"RATE": "7/m", "KEY": "ip", "COST": 3}},
    "quiet": {"door": {"RATE": "3/m", "KEY": "ip", "QUIET": True}},
    "everyone's": {"door": {"RATE": "3/m", "KEY": "everyone"}},
    "shadow": {"door": {"RATE": "3/m", "KEY": "ip", "MODE": "shadow"}},
    "unlimited": {"door": {"RATE": None}},
    "two": {"door": {"RATE": "3/m", "KEY": "ip"}, "site": {"RATE": "5/h", "KEY": "ip", "PATHS": ["*"]}},
    "two, everyone's": {"door": {"RATE": "3/m"}, "site": {"RATE": "5/h", "KEY": "everyone", "PATHS": ["*"]}},
}


@pytest.mark.parametrize("headers", ["draft", "legacy", "none"])
@pytest.mark.parametrize("middleware", [False, True], ids=["alone", "with middleware"])
@pytest.mark.parametrize("name", SCOPES)
def test_the_short_way_and_the_long_way_say_the_same(
    name: str, middleware: bool, headers: str, settings: Any, client: Client, use_cache: Any
) -> None:
    """A request whose limits are plain goes a shorter way, unless somebody listens to ``near_limit``."""
    told = []
    for listener in (None, lambda **words: None):
        use_cache("locmem")
        limit(settings, middleware=middleware, HEADERS=headers, **SCOPES[name])
        if listener:
            near_limit.connect(listener)
        answers = [client.get("/door/function") for _ in range(5)]
        told.append([(answer.status_code, answer.content, dict(answer.headers)) for answer in answers])
    near_limit.disconnect(listener)
    assert told[0] == told[1]


limited = rate_limit("door")


@pytest.mark.parametrize(
    "view",
    [
        limited(csrf_exempt(views.plain)),
        csrf_exempt(limited(views.plain)),
        limited(csrf_exempt(views.plain_async)),
        csrf_exempt(limited(views.plain_async)),
        csrf_exempt(views.OnClass.as_view()),
        limited(csrf_exempt(views.Plain.as_view())),
        limited(method_decorator(csrf_exempt, name="dispatch")(type("Form", (views.Plain,), {}))).as_view(),
        method_decorator(csrf_exempt, name="dispatch")(limited(type("Form", (views.Plain,), {}))).as_view(),
        method_decorator([limited, csrf_exempt], name="dispatch")(type("Form", (views.Plain,), {})).as_view(),
        views.OnAPIView.as_view(),
        views.above_api_view,
        views.below_api_view,
    ],
)
def test_what_is_exempt_from_csrf_stays_exempt(view: Any) -> None:
    assert view.csrf_exempt is True


def test_a_view_that_checks_csrf_goes_on_to_check_it() -> None:
    assert not getattr(limited(views.plain), "csrf_exempt", False)
    assert not getattr(views.OnClass.as_view(), "csrf_exempt", False)


@pytest.mark.parametrize("path", ["/door/function", "/door/async-function"])
async def test_of_fifty_at_once_exactly_ten_get_in_under_asgi(path: str, settings: Any) -> None:
    limit(settings, middleware=True, door={"RATE": "10/h", "KEY": "ip"})
    answers = await asyncio.gather(*(AsyncClient().get(path) for _ in range(50)))
    assert Counter(answer.status_code for answer in answers) == {200: 10, 429: 40}


def test_of_fifty_at_once_exactly_ten_get_in_under_wsgi(settings: Any) -> None:
    limit(settings, middleware=True, door={"RATE": "10/h", "KEY": "ip"})
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: Client().get("/door/function"), range(50)))
    assert Counter(answer.status_code for answer in answers) == {200: 10, 429: 40}


def test_a_view_that_forgets_to_answer_is_told_so_by_django(settings: Any, client: Client) -> None:
    limit(settings, door="3/m")
    with pytest.raises(ValueError, match="didn't return an HttpResponse"):
        client.get("/door/nothing")
