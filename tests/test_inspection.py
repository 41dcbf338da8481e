"""Who is limited now, what is in force and where, and what stores can do."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from freezegun import freeze_time

from ratelimit_kv import hit, inspection, rate_limit, reset_all
from ratelimit_kv.conf import get_config
from ratelimit_kv.inspection import LiveCounter, State, fullest, live_counters, lookup, remove, scopes_in_force
from ratelimit_kv.stores import CannotList, Entry, Store, StoreError, get_store, store_classes

NOON = "2026-03-10 12:00:00"


def rates_of(request: HttpRequest) -> str:
    return "7/m"


@rate_limit("named")
def named(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@rate_limit("2/m", key="ip", scope="inline")
def inline(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@rate_limit("3/m", key="cookie:anon", ceiling=4, methods=["POST"])
def unnamed(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


class Handlers(View):
    @method_decorator(rate_limit("1/m", key="ip", scope="of-get"))
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @rate_limit("named", methods=["POST"])
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


urlpatterns = [
    path("named/", named, name="named"),
    path("inline/", inline),
    path("app/", include(([re_path(r"^(?P<n>\d+)$", unnamed, name="unnamed")], "app"))),
    path("handlers/", Handlers.as_view(), name="handlers"),
]

SCOPES = {
    "named": {"RATE": ["3/m", "10/h"], "KEY": "user|ip"},
    "slide": {"RATE": "10/m", "KEY": "ip", "ALGORITHM": "sliding"},
    "bucket": {"RATE": "10/m", "KEY": "ip", "ALGORITHM": "bucket"},
    "flying": {"RATE": "2", "KEY": "ip", "ALGORITHM": "concurrent"},
    "banned": {"RATE": "1/m", "KEY": "ip", "BAN": {"AFTER": 1, "FOR": "1h"}},
    "daily": {"RATE": "100/day", "KEY": "everyone", "TIMEZONE": "Europe/Rome"},
    "watched": {"RATE": "1/m", "KEY": "ip", "MODE": "shadow"},
    "anywhere": {
        "RATE": "600/m",
        "KEY": "ip",
        "PATHS": ["*"],
        "EXEMPT_PATHS": ["/health"],
        "URL_NAMES": ["named"],
        "METHODS": ["POST"],
    },
    "signin": {"PRESET": "login", "URL_NAMES": ["named"]},
    "moody": {"RATE": rates_of, "KEY": "ip"},
    "free": {"RATE": None, "KEY": "ip"},
}


@pytest.fixture
def configure(settings: Any) -> Callable[..., None]:
    def change(**options: Any) -> None:
        settings.ROOT_URLCONF = __name__
        settings.RATELIMIT_KV = {"SCOPES": SCOPES, **options}

    change()
    return change


@pytest.fixture(params=["locmem", "filebased", "database-sqlite", "pymemcache", "redis"])
def anywhere(request: pytest.FixtureRequest, use_cache: Callable[..., Any], configure: Any) -> Any:
    """Each kind of store that can list."""
    return use_cache(request.param)


@pytest.fixture
def here(use_cache: Callable[..., Any], configure: Any) -> Any:
    return use_cache("locmem")


@pytest.fixture(autouse=True)
def noon() -> Iterator[Any]:
    with freeze_time(NOON) as clock:
        yield clock


def listed(*args: Any, **words: Any) -> dict[tuple[str, str, int], LiveCounter]:
    rows = list(live_counters(get_config(), *args, **words))
    found = {(row.scope, row.identity, row.window): row for row in rows}
    assert len(found) == len(rows), "each counter is told once"
    return found


# ── Live counters ─────────────────────────────────────────────────────────────────────────────────────────


def test_every_algorithm_is_listed_with_its_own_arithmetic(anywhere: Any, noon: Any) -> None:
    for _ in range(4):
        hit("named", "user:42")
        hit("banned", "ip:192.0.2.1")
    hit("slide", "ip:192.0.2.1", cost=8)
    hit("bucket", "ip:192.0.2.1", cost=3)
    hit("flying", "ip:192.0.2.1")
    hit("daily", "everyone", cost=50)
    hit("watched", "ip:192.0.2.1")
    hit("watched", "ip:192.0.2.1")

    assert listed() == {
        ("named", "user:42", 60): LiveCounter("named", "user:42", 3, 3, 60, 0, 60, State.OVER),
        ("named", "user:42", 3600): LiveCounter("named", "user:42", 3, 10, 3600, 7, 3600, State.WITHIN),
        ("slide", "ip:192.0.2.1", 60): LiveCounter("slide", "ip:192.0.2.1", 8, 10, 60, 2, 120, State.WITHIN),
        ("bucket", "ip:192.0.2.1", 60): LiveCounter("bucket", "ip:192.0.2.1", 3, 10, 60, 7, 18, State.WITHIN),
        ("flying", "ip:192.0.2.1", 0): LiveCounter("flying", "ip:192.0.2.1", 1, 2, 0, 1, 1, State.WITHIN),
        ("banned", "ip:192.0.2.1", 60): LiveCounter("banned", "ip:192.0.2.1", 1, 1, 60, 0, 60, State.OVER),
        ("banned", "ip:192.0.2.1", 3600): LiveCounter("banned", "ip:192.0.2.1", 0, 0, 3600, 0, 3600, State.BANNED),
        ("daily", "everyone", 86400): LiveCounter("daily", "everyone", 50, 100, 86400, 50, 39600, State.WITHIN),
        ("watched", "ip:192.0.2.1", 60): LiveCounter("watched", "ip:192.0.2.1", 1, 1, 60, 0, 60, State.OVER),
    }

    # A quarter of the window before is left, and so much of it counts; other windows are over.
    noon.tick(60 + 45)
    later = listed()
    assert later["slide", "ip:192.0.2.1", 60] == LiveCounter("slide", "ip:192.0.2.1", 2, 10, 60, 8, 15, State.WITHIN)
    assert set(later) == {
        ("named", "user:42", 3600),
        ("slide", "ip:192.0.2.1", 60),
        ("flying", "ip:192.0.2.1", 0),
        ("banned", "ip:192.0.2.1", 3600),
        ("daily", "everyone", 86400),
    }
    hit("slide", "ip:192.0.2.1")
    assert listed("slide")["slide", "ip:192.0.2.1", 60].count == 3

    noon.tick(3600 * 2)
    assert set(listed()) == {("daily", "everyone", 86400)}


def test_only_what_is_asked_for(anywhere: Any) -> None:
    hit("named", "user:1", cost=3)
    hit("named", "user:2")
    hit("slide", "ip:192.0.2.1")
    hit("signin.ip48", "ip:2001:db8:1:2::9")
    hit("signin.name", "field: Alice ")

    assert {scope for scope, _, _ in listed("named")} == {"named"}
    assert {who for _, who, _ in listed("named", over=True)} == {"user:1"}
    assert set(listed("signin", "ip:2001:db8:1:ffff::1")) == {("signin.ip48", "ip:2001:db8:1::/48", 900)}
    assert set(listed(identity="ip:192.0.2.1")) == {("slide", "ip:192.0.2.1", 60)}
    assert len(listed(identity="field:ALICE")) == 1, "as people write it"
    assert set(listed("signin")) == {
        ("signin.ip48", "ip:2001:db8:1::/48", 900),
        *(found for found in listed() if found[0] == "signin.name"),
    }
    assert listed("named", "user:3") == {}


def test_foreign_and_old_keys_are_no_counters(here: Any) -> None:
    hit("named", "user:1")
    number = max(key.rpartition(":")[2] for key in here._cache if ":f60:" in key)
    for key in (
        "rl:named:f60:{user:2}:1",  # a window long gone
        "rl:named:f60:{user:2}",
        f"rl:named:f60:user:2:{number}",
        f"rl:named:f60:{{user:2}}:{number}:x",
        f"rl:named:z60:{{user:2}}:{number}",
        f"rl:named:f0:{{user:2}}:{number}",
        f"rl:named:fday@Nowhere/Land:{{user:2}}:{number}",
        f"rl:named:ffortnight@Europe/Rome:{{user:2}}:{number}",
        "rl:named:x60:{user:2}",  # a ban of a scope that bans nobody any more
        "rl:named",
        "rl:",
        f"other:named:f60:{{user:2}}:{number}",
    ):
        here.set(key, 5)
    here.set(f"rl:named:f60:{{user:3}}:{number}", "what somebody else wrote")
    here.set(f"rl:named:f60:{{user:4}}:{number}", 0)

    assert {who for _, who, _ in listed()} == {"user:1"}


def test_counters_that_the_settings_do_not_know_are_listed_without_a_limit(here: Any, configure: Any) -> None:
    for scope, who, cost in (
        ("named", "user:1", 3),
        ("slide", "ip:192.0.2.1", 2),
        ("bucket", "ip:192.0.2.1", 3),
        ("flying", "ip:192.0.2.1", 1),
        ("daily", "everyone", 5),
    ):
        hit(scope, who, cost=cost)
    for _ in range(2):
        hit("banned", "ip:192.0.2.1")
    configure(SCOPES={"named": "3/m"})  # the hourly rate is gone too

    rows = listed()
    assert {(scope, window): (row.count, row.limit, row.state.value) for (scope, _, window), row in rows.items()} == {
        ("named", 60): (3, 3, "over"),
        ("named", 3600): (3, None, "within"),
        ("slide", 60): (2, None, "within"),
        ("bucket", 60): (None, None, "within"),
        ("flying", 0): (1, None, "within"),
        ("daily", 86400): (5, None, "within"),
        ("banned", 60): (1, None, "within"),
        ("banned", 3600): (0, 0, "banned"),
    }
    assert all(row.remaining is None for row in rows.values() if row.limit is None)
    assert rows["bucket", "ip:192.0.2.1", 60].resets_in == 18
    assert listed(identity="everyone"), "an identity is found in them too"


def test_rates_of_a_function_are_listed_without_a_limit(here: Any, rf: Any) -> None:
    hit("moody", rf.get("/"))
    assert listed() == {
        ("moody", "ip:127.0.0.1", 60): LiveCounter("moody", "ip:127.0.0.1", 1, None, 60, None, 60, State.WITHIN)
    }
    assert list(lookup(get_config(), "moody", "ip:127.0.0.1")) == list(listed().values())
    assert remove(get_config(), "moody", "ip:127.0.0.1") == 1


def test_options_requests_have_a_counter_and_a_name(here: Any) -> None:
    config = get_config()
    companion = config.for_options(config.family("slide")[0])
    assert config.family(companion.name) == (companion,)
    hit(companion.name, "ip:192.0.2.1")
    assert listed()[companion.name, "ip:192.0.2.1", 60].limit == 100
    assert remove(config, companion.name, "ip:192.0.2.1") == 1


def test_an_unknown_scope_and_a_wrong_identity_say_what_to_write(here: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="Did you mean 'named'"):
        list(live_counters(get_config(), "namd"))
    with pytest.raises(ValueError, match="Write kind:value, for example user:42"):
        list(live_counters(get_config(), identity="203.0.113.9"))
    with pytest.raises(ValueError, match="is no identity that is counted here: this scope counts by 'ip'"):
        list(lookup(get_config(), "slide", "user:1"))
    with pytest.raises(ValueError, match="not an IP address"):
        list(live_counters(get_config(), identity="ip:nowhere"))
    assert listed(identity="header:x") == {}, "an identity that no scope has, but one that is gone may have had"
    with pytest.raises(ValueError, match="this scope counts by 'ip'"):
        list(lookup(get_config(), "slide", "203.0.113.9"))


def test_a_thousand_sliding_windows_are_each_told_once(anywhere: Any, noon: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(inspection, "BATCH", 7)
    for number in range(1, 31):
        hit("slide", f"ip:192.0.2.{number}", cost=2)
    noon.tick(60)
    for number in range(15, 46):
        hit("slide", f"ip:192.0.2.{number}")
    found = listed("slide")
    assert len(found) == 45
    assert {row.count for row in found.values()} == {1, 2, 3}


def test_several_caches(use_cache: Any, configure: Any) -> None:
    use_cache("locmem")
    use_cache("database-sqlite", alias="rows")
    configure(SCOPES={"a": "5/m", "b": {"RATE": "5/m", "CACHE": "rows"}})
    hit("a", "user:1")
    hit("b", "user:1")
    assert {scope for scope, _, _ in listed()} == {"a", "b"}
    assert {scope for scope, _, _ in listed(alias="rows")} == {"b"}
    assert {scope for scope, _, _ in listed("a")} == {"a"}
    assert {row.scope for row in lookup(get_config(), "b", "user:1")} == {"b"}
    assert list(lookup(get_config(), "b", "user:1", alias="default")) == []
    # A scope that has moved leaves counters behind that limit nobody.
    configure(SCOPES={"a": "5/m", "b": "5/m", "c": {"RATE": "1/m", "CACHE": "rows"}})
    assert listed()["b", "user:1", 60].limit is None


# ── One caller ────────────────────────────────────────────────────────────────────────────────────────────


def test_one_caller_is_looked_up_where_nothing_can_be_listed(use_cache: Any, configure: Any, monkeypatch: Any) -> None:
    use_cache("locmem")

    def cannot(self: Store, prefix: str) -> Iterator[Any]:
        raise CannotList("It keeps no list.")

    monkeypatch.setattr(type(get_store("default")), "scan", cannot)
    for _ in range(3):
        hit("named", "user:42")
        hit("banned", "ip:192.0.2.1")
    hit("slide", "ip:192.0.2.1", cost=8)

    assert [row.state.value for row in lookup(get_config(), "named", "user:42")] == ["over", "within"]
    assert [row.state.value for row in lookup(get_config(), "banned", "ip:192.0.2.1")] == ["over", "banned"]
    assert [row.count for row in lookup(get_config(), "slide", "ip:192.0.2.1")] == [8]
    assert list(lookup(get_config(), "slide", "ip:192.0.2.2")) == []
    assert list(lookup(get_config(), "free", "ip:192.0.2.2")) == []
    with pytest.raises(CannotList):
        list(lookup(get_config(), "moody", "ip:192.0.2.1"))

    listing = fullest(get_config(), "named")
    assert listing.rows == ()
    (gap,) = listing.gaps
    assert "It keeps no list." in gap.message
    assert not gap.is_outage


# ── The fullest ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_fullest_come_first(anywhere: Any) -> None:
    for number, cost in enumerate((1, 2, 9, 7), 1):
        hit("slide", f"ip:192.0.2.{number}", cost=cost)
    hit("watched", "ip:192.0.2.9")
    for _ in range(2):
        hit("banned", "ip:192.0.2.9")

    listing = fullest(get_config())
    assert [(row.scope, row.percent) for row in listing.rows] == [
        ("banned", None),
        ("banned", 100),
        ("watched", 100),
        ("slide", 90),
        ("slide", 70),
        ("slide", 20),
        ("slide", 10),
    ]
    assert listing.total == 7
    assert listing.is_complete

    listing = fullest(get_config(), limit=2)
    assert [row.percent for row in listing.rows] == [None, 100]
    assert listing.total == 7
    assert len(fullest(get_config(), over=True).rows) == 3
    assert fullest(get_config(), "slide", "ip:192.0.2.3").rows[0].count == 9


def test_a_duplicate_of_a_changing_cache_is_shown_once(here: Any, monkeypatch: Any) -> None:
    hit("named", "user:1")
    store = type(get_store("default"))
    scan = store.scan
    monkeypatch.setattr(store, "scan", lambda self, prefix: [*scan(self, prefix), *scan(self, prefix)])
    listing = fullest(get_config(), "named")
    assert len(listing.rows) == listing.total == 2


def test_percent_is_rounded_down_and_unknown_is_last(here: Any, configure: Any) -> None:
    def row(count: int | None, limit: int | None, state: State = State.WITHIN) -> LiveCounter:
        return LiveCounter("a", "ip:192.0.2.1", count, limit, 60, None, 1, state)

    assert row(999, 1000).percent == 99
    assert row(1000, 1000).percent == 100
    assert row(1300, 1000).percent == 130, "a charge may pass the limit"
    assert row(1, 0).percent == 100
    assert row(5, None).percent is None
    assert row(5, None).share < row(0, 10).share < row(0, 0, State.BANNED).share
    assert row(0, 0, State.BANNED).percent is None
    assert row(1, 2).as_dict() == {
        "scope": "a",
        "identity": "ip:192.0.2.1",
        "count": 1,
        "limit": 2,
        "window": 60,
        "remaining": None,
        "resets_in": 1,
        "state": "within",
    }


def test_a_cache_that_does_not_answer_hides_no_other(use_cache: Any, configure: Any, monkeypatch: Any) -> None:
    use_cache("database-sqlite")
    use_cache("locmem", alias="memory")
    configure(SCOPES={"a": "5/m", "b": {"RATE": "5/m", "CACHE": "memory"}})
    hit("b", "user:1")

    def broken(self: Store, prefix: str) -> Iterator[Any]:
        raise StoreError("no such table", outage=True)

    monkeypatch.setattr(type(get_store("default")), "scan", broken)
    listing = fullest(get_config())
    assert [row.scope for row in listing.rows] == ["b"]
    outage, apart = listing.gaps
    assert (outage.alias, outage.is_outage) == ("default", True)
    assert "no such table" in outage.message
    assert (apart.alias, apart.is_outage) == ("memory", False)
    assert "inside each server process" in apart.message


def test_a_listing_can_be_watched_and_ended(here: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(inspection, "PACE", 10)
    for number in range(25):
        hit("slide", f"ip:192.0.2.{number}")
    seen: list[int] = []

    def watch(keys: int) -> bool:
        seen.append(keys)
        return keys < 20

    listing = fullest(get_config(), watch=watch)
    assert seen == [0, 10, 20]
    assert len(listing.rows) == 20
    assert not listing.is_complete
    assert len(list(live_counters(get_config(), watch=lambda keys: keys < 10))) == 10


def test_many_counters_take_little_memory(here: Any, monkeypatch: Any) -> None:
    hit("named", "user:1", cost=2)
    (entry,) = (entry for entry in get_store("default").scan("rl:") if ":f60:" in entry.key)

    def scan(self: Store, prefix: str) -> Iterator[Entry]:
        for number in range(20_000):
            yield Entry(entry.key.replace("user:1", f"user:{number}"), number % 4)

    monkeypatch.setattr(type(get_store("default")), "scan", scan)
    tracemalloc.start()
    try:
        listing = fullest(get_config(), "named", over=True, limit=10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(listing.rows), listing.total) == (10, 5000)
    assert peak < 2_000_000


# ── Removing ──────────────────────────────────────────────────────────────────────────────────────────────


def test_removing_a_caller_leaves_the_others(anywhere: Any, noon: Any) -> None:
    anywhere.set("foreign", "stays", 600)
    hit("slide", "ip:192.0.2.1")
    noon.tick(60)
    for scope in ("named", "slide", "banned", "banned"):
        hit(scope, "ip:192.0.2.1")
        hit(scope, "ip:192.0.2.2")
    config = get_config()

    assert remove(config, "slide", "ip:192.0.2.1") == 2, "this window and the one before"
    assert remove(config, "slide", "ip:192.0.2.1") == 0
    assert remove(config, identity="ip:192.0.2.1") == 4
    assert listed(identity="ip:192.0.2.1") == {}
    assert {scope for scope, _, _ in listed(identity="ip:192.0.2.2")} == {"named", "slide", "banned"}
    assert remove(config, "named") == 2
    assert {scope for scope, _, _ in listed()} == {"slide", "banned"}
    assert reset_all() == 3
    assert anywhere.get("foreign") == "stays"


def test_removing_needs_to_know_whose(here: Any) -> None:
    with pytest.raises(ValueError, match="a scope, an identity"):
        remove(get_config())
    with pytest.raises(ValueError, match="not an identity"):
        remove(get_config(), identity="bob")
    with pytest.raises(ImproperlyConfigured, match="Did you mean"):
        remove(get_config(), "namd", "user:1")


# ── Scopes in force ───────────────────────────────────────────────────────────────────────────────────────


def test_scopes_in_force_and_where(here: Any) -> None:
    scopes = {scope.scope: scope for scope in scopes_in_force(get_config())}

    anywhere = scopes["anywhere"]
    assert anywhere.rates == ("600/m",)
    assert (anywhere.key, anywhere.algorithm, anywhere.mode, anywhere.on_error) == ("ip", "fixed", "enforce", "allow")
    assert (anywhere.paths, anywhere.url_names, anywhere.exempt_paths) == (("*",), ("named",), ("/health",))
    assert anywhere.methods == ("POST",)
    assert anywhere.views == ()
    assert scopes["named"].rates == ("3/m", "10/h")
    assert [(view.view, view.route, view.url_name, view.methods) for view in scopes["named"].views] == [
        (f"{__name__}.named", "/named/", "named", None),
        (f"{__name__}.Handlers", "/handlers/", "handlers", ("POST",)),
    ]
    assert scopes["flying"].rates == ("2",)
    assert scopes["flying"].algorithm == "concurrent"
    assert scopes["moody"].rates is None
    assert scopes["moody"].rate_function == f"{__name__}.rates_of"
    assert scopes["free"].rates is None
    assert scopes["free"].rate_function is None
    assert scopes["banned"].ban == "1h after 1 denied windows, at most 1d"
    assert scopes["signin.ip64"].family == "signin"
    assert scopes["watched"].mode == "shadow"

    assert scopes["inline"].origin == f"{__name__}.inline"
    assert scopes["of-get"].views[0].route == "/handlers/"
    (unnamed_scope, companion) = [scope for scope in scopes.values() if scope.origin.endswith(".unnamed")]
    assert companion.scope == f"{unnamed_scope.scope}.ceiling"
    assert companion.rates == ("12/m",)
    assert companion.family == unnamed_scope.scope
    assert unnamed_scope.views[0].url_name == "app:unnamed"
    assert unnamed_scope.methods == ("POST",)
    assert get_config().family(companion.scope)[0].name == companion.scope
    assert scopes["inline"].as_dict()["views"][0]["route"] == "/inline/"


def test_a_project_without_urls_has_scopes_all_the_same(here: Any, settings: Any) -> None:
    del settings.ROOT_URLCONF
    settings.RATELIMIT_KV = {"SCOPES": {"emails": "100/h"}}
    hit("emails", "user:1")
    assert [scope.scope for scope in scopes_in_force(get_config())] == ["emails"]
    assert len(listed()) == reset_all() == 1


# ── Store facts ───────────────────────────────────────────────────────────────────────────────────────────


def test_store_facts(use_cache: Any) -> None:
    use_cache("locmem")
    facts = inspection.store_facts("default")
    assert (facts.alias, facts.store) == ("default", "LocMemCache")
    assert (facts.exact, facts.shared, facts.survives_restart, facts.lists) == (True, False, False, False)
    use_cache("database-sqlite", alias="rows")
    facts = inspection.store_facts("rows")
    assert (facts.exact, facts.shared, facts.survives_restart, facts.lists) == (True, True, True, True)


def test_the_table_of_stores_has_a_row_for_each() -> None:
    title, line, *rows = inspection.facts_table_markdown().splitlines()
    assert title.startswith("| Store | Exact |")
    assert set(line) <= set("| -")
    assert len(rows) == len(store_classes())
    assert {row.count("|") for row in (title, line, *rows)} == {7}
    assert rows[0].startswith("| LocMemCache | yes | no | no | no |")
    assert rows[-1].startswith("| any other cache | no |")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0s"),
        (45, "45s"),
        (60, "1m"),
        (3552, "59m 12s"),
        (3600, "1h"),
        (3601, "1h"),
        (97200, "1d 3h"),
        (86460, "1d"),
    ],
)
def test_durations_for_people(seconds: int, words: str) -> None:
    assert inspection.duration(seconds) == words


def test_the_cache_itself_agrees(here: Any) -> None:
    hit("named", "user:42", cost=2)
    (key,) = (key for key in caches["default"]._cache if ":f60:" in key)
    assert caches["default"].get(key.removeprefix(":1:")) == listed()["named", "user:42", 60].count
