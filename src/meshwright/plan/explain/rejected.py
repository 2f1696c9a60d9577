"""The usual layouts compared with the chosen one, and why each was not chosen.

Each takes the microbatches and the remat policy that suit it best.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd

from meshwright.errors import LayoutError
from meshwright.hardware.chip import Switch
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.models.parameters import dimensions
from meshwright.plan.candidate import Candidate
from meshwright.plan.explain.thresholds import (
    active_d_ff,
    links,
    mixed_batch_shards,
    nearest_divisor,
    sparsity,
)
from meshwright.plan.given import NOT_SEARCHED
from meshwright.plan.space import different_remats
from meshwright.plan.train import Search, price
from meshwright.plan.words import TRAINING, sentence
from meshwright.units import divisors

# Settings that a layout shares with the chosen one, so that they differ only in how they split.
_SAME_AS_CHOSEN = ("weights_dtype", "compute_dtype", *NOT_SEARCHED)
# Steps that differ by a smaller share are equally long.
_SAME = 0.0005
# The name of each bound in a sentence.
RESOURCES = {
    "compute": "computing",
    "hbm": "memory traffic",
    "ici": "links between chips",
    "dcn": "links between slices",
    "host_link": "the link to the host's memory",
    "bubble": "idle pipeline stages",
    "launch": "launches",
}


@dataclass(frozen=True)
class Rejected:
    """A layout that was not chosen.

    name: the usual name. reason: "memory", "slower", "divides" or "batch"; compared with a given layout also
    "faster", and "fits" if that one does not. text: the reason in words, to follow the name. numbers: its
    figures. nearest: a layout or an option that would work, None if this one does.
    """

    name: str
    layout: str
    reason: str
    text: str
    numbers: dict[str, float | str]
    nearest: str | None = None


def resource_name(bound: str, hardware: Hardware) -> str:
    """`bound` in words that suit the machine."""
    return (RESOURCES | dict(hardware.chip.platform.resources)).get(bound, bound)


def bound_seconds(candidate: Candidate) -> dict[str, float]:
    """Seconds of a step by the resource that they wait for."""
    totals: dict[str, float] = {}
    for term in candidate.cost.terms:
        totals[term.bound] = totals.get(term.bound, 0.0) + term.seconds
    return totals


def rejected(config: ModelConfig, hardware: Hardware, search: Search) -> tuple[Rejected, ...]:
    """The next best mesh and the usual layouts, without the chosen layout."""
    best, workload = search.best, search.workload
    fitting, named = [c for c in search.candidates[1:] if c.fits], []
    # The best candidate of another mesh is more informative than another schedule of the same.
    other_mesh = (c for c in fitting if c.layout.mesh != best.layout.mesh)
    runner_up = next(other_mesh, fitting[0] if fitting else None)
    if runner_up:
        named.append(_compared("the next best mesh", runner_up, best, is_tie=search.is_tie(runner_up)))
    same = {name: best.layout.word(name) for name in _SAME_AS_CHOSEN}
    seen = {_shape(c.layout) for c in (best, runner_up) if c}
    judge = _Judge(config, hardware, workload, best)
    for name, layout in usual_layouts(config, hardware, workload):
        if _shape(layout) not in seen:
            named.append(judge.rejection(name, layout.replace(**same)))
            seen.add(_shape(layout))
    return tuple(named)


def _shape(layout: Layout) -> tuple:
    """The mesh, and the ZeRO stage: other settings make no other layout to a reader."""
    return tuple(layout.mesh.sizes.items()), layout.rules.zero_stage


def usual_layouts(
    config: ModelConfig, hardware: Hardware, workload: Workload
) -> Iterator[tuple[str, Layout]]:
    """The layouts of the training chapter and, on GPUs, Megatron's, even if they do not divide."""
    chips = hardware.num_chips
    yield "pure data parallelism", Layout.of(data=chips)
    if chips > 1 and not hardware.chip.platform.virtual:  # virtual devices run plans at once, but not ZeRO-1
        yield "data parallelism with a sharded optimizer (ZeRO-1)", Layout.of(data=chips, zero=1)
    yield "pure FSDP", Layout.of(fsdp=chips)
    if config.moe and (expert := gcd(config.moe.num_experts, chips)) > 1:
        yield "FSDP with expert parallelism", Layout.of(fsdp=chips, expert=expert)
    if chips > 1 and (tensor := _mixed_tensor(config, hardware, workload)) > 1:
        yield "FSDP with tensor parallelism", Layout.of(fsdp=chips // tensor, tensor=tensor)
    if megatron := _megatron(config, hardware):
        yield "tensor, pipeline and data parallelism (Megatron)", megatron


def _mixed_tensor(config: ModelConfig, hardware: Hardware, workload: Workload) -> int:
    """The tensor degree of the chapter's X = sqrt(B/F M_X/M_Y N), at least 2; 1 on an odd number of chips."""
    ideal = links(hardware)
    if ideal is None:
        return 1
    chips, d_ff = hardware.num_chips, round(active_d_ff(config) * sparsity(config))
    wanted = chips / mixed_batch_shards(workload.num_tokens, d_ff, chips, ideal.axes_ratio)
    return max(2, nearest_divisor(chips, min(wanted, ideal.tensor_reach))) if chips % 2 == 0 else 1


def _megatron(config: ModelConfig, hardware: Hardware) -> Layout | None:
    """Tensor parallelism inside a node, data parallelism, and the fewest stages that fill half a GPU.

    Only weights and gradients count. None on one node and on TPUs. Source: Narayanan et al., 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters", takeaways 1 and 2.
    """
    if not isinstance(hardware.chip.network, Switch) or hardware.dims[0] == 1:
        return None
    sizes = dimensions(config)
    inside = reversed(divisors(hardware.dims[1]))
    tensor = next(d for d in inside if all(sizes[letter] % d == 0 for letter in "NKF"))
    rest = hardware.num_chips // tensor
    held = 4 * count_params(config).total / tensor  # bf16 weights and gradients
    stages = [d for d in range(1, config.num_layers + 1) if rest % d == 0]
    pipe = next((d for d in stages if held / d <= hardware.chip.program_bytes / 2), stages[-1])
    return Layout.of(pipe=pipe, data=rest // pipe, tensor=tensor, zero=1) if pipe > 1 else None


def best_schedule(config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout) -> Candidate:
    """`layout` with the fastest microbatches, remat policy and sequence parallelism that fit.

    If none fits, the one that needs the least memory. For each policy the fewest microbatches that fit are
    the fastest; with stages all are priced, since more of them leave fewer stages idle. Raises LayoutError if
    the layout does not divide.
    """
    variants = [layout]
    if layout.tensor > 1 and workload.seq_len % (layout.context * layout.tensor) == 0:
        variants.append(layout.replace(sequence_parallel=not layout.word("sequence_parallel")))
    priced = []
    for variant in variants:
        for remat in different_remats(config, hardware):
            for microbatches in divisors(max(1, workload.num_sequences // layout.num_batch_shards)):
                scheduled = variant.replace(remat=remat, microbatches=microbatches)
                priced.append(price(config, hardware, workload, scheduled))
                if priced[-1].fits and layout.pipe == 1:
                    break
    fitting = [candidate for candidate in priced if candidate.fits]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_seconds)
    return min(priced, key=lambda candidate: candidate.memory.total)


@dataclass(frozen=True)
class _Judge:
    config: ModelConfig
    hardware: Hardware
    workload: Workload
    best: Candidate

    def _scheduled(self, layout: Layout, workload: Workload | None = None) -> Candidate:
        return best_schedule(self.config, self.hardware, workload or self.workload, layout)

    def rejection(self, name: str, layout: Layout) -> Rejected:
        """The reason against `layout`: too few sequences, a size that does not divide, or its price."""
        if layout.num_batch_shards > self.workload.num_sequences:
            return self._too_few_sequences(name, layout)
        try:
            candidate = self._scheduled(layout)
        except LayoutError as error:
            text = sentence(TRAINING, "indivisible", reason=str(error).partition(";")[0])
            splits_batch = self.workload.num_sequences % layout.num_batch_shards == 0
            near = nearest_legal(layout) if splits_batch else wider_tensor(layout)
            return self._with_nearest(Rejected(name, str(layout), "divides", text, {}), near)
        return _compared(name, candidate, self.best)

    def _too_few_sequences(self, name: str, layout: Layout) -> Rejected:
        """The batch that `layout` would need, whether it would fit then, and the nearest that needs less."""
        shards, given = layout.num_batch_shards, self.workload.num_sequences
        needed = Workload(shards, self.workload.seq_len)
        numbers: dict[str, float | str] = {"num_sequences": given, "needed": shards}
        shown, problem = layout, ""
        with suppress(LayoutError):
            then = self._scheduled(layout, needed)
            shown, numbers["bytes_per_chip"] = then.layout, then.memory.total
            problem = "" if then.fits else _too_large(name, then).text
        text = sentence(
            TRAINING, "too_few_sequences", needed=shards, given=given, tokens=needed.num_tokens, then=problem
        )
        option = f"--batch-tokens {needed.num_tokens}"
        rejection = Rejected(name, str(shown), "batch", text, numbers, option)
        return rejection if layout.tensor == 1 else self._with_nearest(rejection, wider_tensor(shown))

    def _with_nearest(self, rejection: Rejected, near: Iterable[Layout]) -> Rejected:
        """`found` with a sentence on the first of `near` that divides."""
        for layout in near:
            try:
                candidate = self._scheduled(layout)
            except LayoutError:
                continue
            judged = _compared(rejection.name, candidate, self.best)
            words = "" if candidate.layout.mesh == self.best.layout.mesh else judged.text
            text = sentence(TRAINING, "nearest", text=rejection.text, layout=candidate.layout, judged=words)
            return replace(rejection, text=text, nearest=str(candidate.layout), numbers=judged.numbers)
        return rejection


def _compared(name: str, candidate: Candidate, best: Candidate, *, is_tie: bool = False) -> Rejected:
    """`candidate` against the chosen one: the memory it lacks, or the difference in time and its cause."""
    if not candidate.fits:
        return _too_large(name, candidate)
    extra = bound_seconds(candidate)
    for bound, seconds in bound_seconds(best).items():
        extra[bound] = extra.get(bound, 0.0) - seconds
    slower = candidate.step_seconds / best.step_seconds - 1
    pick, opposite = (max, min) if slower >= 0 else (min, max)
    bound, other = pick(extra, key=extra.__getitem__), opposite(extra, key=extra.__getitem__)
    # The opposite effect of another resource, if it is a good part of the difference.
    also = [other] if extra[other] * extra[bound] < 0 and abs(extra[other]) > 0.1 * abs(extra[bound]) else []
    text = sentence(
        TRAINING,
        "priced",
        seconds=candidate.step_seconds,
        slower=slower,
        differences=[(resource_name(one, candidate.hardware), extra[one]) for one in (bound, *also)],
        culprit=_culprit(candidate, best, bound) if extra[bound] > 0 else "",
        chosen_fits=best.fits,
        is_same=abs(slower) < _SAME,
        is_tie=is_tie,
    )
    numbers: dict[str, float | str] = {
        "step_seconds": candidate.step_seconds,
        "slower": slower,
        "bound": bound,
        "extra_seconds": extra[bound],
        "bytes_per_chip": candidate.memory.total,
    }
    faster = slower <= -_SAME
    reason = "faster" if faster and best.fits else "slower" if best.fits else "fits"
    return Rejected(name, str(candidate.layout), reason, text, numbers)


def _culprit(candidate: Candidate, best: Candidate, bound: str) -> str:
    """The term of a link or of memory that exceeds the chosen layout's most."""
    if bound in ("compute", "bubble", "launch"):
        return ""
    before = {term.name: term.seconds for term in best.cost.terms if term.bound == bound}
    extra = {t.name: t.seconds - before.get(t.name, 0.0) for t in candidate.cost.terms if t.bound == bound}
    return max(extra, key=extra.__getitem__, default="")


def _too_large(name: str, candidate: Candidate) -> Rejected:
    """`candidate`, which does not fit: the memory it lacks, and its largest part."""
    lack, (largest, num_bytes) = candidate.shortage, candidate.memory.largest
    text = sentence(TRAINING, "too_large", lack=lack, largest=largest, num_bytes=num_bytes)
    numbers: dict[str, float | str] = {
        "bytes_per_chip": candidate.memory.total,
        "over_bytes": lack.over_bytes,
        "usable_bytes": lack.usable_bytes,
        "largest": largest,
    }
    return Rejected(name, str(candidate.layout), "memory", text, numbers)


def wider_tensor(layout: Layout) -> Iterator[Layout]:
    """Layouts of the same chips with fewer batch shards and a wider tensor axis."""
    for factor in (d for d in divisors(layout.fsdp) if d > 1):
        with suppress(LayoutError):  # if the experts no longer divide
            yield layout.replace(fsdp=layout.fsdp // factor, tensor=layout.tensor * factor)


def nearest_legal(layout: Layout) -> Iterator[Layout]:
    """Layouts of the same chips, the nearest first: less fsdp and more data, then less tensor."""
    for tensor in reversed(divisors(layout.tensor)):
        whole = layout.fsdp * layout.tensor // tensor
        for fsdp in reversed(divisors(whole)):
            with suppress(LayoutError):  # if the experts no longer divide
                near = layout.replace(fsdp=fsdp, data=layout.data * whole // fsdp, tensor=tensor)
                if near != layout:
                    yield near
