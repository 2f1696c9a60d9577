"""A client in its own process, which reads requests from standard input: `python -m ... URL MODEL`.

For each line `COUNT TOKENS TIMES` it requests COUNT answers of TOKENS tokens at once, TIMES times in a row,
and prints ANSWERED, or the error of the first that failed.
"""

import asyncio
import sys

from meshwright.load.client import Client

ANSWERED = "answered"
# A prompt of one token, so that a single step answers it.
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
