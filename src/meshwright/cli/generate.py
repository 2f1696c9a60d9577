"""mw generate: the continuation of a prompt."""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.command_options import OptionsOf, command
from meshwright.cli.console import CHECKPOINT, JSON, emit, note, progress
from meshwright.cli.draft_options import check_drafts
from meshwright.errors import CheckpointError, RequestError
from meshwright.options import option
from meshwright.serve.model_folder import check_model_folder
from meshwright.serve.settings import EngineSettings
from meshwright.signals import ends_after
from meshwright.units import format_seconds, parse_count

if TYPE_CHECKING:
    from meshwright.cli.service import Service
    from meshwright.serve.device.loading import ModelFolder
    from meshwright.serve.engine.request import Request, TokenScore

# A tokenizer of 250,000 tokens loads in a second, and takes 0.35 GB.
_TOKENIZER_SECONDS, _TOKENIZER_BYTES = 10.0, 0.6e9
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@command(app)
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    checkpoint: Path = CHECKPOINT,
    max_tokens: int = option(64, parser=parse_count, help="The most tokens to generate."),
    temperature: float = option(0.0, least=0, help="Sampling temperature; 0 takes the likeliest token."),
    top_p: float = option(
        1.0,
        least=0,
        most=1,
        help="Sample from the likeliest tokens up to this cumulative probability.",
    ),
    seed: int = option(0, least=0, most=2**32 - 1, help="Seed of the sampling."),
    stop: tuple[str, ...] = option((), help="Text that ends the answer; repeatable."),
    best_of: int = option(
        1, least=1, most=64, help="Sample N answers and print the likeliest that repeats few of its words."
    ),
    engine: Annotated[
        dict[str, Any],
        OptionsOf(
            EngineSettings,
            only=(
                *("context", "tensor", "weights_dtype", "batch_invariant"),
                *("num_drafts", "draft_head", "draft_checkpoint"),
            ),
        ),
    ],
    as_json: bool = JSON,
) -> None:
    """Continue a prompt with a checkpoint: a run's folder or a Hugging Face one.

    \b
    mw generate --checkpoint runs/demo "Once upon a time" --max-tokens 64 --temperature 0.7
    """
    if "" in stop:
        raise typer.BadParameter("an empty --stop would stop everything")
    if best_of > 1 and not temperature:
        raise typer.BadParameter("at temperature 0 all answers are the same; add --temperature 0.5")
    check_model_folder(checkpoint)
    settings = EngineSettings(num_slots=1, prefix_cache=False, **engine)
    check_drafts(settings)
    settings.use_devices()
    from meshwright.cli.service import context_of, open_service
    from meshwright.serve.device.loading import load_model_folder
    from meshwright.serve.engine.request import EngineError, Request, SamplingParams

    folder = load_model_folder(checkpoint)
    context = context_of(settings, folder.config)
    tokens = _encoded(prompt, folder, context)
    with ExitStack() as stack:
        with progress() as report:
            service = stack.enter_context(open_service(checkpoint, settings, report))
        requests = [
            Request(
                tokens,
                min(max_tokens, context - len(tokens)),
                SamplingParams(temperature=temperature, top_p=top_p, seed=(seed + number) % 2**32),
                service.tokenizer.eos_ids,
            )
            for number in range(best_of)
        ]
        echo = None if as_json or best_of > 1 else prompt
        try:
            answers = [asyncio.run(_answer(service, request, stop, echo)) for request in requests]
        except EngineError as error:  # such as weights that are not numbers
            _write(None if echo is None else "\n")
            raise CheckpointError(f"checkpoint {checkpoint}: {error}") from error
    document = best(answers).document
    if as_json:
        emit(document)
        return
    if echo is None:
        print(prompt + document["text"])
    note(_speed(document))


def _encoded(prompt: str, folder: "ModelFolder", context: int) -> Sequence[int]:
    """The tokens of a prompt. Raises RequestError, before anything compiles, if none can follow them."""
    reading = f"{folder.path / 'tokenizer.json'}: reading it and the prompt"
    with ends_after(_TOKENIZER_SECONDS, reading, _TOKENIZER_BYTES):
        tokens = folder.tokenizer().encode(prompt)
    if len(tokens) >= context:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, but the context holds {context}; "
            f"give at most {context - 1}, or a longer --context"
        )
    return tokens


# An answer reads as a loop if a larger share of its trigrams of tokens occurred before.
_MOST_REPEATED = 0.1


@dataclass(frozen=True)
class Answer:
    """An answer to a prompt.

    document: the keys in docs/reference/json.md. ids: its tokens. logprob: mean of its tokens, in nats.
    """

    document: dict
    ids: Sequence[int]
    logprob: float

    @property
    def repeated(self) -> float:
        """The share of its trigrams of tokens that occurred before."""
        trigrams = list(zip(self.ids, self.ids[1:], self.ids[2:], strict=False))
        return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def best(answers: Sequence[Answer]) -> Answer:
    """The likeliest answer that does not loop; if all do, the answer that repeats least.

    It is at least half as long as the longest one, since few tokens are likelier on average.
    """
    longest = max(len(answer.ids) for answer in answers)
    answers = [answer for answer in answers if 2 * len(answer.ids) >= longest]
    varied = [answer for answer in answers if answer.repeated <= _MOST_REPEATED]
    if not varied:
        return min(answers, key=lambda answer: answer.repeated)
    return max(varied, key=lambda answer: answer.logprob)


async def _answer(service: "Service", request: "Request", stops: Sequence[str], echo: str | None) -> Answer:
    """The answer to a request.

    echo: None, or a text to print before the answer's pieces.
    """
    from meshwright.serve.text.generation import Generation

    started = time.perf_counter()
    first: float | None = None
    pieces: list[str] = []
    scores: list[TokenScore] = []
    _write(echo)
    with Generation(service.engine, service.tokenizer, [request], stops) as generation:
        async for delta in generation:
            first = first or time.perf_counter()
            pieces.append(delta.text)
            scores += [token.score for token in delta.tokens]
            _write(None if echo is None else delta.text)
    ended = time.perf_counter()
    _write(None if echo is None else "\n")
    num_tokens = generation.num_generated_tokens
    document = {
        "text": "".join(pieces),
        "tokens": num_tokens,
        "ttft_seconds": (first or ended) - started,
        "tpot_seconds": (ended - (first or ended)) / (num_tokens - 1) if num_tokens > 1 else None,
    }
    logprob = sum(score.logprob for score in scores) / max(1, len(scores))
    return Answer(document, [score.token for score in scores], logprob)


def _write(text: str | None) -> None:
    if text is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _speed(document: dict) -> str:
    first, rest = document["ttft_seconds"], document["tpot_seconds"]
    text = f"{document['tokens']} tokens, the first after {format_seconds(first)}"
    return f"{text}, then {format_seconds(rest)} each" if rest else text
