"""For the tests of projects that use rate limits.

Switch them off for a suite with ``RATELIMIT_KV = {..., "ENABLED": False}`` in its settings, with :func:`no_limits`, or
with the fixture ``no_rate_limits``. Where limits are what is tested, :class:`RateLimitTestMixin` for ``TestCase`` and the
fixture ``rate_limits`` for pytest start each test from nothing::

    from ratelimit_kv.testing import no_rate_limits, rate_limits  # noqa: F401  in conftest.py


    def test_the_third_question_has_to_wait(client, rate_limits):
        rate_limits.override(SCOPES={"ask": "2/h"})
        assert [client.get("/ask/").status_code for _ in range(3)] == [200, 200, 429]

Time is read through :mod:`time` when it is needed, so freezegun and time-machine work on every store.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from django.test import SimpleTestCase, override_settings

from .conf import SETTING, as_given, get_config
from .limiter import aliases, reset_all
from .process import forget
from .stores import CannotList, StoreError, get_store

try:
    import pytest
except ImportError:  # the project tests with unittest
    pytest = None  # type: ignore[assignment]

__all__ = ["RateLimitTestMixin", "RateLimits", "empty_store", "no_limits", "override_rate_limits"]

if TYPE_CHECKING:
    _Base = SimpleTestCase
else:
    _Base = object


# ------------------------------------------------------------------------------------------------------- settings


def merged(before: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """``RATELIMIT_KV`` with these options changed; those of a scope are changed one by one, a bare rate is its RATE."""
    before = before if isinstance(before, Mapping) else {}
    result = {**before, **options}
    if isinstance(options.get("SCOPES"), Mapping):
        result["SCOPES"] = scopes = dict(before.get("SCOPES", {}))
        for name, scope in options["SCOPES"].items():
            scopes[name] = {**_options(scopes[name]), **_options(scope)} if name in scopes else scope
    return result


def _options(scope: Any) -> Any:
    return scope if isinstance(scope, Mapping) else {"RATE": scope}


class override_rate_limits(override_settings):  # noqa: N801  named like Django's own
    """Change ``RATELIMIT_KV`` for a block, a test function or a ``TestCase`` class; what is not named stays.

    ``override_rate_limits(ON_ERROR="deny", SCOPES={"ask": "2/h", "login": {"MODE": "shadow"}})`` leaves the other
    scopes and the other options of these two as they are. Options are those of the setting, in upper case. Raises
    ImproperlyConfigured at once for what cannot be right.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.changes = options

    def enable(self) -> None:
        # Merged now and not when it was written, so that overrides nest.
        self.options = {SETTING: merged(as_given(), self.changes)}
        super().enable()
        try:
            get_config()
        except BaseException:
            self.disable()
            raise

    def decorate_class(self, cls: Any) -> Any:
        # Around each test instead of, as Django's does, around the class with what the settings were at import.
        return super(override_settings, self).decorate_class(cls)


def no_limits() -> override_rate_limits:
    """Switch limits off for a block, a test function or a ``TestCase`` class: nothing is counted, nobody is denied."""
    return override_rate_limits(ENABLED=False)


# ---------------------------------------------------------------------------------------------------- a fresh start


@contextmanager
def empty_store() -> Iterator[None]:
    """Counters start from nothing, and what the block counts is gone after it. Keys that are not ours stay.

    On a cache that other processes see too, the block counts under a PREFIX of its own: so do tests that run in parallel,
    and caches that cannot list their keys need not be emptied. Change settings inside with ``override_rate_limits``,
    which keeps that prefix. Raises StoreError when the cache does not answer at the start.
    """
    with ExitStack() as stack, _fresh(lambda **options: stack.enter_context(override_rate_limits(**options))):
        yield


@contextmanager
def _fresh(change: Callable[..., Any]) -> Iterator[None]:
    with suppress(CannotList):
        reset_all()
    if any(get_store(alias).is_shared for alias in aliases(get_config())):
        change(PREFIX=f"test-{secrets.token_hex(8)}")
    forget()
    try:
        yield
    finally:
        # A test that took the store down or broke its transaction is over, and has had its say.
        with suppress(CannotList, StoreError):
            reset_all()
        forget()


class RateLimitTestMixin(_Base):
    """Every test starts with an empty store, and this process remembers nothing: ``class T(RateLimitTestMixin, TestCase)``.

    A ``setUp`` of your own calls ``super().setUp()``, as ever.
    """

    def setUp(self) -> None:
        self.enterContext(empty_store())
        super().setUp()


# ---------------------------------------------------------------------------------------------------------- pytest


class RateLimits:
    """What the fixture ``rate_limits`` hands to a test. All of it ends with the test."""

    def __init__(self, change: Callable[..., Any]) -> None:
        self._change = change

    def override(self, **options: Any) -> None:
        """Change ``RATELIMIT_KV`` until the test ends, as :class:`override_rate_limits` does."""
        self._change(**options)

    def off(self) -> None:
        """Switch limits off until the test ends."""
        self._change(ENABLED=False)

    def reset(self, scope: str | None = None) -> int:
        """Forget all counters, or those of a scope. Returns how many keys were removed. Raises CannotList."""
        return reset_all(scope)


if pytest is not None:

    @contextmanager
    def _changes(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
        """How a fixture changes settings so that they are restored in the right order.

        With pytest-django that is its fixture ``settings``: what that has changed and what Django's own
        ``override_settings`` has changed are not taken back in one order when a test uses both.
        """
        has_django = request.config.pluginmanager.hasplugin("django")
        settings = request.getfixturevalue("settings") if has_django else None
        with ExitStack() as stack:

            def change(**options: Any) -> None:
                if settings is None:
                    stack.enter_context(override_rate_limits(**options))
                else:
                    setattr(settings, SETTING, merged(as_given(), options))
                    get_config()

            yield change

    @pytest.fixture
    def rate_limits(request: pytest.FixtureRequest) -> Iterator[RateLimits]:
        """Every test starts with an empty store; ``override``, ``off`` and ``reset`` change more, until it ends."""
        with _changes(request) as change, _fresh(change):
            yield RateLimits(change)

    @pytest.fixture
    def no_rate_limits(request: pytest.FixtureRequest) -> Iterator[None]:
        """Limits are off for this test; for a suite, ask for it in a fixture with ``autouse=True``."""
        with _changes(request) as change:
            change(ENABLED=False)
            yield

    __all__ += ["no_rate_limits", "rate_limits"]
