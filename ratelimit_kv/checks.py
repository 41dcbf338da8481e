"""The system checks: what ``manage.py check`` says about limits. Nothing, where they are switched off or in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from django.apps import apps
from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.urls import Resolver404, resolve
from django.utils import translation
from django.utils.module_loading import import_string

from . import client_ip, marks
from .algorithms import BAN, MICROSECOND
from .conf import MIDDLEWARE, SETTING, Config, Project, Where, as_given, load, read_project
from .identity import LONGEST, Part
from .marks import Mark
from .rates import Rate
from .scopes import ALGORITHMS, Scope, did_you_mean
from .stores import Store, get_store
from .stores.redis_link import TIMEOUT

__all__ = ["CHECKS", "check_rate_limits", "checks_table_markdown"]

CHECKS: dict[str, tuple[str, str]] = {
    "ratelimit_kv.E001": (
        "A setting is wrong",
        "An option that does not exist, or a value that cannot be used. The middleware refuses to start with it.",
    ),
    "ratelimit_kv.E002": (
        "A view names an unknown scope",
        "A decorator somewhere in the URLconf names a scope that the settings do not define.",
    ),
    "ratelimit_kv.E003": (
        "One name, two limits",
        "Two different definitions have the same name and would count in each other's counters.",
    ),
    "ratelimit_kv.E004": (
        "Limits without the middleware",
        "Scopes have PATHS or URL_NAMES, which only the middleware looks at, and it is not in MIDDLEWARE.",
    ),
    "ratelimit_kv.E005": ("The middleware stands twice", "MIDDLEWARE lists the middleware more than once."),
    "ratelimit_kv.E006": ("The cache cannot be used", "The alias that counters shall live in does not exist or work."),
    "ratelimit_kv.E007": (
        "The cache cannot run this",
        "The cache of a scope cannot run its ALGORITHM or BAN in one step.",
    ),
    "ratelimit_kv.E008": (
        "Leases exceed the limit",
        "LEASE times PROCESSES is more than the limit: some processes would find nothing left to lease.",
    ),
    "ratelimit_kv.E009": (
        "Keys are too long",
        "With this KEY_PREFIX, PREFIX and name, keys can be longer than memcached (250) or a database (255) takes.",
    ),
    "ratelimit_kv.W001": (
        "Each process counts for itself",
        "LocMemCache with DEBUG off: the real limit is the limit times the number of processes.",
    ),
    "ratelimit_kv.W002": ("Nothing is counted", "DummyCache keeps nothing, so nobody is ever limited."),
    "ratelimit_kv.W003": (
        "Each host counts for itself",
        "FileBasedCache with DEBUG off: right on one host, but each further host has counters of its own.",
    ),
    "ratelimit_kv.W004": (
        "A cache that we do not know",
        "With DEBUG off: whether parallel hits are counted exactly is up to this cache.",
    ),
    "ratelimit_kv.W005": (
        "Counters are thrown away",
        "MAX_ENTRIES is so small that a client can push his own counter out of the cache by making others.",
    ),
    "ratelimit_kv.W006": (
        "Others use the alias",
        "Sessions, pages or cached data share a cache that evicts entries, and push counters out.",
    ),
    "ratelimit_kv.W007": (
        "No socket timeout",
        "The cache's server may hang for long or for ever before the limiter notices, with every request behind it.",
    ),
    "ratelimit_kv.W008": (
        "Two aliases, one pool",
        "django-redis and django-valkey keep one pool a URL: of two aliases with it, one gets the other's options.",
    ),
    "ratelimit_kv.W009": (
        "Hits are rolled back",
        "Counted inside ATOMIC_REQUESTS, in the same database: a view that fails gives its hits back.",
    ),
    "ratelimit_kv.W010": (
        "Nobody says who the user is",
        "A key reads the user or the session, and the middleware of Django that knows it is missing.",
    ),
    "ratelimit_kv.W011": (
        "Another middleware decides first",
        "A middleware with a process_view stands above ours and may answer before requests are counted.",
    ),
    "ratelimit_kv.W012": (
        "Refusals without CORS headers",
        "The middleware of corsheaders stands below ours, so browsers hide our 429 from scripts.",
    ),
    "ratelimit_kv.W013": (
        "Clients choose their own counter",
        "A key has a part that a client makes up, without CEILING or another limit by address in the same place.",
    ),
    "ratelimit_kv.W014": (
        "Nothing is there",
        "A path or the name of a URL, where a scope shall apply or be exempt, leads to no view.",
    ),
    "ratelimit_kv.W015": (
        "Everyone is trusted",
        "TRUSTED_PROXIES or EXEMPT_IPS holds all addresses there are.",
    ),
    "ratelimit_kv.W016": (
        "The user is not known yet",
        "A scope of the middleware counts users, on views of REST framework that find out who it is by themselves.",
    ),
    "ratelimit_kv.W017": (
        "A key that is never asked",
        "An alternative of a key stands behind one that always answers.",
    ),
    "ratelimit_kv.W018": (
        "Switched off from outside",
        "A variable of the environment has switched a scope off.",
    ),
}
"""Id -> what it is about, and what that means."""

README = "README has a table of the settings."
LOCMEM = "django.core.cache.backends.locmem.LocMemCache"
DATABASE = "django.core.cache.backends.db.DatabaseCache"
FILES = "django.core.cache.backends.filebased.FileBasedCache"
DUMMY = "django.core.cache.backends.dummy.DummyCache"
MEMCACHED = "django.core.cache.backends.memcached.BaseMemcachedCache"
PYMEMCACHE = "django.core.cache.backends.memcached.PyMemcacheCache"
REDIS = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = ("django_redis.cache.RedisCache", "django_valkey.base.BaseValkeyCache")
"""They share one pool for a URL, and write their options in capitals."""

FEW_ENTRIES = 10_000
"""Fewer different callers than this are made up in a moment."""
PATIENCE = 5.0
"""Seconds that nobody should wait for a counter."""
LATE = 4_102_444_800 * MICROSECOND
"""The year 2100, when the numbers of windows are as long as we care for."""


def finding(number: str, message: str, hint: str) -> CheckMessage:
    """A message for the check framework: an error or a warning, by the letter of its number."""
    kind = checks.Error if number.startswith("E") else checks.Warning
    return kind(message, hint=hint, id=f"ratelimit_kv.{number}")


@checks.register("ratelimit_kv")
def check_rate_limits(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
    """Everything that is wrong with the limits of this project, or will not do what it looks like."""
    config, problems = load()
    if problems:
        return [finding("E001", str(problem), README) for problem in problems]
    if not config.enabled:
        return []
    site = Site(config, read_project())
    if not config.families and not any(marks.marks_of(view) for _, _, view in site.urls):
        return []
    return [message for check in SITE_CHECKS for message in check(site)]


def checks_table_markdown() -> str:
    """The table of all checks, for README."""
    rows = (f"| `{number}` | {title} | {meaning} |" for number, (title, meaning) in CHECKS.items())
    return "\n".join(("| id | finding | what it means |", "|---|---|---|", *rows))


# ------------------------------------------------------------------------------------------------- what is looked at


def ancestry(found: Any) -> frozenset[str]:
    """The dotted names of a class and of all that it inherits from, so that subclasses count as what they are."""
    return frozenset(f"{each.__module__}.{each.__qualname__}" for each in getattr(found, "__mro__", ()))


class Layer(NamedTuple):
    """One entry of MIDDLEWARE."""

    path: str
    ancestry: frozenset[str]
    sees_view: bool
    """Whether it has a ``process_view``."""


@dataclass(frozen=True, slots=True)
class Cache:
    """One alias of CACHES that counters live in."""

    alias: str
    entry: Mapping[str, Any]
    ancestry: frozenset[str]
    store: Store | None
    problem: str
    """Why there is no store."""

    def is_a(self, *backends: str) -> bool:
        """Whether it is one of these backends, or a subclass of one."""
        return not self.ancestry.isdisjoint(backends)

    @property
    def options(self) -> Mapping[str, Any]:
        """OPTIONS."""
        return self.entry.get("OPTIONS") or {}

    def __str__(self) -> str:
        return f"CACHES[{self.alias!r}]"


class View(NamedTuple):
    """One URL pattern whose view has limits of its own."""

    route: str
    name: str
    view: Any
    uses: tuple[tuple[Mark, tuple[Scope, ...]], ...]

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """All of them."""
        return tuple(scope for _, scopes in self.uses for scope in scopes)


class Site:
    """A project, as far as its limits are concerned."""

    def __init__(self, config: Config, project: Project) -> None:
        self.config = config
        self.project = project
        self.is_live = not project.debug
        """Whether this is more than somebody's own machine."""
        self.layers = [_layer(path) for path in project.middleware]
        self.ours = [number for number, layer in enumerate(self.layers) if MIDDLEWARE in layer.ancestry]
        """Where our middleware stands."""
        self.unknown: dict[str, None] = {}
        """What is wrong with the scopes that views name."""
        self.views: list[View] = []
        for route, name, view in self.urls:
            uses = []
            for mark in marks.marks_of(view):
                try:
                    uses.append((mark, config.of_mark(mark, view)))
                except ImproperlyConfigured as error:
                    self.unknown[f"{marks.view_name(view)}: {error}"] = None
            if uses:
                self.views.append(View(route, name, view, tuple(uses)))

    @cached_property
    def urls(self) -> list[tuple[str, str, Any]]:
        """Route, name and view of every URL pattern."""
        languages = sorted(self.config.languages)
        try:
            # The prefix of i18n_patterns is that of the language which is active.
            with translation.override(languages[0]) if languages else nullcontext():
                found = list(marks.views())
        except Exception:  # noqa: BLE001 - importing it runs the project's code; Django's own checks report what that raised
            return []
        return [(_plain(route, self.config), name, view) for route, name, view in found]

    @cached_property
    def scopes(self) -> list[Scope]:
        """All that count: of the settings, and of views."""
        inline = (scope for view in self.views for mark, scopes in view.uses if mark.is_inline for scope in scopes)
        found = {scope.name: scope for scope in (*inline, *self.config.scopes)}
        return [scope for scope in found.values() if scope.mode != "off" and (scope.rates is not None or scope.rate)]

    @cached_property
    def caches(self) -> list[Cache]:
        """The aliases that they count in."""
        return [_cache(alias, self.project.caches) for alias in sorted({scope.cache for scope in self.scopes})]

    def has_layer(self, dotted: str) -> bool:
        """Whether MIDDLEWARE has this class or a subclass."""
        return any(dotted in layer.ancestry for layer in self.layers)

    def applying(self, scope: Scope, route: str, name: str) -> tuple[Scope, ...]:
        """The settings' scopes that the middleware decides for a view, for the methods of ``scope``."""
        methods = scope.methods or {"GET", "POST"}
        found = [set(self.config.scopes_for(route, name, method)) for method in methods]
        return tuple(set.intersection(*found)) if self.ours else ()


