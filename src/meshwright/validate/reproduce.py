"""The planner's input for a published row: model, machine, batch, and possible layouts.

An empty layout column leaves the choice open. Such a row has several layouts in order of preference, and is
priced with the first that fits the memory, or the fastest that fits with the same recomputation (see
`choose`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from meshwright.dtypes import COMPUTED, named, types_for
from meshwright.errors import LayoutError
from meshwright.hardware import catalog
from meshwright.hardware.chip import Switch
from meshwright.hardware.network import NETWORKS
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.space import different_remats
from meshwright.programs.program import PROGRAMS, TrainingProgram
from meshwright.validate.published import AnyRow, PublishedRow
from meshwright.validate.shape_guess import model_of

# The parameters' states, the largest first: with f32 moments (mixed precision, Micikevicius et al., 2018) f32
# weights, or bf16 weights with an f32 copy; then only bf16 weights; then bf16 for all.
_SHARDED_F32: dict[str, object] = {"weights_dtype": "f32", "gradients_dtype": "f32"}
_NARROW_SUMS: dict[str, object] = {"weights_dtype": "f32", "gradients_dtype": "bf16"}
_MASTER_COPY: dict[str, object] = {"weights_dtype": "bf16", "gradients_dtype": "f32", "master_weights": True}
_BF16_WEIGHTS: dict[str, object] = {"weights_dtype": "bf16", "gradients_dtype": "bf16"}
_BF16: dict[str, object] = {**_BF16_WEIGHTS, "optimizer_dtype": "bf16"}
# All fp16 except a float32 copy: the loss is scaled so that gradients fit the range of fp16.
_SCALED_LOSS: dict[str, object] = {**_BF16_WEIGHTS, "master_weights": True}

# Figures of memory by words of a row's unit.
_MEMORY_FIGURES = {
    "allocated": "allocated",
    "reserved": "reserved",
    "device": "device",
    "nvidia-smi": "device",
}

_REMATS = {"none": ("none",), "full": ("full",)}
_SHORT_PIPE = 2
# Sequences of a microbatch if a source does not give them: a tuned run has the fastest that fits.
_MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Case:
    """The planner's input for a published row.

    layouts: groups in order of preference; within a group the fastest is used.
    """

    config: ModelConfig
    hardware: Hardware
    workload: Workload
    layouts: tuple[tuple[Layout, ...], ...]


def reproduce(row: PublishedRow) -> Case:
    """The case of a row. Raises MeshwrightError if the row cannot be expressed."""
    config, hardware = model_of(row), machine_of_row(row)
    if hardware.num_chips != row.chips:
        raise LayoutError(f"{row.hardware} has {hardware.num_chips} chips, and the row says {row.chips}")
    workload = Workload(row.global_batch_sequences, row.seq_len)
    groups = tuple(
        tuple(_layouts(row, config, hardware, *choice)) for choice in _preferences(row, config, hardware)
    )
    groups = tuple(group for group in groups if group)
    return Case(_as_run(config, groups[0][0]), hardware, workload, groups)


def _as_run(config: ModelConfig, layout: Layout) -> ModelConfig:
    """`config` with a KV head for each tensor rank: frameworks replicate fewer heads."""
    heads, ranks = config.num_kv_heads, layout.tensor
    if config.mla is None and heads < ranks and ranks % heads == config.num_heads % ranks == 0:
        config = replace(config, num_kv_heads=ranks)
    return config


def machine_of_row(row: AnyRow) -> Hardware:
    """The row's hardware with its network and software, and with the source's figures of the machine.

    A source that names a network or a program has that record; a program must be of the row's software. A
    network's own bandwidth precedes the row's, which is the rate of a card: several GPUs may share one.
    Programs of other software have their own kernels, even if XLA compiled them. Sources that offload send
    selected activations to the host, without telling which, so that no step waits; our layouts send all that
    are kept. For such rows the link to the host takes no time.
    """
    gigabits = row.nic_gbit_per_gpu
    bare = ":" not in row.hardware and not row.hardware.endswith(".toml")
    machine = catalog.load(f"{row.hardware}:{row.chips}" if bare else row.hardware)
    network = NETWORKS.of_table(row.source)
    if network and isinstance(machine.chip.network, Switch):
        machine = machine.over(network.name)
    is_shared = network is not None and network.bytes_per_second is not None
    machine = machine.with_figures(
        nic_bytes_per_second=gigabits * 1e9 / 8 if gigabits and not is_shared else None,
        hbm_bytes_per_second=row.hbm_bytes_per_second,
        power_watts=row.power_watts,
    )
    if isinstance(row, PublishedRow) and (row.remat or "").endswith("+offload"):
        machine = replace(machine, chip=replace(machine.chip, host_link_bytes_per_second=inf))
    flash = True
    if isinstance(row, PublishedRow) and row.software is not None:
        named = PROGRAMS.of_table(row.source)
        machine = machine.running(named.name if named and _is_of(named, row.software) else row.software)
        flash = row.year is None or row.year >= machine.software.flash_since
    software = replace(machine.software, is_ours=False, flash=flash)
    if isinstance(row, PublishedRow) and row.year and 0 < software.compiled_loss_since <= row.year:
        software = replace(software, loss_arrays=1, split_loss_arrays=1)
    figure = next((figure for word, figure in _MEMORY_FIGURES.items() if word in (row.unit or "")), None)
    software = replace(software, memory_figure=figure or software.memory_figure)
    return replace(machine, software=software)


def _is_of(program: TrainingProgram, software: str) -> bool:
    """Whether a table may call a program `software`: both have constants that were fitted on the same rows.

    Tables also call Transformer Engine's modules eager PyTorch, since they are launched one by one.
    """
    if program.fitted_on == PROGRAMS[software].fitted_on:
        return True
    return (PROGRAMS.root(program.name), PROGRAMS.root(software)) == ("te", "eager")


def _preferences(
    row: PublishedRow, config: ModelConfig, hardware: Hardware
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(remat policy, dtypes of the parameters' states), the fastest first."""
    asked, _, _ = (row.remat or "").partition("+")
    remats = _REMATS.get(asked) if asked else different_remats(config, hardware)
    if asked == "selective":
        remats = (hardware.software.selective,)
    if remats is None:
        known = ", ".join((*_REMATS, "selective"))
        raise LayoutError(f"remat = {row.remat!r} is unknown; fits: {known}, each with +offload")
    mixed, narrow = _states(row, hardware.software)
    for some in (mixed, narrow):
        yield from product(remats, some)


