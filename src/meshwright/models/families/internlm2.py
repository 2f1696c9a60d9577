from meshwright.models.families.family import Family, Key, Tensor, ignored
from meshwright.models.families.keys import LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, feed_forward, fused, linear, norms

_ATTENTION = f"{LAYER}.attention"

FAMILY = Family(
    "internlm2",
    "InternLM 2, 2.5",
    ("InternLM2ForCausalLM",),
    keys=LLAMA_KEYS
    | {"bias": Key(("qkv_bias", "attention_out_bias"), False)}
    | ignored("how transformers runs it", "attn_implementation"),
    groups=(Rope(),),
    tensors={
        "embed": Tensor("model.tok_embeddings.weight", ("V", "D")),
        **norms("attention_norm", f"{LAYER}.attention_norm"),
        # The queries, key and value of each KV head, head after head.
        **fused(("wq", "wk", "wv"), f"{_ATTENTION}.wqkv", ("KGH", "KH", "KH"), "D", "within"),
        **linear("wo", f"{_ATTENTION}.wo", "D", "NH"),
        **norms("mlp_norm", f"{LAYER}.ffn_norm"),
        **feed_forward("w", f"{LAYER}.feed_forward", "F", ("w1", "w3", "w2")),
        **norms("final_norm", "model.norm"),
        "unembed": Tensor("output.weight", ("V", "D")),
    },
    is_written=False,
)
