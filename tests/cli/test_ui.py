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
from itertools import product
from signal import SIGINT
from statistics import median
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest
from tests.report.browser import THEMES, WIDTHS, faint, viewed, wide

import meshwright as mw
from meshwright.cli.main import main
from meshwright.cli.ui import near_of, price_of, reach_of
from meshwright.layout.absorb import absorbed
from meshwright.report.pages.controls import (
    DEFAULT_STATE,
    Planner,
    answer,
    command_of,
    ranking,
    reachable_choices,
    state_of,
    suggestions,
)
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


def test_a_layout_has_the_ranges_of_its_step_and_memory():
    state = state_of(urlencode({"hardware": "h100:1x8", "layout": "fsdp=8,remat=full"}))
    html = answer(Planner(price_of, lambda state: None), state)["html"]
    found = re.findall(r"8 of 10 runs: ([\d.]+ \w+) to ([\d.]+ \w+)", html)
    assert len(found) == 2 and found[1][0].endswith("B"), html[:2000]


@pytest.mark.parametrize(
    ("layout", "moved", "chips", "kept"),
    [
        ("fsdp=64,tensor=8,remat=full", "tensor", 64, "fsdp=8,tensor=8,remat=full"),
        ("fsdp=64,pipe=4", "pipe", 64, "fsdp=16,pipe=4"),
        ("fsdp=64,remat=full", "", 8, "fsdp=8,remat=full"),
        ("data=2,fsdp=4,tensor=8,sequence_parallel=true,pipe=32", "pipe", 64, "fsdp=2,pipe=32"),
        ("fsdp=3", "fsdp", 64, None),
    ],
)
def test_other_axes_make_up_for_a_moved_one(layout: str, moved: str, chips: int, kept: str | None):
    assert absorbed(layout, moved, chips, lambda text: "fsdp=3" not in text) == kept


PLANNER = Planner(price_of, lambda state: None, near_of, reach_of)


def test_a_moved_axis_or_machine_has_a_price():
    moves = [
        ({"layout": "fsdp=64,tensor=4,remat=full"}, "tensor", "fsdp=16,tensor=4,remat=full"),
        ({"hardware": "v5e:4x4"}, "hardware", "fsdp=16,remat=full"),
        ({"layout": "fsdp=64,pipe=2,remat=full"}, "pipe", "fsdp=32,pipe=2,remat=full,microbatches=8"),
        ({"layout": "fsdp=64,remat=full,sequence_parallel=true"}, "remat", "fsdp=64,remat=full"),
    ]
    for words, moved, layout in moves:
        found = answer(PLANNER, state_of(urlencode(words)), moved)
        assert found["layout"] == layout and " per step, " in found["said"] and "became" in found["said"]


def test_values_that_cannot_be_had_are_named():
    reached = reachable_choices(PLANNER, state_of(""))
    assert reached["tensor"] == ["1", "2", "4", "8"] and reached["expert"] == ["1"]
    assert reached["sequence_parallel"] == [""]
    started = time.process_time()
    reachable_choices(PLANNER, state_of(urlencode({"layout": "fsdp=32,tensor=2,remat=full"})))
    assert time.process_time() - started < 1


def test_errors_offer_values():
    state = state_of("")
    did = "model 'llama3-8b' is neither a preset nor a path; did you mean llama-3-8b?"
    assert suggestions(did, state) == [{"control": "model", "value": "llama-3-8b"}]
    fits = "layout: tensor=3 has 3 devices and h100:8 has 8 chips; fits: data=4,tensor=2 or tensor=8"
    assert [found["value"] for found in suggestions(fits, state)] == [
        "data=4,tensor=2,remat=full",
        "tensor=8,remat=full",
    ]
    assert suggestions("hardware 'h10' is unknown; did you mean h100?", {**state, "hardware": "h10:8"}) == [
        {"control": "hardware", "value": "h100:8"}
    ]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ({"price": "2.5", "software": "nemo"}, "plan train --model=llama-3-8b"),
        ({"tab": "serve", "rate": "20"}, "plan serve --model=llama-3-8b"),
        ({"tab": "fit"}, "fit llama-3-8b --hardware=v5e:8x8 --seq-len=4096 --json"),
        ({"tab": "nothing"}, "plan train"),
    ],
)
def test_a_tab_is_a_command(words: dict[str, str], command: str):
    written = " ".join(command_of(state_of(urlencode(words))))
    assert written.startswith(command)
    assert ("--for=nemo --price=2.5" in written) == ("price" in words)
    assert ("--engine=vllm" in written) == ("rate" in words)


