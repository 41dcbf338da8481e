"""Counting and deciding: check, hit, peek, settle and reset, and what a request remembers of them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from django.dispatch import Signal
from django.http import HttpRequest

from . import signals
from .algorithms import (
    BAN,
    BUCKET,
    CONCURRENT,
    EXISTING,
    FIXED,
    FORCE,
    MAX_COUNT,
    MICROSECOND,
    Counter,
    Verdict,
    interval,
)
from .callables import CallableError, Function
from .conf import Config, get_config
from .decisions import Decision, RateState, Reason, tightest
from .guard import WAITED, Breaker, DeniedLog, DeniedMemory, LeaseBook, LocalCounters, Throttle
from .identity import Part
from .scopes import Plan, Scope
from .steps import Step, Steps, arun, run
from .stores import StoreError, get_store
from .stores.base import give_back

__all__ = [
    "RequestLimits",
    "acheck",
    "ahit",
    "apeek",
    "areset",
    "asettle",
    "check",
    "forget",
    "hit",
    "inner",
    "now",
    "peek",
    "reset",
    "reset_all",
    "settle",
    "ticks",
]

logger = logging.getLogger("ratelimit_kv")

ASYNC = {"hit": "ahit", "peek": "apeek", "reset": "areset"}
"""A store's methods and their twins."""

ATTRIBUTE = "rate_limit"
"""Where a request keeps its RequestLimits."""


def now() -> int:
    """Microseconds since the epoch. With :func:`ticks` the only reader of the clock, so freezing time works everywhere."""
    return time.time_ns() // 1000


def ticks() -> float:
    """Seconds of a clock that does not step, for deadlines within this process."""
    return time.monotonic()


# ------------------------------------------------------------------------------------------ state of this process


