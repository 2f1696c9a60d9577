"""mw serve: a checkpoint behind OpenAI's API."""

import json
from contextlib import ExitStack
from typing import Annotated

import typer

from meshwright.cli.common import CheckpointOption, ContextOption, Json, TensorOption, progress, whole_option
from meshwright.nn.devices import split_host
from meshwright.serve.folder import check_model_folder

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def serve(
    checkpoint: CheckpointOption,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, whole_option("--port", least=0, most=65535, help="The port to listen on; 0 takes a free one.")
    ] = 8000,
    slots: Annotated[int, whole_option("--slots", help="Sequences generated at once.")] = 8,
    context: ContextOption = None,
    tensor: TensorOption = 1,
    as_json: Json = False,
) -> None:
    """Serve a checkpoint behind OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models.

    Prints its address once it answers; /health and /metrics beside them. SIGTERM ends it once the
    answers under way are finished.

    \b
    mw serve --checkpoint runs/demo --port 8000
    curl localhost:8000/v1/completions -d '{"model": "demo", "prompt": "def ", "max_tokens": 32}'
    """
    check_model_folder(checkpoint)
    from meshwright.serve.http.server import bind, run

    split_host(tensor)
    with ExitStack() as stack:
        listener = stack.enter_context(bind(host, port))  # first, since loading may take minutes
        from meshwright.cli.serving import open_service
        from meshwright.serve.http.app import create_app

        with progress() as report:
            opened = open_service(checkpoint, tensor=tensor, num_slots=slots, context=context, report=report)
            service = stack.enter_context(opened)
        api = create_app(service.engine, service.tokenizer, service.name)
        run(api, listener, lambda address: _announce(address, service.name, as_json))


def _announce(address: str, name: str, as_json: bool) -> None:
    print(json.dumps({"address": address, "model": name}) if as_json else f"{name} on {address}", flush=True)
