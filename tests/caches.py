"""Every cache that Django can be given in these tests, as an entry of CACHES, and the database behind some.

    CACHES={"default": cache_settings("django-redis", redis_server, KEY_PREFIX="shop")}

Most tests want the fixture ``use_cache`` instead, which starts the server, empties it and sets CACHES.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.servers import Cluster, Missing, Sentinel, Server

ROOT = Path(__file__).resolve().parent.parent

COUNTERS = "counters"
"""The database alias that cache tables live in while a test uses one of the database caches."""
TABLE = "ratelimit_cache"

SERVER_FIXTURES = {
    "database-postgresql": "postgres_server",
    "database-mariadb": "mariadb_server",
    "pymemcache": "memcached_server",
    "pylibmc": "memcached_server",
    "redis": "redis_server",
    "django-redis": "redis_server",
    "django-valkey": "valkey_server",
    "django-redis-sentinel": "sentinel",
    "django-redis-cluster": "redis_cluster",
    "django-valkey-cluster": "redis_cluster",
}
DATABASE_KINDS = ("database-sqlite", "database-postgresql", "database-mariadb")
KINDS = ("locmem", "filebased", "database-sqlite", *SERVER_FIXTURES)
"""Every kind of cache."""
SHARED_KINDS = tuple(kind for kind in KINDS if kind != "locmem")

_CLIENTS = {
    "pymemcache": "pymemcache",
    "pylibmc": "pylibmc",
    "redis": "redis",
    "django-redis": "django_redis",
    "django-redis-sentinel": "django_redis",
    "django-redis-cluster": "django_redis",
    "django-valkey": "django_valkey",
    "django-valkey-cluster": "django_valkey",
}
# Long enough for a busy machine; a test of outages sets its own.
_PATIENCE = 5


def missing_client(kind: str) -> Missing | None:
    """Why this kind can't be used here, as far as Python packages go."""
    package = _CLIENTS.get(kind)
    if package is None or find_spec(package):
        return None
    return Missing(f"the Python package {package} is not installed")


def cache_settings(
    kind: str,
    server: Server | Sentinel | Cluster | None = None,
    *,
    location: str | Path | None = None,
    db: int = 0,
    **overrides: Any,
) -> dict[str, Any]:
    """An entry of CACHES.

    ``server`` is that of the kind (see SERVER_FIXTURES), ``location`` the directory of "filebased" or the
    table of a database cache, ``db`` the number of a Redis database. ``overrides`` are merged in, OPTIONS one
    by one.
    """
    entry = _entry(kind, server, location, db)
    options = {**entry.get("OPTIONS", {}), **overrides.pop("OPTIONS", {})}
    return {**entry, "OPTIONS": options, **overrides}


def _entry(
    kind: str, server: Server | Sentinel | Cluster | None, location: str | Path | None, db: int
) -> dict[str, Any]:
    django = "django.core.cache.backends"
    timeouts = {"socket_timeout": _PATIENCE, "socket_connect_timeout": _PATIENCE}
    TIMEOUTS = {name.upper(): value for name, value in timeouts.items()}
    roomy = {"MAX_ENTRIES": 1_000_000}
    match kind:
        case "locmem":
            return {
                "BACKEND": f"{django}.locmem.LocMemCache",
                "LOCATION": str(location or ""),
                "OPTIONS": roomy,
            }
        case "filebased":
            assert location is not None, "filebased needs location="
            return {
                "BACKEND": f"{django}.filebased.FileBasedCache",
                "LOCATION": str(location),
                "OPTIONS": roomy,
            }
        case _ if kind in DATABASE_KINDS:
            return {
                "BACKEND": f"{django}.db.DatabaseCache",
                "LOCATION": str(location or TABLE),
                "OPTIONS": roomy,
            }

    assert server is not None, f"{kind} needs its server"
    if isinstance(server, Sentinel):
        return {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": f"redis://{server.name}/{db}",
            "OPTIONS": {
                "CLIENT_CLASS": "django_redis.client.SentinelClient",
                "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                "SENTINELS": server.addresses,
                "SENTINEL_KWARGS": timeouts,
                **TIMEOUTS,
            },
        }
    if isinstance(server, Cluster):
        host, port = server.addresses[0]
        if kind == "django-valkey-cluster":
            return {
                "BACKEND": "django_valkey.cluster_cache.cache.ClusterValkeyCache",
                "LOCATION": f"valkey://{host}:{port}/0",
                "OPTIONS": TIMEOUTS,
            }
        return {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": server.url,
            "OPTIONS": {"CONNECTION_FACTORY": "tests.cluster.ClusterConnectionFactory", **TIMEOUTS},
        }
    address = f"{server.host}:{server.port}"
    match kind:
        case "pymemcache":
            return {
                "BACKEND": f"{django}.memcached.PyMemcacheCache",
                "LOCATION": address,
                "OPTIONS": {"timeout": _PATIENCE, "connect_timeout": _PATIENCE, "no_delay": True},
            }
        case "pylibmc":
            return {
                "BACKEND": f"{django}.memcached.PyLibMCCache",
                "LOCATION": address,
                "OPTIONS": {
                    "binary": False,
                    "behaviors": {"connect_timeout": 1000 * _PATIENCE, "tcp_nodelay": True},
                },
            }
        case "redis":
            return {
                "BACKEND": f"{django}.redis.RedisCache",
                "LOCATION": f"redis://{address}/{db}",
                "OPTIONS": timeouts,
            }
        case "django-redis":
            return {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": f"redis://{address}/{db}",
                "OPTIONS": TIMEOUTS,
            }
        case "django-valkey":
            return {
                "BACKEND": "django_valkey.cache.ValkeyCache",
                "LOCATION": f"valkey://{address}/{db}",
                "OPTIONS": TIMEOUTS,
            }
    raise ValueError(f"no such kind of cache: {kind!r}; there are {', '.join(KINDS)}")


