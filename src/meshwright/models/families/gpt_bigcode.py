from meshwright.models.families.family import Family, fixed, ignored
from meshwright.models.families.gpt2 import FAMILY as GPT_2
from meshwright.models.families.gpt2 import GPT_SETS
from meshwright.models.families.tensors import fused, linear

_H = "transformer.h.{}"

FAMILY = Family(
    "gpt_bigcode",
    "StarCoder, SantaCoder",
    ("GPTBigCodeForCausalLM",),
    keys={**GPT_2.keys}
    | fixed(multi_query=True)
    | ignored("one, with multi_query", "num_key_value_heads")
    | ignored("how transformers runs it", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    | ignored("how transformers runs it", "inference_runner", "max_batch_size", "max_sequence_length")
    | ignored("how transformers runs it", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
    sets=GPT_SETS | {"num_kv_heads": 1},
    groups=(),
    prefix="transformer.",
    tensors={**GPT_2.tensors}
    | fused(("wq", "wk", "wv"), f"{_H}.attn.c_attn", ("NH", "KH", "KH"))
    | linear("wo", f"{_H}.attn.c_proj", "D", "NH")
    | linear("w_in", f"{_H}.mlp.c_fc", "F", "D")
    | linear("w_out", f"{_H}.mlp.c_proj", "D", "F"),
)
