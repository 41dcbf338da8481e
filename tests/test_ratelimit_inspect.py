"""``manage.py ratelimit_inspect``: what it prints, what it says on stderr, how it exits."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from django.core.management import CommandError, call_command
from django.http import HttpRequest, HttpResponse
from django.urls import path
from freezegun import freeze_time

from ratelimit_kv import hit, rate_limit
from tests import caches

SCOPES = {
    "ask": {"RATE": "20/h", "KEY": "user|ip"},
    "login": {"RATE": ["5/m", "20/day"], "KEY": "field:username+ip", "METHODS": ["POST"], "URL_NAMES": ["login"]},
    "slow": {"RATE": "2/m", "KEY": "ip", "BAN": {"AFTER": 1, "FOR": "1h"}, "PATHS": ["*"], "EXEMPT_PATHS": ["/health"]},
    "signin": {"PRESET": "login"},
}


@rate_limit("ask", methods=["POST"])
def ask(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


urlpatterns = [path("ask/", ask, name="ask")]


class Said(NamedTuple):
    out: str
    err: str
    code: int

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def inspect(*words: str, **options: Any) -> Said:
    """The command in this process."""
    out, err = io.StringIO(), options.pop("stderr", io.StringIO())
    try:
        call_command("ratelimit_inspect", *words, stdout=out, stderr=err, **options)
    except CommandError as error:
        return Said(out.getvalue(), f"{err.getvalue()}{error}", error.returncode)
    return Said(out.getvalue(), err.getvalue(), 0)


def inspect_elsewhere(*words: str, **settings: Any) -> Said:
    """The command in another process, as from a shell."""
    done = subprocess.run(
        [sys.executable, "-m", "django", "ratelimit_inspect", *words],
        env=caches.child_environment(**settings),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Said(done.stdout, done.stderr, done.returncode)


@pytest.fixture(autouse=True)
def project(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.ROOT_URLCONF = __name__
    settings.RATELIMIT_KV = {"SCOPES": SCOPES}
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def rows(use_cache: Callable[..., Any]) -> Any:
    """A cache that processes share."""
    return use_cache("database-sqlite")


@pytest.fixture
def noon() -> Iterator[Any]:
    with freeze_time("2026-03-10 12:00:00") as clock:
        yield clock


# ── The list ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_table(rows: Any, noon: Any) -> None:
    hit("ask", "user:42", cost=17)
    hit("ask", "ip:192.0.2.1", cost=20)
    hit("slow", "ip:192.0.2.7", cost=2)
    hit("slow", "ip:192.0.2.7")
    assert inspect() == Said(
        """\
