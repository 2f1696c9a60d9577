"""For reference/support.md: which models run under which axes, in training and in inference."""

from collections.abc import Iterator

from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.layout.runs import layout_lacks, model_lacks
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.models.presets import PRESETS
from meshwright.units import format_count

LAYOUTS = {
    "`data`": "data=2",
    "`data`, ZeRO-1 or 2": "data=2,zero=2",
    "`fsdp`": "fsdp=2",
    "`tensor`": "tensor=2",
    "`tensor`, sequence parallel": "tensor=2,sequence_parallel=true",
    "`tensor2`": "tensor=2,tensor2=2",
    "`kv_replicas`": "tensor=2,kv_replicas=2",
    "`context`, all-gather": "context=2",
    "`context`, ring": "context=2,context_method=ring",
    "`context`, Ulysses": "context=2,context_method=ulysses",
    "`expert`": "fsdp=2,expert=2",
    "`pipe`, schedule `lanes`": "pipe=2,microbatches=2,schedule=lanes",
    "`pipe`, other schedules (on one host)": "pipe=2,microbatches=2",
    "`offload`": "data=2,offload=true",
    "fp8 or int8 matmuls": "data=2,matmul_dtype=fp8",
    "int8 or int4 weights": "tensor=2,weights_dtype=int8",
}
PHASES = {"train": "training", "prefill": "prefill", "generate": "generation"}


def layouts() -> str:
    """Which layouts run in which phase."""
    head = f"| layout | {' | '.join(PHASES.values())} |"
    rows = [
        f"| {name} | {' | '.join(_cell(words, phase) for phase in PHASES)} |"
        for name, words in LAYOUTS.items()
    ]
    return "\n".join([head, f"|---|{'---|' * len(PHASES)}", *rows])


def models() -> str:
    """Which presets run, family by family."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in names)} | {sizes} | yes | {runs} |"
        for names, sizes, runs in _families()
    ]
    return "\n".join(["| presets | parameters | plans | runs |", "|---|---|---|---|", *rows])


def _cell(text: str, phase: str) -> str:
    try:
        lacks = layout_lacks(Layout.parse(text), phase)
    except MeshwrightError:
        return "–"
    return "planned only" if lacks else "runs"


def _families() -> Iterator[tuple[list[str], str, str]]:
    """Presets of one family together: (names, from the smallest to the largest, whether they run)."""
    groups: dict[tuple[str, str], list[ModelConfig]] = {}
    for name, config in PRESETS.items():
        runs = model_lacks(config)
        groups.setdefault((name.split("-")[0], f"no: {runs}" if runs else "yes"), []).append(config)
    for (_, runs), configs in groups.items():
        yield [config.name for config in configs], _sizes(configs), runs


def _sizes(configs: list[ModelConfig]) -> str:
    totals = sorted(count_params(config).total for config in configs)
    ends = dict.fromkeys([format_count(totals[0]), format_count(totals[-1])])
    return " to ".join(ends)
