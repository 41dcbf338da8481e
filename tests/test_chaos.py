"""Kill, pause, fill and demote a Redis under the requests of four processes, and see what they notice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.caches import child_environment
from tests.servers import HOST, Server, free_port, wait_until

PROCESSES = 4
REQUESTS = 56
"""Of each process on each of the two pages in each of the trials below: 2,240 in all."""


class Crowd:
    """Four processes that make requests at the same time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.children = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.chaos_worker"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(PROCESSES)
        ]

    def requests(self, page: str, times: int = REQUESTS, address: str = "203.0.113.9") -> tuple[Counter[int], int, int]:
        """How many of each status; how many waited for a socket's timeout; how many log records there were."""
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(json.dumps([page, times, address]) + "\n")
            child.stdin.flush()
        statuses: Counter[int] = Counter()
        waited = logged = 0
        for child in self.children:
            assert child.stdout is not None
            own, _, own_waited, own_logged = json.loads(child.stdout.readline())
            statuses.update({int(status): count for status, count in own.items()})
            waited, logged = waited + own_waited, logged + own_logged
        return statuses, waited, logged

    def stop(self) -> None:
        for child in self.children:
            assert child.stdin is not None
            child.stdin.close()
            child.wait(30)
            assert child.stdout is not None
            child.stdout.close()


@pytest.fixture
def server(own_redis: Callable[..., Server]) -> Server:
    return own_redis(**{"maxmemory-policy": "noeviction"})


@pytest.fixture
def crowd(server: Server, settings: Any) -> Iterator[Crowd]:
    settings.CACHES = {
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": f"redis://{HOST}:{server.port}/0",
            "OPTIONS": {"SOCKET_TIMEOUT": 0.1, "SOCKET_CONNECT_TIMEOUT": 0.1},
        }
    }
    settings.RATELIMIT_KV = {
        "BREAKER": {"FAILURES": 3, "SECONDS": 0.5},
        "SCOPES": {
            "open": {"RATE": "1000000/day", "KEY": "ip"},
            "closed": {"RATE": "1000000/day", "KEY": "ip", "ON_ERROR": "deny"},
            "exact": {"RATE": "50/day", "KEY": "ip"},
        },
    }
    crowd = Crowd(child_environment(ROOT_URLCONF="tests.chaos_worker", LOGGING_CONFIG=None))
    yield crowd
    crowd.stop()


def test_a_redis_in_all_kinds_of_trouble(crowd: Crowd, server: Server) -> None:
    import redis

    def everything_is_counted() -> bool:
        return set(crowd.requests("closed", 1)[0]) == {200}

    def recovered(number: int) -> None:
        wait_until(everything_is_counted, "recovery", 60)
        for child in range(3):  # every breaker of every process has closed, and counts are exact again
            statuses, _, _ = crowd.requests("exact", 30, address=f"198.51.{number}.{child}")
            assert statuses == {200: 50, 429: 70}

    def trouble() -> None:
        statuses, waited, logged = crowd.requests("open")
        assert statuses == {200: PROCESSES * REQUESTS}  # nobody notices
        closed, more_waited, more_logged = crowd.requests("closed")
        assert closed == {503: PROCESSES * REQUESTS}  # nobody passes
        # Those that opened the breaker waited, and its probes; without it all would. A busy machine has its own pauses.
        assert waited + more_waited <= 2 * PROCESSES * REQUESTS / 5
        assert logged + more_logged <= PROCESSES * 6  # transitions, not events

    assert crowd.requests("open")[0] == crowd.requests("closed")[0] == {200: PROCESSES * REQUESTS}
    recovered(0)

    server.kill()
    trouble()
    server.restart()
    recovered(1)

    server.pause()
    trouble()
    server.resume()
    recovered(2)

    with redis.Redis(port=server.port) as client:
        client.config_set("maxmemory", 1)
        trouble()
        client.config_set("maxmemory", 0)
        recovered(3)

        client.replicaof(HOST, free_port())
        trouble()
        client.replicaof("NO", "ONE")
        recovered(4)
