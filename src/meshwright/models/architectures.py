"""The meaning of each key of a Hugging Face `config.json`, by architecture; `models/hf.py` reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Key:
    """A key, its other names, and what it means where it is absent; a needed one must be there.

    null_is_none: null turns the thing off, where otherwise it means the same as absence.
    """

    name: str
    default: Any = None
    needed: bool = False
    also: tuple[str, ...] = ()
    null_is_none: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)


@dataclass(frozen=True)
class Architecture:
    """One HF model class. also_named: what files of the hub call it besides.

    keys, moe, mla: the key of each field of ModelConfig, MoE and MLA that the file sets. traits: the fields
    that the class itself settles. fixed: keys that must have one of these values, absent meaning the first.
    fixed_in: the same of tables within the file. ignored: keys without effect on shapes or mathematics.
    read_apart: keys that models/hf.py reads by itself. local_layers: whether `sliding_window` counts;
    global_every: where no key says it. chunked: local layers see chunks, and layers without rotary positions
    all. rope_theta: where no key says it.
    """

    class_name: str
    model_type: str
    keys: Mapping[str, Key]
    traits: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed_in: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    read_apart: tuple[str, ...] = ()
    moe: Mapping[str, Key | int | bool | str] = field(default_factory=dict)
    mla: Mapping[str, Key] = field(default_factory=dict)
    local_layers: bool = False
    chunked: bool = False
    default_window: int | None = None
    global_every: int = 0
    rope_theta: float = 10_000.0
    also_named: str | None = None


def _needed(name: str, *also: str) -> Key:
    return Key(name, needed=True, also=also)


_SIZES = {
    "num_layers": _needed("num_hidden_layers"),
    "d_model": _needed("hidden_size"),
    "d_ff": _needed("intermediate_size"),
    "num_heads": _needed("num_attention_heads"),
    "vocab_size": _needed("vocab_size"),
    "max_seq_len": _needed("max_position_embeddings"),
    "num_kv_heads": Key("num_key_value_heads"),
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "tied_embeddings": Key("tie_word_embeddings", False),
    "activation": Key("hidden_act", "silu"),
}
_LLAMA = _SIZES | {"d_head": Key("head_dim")}
_ATTENTION_BIAS = {
    "qkv_bias": Key("attention_bias", False),
    "attention_out_bias": Key("attention_bias", False),
}
# Its activation is its own, whatever hidden_act says.
_GPT_OSS = {field: key for field, key in (_LLAMA | _ATTENTION_BIAS).items() if field != "activation"}
_EXPERTS = {
    "num_experts": _needed("num_local_experts", "num_experts"),
    "experts_per_token": _needed("num_experts_per_tok", "experts_per_token"),
    "d_ff": _needed("intermediate_size"),
}
_ROUTER = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
_NO_LOCAL_LAYERS = {"use_sliding_window": (False,)}
_UNUSED_WINDOW = ("sliding_window", "max_window_layers", "use_mrope")

_GEMMA = _LLAMA | {
    "d_head": Key("head_dim", 256),
    "tied_embeddings": Key("tie_word_embeddings", True),
    "activation": Key("hidden_activation", "gelu_pytorch_tanh", also=("hidden_act",)),
}
_GEMMA_TRAITS = {"norm_offset": True, "scale_embedding": True}
_GEMMA_2 = _GEMMA | {
    "query_scale": Key("query_pre_attn_scalar", 256),
    "attention_softcap": Key("attn_logit_softcapping", 50.0, null_is_none=True),
    "logit_softcap": Key("final_logit_softcapping", 30.0, null_is_none=True),
}
_GEMMA_IGNORED = ("cache_implementation", "use_bidirectional_attention", "hidden_act")
# The files of the larger Gemma 3 leave out what their class has by default.
_GEMMA_3 = _GEMMA_2 | {
    "num_heads": Key("num_attention_heads", 8),
    "num_kv_heads": Key("num_key_value_heads", 4),
    "vocab_size": Key("vocab_size", 262_208),
    "max_seq_len": Key("max_position_embeddings", 131_072),
    "attention_softcap": Key("attn_logit_softcapping"),
    "logit_softcap": Key("final_logit_softcapping"),
}
_GPT_2 = {
    "num_layers": _needed("n_layer", "num_hidden_layers"),
    "d_model": _needed("n_embd", "hidden_size"),
    "d_ff": Key("n_inner"),
    "num_heads": _needed("n_head", "num_attention_heads"),
    "vocab_size": _needed("vocab_size"),
    "max_seq_len": _needed("n_positions", "max_position_embeddings"),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "tied_embeddings": Key("tie_word_embeddings", True),
    "activation": Key("activation_function", "gelu_new"),
}
_GPT_2_TRAITS = {
    "norm": "layer",
    "norm_bias": True,
    "positions": "learned",
    "gated": False,
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
}
_GPT_2_IGNORED = (
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "gradient_checkpointing",
)  # fmt: skip
_LATENT = {
    "q_rank": Key("q_lora_rank"),
    "kv_rank": _needed("kv_lora_rank"),
    "nope_dim": _needed("qk_nope_head_dim"),
    "rope_dim": _needed("qk_rope_head_dim"),
    "value_dim": _needed("v_head_dim"),
}
_DEEPSEEK_EXPERTS = {
    "num_experts": _needed("n_routed_experts"),
    "experts_per_token": _needed("num_experts_per_tok"),
    "d_ff": _needed("moe_intermediate_size"),
    "num_shared_experts": Key("n_shared_experts", 0),
    "num_dense_layers": Key("first_k_dense_replace", 0),
    "num_groups": Key("n_group", 1),
    "groups_per_token": Key("topk_group", 1),
    "scaling": Key("routed_scaling_factor", 1.0),
}
_DEEPSEEK_IGNORED = (
    *_ROUTER, "aux_loss_alpha", "ep_size", "num_nextn_predict_layers", "seq_aux", "head_dim", "qk_head_dim",
    "mlp_bias",
)  # fmt: skip
_DEEPSEEK_FIXED = {"attention_bias": (False,), "moe_layer_freq": (1,)}
_V3_EXPERTS = {
    "score": "sigmoid",
    "choice_bias": True,
    "normalized": Key("norm_topk_prob", True),
    "scaling": Key("routed_scaling_factor", 2.5),
}

ARCHITECTURES = (
    Architecture(
        "LlamaForCausalLM",
        "llama",
        _LLAMA | _ATTENTION_BIAS | {"mlp_bias": Key("mlp_bias", False)},
        fixed={"sliding_window": (None,)},
    ),
    Architecture("MistralForCausalLM", "mistral", _LLAMA, local_layers=True, default_window=4096),
    Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        _LLAMA,
        traits={"qkv_bias": True},
        fixed=_NO_LOCAL_LAYERS,
        ignored=_UNUSED_WINDOW,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        _LLAMA | _ATTENTION_BIAS | {"d_head": Key("head_dim", 128)},
        traits={"qk_norm": True},
        fixed=_NO_LOCAL_LAYERS,
        ignored=_UNUSED_WINDOW,
    ),
    Architecture(
        "GemmaForCausalLM",
        "gemma",
        # Its first files said "gelu" and meant the tanh form, which hidden_activation then overruled.
        _GEMMA | {"activation": Key("hidden_activation", "gelu_pytorch_tanh")},
        traits=_GEMMA_TRAITS,
        fixed={"attention_bias": (False,)},
        ignored=_GEMMA_IGNORED,
    ),
    Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA_2,
        traits=_GEMMA_TRAITS | {"post_norms": True},
        fixed={"attention_bias": (False,)},
        ignored=_GEMMA_IGNORED,
        local_layers=True,
        default_window=4096,
        global_every=2,
    ),
    Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _GEMMA_3,
        traits=_GEMMA_TRAITS | {"post_norms": True, "qk_norm": True},
        fixed={"attention_bias": (False,)},
        ignored=(*_GEMMA_IGNORED, "sliding_window_pattern", "_sliding_window_pattern"),
        local_layers=True,
        default_window=4096,
        global_every=6,
        rope_theta=1_000_000.0,
    ),
    Architecture(
        "Phi3ForCausalLM",
        "phi3",
        _LLAMA | {"norm_eps": Key("rms_norm_eps", 1e-5)},
        fixed={"attention_bias": (False,)},
        ignored=("resid_pdrop", "embd_pdrop"),
        local_layers=True,
    ),
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        _GPT_2,
        traits=_GPT_2_TRAITS,
        fixed={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        ignored=_GPT_2_IGNORED,
    ),
    Architecture(
        "MixtralForCausalLM",
        "mixtral",
        _LLAMA | {"norm_eps": Key("rms_norm_eps", 1e-5)},
        ignored=_ROUTER,
        moe=_EXPERTS,
        local_layers=True,
        rope_theta=1_000_000.0,
    ),
    Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _LLAMA | _ATTENTION_BIAS,
        traits={"qk_norm": True},
        fixed=_NO_LOCAL_LAYERS | {"mlp_only_layers": ([],)},
        ignored=(*_ROUTER, *_UNUSED_WINDOW),
        moe=_EXPERTS
        | {
            "d_ff": _needed("moe_intermediate_size"),
            "every": Key("decoder_sparse_step", 1),
            "normalized": Key("norm_topk_prob", False),
        },
    ),
    Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        _GPT_OSS | {"norm_eps": Key("rms_norm_eps", 1e-5)},
        traits={"attention_sinks": True, "activation": "clamped_silu"},
        fixed={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        ignored=(*_ROUTER, "hidden_act", "initial_context_length"),
        moe=_EXPERTS | {"router_bias": True, "expert_bias": True},
        local_layers=True,
        default_window=128,
        global_every=2,
        rope_theta=150_000.0,
    ),
    Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _SIZES,
        # The weights of a token's experts are not normalized, whatever norm_topk_prob says.
        fixed=_DEEPSEEK_FIXED | {"scoring_func": ("softmax",), "norm_topk_prob": (False,)},
        ignored=(*_DEEPSEEK_IGNORED, "topk_method"),
        moe=_DEEPSEEK_EXPERTS | {"normalized": False},
        mla=_LATENT,
    ),
    Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _SIZES,
        fixed=_DEEPSEEK_FIXED
        | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "rope_interleave": (True,)},
        ignored=_DEEPSEEK_IGNORED,
        moe=_DEEPSEEK_EXPERTS | _V3_EXPERTS,
        mla=_LATENT,
    ),
    Architecture(
        "Llama4ForCausalLM",
        "llama4_text",
        _LLAMA
        | _ATTENTION_BIAS
        | {
            "norm_eps": Key("rms_norm_eps", 1e-5),
            "d_ff": _needed("intermediate_size_mlp"),
            "turned_norm": Key("use_qk_norm", True),
            "temperature_floor": Key("floor_scale", 8192),
            "temperature_slope": Key("attn_scale", 0.1),
        },
        ignored=(*_ROUTER, "cache_implementation", "for_llm_compressor", "_attn_implementation_autoset"),
        read_apart=(
            "attention_chunk_size",
            "attn_temperature_tuning",
            "no_rope_layers",
            "no_rope_layer_interval",
            "moe_layers",
        ),
        moe=_EXPERTS
        | {
            "num_shared_experts": 1,
            "every": Key("interleave_moe_layer_step", 1),
            "score": "sigmoid",
            "normalized": False,
            "scales_input": True,
        },
        local_layers=True,
        chunked=True,
        default_window=8192,
        rope_theta=500_000.0,
    ),
    Architecture(
        "MptForCausalLM",
        "mpt",
        {
            "num_layers": _needed("n_layers"),
            "d_model": _needed("d_model"),
            "num_heads": _needed("n_heads"),
            "vocab_size": _needed("vocab_size"),
            "max_seq_len": Key("max_seq_len", 2048),
            "norm_eps": Key("layer_norm_epsilon", 1e-5),
            "tied_embeddings": Key("tie_word_embeddings", True),
        },
        traits={"norm": "layer", "positions": "alibi", "gated": False, "activation": "gelu_erf"},
        fixed={"expansion_ratio": (4,), "no_bias": (True,), "logit_scale": (None,)},
        fixed_in={
            "attn_config": {
                "alibi": (True,),
                "alibi_bias_max": (8,),
                "attn_type": ("multihead_attention",),
                "clip_qkv": (None,),
                "prefix_lm": (False,),
                "qk_ln": (False,),
                "softmax_scale": (None,),
            }
        },
        # Its learned positions give way to ALiBi, and it has one norm, whatever norm_type says.
        ignored=(
            "learned_pos_emb",
            "norm_type",
            "emb_pdrop",
            "resid_pdrop",
            "embedding_fraction",
            "init_config",
            "init_device",
            "tokenizer_name",
            "verbose",
        ),
        also_named="MPTForCausalLM",
    ),
    Architecture(
        "BloomForCausalLM",
        "bloom",
        {
            "num_layers": _needed("n_layer", "num_hidden_layers"),
            "d_model": _needed("hidden_size", "n_embed"),
            "num_heads": _needed("n_head", "num_attention_heads"),
            "vocab_size": _needed("vocab_size"),
            "max_seq_len": Key("seq_length", 2048),
            "norm_eps": Key("layer_norm_epsilon", 1e-5),
            "tied_embeddings": Key("tie_word_embeddings", True),
        },
        traits=_GPT_2_TRAITS | {"positions": "alibi", "activation": "gelu", "embedding_norm": True},
        fixed={"apply_residual_connection_post_layernorm": (False,)},
        ignored=(
            "slow_but_exact",
            "hidden_dropout",
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "n_inner",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
        ),
    ),
)

# Known, and without effect on the shape or the mathematics of a forward pass.
NO_EFFECT = (
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "attention_dropout", "initializer_range", "pretraining_tp", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "_name_or_path", "name_or_path", "output_attentions",
    "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder",
    "is_decoder", "id2label", "label2id", "problem_type", "auto_map", "tokenizer_class",
    "_attn_implementation", "_experts_implementation", "attn_implementation", "use_return_dict",
    "_commit_hash",
)  # fmt: skip

# Keys of HF's models that change what is computed, with the values that change nothing. Where an architecture
# does not read one, any other value is another model.
CHANGES: dict[str, tuple[Any, ...]] = {
    "residual_multiplier": (1,), "embedding_multiplier": (1,), "attention_multiplier": (None,),
    "logits_scaling": (1,), "logit_scale": (1,), "scale_emb": (1,), "scale_depth": (None,),
    "dim_model_base": (None,), "clip_qkv": (None,), "qk_layernorm": (False,), "use_qk_norm": (False,),
    "use_parallel_residual": (False,), "parallel_attn": (False,), "new_decoder_architecture": (False,),
    "alibi": (False,), "rotary_pct": (1,), "rope_interleaved": (False,), "use_mrope": (False,),
    "no_rope_layers": (None, []), "no_rope_layer_interval": (None, 0), "attn_temperature_tuning": (False,),
    "attention_chunk_size": (None,), "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,), "use_cla": (False,), "cla_share_factor": (None, 1),
    "num_kv_shared_layers": (None, 0), "use_bias": (False,), "attn_output_gate": (False,),
    "sliding_window_pattern": (None,), "num_local_experts": (None, 0, 1), "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0), "q_lora_rank": (None,), "kv_lora_rank": (None,),
}  # fmt: skip
