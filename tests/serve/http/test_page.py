"""The chat page: it loads nothing from elsewhere, and in a browser it streams, stops and counts."""

import re
import shutil

import pytest
from tests.serve.http.client import ask
from tests.serve.http.process import server_process
from tests.serve.mock import MockRunner


def test_the_page_is_one_file_that_asks_this_server_alone():
    response = ask(MockRunner(), lambda http: http.get("/"))
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert re.findall(r"https?://", response.text) == []
    asked = set(re.findall(r'fetch\("([^"]+)"', response.text))
    assert asked == {"/v1/models", "/metrics", "/v1/chat/completions"}


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with server_process() as (_, url), playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(url)
        page.wait_for_function("document.getElementById('model').textContent === 'tiny'")
        page.fill("#text", "hi")
        page.click("#send")
        page.wait_for_selector("#stop", state="hidden")
        assert page.inner_text(".assistant") == "naïve 😀 answer"
        assert "tokens/s" in page.inner_text("#numbers")
        assert page.query_selector(".error") is None
        browser.close()
