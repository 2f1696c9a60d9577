from meshwright.models.families.family import Family, Key, Tensor, ignored, without
from meshwright.models.families.keys import LAYER_NORM_EPS, LLAMA_KEYS, activation
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import fused, linear, norms

_NOT_READ = ("rms_norm_eps", "num_key_value_heads")


def neox_tensors(model: str) -> dict[str, Tensor]:
    """The tensors of a model whose modules are in `model`."""
    layer = f"{model}.layers.{{}}"
    return {
        "embed": Tensor(f"{model}.embed_in.weight", ("V", "D")),
        **norms("attention_norm", f"{layer}.input_layernorm"),
        **fused(("wq", "wk", "wv"), f"{layer}.attention.query_key_value", ("NH", "KH", "KH"), "D", "within"),
        **linear("wo", f"{layer}.attention.dense", "D", "NH"),
        **norms("mlp_norm", f"{layer}.post_attention_layernorm"),
        **linear("w_in", f"{layer}.mlp.dense_h_to_4h", "F", "D"),
        **linear("w_out", f"{layer}.mlp.dense_4h_to_h", "D", "F"),
        **norms("final_norm", f"{model}.final_layer_norm"),
        "unembed": Tensor("embed_out.weight", ("V", "D")),
    }


FAMILY = Family(
    "gpt_neox",
    "GPT-NeoX, Pythia",
    ("GPTNeoXForCausalLM",),
    keys=without(LLAMA_KEYS, *_NOT_READ)
    | LAYER_NORM_EPS
    | activation("gelu")
    | {
        "use_parallel_residual": Key("parallel", True),
        "attention_bias": Key(("qkv_bias", "attention_out_bias"), True),
    }
    | ignored("all heads have keys", "num_key_value_heads")
    | ignored("training only", "attention_probs_dropout_prob", "hidden_dropout_prob")
    | ignored(
        "training only", "hidden_dropout", "classifier_dropout", "init_method", "output_layer_init_method"
    ),
    sets={"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True},
    groups=(Rope(share=0.25, share_key="rotary_pct"),),
    tensors=neox_tensors("gpt_neox"),
)
