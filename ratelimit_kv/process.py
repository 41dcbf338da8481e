"""What one process knows while one Config is in force: the time, the breakers, and how a store is asked."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from django.dispatch import Signal

from . import signals
from .conf import Config, get_config
from .guard import WAITED, Breaker, DeniedLog, DeniedMemory, LeaseBook, LocalCounters, Remembered, Throttle
from .scopes import Scope
from .steps import Step, Steps
from .stores import StoreError, get_store

logger = logging.getLogger("ratelimit_kv")

ASYNC = {"hit": "ahit", "peek": "apeek", "reset": "areset"}
"""A store's methods and their twins."""


def now() -> int:
    """Microseconds since the epoch. With :func:`ticks` the only reader of the clock, so freezing time works everywhere."""
    return time.time_ns() // 1000


def ticks() -> float:
    """Seconds of a clock that does not step, for deadlines within this process."""
    return time.monotonic()


class _Breakers(dict[str, Breaker]):
    """By alias, each made when it is first asked for."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __missing__(self, alias: str) -> Breaker:
        config = self._config
        return self.setdefault(alias, Breaker(alias, config.breaker_failures, config.breaker_seconds))


class Runtime:
    """What this process remembers while one Config is in force."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.counts_everybody = config.enabled and not config.has_exemptions
        """Whether no request is exempt as a whole, be it that its view is."""
        self.breaker: Callable[[str], Breaker] = _Breakers(config).__getitem__
        """The breaker of a store, by its alias."""
        self.memory = DeniedMemory(config.remember.entries, config.remember.seconds) if config.remember else None
        self.denied: Mapping[tuple[str, str], Remembered] = self.memory.known if self.memory is not None else {}
        """What is in that memory."""
        self.log = DeniedLog()
        self.throttle = Throttle()
        self.views: dict[Any, Any] = {}
        """What the doors have found out about views."""
        self.leases = LeaseBook(config.processes)
        self._local: dict[str, LocalCounters] = {}

    def local(self, alias: str) -> LocalCounters:
        """This process's own count for a store that is away."""
        found = self._local.get(alias)
        return found if found is not None else self._local.setdefault(alias, LocalCounters())

    def forget(self, scope: str, identity: str) -> None:
        """Something was given back: a remembered denial may no longer be true."""
        if self.memory is not None:
            self.memory.forget(scope, identity)


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The state for the Config in force."""
    global _runtime
    config = get_config()
    found = _runtime
    if found is None or found.config is not config:
        found = _runtime = Runtime(config)
    return found


def forget() -> None:
    """Drop what this process remembers: denials, breakers, local counts. Also done in a forked child."""
    global _runtime
    _runtime = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


# ----------------------------------------------------------------------------------------------- talking to stores


class Resting(StoreError):
    """The breaker is open: the store was not asked."""


def ask_store(rt: Runtime, alias: str, method: str, *args: Any) -> Steps[Any]:
    """Call a store's method behind its breaker. Raises StoreError, whatever happens."""
    began = ticks()
    if not rt.breaker(alias).allows(began):
        raise Resting("the store is being given a rest", outage=False)
    try:
        store = get_store(alias)
        if store.inline:
            result = getattr(store, method)(*args)
        else:
            result = yield Step(getattr(store, method), getattr(store, ASYNC[method]), args)
    except AssertionError:  # a test that forbids queries: DatabaseOperationForbidden is one
        raise
    except Exception as error:  # an unknown cache may raise anything; a limiter is never the outage
        raise (yield from store_failed(rt, alias, error, began)) from error
    if rt.breaker(alias).succeeded(began):
        yield from store_recovered(rt, alias)
    return result


def store_failed(rt: Runtime, alias: str, error: Exception, began: float) -> Steps[StoreError]:
    """A store's failure, told to its breaker."""
    failure = error if isinstance(error, StoreError) else StoreError(type(error).__name__, outage=False)
    done = ticks()
    breaker = rt.breaker(alias)
    if failure.outage or done - began >= WAITED:
        if breaker.failed(done, done - began):
            logger.error(
                "store %s failed (%s): breaker opened, next try in about %s s",
                alias,
                failure.cause,
                breaker.seconds,
                extra={"alias": alias},
            )
            yield from send(signals.store_failed, alias=alias)
    elif breaker.succeeded(began):  # it answered, if not with what we wanted
        yield from store_recovered(rt, alias)
    return failure


def store_recovered(rt: Runtime, alias: str) -> Steps[None]:
    rt.local(alias).forget()
    logger.warning("store %s answers again: breaker closed", alias, extra={"alias": alias})
    yield from send(signals.store_recovered, alias=alias)


def send(signal: Signal, **words: Any) -> Steps[None]:
    if signal.receivers and signal.has_listeners(None):
        yield Step(partial(signal.send_robust, None, **words), partial(signal.asend_robust, None, **words))


def say_store_error(rt: Runtime, scope: Scope, alias: str, error: StoreError) -> Steps[None]:
    """One record a scope and interval; one signal an alias and interval for what is not the breaker's to tell."""
    at = ticks()
    if rt.throttle.due(("store", scope.name), at):
        logger.warning(
            "store error: scope %s, store %s (%s), answered by ON_ERROR %r",
            scope.name,
            alias,
            error.cause,
            scope.on_error,
            extra={"scope": scope.name, "alias": alias},
        )
        if not error.outage and not rt.breaker(alias).is_open and rt.throttle.due(("signal", alias), at):
            yield from send(signals.store_failed, alias=alias)
