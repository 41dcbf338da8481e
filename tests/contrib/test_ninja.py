"""The throttle of Ninja: scopes of the settings, counted after Ninja's authentication, for sync and async operations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core import signing
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.asyncio import async_unsafe
from freezegun import freeze_time
from ninja import NinjaAPI
from ninja.errors import Throttled
from ninja.security import HttpBearer
from ninja.testing import TestClient
from ninja.throttling import BaseThrottle

from ratelimit_kv import apeek, check, peek, rate_limit
from ratelimit_kv.contrib.ninja import RateLimitThrottle
from ratelimit_kv.process import forget
from ratelimit_kv.stores import StoreError
from ratelimit_kv.stores.locmem import LocMemStore
from tests.site import HALF_PAST, limit, statuses

pytestmark = pytest.mark.urls(__name__)


class Token(HttpBearer):
    """Knows tokens like ``7``, and says who that is as Ninja does and as Django does."""

    def authenticate(self, request: HttpRequest, token: str) -> Any:
        if not token.isdigit():
            return None
        request.user = User(pk=int(token))
        return {"sub": f"subject {token}"}


class Witness(BaseThrottle):
    seen = 0

    def allow_request(self, request: HttpRequest) -> bool:
        Witness.seen += 1
        return True


api = NinjaAPI(urls_namespace="throttled", docs_url=None)


def greet(request: HttpRequest) -> dict[str, str]:
    return {"word": "hello"}


async def greet_async(request: HttpRequest) -> dict[str, str]:
    return {"word": "hello"}


for name, view in (("sync", greet), ("async", greet_async)):
    api.api_operation(["GET", "POST"], f"/{name}", throttle=RateLimitThrottle("api", "budget"))(view)
    api.get(f"/{name}/guarded", auth=Token(), throttle=RateLimitThrottle("api"))(view)
    api.get(f"/{name}/several", throttle=[RateLimitThrottle("api"), Witness()])(view)


@api.get("/doors", throttle=RateLimitThrottle("api"))
@rate_limit("api")
def doors(request: HttpRequest) -> Any:
    return check(request, "api").remaining


custom = NinjaAPI(urls_namespace="custom", docs_url=None, throttle=[RateLimitThrottle("api")])
custom.get("/default")(greet)
custom.get("/free", throttle=[])(greet)


@custom.exception_handler(Throttled)
def explain(request: HttpRequest, error: Throttled) -> HttpResponse:
    return custom.create_response(request, {"wait": error.wait}, status=429)


urlpatterns = [path("api/", api.urls), path("custom/", custom.urls)]

SCOPES: dict[str, Any] = {
    "api": {"RATE": "3/m", "KEY": "user|ip"},
    "budget": {"RATE": "100/h", "KEY": "everyone"},
}


@pytest.fixture(autouse=True)
def clock(use_cache: Callable[..., Any]) -> Iterator[Any]:
    use_cache("locmem")
    with freeze_time(HALF_PAST, real_asyncio=True) as frozen:
        yield frozen


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each call of the store, how many counters were in it."""
    seen: list[int] = []
    hit = LocMemStore.hit

    def counted(self: Any, counters: Any, now: int) -> Any:
        seen.append(len(counters))
        return hit(self, counters, now)

    monkeypatch.setattr(LocMemStore, "hit", counted)
    return seen


def fail(self: Any, counters: Any, now: int) -> Any:
    raise StoreError("gone", outage=False)


def token(number: object) -> dict[str, str]:
    return {"Authorization": f"Bearer {number}"}


both = pytest.mark.parametrize("middleware", [False, True], ids=["alone", "with middleware"])
each = pytest.mark.parametrize("kind", ["sync", "async"])


def is_refused_after_three(answers: list[Any], middleware: bool) -> None:
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    for answer in answers[3:]:
        assert answer["Retry-After"] == "30"
        if middleware:
            assert answer["Cache-Control"] == "no-store"
            assert answer.json()["violated-policies"] == ["api"]
        else:
            assert answer.json() == {"detail": "Too many requests."}
    if middleware:
        assert [answer["RateLimit"] for answer in answers[:4]] == [f'"api";r={left};t=30' for left in (2, 1, 0, 0)]


@both
@each
def test_three_of_three_get_in(kind: str, middleware: bool, settings: Any, client: Client) -> None:
    limit(settings, middleware=middleware, **SCOPES)
    headers = {"Accept": "application/json"}
    is_refused_after_three([client.get(f"/api/{kind}", headers=headers) for _ in range(5)], middleware)


@both
@each
async def test_under_asgi(kind: str, middleware: bool, settings: Any, async_client: AsyncClient) -> None:
    limit(settings, middleware=middleware, **SCOPES)
    headers = {"Accept": "application/json"}
    is_refused_after_three([await async_client.get(f"/api/{kind}", headers=headers) for _ in range(5)], middleware)


