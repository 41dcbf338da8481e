"""Settings, read once into one frozen Config. Nothing else reads settings."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver

from . import client_ip, marks
from .algorithms import CONCURRENT
from .callables import Function, load_function
from .client_ip import ClientIP
from .identity import Identities
from .marks import Mark
from .rates import Rate, RateError
from .scopes import (
    OPTIONS,
    Defaults,
    Problem,
    Scope,
    as_options,
    boolean,
    did_you_mean,
    integer,
    number,
    one_of,
    or_none,
    parse_family,
    placed,
    quote,
)

__all__ = [
    "MIDDLEWARE",
    "SETTING",
    "Config",
    "Project",
    "Remember",
    "as_given",
    "get_config",
    "load",
    "read_project",
]

logger = logging.getLogger("ratelimit_kv")

SETTING = "RATELIMIT_KV"
READS = frozenset(
    (
        SETTING,
        "CACHES",
        "DEBUG",
        "LANGUAGES",
        "LANGUAGE_CODE",
        "ROOT_URLCONF",
        "SECRET_KEY",
        "SESSION_COOKIE_NAME",
        "USE_I18N",
        "MIDDLEWARE",
    )
)
"""Settings that a Config depends on."""
MIDDLEWARE = "ratelimit_kv.middleware.RateLimitMiddleware"
PATHS_KEPT = 1024
"""Paths of which it is known which scopes apply. Those that were not asked for lately go first."""
LONGEST_KEPT = 200
"""Characters of such a path: clients choose it, and none is to make us larger."""


class Remember(NamedTuple):
    """REMEMBER_DENIED."""

    entries: int = 10_000
    seconds: float = 5.0


@dataclass(frozen=True, eq=False)
class Config:
    """All settings in force."""

    enabled: bool = True
    defaults: Defaults = field(default_factory=Defaults)
    families: Mapping[str, tuple[Scope, ...]] = field(default_factory=dict)
    """Name as written in SCOPES -> the scopes that it makes."""
    switched_off: tuple[tuple[str, str], ...] = ()
    """Variables of the environment that switch a scope off, and its name."""
    headers: str = "draft"
    identities: Identities = None  # type: ignore[assignment]
    remember: Remember | None = field(default_factory=Remember)
    breaker_failures: int = 3
    breaker_seconds: float = 5.0
    processes: int | None = None
    response: Function | None = None
    exempt: Function | None = None
    has_exempt_ips: bool = False
    debug: bool = False
    has_middleware: bool = False
    languages: frozenset[str] = frozenset()
    """Language prefixes that a path may start with, lower-cased; empty without USE_I18N."""

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """Every scope of the settings, in their order."""
        return tuple(scope for family in self.families.values() for scope in family)

    @cached_property
    def has_exemptions(self) -> bool:
        """Whether a request may be exempt by EXEMPT or EXEMPT_IPS."""
        return self.has_exempt_ips or self.exempt is not None

    @cached_property
    def site(self) -> tuple[Where, ...]:
        """The scopes that settings apply somewhere, with what tells where."""
        return tuple(Where(scope) for scope in self.scopes if scope.has_where and scope.mode != "off")

    @cached_property
    def site_fails_closed(self) -> bool:
        """Whether some scope of the site denies when it cannot be judged."""
        return any(where.scope.on_error == "deny" for where in self.site)

    def scopes_for(self, path: str, url_name: str | None, method: str | None) -> tuple[Scope, ...]:
        """The settings' scopes that apply to a request. ``url_name`` is None for a request that no view was found for."""
        if len(path) > LONGEST_KEPT or len(method or "") > LONGEST_KEPT:
            return self._scopes_for(path, url_name, method)
        return self._latest_scopes(path, url_name, method)

    @cached_property
    def _latest_scopes(self) -> Callable[[str, str | None, str | None], tuple[Scope, ...]]:
        return lru_cache(PATHS_KEPT)(self._scopes_for)

    def _scopes_for(self, path: str, url_name: str | None, method: str | None) -> tuple[Scope, ...]:
        site = self.site
        if not site:
            return ()
        spellings: tuple[str, ...] | None = None
        found = []
        for where in site:
            scope = where.scope
            if scope.methods is not None and method not in scope.methods and method != "OPTIONS":
                continue
            if url_name not in scope.url_names:
                if where.everywhere:
                    pass
                elif not scope.paths:
                    continue
                else:
                    if spellings is None:
                        spellings = self._spellings(path)
                    if not where.matches(spellings):
                        continue
            if not is_exempt(scope, path, url_name):
                found.append(scope)
        return tuple(found)

    def _spellings(self, path: str) -> tuple[str, ...]:
        """The path as PATHS are compared: slashes folded, case folded, no trailing slash; also without its language."""
        plain = fold_path(path)
        first, _, rest = plain[1:].partition("/")
        return (plain, f"/{rest}") if first in self.languages else (plain,)

    def family(self, name: str) -> tuple[Scope, ...]:
        """The scopes of a name: of the settings, else of a decorated view. Raises ImproperlyConfigured if there is none."""
        try:
            return self.families[name]
        except KeyError:
            pass
        for scope in self.scopes:
            if scope.name == name:  # one member of a family, such as signin.account
                return (scope,)
        try:
            return self.decorated[name]
        except KeyError:
            pass
        try:
            return (self.members[name],)  # a member of a view's family, or what counts the OPTIONS requests of a scope
        except KeyError:
            known = [*self.families, *self.decorated]
            raise ImproperlyConfigured(
                f"There is no rate limit scope {name!r}.{did_you_mean(name, known)} "
                f"Scopes are {', '.join(sorted(known)) or 'none'}: write it into {SETTING}['SCOPES']."
            ) from None

    def views(self) -> Iterator[tuple[str, str, Any]]:
        """Route, name and callable of every URL pattern; none in a project without URLs, such as a worker of tasks."""
        return marks.views() if getattr(settings, "ROOT_URLCONF", None) else iter(())

    @cached_property
    def decorated(self) -> Mapping[str, tuple[Scope, ...]]:
        """Inline scopes by name, found by walking the URLconf."""
        found: dict[str, tuple[Scope, ...]] = {}
        for _, _, view in self.views():
            for mark in marks.marks_of(view):
                if mark.is_inline:
                    scopes = self.of_mark(mark, view)
                    found.setdefault(scopes[0].family, scopes)
        return found

    @cached_property
    def members(self) -> Mapping[str, Scope]:
        """Every scope that may have counters, by its own name: of the settings, of views, and those of their OPTIONS."""
        scopes = [*self.scopes, *(scope for family in self.decorated.values() for scope in family)]
        found: dict[str, Scope] = {}
        for scope in scopes:
            found.setdefault(scope.name, scope)
        for scope in scopes:
            if scope.methods is None:
                companion = self.for_options(scope)
                found.setdefault(companion.name, companion)
        return found

    @cached_property
    def _inline(self) -> dict[tuple[Mark, str], tuple[Scope, ...]]:
        return {}

    @cached_property
    def _named(self) -> dict[Mark, tuple[Scope, ...]]:
        return {}

    def of_mark(self, mark: Mark, view: Any) -> tuple[Scope, ...]:
        """The scopes of a mark on a view, made once. Raises ImproperlyConfigured for unknown names."""
        if mark.names:
            scopes = self._named.get(mark)
            if scopes is None:
                scopes = tuple(self._here(scope, mark) for name in mark.names for scope in self.family(name))
                self._named[mark] = scopes
            return scopes
        name = mark.name_on(view)
        scopes = self._inline.get((mark, name))
        if scopes is None:
            scopes = placed(mark.scopes, name, self.defaults, mark.given, marks.view_name(view))
            self._inline[mark, name] = scopes
        return scopes

    def _here(self, scope: Scope, mark: Mark) -> Scope:
        """A settings' scope as a decorator uses it: only cost and methods are the decorator's."""
        if mark.cost is not None:
            scope = replace(scope, cost=mark.cost)
        if mark.methods is not None:
            scope = replace(scope, methods=mark.methods)
        return scope

    @cached_property
    def _for_options(self) -> dict[Scope, Scope]:
        return {}

    def for_options(self, scope: Scope) -> Scope:
        """The counter that OPTIONS requests of a scope have, made once."""
        found = self._for_options.get(scope)
        if found is None:
            found = self._for_options[scope] = scope.for_options()
        return found


