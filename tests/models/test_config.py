"""ModelConfig: read from HF and TOML, written back, and what is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig, RopeScaling
from meshwright.models.hf import from_hf, to_hf
from meshwright.models.presets import PRESETS, load_model

HF = to_hf(PRESETS["llama-3.1-8b"])


@pytest.mark.parametrize("name", PRESETS)
def test_hf_form_reads_back(name: str) -> None:
    config = PRESETS[name]
    assert from_hf(json.loads(json.dumps(to_hf(config))), name) == config


def test_defaults_of_an_old_config() -> None:
    old = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 100,
        "max_position_embeddings": 256,
    }
    config = from_hf(old, "old")
    assert (config.num_kv_heads, config.d_head, config.norm_eps, config.rope_theta) == (8, 64, 1e-6, 1e4)
    assert (config.tied_embeddings, config.rope_scaling) == (False, None)


def test_transformers_5_keeps_rotary_settings_in_one_table() -> None:
    new = {key: value for key, value in HF.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {"rope_theta": HF["rope_theta"]} | HF["rope_scaling"]
    assert from_hf(new, "llama-3.1-8b") == PRESETS["llama-3.1-8b"]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "mistral-7b", "tiny"])
def test_transformers_reads_what_we_write(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(**to_hf(PRESETS[name]))
    assert from_hf(theirs.to_dict(), name) == PRESETS[name]


def test_missing_keys_are_named_at_once() -> None:
    config = {key: value for key, value in HF.items() if key not in ("hidden_size", "vocab_size")}
    with pytest.raises(ModelError) as caught:
        from_hf(config, "mine")
    assert str(caught.value) == "mine: config.json lacks hidden_size, vocab_size"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "mine: architecture Qwen2ForCausalLM is not supported; "
            "supported: LlamaForCausalLM, MistralForCausalLM",
        ),
        ({"architectures": None, "model_type": "gpt2"}, "mine: model_type 'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "mine: hidden_act = 'gelu' is not supported; fits: 'silu'"),
        ({"attention_bias": True}, "mine: attention_bias = True is not supported; fits: False"),
        ({"sliding_window": 4096}, "mine: sliding_window = 4096 is not supported; fits: None"),
        ({"rope_scaling": {"type": "yarn"}}, "mine: rope_type 'yarn' is not supported; fits: 'default'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "mine: rope scaling lacks low_freq_factor",
        ),
        (
            {"head_dim": None, "hidden_size": 4100},
            "hidden_size = 4100 does not divide over num_attention_heads",
        ),
        ({"num_key_value_heads": 5}, "mine: 32 query heads (N) do not divide over 5 KV heads (K)"),
        ({"num_hidden_layers": 0}, "mine: num_layers = 0 must be a positive whole number"),
        ({"vocab_size": "32k"}, "mine: vocab_size = '32k' must be a positive whole number"),
        ({"rms_norm_eps": -1.0}, "mine: norm_eps = -1.0 must be a number above 0"),
        ({"head_dim": 33}, "mine: d_head = 33 is odd"),
        ({"tie_word_embeddings": "no"}, "mine: tied_embeddings = 'no' is not true or false"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        from_hf(HF | changes, "mine")
    assert message in str(caught.value)


def test_unknown_keys_warn_by_name() -> None:
    with pytest.warns(
        UserWarning, match="mine: config.json keys not known and ignored: qk_norm, window_every"
    ):
        from_hf(HF | {"window_every": 2, "qk_norm": True}, "mine")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ((0.0, 1.0, 4.0, 8192), "factor = 0.0 must be"),
        ((8.0, 4.0, 4.0, 8192), "low_freq_factor = 4.0 must be"),
    ],
)
def test_rope_scaling_is_checked(scaling: tuple, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RopeScaling(*scaling)


def test_a_folder_and_its_config_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF))
    expected = replace(PRESETS["llama-3.1-8b"], name="my-llama")
    assert load_model(str(folder)) == load_model(str(folder / "config.json")) == expected


def test_toml_has_our_own_names(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    sizes = {key: value for key, value in asdict(PRESETS["tiny"]).items() if type(value) is int and value}
    path.write_text("\n".join(f"{key} = {value}" for key, value in sizes.items()))
    assert load_model(str(path)) == ModelConfig(**{"name": "small", **sizes})
    scaled = path.read_text() + "\n[rope_scaling]\nfactor = 8\nlow_freq_factor = 1\nhigh_freq_factor = 4\n"
    path.write_text(scaled + "original_max_seq_len = 64\n")
    assert load_model(str(path)).rope_scaling == RopeScaling(8, 1, 4, 64)
    path.write_text(scaled)
    with pytest.raises(ModelError, match=r"rope_scaling lacks original_max_seq_len"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "config.json: does not parse: "),
        ("config.json", "[]", "config.json: holds a list, not an object"),
        ("m.toml", "num_layers = ", "m.toml: does not parse: "),
        ("m.toml", "num_layer = 2", "m.toml: 'num_layer' is unknown; did you mean num_layers"),
        (
            "m.toml",
            "num_layers = 2\nd_model = 64",
            "m.toml lacks d_ff, num_heads, num_kv_heads, d_head, vocab_size",
        ),
    ],
)
def test_faulty_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ModelError) as caught:
        load_model(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file or directory"):
        load_model(str(tmp_path))


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"'llama-3-7b' is no preset and no path; did you mean llama-3-"):
        load_model("llama-3-7b")
    assert load_model("LLaMA-3-70B").name == "llama-3-70b"
