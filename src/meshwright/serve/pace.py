"""How many prompt tokens a step takes beside sequences that generate, by what steps took. Plain Python."""

from bisect import bisect_left

from meshwright.serve.batch import Batch, IdleSeconds, Limits

# A step with prompt tokens takes at most so many times as long as one without, or twice as long as the
# program of such steps does without any.
MOST = 3.0
_NEWEST = 0.25  # weight of the newest step among those before


class Pace:
    """The prompt tokens that fit beside those that generate.

    idle: of the runner. What attention and the load of the machine add is learned from the steps.
    """

    def __init__(self, idle: IdleSeconds, limits: Limits) -> None:
        self._idle, self._limits = idle, limits
        numbers = [number for number, _ in idle.generate]
        of_replica = [-(-number // limits.num_replicas) for number in range(limits.num_slots + 1)]
        # By the number of all sequences, of the program that holds them.
        self._alone = [idle.generate[bisect_left(numbers, number)][1] for number in of_replica]
        # How many times as long as idle steps, and as idle tokens whose attention took its FLOPs alone.
        self._generate = self._prompt = 1.0

    def room(self, num_sequences: int) -> float:
        """The time of a replica's prompts, by the limits, that fits beside so many sequences of all."""
        alone, mixed = self._plain(num_sequences), self._plain(self._limits.num_slots)
        left = max(MOST * alone - mixed, mixed)
        return left / max(self._prompt * self._idle.prompt_token, 1e-12)

    def took(self, batch: Batch, seconds: float) -> None:
        """A step has taken so long."""
        num_sequences, work = batch.num_together, dict[int, float]()
        for one in batch.works:
            if one.num_drafts:
                return
            num_tokens = len(one.tokens)
            if num_tokens > 1:
                replica = one.slot // self._limits.slots_of_replica
                work[replica] = work.get(replica, 0.0) + self._limits.prompt_time(one.start, num_tokens)
            else:
                num_sequences += 1
        if not num_sequences:
            return
        if not work:
            ratio = seconds / self._plain(num_sequences)
            self._generate += _NEWEST * (ratio - 1) * self._generate
            return
        of_prompts = seconds - self._plain(self._limits.num_slots)  # beside prompts all slots have a row
        ratio = of_prompts / max(max(work.values()) * self._idle.prompt_token, 1e-12)
        # One that seems to cost nothing must not open the way to a long one.
        self._prompt += _NEWEST * (max(ratio, self._prompt / 2) - self._prompt)

    def _plain(self, num_sequences: int) -> float:
        """Seconds of a step that generates for so many sequences."""
        return self._generate * self._alone[num_sequences]