class Runtime:
    """What this process remembers while one Config is in force."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.memory = DeniedMemory(config.remember.entries, config.remember.seconds) if config.remember else None
        self.log = DeniedLog()
        self.throttle = Throttle()
        self.views: dict[Any, Any] = {}
        """What the doors have found out about views."""
        self.leases = LeaseBook(config.processes)
        self._breakers: dict[str, Breaker] = {}
        self._local: dict[str, LocalCounters] = {}

    def breaker(self, alias: str) -> Breaker:
        """The breaker of a store."""
        found = self._breakers.get(alias)
        if found is None:
            found = self._breakers.setdefault(
                alias, Breaker(alias, self.config.breaker_failures, self.config.breaker_seconds)
            )
        return found

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


def _ask_store(rt: Runtime, alias: str, method: str, *args: Any) -> Steps[Any]:
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
    except Exception as error:
        raise (yield from _failed(rt, alias, error, began)) from error
    if rt.breaker(alias).succeeded(began):
        yield from _recovered(rt, alias)
    return result


def _failed(rt: Runtime, alias: str, error: Exception, began: float) -> Steps[StoreError]:
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
            yield from _send(signals.store_failed, alias=alias)
    elif breaker.succeeded(began):  # it answered, if not with what we wanted
        yield from _recovered(rt, alias)
    return failure


def _recovered(rt: Runtime, alias: str) -> Steps[None]:
    rt.local(alias).forget()
    logger.warning("store %s answers again: breaker closed", alias, extra={"alias": alias})
    yield from _send(signals.store_recovered, alias=alias)


def _send(signal: Signal, **words: Any) -> Steps[None]:
    if signal.receivers and signal.has_listeners(None):
        yield Step(partial(signal.send_robust, None, **words), partial(signal.asend_robust, None, **words))


def _say_store_error(rt: Runtime, scope: Scope, alias: str, error: StoreError) -> Steps[None]:
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
            yield from _send(signals.store_failed, alias=alias)


# ---------------------------------------------------------------------------------------------------- one decision


class Ask:
    """One scope of one hit on its way to the store."""

    __slots__ = (
        "at",
        "cost",
        "counters",
        "identity",
        "is_local",
        "ledger",
        "number",
        "plan",
        "scope",
        "take",
        "verdicts",
    )

    def __init__(self, scope: Scope, plan: Plan, identity: str, cost: int, number: int) -> None:
        self.scope = scope
        self.plan = plan
        self.identity = identity
        self.cost = cost
        self.take = cost
        """What to charge: more than the cost when a lease takes hits ahead."""
        self.number = number
        self.at = 0
        """When the counters were made."""
        self.counters: list[Counter] = []
        self.verdicts: Sequence[Verdict] = ()
        self.is_local = False
        self.ledger: Ledger | None = None
        """Opened when something is settled for the first time."""

    @property
    def group(self) -> int:
        """Enforced scopes are one group; each shadow scope is judged apart."""
        return self.number + 1 if self.scope.mode == "shadow" else 0

    def fill(self, at: int, share: int = 1) -> list[Counter]:
        """Make the counters."""
        self.at = at
        self.counters = self.scope.counters(self.plan, self.identity, self.take, at, self.number, self.group, share)
        return self.counters


class Charge:
    """One time that something was added to the counters of a scope."""

    __slots__ = ("amount", "counters")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        """Hits, less what has been given back."""
        self.counters: list[Counter] = []
        """Those that can give it back. ``end`` of a bucket is when it will have drained all this."""


class Ledger:
    """What a hit has really added, so that no more than that is ever given back, over all ways and threads."""

    __slots__ = ("charges", "identity", "is_local", "lock", "plan", "scope")

    _opening = threading.Lock()

    @classmethod
    def of(cls, decision: Decision) -> Ledger | None:
        """The account of a decision, the same for everybody who asks; None when nothing can be charged to it."""
        ask: Ask | None = decision.receipt
        if ask is None:
            return None
        if ask.ledger is None:
            with cls._opening:
                if ask.ledger is None:
                    ask.ledger = cls(ask)
        return ask.ledger

    def __init__(self, ask: Ask) -> None:
        self.scope = ask.scope
        self.plan = ask.plan
        self.identity = ask.identity
        self.is_local = ask.is_local
        self.lock = threading.Lock()
        first = Charge(ask.cost)
        self.charges = [first]
        self.confirm(first, ask.counters, ask.verdicts, ask.at)

    @property
    def total(self) -> int:
        """What is charged now."""
        return sum(charge.amount for charge in self.charges)

    def change(self, at: int, total: int | None = None, add: int = 0) -> tuple[Charge | None, list[Counter]]:
        """Note that the total is to be this, or so much more or less, and return the hit that makes it so.

        Giving back goes to the windows that were charged, the latest first; more goes to the window that is current,
        and is to be confirmed when it was really charged.
        """
        with self.lock:
            now_charged = self.total
            missing = min(max(now_charged + add if total is None else total, 0), MAX_COUNT) - now_charged
            if missing > 0:
                if self.scope.algorithm == CONCURRENT:  # one in flight is one, whatever it costs
                    return None, []
                charge = Charge(missing)
                self.charges.append(charge)
                counters = self.scope.counters(self.plan, self.identity, missing, at, 0, 0)
                return charge, [counter._replace(flags=FORCE) for counter in counters if counter.kind != BAN]
            hit: list[Counter] = []
            while missing < 0 and self.charges:
                charge = self.charges[-1]
                back = min(charge.amount, -missing)
                missing += back
                charge.amount -= back
                if not charge.amount:
                    self.charges.pop()
                hit += [one for counter in charge.counters if (one := _give_back(counter, back, at)) is not None]
            return None, hit

    def confirm(self, charge: Charge, counters: Sequence[Counter], verdicts: Sequence[Verdict], at: int) -> None:
        """What became of a charge: only what was really added can be given back."""
        with self.lock:
            if not any(verdict.charged for verdict in verdicts):
                if charge in self.charges:
                    self.charges.remove(charge)
                return
            charge.counters = [
                counter._replace(end=at + verdict.reset_after) if counter.kind == BUCKET else counter
                for counter, verdict in zip(counters, verdicts, strict=True)
                if verdict.charged and counter.kind != BAN and not _was_cut(counter, verdict)
            ]


def _was_cut(counter: Counter, verdict: Verdict) -> bool:
    """Whether a counter stands at the most that it can hold, so that nobody knows how much of a charge went in."""
    if counter.kind == BUCKET:
        return verdict.reset_after >= 2 * interval(counter) * counter.limit
    return verdict.used >= MAX_COUNT


def _give_back(counter: Counter, amount: int, at: int) -> Counter | None:
    """The hit that gives back so much of a charge, None when there is nothing left of it."""
    if counter.kind == BUCKET:  # what has drained meanwhile is used: giving it back would take from who came later
        amount = min(amount, max(counter.end - at, 0) // interval(counter))
        counter = counter._replace(end=0)
    return counter._replace(cost=-amount, flags=FORCE | EXISTING) if amount else None


def _rounds(counters: Iterable[Counter]) -> list[list[Counter]]:
    """Hits that have each key once, as a store wants it: what goes to one window together. Each counter judged apart."""
    merged: dict[tuple[str, int], Counter] = {}
    for counter in counters:
        before = merged.get((counter.key, counter.end))
        merged[counter.key, counter.end] = (
            counter if before is None else before._replace(cost=before.cost + counter.cost)
        )
    rounds: list[list[Counter]] = []
    for counter in merged.values():  # only what was in flight at different times has one key and several ends
        for one in rounds:
            if all(other.key != counter.key for other in one):
                break
        else:
            rounds.append(one := [])
        one.append(counter._replace(group=len(one)))
    return rounds


def _decide(
    rt: Runtime, request: HttpRequest, limits: RequestLimits, scopes: Sequence[Scope], cost: int | None = None
) -> Steps[list[Decision]]:
    """Decide scopes for a request in one round trip a store. A denial from memory ends it early, alone."""
    ids = rt.config.identities
    memo = limits.memo
    done: list[Decision] = []
    asks: list[Ask] = []
    later: list[Scope] = []
    at, tick = now(), ticks()
    for scope in scopes:
        if scope.mode == "off":
            continue
        plan = scope.plan
        if plan is None and scope.rate is None:
            done.append(Decision(scope=scope.name, identity="", allowed=True, reason=Reason.EXEMPT, cost=0))
            continue
        identity = scope.key.quick(request, ids, memo)
        if plan is None or type(identity) is Part or identity is None or type(scope.cost) is not int:
            later.append(scope)
            continue
        weight = scope.cost if cost is None else cost
        known = _remembered(rt, scope, identity, plan, weight, at, tick)
        if known is not None:
            yield from _say_denied(rt, request, known, at)
            return [known]
        asks.append(Ask(scope, plan, identity, weight, len(asks)))
    for scope in later:
        answer = yield from _weigh(rt, request, memo, scope, cost)
        if answer is None:
            continue
        if type(answer) is Decision:
            if not answer.allowed:
                yield from _send(signals.denied, request=request, decision=answer)
                return [answer]
            done.append(answer)
            continue
        assert isinstance(answer, Ask)
        answer.number = len(asks)
        known = _remembered(rt, answer.scope, answer.identity, answer.plan, answer.cost, at, tick)
        if known is not None:
            yield from _say_denied(rt, request, known, at)
            return [known]
        asks.append(answer)
    if asks:
        done += yield from _settle_asks(rt, request, limits, asks, at)
    return done


def _remembered(
    rt: Runtime, scope: Scope, identity: str, plan: Plan, cost: int, at: int, tick: float
) -> Decision | None:
    memory = rt.memory
    if memory is None or not memory._known:
        return None
    # Where the wait does not depend on the cost, a costlier hit gets the same answer. Else it has to ask for its own.
    costliest = plan.limits[0] if scope.algorithm == FIXED and len(plan.limits) == 1 else 0
    known = memory.find(scope.name, identity, plan.token, cost, costliest, at, tick)
    if known is None:
        return None
    before = known.decision
    return Decision(
        scope=scope.name,
        identity=identity,
        allowed=False,
        limit=before.limit,
        window=before.window,
        remaining=before.remaining,
        reset_after=max(known.reset_at - at, 0) / MICROSECOND,
        retry_after=(known.until - at) / MICROSECOND,
        cost=cost,
        reason=Reason.REMEMBERED,
        rates=before.rates,
    )


def _weigh(
    rt: Runtime, request: HttpRequest, memo: dict[Part, str | None], scope: Scope, cost: int | None
) -> Steps[Ask | Decision | None]:
    """Identity, rates and cost of a scope that has to wait for one of them."""
    ids = rt.config.identities
    identity = ""
    try:
        found = yield from scope.key.identify(request, ids, memo)
        if found is None:
            if scope.on_missing == "deny":
                return Decision(scope=scope.name, identity="", allowed=scope.mode == "shadow", reason=Reason.MISSING)
            if scope.on_missing == "skip":
                return Decision(scope=scope.name, identity="", allowed=True, reason=Reason.MISSING, cost=0)
            found = ids.ip(request)
        identity = found
        plan = scope.plan
        if scope.rate is not None:
            rates = yield from _once(memo, scope.rate, request)
            try:
                plan = scope.with_rates(rates)
            except ValueError as error:
                raise CallableError(scope.rate, f"returned {type(rates).__name__}, not a rate") from error
        if plan is None:
            return Decision(scope=scope.name, identity=identity, allowed=True, reason=Reason.EXEMPT, cost=0)
        if cost is None:
            if type(scope.cost) is int:
                cost = scope.cost
            else:
                function = scope.cost
                assert isinstance(function, Function)
                cost = yield from _once(memo, function, request)
                if type(cost) is not int or not 0 <= cost <= MAX_COUNT:
                    raise CallableError(function, f"returned {type(cost).__name__}, not an int from 0 to 2**53 - 1")
    except CallableError as error:
        if rt.throttle.due(("callable", scope.name), ticks()):
            logger.error("scope %s: %s", scope.name, error, exc_info=error.__cause__, extra={"scope": scope.name})
        allowed = scope.on_error != "deny" or scope.mode == "shadow"
        return Decision(scope=scope.name, identity=identity, allowed=allowed, reason=Reason.CALLABLE_ERROR)
    return Ask(scope, plan, identity, cost, 0)


def _once(memo: dict[Any, Any], function: Function, request: HttpRequest) -> Steps[Any]:
    """A callable's answer, called once a request."""
    if function not in memo:
        memo[function] = yield function.step(request)
    return memo[function]


