"""config.json of every family: read as published, written back, and counted as transformers counts."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models.families.table import COUNTED, FILES

from meshwright.errors import ModelError
from meshwright.layout.runnable import model_lacks
from meshwright.models import families
from meshwright.models.config_tables import RopeScaling
from meshwright.models.count import count_params, forward_flops, kv_cache_bytes, mixer_state_bytes, mtp_params
from meshwright.models.hf import from_hf, to_hf
from meshwright.models.presets import PRESETS

PUBLISHED = {
    name: preset
    for family in families.families()
    for release in family.releases
    for name, preset in release.models.items()
}
# A model whose family is only planned, or with weights that only plans know, has no written form.
WRITTEN = [
    name
    for name, config in PRESETS.items()
    if families.load_family(str(config.family)).is_written and not config.extras
]
_UNITS = {"B": 1e9, "M": 1e6}
# They are counted as the other sizes of their tables, or were published with their vision towers.
_UNCOUNTED = {"demo", "tiny", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b", "phi-3.5-mini"}
_UNCOUNTED |= {"ministral-3-3b", "ministral-3-8b", "ministral-3-14b", "glm-4.7-flash", "k-exaone-236b-a23b"}
_UNCOUNTED |= {"granite-3.3-2b", "granite-3.3-8b", "granite-3.1-1b-a400m", "granite-3.1-3b-a800m"}
_UNCOUNTED |= {"ernie-4.5-vl-28b-a3b", "helium-1-2b", "kolibri-1", "gemma-4-e2b", "step-3.5-flash"}
_UNCOUNTED |= {"qwen2.5-vl-7b", "qwen2.5-vl-72b", "qwen3-vl-30b-a3b", "qwen3-vl-235b-a22b", "glm-4.7"}
_UNCOUNTED |= {"gpt-3-medium", "gpt-3-large", "glm-4.5", "glm-4.5-air", "glm-4.6"}


def test_each_file_is_one_family_with_cases() -> None:
    names = [
        path.stem for path in Path(families.__file__).parent.glob("*.py") if "\nFAMILY = " in path.read_text()
    ]
    cases = [path.stem for path in Path(__file__).with_name("cases").glob("*.py")]
    assert sorted(names) == sorted(cases) == sorted(family.name for family in families.families())
    files = Path(families.__file__).parent.glob("*.toml")
    keys = {path.stem: set(tomllib.loads(path.read_text(encoding="utf-8"))) for path in files}
    assert set(keys) == {family.name for family in families.families() if family.releases}
    assert set().union(*keys.values()) == {"releases", "shared"}


@pytest.mark.parametrize("name", FILES)
def test_files_of_the_hub(name: str) -> None:
    """Every key is known (a warning would be an error), and the preset says the same."""
    config = from_hf(FILES[name], name)
    assert config.text == PRESETS[name]
    assert config.family == PRESETS[name].family


@pytest.mark.parametrize("name", WRITTEN)
def test_the_written_form_reads_back(name: str) -> None:
    config = PRESETS[name]
    assert from_hf(json.loads(json.dumps(to_hf(config))), name) == replace(config.text, unquantised=())


@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_reads_the_written_form(name: str) -> None:
    """And writes it again with the keys of its own version, 5."""
    transformers = pytest.importorskip("transformers")
    written = to_hf(PRESETS[name])
    (class_name,) = written.pop("architectures")
    kind = transformers.CONFIG_MAPPING[written["model_type"]]  # the class of a model itself needs torch
    assert hasattr(transformers, class_name)
    theirs = kind(**{key: value for key, value in written.items() if key != "model_type"})
    assert from_hf(theirs.to_dict() | {"architectures": [class_name]}, name) == replace(
        PRESETS[name].text, unquantised=()
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name: str) -> None:
    """To the unit, or to the digits that are printed; of the active ones within 3%.

    Reports do not agree on whether embeddings are active.
    """
    count, preset = count_params(PRESETS[name]), PUBLISHED[name]
    assert (preset.params is None) == (name in _UNCOUNTED)
    if isinstance(preset.params, int):
        assert count.total == preset.params
    elif preset.params is not None:
        digits = len(preset.params[:-1].partition(".")[2])
        assert round(count.total / _UNITS[preset.params[-1]], digits) == float(preset.params[:-1])
    if preset.active is not None:
        assert count.active == pytest.approx(float(preset.active[:-1]) * _UNITS[preset.active[-1]], rel=0.03)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen2.5-vl-7b", 8_292_166_656),
        ("qwen2.5-vl-72b", 73_410_777_344),
        ("qwen3-vl-30b-a3b", 31_070_754_032),
    ],
)
def test_published_parameters_with_towers(name: str, published: int) -> None:
    assert count_params(PRESETS[name]).total + PRESETS[name].tower_params == published


def test_the_modules_for_further_tokens_are_counted_apart() -> None:
    """DeepSeek-V3's files hold 684.5 billion, with copies of the embedding and the output projection."""
    config = from_hf(FILES["deepseek-v3"], "deepseek-v3")
    more = mtp_params(config) + 2 * config.vocab_size * config.d_model
    assert round((count_params(config).total + more) / 1e9, 1) == 684.5
    assert mtp_params(PRESETS["llama-3-8b"]) == 0


