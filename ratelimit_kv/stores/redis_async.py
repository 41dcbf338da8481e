"""Redis and Valkey in an event loop: one connection a loop, shared by all who wait in it.

Commands are written as they come and the replies arrive in that order, so that many can be under way. Whoever is
cancelled leaves his place in the queue: the reply to him goes to nobody, and the connection is as good as before.
To connect, with TLS, credentials, database and protocol, is left to the client library. What follows is this queue,
for a third of the library's time when one waits and for a fifth when fifty do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from importlib import import_module
from threading import Lock
from typing import Any

from .base import StoreError
from .redis_link import Link, library

__all__ = ["AsyncLink", "Loops"]


GRACE = 0.005
"""Seconds that a loop gets to read a reply which seems to be late."""
TURNS = 10
"""Times that a loop has to look in vain before a server that it connects to counts as silent."""


class _Incomplete(Exception):
    """The rest of the reply is still to come."""


def _reply(data: bytes, start: int, error: Callable[[str], Exception]) -> tuple[Any, int]:
    """The reply that starts there, and where it ends; ``error`` makes an exception of an error reply.

    Raises _Incomplete, and ValueError for what no command of ours is answered with.
    """
    end = data.find(b"\r\n", start)
    if end < 0:
        raise _Incomplete
    mark, line, end = data[start : start + 1], data[start + 1 : end], end + 2
    if mark == b"$":
        size = int(line)
        if size < 0:
            return None, end
        if len(data) < end + size + 2:
            raise _Incomplete
        return data[end : end + size], end + size + 2
    if mark == b"*":
        items = []
        for _ in range(int(line)):
            item, end = _reply(data, end, error)
            items.append(item)
        return items, end
    if mark == b":":
        return int(line), end
    if mark == b"_":
        return None, end
    if mark == b"-":
        return error(line.decode("utf-8", "replace")), end
    raise ValueError("no reply to a command of ours")


class _Line(asyncio.Protocol):
    """A connection that the library has made, taken over from it."""

    def __init__(self, connection: Any, timeout: float, exceptions: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection  # it would close the socket if it were forgotten
        self._transport = connection._writer.transport
        self._timeout = timeout
        self._exceptions = exceptions
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        """Who waits for a reply, and since when."""
        self._alarm: asyncio.TimerHandle | None = None
        self._is_late = False
        """Whether the loop has been given its turn to read what seems to be late."""
        self._data = b""
        self.closed = False
        self._transport.set_protocol(self)

    def ask(self, command: bytes) -> asyncio.Future[Any]:
        """The reply to a packed command, or the library's error."""
        future = self._loop.create_future()
        self._waiting.append((future, self._loop.time()))
        self._transport.write(command)
        if self._alarm is None:
            self._alarm = self._loop.call_later(self._timeout, self._look)
        return future

    def _look(self) -> None:
        """Whether somebody has waited too long. One alarm for all: one for each would cost a fifth of a command."""
        self._alarm = None
        if self._waiting:
            left = self._waiting[0][1] + self._timeout - self._loop.time()
            if left > 0.001:
                self._is_late = False
                self._alarm = self._loop.call_later(left, self._look)
            elif not self._is_late:
                # Perhaps it is the loop that was busy, and the reply is here, unread. A turn will show.
                self._is_late = True
                self._alarm = self._loop.call_later(GRACE, self._look)
            else:
                self.close(self._exceptions.TimeoutError("Timeout reading from the server"))

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        self._data += data
        start = 0
        try:
            while start < len(self._data):
                reply, start = _reply(self._data, start, self._error)
                future, _ = self._waiting.popleft()
                if future.done():
                    continue  # cancelled
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except _Incomplete:
            pass
        except (ValueError, IndexError):
            self.close(self._exceptions.InvalidResponse("The server sends what nobody has asked for"))
        self._data = self._data[start:]

    def _error(self, text: str) -> Exception:
        named = {"NOSCRIPT": self._exceptions.NoScriptError, "READONLY": self._exceptions.ReadOnlyError}
        error: Exception = named.get(text.partition(" ")[0], self._exceptions.ResponseError)(text)
        return error

    def connection_lost(self, error: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        self.close(self._exceptions.ConnectionError("Connection closed by server"))

    def close(self, error: Exception) -> None:
        """Hang up. Whoever waits gets the error."""
        if self.closed:
            return
        self.closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._transport.abort()
        self._connection._reader = self._connection._writer = None
        for future, _ in self._waiting:
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()


class AsyncLink:
    """The way to one server in one event loop."""

    def __init__(self, connection_class: Any, settings: dict[str, Any], link: Link) -> None:
        """``connection_class`` and its ``settings`` connect to where ``link`` does."""
        self._connection_class = connection_class
        self._settings = settings
        self.exceptions, self.errors = link.exceptions, link.errors
        self._line: _Line | None = None
        self._connecting: asyncio.Task[_Line] | None = None
        self._ending: AsyncGenerator[None] | None = None

    async def call(self, command: bytes) -> Any:
        """The reply to a packed command, which is sent once, whatever happens. Raises as :meth:`Link.call` does."""
        line = self._line
        if line is None or line.closed:
            line = await self._connect()
        try:
            return await line.ask(command)
        except self.exceptions.ReadOnlyError as error:
            line.close(error)  # the primary when we connected: look for the one that is it now
            raise

    async def _connect(self) -> _Line:
        # Who comes first connects and the others wait for that; it goes on when he is cancelled.
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._open())
            self._connecting.add_done_callback(self._connected)
        return await asyncio.shield(self._connecting)

    def _connected(self, task: asyncio.Task[_Line]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._line = task.result()

    async def _open(self) -> _Line:
        if self._ending is None:
            self._ending = self._close_with_the_loop()
            await anext(self._ending)
        connection = self._connection_class(**self._settings | {"socket_timeout": None, "socket_connect_timeout": None})
        try:
            await self._connect_in_turns(connection)
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, self.errors) or not isinstance(error, Exception):
                raise
            # A credential provider is the project's own code.
            raise StoreError(f"cannot connect: {type(error).__name__}", outage=True) from error
        return _Line(connection, self._settings["socket_timeout"], self.exceptions)

    async def _connect_in_turns(self, connection: Any) -> None:
        """Let the library connect. Raises its TimeoutError when the server has been silent for a timeout.

        Connecting takes several turns of the loop. One that is busy with a burst of requests may take longer for a turn
        than a server may for an answer: so what counts is how often the loop came by and there was nothing new.
        """
        replies, read = 0, connection.read_response

        async def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal replies
            try:
                return await read(*args, **kwargs)
            finally:  # an error is an answer too
                replies += 1

        connection.read_response = counted
        connecting = asyncio.ensure_future(connection.connect())
        connecting.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be there to ask
        turns, before = 0, (False, 0)
        try:
            while not connecting.done():
                timeout = self._settings["socket_timeout" if connection.is_connected else "socket_connect_timeout"]
                await asyncio.wait({connecting}, timeout=timeout / TURNS)
                progress = (connection.is_connected, replies)
                turns = turns + 1 if progress == before else 0
                before = progress
                if turns >= TURNS and not connecting.done():
                    raise self.exceptions.TimeoutError("Timeout connecting to server")
            connecting.result()
        finally:
            connecting.cancel()
            del connection.read_response

    async def _close_with_the_loop(self) -> AsyncGenerator[None]:
        # A loop that ends tells nobody, except asynchronous generators that have begun and not come to their end.
        try:
            yield
        finally:
            if self._line is not None:
                self._line.close(self.exceptions.ConnectionError("The event loop ends"))
                await asyncio.sleep(0)  # the transport closes its socket a step later


