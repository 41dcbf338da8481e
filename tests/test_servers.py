"""The bench itself: servers obey, and never outlive the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import caches, servers
from tests.servers import Server


@pytest.mark.parametrize("kind", caches.SHARED_KINDS)
def test_another_process_sees_the_cache_of_the_test(kind: str, use_cache: Callable[..., Any]) -> None:
    cache = use_cache(kind, KEY_PREFIX="shop")
    cache.set("answer", 42, 60)
    program = "import django; django.setup(); from django.core.cache import cache; print(cache.get('answer'))"

    def seen() -> str:
        command = [sys.executable, "-W", "ignore", "-c", program]
        return subprocess.check_output(command, env=caches.child_environment(), text=True).strip()

    # A read may go to a replica that has yet to hear of it.
    servers.wait_until(lambda: seen() == "42", "the other process")
    assert use_cache(kind, KEY_PREFIX="shop").get("answer") is None, "empty at each start"


def test_a_server_is_paused_killed_and_restarted(
    own_redis: Callable[..., Server], use_cache: Callable[..., Any]
) -> None:
    import redis

    server = own_redis()
    cache = use_cache("django-redis", server=server, OPTIONS={"SOCKET_TIMEOUT": 0.1})
    cache.set("answer", 42)
    with server.paused(), pytest.raises(redis.TimeoutError):
        cache.get("answer")
    assert cache.get("answer") == 42
    server.kill()
    with pytest.raises(redis.ConnectionError):
        cache.get("answer")
    server.restart()
    assert cache.get("answer") is None, "it came back empty"


def test_postgresql_is_paused_with_its_children(postgres_server: Server) -> None:
    import psycopg

    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        backend = connection.info.backend_pid
        with postgres_server.paused():
            servers.wait_until(lambda: state(backend) == "T", "the session's process to stop")
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no such leash")
def test_a_server_ends_with_the_process_that_started_it() -> None:
    program = """
import os, signal
from tests import servers
server = servers.start_redis()
print(server.pid, server.directory, flush=True) if isinstance(server, servers.Server) else print(0, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=caches.ROOT, capture_output=True, text=True)
    pid, directory = done.stdout.split()
    if pid == "0":
        pytest.skip("redis-server is not installed")
    servers.wait_until(lambda: state(int(pid)) in ("gone", "Z"), "the server to end")
    for path in (*Path(directory).iterdir(), Path(directory)):
        path.unlink() if path.is_file() else path.rmdir()


def state(pid: int) -> str:
    """The kernel's letter for what a process does."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(servers.CannotStart, match="no-such-option"):
        servers.start_redis(no_such_option=1)
    assert not [server for server in servers._running.values() if server.kind == "redis" and not server.running]
    assert os.getpid() == servers._main_process