def _settle_asks(
    rt: Runtime, request: HttpRequest | None, limits: RequestLimits | None, asks: list[Ask], at: int
) -> Steps[list[Decision]]:
    """All asks of a hit to their stores and back as decisions."""
    try:
        yield from _take_all(rt, asks, at)
        return (yield from _conclude(rt, request, limits, asks, at))
    except asyncio.CancelledError:  # nobody will ever know of this hit, but what it has in flight would stay there
        yield from _land(rt, asks, at)
        raise


def _take_all(rt: Runtime, asks: list[Ask], at: int) -> Steps[None]:
    """One trip an alias, all or nothing over all of them."""
    taken: list[tuple[str, list[Ask]]] = []
    denied = False
    spent = [ask for ask in asks if ask.scope.lease > 1 and _spend_leased(rt, ask, at)]
    rest = [ask for ask in asks if ask not in spent] if spent else asks
    for alias, batch in _batches(rest) if rest else ():
        if denied:  # an earlier alias denied: nothing may be charged here, but shadow scopes and numbers go on
            enforced = [ask for ask in batch if not ask.group]
            batch = [ask for ask in batch if ask.group]
            for ask in enforced:
                ask.fill(at)
            if enforced:
                yield from _look(rt, alias, enforced, at)
            if not batch:
                continue
        yield from _take(rt, alias, batch, at)
        taken.append((alias, batch))
        denied = denied or any(not _passes(ask) for ask in batch if not ask.group)
    if denied and len(taken) > 1:
        yield from _undo(rt, taken, at)
    if denied:
        for ask in spent:
            rt.leases.keep(ask.counters[0], ask.cost, 0)
            ask.verdicts = [verdict._replace(charged=False) for verdict in ask.verdicts]


def _land(rt: Runtime, asks: list[Ask], at: int) -> Steps[None]:
    """End what a hit may have in flight. The store gets this after the hit, whose answer we have not waited for."""
    for ask in asks:
        if ask.scope.algorithm != CONCURRENT or not ask.cost:
            continue
        counters = [counter._replace(cost=-counter.cost, flags=FORCE | EXISTING) for counter in ask.counters]
        if ask.is_local:
            rt.local(ask.scope.cache).hit(counters, at)
        elif counters:
            try:
                yield from _ask_store(rt, ask.scope.cache, "hit", counters, at)
            except StoreError as error:
                yield from _say_store_error(rt, ask.scope, ask.scope.cache, error)


def _batches(asks: list[Ask]) -> Iterable[tuple[str, list[Ask]]]:
    """By alias. Narrow identities first, everyone's last: a caller over his own limit does not touch everyone's."""
    first = asks[0].scope.cache
    if all(ask.scope.cache == first for ask in asks):
        if len(asks) > 1:
            asks = sorted(asks, key=_breadth)
        return ((first, asks),)
    batches: dict[str, list[Ask]] = {}
    for ask in sorted(asks, key=_breadth):
        batches.setdefault(ask.scope.cache, []).append(ask)
    return sorted(batches.items(), key=lambda item: max(_breadth(ask) for ask in item[1]))


def _breadth(ask: Ask) -> int:
    return 1 if ask.scope.key.is_everyone else 0


def _spend_leased(rt: Runtime, ask: Ask, at: int) -> bool:
    """Whether hits that were taken ahead pay for this one; if not, how many to take with it."""
    counters = ask.fill(at)
    verdicts = rt.leases.spend(counters, ask.cost)
    if verdicts is None:
        ask.take = min(rt.leases.size(counter, ask.scope.lease) for counter in counters)
        return False
    ask.verdicts = [verdict._replace(reset_after=verdict.reset_after - at) for verdict in verdicts]
    return True


def _take(rt: Runtime, alias: str, batch: list[Ask], at: int) -> Steps[None]:
    """Charge these asks in one store, and what leases take ahead."""
    yield from _hit_store(rt, alias, batch, at)
    ahead = [ask for ask in batch if ask.take > ask.cost]
    if not ahead:
        return
    if not all(_passes(ask) for ask in ahead):
        enforced = [ask for ask in batch if not ask.group]
        if all(_passes(ask) for ask in enforced if ask not in ahead):
            for ask in ahead:  # no room to take ahead, but perhaps for the hit itself
                ask.take = ask.cost
            yield from _hit_store(rt, alias, enforced, at)
        return
    for ask in ahead:
        if all(verdict.charged for verdict in ask.verdicts):
            more = ask.take - ask.cost
            rt.leases.keep(ask.counters[0], more, max(verdict.used for verdict in ask.verdicts))
            ask.verdicts = [
                verdict._replace(used=verdict.used - more, remaining=verdict.remaining + more)
                for verdict in ask.verdicts
            ]