# ── The database of a database cache ───────────────────────────────────────────────────────────────────────


class CacheRouter:
    """Keeps cache tables in the alias COUNTERS while there is one, in the default database otherwise."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        from django.db import connections

        is_cache = model._meta.app_label == "django_cache"
        return COUNTERS if is_cache and COUNTERS in connections.settings else None

    db_for_write = db_for_read


def database_settings(kind: str, server: Server | None = None, *, path: Path | None = None) -> dict[str, Any]:
    """An entry of DATABASES for a database cache: on its server, or SQLite in the file ``path``."""
    match kind:
        case "database-sqlite":
            assert path is not None, "SQLite needs path="
            return {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(path),
                "OPTIONS": {
                    "transaction_mode": "IMMEDIATE",
                    "timeout": 30,
                    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
                },
            }
        case "database-postgresql":
            engine, user, name = "postgresql", "postgres", "postgres"
        case "database-mariadb":
            engine, user, name = "mysql", "root", "ratelimit"
        case _:
            raise ValueError(f"not a database cache: {kind!r}")
    assert server is not None, f"{kind} needs its server"
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "HOST": server.host,
        "PORT": str(server.port),
        "USER": user,
        "NAME": name,
    }


@contextlib.contextmanager
def counters_database(entry: dict[str, Any], table: str = TABLE) -> Iterator[str]:
    """Adds a database under the alias COUNTERS, with an empty cache table in it, and takes it away again.

    It is not one of the test databases: pytest-django must have been told to let queries through.
    """
    from django.core.management import call_command
    from django.db import connections

    default = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    complete = connections.configure_settings({"default": default, COUNTERS: entry})
    before = connections.settings.get(COUNTERS)
    _point_counters_at(complete[COUNTERS])
    try:
        connection = connections[COUNTERS]
        _end_other_sessions(connection)
        with connection.cursor() as cursor:
            cursor.execute(f"DROP TABLE IF EXISTS {connection.ops.quote_name(table)}")
        call_command("createcachetable", table, database=COUNTERS, verbosity=0)
        yield COUNTERS
    finally:
        _point_counters_at(before)


def _point_counters_at(entry: dict[str, Any] | None) -> None:
    from django.db import connections

    if COUNTERS in connections.settings:
        connections[COUNTERS].close()
        del connections[COUNTERS]
        del connections.settings[COUNTERS]
    if entry is not None:
        connections.settings[COUNTERS] = entry


def _end_other_sessions(connection: Any) -> None:
    """A thread of an earlier test may have left a transaction open, and the table locked."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        elif connection.vendor == "mysql":
            cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
            )
            for (session,) in cursor.fetchall():
                cursor.execute(f"KILL {session}")


# ── Other processes ────────────────────────────────────────────────────────────────────────────────────────


def child_environment(**settings: Any) -> dict[str, str]:
    """The environment of a process that shall see the caches of this test, and the given settings.

    subprocess.run([sys.executable, "-m", "django", "ratelimit_inspect"], env=child_environment(DEBUG=True))
    """
    from django.conf import settings as current
    from django.db import connections

    handed_on: dict[str, Any] = {"CACHES": current.CACHES}
    if rate_limits := getattr(current, "RATELIMIT_KV", None):
        handed_on["RATELIMIT_KV"] = rate_limits
    if COUNTERS in connections.settings:
        default = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
        handed_on["DATABASES"] = {"default": default, COUNTERS: connections.settings[COUNTERS]}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "RATELIMIT_KV_TEST_SETTINGS": json.dumps({**handed_on, **settings}),
    }
