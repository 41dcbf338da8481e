"""What people import, and how they call it. A change here is a change for all of them."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied

import ratelimit_kv
from ratelimit_kv import Decision, RateLimited
from ratelimit_kv.accounts import RequestLimits
from ratelimit_kv.decisions import RateState, Reason

SIGNATURES = {
    "check": "(request, *scopes)",
    "acheck": "(request, *scopes)",
    "hit": "(scope, who, *, cost=None)",
    "ahit": "(scope, who, *, cost=None)",
    "peek": "(scope, who)",
    "apeek": "(scope, who)",
    "reset": "(scope, identity)",
    "areset": "(scope, identity)",
    "reset_all": "(scope=None)",
    "settle": "(decision, total)",
    "asettle": "(decision, total)",
    "rate_limit": "(*rates_or_scopes, scope=None, **options)",
    "rate_limit_exempt": "(view=None)",
}

ACCOUNTS = {
    "charge": "(self, name, cost)",
    "acharge": "(self, name, cost)",
    "settle": "(self, name, total)",
    "asettle": "(self, name, total)",
    "refund": "(self, name=None)",
    "arefund": "(self, name=None)",
}


def bare(function: Any) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_the_names() -> None:
    assert sorted(ratelimit_kv.__all__) == sorted([*SIGNATURES, "Decision", "RateLimited"])
    assert all(hasattr(ratelimit_kv, name) for name in ratelimit_kv.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_functions(name: str) -> None:
    function = getattr(ratelimit_kv, name)
    assert bare(function) == SIGNATURES[name]
    assert function.__doc__
    assert inspect.iscoroutinefunction(function) is (name in {"acheck", "ahit", "apeek", "areset", "asettle"})


@pytest.mark.parametrize("name", ACCOUNTS)
def test_the_accounts_of_a_request(name: str) -> None:
    function = getattr(RequestLimits, name)
    assert bare(function) == ACCOUNTS[name]
    assert function.__doc__
    assert inspect.iscoroutinefunction(function) is name.startswith("a")


def test_the_rest_of_what_a_request_tells() -> None:
    for name in ("decisions", "tightest", "allowed"):
        assert isinstance(getattr(RequestLimits, name), property)


def test_a_decision() -> None:
    public = ["scope", "identity", "allowed", "limit", "window", "remaining", "reset_after", "retry_after", "cost"]
    names = [one.name for one in fields(Decision) if one.repr]
    assert names == [*public, "counted", "reason", "rates"]
    assert [one.name for one in fields(RateState)] == ["limit", "window", "remaining", "reset_after", "allowed"]
    decision = Decision(scope="ask", identity="user:1", allowed=True)
    assert not hasattr(decision, "__dict__")
    with pytest.raises(FrozenInstanceError):
        decision.allowed = False  # type: ignore[misc]
    with pytest.raises(TypeError):
        Decision("ask", "user:1", True)  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(decision)) == decision


def test_the_reasons() -> None:
    assert {str(reason) for reason in Reason} == {
        "within",
        "over_limit",
        "remembered",
        "banned",
        "impossible",
        "store_error",
        "callable_error",
        "local",
        "missing",
        "shadow",
        "exempt",
    }


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.OVER_LIMIT, 429),
        (Reason.IMPOSSIBLE, 429),
        (Reason.STORE_ERROR, 503),
        (Reason.CALLABLE_ERROR, 503),
        (Reason.MISSING, 400),
    ],
)
def test_a_denial_is_an_exception_of_its_own(reason: Reason, status: int) -> None:
    decision = Decision(scope="ask", identity="user:1", allowed=False, reason=reason, retry_after=7.5)
    with pytest.raises(RateLimited, match=f"ask: {reason}") as caught:
        decision.raise_if_denied()
    assert not isinstance(caught.value, PermissionDenied)
    assert (caught.value.status, caught.value.decision, caught.value.decisions) == (status, decision, (decision,))
    assert caught.value.retry_after == 7.5


def test_who_is_allowed_goes_on() -> None:
    Decision(scope="ask", identity="user:1", allowed=True).raise_if_denied()
