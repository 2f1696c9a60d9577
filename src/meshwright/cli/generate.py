"""mw generate: continues one prompt."""

import asyncio
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.common import (
    BatchInvariantOption,
    CheckpointOption,
    ContextOption,
    Json,
    TensorOption,
    WeightsDtypeOption,
    count_option,
    emit,
    note,
    number_option,
    progress,
    whole_option,
)
from meshwright.errors import RequestError
from meshwright.nn.start.devices import split_host
from meshwright.serve.model_folder import check_model_folder
from meshwright.units import format_seconds

if TYPE_CHECKING:
    from meshwright.cli.serving import Service
    from meshwright.serve.engine.request import Request

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    checkpoint: CheckpointOption,
    max_tokens: Annotated[int, count_option("--max-tokens", help="The most tokens to generate.")] = 64,
    temperature: Annotated[
        float, number_option("--temperature", help="Sampling temperature; 0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        number_option(
            "--top-p", most=1.0, help="Sample from the likeliest tokens up to this cumulative probability."
        ),
    ] = 1.0,
    seed: Annotated[int, whole_option("--seed", least=0, most=2**32 - 1, help="Seed of the sampling.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    context: ContextOption = None,
    tensor: TensorOption = 1,
    weights_dtype: WeightsDtypeOption = None,
    batch_invariant: BatchInvariantOption = False,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a checkpoint: a run's folder or a Hugging Face one.

    \b
    mw generate --checkpoint runs/demo "def " --max-tokens 64 --temperature 0.7
    """
    if any(not text for text in stop or ()):
        raise typer.BadParameter("an empty --stop would stop everything")
    check_model_folder(checkpoint)
    split_host(tensor)
    from meshwright.cli.serving import Serving, context_of, open_service
    from meshwright.serve.device.loading import load_model_folder
    from meshwright.serve.engine.request import Request, SamplingParams

    asked = Serving(
        tensor=tensor,
        num_slots=1,
        context=context,
        prefix_cache=False,
        weights_dtype=weights_dtype,
        batch_invariant=batch_invariant,
    )
    folder = load_model_folder(checkpoint)
    tokens, longest = folder.tokenizer().encode(prompt), context_of(asked, folder.config)
    room = longest - len(tokens)
    if room < 1:  # before anything is compiled
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, but the context holds {longest}; "
            f"give at most {longest - 1}, or a longer --context"
        )
    with ExitStack() as stack:
        with progress() as report:
            service = stack.enter_context(open_service(checkpoint, asked, report))
        sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
        request = Request(tokens, min(max_tokens, room), sampling, service.tokenizer.eos_ids)
        document = asyncio.run(_answer(service, request, stop or [], None if as_json else prompt))
    if as_json:
        emit(document)
    else:
        note(_speed(document))


async def _answer(service: "Service", asked: "Request", stops: list[str], echo: str | None) -> dict:
    """The keys of `mw generate` in contract.md; echo: print the text as it comes, behind this."""
    from meshwright.serve.text.generation import Generation

    started = time.perf_counter()
    first: float | None = None
    pieces: list[str] = []
    _write(echo)
    with Generation(service.engine, service.tokenizer, [asked], stops) as generation:
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
