"""All requests of a load test, sent to a server, and their answers."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import cycle
from math import inf

from meshwright.errors import RequestError
from meshwright.load.client import Client, TextOrChat
from meshwright.load.filler_text import Words
from meshwright.load.timed_answer import TimedAnswer
from meshwright.load.traffic import Chat, Load, Turn

# Words of two requests whose usage counts a server's tokens; the second is the longest that fits the context.
_FEW_WORDS, _MORE_WORDS = 16, (144, 64, 32)
_PAUSE_SECONDS = 0.1  # after an error, in a load that ends by time


async def fit_words(client: Client, *, chat: bool) -> Words:
    """The server's count of tokens, from two short requests, which also warm it up.

    Raises RequestError if the server refuses them.
    """

    async def counted(num_words: int) -> tuple[int, int] | str:
        text = Words.words(num_words, "probe")
        answer = await client.ask([{"role": "user", "content": text}] if chat else text, 2)
        return answer.error or (num_words, answer.prompt_tokens or num_words)

    few = await counted(_FEW_WORDS)
    if isinstance(few, str):
        raise RequestError(f"{client.url} refuses a request of {_FEW_WORDS} words: {few}")
    reason = ""
    for num_words in _MORE_WORDS:
        more = await counted(num_words)
        if not isinstance(more, str):
            return Words.fitted(few, more)
        reason = more
    raise RequestError(f"{client.url} refuses a request of {_MORE_WORDS[-1]} words: {reason}")


async def drive(
    client: Client, load: Load, words: Words, on_answer: Callable[[TimedAnswer], None]
) -> list[TimedAnswer]:
    """The answers to all turns, chat by chat; a chat ends at its first error.

    A load that ends by time lasts that time, also if its last answer comes before; the chats that are under
    way at its end go on to their last turns.
    """
    gate = asyncio.Semaphore(load.concurrency or len(load.chats))
    client.start_clock()
    if load.repeats:
        return await _drive_until(client, load, words, on_answer)

    async def run(number: int, chat: Chat) -> list[TimedAnswer]:
        await asyncio.sleep(max(0.0, chat.arrival_seconds - client.now()))
        async with gate:
            return await _converse(client, load, words, number, chat.turns, on_answer)

    by_chat = await asyncio.gather(*(run(number, chat) for number, chat in enumerate(load.chats)))
    if load.until_seconds < inf:
        await asyncio.sleep(max(0.0, load.until_seconds - client.now()))
    return [answer for answers in by_chat for answer in answers]


async def _drive_until(
    client: Client, load: Load, words: Words, on_answer: Callable[[TimedAnswer], None]
) -> list[TimedAnswer]:
    """The answers of a closed loop that begins chats until the load's time is over."""
    numbered = enumerate(cycle(load.chats))
    answers: list[TimedAnswer] = []

    async def run() -> None:
        while client.now() < load.until_seconds:
            number, chat = next(numbered)
            of_chat = await _converse(client, load, words, number, chat.turns, on_answer)
            answers.extend(of_chat)
            if of_chat[-1].error:  # so that a server that refuses all is not asked without pause
                await asyncio.sleep(_PAUSE_SECONDS)

    await asyncio.gather(*(run() for _ in range(load.concurrency or 1)))
    return answers


async def _converse(
    client: Client,
    load: Load,
    words: Words,
    number: int,
    turns: Sequence[Turn],
    on_answer: Callable[[TimedAnswer], None],
) -> list[TimedAnswer]:
    messages: list[dict[str, str]] = []
    if load.prefix_tokens:
        messages.append({"role": "system", "content": words.text(load.prefix_tokens, f"{load.seed} prefix")})
    answers: list[TimedAnswer] = []
    for turn_number, turn in enumerate(turns):
        text = words.text(turn.prompt_tokens, f"{load.seed} {number} {turn_number}")
        messages.append({"role": "user", "content": text})
        answer = await client.ask(_prompt(messages, chat=load.chat), turn.output_tokens)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
        on_answer(answer)
        if answer.error:
            break
    return answers


def _prompt(messages: Sequence[dict[str, str]], *, chat: bool) -> TextOrChat:
    return list(messages) if chat else " ".join(message["content"] for message in messages)
