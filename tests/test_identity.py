"""Who is asking: every kind of key on every kind of request, and what of it is ever written down."""

from __future__ import annotations

import io
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import AnonymousUser, User
from django.core.cache import cache
from django.core.cache.backends.base import memcache_key_warnings
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe
from freezegun import freeze_time

from ratelimit_kv import Decision, acheck, check, peek
from ratelimit_kv.decisions import Reason
from ratelimit_kv.identity import parse_key
from ratelimit_kv.signals import denied
from tests.site import HALF_PAST, limit

ME = "ip:127.0.0.1"


@pytest.fixture(autouse=True)
def clock(use_cache: Callable[..., Any]) -> Iterator[Any]:
    """The clock stands still, and nothing has been counted yet."""
    use_cache("locmem")
    with freeze_time(HALF_PAST, real_asyncio=True) as frozen:
        yield frozen


@pytest.fixture
def identity(settings: Any) -> Callable[..., str]:
    """``identity("user|ip", request)``: who that is; "" for nobody."""

    def of(key: Any, request: Any, **options: Any) -> str:
        limit(settings, it={"RATE": "1000/m", "KEY": key, "ON_MISSING": "skip", **options})
        return check(request, "it").identity

    return of


def request(method: str = "get", path: str = "/", data: Any = None, **more: Any) -> Any:
    """A request. ``user=``, ``auth=`` and the like are put on it, the rest is for the request factory."""
    attributes = {name: more.pop(name) for name in ("user", "auth", "session", "resolver_match") if name in more}
    made = getattr(RequestFactory(), method)(path, *([] if data is None else [data]), **more)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def resolved(**kwargs: Any) -> Any:
    return SimpleNamespace(kwargs=kwargs, func=None, view_name="")


def by_parser(made: HttpRequest) -> str | None:
    """The key within an Authorization header, by whatever spelling."""
    words = made.headers.get("Authorization", "").split()
    return words[-1] if words and "bearer" in map(str.lower, words) else None


async def by_parser_async(made: HttpRequest) -> str | None:
    return by_parser(made)


# ------------------------------------------------------------------------------------------------------ every key


@pytest.mark.parametrize(
    ("key", "made", "expected"),
    [
        ("ip", {}, "ip:127.0.0.1"),
        ("ip", {"REMOTE_ADDR": "2001:db8:1:2::9"}, "ip:2001:db8:1:2::/64"),
        ("ip/48", {"REMOTE_ADDR": "2001:db8:1:2::9"}, "ip:2001:db8:1::/48"),
        ("ip/48", {"REMOTE_ADDR": "203.0.113.9"}, "ip:203.0.113.9"),
        ("ip", {"REMOTE_ADDR": ""}, "ip:unknown"),
        ("everyone", {}, "everyone"),
        ("user", {"user": User(pk=42)}, "user:42"),
        ("user|ip", {"user": AnonymousUser()}, ME),
        ("header:X-Api-Key", {"HTTP_X_API_KEY": "s3cret"}, "header:~"),
        ("header:x-api-key", {"HTTP_X_API_KEY": " s3cret "}, "header:~"),
        ("header:Content-Type", {"CONTENT_TYPE": "text/x-secret"}, "header:~"),
        ("header:X-Api-Key", {}, ""),
        ("header:X-Api-Key", {"HTTP_X_API_KEY": "  "}, ""),
        ("cookie:anon", {"HTTP_COOKIE": "anon=abc"}, "cookie:~"),
        ("cookie:anon", {"HTTP_COOKIE": "anon="}, ""),
        ("cookie:anon", {"HTTP_COOKIE": "other=abc"}, ""),
        ("arg:slug", {"resolver_match": resolved(slug="tea")}, "arg:~"),
        ("arg:slug", {"resolver_match": resolved(slug="")}, ""),
        ("arg:slug", {"resolver_match": resolved()}, ""),
        ("arg:slug", {}, ""),
        ("claim:sub", {"auth": {"sub": "anna"}}, "claim:~"),
        ("claim:sub", {"auth": SimpleNamespace(sub=7)}, "claim:~"),
        ("claim:sub", {"auth": {"sub": None}}, ""),
        ("claim:sub", {"auth": {"sub": True}}, ""),
        ("claim:sub", {"auth": {"sub": ["anna"]}}, ""),
        ("claim:sub", {"auth": {}}, ""),
        ("claim:sub", {"auth": "a.raw.token"}, ""),
        ("claim:sub", {"auth": None}, ""),
        ("claim:sub", {}, ""),
        (by_parser, {"HTTP_AUTHORIZATION": "Bearer K"}, "call:K"),
        (by_parser_async, {"HTTP_AUTHORIZATION": "Bearer K"}, "call:K"),
        (lambda made: by_parser_async(made), {"HTTP_AUTHORIZATION": "Bearer K"}, "call:K"),
        (partial(by_parser_async), {"HTTP_AUTHORIZATION": "Bearer K"}, "call:K"),
        ("tests.test_identity.by_parser", {"HTTP_AUTHORIZATION": "Bearer K"}, "call:K"),
        ("tests.test_identity.by_parser|ip", {}, ME),
        ("user | header:X-Api-Key | ip", {"HTTP_X_API_KEY": "K"}, "header:~"),
        ("user+ip", {"user": User(pk=42)}, "user:42+ip:127.0.0.1"),
        ("user+ip", {}, ""),
        ("user+ip|ip", {}, ME),
    ],
)
@pytest.mark.parametrize("world", ["WSGI", "ASGI"])
async def test_a_key_says_who_is_asking(key: Any, made: Any, expected: str, world: str, settings: Any) -> None:
    limit(settings, it={"RATE": "9/m", "KEY": key, "ON_MISSING": "skip"})
    asked = request(**made)
    found = (await acheck(asked, "it") if world == "ASGI" else await sync_to_async(check)(asked, "it")).identity
    if expected.endswith("~"):
        assert re.fullmatch(rf"{expected}[A-Za-z0-9_-]{{22}}", found), found
    else:
        assert found == expected


