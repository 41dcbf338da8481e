"""A proxy in front of a server, to see what really goes over the wire."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator


class Wire:
    """Connect to ``port`` instead of the server's. ``log`` has what was passed on, each way, in order."""

    def __init__(self, host: str, port: int) -> None:
        self.delay = 0.0
        """Seconds for which every answer is held back."""
        self.chunk = 1 << 16
        """Bytes that are passed on at a time."""
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.port: int = self._listener.getsockname()[1]
        self.log: list[tuple[str, bytes]] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                for way, source, target in (("sent", client, server), ("received", server, client)):
                    threading.Thread(target=self._pump, args=(way, source, target), daemon=True).start()

    def _pump(self, way: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self.chunk):
                self.log.append((way, data))
                if way == "received" and self.delay:
                    time.sleep(self.delay)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    @property
    def round_trips(self) -> int:
        """How often something was sent after everything before had been answered."""
        ways = [way for way, _ in self.log]
        return sum(way == "sent" and before != "sent" for before, way in zip(["received", *ways], ways, strict=False))

    @property
    def commands(self) -> list[bytes]:
        """The names of the commands sent, upper-cased, in order."""
        sent = b"".join(data for way, data in self.log if way == "sent")
        names = []
        while sent:
            head, _, sent = sent.partition(b"\r\n")
            for number in range(int(head[1:])):
                size, _, sent = sent.partition(b"\r\n")
                argument, sent = sent[: int(size[1:])], sent[int(size[1:]) + 2 :]
                if number == 0:
                    names.append(argument.upper())
        return names

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextlib.contextmanager
def wire_to(host: str, port: int) -> Iterator[Wire]:
    wire = Wire(host, port)
    try:
        yield wire
    finally:
        wire.close()
