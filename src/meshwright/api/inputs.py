"""The inputs of the library: the tokens of a training step, the requests to a server, and their options."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, cast

from meshwright.dtypes import COMPUTED, named
from meshwright.engines.serving_engine import ENGINES
from meshwright.errors import PlanError, nearest
from meshwright.hardware.chip import Chip
from meshwright.hardware.prices import parse_money
from meshwright.hardware.topology import Hardware
from meshwright.layout.precision import Precision, published_precision
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.options import REQUIRED, changed_options, check_options, option, parse_dtype
from meshwright.plan.launcher_limits import check_chips
from meshwright.platforms import CPU
from meshwright.programs.launcher import LAUNCHERS
from meshwright.programs.program import DEFAULT as XLA
from meshwright.programs.program import PROGRAMS
from meshwright.units import (
    parse_count,
    parse_days,
    parse_length,
    parse_seconds,
    parse_seconds_per_token,
    parse_seconds_to_first_token,
    parse_share,
)

if TYPE_CHECKING:
    from meshwright.plan.serve.requests import Requests, Targets

# The default of an option that the command line may leave out and the library may not.
_UNSET = cast(Any, None)


@dataclass(frozen=True)
class Train:
    """A training step of `batch_tokens` tokens, in sequences of `seq_len`: integers, or text such as "4M".

    >>> Train(batch_tokens="4M", seq_len="8k")
    Train(batch_tokens=4000000, seq_len=8192)
    """

    batch_tokens: int = option(REQUIRED, parser=parse_count, help="Tokens per step: 4M, 4Mi.")
    seq_len: int = option(REQUIRED, parser=parse_length, help="Tokens per sequence: 4096, 8k (8192).")

    def __init__(self, batch_tokens: int | str, seq_len: int | str) -> None:
        object.__setattr__(self, "batch_tokens", parse_count(batch_tokens))
        object.__setattr__(self, "seq_len", parse_length(seq_len))

    def workload(self, model: ModelConfig) -> Workload:
        """The nearest number of whole sequences. Raises PlanError if one exceeds the context or the batch."""
        if self.seq_len > model.max_seq_len:
            raise PlanError(
                f"--seq-len {self.seq_len} is longer than {model.name}'s context of {model.max_seq_len}; "
                f"fits: --seq-len {model.max_seq_len}, or --set max_seq_len={self.seq_len}"
            )
        if self.batch_tokens < self.seq_len:
            raise PlanError(
                f"--batch-tokens {self.batch_tokens} is less than one sequence of {self.seq_len} tokens; "
                f"fits: --batch-tokens {self.seq_len}"
            )
        return Workload(round(self.batch_tokens / self.seq_len), self.seq_len)


@dataclass(frozen=True)
class SearchOptions:
    """The dtypes and bounds of a search for layouts to train with."""

    weights_dtype: str | None = option(
        None, parser=parse_dtype, help="Dtype of the weights.", unset="bf16; f32 on cpu"
    )
    compute_dtype: str | None = option(
        None, parser=parse_dtype, help="Dtype of activations and matmuls.", unset="bf16; on cpu the faster"
    )
    given: str = option(
        "", help="Only layouts that meet these conditions: tensor=8,pipe<=4,schedule!=zb-v,memory<=70GB."
    )
    runnable: bool | None = option(
        None,
        flag="--runnable/--any",
        help="Rank what mw train runs, or all that can be planned.",
        unset="only layouts that run, if any",
    )
    top: int = option(10, least=1, most=10_000, help="How many layouts to list.")

    def __post_init__(self) -> None:
        check_options(self)

    def dtypes(self, chip: Chip) -> tuple[str, tuple[str, ...]]:
        """The dtype of the weights, and the dtypes to compute in: for a CPU every dtype that was measured."""
        weights = self.weights_dtype or chip.platform.dtype
        if self.compute_dtype:
            return weights, (self.compute_dtype,)
        measured = tuple(dtype for dtype in COMPUTED if dtype in chip.flops_per_second)
        return weights, chip.platform.compute_dtypes or measured


@dataclass(frozen=True)
class Conditions:
    """The conditions of a price: a training program, a network, ideal rates, memory to leave free."""

    software: str = option(
        XLA,
        metavar="NAME",
        help=f"Training software to price: {', '.join(PROGRAMS.names)}; mw train is xla.",
        after="compute_dtype",
    )
    launcher: str | None = option(
        None,
        flag="--for",
        names=tuple(LAUNCHERS.names),
        metavar="NAME",
        help=f"Rank layouts that this software runs, and print its settings: {', '.join(LAUNCHERS.names)}.",
        after="software",
    )
    network: str | None = option(
        None,
        metavar="NAME",
        help="Network between nodes of GPUs: a name that mw hardware lists, such as infiniband, roce or efa.",
        unset="the hardware's",
        after="launcher",
    )
    ideal: bool = option(False, help="Price a roofline: the longer of products and links, at rated peaks.")
    headroom: float = option(
        0.0, parser=parse_share, metavar="SHARE", help="Share of each chip's memory to leave free: 10%."
    )

    @property
    def given(self) -> list[str]:
        """The flags of options that are not at their default."""
        return list(changed_options(Conditions, vars(self)))

    def of(self, machine: Hardware) -> Hardware:
        """The machine under these conditions. Raises HardwareError for an unknown program or network."""
        program = self.software
        if program in ENGINES.names and program not in PROGRAMS:
            raise PlanError(f"--software {program}: it serves; type mw plan serve --engine {program}")
        if self.launcher:
            if self.launcher not in LAUNCHERS:
                raise PlanError(
                    f"--for {self.launcher} is unknown; {nearest(self.launcher, list(LAUNCHERS.names))}"
                )
            launcher = LAUNCHERS[self.launcher]
            if program not in (XLA, launcher.prices):
                raise PlanError(
                    f"--for {self.launcher} prices steps of {launcher.prices}; leave out --software {program}"
                )
            check_chips(launcher, machine)
            program = launcher.prices
        machine = (machine.over(self.network) if self.network else machine).running(program)
        chip = machine.chip.roofline() if self.ideal else machine.chip
        if self.headroom:
            chip = chip.leaving(self.headroom * chip.program_bytes)
        return replace(machine, chip=chip)


@dataclass(frozen=True)
class SizeOptions:
    """The bounds of a search for the smallest machine."""

    smallest: bool = option(False, help="Find the fewest chips that suffice; --hardware v5p names the chip.")
    max_seconds: float | None = option(
        None, parser=parse_seconds, help="With --smallest: the longest step allowed: 2.5, 500ms."
    )
    days: float | None = option(
        None, parser=parse_days, help="With --smallest and --tokens: the longest run allowed."
    )


@dataclass(frozen=True)
class Serve:
    """Requests of `prompt_tokens`, answered with `output_tokens`: integers, or text such as "8k".

    ttft, tpot: maximum seconds to the first token, and per token after it. max_price_per_hour: for all
    chips. prefix_hit, drafts, acceptance, draft_head, paged, chunk: as in plan/serve/requests.py. lengths:
    (prompt, output) tokens of a sample of requests, in place of prompt_tokens and output_tokens.

    >>> Serve("8k", 512, tpot=0.02)
    Serve(prompt_tokens=8192, output_tokens=512, ttft=None, tpot=0.02)
    """

    prompt_tokens: int = option(
        _UNSET, parser=parse_length, help="Tokens per prompt: 8192, 8k (8192); with --lengths the mean."
    )
    output_tokens: int = option(_UNSET, parser=parse_length, help="Tokens per answer.")
    ttft: float | None = option(
        None,
        parser=parse_seconds_to_first_token,
        help="Longest allowed time to first token: 0.5, 500ms.",
        after="trace",
    )
    tpot: float | None = option(
        None, parser=parse_seconds_per_token, help="Longest allowed time per output token: 0.03, 30ms."
    )
    max_price_per_hour: float | None = option(
        None,
        metavar="PRICE",
        parser=parse_money,
        help="Highest allowed price per hour of all chips.",
        repr=False,
    )
    prefix_hit: float = option(
        0.0, help="Share of a prompt found in a prefix cache.", after="context", repr=False
    )
    drafts: int = option(0, help="Draft tokens per step (speculative decoding).", repr=False)
    acceptance: float = option(0.0, help="Probability that a draft token is accepted.", repr=False)
    draft_head: bool = option(False, help="The model's own head makes the --drafts.", repr=False)
    paged: bool = option(
        False, help="Count the cache at the mean length of sequences, not the longest.", repr=False
    )
    chunk: int | None = option(
        None,
        parser=parse_length,
        help="Prefill in chunks of this many tokens, as mw serve does.",
        unset="whole prompts",
        repr=False,
    )
    lengths: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def __init__(
        self,
        prompt_tokens: int | str | None = None,
        output_tokens: int | str | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
        *,
        max_price_per_hour: float | None = None,
        prefix_hit: float = 0.0,
        drafts: int = 0,
        acceptance: float = 0.0,
        draft_head: bool = False,
        paged: bool = False,
        chunk: int | None = None,
        lengths: Sequence[tuple[int, int]] = (),
    ) -> None:
        prompt, output = _mean_tokens(prompt_tokens, output_tokens, lengths)
        values = locals() | {"prompt_tokens": prompt, "output_tokens": output, "lengths": tuple(lengths)}
        for each in fields(self):
            object.__setattr__(self, each.name, values[each.name])

    @property
    def requests(self) -> "Requests":
        """The requests as the planner takes them. Raises PlanError for a share or a number out of range."""
        from meshwright.plan.serve.requests import Requests

        names = ("prefix_hit", "drafts", "acceptance", "draft_head", "paged", "chunk")
        rest = {name: getattr(self, name) for name in names}
        if self.lengths:
            return Requests.of_lengths(self.lengths, **rest)
        return Requests(self.prompt_tokens, self.output_tokens, **rest)

    @property
    def targets(self) -> "Targets":
        """The targets of every answer. Raises PlanError for a target that is not above 0."""
        from meshwright.plan.serve.requests import Targets

        given = {"ttft": self.ttft, "tpot": self.tpot, "price_per_hour": self.max_price_per_hour}
        return Targets(**{name: value for name, value in given.items() if value is not None})


def _mean_tokens(
    prompt_tokens: int | str | None, output_tokens: int | str | None, lengths: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Mean tokens of a prompt and of its answer. Raises PlanError unless they are given exactly once."""
    if bool(lengths) == (prompt_tokens is not None or output_tokens is not None):
        raise PlanError("Serve: give prompt_tokens and output_tokens, or lengths")
    if lengths:
        from meshwright.plan.serve.requests import Requests

        mean = Requests.of_lengths(lengths)
        return mean.prompt_tokens, mean.output_tokens
    if prompt_tokens is None or output_tokens is None:
        raise PlanError("Serve: prompt_tokens and output_tokens are both needed")
    return parse_length(prompt_tokens), parse_length(output_tokens)


