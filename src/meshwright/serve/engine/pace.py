"""How many prompt tokens a step takes beside sequences that generate, by what steps took. Plain Python."""

from bisect import bisect_left

from meshwright.serve.engine.batch import Batch, IdleSeconds, Limits

# A step with prompt tokens takes at most so many times as long as one that generates for all slots.
MOST = 2.5
# After so many steps in which prompts waited they get twice the time, and so on: those that generate must not
# keep a server below its load.
PATIENCE, _MOST_PATIENCES = 128, 8
_NEWEST = 0.25  # weight of the newest step among those before
# A step tells of so many times what was known, and no more: others hold up the machine now and then.
_MOST_NEWS = 2.0


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
        self._num_waited = 0  # steps, less those in which none did

    def room(self) -> float:
        """The time of a replica's prompts, by the limits, that fits beside those that generate."""
        most = MOST * 2 ** (self._num_waited / PATIENCE)
        left = (most - 1) * self._plain(self._limits.num_slots)  # few who generate may wait as long as all
        return left / max(self._prompt * self._idle.prompt_token, 1e-12)

    def scheduled(self, *, is_waiting: bool) -> None:
        """Whether prompts wait for another step, though there are slots for them."""
        waited = self._num_waited + (1 if is_waiting else -1)
        self._num_waited = min(max(waited, 0), _MOST_PATIENCES * PATIENCE)

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
            self._generate = _nearer(self._generate, seconds / self._alone[num_sequences])
            return
        # Beside prompts all slots have a row.
        num_rows = self._limits.num_slots if self._limits.multiplies_padding else num_sequences
        of_prompts = seconds - self._plain(num_rows)
        idle = max(max(work.values()) * self._idle.prompt_token, 1e-12)
        self._prompt = _nearer(self._prompt, of_prompts / idle)

    def _plain(self, num_sequences: int) -> float:
        """Seconds of a step that generates for so many sequences."""
        return self._generate * self._alone[num_sequences]


def _nearer(known: float, found: float) -> float:
    """What is known by all steps, after one more."""
    news = min(max(found, known / _MOST_NEWS), known * _MOST_NEWS)
    return known + _NEWEST * (news - known)