def _states(
    row: PublishedRow, software: TrainingProgram
) -> tuple[list[Mapping[str, object]], list[Mapping[str, object]]]:
    """Possible dtypes of the parameters' states, the largest first: (with a float32 copy, without).

    bf16 gradients are tried before recomputation, unless the software keeps float32 sums (`wide_sums`).

    With sharded weights, float32 weights are affordable, and bf16 weights without a copy are possible;
    otherwise there is a float32 copy. A single chip holds all states, so fine-tuning on it uses only bf16.
    The stages of a pipeline keep gathered weights if these fit, since each microbatch would gather them
    again; in time and memory that is ZeRO 1.
    """
    if row.chips == 1:
        return [_BF16], []
    sharded = row.zero == 3 or (row.zero is None and (row.fsdp or 1) > 1)
    narrow: list[Mapping[str, object]] = [_BF16_WEIGHTS, _BF16]
    if named(row.dtype) == "f16":
        return [_SCALED_LOSS], []
    if software.narrow_states:
        return [_MASTER_COPY | {"gradients_dtype": "bf16"}], narrow if sharded else []
    if not sharded:
        narrower = [] if software.wide_sums else [_MASTER_COPY | {"gradients_dtype": "bf16"}]
        return [_MASTER_COPY, *narrower], []
    kept = [_MASTER_COPY | {"zero": 1}] if (row.pipe or 1) > 1 else []
    return [
        *kept,
        _NARROW_SUMS if software.narrow_sums else _SHARDED_F32,
    ], [] if software.wide_sums else narrow