def _hit_store(rt: Runtime, alias: str, batch: list[Ask], at: int) -> Steps[None]:
    """One trip for these asks; without an answer each scope's ON_ERROR steps in."""
    counters = [counter for ask in batch for counter in ask.fill(at)]
    try:
        verdicts = yield from _ask_store(rt, alias, "hit", counters, at)
    except StoreError as error:
        yield from _without_store(rt, alias, batch, at, error)
        return
    _deal(batch, verdicts)


def _look(rt: Runtime, alias: str, batch: list[Ask], at: int) -> Steps[None]:
    try:
        verdicts = yield from _ask_store(rt, alias, "peek", [c for ask in batch for c in ask.counters], at)
    except StoreError as error:
        verdicts = [_unanswered(error.cause) for ask in batch for _ in ask.counters]
    _deal(batch, verdicts)


def _deal(batch: list[Ask], verdicts: Sequence[Verdict]) -> None:
    if len(batch) == 1:
        batch[0].verdicts = verdicts
        return
    start = 0
    for ask in batch:
        end = start + len(ask.counters)
        ask.verdicts = verdicts[start:end]
        start = end


def _unanswered(cause: str) -> Verdict:
    return Verdict(False, False, 0, 0, 0, None, Reason.STORE_ERROR, cause)


def _without_store(rt: Runtime, alias: str, batch: list[Ask], at: int, error: StoreError) -> Steps[None]:
    local = [ask for ask in batch if ask.scope.on_error == "local"]
    closed = any(ask.scope.on_error == "deny" and not ask.group for ask in batch)
    for ask in batch:
        ask.take = ask.cost
        ask.verdicts = [_unanswered(error.cause) for _ in ask.counters]
        yield from _say_store_error(rt, ask.scope, alias, error)
    if local:
        share = rt.config.processes or 1
        counters = [counter for ask in local for counter in ask.fill(at, share)]
        if closed:
            counters = [counter._replace(cost=0) for counter in counters]
        for ask in local:
            ask.is_local = True
        _deal(local, rt.local(alias).hit(counters, at))


def _passes(ask: Ask) -> bool:
    """Whether an enforced scope lets the hit through."""
    for verdict in ask.verdicts:
        if not verdict.allowed and (verdict.reason is not Reason.STORE_ERROR or ask.scope.on_error == "deny"):
            return False
    return True


def _undo(rt: Runtime, taken: list[tuple[str, list[Ask]]], at: int) -> Steps[None]:
    """Give back what other aliases charged for a hit that was denied after all."""
    for alias, batch in taken:
        mine = [ask for ask in batch if not ask.group and any(v.charged for v in ask.verdicts) and _passes(ask)]
        for where, asks in (("store", [a for a in mine if not a.is_local]), ("local", [a for a in mine if a.is_local])):
            counters = [c for ask in asks for c in give_back(ask.counters, ask.verdicts)]
            if not counters:
                continue
            counters = [counter._replace(group=position) for position, counter in enumerate(counters)]
            if where == "local":
                rt.local(alias).hit(counters, at)
            else:
                try:
                    yield from _ask_store(rt, alias, "hit", counters, at)
                except StoreError as error:
                    yield from _say_store_error(rt, asks[0].scope, alias, error)
            for ask in asks:
                ask.verdicts = [
                    verdict._replace(
                        charged=False,
                        used=max(verdict.used - ask.cost, 0),
                        remaining=min(verdict.remaining + ask.cost, counter.limit),
                    )
                    if verdict.charged
                    else verdict
                    for counter, verdict in zip(ask.counters, ask.verdicts, strict=True)
                ]


def _conclude(
    rt: Runtime, request: HttpRequest | None, limits: RequestLimits | None, asks: list[Ask], at: int
) -> Steps[list[Decision]]:
    """Decisions of the asks; remembers, logs and signals what deserves it."""
    decisions: list[Decision] = []
    for ask in asks:
        decision = _within(ask) or _decision(ask)
        decisions.append(decision)
        if decision.reason is Reason.WITHIN:
            if signals.near_limit.receivers and decision.counted and _is_near(ask):
                yield from _send(signals.near_limit, request=request, decision=decision)
            continue
        if decision.reason is Reason.STORE_ERROR:
            cause = next((v.cause for v in ask.verdicts if v.reason is Reason.STORE_ERROR), "")
            yield from _say_store_error(rt, ask.scope, ask.scope.cache, StoreError(cause, outage=False))
            if not decision.allowed:
                yield from _send(signals.denied, request=request, decision=decision)
        elif decision.reason is Reason.SHADOW or not decision.allowed:
            if rt.memory is not None and ask.scope.remembers and not ask.is_local:
                rt.memory.remember(decision, ask.plan.token, at, ticks())
            yield from _say_denied(rt, request, decision, at)
    return decisions


def _say_denied(rt: Runtime, request: HttpRequest | None, decision: Decision, at: int) -> Steps[None]:
    if decision.reason is not Reason.REMEMBERED or logger.isEnabledFor(logging.DEBUG):
        rt.log.record(decision, at, ticks())
    yield from _send(signals.denied, request=request, decision=decision)


def _is_near(ask: Ask) -> bool:
    near, cost = ask.scope.near, ask.cost
    return any(
        verdict.used - cost < near * counter.limit <= verdict.used
        for counter, verdict in zip(ask.counters, ask.verdicts, strict=True)
        if counter.kind != BAN
    )


def _within(ask: Ask) -> Decision | None:
    """The answer almost every hit gets: one rate, charged. None when there is more to say."""
    verdicts = ask.verdicts
    if len(verdicts) != 1 or ask.is_local:
        return None
    verdict = verdicts[0]
    if not verdict.charged or verdict.reason is not Reason.WITHIN:
        return None
    counter = ask.counters[0]
    limit, cost = counter.limit, ask.cost
    window = 0 if counter.kind == CONCURRENT else ask.plan.rates[0].period
    remaining, reset_after = verdict.remaining, verdict.reset_after / MICROSECOND
    return Decision(
        scope=ask.scope.name,
        identity=ask.identity,
        allowed=True,
        limit=limit,
        window=window,
        remaining=remaining,
        reset_after=reset_after,
        cost=cost,
        counted=cost,
        rates=(RateState(limit=limit, window=window, remaining=remaining, reset_after=reset_after, allowed=True),),
        receipt=ask,
    )