def test_what_fits_and_the_load_are_tables():
    way = {"way": "serve in bf16", "fits": True, "max_batch": 8, "max_context": 4096, "needed_bytes": 10**9,
           "tokens_per_second": 100.0, "one_stream": 10.0, "why_not": None, "not_run": None}  # fmt: skip
    fits = {"model": "m", "hardware": "t4:1", "seq_len": 4096, "ways": [way, {**way, "fits": False}]}
    found = ranking(Planner(price_of, lambda state: fits), state_of("tab=fit"))
    assert found["said"] == "1 of 2 ways fit m on t4:1" and found["html"].count("<tr") == 3
    servers = {"hardware": "h100:1x4", "layout": "tensor=4,remat=none", "weights_dtype": "bf16",
               "replicas": 1, "chips": 4, "prefill_replicas": 0, "price_per_hour": 43.2,
               "ttft_p95_seconds": 0.07, "tpot_p95_seconds": 0.005, "missed": None}  # fmt: skip
    cheaper = [{**servers, "missed": "--tpot-p95 30ms <missed>"}]
    load = {
        "rate_per_second": 20.0,
        "best": servers,
        "cheaper": cheaper,
        "other": None,
        "boot": None,
        "price_per_day": 1036.8,
        "simulated": 2,
        "considered": 9,
        "launch": {"command": "vllm serve m"},
    }
    found = ranking(Planner(price_of, lambda state: load), state_of("tab=serve&rate=20"))
    assert "vllm serve m" in found["html"] and "&lt;missed&gt;" in found["html"]


def test_two_layouts_side_by_side(address: str):
    found = json.loads(got(address, "price", **SMALL, layout2="fsdp=8", hardware2="b200:8"))
    assert found["html"].count('<section class="side"') == 2 and found["said"].count(" per step, ") == 2
    assert "tiny on b200:8: fsdp=8" in found["html"]
    assert re.findall(r">usable [\d.]+ GB, (\w+)<", found["html"]) == 2 * ["h100", "b200"]
    assert found["html"].count(">on b200:8<") == 2 * 2  # its bars of time and of memory, large and small


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
        "Price",
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


# Resolves when the page shows other figures after an input event: milliseconds from the one to the other.
MOVED = """(control, value) => new Promise((shown) => {
  const started = performance.now();
  const paint = () => requestAnimationFrame(() => setTimeout(() => shown(performance.now() - started)));
  const watch = new MutationObserver(() => { watch.disconnect(); paint(); });
  watch.observe(document.getElementById("answer"), { childList: true });
  control.value = value;
  control.dispatchEvent(new InputEvent("input", { bubbles: true }));
})"""


