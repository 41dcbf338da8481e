"""One hit: from scopes to counters, from verdicts to decisions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest

from . import signals
from .algorithms import (
    BAN,
    CONCURRENT,
    EXISTING,
    FIXED,
    FORCE,
    MAX_COUNT,
    MICROSECOND,
    Counter,
    Verdict,
)
from .callables import CallableError, Function
from .decisions import Decision, RateState, Reason
from .guard import Remembered
from .identity import Part
from .process import Runtime, ask_store, logger, now, say_store_error, send, ticks
from .scopes import Plan, Scope
from .steps import Steps
from .stores import StoreError
from .stores.base import give_back

if TYPE_CHECKING:
    from .accounts import Ledger, RequestLimits


class Ask:
    """One scope of one hit on its way to the store."""

    # Every hit has one, and most are told apart by little: what is not set is what the class says.
    at: int = 0
    """When the counters were made."""
    counters: Sequence[Counter] = ()
    verdicts: Sequence[Verdict] = ()
    is_local: bool = False
    ledger: Ledger | None = None
    """Opened when something is settled for the first time."""

    def __init__(self, scope: Scope, plan: Plan, identity: str, cost: int, number: int) -> None:
        self.scope = scope
        self.plan = plan
        self.identity = identity
        self.cost = cost
        self.take = cost
        """What to charge: more than the cost when a lease takes hits ahead."""
        self.number = number

    @property
    def group(self) -> int:
        """Enforced scopes are one group; each shadow scope is judged apart."""
        return self.number + 1 if self.scope.mode == "shadow" else 0

    def fill(self, at: int, share: int = 1) -> Sequence[Counter]:
        """Make the counters."""
        self.at = at
        self.counters = self.scope.counters(self.plan, self.identity, self.take, at, self.number, self.group, share)
        return self.counters


def decide(
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
        known = remembered(rt, scope, identity, plan, weight, at, tick)
        if known is not None:
            yield from say_denied(rt, request, known, at)
            return [known]
        asks.append(Ask(scope, plan, identity, weight, len(asks)))
    for scope in later:
        answer = yield from weigh(rt, request, memo, scope, cost)
        if answer is None:
            continue
        if type(answer) is Decision:
            if not answer.allowed:
                yield from send(signals.denied, request=request, decision=answer)
                return [answer]
            done.append(answer)
            continue
        assert isinstance(answer, Ask)
        answer.number = len(asks)
        known = remembered(rt, answer.scope, answer.identity, answer.plan, answer.cost, at, tick)
        if known is not None:
            yield from say_denied(rt, request, known, at)
            return [known]
        asks.append(answer)
    if asks:
        done += yield from settle_asks(rt, request, limits, asks, at)
    return done


def remembered(
    rt: Runtime, scope: Scope, identity: str, plan: Plan, cost: int, at: int, tick: float
) -> Decision | None:
    """The denial that answers a hit without the store, None when there is none."""
    memory = rt.memory
    if memory is None or not memory.known:
        return None
    # Where the wait does not depend on the cost, a costlier hit gets the same answer. Else it has to ask for its own.
    costliest = plan.limits[0] if scope.algorithm == FIXED and len(plan.limits) == 1 else 0
    known = memory.find(scope.name, identity, plan.token, cost, costliest, at, tick)
    return None if known is None else retold(known, cost, at)


def retold(known: Remembered, cost: int, at: int) -> Decision:
    """The decision that a remembered denial is now."""
    return replace(
        known.decision,
        reset_after=max(known.reset_at - at, 0) / MICROSECOND,
        retry_after=(known.until - at) / MICROSECOND,
        cost=cost,
        reason=Reason.REMEMBERED,
    )


def weigh(
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


def settle_asks(
    rt: Runtime, request: HttpRequest | None, limits: RequestLimits | None, asks: list[Ask], at: int
) -> Steps[list[Decision]]:
    """All asks of a hit to their stores and back as decisions."""
    try:
        yield from _take_all(rt, asks, at)
        return (yield from conclude(rt, request, limits, asks, at))
    except asyncio.CancelledError:  # nobody will ever know of this hit, but what it has in flight would stay there
        yield from _land(rt, asks, at)
        raise


def _take_all(rt: Runtime, asks: list[Ask], at: int) -> Steps[None]:
    """One trip an alias, all or nothing over all of them."""
    taken: list[tuple[str, list[Ask]]] = []
    denied = False
    spent = [ask for ask in asks if ask.scope.lease > 1 and _spend_leased(rt, ask, at)]
    rest = [ask for ask in asks if ask not in spent] if spent else asks
    for alias, batch in batches(rest) if rest else ():
        if denied:  # an earlier alias denied: nothing may be charged here, but shadow scopes and numbers go on
            enforced = [ask for ask in batch if not ask.group]
            batch = [ask for ask in batch if ask.group]
            for ask in enforced:
                ask.fill(at)
            if enforced:
                yield from look(rt, alias, enforced, at)
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
                yield from ask_store(rt, ask.scope.cache, "hit", counters, at)
            except StoreError as error:
                yield from say_store_error(rt, ask.scope, ask.scope.cache, error)


def batches(asks: list[Ask]) -> Iterable[tuple[str, list[Ask]]]:
    """By alias. Narrow identities first, everyone's last: a caller over his own limit does not touch everyone's."""
    first = asks[0].scope.cache
    if all(ask.scope.cache == first for ask in asks):
        if len(asks) > 1:
            asks = sorted(asks, key=breadth)
        return ((first, asks),)
    batches: dict[str, list[Ask]] = {}
    for ask in sorted(asks, key=breadth):
        batches.setdefault(ask.scope.cache, []).append(ask)
    return sorted(batches.items(), key=lambda item: max(breadth(ask) for ask in item[1]))


breadth = attrgetter("scope.key.is_everyone")
"""Orders asks: those of one caller come before those of everybody."""


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
        verdicts = yield from ask_store(rt, alias, "hit", counters, at)
    except StoreError as error:
        yield from without_store(rt, alias, batch, at, error)
        return
    deal(batch, verdicts)


def look(rt: Runtime, alias: str, batch: list[Ask], at: int) -> Steps[None]:
    try:
        verdicts = yield from ask_store(rt, alias, "peek", [c for ask in batch for c in ask.counters], at)
    except StoreError as error:
        verdicts = [_unanswered(error.cause) for ask in batch for _ in ask.counters]
    deal(batch, verdicts)


def deal(batch: list[Ask], verdicts: Sequence[Verdict]) -> None:
    start = 0
    for ask in batch:
        end = start + len(ask.counters)
        ask.verdicts = verdicts[start:end]
        start = end


def _unanswered(cause: str) -> Verdict:
    return Verdict(False, False, 0, 0, 0, None, Reason.STORE_ERROR, cause)


def without_store(rt: Runtime, alias: str, batch: list[Ask], at: int, error: StoreError) -> Steps[None]:
    local = [ask for ask in batch if ask.scope.on_error == "local"]
    closed = any(ask.scope.on_error == "deny" and not ask.group for ask in batch)
    for ask in batch:
        ask.take = ask.cost
        ask.verdicts = [_unanswered(error.cause) for _ in ask.counters]
        yield from say_store_error(rt, ask.scope, alias, error)
    if local:
        share = rt.config.processes or 1
        counters = [counter for ask in local for counter in ask.fill(at, share)]
        if closed:
            counters = [counter._replace(cost=0) for counter in counters]
        for ask in local:
            ask.is_local = True
        deal(local, rt.local(alias).hit(counters, at))


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
                    yield from ask_store(rt, alias, "hit", counters, at)
                except StoreError as error:
                    yield from say_store_error(rt, asks[0].scope, alias, error)
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


def conclude(
    rt: Runtime, request: HttpRequest | None, limits: RequestLimits | None, asks: list[Ask], at: int
) -> Steps[list[Decision]]:
    """Decisions of the asks; remembers, logs and signals what deserves it."""
    decisions: list[Decision] = []
    for ask in asks:
        decision = plain_decision_of(ask) or decision_of(ask)
        decisions.append(decision)
        if decision.reason is Reason.WITHIN:
            if signals.near_limit.receivers and decision.counted and _is_near(ask):
                yield from send(signals.near_limit, request=request, decision=decision)
            continue
        if decision.reason is Reason.STORE_ERROR:
            cause = next((v.cause for v in ask.verdicts if v.reason is Reason.STORE_ERROR), "")
            yield from say_store_error(rt, ask.scope, ask.scope.cache, StoreError(cause, outage=False))
            if not decision.allowed:
                yield from send(signals.denied, request=request, decision=decision)
        elif decision.reason is Reason.SHADOW or not decision.allowed:
            if rt.memory is not None and ask.scope.remembers and not ask.is_local:
                rt.memory.remember(decision, ask.plan.token, at, ticks())
            yield from say_denied(rt, request, decision, at)
    return decisions


def say_denied(rt: Runtime, request: HttpRequest | None, decision: Decision, at: int) -> Steps[None]:
    if decision.reason is not Reason.REMEMBERED or logger.isEnabledFor(logging.DEBUG):
        rt.log.record(decision, at, ticks())
    yield from send(signals.denied, request=request, decision=decision)


def _is_near(ask: Ask) -> bool:
    near, cost = ask.scope.near, ask.cost
    return any(
        verdict.used - cost < near * counter.limit <= verdict.used
        for counter, verdict in zip(ask.counters, ask.verdicts, strict=True)
        if counter.kind != BAN
    )


def plain_decision_of(ask: Ask) -> Decision | None:
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


def decision_of(ask: Ask, counted: int | None = None) -> Decision:
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
            state = min(states, key=left_of)
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


def left_of(state: RateState) -> int:
    """What is left of a rate."""
    return state.remaining or 0