class Where:
    """Where a scope of the settings applies."""

    __slots__ = ("everywhere", "exact", "prefixes", "scope")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.everywhere = "*" in scope.paths or "/*" in scope.paths
        self.exact = {fold_path(path) for path in scope.paths if not path.endswith("*")}
        self.prefixes = tuple(re.sub("/{2,}", "/", path[:-1]).casefold() for path in scope.paths if path.endswith("*"))

    def matches(self, spellings: tuple[str, ...]) -> bool:
        """Whether one of a path's spellings is meant."""
        return any(
            path in self.exact or path.startswith(self.prefixes) or f"{path}/".startswith(self.prefixes)
            for path in spellings
        )


def fold_path(path: str) -> str:
    """One spelling for a path: repeated slashes are one, no trailing slash, case folded."""
    if "//" in path:
        path = re.sub("/{2,}", "/", path)
    return path.rstrip("/").casefold() or "/"


def is_exempt(scope: Scope, path: str, url_name: str | None) -> bool:
    """Whether EXEMPT_PATHS or EXEMPT_URL_NAMES of a scope name a request.

    Paths as they stand, a trailing star apart. No folding: an exemption must not be wider than it looks.
    """
    if url_name is not None and url_name in scope.exempt_url_names:
        return True
    return any(path.startswith(one[:-1]) if one.endswith("*") else path == one for one in scope.exempt_paths)


