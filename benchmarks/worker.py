"""One limiter on one backend, in a process of its own: does what a pipe tells it, one thing at a time."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import json
import logging
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from django.http import HttpResponse

from benchmarks import urls
from benchmarks.adapters import (
    ADAPTERS,
    COUNT_SCRIPT,
    DAY,
    LIMITS,
    Adapter,
    Backend,
    Limit,
    NotSupported,
    through,
)

POOL = 64
"""Identities that take turns where many are asked for: all are counted already when the timing starts."""
GROWN = 70_000
"""The first of the identities that ``grow`` makes."""
WORK = 11
"""Requests whose bytecodes are counted; the first is left out."""
HURRY = 40
"""Seconds after which one of many processes is ended, wherever it is."""
HAMMERING = 10
"""Identities that are over their limit and go on."""
STANDARD_MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]


def serve(pipe: Connection, name: str, backend: Backend, index: int) -> None:
    """Obey until told to stop or left alone."""
    # What a limiter logs about denials and outages is no part of its time: nothing here handles it.
    logging.lastResort = None
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        worker: Any = Worker(ADAPTERS[name], backend, index)
        pipe.send(("ok", None))
        while (order := pipe.recv()) is not None:
            method, args = order
            try:
                pipe.send(("ok", getattr(worker, method)(*args)))
            except NotSupported as reason:
                pipe.send(("not supported", str(reason)))
            except Exception as error:  # noqa: BLE001 - told to the parent
                pipe.send(("failed", _describe(error)))
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001 - told to the parent
        pipe.send(("failed", _describe(error)))
    sys.stdout.flush()
    os._exit(0)  # threads that a limiter left behind are not waited for


def _describe(error: BaseException) -> str:
    if os.environ.get("BENCHMARKS_TRACEBACK"):
        traceback.print_exc()
    return f"{type(error).__name__}: {error}"[:300]


class Spent(NamedTuple):
    """Microseconds a call. On a busy machine the median tells what the code costs, the mean what the machine made of it."""

    median: float
    mean: float

    @classmethod
    def of(cls, nanoseconds: list[int]) -> Spent:
        return cls(statistics.median(nanoseconds) / 1000, statistics.fmean(nanoseconds) / 1000)


@dataclass
class Situation:
    """Something to time: ``call(item)`` for each item, against ``bare(item)`` for items of the same kind."""

    items: Callable[[int], list[Any]]
    call: Callable[[Any], Any]
    bare: Callable[[Any], Any]
    status: int = 200
    bare_items: Callable[[int], list[Any]] | None = None
    """Where the floor needs other items."""


class Worker:
    def __init__(self, adapter: type[Adapter], backend: Backend, index: int) -> None:
        import django
        from django.conf import settings

        self.index = index
        self.adapter = adapter(backend, f"b{index}")
        settings.configure(
            SECRET_KEY="only-for-benchmarks-" + "x" * 40,
            ALLOWED_HOSTS=["*"],
            ROOT_URLCONF="benchmarks.urls",
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            USE_TZ=True,
            INSTALLED_APPS=[
                "django.contrib.auth",
                "django.contrib.contenttypes",
                "django.contrib.sessions",
                "django.contrib.messages",
                *self.adapter.apps,
            ],
            LOGGING_CONFIG=None,
            CACHES={"default": dict(backend.cache)},
            DATABASES=dict(backend.databases),
            **self.adapter.settings(),
        )
        django.setup()
        self._doors: dict[Any, Any] = {}
        self._situations: dict[str, Situation] = {}
        self._fresh = 1_000
        self._runner: asyncio.Runner | None = None

    def prepare(self) -> None:
        """Tables. Told to one worker after the other, since two at a time would trip over each other."""
        from django.conf import settings
        from django.core.management import call_command

        if settings.CACHES["default"]["BACKEND"].endswith("DatabaseCache"):
            call_command("createcachetable", verbosity=0)
        self.adapter.prepare()

    # -- one request -----------------------------------------------------------------------------------------

    def hit(self, limits: Sequence[str], identity: int, how: str = "sync") -> int:
        """One request of that caller under these limits; the status of its answer."""
        call, items = self._door(tuple(limits), how)
        return call(items([identity])[0]).status_code

    def statements(self, limits: Sequence[str], identity: int) -> int:
        """The same, but the number of database statements it took."""
        from django.db import connections

        count = 0

        def counting(execute: Any, *args: Any) -> Any:
            nonlocal count
            count += 1
            return execute(*args)

        with connections["default"].execute_wrapper(counting):
            self.hit(limits, identity)
        return count

    def prove(self) -> dict[str, str]:
        """Whether the fourth request is denied where three are allowed, by door: "" or what went wrong."""
        doors = {
            "one limit": (("ip3",), "sync"),
            "two limits": (("ip", "user3"), "sync"),
            "three limits": (("ip", "user", "all3"), "sync"),
            "handler": (("ip3",), "handler"),
            "async": (("ip3",), "async"),
        }
        return {name: self._prove(limits, how, 10 + i) for i, (name, (limits, how)) in enumerate(doors.items())}

    def _prove(self, limits: tuple[str, ...], how: str, identity: int) -> str:
        try:
            statuses = [self.hit(limits, identity, how) for _ in range(4)]
            other = self.hit(limits, identity + 100, how)
        except NotSupported as reason:
            return f"not supported: {reason}"
        except Exception as error:  # noqa: BLE001 - told to the parent
            return _describe(error)
        if statuses != [200, 200, 200, 429]:
            return f"does not limit: {statuses}"
        if other != 200 and "all3" not in limits:
            return f"denies another caller: {other}"
        return ""

    # -- timing ----------------------------------------------------------------------------------------------

    def round(self, situation: str, count: int) -> tuple[Spent, Spent]:
        """What so many limited and so many bare calls took."""
        s = self._situation(situation)
        limited, bare = s.items(count), (s.bare_items or s.items)(count)
        gc.collect()
        gc.freeze()  # what is there now is never walked through again, in this round or before the next
        run = self._timed_async if situation == "async" else _timed
        bare_times, _ = run(s.bare, bare)
        times, answer = run(s.call, limited)
        if answer is not None and answer.status_code != s.status:
            raise RuntimeError(f"answered {answer.status_code}, not {s.status}")
        return Spent.of(times), Spent.of(bare_times)

    def _situation(self, name: str) -> Situation:
        if name not in self._situations:
            method, _, argument = name.partition(":")
            make = getattr(self, "_" + method.replace("-", "_"))
            self._situations[name] = make(argument) if argument else make()
        return self._situations[name]

    def _allowed(self, limits: Sequence[str] = ("ip",), how: str = "sync", identities: int = POOL) -> Situation:
        call, items = self._door(tuple(limits), how)
        bare, bare_items = self._door((), how)
        for item in items(range(identities)):
            call(item)
        if how == "async":
            call, bare = call.awaitable, bare.awaitable
        turn = itertools.cycle(range(identities))

        def next_(n: int) -> list[int]:
            return list(itertools.islice(turn, n))

        return Situation(lambda n: items(next_(n)), call, bare, bare_items=lambda n: bare_items(next_(n)))

    def _among(self, population: str) -> Situation:
        """Callers picked from so many, all of whom have been counted before."""
        call, items = self._door(("ip",), "sync")
        bare, _ = self._door((), "sync")
        pick = random.Random(1)
        return Situation(lambda n: items([GROWN + pick.randrange(int(population)) for _ in range(n)]), call, bare)

    def _hot(self) -> Situation:
        return self._allowed(identities=1)

    def _two(self) -> Situation:
        return self._allowed(("ip", "user"))

    def _three(self) -> Situation:
        return self._allowed(("ip", "user", "all"))

    def _handler(self) -> Situation:
        return self._allowed(how="handler")

    def _async(self) -> Situation:
        return self._allowed(how="async")

    def _denied(self) -> Situation:
        """Clients over their limit that go on: whoever remembers denials may have just heard this one."""
        call, items = self._door(("ip3",), "sync")
        bare, _ = self._door((), "sync")
        callers = range(500, 500 + HAMMERING)
        for caller in callers:
            for item in items([caller] * 3):
                call(item)

        def hammering(n: int) -> list[Any]:
            for item in items(callers):
                call(item)
            return items([callers[i % HAMMERING] for i in range(n)])

        return Situation(hammering, call, bare, 429)

    def _denied_first(self) -> Situation:
        """The first denial of each client: nobody can remember it."""
        call, items = self._door(("ip3",), "sync")
        bare, _ = self._door((), "sync")

        def spent(n: int) -> list[Any]:
            callers = range(self._fresh, self._fresh + n)
            self._fresh += n
            for _ in range(3):
                for item in items(callers):
                    call(item)
            return items(callers)

        return Situation(spent, call, bare, 429)

    def _exempt(self) -> Situation:
        return self._passing("/assets/logo.png")

    def _no_scope(self) -> Situation:
        return self._passing("/plain/")

    def _passing(self, path: str) -> Situation:
        """The middleware around a request that it has nothing to do with."""
        if not self.adapter.can_pass(path):
            raise NotSupported("")
        from django.urls import resolve

        _, items = self._door((), "sync")
        match = resolve("/bare/")

        def paths(n: int) -> list[Any]:
            requests = items([0] * n)
            for request in requests:
                request.path = request.path_info = path
                request.resolver_match = match
            return requests

        return Situation(paths, through(self.adapter.middleware, _view), through(lambda inner: inner, _view))

    def _door(self, limits: tuple[str, ...], how: str) -> tuple[Any, Callable[[Sequence[int]], list[Any]]]:
        """What to call, and what to call it with for each of these identities. No limits: the floor."""
        if (limits, how) not in self._doors:
            chosen = [LIMITS[name] for name in limits]
            signed_in = any(limit.who == "user" for limit in chosen) or not limits
            make = {"sync": self._sync_door, "async": self._async_door, "handler": self._handler_door}[how]
            self._doors[limits, how] = make(chosen, signed_in)
        return self._doors[limits, how]

    def _sync_door(self, limits: list[Limit], signed_in: bool) -> tuple[Any, Any]:
        call = self.adapter.limited(_view, limits) if limits else self.adapter.bare(_view)
        return call, lambda identities: [self._request(i, signed_in) for i in identities]

    def _async_door(self, limits: list[Limit], signed_in: bool) -> tuple[Any, Any]:
        call = _InLoop(self._run, self.adapter.limited_async(_async_view, limits) if limits else _async_view)
        return call, lambda identities: [self._async_request(i, signed_in) for i in identities]

    def _handler_door(self, limits: list[Limit], signed_in: bool) -> tuple[Any, Any]:
        """A request as a WSGI server hands it to Django, with the middleware of a new project."""
        from django.core.handlers.wsgi import WSGIHandler
        from django.test import override_settings
        from django.urls import clear_url_caches, path

        view, middleware = self.adapter.installed(_view, limits) if limits else (self.adapter.bare(_view), [])
        route = f"{'-'.join(limit.name for limit in limits) or 'floor'}/"
        urls.urlpatterns.append(path(route, view))
        clear_url_caches()
        standard = STANDARD_MIDDLEWARE
        with override_settings(MIDDLEWARE=[standard[0], *middleware, *standard[1:]]):
            handler = WSGIHandler()

        def call(environ: dict[str, Any]) -> Any:
            response = handler(environ, _start_response)
            response.close()
            return response

        return call, lambda identities: [self._environ(i, f"/{route}") for i in identities]

    # -- requests --------------------------------------------------------------------------------------------

    def _address(self, identity: int) -> str:
        number = (11 << 24) + (self.index << 16) + identity
        return ".".join(str(byte) for byte in number.to_bytes(4))

    def _environ(self, identity: int, path: str = "/bare/") -> dict[str, Any]:
        return {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": path,
            "SCRIPT_NAME": "",
            "QUERY_STRING": "",
            "SERVER_NAME": "testserver",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "REMOTE_ADDR": self._address(identity),
            "HTTP_HOST": "testserver",
            "HTTP_ACCEPT": "*/*",
            "HTTP_USER_AGENT": "benchmarks",
            "wsgi.input": io.BytesIO(),
            "wsgi.url_scheme": "http",
        }

    def _request(self, identity: int, signed_in: bool) -> Any:
        from django.core.handlers.wsgi import WSGIRequest

        request = WSGIRequest(self._environ(identity))
        request.user = self._user(identity, signed_in)
        return request

    def _async_request(self, identity: int, signed_in: bool) -> Any:
        from django.core.handlers.asgi import ASGIRequest

        user = self._user(identity, signed_in)

        async def auser() -> Any:
            return user

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "path": "/bare/",
            "query_string": b"",
            "headers": [(b"host", b"testserver"), (b"accept", b"*/*")],
            "client": (self._address(identity), 50_000),
            "server": ("testserver", 80),
        }
        request = ASGIRequest(scope, io.BytesIO())
        request.user, request.auser = user, auser
        return request

    @staticmethod
    def _user(identity: int, signed_in: bool) -> Any:
        from django.contrib.auth.models import AnonymousUser, User

        return User(pk=identity + 1) if signed_in else AnonymousUser()

    # -- async -----------------------------------------------------------------------------------------------

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        """In the one loop that this process keeps, as an ASGI server does."""
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(awaitable)  # type: ignore[arg-type]

    def _timed_async(self, call: Callable[[Any], Awaitable[Any]], items: list[Any]) -> tuple[list[int], Any]:
        async def timed() -> tuple[list[int], Any]:
            answer = None
            clock = time.perf_counter_ns
            times = []
            for item in items:
                start = clock()
                answer = await call(item)
                times.append(clock() - start)
            return times, answer

        return self._run(timed())

    def stall(self, seconds: float, requests: int) -> tuple[float, dict[str, int]]:
        """The longest that the loop stood still, while so many requests were under way for so long."""
        call, items = self._door(("ip",), "async")

        async def watched() -> tuple[float, dict[str, int]]:
            async def one(item: Any) -> str:
                try:
                    return str((await call.awaitable(item)).status_code)
                except Exception as error:  # noqa: BLE001 - told to the parent
                    return type(error).__name__

            async def ticking() -> float:
                longest, last = 0.0, time.perf_counter()
                end = last + seconds
                while last < end:
                    await asyncio.sleep(0.002)
                    now = time.perf_counter()
                    longest, last = max(longest, now - last), now
                return longest

            ticker = asyncio.create_task(ticking())
            answers = await asyncio.gather(*(one(item) for item in items([0] * requests)))
            return await ticker, dict(Counter(answers))

        return self._run(watched())

    # -- work ------------------------------------------------------------------------------------------------------

    def work(self, situation: str) -> tuple[int, int]:
        """Bytecodes and calls that the limit adds to one request: the same in every run, whatever the machine does."""
        s = self._situation(situation)
        limited, bare = s.items(WORK), (s.bare_items or s.items)(WORK)
        run = self._counted_async if situation == "async" else _counted
        run(s.bare, bare[:1])  # what the first call alone does
        run(s.call, limited[:1])
        floor, total = run(s.bare, bare[1:]), run(s.call, limited[1:])
        return tuple(round((t - f) / (WORK - 1)) for t, f in zip(total, floor, strict=True))  # type: ignore[return-value]

    def _counted_async(self, call: Callable[[Any], Awaitable[Any]], items: list[Any]) -> tuple[int, int]:
        async def all_of_them(items: list[Any]) -> None:
            for item in items:
                await call(item)

        return _counted(lambda items: self._run(all_of_them(items)), [items])

    # -- the units -------------------------------------------------------------------------------------------

    def _unit_evalsha(self) -> Situation:
        """One redis-py EVALSHA with hiredis, and nothing around it."""
        import redis

        client = redis.Redis.from_url(self.adapter.backend.url, socket_timeout=0.25)
        sha = client.script_load(COUNT_SCRIPT)
        return self._unit(lambda key: client.evalsha(sha, 1, key, DAY * 1000) and None)

    def _unit_incr(self) -> Situation:
        import redis

        client = redis.Redis.from_url(self.adapter.backend.url, socket_timeout=0.25)
        return self._unit(lambda key: client.incr(key) and None)

    def _unit_tcp(self) -> Situation:
        """INCR on a socket, packed beforehand: what the network and the server take."""
        host, port = self.adapter.backend.url.removeprefix("redis://").split("/")[0].split(":")
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def incr(_key: str) -> None:
            connection.sendall(b"*2\r\n$4\r\nINCR\r\n$8\r\nunit:tcp\r\n")
            connection.recv(64)

        return self._unit(incr)

    def unit_async(self, count: int) -> Spent:
        """What so many redis.asyncio EVALSHA took."""
        if "unit async" not in self._doors:
            import redis.asyncio

            client = redis.asyncio.Redis.from_url(self.adapter.backend.url, socket_timeout=0.25)
            sha = self._run(client.script_load(COUNT_SCRIPT))

            async def call(key: str) -> None:
                await client.evalsha(sha, 1, key, DAY * 1000)

            self._doors["unit async"] = call
        times, _ = self._timed_async(self._doors["unit async"], [f"unit:{i % POOL}" for i in range(count)])
        return Spent.of(times)

    @staticmethod
    def _unit(call: Callable[[str], None]) -> Situation:
        return Situation(lambda n: [f"unit:{i % POOL}" for i in range(n)], call, lambda key: None)

    # -- many processes --------------------------------------------------------------------------------------

    def admit(self, limits: Sequence[str], processes: int, each: int, identity: int) -> dict[str, int]:
        """So many processes send so many requests of one caller at once: how often each answer came."""
        from django.db import connections

        call, items = self._door(tuple(limits), "sync")
        connections.close_all()  # as servers do before they fork: nobody may share one
        start_read, start_write = os.pipe()
        children = []
        for _ in range(processes):
            result_read, result_write = os.pipe()
            pid = os.fork()
            if pid == 0:
                with contextmanager(_exiting)():
                    signal.alarm(HURRY)
                    os.close(start_write)
                    os.read(start_read, 1)  # until the parent closes its end
                    answers = Counter(_answer(call, item) for item in items([identity] * each))
                    os.write(result_write, json.dumps(answers).encode())
            os.close(result_write)
            children.append((pid, result_read))
        time.sleep(0.05)
        os.close(start_write)
        os.close(start_read)
        total: Counter[str] = Counter()
        for pid, result_read in children:
            with os.fdopen(result_read, "rb") as result:
                total.update(json.loads(result.read() or b'{"died": 1}'))
            os.waitpid(pid, 0)
        return dict(total)

    # -- outages, memory -------------------------------------------------------------------------------------

    def survive(self, requests: int, bound: float) -> tuple[float, dict[str, int]]:
        """Seconds for so many requests in a row (fewer when they take too long), and their answers."""
        call, items = self._door(("ip",), "sync")
        answers: Counter[str] = Counter()
        start = time.perf_counter()
        for item in items(range(requests)):
            answers[_answer(call, item)] += 1
            if time.perf_counter() - start > bound:
                break
        return time.perf_counter() - start, dict(answers)

    def fill(self, first: int, count: int) -> None:
        """One request each of so many callers."""
        call, items = self._door(("ip",), "sync")
        for i in range(first, first + count):
            call(items([i])[0])

    # -- growth ----------------------------------------------------------------------------------------------

    def grow(self, have: int, want: int) -> None:
        """Put the counters of so many callers there, as copies of one that the limiter itself wrote."""
        from django.core.cache import caches
        from django.core.cache.backends.db import DatabaseCache

        self.fill(GROWN - 1, 1)
        address = self._address(GROWN - 1)
        names = [self._address(GROWN + i) for i in range(have, want)]
        cache = caches["default"]
        if isinstance(cache, DatabaseCache):
            self._grow_table(cache._table, address, names)
        elif self.adapter.backend.url:
            import redis

            client = redis.Redis.from_url(self.adapter.backend.url)
            (key,) = (k.decode() for k in client.scan_iter(f"*{address}*", count=1000))
            pipe = client.pipeline(transaction=False)
            for i, name in enumerate(names):
                pipe.set(key.replace(address, name), 1, px=DAY * 1000)
                if i % 1000 == 999:
                    pipe.execute()
            pipe.execute()
        else:
            (key,) = (key for key in cache._cache if address in key)  # LocMem: its dictionaries
            for name in names:
                copy = key.replace(address, name)
                cache._cache[copy], cache._expire_info[copy] = cache._cache[key], cache._expire_info[key]

    @staticmethod
    def _grow_table(table: str, address: str, names: list[str]) -> None:
        from django.db import connection, transaction

        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SELECT cache_key, value, expires FROM {table} WHERE cache_key LIKE %s", [f"%{address}%"])
            ((key, value, expires),) = cursor.fetchall()
            for start in range(0, len(names), 300):
                some = names[start : start + 300]
                values = [each for name in some for each in (key.replace(address, name), value, expires)]
                places = ", ".join(["(%s, %s, %s)"] * len(some))
                cursor.execute(f"INSERT INTO {table} (cache_key, value, expires) VALUES {places}", values)


class _InLoop:
    """An async view, called from outside the loop; ``awaitable`` is the view itself."""

    def __init__(self, run: Callable[[Awaitable[Any]], Any], view: Callable[[Any], Awaitable[Any]]) -> None:
        self._run = run
        self.awaitable = view

    def __call__(self, request: Any) -> Any:
        return self._run(self.awaitable(request))


def _view(request: Any) -> Any:
    return HttpResponse(b"ok")


async def _async_view(request: Any) -> Any:
    return _view(request)


def _start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> None:
    pass


def _timed(call: Callable[[Any], Any], items: list[Any]) -> tuple[list[int], Any]:
    """Nanoseconds of each call, and the last answer."""
    answer = None
    clock = time.perf_counter_ns
    times = []
    for item in items:
        start = clock()
        answer = call(item)
        times.append(clock() - start)
    return times, answer


def _counted(call: Callable[[Any], Any], items: list[Any]) -> tuple[int, int]:
    """Bytecodes and calls, of Python and of C functions, in this thread."""
    if sys.version_info < (3, 12):
        raise NotSupported("sys.monitoring came with Python 3.12")
    monitoring, events = sys.monitoring, sys.monitoring.events
    tool, thread = monitoring.PROFILER_ID, threading.get_ident()
    bytecodes = calls = 0

    def on_bytecode(code: Any, offset: int) -> None:
        nonlocal bytecodes
        bytecodes += threading.get_ident() == thread

    def on_call(code: Any, offset: int, function: Any, argument: Any) -> None:
        nonlocal calls
        calls += threading.get_ident() == thread

    monitoring.use_tool_id(tool, "benchmarks")
    monitoring.register_callback(tool, events.INSTRUCTION, on_bytecode)
    monitoring.register_callback(tool, events.CALL, on_call)
    try:
        monitoring.set_events(tool, events.INSTRUCTION | events.CALL)
        for item in items:
            call(item)
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return bytecodes, calls


def _answer(call: Callable[[Any], Any], item: Any) -> str:
    try:
        return str(call(item).status_code)
    except Exception as error:  # noqa: BLE001 - told to the parent
        return type(error).__name__


def _exiting() -> Iterator[None]:
    """A forked child never returns into its parent's code."""
    try:
        yield
    finally:
        os._exit(0)
