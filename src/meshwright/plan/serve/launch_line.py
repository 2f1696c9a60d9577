"""The command that starts another engine with a planned layout, and settings that it does not change."""

from dataclasses import dataclass

from meshwright.engines.serving_engine import ServingEngine
from meshwright.layout import Layout
from meshwright.layout.axes import CONTEXT, EXPERT, PIPE, TENSOR2
from meshwright.models.config import ModelConfig


@dataclass(frozen=True)
class LaunchLine:
    """A server of an engine.

    command: the line. file: lines of its file of settings. needs: conditions of its start, in words.
    defaults: settings that stay at the engine's default.
    """

    engine: str
    command: str
    file: tuple[str, ...]
    needs: tuple[str, ...]
    defaults: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """The key `launch` of `mw plan serve --engine` in docs/reference/json.md."""
        return {
            "engine": self.engine,
            "command": self.command,
            "file": list(self.file),
            "needs": list(self.needs),
            "defaults": list(self.defaults),
        }


def has_settings_for(engine: ServingEngine, layout: Layout) -> bool:
    """Whether the engine has a setting for every split of this layout."""
    if engine.name == "meshwright":
        return True
    degrees = [layout.degree(axis.name) for axis in (TENSOR2, PIPE, CONTEXT)]
    return all(degree == 1 for degree in degrees) and layout.word("cache") == "copies"


def launch_line(
    engine: ServingEngine, config: ModelConfig, layout: Layout, *, sequences: int, context: int
) -> LaunchLine:
    """The line that serves `config` with this layout.

    sequences: of all replicas of attention at once. context: positions of the longest request.
    """
    data, expert, cache = layout.data, layout.degree(EXPERT.name), layout.precision.cache_dtype
    devices, copies = layout.mesh.num_devices, 1
    if config.moe is None:  # groups share nothing: each is a server
        devices, copies, data = devices // data, data, 1
    values: dict[str, object] = {
        "tensor": devices // data,
        "devices": devices,
        "data": data if data > 1 else None,
        "replicas": copies if copies > 1 else None,
        "expert": expert if expert > 1 else None,
        "experts": "" if expert > 1 else None,
        "sequences": min(-(-sequences // (data * copies)), engine.max_sequences),
        "all_sequences": min(-(-sequences // copies), data * engine.max_sequences),
        "step_tokens": engine.step_tokens,
        "context": context,
        "memory_share": engine.memory_share,
        "cache": engine.cache_names.get(cache),
    }
    given = {name: value for name, value in values.items() if value is not None}
    flags = [flag.format(given[name]) for name, flag in engine.flags.items() if flag and name in given]
    lines = tuple(line.format(given[name]) for name, line in engine.file.items() if name in given)
    weights = layout.precision.experts_dtype or layout.precision.weights_dtype
    needs = [] if weights == layout.precision.compute_dtype else [f"a checkpoint with weights in {weights}"]
    if copies > 1 and "replicas" not in engine.flags:
        needs.append(f"{copies} such servers and a load balancer")
    needs += [need for name, need in engine.needs.items() if name in given]
    if cache not in engine.cache_names and engine.cache_names:
        needs.append(f"a cache in {cache}, whose setting is not known")
    command = " ".join([engine.command.format(model=config.name), *flags])
    return LaunchLine(engine.name, command, lines, tuple(needs), engine.defaults)
