"""The lab of the demo: every card denies after its limit and says so, over HTTP."""

from __future__ import annotations

import contextlib
import html
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.conftest import there
from tests.servers import Missing, wait_until
from tests.test_demo import Site, by_its_own_command, csrf_token, demo_environment, manage, served

BY_CLICKS = {
    "fixed": 3,
    "sliding": 3,
    "bucket": 3,
    "calendar": 3,
    "several": 2,
    "ban": 2,
    "lease": 4,
    "margin": 4,
}
"""Cards with one button -> how often it passes."""
OF_TEN_SECONDS = {"several", "ban"}
"""Cards whose windows are that long; others have minutes, days, or none."""
BY_STORY = {"tokens", "password", "shadow", "plan", "ceiling", "concurrent"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One for all: every card counts for itself."""
    with served(by_its_own_command, tmp_path_factory.mktemp("lab")) as site:
        yield site


class Visitor:
    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.token = csrf_token(client.get("/lab/"))

    def press(self, card: str, **fields: str) -> httpx.Response:
        return self.client.post(f"/lab/{card}/", data=self.form(fields))

    def form(self, fields: dict[str, str]) -> dict[str, str]:
        return {"csrfmiddlewaretoken": self.token, **fields}


@pytest.fixture
def visitor(site: Site) -> Iterator[Visitor]:
    """Somebody who comes while no minute is about to end."""
    wait_for_a_window(60)
    with site.client(follow_redirects=True) as client:
        yield Visitor(client)


def wait_for_a_window(seconds: int) -> None:
    """Windows are aligned to the clock: a test that uses one up must not begin at its very end."""
    wait_until(lambda: seconds - time.time() % seconds > 4, "the next window")


def card(page: httpx.Response, name: str) -> str:
    """The text of a card."""
    found = re.search(rf'<section id="{name}".*?</section>', page.text, re.DOTALL)
    assert found
    return html.unescape(re.sub(r"<[^>]+>|\s+", " ", found[0]))


def test_the_page_has_a_card_for_every_scope(visitor: Visitor) -> None:
    page = visitor.client.get("/lab/").text
    assert set(re.findall(r'<section id="(\w+)"', page)) == {*BY_CLICKS, *BY_STORY}
    assert 'href="/lab/"' in visitor.client.get("/").text


def test_what_is_no_card_is_not_found_and_only_a_press_counts(visitor: Visitor) -> None:
    assert visitor.press("nonsense").status_code == 404
    back = visitor.client.get("/lab/shadow/")
    assert back.url.path == "/lab/"
    assert "2 of 2 left" in card(back, "shadow")


@pytest.mark.parametrize(("name", "limit"), BY_CLICKS.items())
def test_a_card_denies_after_its_limit_and_says_so(visitor: Visitor, name: str, limit: int) -> None:
    if name in OF_TEN_SECONDS:
        wait_for_a_window(10)
    for left in range(limit - 1, -1, -1):
        page = visitor.press(name)
        assert page.status_code == 200
        assert page.url.fragment == name
        assert re.search(rf"Passed\. {left}0? of", card(page, name))
    for _ in range(2):
        page = visitor.press(name)
        assert page.status_code == 429
        assert int(page.headers["Retry-After"]) >= 1
        assert ("Banned. Try again in" if name == "ban" else f"Denied by lab-{name}. Try again in") in card(page, name)
        assert " 0 of " in card(page, name)


def test_a_ban_outlasts_its_window(visitor: Visitor) -> None:
    while (page := visitor.press("ban")).status_code == 200:
        pass
    assert 10 < int(page.headers["Retry-After"]) <= 600


def test_several_rates_are_shown_each(visitor: Visitor) -> None:
    page = card(visitor.client.get("/lab/"), "several")
    assert re.search(r"\d of 2 left.*\d of 5 left", page)


def test_tokens_are_reserved_and_then_settled(visitor: Visitor) -> None:
    used = 0
    for how in ("", "stream", *[""] * 10):
        if (page := visitor.press("tokens", how=how)).status_code == 429:
            break
        said = re.search(r"100 tokens reserved, (\d+) used", card(page, "tokens"))
        assert said
        used += int(said[1])
        assert f"{200 - used} of 200 left" in card(page, "tokens")
    assert 100 < used <= 200, "the next reservation no longer fits"
    assert "Denied by lab-tokens" in card(page, "tokens")


def test_only_wrong_passwords_count_and_the_right_one_clears_them(visitor: Visitor) -> None:
    def guess(password: str) -> tuple[int, str]:
        page = visitor.press("password", password=password)
        return page.status_code, card(page, "password")

    for left in (2, 1):
        status, text = guess("guess")
        assert status == 403
        assert "Wrong. That one counts." in text
        assert f"{left} of 3 left" in text
    status, text = guess("oracle")
    assert status == 200
    assert "Right. The failures before are forgotten." in text
    assert "3 of 3 left" in text
    assert [guess("guess")[0] for _ in range(3)] == [403] * 3
    status, text = guess("oracle")
    assert status == 429
    assert "Denied by lab-password" in text


def test_a_shadow_denies_nobody(visitor: Visitor) -> None:
    pages = [visitor.press("shadow") for _ in range(3)]
    assert [page.status_code for page in pages] == [200] * 3
    would = ["would have been a denial" in card(page, "shadow") for page in pages]
    assert would == [False, False, True]


def test_an_upgrade_of_the_plan_helps_at_once(visitor: Visitor) -> None:
    assert [visitor.press("plan", plan="free").status_code for _ in range(3)] == [200, 200, 429]
    page = visitor.press("plan", plan="pro")
    assert "Passed. 2 of 5 left." in card(page, "plan")
    assert [visitor.press("plan", plan="pro").status_code for _ in range(3)] == [200, 200, 429]


def test_made_up_devices_end_at_the_ceiling(visitor: Visitor) -> None:
    for device in ("phone", "tablet"):
        assert [visitor.press("ceiling", device=device).status_code for _ in range(2)] == [200, 200]
    page = visitor.press("ceiling", device="tablet")
    assert page.status_code == 429
    assert "Denied by lab-ceiling." in card(page, "ceiling")
    assert "0 of 2 left" in card(page, "ceiling")
    assert "2 of 6 left" in card(page, "ceiling")
    assert [visitor.press("ceiling", device="watch").status_code for _ in range(2)] == [200, 200]
    page = visitor.press("ceiling", device="fridge")
    assert page.status_code == 429
    assert "Denied by lab-ceiling.ceiling." in card(page, "ceiling")


def test_a_third_export_waits_until_one_has_ended(visitor: Visitor) -> None:
    def start(exports: contextlib.ExitStack) -> int:
        export = visitor.client.stream("POST", "/lab/concurrent/", data=visitor.form({}))
        return exports.enter_context(export).status_code

    with contextlib.ExitStack() as exports:
        assert [start(exports) for _ in range(3)] == [200, 200, 429]
        assert "0 of 2 left" in card(visitor.client.get("/lab/"), "concurrent")
        assert "Denied by lab-concurrent" in card(visitor.press("concurrent"), "concurrent")
    # The visitor has gone, which the server finds out when it writes the next words.
    wait_until(lambda: "2 of 2 left" in card(visitor.client.get("/lab/"), "concurrent"), "the places to be free")


def test_its_scopes_pass_every_check_on_redis_too(tmp_path: Path) -> None:
    there(find_spec("django_redis") or Missing("the Python package django_redis is not installed"))
    assert "no issues" in manage(demo_environment(tmp_path, "redis://127.0.0.1:6379/0"), "check")
