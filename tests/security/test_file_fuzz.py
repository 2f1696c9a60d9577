"""Generated files: each command that reads them ends in time and memory, with at most a line about the fault.

FUZZ_EXAMPLES in the environment sets how many of each kind; `make nightly` takes thousands.
"""

import json
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.security.mutations import changed_texts, changed_values
from tests.security.test_command_line import durations, fault
from tests.serve.replicas.processes import save_checkpoint

from meshwright.errors import MeshwrightError, RequestError
from meshwright.models.hf import to_hf
from meshwright.models.presets import PRESETS, load_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
FUZZ = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
        HealthCheck.function_scoped_fixture,
    ],
)
SECONDS, MOST_BYTES = 10.0, 2**30


@contextmanager
def within_memory() -> Iterator[None]:
    """Within, more than `MOST_BYTES` of further memory is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check(*line: str | Path) -> None:
    """The command ends well, or in one line about what is wrong."""
    with within_memory():
        wrong = fault([str(word) for word in line], SECONDS)
    assert wrong is None, wrong


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, its document, and a model's description."""
    folder = tmp_path_factory.mktemp("fuzz")
    line = "plan train --model llama-3.2-1b --hardware h100:1x8 --batch-tokens 64Ki --seq-len 4096 -o"
    assert fault([*line.split(), str(folder / "plan.toml")]) is None
    return folder


@cache
def configs() -> dict[str, Any]:
    """The config.json of every third preset, if it has one."""
    found = {}
    for name in list(PRESETS)[::3]:
        with suppress(MeshwrightError, AssertionError):
            found[name] = to_hf(load_model(name))
    return found


@FUZZ
@given(data=st.data())
def test_configurations(folder: Path, data: st.DataObject):
    config = configs()[data.draw(st.sampled_from(sorted(configs())))]
    (folder / "config.json").write_text(as_json(data.draw(changed_values(config))))
    check("model", folder / "config.json")


@FUZZ
@given(data=st.data())
def test_texts_of_configurations(folder: Path, data: st.DataObject):
    text = data.draw(changed_texts(as_json(to_hf(load_model("llama-3-8b")))))
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    check("model", folder / "config.json", "--json")


@FUZZ
@given(data=st.data())
def test_plans(folder: Path, data: st.DataObject):
    text = data.draw(changed_texts((folder / "plan.toml").read_text()))
    (folder / "other.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    check("compare", folder / "other.toml", folder / "plan.toml")


@FUZZ
@given(data=st.data())
def test_documents_of_plans(folder: Path, data: st.DataObject):
    document = data.draw(changed_values(json.loads((folder / "plan.json").read_text())))
    (folder / "document.json").write_text(as_json(document))
    check("report", folder / "document.json", "-o", folder / "page.html")


CHIP = (Path(__file__).parents[2] / "src/meshwright/hardware/chips/h100.toml").read_text()


@FUZZ
@given(text=changed_texts(CHIP))
def test_hardware(folder: Path, text: str):
    (folder / "chip.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    check("hardware", folder / "chip.toml")


@pytest.fixture(scope="module")
def program() -> str:
    """The optimised HLO of a step on eight devices."""
    from tests.security.hlo_program import program_text

    return program_text()


@FUZZ
@given(data=st.data())
def test_programs(folder: Path, program: str, data: st.DataObject):
    text = data.draw(changed_texts(program))
    (folder / "program.txt").write_bytes(text.encode("utf-8", "surrogatepass"))
    check("audit", "--hlo", folder / "program.txt", "--hardware", "v5p:2x2x2", "--mesh", "data=8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def loads(folder: Path) -> None:
    """The folder is loaded as for serving, or refused in a line."""
    import jax

    from meshwright.layout import Layout
    from meshwright.nn.start.device_mesh import device_mesh
    from meshwright.serve.device.loading import load_model_folder

    layout, message, began = Layout.of(), "", time.perf_counter()
    try:
        model = load_model_folder(folder)
        model.tokenizer().encode("hello")
        model.load_params(layout, device_mesh(layout, jax.devices()[:1]))
    except (MeshwrightError, RequestError) as error:
        message = str(error)
    finally:
        durations.append(time.perf_counter() - began)
    assert "\n" not in message, message


WEIGHTS = "model.safetensors"


@FUZZ
@given(data=st.data())
def test_headers_of_weights(folder: Path, checkpoint: Path, data: st.DataObject):
    content = (checkpoint / WEIGHTS).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    changed = data.draw(changed_values(header).map(as_json) | changed_texts(content[8 : 8 + size].decode()))
    text = changed.encode("utf-8", "surrogatepass")
    size = (
        len(text)
        if data.draw(st.booleans())
        else data.draw(st.sampled_from([0, 1, 2**63 - 1, 2**64 - 1, len(text) - 1]))
    )
    other = folder / "headers"
    shutil.copytree(checkpoint, other, dirs_exist_ok=True)
    (other / WEIGHTS).write_bytes(max(size, 0).to_bytes(8, "little") + text + content[8 + len(text) :])
    loads(other)


@FUZZ
@given(data=st.data())
def test_files_of_tokenizers(folder: Path, checkpoint: Path, data: st.DataObject):
    other = folder / "tokenizers"
    shutil.copytree(checkpoint, other, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json", "generation_config.json"]))
    given = {"chat_template": "{{ messages[0].content }}", "eos_token": "</s>", "add_bos_token": True}
    content = json.loads((checkpoint / name).read_text()) if (checkpoint / name).exists() else given
    changed = data.draw(changed_values(content).map(as_json) | changed_texts(as_json(content)))
    (other / name).write_bytes(changed.encode("utf-8", "surrogatepass"))
    loads(other)
