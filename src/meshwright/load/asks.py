"""A client in a process of its own, told on its standard input what to ask: `python -m ... URL MODEL`.

Of each line `COUNT TOKENS TIMES` it asks for COUNT answers of so many tokens at once, so many times in a row,
and prints ANSWERED, or the error of the first that failed.
"""

import asyncio
import sys

from meshwright.load.client import Client

ANSWERED = "answered"
# One token: a step of nothing else answers it.
_PROMPT = "the"


async def _answer(url: str, model: str) -> None:
    async with Client(url, model=model, options={"temperature": 0, "ignore_eos": True}) as client:
        for line in sys.stdin:
            count, num_tokens, times = map(int, line.split())
            errors = []
            for _ in range(times):
                asked = (client.ask(_PROMPT, num_tokens) for _ in range(count))
                errors += [answer.error for answer in await asyncio.gather(*asked) if answer.error]
            print(errors[0] if errors else ANSWERED, flush=True)


if __name__ == "__main__":
    asyncio.run(_answer(*sys.argv[1:]))
