"""Metrics: what the signals tell, counted by scope, reason and alias, in one process and over several."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.test import AsyncClient, Client
from freezegun import freeze_time
from prometheus_client import REGISTRY

import ratelimit_kv
from ratelimit_kv import signals
from ratelimit_kv.process import forget, runtime
from ratelimit_kv.stores import StoreError
from ratelimit_kv.stores.locmem import LocMemStore
from tests.site import HALF_PAST, limit, statuses

NAME = "ratelimit_kv.contrib.prometheus"
SIGNALS = (signals.denied, signals.near_limit, signals.store_failed, signals.store_recovered)


@pytest.fixture(autouse=True)
def metrics(use_cache: Callable[..., Any]) -> Iterator[Any]:
    """Switched on for the test, and off again: other tests have no receivers."""
    use_cache("locmem")
    forget()
    before = [list(signal.receivers) for signal in SIGNALS]
    module = importlib.import_module(NAME)
    yield module
    for signal, receivers in zip(SIGNALS, before, strict=True):
        signal.receivers = receivers
        signal.sender_receivers_cache.clear()
    for name in module.__all__:
        REGISTRY.unregister(getattr(module, name))
    del sys.modules[NAME]


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"ratelimit_kv_{name}", labels)


def labels(name: str) -> list[dict[str, str]]:
    return [
        sample.labels
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"ratelimit_kv_{name}"
    ]


def test_denials_by_scope_and_reason(settings: Any, client: Client) -> None:
    limit(
        settings,
        middleware=True,
        door={"RATE": "3/m", "KEY": "ip"},
        watch={"RATE": "1/m", "PATHS": ["*"], "MODE": "shadow"},
    )
    with freeze_time(HALF_PAST):
        statuses(client, "/door/function", 6)
    assert value("denied_total", scope="door", reason="over_limit") == 1
    assert value("denied_total", scope="door", reason="remembered") == 2
    assert value("denied_total", scope="watch", reason="shadow") == 3  # who is denied from memory is not asked


async def test_denials_under_asgi(settings: Any, async_client: AsyncClient) -> None:
    limit(settings, middleware=True, door={"RATE": "0/m", "KEY": "ip"})
    await async_client.get("/door/async-function")
    assert value("denied_total", scope="door", reason="impossible") == 1


def test_callers_near_their_limit(settings: Any, client: Client) -> None:
    limit(settings, door={"RATE": "10/m", "KEY": "ip", "NEAR": 0.5})
    with freeze_time(HALF_PAST):
        for number in range(3):
            statuses(client, "/door/function", 7, REMOTE_ADDR=f"192.0.2.{number}")
    assert value("near_limit_total", scope="door") == 3


def test_nothing_that_a_client_chooses_is_a_label(settings: Any, client: Client) -> None:
    limit(settings, door={"RATE": "1/m", "KEY": "ip"})
    for number in range(20):
        statuses(client, "/door/function", 2, REMOTE_ADDR=f"192.0.2.{number}")
    assert labels("denied_total") == [{"scope": "door", "reason": "over_limit"}]
    assert len(labels("near_limit_total")) == 1


def test_a_store_that_goes_and_comes_back(settings: Any, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, counters: Any, now: int) -> Any:
        raise StoreError("refused", outage=True)

    limit(settings, BREAKER={"FAILURES": 2, "SECONDS": 5}, door={"RATE": "99/m", "KEY": "ip"})
    with freeze_time(HALF_PAST) as clock:
        statuses(client, "/door/function", 1)
        assert value("store_up", alias="default") is None
        with monkeypatch.context() as patch:
            patch.setattr(LocMemStore, "hit", fail)
            statuses(client, "/door/function", 5)
        assert value("store_up", alias="default") == 0
        assert value("store_failures_total", alias="default") == 1
        clock.tick(60)
        statuses(client, "/door/function", 1)
    assert value("store_up", alias="default") == 1
    assert value("store_failures_total", alias="default") == 1


def test_one_bad_value_is_a_failure_of_a_store_that_is_up(
    settings: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, counters: Any, now: int) -> Any:
        raise StoreError("not a number", outage=False)

    limit(settings, door={"RATE": "99/m", "KEY": "ip"})
    monkeypatch.setattr(LocMemStore, "hit", fail)
    statuses(client, "/door/function", 5)
    assert not runtime().breaker("default").is_open
    assert value("store_failures_total", alias="default") == 1
    assert value("store_up", alias="default") == 1


def test_one_line_in_installed_apps_switches_them_on(settings: Any) -> None:
    limit(settings, door="3/m")
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, NAME]
    assert apps.get_app_config("prometheus").name == NAME
    call_command("check", fail_level="ERROR")


def test_the_example_of_the_documentation(example: Callable[[str], Client]) -> None:
    client = example("Prometheus")
    with freeze_time(HALF_PAST):
        assert statuses(client, "/api/ping/", 6) == [200] * 5 + [429]
        shown = client.get("/metrics").content.decode()
    assert 'ratelimit_kv_denied_total{reason="over_limit",scope="api"} 1.0' in shown
    assert 'ratelimit_kv_near_limit_total{scope="api"} 1.0' in shown
    document = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text("utf-8")
    assert set(re.findall(r"# HELP (ratelimit_kv_\w+(?<!_created)) ", shown)) == set(
        re.findall(r"^\| `(ratelimit_kv_\w+)`", document, re.MULTILINE)
    )


# ------------------------------------------------------------------------------------------------- other processes


def python(code: str, **environment: str) -> str:
    """What a process of its own prints."""
    code = f"import django; django.setup()\n{code}"
    more = {"DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **more, **environment}, stdout=-1, check=True
    )
    return done.stdout.decode()


def test_nothing_else_imports_the_packages_of_contrib() -> None:
    home = Path(ratelimit_kv.__file__).parent
    files = sorted(path.relative_to(home.parent).with_suffix("") for path in home.rglob("*.py"))
    names = [".".join(path.parts).removesuffix(".__init__") for path in files if path.parent.name != "contrib"]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint(*sys.modules)"
    loaded = set(python(code).split())
    assert "ratelimit_kv.middleware" in loaded
    assert not {"rest_framework", "ninja", "prometheus_client", NAME} & loaded


def test_processes_are_added_up_and_the_last_word_on_a_store_holds(tmp_path: Path) -> None:
    environment = {
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "RATELIMIT_KV_TEST_SETTINGS": '{"RATELIMIT_KV": {"SCOPES": {"door": "1/day"}}}',
    }
    deny = f"""
import {NAME}
from ratelimit_kv import hit, signals
from ratelimit_kv.process import runtime
for _ in range(3):
    hit("door", "ip:192.0.2.1")
"""
    fail = "runtime().breaker('default').is_open = True; signals.store_failed.send(None, alias='default')"
    recover = "signals.store_recovered.send(None, alias='default')"
    show = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    for word in (fail, recover):
        python(deny + word, **environment)
    shown = python(show, **environment)
    assert 'ratelimit_kv_denied_total{reason="over_limit",scope="door"} 2.0' in shown
    assert 'ratelimit_kv_denied_total{reason="remembered",scope="door"} 2.0' in shown
    assert 'ratelimit_kv_store_failures_total{alias="default"} 1.0' in shown
    assert 'ratelimit_kv_store_up{alias="default"} 1.0' in shown
