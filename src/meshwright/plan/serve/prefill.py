"""Ways to prefill a prompt: whole or in chunks, its heads split or also its positions.

A chunk is a pass over part of the prompt, after the positions in the cache. Each chunk reads the weights
again, and answers need not wait for the whole prompt (Agrawal et al., 2023). Split by position, each device
has weights and a part of every prompt, and keys and values are gathered or pass round a ring (Liu et al.,
2023): the time to first token still falls past the bound of tensor parallelism. Each way is priced as a sum
of passes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cost.cached_ops import keys_read
from meshwright.cost.serving_step import Passes
from meshwright.errors import LayoutError
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.axes import AXES, DATA, KV_REPLICAS, TENSOR, Ask, ShortForm, chosen_forms
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.runnable import why_not
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.serve.requests import Requests

# Numbers of prompts a pass; the number with the least time per prompt counts.
_PROMPTS = np.array([1.0, 2.0, 4.0])
# Chunks that are each priced; of more the first, the middle and the last are.
_EACH_PRICED = 3
# Axes whose devices may take parts of a prompt instead.
_REPLICA = (DATA, TENSOR, KV_REPLICAS)


@dataclass(frozen=True)
class Way:
    """How a prompt is prefilled, and the seconds of one that finds the chips idle. chunk: None for whole."""

    layout: Layout
    chunk: int | None
    ttft_seconds: float

    def to_dict(self) -> dict[str, object]:
        return {"layout": str(self.layout), "chunk": self.chunk, "ttft_seconds": self.ttft_seconds}


class PromptPasses:
    """The passes that prefill prompts, for each of `batches` numbers of them at once.

    layout: not yet in its phase. chunk: tokens of a pass; None for whole prompts. hardware: as of Passes.
    """

    def __init__(
        self, config: ModelConfig, layout: Layout, requests: Requests, chunk: int | None, hardware: Hardware
    ) -> None:
        self.batches = layout.num_batch_shards * _PROMPTS
        at = layout.at("prefill")
        self._parts = [
            (times, Passes(config, at, self.batches, queries, context, hardware))
            for times, queries, end in _parts(requests, chunk)
            for context in [keys_read(config, hardware, at, queries, end, requests.context)]
        ]

    @property
    def buffers(self) -> Any:
        """Bytes of the largest operation for each batch."""
        return np.max([np.broadcast_to(p.memory.buffers, self.batches.shape) for _, p in self._parts], axis=0)

    def seconds(self, hardware: Hardware) -> Any:
        """Seconds until all prompts of each batch are prefilled."""
        return sum(times * part.seconds(hardware) for times, part in self._parts)


def _parts(requests: Requests, chunk: int | None) -> list[tuple[float, int, int]]:
    """(how many such passes, their tokens, the position of their last) of a prompt.

    The time of a pass grows with the positions before it almost by a line: of many, three are priced and
    summed by Simpson's rule. The first of a prompt has none before it, and is a whole prompt for its program.
    """
    new, prompt = requests.new_prompt_tokens, requests.prompt_tokens
    if chunk is None or chunk >= new:
        return [(1.0, new, prompt)]
    known, whole, rest = prompt - new, new // chunk, new % chunk
    passes = [] if known else [(1.0, chunk, chunk)]
    first, count = 1 + len(passes), whole - len(passes)
    places = [*range(first, whole + 1)] if count <= _EACH_PRICED else [first, (first + whole) / 2, whole]
    weights = [1.0] * count if count <= _EACH_PRICED else [count / 6, count * 4 / 6, count / 6]
    passes += [
        (times, chunk, known + round(place * chunk)) for times, place in zip(weights, places, strict=True)
    ]
    return [*passes, (1.0, rest, prompt)] if rest else passes


def prefilling(layout: Layout) -> Layout:
    """The layout that prefills where `layout` generates: how the cache is split is nothing to it."""
    return layout.replace(cache="copies") if layout.form else layout


def serving_both(layout: Layout, prefill: Layout) -> Layout | None:
    """The layout that prefills as `prefill` and generates as `layout`.

    None if the two layouts store weights differently. Devices that split a prompt by position have separate
    sequences in generation, as data ranks do.

    >>> print(serving_both(Layout.of(data=2, tensor=4), Layout.of(context=2, tensor=4)))
    context=2,tensor=4,remat=none
    >>> serving_both(Layout.of(tensor=8), Layout.of(context=2, tensor=4, zero=3, zero_context=True))
    """
    if not prefill.rules.prompt_axes:
        return layout
    method = prefill.word("context_method")
    both = layout.replace(data=1, context=prefill.num_prompt_shards, context_method=method)
    alike = both.mesh == prefill.mesh and both.rules.stored == prefill.rules.stored
    return both if alike else None


def runs_with(config: ModelConfig, layout: Layout, prefill: Layout) -> bool:
    """Whether `mw serve` prefills so where it generates as `layout`."""
    both = serving_both(layout, prefill)
    return both is not None and why_not(config, both, "prefill") is None


def by_position(config: ModelConfig, layout: Layout, requests: Requests) -> Iterator[Layout]:
    """Layouts of the same chips that split a prompt by position, with no more bytes of weights per chip.

    Data ranks take parts of one prompt instead of prompts of their own, with the weights that they have.
    Heads may be split over fewer devices too: then the ranks share the weights, and gather them by layers.
    There are none for chunks, for prompts that begin in a prefix cache, and for layouts with other axes than
    data ranks and tensor devices, or without a short form.
    """
    if not layout.form or any(layout.degree(axis.name) > 1 for axis in AXES if axis not in _REPLICA):
        return
    if requests.chunk is not None or requests.new_prompt_tokens < requests.prompt_tokens:
        return
    start = {**layout.form, **{axis.name: 1 for axis in _REPLICA}, "cache": "copies"}
    ask = Ask(config, Workload(1, requests.prompt_tokens, "prefill"), layout.mesh.num_devices)
    for form in sorted(chosen_forms(ask, start), key=_tensor_devices):
        before, after = _tensor_devices(layout.form), _tensor_devices(form)
        if before % after or form["zero_context"] != (after < before):
            continue
        try:
            split = layout.replace(**form)
            check_fits(split, config, padded=True)
        except LayoutError:
            continue
        yield split


def _tensor_devices(form: ShortForm) -> int:
    return form[TENSOR.name] * form[KV_REPLICAS.name]
