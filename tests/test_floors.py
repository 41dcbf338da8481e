"""The house of ratelimit_kv: imports only go down, and each thing that the world hands us has one reader.

The rules are read off the source, so they also hold for imports inside functions and under TYPE_CHECKING.
Each rule is a function from one file to its offences; the tables at the end prove that each of them can fail.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "ratelimit_kv"
HOME = Path(__file__).resolve().parent.parent / PACKAGE

ROOF = 7
FLOORS = {
    **dict.fromkeys(["rates", "algorithms", "decisions", "exceptions", "steps"], 0),
    **dict.fromkeys(["identity", "client_ip", "stores", "signals", "callables", "models"], 1),
    **dict.fromkeys(["scopes", "marks", "guard"], 2),
    **dict.fromkeys(["conf"], 3),
    **dict.fromkeys(["process", "deciding", "accounts", "limiter"], 4),
    **dict.fromkeys(["door", "http", "inspection"], 5),
    **dict.fromkeys(["decorators", "middleware", "admin", "management", "contrib", "testing"], 6),
    # The package itself hands on what the floors below offer.
    **dict.fromkeys(["apps", "checks", ""], ROOF),
}
DOORS = 6
"""The floor whose rooms don't know each other."""


# ── Reading a file ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Room:
    """One file of the package."""

    path: str
    """Below the package, as in "stores/redis.py"."""
    tree: ast.Module

    @classmethod
    def of(cls, path: str, source: str) -> Room:
        return cls(path, ast.parse(source))

    @property
    def module(self) -> str:
        """The dotted name below the package, as in "stores.redis"; "" for the package itself."""
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def offence(self, node: ast.AST | int, what: str, instead: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 0)
        return f"{PACKAGE}/{self.path}:{line} {what}; {instead}"

    def imports(self) -> Iterator[tuple[ast.stmt, str, str]]:
        """Statement, what is imported in absolute words ("django.conf.settings"), its name in the file."""
        package = [PACKAGE, *self.path.split("/")[:-1]]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node, alias.name, alias.asname or alias.name.partition(".")[0]
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield node, f"{source}.{alias.name}", alias.asname or alias.name

    def mentions(self) -> Iterator[tuple[ast.AST, str]]:
        """Every import, and every name or attribute that starts at an import, both in absolute words."""
        origins = {}
        for node, imported, name in self.imports():
            yield node, imported
            # `import django.conf` binds `django` alone.
            binds_first_part = isinstance(node, ast.Import) and name == imported.partition(".")[0]
            origins[name] = name if binds_first_part else imported
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute | ast.Name) and (words := dotted(node)):
                first, _, rest = words.partition(".")
                if first in origins:
                    yield node, ".".join(filter(None, [origins[first], rest]))

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call of something imported, in absolute words."""
        absolute = {id(node): words for node, words in self.mentions()}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and id(node.func) in absolute:
                yield node, absolute[id(node.func)]


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; "" for anything that isn't names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def starts(words: str, *prefixes: str) -> bool:
    """Whether the dotted name is one of these or inside one."""
    return any(words == prefix or words.startswith(prefix + ".") for prefix in prefixes)


def room_and_floor(module: str) -> tuple[str, int]:
    """The room that a module, or a name in it, belongs to, and its floor. A package is one room."""
    first, _, rest = module.partition(".")
    if first not in FLOORS:
        return "", ROOF
    if first == "contrib" and rest:
        # But here each file is for another framework.
        return f"{first}.{rest.partition('.')[0]}", FLOORS[first]
    return first, FLOORS[first]


# ── The rules ─────────────────────────────────────────────────────────────────────────────────────────────


def imports_go_down(room: Room) -> list[str]:
    here, floor = room_and_floor(room.module)
    offences = []
    for node, imported, _ in room.imports():
        if not starts(imported, PACKAGE):
            continue
        there, other_floor = room_and_floor(imported.removeprefix(PACKAGE).removeprefix("."))
        if there == here:
            continue
        name = f"{PACKAGE}.{there}".rstrip(".")
        if other_floor > floor:
            instead = "take it as an argument, or move the code that both need further down"
            offences.append(room.offence(node, f"(floor {floor}) imports {name} from floor {other_floor}", instead))
        elif other_floor == floor == DOORS:
            instead = "doors don't know each other: move what both need to floor 5"
            offences.append(room.offence(node, f"imports {name} from beside it on floor {DOORS}", instead))
    return offences


def the_ground_floor_is_plain_python(room: Room) -> list[str]:
    if room_and_floor(room.module)[1] > 0:
        return []
    return [
        room.offence(node, f"imports {imported}", "floor 0 is the standard library only: move this up")
        for node, imported, _ in room.imports()
        if not starts(imported, PACKAGE, *sys.stdlib_module_names)
    ]


def only_conf_reads_settings(room: Room) -> list[str]:
    if room.path == "conf.py":
        return []
    instead = "ask conf's Config, or add what is missing to it"
    return [
        room.offence(node, "reads Django's settings", instead)
        for node, words in room.mentions()
        if starts(words, "django.conf.settings", "django.conf.LazySettings")
    ]


CLOCKS = (
    *(f"time.{name}" for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")),
    *(f"time.{name}_ns" for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")),
    *(f"time.{name}" for name in ("localtime", "gmtime", "ctime", "strftime", "clock_gettime")),
    *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
    "datetime.date.today",
    *(f"django.utils.timezone.{name}" for name in ("now", "localtime", "localdate")),
)


def only_process_reads_the_clock(room: Room) -> list[str]:
    if room.path == "process.py":
        return []
    return [
        room.offence(node, f"reads the clock ({words})", "take the time, or the clock, as an argument")
        for node, words in room.mentions()
        if words in CLOCKS
    ]


def only_stores_touch_a_cache(room: Room) -> list[str]:
    if room.path.startswith("stores/"):
        return []
    instead = "ask the Store of stores.get_store(alias)"
    return [
        room.offence(node, f"touches a cache ({words})", instead)
        for node, words in room.mentions()
        if starts(words, "django.core.cache")
    ]


STORE_CLIENTS = (
    *("redis", "django_redis", "valkey", "django_valkey"),
    *("pymemcache", "pylibmc", "memcache", "psycopg", "MySQLdb"),
)


def only_stores_know_a_client(room: Room) -> list[str]:
    if room.path.startswith("stores/"):
        return []
    return [
        room.offence(node, f"imports {imported}", "a store's client is known to that store alone")
        for node, imported, _ in room.imports()
        if starts(imported, *STORE_CLIENTS)
    ]


def only_identity_and_client_ip_read_who_is_asking(room: Room) -> list[str]:
    if room.path in ("identity.py", "client_ip.py"):
        return []
    instead = "identity.py and client_ip.py say who is asking"
    return [
        room.offence(node, f"reads .{name} of a request", instead)
        for node, owner, name in attributes_read(room)
        if name in ("META", "COOKIES", "POST", "FILES", "auser")
        or (name in ("user", "session", "body") and is_called(owner, "request", "req"))
    ]


def only_http_writes_headers(room: Room) -> list[str]:
    if room.path == "http.py":
        return []
    instead = "http.py writes headers"
    by_hand = [
        room.offence(node, f"writes a header ({ast.unparse(node)})", instead)
        for node in ast.walk(room.tree)
        if is_header_write(node)
    ]
    by_helper = [
        room.offence(node, f"writes a header ({words})", instead)
        for node, words in room.calls()
        if starts(words, "django.utils.cache")
    ]
    return by_hand + by_helper


def is_header_write(node: ast.AST) -> bool:
    """`response["X"] = ...`, `del response.headers["X"]`, `response.setdefault(...)`, `set_cookie`."""
    match node:
        case ast.Subscript(value=target, ctx=ast.Store() | ast.Del()):
            return is_headers(target) or is_called(target, "response", "resp")
        case ast.Call(func=ast.Attribute(value=target, attr="setdefault" | "__setitem__")):
            return is_headers(target) or is_called(target, "response", "resp")
        case ast.Call(func=ast.Attribute(value=target, attr="update" | "pop" | "popitem" | "clear")):
            return is_headers(target)
        case ast.Call(func=ast.Attribute(attr="set_cookie" | "set_signed_cookie" | "delete_cookie")):
            return True
    return False


def only_http_builds_responses(room: Room) -> list[str]:
    if room.path == "http.py":
        return []
    return [
        room.offence(node, f"builds a response ({words})", "http.py turns a decision into a response")
        for node, words in room.calls()
        if (starts(words, "django.http", "django.template.response") and "Response" in words)
        or starts(words, "django.shortcuts.render", "django.shortcuts.redirect")
    ]


FRAMEWORKS = {
    "rest_framework": "contrib/rest_framework.py",
    "ninja": "contrib/ninja.py",
    "prometheus_client": "contrib/prometheus.py",
}


def a_framework_is_known_to_its_own_file(room: Room) -> list[str]:
    return [
        room.offence(node, f"imports {imported}", f"only {FRAMEWORKS[framework]} knows {framework}")
        for node, imported, _ in room.imports()
        if (framework := imported.partition(".")[0]) in FRAMEWORKS and room.path != FRAMEWORKS[framework]
    ]


def attributes_read(room: Room) -> Iterator[tuple[ast.AST, ast.expr, str]]:
    """Each `owner.name`, and each `getattr(owner, "name")`, `hasattr(owner, "name")`."""
    for node in ast.walk(room.tree):
        if isinstance(node, ast.Attribute):
            yield node, node.value, node.attr
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr"):
            match node.args:
                case [owner, ast.Constant(value=str(name)), *_]:
                    yield node, owner, name


def is_called(node: ast.expr, *names: str) -> bool:
    """Whether it is a variable or attribute of such a name: `request`, `self.request`, `inner_request`."""
    name = getattr(node, "attr", None) or getattr(node, "id", "")
    return name.rpartition("_")[2] in names


def is_headers(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "headers" and not is_called(node.value, "request")


# ── The house as it stands ────────────────────────────────────────────────────────────────────────────────

HOUSE = [Room.of(path.relative_to(HOME).as_posix(), path.read_text("utf-8")) for path in sorted(HOME.rglob("*.py"))]
Rule = Callable[[Room], list[str]]


def offences(rule: Rule) -> str:
    return "\n".join(offence for room in HOUSE for offence in rule(room))


def test_every_file_has_a_floor() -> None:
    strangers = {room.path for room in HOUSE if room.module.partition(".")[0] not in FLOORS}
    assert not strangers, "give it a floor in FLOORS"


def test_imports_go_down() -> None:
    assert not offences(imports_go_down)


def test_the_ground_floor_is_plain_python() -> None:
    assert not offences(the_ground_floor_is_plain_python)


def test_only_conf_reads_settings() -> None:
    assert not offences(only_conf_reads_settings)


def test_only_process_reads_the_clock() -> None:
    assert not offences(only_process_reads_the_clock)


def test_only_stores_touch_a_cache() -> None:
    assert not offences(only_stores_touch_a_cache)


def test_only_stores_know_a_client() -> None:
    assert not offences(only_stores_know_a_client)


def test_only_identity_and_client_ip_read_who_is_asking() -> None:
    assert not offences(only_identity_and_client_ip_read_who_is_asking)


def test_only_http_writes_headers() -> None:
    assert not offences(only_http_writes_headers)


def test_only_http_builds_responses() -> None:
    assert not offences(only_http_builds_responses)


def test_a_framework_is_known_to_its_own_file() -> None:
    assert not offences(a_framework_is_known_to_its_own_file)


# ── Each rule can fail, and lets pass what is right ───────────────────────────────────────────────────────

BROKEN: list[tuple[Rule, str, str]] = [
    (imports_go_down, "scopes.py", "from .conf import get_config"),
    (imports_go_down, "scopes.py", "from . import conf"),
    (imports_go_down, "scopes.py", "from ratelimit_kv import conf as c"),
    (imports_go_down, "scopes.py", "import ratelimit_kv.conf"),
    (imports_go_down, "stores/redis.py", "from .. import limiter"),
    (imports_go_down, "stores/redis.py", "from ..process import now"),
    (imports_go_down, "stores/__init__.py", "from ..guard import Guard"),
    (imports_go_down, "limiter.py", "def f():\n    from .door import begin"),
    (imports_go_down, "rates.py", "if TYPE_CHECKING:\n    from .scopes import Scope"),
    (imports_go_down, "door.py", "from . import check"),  # what the package itself offers comes from above
    (imports_go_down, "decorators.py", "from .middleware import RateLimitMiddleware"),
    (imports_go_down, "contrib/ninja.py", "from .rest_framework import RateLimitThrottle"),
    (imports_go_down, "management/commands/ratelimit_inspect.py", "from ...admin import Counters"),
    (the_ground_floor_is_plain_python, "rates.py", "from django.conf import settings"),
    (the_ground_floor_is_plain_python, "steps.py", "def f():\n    import asgiref.sync"),
    (only_conf_reads_settings, "limiter.py", "from django.conf import settings"),
    (only_conf_reads_settings, "checks.py", "def f():\n    from django.conf import settings as s"),
    (only_conf_reads_settings, "http.py", "import django.conf\nx = django.conf.settings.DEBUG"),
    (only_conf_reads_settings, "http.py", "from django import conf\nx = conf.settings.DEBUG"),
    (only_process_reads_the_clock, "guard.py", "import time\ndef f(): return time.monotonic()"),
    (only_process_reads_the_clock, "guard.py", "import time\ndef f(clock=time.monotonic): ..."),
    (only_process_reads_the_clock, "guard.py", "from time import time_ns as clock"),
    (only_process_reads_the_clock, "rates.py", "from datetime import datetime\nx = datetime.now()"),
    (only_process_reads_the_clock, "rates.py", "import datetime as dt\nx = dt.date.today()"),
    (only_process_reads_the_clock, "admin.py", "from django.utils import timezone\nx = timezone.now()"),
    (only_stores_touch_a_cache, "limiter.py", "from django.core.cache import caches"),
    (only_stores_touch_a_cache, "limiter.py", "from django.core import cache"),
    (only_stores_know_a_client, "limiter.py", "def f():\n    import redis.exceptions"),
    (only_identity_and_client_ip_read_who_is_asking, "door.py", "x = request.META['REMOTE_ADDR']"),
    (only_identity_and_client_ip_read_who_is_asking, "door.py", "x = self.request.user.pk"),
    (only_identity_and_client_ip_read_who_is_asking, "door.py", "x = getattr(a_request, 'session', None)"),
    (only_identity_and_client_ip_read_who_is_asking, "door.py", "async def f(r): return await r.auser()"),
    (only_identity_and_client_ip_read_who_is_asking, "scopes.py", "x = request.body"),
    (only_http_writes_headers, "middleware.py", "response['Retry-After'] = '1'"),
    (only_http_writes_headers, "middleware.py", "response.headers['Retry-After'] = '1'"),
    (only_http_writes_headers, "middleware.py", "del the_response['Vary']"),
    (only_http_writes_headers, "middleware.py", "r.headers.setdefault('A', 'b')"),
    (only_http_writes_headers, "door.py", "response.set_cookie('anon', 'x')"),
    (
        only_http_writes_headers,
        "door.py",
        "from django.utils.cache import patch_vary_headers as p\np(r, ['Accept'])",
    ),
    (only_http_builds_responses, "door.py", "from django.http import HttpResponse\nx = HttpResponse('no')"),
    (only_http_builds_responses, "door.py", "from django import http\nx = http.JsonResponse({})"),
    (
        only_http_builds_responses,
        "door.py",
        "from django.shortcuts import render\ndef f(r): return render(r, 'x')",
    ),
    (a_framework_is_known_to_its_own_file, "decorators.py", "from rest_framework.views import APIView"),
    (a_framework_is_known_to_its_own_file, "contrib/ninja.py", "import rest_framework"),
    (a_framework_is_known_to_its_own_file, "signals.py", "if TYPE_CHECKING:\n    import prometheus_client"),
]

SOUND: list[tuple[Rule, str, str]] = [
    (imports_go_down, "limiter.py", "from .conf import get_config\nfrom .stores.base import Store"),
    (imports_go_down, "stores/redis.py", "from .base import Store\nfrom ..algorithms import Counter"),
    (imports_go_down, "contrib/ninja.py", "from ..door import begin\nfrom .. import http"),
    (imports_go_down, "__init__.py", "from .decorators import rate_limit"),
    (imports_go_down, "apps.py", "from . import checks"),
    (the_ground_floor_is_plain_python, "rates.py", "import math\nfrom .decisions import Decision"),
    (only_conf_reads_settings, "conf.py", "from django.conf import settings"),
    (only_conf_reads_settings, "limiter.py", "from .conf import settings"),
    (only_process_reads_the_clock, "process.py", "import time\nx = time.time()"),
    (only_process_reads_the_clock, "guard.py", "def f(now, time): return time.time() - now"),
    (only_stores_touch_a_cache, "stores/cache.py", "from django.core.cache import caches"),
    (only_identity_and_client_ip_read_who_is_asking, "identity.py", "x = request.user"),
    (only_identity_and_client_ip_read_who_is_asking, "door.py", "x = settings.user, response.body"),
    (only_http_writes_headers, "http.py", "response['Retry-After'] = '1'"),
    (only_http_writes_headers, "door.py", "seen = response['Vary'], request.headers['Accept']"),
    (
        only_http_builds_responses,
        "middleware.py",
        "from django.http import HttpResponseBase\ndef f() -> HttpResponseBase: ...",
    ),
    (a_framework_is_known_to_its_own_file, "contrib/ninja.py", "from ninja.throttling import BaseThrottle"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BROKEN, ids=lambda part: getattr(part, "__name__", None))
def test_the_rule_can_fail(rule: Rule, path: str, source: str) -> None:
    (offence, *_) = rule(Room.of(path, source)) or [""]
    assert offence.startswith(f"{PACKAGE}/{path}:")
    assert "; " in offence, "says what to do instead"


@pytest.mark.parametrize(("rule", "path", "source"), SOUND, ids=lambda part: getattr(part, "__name__", None))
def test_the_rule_lets_pass_what_is_right(rule: Rule, path: str, source: str) -> None:
    assert rule(Room.of(path, source)) == []


def test_every_rule_is_proven() -> None:
    rules = {rule for name, rule in globals().items() if f"test_{name}" in globals()}
    assert len(rules) == 10
    assert {rule for rule, _, _ in BROKEN} == rules
