"""Replicas of KV heads: tensor parallelism beyond the number of KV heads.

Source: Pope et al., "Efficiently Scaling Transformer Inference" (2022), section 3.3, for replicated KV heads.
"""

from collections.abc import Iterator

from meshwright.errors import LayoutError
from meshwright.layout.axes.axis import (
    EVERYWHERE,
    WIDE_LETTERS,
    Ask,
    Axis,
    Composition,
    Option,
    ShortForm,
    divisors,
)
from meshwright.layout.rules import Table
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
from meshwright.notation.mesh import Mesh

# Devices of one tensor group that a search reaches by replicas: PaLM's 12 and those of two GPU nodes.
_WIDEST = 16
_LETTERS = WIDE_LETTERS.replace("K", "")


class KvReplicas(Axis):
    """N, F and V over `tensor` and then `kv_replicas`; K over `tensor` alone, so G takes the replicas.

    In generation the axes over which the heads leave a cache whole may split it otherwise: `cache=batch`
    splits its sequences, cache[B_kv_replicas, S, K_tensor, H], `cache=sequence` its positions,
    cache[B, S_kv_replicas, K_tensor, H]. Latents have no heads, so `tensor` does it too. With `cache=batch`
    queries travel to the cache and sums of values back: two AllToAlls a layer.
    """

    def compose(self, tables: Composition) -> None:
        if tables.form["cache"] != "copies":
            tables.cache_letter = {"batch": "B", "sequence": "S"}[tables.form["cache"]]
        tables.add(EVERYWHERE, _LETTERS, "kv_replicas")
        tables.add("activations", "G", "kv_replicas")
        if tables.form["sequence_parallel"]:
            tables.add("activations", "TC", "kv_replicas")

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, object]]:
        """Degrees that give models of few KV heads as wide a split as others, where all letters divide."""
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

    def fit(self, config: ModelConfig, mesh: Mesh, table: Table, schedule: Schedule) -> None:
        """Queries of one KV head are neighbours: only a device with a single KV head can share it."""
        copies, tensor = (mesh.sizes.get(axis, 1) for axis in ("kv_replicas", "tensor"))
        if copies > 1 and tensor != config.num_kv_heads:
            keys, heads = table.split("k", "BTKH"), config.num_kv_heads
            raise LayoutError(
                f"{keys}: kv_replicas = {copies} needs one KV head a device, and "
                f"{heads} KV heads (K) lie over tensor = {tensor}; fits: tensor = {heads}"
            )

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        return (
            "the queries of each KV head and the feed-forward width are split over "
            f"{form['kv_replicas']} chips, each with a copy of that KV head"
        )


_CACHE = Option(("copies", "batch", "sequence"), ("tensor", "kv_replicas"))
KV_REPLICAS = KvReplicas("kv_replicas", {"cache": _CACHE})
