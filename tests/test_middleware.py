"""The middleware: where it decides, what it counts that never reaches a view, what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import Any

import pytest
from asgiref.sync import SyncToAsync, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.template.response import SimpleTemplateResponse
from django.test import AsyncClient, Client
from freezegun import freeze_time

from ratelimit_kv import peek
from ratelimit_kv.middleware import RateLimitMiddleware
from tests.site import HALF_PAST, RATE_LIMIT, limit, statuses

ME = "ip:127.0.0.1"


@pytest.fixture(autouse=True)
def clock(use_cache: Callable[..., Any]) -> Iterator[Any]:
    """The clock stands still, and nothing has been counted yet."""
    use_cache("locmem")
    with freeze_time(HALF_PAST, real_asyncio=True) as frozen:
        yield frozen


@pytest.fixture
def store_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call of the store, as it happens."""
    from ratelimit_kv.stores.locmem import LocMemStore

    calls: list[str] = []
    for method in ("hit", "peek", "reset"):

        def spy(name: str, real: Any, self: Any, *args: Any) -> Any:
            calls.append(name)
            return real(self, *args)

        monkeypatch.setattr(LocMemStore, method, partialmethod(partial(spy, method, getattr(LocMemStore, method))))
    return calls


def as_it_stands(path: str) -> dict[str, str]:
    """For the test client, which takes what follows two slashes for a host."""
    return {"PATH_INFO": path} if path.startswith("//") else {}


def site_wide(settings: Any, rate: str = "3/m", **options: Any) -> None:
    """One limit by address on everything."""
    limit(settings, middleware=True, site={"RATE": rate, "KEY": "ip", "PATHS": ["*"], **options})


# ----------------------------------------------------------------------------------------- where and when it decides


def test_wrong_settings_stop_a_server_from_starting(settings: Any) -> None:
    limit(settings, middleware=True, ask={"RATE": "5/month"})
    with pytest.raises(ImproperlyConfigured, match="5/month"):
        RateLimitMiddleware(lambda request: HttpResponse())


def test_it_serves_both_worlds() -> None:
    assert RateLimitMiddleware.sync_capable
    assert RateLimitMiddleware.async_capable


def in_atomic_block(request: HttpRequest) -> str:
    return f"atomic-{connection.in_atomic_block}"


