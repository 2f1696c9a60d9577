"""Tensor parallelism: heads and feed-forward width are split; and the two axes that go with it.

Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al. (2022) for sequence parallelism.
"""

from collections.abc import Iterator

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
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions

MAX_TENSOR = 64


class Tensor(Axis):
    """N, K, F and V over `tensor`; with sequence parallelism T takes it where no other letter does."""

    def compose(self, tables: Composition) -> None:
        tables.add(EVERYWHERE, WIDE_LETTERS, "tensor")
        if tables.form["sequence_parallel"]:
            tables.add("activations", "TC", "tensor")

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, object]]:
        """Every degree that divides, with sequence parallelism where the positions divide.

        It sends the same bytes, splits the work on norms and residuals, and keeps a share of what they read.
        So the form without it is tried only where a condition names it.
        """
        for tensor in tensor_degrees(ask.config, ask.chips):
            divides = tensor > 1 and ask.workload.seq_len % (form["context"] * tensor) == 0
            if not divides or "sequence_parallel" in ask.conditions:
                yield {"tensor": tensor, "sequence_parallel": False}
            if divides:
                yield {"tensor": tensor, "sequence_parallel": True}

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


def tensor_degrees(config: ModelConfig, num_chips: int) -> list[int]:
    """Degrees of `tensor` that divide the chips, heads and feed-forward; the vocabulary may be padded."""
    sizes = dimensions(config)
    letters = [letter for letter in WIDE_LETTERS if letter != "V" and sizes.get(letter)]
    return [
        degree
        for degree in divisors(num_chips)
        if degree <= MAX_TENSOR and all(sizes[letter] % degree == 0 for letter in letters)
    ]


class Tensor2(Axis):
    """D of weights and activations over `tensor2`: a second tensor axis (2D tensor parallelism)."""

    def compose(self, tables: Composition) -> None:
        tables.add(EVERYWHERE, "D", "tensor2", first=True)

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, object]]:
        """Two tensor axes take two axes of a torus; a switch has one."""
        yield {}
        if ask.torus and form["tensor"] >= 8 and form["tensor"] % 2 == 0:
            yield {"tensor": form["tensor"] // 2, "tensor2": 2}

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        over = form["tensor2"]
        return f"the model dimension of weights and activations is split over {over} chips (2D tensor)"


_SEQUENCE_PARALLEL = Option((False, True), ("tensor", "kv_replicas"))
TENSOR = Tensor("tensor", {"sequence_parallel": _SEQUENCE_PARALLEL}, always=True)
TENSOR2 = Tensor2("tensor2")