def test_two_of_a_kind_are_two_and_one_twice_is_one(identity: Any) -> None:
    for key, meta in (("header:X-Api-Key", "HTTP_X_API_KEY"), ("cookie:k", "HTTP_COOKIE")):
        spell = "k={}".format if key.startswith("cookie") else str
        one, two = (identity(key, request(**{meta: spell(value)})) for value in ("one", "two"))
        assert one != two
        assert one == identity(key, request(**{meta: spell("one")}))


def test_spellings_that_the_projects_own_parser_takes_for_one_are_one(identity: Any) -> None:
    spellings = ("Bearer K", "x Bearer K", "bearer  K")
    assert {identity(by_parser, request(HTTP_AUTHORIZATION=spelling)) for spelling in spellings} == {"call:K"}


@pytest.mark.parametrize("value", [0, 42, "anna", mark_safe("anna")])
def test_a_function_may_return_text_or_a_number(value: Any, identity: Any) -> None:
    assert identity(lambda made: value, request()) == f"call:{value}"


@pytest.mark.parametrize("value", [None, ""])
def test_a_function_may_know_nobody(value: Any, identity: Any) -> None:
    assert identity(lambda made: value, request()) == ""


@pytest.mark.parametrize("value", [True, 1.5, b"anna", ["anna"], object(), uuid.UUID(int=1)])
def test_a_function_that_returns_anything_else_has_failed(value: Any, settings: Any) -> None:
    limit(settings, it={"RATE": "1/m", "KEY": lambda made: value})
    assert check(request(), "it").reason is Reason.CALLABLE_ERROR


@pytest.mark.parametrize(
    "key",
    [
        "usr",
        "users",
        "ipp",
        "header",
        "header:",
        "header:X Y",
        "cookie",
        "ip/31",
        "ip/129",
        "ip/x",
        "",
        "|",
        "user|",
        "a.b.c",
        "tests.test_identity.nowhere",
        7,
        None,
        "user:42",
    ],
)
def test_what_is_no_key_is_an_error_that_quotes_it(key: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(key)) if key else "key"):
        parse_key(key)


# ------------------------------------------------------------------------------------------------------ the user


