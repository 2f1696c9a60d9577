from meshwright.models.families.family import Family, Key, fixed
from meshwright.models.families.keys import DEEPSEEK_EXPERTS, LATENT, SIZES
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LAYER, LLAMA_TENSORS, experts, fused_experts
from meshwright.models.families.tool_formats import MISTRAL_CALLS

FAMILY = Family(
    "mistral4",
    "Mistral 4",
    ("Mistral4ForCausalLM",),
    keys=SIZES
    | LATENT
    | DEEPSEEK_EXPERTS
    | {"norm_topk_prob": Key("moe.normalized", True)}
    | fixed(attention_bias=False, mlp_bias=False, rope_interleave=True, n_group=1, topk_group=1),
    groups=(Rope(temperature=True),),
    tensors=LLAMA_TENSORS
    | LATENT_TENSORS
    | experts()
    | fused_experts(f"{LAYER}.mlp.experts", "gate_up_proj", "down_proj", suffix=""),
    tool_calls=MISTRAL_CALLS,
)
