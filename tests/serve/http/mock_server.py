"""A server process on a free port, over a model worked by hand: prints its address, then `closed`."""

import ctypes
import gc
import signal
import sys

from tests.serve.http.client import MODEL
from tests.serve.mock import EOS, MockRunner, byte_tokenizer, says

from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.app import create_app
from meshwright.serve.http.server import bind, run_server

PLANNED_SECONDS = 0.00123
ANSWER = "naïve 😀 answer"
FOREVER = list(byte_tokenizer().encode("forever"))
# Made once: a tokenizer keeps memory for the words that it has met beyond its own life (tokenizers 0.23).
_SAYS = says(ANSWER)


def answer(prompt: list[int], tokens: list[int]) -> int:
    """ANSWER to every prompt, but one letter without end to what says `forever`."""
    said = bytes(token for token in prompt if token < EOS)
    return FOREVER[-1] if bytes(FOREVER) in said else _SAYS(prompt, tokens)


def give_back(*_: object) -> None:
    """Gives back what memory is not in use, on SIGUSR1."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    signal.signal(signal.SIGUSR1, give_back)
    listener = bind("127.0.0.1", 0)
    with Engine(MockRunner(answer, num_slots=8, context=int(sys.argv[1]))) as engine:
        engine.metrics.planned_step.set(PLANNED_SECONDS)
        run_server(create_app(engine, byte_tokenizer(), MODEL), listener, lambda url: print(url, flush=True))
    print("closed", flush=True)


if __name__ == "__main__":
    main()
