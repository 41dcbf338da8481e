"""The throttle of REST framework: scopes of the settings, counted after the framework has found out who is asking."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import AsyncClient, Client
from django.urls import path
from freezegun import freeze_time
from rest_framework.authentication import BaseAuthentication
from rest_framework.authtoken.views import ObtainAuthToken
from rest_framework.decorators import api_view, throttle_classes
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.test import APIRequestFactory
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from ratelimit_kv import check, peek, rate_limit, rate_limit_exempt
from ratelimit_kv.contrib.rest_framework import RateLimitThrottle
from ratelimit_kv.process import forget
from ratelimit_kv.stores import StoreError
from ratelimit_kv.stores.locmem import LocMemStore
from tests.site import HALF_PAST, limit, statuses

pytestmark = pytest.mark.urls(__name__)


class Token(BaseAuthentication):
    """Knows tokens like ``7``: user 7, on the plan that the token says."""

    def authenticate(self, request: Any) -> Any:
        kind, _, number = request.headers.get("Authorization", "").partition(" ")
        if kind != "Token":
            return None
        if not number.isdigit():
            raise AuthenticationFailed
        return User(pk=int(number), username=f"user {number}"), {"sub": f"subject {number}"}

    def authenticate_header(self, request: Any) -> str:
        return "Token"


class Base(APIView):
    authentication_classes = [Token]
    throttle_classes = [RateLimitThrottle]

    def get(self, request: Any) -> Response:
        return Response("hello")

    post = get


class Named(Base):
    rate_limit_scopes = ("api", "budget")


class OneName(Base):
    rate_limit_scopes = "api"


class AsInRestFramework(Base):
    throttle_scope = "api"


class Nothing(Base):
    pass


class ApiThrottle(RateLimitThrottle):
    scopes = ("api",)


class BudgetThrottle(RateLimitThrottle):
    scopes = ("budget",)


class BySubclass(Base):
    throttle_classes = [ApiThrottle]
    rate_limit_scopes = ("budget",)


class Several(Base):
    throttle_classes = [ApiThrottle, BudgetThrottle, RateLimitThrottle]
    rate_limit_scopes = ("third",)


class Witness(BaseThrottle):
    seen = 0

    def allow_request(self, request: Any, view: Any) -> bool:
        Witness.seen += 1
        return False

    def wait(self) -> float:
        return 99.5


class WithForeign(Base):
    throttle_classes = [ApiThrottle, Witness]


class Late(Named):
    """Authenticates when somebody asks for the user, as REST framework's documentation suggests."""

    def perform_authentication(self, request: Any) -> None:
        pass


class AllDoors(Base):
    throttle_classes = [ApiThrottle]

    @rate_limit("api")
    def get(self, request: Any) -> Response:
        return Response(check(request, "api").remaining)


@rate_limit_exempt
class Exempt(Named):
    pass


class ExemptHandler(Named):
    post = rate_limit_exempt(Named.post)


class Items(ViewSet):
    authentication_classes = [Token]
    throttle_classes = [RateLimitThrottle]
    rate_limit_scopes = ("api",)

    def list(self, request: Any) -> Response:
        return Response([])


@api_view(["GET"])
@throttle_classes([ApiThrottle])
def function(request: Any) -> Response:
    return Response("hello")


class Obtain(ObtainAuthToken):
    """REST framework's own, which has ``throttle_classes = ()``."""


urlpatterns = [
    path("named", Named.as_view()),
    path("one-name", OneName.as_view()),
    path("as-in-rest-framework", AsInRestFramework.as_view()),
    path("nothing", Nothing.as_view()),
    path("by-subclass", BySubclass.as_view()),
    path("several", Several.as_view()),
    path("with-foreign", WithForeign.as_view()),
    path("late", Late.as_view()),
    path("all-doors", AllDoors.as_view()),
    path("exempt", Exempt.as_view()),
    path("exempt-handler", ExemptHandler.as_view()),
    path("items", Items.as_view({"get": "list"})),
    path("function", function),
    path("token", Obtain.as_view(), name="token"),
]