def _decision(ask: Ask, counted: int | None = None) -> Decision:
    """One scope's answer from the verdicts of its counters."""
    scope, verdicts = ask.scope, ask.verdicts
    states = tuple(
        [
            RateState(
                limit=counter.limit,
                window=0 if counter.kind == CONCURRENT else rate.period,
                remaining=None if verdict.reason is Reason.STORE_ERROR else verdict.remaining,
                reset_after=verdict.reset_after / MICROSECOND,
                allowed=verdict.allowed,
            )
            for rate, counter, verdict in zip(ask.plan.rates, ask.counters, verdicts, strict=False)
        ]
    )
    worst: Verdict | None = None
    state = states[0]
    for position, verdict in enumerate(verdicts):
        if verdict.allowed or verdict.reason is Reason.STORE_ERROR:
            continue
        if worst is None or (worst.retry_after is not None and (verdict.retry_after or MAX_COUNT) > worst.retry_after):
            worst = verdict
            if position < len(states):
                state = states[position]
    charged = any(verdict.charged for verdict in verdicts)
    failed = any(verdict.reason is Reason.STORE_ERROR for verdict in verdicts)
    is_peek = counted is not None
    if counted is None:
        counted = ask.cost if charged else 0
    if worst is None and failed:
        allowed = scope.on_error != "deny" or scope.mode == "shadow"
        return Decision(
            scope=scope.name,
            identity=ask.identity,
            allowed=allowed,
            limit=state.limit,
            window=state.window,
            retry_after=None if scope.on_error != "deny" else 1.0,
            cost=ask.cost,
            counted=counted,
            reason=Reason.STORE_ERROR,
            rates=states,
            receipt=ask if (allowed or charged) and not is_peek else None,
        )
    retry_after: float | None = None
    if worst is None:
        allowed, reason = True, Reason.LOCAL if ask.is_local else Reason.WITHIN
        if len(states) > 1:
            state = min(states, key=_left)
    else:
        shadow = scope.mode == "shadow"
        allowed = shadow
        reason = Reason.SHADOW if shadow else Reason.LOCAL if ask.is_local else worst.reason
        retry_after = None if worst.retry_after is None else worst.retry_after / MICROSECOND
    return Decision(
        scope=scope.name,
        identity=ask.identity,
        allowed=allowed,
        limit=state.limit,
        window=state.window,
        remaining=state.remaining,
        reset_after=state.reset_after if worst is None or retry_after is None else max(state.reset_after, retry_after),
        retry_after=retry_after,
        cost=ask.cost,
        counted=counted,
        reason=reason,
        rates=states,
        receipt=ask if (allowed or charged) and not is_peek else None,
    )


# --------------------------------------------------------------------------------------------- what a request keeps


class RequestLimits:
    """``request.rate_limit``: the decisions of a request, and its accounts."""

    # Every request has one, and most are told apart by little: what is not set is what the class says.
    exempt: bool | None = None
    """Whether the whole request is exempt; None while nobody has asked."""
    door: str = ""
    """The outermost door that answers for this request: ``middleware`` or ``decorator``."""
    resolved: bool = False
    """Whether a view was found for it."""
    has_denied: bool = False
    """Whether any decision was a denial."""
    finished: bool = False
    """Whether a door has given back and told what there was."""
    counted_here: frozenset[Any] = frozenset()
    """Marks that a door has decided already."""
    asks: Sequence[Ask] = ()
    """Hits that passed and whose decisions nobody has read yet."""
    earlier: dict[str, list[Decision]] | None = None
    """Decisions that charged before the latest one, where a scope was hit several times."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self._by_name: dict[str, Decision] = {}
        self.scopes: dict[str, Scope] = {}
        self.memo: dict[Any, Any] = {}

    @property
    def by_name(self) -> dict[str, Decision]:
        """The decisions by the names of their scopes."""
        asks = self.asks
        if asks:
            self.asks = ()
            for ask in asks:
                self.scopes[ask.scope.name] = ask.scope
                self._by_name[ask.scope.name] = _within(ask) or _decision(ask)
        return self._by_name

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One for each scope that was asked, in the order of asking. Empty when none applied."""
        return tuple(self.by_name.values())

    @property
    def allowed(self) -> bool:
        """Whether no scope denied."""
        return all(decision.allowed for decision in self.by_name.values())

    @property
    def tightest(self) -> Decision | None:
        """The denial with the longest wait, else the decision nearest its limit; None when none applied."""
        return tightest(self.by_name.values())

    def record(self, scopes: Iterable[Scope], decisions: Iterable[Decision]) -> None:
        """Keep what was decided."""
        for scope in scopes:
            self.scopes[scope.name] = scope
        for decision in decisions:
            before = self.by_name.get(decision.scope)
            if before is not None and before.receipt is not None:
                self.earlier = self.earlier or {}
                self.earlier.setdefault(decision.scope, []).append(before)
            self.by_name[decision.scope] = decision
            if not decision.allowed:
                self.has_denied = True

    def charge(self, name: str, cost: int) -> None:
        """Add to what this request costs in a scope, which may pass its limit. Never denies, never raises for a store."""
        run(self._account(name, add=cost))

    async def acharge(self, name: str, cost: int) -> None:
        """:meth:`charge`, async."""
        await arun(self._account(name, add=cost))

    def settle(self, name: str, total: int) -> None:
        """Set what this request costs in a scope in all, up or down."""
        run(self._account(name, total=total))

    async def asettle(self, name: str, total: int) -> None:
        """:meth:`settle`, async."""
        await arun(self._account(name, total=total))

    def refund(self, name: str | None = None) -> None:
        """Give back what this request cost in a scope, or in every scope."""
        run(self._account(name, total=0))

    async def arefund(self, name: str | None = None) -> None:
        """:meth:`refund`, async."""
        await arun(self._account(name, total=0))

    def _account(self, name: str | None, total: int | None = None, add: int | None = None) -> Steps[None]:
        amount = total if add is None else add
        if type(amount) is not int or not 0 <= amount <= MAX_COUNT:
            raise ValueError(f"{amount!r} is not a cost. Write an int from 0 to 2**53 - 1.")
        rt = runtime()
        names = list(self.by_name) if name is None else [scope.name for scope in rt.config.family(name)]
        for one in names:
            yield from self.move(rt, one, total, add or 0)

    def charged(self, name: str) -> int:
        """What this request has charged in a scope, and not given back."""
        return sum(ledger.total for ledger in self._ledgers(name))

    def _ledgers(self, name: str) -> list[Ledger]:
        decisions = (*(self.earlier or {}).get(name, ()), *filter(None, (self.by_name.get(name),)))
        return [ledger for decision in decisions if (ledger := Ledger.of(decision)) is not None]

    def move(self, rt: Runtime, name: str, total: int | None = None, add: int = 0) -> Steps[None]:
        """Move what this request costs in one scope: to a total, or by so much more."""
        ledgers = self._ledgers(name)
        if not ledgers:
            return
        if len(ledgers) == 1:
            self.by_name[name] = yield from _move(rt, self.by_name[name], ledgers[0], total, add)
            return
        if total is not None:
            add = total - self.charged(name)
        for ledger in reversed(ledgers):  # more goes to the latest, less comes from the latest first
            by = add if add > 0 else -min(ledger.total, -add)
            told = yield from _move(rt, self.by_name[name], ledger, None, by)
            self.by_name[name] = replace(told, counted=self.charged(name))
            add -= by


