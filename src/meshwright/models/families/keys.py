"""Keys of config.json that several families share; `LLAMA_KEYS | {...}` is most of a family's."""

from typing import Any

from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Fixed, Form, Key, Rule, fixed, ignored, needed, without

# Hugging Face's names of our activations; files that we write have the first.
_ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "gelu_erf": ("gelu",),
    "relu": ("relu",),
    "relu2": ("relu2",),
    "xielu": ("xielu",),
}


def _read_activation(value: Any) -> str:
    for ours, theirs in _ACTIVATIONS.items():
        if value in theirs:
            return ours
    raise ValueError(", ".join(repr(theirs[0]) for theirs in _ACTIVATIONS.values()))


ACTIVATION = Form(_read_activation, lambda value, model: _ACTIVATIONS.get(value, (value,))[0])


def activation(name: str) -> dict[str, Rule]:
    """The key of the activation, `name` if it is absent."""
    return {"hidden_act": Key("activation", name, form=ACTIVATION)}


def _read_query_scalar(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise ValueError("a number")
    return value**-0.5 if value > 0 else value


def _write_query_scalar(value: float | None, model: ModelConfig) -> int:
    return round(value**-2) if value else model.d_head


# The file has n of n ** -0.5.
QUERY_SCALAR = Form(_read_query_scalar, _write_query_scalar)


def _read_factor(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError("a number above 0")
    return None if value == 1 else float(value)


# A factor, None if it is 1; and a divisor, the factor's inverse.
FACTOR = Form(_read_factor, lambda value, model: value or 1.0)
DIVISOR = Form(
    lambda value: None if _read_factor(value) is None else 1 / value,
    lambda value, model: 1 / value if value else 1.0,
)

# Keys

SIZES: dict[str, Rule] = {
    "num_hidden_layers": needed("num_layers"),
    "hidden_size": needed("d_model"),
    "intermediate_size": needed("d_ff"),
    "num_attention_heads": needed("num_heads"),
    "vocab_size": needed("vocab_size"),
    "max_position_embeddings": needed("max_seq_len"),
    "num_key_value_heads": Key("num_kv_heads"),
    "rms_norm_eps": Key("norm_eps", 1e-6),
    "tie_word_embeddings": Key("tied_embeddings", False),
    "hidden_act": Key("activation", "silu", form=ACTIVATION),
}
LLAMA_KEYS: dict[str, Rule] = SIZES | {"head_dim": Key("d_head")}
ATTENTION_BIAS: dict[str, Rule] = {"attention_bias": Key(("qkv_bias", "attention_out_bias"), False)}
EPS_1E_5: dict[str, Rule] = {"rms_norm_eps": Key("norm_eps", 1e-5)}
LAYER_NORM_EPS: dict[str, Rule] = {"layer_norm_eps": Key("norm_eps", 1e-5)}
MULTIPLIERS: dict[str, Rule] = {
    "embedding_multiplier": Key("embedding_scale", 1.0, form=FACTOR),
    "logits_scaling": Key("logit_scale", 1.0, form=DIVISOR),
    "residual_multiplier": Key("residual_scale", 1.0, form=FACTOR),
    "attention_multiplier": Key(
        "query_scale", 1.0, form=Form(write=lambda value, model: value or model.d_head**-0.5)
    ),
}
ROUTER = ignored("training only", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
EXPERTS: dict[str, Rule] = ROUTER | {
    "num_local_experts": needed("moe.num_experts", "num_experts"),
    "num_experts_per_tok": needed("moe.experts_per_token", "experts_per_token"),
}
# Of classes that know only this name.
NUM_EXPERTS: dict[str, Rule] = without(EXPERTS, "num_local_experts") | {
    "num_experts": needed("moe.num_experts", "num_local_experts")
}
# Of Qwen's files, whose layers all see everything: use_sliding_window is false.
NO_LOCAL_LAYERS = fixed(use_sliding_window=False) | ignored(
    "counts only with use_sliding_window", "sliding_window", "max_window_layers"
)
# Of families that are only planned.
PLANNED_POSITIONS = ignored(
    "planned only, and positions change no plan",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
)
# The modules that predict further tokens, which are counted apart. Files that we write have none.
MTP: dict[str, Rule] = {
    "num_nextn_predict_layers": Key("mtp_layers", 0, form=Form(write=lambda value, model: 0))
}
LATENT: dict[str, Rule] = {
    "q_lora_rank": Key("mla.q_rank"),
    "kv_lora_rank": needed("mla.kv_rank"),
    "qk_nope_head_dim": needed("mla.nope_dim"),
    "qk_rope_head_dim": needed("mla.rope_dim"),
    "v_head_dim": needed("mla.value_dim"),
} | ignored("follows from the parts of a head", "head_dim", "qk_head_dim")
DEEPSEEK_EXPERTS: dict[str, Rule] = (
    ROUTER
    | fixed(moe_layer_freq=1)
    | ignored("training only", "aux_loss_alpha", "seq_aux", "ep_size")
    | ignored("how transformers runs it", "moe_router_dtype")
    | {
        "n_routed_experts": needed("moe.num_experts", "num_routed_experts"),
        "num_experts_per_tok": needed("moe.experts_per_token"),
        "moe_intermediate_size": needed("moe.d_ff"),
        "n_shared_experts": Key("moe.num_shared_experts", 0, also=("num_shared_experts",)),
        "first_k_dense_replace": Key("moe.num_dense_layers", 0),
        "n_group": Key("moe.num_groups", 1),
        "topk_group": Key("moe.groups_per_token", 1),
        "routed_scaling_factor": Key("moe.scaling", 1.0),
    }
)

# Keys of every family that has no rule of its own for them

EVERY_FILE: dict[str, Rule] = (
    ignored("names the model", "architectures", "model_type", "_name_or_path", "name_or_path", "auto_map",
            "_commit_hash", "transformers_version", "tokenizer_class")
    | ignored("how weights are stored", "torch_dtype", "dtype", "quantization_config", "compression_config")
    | ignored("training only", "attention_dropout", "initializer_range")
    | ignored("of the tokenizer", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    | ignored("how transformers runs it", "use_cache", "pretraining_tp", "output_attentions",
              "output_hidden_states", "return_dict", "use_return_dict", "chunk_size_feed_forward",
              "is_encoder_decoder", "is_decoder", "_attn_implementation", "_experts_implementation",
              "attn_implementation")
    | ignored("of generation", "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id",
              "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
              "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
              "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
              "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
              "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k",
              "top_p", "typical_p", "sep_token_id", "prefix")
    | ignored("how transformers runs it", "add_cross_attention", "cross_attention_hidden_size",
              "finetuning_task", "pruned_heads", "task_specific_params", "tf_legacy_loss",
              "tie_encoder_decoder", "torchscript", "use_bfloat16", "_attn_implementation_autoset",
              "cache_implementation", "use_mem_eff_path", "gradient_checkpointing")
    | ignored("of classifiers", "id2label", "label2id", "problem_type")
)  # fmt: skip

# Keys of some family that change its mathematics. In a file of a family without a rule for them, only these
# values leave the model as it is.
OTHER_MODELS: dict[str, Fixed] = {
    key: Fixed(values)
    for values, keys in {
        (None,): (
            "attention_chunk_size", "attention_multiplier", "attn_logit_softcapping", "clip_qkv",
            "dim_model_base", "final_logit_softcapping", "kv_lora_rank", "q_lora_rank",
            "query_pre_attn_scalar", "scale_depth", "sliding_window", "sliding_window_pattern",
        ),
        (False,): (
            "alibi", "attn_output_gate", "attn_temperature_tuning", "new_decoder_architecture",
            "parallel_attn", "qk_layernorm", "rope_interleaved", "use_bias", "use_cla", "use_mrope",
            "use_parallel_residual", "use_qk_norm",
        ),
        (1,): (
            "embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier", "rotary_pct",
            "scale_emb",
        ),
        (None, 0): ("n_routed_experts", "no_rope_layer_interval", "num_kv_shared_layers"),
        (None, 0, 1): ("num_experts", "num_local_experts"),
        (None, 1): ("cla_share_factor",),
    }.items()
    for key in keys
} | {
    "no_rope_layers": Fixed((None, [])),
    "layer_types": Fixed((None, "full_attention"), of_each=True),
}  # fmt: skip