class Person:
    """A user of somebody else's making."""

    def __init__(self, pk: Any, is_authenticated: Any = True) -> None:
        self.pk, self.is_authenticated = pk, is_authenticated


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        (User(pk=0), "user:0"),
        (User(), ""),
        (AnonymousUser(), ""),
        (None, ""),
        (Person(uuid.UUID(int=7)), "user:00000000-0000-0000-0000-000000000007"),
        (Person("anna@example.com"), "user:anna@example.com"),
        (Person("a b"), "user:a%20b"),
        (Person(""), ""),
        (Person(7, is_authenticated=False), ""),
        (SimpleLazyObject(lambda: User(pk=42)), "user:42"),
        (SimpleLazyObject(AnonymousUser), ""),
        (object(), ""),
    ],
)
async def test_a_user_that_somebody_put_there_is_believed(user: Any, expected: str, settings: Any) -> None:
    limit(settings, it={"RATE": "9/m", "KEY": "user", "ON_MISSING": "skip"})
    assert (await acheck(request(user=user), "it")).identity == expected


def test_nobody_becomes_a_user_by_saying_so(identity: Any) -> None:
    made = request(user=AnonymousUser(), HTTP_X_USER_ID="42", HTTP_REMOTE_USER="42")
    assert identity("user|ip", made) == ME
    assert identity("header:X-User-Id", made) != identity("user", request(user=User(pk=42)))


# --------------------------------------------------------------------------------------------------- the session

SESSIONS = ["db", "cached_db", "cache", "file", "signed_cookies"]


@pytest.fixture(params=SESSIONS)
def engine(request: pytest.FixtureRequest, settings: Any, tmp_path: Any, db: None) -> str:
    settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{request.param}"
    settings.SESSION_FILE_PATH = tmp_path
    return str(request.param)


@pytest.mark.parametrize("made_up", ["m" * 32, "../../etc/passwd", "short", "é" * 20, "a:b:c"])
def test_a_session_id_that_somebody_made_up_is_nobody(engine: str, made_up: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, it={"RATE": "9/m", "KEY": "session|ip", "PATHS": ["*"]})
    client.cookies[settings.SESSION_COOKIE_NAME] = made_up
    assert client.get("/who").json() == {"it": ME}


def test_a_session_that_a_backend_keeps_is_somebody(engine: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, it={"RATE": "9/m", "KEY": "session|ip", "PATHS": ["*"]})
    session = client.session
    session["basket"] = 1
    session.save()
    client.cookies[settings.SESSION_COOKIE_NAME] = session.session_key
    first = client.get("/who").json()["it"]
    assert client.get("/who").json()["it"] == first
    if (
        engine == "signed_cookies"
    ):  # it is the cookie, signed anew at every change: a client could be as many as he likes
        assert first == ME
    else:
        assert first.startswith("session:~")


@pytest.mark.django_db(transaction=True)
async def test_a_session_is_read_under_asgi_too(settings: Any) -> None:
    limit(settings, middleware=True, it={"RATE": "9/m", "KEY": "session|ip", "PATHS": ["*"]})
    client = AsyncClient()
    session = await client.asession()
    session["basket"] = 1
    await session.asave()
    client.cookies[settings.SESSION_COOKIE_NAME] = session.session_key
    assert (await client.get("/who")).json()["it"].startswith("session:~")
    client.cookies[settings.SESSION_COOKIE_NAME] = "m" * 32
    assert (await client.get("/who")).json()["it"] == ME


# ------------------------------------------------------------------------------------------------------ a field

FORM, JSON, MULTIPART = "application/x-www-form-urlencoded", "application/json", "multipart/form-data; boundary=b"
PARTS = '--b\r\nContent-Disposition: form-data; name="name"\r\n\r\nanna\r\n--b--\r\n'


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("name=anna", FORM),
        ("name=Anna", FORM),
        ("name=%20ANNA%20", FORM),
        ("x=1&name=anna&y=2", FORM),
        ("name=bert&name=anna", FORM),
        ("name=%EF%BC%A1nn%EF%BC%A1", FORM),
        ("name=a%CC%81nna", FORM),
        ("name=%C3%A1nna", FORM),
        ("name=an%C2%ADna", FORM),
        ("name=an%E2%80%8Bna", FORM),
        ('{"name": "anna"}', JSON),
        ('{"name": "ANNA ", "other": [1]}', "application/vnd.api+json"),
        ('{"name": "anna"}', "text/plain"),
        ('{"name": "anna"}', "text/plain; charset=utf-8"),
        ('{"name": "anna"}', ""),
        ('{"name": "anna"}', FORM),
        ('{"name": "a\\u0301nna"}', JSON),
    ],
)
@pytest.mark.parametrize("method", ["post", "put"])
def test_a_field_is_found_however_it_is_sent(body: str, content_type: str, method: str, identity: Any) -> None:
    anna = identity("field:name", request("post", data={"name": "anna"}))
    assert anna.startswith("field:~")
    made = RequestFactory().generic(method.upper(), "/", body, content_type=content_type)
    assert identity("field:name", made) == anna