def _layer(path: str) -> Layer:
    try:
        found = import_string(path)
    except Exception:  # noqa: BLE001 - importing runs the project's code; Django itself reports what that raised
        return Layer(path, frozenset((path,)), False)
    return Layer(path, ancestry(found) | {path}, hasattr(found, "process_view"))


def _cache(alias: str, entries: Mapping[str, Any]) -> Cache:
    entry = entries.get(alias)
    if entry is None:
        return Cache(alias, {}, frozenset(), None, f"there is no such alias.{did_you_mean(alias, entries)}")
    try:
        backend = import_string(entry["BACKEND"])
        return Cache(alias, entry, ancestry(backend), get_store(alias), "")
    except Exception as error:  # noqa: BLE001 - a cache that cannot be made fails in any way it likes
        return Cache(alias, entry, frozenset(), None, f"{type(error).__name__}: {error}")


def _plain(route: str, config: Config) -> str:
    """A route as a path, as far as it is one: without the anchors of regular expressions, and without a language."""
    for anchor in ("^", "$", "\\Z"):
        route = route.replace(anchor, "")
    first, _, rest = route[1:].partition("/")
    return f"/{rest}" if first in config.languages else route


def _names(words: Iterable[str]) -> str:
    """A few names for a message, not all of many."""
    listed = sorted(set(words))
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _scopes(scopes: Iterable[Scope]) -> str:
    names = {scope.name for scope in scopes}
    return f"scope{'s' if len(names) > 1 else ''} {_names(map(repr, names))}"


