"""The app: ``"ratelimit_kv"`` in INSTALLED_APPS."""

from __future__ import annotations

from django.apps import AppConfig


class RateLimitConfig(AppConfig):
    """Registers the system checks."""

    name = "ratelimit_kv"
    verbose_name = "Rate limits"

    def ready(self) -> None:
        from . import checks  # noqa: F401  registers them