SCOPES: dict[str, Any] = {
    "api": {"RATE": "3/m", "KEY": "user|ip"},
    "budget": {"RATE": "100/h", "KEY": "everyone"},
    "third": {"RATE": "9/m", "KEY": "ip"},
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
    return {"Authorization": f"Token {number}"}


both = pytest.mark.parametrize("middleware", [False, True], ids=["alone", "with middleware"])


@both
@pytest.mark.parametrize(
    "where",
    ["named", "one-name", "as-in-rest-framework", "by-subclass", "several", "late", "all-doors", "items", "function"],
)
def test_three_of_three_get_in(where: str, middleware: bool, settings: Any, client: Client) -> None:
    limit(settings, middleware=middleware, **SCOPES)
    answers = [client.get(f"/{where}") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    for answer in answers[3:]:
        assert answer["Retry-After"] == "30"
        assert answer["Cache-Control"] == "no-store"
        assert answer.json() == {"detail": "Request was throttled. Expected available in 30 seconds."}
    if middleware:
        assert [answer["RateLimit"] for answer in answers[:4]] == [f'"api";r={left};t=30' for left in (2, 1, 0, 0)]


async def test_under_asgi(settings: Any, async_client: AsyncClient) -> None:
    limit(settings, middleware=True, **SCOPES)
    assert [(await async_client.get("/named")).status_code for _ in range(4)] == [200, 200, 200, 429]


def test_a_retry_passes_exactly_when_it_was_told_to(settings: Any, client: Client, clock: Any) -> None:
    limit(settings, **SCOPES)
    statuses(client, "/named", 3)
    wait = int(client.get("/named")["Retry-After"])
    clock.tick(wait - 1)
    assert client.get("/named").status_code == 429
    clock.tick(1)
    assert client.get("/named").status_code == 200


def test_tokens_are_told_apart_and_followed_to_other_addresses(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, **SCOPES)
    for number in (7, 8):
        assert statuses(client, "/named", 4, headers=token(number)) == [200, 200, 200, 429]
    assert client.get("/named", headers=token(7), REMOTE_ADDR="192.0.2.1").status_code == 429
    assert peek("api", "user:7").remaining == 0
    assert peek("api", "ip:127.0.0.1").remaining == 3


@pytest.mark.parametrize("where", ["named", "late"])
def test_whom_the_middleware_did_not_know_the_throttle_does(where: str, settings: Any, client: Client) -> None:
    """It asked the session for the user, in vain, and remembers that."""
    limit(settings, middleware=True, site={"RATE": "100/m", "KEY": "user|ip", "PATHS": ["*"]}, **SCOPES)
    client.cookies["sessionid"] = "unknown"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django.contrib.sessions.backends.db.SessionStore.load", lambda self: {})
        assert client.get(f"/{where}", headers=token(7)).status_code == 200
    assert peek("site", "ip:127.0.0.1").remaining == 99
    assert peek("api", "user:7").remaining == 2


def test_claims_are_those_of_the_verified_token(settings: Any, client: Client) -> None:
    limit(settings, api={"RATE": "2/m", "KEY": "claim:sub|ip"}, budget="100/h")
    assert statuses(client, "/named", 3, headers=token(7)) == [200, 200, 429]
    assert statuses(client, "/named", 3, headers=token(8)) == [200, 200, 429]


def test_guesses_are_counted_by_the_middleware_before_they_are_refused(settings: Any, client: Client) -> None:
    limit(settings, middleware=True, net={"RATE": "5/m", "KEY": "ip", "PATHS": ["*"]}, **SCOPES)
    answers = [client.get("/named", headers=token(f"guess-{n}")).status_code for n in range(10)]
    assert answers == [401] * 5 + [429] * 5
    assert peek("budget", "everyone").remaining == 100


def test_a_view_that_has_opted_out_of_throttles_is_limited_by_its_url(settings: Any, client: Client) -> None:
    assert not Obtain.throttle_classes
    limit(settings, middleware=True, obtain={"RATE": "5/m", "KEY": "ip", "URL_NAMES": ["token"]})
    assert statuses(client, "/token", 6, "post") == [400] * 5 + [429]


def test_all_throttles_of_a_view_take_one_trip(settings: Any, client: Client, trips: list[int]) -> None:
    limit(settings, **SCOPES)
    assert client.get("/several").status_code == 200
    assert trips == [3]


def test_what_one_throttle_denies_costs_nothing_in_the_others(settings: Any, client: Client) -> None:
    limit(settings, **SCOPES)
    assert statuses(client, "/several", 6) == [200] * 3 + [429] * 3  # the last ones from memory
    assert peek("budget", "everyone").remaining == 97
    assert peek("third", "ip:127.0.0.1").remaining == 6


@both
def test_every_door_counts_a_request_once(middleware: bool, settings: Any, client: Client, trips: list[int]) -> None:
    limit(settings, middleware=middleware, api={"RATE": "3/m", "KEY": "ip", "PATHS": ["*"]})
    assert [client.get("/all-doors").json() for _ in range(3)] == [2, 1, 0]
    assert trips == [1, 1, 1]


def test_the_longest_wait_of_all_throttles_is_told(settings: Any, client: Client) -> None:
    limit(settings, **SCOPES)
    Witness.seen = 0
    answers = [client.get("/with-foreign") for _ in range(4)]
    assert Witness.seen == 4
    assert answers[3].json()["detail"].endswith("in 100 seconds.")


def test_the_default_throttle_of_a_project(settings: Any, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.REST_FRAMEWORK = {
        "DEFAULT_THROTTLE_CLASSES": ["ratelimit_kv.contrib.rest_framework.RateLimitThrottle"],
    }
    monkeypatch.setattr(Nothing, "throttle_classes", api_settings.DEFAULT_THROTTLE_CLASSES)
    assert [RateLimitThrottle] == Nothing.throttle_classes
    limit(settings, **SCOPES)
    assert statuses(client, "/nothing", 4) == [200] * 4
    monkeypatch.setattr(Nothing, "rate_limit_scopes", ("api",), raising=False)
    assert statuses(client, "/nothing", 4) == [200, 200, 200, 429]


@both
def test_exempt_views_and_handlers(middleware: bool, settings: Any, client: Client) -> None:
    limit(settings, middleware=middleware, **SCOPES)
    assert statuses(client, "/exempt", 4) == [200] * 4
    assert statuses(client, "/exempt-handler", 4, "post") == [200] * 4
    assert statuses(client, "/exempt-handler", 4) == [200, 200, 200, 429]


def test_methods_and_options(settings: Any, client: Client) -> None:
    limit(settings, api={"RATE": "1/m", "METHODS": ["POST"]}, budget="1/m")
    assert client.post("/one-name").status_code == 200
    assert client.post("/one-name").status_code == 429
    assert statuses(client, "/one-name", 3) == [200] * 3
    assert statuses(client, "/named", 3, "options") == [200] * 3


def test_switched_off(settings: Any, client: Client) -> None:
    limit(settings, ENABLED=False, **SCOPES)
    assert statuses(client, "/named", 4) == [200] * 4


def test_a_shadow_denies_nobody(settings: Any, client: Client) -> None:
    limit(settings, api={"RATE": "1/m", "MODE": "shadow"}, budget="100/m")
    assert statuses(client, "/named", 3) == [200] * 3


def test_no_wait_helps_what_costs_too_much(settings: Any, client: Client) -> None:
    limit(settings, api={"RATE": "3/m", "COST": 4}, budget="100/m")
    answer = client.get("/named")
    assert answer.status_code == 429
    assert "Retry-After" not in answer
    assert answer.json() == {"detail": "Request was throttled."}


def test_quiet_waits_are_whole_minutes(settings: Any, client: Client) -> None:
    limit(settings, api={"RATE": "1/m", "QUIET": True}, budget="100/m")
    client.get("/named")
    assert client.get("/named")["Retry-After"] == "60"


@both
def test_a_store_that_fails_under_deny_is_503(
    middleware: bool, settings: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(settings, middleware=middleware, ON_ERROR="deny", **SCOPES)
    forget()
    monkeypatch.setattr(LocMemStore, "hit", fail)
    answer = client.get("/named")
    assert answer.status_code == 503
    assert answer["Retry-After"] == "1"
    assert answer["Cache-Control"] == "no-store"
    assert answer.json() == {"detail": "Temporarily unavailable"}


def test_a_store_that_fails_under_allow_is_not_noticed(
    settings: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(settings, **SCOPES)
    forget()
    monkeypatch.setattr(LocMemStore, "hit", fail)
    assert statuses(client, "/named", 5) == [200] * 5


@both
def test_a_caller_that_nobody_knows_is_400(middleware: bool, settings: Any, client: Client) -> None:
    limit(settings, middleware=middleware, api={"RATE": "3/m", "KEY": "user", "ON_MISSING": "deny"}, budget="9/m")
    answer = client.get("/named")
    assert answer.status_code == 400
    assert "Retry-After" not in answer
    assert answer.json() == {"detail": "Bad request"}
    assert client.get("/named", headers=token(7)).status_code == 200


def handler(error: Exception, context: Any) -> Response:
    """An exception handler that knows nothing of headers."""
    return Response({"error": error.__class__.__name__}, status=getattr(error, "status_code", 500))


def test_headers_outlive_an_exception_handler_that_drops_them(
    settings: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(settings, **SCOPES)
    monkeypatch.setattr(Named, "get_exception_handler", lambda self: handler)
    statuses(client, "/named", 3)
    answer = client.get("/named")
    assert (answer.status_code, answer.json()) == (429, {"error": "Throttled"})
    assert (answer["Retry-After"], answer["Cache-Control"]) == ("30", "no-store")


def in_flight(settings: Any, *, middleware: bool) -> None:
    limit(settings, middleware=middleware, api={"RATE": "1", "ALGORITHM": "concurrent"}, budget="100/h")
    forget()


def test_what_is_in_flight_is_released_by_the_middleware(
    settings: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    in_flight(settings, middleware=True)
    assert statuses(client, "/named", 3) == [200] * 3
    assert not caplog.records


def test_without_the_middleware_it_says_that_nothing_is_given_back(
    settings: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    in_flight(settings, middleware=False)
    with caplog.at_level(logging.WARNING, "ratelimit_kv"):
        assert statuses(client, "/named", 2) == [200, 429]
    said = [record.getMessage() for record in caplog.records if "gives hits back" in record.getMessage()]
    assert said == ["scope api gives hits back after the view, which RateLimitMiddleware does, and it is not there"]


def test_without_urls(settings: Any) -> None:
    """As in a unit test of a view: nothing has been resolved."""
    limit(settings, **SCOPES)
    view, factory = Named.as_view(), APIRequestFactory()
    assert [view(factory.get("/")).status_code for _ in range(4)] == [200, 200, 200, 429]


def test_an_unknown_scope_says_so(settings: Any, client: Client) -> None:
    limit(settings, apy="3/m", budget="9/m")
    with pytest.raises(Exception, match="Did you mean 'apy'"):
        client.get("/named")


@pytest.mark.django_db
def test_the_example_of_the_documentation(example: Callable[[str], Client]) -> None:
    client = example("REST framework")
    User.objects.create_user("alice", password="wonderland")

    def ask(password: str, address: str) -> int:
        basic = b64encode(f"alice:{password}".encode()).decode()
        headers = {"Authorization": f"Basic {basic}"}
        return int(client.get("/api/reports/", headers=headers, REMOTE_ADDR=address).status_code)

    assert [ask("wonderland", "192.0.2.1") for _ in range(3)] == [200] * 3
    assert [ask("wonderland", "192.0.2.2") for _ in range(3)] == [200, 200, 429]
    assert [ask("guess", "192.0.2.3") for _ in range(21)] == [401] * 20 + [429]
    assert statuses(client, "/api/ping/", 6) == [200] * 5 + [429]
    assert peek("reports", "everyone").remaining == 45
