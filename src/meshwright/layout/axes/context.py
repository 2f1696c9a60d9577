"""Context parallelism: each sequence is split by position."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.layout.axes.axis import Ask, Axis, Composition, Form, Option, divisors
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig

if TYPE_CHECKING:
    from meshwright.layout.layout import Layout

# Splitting a sequence further leaves too few queries a device for the rows of a matmul.
MAX_CONTEXT, _MIN_POSITIONS = 64, 512


class Context(Axis):
    """T_context. Keys and values are gathered for attention, or stay S_context and pass round a ring."""

    def compose(self, tables: Composition) -> None:
        tables.add("activations", "TC", "context")
        if tables.form["context_method"] == "ring":
            tables.add("activations", "S", "context")

    def choices(self, ask: Ask, form: Form) -> Iterator[dict[str, object]]:
        for degree in divisors(ask.chips):
            if degree == 1 or splits(ask.workload.seq_len, degree):
                yield {"context": degree}

    def words(self, config: ModelConfig, workload: Workload, layout: "Layout") -> str:
        how = "pass round a ring" if layout.word("context_method") == "ring" else "are gathered"
        piece = workload.seq_len // layout.context
        text = (
            f"each sequence is cut into {layout.context} pieces of {piece:,} tokens; keys and values {how} "
            "for attention"
        )
        return (
            f"{text}, and the pieces' chips share what ZeRO shards" if layout.word("zero_context") else text
        )


def splits(seq_len: int, context: int) -> bool:
    """Whether the shards of a sequence divide and are long enough for a search to try."""
    return seq_len % context == 0 and context <= min(MAX_CONTEXT, seq_len // _MIN_POSITIONS)


CONTEXT = Context("context", {"context_method": Option(("allgather", "ring"))}, always=True)
