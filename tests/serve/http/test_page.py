"""The chat page: it loads nothing from elsewhere, and in a browser it streams, stops and counts."""

import re
import time
from collections.abc import Callable

import httpx
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
    assert asked == {"/v1/models", "/metrics", "/tokenize", "/v1/chat/completions"}


@pytest.fixture
def page(browser):
    """The page of a mock server, loaded; what it asks of any other place fails the test."""
    with server_process() as (_, url):
        page, elsewhere = browser.new_page(), []
        page.on("request", lambda request: request.url.startswith(url) or elsewhere.append(request.url))
        page.goto(url)
        until(lambda: page.inner_text("#model") == "tiny")
        yield page
        page.close()
        assert elsewhere == []


def until(holds: Callable[[], bool]) -> None:
    """Waits for something; in Python, since the page's policy lets nobody evaluate text in it."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def send(page, text: str) -> None:
    page.fill("#text", text)
    page.click("#send")


def say(page, text: str) -> str:
    """The whole answer to a text."""
    send(page, text)
    page.wait_for_selector("#stop", state="hidden")
    return page.locator(".assistant").last.inner_text()


@pytest.mark.slow
def test_the_page_streams_an_answer_and_tells_measured_times_beside_the_planned_one(page):
    assert say(page, "hi") == "naïve 😀 answer"
    assert re.fullmatch(
        r"first token [\d.]+ m?s · [\d.]+ tokens/s · [\d.]+ m?s per token · planned 1\.23 ms",
        page.inner_text("#numbers"),
    )
    assert page.query_selector(".error") is None


@pytest.mark.slow
def test_the_page_stops_an_answer_keeps_what_came_and_begins_anew(page):
    page.click("summary")
    page.fill("#most", "90000")
    send(page, "forever")
    until(lambda: len(page.inner_text(".assistant")) > 20)
    assert page.is_visible("#stop")
    page.click("#stop")
    page.wait_for_selector("#stop", state="hidden")
    said = page.inner_text(".assistant")
    assert set(said) == {"r"} and len(said) < 90_000
    until(lambda: "\nmeshwright:running_requests 0" in httpx.get(f"{page.url}metrics").text)
    send(page, "more")  # the conversation still says forever
    until(lambda: len(page.locator(".assistant").last.inner_text()) > 20)
    assert page.locator(".assistant").count() == 2
    page.click("#clear")
    page.wait_for_selector("#stop", state="hidden")
    assert page.inner_text("#said") == "" == page.inner_text("#numbers")
    assert say(page, "hi") == "naïve 😀 answer"


@pytest.mark.slow
def test_the_first_message_fits_a_short_context(browser):
    with server_process(96) as (_, url):
        page = browser.new_page()
        page.goto(url)
        until(lambda: page.inner_text("#model") == "tiny")
        assert [say(page, text) for text in ("hi", "hello", "again")] == ["naïve 😀 answer"] * 3
        assert page.query_selector(".error") is None
        page.close()


@pytest.mark.slow
def test_the_page_asks_with_its_settings_and_shows_a_refusal(page):
    asked = []
    page.on("request", lambda one: one.method == "POST" and asked.append(one))
    page.click("summary")
    for setting, value in {"temperature": "0", "most": "3", "key": "secret", "system": "be brief"}.items():
        page.fill(f"#{setting}", value)
    assert say(page, "hi") == "na\N{REPLACEMENT CHARACTER}"  # the third token is half a character
    counting, request = asked
    assert counting.url.endswith("/tokenize")
    body = request.post_data_json
    assert (body["temperature"], body["max_tokens"]) == (0, 3)
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert body["messages"] == said and request.headers["authorization"] == "Bearer secret"
    page.fill("#most", "0")
    send(page, "again")
    assert "max_tokens" in page.wait_for_selector(".error").inner_text()
    assert page.locator(".assistant").count() == 1
