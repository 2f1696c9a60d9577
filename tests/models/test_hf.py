"""HF's config.json: read in the words of transformers 4 and 5, written back, and what is refused."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.families.table import FILES

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import RopeScaling
from meshwright.models.count import count_params
from meshwright.models.explained import explain_config
from meshwright.models.hf import from_hf, to_hf
from meshwright.models.layer_kinds import Window
from meshwright.models.presets import PRESETS, load_model

HF = FILES["llama-3.1-8b"]


def test_the_default_of_transformers_5_is_gpt_oss_120b() -> None:
    transformers = pytest.importorskip("transformers")
    assert from_hf(transformers.GptOssConfig().to_dict(), "gpt-oss-120b") == PRESETS["gpt-oss-120b"]


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(ModelError, match="tiny: no Hugging Face architecture has this combination"):
        to_hf(replace(PRESETS["tiny"], logit_softcap=30.0))


def test_how_weights_are_stored_is_no_part_of_the_model() -> None:
    config = FILES["gpt-oss-20b"] | {"quantization_config": {"quant_method": "mxfp4"}}
    assert from_hf(config, "gpt-oss-20b") == PRESETS["gpt-oss-20b"]


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
    taken = (
        r"^old: config\.json lacks keys, whose defaults hold: num_key_value_heads = 8, rms_norm_eps = 1e-06, "
        r"tie_word_embeddings = False, hidden_act = 'silu', rope_theta = 10000\.0$"
    )
    with pytest.warns(UserWarning, match=taken):
        config = from_hf(old, "old")
    assert (config.num_kv_heads, config.d_head, config.norm_eps, config.rope_theta) == (8, 64, 1e-6, 1e4)
    assert (config.tied_embeddings, config.rope_scaling) == (False, None)


def test_a_file_with_every_key_takes_no_default(recwarn: pytest.WarningsRecorder) -> None:
    """Under a family's own names of them; a base is in a key or, in transformers 5, in a table."""
    whole = {key: value for key, value in HF.items() if not key.startswith("rope_")}
    for rotary in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}):
        assert from_hf(whole | rotary, "llama-3.1-8b").rope_theta == 5e5
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"^llama-3\.1-8b: .* whose defaults hold: rope_theta = 10000\.0$"):
        from_hf(whole, "llama-3.1-8b")


def test_transformers_5_keeps_rotary_settings_in_one_table() -> None:
    new = {key: value for key, value in HF.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {"rope_theta": HF["rope_theta"]} | HF["rope_scaling"]
    assert from_hf(new, "llama-3.1-8b") == PRESETS["llama-3.1-8b"]


def test_missing_keys_are_named_at_once() -> None:
    config = {key: value for key, value in HF.items() if key not in ("hidden_size", "vocab_size")}
    with pytest.raises(ModelError) as caught:
        from_hf(config, "mine")
    assert str(caught.value) == "mine: config.json lacks hidden_size, vocab_size"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "mine: architecture T5ForConditionalGeneration is not supported; "
            "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, ",
        ),
        (
            {"architectures": None, "model_type": "mine", "type_vocab_size": 2},
            "mine: model_type 'mine' is not known. It would be read as llama (LLaMA 1 to 3.3) but for "
            "type_vocab_size = 2, which may change the model",
        ),
        ({"model_type": "clip", "text_config": {}}, "mine: model_type 'clip' is not supported"),
        ({"hidden_act": "mish"}, "mine: hidden_act = 'mish' is not supported; fits: 'silu', 'gelu_pytorch_"),
        ({"attention_bias": "yes"}, "mine: qkv_bias = 'yes' is not true or false"),
        ({"sliding_window": 4096}, "mine: sliding_window = 4096 is not supported; fits: None"),
        ({"rope_scaling": {"type": "ntk"}}, "mine: rope_type 'ntk' is not supported; fits: 'default'"),
        ({"rope_scaling": {"type": "linear"}}, "mine: rope scaling lacks factor"),
        ({"rope_scaling": {"factor": 4.0}}, "mine: rope scaling has factor = 4.0, but no rope_type"),
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


