"""The cheapest change that makes a layout fit, found by pricing each."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from meshwright.errors import LayoutError, ModelError
from meshwright.hardware.topology import Hardware
from meshwright.layout import REMATS, Layout
from meshwright.layout.axes import CONTEXT, DATA, FSDP, RANKS, TENSOR
from meshwright.layout.runnable import why_not
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate
from meshwright.plan.rank import TIE
from meshwright.plan.space import different_remats
from meshwright.plan.train import price
from meshwright.plan.words import TRAINING, sentence

# The largest number of times that context and tensor are doubled, and that the batch is halved.
_DOUBLINGS = 2
_HALVINGS = 6
# Settings with ever less optimizer state, tried in this order.
_LESS_STATE = ({"optimizer_dtype": "bf16"}, {"optimizer_dtype": "int8"}, {"optimizer": "adafactor"})
_LORA_RANK = 16


@dataclass(frozen=True)
class Change:
    """The changed settings, and the layout that then fits. why_not: the reason if it does not run yet."""

    words: tuple[str, ...]
    candidate: Candidate
    why_not: str | None

    def __str__(self) -> str:
        return sentence(
            TRAINING,
            "fitting",
            words=self.words,
            seconds=self.candidate.step_seconds,
            num_bytes=self.candidate.needed_bytes,
            why_not=self.why_not,
        )


def cheapest_fit(
    config: ModelConfig, hardware: Hardware, workload: Workload, nearest: Candidate
) -> Change | None:
    """The change that gives the shortest step; the change of fewer settings if steps are nearly equal.

    First other layouts of the same work are tried, then an optimizer with less state, then smaller batches,
    then adapters instead of all weights. None if nothing fits.
    """

    def priced(layouts: Iterable[Layout], work: Workload = workload) -> Iterator[Candidate]:
        for layout in layouts:
            with suppress(LayoutError):
                yield price(config, hardware, work, layout)

    layout = nearest.layout
    candidates = [nearest, *priced(_same_work(config, hardware, workload, layout))]
    leanest = min(candidates, key=lambda candidate: candidate.memory.total).layout
    for tried in (candidates, *(list(priced([leanest.replace(**state)])) for state in _LESS_STATE)):
        if fitting := [candidate for candidate in tried if candidate.fits]:
            return _cheapest(config, layout, fitting)
    for fewer in _smaller(workload, leanest.num_batch_shards):
        share = fewer.num_sequences // leanest.num_batch_shards
        for candidate in priced([leanest.replace(microbatches=share)], fewer):
            if candidate.fits:
                words = (f"--batch-tokens {fewer.num_tokens}", *_changed(layout, candidate.layout))
                return Change(words, candidate, _why_not(config, candidate))
    return _adapters(config, hardware, workload, dict.fromkeys((layout, leanest)), layout)


def _smaller(workload: Workload, shards: int) -> Iterator[Workload]:
    """The workload with a half, a quarter, ... of its sequences, while each shard has at least one."""
    for halves in range(1, _HALVINGS + 1):
        sequences, rest = divmod(workload.num_sequences, 2**halves)
        if rest or sequences < shards:
            return
        yield replace(workload, num_sequences=sequences)


def _adapters(
    config: ModelConfig, hardware: Hardware, workload: Workload, layouts: Iterable[Layout], before: Layout
) -> Change | None:
    """Adapters (LoRA) in the first of `layouts` that fits with them; None if none fits.

    before: the layout without the change.
    """
    if config.lora_rank:
        return None
    for layout in layouts:
        with suppress(LayoutError, ModelError):
            adapted = replace(config, lora_rank=_LORA_RANK)
            candidate = price(adapted, hardware, workload, layout)
            if candidate.fits:
                words = (f"--set lora_rank={_LORA_RANK}", *_changed(before, layout))
                return Change(words, candidate, _why_not(adapted, candidate))
    return None


def _same_work(
    config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout
) -> Iterator[Layout]:
    """Layouts near `layout` that may need less memory: more sharding, recomputation or microbatches."""
    current = REMATS.index(layout.schedule.remat)
    stronger = [remat for remat in different_remats(config, hardware) if REMATS.index(remat) > current]
    for mesh in (layout, *_offloaded(hardware, layout), *_sharded_further(layout)):
        share = workload.num_sequences // mesh.num_batch_shards
        doubled = (mesh.schedule.microbatches * 2**power for power in range(share.bit_length()))
        numbers = [number for number in doubled if share % number == 0]
        for remat in (layout.schedule.remat, *stronger):
            for microbatches in dict.fromkeys((mesh.schedule.microbatches, *numbers, share)):
                if microbatches >= mesh.schedule.microbatches:
                    yield mesh.replace(remat=remat, microbatches=microbatches)


def _sharded_further(layout: Layout) -> Iterator[Layout]:
    """Layouts of the same chips that shard their state or their sequences further."""
    data, fsdp = layout.data, layout.fsdp
    changes: list[dict[str, object]] = []
    if data > 1:
        for stage in (1, 2) if layout.pipe == 1 else (1,):
            if fsdp == 1 and stage > layout.rules.zero_stage:
                changes.append({"zero": stage})
        changes.append({DATA.name: 1, FSDP.name: data * fsdp, "zero": None})
    if layout.context > 1 and layout.rules.zero_stage and not layout.word("zero_context"):
        changes.append({"zero_context": True})
    for factor in (2**n for n in range(1, _DOUBLINGS + 1)):
        for axis in (CONTEXT.name, TENSOR.name):
            for ranks in RANKS:
                if layout.word(ranks) % factor == 0:
                    wider = layout.word(axis) * factor
                    changes.append({axis: wider, ranks: layout.word(ranks) // factor})
    for change in changes:
        with suppress(LayoutError):
            yield layout.replace(**change)


def _offloaded(hardware: Hardware, layout: Layout) -> Iterator[Layout]:
    """The layout with state in the host's memory, if that is not the devices' own."""
    if layout.pipe == 1 and not hardware.chip.platform.host_memory:
        for word in ("offload", "offload_optimizer"):
            if not layout.word(word):
                yield layout.replace(**{word: True})


def _cheapest(config: ModelConfig, layout: Layout, fitting: list[Candidate]) -> Change:
    """The change of the fewest settings, among layouts whose steps are within TIE of the fastest.

    Layouts that do not run count only if none runs.
    """
    running = [one for one in fitting if _why_not(config, one) is None] or fitting
    least = (1 + TIE) * min(candidate.step_seconds for candidate in running)
    changes = [
        Change(_changed(layout, changed.layout), changed, _why_not(config, changed))
        for changed in running
        if changed.step_seconds <= least
    ]
    return min(changes, key=lambda change: (len(change.words), change.candidate.step_seconds))


def _why_not(config: ModelConfig, candidate: Candidate) -> str | None:
    return why_not(config, candidate.layout, hardware=candidate.hardware)


def _changed(layout: Layout, other: Layout) -> tuple[str, ...]:
    """The settings of `other` that `layout` lacks; `fsdp=64 for data=64` if one axis replaces another."""
    before, after = (str(one).split(",") for one in (layout, other))
    new = [word for word in after if word not in before]
    kept = {word.partition("=")[0] for word in after}
    gone = [word for word in before if word.partition("=")[0] not in kept]
    for name in ("optimizer", "optimizer_dtype"):
        if (value := getattr(other.precision, name)) != getattr(layout.precision, name):
            new.append(f"{name}={value}")
    if gone and new:
        new[0] += f" for {','.join(gone)}"
    return tuple(new)
