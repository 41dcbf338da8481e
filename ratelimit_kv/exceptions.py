"""What this package raises on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decisions import Decision

__all__ = ["RateLimited"]


class RateLimited(Exception):
    """A request was refused by a limit. Not a ``PermissionDenied``: nothing but our own doors answers it.

    ``status`` is 429, or 503 when the store failed under ``ON_ERROR: "deny"``, or 400 when a required identity is missing.
    """

    def __init__(self, decision: Decision, decisions: tuple[Decision, ...] = ()) -> None:
        self.decision = decision
        self.decisions = decisions or (decision,)
        self.status = decision.status
        super().__init__(f"{decision.scope}: {decision.reason}")

    @property
    def retry_after(self) -> float | None:
        """Seconds until a retry can succeed, None when waiting does not help."""
        return self.decision.retry_after
