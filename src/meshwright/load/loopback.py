"""A server of a runner and its client in another process, to time requests over HTTP."""

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

    Between calls of `ask` they wait, and the runner may be called directly.
    """

    def __init__(self, runner: Runner) -> None:
        self._stack = ExitStack()
        with ExitStack() as stack:  # closes the others if one does not start
            engine = stack.enter_context(Engine(runner))
            app = create_app(engine, words_of(runner.vocab_size), _MODEL, ClientLimits())
            url = stack.enter_context(running(app, bind("127.0.0.1", 0)))
            command = [sys.executable, "-m", asks.__name__, url, _MODEL]
            self._client = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            self._stack = stack.pop_all()

    def ask(self, count: int, num_tokens: int, times: int) -> None:
        """Wait for `count` concurrent answers of `num_tokens` tokens, `times` times in a row.

        Raises DeviceError if one fails.
        """
        requests, replies = self._client.stdin, self._client.stdout
        assert requests is not None and replies is not None, "both are pipes"
        print(count, num_tokens, times, file=requests, flush=True)
        if (reply := replies.readline().strip()) != asks.ANSWERED:
            raise DeviceError(f"the server that is measured over HTTP: {reply or 'its client ended'}")

    def close(self) -> None:
        """End the client, the server and the engine."""
        self._stack.close()


def words_of(vocab_size: int) -> Tokenizer:
    """A tokenizer with one token a word, for any words."""
    vocabulary = {f"t{number}": number for number in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(tokenizer)
