from meshwright.models.families.family import Family, Key, Rule, Tensor, ignored, needed
from meshwright.models.families.keys import ACTIVATION
from meshwright.models.families.tensors import in_pairs, linear, norms

_H = "transformer.h.{}"
GPTJ_KEYS: dict[str, Rule] = (
    {
        "n_layer": needed("num_layers", "num_hidden_layers"),
        "n_embd": needed("d_model", "hidden_size"),
        "n_inner": Key("d_ff"),
        "n_head": needed("num_heads", "num_attention_heads"),
        "vocab_size": needed("vocab_size"),
        "n_positions": needed("max_seq_len", "max_position_embeddings"),
        "rotary_dim": Key("rotary_dim", 64),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "tie_word_embeddings": Key("tied_embeddings", False),
        "activation_function": Key("activation", "gelu_new", form=ACTIVATION),
    }
    | ignored("training only", "attn_pdrop", "embd_pdrop", "resid_pdrop", "gradient_checkpointing")
    | ignored("as its class computes it", "rotary", "scale_attn_weights")
    | ignored("how transformers runs it", "task_specific_params")
    | ignored("n_positions counts", "n_ctx")
    | ignored("of classifiers", "summary_activation", "summary_first_dropout", "summary_proj_to_labels")
    | ignored("of classifiers", "summary_type", "summary_use_proj")
)
GPTJ_SETS = {
    "norm": "layer",
    "norm_bias": True,
    "gated": False,
    "mlp_bias": True,
    "parallel": True,
    "shared_norm": True,
    "head_bias": True,
}
GPTJ_TENSORS = {
    "embed": Tensor("transformer.wte.weight", ("V", "D")),
    **norms("attention_norm", f"{_H}.ln_1"),
    **linear("wo", f"{_H}.attn.out_proj", "D", "NH"),
    **linear("w_in", f"{_H}.mlp.fc_in", "F", "D"),
    **linear("w_out", f"{_H}.mlp.fc_out", "D", "F"),
    **norms("final_norm", "transformer.ln_f"),
    **linear("unembed", "lm_head", "V", "D"),
}
_HEADS = {
    **linear("wq", f"{_H}.attn.q_proj", "NH", "D"),
    **linear("wk", f"{_H}.attn.k_proj", "KH", "D"),
    **linear("wv", f"{_H}.attn.v_proj", "KH", "D"),
}

FAMILY = Family(
    "gptj",
    "GPT-J",
    ("GPTJForCausalLM",),
    keys=GPTJ_KEYS,
    sets=GPTJ_SETS,
    groups=(),
    prefix="transformer.",
    tensors=GPTJ_TENSORS | in_pairs(_HEADS, "wq", "wk") | {"wv": _HEADS["wv"]},
)