def test_it_decides_outside_of_the_transaction_of_a_request(
    settings: Any, client: Client, transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    limit(settings, middleware=True, site={"RATE": "3/m", "KEY": in_atomic_block, "PATHS": ["*"]})
    assert client.get("/who").json() == {"site": "call:atomic-False"}


@pytest.mark.parametrize(("path", "calls"), [("/door/function", 1), ("/door/async-class", 1), ("/door/handler", 2)])
def test_the_limits_of_settings_and_of_the_view_are_decided_in_one_call(
    path: str, calls: int, settings: Any, client: Client, store_calls: list[str]
) -> None:
    """A limit on a handler stands behind whatever the view does before, so it is decided there."""
    limit(settings, middleware=True, site={"RATE": "9/m", "PATHS": ["*"]}, door="9/m")
    client.get(path)
    assert store_calls == ["hit"] * calls


def test_one_scope_counts_once_whoever_asks_for_it(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, site={"RATE": "10/m", "PATHS": ["*"]}, door={"RATE": "3/m", "PATHS": ["/door/*"]})
    assert statuses(client, "/door/function", 4) == [200, 200, 200, 429]
    assert statuses(client, "/door/handler", 1) == [429]
    assert peek("door", ME).remaining == 0
    assert peek("site", ME).remaining == 7, "a refused request costs nothing"


def test_the_tightest_limit_is_told(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, site={"RATE": "10/h", "PATHS": ["*"]}, door="3/m")
    answer = client.get("/door/function")
    assert answer["RateLimit"] == '"door";r=2;t=30'
    assert answer["RateLimit-Policy"] == '"door";q=3;w=60, "site";q=10;w=3600'


def test_a_view_sees_what_was_decided(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, site={"RATE": "10/h", "PATHS": ["*"]}, who={"RATE": "3/m", "URL_NAMES": ["who"]})
    assert client.get("/who").json() == {"site": ME, "who": ME}


def test_nothing_is_counted_while_limits_are_off(settings: Any, client: Client, store_calls: list[str]) -> None:
    limit(settings, middleware=True, ENABLED=False, site={"RATE": "1/m", "PATHS": ["*"]}, door="1/m")
    assert statuses(client, "/door/function", 3) == [200, 200, 200]
    assert store_calls == []


def test_unlimited_costs_nothing_and_zero_refuses_all(settings: Any, client: Client, store_calls: list[str]) -> None:
    site_wide(settings, rate=None)  # type: ignore[arg-type]
    assert statuses(client, "/plain", 50) == [200] * 50
    assert store_calls == []
    site_wide(settings, rate="0/m")
    answer = client.get("/plain")
    assert answer.status_code == 429
    assert answer["RateLimit"] == '"site";r=0;t=30'


# ---------------------------------------------------------------------------------- what never reaches a view

COMMON = "django.middleware.common.CommonMiddleware"
CSRF = "django.middleware.csrf.CsrfViewMiddleware"


def closed(get_response: Any) -> Any:
    """A middleware that lets nobody in."""
    return lambda request: HttpResponse("closed", status=403)


def closed_to_views(get_response: Any) -> Any:
    def middleware(request: HttpRequest) -> Any:
        return get_response(request)

    middleware.process_view = lambda request, *args: HttpResponse("closed", status=403)  # type: ignore[attr-defined]
    return middleware


@pytest.mark.parametrize(
    ("path", "extra", "status"),
    [
        ("/nowhere", [], 404),
        ("/plain", [COMMON], 400),
        ("/plain", [f"{__name__}.closed"], 403),
        ("/plain", [f"{__name__}.closed_to_views"], 403),
        ("/plain", [CSRF], 403),
    ],
    ids=["404", "host", "middleware", "process_view", "csrf"],
)
@pytest.mark.parametrize("world", ["WSGI", "ASGI"])
async def test_what_is_refused_before_it_reaches_a_view_is_counted(
    path: str, extra: list[str], status: int, world: str, settings: Any
) -> None:
    site_wide(settings)
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, *extra]
    settings.ALLOWED_HOSTS = ["example.com"]
    if world == "ASGI":
        client = AsyncClient(enforce_csrf_checks=True)
        answers = [await client.post(path) for _ in range(5)]
    else:
        blocking = Client(enforce_csrf_checks=True)
        answers = [await sync_to_async(blocking.post)(path) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [status, status, status, 429, 429]
    assert answers[0]["RateLimit"] == '"site";r=2;t=30'
    assert answers[3]["Retry-After"] == "30"


def test_an_address_that_leads_nowhere_is_only_under_limits_of_paths(settings: Any, client: Client) -> None:
    limit(
        settings,
        middleware=True,
        named={"RATE": "1/m", "URL_NAMES": ["plain"]},
        api={"RATE": "2/m", "PATHS": ["/api/*"]},
    )
    assert statuses(client, "/nowhere", 3) == [404, 404, 404]
    assert statuses(client, "/api/nowhere", 3) == [404, 404, 429]


def test_redirects_to_the_right_address_are_not_counted(settings: Any, client: Client) -> None:
    """Neither the slash of APPEND_SLASH nor the language of LocaleMiddleware: only the request that follows."""
    site_wide(settings)
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware", COMMON]
    assert statuses(client, "/login", 3) == [301, 301, 301]
    assert statuses(client, "/shop/", 3) == [302, 302, 302]
    assert peek("site", ME).remaining == 3
    assert [client.get(path, follow=True).status_code for path in ("/login", "/shop/")] == [200, 200]
    assert peek("site", ME).remaining == 1


def as_page(request: HttpRequest, decision: Any) -> SimpleTemplateResponse:
    return SimpleTemplateResponse("ratelimit_kv/429.html", {"title": "Enough"}, status=429)


@pytest.mark.parametrize("path", ["/plain", "/nowhere"])
async def test_a_response_that_is_yet_to_be_rendered_is_rendered(
    path: str, settings: Any, client: Client, async_client: AsyncClient
) -> None:
    site_wide(settings, "0/m", RESPONSE=as_page)
    for answer in (await sync_to_async(client.get)(path), await async_client.get(path)):
        assert answer.status_code == 429
        assert b"<title>Enough</title>" in answer.content


# --------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize("middleware", [True, False])
@pytest.mark.parametrize(
    "path", ["/door/class", "/door/async-class", "/door/dispatch", "/door/drf-class", "/door/drf-below"]
)
def test_options_are_free_where_django_answers_them(
    path: str, middleware: bool, settings: Any, client: Client, store_calls: list[str]
) -> None:
    limit(settings, middleware=middleware, door={"RATE": "2/m", "KEY": "ip"})
    assert statuses(client, path, 5, "options") == [200] * 5
    assert store_calls == []
    assert statuses(client, path, 3) == [200, 200, 429]
    assert statuses(client, path, 30, "options") == [200] * 30


@pytest.mark.parametrize("middleware", [True, False])
@pytest.mark.parametrize("path", ["/door/function", "/door/async-function", "/door/object"])
def test_options_have_a_counter_of_their_own_where_the_view_answers_them(
    path: str, middleware: bool, settings: Any, client: Client
) -> None:
    limit(settings, middleware=middleware, door={"RATE": "2/m", "KEY": "ip"})
    assert statuses(client, path, 5, "options") == [200] * 5
    assert statuses(client, path, 3) == [200, 200, 429]
    assert statuses(client, path, 16, "options") == [200] * 15 + [429], "ten times the limit"
    assert peek("door.options", ME).remaining == 0


def test_options_that_lead_nowhere_do_not_spend_the_budget_either(settings: Any, client: Client) -> None:
    limit(
        settings,
        middleware=True,
        site={"RATE": "2/m", "PATHS": ["*"]},
        forms={"RATE": "2/m", "PATHS": ["*"], "METHODS": ["POST"]},
    )
    assert statuses(client, "/nowhere", 5, "options") == [404] * 5
    assert peek("site", ME).remaining == 2
    assert peek("forms", ME).remaining == 2


def test_a_scope_that_names_options_counts_them(settings: Any, client: Client) -> None:
    site_wide(settings, "2/m", METHODS=["OPTIONS"])
    assert statuses(client, "/class", 3, "options") == [200, 200, 429]
    assert statuses(client, "/class", 3) == [200] * 3


def test_methods_narrow_a_limit(settings: Any, client: Client) -> None:
    site_wide(settings, "2/m", METHODS=["POST"])
    assert statuses(client, "/class", 3) == [200, 200, 200]
    assert statuses(client, "/class", 3, "post") == [200, 200, 429]
    assert statuses(client, "/nowhere", 2) == [404, 404]
    assert statuses(client, "/nowhere", 1, "post") == [429]


def test_head_is_get(settings: Any, client: Client) -> None:
    site_wide(settings, "2/m", METHODS=["GET"])
    assert [getattr(client, method)("/class").status_code for method in ("head", "get", "head")] == [200, 200, 429]


# ------------------------------------------------------------------------------------------------ exemptions


def is_probe(request: HttpRequest) -> bool:
    return request.headers.get("User-Agent") == "kube-probe/1.29"


async def is_probe_async(request: HttpRequest) -> bool:
    return is_probe(request)


EXEMPTIONS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # path, options at the top, options of the scope, extra of the request
    ("/plain", {"EXEMPT": is_probe}, {}, {"headers": {"user-agent": "kube-probe/1.29"}}),
    ("/plain", {"EXEMPT": is_probe_async}, {}, {"headers": {"user-agent": "kube-probe/1.29"}}),
    ("/plain", {"EXEMPT_IPS": ["203.0.113.0/24"]}, {}, {"REMOTE_ADDR": "203.0.113.9"}),
    ("/plain", {}, {"EXEMPT_PATHS": ["/plain"]}, {}),
    ("/item/tea", {}, {"EXEMPT_PATHS": ["/item/*"]}, {}),
    ("/nowhere", {}, {"EXEMPT_PATHS": ["/nowhere"]}, {}),
    ("/plain", {}, {"EXEMPT_URL_NAMES": ["plain"]}, {}),
    ("/plain", {}, {"MODE": "off"}, {}),
]


