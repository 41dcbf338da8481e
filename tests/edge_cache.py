"""A cache that behaves like an edge key-value service: for tests of what a limiter can still promise on one.

Reads may be a while old, the last writer wins, a key takes one write a second, and a lifetime is at least a minute.
"""

from __future__ import annotations

import time
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache


class WriteRefused(Exception):
    """The service took a write of this key less than a second ago, or the lifetime is too short for it."""


class EdgeCache(BaseCache):
    """``LOCATION`` names the service, ``OPTIONS: {"LAG": seconds}`` how old a read may be."""

    services: dict[str, dict[str, list[tuple[float, float, Any]]]] = {}

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(params)
        self.writes = self.services.setdefault(location, {})
        self.lag = float(params.get("OPTIONS", {}).get("LAG", 0))

    def get(self, key: str, default: Any = None, version: int | None = None) -> Any:
        now = time.time()
        seen = [
            (expires, value)
            for written, expires, value in self.writes.get(self.make_key(key, version), ())
            if written <= now - self.lag
        ]
        return seen[-1][1] if seen and seen[-1][0] > now else default

    def set(self, key: str, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> None:
        made, now = self.make_key(key, version), time.time()
        lifetime = self.get_backend_timeout(timeout)
        if lifetime is not None and lifetime - now < 60:
            raise WriteRefused("a lifetime below 60 s")
        history = self.writes.setdefault(made, [])
        if history and now - history[-1][0] < 1:
            raise WriteRefused("more than one write a second")
        history.append((now, lifetime or float("inf"), value))

    def add(self, key: str, value: Any, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        if self.get(key, version=version) is not None:
            return False
        self.set(key, value, timeout, version)
        return True

    def incr(self, key: str, delta: int = 1, version: int | None = None) -> int:
        value = self.get(key, version=version)
        if value is None:
            raise ValueError(key)
        self.set(key, value + delta, 3600, version)
        return int(value + delta)

    def delete(self, key: str, version: int | None = None) -> bool:
        return self.writes.pop(self.make_key(key, version), None) is not None

    def clear(self) -> None:
        self.writes.clear()
