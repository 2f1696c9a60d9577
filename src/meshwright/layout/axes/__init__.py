"""The axes of parallelism, one record each, which the short form, search, checks and prose read."""

from meshwright.layout.axes.axis import Ask, Axis, Composition, Option, ShortForm, divisors
from meshwright.layout.axes.context import CONTEXT
from meshwright.layout.axes.data import DATA
from meshwright.layout.axes.expert import EXPERT, EXPERT_NODES
from meshwright.layout.axes.fsdp import FSDP
from meshwright.layout.axes.kv_replicas import KV_REPLICAS
from meshwright.layout.axes.pipe import PIPE
from meshwright.layout.axes.tensor import TENSOR, TENSOR2

# From the outermost axis of a mesh to the innermost.
AXES: tuple[Axis, ...] = (
    PIPE,
    DATA,
    FSDP,
    EXPERT_NODES,
    EXPERT,
    CONTEXT,
    TENSOR2,
    TENSOR,
    KV_REPLICAS,
)
# In the order in which a search chooses them: what each tries depends on those before.
SEARCHED: tuple[Axis, ...] = (PIPE, CONTEXT, TENSOR, TENSOR2, KV_REPLICAS, FSDP, DATA, EXPERT, EXPERT_NODES)

__all__ = ["AXES", "SEARCHED", "Ask", "Axis", "Composition", "Option", "ShortForm", "divisors"]
