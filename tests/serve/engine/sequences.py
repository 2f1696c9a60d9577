"""Small sequences and limits for tests of the scheduler, and steps without an engine."""

from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.request import Request, TokenScore
from meshwright.serve.engine.scheduler import Scheduler
from meshwright.serve.engine.sequence import TokenSequence


def sequence(
    num_tokens: int = 1, max_tokens: int = 4, first: int = 0, priority: int = 0, client: str = ""
) -> TokenSequence:
    request = Request(tuple(range(first, first + num_tokens)), priority=priority, client=client)
    return TokenSequence(request, max_tokens, index=0, emit=lambda _: None)


def limits(num_slots: int = 2, num_pages: int = 100, chunk: int = 8) -> Limits:
    return Limits(num_slots, context=16, page_size=4, num_pages=num_pages, chunk=chunk, block=4)


def tokens_of(batch: Batch | None) -> list[tuple[int, ...]]:
    return [tuple(work.tokens) for work in batch.works] if batch else []


def run(scheduler: Scheduler, batch: Batch, token: int = 99) -> None:
    """What an engine does with a step: everything that is sampled is `token`."""
    sampled = [[TokenScore(token, 0.0)] * work.num_samples for work in batch.works]
    for work, tokens in scheduler.postprocess(batch.works, sampled):
        for one in tokens:
            if work.sequence.append(one).finish_reason:
                scheduler.release(work.sequence, "length")
                break
