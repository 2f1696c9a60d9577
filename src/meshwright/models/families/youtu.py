from meshwright.models.families.family import Family, Key, fixed, ignored
from meshwright.models.families.keys import LATENT, SIZES
from meshwright.models.families.rope import Rope
from meshwright.models.families.tensors import LATENT_TENSORS, LLAMA_TENSORS

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