@contextmanager
def opened(
    browser: Any, address: str, state: dict[str, str], width: int = 1280, theme: str = "light"
) -> Iterator[Any]:
    """The page with a price and a ranking on it."""
    with viewed(browser, f"{address}?{urlencode(state)}", width, theme) as page:
        page.wait_for_selector("#answer .card")
        page.wait_for_selector("#ranking button")
        page.wait_for_selector("[data-axis=data] option:disabled", state="attached")
        yield page


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), list(product(WIDTHS, THEMES)))
def test_the_page_fits_its_window_and_can_be_read(width: int, theme: str, browser: Any, address: str):
    compared = {**SMALL, "layout2": "fsdp=2,tensor=4", "hardware2": "v5e:2x4"}
    with opened(browser, address, compared, width, theme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert wide(page) == [] == faint(browser, page)
        page.locator("#ranking tbody td").first.wait_for(timeout=60_000)
        ranking = page.locator("#ranking")
        assert ranking.evaluate("(one) => one.scrollWidth") == ranking.evaluate("(one) => one.clientWidth")


@pytest.mark.slow
def test_a_moved_control_shows_its_figures_at_once(browser: Any, address: str):
    with opened(browser, address, DEFAULT_STATE) as page:
        moves = [("#batch-range", str(18 + n % 8)) for n in range(10)]
        moves += [("[data-axis=microbatches]", str(2 ** (n % 4))) for n in range(1, 11)]
        took = [page.locator(control).evaluate(MOVED, value) / 1000 for control, value in moves]
    assert median(took) < ANSWERS_WITHIN, took


@pytest.mark.slow
def test_the_keyboard_alone_reaches_all_and_the_result_is_announced(browser: Any, address: str):
    with opened(browser, address, SMALL) as page:
        controls = ":is(input, select, button, a[href], summary):visible:enabled"
        wanted = page.locator(controls).evaluate_all("(all) => all.map((one) => one.outerHTML)")
        reached = []
        for _ in range(2 * len(wanted)):
            page.keyboard.press("Tab")
            focus = page.evaluate_handle("document.activeElement")
            assert focus.evaluate("(one) => getComputedStyle(one).outlineStyle") == "solid"
            reached.append(focus.evaluate("(one) => one.outerHTML"))
            if reached[-1] == wanted[-1]:
                break
        assert [one for one in reached if one in wanted] == wanted
        said = page.get_by_role("status").first
        before = said.inner_text()
        assert before.endswith("MFU, fits")
        page.get_by_role("combobox", name="fsdp").focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function(
            "(before) => document.getElementById('said').textContent !== before", arg=before
        )
        assert said.inner_text().startswith("data=8,fsdp=2 became data=4,fsdp=2; ")


@pytest.mark.slow
def test_the_tree_of_roles_has_a_name_for_every_control(browser: Any, address: str):
    with opened(browser, address, {**SMALL, "price": "10.8"}) as page:
        names = {
            "textbox": ["tokens per step", "sequence length", "as text", "layout"],
            "combobox": ["model", "hardware", "data", "fsdp", "tensor", "context", "pipe", "expert"],
            "slider": ["tokens per step, by doubling"],
            "checkbox": ["sequence parallel"],
            "group": ["Run", "Layout", "Compare with", "Time of a step", "Memory of a chip"],
            "button": ["use data=8", "Undo", "Copy link"],
            "tab": ["Training", "Serving", "Does it fit?"],
        }
        for role, wanted in names.items():
            for name in wanted:
                assert page.get_by_role(role, name=name, exact=True).count() >= 1, (role, name)
        assert page.get_by_role("img", name=re.compile("^compute: ")).count() >= 1
        nameless = re.findall(
            r"- (?:textbox|combobox|slider|checkbox|button|link|img)(?!.*\")",
            page.locator("body").aria_snapshot(),
        )
        assert nameless == []
        assert page.locator("#batch-range").get_attribute("aria-valuetext") == "64Ki"


@pytest.mark.slow
def test_a_link_keeps_the_state_and_what_is_compared(browser: Any, address: str):
    with opened(browser, address, SMALL) as page:
        page.get_by_role("button", name="use fsdp=8", exact=True).click()
        page.get_by_text("Price, number types").click()
        page.get_by_label("layout", exact=True).fill("data=4,fsdp=2")
        page.wait_for_selector(".side >> nth=1")
        titles = page.locator(".side h2").all_inner_texts()
        assert titles == ["tiny on h100:8: fsdp=8", "tiny on h100:8: data=4,fsdp=2"]
        link = page.url
    with viewed(browser, link, 1280, "dark") as other:
        other.wait_for_selector(".side >> nth=1")
        assert other.locator(".side h2").all_inner_texts() == titles
        assert other.get_by_role("combobox", name="fsdp").input_value() == "8"
        with other.expect_download() as saved:
            other.get_by_role("link", name="plan.toml").click()
        assert tomllib.loads(saved.value.path().read_text())["layout"]["mesh"]["fsdp"] == 8


@pytest.mark.slow
def test_moves_suggestions_tabs_and_undo(browser: Any, address: str):
    with opened(browser, address, DEFAULT_STATE) as page:
        layout, said = page.locator("[name=layout]"), page.locator("#said")
        page.get_by_role("combobox", name="tensor").select_option("8")
        page.wait_for_function("() => document.getElementById('said').textContent.includes('became')")
        assert layout.input_value() == "fsdp=8,remat=full,tensor=8"
        page.wait_for_selector("[data-axis=tensor] option:disabled", state="attached")
        page.locator("[name=model]").fill("llama3-8b")
        page.wait_for_selector("#suggestions button")
        assert page.locator("#answer.old .card").count() >= 4  # the last good result stays
        page.locator("#suggestions button").first.click()
        page.wait_for_selector("#answer:not(.old)")
        assert page.locator("[name=model]").input_value() == "llama-3-8b" and "MFU" in said.inner_text()
        for _ in range(3):
            page.locator("#undo").click()
        page.wait_for_function("() => document.querySelector('[name=layout]').value === 'fsdp=64,remat=full'")
        # A search that is under way replaces the marks.
        page.wait_for_function("() => document.body.innerText.includes('layouts ranked')")
        page.wait_for_selector("#ranking .pick")
        mark = page.locator("#ranking .pick:visible").nth(3)
        mark.scroll_into_view_if_needed()
        box = mark.locator("circle").bounding_box()
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_function("() => document.querySelector('[name=layout]').value !== 'fsdp=64,remat=full'")
        for tab, table in (("Serving", "#serve table"), ("Does it fit?", "#fit table")):
            page.get_by_role("tab", name=tab).click()
            page.wait_for_selector(table)
        assert "tab=fit" in page.url
