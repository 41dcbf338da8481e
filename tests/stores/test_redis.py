"""Redis and Valkey through each client, alone, under Sentinel and as a Cluster."""

from __future__ import annotations

from tests.stores.contract import StoreContract


class TestDjangoRedis(StoreContract):
    kind = "django-redis"


class TestRedisCache(StoreContract):
    kind = "redis"


class TestDjangoValkey(StoreContract):
    kind = "django-valkey"


class TestSentinel(StoreContract):
    kind = "django-redis-sentinel"


class TestCluster(StoreContract):
    kind = "django-redis-cluster"


class TestValkeyCluster(StoreContract):
    kind = "django-valkey-cluster"