# ---------------------------------------------------------------------------------------------------------- the scopes


def names_are_known(site: Site) -> Iterator[CheckMessage]:
    for problem in site.unknown:
        yield finding("E002", problem, "Define it in the settings, or give the decorator a rate.")


def names_are_defined_once(site: Site) -> Iterator[CheckMessage]:
    known = {scope.name: (scope, f"{SETTING}['SCOPES']") for scope in site.config.scopes}
    said: set[str] = set()
    for view in site.views:
        for mark, scopes in view.uses:
            for scope in scopes if mark.is_inline else ():
                first, where = known.setdefault(scope.name, (scope, scope.origin))
                if replace(first, origin="") != replace(scope, origin="") and scope.name not in said:
                    said.add(scope.name)
                    yield finding(
                        "E003",
                        f"The scope {scope.name!r} is defined in {where} and, in another way, on {scope.origin}.",
                        "Give one of them another name, with scope='...'; or define it in the settings and name it.",
                    )


def middleware_is_there(site: Site) -> Iterator[CheckMessage]:
    scopes = [where.scope for where in site.config.site]
    if scopes and not site.ours:
        yield finding(
            "E004",
            f"In {_scopes(scopes)}, PATHS and URL_NAMES have no effect without the middleware.",
            f"Put '{MIDDLEWARE}' first into MIDDLEWARE, after SecurityMiddleware.",
        )
    if len(site.ours) > 1:
        yield finding(
            "E005",
            f"MIDDLEWARE lists the middleware {len(site.ours)} times: "
            f"{', '.join(site.layers[number].path for number in site.ours)}.",
            "Keep the first one.",
        )