def test_a_field_of_a_multipart_form_is_found_as_django_reads_it(identity: Any) -> None:
    anna = identity("field:name", request("post", data={"name": "anna"}))
    post, put = (RequestFactory().generic(method, "/", PARTS, content_type=MULTIPART) for method in ("POST", "PUT"))
    assert identity("field:name", post) == anna
    assert identity("field:name", put) == "", "Django reads those of POST alone"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("", FORM),
        ("name=", FORM),
        ("name=%20", FORM),
        ("name=%C2%AD", FORM),
        ("other=anna", FORM),
        ("&" * 5000, FORM),
        ("name=anna&" + "x=1&" * 5000, FORM),
        ("name=" + "a" * 65536, FORM),
        ("\xff\xfe", FORM),
        ("", MULTIPART),
        ("--b", MULTIPART),
        (PARTS, "multipart/form-data"),
        (PARTS, "multipart/form-data; boundary=" + "x" * 300),
        ("{", JSON),
        ("null", JSON),
        ("[]", JSON),
        ('["name"]', JSON),
        ('{"name": null}', JSON),
        ('{"name": ["anna"]}', JSON),
        ('{"name": {"first": "anna"}}', JSON),
        ('{"name": ""}', JSON),
        ("[" * 50000, JSON),
        ('{"name":' * 9000, JSON),
        ("1" * 5000, JSON),
        ('{"name": ' + "1" * 5000 + "}", JSON),
        ('{"name": "\\ud800"', JSON),
        (b"\xff\xfe\x00", JSON),
    ],
)
def test_a_field_that_is_not_there_is_missing_and_never_an_error(body: Any, content_type: str, identity: Any) -> None:
    assert identity("field:name", RequestFactory().generic("POST", "/", body, content_type=content_type)) == ""


@pytest.mark.parametrize(
    ("body", "same"),
    [('{"name": 7}', '{"name": "7"}'), ('{"name": 1e400}', '{"name": "INF"}'), ('{"name": true}', '{"name": "True"}')],
)
def test_a_scalar_is_what_it_is_written_as(body: str, same: str, identity: Any) -> None:
    first, second = (identity("field:name", request("post", data=text, content_type=JSON)) for text in (body, same))
    assert first == second != ""


def test_half_a_character_is_still_somebody(identity: Any) -> None:
    assert identity("field:name", request("post", data='{"name": "\\ud800"}', content_type=JSON)).startswith("field:~")


@pytest.mark.parametrize("length", ["x", "-1", "", "99999999999999999999999"])
def test_a_length_that_is_a_lie_is_no_error(length: str, identity: Any) -> None:
    made = request("post", data="name=anna", content_type=FORM, CONTENT_LENGTH=length)
    assert identity("field:name", made) in ("", identity("field:name", request("post", data={"name": "anna"})))


def test_a_request_without_a_body_has_no_field(identity: Any) -> None:
    assert identity("field:name", request("get", "/?name=anna")) == ""


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_body_that_somebody_has_read_as_a_stream_is_missing(method: str, identity: Any) -> None:
    made = RequestFactory().generic(method, "/", "name=anna", content_type=FORM)
    made.read(3)
    assert identity("field:name", made) == ""


def test_a_form_that_somebody_has_read_is_not_read_again(identity: Any) -> None:
    """As CsrfViewMiddleware does: a multipart form is then a stream that has been used up."""
    made = RequestFactory().post("/", {"name": "anna"})
    assert made.POST["name"] == "anna"
    assert identity("field:name", made) == identity("field:name", request("post", data={"name": "anna"}))


