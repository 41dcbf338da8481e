"""Django's FileBasedCache: one small file for each counter, where the cache itself would have put it.

A hit holds a lock on the file of each of its counters, in one order for everybody. The file is as the cache
writes it, so ``cache.get(key)``, ``cache.clear()`` and the cache's own culling know it; behind the pickled value,
where no reader looks, stands the key, which the name of the file cannot give back.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from django.core.cache import caches

from ..algorithms import (
    FIXED,
    MICROSECOND,
    SLIDING,
    Counter,
    Unreadable,
    Verdict,
    dump,
    load,
    observe,
    transact,
)
from .base import Entry, Store, StoreError, start_of_keys, unpickle
from .cache import CacheStore

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["FileStore"]

_ATTEMPTS = 1000
"""Each fails because somebody has removed or replaced the file while we waited for it."""
_SWEEP_CHANCE = 1 / 25
_SWEEP_FILES = 100
"""Together: four files are looked at for each that comes, and go if they have expired."""


class LockedFileStore(Store):
    """Exact across the processes of one host, or of all that share a file system with ``flock``."""

    name = "FileBasedCache"
    round_trips = "0"

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._sweeping = threading.Lock()
        self._files_to_sweep: Iterator[str] = iter(())

    def hit(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache: Any = caches[self.alias]
        with _errors(), ExitStack() as stack:
            files = _open_all(stack, cache, counters, now, write=True)
            states = _states(cache, files, counters)
            verdicts, writes = transact(counters, states, now)
            written: list[_File] = []
            try:
                for position, state in writes.items():
                    counter = counters[position]
                    file = files[counter.key]
                    written.append(file)
                    file.write(cache, counter, dump(counter, state), now)
            except BaseException:
                # All or nothing, on a disk that is full too.
                for file in written:
                    file.restore()
                raise
            is_new = any(not file.is_alive for file in written)
            for file in files.values():
                if not file.is_alive and file not in written:
                    file.remove()
        if is_new and random.random() < _SWEEP_CHANCE:
            self._sweep(cache, now)
        return verdicts

    def peek(self, counters: Sequence[Counter], now: int) -> list[Verdict]:
        cache: Any = caches[self.alias]
        with _errors(), ExitStack() as stack:
            files = _open_all(stack, cache, counters, now, write=False)
            return observe(counters, _states(cache, files, counters), now)

    def reset(self, keys: Sequence[str]) -> int:
        cache: Any = caches[self.alias]
        with _errors():
            return sum(bool(cache.delete(key)) for key in keys)

    def scan(self, prefix: str) -> Iterator[Entry]:
        cache: Any = caches[self.alias]
        start = start_of_keys(cache, prefix)
        with _errors():
            for path in _paths(cache):
                with ExitStack() as stack:
                    file = _open(stack, path, 0, write=False)
                    made, value = file.entry() if file else ("", None)
                if made.startswith(start):
                    yield Entry(prefix + made[len(start) :], value)

    def _sweep(self, cache: Any, now: int) -> None:
        """Remove what has expired among the next files of the directory, and begin again at its end."""
        if not self._sweeping.acquire(blocking=False):
            return
        try:
            batch = list(islice(self._files_to_sweep, _SWEEP_FILES))
            if not batch:
                self._files_to_sweep = _paths(cache)
            for path in batch:
                with suppress(BlockingIOError, FileNotFoundError), ExitStack() as stack:
                    file = _open(stack, path, now, write=True, wait=False)
                    if file and file.has_expired:
                        file.remove()
        except OSError:
            pass  # the hit has been counted; whatever is wrong, hits will say
        finally:
            self._sweeping.release()


FileStore: type[Store] = LockedFileStore if fcntl else CacheStore
"""What FileBasedCache is given: where there is no ``flock``, the generic store, which is not exact."""


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{type(error).__name__}: {error.strerror or error}", outage=True) from error


# ── One file ───────────────────────────────────────────────────────────────────────────────────────────────


class _File:
    """An open, locked file of the cache, as it was when it was opened."""

    def __init__(self, path: str, descriptor: int, content: bytes, now: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._content = content
        self._size = len(content)
        self.has_expired = not content
        """An empty one too, as Django has it: it was created and then nobody came to write."""
        stream = io.BytesIO(content)
        if content:
            try:
                expiry = pickle.load(stream)
                self.has_expired = expiry is not None and expiry * MICROSECOND < now
            except Exception:  # noqa: BLE001 - cut off or not of this cache, so there may be anything in it
                content = b""
        self.is_alive = bool(content) and not self.has_expired
        self._head = stream.tell()

    def _payload(self) -> bytes | Unreadable:
        try:
            return zlib.decompress(self._content[self._head :])
        except zlib.error:
            return Unreadable("a file that is cut off, or not of this cache")

    def value(self) -> Any:
        """The value, None when it has expired or was never there."""
        if not self.is_alive:
            return None
        payload = self._payload()
        return unpickle(payload) if isinstance(payload, bytes) else payload

    def entry(self) -> tuple[str, Any]:
        """The cache's key and the value; "" as the key of a file that is not a counter's."""
        payload = self._payload()
        if not isinstance(payload, bytes):
            return "", payload
        stream = io.BytesIO(payload)
        try:
            value = pickle.load(stream)
            return stream.read().decode(), value
        except Exception:  # noqa: BLE001 - somebody else's object runs his code, which may raise anything
            return "", None

    def write(self, cache: Any, counter: Counter, value: Any, now: int) -> None:
        """Set the value; the expiry of a window only if it is new."""
        if self.is_alive and counter.kind in (FIXED, SLIDING):
            head = self._content[: self._head]
        else:
            head = pickle.dumps(now / MICROSECOND + counter.ttl, cache.pickle_protocol)
        payload = pickle.dumps(value, cache.pickle_protocol) + str(cache.make_key(counter.key)).encode()
        # Not compressed: it is too short to become shorter.
        self._overwrite(head + zlib.compress(payload, 0))

    def restore(self) -> None:
        """Make the content what it was."""
        with suppress(OSError):
            self._overwrite(self._content)

    def _overwrite(self, content: bytes) -> None:
        # In one piece and in place: a new file under the old name would take the lock away from who waits.
        self._size = max(self._size, len(content))
        if os.pwrite(self._descriptor, content, 0) != len(content):
            raise OSError(None, "the disk took only a part")
        if len(content) < self._size:
            os.ftruncate(self._descriptor, len(content))
            self._size = len(content)

    def remove(self) -> None:
        Path(self.path).unlink(missing_ok=True)


def _open(
    stack: ExitStack, path: str, now: int, *, write: bool, create: bool = False, wait: bool = True
) -> _File | None:
    """The file, locked until the stack unwinds; None when it is not there. Raises OSError."""
    flags = (os.O_RDWR | (os.O_CREAT if create else 0)) if write else os.O_RDONLY
    lock = (fcntl.LOCK_EX if write else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    for _ in range(_ATTEMPTS):
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            fcntl.flock(descriptor, lock)
            status = os.fstat(descriptor)
            if status.st_nlink:
                content = os.pread(descriptor, status.st_size, 0) if status.st_size else b""
                stack.callback(os.close, descriptor)
                return _File(path, descriptor, content, now)
        except BaseException:
            os.close(descriptor)
            raise
        # Removed or replaced while we waited: what we hold is nobody's file any more.
        os.close(descriptor)
    raise StoreError("a file of the cache was replaced again and again", outage=False)


def _open_all(stack: ExitStack, cache: Any, counters: Sequence[Counter], now: int, *, write: bool) -> dict[str, _File]:
    """The files of the counters by key. Locked in one order, so that two requests cannot wait for each other."""
    wanted = {
        cache._key_to_file(counter.previous): (counter.previous, False)
        for counter in counters
        if counter.kind == SLIDING
    }
    wanted |= {cache._key_to_file(counter.key): (counter.key, write) for counter in counters}
    files = {}
    for path in sorted(wanted):
        key, writable = wanted[path]
        try:
            file = _open(stack, path, now, write=writable, create=writable)
        except FileNotFoundError:
            cache._createdir()  # anybody may have removed it, and so may the cache's first use still lie ahead
            file = _open(stack, path, now, write=writable, create=writable)
        if file:
            files[key] = file
    return files


def _states(cache: Any, files: dict[str, _File], counters: Sequence[Counter]) -> list[Any]:
    values = {key: file.value() for key, file in files.items()}
    return [load(counter, values.get(counter.key), values.get(counter.previous)) for counter in counters]


def _paths(cache: Any) -> Iterator[str]:
    """The files of the cache, as a stream."""
    try:
        with os.scandir(cache._dir) as entries:
            for entry in entries:
                if entry.name.endswith(cache.cache_suffix):
                    yield entry.path
    except FileNotFoundError:
        return
