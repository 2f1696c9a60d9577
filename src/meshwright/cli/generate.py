"""mw generate: the continuation of a prompt."""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
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
    from meshwright.serve.engine.request import Request

# A tokenizer of 250,000 tokens loads in a second.
_TOKENIZER_SECONDS = 10.0
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
    check_model_folder(checkpoint)
    settings = EngineSettings(num_slots=1, prefix_cache=False, **engine)
    check_drafts(settings)
    settings.use_devices()
    from meshwright.cli.service import context_of, open_service
    from meshwright.serve.device.loading import load_model_folder
    from meshwright.serve.engine.request import EngineError, Request, SamplingParams

    folder = load_model_folder(checkpoint)
    with ends_after(_TOKENIZER_SECONDS, f"{checkpoint / 'tokenizer.json'}: reading it and the prompt"):
        tokens = folder.tokenizer().encode(prompt)
    longest = context_of(settings, folder.config)
    most = longest - len(tokens)
    if most < 1:  # checked before compiling
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, but the context holds {longest}; "
            f"give at most {longest - 1}, or a longer --context"
        )
    with ExitStack() as stack:
        with progress() as report:
            service = stack.enter_context(open_service(checkpoint, settings, report))
        sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
        request = Request(tokens, min(max_tokens, most), sampling, service.tokenizer.eos_ids)
        try:
            document = asyncio.run(_answer(service, request, stop, None if as_json else prompt))
        except EngineError as error:  # such as weights that are not numbers
            _write(None if as_json else "\n")
            raise CheckpointError(f"checkpoint {checkpoint}: {error}") from error
    if as_json:
        emit(document)
    else:
        note(_speed(document))


async def _answer(service: "Service", request: "Request", stops: Sequence[str], echo: str | None) -> dict:
    """The keys of `mw generate` in docs/reference/json.md.

    echo: None, or a text to print before the answer's pieces.
    """
    from meshwright.serve.text.generation import Generation

    started = time.perf_counter()
    first: float | None = None
    pieces: list[str] = []
    _write(echo)
    with Generation(service.engine, service.tokenizer, [request], stops) as generation:
        async for delta in generation:
            first = first or time.perf_counter()
            pieces.append(delta.text)
            _write(None if echo is None else delta.text)
    ended = time.perf_counter()
    _write(None if echo is None else "\n")
    num_tokens = generation.num_generated_tokens
    return {
        "text": "".join(pieces),
        "tokens": num_tokens,
        "ttft_seconds": (first or ended) - started,
        "tpot_seconds": (ended - (first or ended)) / (num_tokens - 1) if num_tokens > 1 else None,
    }


def _write(text: str | None) -> None:
    if text is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _speed(document: dict) -> str:
    first, rest = document["ttft_seconds"], document["tpot_seconds"]
    text = f"{document['tokens']} tokens, the first after {format_seconds(first)}"
    return f"{text}, then {format_seconds(rest)} each" if rest else text