# --------------------------------------------------------------------------------------------------------- reading


def _prefix(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,32}", value):
        raise ValueError(f"{quote(value)} cannot start our keys. Write 1 to 32 of A-Z a-z 0-9 _ . -")
    return value


def _env_prefix(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*_", value):
        raise ValueError(f"{quote(value)} cannot start our variables. Write letters that end in _, like 'RATE_LIMIT_'.")
    return value


def _pair(value: Any, first: str, second: str, default: tuple[Any, Any]) -> tuple[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f'{quote(value)} is not a dict. Write {{"{first}": {default[0]}, "{second}": {default[1]}}}.')
    for word in value:
        if word not in (first, second):
            hint = did_you_mean(word, (first, second))
            raise ValueError(f"{quote(word)} is unknown.{hint} There are {first} and {second}.")
    return value.get(first, default[0]), value.get(second, default[1])


def _remember(value: Any) -> Remember:
    entries, seconds = _pair(value, "ENTRIES", "SECONDS", (10_000, 5))
    return Remember(integer(1, 10_000_000, "ENTRIES ")(entries), number(0.1, 60, "SECONDS ")(seconds))


def _breaker(value: Any) -> tuple[int, float]:
    failures, seconds = _pair(value, "FAILURES", "SECONDS", (3, 5))
    return integer(1, 1000, "FAILURES ")(failures), number(0.1, 3600, "SECONDS ")(seconds)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{quote(value)} is not text.")
    return value


def _alias(value: Any) -> str:
    if not isinstance(value, str) or value not in settings.CACHES:
        raise ValueError(_no_alias(value))
    return value


def _no_alias(value: Any) -> str:
    aliases = ", ".join(sorted(map(str, settings.CACHES)))
    return f"{quote(value)} is not an alias in CACHES.{did_you_mean(value, settings.CACHES)} There are {aliases}."


def _as_it_is(value: Any) -> Any:
    return value


TOP: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "ENABLED": (True, boolean),
    "CACHE": ("default", _alias),
    "PREFIX": ("rl", _prefix),
    "SCOPES": ({}, _as_it_is),
    "ON_ERROR": ("allow", OPTIONS["ON_ERROR"][1]),
    "HEADERS": ("draft", one_of("draft", "legacy", "none")),
    # Those of the address are judged together, by client_ip.
    "TRUSTED_PROXIES": ((), _as_it_is),
    "CLIENT_IP_HEADER": (None, _as_it_is),
    "IPV4_PREFIX": (32, _as_it_is),
    "IPV6_PREFIX": (64, _as_it_is),
    "HASH_IDENTITIES": (False, boolean),
    "HASH_KEY": (None, or_none(_text)),
    "REMEMBER_DENIED": ({"ENTRIES": 10_000, "SECONDS": 5}, or_none(_remember)),
    "BREAKER": ({"FAILURES": 3, "SECONDS": 5}, _breaker),
    "PROCESSES": (None, or_none(integer(1, 100_000, or_else=", or None"))),
    "RESPONSE": (None, or_none(load_function)),
    "EXEMPT": (None, or_none(load_function)),
    "EXEMPT_IPS": ((), _as_it_is),
    "ENV_PREFIX": (None, or_none(_env_prefix)),
}
"""Option of the top level -> default and parser, which raises ValueError."""


def as_given() -> Any:
    """``RATELIMIT_KV`` as it is written."""
    return getattr(settings, SETTING, {})


