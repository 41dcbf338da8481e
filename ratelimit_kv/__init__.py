"""A rate limiter for Django, on its cache framework."""

from .decisions import Decision
from .decorators import rate_limit, rate_limit_exempt
from .exceptions import RateLimited
from .limiter import acheck, ahit, apeek, areset, asettle, check, hit, peek, reset, reset_all, settle

__all__ = [
    "Decision",
    "RateLimited",
    "acheck",
    "ahit",
    "apeek",
    "areset",
    "asettle",
    "check",
    "hit",
    "peek",
    "rate_limit",
    "rate_limit_exempt",
    "reset",
    "reset_all",
    "settle",
]

__version__ = "0.1.0"
