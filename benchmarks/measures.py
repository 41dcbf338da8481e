"""What is measured, from the parent's side: plain data, which report.py turns into tables."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis as redis_client

from benchmarks.adapters import (
    ADAPTERS,
    DJANGO_REDIS,
    LOCMEM,
    MEMCACHED,
    OURS,
    POSTGRES,
    REDIS,
    REDIS_CACHE,
    SQLITE,
    Backend,
    NotSupported,
    OursWithHeaders,
    RawEvalsha,
)
from benchmarks.crew import Failed, Times, Worker, workers
from benchmarks.proxy import Proxy
from benchmarks.worker import Spent
from tests.servers import Server, start_redis

SITUATIONS = {
    "allowed": "one limit",
    "hot": "one limit",
    "denied": "one limit",
    "denied-first": "one limit",
    "two": "two limits",
    "three": "three limits",
    "handler": "handler",
    "async": "async",
    "exempt": "",
    "no-scope": "",
}
"""Each situation that is timed, and the proof that it stands on."""

LEFT_OUT = "left out: there was no time"
FEWEST_ROUNDS = 3

TIMEOUT = 0.25
"""Seconds that a client waits for Redis."""


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    seconds: float
    """The most that the run may take, about: twice what it takes on a machine that has nothing else to do."""
    situations: tuple[str, ...]
    rounds: int
    round_us: float
    """A round of one worker takes about this long."""
    identities: int
    """For the memory of one: three quarters of a power of two, where hash tables of Redis double."""
    population: tuple[int, ...]
    each: int
    """Requests of each of 8 processes, where the processor time of Redis is measured."""
    times_on: tuple[str, ...]
    wire_on: tuple[str, ...]
    exact_on: tuple[str, ...]
    outages_on: tuple[str, ...]
    outage_bound: float
    """Seconds that 20 requests may take before the rest is left out."""


FULL = Size(
    seconds=960,
    situations=tuple(SITUATIONS),
    rounds=15,
    round_us=15_000,
    identities=100_000,
    population=(1_000, 10_000, 100_000, 1_000_000),
    each=500,
    times_on=(DJANGO_REDIS, REDIS_CACHE, LOCMEM, SQLITE, POSTGRES, MEMCACHED),
    wire_on=(DJANGO_REDIS, REDIS_CACHE, MEMCACHED, POSTGRES, SQLITE),
    exact_on=(DJANGO_REDIS, REDIS_CACHE, MEMCACHED, POSTGRES, SQLITE),
    outages_on=REDIS,
    outage_bound=12,
)
QUICK = Size(
    seconds=240,
    situations=("allowed", "denied", "three", "async", "exempt", "no-scope"),
    rounds=3,
    round_us=3_000,
    identities=6_250,
    population=(1_000, 10_000),
    each=100,
    times_on=(DJANGO_REDIS, REDIS_CACHE, LOCMEM, SQLITE),
    wire_on=(DJANGO_REDIS, REDIS_CACHE, SQLITE),
    exact_on=(DJANGO_REDIS,),
    outages_on=(DJANGO_REDIS,),
    outage_bound=2,
)


@dataclass(frozen=True)
class Plan:
    """What of it this run does."""

    size: Size
    adapters: Sequence[str]
    backends: Sequence[str]
    say: Callable[[str], None]
    until: float = 0
    """When this measure has to end, by the monotonic clock. What it can't reach by then is left out and says so."""

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until

    def on(self, backend: str) -> list[str]:
        """The adapters that can use that backend."""
        return [name for name in self.adapters if backend in ADAPTERS[name].backends]

    def some_on(self, backends: Iterable[str]) -> list[str]:
        return [backend for backend in backends if backend in self.backends and self.on(backend)]

    def in_time(self, backends: Iterable[str], results: dict[str, Any]) -> Iterator[str]:
        """The same one by one, until time is over; of the rest the results say so."""
        for backend in self.some_on(backends):
            if self.late:
                results[backend] = {name: {"error": LEFT_OUT} for name in self.on(backend)}
            else:
                yield backend


