"""
Settings of the demo: what a small site needs, and RATELIMIT_KV.

The environment can change:

REDIS_URL        count in this Redis (through django-redis) instead of a SQLite file
DEBUG            "0" or "1"; on for manage.py, off under demo_project.wsgi and demo_project.asgi
DEMO_STATE_DIR   where the SQLite files are kept; var/ beside manage.py
SECRET_KEY, ALLOWED_HOSTS (comma separated)
"""

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent
STATE_DIR = Path(os.environ.get("DEMO_STATE_DIR") or BASE_DIR / "var")
STATE_DIR.mkdir(parents=True, exist_ok=True)

DEBUG = os.environ.get("DEBUG", "1").lower() in {"1", "true", "yes", "on"}
SECRET_KEY = os.environ.get("SECRET_KEY", "demo-only-public-never-for-a-real-site-0123456789-abcdefghijkl")
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]").split(",")

INSTALLED_APPS = [
    "demo_project",
    "ratelimit_kv",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "ratelimit_kv.middleware.RateLimitMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "demo_project.urls"
WSGI_APPLICATION = "demo_project.wsgi.application"
ASGI_APPLICATION = "demo_project.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

LOGIN_REDIRECT_URL = LOGOUT_REDIRECT_URL = "home"
STATIC_URL = "/static/"
TIME_ZONE = "UTC"
USE_TZ = True

# Writers wait for each other at BEGIN instead of failing half way, and readers wait for nobody.
SQLITE = {
    "ENGINE": "django.db.backends.sqlite3",
    "OPTIONS": {
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    },
}
DATABASES = {
    "default": {**SQLITE, "NAME": STATE_DIR / "demo.sqlite3"},
    "ratelimit": {**SQLITE, "NAME": STATE_DIR / "ratelimit.sqlite3"},
}
DATABASE_ROUTERS = ["demo_project.routers.CounterRouter"]

# Counters live on an alias of their own: nothing else can evict them, and they crowd out nothing else.
if REDIS_URL := os.environ.get("REDIS_URL"):
    COUNTERS = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": REDIS_URL,
        "OPTIONS": {"SOCKET_CONNECT_TIMEOUT": 0.25, "SOCKET_TIMEOUT": 0.25},
    }
else:
    COUNTERS = {
        "BACKEND": "django.core.cache.backends.db.DatabaseCache",
        "LOCATION": "ratelimit_counters",
        "OPTIONS": {"MAX_ENTRIES": 1_000_000},
    }
CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    "ratelimit": COUNTERS,
}

# The cards of /lab/: one for each way to limit, small enough to hit with a few clicks.
LAB = {
    "fixed": {"RATE": "3/m"},
    "sliding": {"RATE": "3/m", "ALGORITHM": "sliding"},
    "bucket": {"RATE": "3/30s", "ALGORITHM": "bucket"},
    "calendar": {"RATE": "3/day", "TIMEZONE": "Asia/Tokyo"},
    "several": {"RATE": ["2/10s", "5/m"]},
    "tokens": {"RATE": "200/m", "COST": "demo_project.lab.estimate"},
    "password": {
        "RATE": "3/m",
        "COUNT_IF": "ratelimit_kv.scopes.is_failure",
        "RESET_IF": "ratelimit_kv.scopes.is_success",
    },
    "ban": {"RATE": "2/10s", "BAN": {"AFTER": 1, "FOR": "1m", "GROWTH": 2, "MAX": "10m"}},
    "shadow": {"RATE": "2/m", "MODE": "shadow"},
    "plan": {"RATE": "demo_project.lab.rate_of_plan"},
    "ceiling": {"RATE": "2/m", "KEY": "field:device", "CEILING": 3},
    "lease": {"RATE": "40/m", "KEY": "everyone", "LEASE": 4},
    "margin": {"RATE": "5/m", "SAFETY_MARGIN": 0.2},
    "concurrent": {"RATE": "2", "ALGORITHM": "concurrent"},
}

RATELIMIT_KV = {
    "CACHE": "ratelimit",
    "PROCESSES": 4,  # at most; what leases are measured by
    "SCOPES": {
        # Applied by the middleware, wherever the path or the name of the URL says.
        "global": {"RATE": "600/m", "KEY": "ip", "PATHS": ["*"], "EXEMPT_PATHS": ["/health", "/static/*"]},
        "auth": {
            "RATE": "5/m",
            "KEY": "ip",
            "METHODS": ["POST"],
            "URL_NAMES": ["login", "admin:login"],
            "MESSAGE": "That was a lot of sign-in attempts. Try again in {retry_after}.",
        },
        # Applied where a view names them with @rate_limit.
        "ask": {
            "RATE": "20/h",
            "KEY": "user|ip",
            "METHODS": ["POST"],
            "MESSAGE": "You have asked a lot this hour. The oracle will hear you again in {retry_after}.",
        },
        "ask-budget": {
            "RATE": "100/day",
            "KEY": "everyone",
            "METHODS": ["POST"],
            "MESSAGE": "The oracle has spoken {limit} times today and sleeps. It wakes in {retry_after}.",
        },
        "roast": {
            "RATE": "5/day",
            "KEY": "cookie:anon+ip",
            "CEILING": 5,
            "METHODS": ["POST"],
            "RESPONSE": "demo_project.views.roasted_enough",
        },
        "api-ask": {"RATE": "20/h", "KEY": "ip", "RESPONSE": "demo_project.views.refused_in_json"},
        "api-ask-async": {"RATE": "20/h", "KEY": "ip", "RESPONSE": "demo_project.views.refused_in_json"},
        "api-me": {"RATE": "10/m", "KEY": "user|ip"},
        **{f"lab-{name}": {**scope, "RESPONSE": "demo_project.lab.denied"} for name, scope in LAB.items()},
    },
}
