"""The demo as people meet it: started by its own command or behind real servers, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import there
from tests.servers import Missing, Server, find_binary, wait_until

ROOT = Path(__file__).resolve().parent.parent
HOUR = 3600
AS_A_BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}

PAGES = ["/", "/ask/", "/roast/", "/lab/", "/accounts/login/", "/admin/login/"]
JSON = ["/health", "/api/ask/", "/api/ask/async/"]


@dataclass
class Site:
    """The demo, running: its address, and its environment for other processes that look at it."""

    url: str
    environment: dict[str, str]

    def client(self, **options: Any) -> httpx.Client:
        # A connection for each request: the server may close one that is kept just when it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, limits=limits, **options)

    def manage(self, *arguments: str) -> str:
        return manage(self.environment, *arguments)

    def counter(self, scope: str, identity: str) -> dict[str, Any]:
        """What ``ratelimit_inspect`` says of it, in another process."""
        rows = json.loads(self.manage("ratelimit_inspect", "--format", "json"))
        [row] = [row for row in rows if (row["scope"], row["identity"]) == (scope, identity)]
        return row


def demo_environment(state: Path, redis_url: str = "") -> dict[str, str]:
    return {
        "DJANGO_SETTINGS_MODULE": "demo_project.settings",
        "DEMO_STATE_DIR": str(state),
        "REDIS_URL": redis_url,
        # Where gunicorn puts its control socket.
        "XDG_RUNTIME_DIR": str(state),
    }


def manage(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def served(command: Callable[[int], list[str]], directory: Path, redis_url: str = "") -> Iterator[Site]:
    environment = demo_environment(directory, redis_url)

    def answers(port: int) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).is_success
        return False

    server = Server(
        "demo",
        lambda port: ["/usr/bin/env", *(f"{name}={value}" for name, value in environment.items()), *command(port)],
        answers,
        "http://{host}:{port}",
        directory,
        # Processes that others depend on end them in turn.
        quick_end=signal.SIGTERM,
    )
    try:
        server.start()
        yield Site(server.url, environment)
    finally:
        server.stop()


def by_its_own_command(port: int) -> list[str]:
    return [sys.executable, str(ROOT / "manage.py"), "demo", str(port)]


def by_gunicorn(port: int) -> list[str]:
    options = ["--workers", "4", "--bind", f"127.0.0.1:{port}", "--chdir", str(ROOT)]
    return [sys.executable, "-m", "gunicorn", "demo_project.wsgi", *options]


def by_uvicorn(port: int) -> list[str]:
    options = ["--workers", "4", "--port", str(port), "--app-dir", str(ROOT), "--log-level", "warning"]
    return [sys.executable, "-m", "uvicorn", "demo_project.asgi:application", *options]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves on disk, to be copied."""
    state = tmp_path_factory.mktemp("prepared")
    manage(demo_environment(state), "demo", "--no-serve")
    return state


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """For tests that use nothing up."""
    with served(by_its_own_command, tmp_path_factory.mktemp("demo")) as site:
        yield site


@pytest.fixture
def state(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "state")


@pytest.fixture
def fresh_site(state: Path) -> Iterator[Site]:
    with served(by_its_own_command, state) as site:
        yield site


@pytest.fixture
def this_hour() -> None:
    """Windows are aligned to the clock: a test that uses one up must not begin at its very end."""
    wait_until(lambda: HOUR - time.time() % HOUR > 30, "the next hour")


@pytest.fixture
def this_minute() -> None:
    """As ``this_hour``."""
    wait_until(lambda: 60 - time.time() % 60 > 15, "the next minute")


# ── The command ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_prepares_everything_and_can_be_repeated(tmp_path: Path) -> None:
    tmp_path /= "not/there/yet"
    environment = demo_environment(tmp_path)
    first, second = (manage(environment, "demo", "8765", "--no-serve") for _ in range(2))
    assert first == second
    for promise in ("http://127.0.0.1:8765/", "/admin/", "/api/ask/", "manage.py ratelimit_inspect"):
        assert promise in first
    named = "SELECT name FROM sqlite_master WHERE type = 'table'"
    assert query(tmp_path / "ratelimit.sqlite3", named) == [("ratelimit_counters",)], "a file of their own"
    assert ("auth_user",) in query(tmp_path / "demo.sqlite3", named)
    assert ("ratelimit_counters",) not in query(tmp_path / "demo.sqlite3", named)
    users = query(tmp_path / "demo.sqlite3", "SELECT username, is_staff, is_superuser FROM auth_user")
    assert users == [("demo", 1, 1)]


