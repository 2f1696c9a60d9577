"""Keys of config.json that make layers differ: local attention, and layers without rotary positions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Part

GLOBAL = "full_attention"


@dataclass(frozen=True)
class LocalLayers:
    """The window of local layers, and the layers that see all positions.

    window: the default of the key. global_every: each n-th layer is global if no list says it; 0 for none.
    pattern: names of a key that gives that n. unturned: global layers have no rotary positions, if other
    layers are local. key, field, kind: of the window in the file, of the window
    in ModelConfig, and of a local layer in `layer_types`.
    """

    window: int | None = None
    global_every: int = 0
    pattern: tuple[str, ...] = ()
    key: str = "sliding_window"
    field: str = "sliding_window"
    kind: str = "sliding_attention"
    unturned: bool = False

    @property
    def parts(self) -> Mapping[str, Part]:
        listed = dict.fromkeys(self.pattern, Part(("global_every",)))
        return {self.key: Part((self.field,)), "layer_types": Part(("global_every",), (list,))} | listed

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        """No fields if every layer sees all positions that the model has."""
        window = given.get(self.key, self.window)
        every = next((given[key] for key in self.pattern if given.get(key) is not None), None)
        if every is None:
            every = fields.get("nope_every", self.global_every)
        if isinstance(every, str):  # EXAONE's "LLLG"
            every = each(list(every), "G", "L", "the pattern of layers", name)
        numbers: tuple[int, ...] = ()
        if kinds := given.get("layer_types"):
            every, numbers = self._listed(kinds, name)
        if window is None or every == 1:
            return {}
        unturned = {"nope_every": every, "nope_layers": numbers} if self.unturned else {}
        if isinstance(window, int) and window >= fields["max_seq_len"]:
            return unturned
        return {self.field: window, "global_every": every, "global_layers": numbers} | unturned

    def _listed(self, kinds: list[Any], name: str) -> tuple[int, tuple[int, ...]]:
        """n if each n-th layer is global; otherwise 0, and the numbers of the global layers."""
        if unknown := [kind for kind in kinds if kind not in (GLOBAL, self.kind)]:
            raise ModelError(
                f"{name}: layer_types: {unknown[0]!r} is not supported; fits: {GLOBAL}, {self.kind}"
            )
        numbers = tuple(number for number, kind in enumerate(kinds) if kind == GLOBAL)
        every = numbers[0] + 1 if numbers else 0
        if numbers == tuple(range(every - 1, len(kinds), every or 1))[: len(kinds) if every else 0]:
            return every, ()
        return 0, numbers

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kinds = [GLOBAL if window is None else self.kind for window in model.windows]
        is_listed = model.global_every or model.global_layers
        return {self.key: getattr(model, self.field)} | ({"layer_types": kinds} if is_listed else {})


# Llama 4's: a local layer sees its own chunk.
CHUNKED_LAYERS = LocalLayers(
    window=8192, key="attention_chunk_size", field="attention_chunk", kind="chunked_attention"
)


@dataclass(frozen=True)
class UnturnedLayers:
    """Each n-th layer has no rotary positions: `no_rope_layers` lists 0 for them, or an interval says it."""

    every: int = 4

    @property
    def parts(self) -> Mapping[str, Part]:
        read = ("nope_every",)
        return {"no_rope_layers": Part(read, (list,)), "no_rope_layer_interval": Part(read, (int,))}

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        every = given.get("no_rope_layer_interval")
        every = self.every if every is None else every
        if flags := given.get("no_rope_layers"):
            every = each(flags, 0, 1, "no_rope_layers", name)
        return {"nope_every": every if every <= fields["num_layers"] else 0}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"no_rope_layers": [int(layer.kind.turned) for layer in model.layers]}


@dataclass(frozen=True)
class ExpertLayers:
    """The first layers are dense, as `mlp_layer_types` lists them; without that list, the number says it.

    dense: their number if the file has neither list nor `key`.
    """

    dense: int = 1
    key: str = "first_k_dense_replace"

    @property
    def parts(self) -> Mapping[str, Part]:
        return {
            "mlp_layer_types": Part(("moe.num_dense_layers",), (list,)),
            self.key: Part(("moe.num_dense_layers",), (int,)),
            "mlp_only_layers": Part(("moe.num_dense_layers",), (list,)),
        }

    def read(self, given: Mapping[str, Any], fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        number = given.get(self.key)
        number = self.dense if number is None else number
        kinds = given.get("mlp_layer_types")
        if (numbers := given.get("mlp_only_layers")) is not None and kinds is None:
            kinds = ["dense" if n in numbers else "sparse" for n in range(fields["num_layers"])]
        if kinds:
            number = kinds.count("dense")
            if kinds != ["dense"] * number + ["sparse"] * (len(kinds) - number):
                raise ModelError(
                    f"{name}: this order of dense layers is not supported; fits: dense ones first"
                )
        return {"moe": replace(fields["moe"], num_dense_layers=number)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        number = model.num_dense_layers
        return {
            "mlp_layer_types": ["dense"] * number + ["sparse"] * (model.num_layers - number),
            self.key: number,
        }


def each(listed: list[Any], special: Any, others: Any, key: str, name: str) -> int:
    """n if each n-th element is `special` and all others are `others`; 0 if none is special, 1 if all are.

    >>> each(["local", "global"] * 3, "global", "local", "layer_types", "mine")
    2
    """
    every = listed.index(special) + 1 if special in listed else 0
    if listed != [special if every and (n + 1) % every == 0 else others for n in range(len(listed))]:
        raise ModelError(f"{name}: this {key} is not supported; fits: {others!r}, every n-th {special!r}")
    return every
