"""Tensor parallelism: heads and feed-forward width are split; and a second tensor axis.

Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al. (2022) for sequence parallelism; Pope et al.,
"Efficiently Scaling Transformer Inference" (2022), for two tensor axes.
"""

from collections.abc import Iterator
from typing import Any

from meshwright.layout.axes.axis import EVERYWHERE, WIDE_LETTERS, Ask, Axis, Composition, FormWord, ShortForm
from meshwright.layout.rules import Rules
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.mixers import LIKE_LETTERS
from meshwright.models.parameters import dimensions
from meshwright.notation.mesh import Mesh
from meshwright.units import divisors

# Tensor devices that a search tries at most, in training and in inference, and second axes in inference.
MAX_TENSOR, MAX_SERVING_TENSOR, _SERVING_TENSOR2 = 64, 128, (2, 4, 8)
# Below this number of chips one axis always beats two: the bound of How to Scale Your Model is 72 for F = 4D.
MIN_IN_2D = 16


class TensorAxis(Axis):
    """N, K, F and V over `tensor`; with sequence parallelism T takes it if no other letter does."""

    def compose(self, tables: Composition) -> None:
        tables.add(EVERYWHERE, WIDE_LETTERS, "tensor")
        if tables.form["sequence_parallel"]:
            tables.add("activations", "TC", "tensor")

    def read(self, rules: Rules, form: ShortForm, mesh: Mesh) -> dict[str, object]:
        splits_positions = {"tensor", "kv_replicas"} & {*rules.activations.axes_of("T")}
        return {"sequence_parallel": True} if splits_positions else {}

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Every degree that divides, with sequence parallelism if the positions divide.

        It sends the same bytes, splits the work on norms and residuals, and keeps a share of their inputs.
        So the form without it is tried only if a condition names it.
        """
        for tensor in tensor_degrees(ask.config, ask.chips):
            divides = tensor > 1 and ask.workload.seq_len % (form["context"] * tensor) == 0
            if not divides or "sequence_parallel" in ask.conditions:
                yield {"tensor": tensor, "sequence_parallel": False}
            if divides:
                yield {"tensor": tensor, "sequence_parallel": True}

    def serving_choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Every degree that splits the heads of the cache."""
        for tensor in divisors(ask.chips):
            if cached_heads(ask.config) % tensor == 0 and tensor <= MAX_SERVING_TENSOR:
                yield {"tensor": tensor}

    def free_words(self, form: ShortForm, config: ModelConfig, schedule: Schedule) -> dict[str, Any]:
        """Sequence parallelism over `tensor`, unless experts without a capacity gather tokens over it."""
        heads = form["tensor"] * form["kv_replicas"]  # a model with one KV head may have only replicas
        is_free = form["expert"] == heads == 1 and (config.moe is None or schedule.capacity is not None)
        return {"tensor": 2, "sequence_parallel": True} if is_free else {}

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        summed = (
            "reduce-scattered by tokens and all-gathered before the next matmul (sequence parallelism)"
            if form["sequence_parallel"]
            else "summed before the next operation can begin (AllReduce)"
        )
        return (
            f"heads and feed-forward width are split over {form['tensor']} chips, which work on the same "
            f"tokens. The second matmul of attention and of the MLP leaves partial sums, {summed}"
        )

    def serving_words(self, config: ModelConfig, form: ShortForm) -> str:
        return (
            f"Heads and feed-forward width are split over tensor = {form['tensor']}, and so are the weights "
            f"and the {config.num_kv_heads} KV heads (K) of the cache. Each layer has two all-reduces of one "
            "token per sequence, which are latency-bound."
        )


def tensor_degrees(config: ModelConfig, num_chips: int) -> list[int]:
    """Degrees of `tensor` that divide the chips, heads and feed-forward; the vocabulary may be padded."""
    of_stacks = [dimensions(layer) for layer in config.each_variant]
    sizes = of_stacks[0]
    letters = [letter for letter in WIDE_LETTERS if letter != "V" and sizes.get(letter)]
    of_mixers = (like for letter, like in LIKE_LETTERS.items() if letter in WIDE_LETTERS)
    letters += [letter for like in of_mixers if (letter := next((x for x in like if x in sizes), ""))]
    return [
        degree
        for degree in divisors(num_chips)
        if degree <= MAX_TENSOR
        and all(sizes[letter] % degree == 0 for sizes in of_stacks for letter in letters if letter in sizes)
    ]


def cached_heads(config: ModelConfig) -> int:
    """Heads that devices can split in inference: query heads with latents, otherwise KV heads."""
    return config.num_heads if config.mla else config.num_kv_heads


class Tensor2(Axis):
    """D of weights and activations over `tensor2`: a second tensor axis (2D tensor parallelism)."""

    def compose(self, tables: Composition) -> None:
        tables.add(EVERYWHERE, "D", "tensor2", first=True)

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Two tensor axes take two axes of a torus; a switch has one."""
        yield {}
        if ask.torus and form["tensor"] >= 8 and form["tensor"] % 2 == 0:
            yield {"tensor": form["tensor"] // 2, "tensor2": 2}

    def serving_choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """2D weight-stationary layouts, for generation on a torus."""
        yield {}
        if ask.torus and ask.workload.phase == "generate":
            yield from ({"tensor2": degree} for degree in _SERVING_TENSOR2 if ask.chips % degree == 0)

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        over = form["tensor2"]
        return f"the model dimension of weights and activations is split over {over} chips (2D tensor)"

    def serving_words(self, config: ModelConfig, form: ShortForm) -> str:
        return f"D is split over tensor2 = {form['tensor2']} (2D weight-stationary)."


_ALSO = ("tp", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size", "mp")
_SEQUENCE_PARALLEL = FormWord((False, True), ("tensor", "kv_replicas"))
TENSOR = TensorAxis(
    "tensor", turn=2, options={"sequence_parallel": _SEQUENCE_PARALLEL}, always=True, also=_ALSO
)
TENSOR2 = Tensor2("tensor2", turn=3, takes_from=("tensor",))
