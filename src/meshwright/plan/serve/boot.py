"""Whether an engine starts with a layout: the memory of a chip after start-up, and the time until then."""

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.cost.record_inference import cache_bytes
from meshwright.cost.serving_step import pass_cost
from meshwright.engines.serving_engine import ServingEngine
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.server_programs import server_programs
from meshwright.models.config import ModelConfig
from meshwright.plan.serve.point import Point

# Tokens of each prompt in the largest step.
_PROMPT = 256


@dataclass(frozen=True)
class Boot:
    """Bytes of a chip after start-up, and seconds of start-up.

    activations: arrays of the largest step, which engines run before they size their caches. caches: the rest
    of the engine's share of the memory. outside: programs, graphs and libraries, which are not part of that
    share. device: memory of the chip. positions: tokens that fit into the caches of one group of devices.
    boots: whether one request fits into the caches, and everything into the memory. load_seconds: time to
    read the weights of all chips of a host from its disk. compile_seconds: time to compile programs and to
    capture graphs, if no earlier start has left them in a cache.
    """

    weights: int
    activations: int
    caches: int
    outside: int
    device: int
    positions: int
    boots: bool
    load_seconds: float
    compile_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The key `boot` of `mw plan serve --engine` in docs/reference/json.md."""
        return asdict(self)


def server_start(point: Point) -> dict[str, Any]:
    """The key `server` of `mw plan serve`: the programs of `mw serve`, and whether a chip holds all of it.

    bytes: weights, cache and buffers of the plan, and the code of all programs, if its size is known.
    """
    chip = point.hardware.chip
    counts = server_programs(point.config, point.layout, chip.platform, point.batch, point.requests.context)
    code = counts.code_bytes(chip.platform.compiler, point.config.num_layers)
    total = int(point.memory.total) + (code or 0)
    return {
        "programs": counts._asdict(),
        "program_bytes": code,
        "bytes": total,
        "usable_bytes": chip.program_bytes,
        "boots": total <= chip.program_bytes,
    }


def boot_of(
    config: ModelConfig, hardware: Hardware, layout: Layout, engine: ServingEngine, context: int
) -> Boot | None:
    """The start of an engine for requests of up to `context` positions; None if its figures are unknown."""
    if not engine.outside_bytes or hardware.chip.kind != "gpu":  # the figures are of GPUs
        return None
    prompts = max(1, engine.step_tokens // _PROMPT) * layout.at("prefill").num_batch_shards
    _, memory = pass_cost(config, layout.at("prefill"), hardware, prompts, _PROMPT, _PROMPT)
    at, device = layout.at("generate"), hardware.chip.reported_bytes
    weights, activations = int(memory.weights), int(memory.buffers)
    caches = max(0, int(engine.cache_bytes(device, weights + activations)))
    position_bytes = float(cache_bytes(config, at, at.num_batch_shards, context)) / context
    positions, outside = int(caches / max(position_bytes, 1e-9)), int(engine.outside_bytes)
    on_host = min(hardware.num_chips, hardware.chip.chips_per_host) * weights
    return Boot(
        weights,
        activations,
        caches,
        outside,
        device,
        positions,
        positions >= context and weights + activations + caches + outside <= device,
        on_host / engine.load_bytes_per_second,
        engine.compile_seconds,
    )
