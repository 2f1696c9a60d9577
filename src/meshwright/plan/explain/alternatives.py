"""The usual layouts beside the chosen one, and why each was not chosen.

Each takes the microbatches and the remat policy that suit it best, so that what is said of it is
true of its best form.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
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
from meshwright.plan.explain.comparison import Rejected, rejection, too_large_layout
from meshwright.plan.explain.ideal_links import links
from meshwright.plan.explain.thresholds import active_d_ff, mixed_batch_shards, nearest_divisor, sparsity
from meshwright.plan.given import NOT_SEARCHED
from meshwright.plan.space import different_remats, divisors
from meshwright.plan.train import Search, price

# What a layout shares with the chosen one, so that they differ in how they split and in nothing else.
_SAME_AS_CHOSEN = ("weights_dtype", "compute_dtype", *NOT_SEARCHED)


def best_schedule(config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout) -> Candidate:
    """`layout` with the microbatches, remat policy and sequence parallelism that make it fastest.

    Of those that fit; where none does, the one that needs least memory. For each policy the fewest
    microbatches that fit are the fastest, but with stages more of them leave fewer idle: all are priced.
    Raises LayoutError where the layout does not divide.
    """
    variants = [layout]
    if layout.tensor > 1 and workload.seq_len % (layout.context * layout.tensor) == 0:
        variants.append(layout.replace(sequence_parallel=not layout.word("sequence_parallel")))
    priced = [
        candidate
        for variant in variants
        for remat in different_remats(config, hardware)
        for candidate in _until_it_fits(config, hardware, workload, variant.replace(remat=remat))
    ]
    fitting = [candidate for candidate in priced if candidate.fits]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_seconds)
    return min(priced, key=lambda candidate: candidate.memory.total)


def _until_it_fits(
    config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout
) -> Iterator[Candidate]:
    for microbatches in divisors(max(1, workload.num_sequences // layout.num_batch_shards)):
        candidate = price(config, hardware, workload, layout.replace(microbatches=microbatches))
        yield candidate
        if candidate.fits and layout.pipe == 1:
            return


def rejected(config: ModelConfig, hardware: Hardware, found: Search) -> tuple[Rejected, ...]:
    """The next best mesh and the usual layouts, without those that the search chose."""
    best, workload = found.best, found.workload
    runner_up = _runner_up(found)
    named = [_runner_up_words(found, runner_up)] if runner_up else []
    same = {name: best.layout.word(name) for name in _SAME_AS_CHOSEN}
    seen = {_shape(c.layout) for c in (best, runner_up) if c}
    for name, layout in usual(config, hardware, workload):
        if _shape(layout) not in seen:
            named.append(_judge(config, hardware, workload, name, layout.replace(**same), best))
            seen.add(_shape(layout))
    return tuple(named)


def _shape(layout: Layout) -> tuple:
    """What makes two layouts different to a reader: the mesh, and what is sharded over the data ranks."""
    return tuple(layout.mesh.sizes.items()), layout.zero_stage


def _runner_up(found: Search) -> Candidate | None:
    """The best candidate of another mesh, which says more than another schedule of the same."""
    fitting = [c for c in found.candidates[1:] if c.fits]
    mesh = found.best.layout.mesh
    return next((c for c in fitting if c.layout.mesh != mesh), fitting[0] if fitting else None)


def _runner_up_words(found: Search, runner_up: Candidate) -> Rejected:
    """How the next best mesh compares; a tie may be a little faster, and is less plain."""
    compared = rejection("the next best mesh", runner_up, found.best)
    if not found.is_tie(runner_up):
        return compared
    return replace(compared, text=f"{compared.text}. That is a tie; the simpler layout is ranked first")


def usual(config: ModelConfig, hardware: Hardware, workload: Workload) -> Iterator[tuple[str, Layout]]:
    """The layouts of the training chapter and, on GPUs, Megatron's, whether they divide or not."""
    chips = hardware.num_chips
    yield "data parallelism alone", Layout.of(data=chips)
    if chips > 1 and hardware.chip.kind != "cpu":  # where plans are run at once, and not with ZeRO-1 yet
        yield "data parallelism with a sharded optimizer (ZeRO-1)", Layout.of(data=chips, zero=1)
    yield "FSDP alone", Layout.of(fsdp=chips)
    if config.moe and (expert := gcd(config.moe.num_experts, chips)) > 1:
        yield "FSDP with expert parallelism", Layout.of(fsdp=chips, expert=expert)
    if chips > 1 and (tensor := _mixed_tensor(config, hardware, workload)) > 1:
        yield "FSDP with tensor parallelism", Layout.of(fsdp=chips // tensor, tensor=tensor)
    if megatron := _megatron(config, hardware):
        yield "tensor, pipeline and data parallelism (Megatron)", megatron


def _mixed_tensor(config: ModelConfig, hardware: Hardware, workload: Workload) -> int:
    """The tensor degree that the chapter's X = sqrt(B/F M_X/M_Y N) leaves, 2 at least; 1 on odd chips."""
    ideal = links(hardware)
    if ideal is None:
        return 1
    chips, d_ff = hardware.num_chips, round(active_d_ff(config) * sparsity(config))
    wanted = chips / mixed_batch_shards(workload.num_tokens, d_ff, chips, ideal.axes_ratio)
    return max(2, nearest_divisor(chips, min(wanted, ideal.tensor_reach))) if chips % 2 == 0 else 1


def _megatron(config: ModelConfig, hardware: Hardware) -> Layout | None:
    """Tensor parallelism inside a node, the fewest stages whose weights and gradients fill half a GPU, data.

    None on one node and on TPUs. Source: Narayanan et al., 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters", takeaways 1 and 2.
    """
    if not isinstance(hardware.chip.network, Switch) or hardware.dims[0] == 1:
        return None
    sizes = dimensions(config)
    inside = [d for d in range(hardware.dims[1], 0, -1) if hardware.dims[1] % d == 0]
    tensor = next(d for d in inside if all(sizes[letter] % d == 0 for letter in "NKF"))
    rest = hardware.num_chips // tensor
    held = 4 * count_params(config).total / tensor  # bf16 weights and gradients
    stages = [d for d in range(1, config.num_layers + 1) if rest % d == 0]
    pipe = next((d for d in stages if held / d <= hardware.chip.program_bytes / 2), stages[-1])
    return Layout.of(pipe=pipe, data=rest // pipe, tensor=tensor, zero=1) if pipe > 1 else None


def _judge(
    config: ModelConfig, hardware: Hardware, workload: Workload, name: str, layout: Layout, best: Candidate
) -> Rejected:
    """Why `layout` was not chosen: too few sequences, what does not divide, or its price."""
    if layout.num_batch_shards > workload.num_sequences:
        return _too_few_sequences(config, hardware, workload, name, layout, best)
    try:
        candidate = best_schedule(config, hardware, workload, layout)
    except LayoutError as error:
        what = f"does not divide: {str(error).partition(';')[0]}"
        rejected = Rejected(name, str(layout), "divides", what, {})
        splits_batch = workload.num_sequences % layout.num_batch_shards == 0
        near = nearest_legal(layout) if splits_batch else wider_tensor(layout)
        return _with_nearest(config, hardware, workload, rejected, near, best)
    return rejection(name, candidate, best)


def _too_few_sequences(
    config: ModelConfig, hardware: Hardware, workload: Workload, name: str, layout: Layout, best: Candidate
) -> Rejected:
    """What batch `layout` would need, whether it would fit then, and the nearest that needs less."""
    shards = layout.num_batch_shards
    needed = Workload(shards, workload.seq_len)
    text = (
        f"needs {shards:,} sequences, one per shard; the batch has "
        f"{workload.num_sequences:,} (--batch-tokens {needed.num_tokens})"
    )
    numbers: dict[str, float | str] = {"num_sequences": workload.num_sequences, "needed": shards}
    with suppress(LayoutError):
        then = best_schedule(config, hardware, needed, layout)
        layout = then.layout
        numbers["bytes_per_chip"] = then.memory.total
        if not then.fits:
            text += f". Even then it {too_large_layout(name, then).text}"
    rejected = Rejected(name, str(layout), "batch", text, numbers, f"--batch-tokens {needed.num_tokens}")
    if layout.tensor == 1:
        return rejected
    return _with_nearest(config, hardware, workload, rejected, wider_tensor(layout), best)


def _with_nearest(
    config: ModelConfig,
    hardware: Hardware,
    workload: Workload,
    rejected: Rejected,
    near: Iterable[Layout],
    best: Candidate,
) -> Rejected:
    """`rejected` and what is to be said of the first of `near` that divides."""
    for layout in near:
        try:
            candidate = best_schedule(config, hardware, workload, layout)
        except LayoutError:
            continue
        judged = rejection(rejected.name, candidate, best)
        chosen = candidate.layout.mesh == best.layout.mesh
        said = "is the chosen one" if chosen else judged.text
        text = f"{rejected.text}. The nearest that divides, {candidate.layout}, {said}"
        return replace(rejected, text=text, nearest=str(candidate.layout), numbers=judged.numbers)
    return rejected


def wider_tensor(layout: Layout) -> Iterator[Layout]:
    """Layouts of as many chips with ever fewer batch shards and a wider tensor axis."""
    for factor in (d for d in range(2, layout.fsdp + 1) if layout.fsdp % d == 0):
        with suppress(LayoutError):  # where the experts no longer divide
            yield layout.replace(fsdp=layout.fsdp // factor, tensor=layout.tensor * factor)


def nearest_legal(layout: Layout) -> Iterator[Layout]:
    """Layouts of as many chips, ever further from `layout`: less fsdp and more data, then less tensor."""
    tensors = [d for d in range(layout.tensor, 0, -1) if layout.tensor % d == 0]
    for tensor in tensors:
        whole = layout.fsdp * layout.tensor // tensor
        for fsdp in (d for d in range(whole, 0, -1) if whole % d == 0):
            with suppress(LayoutError):  # where the experts no longer divide
                near = layout.replace(fsdp=fsdp, data=layout.data * whole // fsdp, tensor=tensor)
                if near != layout:
                    yield near
