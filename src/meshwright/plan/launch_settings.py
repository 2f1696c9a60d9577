"""The settings of a training program for a planned layout, as its launcher's record writes them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.hardware.topology import Hardware
from meshwright.layout import DEGREES, Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.programs.launcher import Launcher

# Axes from the innermost, which get the links of a node first.
_INNER_FIRST = ("tensor", "context", "expert", "fsdp", "data")


@dataclass(frozen=True)
class LaunchSettings:
    """A program's settings.

    text: the settings in the program's form. command: the line that starts the run; arguments are part of it.
    needs: other conditions of the run, in words.
    """

    launcher: Launcher
    command: str
    text: str
    needs: tuple[str, ...]

    @property
    def file(self) -> tuple[str, str]:
        """The suffix of a file next to plan.toml, and its text: the settings, or a script with arguments."""
        suffix = {"arguments": "sh", "yaml": "yml", "python": "py"}.get(self.launcher.form)
        text = self.text
        if self.launcher.form == "arguments":
            text = " \\\n    ".join([self.command, *self.text.splitlines()])
        return f".{self.launcher.name}.{suffix or self.launcher.form}", text + "\n"

    def to_dict(self) -> dict[str, object]:
        """The key `launch` of docs/reference/json.md."""
        return {
            "for": self.launcher.name,
            "version": self.launcher.version,
            "form": self.launcher.form,
            "command": self.command,
            "settings": self.text,
            "needs": list(self.needs),
        }


def launch_settings(
    launcher: Launcher, config: ModelConfig, layout: Layout, workload: Workload, hardware: Hardware
) -> LaunchSettings:
    """The program's settings to train `config` in this layout."""
    values = _values(config, layout, workload, hardware)
    lines: list[str] = []
    needs = list(launcher.needs)
    for key, template in launcher.settings.items():
        kept = needs if key.startswith("note.") else lines
        if _applies(key.removeprefix("note."), values):
            kept.extend(template.format_map(values).splitlines())
    text = json.dumps(_nested(lines), indent=2) if launcher.form == "json" else "\n".join(lines)
    return LaunchSettings(launcher, launcher.command.format_map(values), text, tuple(needs))


def _applies(key: str, values: Mapping[str, Any]) -> bool:
    word, _, value = key.partition(".")
    if word == "always":
        return True
    if value:
        return str(values[word]).lower() == value
    return values[word] is True or (isinstance(values[word], int) and values[word] > 1)


def _values(config: ModelConfig, layout: Layout, workload: Workload, hardware: Hardware) -> dict[str, Any]:
    schedule, precision = layout.schedule, layout.precision
    degrees = {axis: layout.degree(axis) for axis in DEGREES}
    micro = workload.num_sequences // (layout.num_batch_shards * schedule.microbatches)
    pipelined, context = layout.pipe > 1, degrees["context"] > 1
    chunks = layout.pipe * SCHEDULES[schedule.pipeline].chunks(schedule.interleave)
    moe = config.moe
    outer, inner = _over_nodes(layout, hardware)
    return {
        **degrees,
        **{f"ici_{axis}": inner[axis] for axis in _INNER_FIRST},
        **{f"dcn_{axis}": outer[axis] for axis in _INNER_FIRST},
        "nodes": hardware.num_hosts,
        "chips_per_node": hardware.num_chips // hardware.num_hosts,
        "layers": config.num_layers,
        "width": config.d_model,
        "ffn": config.d_ff,
        "heads": config.num_heads,
        "head_width": config.d_head,
        "kv_heads": config.num_kv_heads,
        "grouped_heads": config.num_kv_heads < config.num_heads,
        "gated": config.gated and config.activation == "silu",
        "rms_norm": config.norm == "rms",
        "no_biases": not (config.qkv_bias or config.mlp_bias or config.attention_out_bias),
        "rope": config.positions == "rope",
        "rope_base": round(config.rope_theta),
        "untied": not config.tied_embeddings,
        "experts": moe.num_experts if moe else 1,
        "top_k": moe.experts_per_token if moe else 1,
        "expert_ffn": moe.d_ff if moe else config.d_ff,
        "seq_len": workload.seq_len,
        "micro_batch": micro,
        "microbatches": schedule.microbatches,
        "global_batch": workload.num_sequences,
        "local_batch": micro * schedule.microbatches if pipelined else micro,
        "batch_per_device": f"{workload.num_sequences / hardware.num_chips / schedule.microbatches:g}",
        "zero": layout.rules.zero_stage,
        "remat": schedule.remat,
        "schedule": schedule.pipeline if pipelined else "",
        "interleave": schedule.interleave if pipelined else 1,
        "stages": pipelined,
        "chunk_layers": config.num_layers // chunks if pipelined and config.num_layers % chunks == 0 else 0,
        "context_method": layout.word("context_method") if context else "",
        "sequence_parallel": bool(layout.word("sequence_parallel")),
        "rows_travel": degrees["expert"] > 1,
        "offload_optimizer": schedule.offload_optimizer,
        "weights_dtype": precision.weights_dtype,
        "compute_dtype": precision.compute_dtype,
        "matmul_dtype": precision.matmul_dtype,
        "optimizer_dtype": precision.optimizer_dtype,
    }


def _over_nodes(layout: Layout, hardware: Hardware) -> tuple[dict[str, int], dict[str, int]]:
    """The degree of each axis over nodes, and within a node; all of it within a TPU's slice."""
    degrees = {axis: layout.mesh.sizes.get(axis, 1) for axis in _INNER_FIRST}
    if hardware.chip.kind == "tpu":
        return dict.fromkeys(_INNER_FIRST, 1), degrees
    outer, inner, left = {}, {}, hardware.chips_per_node
    for axis, degree in degrees.items():
        inner[axis] = next(n for n in range(min(degree, left), 0, -1) if degree % n == 0 and left % n == 0)
        outer[axis] = degree // inner[axis]
        left //= inner[axis]
    return outer, inner


def _nested(lines: Iterable[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for line in lines:
        path, _, value = line.partition(" = ")
        *sections, name = path.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = json.loads(value)
    return tree
