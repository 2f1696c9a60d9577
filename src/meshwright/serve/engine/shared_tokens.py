"""The scheduling policy of engines whose prompts and sequences share the tokens of a step. Plain Python."""

from meshwright.serve.engine.policy import Policy, Queue
from meshwright.serve.engine.replica import Replica
from meshwright.serve.engine.sequence import TokenSequence


class SharedTokens(Policy):
    """Continuous batching with at most `max_tokens` tokens of a replica in a step.

    Every step generates for all running sequences, and takes prompts in their order of arrival.
    separate_prompts: a step has only prompts or only sequences that generate, which wait until no prompt can
    run (SGLang).
    cuts_prompts: whether a prompt may continue in the next step (chunked prefill); otherwise a prompt that
    does not fit waits for the next step. counts_generated: whether tokens of sequences that generate count
    towards `max_tokens` (vLLM and TensorRT-LLM); otherwise only prompts do (SGLang).
    balance_steps: while no replica is idle, prompts wait until each replica can start one, but for fewer than
    this number of steps (TensorRT-LLM's `attention_dp_config`); 0 and 1: they do not wait.
    """

    def __init__(
        self,
        max_tokens: int,
        num_replicas: int,
        *,
        cuts_prompts: bool,
        counts_generated: bool,
        separate_prompts: bool = False,
        balance_steps: int = 0,
    ) -> None:
        self._balance_steps, self._num_waited = balance_steps, 0
        self._max_tokens, self._num_replicas = max_tokens, num_replicas
        self._cuts_prompts, self._counts_generated = cuts_prompts, counts_generated
        self._separate_prompts, self._lets_generate = separate_prompts, False
        self._last: TokenBudget | None = None

    def budget(self, queue: Queue) -> "TokenBudget":
        running = -(-len(queue.running) // self._num_replicas) if self._counts_generated else 0
        budget = TokenBudget(max(1, self._max_tokens - running), cuts_prompts=self._cuts_prompts)
        if self._separate_prompts:
            has_cut = self._last is not None and self._last.has_cut
            has_prompts = has_cut or bool(queue.waiting and queue.num_free_slots)
            budget.generates = self._lets_generate or not has_prompts
            self._lets_generate, self._last = False, budget
        if self._balance_steps:
            budget.starts = not self._waits(queue)
        return budget

    def _waits(self, queue: Queue) -> bool:
        """Whether prompts wait for a step in which each replica can start one."""
        replicas, num_slots = queue.replicas, queue.limits.slots_per_replica
        num_free = [len(replica.free_slots) for replica in replicas]
        can_wait = any(num_free) and bool(queue.waiting) and max(num_free) < num_slots
        if not can_wait or (min(num_free) and len(queue.waiting) >= len(replicas)):
            self._num_waited = 0
            return False
        self._num_waited = (self._num_waited + 1) % self._balance_steps
        return self._num_waited > 0

    def hold_nothing(self) -> None:
        self._lets_generate = True


class TokenBudget:
    """A StepBudget of `max_tokens` prompt tokens of each replica; the first prompt of a step always runs.

    has_cut: whether a prompt goes on in the next step.
    """

    __slots__ = ("_cuts_prompts", "_max_tokens", "_tokens", "generates", "has_cut", "starts")

    def __init__(self, max_tokens: int, *, cuts_prompts: bool) -> None:
        self._max_tokens, self._cuts_prompts = max_tokens, cuts_prompts
        self._tokens: dict[Replica, int] = {}
        self.generates = self.starts = True
        self.has_cut = False

    def has_room(self, replica: Replica) -> bool:
        return self._tokens.get(replica, 0) < self._max_tokens

    def num_tokens(self, sequence: TokenSequence, replica: Replica) -> int:
        wanted, taken = sequence.num_uncomputed, self._tokens.get(replica, 0)
        if wanted <= 1 or wanted <= self._max_tokens - taken:
            return wanted
        return self._max_tokens - taken if self._cuts_prompts or not taken else 0

    def take(self, sequence: TokenSequence, replica: Replica, num_tokens: int) -> None:
        if num_tokens > 1:
            self._tokens[replica] = self._tokens.get(replica, 0) + num_tokens
            self.has_cut = self.has_cut or num_tokens < sequence.num_uncomputed