SCOPE  IDENTITY       USED  PER     %  RESETS IN  STATE
slow   ip:192.0.2.7                           1h  banned
ask    ip:192.0.2.1  20/20  1h   100%         1h  over
slow   ip:192.0.2.7    2/2  1m   100%         1m  over
ask    user:42       17/20  1h    85%         1h  within
""",
        "",
        0,
    )


def test_nothing_to_show(rows: Any) -> None:
    assert inspect() == Said("No live counters.\n", "", 0)
    assert inspect("--format", "json") == Said("[]\n", "", 0)
    assert inspect("--scope", "ask", "--identity", "user:1") == Said("No live counters.\n", "", 0)


def test_json_has_the_names_that_people_script_against(rows: Any, noon: Any) -> None:
    hit("ask", "user:42", cost=3)
    noon.tick(0.5)
    assert inspect("--format", "json").json == [
        {
            "scope": "ask",
            "identity": "user:42",
            "count": 3,
            "limit": 20,
            "window": 3600,
            "remaining": 17,
            "resets_in": 3600,
            "state": "within",
        }
    ]


def test_csv(rows: Any, settings: Any, noon: Any) -> None:
    hit("ask", "user:42", cost=3)
    hit("login", "field:bob+ip:192.0.2.1")
    settings.RATELIMIT_KV = {"SCOPES": {"ask": "20/h"}}
    table = list(csv.DictReader(io.StringIO(inspect("--format", "csv").out)))
    assert list(table[0]) == ["scope", "identity", "count", "limit", "window", "remaining", "resets_in", "state"]
    assert table[0]["limit"] == "20"
    assert {row["limit"] for row in table[1:]} == {""}


def test_filters(rows: Any) -> None:
    for number in range(3):
        hit("ask", f"user:{number}", cost=10 * number)
    hit("login", "field:Bob+ip:192.0.2.1")

    def identities(*words: str) -> list[str]:
        return [row["identity"] for row in inspect("--format", "json", *words).json]

    assert identities("--scope", "ask") == ["user:2", "user:1"]
    assert identities("--over") == ["user:2"]
    assert identities("--identity", "user:1") == ["user:1"]
    assert identities("--scope", "ask", "--identity", "user:1", "--over") == []
    (shown, _) = identities("--scope", "login")
    assert identities("--identity", shown) == [shown, shown], "copied from the list"
    assert identities("--scope", "login", "--identity", "field:bob+ip:192.0.2.1") == [shown, shown], "as people write"


def test_it_says_when_it_cut(rows: Any) -> None:
    for number in range(5):
        hit("ask", f"user:{number}", cost=number + 1)
    said = inspect("--limit", "2", "--format", "json")
    assert [row["count"] for row in said.json] == [5, 4]
    assert "These are the 2 fullest of 5 counters" in said.err
    assert said.code == 0
    assert inspect("--limit", "5").err == ""
    assert inspect("--limit", "0").code == 1


@pytest.mark.parametrize("columns", [80, 100])
def test_long_names_are_shortened_in_the_table_alone(rows: Any, settings: Any, monkeypatch: Any, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    name, who = "shop.views.checkout-with-a-rather-long-name.3f2a1b", f"user:{'e' * 40}@shop.example"
    settings.RATELIMIT_KV = {"SCOPES": {name: {"RATE": "1000000/m", "KEY": "user"}}}
    hit(name, who, cost=999_999)
    title, line = inspect().out.splitlines()
    assert len(line) <= columns
    assert len(title) <= columns
    assert "999999/1000000" in line
    for shown, full in zip(line.split(), (name, who), strict=False):
        start, dots, end = shown.partition("...")
        assert dots
        assert full.startswith(start)
        assert full.endswith(end)
    assert inspect("--format", "json").json[0]["identity"] == who
    assert who in inspect("--format", "csv").out


def test_colours_where_they_help(rows: Any) -> None:
    hit("ask", "user:1", cost=20)
    hit("ask", "user:2", cost=16)
    hit("ask", "user:3", cost=1)
    _, over, near, within = inspect(force_color=True).out.splitlines()
    assert over.startswith("\x1b[")
    assert near.startswith("\x1b[")
    assert over[:8] != near[:8]
    assert not within.startswith("\x1b[")
    assert "\x1b" not in inspect().out


def test_progress_on_a_terminal_alone(rows: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    hit("ask", "user:1")
    err = inspect(stderr=Terminal(), no_color=True).err
    assert err.startswith("\r0 counters seen ...")
    assert err.endswith("\r"), "and the line is empty again"
    assert inspect().err == ""


# ── From a shell, against the real thing ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["database-sqlite", "redis"])
def test_another_process_sees_the_counters(kind: str, use_cache: Callable[..., Any]) -> None:
    use_cache(kind)
    hit("ask", "user:42", cost=20)
    said = inspect_elsewhere("--format", "json")
    assert said.code == 0, said.err
    assert [(row["identity"], row["count"], row["limit"]) for row in said.json] == [("user:42", 20, 20)]
    said = inspect_elsewhere("--reset", "--scope", "ask", "--identity", "user:42", "--no-input")
    assert said == Said("Removed 1 counter of user:42 in the scope ask.\n", "", 0)
    assert inspect().out == "No live counters.\n"


def test_locmem_cannot_be_seen_from_another_process(use_cache: Callable[..., Any], settings: Any) -> None:
    use_cache("locmem", location="shared")
    hit("ask", "user:42")
    said = inspect_elsewhere()
    assert said.code == 3
    assert said.out == "", "nothing found would be a lie"
    assert "live inside each server process" in said.err
    said = inspect_elsewhere("--format", "json", "--scope", "ask", "--identity", "user:42")
    assert (said.out, said.code) == ("", 3)
    said = inspect_elsewhere("--reset", "--scope", "ask", "--no-input")
    assert (said.out, said.code) == ("", 3)

    # Within the process it shows what there is, and that this is not all.
    said = inspect("--format", "json")
    assert [row["identity"] for row in said.json] == ["user:42"]
    assert said.code == 3
    assert inspect("--scope", "ask", "--identity", "user:42").code == 0
    assert inspect("--reset", "--scope", "ask", interactive=False).code == 0


def test_a_store_that_does_not_answer(own_redis: Callable[..., Any], use_cache: Callable[..., Any]) -> None:
    server = own_redis()
    use_cache("django-redis", server=server)
    server.stop()
    for words in (
        [],
        ["--scope", "ask", "--identity", "user:1"],
        ["--reset", "--scope", "ask", "--no-input"],
        ["--reset", "--scope", "ask", "--identity", "user:1", "--no-input"],
        ["--reset", "--identity", "user:1", "--no-input"],
    ):
        said = inspect(*words)
        assert (said.out, said.code) == ("", 2), words
        assert "does not answer" in said.err
    assert inspect_elsewhere().code == 2


def hashed(key: str, prefix: str, version: int) -> str:
    return f"{prefix}{hash(key)}"


def test_a_cache_that_cannot_list_still_answers_for_one_caller(use_cache: Callable[..., Any]) -> None:
    use_cache("database-sqlite", KEY_FUNCTION=f"{__name__}.hashed")
    hit("ask", "user:42", cost=20)
    said = inspect()
    assert (said.out, said.code) == ("", 3)
    assert "cannot be listed" in said.err
    assert "KEY_FUNCTION" in said.err
    assert inspect("--identity", "user:42").code == 3
    said = inspect("--scope", "ask", "--identity", "user:42", "--format", "json")
    assert said.code == 0
    assert said.json[0]["count"] == 20
    assert inspect("--scope", "ask", "--identity", "user:43") == Said("No live counters.\n", "", 0)
    assert inspect("--reset", "--scope", "ask", interactive=False).code == 3
    assert inspect("--reset", "--scope", "ask", "--identity", "user:42", interactive=False).code == 0


def test_redis_is_scanned_in_large_steps(use_cache: Callable[..., Any]) -> None:
    cache = use_cache("redis")
    client = cache._cache.get_client(None, write=True)
    with client.pipeline(transaction=False) as pipe:
        for number in range(5000):
            pipe.set(f"foreign:{number}", number)
        pipe.execute()
    for number in range(50):
        hit("ask", f"user:{number}")
    client.config_resetstat()
    assert len(inspect("--format", "json").json) == 50
    calls = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in client.info("commandstats").items()}
    assert "keys" not in calls
    assert calls["scan"] <= 10
    assert sum(calls.values()) < 100
    assert not {"set", "del", "eval", "evalsha", "expire", "pexpire"} & set(calls), "it reads only"


# ── Mistakes ──────────────────────────────────────────────────────────────────────────────────────────────


def test_mistakes_say_what_to_write(rows: Any, settings: Any) -> None:
    said = inspect("--scope", "aks")
    assert said.code == 1
    assert "Did you mean 'ask'?" in said.err
    said = inspect("--identity", "203.0.113.9")
    assert said.code == 1
    assert "ip:203.0.113.9" in said.err
    assert inspect("--reset", "--scope", "aks", interactive=False).code == 1
    assert "needs --scope, --identity or both" in inspect("--reset").err
    assert inspect("--scopes", "--store").code == 1
    settings.RATELIMIT_KV = {"SCOPES": {"ask": "often"}}
    said = inspect()
    assert said.code == 1
    assert "often" in said.err


def test_help_documents_the_exit_codes(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        call_command("ratelimit_inspect", "--help")
    said = capsys.readouterr().out
    assert "exit codes:" in said
    for code in range(4):
        assert f"\n  {code}   " in said


# ── Reset ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("answer", "is_removed"), [("y", True), ("YES ", True), ("n", False), ("", False)])
def test_reset_asks(rows: Any, monkeypatch: Any, answer: str, is_removed: bool) -> None:
    hit("ask", "user:1")
    hit("ask", "user:2")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or answer)
    said = inspect("--reset", "--scope", "ask")
    assert asked == ["Remove the counters of everybody in the scope ask? [y/N] "]
    assert (said.out, said.code) == (
        ("Removed 2 counters of everybody in the scope ask.\n", 0) if is_removed else ("", 1)
    )
    assert len(inspect("--format", "json").json) == (0 if is_removed else 2)


def test_reset_with_nobody_there_to_answer(rows: Any) -> None:
    hit("ask", "user:1")
    said = inspect_elsewhere("--reset", "--scope", "ask")
    assert said.code == 1
    assert "--no-input" in said.err
    assert len(inspect("--format", "json").json) == 1


def test_reset_of_a_caller(rows: Any) -> None:
    for who in ("user:1", "user:2"):
        hit("ask", who, cost=20)
    hit("slow", "ip:192.0.2.1", cost=2)
    hit("slow", "ip:192.0.2.1")
    said = inspect("--reset", "--identity", "user:1", interactive=False)
    assert said == Said("Removed 1 counter of user:1 in every scope.\n", "", 0)
    assert hit("ask", "user:1").allowed
    assert not hit("ask", "user:2").allowed
    said = inspect("--reset", "--scope", "ask", "--identity", "user:3", interactive=False)
    assert said == Said("Removed 0 counters of user:3 in the scope ask.\n", "", 0)
    assert inspect("--reset", "--scope", "slow", "--identity", "ip:192.0.2.1", interactive=False).code == 0
    assert hit("slow", "ip:192.0.2.1").allowed, "the ban is lifted too"


# ── Scopes and stores ─────────────────────────────────────────────────────────────────────────────────────


def test_scopes(rows: Any) -> None:
    said = inspect("--scopes")
    assert said.code == 0
    assert said.out.startswith(
        """\
