from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, DEEPSEEK_EXPERTS, LLAMA_KEYS
from meshwright.models.families.releases import published, release
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LLAMA_TENSORS, experts

FAMILY = Family(
    "deepseek",
    "DeepSeek-MoE",
    ("DeepseekForCausalLM",),
    model_types=("deepseek", "deepseek_ocr2_text", "unlimited_ocr_text"),
    wrappers=("deepseek_ocr2", "unlimited_ocr"),
    keys=LLAMA_KEYS
    | ATTENTION_BIAS
    | DEEPSEEK_EXPERTS
    | {"norm_topk_prob": Key("moe.normalized", False)}
    | fixed(scoring_func="softmax", topk_method="greedy", use_mla=False)
    | ignored(
        "of latent attention, which it lacks",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
    | ignored("how its class runs it", "lm_head", "rm_head"),
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | experts(),
    is_written=False,
    releases=release(
        "Dai et al. 2024, https://arxiv.org/abs/2401.06066; deepseek-ai/deepseek-moe-16b-base",
        {
            "deepseek-moe-16b": published(
                "L=28, D=2048, F=10_944, N=16, K=16, V=102_400",
                16_375_728_128,
                "2.8B",
                moe_intermediate_size=1408,
                max_position_embeddings=4096,
                n_routed_experts=64,
                n_shared_experts=2,
                num_experts_per_tok=6,
                first_k_dense_replace=1,
            )
        },
    ),
)
