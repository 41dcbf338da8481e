"""README, held to the code: every option, check, command, name, signal, store and log line in it, and none besides.

What the code can say by itself stands between ``<!-- name -->`` and ``<!-- /name -->``;
``python -m tests.test_readme`` writes it there anew.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import django
import pytest
from django.core.cache import cache
from django.core.management.base import BaseCommand
from django.http import HttpResponse
from freezegun import freeze_time

import ratelimit_kv
from benchmarks.sliding_error import table
from ratelimit_kv import rate_limit, signals, testing
from ratelimit_kv.accounts import RequestLimits
from ratelimit_kv.checks import checks_table_markdown
from ratelimit_kv.conf import TOP, load
from ratelimit_kv.decisions import Decision, Reason
from ratelimit_kv.identity import NAMED, PLAIN
from ratelimit_kv.inspection import facts_table_markdown
from ratelimit_kv.management.commands import ratelimit_inspect
from ratelimit_kv.scopes import ALGORITHMS, FIRST, OPTIONS, Scope

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md"]


def text() -> str:
    return README.read_text("utf-8")


def block(name: str) -> str:
    """What stands between the marks of a block."""
    found = re.search(rf"<!-- {re.escape(name)} -->\n(.*?)<!-- /{re.escape(name)} -->", text(), re.DOTALL)
    assert found, f"README has no block {name!r}"
    return found[1]


def rows(markdown: str) -> list[list[str]]:
    """The cells of all tables, without the heads."""
    found: list[list[str]] = []
    for line in markdown.splitlines():
        if not line.startswith("|"):
            continue
        if re.fullmatch(r"[|:\- ]+", line):
            found.pop()
            continue
        found.append([cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def names(markdown: str) -> list[str]:
    """What the first cells of a table say in code."""
    return [name for row in rows(markdown) for name in re.findall(r"`([^`]+)`", row[0])]


# ------------------------------------------------------------------------------------------------ written by the code


WRITTEN: dict[str, Callable[[], str]] = {
    "stores": facts_table_markdown,
    "checks": checks_table_markdown,
    "sliding": table,
}


def written(markdown: str) -> str:
    """The same with the tables that the code writes."""
    for name, make in WRITTEN.items():
        start, mark, rest = markdown.partition(f"<!-- {name} -->\n")
        _, end, rest = rest.partition(f"<!-- /{name} -->")
        assert mark, f"README has no block {name!r}"
        assert end, f"README has no end of block {name!r}"
        markdown = f"{start}{mark}{make().strip()}\n{end}{rest}"
    return markdown


def test_tables_are_what_the_code_says() -> None:
    assert text() == written(text()), "python -m tests.test_readme writes them anew"


# ------------------------------------------------------------------------------------------------------------ settings


def value_of(cell: str) -> Any:
    """The default that a cell shows as code."""
    found = re.fullmatch(r"`(.+)`", cell)
    assert found, f"{cell!r} is no code"
    return ast.literal_eval(found[1])


def test_every_option_of_the_top_level_with_its_default() -> None:
    shown = {row[0].strip("`"): value_of(row[1]) for row in rows(block("settings: top"))}
    assert shown == {option: default for option, (default, _) in TOP.items()}


def test_every_option_of_a_scope_with_its_default() -> None:
    plain = Scope(name="plain")
    words = {letter: word for word, letter in ALGORITHMS.items()}
    defaults: dict[str, Any] = {"PRESET": None, "TIMEZONE": plain.timezone or None, "ALGORITHM": words[plain.algorithm]}
    for option, (attribute, _) in OPTIONS.items():
        default = getattr(plain, attribute)
        default = tuple(default) if isinstance(default, frozenset) else default
        defaults[option] = default.text if option == "KEY" else default
    table = {row[0].strip("`"): row[1] for row in rows(block("settings: scope"))}
    assert set(table) == {*OPTIONS, *FIRST}
    assert table.pop("RATE") == ""
    for option in ("CACHE", "ON_ERROR"):
        assert table.pop(option) == "that of the top level"
        del defaults[option]
    assert {option: value_of(cell) for option, cell in table.items()} == defaults


def test_every_key() -> None:
    assert sorted(names(block("keys"))) == sorted([*PLAIN, *(f"{kind}:NAME" for kind in NAMED), "myapp.limits.tenant"])


# ------------------------------------------------------------------------------------------------------------- the API


def test_every_public_name() -> None:
    assert sorted(re.split(r"\W", name)[0] for name in names(block("api"))) == sorted(ratelimit_kv.__all__)


def test_arguments_are_as_shown() -> None:
    for shown in names(block("api")):
        name, _, arguments = shown.rstrip(")").partition("(")
        if arguments:
            real = list(inspect.signature(getattr(ratelimit_kv, name)).parameters)
            assert [re.split(r"=", one.strip("* "))[0] for one in arguments.split(",")] == real, shown


def test_every_field_and_reason_of_a_decision() -> None:
    real = [one.name for one in fields(Decision) if one.repr] + ["status"]
    assert names(block("decision")) == real
    assert names(block("reasons")) == [str(reason) for reason in Reason]


def test_what_a_request_offers_is_there() -> None:
    shown = set(re.findall(r"request\.rate_limit\.(\w+)", "".join(path.read_text("utf-8") for path in DOCUMENTS)))
    assert shown >= {"decisions", "tightest", "allowed", "charge", "settle", "refund", "asettle"}
    assert not [name for name in shown if not hasattr(RequestLimits, name)]


def test_every_signal() -> None:
    assert [row[0].strip("`") for row in rows(block("signals"))] == signals.__all__


# --------------------------------------------------------------------------------------------------- around the package


def test_every_option_of_the_command() -> None:
    theirs = {word for action in BaseCommand().create_parser("", "")._actions for word in action.option_strings}
    real = {
        action.option_strings[0]
        for action in ratelimit_inspect.Command().create_parser("", "")._actions
        if action.option_strings and not theirs & set(action.option_strings)
    }
    shown = block("command: ratelimit_inspect")
    assert {name.partition(" ")[0] for name in names(shown)} == real
    codes = [row[0] for row in rows(shown) if row[0].isdigit()]
    assert codes == re.findall(r"^  (\d)  ", ratelimit_inspect.EXIT_CODES, re.MULTILINE)
    assert ", ".join(ratelimit_inspect.COLUMNS) in shown
    used = re.findall(
        r"ratelimit_inspect((?: --?[\w-]+(?: [^-\s`#]+)?)+)", "".join(p.read_text("utf-8") for p in DOCUMENTS)
    )
    assert used
    assert {option for line in used for option in re.findall(r"--[\w-]+", line)} <= real


def test_every_helper_for_tests() -> None:
    assert sorted(re.split(r"\W", name)[0] for name in names(block("testing"))) == sorted(testing.__all__)


def log_lines() -> list[str]:
    """Every text that is logged, with … for what is put in."""
    found = []
    for path in (ROOT / "ratelimit_kv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:\.\d+)?[sr]", "…", node.value))
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values))
    return found


def test_log_lines_are_those_of_the_code() -> None:
    known = log_lines()
    for _, line, _ in rows(block("log")):
        said = line.strip("`").removesuffix(" …")
        assert [one for one in known if one.startswith(said)], f"nothing logs {said!r}"


# ----------------------------------------------------------------------------------------------------- the two commands


def command(name: str) -> str:
    found = re.search(rf"<!-- command: {name} -->\n```sh\n(.+)\n```", text())
    assert found, f"README has no command {name!r}"
    return found[1]


def test_the_two_commands() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for name, last in (("demo", ".venv/bin/python manage.py demo"), ("tests", ".venv/bin/python -m pytest")):
        venv, install, run = command(name).split(" && ")
        assert venv == "python -m venv .venv"
        found = re.fullmatch(r'\.venv/bin/pip install -e "\.\[(\w+)\]"', install)
        assert found
        assert found[1] in extras
        assert run == last
    assert (ROOT / "demo_project" / "management" / "commands" / "demo.py").exists()
    # What README says is what CI runs, with more extras and options.
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    assert 'pip" install -q -e ".[test' in ci
    assert '/bin/python" -m pytest' in ci


# ------------------------------------------------------------------------------------------------------------- the text


def anchors(markdown: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text("utf-8")), link


def test_every_recipe_is_in_the_table() -> None:
    recipes = re.findall(r"^## (.+)$", (ROOT / "docs" / "recipes.md").read_text("utf-8"), re.MULTILINE)
    assert re.findall(r"\[(.+?)\]\(docs/recipes\.md#", block("recipes")) == recipes


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_of_python_compile(path: Path) -> None:
    for code in re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        ast.parse(code)


def test_settings_in_the_text_hold(settings: Any) -> None:
    settings.CACHES = {**settings.CACHES, "ratelimit": settings.CACHES["default"]}
    seen = 0
    for code in re.findall(r"^```python\n(.*?)^```", text(), re.DOTALL | re.MULTILINE):
        for node in ast.parse(code).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "RATELIMIT_KV":
                settings.RATELIMIT_KV = ast.literal_eval(node.value)
                assert load()[1] == []
                seen += 1
    assert seen >= 3


def test_the_example_in_how_it_works_is_a_real_key(settings: Any, rf: Any) -> None:
    settings.RATELIMIT_KV = {"SCOPES": {"ask": "20/h"}}
    cache.clear()
    [example] = re.findall(r"^(rl:ask:.+)$", text(), re.MULTILINE)
    view = rate_limit("ask")(lambda request: HttpResponse())
    with freeze_time("2026-11-30 07:00:00"):
        view(rf.get("/", REMOTE_ADDR="203.0.113.9"))
        assert cache.get(example) == 1


def test_the_refusal_that_is_shown_is_ours(settings: Any, rf: Any) -> None:
    [shown] = re.findall(r"^```http\n(.*?)^```", text(), re.DOTALL | re.MULTILINE)
    head, _, body = shown.partition("\n\n")
    settings.RATELIMIT_KV = {"SCOPES": {"ask": ["2/m", "20/h"]}}
    cache.clear()
    view = rate_limit("ask")(lambda request: HttpResponse())
    with freeze_time("2026-11-29 23:00:08"):
        for _ in range(3):
            response = view(rf.get("/", headers={"Accept": "application/json"}))
    status, *lines = head.splitlines()
    assert status == f"HTTP/1.1 {response.status_code} {response.reason_phrase}"
    assert dict(line.split(": ", 1) for line in lines) == dict(response.headers)
    assert json.loads(body) == json.loads(response.content)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_of_this_machine(path: Path) -> None:
    document = path.read_text("utf-8")
    assert not re.findall(r"/(?:home|root|work|tmp|opt|Users)/|localhost:\d{4}", document)
    assert not [line for line in document.splitlines() if line != line.rstrip()]


def test_python_and_django_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    djangos = re.findall(r"Framework :: Django :: ([\d.]+)", project)
    assert f"Django {', '.join(djangos[:-1])} and {djangos[-1]} on Python {pythons[0]} to {pythons[-1]}." in text()


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    README.write_text(written(text()), "utf-8")