@pytest.mark.parametrize(("name", "billions", "more"), [("glm-4.5", 355, 1), ("glm-4.5-air", 106, 0)])
def test_glm_is_counted_without_its_vocabulary(name: str, billions: int, more: int) -> None:
    """The larger with the module that predicts a second token: a layer and a matrix [2D, D] more."""
    config = PRESETS[name]
    count = count_params(replace(config, num_layers=config.num_layers + more))
    assert round((count.total - count.vocab + more * 2 * config.d_model**2) / 1e9) == billions


@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_counts_the_same(name: str) -> None:
    """The same numbers built by transformers on the meta device, to the unit.

    There the biases that only choose experts (DeepSeek-V3, LFM2) are no parameters, since no gradient reaches
    them.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = _hf_model(transformers, name)
    chosen_by = ("e_score_correction_bias", "expert_bias")
    biases = sum(b.numel() for path, b in model.named_buffers() if path.endswith(chosen_by))
    assert count_params(PRESETS[name]).total == model.num_parameters() + biases


@pytest.mark.parametrize("model_type", COUNTED)
def test_transformers_counts_families_without_a_written_form_the_same(model_type: str) -> None:
    """And their shapes can be planned: each has FLOPs and a cache or a state."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    theirs = transformers.CONFIG_MAPPING[model_type]
    made = theirs(**COUNTED[model_type])
    whole = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    with torch.device("meta"):
        model = getattr(transformers, whole)(made) if whole else transformers.AutoModel.from_config(made)
    not_trained = ("e_score_correction_bias", "tid2eid")
    biases = sum(b.numel() for path, b in model.named_buffers() if path.endswith(not_trained))
    # The text model of a larger one has its output projection outside.
    head = 0 if whole or made.tie_word_embeddings else made.vocab_size * made.hidden_size
    listed = {"architectures": [type(model).__name__]} if whole else {}
    config = from_hf(made.to_dict() | listed, model_type)
    assert count_params(config).total == model.num_parameters() + biases + head
    assert model_lacks(config) or not families.load_family(str(config.family)).is_written
    for flops in (forward_flops(config, 4096).total, forward_flops(config, 4096, causal=False).total):
        assert flops > 2 * (count_params(config).active - count_params(config).vocab)
    assert kv_cache_bytes(config, 4096) + mixer_state_bytes(config) > 0


def test_the_text_model_of_a_larger_one_is_read() -> None:
    """Llama 3.2 Vision's, counted as transformers counts it; and Qwen's that speaks, by its thinker."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = transformers.MllamaConfig()
    with torch.device("meta"):
        model = transformers.MllamaForCausalLM(made.text_config)
    assert count_params(from_hf(made.to_dict(), "mllama")).total == model.num_parameters()
    seeing = transformers.Ernie4_5_VLMoeConfig()
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(seeing)
    ernie, count = from_hf(seeing.to_dict(), "ernie"), model.language_model.num_parameters()
    assert count_params(ernie).total == count and count_params(ernie).active < count / 8
    assert ernie.tower_params == model.num_parameters() - count
    omni = transformers.Qwen2_5OmniConfig().to_dict()
    text = from_hf(omni, "omni")
    assert (text.family, text.num_layers) == ("qwen2", 28)


def test_blocks_of_several_shapes_are_counted() -> None:
    """Llama Nemotron's, counted by hand: a layer, one without attention, only attention, a matrix for it."""

    def block(kv_group: int | None, mult: float | None, *, linear: bool = False) -> dict[str, Any]:
        attends = kv_group is not None or linear
        attention = {"n_heads_in_group": kv_group, "no_op": not attends, "replace_with_linear": linear}
        return {"attention": attention, "ffn": {"ffn_mult": mult, "no_op": mult is None}}

    blocks = [block(8, 5.25), block(None, 1.3125), block(16, None), block(None, 5.25, linear=True)]
    config = from_hf(
        {
            "architectures": ["DeciLMForCausalLM"],
            "model_type": "nemotron-nas",
            "num_hidden_layers": 4,
            "hidden_size": (width := 8192),
            "num_attention_heads": 64,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "block_configs": blocks,
        },
        "nemotron",
    )
    of_attention = [width + 2 * width**2 + 2 * width * heads * 128 for heads in (8, 4)]
    of_mlp = [width + 3 * width * d_ff for d_ff in (28_672, 7168, 28_672)]
    rest = 2 * 128_256 * width + width + width + width**2
    assert count_params(config).total == sum(of_attention) + sum(of_mlp) + rest
    assert kv_cache_bytes(config, 1) == 2 * 2 * 128 * (8 + 4)


