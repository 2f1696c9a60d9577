"""Results that are read from the hidden states of a step: scores of prompt tokens, and embeddings.

    scores[t] = log p(tokens[t + 1] | tokens[..t])        of every token of a prompt but the last
    embedding = h / |h|                                   h: of the last token, after the final norm

The head runs over a few rows at a time, since logits[T, V] of a long prompt would be larger than the model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.models import transformer
from meshwright.nn.attention.paged import PADDING
from meshwright.nn.products.row_products import in_tiles
from meshwright.nn.start.device_mesh import partition_spec
from meshwright.serve.device.programs import InferencePrograms
from meshwright.serve.device.sampling import top_tokens
from meshwright.serve.engine.request import Scores, TokenScore

ROWS = 64  # of each shard in one product with the head


class Read(NamedTuple):
    """A row of hidden states to read. work: its number in the batch. target: the token to score.

    num_top: alternatives to report.
    """

    work: int
    shard: int
    row: int
    target: int = 0
    num_top: int = 0


_PADDING = Read(-1, 0, PADDING)


class ScoredRows(NamedTuple):
    """Log-probabilities f32[n] of tokens, and the likeliest tokens instead, [n, NUM_TOP], descending."""

    logprobs: Array
    top_ids: Array
    top_logprobs: Array


class Readout:
    """The programs that read hidden states of steps with `num_hidden` rows; compiles them.

    They take (params, hidden, rows i32[n]): ROWS rows of `hidden` on each shard of the batch, or PADDING. The
    one for scores also takes targets i32[n], the tokens after these rows, and returns ScoredRows. The one for
    embeddings returns f32[n, D], the hidden states after the final norm.
    """

    def __init__(self, programs: InferencePrograms, num_hidden: int) -> None:
        self._programs, self._num_shards = programs, programs.cache.num_shards
        self._score = self._compiled(self._scores, num_hidden, 2)
        self._embed = self._compiled(self._embeddings, num_hidden, 1)

    def _compiled(self, read: Callable[..., Any], num_hidden: int, num_columns: int) -> Any:
        programs = self._programs
        batch, _, dims = partition_spec(programs.layout.activation("x", "BTD"))
        hidden = jax.ShapeDtypeStruct(
            (programs.num_replicas * num_hidden, 1, programs.config.d_model),
            programs.ops.dtype,
            sharding=NamedSharding(programs.mesh, PartitionSpec(batch, None, dims)),
        )
        columns = [programs.cache.split(self._num_shards * ROWS)] * num_columns
        return programs.lowered(jax.jit(read), programs.abstract_params(), hidden, *columns).compile()

    def _scores(self, params: Mapping[str, Any], hidden: Array, rows: Array, targets: Array) -> ScoredRows:
        programs = self._programs
        logits = transformer.leave(
            programs.config, programs.ops, params, programs.token_steps.rows_taken(hidden, rows)
        )
        by_shard = PartitionSpec(programs.cache.batch_axes)
        local = partial(in_tiles, _scored) if programs.batch_invariant else _scored
        mapped = jax.shard_map(local, in_specs=by_shard, out_specs=by_shard, check_vma=False)
        return mapped((programs.token_steps.whole(logits), targets))

    def _embeddings(self, params: Mapping[str, Any], hidden: Array, rows: Array) -> Array:
        programs = self._programs
        taken = programs.token_steps.rows_taken(hidden, rows)
        return programs.token_steps.whole(
            transformer.final_norm(programs.config, programs.ops, params, taken)
        )

    def dispatch(
        self, params: Mapping[str, Any], hidden: Array, scored: Sequence[Read], embedded: Sequence[Read]
    ) -> "Results":
        """Dispatch the scores of rows `scored` and the embeddings of rows `embedded`."""
        return Results(
            [(reads, self._score(params, hidden, *columns)) for reads, *columns in self._packed(scored)],
            [(reads, self._embed(params, hidden, rows)) for reads, rows, _ in self._packed(embedded)],
        )

    def _packed(self, reads: Sequence[Read]) -> Iterator[tuple[list[Read], np.ndarray, np.ndarray]]:
        """ROWS reads of each shard at a time, with their rows and targets."""
        by_shard = [[read for read in reads if read.shard == shard] for shard in range(self._num_shards)]
        for begin in range(0, max(map(len, by_shard)), ROWS):
            packed = list[Read]()
            for rows_of_shard in by_shard:
                some = rows_of_shard[begin : begin + ROWS]
                packed += some + [_PADDING] * (ROWS - len(some))
            rows, targets = zip(*((read.row, read.target) for read in packed), strict=True)
            yield packed, np.array(rows, np.int32), np.array(targets, np.int32)


class Results(NamedTuple):
    """Dispatched reads with their outputs."""

    scores: list[tuple[list[Read], Any]]
    embeddings: list[tuple[list[Read], Any]]

    @property
    def outputs(self) -> list[Any]:
        return [output for _, output in (*self.scores, *self.embeddings)]

    def read(self) -> tuple[Mapping[int, Sequence[TokenScore]], Mapping[int, np.ndarray]]:
        """Scores and embeddings by work; waits for the device."""
        scores, embeddings = defaultdict[int, list[Scores]](list), dict[int, np.ndarray]()
        for reads, output in self.scores:
            logprobs, ids, top_logprobs = map(np.asarray, jax.device_get(output))
            works = np.array([read.work for read in reads])
            targets = np.array([read.target for read in reads], np.int32)
            num_tops = {read.work: read.num_top for read in reads if read is not _PADDING}
            for work, num_top in num_tops.items():
                rows = np.flatnonzero(works == work)
                top = ids[rows, :num_top], top_logprobs[rows, :num_top]
                scores[work].append(Scores(targets[rows], logprobs[rows], *top))
        for reads, output in self.embeddings:
            for read, hidden in zip(reads, jax.device_get(output), strict=True):
                if read is not _PADDING:
                    embeddings[read.work] = hidden / max(float(np.linalg.norm(hidden)), 1e-12)
        return {work: Scores.joined(parts) for work, parts in scores.items()}, embeddings


def _scored(columns: tuple[Array, Array]) -> ScoredRows:
    """The scores on one shard of the batch."""
    logits, targets = columns
    normalisers = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    logprobs = jnp.take_along_axis(logits, targets[:, None], axis=-1) - normalisers
    top_ids, top_logits = top_tokens(logits)
    return ScoredRows(logprobs[:, 0], top_ids, top_logits - normalisers)
