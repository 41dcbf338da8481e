"""The app: ``"ratelimit_kv"`` in INSTALLED_APPS."""

from __future__ import annotations

import logging

from django.apps import AppConfig


class RateLimitConfig(AppConfig):
    """Registers the system checks, and says at start what is wrong with the settings."""

    name = "ratelimit_kv"
    verbose_name = "Rate limits"

    def ready(self) -> None:
        from . import checks, conf  # noqa: F401  checks register themselves

        # A server runs no checks, and a project that only decorates has no middleware that would refuse to start.
        # Logged, not raised, so that `manage.py check` can still say it all in its own words.
        for problem in conf.load()[1]:
            logging.getLogger("ratelimit_kv").error("%s", problem)
