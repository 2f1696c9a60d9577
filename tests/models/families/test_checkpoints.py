"""Checkpoints of every family: transformers' logits, on one device and on a mesh, and written back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.families.case import PLAIN
from tests.models.families.table import TINY
from tests.nn import hf_models
from tests.nn.files.loaded import TOKENS, assert_same, f32, load, logits

from meshwright.errors import CheckpointError
from meshwright.models.model_files import read_model
from meshwright.nn.files.weights import save_hf

pytestmark = pytest.mark.sampled(4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray]]:
    """A model's folder and its logits, made when a test first asks for them. Not to be changed."""
    return Folders(tmp_path_factory.mktemp("hf"))


class Folders(dict[str, tuple[Path, np.ndarray]]):
    """Folders and logits by the kind of their model."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, kind: str) -> tuple[Path, np.ndarray]:
        folder = self.root / kind
        self[kind] = folder, hf_models.logits(hf_models.save(kind, folder), TOKENS)
        return self[kind]


def assert_close(found: np.ndarray, expected: np.ndarray, kind: str) -> None:
    tolerance = TINY[kind].tolerance * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def kinds(nightly: dict[str, bool]) -> list[Any]:
    """The cases by name; those that are true are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if slow else name for name, slow in nightly.items()]


@pytest.mark.parametrize("kind", kinds({kind: tiny.nightly for kind, tiny in TINY.items()}))
def test_logits_equal_transformers(folders, kind):
    folder, expected = folders[kind]
    params, config = load(folder, f32())
    assert_close(logits(params, config, f32()), expected, kind)


@pytest.mark.parametrize(
    "kind", kinds({kind: tiny.split == "nightly" for kind, tiny in TINY.items() if tiny.split})
)
def test_a_split_model_gives_the_same_logits(folders, kind):
    """Heads over tensor, D over fsdp, and of fused tensors each device its own part."""
    folder, expected = folders[kind]
    layout = f32("fsdp=2,kv_replicas=4" if read_model(folder).num_kv_heads == 1 else "fsdp=2,tensor=4")
    params, config = load(folder, layout)
    assert_close(logits(params, config, layout), expected, kind)


# The names of a family's tensors are one record, which reads files too: `make test` writes one of each form.
WRITTEN = (
    "qwen3", "gpt2", "gpt_neox", "mpt", "phi3", "gemma3", "cohere", "mixtral", "gpt_oss", "deepseek_v2",
    "qwen3_next", "nemotron_h", "bamba",
)  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    kinds({kind: tiny.nightly or kind not in WRITTEN for kind, tiny in TINY.items() if tiny.written}),
)
def test_transformers_loads_what_save_hf_writes(folders, tmp_path, kind):
    folder, expected = folders[kind]
    params, config = load(folder, f32("tensor=2"))
    save_hf(params, config, tmp_path)
    model = hf_models.load(tmp_path)
    assert type(model).__name__ == TINY[kind].written
    assert_close(hf_models.logits(model, TOKENS), expected, kind)
    again, _ = load(tmp_path, f32("tensor=2"))
    assert_same(again, params)


