"""Rows of a table of load tests of serving engines."""

from dataclasses import dataclass
from math import isqrt

from meshwright.validate.read_row import ReadRow

FIGURES = ("tpot_seconds", "ttft_seconds", "e2e_seconds")
ROW_MODES = ("together", "apart")
# InferenceX draws lengths from 0.8 to 1 times these (prompt, answer).
_DRAWN = ((1024, 1024), (8192, 1024), (1024, 8192))
SHORTEST_DRAWN = 0.8
# A batch that the source calls "max": the most requests that the engine takes.
MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class WorkerDegrees:
    """The degrees of one worker of a pool."""

    tensor: int
    data: int
    expert_tensor: int
    expert: int

    @property
    def chips(self) -> int:
        return self.tensor * self.data


@dataclass(frozen=True)
class LoadTestRow(ReadRow):
    """One published load test. None: the source does not say.

    ttft_seconds, tpot_seconds: means over requests. prompt_len, output_len: tokens, or their rounded means.
    An answer of one token, or of none, ends with the prompt.
    """

    id: str
    source: str
    year: int | None
    engine: str
    engine_version: str | None
    model: str
    hf_model: str | None
    system: str
    hardware: str
    chips: int
    weight_dtype: str
    expert_dtype: str | None
    mode: str
    concurrency: int | None
    prompt_len: int
    output_len: int
    tensor: int | None
    pipe: int | None
    data: int | None
    expert_tensor: int | None
    expert: int | None
    prefill_workers: int | None
    prefill_tensor: int | None
    prefill_data: int | None
    prefill_expert_tensor: int | None
    prefill_expert: int | None
    decode_workers: int | None
    decode_tensor: int | None
    decode_data: int | None
    decode_expert_tensor: int | None
    decode_expert: int | None
    decode_batch: int | None
    ttft_seconds: float
    tpot_seconds: float | None

    @property
    def figures(self) -> dict[str, float]:
        """Measured seconds by those names of FIGURES that the row has."""
        if self.output_len < 2:
            return {"ttft_seconds": self.ttft_seconds, "e2e_seconds": self.ttft_seconds}
        if self.tpot_seconds is None:
            return {"ttft_seconds": self.ttft_seconds}
        return self.with_request(self.ttft_seconds, self.tpot_seconds)

    def with_request(self, ttft_seconds: float, tpot_seconds: float) -> dict[str, float]:
        """The two means, and the mean time of a whole request that follows."""
        e2e = ttft_seconds + (self.output_tokens - 1) * tpot_seconds
        return {"tpot_seconds": tpot_seconds, "ttft_seconds": ttft_seconds, "e2e_seconds": e2e}

    @property
    def output_tokens(self) -> float:
        """Mean tokens of an answer, at least the one that a prompt ends with."""
        return self.output_len * (1 + SHORTEST_DRAWN) / 2 if self.draws_lengths else max(1, self.output_len)

    @property
    def draws_lengths(self) -> bool:
        return (self.prompt_len, self.output_len) in _DRAWN

    @property
    def panel(self) -> tuple[object, ...]:
        """Rows of a panel differ in engine, layout, chips and concurrency."""
        return (self.model, self.system, self.weight_dtype, self.mode, self.prompt_len, self.output_len)

    @property
    def degrees(self) -> tuple[object, ...]:
        """The columns of the degrees of all pools."""
        together = (self.tensor, self.data, self.expert_tensor, self.expert)
        prefill = (
            self.prefill_tensor, self.prefill_data, self.prefill_expert_tensor, self.prefill_expert,
        )  # fmt: skip
        decode = (self.decode_tensor, self.decode_data, self.decode_expert_tensor, self.decode_expert)
        return (self.mode, together, prefill, decode)

    def pools(self) -> list[tuple[int, WorkerDegrees]]:
        """(workers, degrees) of the one pool, or of the pools of prefill and of decode."""
        if self.mode == "together":
            stated = (self.tensor or 1, self.data or 1, self.expert_tensor or 1, self.expert or 1)
            if _is_squared(*stated):
                expert = isqrt(stated[0] * stated[1])
                tensor, data = (1, expert) if stated[1] > stated[0] else (expert, 1)
                return [(1, WorkerDegrees(tensor, data, 1, expert))]
            degrees = WorkerDegrees(*stated)
            return [(max(1, self.chips // degrees.chips), degrees)]
        prefill = _degrees(
            self.prefill_tensor, self.prefill_data, self.prefill_expert_tensor, self.prefill_expert
        )
        decode = _degrees(self.decode_tensor, self.decode_data, self.decode_expert_tensor, self.decode_expert)
        return [(self.prefill_workers or 1, prefill), (self.decode_workers or 1, decode)]


def _is_squared(tensor: int, data: int, expert_tensor: int, expert: int) -> bool:
    """Whether n devices of an expert group are counted as n * n devices.

    A record with tensor = expert = n says that experts are divided over the n devices of tensor parallelism.
    Collections that take expert_tensor for tensor, or expert for data, then find n * n devices: the same
    runs are listed with n and with n * n devices, and equal times. Workers of separate pools are counted
    correctly.
    """
    num_devices = tensor * data
    is_expert_tensor = expert_tensor == expert and num_devices == expert * expert
    is_expert_data = expert_tensor == 1 and tensor == data and num_devices == expert
    return expert > 1 and (is_expert_tensor or is_expert_data)


def _degrees(*stated: int | None) -> WorkerDegrees:
    return WorkerDegrees(*(degree or 1 for degree in stated))
