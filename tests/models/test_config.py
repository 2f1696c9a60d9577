"""ModelConfig: what it refuses, and how it is read from a TOML and from a folder."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.models.families.table import FILES

from meshwright.errors import ModelError
from meshwright.layout import Layout
from meshwright.layout.runnable import why_not
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MLA, MoE, RopeScaling
from meshwright.models.hf import to_hf
from meshwright.models.layer_kinds import Window
from meshwright.models.model_files import config_json
from meshwright.models.presets import PRESETS, load_model

HF = FILES["llama-3.1-8b"]


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ((0.0, 1.0, 4.0, 8192), "factor = 0.0 must be"),
        ((8.0, 5.0, 4.0, 8192), "low_freq_factor = 5.0 must be"),
    ],
)
def test_rope_scaling_is_checked(scaling: tuple, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        RopeScaling(*scaling)


def test_a_model_that_hugging_face_has_not_is_written_in_our_own_form(tmp_path: Path) -> None:
    config = replace(PRESETS["phi-3.5-mini"], layers_per_cache=2)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config) | {"eos_token_id": 0}))
    assert load_model(str(tmp_path)) == config
    assert config_json(PRESETS["tiny"]) == to_hf(PRESETS["tiny"])


@pytest.mark.parametrize("given", [{}, {"short_factor": (1.0,) * 48}, {"long_factor": (1.0,) * 48}])
def test_longrope_needs_both_lists_of_factors(given: dict) -> None:
    with pytest.raises(ModelError, match="lacks short_factor or long_factor, which kind 'longrope' needs"):
        RopeScaling(32.0, original_max_seq_len=4096, kind="longrope", **given)


def test_longrope_has_a_factor_for_each_frequency() -> None:
    """Heads of 96 have 48 pairs."""
    config = PRESETS["phi-3.5-mini"]
    assert config.rope_scaling is not None
    few = replace(config.rope_scaling, long_factor=(1.0,) * 32)
    with pytest.raises(ModelError, match="32 numbers in long_factor; fits: one for each of the 48 pairs"):
        replace(config, rope_scaling=few)


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
    with pytest.raises(ModelError, match=r"'llama-3-7b' is neither a preset nor a path; did you mean"):
        load_model("llama-3-7b")
    assert load_model("LLaMA-3-70B").name == "llama-3-70b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "batch"}, "tiny: norm = 'batch' is not supported; fits: rms, layer"),
        ({"activation": "swiglu"}, "tiny: activation = 'swiglu' is not supported; fits: silu, gelu"),
        ({"sliding_window": 0}, "tiny: sliding_window = 0 must be a positive whole number"),
        ({"sliding_window": 8, "attention_chunk": 8}, "local layers see a chunk or a window; leave one out"),
        ({"nope_every": 2, "positions": "alibi"}, "tiny: nope_every = 2 is for rotary positions without"),
        ({"global_every": -1}, "tiny: global_every = -1 must be a whole number of at least 0"),
        ({"query_scale": float("nan")}, "tiny: query_scale = nan must be a number above 0"),
        ({"gated": 1}, "tiny: gated = 1 is not true or false"),
        ({"rotary_dim": 18}, "tiny: rotary_dim = 18 must be even and at most d_head = 16"),
        ({"mla": MLA(8, 8, 4, 8)}, "tiny: d_head = 16 must be mla.nope_dim + mla.rope_dim = 8 + 4 = 12"),
        (
            {"mla": MLA(8, 8, 8, 8)},
            "tiny: num_kv_heads = 4, but latent attention has one per query head",
        ),
        ({"moe": MoE(4, 2, 8, num_dense_layers=2)}, "tiny: none of 2 layers has experts"),
    ],
)
def test_a_config_that_makes_no_model(changes: dict, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        replace(PRESETS["tiny"], **changes)
    assert message in str(caught.value)


def test_nested_tables_of_a_toml(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    sizes = {key: value for key, value in asdict(PRESETS["tiny"]).items() if type(value) is int and value}
    lines = [f"{key} = {value}" for key, value in sizes.items()]
    path.write_text("\n".join([*lines, "[moe]", "num_experts = 8", "experts_per_token = 2", "d_ff = 32"]))
    assert load_model(str(path)).moe == MoE(8, 2, 32)
    path.write_text("\n".join([*lines, "[moe]", "experts = 8"]))
    with pytest.raises(ModelError, match=r"mixed.toml: \[moe\]: 'experts' is unknown; did you mean"):
        load_model(str(path))


def test_which_layers_are_dense_and_which_local() -> None:
    """Experts in every second layer but the first two; of the attention each third sees all."""
    config = replace(PRESETS["tiny"], num_layers=6, moe=MoE(8, 2, 32, num_dense_layers=2, every=2))
    assert config.num_dense_layers == 4
    local = replace(PRESETS["tiny"], num_layers=6, sliding_window=16, global_every=3)
    assert local.windows == (Window(16), Window(16), None) * 2


def test_the_model_of_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    (tmp_path / "own.toml").write_text(text.partition("```toml\n")[2].partition("```")[0])
    config = load_model(str(tmp_path / "own.toml"))
    assert config.moe is not None and config.moe.d_ff == 1536
    assert config.windows[:4] == (Window(4096), Window(4096), Window(4096), None)


def test_compressed_keys_of_several_heads_are_planned_only() -> None:
    """`mw model` compares caches with a KV head for each query head."""
    config = replace(PRESETS["deepseek-v4-flash"], num_kv_heads=64)
    assert why_not(config, Layout.of()) == "compressed keys of 64 KV heads"
    assert why_not(PRESETS["deepseek-v4-flash"], Layout.of()) is None
