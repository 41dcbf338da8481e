"""Live counters in the admin: who may see and reset them, and what the pages say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.test import Client
from django.urls import path, reverse

from ratelimit_kv import admin as ours
from ratelimit_kv import hit, inspection
from ratelimit_kv.models import LiveCounter
from ratelimit_kv.stores import CannotList, StoreError, get_store

pytestmark = pytest.mark.django_db

own_site = admin.AdminSite(name="own")
own_site.register(LiveCounter, ours.LiveCounterAdmin)
urlpatterns = [path("admin/", admin.site.urls), path("own/", own_site.urls)]

LIST = "/admin/ratelimit_kv/livecounter/"
RESET = f"{LIST}reset/"
SCOPES = {
    "ask": {"RATE": "20/h", "KEY": "user|ip"},
    "slow": {"RATE": "2/m", "KEY": "ip", "BAN": {"AFTER": 1, "FOR": "1h"}},
}


@pytest.fixture(autouse=True)
def project(settings: Any, use_cache: Callable[..., Any]) -> None:
    settings.ROOT_URLCONF = __name__
    settings.RATELIMIT_KV = {"SCOPES": SCOPES}
    settings.STATIC_URL = "/static/"
    use_cache("database-sqlite")


def client_of(*permissions: str, **fields: Any) -> Client:
    user = User.objects.create_user("somebody", is_staff=True, **fields)
    for codename in permissions:
        user.user_permissions.add(Permission.objects.get(codename=codename))
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client


@pytest.fixture
def boss() -> Client:
    return client_of(is_superuser=True)


def page(client: Client, url: str = LIST) -> str:
    response = client.get(url)
    assert response.status_code == 200
    return response.content.decode()


def rows(client: Client, url: str = LIST) -> list[tuple[str, str]]:
    return [(row["counter"].scope, row["counter"].identity) for row in client.get(url).context["rows"]]


def post(client: Client, **data: Any) -> Any:
    token = client.get(LIST).context["csrf_token"]
    return client.post(f"{RESET}?scope=ask", {"csrfmiddlewaretoken": str(token), **data})


# ── Who may ───────────────────────────────────────────────────────────────────────────────────────────────


def test_strangers_are_asked_to_log_in() -> None:
    assert Client().get(LIST)["Location"].startswith("/admin/login/")
    assert Client().post(RESET)["Location"].startswith("/admin/login/")


def test_staff_without_permission_sees_nothing() -> None:
    client = client_of()
    assert client.get(LIST).status_code == 403
    assert "Live counters" not in page(client, "/admin/")


def test_who_may_view_sees_and_does_not_reset() -> None:
    hit("ask", "user:42", cost=20)
    client = client_of("view_livecounter")
    assert "Live counters" in page(client, "/admin/")
    html = page(client)
    assert "user:42" in html
    assert "Reset selected" not in html
    assert 'type="checkbox" name="counter"' not in html
    assert post(client, counter="ask user:42", confirmed="yes").status_code == 403
    assert not hit("ask", "user:42").allowed


def test_who_may_delete_resets() -> None:
    hit("ask", "user:42", cost=20)
    client = client_of("view_livecounter", "delete_livecounter")
    assert "Reset selected" in page(client)
    assert post(client, counter="ask user:42", confirmed="yes").status_code == 302
    assert hit("ask", "user:42").allowed


def test_there_is_nothing_to_add_or_to_change(boss: Client) -> None:
    assert boss.get(f"{LIST}add/").status_code == 404
    html = page(boss, "/admin/")
    assert LIST in html
    assert f"{LIST}add/" not in html


# ── The list ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_fullest_first(boss: Client) -> None:
    hit("ask", "user:1", cost=3)
    hit("ask", "user:2", cost=20)
    hit("slow", "ip:192.0.2.1", cost=2)
    hit("slow", "ip:192.0.2.1")
    assert rows(boss) == [
        ("slow", "ip:192.0.2.1"),
        ("ask", "user:2"),
        ("slow", "ip:192.0.2.1"),
        ("ask", "user:1"),
    ]
    html = page(boss)
    assert "20 / 20" in html
    assert 'alt="over"' in html
    assert 'alt="banned"' in html
    assert "4 live counters" in html
    assert "default (DatabaseCache)" in html
    assert "no-store" in boss.get(LIST)["Cache-Control"]


def test_search(boss: Client) -> None:
    for number in range(3):
        hit("ask", f"user:{number}", cost=10 * number)
    hit("slow", "ip:192.0.2.1")
    assert rows(boss, f"{LIST}?scope=ask") == [("ask", "user:2"), ("ask", "user:1")]
    assert rows(boss, f"{LIST}?identity=ip:192.0.2.1") == [("slow", "ip:192.0.2.1")]
    assert rows(boss, f"{LIST}?over=on") == [("ask", "user:2")]
    assert rows(boss, f"{LIST}?scope=ask&identity=user:1") == [("ask", "user:1")]
    html = page(boss, f"{LIST}?scope=ask&identity=user:1")
    assert '<option value="ask" selected>' in html
    assert 'value="user:1"' in html


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("identity=192.0.2.1", "Write kind:value"),
        ("scope=ask&identity=192.0.2.1", "Write kind:value"),
        ("scope=aks", "not one of the available choices"),
        ("identity=%00", "Null characters"),
        (f"identity={'x' * 1001}", "at most 1000"),
    ],
)
def test_a_wrong_search_is_explained(boss: Client, query: str, said: str) -> None:
    hit("ask", "user:1")
    html = page(boss, f"{LIST}?{query}")
    assert said in html
    assert "user:1<" not in html


def test_hostile_searches_are_escaped(boss: Client) -> None:
    html = page(boss, f"{LIST}?identity=user:<script>alert(1)</script>")
    assert "<script>alert" not in html
    assert page(boss, f"{LIST}?identity=<b>").count("<b>") == 0


def test_a_long_list_says_that_it_is_cut(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "ROWS", 2)
    for number in range(3):
        hit("ask", f"user:{number}")
    assert "The 2 fullest of 3 counters" in page(boss)


def test_a_list_that_takes_too_long_says_so(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hit("ask", "user:1")
    monkeypatch.setattr(ours, "SECONDS", 0.0)
    monkeypatch.setattr(inspection, "PACE", 1)
    html = page(boss)
    assert "too many counters" in html
    assert rows(boss) == []


def test_counters_of_a_scope_that_is_gone_are_shown_without_a_box(boss: Client, settings: Any) -> None:
    hit("ask", "user:1", cost=3)
    settings.RATELIMIT_KV = {"SCOPES": {"other": "1/m"}}
    html = page(boss)
    assert "3 / ?" in html
    assert 'name="counter"' not in html
    assert post(boss, counter="ask user:1", confirmed="yes").status_code == 200


def test_counters_that_live_in_each_process(boss: Client, use_cache: Callable[..., Any]) -> None:
    use_cache("locmem")
    hit("ask", "user:1")
    html = page(boss)
    assert "live inside each server process" in html
    assert "user:1" in html, "those of this process are shown"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CannotList("It keeps no list."), "It keeps no list."),
        (StoreError("refused", outage=True), "does not answer: refused"),
    ],
)
def test_a_cache_that_cannot_tell_says_so(
    boss: Client, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    hit("ask", "user:1")

    def scan(self: Any, prefix: str) -> Iterator[Any]:
        raise error

    monkeypatch.setattr(type(get_store("default")), "scan", scan)
    assert said in page(boss)
    assert rows(boss, f"{LIST}?scope=ask&identity=user:1") == [("ask", "user:1")]


# ── Reset ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_reset_asks_first_and_keeps_the_search(boss: Client) -> None:
    hit("ask", "user:1", cost=20)
    hit("ask", "user:2", cost=20)
    hit("slow", "ip:192.0.2.1", cost=2)
    hit("slow", "ip:192.0.2.1")

    asked = post(boss, counter=["ask user:1", "slow ip:192.0.2.1", "ask user:1"])
    assert asked.status_code == 200
    html = asked.content.decode()
    assert "Are you sure?" in html
    assert html.count("<li><strong>") == 2
    assert f'href="{LIST}?scope=ask"' in html
    assert not hit("ask", "user:1").allowed, "nothing has happened yet"

    done = post(boss, counter=["ask user:1", "slow ip:192.0.2.1"], confirmed="yes")
    assert done["Location"] == f"{LIST}?scope=ask"
    assert "Removed 3 counters." in page(boss)
    assert hit("ask", "user:1").allowed
    assert hit("slow", "ip:192.0.2.1").allowed, "the ban is lifted"
    assert not hit("ask", "user:2").allowed
    assert {str(entry.object_repr) for entry in LogEntry.objects.all()} == {"ask user:1", "slow ip:192.0.2.1"}
    assert "ask user:1" in page(boss, "/admin/"), "who did what is in the admin's own log"


def test_reset_is_a_post_with_a_token(boss: Client) -> None:
    hit("ask", "user:1", cost=20)
    assert boss.get(RESET).status_code == 405
    assert boss.post(RESET, {"counter": "ask user:1", "confirmed": "yes"}).status_code == 403
    assert not hit("ask", "user:1").allowed


@pytest.mark.parametrize("counter", [[], ["ask"], ["aks user:1"], ["ask nonsense"], ["<script> user:1"]])
def test_a_wrong_selection_is_explained(boss: Client, counter: list[str]) -> None:
    response = post(boss, counter=counter, confirmed="yes")
    assert response.status_code == 200
    html = response.content.decode()
    assert "errornote" in html
    assert "<script> user" not in html
    assert "Yes, reset" not in html


def test_a_store_that_fails_meanwhile(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hit("ask", "user:1")

    def reset(self: Any, keys: Any) -> int:
        raise StoreError("refused", outage=False)

    monkeypatch.setattr(type(get_store("default")), "reset", reset)
    assert post(boss, counter="ask user:1", confirmed="yes").status_code == 302
    assert "Not all was removed: refused." in page(boss)
    assert not LogEntry.objects.exists()


# ── Around it ─────────────────────────────────────────────────────────────────────────────────────────────


def test_an_admin_site_of_ones_own(boss: Client) -> None:
    hit("ask", "user:1")
    html = page(boss, "/own/ratelimit_kv/livecounter/")
    assert 'action="/own/ratelimit_kv/livecounter/reset/' in html
    assert reverse("admin:ratelimit_kv_livecounter_changelist", current_app="own") == "/own/ratelimit_kv/livecounter/"


def test_no_table_and_no_migration(capsys: Any) -> None:
    from django.db import connection

    assert LiveCounter._meta.db_table not in connection.introspection.table_names()
    call_command("makemigrations", check_changes=True, dry_run=True)
    assert "No changes detected" in capsys.readouterr().out
    call_command("dumpdata", "ratelimit_kv", verbosity=0)
    assert capsys.readouterr().out.strip() == "[]"
    assert list(LiveCounter.objects.all()) == list(LiveCounter._base_manager.all()) == []


def test_without_the_admin_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, django\n"
        "from django.conf import settings\n"
        "settings.configure(SECRET_KEY='x', INSTALLED_APPS=['ratelimit_kv'])\n"
        "django.setup()\n"
        "from django.core.management import call_command\n"
        "call_command('check')\n"
        "ours = ('django.contrib.admin', 'django.contrib.auth', 'ratelimit_kv.admin')\n"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]"), done.stdout
