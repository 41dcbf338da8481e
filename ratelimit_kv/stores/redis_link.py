"""Connections of our own to Redis or Valkey: one command, one reply, and no command twice.

The client of the cache is asked for its settings and left alone otherwise. It sends a command again when the
answer is late, so that one hit may count twice; it waits without end where the alias sets no timeout; django-redis
shares its pool among all aliases of one URL. And its way from a command to the socket takes longer than the way
from there to the server and back. So connections are made from the alias's settings, kept here, and handed
commands that are packed already.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any
from weakref import WeakSet

from .base import StoreError

__all__ = ["TIMEOUT", "Link", "bounded", "failure", "library", "link_to", "pack"]

TIMEOUT = 0.25
"""Seconds for which a socket is waited for where the alias sets no timeout."""


def library(connection_class: type) -> str:
    """Whose connection it is: "redis" or "valkey". These two differ in names alone. Raises TypeError for others."""
    for ancestor in connection_class.__mro__:
        root = ancestor.__module__.partition(".")[0]
        if root in ("redis", "valkey"):
            return root
    raise TypeError(f"{connection_class.__qualname__} is not a connection of redis-py or valkey-py")


def bounded(settings: dict[str, Any]) -> dict[str, Any]:
    """These connection settings with an end to every wait and without second attempts.

    A timeout that the alias sets stays as it is. Left out is what a pool hands to its own connections besides: its
    observers, and the notices of maintenance, which would come in between two replies.
    """
    of_the_pool = ("maint", "orig_", "oss_", "event_dispatcher", "himport_registry")
    kept = {name: value for name, value in settings.items() if not name.startswith(of_the_pool)}
    timeout = kept.get("socket_timeout") or TIMEOUT
    return kept | {
        "socket_timeout": timeout,
        "socket_connect_timeout": kept.get("socket_connect_timeout") or timeout,
        "retry": None,
        "retry_on_error": [],
        "retry_on_timeout": False,
    }


def pack(*arguments: bytes) -> bytes:
    """A command as it goes over the wire."""
    return b"*%d\r\n%b" % (
        len(arguments),
        b"".join([b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]),
    )


# -------------------------------------------------------------------------------------------------------- failures

_OF_ONE_COMMAND = frozenset({"ERR", "WRONGTYPE", "CROSSSLOT"})
"""Codes that blame the command. All others blame the server: READONLY, OOM, MISCONF, NOPERM, CLUSTERDOWN ..."""


def failure(error: Exception) -> StoreError:
    """What went wrong, for people and for the breaker: without keys, values or credentials."""
    ancestry = {ancestor.__name__ for ancestor in type(error).__mro__}
    kind, text = type(error).__name__, str(error).partition(", with args")[0]
    if "ResponseError" not in ancestry or "ConnectionError" in ancestry:
        outage = True
    elif kind == "ResponseError":  # the library cuts off the code ERR, and leaves those that it does not know
        code = text.partition(" ")[0]
        outage = (code.isupper() and code not in _OF_ONE_COMMAND) or "unknown command" in text
    else:
        outage = kind != "ClusterCrossSlotError"
    return StoreError(f"{kind}: {text[:200]}", outage=outage)


# ----------------------------------------------------------------------------------------------------- connections


def _always() -> bool:
    return True


def _readable(sock: Any) -> Callable[[], Any]:
    """A function that says whether something can be read from the socket now, be it that it is closed.

    It keeps its poll object; to make one for each command, as the library does, would cost three times as much.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return partial(poll.poll, 0)
    return lambda: select.select([sock], [], [], 0)[0]  # Windows, eventlet


class _Line:
    """One connection, and whether it has to be made (anew) before the next command."""

    __slots__ = ("connection", "stale")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.stale: Callable[[], Any] = _always

    def connect(self) -> None:
        self.close()
        self.connection.connect()
        # Nothing is under way between two commands. So what can be read then is the server's goodbye.
        self.stale = _readable(self.connection._sock)

    def close(self) -> None:
        self.stale = _always
        self.connection.disconnect()


