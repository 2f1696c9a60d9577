"""A runner behind HTTP, asked by a client in another process of this machine, as load tests ask."""

import subprocess
import sys
from contextlib import ExitStack

import tokenizers
from tokenizers import models, pre_tokenizers

from meshwright.errors import DeviceError
from meshwright.load import asks
from meshwright.serve.engine.batch import Runner
from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.app import create_app
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.http.server import bind, running
from meshwright.serve.text.tokenizer import Tokenizer

_MODEL = "calibration"


class Loopback:
    """The runner's engine and its server in this process, and their client, until `close`.

    While nothing is asked they wait, and the runner may be called by others.
    """

    def __init__(self, runner: Runner) -> None:
        self._stack = ExitStack()
        with ExitStack() as stack:  # closed where one of them does not start
            engine = stack.enter_context(Engine(runner))
            app = create_app(engine, _words(runner.vocab_size), _MODEL, ClientLimits())
            url = stack.enter_context(running(app, bind("127.0.0.1", 0)))
            command = [sys.executable, "-m", asks.__name__, url, _MODEL]
            self._client = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            self._stack = stack.pop_all()

    def ask(self, count: int, num_tokens: int, times: int) -> None:
        """Has `count` requests answered at once, so many times in a row, each with so many tokens.

        Raises DeviceError where one fails.
        """
        told, heard = self._client.stdin, self._client.stdout
        assert told is not None and heard is not None, "both are pipes"
        print(count, num_tokens, times, file=told, flush=True)
        if (said := heard.readline().strip()) != asks.ANSWERED:
            raise DeviceError(f"the server that is measured over HTTP: {said or 'its client ended'}")

    def close(self) -> None:
        """Ends the client, the server and the engine."""
        self._stack.close()


def _words(vocab_size: int) -> Tokenizer:
    """A tokenizer of one word a token, whatever the words."""
    vocabulary = {f"t{number}": number for number in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(tokenizer)
