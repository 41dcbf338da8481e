"""FileStore in a directory of FileBasedCache."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache

from ratelimit_kv.decisions import Reason
from ratelimit_kv.stores import StoreError, files
from ratelimit_kv.stores.cache import CacheStore
from tests.servers import wait_until
from tests.stores.bench import SECOND, Bench, counter, microseconds
from tests.stores.contract import StoreContract


class TestFiles(StoreContract):
    kind = "filebased"


@pytest.fixture
def bench(use_cache: Callable[..., Any]) -> Bench:
    return Bench("filebased", use_cache("filebased"))


def path_of(key: str) -> Path:
    return Path(cache._key_to_file(key))


def all_files() -> list[Path]:
    return sorted(Path(cache._dir).iterdir())


def test_a_hit_walks_no_directory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a walk")

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, walk)
    monkeypatch.setattr(files.random, "random", lambda: 1.0)
    for _ in range(3):
        bench.hit(counter(), counter(scope="other"))
    assert bench.used(counter()) == [3]


def test_only_what_is_charged_leaves_a_file(bench: Bench) -> None:
    now = microseconds()
    full, other = counter(now=now, limit=1), counter("user:2", kind="s", now=now)
    bench.hit(full, now=now)
    assert all_files() == [path_of(full.key)]
    bench.hit(full, other, now=now)
    bench.peek(full, other, now=now)
    assert all_files() == [path_of(full.key)]
    assert path_of(full.key).stat().st_mode & 0o777 == 0o600, "as the cache's own files"


def test_a_file_that_was_cut_off(bench: Bench) -> None:
    now = microseconds()
    hit = counter(kind="b", now=now, limit=9, period=600)
    bench.hit(hit, now=now)
    whole = path_of(hit.key).read_bytes()
    for length in range(len(whole)):
        path_of(hit.key).write_bytes(whole[:length])
        (verdict,) = bench.hit(hit, now=now)
        assert verdict.charged or verdict.reason is Reason.STORE_ERROR
        assert bench.used(hit, now=now) == [int(verdict.charged)]
        listed = bench.keys()
        assert listed == [hit.key] or not verdict.charged
    later = now + hit.ttl * SECOND + 2 * SECOND
    assert bench.hit(hit, now=later)[0].charged, "what cannot be read expires too"


@pytest.mark.parametrize("content", [b"\x00" * 90, b"hello", b"\x80\x05N.", b"\x80\x05\x8c\x01x\x94.rest"])
def test_a_file_that_is_not_of_the_cache(bench: Bench, content: bytes) -> None:
    hit = counter()
    path_of(hit.key).write_bytes(content)
    Path(cache._dir, "stranger.djcache").write_bytes(content)
    Path(cache._dir, "stranger.txt").write_bytes(content)
    (verdict,) = bench.hit(hit)
    assert verdict.charged or verdict.reason is Reason.STORE_ERROR
    assert bench.keys() == ([hit.key] if verdict.charged else [])


def test_the_directory_may_go(bench: Bench) -> None:
    bench.hit(counter())
    shutil.rmtree(cache._dir)
    assert bench.used(counter()) == [0]
    assert bench.keys() == []
    assert bench.store.reset([counter().key]) == 0
    assert bench.hit(counter())[0].used == 1


def test_a_directory_that_cannot_be_used(bench: Bench) -> None:
    shutil.rmtree(cache._dir)
    Path(cache._dir).write_text("")
    for look in (bench.hit, bench.peek):
        with pytest.raises(StoreError, match="NotADirectoryError") as caught:
            look(counter())
        assert caught.value.outage
    with pytest.raises(StoreError):
        list(bench.store.scan("rl:"))


@pytest.mark.parametrize("how", ["error", "half"])
def test_all_or_nothing_on_a_full_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    now = microseconds()
    hits = [counter(now=now, limit=9, scope=scope) for scope in "abc"]
    bench.hit(*hits[:2], now=now)
    before = {path: path.read_bytes() for path in all_files()}
    pwrite, room = os.pwrite, [2]

    def write(descriptor: int, content: bytes, offset: int) -> int:
        room[0] -= 1
        if room[0] == -1:
            if how == "half":
                return pwrite(descriptor, content[:30], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(StoreError, match=r"No space|only a part") as caught:
        bench.hit(*hits, now=now)
    assert caught.value.outage
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in all_files() if path.stat().st_size} == before
    assert bench.used(*hits, now=now) == [1, 1, 0]
    assert [verdict.used for verdict in bench.hit(*hits, now=now)] == [2, 2, 1]


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_file_that_changes_while_it_is_waited_for(bench: Bench, change: str) -> None:
    hit = counter(limit=9)
    bench.hit(hit)
    path = path_of(hit.key)
    verdicts: list[Any] = []
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: verdicts.extend(bench.hit(hit)))
        thread.start()
        inode = path.stat().st_ino
        wait_until(lambda: f":{inode} " in waiting_locks(), "the thread to wait for the lock")
        if change == "removed":
            cache.clear()
        else:
            cache.set(hit.key, 5, 300)
    thread.join(20)
    assert verdicts[0].used == (1 if change == "removed" else 6)
    assert bench.used(hit) == [verdicts[0].used]


def waiting_locks() -> str:
    locks = Path("/proc/locks")
    if not locks.exists():
        pytest.skip("this kernel does not show its locks")
    return "\n".join(line for line in locks.read_text().splitlines() if "->" in line)


def test_it_gives_up_on_a_file_that_never_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.hit(counter())
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result([0] * 10))
    with pytest.raises(StoreError, match="again and again") as caught:
        bench.hit(counter())
    assert not caught.value.outage


def test_an_interrupted_wait_closes_the_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    closed: list[int] = []
    close = os.close
    monkeypatch.setattr(os, "close", lambda descriptor: (closed.append(descriptor), close(descriptor)))
    monkeypatch.setattr(files.fcntl, "flock", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.hit(counter())
    assert len(closed) == 1


def test_expired_files_are_swept_bit_by_bit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = microseconds()
    long_ago = now - 7200 * SECOND
    monkeypatch.setattr(files.random, "random", lambda: 1.0)
    for number in range(150):
        bench.hit(counter(f"user:{number}", now=long_ago), now=long_ago)
    living = counter("user:living", now=now, limit=99)
    bench.hit(living, now=now)
    cache.set("theirs", 1, 300)
    cache.set("theirs_for_ever", 1, None)
    stranger = Path(cache._dir, "stranger.djcache")
    stranger.write_bytes(b"not a pickle")
    Path(cache._dir, "nobody.djcache").write_bytes(b"")
    Path(cache._dir, "other.txt").write_bytes(b"")
    monkeypatch.setattr(files.random, "random", lambda: 0.0)
    held = path_of(counter("user:7", now=long_ago).key)
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for number in range(5):
            bench.hit(counter(f"user:new{number}", now=now), now=now)
        assert held.exists(), "somebody is at it"
        for number in range(5, 9):
            bench.hit(counter(f"user:new{number}", now=now), now=now)
        assert len(all_files()) == 9 + 5 + 1, "new ones, living, theirs, stranger, other, and the one that is held"
    for number in range(9, 14):
        bench.hit(counter(f"user:new{number}", now=now), now=now)
    assert len(all_files()) == 14 + 5
    assert stranger.exists()
    assert cache.get("theirs") == cache.get("theirs_for_ever") == 1
    assert bench.used(living, now=now) == [1]


def test_a_sweep_that_fails_fails_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(*args: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(files.random, "random", lambda: 0.0)
    monkeypatch.setattr(os, "scandir", scandir)
    for number in range(3):
        assert bench.hit(counter(f"user:{number}"))[0].charged
    assert isinstance(bench.store, files.LockedFileStore)
    with bench.store._sweeping:
        assert bench.hit(counter("user:4"))[0].charged, "one sweeps at a time"


def test_where_there_is_no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.find_spec("ratelimit_kv.stores.files")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FileStore is CacheStore
