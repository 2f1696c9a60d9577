"""Time for prompts in a step with sequences that generate, learned from measured steps. Plain Python."""

from bisect import bisect_left

from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.limits import IdleSeconds, Limits

# A step with prompt tokens takes at most this many times the seconds of a step that generates for all slots.
MAX_SLOWDOWN = 2.5
# After this number of steps with waiting prompts, prompts get twice the time, and so on: otherwise
# sequences that generate would keep a server below its load.
PATIENCE, _MAX_DOUBLINGS = 128, 8
_WEIGHT = 0.25  # of the newest step in the running means
# A step counts for at most this many times the running mean: other work delays the machine now and then.
_MAX_CHANGE = 2.0


class PrefillBudget:
    """Prompt tokens that fit into a step with sequences that generate.

    idle: of the runner. The cost of attention and the load of the machine are learned from steps.
    """

    def __init__(self, idle: IdleSeconds, limits: Limits) -> None:
        self._idle, self._limits = idle, limits
        sizes = [size for size, _ in idle.generate]
        per_replica = [-(-number // limits.num_replicas) for number in range(limits.num_slots + 1)]
        # Idle seconds of a step by its number of sequences.
        self._idle_generate = [idle.generate[bisect_left(sizes, number)][1] for number in per_replica]
        # Running means: measured over idle seconds, of steps that generate and of prompt tokens.
        self._generate_ratio = self._prompt_ratio = 1.0
        self._num_waited = 0  # steps with waiting prompts, minus steps without

    def prompt_time(self) -> float:
        """Time for prompts of each replica in the next step, in the unit of `Limits.prompt_time`."""
        slowdown = MAX_SLOWDOWN * 2 ** (self._num_waited / PATIENCE)
        # The bound is for a full batch, so a small batch may slow down by a larger factor.
        seconds = (slowdown - 1) * self._generate_seconds(self._limits.num_slots)
        return seconds / max(self._prompt_ratio * self._idle.prompt_token, 1e-12)

    def scheduled(self, *, is_waiting: bool) -> None:
        """Note whether prompts wait for the step after this one although slots are free."""
        num_waited = self._num_waited + (1 if is_waiting else -1)
        self._num_waited = min(max(num_waited, 0), _MAX_DOUBLINGS * PATIENCE)

    def measured(self, batch: Batch, seconds: float) -> None:
        """Learn from the measured seconds of a step."""
        num_generating, prompt_times = batch.num_counted, dict[int, float]()
        for work in batch.works:
            if work.num_drafts:
                return
            num_tokens = len(work.tokens)
            if num_tokens > 1:
                replica = work.slot // self._limits.slots_per_replica
                time = self._limits.prompt_time(work.start, num_tokens)
                prompt_times[replica] = prompt_times.get(replica, 0.0) + time
            else:
                num_generating += 1
        if not num_generating:
            return
        if not prompt_times:
            ratio = seconds / self._idle_generate[num_generating]
            self._generate_ratio = _updated(self._generate_ratio, ratio)
            return
        # A program with blocks of prompts has a row for every slot.
        num_rows = self._limits.num_slots if self._limits.multiplies_padding else num_generating
        prompt_seconds = seconds - self._generate_seconds(num_rows)
        idle = max(max(prompt_times.values()) * self._idle.prompt_token, 1e-12)
        self._prompt_ratio = _updated(self._prompt_ratio, prompt_seconds / idle)

    def _generate_seconds(self, num_sequences: int) -> float:
        """Expected seconds of a step that generates for this number of sequences."""
        return self._generate_ratio * self._idle_generate[num_sequences]


def _updated(mean: float, ratio: float) -> float:
    """The running mean after one more step."""
    ratio = min(max(ratio, mean / _MAX_CHANGE), mean * _MAX_CHANGE)
    return mean + _WEIGHT * (ratio - mean)
