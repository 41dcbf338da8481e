"""A loopback proxy that passes bytes on and counts what went over the wire."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """What clients sent since the last look."""

    trips: int = 0
    """Times a client began to speak after the server had: each costs one wait for the network."""
    commands: list[str] = field(default_factory=list)
    """Names of the commands, in the order they were sent."""


class Proxy:
    """Stands before the server on ``port`` and speaks ``protocol``: "redis", "memcached" or "postgres"."""

    def __init__(self, port: int, protocol: str) -> None:
        self._target = ("127.0.0.1", port)
        self._reader = {"redis": _RespReader, "memcached": _MemcacheReader, "postgres": _PostgresReader}[protocol]
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self) -> Traffic:
        """The traffic since the last call."""
        with self._lock:
            traffic, self._traffic = self._traffic, Traffic()
        return traffic

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            for key, _ in self._selector.select(0.05):
                if key.data is None:
                    self._accept()
                else:
                    key.data()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = self._reader()
        speaking = False

        def pump(source: socket.socket, sink: socket.socket, count: bool) -> None:
            nonlocal speaking
            try:
                data = source.recv(65536)
                if data and count:
                    names = list(reader.feed(data))
                    with self._lock:
                        self._traffic.trips += not speaking
                        self._traffic.commands += names
                speaking = count
                if data:
                    sink.sendall(data)
            except OSError:
                data = b""
            if not data:
                for end in (source, sink):
                    if end.fileno() >= 0:  # not yet closed by the other direction
                        self._selector.unregister(end)
                        end.close()

        self._selector.register(client, selectors.EVENT_READ, lambda: pump(client, server, True))
        self._selector.register(server, selectors.EVENT_READ, lambda: pump(server, client, False))


class _Reader:
    """Finds the commands in a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[str]:
        self._buffer += data
        while (found := self._one()) is not None:
            name, used = found
            self._buffer = self._buffer[used:]
            if name:
                yield name

    def _one(self) -> tuple[str, int] | None:
        """The first whole command and its length; None when more bytes are needed."""
        raise NotImplementedError


class _RespReader(_Reader):
    def _one(self) -> tuple[str, int] | None:
        position = self._buffer.find(b"\r\n")
        if position < 0:
            return None
        if not self._buffer.startswith(b"*"):  # an inline command
            return self._buffer[:position].split(b" ")[0].decode().upper(), position + 2
        words = []
        parts = int(self._buffer[1:position])
        position += 2
        for _ in range(parts):
            end = self._buffer.find(b"\r\n", position)
            if end < 0:
                return None
            size = int(self._buffer[position + 1 : end])
            word = self._buffer[end + 2 : end + 2 + size]
            position = end + 2 + size + 2
            if position > len(self._buffer):
                return None
            words.append(word)
        return words[0].decode().upper(), position


class _MemcacheReader(_Reader):
    _WITH_DATA = {b"set": 4, b"add": 4, b"replace": 4, b"append": 4, b"prepend": 4, b"cas": 4, b"ms": 2}

    def _one(self) -> tuple[str, int] | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return None
        words = self._buffer[:end].split()
        used = end + 2
        if words and words[0] in self._WITH_DATA:
            used += int(words[self._WITH_DATA[words[0]]]) + 2
            if used > len(self._buffer):
                return None
        return (words[0].decode() if words else ""), used


class _PostgresReader(_Reader):
    """Counts statements: simple queries and executions of prepared ones."""

    _STATEMENTS = {b"Q": "query", b"E": "execute"}

    def __init__(self) -> None:
        super().__init__()
        self._started = False

    def _one(self) -> tuple[str, int] | None:
        head = 1 if self._started else 0  # the start-up packet alone has no type
        if len(self._buffer) < head + 4:
            return None
        used = head + int.from_bytes(self._buffer[head : head + 4])
        if len(self._buffer) < used:
            return None
        name = self._STATEMENTS.get(self._buffer[:1], "") if self._started else ""
        self._started = True
        return name, used
