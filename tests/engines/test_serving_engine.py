"""Serving engines: a record for each, with sources, over a chip's [inference]."""

import tomllib
from importlib import resources

import pytest
from tests.engines.parsers import CACHES, PARSERS

from meshwright.engines.serving_engine import ENGINES
from meshwright.errors import HardwareError
from meshwright.programs.efficiency import StepEfficiency

WORDS = {"name", "about", "parent", "also", "sources", "defaults", "cache_names"}


@pytest.mark.parametrize("name", PARSERS)
def test_flags_are_those_of_the_engines_parser(name: str) -> None:
    engine, (release, known) = ENGINES[name], PARSERS[name]
    stated = tomllib.loads((resources.files("meshwright.engines") / f"{name}.toml").read_text())
    assert release in stated["sources"]["flags"]
    words = " ".join([engine.command, *engine.flags.values()]).split()
    assert {word for word in words if word.startswith("--")} == set(known.split())
    assert set(engine.cache_names.values()) <= CACHES.get(name, {"auto"})


@pytest.mark.parametrize("name", ENGINES.names)
def test_every_figure_has_a_source(name: str) -> None:
    stated = tomllib.loads((resources.files("meshwright.engines") / f"{name}.toml").read_text())
    assert ENGINES[name].name == name and ENGINES[name].about
    assert set(stated) - WORDS == set(stated.get("sources", {}))


def test_an_engine_replaces_figures_of_the_chip() -> None:
    engine = ENGINES.read(
        'name = "ours"\nabout = "a test"\n[gpu]\nmemory = 0.5\n"matmul.bf16" = 0.25\n', "ours.toml"
    )
    inference = StepEfficiency(matmul={"bf16": 0.75, "fp8": 0.5}, memory=0.75, cache=0.5)
    found = engine.applied(inference, "gpu")
    assert found == StepEfficiency(matmul={"bf16": 0.25, "fp8": 0.5}, memory=0.5, cache=0.5)
    assert engine.applied(inference, "tpu") == inference


def test_a_version_states_what_differs() -> None:
    text = 'name = "new"\nabout = "a test"\nparent = "tensorrt-llm"\n[gpu]\nmemory = 0.5\n'
    found, parent = ENGINES.read(text, "new.toml"), ENGINES["tensorrt-llm"]
    assert found.gpu == {**parent.gpu, "memory": 0.5} and found.parent == "tensorrt-llm"


def test_a_share_of_free_memory_is_of_what_weights_leave() -> None:
    """Of 100 bytes with 40 used, caches of TensorRT-LLM have 0.9 * 60, and of vLLM 0.9 * 100 - 40."""
    assert ENGINES["tensorrt-llm"].cache_bytes(100, 40) == pytest.approx(54)
    assert ENGINES["vllm"].cache_bytes(100, 40) == pytest.approx(50)


def test_names_and_faults() -> None:
    assert {"vllm", "sglang", "tensorrt-llm", "fastertransformer", "meshwright"} <= set(ENGINES.names)
    assert "pure" in ENGINES and ENGINES["pure"].tpu == ENGINES["jax-llm-examples"].tpu
    assert "orca" not in ENGINES
    with pytest.raises(HardwareError, match=r"engine 'vlm' is unknown; did you mean vllm"):
        ENGINES["vlm"]
    with pytest.raises(HardwareError, match=r"ours.toml:4: gpu.speed is unknown"):
        ENGINES.read('name = "ours"\nabout = "a"\n[gpu]\nspeed = 1\n', "ours.toml")