@pytest.mark.parametrize(("path", "top", "options", "extra"), EXEMPTIONS)
def test_the_exempt_are_never_refused_and_cost_nothing(
    path: str, top: Any, options: Any, extra: Any, settings: Any, client: Client, store_calls: list[str]
) -> None:
    limit(settings, middleware=True, **top, site={"RATE": "1/m", "PATHS": ["*"], "KEY": "ip", **options})
    answers = [client.get(path, **extra) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {404 if path == "/nowhere" else 200}
    assert not any("RateLimit" in answer for answer in answers)
    assert store_calls == []


def test_who_is_not_exempt_is_limited_beside_them(settings: Any, client: Client) -> None:
    limit(
        settings,
        middleware=True,
        EXEMPT=is_probe,
        EXEMPT_IPS=["203.0.113.0/24"],
        site={"RATE": "1/m", "PATHS": ["*"], "KEY": "ip", "EXEMPT_PATHS": ["/plain"]},
    )
    assert statuses(client, "/plain", 2) == [200, 200]
    assert statuses(client, "/class", 2) == [200, 429]
    forged = {"REMOTE_ADDR": "198.51.100.1", "headers": {"x-forwarded-for": "203.0.113.9"}}
    assert statuses(client, "/class", 2, **forged) == [200, 429], "a forwarded header from anybody exempts nobody"


@pytest.mark.parametrize(
    "path", ["/Plain", "/plain/", "//plain", "/plain/../plain", "/plainer", "/item/plain", "/media/x"]
)
def test_an_exemption_is_no_wider_than_it_looks(path: str, settings: Any, client: Client) -> None:
    site_wide(settings, "0/m", EXEMPT_PATHS=["/plain"])
    assert statuses(client, path, 1, **as_it_stands(path)) == [429]


def raises(request: HttpRequest) -> bool:
    raise LookupError


@pytest.mark.parametrize("exempt", [raises, lambda request: "yes", lambda request: None])
def test_what_is_not_clearly_exempt_is_not(exempt: Any, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, EXEMPT=exempt, site={"RATE": "1/m", "PATHS": ["*"]})
    assert statuses(client, "/plain", 2) == [200, 429]


def test_an_exemption_of_a_scope_holds_wherever_the_scope_is_named(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, door={"RATE": "1/m", "EXEMPT_PATHS": ["/door/function", "/door/handler"]})
    assert statuses(client, "/door/function", 3) == [200] * 3
    assert statuses(client, "/door/handler", 3) == [200] * 3
    assert statuses(client, "/door/class", 2) == [200, 429]


# -------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("paths", "path"),
    [
        (["*"], "/anything"),
        (["/*"], "/anything"),
        (["/login"], "/login"),
        (["/login"], "/login/"),
        (["/login/"], "/login"),
        (["/login"], "//login"),
        (["/login"], "///login//"),
        (["/login"], "/LogIn"),
        (["/Login"], "/login"),
        (["/login"], "/%6Cogin"),
        (["/login"], "/login?next=/"),
        (["/login"], "/login%2F"),
        (["/login"], "/en-us/login/"),
        (["/login"], "/de/login"),
        (["/login"], "/zh-hans/login"),
        (["/de/login"], "/de/login"),
        (["/api/*"], "/api/v1/users"),
        (["/api/*"], "/API//v1"),
        (["/api/*"], "/api"),
        (["/api/*"], "/fr/api/v1"),
        (["/straße"], "/STRASSE"),
    ],
)
def test_a_respelled_path_is_still_that_path(paths: list[str], path: str, settings: Any, client: Client) -> None:
    site_wide(settings, "0/m", PATHS=paths)
    assert statuses(client, path, 1, **as_it_stands(path)) == [429]


