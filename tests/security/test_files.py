"""Hostile checkpoints: each is refused in one line, or loads; none is read outside its folder or for ever."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.serve.replicas.processes import save_checkpoint

from meshwright.cli.main import main
from meshwright.errors import MeshwrightError, RequestError
from meshwright.layout import Layout
from meshwright.models import chat
from meshwright.models.chat import ChatTemplate
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device.loading import load_model_folder

DEEP = "[" * 100_000 + "]" * 100_000
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "tiny"))


def keys(name: str, **values: object) -> Change:
    """Sets keys of a JSON file, which need not exist."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | values))

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def binary(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def device(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")

    return change


def tensor(name: str, values: np.ndarray) -> Change:
    return lambda folder: save_file(load_file(folder / WEIGHTS) | {name: values}, folder / WEIGHTS)


def index(name: object) -> Change:
    """An index that has all tensors in one file, which is outside the folder."""

    def change(folder: Path) -> None:
        names = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).rename(folder.parent / "outside.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, name)}))

    return change


def tokenizer(**values: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"] |= values.pop("model", {})
        (folder / "tokenizer.json").write_text(json.dumps(content | values))

    return change


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


REFUSED: dict[str, tuple[Change, str]] = {
    "nested end tokens": (keys("generation_config.json", eos_token_id=[[1], [2]]), "which is no token"),
    "an end token of text": (keys("generation_config.json", eos_token_id="</s>"), "which is no token"),
    "a huge end token": (keys("generation_config.json", eos_token_id=10**30), "which is no token"),
    "many end tokens": (keys("generation_config.json", eos_token_id=[1] * 100_000), "more than 1000"),
    "no vocabulary": (tokenizer(model={"vocab": {}, "merges": []}, added_tokens=[]), "has no tokens"),
    "a tokenizer that is a list": (text("tokenizer.json", "[]"), "is not a tokenizer"),
    "a nested tokenizer": (text("tokenizer.json", DEEP), "is not a tokenizer"),
    "a tokenizer of another model": (
        tokenizer(model={"vocab": {f"x{i}": i for i in range(357)}, "merges": []}),
        "has 358 tokens, but the model's vocabulary has 300",
    ),
    "a million merges": (tokenizer(model={"merges": [["a", "b"]] * 1_000_001}), "entries in its lists"),
    "a wrong expression": (tokenizer(pre_tokenizer=split("(a")), "is not a tokenizer"),
    "a nested expression": (tokenizer(pre_tokenizer=split("(" * 9999 + ")" * 9999)), "is not a tokenizer"),
    "a template that is a number": (keys("tokenizer_config.json", chat_template=5), "is int, not text"),
    "a template of 2 MB": (text("chat_template.jinja", "{{ x }}" * 300_000), "at most 1,000,000"),
    "settings that are a list": (text("tokenizer_config.json", "[1]"), "not a JSON object"),
    "a nested config": (text("config.json", DEEP), "nested too deeply"),
    "two bases": (keys("config.json", rope_theta=5e5), "rope_theta = 500000.0 contradicts 10000.0"),
    "two scalings": (
        keys("config.json", rope_scaling={"rope_type": "yarn", "factor": 4}),
        "contradicts rope_parameters",
    ),
    "a quantisation that is text": (keys("config.json", quantization_config="fp8"), "must be an object"),
    "a thousand million layers": (keys("config.json", num_hidden_layers=10**9), "at most 10,000"),
    "a wrong dtype": (tensor("model.norm.weight", np.ones(32, bool)), "stored as BOOL"),
    "an empty tensor": (tensor("model.norm.weight", np.ones(0, np.float32)), "is [0] there"),
    "a huge header": (binary(WEIGHTS, b"\xff" * 8 + b"{"), "does not load"),
    "a nested header": (binary(WEIGHTS, len(DEEP).to_bytes(8, "little") + DEEP.encode()), "does not load"),
    "no weights": (binary(WEIGHTS, b""), "does not load"),
    "weights above": (index("../outside.safetensors"), "not a file of the folder"),
    "weights elsewhere": (index("/dev/zero"), "not a file of the folder"),
    "weights of no name": (index(5), "no whole weight_map"),
    "weights that are a pipe": (pipe(WEIGHTS), "not a regular file"),
    "weights that are a device": (device(WEIGHTS), "not a regular file"),
    "an index that is a pipe": (pipe(INDEX), "not a regular file"),
    "a config that is a pipe": (pipe("config.json"), "has no config.json"),
    "a tokenizer that is a pipe": (pipe("tokenizer.json"), "not a regular file"),
    "a tokenizer that is a device": (device("tokenizer.json"), "not a regular file"),
    "a template that is a pipe": (pipe("chat_template.jinja"), "not a regular file"),
    "settings that are a device": (device("generation_config.json"), "not a regular file"),
}


def load(folder: Path) -> None:
    layout = Layout.of()
    model = load_model_folder(folder)
    model.tokenizer().encode("hello")
    model.load_params(layout, device_mesh(layout, jax.devices()))


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_checkpoint_is_refused_in_a_line(folder: Path, name: str):
    change, message = REFUSED[name]
    change(folder)
    with pytest.raises(MeshwrightError) as error:
        load(folder)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_command_refuses_in_a_line(folder: Path, capfd: pytest.CaptureFixture[str]):
    keys("generation_config.json", eos_token_id=[[1]])(folder)
    assert main(["generate", "hello", "--checkpoint", str(folder)]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("mw: ") and not any("Traceback" in line for line in lines)


def test_reading_that_takes_much_memory_ends_the_command():
    grows = (
        "from meshwright.signals import ends_after\n"
        "with ends_after(50, 'reading it', 1e8):\n"
        "    pieces = []\n"
        "    while True: pieces.append(bytes(range(256)) * 40_000)"
    )
    ended = subprocess.run([sys.executable, "-c", grows], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "mw: reading it needs more than 100 MB\n")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hi \ud800", r"U\+D800 at character 3 is half"),
        ("hi \udcff", "the byte 0xFF at character 3 is not UTF-8"),
    ],
)
def test_a_text_that_is_not_unicode_is_named(text: str, fault: str, folder: Path):
    with pytest.raises(RequestError, match=f"^the text is not Unicode: {fault}"):
        load_model_folder(folder).tokenizer().encode(text)


def test_an_expression_that_never_ends_is_an_error(folder: Path):
    tokenizer(pre_tokenizer=split("(a+)+$"))(folder)
    with pytest.raises(RequestError, match=r"^the tokenizer fails on the text: "):
        load_model_folder(folder).tokenizer().encode("a" * 50 + "!")


# Ways out of a sandbox of Jinja that were published, and some that its own list names.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages|attr('__class__')|attr('__mro__') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{x.__class__.__mro__}'.format_map({'x': messages}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "{{ ['{0.__class__}']|map('format', messages)|list }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|groupby('__class__') }}",
    "{{ namespace(__class__=1).__class__ }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ range(10 ** 9)|list }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{{ joiner.__init__.__builtins__ }}",
    "{{ joiner.__init__['__globals__'] }}",
    "{{ (messages|first).get.__self__ }}",
    "{{ ({}).__getattribute__('__class__') }}",
]


def test_constants_of_a_template_are_computed_within_its_limits():
    for constant in ("'a' * 10 ** 12", "'a'|center(10 ** 12)", "[0] * 10 ** 12"):
        ChatTemplate(f"{{{{ {constant} }}}}").check()  # no MemoryError
    assert ChatTemplate("{{ 1 + 1 }}").render([]) == "2"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "longer than 0.1 s"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "longer than 0.1 s",
        ),
        (
            "{% for a in [1] recursive %}{{ loop([1, 2]) if loop.depth < 40 }}{% endfor %}",
            "longer than 0.1 s",
        ),
        ("{{ 9 ** (9 ** 9) }}", "a value has a size of"),
        ("{{ 'a' * 10 ** 10 }}", "a value has a size of"),
        ("{{ lipsum(n=10 ** 9) }}", "'lipsum' is undefined"),
    ],
)
def test_a_template_ends_in_limited_time(template: str, fault: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat, "_MOST_SECONDS", 0.1)
    with pytest.raises(RequestError, match=f"^the chat template refuses the messages: .*{fault}"):
        ChatTemplate(template).render([])


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_reaches_only_its_arguments(template: str):
    messages = [{"role": "user", "content": "hi"}]
    try:
        rendered = ChatTemplate(template).render(messages)
    except RequestError as error:
        rendered = str(error)
    secrets = ("root:", "uid=", "<class", "<module", "<function", "builtin", "subclasses")
    assert not any(secret in rendered for secret in secrets), rendered
    assert messages == [{"role": "user", "content": "hi"}]
