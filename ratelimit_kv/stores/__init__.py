"""Where counters live: one Store for each cache alias of Django's settings."""

from __future__ import annotations

from typing import Any

from django.core.cache import caches
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.module_loading import import_string

from .base import CannotList, Entry, Store, StoreError

__all__ = ["CannotList", "Entry", "Store", "StoreError", "get_store", "store_classes"]

_STORES: tuple[tuple[str, str], ...] = (
    ("django.core.cache.backends.locmem.LocMemCache", "locmem.LocMemStore"),
    ("django.core.cache.backends.db.DatabaseCache", "database.DatabaseStore"),
    ("django.core.cache.backends.filebased.FileBasedCache", "files.FileStore"),
    ("django.core.cache.backends.memcached.BaseMemcachedCache", "memcached.MemcachedStore"),
    ("django.core.cache.backends.redis.RedisCache", "redis.RedisStore"),
    ("django_redis.cache.RedisCache", "redis.RedisStore"),
    ("django_valkey.cache.ValkeyCache", "redis.RedisStore"),
    ("django_valkey.cluster_cache.cache.ClusterValkeyCache", "redis.RedisStore"),
)
"""Backend class -> our store; a subclass of a backend counts as it. Else it is the generic one."""

_stores: dict[str, Store] = {}


def get_store(alias: str) -> Store:
    """The store of a cache alias, one for the process. Raises InvalidCacheBackendError for an unknown one."""
    try:
        return _stores[alias]
    except KeyError:
        return _stores.setdefault(alias, _store_class(caches[alias])(alias))


def store_classes() -> tuple[type[Store], ...]:
    """Every kind of store there is, the generic one last."""
    words = dict.fromkeys(word for _, word in _STORES)
    return tuple(import_string(f"{__name__}.{word}") for word in (*words, "cache.CacheStore"))


def _store_class(cache: Any) -> type[Store]:
    """By the names in the backend's ancestry, so that no optional package has to be imported."""
    ancestry = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(cache).__mro__}
    for backend, store in _STORES:
        if backend in ancestry:
            return import_string(f"{__name__}.{store}")  # type: ignore[no-any-return]
    return import_string(f"{__name__}.cache.CacheStore")  # type: ignore[no-any-return]


@receiver(setting_changed)
def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in ("CACHES", "DATABASES"):
        _stores.clear()