def leases_fit(site: Site) -> Iterator[CheckMessage]:
    processes = site.config.processes or 1
    for scope in site.scopes:
        smallest = min((rate.limit for rate in scope.rates or ()), default=0)
        if scope.lease > 1 and scope.lease * processes > smallest > 0:
            yield finding(
                "E008",
                f"Scope {scope.name!r}: {processes} processes that lease {scope.lease} each need more than the limit {smallest}.",
                f"Set LEASE to {max(smallest // (processes * 2), 1)} or less.",
            )


def keys_are_asked(site: Site) -> Iterator[CheckMessage]:
    for scope in site.scopes:
        for number, alternative in enumerate(scope.key.alternatives[:-1]):
            if _always(alternative):
                words = scope.key.text.split("|")
                asked = [word for word, parts in zip(words, scope.key.alternatives, strict=True) if not _always(parts)]
                yield finding(
                    "W017",
                    f"Scope {scope.name!r}: in the key {scope.key.text!r}, {words[number]!r} always answers, "
                    f"so {'|'.join(words[number + 1 :])!r} is never asked.",
                    f"Write {'|'.join((*asked, words[number]))!r}.",
                )
                break


def _always(alternative: tuple[Part, ...]) -> bool:
    """Whether every request has such an identity."""
    return all(part.kind in ("ip", "everyone") for part in alternative)


def scopes_are_on(site: Site) -> Iterator[CheckMessage]:
    for variable, name in site.config.switched_off:
        yield finding(
            "W018",
            f"{variable}=0 in the environment has switched the scope {name!r} off.",
            f"Remove {variable}, or set it to a limit, when it shall count again.",
        )


def addresses_are_not_all_trusted(site: Site) -> Iterator[CheckMessage]:
    given = as_given()
    for path, problem in client_ip.warnings(given.get("TRUSTED_PROXIES", ()), given.get("EXEMPT_IPS", ())):
        yield finding("W015", f'{SETTING}["{path}"]: {problem}', "List no more than the networks that are meant.")


# ----------------------------------------------------------------------------------------------------------- the caches