def query(database: Path, sql: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(sql).fetchall()


def test_its_settings_pass_every_check(state: Path) -> None:
    for debug in ("0", "1"):
        said = manage({**demo_environment(state), "DEBUG": debug}, "check", "--database", "default")
        assert "no issues" in said


# ── Pages ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_whole(site: Site, path: str) -> None:
    with site.client() as client:
        response = client.get(path)
        assert response.status_code == 200
        assert '<html lang="en' in response.text
        for stylesheet in re.findall(r'<link rel="stylesheet" href="([^"]+)"', response.text):
            assert client.get(stylesheet).status_code == 200


@pytest.mark.parametrize("path", PAGES[:-1])
def test_a_strict_content_security_policy_would_let_every_page_be(site: Site, path: str) -> None:
    with site.client() as client:
        page = client.get(path).text
    assert not re.search(r"<script|<style|\sstyle=|\son\w+=", page)


@pytest.mark.parametrize("path", JSON)
def test_endpoints_answer_in_json(site: Site, path: str) -> None:
    with site.client() as client:
        response = client.get(path)
    assert response.status_code == 200
    assert response.headers["Content-Type"] == "application/json"
    assert response.json()


def test_anybody_can_script_against_the_oracle(site: Site) -> None:
    with site.client() as client:
        for path in ("/api/ask/", "/api/ask/async/"):
            for response in (
                client.get(path, params={"question": "Why?"}),
                client.post(path, data={"question": "Why?"}),
            ):
                assert response.json()["question"] == "Why?"
                assert response.json()["answer"]
                assert 0 <= response.json()["remaining"] < 20


def test_health_and_assets_are_exempt_and_pages_say_their_limits(site: Site) -> None:
    with site.client() as client:
        for path in ("/health", "/static/demo_project/site.css"):
            assert "RateLimit" not in client.get(path).headers
        assert '"api-ask"' in client.get("/api/ask/").headers["RateLimit-Policy"]


def test_the_front_page_shows_what_the_visitor_has_left(site: Site) -> None:
    with site.client() as client:
        for _ in range(2):
            page = client.get("/").text
            for left in ("20 of 20 left", "100 of 100 left", "5 of 5 left"):
                assert left in page, "looking costs nothing"
        assert re.search(r"5\d\d of 600 left", page)
        assert "<code>ip:127.0.0.1</code>" in page
        assert "resets in" in page


# ── Limits ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("this_hour")
def test_the_21st_call_of_the_api_is_denied_and_the_rest_of_the_site_is_not(fresh_site: Site) -> None:
    with fresh_site.client() as client:
        answers = [client.get("/api/ask/") for _ in range(22)]
        assert [answer.status_code for answer in answers] == [200] * 20 + [429] * 2
        assert [answer.json()["remaining"] for answer in answers[:20]] == list(range(19, -1, -1))
        denied = answers[-1]
        assert 1 <= int(denied.headers["Retry-After"]) <= HOUR
        assert denied.headers["Cache-Control"] == "no-store"
        assert denied.headers["Content-Type"] == "application/problem+json"
        assert denied.json()["status"] == 429
        for path in (*PAGES, "/api/ask/async/", "/health"):
            assert client.get(path).status_code == 200
    row = fresh_site.counter("api-ask", "ip:127.0.0.1")
    assert (row["count"], row["limit"], row["remaining"]) == (20, 20, 0)


@pytest.mark.usefixtures("this_hour")
def test_a_visitor_over_his_own_limit_leaves_the_budget_of_all_untouched(fresh_site: Site) -> None:
    with fresh_site.client(headers=AS_A_BROWSER) as client:
        answers = [submit(client, "/ask/", question="Will it scale?") for _ in range(25)]
    assert [answer.status_code for answer in answers] == [200] * 20 + [429] * 5
    assert "Will it scale?" in answers[0].text
    assert "19 of 20 left" in answers[0].text
    assert "The oracle will hear you again in" in answers[-1].text
    assert answers[-1].headers["Content-Type"].startswith("text/html")
    assert fresh_site.counter("ask-budget", "everyone")["count"] == 20


@pytest.mark.usefixtures("this_hour")
def test_five_roasts_a_day_then_a_kind_word(fresh_site: Site) -> None:
    with fresh_site.client() as client:
        answers = [submit(client, "/roast/") for _ in range(6)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429]
        assert "That is enough for today" in answers[-1].text
        assert int(answers[-1].headers["Retry-After"]) >= 1
        assert client.get("/roast/").status_code == 200
    with fresh_site.client() as another:
        assert submit(another, "/roast/").status_code == 200


@pytest.mark.usefixtures("this_hour")
def test_throwing_the_cookie_away_helps_only_so_far(fresh_site: Site) -> None:
    with fresh_site.client() as client:
        page = client.get("/roast/")
        form = {"csrfmiddlewaretoken": csrf_token(page)}
        statuses = []
        for number in range(30):
            client.cookies.set("anon", f"made-up-{number}", domain="127.0.0.1", path="/")
            statuses.append(client.post("/roast/", data=form).status_code)
    assert statuses == [200] * 25 + [429] * 5


def test_guessing_passwords_ends_soon(fresh_site: Site) -> None:
    # Five a minute: eleven attempts overrun even two windows. An empty password spares us the slow hash.
    with fresh_site.client() as client:
        answers = [submit(client, "/accounts/login/", username="demo", password="") for _ in range(11)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[:5] == [200] * 5
    assert 429 in statuses
    assert "sign-in attempts" in answers[statuses.index(429)].text


@pytest.mark.usefixtures("this_minute")
def test_the_api_of_a_user_is_counted_by_user(fresh_site: Site) -> None:
    with fresh_site.client() as client:
        assert client.get("/api/me/").headers["Location"].startswith("/accounts/login/")
        assert submit(client, "/accounts/login/", username="demo", password="demo").status_code == 302
        assert client.get("/api/me/").json()["user"] == "demo"
        assert client.get("/admin/").status_code == 200
        assert "Sign out" in client.get("/").text
    assert fresh_site.counter("api-me", "user:1")["count"] == 1


def submit(client: httpx.Client, path: str, **fields: str) -> httpx.Response:
    page = client.get(path)
    return client.post(path, data={"csrfmiddlewaretoken": csrf_token(page), **fields})


def csrf_token(page: httpx.Response) -> str:
    return re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', page.text)[-1]


# ── Real servers ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("this_hour")
@pytest.mark.parametrize("store", ["sqlite", "redis"])
@pytest.mark.parametrize(
    ("server", "path", "scope"),
    [("gunicorn", "/api/ask/", "api-ask"), ("uvicorn", "/api/ask/async/", "api-ask-async")],
)
def test_200_concurrent_requests_against_a_limit_of_20(
    server: str, path: str, scope: str, store: str, state: Path, request: pytest.FixtureRequest
) -> None:
    there(find_spec(server) or Missing(f"the Python package {server} is not installed"))
    redis_url = ""
    if store == "redis":
        there(find_spec("django_redis") or Missing("the Python package django_redis is not installed"))
        redis_url = request.getfixturevalue("own_redis")().url
    command = {"gunicorn": by_gunicorn, "uvicorn": by_uvicorn}[server]

    with served(command, state, redis_url) as site:
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(200) as pool:
            # A client for each thread: to share one is not as safe as it is said to be.
            clients = [stack.enter_context(site.client(verify=False)) for _ in range(200)]

            def ask(client: httpx.Client) -> tuple[float, httpx.Response, float]:
                before = time.time()
                return before, client.get(path), time.time()

            answers = list(pool.map(ask, clients))
        row = site.counter(scope, "ip:127.0.0.1")

    statuses = [response.status_code for _, response, _ in answers]
    assert {status: statuses.count(status) for status in set(statuses)} == {200: 20, 429: 180}
    window_ends = math.ceil(answers[0][0] / HOUR) * HOUR
    for before, response, after in answers:
        if response.status_code == 429:
            wait = int(response.headers["Retry-After"])
            assert math.ceil(window_ends - after) <= wait <= math.ceil(window_ends - before)
    assert (row["count"], row["limit"], row["remaining"]) == (20, 20, 0)


# ── A browser ──────────────────────────────────────────────────────────────────────────────────────────────


class Browser:
    """Headless Chromium, spoken to over its debugging pipes: JSON messages, each ended by a zero byte."""

    FLAGS = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--remote-debugging-pipe",
    )

    # It expects its pipes at 3 and 4, where others may be now.
    WITH_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

    def __init__(self, binary: str, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._messages, messages = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-c", self.WITH_PIPES, str(commands), str(messages)),
                *(binary, *self.FLAGS, f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(commands, messages),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(messages)
        self._unread = b""
        self._number = 0
        self._loaded = False
        self._session: dict[str, str] = {}

    def start(self) -> None:
        page = self._send("Target.createTarget", url="about:blank")["targetId"]
        session = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        self._send("Page.enable")

    def close(self) -> None:
        # Without its pipes it ends by itself.
        os.close(self._commands)
        os.close(self._messages)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def resize(self, width: int, height: int) -> None:
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def open(self, url: str) -> None:
        self._loaded = False
        self._send("Page.navigate", url=url)
        self._wait_for_load()

    def submit(self, **fields: str) -> None:
        """Fills the page's form in and sends it."""
        self._loaded = False
        self.ask(
            f"""(() => {{
                const form = document.querySelector("main form");
                const fields = Object.entries({json.dumps(fields)});
                for (const [name, value] of fields) form.elements[name].value = value;
                form.requestSubmit();
            }})()"""
        )
        self._wait_for_load()

    def ask(self, expression: str) -> Any:
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return self.ask(f"document.querySelector({json.dumps(selector)}).innerText")

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _wait_for_load(self) -> None:
        while not self._loaded:
            self._read()

    def _read(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._messages], [], [], seconds)[0]:
                raise TimeoutError(f"the browser has said nothing for {seconds} s")
            if not (received := os.read(self._messages, 1 << 16)):
                raise EOFError("the browser has gone")
            self._unread += received
        line, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._loaded = self._loaded or message.get("method") == "Page.loadEventFired"
        return message


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    binary = there(next(filter(None, map(find_binary, names)), Missing("Chromium is not installed")))
    profile = tmp_path_factory.mktemp("profile")
    browser = Browser(binary, profile)
    try:
        browser.start()
        yield browser
    finally:
        browser.close()
        shutil.rmtree(profile, ignore_errors=True)


LOOKS = """({
    "h1": document.querySelectorAll("h1").length,
    "title": document.title,
    "styled": document.styleSheets.length > 0 && document.styleSheets[0].cssRules.length > 0,
    "wider": document.documentElement.scrollWidth - innerWidth,
    "unlabelled": [...document.querySelectorAll("main input:not([type=hidden])")]
        .filter(input => !input.labels.length).map(input => input.name),
    "small": [...document.querySelectorAll("main button, main .button, main input:not([type=hidden])")]
        .filter(target => target.getBoundingClientRect().height < 44).map(target => target.outerHTML),
})"""


@pytest.mark.parametrize(("width", "height"), [(1200, 800), (390, 844)], ids=["desktop", "phone"])
def test_pages_in_a_browser(site: Site, browser: Browser, width: int, height: int) -> None:
    browser.resize(width, height)
    for path in ("/", "/ask/", "/roast/", "/lab/", "/accounts/login/"):
        browser.open(site.url + path)
        looks = browser.ask(LOOKS)
        assert "oracle" in looks.pop("title")
        assert looks.pop("wider") <= 0, f"{path} scrolls sideways at {width} px"
        assert looks == {"h1": 1, "styled": True, "unlabelled": [], "small": []}, path
    browser.open(site.url + "/")
    assert browser.ask("document.querySelectorAll('meter').length") == 8


@pytest.mark.usefixtures("this_hour")
def test_a_visitor_with_a_phone_asks_until_the_oracle_tires(fresh_site: Site, browser: Browser) -> None:
    browser.resize(390, 844)
    browser.open(fresh_site.url + "/ask/")
    browser.submit(question="Will it <scale>?")
    assert browser.text(".answer figcaption") == "Will it <scale>?"
    assert browser.text(".answer p")
    assert "19 of 20 left" in browser.text("main")

    with fresh_site.client() as client:
        while submit(client, "/ask/", question="And now?").status_code == 200:
            pass
    browser.submit(question="One more?")
    assert browser.text("h1") == "The oracle needs a rest"
    assert "hear you again in" in browser.text("main")
    assert browser.ask(LOOKS)["wider"] <= 0
    browser.open(fresh_site.url + browser.ask("document.querySelector('main .button').getAttribute('href')"))
    assert "0 of 20 left" in browser.text("main")
    assert "80 of 100 left" in browser.text("main")


@pytest.mark.usefixtures("this_minute")
def test_the_demo_user_signs_in_and_sees_the_counters_in_the_admin(fresh_site: Site, browser: Browser) -> None:
    browser.resize(1200, 800)
    browser.open(fresh_site.url + "/api/me/")
    browser.submit(username="demo", password="demo")
    assert json.loads(browser.text("body"))["user"] == "demo"
    browser.open(fresh_site.url + "/admin/")
    assert "Site administration" in browser.text("h1")
    browser.open(fresh_site.url + "/admin/ratelimit_kv/livecounter/")
    rows = browser.text("#result_list")
    for said in ("api-me", "user:1", "1 / 10"):
        assert said in rows
    browser.resize(390, 844)
    assert browser.ask(LOOKS)["wider"] <= 0
    browser.resize(1200, 800)
    browser.open(fresh_site.url + "/")
    assert "Sign out" in browser.text("nav")
