"""Prometheus: what the signals tell, as metrics. They are on when this is imported, as an app or otherwise.

Labels are scopes, reasons and cache aliases, so there are as many series as the settings have of these; never identities.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import receiver
from prometheus_client import Counter, Gauge

from .. import signals
from ..decisions import Decision
from ..process import runtime

__all__ = ["DENIED", "NEAR_LIMIT", "STORE_FAILURES", "STORE_UP"]

DENIED = Counter("ratelimit_kv_denied", "Hits that were denied, or would have been (shadow).", ["scope", "reason"])
NEAR_LIMIT = Counter("ratelimit_kv_near_limit", "Callers that came near their limit.", ["scope"])
STORE_FAILURES = Counter("ratelimit_kv_store_failures", "Times that a store stopped answering.", ["alias"])
# Of several processes the one that found out last is right: the others have not asked since.
STORE_UP = Gauge(
    "ratelimit_kv_store_up",
    "Whether a store is being asked (1) or left alone (0). There once it has failed.",
    ["alias"],
    multiprocess_mode="livemostrecent",
)


@receiver(signals.denied)
def _count_denied(*, decision: Decision, **kwargs: Any) -> None:
    DENIED.labels(decision.scope, decision.reason.value).inc()


@receiver(signals.near_limit)
def _count_near_limit(*, decision: Decision, **kwargs: Any) -> None:
    NEAR_LIMIT.labels(decision.scope).inc()


@receiver(signals.store_failed)
def _count_failure(*, alias: str, **kwargs: Any) -> None:
    STORE_FAILURES.labels(alias).inc()
    # A failure of one key leaves the breaker closed, and no recovery will be told.
    STORE_UP.labels(alias).set(0 if runtime().breaker(alias).is_open else 1)


@receiver(signals.store_recovered)
def _note_recovery(*, alias: str, **kwargs: Any) -> None:
    STORE_UP.labels(alias).set(1)
