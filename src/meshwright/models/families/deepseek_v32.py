from meshwright.models.families.deepseek_v3 import FAMILY as V3
from meshwright.models.families.family import Family, Rule, Tensor, fixed, ignored, needed, without
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, linear

# Keys and tensors of the indexer, in both families that have one.
INDEXER_KEYS: dict[str, Rule] = {
    "index_n_heads": needed("indexer.num_heads"),
    "index_head_dim": needed("indexer.head_dim"),
    "index_topk": needed("indexer.top_k"),
}
_INDEXER = f"{LAYER}.self_attn.indexer"
INDEXER_TENSORS = {
    **linear("index_q", f"{_INDEXER}.wq_b", "xy", "Q"),
    **linear("index_k", f"{_INDEXER}.wk", "y", "D"),
    **linear("index_weights", f"{_INDEXER}.weights_proj", "x", "D"),
    "index_norm": Tensor(f"{_INDEXER}.k_norm.weight", ("y",)),
    "index_norm_bias": Tensor(f"{_INDEXER}.k_norm.bias", ("y",)),
}

FAMILY = Family(
    "deepseek_v32",
    "DeepSeek-V3.2",
    ("DeepseekV32ForCausalLM",),
    keys=without(V3.keys, "rope_interleave")
    | INDEXER_KEYS
    | fixed(rope_interleave=True)
    | ignored("as its class computes it", "layer_types", "mlp_layer_types"),
    sets=V3.sets,
    groups=(Rope(),),
    tensors={**V3.tensors, **INDEXER_TENSORS},
    more_layers=True,
)
