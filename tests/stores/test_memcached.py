"""MemcachedStore through both clients of Django."""

from __future__ import annotations

from tests.stores.contract import StoreContract


class TestPyMemcache(StoreContract):
    kind = "pymemcache"


class TestPyLibMC(StoreContract):
    kind = "pylibmc"