def test_a_body_of_unknown_length_is_not_read_beyond_what_a_form_can_be(identity: Any) -> None:
    """Chunked, under ASGI. A short one is read, a long one is left where it is."""
    for size, is_found in ((10, True), (10_000_000, False)):
        body = b"name=anna&x=" + b"x" * size
        scope = AsyncRequestFactory().get("/").scope
        headers = [(b"content-type", FORM.encode()), (b"transfer-encoding", b"chunked")]
        made: Any = ASGIRequest({**scope, "method": "POST", "headers": headers}, io.BytesIO(body))
        assert bool(identity("field:name", made)) is is_found
        assert hasattr(made, "_body") is is_found
        assert made.read() == body


@pytest.mark.parametrize("world", ["WSGI", "ASGI"])
@pytest.mark.parametrize("early", [False, True], ids=["", "csrf"])
async def test_the_view_still_reads_all_of_it(world: str, early: bool, settings: Any) -> None:
    from django.core.files.uploadedfile import SimpleUploadedFile

    limit(settings, middleware=True, it={"RATE": "99/m", "KEY": "field:name", "PATHS": ["*"]})
    if early:
        settings.MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware", *settings.MIDDLEWARE]

    async def post(path: str, data: Any, **more: Any) -> HttpResponse:
        if world == "ASGI":
            return await AsyncClient().post(path, data, **more)  # type: ignore[return-value]
        return await sync_to_async(Client().post)(path, data, **more)  # type: ignore[return-value]

    for size in (10, 100_000):
        seen = json.loads((await post("/echo", {"name": "anna", "text": "x" * size}, content_type=JSON)).content)
        assert json.loads(seen["body"]) == {"name": "anna", "text": "x" * size}
        uploaded = SimpleUploadedFile("a.txt", b"x" * size)
        seen = json.loads((await post("/upload", {"name": "anna", "file": uploaded})).content)
        assert seen == {"post": {"name": "anna"}, "files": {"file": "x" * size}}
        assert (await post("/stream", "x" * size, content_type="text/plain")).content == b"x" * size


@pytest.mark.parametrize("body", ["x=1&" * 2000])
def test_what_is_wrong_with_a_body_the_view_finds_out_itself(body: str, settings: Any, client: Client) -> None:
    limit(settings, middleware=True, it={"RATE": "99/m", "KEY": "field:name", "PATHS": ["*"]})
    assert client.post("/upload", body, content_type=FORM).status_code == 400, "too many fields"


# ----------------------------------------------------------------------------- what is written, and what is not

HOSTILE = [
    "198.51.100.1, 10.0.0.2",
    "two\nlines",
    "tab\there",
    "nul\x00",
    "glob*?[a]^",
    "{brace}",
    "a+ip:127.0.0.1",
    "a|b",
    "50%",
    "%2B",
    "~AAAAAAAAAAAAAAAAAAAAAA",
    "üñï",
    "\ud800",
    "x" * 10_000,
    ":",
    "user:1",
    " ",
]


