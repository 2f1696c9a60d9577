from meshwright.models.families.family import Family, Key, Rule, Tensor, without
from meshwright.models.families.keys import ATTENTION_BIAS, FACTOR, LAYER_NORM_EPS, LLAMA_KEYS
from meshwright.models.families.releases import Release, preset
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
SHARED = {"vocab_size": 256_000, "tied_embeddings": True}

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
    releases=(
        Release(
            "config.json of CohereForAI/c4ai-command-r-v01, c4ai-command-r-plus",
            {
                "command-r": preset(
                    "L=40, D=8192, F=22_528, N=64", 34_980_831_232, rope_theta=8_000_000.0, logit_scale=0.0625
                ),
                "command-r-plus": preset(
                    "L=64, D=12_288, F=33_792, N=96, K=8",
                    103_810_674_688,
                    rope_theta=75_000_000.0,
                    logit_scale=0.8333333333333334,
                    qk_norm=True,
                ),
            },
            shared=SHARED | {"max_seq_len": 131_072},
        ),
        Release(
            "Dang et al. 2024, https://arxiv.org/abs/2412.04261; config.json of CohereForAI/aya-expanse-8b",
            {
                "aya-expanse-8b": preset(
                    "L=32, D=4096, F=14_336, N=32, K=8", 8_028_033_024, rope_theta=10_000.0, logit_scale=0.125
                )
            },
            shared=SHARED | {"max_seq_len": 8192},
        ),
    ),
)