class Farm:
    """The servers of a run and the Django settings that lead to them."""

    def __init__(self, ports: dict[str, int], sqlite: str) -> None:
        self.ports = ports
        self._sqlite = sqlite

    def backend(self, name: str, port: int | None = None) -> Backend:
        """Django's settings for one backend; ``port`` stands in for its server's, for a proxy or a victim."""
        cache: dict[str, Any] = {"OPTIONS": {}}
        databases: dict[str, Any] = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
        url = ""
        if name == LOCMEM:
            cache |= {
                "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
                "OPTIONS": {"MAX_ENTRIES": 10**7},
            }
        elif name in (SQLITE, POSTGRES):
            cache |= {
                "BACKEND": "django.core.cache.backends.db.DatabaseCache",
                "LOCATION": "bench_cache",
                "OPTIONS": {"MAX_ENTRIES": 10**7},
            }
            databases["default"] = self._sqlite_database() if name == SQLITE else self._postgres_database(port)
        elif name == MEMCACHED:
            url = f"127.0.0.1:{port or self.ports['memcached']}"
            cache |= {"BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache", "LOCATION": url}
        else:
            url = f"redis://127.0.0.1:{port or self.ports['redis']}"
            if name == DJANGO_REDIS:
                backend, options = (
                    "django_redis.cache.RedisCache",
                    ("SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT"),
                )
            else:
                backend, options = (
                    "django.core.cache.backends.redis.RedisCache",
                    ("socket_timeout", "socket_connect_timeout"),
                )
            cache |= {"BACKEND": backend, "LOCATION": url, "OPTIONS": dict.fromkeys(options, TIMEOUT)}
        return Backend(name, cache, databases, url)

    def _sqlite_database(self) -> dict[str, Any]:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": self._sqlite,
            "CONN_MAX_AGE": None,
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
            },
        }

    def _postgres_database(self, port: int | None) -> dict[str, Any]:
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "USER": "postgres",
            "HOST": "127.0.0.1",
            "PORT": port or self.ports["postgres"],
            "CONN_MAX_AGE": None,
            "OPTIONS": {"sslmode": "disable"},
        }

    def server_of(self, backend: str) -> str:
        return {POSTGRES: "postgres", MEMCACHED: "memcached"}.get(backend, "redis" if backend in REDIS else "")

    @property
    def redis(self) -> redis_client.Redis:
        return redis_client.Redis(port=self.ports["redis"])


# -- time ----------------------------------------------------------------------------------------------------


