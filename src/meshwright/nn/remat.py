"""Names of arrays that remat policies save, and the policy of a layout."""

from collections.abc import Callable
from typing import Any

import jax

from meshwright.layout import Layout
from meshwright.nn.each_device import KEPT
from meshwright.nn.products.contract import LATER

# Names that a remat policy may save: results of operations, never gathered arrays (or FSDP would keep
# every layer's whole weights) and nothing from within an operation. cost/graph.py counts the same.
MATMUL, SECOND, OPERATION = "matmul", "second matmul", "operation"
# The same products with a latent as input: queries, keys and values, larger than the latent.
OF_LATENT = {MATMUL: "matmul of a latent", SECOND: "second matmul of a latent"}
# The name of a layer's input if it is offloaded: without a name it stays on the device.
INPUT = "input"

_SAVED = {
    "none": (MATMUL, SECOND, *OF_LATENT.values(), OPERATION, KEPT),
    "attention": (MATMUL, SECOND, *OF_LATENT.values(), OPERATION, KEPT),  # scores are within an operation
    "matmuls": (MATMUL, SECOND, *OF_LATENT.values(), KEPT),
    "latents": (MATMUL, SECOND, KEPT),
    "alternate": (MATMUL, OF_LATENT[MATMUL], KEPT),
    "full": (),
}


def policy(layout: Layout) -> Callable[..., Any]:
    """The remat policy: the arrays to save for the backward pass, and the memory that holds them.

    XLA for CPU has only one memory: offloaded arrays stay in it (jax 0.10.2).
    """
    if not layout.schedule.offload:
        return jax.checkpoint_policies.save_only_these_names(*_SAVED[layout.schedule.remat], LATER)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[LATER],
        names_which_can_be_offloaded=[INPUT, *_SAVED[layout.schedule.remat]],
        offload_src="device",
        offload_dst="pinned_host",
    )