class Link:
    """Connections to one server, for all threads of this process; a forked child starts without any."""

    def __init__(self, connection_class: type, settings: dict[str, Any], *, most: int, patience: float = 0) -> None:
        """``most``: connections at one time; ``patience``: seconds to wait for one when all are in use."""
        self.connection_class = connection_class
        self.settings = settings
        self._most = most
        self._patience = patience
        name = library(connection_class)
        self.exceptions: Any = import_module(f"{name}.exceptions")
        """The library's module of that name."""
        base: type[Exception] = getattr(self.exceptions, f"{name.capitalize()}Error")
        self.errors: tuple[type[Exception], ...] = (base, OSError)
        """All that :meth:`call` raises, StoreError apart."""
        self.start()
        _links.add(self)

    def start(self) -> None:
        """Begin without connections. Those of before are closed when nobody holds them any more."""
        self._idle: SimpleQueue[_Line] = SimpleQueue()
        self._lock = Lock()
        self._made = 0

    def _take(self) -> _Line:
        try:
            return self._idle.get_nowait()
        except Empty:
            pass
        with self._lock:
            if self._made < self._most:
                line = _Line(self.connection_class(**self.settings))
                self._made += 1
                return line
        try:
            return self._idle.get(self._patience > 0, self._patience)
        except Empty:
            raise StoreError(f"all {self._most} connections are in use", outage=True) from None

    def _ready(self, line: _Line) -> Any:
        """The line's connection, made anew if the server has closed it meanwhile, which is noticed before sending."""
        if line.stale():
            try:
                line.connect()
            except self.errors:
                raise
            except Exception as error:
                # A credential provider is the project's own code.
                raise StoreError(f"cannot connect: {type(error).__name__}", outage=True) from error
        return line.connection

    def call(self, command: bytes) -> Any:
        """The reply to a packed command, which is sent once, whatever happens.

        Raises what the library raises, and StoreError when no connection is to be had.
        """
        line = self._take()
        try:
            connection = self._ready(line)
            connection.send_packed_command([command])
            return connection.read_response(disable_decoding=True)
        except self.exceptions.ReadOnlyError:
            # This server was the primary when we connected. Let every connection look for the one that is it now.
            line.close()
            self._hang_up()
            raise
        except self.exceptions.ResponseError:
            raise  # a reply like any other: the connection is ready for the next command
        except BaseException:  # the reply may be unread, and would be taken for that to the next command
            line.close()
            raise
        finally:
            self._idle.put(line)

    def call_many(self, commands: Sequence[bytes]) -> list[Any]:
        """The replies to packed commands that are sent together; an error reply is an exception in its place."""
        line = self._take()
        replies: list[Any] = []
        try:
            connection = self._ready(line)
            connection.send_packed_command(commands)
            for _ in commands:
                try:
                    replies.append(connection.read_response(disable_decoding=True))
                except self.exceptions.ResponseError as error:
                    replies.append(error)
        except BaseException:
            line.close()
            raise
        finally:
            self._idle.put(line)
        return replies

    def _hang_up(self) -> None:
        """Close every connection that is not in use; each is made anew when it is needed."""
        idle = []
        with suppress(Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for line in idle:
            line.close()
            self._idle.put(line)


_links: WeakSet[Link] = WeakSet()


def _start_all() -> None:
    for link in _links:
        link.start()


if hasattr(os, "register_at_fork"):
    # Parent and child on one socket would read each other's replies.
    os.register_at_fork(after_in_child=_start_all)


def link_to(pool: Any) -> Link:
    """A link with the settings of a client's pool. With Sentinel, to whichever server is the primary."""
    settings = bounded(pool.connection_kwargs)
    if hasattr(pool, "sentinel_manager"):
        settings["connection_pool"] = _Primary(pool)
    # A BlockingConnectionPool waits for a connection when all are in use. So do we, if not as long.
    patience = min(getattr(pool, "timeout", None) or 0, settings["socket_timeout"])
    return Link(pool.connection_class, settings, most=pool.max_connections, patience=patience)


class _Primary:
    """Whom the library's connections under Sentinel ask for the address of the primary, whenever they connect.

    It stands in for the pool that they know, which asks without timeout and up to ten times over, and which
    django-valkey sets up for replicas.
    """

    is_master = True
    check_connection = False

    def __init__(self, pool: Any) -> None:
        self.service_name = pool.service_name
        self._sentinels = [link_to(sentinel.connection_pool) for sentinel in pool.sentinel_manager.sentinels]

    def get_master_address(self) -> tuple[str, int]:
        """Host and port. Raises the library's ConnectionError."""
        question = pack(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self.service_name.encode())
        for link in self._sentinels:
            with suppress(StoreError, *link.errors):
                if answer := link.call(question):
                    host, port = answer
                    return host.decode(), int(port)
        raise self._sentinels[0].exceptions.ConnectionError("no Sentinel knows a primary")
