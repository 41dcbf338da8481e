"""What an attacker tries, through real requests: to get more than his share, other people's share, or the server's time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client
from django.urls import path, re_path
from freezegun import freeze_time

from ratelimit_kv import hit, peek, rate_limit, settle
from ratelimit_kv.stores import get_store
from tests import servers
from tests.caches import cache_settings, child_environment
from tests.conftest import there
from tests.servers import Missing, Server
from tests.site import HALF_PAST, limit, statuses

pytestmark = [pytest.mark.urls(__name__)]

CSRF = "django.middleware.csrf.CsrfViewMiddleware"
FORM = "application/x-www-form-urlencoded"


# ------------------------------------------------------------------------------------------------------- the site


def page(request: HttpRequest, **kwargs: Any) -> HttpResponse:
    return HttpResponse("hello")


def whom(request: HttpRequest) -> HttpResponse:
    """What two ways of writing a view take for the name in a body."""
    try:
        said = json.loads(request.body).get("username")
    except ValueError:
        said = None
    return JsonResponse({"json": said, "form": request.POST.get("username")})


def answers(request: HttpRequest, status: int) -> HttpResponse:
    return HttpResponse(status=status)


def refunds(request: HttpRequest) -> HttpResponse:
    request.rate_limit.refund()  # type: ignore[attr-defined]
    request.rate_limit.refund("asks")  # type: ignore[attr-defined]
    return HttpResponse(status=418)


def cached(request: HttpRequest, name: str) -> HttpResponse:
    return HttpResponse(headers={name: {"Expires": "Thu, 01 Jan 2037 00:00:00 GMT"}.get(name, "max-age=60")})


async def busy(request: HttpRequest) -> HttpResponse:
    await asyncio.sleep(3600)
    return HttpResponse("done")


def is_error(request: HttpRequest, response: HttpResponse) -> bool:
    return response.status_code >= 400


def fails(request: HttpRequest, *args: Any) -> Any:
    raise LookupError("a mistake of the project")


urlpatterns = [
    path("admin/", admin.site.urls),
    path("login/", LoginView.as_view(template_name="admin/login.html"), name="login"),
    path("page", page, name="page"),
    path("whom", whom, name="whom"),
    path("named", rate_limit("names")(whom)),
    path("status/<int:status>", answers, name="status"),
    path("refunds", refunds, name="refunds"),
    path("cached/<str:name>", cached, name="cached"),
    path("busy", busy, name="busy"),
    re_path(r"^old/$", page),
]


def keys() -> list[str]:
    return sorted(entry.key for entry in get_store("default").scan("rl:"))


@pytest.fixture(autouse=True)
def empty(use_cache: Callable[..., Any]) -> None:
    use_cache("locmem")


# ------------------------------------------------------------------------------------------------- bodies and names


NAMES = {"RATE": "2/m", "KEY": "field:username", "CEILING": 100, "ON_MISSING": "deny", "URL_NAMES": ["whom"]}


@pytest.mark.parametrize(
    "body",
    [
        '{"username": "alice", "x": "&username=mallory%d&"}',
        '{"username": "mallory%d", "x": "&username=alice&"}',
        ' \r\n{"x": "&username=alice&", "username": "mallory%d"}',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("middleware", [True, False])
def test_a_body_that_is_two_things_at_once_tries_nobodys_name(
    body: str, encoding: str, middleware: bool, settings: Any, client: Client
) -> None:
    limit(settings, middleware=middleware, names=NAMES)
    where = "/whom" if middleware else "/named"
    said = [client.post(where, (body % number).encode(encoding), content_type=FORM) for number in range(4)]
    assert [response.status_code for response in said] == [400] * 4


@pytest.mark.parametrize("content_type", [FORM, "application/json", "text/plain", "", "application/x-yaml"])
def test_json_under_another_name_is_still_json(content_type: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, names=NAMES)
    assert statuses(client, "/whom", 3, "post", data=b'{"username": "alice"}', content_type=content_type) == [
        200,
        200,
        429,
    ]


@pytest.mark.parametrize("middleware", [True, False])
def test_json_is_read_after_csrf_has_looked_for_a_form(middleware: bool, settings: Any) -> None:
    limit(settings, middleware=middleware, names=NAMES)
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, CSRF]
    client = Client(enforce_csrf_checks=True)
    client.cookies["csrftoken"] = token = "a" * 32
    body = {"data": b'{"username": "alice"}', "content_type": "application/json", "headers": {"X-CSRFToken": token}}
    assert statuses(client, "/whom" if middleware else "/named", 3, "post", **body) == [200, 200, 429]


@pytest.mark.parametrize(
    "name",
    [
        "\u0300" * 14_000 + "\u0316" * 14_000,
        "\u0315\u0300" * 14_000,
        "\u302e\U0001d165" * 8_000,
        "\ufdfa" * 15_000,
        "ﬃ" * 15_000,
    ],
    ids=["sorted late", "in turns", "spacing", "long ligature", "ligature"],
)
def test_a_name_made_of_marks_does_not_cost_seconds(name: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, names={**NAMES, "ON_MISSING": "ip"})
    body = json.dumps({"username": "a" + name}, ensure_ascii=False).encode()
    assert len(body) < 64 * 1024
    client.post("/whom", b"{}", content_type="application/json")
    before = time.process_time()
    client.post("/whom", body, content_type="application/json")
    assert time.process_time() - before < 4  # it was 3 to 8 without the tracing of coverage, which triples it


@pytest.mark.parametrize(
    "spelling",
    [
        "ALICE1",
        "a\u0142ice1",
        " alice1\t",
        "Álice1",
        "\uff41\uff4c\uff49\uff43\uff45\uff11",
        "a\u200blice1",
        "al\u0131ce1",
        "ali\u0307ce1",
        "\x01alice1\x7f",
        "ali\u00adce1",
        "\ufeffalice1",
        "ⓐⓛⓘⓒⓔ①",
        "a\u034flice1",
        "alice\u0661",
        "alice\u2776",
    ],
)
def test_another_spelling_of_a_name_is_no_new_budget(spelling: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, names=NAMES)
    assert statuses(client, "/whom", 2, "post", data={"username": "alice1"}) == [200, 200]
    assert client.post("/whom", {"username": spelling}).status_code == 429
    said = json.dumps({"username": spelling})
    assert client.post("/whom", said, content_type="application/json").status_code == 429


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"[" * 60_000, "application/json"),
        (b'{"username":' * 5_000, "text/plain"),
        (b'{"username": ' + b"9" * 60_000 + b"}", "application/json"),
        (b'{"username": ["alice"]}', "application/json"),
        (b'{"username": {"a": 1}}', "application/json"),
        (b'{"username": null}', "application/json"),
        (b'{"username": "alice"}' + b" " * 64 * 1024, "application/json"),
        (b"&".join(b"f%d=1" % n for n in range(1200)) + b"&username=alice", FORM),
        (
            b"".join(b'--x\r\nContent-Disposition: form-data; name="f%d"\r\n\r\n1\r\n' % n for n in range(1100))
            + b"--x--",
            "multipart/form-data; boundary=x",
        ),
        (b"--x\r\n" * 10_000, "multipart/form-data; boundary=x"),
        (b'--x\r\nContent-Disposition: form-data; name="username"\r\n\r\nalice', "multipart/form-data; boundary=x"),
        (b"username=%ff%fe%00", FORM + "; charset=utf-7"),
    ],
    ids=range(12),
)
def test_a_body_that_cannot_be_read_is_no_500_and_no_budget(
    body: bytes, content_type: str, settings: Any, client: Client
) -> None:
    limit(settings, middleware=True, names={**NAMES, "ON_MISSING": "ip", "CEILING": None})
    client.raise_request_exception = False
    sent = {"data": body, "content_type": content_type}
    assert 429 in statuses(client, "/whom", 3, "post", **sent)


# ----------------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize("path", ["/old/", "/old/%0a", "//old/", "/OLD/", "/old//"])
def test_a_view_is_not_reached_around_its_path(path: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, old={"RATE": "1/m", "KEY": "ip", "PATHS": ["/old/"]})
    client.get("/old/")
    assert client.get(path).status_code in (429, 404)


@pytest.mark.parametrize("method", ["HEAD", "PUT", "PROPFIND", "get", "X" * 1000])
def test_an_odd_method_is_no_budget(method: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, site={"RATE": "1/m", "KEY": "ip", "PATHS": ["*"]})
    client.get("/page")
    assert client.generic(method, "/page", headers={"X-HTTP-Method-Override": "OPTIONS"}).status_code == 429


# ----------------------------------------------------------------------------------------- giving back, twice and late


def test_a_refund_in_the_view_and_one_by_count_if_are_one(settings: Any, client: Client) -> None:
    limit(
        settings,
        middleware=True,
        asks={"RATE": "3/m", "KEY": "ip", "COUNT_IF": lambda *_: False, "URL_NAMES": ["refunds"], "METHODS": ["GET"]},
    )
    with freeze_time(HALF_PAST):
        hit("asks", "ip:127.0.0.1")
        hit("asks", "ip:127.0.0.1")
        statuses(client, "/refunds", 5)
        assert peek("asks", "ip:127.0.0.1").remaining == 1


def test_a_response_of_the_last_window_gives_nothing_to_this_one(settings: Any) -> None:
    limit(settings, middleware=True, asks={"RATE": "3/m", "KEY": "ip", "COUNT_IF": is_error})
    with freeze_time(HALF_PAST) as clock:
        decision = hit("asks", "ip:127.0.0.1")
        clock.tick(60)
        hit("asks", "ip:127.0.0.1")
        settle(decision, 0)
        settle(decision, 0)
        assert peek("asks", "ip:127.0.0.1").remaining == 2


# ------------------------------------------------------------------------------------------------------ other clocks


@pytest.mark.parametrize("algorithm", ["fixed", "sliding", "bucket"])
@pytest.mark.parametrize("kind", ["locmem", "django-redis"])
def test_a_host_whose_clock_is_an_hour_ahead_locks_nobody_out(
    algorithm: str, kind: str, use_cache: Callable[..., Any], settings: Any
) -> None:
    use_cache(kind)
    limit(
        settings,
        asks={"RATE": "3/m", "KEY": "ip", "ALGORITHM": algorithm, "BAN": {"AFTER": 1, "FOR": "5m", "MAX": "5m"}},
    )
    with freeze_time(HALF_PAST) as clock:
        clock.tick(3600)
        assert [hit("asks", "ip:127.0.0.1").allowed for _ in range(5)] == [True] * 3 + [False] * 2
        clock.tick(-3600)
        denied = hit("asks", "ip:127.0.0.1")
        assert denied.allowed or (denied.retry_after or 0) <= 300
        clock.tick(301)
        assert hit("asks", "ip:127.0.0.1").allowed


@pytest.mark.parametrize("algorithm", ["fixed", "sliding", "bucket"])
def test_a_clock_that_steps_back_is_no_new_budget_each_time(algorithm: str, settings: Any) -> None:
    limit(settings, asks={"RATE": "3/h", "KEY": "ip", "ALGORITHM": algorithm})
    passed = 0
    with freeze_time("2026-03-01 12:30:00") as clock:
        for _ in range(10):
            passed += sum(hit("asks", "ip:127.0.0.1").allowed for _ in range(3))
            clock.tick(-1)
    assert passed == 3


@pytest.mark.parametrize("kind", ["locmem", "django-redis"])
def test_another_algorithm_over_live_counters_is_no_error(
    kind: str, use_cache: Callable[..., Any], settings: Any, client: Client
) -> None:
    use_cache(kind)
    for algorithm in ("fixed", "sliding", "bucket", "concurrent", "fixed"):
        rate = "2" if algorithm == "concurrent" else "2/h"
        limit(
            settings,
            middleware=True,
            asks={"RATE": rate, "KEY": "ip", "ALGORITHM": algorithm, "PATHS": ["*"], "ON_ERROR": "deny"},
        )
        expected = [200] * 3 if algorithm == "concurrent" else [200, 200, 429]
        if keys() and algorithm == "fixed":
            expected = [429] * 3
        assert statuses(client, "/page", 3) == expected, algorithm


# --------------------------------------------------------------------------------------------------- whoever goes


@pytest.mark.parametrize("loop", ["new", "old"])
async def test_clients_that_go_at_once_do_not_use_up_who_may_be_in_flight(
    loop: str, use_cache: Callable[..., Any], own_redis: Callable[..., Any], settings: Any
) -> None:
    server = own_redis()
    use_cache("django-redis", server=server)
    limit(
        settings,
        middleware=True,
        flights={"RATE": "2", "KEY": "everyone", "ALGORITHM": "concurrent", "URL_NAMES": ["busy", "page"]},
        warm={"RATE": "1000/m", "KEY": "ip", "PATHS": ["/status/*"]},
        BREAKER={"FAILURES": 100, "SECONDS": 1},
    )
    client = AsyncClient()
    for _ in range(25 if loop == "old" else 1):
        await client.get("/status/200")
    for _ in range(4):
        with server.paused():
            task = asyncio.create_task(client.get("/busy"))
            await asyncio.sleep(0.05)  # its hit is on the way, and nobody answers
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await client.get("/page")).status_code == 200


# ----------------------------------------------------------------------------------------------- logs and shared pages


@pytest.mark.parametrize("broken", [{"RESPONSE": fails}, {"RESPONSE": lambda *_: 1}])
def test_a_mistake_of_the_project_is_not_logged_for_every_request_of_an_attack(
    broken: Any, settings: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    limit(settings, middleware=True, site={"RATE": "1/h", "KEY": "ip", "PATHS": ["*"], **broken})
    with caplog.at_level(logging.INFO):
        assert statuses(client, "/page", 50) == [200] + [429] * 49
    assert len(caplog.records) == 2  # denied, and the mistake


def test_a_page_that_cannot_be_rendered_is_not_logged_for_every_request_of_an_attack(
    settings: Any, client: Client, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "429.html").write_text("{% no such tag %}")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    limit(settings, middleware=True, site={"RATE": "1/h", "KEY": "ip", "PATHS": ["*"]})
    statuses(client, "/page", 50, headers={"Accept": "text/html"})
    assert len([one for one in caplog.records if one.name == "ratelimit_kv"]) == 2


def test_a_thousand_callers_over_their_limit_do_not_flood_the_log(
    settings: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    limit(settings, middleware=True, site={"RATE": "0/h", "KEY": "ip", "PATHS": ["*"]})
    with caplog.at_level(logging.INFO):
        for number in range(300):
            client.get(f"/{number}", REMOTE_ADDR=f"10.0.{number % 250}.{number % 200}")
    assert len([one for one in caplog.records if one.name == "ratelimit_kv"]) <= 21


@pytest.mark.parametrize("header", ["Expires", "CDN-Cache-Control", "Surrogate-Control"])
@pytest.mark.parametrize("style", ["draft", "legacy"])
def test_a_page_that_caches_keep_for_others_tells_nobodys_numbers(
    header: str, style: str, settings: Any, client: Client
) -> None:
    limit(settings, middleware=True, HEADERS=style, site={"RATE": "9/h", "KEY": "ip", "PATHS": ["*"]})
    assert not [name for name in client.get(f"/cached/{header}").headers if "ratelimit" in name.lower()]
    assert [name for name in client.get("/page").headers if "ratelimit" in name.lower()]


# ------------------------------------------------------------------------------------------------- the login preset

LOGINS = ["/login/", "/admin/login/"]
WRONG = {"username": "alice", "password": "guess"}
RIGHT = {"username": "alice", "password": "wonderland"}
ATTACKER = "198.51.100.66"


@pytest.fixture
def clock(settings: Any, db: None) -> Iterator[Any]:
    """Alice has an account, and logins are limited."""
    User.objects.create_user("alice", password="wonderland", is_staff=True)
    limit(settings, middleware=True, signin={"PRESET": "login", "URL_NAMES": ["login", "admin:login"]})
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, CSRF]
    settings.LOGIN_REDIRECT_URL = "/page"
    with freeze_time(HALF_PAST) as clock:
        yield clock


def login(body: Any, address: str = ATTACKER, path: str = "/login/", **more: Any) -> int:
    """What a browser without cookies is answered."""
    return Client().post(path, body, REMOTE_ADDR=address, **more).status_code


@pytest.mark.parametrize("path", LOGINS)
def test_the_right_password_is_not_found_among_many_wrong_ones(path: str, clock: Any) -> None:
    assert [login(WRONG, path=path) for _ in range(6)] == [200] * 5 + [429]
    assert [login(RIGHT, path=other) for other in LOGINS] == [429, 429]
    clock.tick(15 * 60)
    assert login(RIGHT, path=path) == 302


@pytest.mark.parametrize("path", LOGINS)
def test_guesses_from_everywhere_are_few_for_one_account(path: str, clock: Any) -> None:
    tried = 0
    for number in range(300):  # an hour, five tries a minute, each from a new address
        tried += login(WRONG, f"10.{number // 250}.{number % 250}.1", path) == 200
        clock.tick(12)
    assert 20 < tried <= 20 + 3600 / 45


def test_one_network_cannot_keep_an_owner_out(clock: Any) -> None:
    for _ in range(120):  # an hour of failing in her name, and she comes in between whenever she likes
        login(WRONG)
        assert login(RIGHT, "192.0.2.1") == 302
        clock.tick(30)


def test_guesses_for_everyone_are_few_for_one_address(clock: Any) -> None:
    names = [{"username": f"user{number}", "password": "123456"} for number in range(25)]
    assert [login(name) for name in names] == [200] * 20 + [429] * 5
    assert login(RIGHT) == 429
    assert login(RIGHT, "192.0.2.1") == 302


def test_a_success_of_the_attackers_own_forgives_him_nothing(clock: Any) -> None:
    User.objects.create_user("mallory", password="mallory")
    tried = 0
    for _ in range(30):
        tried += login(WRONG) == 200
        login({"username": "mallory", "password": "mallory"})
    assert tried == 5


def test_a_success_of_the_attackers_own_does_not_clear_his_address(clock: Any, settings: Any) -> None:
    User.objects.create_user("mallory", password="mallory")
    signin = {"PRESET": "login", "URL_NAMES": ["login"], "RESET_IF": "ratelimit_kv.scopes.is_success"}
    limit(settings, middleware=True, signin=signin)
    tried = 0
    for number in range(40):
        tried += login({"username": f"user{number}", "password": "guess"}) == 200
        login({"username": "mallory", "password": "mallory"})
    assert tried == 20


def test_an_owner_is_let_in_where_nobody_fails_any_more(clock: Any) -> None:
    assert [login(WRONG, f"10.{number}.0.1") for number in range(25)] == [200] * 20 + [429] * 5
    assert login(RIGHT, "192.0.2.1") == 429
    clock.tick(45)  # not fifteen minutes
    assert login(RIGHT, "192.0.2.1") == 302
    assert login(RIGHT, "192.0.2.1") == 302  # a success is given back


def test_who_shares_an_address_with_an_attacker_on_one_account_goes_on(clock: Any) -> None:
    User.objects.create_user("bob", password="builder")
    for _ in range(40):
        login(WRONG)
    assert login({"username": "bob", "password": "builder"}) == 302


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"x" * 70_000, FORM),
        (b"username=alice&password=wonderland&x=" + b"x" * 70_000, FORM),
        (b"password=wonderland", FORM),
        (b"username=&password=wonderland", FORM),
        (b"username=%E2%80%8B&password=wonderland", FORM),
        (b'{"username": "bob", "x": "&username=alice&password=wonderland&"}', FORM),
        (b"--x", "multipart/form-data; boundary=x"),
        (b'{"username": ["alice"], "password": "wonderland"}', "application/json"),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("path", LOGINS)
def test_a_login_that_names_nobody_is_refused(body: bytes, content_type: str, path: str, clock: Any) -> None:
    assert [login(body, path=path, content_type=content_type) for _ in range(3)] == [400] * 3
    assert keys() == []


def test_a_login_in_json_spends_the_same_budget(clock: Any) -> None:
    said = json.dumps({"username": " Alice", "password": "guess"})
    for content_type in ("application/json", "text/plain", FORM, "application/json", "text/plain"):
        assert login(said, content_type=content_type) == 200  # Django's form finds nothing in it
    assert login(RIGHT) == 429


def test_a_post_that_csrf_refuses_is_a_failure_too(clock: Any) -> None:
    client = Client(enforce_csrf_checks=True, REMOTE_ADDR=ATTACKER)
    assert statuses(client, "/login/", 6, "post", data=RIGHT) == [403] * 5 + [429]


@pytest.mark.parametrize(
    ("spread", "passed"),
    [
        (lambda number: f"2001:db8:1:1::{number:x}", 20),  # within a /64
        (lambda number: f"2001:db8:1:{number % 256:x}::1", 60),  # within a /56
        (lambda number: f"2001:db8:1:{number * 97 % 65536:x}::{number:x}", 200),  # within a /48
        (lambda number: f"64:ff9b::c633:{number % 2 + 100:x}", 40),  # two IPv4 addresses behind NAT64
        (lambda number: f"::ffff:198.51.100.{number % 2}", 40),
    ],
    ids=["/64", "/56", "/48", "NAT64", "mapped"],
)
def test_a_customer_with_a_whole_network_is_one_customer(spread: Any, passed: int, clock: Any) -> None:
    tried = sum(
        login({"username": f"user{number}", "password": "123456"}, spread(number)) == 200
        for number in range(passed + 10)
    )
    assert tried == passed


def test_a_refusal_tells_an_attacker_nothing_about_the_account(clock: Any) -> None:
    def told(name: str, address: str) -> Any:
        client = Client(REMOTE_ADDR=address)
        for _ in range(5):
            client.post("/login/", {"username": name, "password": "guess"})
        denied = client.post("/login/", {"username": name, "password": "guess"}, headers={"Accept": "application/json"})
        return denied.status_code, dict(denied.headers), denied.content

    assert told("alice", "192.0.2.1") == told("nobody", "192.0.2.2")
    assert "alice" not in str(keys())


# --------------------------------------------------------------------------------- real servers, behind a real socket


@pytest.fixture(scope="module", params=["gunicorn", "uvicorn"])
def proxied(request: pytest.FixtureRequest, redis_server: Server) -> Iterator[Callable[..., int]]:
    """A server behind a proxy on a unix socket. The proxy is us: it sends what it is told, and returns the status."""
    kind = request.param
    there(find_spec(kind) or Missing(f"the Python package {kind} is not installed"))
    given = {
        "CACHES": {"default": cache_settings("django-redis", redis_server, KEY_PREFIX=f"attacks-{kind}")},
        "ROOT_URLCONF": __name__,
        "MIDDLEWARE": ["ratelimit_kv.middleware.RateLimitMiddleware"],
        "RATELIMIT_KV": {
            "TRUSTED_PROXIES": ["unix"],
            "EXEMPT_IPS": ["127.0.0.1"],
            "SCOPES": {
                "site": {"RATE": "2/day", "KEY": "ip", "PATHS": ["/page"]},
                "names": NAMES,
                "flights": {"RATE": "3", "KEY": "everyone", "ALGORITHM": "concurrent", "PATHS": ["/busy", "/status/*"]},
            },
        },
    }
    directory = Path(tempfile.mkdtemp(prefix="attacks-"))
    place = str(directory / "s")
    command = {
        "gunicorn": ["gunicorn", "--bind", f"unix:{place}", "django.core.wsgi:get_wsgi_application()"],
        "uvicorn": ["uvicorn", "--uds", place, "--factory", "django.core.asgi:get_asgi_application", "--lifespan=off"],
    }[kind]
    environment = {**child_environment(**given), "XDG_RUNTIME_DIR": str(directory)}
    words = [f"{name}={value}" for name, value in environment.items()]

    def send(path: str, *lines: str, body: bytes = b"", wait: bool = True) -> int:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(30)
            peer.connect(place)
            head = "\r\n".join([path if " " in path else f"GET {path} HTTP/1.1", "Host: site", *lines])
            peer.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode("latin-1") + body)
            return int(peer.makefile("rb").readline().split()[1]) if wait else 0

    def is_ready(port: int) -> bool:
        with contextlib.suppress(OSError):
            return send("/cached/Expires") == 200
        return False

    server = Server(
        kind,
        lambda port: ["/usr/bin/env", *words, sys.executable, "-m", *command],
        is_ready,
        place,
        directory,
        quick_end=signal.SIGTERM,
    )
    server.start()
    yield send
    server.stop()


@pytest.mark.parametrize(
    "forged",
    [
        ["X-Forwarded-For: 192.0.2.{}", "X-Forwarded-For: {me}"],
        ["X-Forwarded-For: 192.0.2.{}, {me}"],
        ["X-Forwarded-For: {me}", "X_Forwarded_For: 192.0.2.{}"],
        ["X_Forwarded_For: 192.0.2.{}", "X-Forwarded-For: {me}"],
        ["X-Forwarded-For: {me}", "Forwarded: for=192.0.2.{}"],
        ["X-Forwarded-For: {me}", "X-Real-IP: 192.0.2.{}", "Client-IP: 192.0.2.{}", "CF-Connecting-IP: 192.0.2.{}"],
        ["X-Forwarded-For: garbage{}, unknown, {me}"],
        ["X-Forwarded-For: 127.0.0.1, {me}", "X-Nonce: {}"],
        ["X-Forwarded-For: 192.0.2.{}, {me}:41822"],
        ["X-Forwarded-For: 192.0.2.{}, ::ffff:{me}"],
        ["x-forwarded-for: 192.0.2.{},,  {me} "],
    ],
    ids=range(11),
)
def test_whoever_is_behind_a_proxy_is_no_one_else(
    forged: list[str], proxied: Callable[..., int], request: pytest.FixtureRequest
) -> None:
    me = f"203.0.113.{request.node.callspec.indices['forged'] + 1}"
    said = [proxied("/page", *(line.replace("{me}", me).replace("{}", str(n)) for line in forged)) for n in range(5)]
    assert said == [200, 200, 429, 429, 429]


@pytest.mark.parametrize(
    "line", ["X-Forwarded-For: ,", "X-Forwarded-For: unknown", "X-Nonce: 1", "X-Forwarded-For: %s"]
)
def test_a_proxy_that_knows_nobody_is_one_caller(line: str, proxied: Callable[..., int]) -> None:
    assert [proxied("/page", line.replace("%s", "9." * n)) for n in range(5)][2:] == [429] * 3


@pytest.mark.parametrize(
    "asked",
    [
        "GET //page HTTP/1.1",
        "GET /%70age HTTP/1.1",
        "GET http://other/page HTTP/1.1",
        "GET /page?x=1#y HTTP/1.1",
        "HEAD /page HTTP/1.1",
        "BREW /page HTTP/1.1",
        "GET /page HTTP/1.0",
        "GET /./page HTTP/1.1",
        "GET /page;x=1 HTTP/1.1",
        "GET /page%00 HTTP/1.1",
    ],
)
def test_another_way_to_ask_is_no_new_budget(asked: str, proxied: Callable[..., int]) -> None:
    me = "X-Forwarded-For: 203.0.113.200"
    proxied("/page", me)
    proxied("/page", me)
    assert proxied(asked, me) in (429, 404, 400, 405)


@pytest.mark.parametrize("chunk", [b"", b" " * 80_000], ids=["short", "long"])
def test_a_body_in_chunks_is_read_or_refused_but_not_let_through(chunk: bytes, proxied: Callable[..., int]) -> None:
    body = b'{"username": "alice"}' + chunk
    lines = ["Transfer-Encoding: chunked", "Content-Type: application/json", "X-Forwarded-For: 203.0.113.201"]
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    said = [proxied("POST /whom HTTP/1.1", *lines, body=sent) for _ in range(4)]
    assert said.count(200) <= 2
    assert set(said) <= {200, 400, 429}


@pytest.mark.parametrize("proxied", ["uvicorn"], indirect=True)  # gunicorn does not notice while the view runs
def test_clients_that_hang_up_do_not_stay_in_flight(proxied: Callable[..., int]) -> None:
    for _ in range(12):
        proxied("/busy", wait=False)
    servers.wait_until(lambda: proxied("/status/200") == 200, "those who hung up to be forgotten", 20)
