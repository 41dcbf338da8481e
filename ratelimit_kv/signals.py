"""Signals, sent robustly: a receiver that raises never reaches the request."""

from __future__ import annotations

from django.dispatch import Signal

__all__ = ["denied", "near_limit", "store_failed", "store_recovered"]

denied = Signal()
"""A scope denied a hit, or would have (``decision.reason`` is then ``shadow``). Sent with ``request`` (or None) and ``decision``."""

near_limit = Signal()
"""A hit crossed the scope's ``NEAR`` share of its limit. Sent with ``request`` (or None) and ``decision``."""

store_failed = Signal()
"""A store stopped answering: once when its breaker opens, and once an interval for other failures. Sent with ``alias``."""

store_recovered = Signal()
"""A store answers again after ``store_failed``. Sent with ``alias``."""