def caches_work(site: Site) -> Iterator[CheckMessage]:
    for cache in site.caches:
        users = [scope for scope in site.scopes if scope.cache == cache.alias]
        if cache.store is None:
            yield finding(
                "E006",
                f"{cache}, for {_scopes(users)}, cannot be used: {cache.problem}",
                "Name an alias that works, in CACHE.",
            )
            continue
        for scope in users:
            for option, kind in (("ALGORITHM", scope.algorithm), ("BAN", BAN if scope.ban else scope.algorithm)):
                if kind not in cache.store.kinds and (option == "ALGORITHM" or kind == BAN):
                    word = next((word for word, known in ALGORITHMS.items() if known == kind), "")
                    yield finding(
                        "E007",
                        f"Scope {scope.name!r}: {cache} ({cache.entry['BACKEND']}) cannot run "
                        f"{f'{option} {word!r}' if word else option}.",
                        "Redis, Valkey and DatabaseCache run all of them. Set CACHE to such an alias.",
                    )


def keys_fit(site: Site) -> Iterator[CheckMessage]:
    for cache in site.caches:
        room = 250 if cache.is_a(MEMCACHED) else 255 if cache.is_a(DATABASE) else 0
        for scope in site.scopes if room and cache.store else ():
            longest = max(map(len, _keys(site.config, scope, cache)), default=0) if scope.cache == cache.alias else 0
            if longest > room:
                yield finding(
                    "E009",
                    f"Scope {scope.name!r}: keys in {cache} can have {longest} characters, and {room} is all it takes.",
                    f"Shorten its KEY_PREFIX, {SETTING}['PREFIX'] or the scope's name by {longest - room} characters.",
                )


def _keys(config: Config, scope: Scope, cache: Cache) -> Iterator[str]:
    """The keys of a scope for the longest identity there is, as they are in the cache."""
    function = cache.entry.get("KEY_FUNCTION")
    prefix, version = cache.entry.get("KEY_PREFIX", ""), cache.entry.get("VERSION", 1)
    if isinstance(function, str):
        function = import_string(function)
    for each in (scope, config.for_options(scope)):
        plan = each.plan or each.make_plan([Rate(1, 1)])
        for counter in each.counters(plan, "x" * LONGEST, 1, LATE, 0, 0):
            yield str(function(counter.key, prefix, version)) if function else f"{prefix}:{version}:{counter.key}"


def caches_count(site: Site) -> Iterator[CheckMessage]:
    for cache in site.caches:
        own = f"Set {SETTING}['CACHE'] to an alias on Redis, Valkey, memcached or a database."
        if cache.store is None:
            continue
        if cache.is_a(DUMMY):
            yield finding("W002", f"{cache} keeps nothing, so nothing is limited.", f"{own} Or set ENABLED to False.")
        elif not site.is_live:
            continue
        elif not cache.store.is_shared:
            yield finding(
                "W001",
                f"{cache} ({cache.store.name}) counts in each process apart, so N processes let N times the limit pass.",
                own,
            )
        elif type(cache.store).is_exact is False:  # the class's word: a Redis would have to be asked what it is
            yield finding(
                "W004",
                f"{cache} is a cache whose counting we do not know ({cache.entry['BACKEND']}): "
                "hits at the same moment may be lost.",
                own,
            )
        if site.is_live and cache.is_a(FILES):
            yield finding(
                "W003",
                f"{cache} counts in the files of one host; each further host counts for itself.",
                f"{own} With a single host, silence this check.",
            )


def counters_stay(site: Site) -> Iterator[CheckMessage]:
    for cache in site.caches if site.is_live else ():
        if cache.is_a(LOCMEM, DATABASE, FILES):
            entries = _max_entries(cache)
            if entries < FEW_ENTRIES:
                who = "each new counter" if cache.is_a(LOCMEM) else "whatever else is written to it"
                yield finding(
                    "W005",
                    f"{cache} throws entries away beyond {entries}, so {who} may erase a counter that denies.",
                    'Write "OPTIONS": {"MAX_ENTRIES": 1_000_000} into it, and let nothing else use it.',
                )
        if cache.is_a(DATABASE, FILES, MEMCACHED):
            others = []
            if cache.alias == site.project.session_cache:
                others.append("sessions")
            if cache.alias == site.project.page_cache and site.has_layer(
                "django.middleware.cache.UpdateCacheMiddleware"
            ):
                others.append("pages")
            if cache.alias == "default":
                others.append("all that does not name another alias")
            if others:
                yield finding(
                    "W006",
                    f"{cache} evicts entries and is also used by {' and '.join(others)}, which can push counters out.",
                    f"Give the limiter an alias of its own and set {SETTING}['CACHE'] to it.",
                )