@pytest.mark.parametrize("kind", ["llama4", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_language_model_of_one_that_sees(folders, tmp_path, kind):
    """As Llama4ForConditionalGeneration's files have it, beside what sees."""
    from safetensors.numpy import load_file, save_file

    folder, expected = folders[kind]
    config = json.loads((folder / "config.json").read_text())
    seeing = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(seeing))
    tensors = load_file(folder / "model.safetensors")
    renamed: dict[str, Any] = {f"language_model.{name}": value for name, value in tensors.items()}
    renamed["multi_modal_projector.linear_1.weight"] = np.zeros((2, 2), np.float32)
    save_file(renamed, tmp_path / "model.safetensors")
    params, read = load(tmp_path, f32())
    assert_close(logits(params, read, f32()), expected, kind)


@pytest.mark.parametrize("kind", ["deepseek_v3", "yarn"])
def test_layers_that_predict_further_tokens_are_passed_over(folders, tmp_path, kind):
    """DeepSeek-V3's files have one after the last; LLaMA's have none, so there it is an error."""
    from safetensors.numpy import load_file, save_file

    folder, _ = folders[kind]
    tensors = load_file(folder / "model.safetensors")
    more = {"model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    if kind == "deepseek_v3":
        assert_same(load(tmp_path, f32())[0], load(folder, f32())[0])
    else:
        with pytest.raises(CheckpointError, match=r"holds model\.layers\.3\.eh_proj\.weight, which"):
            load(tmp_path, f32())


def _as_on_the_hub(name: str) -> str:
    """The name in DeepSeek-V4's published files of a tensor named as in files of transformers."""
    parts = {f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}
    short = parts | {"model.embed_tokens.weight": "embed.weight"}
    return short.get(name, name.removeprefix("model.")).replace(".attn.norm.", ".attn.kv_norm.")


@pytest.mark.slow
def test_deepseek_v4_as_the_hub_names_it(folders, tmp_path):
    """Without the prefix, with short names of the parts outside of layers, and with a draft head."""
    from safetensors.numpy import load_file, save_file

    folder, _ = folders["deepseek_v4"]
    tensors = load_file(folder / "model.safetensors")
    renamed: dict[str, Any] = {_as_on_the_hub(name): value for name, value in tensors.items()}
    more = {"mtp.0.norm.weight": np.zeros(2, np.float32)}
    save_file(renamed | more, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert_same(load(tmp_path, f32())[0], load(folder, f32())[0])


# The numbers of 4 bits in the order of their codes, as the published inference/convert.py lists them.
_FOUR_BITS = np.array([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "fsdp=2,expert=2,kv_replicas=2"])
def test_deepseek_v4_as_the_hub_quantises_it(tmp_path, layout):
    """Experts in 4 bits with a scale for 32 inputs, other matrices in fp8 with a scale for each block."""
    import ml_dtypes
    from safetensors.numpy import load_file, save_file

    source, wide, hub = (tmp_path / name for name in ("source", "wide", "hub"))
    narrow = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 32)
    hf_models.save("deepseek_v4", source, **narrow)
    random, tensors = np.random.default_rng(0), load_file(source / "model.safetensors")
    plain: dict[str, np.ndarray] = dict(tensors)
    stored: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        scale, (rows, columns) = name.replace(".weight", ".scale"), (*value.shape, 1, 1)[:2]
        if ".experts." in name:
            codes, powers = (
                random.integers(0, 16, (rows, columns)),
                random.integers(-9, -5, (rows, columns // 32)),
            )
            plain[name] = (_FOUR_BITS[codes] * np.repeat(2.0**powers, 32, axis=1)).astype(np.float32)
            stored[name] = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
        elif ".compressor." not in name and any(
            part in name for part in (".wq_", ".wkv.", ".wo_", ".shared_")
        ):
            powers = random.integers(-4, 1, (-(-rows // 16), -(-columns // 16)))
            stored[name] = value.astype(ml_dtypes.float8_e4m3fn)
            spread = np.repeat(np.repeat(2.0**powers, 16, axis=0)[:rows], 16, axis=1)[:, :columns]
            plain[name] = (stored[name].astype(np.float32) * spread).astype(np.float32)
        else:
            stored[name] = value
            continue
        stored[scale] = (2.0**powers).astype(ml_dtypes.float8_e8m0fnu)
    config = json.loads((source / "config.json").read_text())
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 16]}
    for folder, content, more in (
        (wide, plain, {}),
        (hub, stored, {"quantization_config": quantised, "expert_dtype": "fp4"}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | more))
        save_file({_as_on_the_hub(name): x for name, x in content.items()}, folder / "model.safetensors")
    assert sum(name.endswith(".scale") for name in stored) == 5 * (8 * 3 + 3 + 5) + 2
    assert_same(load(hub, f32(layout))[0], load(wide, f32(layout))[0])


def _same(name: str, _: dict[str, Any]) -> tuple[str, None]:
    return name, None


def _with_names(name: str, short: dict[str, str]) -> str:
    """A tensor's name with each of these parts in a family's own words."""
    for old, new in short.items():
        name = name.replace(old, new)
    return name


def _joined(name: str, tensors: dict[str, Any]) -> np.ndarray | None:
    """Queries, keys and values as one array, if this is the queries' tensor."""
    if ".q_proj." not in name:
        return None
    return np.concatenate([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])


def _of_internlm2(name: str, tensors: dict[str, Any]) -> tuple[str, np.ndarray | None]:
    """Its queries, keys and values are one array: for each KV head its queries, key and value."""
    short = {
        "embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "mlp.gate_proj":
        "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    }  # fmt: skip
    if ".q_proj." in name:
        q, k, v = (tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv")
        width, num_kv_heads = q.shape[1], 4
        heads = [x.reshape(num_kv_heads, -1, width) for x in (q, k, v)]
        return name.replace("self_attn.q_proj", "attention.wqkv"), np.concatenate(heads, 1).reshape(-1, width)
    return _with_names(name, short), None


def _of_exaone(name: str, _: dict[str, Any]) -> tuple[str, None]:
    short = {
        "model.embed_tokens": "transformer.wte", "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn": "attn.attention",
        "o_proj": "out_proj", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
    }  # fmt: skip
    return _with_names(name, short), None


def _of_qwen(name: str, tensors: dict[str, Any]) -> tuple[str, np.ndarray | None]:
    short = {
        "model.embed_tokens": "transformer.wte", "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj",
        "up_proj": "w1", "gate_proj": "w2", "down_proj": "c_proj", "self_attn.q_proj": "attn.c_attn",
    }  # fmt: skip
    return _with_names(name, short), _joined(name, tensors)


def _of_chatglm(name: str, tensors: dict[str, Any]) -> tuple[str, np.ndarray | None]:
    short = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.layers": "transformer.encoder.layers",
        "model.norm": "transformer.encoder.final_layernorm", "lm_head": "transformer.output_layer",
        "self_attn.q_proj": "self_attention.query_key_value", "self_attn.o_proj": "self_attention.dense",
        "gate_up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h",
    }  # fmt: skip
    return _with_names(name, short), _joined(name, tensors)


def _of_ling(name: str, tensors: dict[str, Any]) -> tuple[str, np.ndarray | None]:
    short = {
        "model.embed_tokens": "model.word_embeddings", "self_attn.q_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm", "e_score_correction_bias": "expert_bias",
    }  # fmt: skip
    return _with_names(name, short), _joined(name, tensors)


# ChatGLM's file has names of its own for all sizes.
_CHATGLM = {
    "model_type": "chatglm", "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "kv_channels": 8,
    "num_attention_heads": 8, "multi_query_attention": True, "multi_query_group_num": 4, "rope_ratio": 0.01,
    "padded_vocab_size": 64, "seq_length": 64, "layernorm_epsilon": 0.00000015625, "add_qkv_bias": True,
    "original_rope": True,
}  # fmt: skip
_LING = {
    "model_type": "bailing_moe", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 3, "vocab_size": 64, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 8,
    "norm_topk_prob": True, "use_qk_norm": True, "tie_word_embeddings": False, "norm_head": False,
}  # fmt: skip
_BAICHUAN = {
    "model_type": "baichuan", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8,
    "num_hidden_layers": 3, "vocab_size": 64, "model_max_length": 64, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
# Types whose config.json has all keys of the test's row, and no other.
_OWN_KEYS = ("baichuan", "qwen", "chatglm", "bailing_moe", "bailing_moe_v2")


def _of_baichuan(name: str, tensors: dict[str, Any]) -> tuple[str, np.ndarray | None]:
    return name.replace("q_proj", "W_pack"), _joined(name, tensors)


def _stored(tensors: dict[str, Any], renamed: Any, *, is_joined: bool) -> dict[str, np.ndarray]:
    """The tensors by a family's names. is_joined: keys and values are in the tensor of the queries."""
    stored = {}
    for name in tensors:
        new, value = renamed(name, tensors)
        if not (is_joined and (".k_proj." in name or ".v_proj." in name)):
            stored[new] = np.ascontiguousarray(tensors[name] if value is None else value)
    return stored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("like", "more", "renamed", "keys"),
    [
        ("grouped", {}, _of_internlm2, {"model_type": "internlm2"}),
        ("grouped", {}, _same, {"model_type": "internlm3"}),
        ("ungrouped", {"attention_bias": True}, _same, {"model_type": "internlm", "bias": True}),
        (
            "stretched",
            {"tie_word_embeddings": False},
            _of_exaone,
            {"model_type": "exaone", "num_layers": 3, "layer_norm_epsilon": 1e-6},
        ),
        (
            "qwen2",
            {"num_key_value_heads": 8},
            _of_qwen,
            {
                "model_type": "qwen", "intermediate_size": 96, "kv_channels": 6, "rotary_emb_base": 10_000.0,
                "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 8, "vocab_size": 64,
                "seq_length": 64,
            },
        ),
        (
            "glm",
            {"attention_bias": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
            _of_chatglm,
            _CHATGLM,
        ),
        (
            "ungrouped",
            {"head_dim": 4},
            _of_baichuan,
            _BAICHUAN | {"max_position_embeddings": 64, "rope_theta": 10_000.0},
        ),
        (
            "qwen3_moe",
            {"rope_parameters": PLAIN, "norm_topk_prob": True},
            _of_ling,
            _LING | {"rope_theta": 100.0, "head_dim": 6},
        ),
        (
            "glm4_moe",
            {"attention_bias": False, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6},
            _of_ling,
            _LING
            | {
                "model_type": "bailing_moe_v2", "head_dim": 8, "num_shared_experts": 1, "n_group": 2,
                "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
                "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
                "partial_rotary_factor": 0.5, "moe_shared_expert_intermediate_size": 24,
            },
        ),
    ],
    ids=["internlm2", "internlm3", "internlm1", "exaone", "qwen", "chatglm", "baichuan", "ling1", "ling2"],
)  # fmt: skip
def test_models_whose_repositories_bring_their_code(tmp_path, like, more, renamed, keys):
    """Without code in transformers, they compute what a model of it computes from tensors of other names."""
    from safetensors.numpy import load_file, save_file

    source, own = tmp_path / "source", tmp_path / "own"
    expected = hf_models.logits(hf_models.save(like, source, **more), TOKENS)
    is_joined = keys["model_type"] in ("internlm2", *_OWN_KEYS)
    own.mkdir()
    tensors = load_file(source / "model.safetensors")
    save_file(_stored(tensors, renamed, is_joined=is_joined), own / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | keys
    of_source = {"architectures", "attention_bias", "mlp_bias", "pretraining_tp"}
    if keys["model_type"] == "exaone":
        of_source |= {"num_hidden_layers", "hidden_act", "rms_norm_eps"}
    config = (
        keys if keys["model_type"] in _OWN_KEYS else {k: v for k, v in config.items() if k not in of_source}
    )
    (own / "config.json").write_text(json.dumps(config))
    for layout in (f32(), f32("fsdp=2,tensor=4")):
        params, read = load(own, layout)
        assert_close(logits(params, read, layout), expected, "qwen2")


@pytest.mark.slow
def test_baichuan_13b_has_alibi(tmp_path):
    """LLaMA without turned heads, and a mask that falls linearly with the distance, by head."""
    import torch
    from safetensors.numpy import load_file, save_file

    source, own = tmp_path / "source", tmp_path / "own"
    model = hf_models.save("ungrouped", source, head_dim=4)
    num_heads, tokens = 8, torch.tensor(TOKENS)
    at = torch.arange(tokens.shape[1])
    distance = at[:, None] - at
    slopes = 2.0 ** -torch.arange(1, num_heads + 1)
    mask = torch.where(distance >= 0, -slopes[:, None, None] * distance, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(
            tokens,
            attention_mask=mask.expand(len(tokens), -1, -1, -1),
            position_ids=torch.zeros_like(tokens),
        ).logits.numpy()
    own.mkdir()
    tensors = load_file(source / "model.safetensors")
    save_file(_stored(tensors, _of_baichuan, is_joined=True), own / "model.safetensors")
    (own / "config.json").write_text(json.dumps(_BAICHUAN))
    for layout in (f32(), f32("fsdp=2,tensor=4")):
        params, read = load(own, layout)
        assert_close(logits(params, read, layout), expected, "qwen2")


def test_gpt_oss_as_it_stands_on_the_hub(tmp_path):
    """Its experts in mxfp4."""
    from safetensors.numpy import load_file, save_file

    hf_models.save("gpt_oss", tmp_path, intermediate_size=64)
    file, random = tmp_path / "model.safetensors", np.random.default_rng(0)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, num_in, num_out = tensors.pop(name).shape
        shape = experts, num_out, num_in // 32
        tensors[f"{name}_blocks"] = random.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{name}_scales"] = random.integers(120, 126, shape, np.uint8)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    # Without `dequantize` transformers asks for accelerate.
    quantised = {"quant_method": "mxfp4", "dequantize": True}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    expected = hf_models.logits(hf_models.load(tmp_path).float(), TOKENS)
    for layout in (f32(), f32("fsdp=2,expert=2,tensor=2")):
        params, read = load(tmp_path, layout)
        assert_close(logits(params, read, layout), expected, "gpt_oss")


def test_gpt2_as_it_stands_on_the_hub(folders, tmp_path):
    """Without the prefix, and with the causal masks of old exports."""
    from safetensors.numpy import load_file, save_file

    folder, expected = folders["gpt2"]
    tensors = load_file(folder / "model.safetensors")
    renamed: dict[str, Any] = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    save_file(
        renamed | {"h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    params, config = load(tmp_path, f32())
    assert_close(logits(params, config, f32()), expected, "gpt2")
