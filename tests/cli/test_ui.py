"""mw ui as a process: its page, prices, ranking and exports over HTTP, and in a browser."""

import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from signal import SIGINT
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest
from tests.report.browser import CHROMIUM

import meshwright as mw
from meshwright.cli.main import main
from meshwright.cli.ui import price_of
from meshwright.report.ui import Planner, answer, state_of
from meshwright.units import format_count

SMALL = {"model": "tiny", "hardware": "h100:8", "batch": "64Ki", "seq": "64", "layout": "data=8"}
ANSWERS_WITHIN = 0.15  # seconds, at the moving of a control


@contextmanager
def serving() -> Iterator[str]:
    """The address of a page that a process of its own serves."""
    command = [sys.executable, "-m", "meshwright", "ui", "--port", "0", "--no-open", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout
            lines = [process.stdout.readline() for _ in range(3)]
            yield json.loads("".join(lines))["address"]
            process.send_signal(SIGINT)
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0, said
        finally:
            process.kill()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as found:
        yield found


def got(address: str, path: str, **state: str) -> str:
    with urlopen(f"{address}{path}?{urlencode(state)}", timeout=60) as answer:
        return answer.read().decode()


def test_the_page_has_a_label_for_every_control_and_loads_nothing(address: str):
    page = got(address, "", **SMALL)
    assert (
        'value="h100:8"' in page
        and "https://" not in page
        and "http://" not in page.replace("http://www.w3", "")
    )
    controls = len(re.findall(r"<(?:input|select)\b", page))
    assert controls == len(re.findall(r"<label\b[^>]*>", page)) >= 15


def test_a_moved_control_is_answered_at_once():
    """In processor time, which other work on the machine does not lengthen."""
    planner, took = Planner(price_of, lambda state: None), []
    for microbatches in (1, 2, 4):
        state = state_of(urlencode({"layout": f"fsdp=64,microbatches={microbatches},remat=full"}))
        started = time.process_time()
        found = answer(planner, state)
        took.append(time.process_time() - started)
        assert "MFU" in found["said"] and "fits" in found["said"] and "<svg" in found["html"]
    assert min(took) < ANSWERS_WITHIN, took


def test_two_layouts_side_by_side(address: str):
    found = json.loads(got(address, "price", **SMALL, layout2="fsdp=8", hardware2="b200:8"))
    assert found["html"].count('<section class="side"') == 2 and found["said"].count(" per step, ") == 2
    assert "tiny on b200:8: fsdp=8" in found["html"]


def test_the_cards_say_what_the_library_says(address: str):
    html = json.loads(got(address, "price", **SMALL))["html"]
    one = mw.price("tiny", "h100:8", mw.Train("64Ki", "64"), "data=8")
    speed = one.to_dict()["tokens_per_second_per_chip"] * 8
    assert f"{format_count(speed)} tokens/s, planned" in html and f"{one.mfu:.1%}" in html
    assert re.findall(r'<span class="label">([^<]*)', html) == [
        "Layout",
        "Step time, planned",
        "MFU",
        "Memory per chip",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"layout": "data=3"}, "layout: data=3 has 3 devices"),
        ({"model": "tyny"}, "did you mean"),
        ({"batch": "many"}, "many"),
        ({"layout": "<script>=1"}, "is not supported"),
    ],
)
def test_bad_input_is_said_in_its_place(words: dict[str, str], said: str, address: str):
    found = json.loads(got(address, "price", **{**SMALL, **words}))
    assert said in found["said"] and 'role="alert"' in found["html"] and "<script>" not in found["html"]


@pytest.mark.parametrize(("model", "has_latents"), [("llama-3-8b", False), ("deepseek-v3", True)])
def test_only_remats_of_the_model_are_offered(model: str, has_latents: bool):
    state = state_of(urlencode({"model": model}))
    offered = answer(Planner(price_of, lambda state: None), state)["remats"]
    assert ("latents" in offered) == has_latents and {"none", "full"} <= {*offered}


def test_plan_and_figures_can_be_kept(address: str):
    assert tomllib.loads(got(address, "plan.toml", **SMALL))["hardware"] == "h100:8"
    assert json.loads(got(address, "plan.json", **SMALL))["best"]["fits"]
    for name in ("step.svg", "memory.svg"):
        assert ElementTree.fromstring(got(address, name, **SMALL)).tag.endswith("svg")


def test_the_search_goes_on_in_the_background(address: str):
    deadline = time.monotonic() + 60
    while not (found := json.loads(got(address, "search", **SMALL)))["done"]:
        assert json.loads(got(address, "price", **SMALL))["seconds"] < 5
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "data-layout=" in found["html"] and found["said"].endswith("layouts ranked")


@pytest.mark.parametrize(
    ("path", "host", "status"), [("/", "evil.example", 403), ("/etc/passwd", "127.0.0.1", 404)]
)
def test_other_hosts_and_paths_are_refused(path: str, host: str, status: int, address: str):
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    connection.request("GET", path, headers={"Host": f"{host}:{parts.port}"})
    assert connection.getresponse().status == status
    connection.close()


def test_a_port_that_is_taken_is_one_line(address: str, capsys: pytest.CaptureFixture[str]):
    port = str(urlsplit(address).port)
    assert main(["ui", "--port", port, "--no-open"]) == 2
    assert capsys.readouterr().err.startswith(f"mw: --port {port}: ")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_in_a_browser(address: str, tmp_path):
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}", "--virtual-time-budget=8000", "--window-size=1280,1200", "--dump-dom",
        f"{address}?{urlencode(SMALL)}",
    ]  # fmt: skip
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert ":CONSOLE" not in done.stderr
    assert re.search(r'<p id="said"[^>]*>[^<]*MFU, fits</p>', done.stdout)
    assert "data-price-seconds" in done.stdout and 'class="card' in done.stdout