def _max_entries(cache: Cache) -> int:
    """As BaseCache reads it."""
    entries = cache.entry.get("max_entries", cache.options.get("MAX_ENTRIES", 300))
    try:
        return int(entries)
    except (ValueError, TypeError):
        return 300


def servers_have_timeouts(site: Site) -> Iterator[CheckMessage]:
    for cache in site.caches if site.is_live else ():
        words: Sequence[str]
        if cache.is_a(PYMEMCACHE):
            words = ("timeout", "connect_timeout")
        elif cache.is_a(REDIS):
            words = ("socket_timeout",)
        elif cache.is_a(*DJANGO_REDIS):
            words = ("SOCKET_TIMEOUT",)
        else:
            continue
        waits = [_timeout(cache, word) for word in words]
        hint = f'Write "OPTIONS": {{{", ".join(f"{word!r}: {TIMEOUT}" for word in words)}}} into it.'.replace("'", '"')
        if None in waits and cache.is_a(PYMEMCACHE):
            yield finding("W007", f"{cache} waits without end for a server that hangs.", hint)
        elif None in waits:
            yield finding(
                "W007",
                f"{cache} sets no {words[0]}. The limiter waits {TIMEOUT} s of its own accord, too short for a server far "
                "away, whose late answers would let requests pass; everything else on this alias may hang.",
                hint,
            )
        elif (longest := max(wait for wait in waits if wait is not None)) > PATIENCE:
            yield finding("W007", f"{cache} lets requests wait {longest:g} s for a server that hangs.", hint)


def _timeout(cache: Cache, word: str) -> float | None:
    """Seconds; None without one. Where it stands only in the URL, it is taken to be fine."""
    pool = cache.options.get("CONNECTION_POOL_KWARGS") or {}
    value = cache.options.get(word) or pool.get(word.lower())
    if not value and f"{word.lower()}=" in str(cache.entry.get("LOCATION")):
        return 0.0
    return float(value) if isinstance(value, int | float) and value else None


POOL_OPTIONS = (
    *("USERNAME", "PASSWORD", "PARSER_CLASS", "SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT"),
    *("CONNECTION_FACTORY", "CONNECTION_POOL_CLASS", "CONNECTION_POOL_KWARGS"),
)
"""What django-redis makes a pool of, besides the URL."""


def pools_are_their_own(site: Site) -> Iterator[CheckMessage]:
    for cache in site.caches:
        for alias, entry in site.project.caches.items() if cache.is_a(*DJANGO_REDIS) else ():
            is_alike = entry.get("BACKEND") == cache.entry["BACKEND"]
            if alias == cache.alias or not is_alike or not set(_urls(entry)) & set(_urls(cache.entry)):
                continue
            options = entry.get("OPTIONS") or {}
            different = [word for word in POOL_OPTIONS if options.get(word) != cache.options.get(word)]
            if different:
                yield finding(
                    "W008",
                    f"{cache} and CACHES[{alias!r}] have the same URL but not the same {', '.join(different)}: "
                    "whichever is used first decides for both.",
                    "Give them the same OPTIONS, or another database number in the URL of one.",
                )


def _urls(entry: Mapping[str, Any]) -> list[str]:
    location = entry.get("LOCATION") or ()
    return location.split(",") if isinstance(location, str) else list(location)


def hits_are_not_rolled_back(site: Site) -> Iterator[CheckMessage]:
    for cache in site.caches:
        if cache.store is None or not cache.is_a(DATABASE):
            continue
        # As the cache itself asks, without making a connection.
        model = import_string(cache.entry["BACKEND"])(cache.entry.get("LOCATION", ""), {}).cache_model_class
        database = router.db_for_write(model)
        if not connections.settings.get(database, {}).get("ATOMIC_REQUESTS"):
            continue
        inside = [
            marks.view_name(view.view)
            for view in site.views
            if any(scope.cache == cache.alias for scope in view.scopes)
            and database not in getattr(view.view, "_non_atomic_requests", ())
            and not {mark for mark, _ in view.uses} <= set(marks.hoistable(view.view))
        ]
        if not site.ours or inside:
            views = f", on {_names(inside)}" if site.ours else ""
            how = "@rate_limit outermost on the view" if site.ours else f"'{MIDDLEWARE}' first into MIDDLEWARE"
            yield finding(
                "W009",
                f"{cache} lives in the database {database!r}, whose ATOMIC_REQUESTS also takes back the hits of a view "
                f"that fails{views}.",
                f"Put {how}, so that it counts before that; or keep the cache's table in a database of its own.",
            )


