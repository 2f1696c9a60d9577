"""The layouts that are tried for inference: a closed list for each number of chips.

Weights are never gathered, so FSDP is none of them. Tensor parallelism goes as far as the heads do: up to K
devices split the cache by KV heads, those beyond (`kv_replicas`) by sequence of the batch or by position.
A second tensor axis over D is 2D weight-stationary. Data ranks are replicas, which share out experts where
there are any.
Source: How to Scale Your Model, "Inference"; Pope et al., "Efficiently Scaling Transformer Inference" (2022).
"""

from collections.abc import Iterator, Mapping

from meshwright.errors import LayoutError
from meshwright.hardware.chip import Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.axes import divisors
from meshwright.layout.fit import check_fits
from meshwright.models.config import ModelConfig

# Tensor devices on one axis, and the second axis of those that have two.
_WIDEST, _SECOND = 128, (2, 4, 8)
# Below so many chips one axis always beats two: the reference's bound is 72 for F = 4D.
_LEAST_IN_2D = 16


def serving_layouts(
    config: ModelConfig, hardware: Hardware, precision: Mapping[str, object], *, replicas: bool
) -> list[Layout]:
    """Every layout tried on `hardware`; replicas: also groups of its chips that hold the same weights.

    Without replicas only the fewest that are needed for the chips to divide, and those that share experts.
    """
    found: list[Layout] = []
    for data in divisors(hardware.num_chips):
        if found and not replicas and config.moe is None:
            break
        found += _with_data(config, hardware, precision, data)
    return found


def _with_data(
    config: ModelConfig, hardware: Hardware, precision: Mapping[str, object], data: int
) -> Iterator[Layout]:
    torus, chips = isinstance(hardware.chip.network, Torus), hardware.num_chips // data
    seconds = [n for n in _SECOND if torus and chips >= _LEAST_IN_2D and chips % n == 0]
    for tensor2 in (1, *seconds):
        for words in tensor_words(config, chips // tensor2):
            for expert in _experts(config, data, words["tensor"]):
                try:
                    layout = Layout.of(
                        **{**words, **precision, "data": data, "tensor2": tensor2, "expert": expert}
                    )
                    check_fits(layout, config, padded=True)
                except LayoutError:
                    continue
                yield layout


def tensor_words(config: ModelConfig, chips: int) -> Iterator[dict[str, object]]:
    """`tensor`, `kv_replicas` and `cache` of so many chips that split the heads."""
    if chips > _WIDEST:
        return
    heads = config.num_heads if config.mla else config.num_kv_heads
    if heads % chips == 0:
        yield {"tensor": chips}
        if config.mla and chips > 1:
            yield {"tensor": chips, "cache": "batch"}
            yield {"tensor": chips, "cache": "sequence"}
    elif chips % heads == 0:
        for cache in ("copies", "batch", "sequence"):
            yield {"tensor": heads, "kv_replicas": chips // heads, "cache": cache}


def _experts(config: ModelConfig, data: int, tensor: object) -> list[int]:
    if config.moe is None:
        return [1]
    assert isinstance(tensor, int)
    tried = dict.fromkeys((1, data, data * tensor))
    return [expert for expert in tried if config.moe.num_experts % expert == 0]