@pytest.mark.parametrize(
    ("paths", "path"),
    [
        (["/login"], "/login/now"),
        (["/login"], "/logins"),
        (["/login"], "/xx/login"),
        (["/api/*"], "/apis"),
        (["/"], "/login"),
        (["/login"], "/"),
    ],
)
def test_another_path_is_not(paths: list[str], path: str, settings: Any, client: Client) -> None:
    site_wide(settings, "0/m", PATHS=paths)
    assert statuses(client, path, 1) == [404]


def test_languages_are_no_part_of_a_path_only_where_urls_are_translated(settings: Any, client: Client) -> None:
    site_wide(settings, "0/m", PATHS=["/login"])
    settings.USE_I18N = False
    assert statuses(client, "/de/login", 1) == [404]


def test_every_spelling_that_leads_to_a_view_shares_the_counter_of_its_name(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, signin={"RATE": "3/m", "URL_NAMES": ["login"]})
    paths = ["/login/", "/login/?x=1", "/%6Cogin/", "/login/"]
    assert [client.get(path).status_code for path in paths] == [200, 200, 200, 429]


# ------------------------------------------------------------------------------------ the user and the session


@pytest.mark.parametrize("path", ["/plain", "/plain-async", "/nowhere"])
async def test_an_anonymous_page_does_not_vary_on_the_cookie_and_reads_no_session(
    path: str, settings: Any, client: Client, async_client: AsyncClient
) -> None:
    """This test has no database: reading the session would raise."""
    limit(
        settings,
        middleware=True,
        **{name: {"RATE": "9/m", "KEY": name, "PATHS": ["*"]} for name in ("user", "session")},
    )
    for answer in (await sync_to_async(client.get)(path), await async_client.get(path)):
        assert answer.status_code in (200, 404)
        assert "Vary" not in answer
        assert "RateLimit" in answer