def _settle(rt: Runtime, decision: Decision, total: int) -> Steps[Decision]:
    """Move a decision's charges to a total."""
    ledger = Ledger.of(decision)
    return decision if ledger is None else (yield from _move(rt, decision, ledger, total))


def _move(rt: Runtime, decision: Decision, ledger: Ledger, total: int | None, add: int = 0) -> Steps[Decision]:
    """Move an account, and tell it in a decision. A store that fails is logged; the numbers then stay as they were."""
    at = now()
    charge, counters = ledger.change(at, total, add)
    if not counters:
        return replace(decision, counted=ledger.total) if decision.counted != ledger.total else decision
    scope = ledger.scope
    rt.forget(scope.name, ledger.identity)
    done: list[tuple[Counter, Verdict]] = []
    for batch in _rounds(counters):
        if ledger.is_local:
            verdicts = rt.local(scope.cache).hit(batch, at)
        else:
            try:
                verdicts = yield from _ask_store(rt, scope.cache, "hit", batch, at)
            except StoreError as error:
                if charge is not None:
                    ledger.confirm(charge, (), (), at)
                yield from _say_store_error(rt, scope, scope.cache, error)
                return decision
        done += zip(batch, verdicts, strict=True)
        if charge is not None:
            ledger.confirm(charge, batch, verdicts, at)
    rt.forget(scope.name, ledger.identity)
    rates = list(decision.rates)
    for counter, verdict in sorted(done, key=lambda pair: pair[0].end):  # the latest window is told
        if verdict.reason is not Reason.STORE_ERROR:
            place = ledger.plan.heads.index(counter.key[: counter.key.index("{") + 1])
            rates[place] = replace(rates[place], remaining=verdict.remaining)
    nearest = min(rates, key=_left)
    return replace(
        decision,
        counted=ledger.total,
        rates=tuple(rates),
        limit=nearest.limit,
        window=nearest.window,
        remaining=nearest.remaining,
        reset_after=nearest.reset_after,
    )


def _left(state: RateState) -> int:
    """What is left of a rate."""
    return state.remaining or 0


def give_back_flow(limits: RequestLimits, name: str) -> Steps[None]:
    """Give back all that a request has charged in a scope."""
    return limits.move(runtime(), name, 0)


def reset_flow(scope: Scope, decision: Decision) -> Steps[int]:
    """Forget whom a scope has decided about. A store that fails is logged."""
    rt = runtime()
    ask: Ask | None = decision.receipt
    plan = scope.plan if ask is None else ask.plan
    try:
        return (yield from _forget_identity(rt, scope, decision.identity, now(), plan))
    except StoreError as error:
        yield from _say_store_error(rt, scope, scope.cache, error)
        return 0


def inner(request: Any) -> HttpRequest:
    """The HttpRequest within whatever a framework wraps around it."""
    return getattr(request, "_request", request)  # type: ignore[no-any-return]


def limits_of(request: HttpRequest) -> RequestLimits:
    """The request's own record, made when it is first asked for."""
    limits = getattr(request, ATTRIBUTE, None)
    if type(limits) is not RequestLimits:
        limits = RequestLimits(request)
        request.rate_limit = limits  # type: ignore[attr-defined]
    return limits


# ------------------------------------------------------------------------------------------------------- in flows


def check_flow(request: HttpRequest, scopes: Sequence[Scope]) -> Steps[RequestLimits]:
    """Decide those of the scopes that this request has not been asked for yet, and record them."""
    limits = limits_of(request)
    rt = runtime()
    if not rt.config.enabled:
        return limits
    by_name = limits.by_name
    if by_name:
        scopes = [scope for scope in scopes if scope.name not in by_name]
    if not scopes:
        return limits
    if limits.exempt is None:
        limits.exempt = (yield from _is_exempt(rt, request)) if rt.config.has_exemptions else False
    if limits.exempt:
        limits.record(
            scopes,
            [
                Decision(scope=scope.name, identity="", allowed=True, reason=Reason.EXEMPT, cost=0)
                for scope in scopes
                if scope.mode != "off"
            ],
        )
        return limits
    decisions = yield from _decide(rt, request, limits, scopes)
    limits.record(scopes, decisions)
    return limits


def quick(request: HttpRequest, limits: RequestLimits, scopes: Sequence[Scope]) -> Any:
    """The short way of almost every request: all that counts is plain, the store answers, every counter has room.

    True when the hit passed; its decisions are made when somebody reads them. False when it was denied from memory.
    None when the long way has to be taken from its start (``check_flow``), else the flow that takes it from where the
    store has answered.
    """
    rt = runtime()
    asks, counters, at = _plain(rt, request, limits, scopes)
    if not asks:
        return False if limits.has_denied else None
    alias = scopes[0].cache
    began = ticks()
    try:
        verdicts = get_store(alias).hit(counters, at)
    except AssertionError:
        raise
    except Exception as error:  # noqa: BLE001  as for every call of a store
        return _go_on(rt, request, limits, asks, at, began, error)
    return _pass(rt, request, limits, asks, at, began, verdicts)


