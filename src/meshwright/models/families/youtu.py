from meshwright.models.families.common import LATENT, LATENT_TENSORS, LLAMA_TENSORS, SIZES
from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.rope import Rope

FAMILY = Family(
    "youtu",
    "Youtu-LLM",
    ("YoutuForCausalLM",),
    keys=SIZES
    | LATENT
    | {"tie_word_embeddings": Key("tied_embeddings", True)}
    | ignored("training only", "embedding_initializer_range")
    | fixed(attention_bias=False, mlp_bias=False, rope_interleave=True),
    groups=(Rope(),),
    tensors=LLAMA_TENSORS | LATENT_TENSORS,
)
