"""CacheStore: any cache, and what strange ones answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.cache import caches
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.locmem import LocMemCache

from ratelimit_kv.decisions import Reason
from ratelimit_kv.stores import CannotList, StoreError, cache, get_store
from ratelimit_kv.stores.cache import CacheStore
from ratelimit_kv.stores.locmem import LocMemStore
from tests.stores.bench import counter, microseconds, refund
from tests.stores.contract import StoreContract


class TestOnRedis(StoreContract):
    """Redis counts atomically, which is all that the generic store asks for."""

    kind = "redis"
    store_class = "ratelimit_kv.stores.cache.CacheStore"


class Scripted(BaseCache):
    """A cache that answers as it is told: a value is returned, an exception raised, a function called."""

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(params)
        self.script: dict[str, list[Any]] = {}
        self.heard: list[tuple[Any, ...]] = []

    def _answer(self, name: str, *arguments: Any) -> Any:
        self.heard.append((name, *arguments))
        answers = self.script[name]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_many(self, keys: Any, version: Any = None) -> Any:
        return self._answer("get_many")

    def add(self, key: str, value: Any, timeout: Any = None, version: Any = None) -> Any:
        return self._answer("add", value, timeout)

    def incr(self, key: str, delta: int = 1, version: Any = None) -> Any:
        return self._answer("incr", delta)

    def decr(self, key: str, delta: int = 1, version: Any = None) -> Any:
        return self._answer("decr", delta)

    def delete(self, key: str, version: Any = None) -> Any:
        return self._answer("delete")


@pytest.fixture
def scripted(settings: Any) -> Callable[..., Scripted]:
    settings.CACHES = {"default": {"BACKEND": f"{__name__}.Scripted"}}

    def script(**answers: list[Any]) -> Scripted:
        backend: Any = caches["default"]
        backend.script = {"get_many": [{}], **answers}
        return backend

    return script


def hit(**fields: Any) -> Any:
    return get_store("default").hit([counter(**fields)], microseconds())[0]


def test_which_store_a_cache_is_given(settings: Any) -> None:
    settings.CACHES = {
        "locmem": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "subclass": {"BACKEND": f"{__name__}.Subclass"},
        "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
        "scripted": {"BACKEND": f"{__name__}.Scripted"},
    }
    classes = {alias: type(get_store(alias)) for alias in settings.CACHES}
    assert classes == {"locmem": LocMemStore, "subclass": LocMemStore, "dummy": CacheStore, "scripted": CacheStore}


class Subclass(LocMemCache):
    pass


def test_a_new_key(scripted: Callable[..., Scripted]) -> None:
    backend = scripted(add=[True])
    verdict = hit(cost=2, ttl=77)
    assert (verdict.charged, verdict.used) == (True, 2)
    assert backend.heard == [("get_many",), ("add", 2, 77)]


def test_a_key_that_somebody_else_adds(scripted: Callable[..., Scripted]) -> None:
    backend = scripted(add=[False], incr=[2])
    verdict = hit()
    assert (verdict.charged, verdict.used, verdict.remaining) == (True, 2, 1)
    assert backend.heard == [("get_many",), ("add", 1, counter().ttl), ("incr", 1)]


def test_a_key_that_expires_in_between(scripted: Callable[..., Scripted]) -> None:
    backend = scripted(add=[False, True], incr=[ValueError("not found")])
    assert hit().used == 1
    assert [name for name, *_ in backend.heard] == ["get_many", "add", "incr", "add"]
    backend = scripted(get_many=[{counter().key: 2}], add=[True], incr=[ValueError("not found")])
    assert hit().used == 1
    scripted(get_many=[{counter().key: 2}], decr=[ValueError("not found")])
    (verdict,) = get_store("default").hit([refund(counter())], microseconds())
    assert not verdict.charged


def test_a_key_that_is_never_there(scripted: Callable[..., Scripted]) -> None:
    backend = scripted(add=[False], incr=[ValueError("not found")])
    with pytest.raises(StoreError, match="neither there") as caught:
        hit()
    assert caught.value.outage
    assert len(backend.heard) < 20


def test_room_that_others_take_in_between(scripted: Callable[..., Scripted]) -> None:
    key = counter().key
    backend = scripted(get_many=[{key: 2}, {key: 3}], incr=[4], decr=[3])
    verdict = hit()
    assert (verdict.allowed, verdict.charged, verdict.used) == (False, False, 3)
    assert backend.heard == [("get_many",), ("incr", 1), ("decr", 1), ("get_many",)]


def test_it_gives_up_when_it_is_outrun_for_ever(scripted: Callable[..., Scripted]) -> None:
    scripted(get_many=[{counter().key: 2}], incr=[4], decr=[3])
    with pytest.raises(StoreError, match="outrun") as caught:
        hit()
    assert not caught.value.outage


def test_more_is_given_back_than_there_is(scripted: Callable[..., Scripted]) -> None:
    backend = scripted(get_many=[{counter().key: 3}], decr=[-2], incr=[0])
    (verdict,) = get_store("default").hit([refund(counter(), 3)], microseconds())
    assert (verdict.charged, verdict.used) == (True, 0)
    assert backend.heard == [("get_many",), ("decr", 3), ("incr", 2)]


@pytest.mark.parametrize("answer", [None, False, True, "3", 3.0, b"3"])
def test_answers_that_are_no_numbers(scripted: Callable[..., Scripted], answer: Any) -> None:
    for script in ({"add": [False], "incr": [answer]}, {"get_many": [{counter().key: 1}], "incr": [answer]}):
        scripted(**script)
        with pytest.raises(StoreError, match=rf"incr\(\) returned {type(answer).__name__}"):
            hit()


@pytest.mark.parametrize("answer", [None, 1, "OK"])
def test_answers_of_add_that_are_no_answers(scripted: Callable[..., Scripted], answer: Any) -> None:
    scripted(add=[answer])
    with pytest.raises(StoreError, match=r"add\(\) returned") as caught:
        hit()
    assert caught.value.outage


def test_what_was_taken_is_given_back_when_a_later_counter_fails(scripted: Callable[..., Scripted]) -> None:
    backend = scripted(add=[True, OSError("lost")], get_many=[{}, {counter().key: 1}], decr=[0])
    with pytest.raises(StoreError, match="lost") as caught:
        get_store("default").hit([counter(), counter(scope="other")], microseconds())
    assert caught.value.outage
    assert backend.heard[-1] == ("decr", 1)
    scripted(add=[True, OSError("lost")], get_many=[{}, OSError("still lost")])
    with pytest.raises(StoreError, match="OSError: lost"):
        get_store("default").hit([counter(), counter(scope="other")], microseconds())


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (ConnectionError("refused"), True),
        (TimeoutError(), True),
        (RuntimeError("whatever"), True),
        (ValueError("a key like that"), False),
        (TypeError("an argument like that"), False),
    ],
)
def test_errors(scripted: Callable[..., Scripted], error: Exception, outage: bool) -> None:
    scripted(get_many=[error], delete=[error])
    store = get_store("default")
    for look in (hit, lambda: store.peek([counter()], 0), lambda: store.reset(["key"])):
        with pytest.raises(StoreError, match=type(error).__name__) as caught:
            look()
        assert caught.value.outage == outage
        assert caught.value.__cause__ is error


def test_an_outage_that_the_cache_keeps_to_itself(scripted: Callable[..., Scripted]) -> None:
    scripted(get_many=[None])
    with pytest.raises(StoreError):
        hit()


def test_algorithms_that_it_does_not_run(scripted: Callable[..., Scripted]) -> None:
    backend = scripted(add=[True])
    verdicts = get_store("default").hit([counter(kind="b"), counter()], microseconds())
    assert [verdict.reason for verdict in verdicts] == [Reason.STORE_ERROR, Reason.WITHIN]
    assert "'b'" in verdicts[0].cause
    assert [name for name, *_ in backend.heard] == ["get_many", "add"]


def test_it_cannot_list(scripted: Callable[..., Scripted]) -> None:
    scripted()
    assert not get_store("default").can_list
    with pytest.raises(CannotList, match="one by one"):
        list(get_store("default").scan("rl:"))


def test_dummy_cache_counts_nothing(settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    assert [hit(limit=2).used for _ in range(5)] == [1] * 5
    store = get_store("default")
    assert store.peek([counter()], 0)[0].used == 0
    assert store.reset([counter().key]) == 0
    assert not store.hit([refund(counter())], 0)[0].charged


def test_none_of_the_asynchronous_methods_is_used() -> None:
    source = cache.__loader__.get_source(cache.__name__)
    assert source
    for name in ("aincr", "aadd", "aget", "adecr"):
        assert f".{name}" not in source