async def aquick(request: HttpRequest, limits: RequestLimits, scopes: Sequence[Scope]) -> Any:
    """:func:`quick`, async."""
    rt = runtime()
    asks, counters, at = _plain(rt, request, limits, scopes)
    if not asks:
        return False if limits.has_denied else None
    alias = scopes[0].cache
    began = ticks()
    try:
        store = get_store(alias)
        verdicts = store.hit(counters, at) if store.inline else await store.ahit(counters, at)
    except AssertionError:
        raise
    except Exception as error:  # noqa: BLE001  as for every call of a store
        return _go_on(rt, request, limits, asks, at, began, error)
    return _pass(rt, request, limits, asks, at, began, verdicts)


def _plain(
    rt: Runtime, request: HttpRequest, limits: RequestLimits, scopes: Sequence[Scope]
) -> tuple[list[Ask], list[Counter], int]:
    """The hit, with its asks and its time, if nothing in it has to wait for anything but one store. Else no asks.

    A denial from memory is recorded, where nobody is to be told of it.
    """
    config, memory = rt.config, rt.memory
    alias, at = scopes[0].cache, now()
    nothing: tuple[list[Ask], list[Counter], int] = ([], [], at)
    if limits.asks or limits._by_name or config.has_exemptions or limits.exempt or rt.breaker(alias).is_open:
        return nothing
    ids, memo = config.identities, limits.memo
    asks: list[Ask] = []
    for scope in scopes:
        plan = scope.plan
        if not scope.is_plain or scope.cache != alias or plan is None:
            return nothing
        identity = scope.key.quick(request, ids, memo)
        if type(identity) is not str:
            return nothing
        if memory is not None and (scope.name, identity) in memory:
            known = _remembered(rt, scope, identity, plan, scope.cost, at, ticks())  # type: ignore[arg-type]
            if known is not None and not signals.denied.receivers and not logger.isEnabledFor(logging.DEBUG):
                limits.scopes[scope.name] = scope
                limits._by_name[scope.name] = known
                limits.has_denied = True
            return nothing
        asks.append(Ask(scope, plan, identity, scope.cost, len(asks)))  # type: ignore[arg-type]
    if len(asks) == 1:
        return asks, asks[0].fill(at), at
    asks.sort(key=_breadth)
    return asks, [counter for ask in asks for counter in ask.fill(at)], at


def _pass(
    rt: Runtime,
    request: HttpRequest,
    limits: RequestLimits,
    asks: list[Ask],
    at: int,
    began: float,
    verdicts: Sequence[Verdict],
) -> Any:
    for verdict in verdicts:
        if not verdict.charged:
            return _go_on(rt, request, limits, asks, at, began, verdicts)
    if signals.near_limit.receivers or rt.breaker(asks[0].scope.cache).is_troubled:
        return _go_on(rt, request, limits, asks, at, began, verdicts)
    _deal(asks, verdicts)
    limits.asks = asks
    return True


def _go_on(
    rt: Runtime, request: HttpRequest, limits: RequestLimits, asks: list[Ask], at: int, began: float, answer: Any
) -> Steps[RequestLimits]:
    """The long way from where the store has answered, or failed."""
    alias = asks[0].scope.cache
    if isinstance(answer, Exception):
        yield from _without_store(rt, alias, asks, at, (yield from _failed(rt, alias, answer, began)))
    else:
        if rt.breaker(alias).succeeded(began):
            yield from _recovered(rt, alias)
        _deal(asks, answer)
    limits.record([ask.scope for ask in asks], (yield from _conclude(rt, request, limits, asks, at)))
    return limits


def _is_exempt(rt: Runtime, request: HttpRequest) -> Steps[bool]:
    config = rt.config
    if config.has_exempt_ips and config.identities.is_exempt(request):
        return True
    if config.exempt is None:
        return False
    try:
        answer = yield config.exempt.step(request)
    except CallableError as error:
        if rt.throttle.due(("callable", "EXEMPT"), ticks()):
            logger.error("EXEMPT: %s; nobody is exempt", error, exc_info=error.__cause__)
        return False
    return answer is True


def _check(request: Any, names: Sequence[str]) -> Steps[Decision]:
    request = inner(request)
    config = get_config()
    scopes = [scope for name in names for scope in config.family(name)]
    limits = yield from check_flow(request, scopes)
    found = [limits.by_name[scope.name] for scope in scopes if scope.name in limits.by_name]
    denied = [decision for decision in limits.decisions if not decision.allowed]
    # A denial from memory stands alone: the scopes behind it were not asked.
    return _answer(found or denied, scopes)


def _answer(decisions: Sequence[Decision], scopes: Sequence[Scope]) -> Decision:
    best = tightest(decisions)
    if best is None:
        return Decision(scope=scopes[0].name if scopes else "", identity="", allowed=True, reason=Reason.EXEMPT, cost=0)
    return best


def _hit(name: str, who: Any, cost: int | None) -> Steps[Decision]:
    _check_cost(cost)
    rt = runtime()
    scopes = rt.config.family(name)
    if not rt.config.enabled:
        return _answer((), scopes)
    if isinstance(who, str):
        asks = _asks(rt, name, scopes, who, cost)
        if not asks:
            return _answer((), scopes)
        at, tick = now(), ticks()
        for ask in asks:
            known = _remembered(rt, ask.scope, ask.identity, ask.plan, ask.cost, at, tick)
            if known is not None:
                yield from _say_denied(rt, None, known, at)
                return known
        return _answer((yield from _settle_asks(rt, None, None, asks, at)), scopes)
    request = inner(who)
    limits = limits_of(request)
    if limits.exempt is None:
        limits.exempt = yield from _is_exempt(rt, request)
    if limits.exempt:
        return _answer((), scopes)
    decisions = yield from _decide(rt, request, limits, scopes, cost)
    limits.record(scopes, decisions)
    return _answer(decisions, scopes)


def _asks(rt: Runtime, name: str, scopes: Sequence[Scope], identity: str, cost: int | None) -> list[Ask]:
    """For an identity that a person or a task names: the scopes of the family whose key can make it."""
    asks: list[Ask] = []
    for scope, who in _named(rt, scopes, identity):
        if scope.mode == "off" or (scope.plan is None and scope.rate is None):
            continue
        if scope.plan is None:
            raise ValueError(
                f"The rate of scope {name!r} is a function of the request. Pass the request, not {identity!r}."
            )
        weight = cost if cost is not None else scope.cost if isinstance(scope.cost, int) else 1
        asks.append(Ask(scope, scope.plan, who, weight, len(asks)))
    return asks