@dataclass(frozen=True)
class ServedDtypes:
    """The dtypes to serve with; several for the weights and the cache are all tried: `bf16,int8`."""

    weights_dtype: str | None = option(
        None,
        metavar="DTYPE,...",
        help="Dtypes of the weights to try: bf16,fp8,int8,int4.",
        unset="bf16; f32 on cpu",
    )
    kv_dtype: str | None = option(
        None, metavar="DTYPE,...", help="Dtypes of the KV cache to try: bf16,int8.", unset="as computed"
    )
    matmul_dtype: str | None = option(
        None,
        metavar="DTYPE",
        help="Dtype of matmul operands, if activations are quantised: int8, fp8.",
        unset="as computed",
    )
    compute_dtype: str | None = None

    def precisions(
        self, machines: Sequence[Hardware], model: ModelConfig, *, by_engine: bool = False
    ) -> list[dict[str, str]]:
        """The dtypes of a layout, for every dtype of the weights and of the cache.

        By default both are the dtype to compute in: bf16, and f32 if all machines are CPUs. Except on CPUs,
        weights then have the type of the model's published files, if the server runs it; by_engine: as in
        `published_precision`. Raises LayoutError for an unknown dtype.
        """
        first, *others = {machine.chip.kind: machine.chip.platform for machine in machines}.values()
        compute = self.compute_dtype or ("bf16" if others else first.dtype)
        precisions: list[dict[str, Any]] = [
            {
                "weights_dtype": named(weights),
                "compute_dtype": compute,
                "kv_dtype": named(kv),
                "matmul_dtype": self.matmul_dtype,
            }
            for weights in (self.weights_dtype or compute).split(",")
            for kv in (self.kv_dtype or compute).split(",")
        ]
        if not self.weights_dtype and (others or first is not CPU):
            precisions = [words | published_precision(model, by_engine=by_engine) for words in precisions]
        for words in precisions:
            Precision(**words)
            if not self.matmul_dtype and not others:
                words["matmul_dtype"] = first.served_operands(words["weights_dtype"])
        return precisions