def by_name(made: HttpRequest) -> str:
    return str(made.name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", ["user", "call", "arg:slug", "claim:sub", "field:name", "user+arg:slug+call"])
def test_no_value_makes_a_key_that_a_store_would_not_take(
    key: str, value: str, identity: Any, settings: Any, use_cache: Any
) -> None:
    use_cache("locmem", KEY_PREFIX="p" * 60, VERSION=12345)
    made = request(user=Person(value), auth={"sub": value}, resolver_match=resolved(slug=value))
    made.name = value
    made.META["CONTENT_LENGTH"], made._body, made.content_type = "1", json.dumps({"name": value}).encode(), JSON
    found = identity(key.replace("call", "tests.test_identity.by_name"), made)
    keys = list(cache._cache)
    assert [list(memcache_key_warnings(one)) for one in keys] == [[] for _ in keys]
    assert all(len(one) < 250 for one in keys)
    assert not set("*?[]{}^|\\%") & set(found.replace("%", "", found.count("%"))), found
    assert len(found) <= 96
    if found:
        assert peek("it", found).remaining == 999, "and it is found again by what a list shows"


def test_different_callers_never_share_a_counter(identity: Any) -> None:
    """Kinds are ours, and parts are joined so that no value can pretend to be two."""
    address = "203.0.113.9"
    callers = [
        identity("ip", request(REMOTE_ADDR=address)),
        identity("user", request(user=Person(address))),
        identity("user", request(user=Person(f"ip:{address}"))),
        identity("user", request(user=Person("~" + "A" * 22))),
        identity("user", request(user=Person("1"))),
        identity("header:X", request(HTTP_X="1")),
        identity("header:Y", request(HTTP_Y="1")),
        identity("cookie:X", request(HTTP_COOKIE="X=1")),
        identity("field:X", request("post", data={"X": "1"})),
        identity("arg:X", request(resolver_match=resolved(X="1"))),
        identity("claim:X", request(auth={"X": "1"})),
        identity(lambda made: "1", request()),
        identity("user+tests.test_identity.by_parser", request(user=Person("ab"), HTTP_AUTHORIZATION="bearer c")),
        identity("user+tests.test_identity.by_parser", request(user=Person("a"), HTTP_AUTHORIZATION="bearer bc")),
        identity("user", request(user=Person("a+call:bc"))),
        identity("header:X+header:Y", request(HTTP_X="1", HTTP_Y="2")),
        identity("header:X+header:Y", request(HTTP_X="2", HTTP_Y="1")),
        identity("header:X", request(HTTP_X="x" * 10_000 + "a")),
        identity("header:X", request(HTTP_X="x" * 10_000 + "b")),
        identity("user", request(user=Person("x" * 200 + "a"))),
        identity("user", request(user=Person("x" * 200 + "b"))),
        identity("everyone", request()),
        identity("user", request(user=Person("everyone"))),
    ]
    assert all(callers)
    assert len(set(callers)) == len(callers)


def test_a_secret_is_written_nowhere(settings: Any, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    secret = "sk-live-4242-anna"
    heard: list[Decision] = []

    def listen(decision: Decision, **words: Any) -> None:
        heard.append(decision)

    denied.connect(listen)
    kinds = ("header:X-Api-Key", "cookie:token", "field:name", "arg:slug", "header:X-Api-Key+cookie:token")
    scopes = {f"it{number}": {"RATE": "1/m", "KEY": key, "PATHS": ["*"]} for number, key in enumerate(kinds)}
    limit(settings, middleware=True, REMEMBER_DENIED=None, **scopes)
    client.cookies["token"] = secret
    told = ""
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            answer = client.post(f"/item/{secret}", {"name": secret}, headers={"x-api-key": secret})
            told += f"{answer.headers}{answer.content!r}"
    denied.disconnect(listen)
    assert answer.status_code == 429
    assert len(heard) == 2 * len(kinds)
    written = f"{caplog.text}{[vars(record) for record in caplog.records if record.name == 'ratelimit_kv']}"
    for place in (f"{heard}", written, told, f"{cache._cache}"):
        assert secret not in place


def test_names_and_addresses_are_readable_unless_settings_hash_them_too(settings: Any) -> None:
    made = request(user=User(pk=42), REMOTE_ADDR="203.0.113.9")
    for hashed, expected in ((False, "user:42+ip:203.0.113.9"), (True, r"user:~[\w-]{22}\+ip:~[\w-]{22}")):
        limit(settings, HASH_IDENTITIES=hashed, it={"RATE": "9/m", "KEY": "user+ip"})
        made = request(user=User(pk=42), REMOTE_ADDR="203.0.113.9")
        found = check(made, "it").identity
        assert re.fullmatch(expected if hashed else re.escape(expected), found)
        assert peek("it", "user:42+ip:203.0.113.9").remaining == 8


def test_digests_depend_on_the_key_of_the_project(settings: Any) -> None:
    def digest(secret: str, **options: Any) -> str:
        settings.SECRET_KEY = secret
        limit(settings, **options, it={"RATE": "9/m", "KEY": "header:X"})
        return check(request(HTTP_X="anna"), "it").identity

    assert digest("one") != digest("two")
    assert digest("one", HASH_KEY="k") == digest("two", HASH_KEY="k") != digest("one")
