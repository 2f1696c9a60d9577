"""A batch as the arrays of a step: each work in a row of its kind, a long one in several blocks."""

from collections.abc import Iterator

import numpy as np

from meshwright.nn.attention.paged import PADDING, Rows
from meshwright.serve.device.forward_steps import StepShape
from meshwright.serve.device.readout import Read
from meshwright.serve.device.sampling import Edits, Guesses, SampledRows, batch_edits, batch_rows, no_guesses
from meshwright.serve.engine.batch import Batch, SequenceWork
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.logit_edits import LogitEdits
from meshwright.serve.engine.request import GREEDY, Request
from meshwright.serve.engine.sequence import TokenSequence


class StepInputs:
    """The arrays of a step, replica by replica.

    num_per_shard: replicas on one shard of the batch. num_sharing: replicas that prefill prompts together,
    and have their tokens in common. num_hidden: D of a draft head, otherwise 0.
    sampled: for each work the rows of logits after which its tokens are sampled. scored, embedded: the rows
    of hidden states that are read. computed: for each work the rows of its tokens, through all replicas.
    hidden: of a draft head, f32[tokens, D], for each token the hidden state that the head reads next to it.
    """

    def __init__(
        self,
        batch: Batch,
        step: StepShape,
        limits: Limits,
        num_per_shard: int,
        num_sharing: int,
        num_hidden: int = 0,
    ) -> None:
        self._step, self._slots = step, limits.slots_per_replica
        self._num_per_shard, self._num_sharing = num_per_shard, num_sharing
        self._limits = limits
        count = limits.num_replicas
        num_groups = count // num_sharing
        num_logits = count * step.num_logits
        self.tokens = np.zeros(num_groups * step.num_tokens, np.int32)
        self.positions = np.full(count * step.num_tokens, PADDING, np.int32)
        self.slots = np.full(num_groups * step.num_tokens, self._slots, np.int32)
        num_tables = 2 if limits.window else 1
        self.tables = np.zeros((count * step.num_rows, num_tables, step.pages_of_row), np.int32)
        self.heads = np.full(num_groups * step.num_heads, PADDING, np.int32)
        self.chosen_slots = np.full(num_logits, self._slots, np.int32)
        self.chosen_positions = np.zeros(num_logits, np.int32)
        self._params = [GREEDY] * num_logits
        self._edits: list[LogitEdits | None] = [None] * num_logits
        self._guesses = list[tuple[int, int, np.ndarray]]()  # row of logits, token, the draft model's logits
        self.sampled: list[range] = []
        self.scored, self.embedded = list[Read](), list[Read]()
        self.computed: list[range] = []
        self.hidden = np.zeros((num_groups * step.num_tokens, num_hidden), np.float32) if num_hidden else None
        self._num_sampled = [0] * num_groups
        starts = [list(_starts(step.rows)) for _ in range(num_groups)]
        for number, work in enumerate(batch.works):
            group = work.slot // self._slots // num_sharing
            kind = len(step.rows) - 1 if work.is_prompt else 0
            length = step.rows[kind].length
            begins, first = range(0, len(work.tokens), length), starts[group][kind][1]
            for begin in begins:
                row, token = starts[group][kind]
                self._put(work, begin, min(length, len(work.tokens) - begin), row, token)
                starts[group][kind] = row + 1, token + length
            first_row = group * step.num_tokens + first
            self.computed.append(range(first_row, first_row + len(work.tokens)))
            self._choose(work, starts[group][kind][1] - length, len(work.tokens) - begins[-1])
            if work.reads is not None:
                self._read(number, work, first)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        columns = self.tokens, self.positions, self.slots, self.tables, self.heads
        return columns if self.hidden is None else (*columns, self.hidden)

    def sampling(self, vocab_size: int) -> tuple[SampledRows, Edits | None]:
        """The parameters of each row of logits; no edits if none of them has any."""
        edits = batch_edits(list(zip(self._params, self._edits, strict=True)), vocab_size)
        return batch_rows(self._params, self.chosen_positions), edits

    def guesses(self, vocab_size: int) -> Guesses | None:
        """The guesses of the ratio test, by row of logits; None without any."""
        if not self._guesses:
            return None
        guesses = no_guesses(len(self._params), vocab_size)
        for row, token, logits in self._guesses:
            guesses.tokens[row], guesses.logits[row] = token, logits
        return guesses

    def _put(self, work: SequenceWork, begin: int, count: int, row: int, token: int) -> None:
        """Write `count` tokens of the work, from its number `begin` on, to a row of its replica."""
        replica = work.slot // self._slots
        place, row = token + replica * self._step.num_tokens, row + replica * self._step.num_rows
        token += replica // self._num_sharing * self._step.num_tokens
        start = work.start + begin
        self.tokens[token : token + count] = work.tokens[begin : begin + count]
        if self.hidden is not None and work.hidden is not None:
            self.hidden[token : token + count] = work.hidden[begin : begin + count]
        self.positions[place : place + count] = range(start, start + count)
        slot = slot_on_shard(
            self._limits, work.slot, self._num_per_shard, num_right=0 if begin else work.num_right
        )
        # Replicas that share a prompt know by the slots which of its tokens are padding.
        self.slots[token : token + (count if self._num_sharing > 1 else 1)] = slot
        self.tables[row, 0, : len(work.pages)] = work.pages
        if work.window_pages:  # NO_PAGE is never read, so that any number does
            self.tables[row, 1, : len(work.pages)] = np.maximum(work.window_pages, 0)

    def _choose(self, work: SequenceWork, token: int, count: int) -> None:
        """Sample after the last of the row's `count` tokens, and before each draft."""
        replica = work.slot // self._slots
        group = replica // self._num_sharing
        if self._num_sharing == 1:
            token += replica % self._num_per_shard * self._step.num_tokens
        head = self._num_sampled[group]
        self._num_sampled[group] += work.num_samples
        first = replica * self._step.num_logits + head
        self.sampled.append(range(first, first + work.num_samples))
        head += group * self._step.num_heads
        for number, from_end in zip(self.sampled[-1], range(work.num_samples, 0, -1), strict=True):
            self.heads[head + number - first] = token + count - from_end
            start = work.start if work.position is None else work.position
            self.chosen_positions[number] = start + len(work.tokens) - from_end + 1
            self._params[number] = work.sequence.request.sampling
            self._edits[number] = work.sequence.edits
        # The last sampled row has no draft, and drafts may have no logits.
        self._guesses += zip(self.sampled[-1], work.drafts, work.draft_logits, strict=False)
        if work.num_samples == 1:
            self.chosen_slots[first] = slot_on_shard(self._limits, work.slot, self._num_per_shard)

    def _read(self, number: int, work: SequenceWork, token: int) -> None:
        """Read the hidden states of the work, whose tokens begin at number `token` of its replica's step."""
        shard, place = divmod(work.slot // self._slots, self._num_per_shard)
        first, request = token + place * self._step.num_tokens, work.sequence.request
        if work.reads == "embedding":
            self.embedded.append(Read(number, shard, first + len(work.tokens) - 1))
            return
        targets = request.prompt[work.start + 1 : work.start + 1 + len(work.tokens)]
        num_top = request.sampling.top_logprobs
        self.scored += [Read(number, shard, first + i, token, num_top) for i, token in enumerate(targets)]


def slot_on_shard(
    limits: Limits, slot: int, num_per_shard: int, snapshot: int | None = None, num_right: int = 0
) -> int:
    """The index of a slot's entry, or of another entry of its sequence, on its shard of the batch.

    snapshot: the entry of this snapshot of the slot's replica. num_right: the entry after this many drafts.
    """
    replica, number = divmod(slot, limits.slots_per_replica)
    if snapshot is not None:
        number = limits.slots_per_replica + 1 + snapshot
    elif num_right and limits.num_kept_drafts:
        first = limits.slots_per_replica + 1 + limits.num_snapshots
        number = first + number * limits.num_kept_drafts + num_right - 1
    return replica % num_per_shard * limits.num_state_entries + number


def _starts(rows: tuple[Rows, ...]) -> Iterator[tuple[int, int]]:
    """(number of its first row, number of its first token) of each kind of rows."""
    row = token = 0
    for kind in rows:
        yield row, token
        row, token = row + kind.num_rows, token + kind.num_tokens


def placeholder(
    limits: Limits, replica: int, row: int, count: int, num_drafts: int = 0, *, samples: bool = True
) -> SequenceWork:
    """A work of `count` tokens at the beginning of no request's sequence, to time steps with."""
    pages = tuple(range(-(-count // limits.page_size)))
    return SequenceWork(
        TokenSequence(Request((0,), sampling=GREEDY), 1, 0, lambda _: None),
        replica * limits.slots_per_replica + row,
        0,
        (0,) * count,
        pages,
        num_drafts,
        samples=samples,
        window_pages=pages if limits.window else (),
    )