# ------------------------------------------------------------------------------------------------- the project around us


def callers_are_known(site: Site) -> Iterator[CheckMessage]:
    # Views of REST framework and Ninja say themselves who is asking.
    frameworks = [view for _, _, view in site.urls if hasattr(view, "cls")]
    frameworks += [operation for _, _, view in site.urls for operation in marks.operations(view)]
    on_views = (scope for view in site.views if view.view not in frameworks for scope in view.scopes)
    asked = {scope.name: scope for scope in (*(where.scope for where in site.config.site), *on_views)}
    for kind, dotted in (
        ("user", "django.contrib.auth.middleware.AuthenticationMiddleware"),
        ("session", "django.contrib.sessions.middleware.SessionMiddleware"),
    ):
        scopes = [
            scope
            for scope in asked.values()
            if any(part.kind == kind for alternative in scope.key.alternatives for part in alternative)
            # The default key is right for a project without users, too.
            and (scope.key.text != "user|ip" or apps.is_installed("django.contrib.auth"))
        ]
        if scopes and not site.has_layer(dotted):
            yield finding(
                "W010",
                f"The key of {_scopes(scopes)} reads the {kind}, but '{dotted}' is not in MIDDLEWARE.",
                "Add it, or write a KEY that does without.",
            )


def order_is_right(site: Site) -> Iterator[CheckMessage]:
    if not site.ours:
        return
    first = site.ours[0]
    if above := [layer.path for layer in site.layers[:first] if layer.sees_view]:
        yield finding(
            "W011",
            f"{_names(above)} {'have' if len(above) > 1 else 'has'} a process_view and "
            f"stand{'' if len(above) > 1 else 's'} above the middleware of the limits: "
            "what is answered there is not limited in time.",
            f"Put '{site.layers[first].path}' above, after SecurityMiddleware.",
        )
    cors = "corsheaders.middleware.CorsMiddleware"
    if any(cors in layer.ancestry for layer in site.layers[first:]):
        yield finding(
            "W012",
            "Refusals have no CORS headers, since the middleware of corsheaders stands below that of the limits.",
            f"Put '{cors}' above '{site.layers[first].path}'.",
        )


def clients_cannot_choose(site: Site) -> Iterator[CheckMessage]:
    for scope in site.scopes:
        if not scope.key.is_client_chosen or scope.ceiling is not None or scope.mode != "enforce":
            continue
        bare = [
            marks.view_name(view.view)
            for view in site.views
            if any(each.name == scope.name for each in view.scopes)
            and not any(
                _counts_addresses(other, scope)
                for other in (*view.scopes, *site.applying(scope, view.route, view.name))
            )
        ]
        if scope.has_where and not any(_covers(where, scope) for where in site.config.site):
            bare.append("the places in its settings")
        if bare:
            yield finding(
                "W013",
                f"Scope {scope.name!r}: clients make up a part of the key {scope.key.text!r}, and with each new value have a new "
                f"budget, on {_names(bare)}.",
                "Add a CEILING, for example 5, or a limit by 'ip' in the same places.",
            )


def _counts_addresses(other: Scope, scope: Scope) -> bool:
    """Whether another scope limits each address, for every request that this one counts."""
    if other.name == scope.name or other.mode != "enforce" or other.key.is_client_chosen:
        return False
    if other.methods is not None and not (scope.methods is not None and scope.methods <= other.methods):
        return False
    return any(len(alternative) == 1 and alternative[0].kind == "ip" for alternative in other.key.alternatives)


def _covers(where: Where, scope: Scope) -> bool:
    other = where.scope
    if not _counts_addresses(other, scope):
        return False
    if set(scope.paths) & set(other.exempt_paths) or scope.url_names & other.exempt_url_names:
        return False
    return where.everywhere or (set(scope.paths) <= set(other.paths) and scope.url_names <= other.url_names)