def load() -> tuple[Config, list[Problem]]:
    """Read the settings: the Config, and everything that is wrong with them (then the Config is not to be used)."""
    given = as_given()
    if not isinstance(given, Mapping):
        return Config(), [Problem(SETTING, f"{quote(given)} is not a dict. Write {SETTING} = {{'SCOPES': {{...}}}}.")]
    problems = [
        Problem(SETTING, f"{quote(option)} is not an option.{did_you_mean(option, TOP)}")
        for option in given
        if option not in TOP
    ]
    values: dict[str, Any] = {}
    for option, (default, parse) in TOP.items():
        try:
            values[option] = parse(given.get(option, default))
        except (ValueError, TypeError) as error:
            problems.append(Problem(f'{SETTING}["{option}"]', str(error)))
            values[option] = default  # so that what is wrong with the scopes is found as well
    address = [values[option] for option in ADDRESS]
    for path, message in client_ip.problems(*address):
        option, bracket, place = path.partition("[")
        problems.append(Problem(f'{SETTING}["{option}"]{bracket}{place}', message))
    secret = values["HASH_KEY"] or _secret_key(problems)
    defaults = Defaults(values["CACHE"], values["PREFIX"], values["ON_ERROR"])
    families = _families(values["SCOPES"], defaults, problems)
    switched_off: list[tuple[str, str]] = []
    if isinstance(values["SCOPES"], Mapping) and values["ENV_PREFIX"]:
        families, switched_off = _from_environment(families, values["SCOPES"], values["ENV_PREFIX"], defaults, problems)
    if problems:
        return Config(), problems
    failures, seconds = values["BREAKER"]
    config = Config(
        enabled=values["ENABLED"],
        defaults=defaults,
        families=families,
        switched_off=tuple(switched_off),
        headers=values["HEADERS"],
        identities=Identities.build(
            ClientIP.build(*address), secret, values["HASH_IDENTITIES"], settings.SESSION_COOKIE_NAME
        ),
        remember=values["REMEMBER_DENIED"],
        breaker_failures=failures,
        breaker_seconds=seconds,
        processes=values["PROCESSES"],
        response=values["RESPONSE"],
        exempt=values["EXEMPT"],
        has_exempt_ips=bool(values["EXEMPT_IPS"]),
        debug=settings.DEBUG,
        has_middleware=MIDDLEWARE in settings.MIDDLEWARE,
        languages=_languages(),
    )
    return config, problems


ADDRESS = ("TRUSTED_PROXIES", "CLIENT_IP_HEADER", "IPV4_PREFIX", "IPV6_PREFIX", "EXEMPT_IPS")
"""The options that client_ip judges, in the order of its arguments."""


def _secret_key(problems: list[Problem]) -> str:
    try:
        secret: str | bytes = settings.SECRET_KEY
    except ImproperlyConfigured:
        problems.append(Problem(f'{SETTING}["HASH_KEY"]', "there is no SECRET_KEY to use in its place. Write one."))
        return ""
    return secret if isinstance(secret, str) else secret.decode("latin-1")  # Django takes both


def _families(given: Any, defaults: Defaults, problems: list[Problem]) -> dict[str, tuple[Scope, ...]]:
    path = f'{SETTING}["SCOPES"]'
    if not isinstance(given, Mapping):
        problems.append(Problem(path, f"{quote(given)} is not a dict. Write {{'ask': '20/h'}}."))
        return {}
    families: dict[str, tuple[Scope, ...]] = {}
    owners: dict[str, str] = {}
    for name, options in given.items():
        here = f'{path}["{name}"]' if isinstance(name, str) else f"{path}[{quote(name)}]"
        scopes, found = parse_family(name, options, defaults, here)
        problems.extend(found)
        unknown = next((scope.cache for scope in scopes if scope.cache not in settings.CACHES), defaults.cache)
        if unknown != defaults.cache:  # what is wrong with that has been said
            problems.append(Problem(f'{here}["CACHE"]', _no_alias(unknown)))
        for scope in scopes:
            if scope.name in owners:
                problems.append(
                    Problem(here, f"the name {scope.name!r} is also made by {owners[scope.name]!r}. Rename one.")
                )
            owners[scope.name] = name
        if scopes:
            families[name] = scopes
    return families