def _named(rt: Runtime, scopes: Sequence[Scope], identity: str) -> list[tuple[Scope, str]]:
    """Those of the scopes that count such a caller, each with its identity for him. Raises ValueError if none does."""
    ids = rt.config.identities
    found = [
        (scope, who)
        for scope in scopes
        if (who := scope.key.find(identity, ids, ip_stands_in=scope.on_missing == "ip")) is not None
    ]
    if not found:
        for scope in scopes:
            scope.key.canonical(identity, ids)  # says what is wrong with what is no identity at all
        keys = " and ".join(sorted({repr(scope.key.text) for scope in scopes}))
        raise ValueError(f"{identity!r} is no identity that is counted here: this scope counts by {keys}.")
    return found


def _check_cost(cost: Any) -> None:
    if cost is not None and (type(cost) is not int or not 0 <= cost <= MAX_COUNT):
        raise ValueError(f"{cost!r} is not a cost. Write an int from 0 to 2**53 - 1.")


def _peek(name: str, who: Any) -> Steps[Decision]:
    rt = runtime()
    scopes = rt.config.family(name)
    asks: list[Ask] = []
    done: list[Decision] = []
    if isinstance(who, str):
        asks = _asks(rt, name, scopes, who, None)
    else:
        request = inner(who)
        memo = dict(limits_of(request).memo)
        for scope in scopes:
            if scope.mode == "off" or (scope.plan is None and scope.rate is None):
                continue
            answer = yield from _weigh(rt, request, memo, scope, None if isinstance(scope.cost, int) else 1)
            if isinstance(answer, Ask):
                answer.number = len(asks)
                asks.append(answer)
            elif answer is not None:
                done.append(answer)
    at = now()
    for alias, batch in _batches(asks) if asks else ():
        for ask in batch:
            ask.fill(at)
        yield from _look(rt, alias, batch, at)
    return _answer([*done, *(_decision(ask, counted=0) for ask in asks)], scopes)


def _reset(name: str, identity: str) -> Steps[int]:
    rt = runtime()
    scopes = rt.config.family(name)
    at = now()
    removed = 0
    for scope, who in _named(rt, scopes, identity):
        removed += yield from _forget_identity(rt, scope, who, at, scope.plan)
    return removed


def _forget_identity(rt: Runtime, scope: Scope, identity: str, at: int, plan: Plan | None) -> Steps[int]:
    removed = 0
    if plan is not None:
        removed = yield from _ask_store(rt, scope.cache, "reset", scope.keys(plan, identity, at))
        rt.local(scope.cache).forget()
    elif scope.rate is not None:  # which rates it has only a request tells: find the keys that are there
        removed = yield from _reset_found(rt, scope, identity)
    rt.forget(scope.name, identity)
    return removed


def _reset_found(rt: Runtime, scope: Scope, identity: str) -> Steps[int]:
    store = get_store(scope.cache)
    start = f"{scope.prefix}:{scope.name}:"

    def found() -> int:
        keys = [entry.key for entry in store.scan(start) if f":{{{identity}}}" in entry.key]
        return store.reset(keys) if keys else 0

    function = Function(found)
    try:
        return (yield function.step())  # type: ignore[no-any-return]
    except CallableError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


# ---------------------------------------------------------------------------------------------------- public doors


def check(request: Any, *scopes: str) -> Decision:
    """Count a request in these scopes, once: the first door that asks counts, later ones get the recorded decision.

    Returns the tightest decision. Never raises because a store is down. Raises ImproperlyConfigured for unknown names.
    """
    return run(_check(request, scopes))


async def acheck(request: Any, *scopes: str) -> Decision:
    """:func:`check`, async."""
    return await arun(_check(request, scopes))


def hit(scope: str, who: Any, *, cost: int | None = None) -> Decision:
    """Count, always. ``who`` is an identity like ``"user:42"``, or a request. ``cost``: int from 0 to 2**53 - 1.

    Raises ValueError for a cost out of range or an identity that is none.
    """
    return run(_hit(scope, who, cost))


async def ahit(scope: str, who: Any, *, cost: int | None = None) -> Decision:
    """:func:`hit`, async."""
    return await arun(_hit(scope, who, cost))


def peek(scope: str, who: Any) -> Decision:
    """What a hit would be answered now. Writes nothing. ``who`` as for :func:`hit`."""
    return run(_peek(scope, who))


async def apeek(scope: str, who: Any) -> Decision:
    """:func:`peek`, async."""
    return await arun(_peek(scope, who))


def reset(scope: str, identity: str) -> int:
    """Forget a caller: this window and the one before, bucket, ban. Returns how many keys were removed.

    The identity is written as ``"ip:203.0.113.9"`` or as a list showed it. Raises ``stores.StoreError`` when the store
    does not answer.
    """
    return run(_reset(scope, identity))


async def areset(scope: str, identity: str) -> int:
    """:func:`reset`, async."""
    return await arun(_reset(scope, identity))


def settle(decision: Decision, total: int) -> Decision:
    """Move what a hit outside requests costs in all to ``total``, up or down. Returns the new decision."""
    _check_cost(total)
    return run(_settle(runtime(), decision, total))


async def asettle(decision: Decision, total: int) -> Decision:
    """:func:`settle`, async."""
    _check_cost(total)
    return await arun(_settle(runtime(), decision, total))


def reset_all(scope: str | None = None) -> int:
    """Remove every counter of a scope, or all of ours; foreign keys stay. Returns how many keys were removed.

    Raises ``stores.CannotList`` on a cache that cannot say what it holds.
    """
    config = get_config()
    if scope is None:
        starts = {(alias, f"{config.defaults.prefix}:") for alias in aliases(config)}
    else:
        starts = {(one.cache, f"{one.prefix}:{one.name}:") for one in config.family(scope)}
    removed = 0
    for alias, start in sorted(starts):
        store = get_store(alias)
        batch: list[str] = []
        for entry in store.scan(start):
            batch.append(entry.key)
            if len(batch) >= 1000:
                removed += store.reset(batch)
                batch = []
        if batch:
            removed += store.reset(batch)
    forget()
    return removed


def aliases(config: Config) -> tuple[str, ...]:
    """The cache aliases that hold counters."""
    return tuple(sorted({config.defaults.cache, *(scope.cache for scope in config.members.values())}))
