"""Settings of load tests that tables leave out, as public launch scripts choose them.

Tables give the degrees of one worker and the requests at once. They leave out

    attention       one copy of heads over all devices of a worker, or sequences of its own for each device
    workers         of pools apart
    drafts          whether the model's heads for further tokens ran
    streaming       tokens that a server collects before it sends them
    slots           requests that the decode workers of TensorRT-LLM hold at once (`max_batch_size`)

Source: InferenceX (Apache-2.0, August 2026), searches in configs/ with pools apart, and launch scripts in
benchmarks/. SGLang and TensorRT-LLM serve mixtures with latent attention there as follows. Workers split
heads up to about SPLIT_POSITIONS positions at once; beyond, and in workers of more than MOST_SPLIT devices,
each device has sequences of its own. A pool that splits heads has about SPLIT_WORKERS workers for one of
prefill. Other pools have one decode worker (217 of 265 searches of TensorRT-LLM), and the prefill workers
that keep it full.

Searches of TensorRT-LLM with sequences for each device ask for 1.05 to 1.3 times the requests that decode
workers hold, which keeps decode steps full. A device holds 2^k or 3 * 2^k sequences, in 9 of 10 searches the
largest such number up to its share. If workers split heads, about half of the searches hold all requests.
"""

from meshwright.models.config import ModelConfig
from meshwright.validate.load_test_row import LoadTestRow, WorkerDegrees

# The most positions, over all requests at once, in workers whose devices split heads.
SPLIT_POSITIONS = 900_000
MOST_SPLIT = 16
# Workers that split heads: 3 (64 devices of H100, 32 of GB200 in fp8) to 8, most often 4 or 5.
SPLIT_WORKERS = 4
# Share of TensorRT-LLM's searches with drafts (SGLang's are mostly without), and tokens of a step with drafts
# for each token without: three heads predict 2.6 tokens in a step of 1.5 times the length (DeepSeek-R1).
DRAFTED = 0.55
DRAFTS_GAIN = 1.75
# Probability that a draft token is right if the ones before it are. The first token's is from DeepSeek-R1's
# head (vllm-project/vllm pull request 12755); with a later token's, a step of three drafts has 2.6 tokens.
_FIRST_RIGHT, _LATER_RIGHT = 0.82, 0.6
# Tokens that a server collects, by engine, hardware's first letters and model's; the first that fits.
_STREAMED = (
    ("trtllm", "", "minimax", 100),
    ("trtllm", "", "gpt-oss", 1),  # 20, with the first token sent at once: num_postprocess_workers = 4
    ("trtllm", "", "llama", 1),
    ("trtllm", "", "qwen3-", 1),
    ("trtllm", "", "", 10),
    ("sglang", "h", "", 1),
    ("sglang", "", "", 30),  # 50 for Qwen3.5 in fp8 since the end of April 2026; the published runs are older
)


def streamed_tokens(row: LoadTestRow) -> int:
    """Tokens of an answer in its first message."""
    if row.mode == "apart":  # the pool of prefill sends the first token
        return 1
    fits = (
        number
        for engine, machine, model, number in _STREAMED
        if row.engine == engine and row.hardware.startswith(machine) and row.model.startswith(model)
    )
    return min(next(fits, 1), max(1, row.output_len))


def decode_slots(row: LoadTestRow, concurrency: int, groups: int, *, splits: bool) -> int:
    """Requests that all decode workers hold at once, of `concurrency` requests; the others wait for a place.

    groups: devices with sequences of their own, of all workers. splits: whether workers split heads instead.
    """
    if row.engine != "trtllm" or splits:
        return concurrency
    each = max(1, concurrency // groups)
    power = 1 << (each.bit_length() - 1)
    return groups * (power * 3 // 2 if power > 1 and 2 * each >= 3 * power else power)


def is_unstated(row: LoadTestRow, config: ModelConfig) -> bool:
    """Whether `row` leaves out the workers of its pools and the layout of attention."""
    return row.mode == "apart" and row.decode_workers is None and config.mla is not None


def splits_heads(row: LoadTestRow, concurrency: int, degrees: WorkerDegrees) -> bool:
    """Whether the devices of a decode worker with latent attention split heads."""
    positions = concurrency * (row.prompt_len + row.output_len / 2)
    return degrees.chips <= MOST_SPLIT and positions <= SPLIT_POSITIONS


def expected_gain(row: LoadTestRow, config: ModelConfig) -> float:
    """Expected tokens of a step for each without drafts, if `row` does not say whether there were any."""
    drafts = config.mtp_layers and row.engine == "trtllm" and is_unstated(row, config)
    return 1 + DRAFTED * (DRAFTS_GAIN - 1) if drafts else 1.0


def tokens_of_step(num_drafts: int) -> float:
    """Expected tokens of a sequence in a step that verifies draft tokens.

    >>> [round(tokens_of_step(number), 2) for number in range(4)]
    [1.0, 1.82, 2.31, 2.61]
    """
    return 1.0 + sum(_FIRST_RIGHT * _LATER_RIGHT**place for place in range(num_drafts))