def places_exist(site: Site) -> Iterator[CheckMessage]:
    if not site.urls:
        return
    names = {name or marks.view_name(view) for _, name, view in site.urls}
    said: set[tuple[str, str]] = set()
    for scope in site.config.scopes:
        wrong = [
            (option, name, did_you_mean(name, names))
            for option, listed in (("URL_NAMES", scope.url_names), ("EXEMPT_URL_NAMES", scope.exempt_url_names))
            for name in sorted(listed - names)
        ]
        wrong += [("PATHS", path, "") for path in scope.paths if not _leads_somewhere(path, site)]
        for path in scope.exempt_paths:
            # A path without a view may be exempt: its 404 would be counted. But one that is a slash off is a mistake.
            other = path.rstrip("/") if path.endswith("/") else f"{path}/"
            if not path.endswith("*") and not _resolves(path) and _resolves(other):
                wrong.append(("EXEMPT_PATHS", path, f" Did you mean {other!r}?"))
        for option, given, guess in wrong:
            where = f'{SETTING}["SCOPES"]["{scope.family or scope.name}"]["{option}"]'
            if (where, given) not in said:
                said.add((where, given))
                yield finding("W014", f"{where}: {given!r} leads to no view.{guess}", "Correct it, or take it out.")


def _leads_somewhere(path: str, site: Site) -> bool:
    """Whether some view can be reached by a path of PATHS, in one of the spellings that they match."""
    if path.endswith("*"):
        start = path[:-1].casefold()
        for route, _, _ in site.urls:
            fixed = _fixed(route)
            reaches = fixed != route and start.startswith(fixed.casefold())
            if reaches or f"{fixed}/".casefold().startswith(start):
                return True
        return False
    bare = path.rstrip("/")
    for spelling in dict.fromkeys((path, bare or "/", f"{bare}/", bare.lower() or "/", f"{bare.lower()}/")):
        if _resolves(spelling):
            return True
        for language in site.config.languages:
            with translation.override(language):
                if _resolves(spelling) or _resolves(f"/{language}{spelling}"):
                    return True
    return False


def _fixed(route: str) -> str:
    """The start of a route that is the same for all its paths."""
    for number, char in enumerate(route):
        if char in "<([\\.*+?":
            return route[:number]
    return route


def _resolves(path: str) -> bool:
    try:
        resolve(path)
    except Resolver404:
        return False
    except Exception:  # noqa: BLE001 - a converter of the project fails: so the path has come as far as to a route
        return True
    return True


def users_are_known_in_time(site: Site) -> Iterator[CheckMessage]:
    for where in site.config.site if site.ours else ():
        scope = where.scope
        if not any(part.kind == "user" for alternative in scope.key.alternatives for part in alternative):
            continue
        late = [
            marks.view_name(view)
            for route, name, view in site.urls
            if _authenticates(view) and scope in site.applying(scope, route, name)
        ]
        if late:
            yield finding(
                "W016",
                f"Scope {scope.name!r} counts users before the view runs, where those who come with a token are still anonymous: "
                f"{_names(late)}.",
                "Name the scope on these views, with @rate_limit below @api_view or as a throttle, and exempt their URL.",
            )


def _authenticates(view: Any) -> bool:
    """Whether it is a view of REST framework that finds its user by more than Django's session."""
    session = "rest_framework.authentication.SessionAuthentication"
    classes = getattr(getattr(view, "cls", None), "authentication_classes", None) or ()
    return any(session not in ancestry(each) for each in classes)


SITE_CHECKS: tuple[Callable[[Site], Iterator[CheckMessage]], ...] = (
    names_are_known,
    names_are_defined_once,
    middleware_is_there,
    leases_fit,
    keys_are_asked,
    scopes_are_on,
    addresses_are_not_all_trusted,
    caches_work,
    keys_fit,
    caches_count,
    counters_stay,
    servers_have_timeouts,
    pools_are_their_own,
    hits_are_not_rolled_back,
    callers_are_known,
    order_is_right,
    clients_cannot_choose,
    places_exist,
    users_are_known_in_time,
)
