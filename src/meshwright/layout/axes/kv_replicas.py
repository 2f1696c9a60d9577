"""Replicas of KV heads: tensor parallelism beyond the number of KV heads.

Source: Pope et al., "Efficiently Scaling Transformer Inference" (2022), section 3.3, for replicated KV heads.
"""

from collections.abc import Iterator
from typing import Any

from meshwright.errors import LayoutError
from meshwright.layout.axes.axis import (
    CACHE_AXES,
    EVERYWHERE,
    WIDE_LETTERS,
    Ask,
    Axis,
    Composition,
    FormWord,
    ShortForm,
)
from meshwright.layout.axes.tensor import MAX_SERVING_TENSOR, MIN_IN_2D, cached_heads
from meshwright.layout.rules import AxisTable, Rules
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
from meshwright.notation.mesh import Mesh
from meshwright.units import divisors

# Devices of one tensor group that a search in training reaches by replicas: PaLM's 12, or two GPU nodes.
_WIDEST = 16
_LETTERS = WIDE_LETTERS.replace("K", "")


class KvReplicas(Axis):
    """N, F and V over `tensor` and then `kv_replicas`; K over `tensor` only, so G takes the replicas.

    In generation, axes that do not split the cache's heads may split another of its dimensions.
    `cache=batch` splits sequences, cache[B_kv_replicas, S, K_tensor, H], and `cache=sequence` positions,
    cache[B, S_kv_replicas, K_tensor, H]. Latents have no heads, so `tensor` is one of these axes too. With
    `cache=batch` queries travel to the cache and sums of values back: two AllToAlls a layer.
    """

    def compose(self, tables: Composition) -> None:
        if tables.form["cache"] != "copies":
            tables.cache_letter = {"batch": "B", "sequence": "S"}[tables.form["cache"]]
        tables.add(EVERYWHERE, _LETTERS, "kv_replicas")
        tables.add("activations", "G", "kv_replicas")
        if tables.form["sequence_parallel"]:
            tables.add("activations", "TC", "kv_replicas")

    def read(self, rules: Rules, form: ShortForm, mesh: Mesh) -> dict[str, object]:
        cached = dict(dict(rules.by_phase).get("generate", AxisTable(())).arrays).get("latent")
        if cached is None:
            return {}
        return {"cache": "sequence" if {*CACHE_AXES} & {*dict(cached).get("S", ())} else "batch"}

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Degrees that give models of few KV heads as wide a split as others, if all letters divide."""
        yield {"kv_replicas": 1}
        sizes, tensor = dimensions(ask.config), form["tensor"]
        if tensor != ask.config.num_kv_heads or form["tensor2"] > 1:
            return
        letters = [letter for letter in _LETTERS if letter != "V" and sizes.get(letter)]
        split = tensor * form["context"] if form["sequence_parallel"] else 1
        for degree in divisors(ask.chips)[1:]:
            divides = all(sizes[letter] % (tensor * degree) == 0 for letter in letters)
            positions = split == 1 or ask.workload.seq_len % (split * degree) == 0
            if tensor * degree <= _WIDEST and divides and positions:
                yield {"kv_replicas": degree}

    def serving_choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Degrees beyond the heads of the cache, with every split of the cache that they leave whole."""
        tensor, second, config = form["tensor"], form["tensor2"], ask.config
        for degree in divisors(ask.chips) if tensor == cached_heads(config) else [1]:
            group = tensor * degree
            if group > MAX_SERVING_TENSOR or (second > 1 and group * second < MIN_IN_2D):
                continue
            is_whole = degree > 1 or (config.mla is not None and tensor > 1)
            caches = _CACHE.fits if is_whole and ask.workload.phase == "generate" else ("copies",)
            yield from ({"kv_replicas": degree, "cache": cache} for cache in caches)

    def fit(self, config: ModelConfig, mesh: Mesh, table: AxisTable, schedule: Schedule) -> None:
        """Queries of one KV head are neighbours: only a device with a single KV head can share it."""
        copies, tensor = (mesh.sizes.get(axis, 1) for axis in ("kv_replicas", "tensor"))
        if copies > 1 and tensor != config.num_kv_heads:
            keys, heads = table.split("k", "BTKH"), config.num_kv_heads
            wider, rest = divmod(copies * tensor, heads)
            fits = f"tensor={heads},kv_replicas={wider}" if wider > 1 and not rest else f"tensor={heads}"
            raise LayoutError(
                f"{keys}: kv_replicas = {copies} needs one KV head a device, and "
                f"{heads} KV heads (K) are split over tensor = {tensor}; fits: {fits}"
            )

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        return (
            "the queries of each KV head and the feed-forward width are split over "
            f"{form['kv_replicas']} chips, each with a copy of that KV head"
        )

    def serving_words(self, config: ModelConfig, form: ShortForm) -> str:
        how = {
            "copies": "hold copies of the same KV heads",
            "batch": "split the cache by sequence, with two all-to-alls per layer",
            "sequence": "split the cache by position and combine partial softmax sums",
        }[form["cache"]]
        heads = config.num_kv_heads
        return f"There are more devices than the {heads} KV heads: kv_replicas = {form['kv_replicas']} {how}."


_CACHE = FormWord(("copies", "batch", "sequence"), ("tensor", "kv_replicas"))
KV_REPLICAS = KvReplicas("kv_replicas", turn=4, options={"cache": _CACHE})
