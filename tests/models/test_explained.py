"""A config.json key by key, as `mw model --explain-config` shows it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.families.table import FILES

from meshwright.cli.main import main
from meshwright.models.explained import ExplainedKey, explain_config
from meshwright.models.hf import from_hf

QWEN = FILES["qwen3-0.6b"]


def _keys(**changes: Any) -> dict[str, ExplainedKey]:
    return {line.key: line for line in explain_config(QWEN | changes, "mine").keys}


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_published_file_is_explained(name: str) -> None:
    explanation = explain_config(FILES[name], name)
    assert explanation.error is None and explanation.family.name == from_hf(FILES[name], name).family
    assert {line.verdict for line in explanation.keys} <= {"read", "ignored", "default"}
    assert all(line.meaning for line in explanation.keys)


def test_each_verdict() -> None:
    lines = _keys(window_every=2, use_sliding_window=True, residual_multiplier=0.22, vocab_size=None)
    meanings = {
        "hidden_size": ("read", "d_model"),
        "max_window_layers": ("ignored", "counts only with use_sliding_window"),
        "window_every": ("unknown", "ignored, with a warning"),
        "use_sliding_window": ("refused", "use_sliding_window = True is not supported; fits: False"),
        "vocab_size": ("missing", "vocab_size: every file needs it"),
    }
    assert {key: (lines[key].verdict, lines[key].meaning) for key in meanings} == meanings
    assert "changes what the model computes" in lines["residual_multiplier"].meaning


def test_fields_have_their_values() -> None:
    lines = _keys(rope_scaling={"type": "linear", "factor": 2.0})
    assert lines["attention_bias"].meaning == "qkv_bias = False, attention_out_bias = False"
    assert lines["rope_scaling"].meaning == "rope_scaling = RopeScaling(factor=2.0, kind='linear')"
    assert "num_key_value_heads" in lines
    without = {key: value for key, value in QWEN.items() if key != "num_key_value_heads"}
    default = {line.key: line for line in explain_config(without, "mine").keys}["num_key_value_heads"]
    assert (default.verdict, default.meaning) == ("default", "num_kv_heads = 16")


def test_the_key_that_an_error_names_is_refused() -> None:
    explanation = explain_config(QWEN | {"hidden_act": "mish"}, "mine")
    assert explanation.error is not None and "hidden_act = 'mish' is not supported" in explanation.error
    assert [line.key for line in explanation.keys if line.verdict == "refused"] == ["hidden_act"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES["llama-4-scout"]))
    assert main(["model", "--explain-config", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["family"], document["class"]) == ("llama4", "Llama4ForCausalLM")
    assert {"key": "head_dim", "value": 128, "verdict": "read", "meaning": "d_head = 128"} in document["keys"]
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"use_sliding_window": True}))
    assert main(["model", "--explain-config", str(tmp_path / "config.json")]) == 1
    out = capsys.readouterr().out
    assert "refused" in out and "use_sliding_window is refused" in out
    assert main(["model", "--explain-config", str(tmp_path / "mine.toml")]) == 2
    assert "--explain-config takes a config.json or its folder" in capsys.readouterr().err
