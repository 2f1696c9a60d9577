"""The layouts that a training program runs, by its launcher's record."""

from meshwright.errors import PlanError
from meshwright.hardware.topology import Hardware
from meshwright.layout import DEGREES, Layout
from meshwright.layout.axes import CONTEXT, DATA, FSDP, TENSOR
from meshwright.layout.pipelines import SCHEDULES
from meshwright.models.config import ModelConfig
from meshwright.programs.launcher import Launcher


def check_chips(launcher: Launcher, hardware: Hardware) -> None:
    """Raises PlanError for chips that the program does not run on."""
    if hardware.chip.kind not in launcher.chips:
        raise PlanError(
            f"--for {launcher.name} runs on {' and '.join(kind.upper() for kind in launcher.chips)}s, and "
            f"{hardware.spec} has {hardware.chip.kind.upper()}s; fits: --hardware h100:8x8"
            + ("" if "tpu" in launcher.chips else ", or --for maxtext on TPUs")
        )


def launcher_lacks(launcher: Launcher, config: ModelConfig, layout: Layout) -> str | None:
    """Why the program does not run this layout; None if it does."""
    name, degrees = launcher.name, {axis: layout.degree(axis) for axis in DEGREES}
    for axis, degree in degrees.items():
        if degree > 1 and axis not in launcher.axes:
            return f"{name} has no axis for {axis}={degree}"
    for pair in launcher.apart:
        if all(degrees[axis] > 1 for axis in pair.split()):
            return f"{name} does not combine {' and '.join(pair.split())}"
    return (
        _schedule_lacks(launcher, config, layout)
        or _state_lacks(launcher, layout, degrees[FSDP.name] > 1, degrees[DATA.name] > 1)
        or _words_lack(launcher, layout, degrees)
    )


def _schedule_lacks(launcher: Launcher, config: ModelConfig, layout: Layout) -> str | None:
    schedule = layout.schedule
    if schedule.remat not in launcher.remats:
        return f"{launcher.name} has no remat={schedule.remat}"
    if layout.pipe == 1:
        return None
    if schedule.pipeline not in launcher.schedules:
        return f"{launcher.name} has no schedule={schedule.pipeline}"
    chunks = layout.pipe * SCHEDULES[schedule.pipeline].chunks(schedule.interleave)
    if launcher.equal_stages and config.num_layers % chunks:
        return f"{launcher.name} has equal stages, and {config.num_layers} layers make no {chunks}"
    return None


def _state_lacks(launcher: Launcher, layout: Layout, is_sharded: bool, is_copied: bool) -> str | None:
    stage = str(layout.rules.zero_stage)
    fits = launcher.zero_sharded if is_sharded else launcher.zero_data if is_copied else ("0",)
    if layout.degree(CONTEXT.name) > 1:
        fits = fits if is_sharded or is_copied else launcher.zero_data + launcher.zero_sharded
        if stage != "0" and not layout.word("zero_context"):
            return f"{launcher.name} shards state over context ranks too"
    return None if stage in fits else f"{launcher.name} has no zero={stage} here"


def _words_lack(launcher: Launcher, layout: Layout, degrees: dict[str, int]) -> str | None:
    schedule, is_split = layout.schedule, layout.word("sequence_parallel")
    lacks = {
        "grouped=true": schedule.grouped,
        f"capacity={schedule.capacity}": schedule.capacity is not None,
        "offload=true": schedule.offload,
        "offload_optimizer=true": schedule.offload_optimizer and not launcher.offloads,
        f"inner={layout.word('inner')}": layout.word("inner") is not None,
        f"context_method={layout.word('context_method')}": degrees[CONTEXT.name] > 1
        and layout.word("context_method") not in launcher.context_methods,
        "sequence_parallel=true": is_split and launcher.sequence_parallel == "never",
        "sequence_parallel=false": degrees[TENSOR.name] > 1
        and not is_split
        and launcher.sequence_parallel == "always",
    }
    return next((f"{launcher.name} has no {word}" for word, lacking in lacks.items() if lacking), None)
