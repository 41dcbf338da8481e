"""One process of tests/test_chaos.py: answers lines of JSON. ``["page", times, address]`` -> what its requests met."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter

import django
from django.http import HttpRequest, HttpResponse
from django.urls import path


def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse("hello")


def main() -> None:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    django.setup()
    logging.getLogger().handlers = []
    logging.getLogger("ratelimit_kv").addHandler(Keep(logging.WARNING))
    from django.test import Client

    from ratelimit_kv import rate_limit

    urlpatterns.extend(path(name, rate_limit(name)(view)) for name in ("open", "closed", "exact"))
    client = Client(raise_request_exception=False)
    for line in sys.stdin:
        page, times, address = json.loads(line)
        statuses: Counter[int] = Counter()
        longest = 0.0
        waited = 0
        records.clear()
        for _ in range(times):
            began = time.perf_counter()
            statuses[client.get(f"/{page}", REMOTE_ADDR=address).status_code] += 1
            took = time.perf_counter() - began
            longest, waited = max(longest, took), waited + (took > 0.09)
        sys.stdout.write(json.dumps([dict(statuses), longest, waited, len(records)]) + "\n")
        sys.stdout.flush()


urlpatterns: list[object] = []

if __name__ == "__main__":
    sys.modules["tests.chaos_worker"] = sys.modules["__main__"]  # the URLconf is this module, once
    main()
