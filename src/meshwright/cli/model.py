"""mw model: what a model counts to."""

from typing import Annotated

import typer

from meshwright.cli.common import Json, count_option, dtype_option, emit, show
from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.count import (
    count_params,
    forward_flops_per_token,
    kv_bytes_per_token,
    train_flops_per_token,
)
from meshwright.models.presets import load_model
from meshwright.units import format_bytes, format_count

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DEFAULT_SEQ_LEN = 4096


@app.command()
def count(
    model: Annotated[
        str,
        typer.Argument(help="A preset, a config.json, a checkpoint folder or a TOML."),
    ],
    seq_len: Annotated[
        int | None, count_option("--seq-len", help="Sequence length T of the attention FLOPs. [4096]")
    ] = None,
    kv_dtype: Annotated[str, dtype_option("--kv-dtype", help="Type of the KV cache.")] = "bf16",
    as_json: Json = False,
) -> None:
    """Count a model's parameters, FLOPs a token and cache bytes a token.

    \b
    mw model llama-3-70b --seq-len 8192 --kv-dtype int8
    """
    config = load_model(model)
    length = seq_len or min(_DEFAULT_SEQ_LEN, config.max_seq_len)
    if length > config.max_seq_len:
        raise ModelError(
            f"--seq-len {length} is longer than {config.name}'s context of {config.max_seq_len}; "
            f"fits: --seq-len {config.max_seq_len}"
        )
    document = model_document(config, length, kv_dtype)
    if as_json:
        emit(document)
    else:
        show(_table(document))


def model_document(config: ModelConfig, seq_len: int, kv_dtype: str) -> dict:
    """The keys of `mw model` in contract.md."""
    params = count_params(config)
    parts = ("total", "active", "mlp", "attention", "vocab", "norms")
    return {
        "name": config.name,
        "params": {part: getattr(params, part) for part in parts},
        "seq_len": seq_len,
        "train_flops_per_token": train_flops_per_token(config, seq_len),
        "forward_flops_per_token": forward_flops_per_token(config, seq_len),
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": kv_bytes_per_token(config, kv_dtype),
    }


def _table(document: dict) -> object:
    from rich.table import Table

    table = Table(title=document["name"], title_justify="left", box=None, show_header=False, padding=(0, 2))
    for part, count in document["params"].items():
        table.add_row(f"parameters, {part}", format_count(count), f"{count:,}")
    at = f"at T = {document['seq_len']:,}, causal attention counted half"
    table.add_row("forward FLOPs a token", format_count(document["forward_flops_per_token"]), at)
    table.add_row("training FLOPs a token", format_count(document["train_flops_per_token"]), at)
    cache = f"keys and values in {document['kv_dtype']}, over all layers"
    table.add_row("KV cache a token", format_bytes(document["kv_bytes_per_token"]), cache)
    return table
