"""Memory of one device, planned beside compiled: its state, its results and the total."""

from collections.abc import Mapping

from meshwright.audit.compare.findings import Finding
from meshwright.audit.compile.programs import PlannedStep
from meshwright.units import format_bytes

# Weights, moments and caches are counted, so that they agree but for the tiles that a compiler fills.
STATE_TOLERANCE = 0.03
# What XLA holds beside its state depends on its schedule. XLA:CPU widens 16-bit numbers and orders operations
# without regard to memory, where a plan has the order of the other compilers: unbroken steps of small models
# take 2.2 times as much there. Of it only what is out of all proportion is noticed.
TOTAL_TOLERANCE = 0.35
CPU_TOTAL_TOLERANCE = 1.5


def compare_memory(
    planned: PlannedStep, compiled: Mapping[str, int], inputs: int, capacity: int | None, *, on_cpu: bool
) -> list[Finding]:
    """What of the compiled memory is not as planned.

    compiled: `arguments`, `outputs` (those that reuse no argument), `temporaries` and their `total`. inputs:
    bytes of arguments and results that are no state (tokens, logits). capacity: of the chip; None where
    another is compiled for.
    """
    total, state = compiled["total"], planned.state_bytes
    held = compiled["arguments"] + compiled["outputs"] - inputs
    found = []
    if abs(held - state) > STATE_TOLERANCE * state:
        found.append(_state(held, state, compiled["outputs"]))
    tolerance = CPU_TOTAL_TOLERANCE if on_cpu else TOTAL_TOLERANCE
    if not 1 / (1 + tolerance) <= (total - held + state) / planned.memory_total <= 1 + tolerance:
        found.append(
            _finding(
                "temporaries",
                f"the program takes {format_bytes(total)}, {total / planned.memory_total:.2f} times the "
                f"planned {format_bytes(planned.memory_total)}; its largest buffers are in memory.peak",
                "",
                total - planned.memory_total,
            )
        )
    if capacity is not None and total > capacity:
        found.append(too_large(total, capacity))
    return found


def too_large(total: int | None, capacity: int, said: str = "") -> Finding:
    """A program that a chip has no room for; said: the compiler's own words, where it refused."""
    needs = f"the program needs {format_bytes(total)};" if total else "the program does not fit:"
    what = f"{needs} a chip has {format_bytes(capacity)}" + (f" ({said})" if said else "")
    change = "shard more, recompute more (remat), or use more microbatches"
    return _finding("memory", what, change, total - capacity if total else 0)


def _state(held: int, state: int, outputs: int) -> Finding:
    if outputs > STATE_TOLERANCE * state and held > state:
        return _finding(
            "state",
            f"{format_bytes(outputs)} of new state is allocated beside the old, which is not donated",
            "donate the state: jax.jit(step, donate_argnums=0)",
            outputs,
        )
    return _finding(
        "state",
        f"weights, moments and caches take {format_bytes(held)}, planned {format_bytes(state)}",
        "",
        held - state,
    )


def _finding(tensor: str, what: str, change: str, extra_bytes: int) -> Finding:
    return Finding("memory", tensor, "", what, "", change, extra_bytes, None)