@each
def test_a_database_counts_for_async_operations_too(
    kind: str, settings: Any, async_client: AsyncClient, use_cache: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Django refuses to ask it in an event loop, and that would look like a store that fails."""
    use_cache("database-sqlite")
    limit(settings, **SCOPES)
    ask = async_to_sync(async_client.get)
    assert [ask(f"/api/{kind}").status_code for _ in range(4)] == [200, 200, 200, 429]
    assert not [record for record in caplog.records if "store error" in record.getMessage()]
    assert peek("budget", "everyone").remaining == 97


async def test_connections_do_not_outlive_the_thread(
    settings: Any, async_client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(settings, **SCOPES)
    closed: list[threading.Thread] = []
    monkeypatch.setattr(connections, "close_all", lambda: closed.append(threading.current_thread()))
    await async_client.get("/api/async")
    [thread] = closed
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


async def slow_key(request: HttpRequest) -> str:
    return "slow"


@each
async def test_functions_of_either_kind_are_called(kind: str, settings: Any, async_client: AsyncClient) -> None:
    limit(settings, api={"RATE": "3/m", "KEY": slow_key}, budget={"RATE": lambda request: "9/m", "KEY": "ip"})
    answers = [(await async_client.get(f"/api/{kind}")).status_code for _ in range(4)]
    assert answers == [200, 200, 200, 429]
    assert (await apeek("api", "call:slow")).remaining == 0


@each
async def test_users_of_a_session_are_looked_up(
    kind: str, settings: Any, async_client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(settings, **SCOPES)
    # As a database would have it.
    monkeypatch.setattr("django.contrib.auth.get_user", async_unsafe(lambda request: User(pk=7)))
    async_client.cookies["sessionid"] = "of user 7"
    answers = [(await async_client.get(f"/api/{kind}")).status_code for _ in range(4)]
    assert answers == [200, 200, 200, 429]
    assert (await apeek("api", "user:7")).remaining == 0


@each
def test_tokens_are_told_apart_and_followed_to_other_addresses(kind: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, **SCOPES)
    for number in (7, 8):
        assert statuses(client, f"/api/{kind}/guarded", 4, headers=token(number)) == [200, 200, 200, 429]
    assert client.get(f"/api/{kind}/guarded", headers=token(7), REMOTE_ADDR="192.0.2.1").status_code == 429
    assert client.get(f"/api/{kind}/guarded", headers=token("guess")).status_code == 401
    assert peek("api", "user:7").remaining == 0
    assert peek("api", "ip:127.0.0.1").remaining == 3


@each
def test_whom_the_middleware_did_not_know_the_throttle_does(kind: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, site={"RATE": "100/m", "KEY": "user|ip", "PATHS": ["*"]}, **SCOPES)
    client.cookies["sessionid"] = "unknown"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django.contrib.sessions.backends.db.SessionStore.load", lambda self: {})
        assert client.get(f"/api/{kind}/guarded", headers=token(7)).status_code == 200
    assert peek("site", "ip:127.0.0.1").remaining == 99
    assert peek("api", "user:7").remaining == 2


@each
def test_claims_are_those_of_the_verified_token(kind: str, settings: Any, client: Client) -> None:
    limit(settings, api={"RATE": "2/m", "KEY": "claim:sub"})
    assert statuses(client, f"/api/{kind}/guarded", 3, headers=token(7)) == [200, 200, 429]
    assert statuses(client, f"/api/{kind}/guarded", 3, headers=token(8)) == [200, 200, 429]


def test_guesses_are_counted_by_the_middleware_before_they_are_refused(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, net={"RATE": "5/m", "KEY": "ip", "PATHS": ["*"]}, **SCOPES)
    answers = [client.get("/api/sync/guarded", headers=token(f"guess-{n}")).status_code for n in range(10)]
    assert answers == [401] * 5 + [429] * 5


def test_the_scopes_of_a_throttle_take_one_trip_all_or_nothing(settings: Any, client: Client, trips: list[int]) -> None:
    limit(settings, **SCOPES)
    assert statuses(client, "/api/sync", 6) == [200] * 3 + [429] * 3
    assert trips == [2, 2, 2, 2]  # the last two were answered from memory
    assert peek("budget", "everyone").remaining == 97


@both
def test_every_door_counts_a_request_once(middleware: bool, settings: Any, client: Client, trips: list[int]) -> None:
    limit(settings, middleware=middleware, api={"RATE": "3/m", "KEY": "ip", "PATHS": ["*"]})
    assert [client.get("/api/doors").json() for _ in range(3)] == [2, 1, 0]
    assert trips == [1, 1, 1]


@each
def test_other_throttles_of_an_operation_are_asked(kind: str, settings: Any, client: Client) -> None:
    limit(settings, **SCOPES)
    Witness.seen = 0
    assert statuses(client, f"/api/{kind}/several", 4) == [200, 200, 200, 429]
    assert Witness.seen == 4


def test_the_default_of_an_api_and_its_own_handler(settings: Any, client: Client) -> None:
    limit(settings, **SCOPES)
    answers = [client.get("/custom/default") for _ in range(4)]
    assert answers[3].json() == {"wait": 30}
    assert answers[3]["Retry-After"] == "30"
    assert statuses(client, "/custom/free", 4) == [200] * 4


def test_methods(settings: Any, client: Client) -> None:
    limit(settings, api={"RATE": "1/m", "METHODS": ["POST"]}, budget="100/m")
    assert statuses(client, "/api/sync", 2, "post") == [200, 429]
    assert statuses(client, "/api/sync", 2) == [200, 200]


def test_a_throttle_is_shared_by_threads_and_a_wait_is_not(settings: Any, client: Client) -> None:
    limit(settings, **SCOPES)
    throttle = RateLimitThrottle("api")
    request = HttpRequest()
    request.method, request.META = "GET", {"REMOTE_ADDR": "192.0.2.1"}
    for _ in range(3):
        client.get("/api/sync", REMOTE_ADDR="192.0.2.1")
    assert not throttle.allow_request(request)
    assert throttle.wait() == 30
    waits: list[int | None] = []
    thread = threading.Thread(target=lambda: waits.append(throttle.wait()))
    thread.start()
    thread.join()
    assert waits == [None]


@each
@pytest.mark.parametrize(("middleware", "status"), [(True, 503), (False, 429)])
def test_a_store_that_fails_under_deny(
    middleware: bool, status: int, kind: str, settings: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the middleware a throttle of Ninja has no other word than 429."""
    limit(settings, middleware=middleware, ON_ERROR="deny", **SCOPES)
    forget()
    monkeypatch.setattr(LocMemStore, "hit", fail)
    answer = client.get(f"/api/{kind}")
    assert answer.status_code == status
    assert answer["Retry-After"] == "1"


@pytest.mark.parametrize(("middleware", "status"), [(True, 400), (False, 429)])
def test_a_caller_that_nobody_knows(middleware: bool, status: int, settings: Any, client: Client) -> None:
    limit(settings, middleware=middleware, api={"RATE": "3/m", "KEY": "user", "ON_MISSING": "deny"}, budget="9/m")
    answer = client.get("/api/sync")
    assert answer.status_code == status
    assert "Retry-After" not in answer


def test_message_and_response_of_a_scope_are_what_the_middleware_answers(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, api={"RATE": "0/m", "MESSAGE": "Not now."}, budget="9/m")
    assert client.get("/api/sync").content == b"Not now.\n"


def in_flight(settings: Any, *, middleware: bool) -> None:
    limit(settings, middleware=middleware, api={"RATE": "1", "ALGORITHM": "concurrent"}, budget="100/h")
    forget()


@each
def test_what_is_in_flight_is_released_by_the_middleware(kind: str, settings: Any, client: Client) -> None:
    in_flight(settings, middleware=True)
    assert statuses(client, f"/api/{kind}", 3) == [200] * 3


def test_without_the_middleware_it_says_that_nothing_is_given_back(
    settings: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    in_flight(settings, middleware=False)
    with caplog.at_level(logging.WARNING, "ratelimit_kv"):
        assert statuses(client, "/api/sync", 2) == [200, 429]
    said = [record.getMessage() for record in caplog.records if "gives hits back" in record.getMessage()]
    assert said == ["scope api gives hits back after the view, which RateLimitMiddleware does, and it is not there"]


def test_the_test_client_of_ninja(settings: Any) -> None:
    limit(settings, **SCOPES)
    ninja = TestClient(api)
    assert [ninja.get("/sync").status_code for _ in range(4)] == [200, 200, 200, 429]


@pytest.mark.parametrize("wrong", [(), ("5/m",), ("api", None), (["api"],)])
def test_what_is_no_scope_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r'RateLimitThrottle\("api"\)'):
        RateLimitThrottle(*wrong)


def test_an_unknown_scope_says_so(settings: Any, client: Client) -> None:
    limit(settings, apy="3/m", budget="9/m")
    with pytest.raises(Exception, match="Did you mean 'apy'"):
        client.get("/api/sync")


def test_the_example_of_the_documentation(example: Callable[[str], Client]) -> None:
    client = example("Ninja")

    def ask(token: str, address: str, path: str = "reports") -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return int(client.get(f"/api/{path}/", headers=headers, REMOTE_ADDR=address).status_code)

    mine, other = (signing.dumps({"sub": sub}, salt="api") for sub in ("42", "43"))
    assert [ask(mine, "192.0.2.1") for _ in range(3)] == [200] * 3
    assert [ask(mine, "192.0.2.2") for _ in range(3)] == [200, 200, 429]
    assert ask(mine, "192.0.2.2", "ping") == ask(mine, "192.0.2.2", "live") == 429
    assert [ask(other, "192.0.2.2", "live") for _ in range(6)] == [200] * 5 + [429]
    assert [ask("guess", "192.0.2.3") for _ in range(21)] == [401] * 20 + [429]
    assert peek("reports", "everyone").remaining == 45