def _layouts(
    row: PublishedRow, config: ModelConfig, hardware: Hardware, remat: str, states: Mapping[str, object]
) -> Iterator[Layout]:
    """The layouts that agree with the row's columns, with one remat policy."""
    tensor, pipe, context = row.tensor or _least_tensor(row), row.pipe or 1, row.context or 1
    data, fsdp, zero = _data_axes(row, row.chips // (tensor * pipe * context))
    if data * fsdp * tensor * pipe * context != row.chips:
        raise LayoutError(
            f"data·fsdp·tensor·pipe·context = {data}·{fsdp}·{tensor}·{pipe}·{context} "
            f"= {data * fsdp * tensor * pipe * context} is not the row's {row.chips} chips"
        )
    compute, matmul = arithmetic(row.dtype)
    undecided = row.sequence_parallel is None and tensor > 1
    sequence_parallel = (False, True) if undecided else (bool(row.sequence_parallel),)
    counts = _microbatches(row, data * fsdp, pipe, hardware.chip.kind)
    may_fold = hardware.software.folds_experts and (row.expert or 1) > 1 and tensor * context > 1
    folded = (False, True) if may_fold else (False,)
    for split, microbatches, fold in product(sequence_parallel, counts, folded):
        yield Layout.of(
            data=data,
            fsdp=fsdp,
            tensor=tensor,
            pipe=pipe,
            context=context,
            expert=row.expert or 1,
            fold=fold,
            dispatch="once" if _dispatches_once(row, config, hardware) else "each",
            zero_context=context > 1 and bool(zero),  # as all frameworks do
            sequence_parallel=split and tensor > 1,
            microbatches=microbatches,
            interleave=_chunks(row, config, pipe, microbatches),
            remat=remat,
            offload=(row.remat or "").endswith("+offload"),
            compute_dtype=compute,
            matmul_dtype=matmul,
            **{"zero": zero, **states},
        )


def _dispatches_once(row: PublishedRow, config: ModelConfig, hardware: Hardware) -> bool:
    """Whether the row's software sends a token to a node only once, for all of its experts there."""
    since = hardware.software.once_since
    return config.moe is not None and bool(since) and row.year is not None and row.year >= since


def _least_tensor(row: PublishedRow) -> int:
    """Chips that share a sequence if no degree is given: 1, or enough to give each sequence some."""
    named = (row.data, row.fsdp, row.pipe, row.context)
    if any(named) or row.chips <= row.global_batch_sequences:
        return 1
    sharing = -(-row.chips // row.global_batch_sequences)
    fitting = (n for n in range(sharing, row.chips + 1) if row.chips % n == 0 and n & (n - 1) == 0)
    return next(fitting, 1)


def _data_axes(row: PublishedRow, ranks: int) -> tuple[int, int, int | None]:
    """(data, fsdp, zero): groups of zero_group ranks are fsdp, replicas of them data."""
    data, fsdp = row.data, row.fsdp
    if data is None or fsdp is None:
        fsdp = fsdp or (ranks // data if data else ranks)
        data = data or max(1, ranks // fsdp)
    zero = row.zero
    if row.zero_group and zero and fsdp == 1:
        data, fsdp = data * fsdp // row.zero_group, row.zero_group
    if zero == 3 and fsdp == 1:
        data, fsdp = 1, data
    if zero == 2 and (row.pipe or 1) > 1:
        zero = 1  # with stages, frameworks sum gradients once per step, not once per microbatch
    if zero == 0 and fsdp > 1:
        data, fsdp = data * fsdp, 1
    return data, fsdp, None if zero == 3 and fsdp * (row.context or 1) == 1 else zero


def _microbatches(row: PublishedRow, ranks: int, pipe: int, kind: str) -> list[int]:
    """Possible numbers of microbatches in a step.

    Programs for TPUs shard one array over all chips and give the batch of a chip, even if several chips share
    a sequence: if that times the chips is the whole batch, there is a single microbatch. A long pipeline
    without accumulation cuts its local batch into a microbatch for each stage, since otherwise all stages but
    one would be idle.
    """
    if row.micro_batch is None:
        local = max(1, row.global_batch_sequences // ranks)
        return [local // size for size in _MICROBATCHES if local % size == 0]
    of_a_chip = kind == "tpu" or row.micro_batch < 1  # a microbatch has at least one sequence
    if of_a_chip and pipe == 1 and row.micro_batch * row.chips == row.global_batch_sequences:
        return [1]
    count = max(1, round(row.global_batch_sequences / (ranks * row.micro_batch)))
    if count == 1 and pipe > _SHORT_PIPE:
        return [max(1, min(pipe, row.global_batch_sequences // ranks))]
    return [count]


def _chunks(row: PublishedRow, config: ModelConfig, pipe: int, microbatches: int) -> int:
    """Chunks per stage: the row's, or the smallest number above 1 that divides a stage's layers.

    Frameworks give all chunks the same number of layers, usually with two chunks. If microbatches do not
    divide over the stages there is one chunk, as the schedule requires.
    """
    if pipe == 1 or microbatches % pipe:
        return 1
    of_a_stage = max(1, config.num_layers // pipe)
    fewest = next((chunks for chunks in range(2, of_a_stage + 1) if of_a_stage % chunks == 0), 1)
    return row.interleave or fewest


def arithmetic(dtype: str) -> tuple[str, str | None]:
    """(compute dtype, dtype of matmuls if another) of a source's dtype, a name or an alias.

    Activations of narrower types are bf16. An MX type without products here counts as the plain type.
    """
    fits = types_for("operands")
    name = next((name for name in (named(dtype), dtype.removeprefix("mx")) if name in fits), None)
    if name is None:
        raise LayoutError(f"dtype = {dtype!r} is unknown; fits: {', '.join(fits)}")
    return (name, None) if name in COMPUTED else ("bf16", name)
