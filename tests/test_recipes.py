"""docs/recipes.md, run: each recipe is written down as the project that it describes, and asked over real requests."""

from __future__ import annotations

import importlib
import re
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.apps import apps
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.core import signing
from django.core.cache import caches
from django.core.exceptions import ValidationError
from django.db import connection
from django.test import Client
from freezegun import freeze_time

from ratelimit_kv import hit, peek, reset
from ratelimit_kv.conf import load
from ratelimit_kv.process import forget
from tests.site import HALF_PAST, statuses

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "recipes.md"
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "ratelimit_kv.middleware.RateLimitMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"(?:#|<!--) (?P<name>[\w/.]+\.(?:py|html))(?: -->)?\n")


class Recipe(NamedTuple):
    """A section of the document."""

    title: str
    files: dict[str, str]
    """Name in the first line of a block -> text of the block."""
    extras: list[str]
    """Blocks of Python that are no file: alternatives."""


def recipes() -> dict[str, Recipe]:
    """Title -> recipe, in the order of the document."""
    found = {}
    for section in DOCUMENT.read_text("utf-8").split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        files: dict[str, str] = {}
        extras: list[str] = []
        for block in BLOCK.finditer(body):
            named = NAME.match(block["text"])
            if named:
                files[named["name"]] = block["text"]
            elif block["language"] == "python":
                extras.append(block["text"])
        found[title] = Recipe(title, files, extras)
    return found


RECIPES = recipes()


def settings_in(text: str) -> dict[str, Any]:
    """The settings that a block of Python makes."""
    names: dict[str, Any] = {}
    exec(text, names)
    return {name: value for name, value in names.items() if name.isupper()}


@pytest.fixture
def recipe(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Client]]:
    """``recipe(title)``: the recipe is in force; returns a client of its site."""

    def cook(title: str) -> Client:
        found = RECIPES[title]
        for name, text in found.files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        (tmp_path / "myapp").mkdir(exist_ok=True)
        (tmp_path / "myapp" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        if "myapp/models.py" in found.files:
            settings.INSTALLED_APPS = [*django_settings.INSTALLED_APPS, "myapp"]
        own = settings_in(found.files["settings.py"])
        # The servers of a recipe are not here: the aliases are, in memory.
        own["CACHES"] = {alias: in_memory(alias, tmp_path) for alias in own.get("CACHES", {"default": {}})}
        settings.TEMPLATES = [{**django_settings.TEMPLATES[0], "DIRS": [tmp_path / "templates"]}]
        for name, value in {"MIDDLEWARE": MIDDLEWARE, "ROOT_URLCONF": "tests.urls", **own}.items():
            setattr(settings, name, value)
        if "myapp/urls.py" in found.files:
            settings.ROOT_URLCONF = "myapp.urls"
        assert load()[1] == []
        importlib.import_module(
            django_settings.ROOT_URLCONF
        )  # before a test freezes time: what is imported then may mind
        forget()
        return Client()

    yield cook
    for name in [name for name in sys.modules if name.partition(".")[0] == "myapp"]:
        del sys.modules[name]
    apps.all_models.pop("myapp", None)
    apps.clear_cache()
    forget()


def in_memory(alias: str, place: Path) -> dict[str, Any]:
    return {
        "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
        "LOCATION": f"{place}/{alias}",
        "OPTIONS": {"MAX_ENTRIES": 100_000},
    }


def keys(alias: str = "default") -> list[str]:
    """What there is in a cache in memory."""
    cache: Any = caches[alias]
    return [made.removeprefix(":1:") for made in cache._cache]


def module(name: str) -> Any:
    return importlib.import_module(f"myapp.{name}")


# ---------------------------------------------------------------------------------------------------- the document


def test_every_recipe_has_a_test() -> None:
    tested = set(re.findall(r'recipe\("([^"]+)"\)', Path(__file__).read_text("utf-8")))
    assert tested == set(RECIPES)


@pytest.mark.parametrize("title", RECIPES)
def test_blocks_without_a_file_are_settings_that_hold(title: str, settings: Any) -> None:
    for text in RECIPES[title].extras:
        settings.RATELIMIT_KV = settings_in(text)["RATELIMIT_KV"]
        assert load()[1] == []


# ----------------------------------------------------------------------------------------------------- the recipes


def test_five_free_uses(recipe: Callable[[str], Client]) -> None:
    client = recipe("Five free uses a day per visitor")
    with freeze_time(HALF_PAST) as clock:
        assert client.get("/roast/").content == b"Dare? 5 left today."
        answers = [client.post("/roast/") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429]
        assert answers[4].content.endswith(b"0 more today.")
        assert answers[5].content == b"That was five for today. Come back in 12 hours.\n"
        assert client.get("/roast/").content == b"Dare? 0 left today."

        another = Client()
        another.get("/roast/")
        assert another.post("/roast/").status_code == 200

        # Cookies are thrown away: 5 + 1 uses, then 19 more of the ceiling.
        thrown_away = 0
        while True:
            fresh = Client()
            fresh.get("/roast/")
            if fresh.post("/roast/").status_code == 429:
                break
            thrown_away += 1
        assert thrown_away == 19

        clock.tick(12 * 3600)
        assert client.post("/roast/").status_code == 200


def test_two_budgets(recipe: Callable[[str], Client]) -> None:
    client = recipe("Two budgets: everyone per day, a visitor per hour")
    with freeze_time(HALF_PAST):
        assert statuses(client, "/ask/", 30) == [200] * 20 + [429] * 10
        assert peek("ask-budget", "everyone").remaining == 80
        denied = client.get("/ask/")
        assert denied.content.startswith(b"You've asked a lot. Come back in 60 minutes.")
        for number in range(4):
            assert statuses(client, "/ask/", 20, REMOTE_ADDR=f"192.0.2.{number}") == [200] * 20
        last = client.get("/ask/", REMOTE_ADDR="192.0.2.9")
        assert (last.status_code, last.content) == (429, b"The oracle sleeps until tomorrow.\n")


@pytest.mark.django_db
def test_login(recipe: Callable[[str], Client]) -> None:
    client = recipe("A login")
    User.objects.create_user("alice", password="wonderland", is_staff=True)
    wrong = {"username": "alice", "password": "guess"}
    right = {"username": "alice", "password": "wonderland"}
    with freeze_time(HALF_PAST) as clock:
        for path in ("/login/", "/admin/login/?next=/admin/"):
            assert client.post(path, right).status_code == 302  # given back
        assert statuses(client, "/login/", 2, "post", data=wrong) == [200] * 2
        assert statuses(client, "/admin/login/", 3, "post", data={**wrong, "username": " ALICE "}) == [200] * 3
        denied = client.post("/login/", right)
        assert denied.status_code == 429
        assert int(denied["Retry-After"]) % 60 == 0
        assert "RateLimit" not in denied

        # Another name from this address goes on, until the address is through.
        other = {"username": "bob", "password": "guess"}
        assert statuses(client, "/login/", 5, "post", data=other) == [200] * 5
        names = [{"username": f"user{number}", "password": "guess"} for number in range(11)]
        assert [client.post("/login/", name).status_code for name in names] == [200] * 10 + [429]

        module("support").let_in("Alice", "127.0.0.1")
        assert client.post("/login/", right).status_code == 302
        clock.tick(15 * 60)
        assert client.post("/login/", other).status_code == 200


def test_api_by_sub(recipe: Callable[[str], Client]) -> None:
    client = recipe("An API per user, by a verified token's sub")

    def ask(token: str, address: str = "127.0.0.1") -> int:
        return int(client.get("/api/me/", headers={"Authorization": token}, REMOTE_ADDR=address).status_code)

    def bearer(sub: str) -> str:
        return f"Bearer {signing.dumps({'sub': sub}, salt='api')}"

    with freeze_time(HALF_PAST):
        assert [ask(bearer("42")) for _ in range(11)] == [200] * 10 + [429]
        assert ask(bearer("42"), "192.0.2.1") == 429
        assert ask(bearer("43")) == 200
        assert [ask(f"Bearer {number}") for number in range(11)] == [401] * 10 + [429]
        assert not [key for key in keys() if "42" in key.partition("{")[2].partition("}")[0]]


@pytest.mark.django_db
def test_rest_framework(recipe: Callable[[str], Client]) -> None:
    client = recipe("REST framework, after its own authentication")
    User.objects.create_user("alice", password="wonderland")

    def ask(password: str, address: str) -> int:
        token = b64encode(f"alice:{password}".encode()).decode()
        headers = {"Authorization": f"Basic {token}"}
        return int(client.get("/api/reports/", headers=headers, REMOTE_ADDR=address).status_code)

    with freeze_time(HALF_PAST):
        assert [ask("wonderland", "192.0.2.1") for _ in range(3)] == [200] * 3
        assert [ask("wonderland", "192.0.2.2") for _ in range(3)] == [200, 200, 429]
        assert [ask("guess", "192.0.2.3") for _ in range(21)] == [401] * 20 + [429]
        assert client.get("/api/reports/").status_code == 401


def test_ninja(recipe: Callable[[str], Client]) -> None:
    client = recipe("Ninja, after its own authentication")

    def ask(token: str, address: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return int(client.get("/api/reports/", headers=headers, REMOTE_ADDR=address).status_code)

    with freeze_time(HALF_PAST):
        token = signing.dumps({"sub": "42"}, salt="api")
        assert [ask(token, "192.0.2.1") for _ in range(3)] == [200] * 3
        assert [ask(token, "192.0.2.2") for _ in range(3)] == [200, 200, 429]
        assert [ask("guess", "192.0.2.3") for _ in range(21)] == [401] * 20 + [429]


def test_two_layers(recipe: Callable[[str], Client]) -> None:
    client = recipe("Two layers, with exempt paths")
    with freeze_time(HALF_PAST):
        assert statuses(client, "/search/", 21) == [200] * 20 + [429]
        assert statuses(client, "/", 180) == [200] * 180
        assert client.get("/").status_code == client.get("/nowhere/").status_code == 429
        before = keys()
        assert statuses(client, "/health", 5) == [200] * 5
        assert keys() == before


def test_hot_path(recipe: Callable[[str], Client]) -> None:
    client = recipe("A hot path on a cache of its own")
    with freeze_time(HALF_PAST):
        assert statuses(client, "/beacon/", 61) == [200] * 60 + [429]
        assert client.get("/ask/").status_code == 200
    assert [key.split(":")[1] for key in keys("hot")] == ["beacon"]
    assert [key.split(":")[1] for key in keys("ratelimit")] == ["ask"]
    assert keys() == []


def test_own_voice(recipe: Callable[[str], Client]) -> None:
    client = recipe("Replies in your own voice")
    with freeze_time(HALF_PAST):
        assert client.get("/ask/").status_code == client.get("/api/ask/").status_code == 200
        page = client.get("/ask/", headers={"Accept": "text/html"})
        assert page.status_code == 429
        assert "<h1>Not so fast</h1>\n<p>The oracle has spoken. Be back in 60 minutes.</p>" in page.content.decode()
        answer = client.get("/api/ask/")
        assert (answer.status_code, answer.json()) == (429, {"error": {"code": "slow_down", "scope": "api"}})
        assert (answer["Retry-After"], answer["Cache-Control"]) == ("3570", "no-store")


@pytest.mark.django_db  # to close a response is to close connections
def test_reserve_and_settle(recipe: Callable[[str], Client]) -> None:
    client = recipe("An AI endpoint: reserve, then settle")

    def left() -> int | None:
        return peek("tokens", "ip:127.0.0.1").remaining

    def post(path: str, size: int) -> Any:
        return client.post(path, "x" * size, content_type="text/plain")

    with freeze_time(HALF_PAST):
        assert post("/complete/", 300).json()["text"] == "It works on my machine."
        assert left() == 100_000 - 12 - 75

        stream = post("/stream/", 300)
        reserved = left()
        assert reserved == 100_000 - 87 - (100 + 1000)
        assert b"".join(stream.streaming_content) == b"It works on my machine. "
        assert left() == 100_000 - 87 - 5

        stream = post("/stream/", 300)
        next(iter(stream.streaming_content))
        stream.close()  # the client has gone
        assert left() == 100_000 - 87 - 5 - 1

        denied = post("/complete/", 300_000)
        assert denied.status_code == 429
        assert "Retry-After" not in denied
        assert left() == 100_000 - 87 - 5 - 1


def test_only_failures_count(recipe: Callable[[str], Client]) -> None:
    client = recipe("Only failures count")
    good, bad = {"code": "SUMMER"}, {"code": "GUESS"}
    with freeze_time(HALF_PAST):
        assert statuses(client, "/coupon/", 10, "post", data=good) == [200] * 10
        assert statuses(client, "/coupon/", 2, "post", data=bad) == [404] * 2
        assert client.post("/coupon/", good).status_code == 200
        assert statuses(client, "/coupon/", 4, "post", data=bad) == [404] * 3 + [429]
        assert client.post("/coupon/", good).status_code == 429


def test_ban(recipe: Callable[[str], Client]) -> None:
    client = recipe("Ban those who go on")
    with freeze_time("2026-03-01 12:00:00") as clock:
        for _ in range(3):
            assert statuses(client, "/", 11) == [200] * 10 + [429]
            clock.tick(60)
        banned = client.get("/")
        assert banned.status_code == 429
        assert 3000 < int(banned["Retry-After"]) <= 3600
        clock.tick(int(banned["Retry-After"]))
        assert client.get("/").status_code == 200
        for _ in range(3):
            statuses(client, "/", 11)
            clock.tick(60)
        assert 7000 < int(client.get("/")["Retry-After"]) <= 7200
        assert reset("scrape", "ip:127.0.0.1")
        assert client.get("/").status_code == 200


def test_shadow(recipe: Callable[[str], Client]) -> None:
    client = recipe("Try a limit before it denies")
    with freeze_time(HALF_PAST):
        answers = [client.get("/api/") for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert not any("RateLimit" in answer for answer in answers)
        assert module("watch").would_have_been_denied == {"api-v2": 3}


@pytest.mark.django_db(transaction=True)
def test_plans(recipe: Callable[[str], Client]) -> None:
    client = recipe("Limits by plan")
    plan_model = module("models").Plan
    with connection.schema_editor() as editor:
        editor.create_model(plan_model)
    try:
        with freeze_time(HALF_PAST) as clock:
            assert statuses(client, "/api/", 3) == [200, 200, 429]
            client.force_login(User.objects.create_user("alice"))
            assert statuses(client, "/api/", 4) == [200] * 3 + [429]
            plan = plan_model(user=User.objects.get(), rate="5/month")
            with pytest.raises(ValidationError, match="5/month"):
                plan.full_clean()
            plan.rate = "5/h"
            plan.full_clean()
            plan.save()
            clock.tick(60)
            assert statuses(client, "/api/", 3) == [200, 200, 429]  # three have been counted before
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(plan_model)


def test_ceiling(recipe: Callable[[str], Client]) -> None:
    client = recipe("A ceiling for keys that clients choose")

    def ask(device: str) -> int:
        return int(client.get("/sync/", headers={"X-Device": device}).status_code)

    with freeze_time(HALF_PAST):
        assert [ask("one") for _ in range(3)] == [200, 200, 429]
        assert [ask(f"made-up-{number}") for number in range(10)] == [200] * 8 + [429] * 2
        assert len(keys()) == 1 + 8 + 1  # the devices that were counted, and the address


def test_lease(recipe: Callable[[str], Client]) -> None:
    client = recipe("A hot counter, leased")
    with freeze_time(HALF_PAST):
        assert statuses(client, "/", 50) == [200] * 50
        cache = caches["default"]
        [key] = keys()
        assert 50 <= cache.get(key) < 50 + 20
        cache.set(key, 10_000)
        assert 429 in statuses(client, "/", 21)


def test_margin(recipe: Callable[[str], Client]) -> None:
    client = recipe("A margin for caches that count late")
    with freeze_time(HALF_PAST):
        assert statuses(client, "/api/", 20) == [200] * 18 + [429] * 2
        assert client.get("/api/")["RateLimit-Policy"] == '"api";q=18;w=3600'


@pytest.mark.django_db  # to close a response is to close connections
def test_two_at_a_time(recipe: Callable[[str], Client]) -> None:
    client = recipe("At most two at a time")
    first, second = client.get("/export/"), client.get("/export/")
    assert [first.status_code, second.status_code] == [200, 200]
    denied = client.get("/export/")
    assert (denied.status_code, denied["Retry-After"]) == (429, "1")
    assert b"".join(first.streaming_content).startswith(b"row 0")
    first.close()  # as servers do
    third = client.get("/export/")
    assert third.status_code == 200
    assert client.get("/export/").status_code == 429
    second.close()
    third.close()
    assert peek("export", "ip:127.0.0.1").remaining == 2


def test_calendar(recipe: Callable[[str], Client]) -> None:
    client = recipe("Days and months of the calendar")
    with freeze_time("2026-03-28 22:30:00") as clock:  # 23:30 in Rome, and the next day has 23 hours
        assert statuses(client, "/", 4) == [200] * 3 + [429]
        assert client.get("/")["Retry-After"] == "1800"
        clock.tick(1800)
        assert statuses(client, "/", 4) == [200] * 3 + [429]
        assert client.get("/")["Retry-After"] == str(23 * 3600)
        assert peek("budget", "everyone").rates[1].remaining == 994


def test_burst(recipe: Callable[[str], Client]) -> None:
    client = recipe("A burst, then a steady pace")
    with freeze_time(HALF_PAST) as clock:
        assert statuses(client, "/api/", 11) == [200] * 10 + [429]
        assert client.get("/api/")["Retry-After"] == "1"
        clock.tick(1)
        assert statuses(client, "/api/", 2) == [200, 429]
        clock.tick(10)
        assert statuses(client, "/api/", 11) == [200] * 10 + [429]


def test_ladder(recipe: Callable[[str], Client]) -> None:
    client = recipe("An address ladder for IPv6")

    def ask(address: str) -> int:
        return int(client.post("/signup/", REMOTE_ADDR=address).status_code)

    with freeze_time(HALF_PAST):
        assert [ask(f"2001:db8:1:0::{number}") for number in range(1, 5)] == [200] * 3 + [429]
        assert [ask(f"2001:db8:1:{number}::1") for number in range(1, 5)] == [200] * 3 + [429]
        assert [ask(f"2001:db8:1:{number:x}00::1") for number in range(1, 16)] == [200] * 14 + [429]
        assert [ask("192.0.2.1") for _ in range(4)] == [200] * 3 + [429]


def test_tasks(recipe: Callable[[str], Client]) -> None:
    recipe("In tasks, sockets and resolvers")
    send_digest = module("tasks").send_digest
    with freeze_time(HALF_PAST):
        assert send_digest(42, ["a", "b", "c", "d"], send=lambda address: address != "d") == 0
        assert peek("emails", "user:42").remaining == 7
        assert send_digest(42, list("12345678"), send=bool) == 11 * 3600 + 3570
        assert send_digest(44, list("12345678901"), send=bool) is None
        assert hit("emails", "user:43").remaining == 9


def test_in_the_middle(recipe: Callable[[str], Client]) -> None:
    client = recipe("Ask in the middle of a view")
    with freeze_time(HALF_PAST):
        assert statuses(client, "/chart/a/", 5) == [200] * 5
        assert [client.get(f"/chart/{name}/").status_code for name in "bcd"] == [200, 429, 429]
        assert client.get("/chart/a/").status_code == 200
        assert client.get("/chart/d/")["Retry-After"] == "3570"
