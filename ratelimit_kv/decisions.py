"""The answer of a scope, frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .exceptions import RateLimited

__all__ = ["Decision", "RateState", "Reason", "tightest"]


class Reason(StrEnum):
    """Why a decision came out as it did."""

    WITHIN = "within"
    """Counted, and within the limit."""
    OVER_LIMIT = "over_limit"
    """The limit is used up; waiting ``retry_after`` helps."""
    REMEMBERED = "remembered"
    """Denied from this process's memory of an earlier denial, without asking the store."""
    BANNED = "banned"
    """Denied again and again, so denied beyond the window."""
    IMPOSSIBLE = "impossible"
    """Costs more than the limit: no wait helps."""
    STORE_ERROR = "store_error"
    """The store did not answer with a number; the scope's ``ON_ERROR`` decided."""
    CALLABLE_ERROR = "callable_error"
    """A callable of the settings raised or returned the wrong type; ``ON_ERROR`` decided."""
    LOCAL = "local"
    """The store did not answer; this process's own count decided (``ON_ERROR: "local"``)."""
    MISSING = "missing"
    """The caller has no identity under the scope's key."""
    SHADOW = "shadow"
    """Would have been denied, but the scope only watches (``MODE: "shadow"``)."""
    EXEMPT = "exempt"
    """Not counted: exempt by settings, mark, address, method or an unlimited rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateState:
    """Where one rate of a scope stands."""

    limit: int
    """Hits a window, from 0."""
    window: int
    """Length of the window in whole seconds; 0 for a concurrency limit."""
    remaining: int | None
    """Hits left, never negative; None when the store did not say."""
    reset_after: float
    """Seconds until all of the limit is there again."""
    allowed: bool
    """Whether this rate alone lets the hit through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer of one scope to one hit.

    The numbers are those of the rate with the longest wait when denied, else of the one nearest its limit.
    """

    scope: str
    """Name of the scope."""
    identity: str
    """Who was counted, in the encoded form that stands in the store's key; "" when nobody was."""
    allowed: bool
    """Whether the hit may pass."""
    limit: int | None = None
    """Hits a window; None when unlimited or unknown."""
    window: int | None = None
    """Length of the window in whole seconds."""
    remaining: int | None = None
    """Hits left, from 0; None when unlimited or when the store failed."""
    reset_after: float = 0.0
    """Seconds until all of the limit is there again."""
    retry_after: float | None = None
    """Seconds until the same hit can pass; None when allowed or when no wait helps."""
    cost: int = 1
    """What the hit weighs."""
    counted: int = 0
    """What was really added to the counters: ``cost`` or 0."""
    reason: Reason = Reason.WITHIN
    """Why."""
    rates: tuple[RateState, ...] = ()
    """Every rate of the scope, in the order of the settings."""
    receipt: Any = field(default=None, repr=False, compare=False)
    """What ``settle`` needs to find the charged counters again. Private to the limiter."""

    @property
    def status(self) -> int:
        """The HTTP status that fits a denial: 503 for a failed store or callable, 400 for a missing identity, else 429."""
        return _STATUS.get(self.reason, 429)

    def raise_if_denied(self) -> None:
        """Raise :class:`RateLimited` unless the hit is allowed."""
        if not self.allowed:
            raise RateLimited(self)


_STATUS = {Reason.STORE_ERROR: 503, Reason.CALLABLE_ERROR: 503, Reason.MISSING: 400}


def tightest(decisions: Iterable[Decision]) -> Decision | None:
    """The decision a caller should be told about: the denial with the longest wait, else the one with the least left.

    A denial that no wait cures outranks every wait. None when there is nothing with a number in it.
    """
    best: Decision | None = None
    rank: tuple[int, float] = (0, 0.0)
    for decision in decisions:
        if not decision.allowed:
            wait = decision.retry_after
            mine = (0, float("-inf")) if wait is None else (0, -wait)
        elif decision.remaining is not None and decision.limit is not None:
            mine = (1, decision.remaining)  # what he can still do, whatever the share
        else:
            mine = (2, 0.0)
        if best is None or mine < rank:
            best, rank = decision, mine
    return best
