"""Decisions as HTTP: the refusal in the client's own format, and the headers that tell him where he stands."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core import mail
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.functional import lazystr
from django.utils.translation import gettext_lazy, override
from django.views.decorators.cache import cache_control, cache_page, never_cache
from freezegun import freeze_time

from ratelimit_kv import hit, rate_limit
from ratelimit_kv.http import phrase, preferred
from tests.site import HALF_PAST, limit

ME = "ip:127.0.0.1"


@pytest.fixture(autouse=True)
def clock(use_cache: Callable[..., Any]) -> Iterator[Any]:
    """The clock stands still, and nothing has been counted yet."""
    use_cache("locmem")
    with freeze_time(HALF_PAST, real_asyncio=True) as frozen:
        yield frozen


def refusal(settings: Any, client: Client, accept: str = "*/*", **options: Any) -> Any:
    """What a client that accepts this is told the second time, by a scope that lets him in once."""
    limit(settings, middleware=True, ask={"RATE": "1/m", "KEY": "ip", "URL_NAMES": ["plain"], **options})
    client.get("/plain")
    return client.get("/plain", headers={"accept": accept})


# ------------------------------------------------------------------------------------- the body, by what is accepted

CHROME = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, "text"),
        ("*/*", "text"),
        ("", "text"),
        (CHROME, "html"),
        ("text/html", "html"),
        ("application/json", "json"),
        ("application/problem+json", "json"),
        ("application/json, text/plain, */*", "json"),
        ("application/json;q=0.9, text/html;q=0.8", "json"),
        ("application/json;q=0.8, text/html;q=0.9", "html"),
        ("application/*", "json"),
        ("text/*", "text"),
        ("text/plain", "text"),
        ("image/png", "text"),
        ("text/html;q=0, */*", "text"),
        ("application/json;q=0, text/html", "html"),
        ("nonsense", "text"),
        (";;;,,,q=", "text"),
        ("text/html;q=one", "html"),
        ("a/b;q=nan, text/html;q=-1", "html"),
        ("application/json" + ", text/html" * 2000, "json"),
    ],
)
def test_a_client_is_answered_in_what_it_accepts(accept: str | None, kind: str, rf: RequestFactory) -> None:
    headers = {} if accept is None else {"accept": accept}
    assert preferred(rf.get("/", headers=headers)) == kind


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/vnd.api+json", "application/json; charset=utf-8"]
)
def test_a_client_that_takes_anything_and_sent_json_gets_json(content_type: str, rf: RequestFactory) -> None:
    assert preferred(rf.post("/", "{}", content_type=content_type)) == "json"


def test_json_is_a_problem_as_rfc_9457_has_it(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, ask={"RATE": ["1/m", "9/h"], "KEY": "ip", "PATHS": ["*"]})
    client.get("/plain")
    answer = client.get("/plain", headers={"accept": "application/json"})
    assert answer.status_code == 429
    assert answer["Content-Type"] == "application/problem+json"
    assert json.loads(answer.content) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Too many requests",
        "status": 429,
        "detail": "Too many requests. Please try again in 30 seconds.",
        "violated-policies": ["ask.60s"],
        "retry_after": 30,
    }


def test_a_browser_gets_a_page(settings: Any, client: Client) -> None:
    answer = refusal(settings, client, CHROME, MESSAGE="<b>{scope}</b> is over")
    assert answer["Content-Type"] == "text/html; charset=utf-8"
    assert b"&lt;b&gt;ask&lt;/b&gt; is over" in answer.content, "what settings say is text"
    assert b"<h1>Too many requests</h1>" in answer.content


def in_templates(settings: Any, directory: Path, page: str) -> None:
    (directory / "429.html").write_text(page)
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [directory]}]


def test_a_project_has_a_page_of_its_own(settings: Any, client: Client, tmp_path: Path) -> None:
    in_templates(
        settings,
        tmp_path,
        "{{ status }}|{{ scope }}|{{ limit }}|{{ retry_after }}|{{ retry_after_phrase }}|{{ decision.window }}|{{ message }}",
    )
    limit(settings, middleware=True, ask={"RATE": "1/m", "KEY": "ip", "PATHS": ["*"]})
    client.get("/plain")
    answer = client.get("/plain", headers={"accept": CHROME})
    words = "429|ask|1|30|30 seconds|60|Too many requests. Please try again in 30 seconds."
    assert answer.content.decode() == words


def test_a_page_is_rendered_without_the_request(settings: Any, client: Client, tmp_path: Path) -> None:
    """Context processors would read the session of somebody who is being refused. This test has no database."""
    in_templates(settings, tmp_path, "{{ request }}{{ user }}{{ messages }}enough")
    client.cookies[settings.SESSION_COOKIE_NAME] = "m" * 32
    answer = refusal(settings, client, CHROME)
    assert answer.content == b"enough"
    assert "Vary" not in answer


def test_a_page_that_cannot_be_rendered_is_told_in_text(
    settings: Any, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_templates(settings, tmp_path, "{% url 'nowhere' %}")
    answer = refusal(settings, client, CHROME)
    assert answer.status_code == 429
    assert answer["Content-Type"] == "text/plain; charset=utf-8"
    assert "429.html" in caplog.text


# ---------------------------------------------------------------------------------------- in the project's own voice


def test_a_message_is_filled_in(settings: Any, client: Client) -> None:
    limit(
        settings,
        middleware=True,
        ask={
            "RATE": "1/h",
            "KEY": "ip",
            "PATHS": ["*"],
            "MESSAGE": "{limit} an hour of {scope}. Back in {retry_after}. {{}}",
        },
    )
    client.get("/plain")
    assert client.get("/plain").content == b"1 an hour of ask. Back in 60 minutes. {}\n"
    answer = client.get("/plain", headers={"accept": "application/json"})
    assert json.loads(answer.content)["detail"] == "1 an hour of ask. Back in 60 minutes. {}"


def test_a_message_may_be_translated(settings: Any, client: Client) -> None:
    """Django's own translation of the word stands in for a project's."""
    limit(settings, middleware=True, ask={"RATE": "0/m", "PATHS": ["*"], "MESSAGE": gettext_lazy("Password")})
    assert client.get("/plain").content.decode() == "Password\n"
    with override("de"):
        assert client.get("/plain").content.decode() == "Passwort\n"


def test_a_translation_that_cannot_be_filled_in_is_no_500(
    settings: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    answer = refusal(settings, client, MESSAGE=lazystr("Zurück in {wartezeit}"))
    assert answer.content == b"Too many requests. Please try again in 30 seconds.\n"
    assert "MESSAGE could not be filled in" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.001, "1 second"),
        (1, "1 second"),
        (1.2, "2 seconds"),
        (119, "119 seconds"),
        (119.5, "2 minutes"),
        (121, "3 minutes"),
        (7199, "120 minutes"),
        (7201, "3 hours"),
        (172_799, "48 hours"),
        (172_801, "3 days"),
        (None, "a while"),
    ],
)
def test_a_wait_for_people_is_never_too_short(seconds: float | None, words: str) -> None:
    assert phrase(seconds) == words


def oracle(request: HttpRequest, decision: Any) -> HttpResponse:
    return JsonResponse({"answer": f"The oracle rests for {decision.retry_after:.0f} s."}, status=429)


async def oracle_async(request: HttpRequest, decision: Any) -> HttpResponse:
    return oracle(request, decision)


def teapot(request: HttpRequest, decision: Any) -> HttpResponse:
    return HttpResponse("Tea?", status=418, headers={"Retry-After": "7", "Cache-Control": "max-age=60"})


@pytest.mark.parametrize("response", [oracle, oracle_async, f"{__name__}.oracle"])
@pytest.mark.parametrize("place", ["scope", "settings"])
async def test_a_function_answers_instead(
    response: Any, place: str, settings: Any, client: Client, async_client: AsyncClient
) -> None:
    in_settings = {"RESPONSE": response} if place == "settings" else {}
    in_scope = {"RESPONSE": response} if place == "scope" else {"RESPONSE": None}
    limit(settings, middleware=True, **in_settings, ask={"RATE": "1/m", "KEY": "ip", "PATHS": ["*"], **in_scope})
    await async_client.get("/plain")
    answer = await async_client.get("/plain")
    assert answer.json() == {"answer": "The oracle rests for 30 s."}
    assert answer["Retry-After"] == "30"
    assert answer["Cache-Control"] == "no-store"


@pytest.mark.parametrize("response", [oracle, oracle_async])
def test_a_function_answers_instead_under_wsgi(response: Any, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, ask={"RATE": "1/m", "PATHS": ["*"], "RESPONSE": response})
    client.get("/plain")
    assert client.get("/plain").json() == {"answer": "The oracle rests for 30 s."}


def test_two_scopes_answer_with_two_voices(settings: Any, client: Client) -> None:
    limit(
        settings,
        middleware=True,
        RESPONSE=oracle,
        one={"RATE": "1/m", "URL_NAMES": ["plain"]},
        two={"RATE": "1/m", "URL_NAMES": ["class"], "RESPONSE": teapot},
    )
    client.get("/plain"), client.get("/class")
    assert client.get("/plain").status_code == 429
    answer = client.get("/class")
    assert answer.status_code == 418
    assert answer["Retry-After"] == "7", "his own word on when to come back stands"
    assert answer["Cache-Control"] == "no-store"


def raises(request: HttpRequest, decision: Any) -> HttpResponse:
    raise LookupError("no words")


@pytest.mark.parametrize("response", [raises, lambda request, decision: "text", lambda request: HttpResponse()])
def test_a_function_that_cannot_answer_is_not_a_500(
    response: Any, settings: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    answer = refusal(settings, client, RESPONSE=response)
    assert answer.status_code == 429
    assert answer.content == b"Too many requests. Please try again in 30 seconds.\n"
    assert {record.levelname for record in caplog.records if "scope ask" in record.message} == {"ERROR", "WARNING"}


# ------------------------------------------------------------------------------------------------- how long to wait


@pytest.mark.parametrize(
    ("moment", "wait"),
    [
        ("12:00:00", "60"),
        ("12:00:00.000001", "60"),
        ("12:00:10.5", "50"),
        ("12:00:59", "1"),
        ("12:00:59.999999", "1"),
    ],
)
def test_retry_after_is_whole_seconds_rounded_up(moment: str, wait: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, ask={"RATE": "1/m", "KEY": "ip", "PATHS": ["*"]})
    with freeze_time(f"2026-03-01 {moment}"):
        client.get("/plain")
        assert client.get("/plain")["Retry-After"] == wait


def test_of_several_limits_the_longest_wait_is_told(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, short={"RATE": "1/m", "PATHS": ["*"]}, long={"RATE": "1/h", "PATHS": ["*"]})
    client.get("/plain")
    answer = client.get("/plain", headers={"accept": "application/json"})
    assert answer["Retry-After"] == "3570"
    assert json.loads(answer.content)["violated-policies"] == ["long"]


def test_what_costs_more_than_the_limit_is_never_told_to_come_back(settings: Any, client: Client) -> None:
    answer = refusal(settings, client, RATE="3/m", COST=4)
    assert answer.status_code == 429
    assert "Retry-After" not in answer
    assert answer["Cache-Control"] == "no-store"
    assert b"more than is allowed at once" in answer.content


def test_a_quiet_scope_tells_neither_its_numbers_nor_the_exact_wait(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, login={"RATE": "1/15m", "KEY": "ip", "PATHS": ["*"], "QUIET": True})
    assert "RateLimit" not in client.get("/plain")
    answer = client.get("/plain", headers={"accept": "application/json"})
    assert answer["Retry-After"] == "900", "870 seconds, to the full minute"
    assert "RateLimit" not in answer
    assert "RateLimit-Policy" not in answer
    assert b"login" not in answer.content
    assert b"login" not in client.get("/plain", headers={"accept": CHROME}).content


# ----------------------------------------------------------------------------------------------- other refusals


def broken(request: HttpRequest) -> str:
    raise LookupError


@pytest.mark.parametrize(
    ("options", "status", "title"),
    [
        ({"KEY": "header:X-Api-Key", "ON_MISSING": "deny"}, 400, "Bad request"),
        ({"KEY": broken, "ON_ERROR": "deny"}, 503, "Temporarily unavailable"),
    ],
)
def test_other_reasons_to_refuse_have_other_statuses(
    options: Any, status: int, title: str, settings: Any, client: Client
) -> None:
    answer = refusal(settings, client, "application/json", RATE="9/m", MESSAGE="Too quick.", **options)
    assert answer.status_code == status
    assert answer["Cache-Control"] == "no-store"
    assert ("Retry-After" in answer) is (status == 503)
    problem = json.loads(answer.content)
    assert (problem["type"], problem["title"], problem["status"]) == ("about:blank", title, status)
    assert "Too quick" not in problem["detail"], "that is for those who were too quick"
    assert refusal(settings, client, CHROME, RATE="9/m", **options).status_code == status
    assert refusal(settings, client, "text/plain", RATE="9/m", **options).status_code == status


def test_a_store_that_is_away_is_503_where_a_scope_says_so(settings: Any, client: Client, use_cache: Any) -> None:
    from tests.servers import free_port

    settings.CACHES = {
        **settings.CACHES,
        "away": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": f"redis://127.0.0.1:{free_port()}",
        },
    }
    answer = refusal(settings, client, "application/json", CACHE="away", ON_ERROR="deny")
    assert answer.status_code == 503
    assert int(answer["Retry-After"]) >= 1
    assert "RateLimit" not in answer
    open_door = refusal(settings, client, CACHE="away")
    assert open_door.status_code == 200
    assert "RateLimit" not in open_door


# ------------------------------------------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ("draft", {"RateLimit-Policy": '"ask";q=3;w=60', "RateLimit": '"ask";r=2;t=30'}),
        ("legacy", {"X-RateLimit-Limit": "3", "X-RateLimit-Remaining": "2", "X-RateLimit-Reset": "30"}),
        ("none", {}),
    ],
)
def test_the_headers_come_in_a_style(headers: str, told: dict[str, str], settings: Any, client: Client) -> None:
    limit(settings, middleware=True, HEADERS=headers, ask={"RATE": "3/m", "KEY": "ip", "PATHS": ["*"]})
    answer = client.get("/plain")
    assert {name: value for name, value in answer.headers.items() if "RateLimit" in name} == told


def test_a_scope_of_several_rates_has_a_policy_for_each(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, ask={"RATE": ["9/m", "4/h"], "KEY": "ip", "PATHS": ["*"]})
    answer = client.get("/plain")
    assert answer["RateLimit-Policy"] == '"ask.60s";q=9;w=60, "ask.3600s";q=4;w=3600'
    assert answer["RateLimit"] == '"ask.3600s";r=3;t=3570'


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("ip", True),
        ("user|ip", True),
        ("field:name+ip", True),
        ("everyone", False),
        ("field:name", False),
        ("arg:slug", False),
    ],
)
def test_what_is_not_the_callers_own_is_not_told(key: str, told: bool, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, ask={"RATE": "1/m", "KEY": key, "PATHS": ["*"]})
    answers = [client.post("/item/tea", {"name": "anna"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert [("RateLimit" in answer, "RateLimit-Policy" in answer) for answer in answers] == [(told, told)] * 2


def test_numbers_of_what_is_told_are_not_those_of_what_is_not(settings: Any, client: Client) -> None:
    limit(
        settings,
        middleware=True,
        us={"RATE": "2/m", "KEY": "everyone", "PATHS": ["*"]},
        me={"RATE": "9/m", "PATHS": ["*"]},
    )
    answer = client.get("/plain")
    assert answer["RateLimit"] == '"me";r=8;t=30'
    assert answer["RateLimit-Policy"] == '"me";q=9;w=60'


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_a_scope_that_does_not_refuse_is_not_told(mode: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, ask={"RATE": "1/m", "PATHS": ["*"], "MODE": mode})
    for answer in (client.get("/plain"), client.get("/plain")):
        assert answer.status_code == 200
        assert "RateLimit" not in answer


def with_own_headers(request: HttpRequest) -> HttpResponse:
    return HttpResponse(headers={"RateLimit": '"mine";r=1;t=1', "X-RateLimit-Limit": "1"})


urlpatterns = [
    path("own", rate_limit("ask")(with_own_headers)),
    *(
        path(name, rate_limit("ask")(decorate(lambda request: HttpResponse())))
        for name, decorate in {
            "public": cache_control(public=True),
            "max-age": cache_control(max_age=60),
            "s-maxage": cache_control(s_maxage=60),
            "private": cache_control(private=True, max_age=60),
            "no-store": cache_control(no_store=True),
            "never": never_cache,
            "above": cache_page(60),
        }.items()
    ),
    path("below", cache_page(60)(rate_limit("ask")(lambda request: HttpResponse()))),
]


@pytest.mark.parametrize("middleware", [True, False])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("public", False),
        ("max-age", False),
        ("s-maxage", False),
        ("above", False),
        ("below", False),
        ("private", True),
        ("no-store", True),
        ("never", True),
    ],
)
def test_a_response_that_others_may_be_given_carries_nobodys_numbers(
    name: str, told: bool, middleware: bool, settings: Any, client: Client
) -> None:
    limit(settings, middleware=middleware, ask={"RATE": "9/m", "KEY": "ip"})
    settings.ROOT_URLCONF = __name__
    for _ in range(2):
        assert ("RateLimit" in client.get(f"/{name}")) is told


CACHE_MIDDLEWARE = ("django.middleware.cache.UpdateCacheMiddleware", "django.middleware.cache.FetchFromCacheMiddleware")


@pytest.mark.parametrize("name", ["private", "no-store"])
def test_what_djangos_cache_will_not_keep_carries_its_numbers(name: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, ask={"RATE": "2/m", "KEY": "ip"})
    settings.MIDDLEWARE = [CACHE_MIDDLEWARE[0], *settings.MIDDLEWARE, CACHE_MIDDLEWARE[1]]
    settings.ROOT_URLCONF = __name__
    answers = [client.get(f"/{name}") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert all("RateLimit" in answer for answer in answers)


@pytest.mark.parametrize("headers", ["draft", "legacy"])
def test_the_views_own_headers_are_left_alone(headers: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, HEADERS=headers, ask={"RATE": "9/m", "KEY": "ip"})
    settings.ROOT_URLCONF = __name__
    answer = client.get("/own")
    if headers == "draft":
        assert answer["RateLimit"] == '"mine";r=1;t=1'
        assert "RateLimit-Policy" not in answer
    else:
        assert answer["X-RateLimit-Limit"] == "1"
        assert "X-RateLimit-Remaining" not in answer


@pytest.mark.parametrize("accept", ["text/plain", "application/json"])
def test_a_refusal_that_is_kept_is_not_told_in_the_language_of_another(accept: str, settings: Any) -> None:
    limit(settings, middleware=False, ask={"RATE": "1/m", "KEY": "everyone", "MESSAGE": gettext_lazy("Password")})
    view = rate_limit("ask")(lambda request: HttpResponse())
    said = []
    for language in ("en", "en", "en", "de", "de", "en"):
        with override(language):
            said.append(view(RequestFactory().get("/", headers={"Accept": accept})).content)
    assert [b"Passwort" in text for text in said] == [False, False, False, True, True, False]


# ------------------------------------------------------------------------------------------------- no flood


@pytest.mark.parametrize("options", [{}, {"KEY": broken, "ON_ERROR": "deny", "RATE": "9/m"}])
def test_refusals_are_neither_logged_nor_mailed_one_by_one(
    options: Any, settings: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    settings.ADMINS = ["admin@example.com"]
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            assert refusal(settings, client, **options).status_code in (429, 503)
    assert [record for record in caplog.records if record.name.startswith("django")] == []
    assert mail.outbox == []


def test_no_refusal_is_ever_a_server_error_of_a_hostile_header(settings: Any, client: Client) -> None:
    for accept in ("\x00", "é", "text/html;charset=\x7f", '"', "=" * 9000, "a" * 9000, ",;" * 4000):
        assert refusal(settings, client, accept).status_code == 429


def test_a_hit_without_a_request_says_the_same(settings: Any) -> None:
    limit(settings, mails="1/m")
    hit("mails", ME)
    assert hit("mails", ME).retry_after == 30.0
