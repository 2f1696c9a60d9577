from meshwright.models.families.family import Family, Key, Tensor, fixed, ignored, needed
from meshwright.models.families.keys import ACTIVATION
from meshwright.models.families.tensors import HEAD, norms

GPT_SETS = {
    "norm": "layer",
    "norm_bias": True,
    "positions": "learned",
    "gated": False,
    "qkv_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
}
_H = "transformer.h.{}"
_QKV = ("NH", "KH", "KH")


def _conv1d(parameter: str, module: str, into: str, out: str) -> dict[str, Tensor]:
    """weight[in, out] and bias[out]: GPT-2 stores its linear layers transposed."""
    return {
        parameter: Tensor(f"{module}.weight", (into, out)),
        f"{parameter}_bias": Tensor(f"{module}.bias", (out,)),
    }


FAMILY = Family(
    "gpt2",
    "GPT-2, GPT-3, Megatron's GPT",
    ("GPT2LMHeadModel",),
    model_types=("gpt2", "gpt-sw3"),
    keys={
        "n_layer": needed("num_layers", "num_hidden_layers"),
        "n_embd": needed("d_model", "hidden_size"),
        "n_inner": Key("d_ff"),
        "n_head": needed("num_heads", "num_attention_heads"),
        "vocab_size": needed("vocab_size"),
        "n_positions": needed("max_seq_len", "max_position_embeddings"),
        "layer_norm_epsilon": Key("norm_eps", 1e-5),
        "tie_word_embeddings": Key("tied_embeddings", True),
        "activation_function": Key("activation", "gelu_new", form=ACTIVATION),
    }
    | fixed(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    | ignored("training only", "attn_pdrop", "embd_pdrop", "resid_pdrop", "gradient_checkpointing")
    | ignored("n_positions counts", "n_ctx")
    | ignored("how transformers runs it", "reorder_and_upcast_attn", "task_specific_params")
    | ignored(
        "of classifiers",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    sets=GPT_SETS,
    groups=(),
    prefix="transformer.",
    tensors={
        "embed": Tensor("transformer.wte.weight", ("V", "D")),
        "positions": Tensor("transformer.wpe.weight", ("W", "D")),
        **{
            f"{name}{suffix}": Tensor(f"{_H}.attn.c_attn.{kind}", (*into, part), len(into), _QKV, index)
            for index, (name, part) in enumerate(zip(("wq", "wk", "wv"), _QKV, strict=True))
            for suffix, kind, into in (("", "weight", ("D",)), ("_bias", "bias", ()))
        },
        **norms("attention_norm", f"{_H}.ln_1"),
        **_conv1d("wo", f"{_H}.attn.c_proj", "NH", "D"),
        **norms("mlp_norm", f"{_H}.ln_2"),
        **_conv1d("w_in", f"{_H}.mlp.c_fc", "D", "F"),
        **_conv1d("w_out", f"{_H}.mlp.c_proj", "F", "D"),
        **norms("final_norm", "transformer.ln_f"),
        **HEAD,
    },
)
