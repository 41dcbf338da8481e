"""Settings of the test suite: the least that Django, its admin and the app need.

Caches on real servers are made in the tests, by the fixtures in conftest.py.
"""

import json
import os

SECRET_KEY = "only-for-tests-" + "x" * 40
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.urls"
USE_TZ = True

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "ratelimit_kv",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
DATABASE_ROUTERS = ["tests.caches.CacheRouter"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
        "OPTIONS": {"MAX_ENTRIES": 1_000_000},
    }
}

# What `tests.caches.child_environment` hands to a process that a test starts: a server, a second process that
# counts. Such a process sees the caches and databases of that test and can override anything else.
globals().update(json.loads(os.environ.get("RATELIMIT_KV_TEST_SETTINGS", "{}")))