@pytest.fixture
def alice(db: None, django_user_model: Any) -> Any:
    return django_user_model.objects.create_user("alice")


def test_a_user_is_counted_as_one_wherever_he_comes_from(settings: Any, alice: Any) -> None:
    limit(settings, middleware=True, api={"RATE": "2/m", "PATHS": ["*"]})
    client = Client()
    client.force_login(alice)
    answers = [client.get("/who", REMOTE_ADDR=f"203.0.113.{n}") for n in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].json() == {"api": f"user:{alice.pk}"}


@pytest.mark.django_db(transaction=True)
async def test_a_user_is_counted_under_asgi_without_a_blocking_read(settings: Any, django_user_model: Any) -> None:
    alice = await django_user_model.objects.acreate(username="alice")
    limit(settings, middleware=True, api={"RATE": "2/m", "PATHS": ["*"]})
    client = AsyncClient()
    await client.aforce_login(alice)
    answers = [await client.get("/plain-async") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert peek("api", f"user:{alice.pk}").remaining == 0


async def hops(monkeypatch: pytest.MonkeyPatch, path: str) -> int:
    """How often a request under ASGI goes to a thread and back."""
    count = 0
    real = SyncToAsync.__call__

    async def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return await real(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(SyncToAsync, "__call__", spy)
        assert (await AsyncClient().get(path)).status_code == 200
    return count


@pytest.mark.parametrize("scopes", [{}, {"site": {"RATE": "9/m", "KEY": "ip", "PATHS": ["*"]}}], ids=["none", "LocMem"])
async def test_under_asgi_it_goes_to_no_thread_unless_a_store_needs_one(
    scopes: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(settings, **scopes)
    settings.MIDDLEWARE = []
    before = await hops(monkeypatch, "/plain-async")
    settings.MIDDLEWARE = [RATE_LIMIT]
    assert await hops(monkeypatch, "/plain-async") == before


# ---------------------------------------------------------------------------------------------- shared responses

UPDATE, FETCH = "django.middleware.cache.UpdateCacheMiddleware", "django.middleware.cache.FetchFromCacheMiddleware"


def test_a_page_for_everybody_carries_nobodys_numbers(settings: Any, client: Client) -> None:
    site_wide(settings, "9/m")
    settings.MIDDLEWARE = [UPDATE, *settings.MIDDLEWARE, FETCH]
    answers = [client.get("/plain") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert not any("RateLimit" in answer for answer in answers)
    assert peek("site", ME).remaining == 8, "the cached page reached no view"


def test_a_refusal_is_kept_by_no_page_cache(settings: Any, client: Client, clock: Any) -> None:
    site_wide(settings, "1/m", RESPONSE=lambda request, decision: HttpResponse("The oracle rests."))
    settings.MIDDLEWARE = [UPDATE, *settings.MIDDLEWARE, FETCH]
    client.get("/class")
    assert client.get("/plain").content == b"The oracle rests."
    clock.tick(30)
    assert client.get("/plain").content == b"hello"


# ------------------------------------------------------------------------------------------- the company it keeps


def cors(get_response: Any) -> Any:
    """What django-cors-headers does."""

    def middleware(request: HttpRequest) -> Any:
        response = get_response(request)
        response["Access-Control-Allow-Origin"] = "*"
        return response

    return middleware


def test_a_middleware_outside_still_finishes_the_refusal(settings: Any, client: Client) -> None:
    site_wide(settings, "0/m")
    settings.MIDDLEWARE = [f"{__name__}.cors", *settings.MIDDLEWARE]
    answer = client.get("/plain")
    assert answer.status_code == 429
    assert answer["Access-Control-Allow-Origin"] == "*"


def nobody(get_response: Any) -> Any:
    def middleware(request: HttpRequest) -> Any:
        request.user = None  # type: ignore[assignment]
        return get_response(request)

    return middleware


def test_a_user_that_is_none_is_nobody(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, api={"RATE": "2/m", "PATHS": ["*"]})
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.nobody"]
    assert client.get("/who").json() == {"api": ME}


def test_without_any_other_middleware_there_is_no_user_to_ask(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, api={"RATE": "2/m", "PATHS": ["*"], "KEY": "user|session|ip"})
    settings.MIDDLEWARE = [RATE_LIMIT]
    assert client.get("/who").json() == {"api": ME}


def test_listed_twice_it_counts_once(settings: Any, client: Client) -> None:
    site_wide(settings)
    settings.MIDDLEWARE = [RATE_LIMIT, *settings.MIDDLEWARE]
    assert statuses(client, "/plain", 4) == [200, 200, 200, 429]


def test_bad_credentials_are_counted_before_they_are_refused(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, site={"RATE": "5/m", "KEY": "ip", "PATHS": ["*"]}, door="9/m")
    answers = [client.get("/door/guarded", headers={"authorization": f"Guess {n}"}) for n in range(10)]
    assert [answer.status_code for answer in answers] == [401] * 5 + [429] * 5


def test_a_limit_below_the_authentication_of_a_framework_tells_its_users_apart(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, door="1/m")
    for token in ("anna", "bert"):
        answers = [client.get("/door/guarded", headers={"authorization": f"Token {token}"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
