from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, DEEPSEEK_EXPERTS, LLAMA_KEYS
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
)
