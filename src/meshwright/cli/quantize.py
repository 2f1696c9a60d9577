"""mw quantize: a checkpoint with narrower weights, and their effect on perplexity."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, emit, progress
from meshwright.files import check_writable
from meshwright.nn.start.devices import use_cpu_devices
from meshwright.options import REQUIRED, option
from meshwright.serve.model_folder import check_model_folder
from meshwright.units import format_bytes

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@command(app)
def quantize(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="The folder of a run or of a Hugging Face model.")
    ],
    to: Literal["int8", "fp8", "int4"] = option(REQUIRED, help="Dtype of the weights."),
    output: Path = option(REQUIRED, flag="-o --output", help="The folder to write."),
    text: Path | None = option(
        None, flag="--eval", help="Measure the perplexity of this text before and after."
    ),
    as_json: bool = JSON,
) -> None:
    """Quantise a checkpoint to int8, fp8 or int4.

    int8 and fp8 have a scale per output, int4 one per group of inputs.

    The format is compressed-tensors, which vLLM, transformers and `mw serve` read.

    \b
    mw quantize runs/demo --to int8 --eval held-out.txt -o demo-int8
    """
    check_model_folder(checkpoint)
    check_writable(output / "config.json")
    use_cpu_devices(1)
    from meshwright.serve.device.quantized_checkpoint import quantize_folder

    with progress() as report:
        document = quantize_folder(checkpoint, output, to, text, lambda what: report(what, None))
    if as_json:
        emit(document)
        return
    sizes = (
        f"{format_bytes(document['bytes_before'])} in bf16, {format_bytes(document['bytes_after'])} in {to}"
    )
    print(f"{output}: {sizes}")
    if text is not None:
        before, after = document["perplexity_before"], document["perplexity_after"]
        print(f"perplexity of {document['tokens']} tokens: {before:.4f} before, {after:.4f} after")