def test_a_model_of_an_unknown_type_is_read_as_the_family_with_its_keys() -> None:
    with pytest.warns(UserWarning, match="model_type 'mine' is not known; all its keys belong to llama"):
        assert from_hf(HF | {"architectures": None, "model_type": "mine"}, "mine") == from_hf(HF, "mine")


def test_squared_relu_is_read_without_a_gate() -> None:
    with pytest.warns(UserWarning, match="as which it is read"):
        config = from_hf(HF | {"architectures": None, "model_type": "mine", "hidden_act": "relu2"}, "mine")
    assert (config.activation, config.gated) == ("relu2", False)


def test_the_text_of_a_model_that_sees_is_read_by_its_own_type() -> None:
    qwen = FILES["qwen3-0.6b"]
    seeing = {"model_type": "mine", "text_config": qwen, "tie_word_embeddings": True}
    assert from_hf(seeing, "mine") == from_hf(qwen, "mine")


@pytest.mark.parametrize("table", ["llm_config", "language_config"])
def test_the_text_model_is_found_by_the_names_of_its_table(table: str) -> None:
    """InternVL's and DeepSeek-VL2's files, whose own classes are not known."""
    seeing = {"architectures": ["MineChat"], "model_type": "mine_chat", table: HF, "hidden_size": 1}
    assert from_hf(seeing, "mine") == from_hf(HF, "mine")


def test_a_flat_file_of_a_model_that_sees_is_read_as_its_text_model() -> None:
    """Qwen2-VL's on the hub."""
    plain = FILES["qwen2.5-7b"]
    seeing = plain | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": {"depth": 32, "embed_dim": 1280},
        "vision_start_token_id": 1,
        "image_token_id": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    assert from_hf(seeing, "mine").text == from_hf(plain, "mine")
    assert {line.verdict for line in explain_config(seeing, "mine").keys} == {"read", "ignored", "default"}


def test_a_text_model_may_leave_out_its_class_defaults() -> None:
    """As LLaVA-1.5's does: all sizes but the vocabulary are LLaMA-7B's."""
    text = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_064}
    config = from_hf({"model_type": "llava", "text_config": text}, "llava")
    assert count_params(config).total == 6_738_939_904