def times(plan: Plan, farm: Farm) -> dict[str, Any]:
    """Added time: ``{backend: {adapter: {situation: summary or why not}}}``, and the units."""
    results: dict[str, Any] = {}
    units: dict[str, list[float]] = {"evalsha": [], "incr": [], "tcp": [], "async evalsha": []}
    with workers([RawEvalsha.name], farm.backend(DJANGO_REDIS)) as (raw, failed):
        if not raw:
            raise Failed(f"no unit to compare with: {failed}")
        backends = plan.some_on(plan.size.times_on)
        start = time.monotonic()
        for number, backend in enumerate(backends, 1):
            plan.say(f"timing {backend}")
            farm.redis.flushall()  # two backends on one server: the everyone of one is the everyone of the other
            until = start + (plan.until - start) * number / len(backends)
            results[backend] = _times_on(replace(plan, until=until), farm.backend(backend), raw[0], units)
    return {
        "backends": results,
        "units_us": {
            name: {"best": round(min(rounds), 2), "median": round(sorted(rounds)[len(rounds) // 2], 2)}
            for name, rounds in units.items()
            if rounds
        },
    }


def _times_on(plan: Plan, backend: Backend, raw: Worker, units: dict[str, list[float]]) -> dict[str, Any]:
    with workers(plan.on(backend.name), backend) as (crew, failed):
        table: dict[str, Any] = {name: {"error": why} for name, why in failed.items()}
        proofs = {}
        for worker in crew:
            table[worker.name] = {}
            proofs[worker.name] = worker.prove()
        start = time.monotonic()
        for number, situation in enumerate(plan.size.situations, 1):
            until = start + (plan.until - start) * number / len(plan.size.situations)
            proof = SITUATIONS[situation]
            taking_part: dict[Worker, Times] = {}
            for worker in crew:
                why = proofs[worker.name].get(proof, "")
                if not why:
                    try:
                        taking_part[worker] = Times(_calls(worker, situation, plan.size.round_us))
                        continue
                    except NotSupported as reason:
                        why = f"not supported: {reason}".rstrip(": ")
                    except Failed as error:
                        why = str(error)
                table[worker.name][situation] = why
            for turn in range(plan.size.rounds):
                if time.monotonic() > until and turn >= FEWEST_ROUNDS:
                    break
                _references(raw, plan.size, units)
                order = list(taking_part)
                first = turn % len(order) if order else 0
                for worker in order[first:] + order[:first]:  # A B C, B C A, C A B ...
                    unit = _unit(raw, situation, plan.size)
                    try:
                        taking_part[worker].add(*worker.round(situation, taking_part[worker].calls), unit)
                    except Failed as error:
                        table[worker.name][situation] = str(error)
                        del taking_part[worker]
            for worker, rounds in taking_part.items():
                table[worker.name][situation] = rounds.summary()
                if backend.name in (DJANGO_REDIS, LOCMEM):
                    with contextlib.suppress(NotSupported):
                        bytecodes, calls = worker.work(situation)
                        table[worker.name][situation] |= {"bytecodes": bytecodes, "calls": calls}
    return table


def _calls(worker: Worker, situation: str, round_us: float) -> int:
    """How many calls fill a round. Asking warms the worker up."""
    worker.round(situation, 10)
    limited, bare = worker.round(situation, 10)
    return int(min(1000, max(10, round_us / (limited.median + bare.median))))


def _unit(raw: Worker, situation: str, size: Size) -> Spent:
    """What the unit takes now, beside the round that it is the unit of."""
    calls = max(20, int(size.round_us / 200))
    return raw.unit_async(calls) if situation == "async" else raw.round("unit-evalsha", calls)[0]


def _references(raw: Worker, size: Size, units: dict[str, list[float]]) -> None:
    """All units, one after the other, so that they can be compared with each other too."""
    for name in ("evalsha", "incr", "tcp"):
        limited, bare = raw.round(f"unit-{name}", max(20, int(size.round_us / 200)))
        units[name].append(limited.median - bare.median)
    units["async evalsha"].append(_unit(raw, "async", size).median)


# -- the wire ------------------------------------------------------------------------------------------------


def wire(plan: Plan, farm: Farm) -> dict[str, Any]:
    """Round trips and commands of one request: ``{backend: {adapter: {step: [trips, commands]}}}``."""
    results: dict[str, Any] = {}
    for backend in plan.in_time(plan.size.wire_on, results):
        plan.say(f"counting on {backend}")
        server = farm.server_of(backend)
        proxy = Proxy(farm.ports[server], server) if server else None
        try:
            with workers(plan.on(backend), farm.backend(backend, proxy and proxy.port)) as (crew, failed):
                results[backend] = {name: {"error": why} for name, why in failed.items()}
                for worker in crew:
                    results[backend][worker.name] = _wire_of(worker, proxy)
        finally:
            if proxy:
                proxy.close()
    return results


def _wire_of(worker: Worker, proxy: Proxy | None) -> dict[str, Any]:
    one, three, few = ("ip",), ("ip", "user", "all"), ("ip3",)

    def once(limits: tuple[str, ...], identity: int) -> list[Any]:
        if proxy is None:
            statements = worker.statements(limits, identity)
            return [statements, ""]
        proxy.take()
        worker.hit(limits, identity)
        traffic = proxy.take()
        return [traffic.trips, " ".join(traffic.commands)]

    try:
        for limits in (one, three, few):  # connections, scripts, tables: once a process
            worker.hit(limits, 1)
        steps = {"new caller": once(one, 2), "known caller": once(one, 2)}
        once(three, 2)
        steps["three limits"] = once(three, 2)
        for _ in range(3):
            worker.hit(few, 3)
        return steps | {"denied": once(few, 3), "denied again": once(few, 3)}
    except Failed as error:
        return {"error": str(error)}


# -- exactness -----------------------------------------------------------------------------------------------


def exactness(plan: Plan, farm: Farm, processes: int = 8, each: int = 50) -> dict[str, Any]:
    """How often each answer came when 8 processes send 50 requests of one caller against a limit of 100."""
    results: dict[str, Any] = {}
    for backend in plan.in_time(plan.size.exact_on, results):
        plan.say(f"{processes} processes on {backend}")
        with workers(plan.on(backend), farm.backend(backend)) as (crew, failed):
            results[backend] = {name: {"error": why} for name, why in failed.items()}
            for worker in crew:
                if plan.late:
                    results[backend][worker.name] = {"error": LEFT_OUT}
                    continue
                try:
                    results[backend][worker.name] = worker.admit(("ip100",), processes, each, 7)
                except Failed as error:
                    results[backend][worker.name] = {"error": str(error)}
    return results


def leases(plan: Plan, farm: Farm, processes: int = 8) -> list[dict[str, Any]]:
    """Store calls and admissions at parts and multiples of a limit of 1000, with and without leases."""
    rows: list[dict[str, Any]] = []
    if OURS[0] not in plan.adapters or DJANGO_REDIS not in plan.backends:
        return rows
    plan.say("leases")
    with workers([OURS[0]], farm.backend(DJANGO_REDIS)) as (crew, failed):
        for scope in ("all1000", "lease1000"):
            for load in (0.5, 1, 2, 10):
                each = int(1000 * load / processes)
                row: dict[str, Any] = {"lease": scope == "lease1000", "requests": each * processes}
                rows.append(row)
                if plan.late or not crew:
                    row["error"] = failed.get(OURS[0], LEFT_OUT)
                    continue
                try:
                    crew[0].admit((scope,), 1, 1, 7)  # the script is sent once
                    farm.redis.flushall()
                    before = _script_calls(farm.redis)
                    row["answers"] = crew[0].admit((scope,), processes, each, 7)
                    row["store_calls"] = round((_script_calls(farm.redis) - before) / row["requests"], 4)
                except Failed as error:
                    row["error"] = str(error)
    return rows


def server(plan: Plan, farm: Farm, processes: int = 8) -> dict[str, Any]:
    """Processor time of Redis for one allowed request, while so many processes send."""
    results: dict[str, Any] = {}
    if DJANGO_REDIS not in plan.backends:
        return results
    plan.say("processor time of Redis")
    names = [name for name in plan.on(DJANGO_REDIS) if name != OursWithHeaders.name]  # no matter to the server
    with workers(names, farm.backend(DJANGO_REDIS)) as (crew, failed):
        results |= {name: {"error": why} for name, why in failed.items()}
        for worker in crew:
            results[worker.name] = row = {}
            for limits in (("ip",), ("ip", "user", "all")):
                if plan.late:
                    row[len(limits)] = LEFT_OUT
                    continue
                try:
                    worker.admit(limits, 1, 10, 7)  # scripts are sent once
                    before = _processor_time(farm.redis)
                    worker.admit(limits, processes, plan.size.each, 7)
                    used = _processor_time(farm.redis) - before
                except Failed as error:
                    row[len(limits)] = str(error)
                else:
                    row[len(limits)] = round(used * 1e6 / (processes * plan.size.each), 2)
    return results


def _processor_time(client: redis_client.Redis) -> float:
    info = client.info("cpu")
    return info["used_cpu_user"] + info["used_cpu_sys"]


def _script_calls(client: redis_client.Redis) -> int:
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval", "fcall"))


# -- outages -------------------------------------------------------------------------------------------------


def outages(plan: Plan, farm: Farm) -> dict[str, Any]:
    """Seconds for 20 requests, one after the other, without an answer from Redis; the loop's stall."""
    results: dict[str, Any] = {"paused": {}, "refused": {}, "stall": {}}
    for backend in plan.some_on(plan.size.outages_on):
        for kind in ("paused", "refused"):
            if plan.late:
                results[kind][backend] = {name: {"error": LEFT_OUT} for name in plan.on(backend)}
                continue
            plan.say(f"{kind} Redis, {backend}")
            with (
                _victim() as (victim, its),
                workers(plan.on(backend), its.backend(backend)) as (crew, failed),
            ):
                results[kind][backend] = {name: {"error": why} for name, why in failed.items()}
                results[kind][backend] |= _outage(crew, victim, kind, plan.size.outage_bound)
    if DJANGO_REDIS in plan.backends:
        plan.say("stall of the loop")
        with (
            _victim() as (victim, its),
            workers(plan.on(DJANGO_REDIS), its.backend(DJANGO_REDIS)) as (crew, _),
        ):
            results["stall"] = {worker.name: _stall(worker, victim) for worker in crew}
    return results


@contextlib.contextmanager
def _victim() -> Iterator[tuple[Server, Farm]]:
    """A Redis to be ill-treated."""
    server = start_redis()
    assert isinstance(server, Server)  # the farm has one too
    try:
        yield server, Farm({"redis": server.port}, "")
    finally:
        server.stop()


def _outage(crew: list[Worker], victim: Server, kind: str, bound: float) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    ready = []
    for worker in crew:
        try:
            for identity in range(5):
                worker.hit(("ip",), identity)
            ready.append(worker)
        except Failed as error:
            answers[worker.name] = {"error": str(error)}
    if kind == "paused":  # they wait, all at the same time: nobody takes a processor from the others for long
        victim.pause()
        for worker in ready:
            worker.order("survive", 20, bound)
    else:
        victim.kill()
    for worker in ready:
        if kind == "refused":
            worker.order("survive", 20, bound)
        try:
            seconds, statuses = worker.answer()
            answers[worker.name] = {"seconds": round(seconds, 3), "answers": statuses}
        except Failed as error:
            answers[worker.name] = {"error": str(error)}
    return answers


def _stall(worker: Worker, victim: Server) -> Any:
    try:
        worker.hit(("ip",), 0, "async")
        victim.pause()
        worker.order("stall", 0.45, 5)
        time.sleep(0.3)
        victim.resume()
        seconds, answers = worker.answer()
        return {"longest_ms": round(seconds * 1000, 1), "answers": answers}
    except NotSupported as reason:
        return f"not supported: {reason}"
    except Failed as error:
        return str(error)
    finally:
        victim.resume()


# -- memory and growth ---------------------------------------------------------------------------------------


def memory(plan: Plan, farm: Farm) -> dict[str, Any]:
    """Bytes of Redis that one more identity takes: the difference in used_memory of a server of its own."""
    results: dict[str, Any] = {}
    names = plan.on(DJANGO_REDIS) if DJANGO_REDIS in plan.backends else []
    for pair in (
        names[i : i + 2] for i in range(0, len(names), 2)
    ):  # two at a time: one fills while the other's server works
        if plan.late:
            results |= {name: {"error": LEFT_OUT} for name in pair}
            continue
        plan.say(f"memory of {plan.size.identities:,} identities, {' and '.join(pair)}")
        with contextlib.ExitStack() as stack:
            filling: list[tuple[Worker, redis_client.Redis, int]] = []
            for name in pair:
                _, its = stack.enter_context(_victim())
                crew, failed = stack.enter_context(workers([name], its.backend(DJANGO_REDIS)))
                try:
                    (worker,) = crew
                    worker.fill(0, 1)  # its scripts and connections
                    filling.append((worker, its.redis, its.redis.info("memory")["used_memory"]))
                    worker.order("fill", 1, plan.size.identities)
                except (Failed, ValueError) as error:
                    results[name] = {"error": failed.get(name, str(error))}
            for worker, client, before in filling:
                try:
                    worker.answer(patience=240)
                    used = client.info("memory")["used_memory"] - before
                    results[worker.name] = {
                        "bytes": round(used / plan.size.identities, 1),
                        "keys": client.dbsize(),
                    }
                except Failed as error:
                    results[worker.name] = {"error": str(error)}
    return results


def growth(plan: Plan, farm: Farm) -> dict[str, Any]:
    """What one request costs among so many identities: ``{backend: {adapter: {population: summary}}}``."""
    results: dict[str, Any] = {}
    if OURS[0] not in plan.adapters:
        return results
    with workers([RawEvalsha.name], farm.backend(DJANGO_REDIS)) as (raw, _):
        for backend in plan.in_time((DJANGO_REDIS, LOCMEM, SQLITE, POSTGRES), results):
            plan.say(f"growth on {backend}")
            results[backend] = {OURS[0]: (row := {})}
            with workers([OURS[0]], farm.backend(backend)) as (crew, failed):
                for have, want in zip((0, *plan.size.population), plan.size.population, strict=False):
                    if plan.late:
                        row[want] = LEFT_OUT
                        continue
                    try:
                        crew[0].grow(have, want)
                        situation = f"among:{want}"
                        rounds = Times(_calls(crew[0], situation, plan.size.round_us))
                        for _ in range(plan.size.rounds):
                            unit = _unit(raw[0], situation, plan.size)
                            rounds.add(*crew[0].round(situation, rounds.calls), unit)
                        row[want] = rounds.summary()
                    except (Failed, IndexError) as error:
                        row[want] = str(failed.get(OURS[0], error))
                        break
    farm.redis.flushall()
    return results
