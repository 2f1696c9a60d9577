from meshwright.models.families.family import Family, Key, Rule, Tensor, without
from meshwright.models.families.keys import ATTENTION_BIAS, FACTOR, LAYER_NORM_EPS, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, in_pairs

COHERE_KEYS: dict[str, Rule] = (
    without(LLAMA_KEYS, "rms_norm_eps")
    | ATTENTION_BIAS
    | LAYER_NORM_EPS
    | {
        "tie_word_embeddings": Key("tied_embeddings", True),
        "logit_scale": Key("logit_scale", 0.0625, form=FACTOR),
    }
)
COHERE_SETS = {"norm": "layer", "parallel": True, "shared_norm": True}
COHERE_TENSORS = LLAMA_TENSORS | in_pairs(LLAMA_TENSORS, "wq", "wk", "wq_bias", "wk_bias")

FAMILY = Family(
    "cohere",
    "Command R",
    ("CohereForCausalLM",),
    keys=COHERE_KEYS | {"use_qk_norm": Key("qk_norm", False)},
    sets=COHERE_SETS | {"qk_norm_over": "heads"},
    groups=(Rope(),),
    tensors=COHERE_TENSORS
    | {
        "q_norm": Tensor(f"{LAYER}.self_attn.q_norm.weight", ("N", "H"), pairs="H"),
        "k_norm": Tensor(f"{LAYER}.self_attn.k_norm.weight", ("K", "H"), pairs="H"),
    },
)