def _from_environment(
    families: dict[str, tuple[Scope, ...]],
    given: Mapping[str, Any],
    prefix: str,
    defaults: Defaults,
    problems: list[Problem],
) -> tuple[dict[str, tuple[Scope, ...]], list[tuple[str, str]]]:
    """Overrides like RATE_LIMIT_AUTH_MAX=10 and RATE_LIMIT_AUTH_WINDOW=60 (seconds).

    The families with them, and (variable, scope) for each that MAX=0 switches off.
    """
    names: dict[str, list[str]] = {}
    for name in given:
        if isinstance(name, str):
            names.setdefault(re.sub(r"[^A-Z0-9]", "_", name.upper()), []).append(name)
    overrides: dict[str, dict[str, str]] = {}
    for variable in sorted(name for name in os.environ if name.startswith(prefix)):
        word, _, what = variable[len(prefix) :].rpartition("_")
        if word not in names or what not in ("MAX", "WINDOW"):
            possible = [f"{prefix}{word}_{what}" for word in names for what in ("MAX", "WINDOW")]
            hint = did_you_mean(variable, possible)
            problems.append(
                Problem(variable, f"names no scope and option.{hint} Write {prefix}<SCOPE>_MAX or _WINDOW.")
            )
        elif len(names[word]) > 1:
            problems.append(Problem(variable, f"may mean {' or '.join(map(repr, names[word]))}. Rename one of them."))
        elif not re.fullmatch(r"[0-9]{1,16}", os.environ[variable]):
            text = quote(os.environ[variable])
            problems.append(Problem(variable, f"{text} is not a whole number. Write MAX in hits, WINDOW in seconds."))
        else:
            overrides.setdefault(names[word][0], {})[what] = variable
    changed = dict(families)
    off: list[tuple[str, str]] = []
    for name, variables in overrides.items():
        if name not in families:
            continue  # its definition is wrong, which has been said
        numbers = {what: int(os.environ[variable]) for what, variable in variables.items()}
        if numbers.get("MAX") == 0:
            off.append((variables["MAX"], name))
            changed[name] = tuple(replace(scope, mode="off") for scope in families[name])
            continue
        variable = " and ".join(variables.values())
        options = as_options(given[name]) or {}
        scope = families[name][0]
        rates = scope.rates or ()
        is_bare = scope.algorithm == CONCURRENT
        if len(rates) != 1 or rates[0].calendar or "PRESET" in options or (is_bare and "WINDOW" in numbers):
            problems.append(Problem(variable, f"the scope {name!r} has not exactly one plain rate to override."))
            continue
        try:
            rate = Rate(numbers.get("MAX", rates[0].limit), numbers.get("WINDOW", rates[0].period))
        except RateError as error:
            problems.append(Problem(variable, str(error)))
            continue
        # Parsed again, so that what follows from the rate follows from the new one.
        text = str(rate.limit if is_bare else rate)
        changed[name], found = parse_family(name, {**options, "RATE": text}, defaults, variable)
        problems.extend(found)
    return changed, off


@dataclass(frozen=True, slots=True)
class Project:
    """What the system checks ask about the project around us, from Django's own settings."""

    debug: bool
    middleware: tuple[str, ...]
    """Dotted paths."""
    caches: Mapping[str, Mapping[str, Any]]
    session_cache: str | None
    """The alias that sessions live in, None when they live elsewhere."""
    page_cache: str
    """The alias that the cache middleware keeps pages in, if it is there."""


def read_project() -> Project:
    """Django's settings as they are now."""
    in_cache = settings.SESSION_ENGINE.rpartition(".")[2] in ("cache", "cached_db")
    return Project(
        debug=settings.DEBUG,
        middleware=tuple(settings.MIDDLEWARE),
        caches=settings.CACHES,
        session_cache=settings.SESSION_CACHE_ALIAS if in_cache else None,
        page_cache=settings.CACHE_MIDDLEWARE_ALIAS,
    )


def _languages() -> frozenset[str]:
    """What i18n_patterns may put in front of a path."""
    if not settings.USE_I18N:
        return frozenset()
    return frozenset(code.lower() for code in (settings.LANGUAGE_CODE, *(code for code, _ in settings.LANGUAGES)))


_config: Config | None = None


def get_config() -> Config:
    """The Config in force, read on first use. Raises ImproperlyConfigured that lists everything that is wrong."""
    global _config
    config = _config
    if config is None:
        config, problems = load()
        if problems:
            raise ImproperlyConfigured("\n".join(map(str, problems)))
        for variable, name in config.switched_off:
            logger.warning("%s=0 switches the rate limit scope %s off", variable, name)
        _config = config
    return config


@receiver(setting_changed)
def _forget(*, setting: str, **kwargs: Any) -> None:
    global _config
    if setting in READS:
        _config = None
