"""The layouts that are tried for inference, by the serving choices of the axes.

Weights are never gathered in generation, so there is no FSDP. Tensor parallelism goes as far as the heads:
devices beyond the K KV heads (`kv_replicas`) split the cache by sequence of the batch or by position. A
second tensor axis over D is 2D weight-stationary. Data ranks are replicas, and divide experts if the model
has any.
Source: How to Scale Your Model, "Inference"; Pope et al., "Efficiently Scaling Transformer Inference" (2022).
"""

from collections.abc import Iterator, Mapping

from meshwright.errors import LayoutError, PlanError
from meshwright.hardware.chip import Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.axes import DATA, EXPERT, TENSOR2, Ask, ShortForm, chosen_forms
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.short import DEFAULTS
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig

# Choices for generation are the same for all contexts.
_GENERATE = Workload(1, 1, "generate")


def serving_layouts(
    config: ModelConfig, hardware: Hardware, precision: Mapping[str, object], *, replicas: bool
) -> list[Layout]:
    """Every layout tried on `hardware`, with the fewest data ranks first.

    replicas: also groups of chips that hold the same weights. Otherwise only the fewest groups into which the
    chips divide, and groups that share experts.
    """
    layouts: list[Layout] = []
    ask = Ask(config, _GENERATE, hardware.num_chips, isinstance(hardware.chip.network, Torus))
    for form in sorted(chosen_forms(ask, DEFAULTS), key=lambda form: (form[DATA.name], form[TENSOR2.name])):
        has_fewer = bool(layouts) and layouts[-1].data < form[DATA.name]
        if has_fewer and not replicas and config.moe is None:
            break
        try:
            layout = Layout.of(**{**form, **precision})
            check_fits(layout, config, padded=True)
        except LayoutError:
            continue
        layouts.append(layout)
    return layouts


def most_heads(config: ModelConfig, num_chips: int) -> Layout:
    """The layout with the most chips along the heads, and replicas on the rest."""
    for tensor in (degree for degree in range(num_chips, 0, -1) if num_chips % degree == 0):
        layout = Layout.of(tensor=tensor, data=num_chips // tensor)
        try:
            check_fits(layout, config, None, config.max_seq_len, padded=True)
        except LayoutError:
            continue
        return layout
    raise PlanError(f"{config.name}: no layout of {num_chips} chips divides its heads")


def one_replica(config: ModelConfig, num_chips: int) -> Iterator[ShortForm]:
    """Forms of this number of chips that split one copy of the weights by heads and width."""
    for form in chosen_forms(Ask(config, _GENERATE, num_chips), DEFAULTS):
        if form[DATA.name] == form[EXPERT.name] == 1:
            yield form
