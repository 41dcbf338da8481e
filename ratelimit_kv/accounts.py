"""``request.rate_limit``: what a request has been told, and what it has been charged."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from django.http import HttpRequest

from .algorithms import (
    BAN,
    BUCKET,
    CONCURRENT,
    EXISTING,
    FORCE,
    MAX_COUNT,
    Counter,
    Verdict,
    interval,
)
from .deciding import Ask, decision_of, left_of, plain_decision_of, retold
from .decisions import Decision, Reason, tightest
from .guard import Remembered
from .process import Runtime, ask_store, now, runtime, say_store_error
from .scopes import Scope
from .steps import Steps, arun, run
from .stores import StoreError

ATTRIBUTE = "rate_limit"
"""Where a request keeps its RequestLimits."""


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
    known: tuple[Scope, Remembered, int] | None = None
    """A denial from memory that nobody has read yet, and when it was found."""
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
        if self.known is not None:
            (scope, known, at), self.known = self.known, None
            self.scopes[scope.name] = scope
            self._by_name[scope.name] = retold(known, known.decision.cost, at)
        asks = self.asks
        if asks:
            self.asks = ()
            for ask in asks:
                self.scopes[ask.scope.name] = ask.scope
                self._by_name[ask.scope.name] = plain_decision_of(ask) or decision_of(ask)
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


def settle_flow(rt: Runtime, decision: Decision, total: int) -> Steps[Decision]:
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
                verdicts = yield from ask_store(rt, scope.cache, "hit", batch, at)
            except StoreError as error:
                if charge is not None:
                    ledger.confirm(charge, (), (), at)
                yield from say_store_error(rt, scope, scope.cache, error)
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
    nearest = min(rates, key=left_of)
    return replace(
        decision,
        counted=ledger.total,
        rates=tuple(rates),
        limit=nearest.limit,
        window=nearest.window,
        remaining=nearest.remaining,
        reset_after=nearest.reset_after,
    )


def give_back_flow(limits: RequestLimits, name: str) -> Steps[None]:
    """Give back all that a request has charged in a scope."""
    return limits.move(runtime(), name, 0)


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