class Loops:
    """A link for each event loop that lives long enough to be worth one.

    A loop may have been made for a single request: an async view under WSGI, ``async_to_sync``. No request shall open
    a connection. So a loop gets a link when it has come back some times, or for some time.
    """

    uses = 20
    """Times that a loop does without a link ..."""
    seconds = 1.0
    """... unless the first was so long ago."""

    def __init__(self, link: Link | None) -> None:
        """Without a link, loops are counted and none is given one."""
        self._make = _maker(link) if link is not None else None
        self._known: dict[asyncio.AbstractEventLoop, tuple[AsyncLink | None, int, float]] = {}
        """Its link, how often it has asked for one, when it did first."""
        self._lock = Lock()

    def link(self) -> AsyncLink | None:
        """The link of the running loop; None for one that is new here, or when there is none for such a server."""
        loop = asyncio.get_running_loop()
        link, asked, since = self._known.get(loop) or (None, 0, loop.time())
        if link is None:
            if self._make is not None and (asked >= self.uses or loop.time() - since >= self.seconds):
                link = self._make()
            with self._lock:
                if not asked:
                    for other in [other for other in self._known if other.is_closed()]:
                        del self._known[other]
                self._known[loop] = link, asked + 1, since
        return link

    def is_new(self) -> bool:
        """Whether the running loop may be one for a single request."""
        loop = asyncio.get_running_loop()
        _, asked, since = self._known.get(loop) or (None, 0, loop.time())
        return asked <= self.uses and loop.time() - since < self.seconds


def _maker(link: Link) -> Callable[[], AsyncLink] | None:
    """A function that makes a link to the same server for an event loop, None when the library has none."""
    name = library(link.connection_class)
    settings = {key: value for key, value in link.settings.items() if key not in ("parser_class", "command_packer")}
    if link.connection_class.__module__ != f"{name}.connection" or "redis_connect_func" in settings:
        return None  # Sentinel's connection, or somebody's own
    with suppress(AttributeError, TypeError):
        connection_class = getattr(import_module(f"{name}.asyncio.connection"), link.connection_class.__name__)
        connection_class(**settings)
        return lambda: AsyncLink(connection_class, settings, link)
    return None