def _hf_model(transformers: Any, name: str) -> Any:
    preset = PRESETS[name]
    if preset.rope_theta_local == preset.rope_theta:  # only global layers are stretched
        preset = replace(preset, rope_theta_local=None)
    if not preset.nope_every:  # a temperature is part of the stretching
        preset = replace(preset, temperature_floor=None, temperature_slope=0.1)
    written = to_hf(replace(preset, rope_scaling=None))
    model = getattr(transformers, written.pop("architectures")[0])
    return model(model.config_class(**{key: value for key, value in written.items() if key != "model_type"}))


def test_a_thinker_config_that_is_no_table_is_refused() -> None:
    with pytest.raises(ModelError, match="thinker_config = 5 must be"):
        from_hf({"model_type": "llama", "thinker_config": 5}, "omni")


def test_codegen_needs_heads_for_the_four_groups_of_its_files() -> None:
    written = {"model_type": "codegen", "n_embd": 96, "n_layer": 2, "n_positions": 64, "vocab_size": 64}
    written |= {"rotary_dim": 4}
    assert from_hf(written | {"n_head": 8}, "coder").num_heads == 8
    with pytest.raises(ModelError, match=r"n_head = 6 does not divide .*; fits: a multiple of 4"):
        from_hf(written | {"n_head": 6}, "coder")


@pytest.mark.parametrize(("version", "base", "divisor"), [(2, 10_000.0, 4), (3, 40_000.0, None)])
def test_chatglm_2_divides_positions_and_chatglm_3_multiplies_their_base(
    version: int, base: float, divisor: int | None
) -> None:
    written = {"model_type": "chatglm", "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48}
    written |= {"num_attention_heads": 8, "padded_vocab_size": 64, "seq_length": 64, "original_rope": True}
    written |= {"_name_or_path": f"THUDM/chatglm{version}-6b-32k", "rope_ratio": 4}
    config = from_hf(written, "glm")
    scaling = RopeScaling(divisor, kind="linear") if divisor else None
    assert (config.rope_theta, config.rope_scaling) == (base, scaling)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"compress_ratios": [0, 4, 100]}, "compress_ratios has 100; fits: 0, 4, 128"),
        ({"layer_types": ["sliding_attention", "other", "other"]}, "layer_types has 'other'"),
        ({"layer_types": ["sliding_attention"]}, "1 kinds of attention for 3 layers"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types has 1 kinds; fits: 3"),
    ],
)
def test_deepseek_v4_has_known_kinds_for_every_layer(changed: dict[str, Any], said: str) -> None:
    written = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
    written |= {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 8, "head_dim": 64}
    written |= {
        "max_position_embeddings": 512,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
    }
    assert len(from_hf(written, "v4").layers) == 3
    if "layer_types" in changed:
        del written["compress_ratios"]
    with pytest.raises(ModelError, match=said):
        from_hf(written | changed, "v4")


@pytest.mark.slow
def test_longcat_flash_is_counted_without_weights_of_experts_that_compute_nothing() -> None:
    """Transformers makes gate_up_proj, but not down_proj, also for experts that return their input."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = transformers.CONFIG_MAPPING["longcat_flash"](num_layers=2, n_routed_experts=16, zero_expert_num=8)
    with torch.device("meta"):
        model = transformers.LongcatFlashForCausalLM(made)
    biases = sum(b.numel() for path, b in model.named_buffers() if path.endswith("e_score_correction_bias"))
    never_used = 2 * made.num_layers * made.zero_expert_num * made.hidden_size * made.expert_ffn_hidden_size
    config = from_hf(made.to_dict() | {"architectures": [type(model).__name__]}, "longcat")
    assert count_params(config).total == model.num_parameters() + biases - never_used