def test_a_value_may_stand_for_another_family() -> None:
    """DeepSeek-OCR's text model and DeepSeek-VL2's say DeepSeek-V2, and are DeepSeek-MoE and V3."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 1280, "intermediate_size": 6848, "vocab_size": 129_280}
    sizes |= {"num_attention_heads": 10, "max_position_embeddings": 8192, "moe_intermediate_size": 896}
    sizes |= {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
    text = sizes | {"architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1}
    ocr = from_hf({"model_type": "deepseek_vl_v2", "language_config": text | {"use_mla": False}}, "ocr")
    assert (ocr.family, ocr.mla, ocr.d_head) == ("deepseek", None, 128)
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    vl2 = from_hf(text | latent | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}, "vl2")
    assert vl2.family == "deepseek_v3" and vl2.moe is not None and vl2.moe.score == "sigmoid"


def test_the_layers_of_minimax_own_files() -> None:
    own = {
        "architectures": ["MiniMaxText01ForCausalLM"],
        "attn_type_list": [0, 0, 0, 1] * 2,
        "layernorm_mlp_alpha": 3.5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
    }
    kept = {key: HF[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    kept |= {"max_position_embeddings": 8192, "head_dim": 128, "model_type": "minimax_text_01"}
    assert from_hf(own | kept, "mine").mixers == ("state", "state", "state", "attention")


def test_a_file_whose_layers_all_attend_has_no_state() -> None:
    file = to_hf(PRESETS["lfm2-1.2b"]) | {"full_attn_idxs": [*range(16)], "layer_types": None}
    config = from_hf(file, "mine")
    assert config.short_convolution is None and config.mixers is None


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification", "LlamaForRewardModel"])
def test_a_class_with_another_head_is_read_by_its_type(name: str) -> None:
    file = HF | {"architectures": [name], "num_labels": 1, "id2label": {"0": "score"}}
    assert from_hf(file, "mine") == from_hf(HF, "mine")


def test_sizes_under_other_names_are_read_and_named() -> None:
    """LLaMA's own params.json, whose feed-forward is a multiple of 1024 wide."""
    sizes = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128_256}
    own = sizes | {"multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 5e5}
    with pytest.warns(UserWarning, match="n_layers is read as num_hidden_layers"):
        config = from_hf(own, "llama")
    assert count_params(config).total == count_params(PRESETS["llama-3-8b"]).total
    with pytest.raises(ModelError, match="dim = 4096 and hidden_size = 2048 contradict each other"):
        from_hf(own | {"hidden_size": 2048}, "llama")
    with pytest.raises(ModelError, match="multiple_of = 1024 and intermediate_size = 8192 contradict"):
        from_hf(own | {"intermediate_size": 8192}, "llama")


def test_unknown_keys_that_are_off_do_not_hide_a_family() -> None:
    odd = {"architectures": ["MineForCausalLM"], "model_type": "mine", "use_spin": False, "spin_scale": 1.0}
    with pytest.warns(UserWarning, match="as which it is read"):
        assert from_hf(HF | odd, "mine") == from_hf(HF, "mine")
    with pytest.raises(ModelError, match=r"but for spin_scale = 0\.5, use_spin = True, which may change"):
        from_hf(HF | odd | {"use_spin": True, "spin_scale": 0.5}, "mine")


def _changed(name: str, **changes: Any) -> ModelConfig:
    return from_hf(FILES[name] | changes, name)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen2.5-7b",
            {"use_sliding_window": True},
            "use_sliding_window = True is not supported; fits: False",
        ),
        ("qwen3-30b-a3b", {"mlp_only_layers": [3]}, "mlp_only_layers = [3] is not supported; fits: []"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 200}, "a token cannot go through 200 of 128 experts (E)"),
        ("mixtral-8x7b", {"num_local_experts": None}, "mixtral-8x7b: config.json lacks num_local_experts"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported; fits: 1"),
        ("deepseek-v3", {"qk_rope_head_dim": 63}, "rope_dim = 63 is odd"),
        ("deepseek-v3", {"first_k_dense_replace": 61}, "none of 61 layers has experts"),
        ("mpt-7b", {"attn_config": {"clip_qkv": 6}}, "clip_qkv = 6 is not supported; fits: None"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False is not supported; fits: True"),
        ("gpt2", {"n_embd": 770}, "hidden_size = 770 does not divide over num_attention_heads = 12"),
        (
            "gpt-oss-20b",
            {"layer_types": ["full_attention", "chunked_attention", "sliding_attention"]},
            "layer_types: 'chunked_attention' is not supported; fits: full_attention, sliding_attention",
        ),
    ],
)
def test_values_of_one_architecture(name: str, changes: dict, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        _changed(name, **changes)
    assert message in str(caught.value)


def test_lists_say_which_layers_of_llama_4_are_which() -> None:
    text = FILES["llama-4-maverick"]["text_config"]
    turned = from_hf(text | {"no_rope_layers": [1] * 48}, "mine")
    assert (turned.nope_every, turned.windows) == (0, (Window(8192, chunked=True),) * 48)
    every_second = from_hf(text | {"no_rope_layers": [1, 0] * 24, "moe_layers": [*range(1, 48, 2)]}, "mine")
    assert [layer.kind.turned for layer in every_second.layers] == [True, False] * 24
    assert from_hf(text | {"attn_temperature_tuning": False}, "mine").temperature_floor is None
    for listed in ({"no_rope_layers": [1, 0, 1, 1] * 12}, {"moe_layers": [0, 1]}):
        with pytest.raises(ModelError, match=f"{next(iter(listed))}.* is not supported; fits: "):
            from_hf(text | listed, "mine")


def test_layer_types_say_which_layers_are_local() -> None:
    local, whole = "sliding_attention", "full_attention"
    assert _changed("gemma-2-27b", layer_types=[local] * 46).global_every == 0
    assert _changed("gemma-2-27b", layer_types=[local, local, whole] * 15 + [local]).global_every == 3
    assert _changed("gemma-2-27b", layer_types=[whole] * 46).windows == (None,) * 46


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert _changed("mistral-7b-v0.1", sliding_window=32_768).sliding_window is None
    assert _changed("mistral-7b-v0.1", sliding_window=None).sliding_window is None
    without = {key: value for key, value in FILES["mistral-7b-v0.1"].items() if key != "sliding_window"}
    assert from_hf(without, "mistral").sliding_window == 4096


def test_rotary_forms() -> None:
    linear = _changed("qwen2.5-7b", rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.rope_scaling == RopeScaling(2.0, kind="linear")
    yarn = _changed("qwen2.5-7b", rope_scaling={"type": "yarn", "factor": 4.0})
    assert yarn.rope_scaling == RopeScaling(4.0, original_max_seq_len=131_072, kind="yarn")
    assert _changed("qwen2.5-7b", rope_scaling={"type": "dynamic", "factor": 4.0}).rope_scaling is not None
    assert _changed("phi-3-mini", partial_rotary_factor=0.75).rotary_dim == 72


def test_a_share_of_heads_that_a_class_would_not_read_is_refused() -> None:
    """LLaMA's class turns whole heads, whatever the key says; such a Phi-3 is written as a Phi-3."""
    with pytest.raises(ModelError, match=r"partial_rotary_factor = 0.5 is not supported; fits: 1.0"):
        _changed("llama-3.1-8b", partial_rotary_factor=0.5)
    assert to_hf(_changed("phi-3-mini", partial_rotary_factor=0.75))["model_type"] == "phi3"


def test_a_cap_written_null_is_off() -> None:
    assert _changed("gemma-2-27b", attn_logit_softcapping=None).attention_softcap is None
    without = {key: value for key, value in FILES["gemma-2-27b"].items() if "capping" not in key}
    assert from_hf(without, "gemma-2-27b") == PRESETS["gemma-2-27b"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 10**6) | st.floats() | st.text("a0-", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["factor", "rope_type", "full_attention", "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(
    st.sampled_from(list(FILES)).flatmap(lambda n: st.tuples(st.just(n), st.sampled_from([*FILES[n]]), _JSON))
)
def test_whatever_a_key_says_the_error_is_ours(changed: tuple[str, str, Any]) -> None:
    name, key, value = changed
    with suppress(ModelError):
        assert from_hf(FILES[name] | {key: value}, name).num_layers > 0


@pytest.mark.parametrize(
    ("key", "value"), [("residual_multiplier", 0.22), ("clip_qkv", 8.0), ("num_local_experts", 8)]
)
def test_a_key_that_would_make_it_another_model_is_refused(key: str, value: float) -> None:
    with pytest.raises(ModelError, match=f"mine: {key} = {value} changes what the model computes, and Llama"):
        from_hf(HF | {key: value}, "mine")


def test_a_key_that_says_what_is_so_anyway_is_read() -> None:
    assert from_hf(HF | {"residual_multiplier": 1.0}, "mine") == from_hf(HF, "mine")


@pytest.mark.parametrize(
    ("repository", "preset"),
    [
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.1-70b"),
        ("deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek-v3"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-3.1-24b"),
        ("CohereLabs/c4ai-command-a-03-2025", "command-a"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("Qwen/QwQ-32B", "qwen2.5-32b"),
        ("inclusionAI/Ring-1T", "ling-1t"),
        ("nvidia/Nemotron-H-8B-Base-8K", "nemotron-h-8b"),
        ("Qwen/Qwen3.6-27B", "qwen3.5-27b"),
    ],
)
def test_names_on_the_hub_are_presets(repository: str, preset: str) -> None:
    assert load_model(repository) == PRESETS[preset]


def test_every_preset_is_written_or_refused_in_a_line():
    """Also as the families of other kinds of models, which are tried one after another."""
    for name in PRESETS:
        with suppress(ModelError):
            assert to_hf(load_model(name))["model_type"]
