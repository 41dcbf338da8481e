"""The test site under limits: what every test of requests says first."""

from typing import Any

HALF_PAST = "2026-03-01 12:00:30"
"""Half of a one-minute window is left."""
RATE_LIMIT = "ratelimit_kv.middleware.RateLimitMiddleware"


def limit(settings: Any, *, middleware: bool = False, **given: Any) -> None:
    """Put limits in force, with or without the middleware. Words in upper case are options, the others are scopes.

    limit(settings, middleware=True, HEADERS="none", ask="20/h", site={"RATE": "100/m", "PATHS": ["*"]})
    """
    options = {word: value for word, value in given.items() if word.isupper()}
    scopes = {word.replace("_", "-"): value for word, value in given.items() if not word.isupper()}
    settings.RATELIMIT_KV = {"SCOPES": scopes, **options}
    others = [name for name in settings.MIDDLEWARE if name != RATE_LIMIT]
    settings.MIDDLEWARE = [RATE_LIMIT, *others] if middleware else others


def statuses(client: Any, path: str, times: int, method: str = "get", **more: Any) -> list[int]:
    """What so many requests are answered."""
    return [getattr(client, method)(path, **more).status_code for _ in range(times)]