ask  20/h by user|ip
    view tests.test_ratelimit_inspect.ask at /ask/ for POST
login  5/m, 20/day by field:username+ip
    URL names login for POST
slow  2/m by ip
    paths *
    but not /health
    ban 1h after 1 denied windows, at most 1d
signin.account  5/15m by field:username+ip/48
    where code asks for it: check(), hit()
"""
    )
    assert all(len(line) <= 80 for line in said.out.splitlines())
    found = {scope["scope"]: scope for scope in inspect("--scopes", "--format", "json").json}
    assert found["login"]["methods"] == ["POST"]
    assert found["ask"]["views"][0]["route"] == "/ask/"
    assert inspect("--scopes", "--scope", "ask").out.splitlines()[0] == "ask  20/h by user|ip"
    assert len(inspect("--scopes", "--scope", "signin", "--format", "json").json) == 5
    table = list(csv.DictReader(io.StringIO(inspect("--scopes", "--format", "csv").out)))
    assert table[1]["rates"] == "5/m 20/day"
    assert json.loads(table[0]["views"])[0]["url_name"] == "ask"


def test_no_scopes(rows: Any, settings: Any, monkeypatch: Any) -> None:
    settings.ROOT_URLCONF = "empty_urls"
    monkeypatch.setitem(sys.modules, "empty_urls", SimpleNamespace(urlpatterns=[]))
    settings.RATELIMIT_KV = {}
    assert inspect("--scopes").out.startswith("No scopes are in force")


def test_store_facts(rows: Any, use_cache: Callable[..., Any], settings: Any) -> None:
    assert inspect("--store").out == (
        """\
default  DatabaseCache
    exact                     yes
    shared between processes  yes
    survives a restart        yes
    can list                  yes
    round trips a request     1 when denied, else 2; with several counters 3
                              and 1 for each
"""
    )
    use_cache("locmem", alias="memory")
    settings.RATELIMIT_KV = {"SCOPES": {"ask": {"RATE": "1/m", "CACHE": "memory"}}}
    facts = {facts["alias"]: facts for facts in inspect("--store", "--format", "json").json}
    assert facts["memory"]["lists"] is False
    assert facts["default"]["shared"] is True
    assert inspect("--store", "--format", "csv").out.startswith("alias,store,exact,shared,")
