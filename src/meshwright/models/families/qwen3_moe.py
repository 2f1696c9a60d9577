from meshwright.models.families.family import Family, Key, fixed, ignored, needed
from meshwright.models.families.keys import ATTENTION_BIAS, EXPERTS, LLAMA_KEYS, NO_LOCAL_LAYERS
from meshwright.models.families.releases import Release, by_letter, mixture, preset
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, experts
from meshwright.models.families.tool_formats import HERMES

FAMILY = Family(
    "qwen3_moe",
    "Qwen3-MoE",
    ("Qwen3MoeForCausalLM",),
    model_types=("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"),
    wrappers=("qwen3_vl_moe",),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | NO_LOCAL_LAYERS
    | ignored("of models that also see", "use_mrope")
    | EXPERTS
    | fixed(mlp_only_layers=[], use_qk_norm=True, shared_expert_intermediate_size=0, qkv_bias=False)
    | ignored("of the tokenizer", "mask_token_id")
    | {
        "moe_intermediate_size": needed("moe.d_ff"),
        "decoder_sparse_step": Key("moe.every", 1),
        "norm_topk_prob": Key("moe.normalized", False),
    },
    sets={"qk_norm": True},
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | experts(),
    tool_calls=HERMES,
    releases=(
        Release(
            "Yang et al. 2025, https://arxiv.org/abs/2505.09388; config.json of Qwen/Qwen3-*",
            {
                "qwen3-30b-a3b": preset(
                    "L=48, D=2048, F=6144, N=32", 30_532_122_624, "3.3B", moe=mixture(128, 8, 768)
                ),
                "qwen3-235b-a22b": preset(
                    "L=94, D=4096, F=12_288, N=64", 235_093_634_560, "22B", moe=mixture(128, 8, 1536)
                ),
            },
            shared=by_letter("K=4, H=128, V=151_936")
            | {"max_seq_len": 40_960, "norm_eps": 1e-6, "rope_theta": 1e6},
        ),
        Release(
            "config.json of Qwen/Qwen3-Coder-480B-A35B-Instruct and Qwen3-Coder-30B-A3B-Instruct",
            {
                "qwen3-coder-30b-a3b": preset(
                    "L=48, D=2048, F=6144, N=32, K=4", 30_532_122_624, "3.3B", moe=mixture(128, 8, 768)
                ),
                "qwen3-coder-480b-a35b": preset(
                    "L=62, D=6144, F=8192, N=96, K=8", "480B", "35B", moe=mixture(160, 8, 2560)
                ),
            },
            shared=by_letter("H=128, V=151_936")
            | {"max_seq_len": 262_144, "norm_eps": 1e-6, "rope_theta": 1e7},
        ),
        Release(
            # tower_params: of the vision tower, which plans hold in memory.
            "config.json of Qwen/Qwen3-VL-30B-A3B-Instruct and Qwen3-VL-235B-A22B-Instruct",
            {
                "qwen3-vl-30b-a3b": preset(
                    "L=48, D=2048, F=6144, N=32", moe=mixture(128, 8, 768), tower_params=538_631_408
                ),
                "qwen3-vl-235b-a22b": preset(
                    "L=94, D=4096, F=12_288, N=64", moe=mixture(128, 8, 1536), tower_params=576_388_336
                ),
            },
            shared=by_letter("K=4, H=128, V=151_936")
            | {"max_seq_len": 262_144, "norm_eps": 1e-6, "rope_theta": 5e6},
        ),
    ),
)
