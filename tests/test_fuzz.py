"""Hostile requests at the middleware and the decorator: nothing raises, no key is unsafe, no budget is minted."""

from __future__ import annotations

import json
import re
from io import BytesIO
from typing import Any

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpRequest, HttpResponse
from django.urls import path, re_path
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_kv import rate_limit, reset_all
from ratelimit_kv.stores import get_store

pytestmark = [pytest.mark.urls(__name__), pytest.mark.django_db]

SAFE_KEY = re.compile(r"rl:[a-z][a-z0-9_.-]*:[fsbcx][A-Za-z0-9@/_+-]+:\{[!-z|~]*\}(:-?\d+)?\Z")
UNSAFE = re.compile(r"[\s\x00-\x20\x7f-\U0010ffff*?\[\]\\]")
LIMIT = 5


@rate_limit("header", "cookie", "field", "session", "user", "arg", "mixed")
def page(request: HttpRequest, slug: str = "") -> HttpResponse:
    return HttpResponse(request.body)


urlpatterns = [path("page", page, name="page"), re_path(r"^any/(?P<slug>.*)$", page, name="any")]


@pytest.fixture(autouse=True)
def limits(settings: Any) -> None:
    settings.MIDDLEWARE = ["ratelimit_kv.middleware.RateLimitMiddleware", *settings.MIDDLEWARE]
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100_000
    settings.RATELIMIT_KV = {
        "TRUSTED_PROXIES": ["10.0.0.0/8"],
        "SCOPES": {
            "site": {"RATE": "1000000/h", "KEY": "ip", "PATHS": ["*"], "EXEMPT_PATHS": ["/health"]},
            "api": {"RATE": "1000000/h", "KEY": "user|ip", "PATHS": ["/any/*"], "URL_NAMES": ["page"]},
            "header": {"RATE": f"{LIMIT}/h", "KEY": "header:X-Api-Key", "CEILING": 1},
            "cookie": {"RATE": f"{LIMIT}/h", "KEY": "cookie:anon", "CEILING": 1},
            "field": {"RATE": f"{LIMIT}/h", "KEY": "field:username", "CEILING": 1},
            "session": {"RATE": f"{LIMIT}/h", "KEY": "session"},
            "user": {"RATE": f"{LIMIT}/h", "KEY": "user"},
            "arg": {"RATE": "1000000/h", "KEY": "arg:slug"},
            "mixed": {"RATE": f"{LIMIT}/h", "KEY": "claim:sub|header:User-Agent+ip|session+field:a+cookie:b"},
        },
    }


text = st.text(max_size=200) | st.sampled_from(
    ["a" * 10_000, "*", "[x]", "{}", "a:b", "%00", "~", "\r\nX: y", "ip:1", "💣"]
)
header_text = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\x00"), max_size=200) | st.just(
    "k" * 10_000
)
address = text | st.sampled_from(
    ["", "203.0.113.9", "203.0.113.9:80", "[::1]:4", "fe80::1%eth0", "::ffff:1.2.3.4", "10.0.0.1"]
)
json_body = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | text,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["username", "a", "b"]), inner, max_size=3)
    ),
    max_leaves=8,
)
body = (
    st.binary(max_size=300)
    | json_body.map(lambda value: json.dumps(value).encode())
    | text.map(lambda value: f"username={value}&a=1".encode(errors="replace"))
    | st.sampled_from([b"[" * 50_000, b'{"username":' * 5_000, b"1" * 6_000, b"x" * 90_000, b"--x\r\n\r\n"])
)
hostile = st.fixed_dictionaries(
    {
        "REQUEST_METHOD": st.sampled_from(
            ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "post", "", "\u00e4"]
        ),
        "PATH_INFO": st.sampled_from(["/page", "//page", "/page/", "/any/x", "/nothing", "/any/\xff\xfe", "/page\x00"])
        | header_text.map(lambda value: f"/any/{value}"),
        "QUERY_STRING": header_text,
        "CONTENT_TYPE": st.sampled_from(
            [
                "application/json",
                "text/plain",
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x",
                "multipart/form-data",
                "application/x-www-form-urlencoded; charset=nonsense",
                "",
                "\xff",
            ]
        ),
        "REMOTE_ADDR": address,
        "HTTP_X_FORWARDED_FOR": address | st.lists(address, max_size=5).map(", ".join),
        "HTTP_FORWARDED": header_text,
        "HTTP_X_API_KEY": header_text,
        "HTTP_USER_AGENT": header_text,
        "HTTP_ACCEPT": header_text,
        "HTTP_AUTHORIZATION": header_text,
        "HTTP_X_HTTP_METHOD_OVERRIDE": header_text,
        "HTTP_COOKIE": header_text | header_text.map(lambda value: f"sessionid={value}; anon={value}; b=1"),
        "CONTENT_LENGTH": st.none() | st.sampled_from(["", "-1", "x", "99999999999", "\u0663"]),
        "body": body,
    }
)


def send(handler: WSGIHandler, words: dict[str, Any]) -> int:
    content = words["body"]
    environ = {name: value for name, value in words.items() if name != "body"}
    if environ["CONTENT_LENGTH"] is None:
        environ["CONTENT_LENGTH"] = str(len(content))
    environ |= {
        "wsgi.input": BytesIO(content),
        "wsgi.url_scheme": "http",
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "SCRIPT_NAME": "",
    }
    statuses: list[int] = []
    response = handler(environ, lambda status, headers: statuses.append(int(status.split()[0])))
    b"".join(response)
    response.close()
    return statuses[0]


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(hostile, min_size=1, max_size=4))
def test_nothing_raises_and_no_key_is_unsafe(requests: list[dict[str, Any]]) -> None:
    reset_all()
    handler = WSGIHandler()
    for words in requests:
        assert send(handler, words) < 500, words
    for entry in get_store("default").scan("rl:"):
        assert len(entry.key) <= 250, entry.key
        assert not UNSAFE.search(entry.key), entry.key
        assert SAFE_KEY.match(entry.key), entry.key


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(hostile, min_size=20, max_size=20))
def test_from_one_address_nothing_mints_a_budget(requests: list[dict[str, Any]]) -> None:
    reset_all()
    handler = WSGIHandler()
    served = 0
    for words in requests:
        words = {**words, "REMOTE_ADDR": "198.51.100.7", "PATH_INFO": "/page"}
        if words["REQUEST_METHOD"] != "OPTIONS":  # these have a counter of their own
            served += send(handler, words) == 200
    assert served <= LIMIT
