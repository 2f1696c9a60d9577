"""For reference/support.md: which models run under which axes, in training and in inference."""

from collections.abc import Iterator

from meshwright.layout.runs import model_lacks
from meshwright.layout.support import LAYOUTS, PHASES, phases_of
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.models.presets import PRESETS
from meshwright.units import format_count


def layouts() -> str:
    """Which layouts run in which phase."""
    head = f"| layout | {' | '.join(PHASES.values())} |"
    rows = [
        f"| {_name(feature)} | {' | '.join(_cell(lacks) for lacks in phases_of(feature).values())} |"
        for feature in LAYOUTS
    ]
    return "\n".join([head, f"|---|{'---|' * len(PHASES)}", *rows])


def models() -> str:
    """Which presets run, family by family."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in names)} | {sizes} | yes | {runs} |"
        for names, sizes, runs in _families()
    ]
    return "\n".join(["| presets | parameters | plans | runs |", "|---|---|---|---|", *rows])


def _name(feature: str) -> str:
    axis, comma, rest = feature.partition(",")
    return feature if " " in axis else f"`{axis}`{comma}{rest}"


def _cell(lacks: str | None) -> str:
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
