from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.by_layer import by_layer
from meshwright.models.families.deepseek_v3 import FAMILY as V3
from meshwright.models.families.deepseek_v32 import INDEXER_KEYS, INDEXER_TENSORS
from meshwright.models.families.family import Family, Fixed, Key, Part, ignored
from meshwright.models.families.rope import Rope


@dataclass(frozen=True)
class Indexers:
    """The layers that have an indexer; the others read the keys that the last of them chose.

    every, offset: after the first layers each n-th has one, if the file does not say it.
    """

    every: int = 1
    offset: int = 2

    @property
    def parts(self) -> Mapping[str, Part]:
        return {
            "indexer_types": Part(("indexer",), (list,)),
            "index_topk_pattern": Part(("indexer",), (str, list)),
            "index_topk_freq": Part(("indexer",), (int,)),
            "index_skip_topk_offset": Part(("indexer",), (int,)),
        }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        numbers = range(fields["num_layers"])
        every = given.get("index_topk_freq") or self.every
        offset = given.get("index_skip_topk_offset") or self.offset
        shared = [max(n - offset + 1, 0) % every > 0 for n in numbers]
        if pattern := given.get("index_topk_pattern"):
            shared = [letter == "S" for letter in pattern]
        if kinds := given.get("indexer_types"):
            if unknown := {*kinds} - {"full", "shared"}:
                raise ModelError(f"{name}: indexer_types has {min(unknown)!r}; fits: 'full' and 'shared'")
            shared = [kind == "shared" for kind in kinds]
        indexer = fields["indexer"]
        chooses = replace(indexer, handed_on=any(shared))
        reads = replace(indexer, shared=True)
        return by_layer([{"indexer": reads if shared[n] else chooses} for n in numbers])

    def write(self, model: ModelConfig) -> dict[str, Any]:
        layers = (model.at(layer.kind.variant) for layer in model.layers)
        return {"indexer_types": ["full" if layer.own_indexer else "shared" for layer in layers]}


# Neighbouring elements of the indexer's heads are turned together, too.
_IN_PAIRS = {
    name: tensor if name == "index_weights" else replace(tensor, pairs="y")
    for name, tensor in INDEXER_TENSORS.items()
}

FAMILY = Family(
    "glm_moe_dsa",
    "GLM-5",
    ("GlmMoeDsaForCausalLM",),
    keys=dict(V3.keys)
    | INDEXER_KEYS
    | {
        "rms_norm_eps": Key("norm_eps", 1e-5),
        "first_k_dense_replace": Key("moe.num_dense_layers", 3),
        "indexer_rope_interleave": Fixed((True,)),
    }
    | ignored("as its class computes it", "layer_types", "mlp_layer_types", "num_experts")
    | ignored("of the module that predicts a second token", "index_share_for_mtp_iteration"),
    sets=V3.sets,
    groups=(Rope(), Indexers()),
    tensors={**V3.tensors, **_IN_PAIRS},
    more_layers=True,
)
