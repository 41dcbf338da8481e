"""Counting and deciding: check, hit, peek, settle and reset."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from django.http import HttpRequest

from . import signals
from .accounts import RequestLimits, inner, limits_of, settle_flow
from .algorithms import (
    MAX_COUNT,
    Counter,
    Verdict,
)
from .callables import CallableError, Function
from .conf import Config, get_config
from .deciding import (
    Ask,
    batches,
    breadth,
    conclude,
    deal,
    decide,
    decision_of,
    look,
    remembered,
    say_denied,
    settle_asks,
    weigh,
    without_store,
)
from .decisions import Decision, Reason, tightest
from .process import (
    Runtime,
    ask_store,
    forget,
    logger,
    now,
    runtime,
    say_store_error,
    store_failed,
    store_recovered,
    ticks,
)
from .scopes import Plan, Scope
from .steps import Steps, arun, run
from .stores import StoreError, get_store

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
    decisions = yield from decide(rt, request, limits, scopes)
    limits.record(scopes, decisions)
    return limits


def quick(rt: Runtime, request: HttpRequest, limits: RequestLimits, scopes: Sequence[Scope]) -> Any:
    """The short way of almost every request: all that counts is plain, the store answers, every counter has room.
    Nobody is exempt, nobody wants to be told of ``near_limit``, and the store has not failed a moment ago.

    True when the hit passed; its decisions are made when somebody reads them. False when it was denied from memory.
    None when the long way has to be taken from its start (``check_flow``), else the flow that takes it from where the
    store has answered.
    """
    asks, counters, at = _plain(rt, request, limits, scopes)
    if not asks:
        return None if limits.known is None else False
    began = ticks()
    try:
        verdicts = get_store(scopes[0].cache).hit(counters, at)
    except AssertionError:  # a test that forbids queries: DatabaseOperationForbidden is one
        raise
    except Exception as error:  # noqa: BLE001 - an unknown cache may raise anything; ON_ERROR decides
        return _go_on(rt, request, limits, asks, at, began, error)
    return _pass(rt, request, limits, asks, at, began, verdicts)


async def aquick(rt: Runtime, request: HttpRequest, limits: RequestLimits, scopes: Sequence[Scope]) -> Any:
    """:func:`quick`, async."""
    asks, counters, at = _plain(rt, request, limits, scopes)
    if not asks:
        return None if limits.known is None else False
    began = ticks()
    try:
        store = get_store(scopes[0].cache)
        verdicts = store.hit(counters, at) if store.inline else await store.ahit(counters, at)
    except AssertionError:  # a test that forbids queries: DatabaseOperationForbidden is one
        raise
    except Exception as error:  # noqa: BLE001 - an unknown cache may raise anything; ON_ERROR decides
        return _go_on(rt, request, limits, asks, at, began, error)
    return _pass(rt, request, limits, asks, at, began, verdicts)


def _plain(
    rt: Runtime, request: HttpRequest, limits: RequestLimits, scopes: Sequence[Scope]
) -> tuple[list[Ask], Sequence[Counter], int]:
    """The hit, with its asks and its time, if nothing in it has to wait for anything but one store. Else no asks.

    A denial from memory is recorded, where nobody is to be told of it.
    """
    alias = scopes[0].cache
    if (
        limits.asks
        or limits.has_denied
        or limits._by_name
        or limits.exempt
        or not rt.counts_everybody
        or rt.breaker(alias).is_troubled
        or signals.near_limit.receivers
    ):
        return _NOTHING
    ids, memo, denied = rt.config.identities, limits.memo, rt.denied
    at = now()
    asks: list[Ask] = []
    for scope in scopes:
        if not scope.is_plain or scope.cache != alias:
            return _NOTHING
        identity = scope.key.quick(request, ids, memo)
        if type(identity) is not str:
            return _NOTHING
        if denied and (scope.name, identity) in denied:
            _recall(rt, limits, scope, identity, at)
            return _NOTHING
        plan: Any = scope.plan
        cost: Any = scope.cost
        number = len(asks)
        ask = Ask(scope, plan, identity, cost, number)
        ask.at = at
        ask.counters = scope.counters(plan, identity, cost, at, number, 0)
        asks.append(ask)
    if len(asks) == 1:
        return asks, ask.counters, at
    asks.sort(key=breadth)
    return asks, [counter for ask in asks for counter in ask.counters], at


_NOTHING: tuple[list[Ask], Sequence[Counter], int] = ([], (), 0)


def _recall(rt: Runtime, limits: RequestLimits, scope: Scope, identity: str, at: int) -> None:
    """Note the denial that is remembered for this hit, if it is true of it, and nobody is to be told of it."""
    memory, plan, cost = rt.memory, scope.plan, scope.cost
    if signals.denied.receivers or logger.isEnabledFor(logging.DEBUG):
        return
    assert memory is not None  # it was found there
    assert plan is not None
    assert type(cost) is int  # both as is_plain says
    known = memory.find(scope.name, identity, plan.token, cost, 0, at, ticks())
    if known is not None:
        limits.known = (scope, known, at)
        limits.has_denied = True


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
    if rt.breaker(asks[0].scope.cache).is_troubled:  # others have met a failure meanwhile: tell it that this was none
        return _go_on(rt, request, limits, asks, at, began, verdicts)
    if len(asks) == 1:
        asks[0].verdicts = verdicts
    elif len(asks) == len(verdicts):
        for ask, verdict in zip(asks, verdicts, strict=True):
            ask.verdicts = (verdict,)
    else:
        deal(asks, verdicts)
    limits.asks = asks
    return True


def _go_on(
    rt: Runtime, request: HttpRequest, limits: RequestLimits, asks: list[Ask], at: int, began: float, answer: Any
) -> Steps[RequestLimits]:
    """The long way from where the store has answered, or failed."""
    alias = asks[0].scope.cache
    if isinstance(answer, Exception):
        yield from without_store(rt, alias, asks, at, (yield from store_failed(rt, alias, answer, began)))
    else:
        if rt.breaker(alias).succeeded(began):
            yield from store_recovered(rt, alias)
        deal(asks, answer)
    limits.record([ask.scope for ask in asks], (yield from conclude(rt, request, limits, asks, at)))
    return limits


def reset_flow(scope: Scope, decision: Decision) -> Steps[int]:
    """Forget whom a scope has decided about. A store that fails is logged."""
    rt = runtime()
    ask: Ask | None = decision.receipt
    plan = scope.plan if ask is None else ask.plan
    try:
        return (yield from _forget_identity(rt, scope, decision.identity, now(), plan))
    except StoreError as error:
        yield from say_store_error(rt, scope, scope.cache, error)
        return 0


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
            known = remembered(rt, ask.scope, ask.identity, ask.plan, ask.cost, at, tick)
            if known is not None:
                yield from say_denied(rt, None, known, at)
                return known
        return _answer((yield from settle_asks(rt, None, None, asks, at)), scopes)
    request = inner(who)
    limits = limits_of(request)
    if limits.exempt is None:
        limits.exempt = yield from _is_exempt(rt, request)
    if limits.exempt:
        return _answer((), scopes)
    decisions = yield from decide(rt, request, limits, scopes, cost)
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
            answer = yield from weigh(rt, request, memo, scope, None if isinstance(scope.cost, int) else 1)
            if isinstance(answer, Ask):
                answer.number = len(asks)
                asks.append(answer)
            elif answer is not None:
                done.append(answer)
    at = now()
    for alias, batch in batches(asks) if asks else ():
        for ask in batch:
            ask.fill(at)
        yield from look(rt, alias, batch, at)
    return _answer([*done, *(decision_of(ask, counted=0) for ask in asks)], scopes)


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
        removed = yield from ask_store(rt, scope.cache, "reset", scope.keys(plan, identity, at))
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
    return run(settle_flow(runtime(), decision, total))


async def asettle(decision: Decision, total: int) -> Decision:
    """:func:`settle`, async."""
    _check_cost(total)
    return await arun(settle_flow(runtime(), decision, total))


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
