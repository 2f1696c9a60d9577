from meshwright.models.families.family import Family, Fixed, Key, fixed, ignored
from meshwright.models.families.keys import LLAMA_KEYS, NO_LOCAL_LAYERS
from meshwright.models.families.rope import Rope
from meshwright.models.families.state_layers import (
    DELTA_KEYS,
    GATED_QUERIES,
    SPLIT_DELTA_TENSORS,
    StateLayers,
)
from meshwright.models.families.tensors import LLAMA_TENSORS
from meshwright.models.families.tool_formats import HERMES

# Keys of both Qwen3.5 families.
QWEN3_5_KEYS = (
    LLAMA_KEYS
    | NO_LOCAL_LAYERS
    | DELTA_KEYS
    | {"head_dim": Key("d_head", 256), "output_gate_type": Fixed(("swish", "silu"))}
    | fixed(attention_bias=False, attn_output_gate=True, mlp_only_layers=[])
    | ignored(
        "of the module that predicts a second token", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"
    )
    | ignored("how states are stored", "mamba_ssm_dtype")
)
QWEN3_5_SETS = {"qk_norm": True, "norm_offset": True, "attention_gate": True}
QWEN3_5_GROUPS = (StateLayers(every=4), Rope(share=0.25))

FAMILY = Family(
    "qwen3_5",
    "Qwen3.5 (text)",
    ("Qwen3_5ForCausalLM",),
    model_types=("qwen3_5_text",),
    wrappers=("qwen3_5",),
    keys=QWEN3_5_KEYS,
    sets=QWEN3_5_SETS,
    groups=QWEN3_5_GROUPS,
    tensors=LLAMA_TENSORS | GATED_QUERIES | SPLIT_DELTA_TENSORS,
    more_layers=True,
    tool_calls=HERMES,
)
