"""Pages: no text of others becomes HTML, no other site uses them, and only their own scripts run."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import pytest
from tests.cli.test_ui import serving
from tests.report.sample_run import write_pages
from tests.serve.http.client import ask
from tests.serve.mock import MockRunner

from meshwright.cli.main import main
from meshwright.cli.ui import price_of
from meshwright.report.pages.controls import DEFAULT_STATE, Planner, answer, state_of, ui_page

MARKUP = '"><img src=x onerror="document.title=\'in\'"><script>document.title="in"</script>'


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as found:
        yield found


@pytest.mark.parametrize("control", DEFAULT_STATE)
def test_the_value_of_a_control_stays_text(control: str):
    state = state_of(urlencode({control: MARKUP}))
    assert "<img" not in ui_page(state)
    found = answer(Planner(price_of, lambda words: None), state)
    assert "<img" not in found["html"]


def status(address: str, path: str, **headers: str) -> int:
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("GET", path, headers=headers)
    found = connection.getresponse().status
    connection.close()
    return found


def test_only_the_page_itself_uses_its_server(address: str):
    port, path = urlsplit(address).port, f"/plan.toml?{urlencode({'model': 'tiny'})}"
    own = f"127.0.0.1:{port}"
    assert status(address, "/", Host=own, Origin=f"http://{own}") == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        f"127.0.0.1.evil:{port}",
    ):
        assert status(address, path, Host=host) == 403, host
    for origin in ("http://evil.example", "null", f"http://evil.example:{port}", f"https://{own}"):
        assert status(address, path, Host=own, Origin=origin) == 403, origin
    for site in ("cross-site", "same-site"):
        assert status(address, path, Host=own, **{"Sec-Fetch-Site": site}) == 403
    assert status(address, "/", Host=own, **{"Sec-Fetch-Site": "cross-site"}) == 200  # a link


def test_only_scripts_of_the_pages_run(address: str):
    with urlopen(address, timeout=60) as response:
        policies = [response.headers["Content-Security-Policy"]]
    policies += [ask(MockRunner(), lambda http: http.get("/")).headers["content-security-policy"]]
    for policy in policies:
        parts = dict(part.split(" ", 1) for part in policy.split("; "))
        assert parts["script-src"].startswith("'sha256-") and "unsafe" not in policy
        assert parts["frame-ancestors"] == parts["base-uri"] == parts["default-src"] == "'none'"


@pytest.mark.slow
def test_only_scripts_and_styles_of_a_report_are_used(browser: Any, tmp_path: Path):
    written = write_pages(tmp_path)
    figure = "plot fsdp --model llama-2-13b --hardware v5p:4x4x4 --batch-tokens 3M"
    assert main([*figure.split(), "-o", str(tmp_path / "figure.html")]) == 0
    page = browser.new_page()
    for path in (*written.values(), tmp_path / "figure.html"):
        text = path.read_text()
        assert "unsafe" not in text.split("Content-Security-Policy", 1)[1].split(">", 1)[0]
        injected = MARKUP.removeprefix('">') + "<style>body { margin: 99px }</style>"
        for added, num_blocked in (("", 0), (injected, 4)):
            complaints = list[str]()
            page.on("console", lambda message, seen=complaints: seen.append(message.text))
            path.write_text(text.replace("</body>", added + "</body>"))
            page.goto(path.as_uri())
            page.wait_for_timeout(200)
            margin = page.evaluate("getComputedStyle(document.body).marginTop")
            assert page.title() != "in" and margin not in ("8px", "99px")  # the browser's, the injected
            blocked = [line for line in complaints if "Content Security Policy" in line]
            assert len(blocked) == num_blocked, complaints
    page.close()


@pytest.mark.slow
def test_markup_does_nothing_in_a_browser(address: str, browser: Any):
    page = browser.new_page()
    page.goto(f"{address}?{urlencode(DEFAULT_STATE | {'model': MARKUP, 'hardware2': MARKUP})}")
    page.wait_for_selector("#said:not(:empty)")
    assert page.locator("img").count() == 0 and page.title() != "in"
    page.close()
    with serving() as other:  # a page of another port is another origin
        page = browser.new_page()
        page.goto(other)
        blocked = page.evaluate(
            f"fetch({json.dumps(address + 'plan.toml')}).then(() => 'read', () => 'blocked')"
        )
        assert blocked == "blocked"
        page.close()
