from meshwright.models.families.family import Family, Key, Rule, fixed, ignored
from meshwright.models.families.keys import ATTENTION_BIAS, EPS_1E_5, LLAMA_KEYS
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LAYER, LLAMA_TENSORS, norms

HUNYUAN_KEYS: dict[str, Rule] = (
    LLAMA_KEYS
    | EPS_1E_5
    | ATTENTION_BIAS
    | fixed(use_qk_norm=True, mlp_bias=False, use_mla=False, norm_type="rms")
    | ignored("of the tokenizer", "eod_token_id", "sep_token_id", "im_start_id", "im_end_id", "im_newline_id")
    | ignored("of the tokenizer", "text_start_id", "text_end_id", "mask_init_id")
    | {"head_dim": Key("d_head", also=("attention_head_dim",))}
    | fixed(use_cla=False)
    | ignored("counts only with use_cla", "cla_share_factor")
)
HUNYUAN_SETS = {"qk_norm": True, "qk_norm_last": True}
HUNYUAN_TENSORS = (
    LLAMA_TENSORS
    | norms("q_norm", f"{LAYER}.self_attn.query_layernorm", "H")
    | norms("k_norm", f"{LAYER}.self_attn.key_layernorm", "H")
)

FAMILY = Family(
    "hunyuan_v1_dense",
    "Hunyuan (dense)",
    ("HunYuanDenseV1ForCausalLM",),
    model_types=("hunyuan_v1_dense", "hunyuan_vl_text"),
    keys=HUNYUAN_KEYS,
    sets=HUNYUAN_SETS,
    groups=(Rope(),),
    tensors=HUNYUAN_TENSORS,
)
