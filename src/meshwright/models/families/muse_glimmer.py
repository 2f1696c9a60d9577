from meshwright.models.families.family import Family, Key, fixed, ignored, without
from meshwright.models.families.keys import ACTIVATION, EPS_1E_5, LLAMA_KEYS, PLANNED_POSITIONS
from meshwright.models.families.layers import LocalLayers

# Keys of both Muse families.
MUSE_KEYS = (
    without(LLAMA_KEYS, "hidden_act")
    | EPS_1E_5
    | PLANNED_POSITIONS
    | {
        "hidden_activation": Key("activation", "silu", also=("hidden_act",), form=ACTIVATION),
        "final_logit_softcapping": Key("logit_softcap"),
        "output_multiplier": Key("logit_scale"),
    }
    | fixed(attention_bias=False)
    | ignored("planned only: factors of queries and sums", "qk_scale_factor", "post_norm_eps")
    | ignored("planned only, and positions change no plan", "layer_rope_theta")
)

FAMILY = Family(
    "muse_glimmer",
    "Muse Glimmer",
    ("MuseGlimmerForCausalLM",),
    model_types=("muse_glimmer_text",),
    wrappers=("muse_glimmer",),
    keys=MUSE_KEYS,
    sets={"attention_gate": True, "post_norms": True, "planned_only": "norms without weights (Muse)"},
    groups=(LocalLayers(window=2048, global_every=4),),
    tensors={},
    is_written=False,
)
