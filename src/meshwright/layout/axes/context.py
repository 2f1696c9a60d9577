"""Context parallelism: each sequence is split by position."""

from collections.abc import Iterator
from typing import Any

from meshwright.errors import LayoutError
from meshwright.layout.axes.axis import Ask, Axis, Composition, FormWord, ShortForm
from meshwright.layout.rules import AxisTable, Rules
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.notation.array import dividing_degrees
from meshwright.notation.mesh import Mesh
from meshwright.units import divisors

# With fewer positions a device has too few queries for the rows of a matmul, in training and in prefill.
MAX_CONTEXT, _MIN_POSITIONS, _MIN_PROMPT_POSITIONS = 64, 512, 128


class Context(Axis):
    """T_context. Keys and values are gathered for attention, or stay S_context and pass round a ring.

    Or heads are exchanged for positions: q[B, T_context, N, H] -> q[B, T, N_context, H], and back (Ulysses).
    Sources: Liu et al., "Ring Attention", 2023; Jacobs et al., "DeepSpeed Ulysses", 2023.
    """

    def check(self, form: ShortForm) -> None:
        if form["context_method"] == "ulysses" and form["kv_replicas"] > 1:
            raise LayoutError(
                f"layout: context_method = ulysses splits KV heads, but kv_replicas = {form['kv_replicas']} "
                f"copies them; fits: kv_replicas = 1, or context_method = ring"
            )

    def compose(self, tables: Composition) -> None:
        tables.add("activations", "TC", "context")
        if tables.form["context_method"] == "ring":
            tables.add("activations", "S", "context")
        if tables.form["context_method"] == "ulysses":
            tables.heads_axis = "context"

    def read(self, rules: Rules, form: ShortForm, mesh: Mesh) -> dict[str, object]:
        if rules.activations.attending is not None:
            return {"context_method": "ulysses"}
        return {"context_method": "ring"} if "context" in rules.activations.axes_of("S") else {}

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        for degree in divisors(ask.chips):
            if degree == 1 or splits(ask.workload.seq_len, degree):
                yield {"context": degree}

    def serving_choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, Any]]:
        """Prompts are split by position; generation has one position of each sequence."""
        if ask.workload.phase == "generate":
            yield {}
            return
        for degree in divisors(ask.chips)[1:]:
            positions, rest = divmod(ask.workload.seq_len, degree)
            if not rest and positions >= _MIN_PROMPT_POSITIONS:
                yield from ({"context": degree, "context_method": method} for method in ("allgather", "ring"))

    def free_words(self, form: ShortForm, config: ModelConfig, schedule: Schedule) -> dict[str, Any]:
        return {"context": max(2, form["context"])} if form["context_method"] == "allgather" else {}

    def fit(self, config: ModelConfig, mesh: Mesh, table: AxisTable, schedule: Schedule) -> None:
        """Raise LayoutError if Ulysses would leave a device without a whole head of keys."""
        if table.attending is None:
            return
        heads = table.attending.split("k", "BTKH")
        if config.num_kv_heads % (over := mesh.size(heads.axes_of("K"))):
            fits = ", ".join(map(str, dividing_degrees(config.num_kv_heads, config.num_kv_heads)))
            raise LayoutError(
                f"{heads}: {config.num_kv_heads} KV heads (K) do not divide over "
                f"{'·'.join(heads.axes_of('K'))} = {over}; fits: {{{fits}}}, or context_method = ring"
            )

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        piece = workload.seq_len // form["context"]
        text = (
            f"each sequence is cut into {form['context']} pieces of {piece:,} tokens; "
            f"{_WORDS[form['context_method']]}"
        )
        return f"{text}, and ZeRO shards over these chips as well" if form["zero_context"] else text


_WORDS = {
    "allgather": "keys and values are all-gathered for attention",
    "ring": "keys and values pass round a ring for attention",
    "ulysses": "for attention, an all-to-all gives each chip whole sequences of some of the heads (Ulysses)",
}


def splits(seq_len: int, context: int) -> bool:
    """Whether the shards of a sequence divide and are long enough for a search to try."""
    return seq_len % context == 0 and context <= min(MAX_CONTEXT, seq_len // _MIN_POSITIONS)


_METHODS = FormWord(("allgather", "ring", "ulysses"), ("context",))
_ALSO = ("cp", "context_parallel", "context_parallel_size", "ulysses")
CONTEXT = Context("context", turn=1, options={"context_method": _METHODS}, always=True, also=_ALSO)
