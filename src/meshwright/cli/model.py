"""mw model: parameters, FLOPs, cache and arithmetic intensity of a model."""

from dataclasses import asdict, replace
from pathlib import Path
from reprlib import repr as brief
from typing import Annotated

import typer

from meshwright.cli.command_options import command
from meshwright.cli.completions import models
from meshwright.cli.console import CHANGES, JSON, emit, load_model_with, show, warn_of_long_context
from meshwright.errors import ModelError
from meshwright.layout.precision import Precision, published_precision, stored_bytes
from meshwright.layout.runnable import model_lacks
from meshwright.models import count as counted
from meshwright.models.config import ModelConfig
from meshwright.models.explained import ConfigExplanation, explain_config
from meshwright.models.model_files import model_name, read_object
from meshwright.models.presets import PRESETS
from meshwright.options import option, parse_dtype
from meshwright.units import format_bytes, format_count, parse_count, parse_length

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DEFAULT_SEQ_LEN = 4096
_IS_REFUSED = 1
_COMPONENTS = {
    "mlp": "feed-forward",
    "attention": "projections",
    "scores": "scores, values",
    "vocab": "vocabulary",
    "router": "router",
    "norms": "norms",
}


@command(app)
def count(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A preset, a config.json, a checkpoint folder or a TOML. Without: all presets.",
            autocompletion=models,
        ),
    ] = None,
    seq_len: int | None = option(
        None, parser=parse_length, help="Sequence length T of the attention FLOPs.", unset="4096"
    ),
    kv_dtype: str = option("bf16", parser=parse_dtype, help="Type of the KV cache."),
    batch: int = option(1, least=1, help="Sequences at once, for the cache and the arithmetic intensity."),
    tokens: int | None = option(None, parser=parse_count, help="Tokens of a training run; adds its FLOPs."),
    changes: str | None = CHANGES,
    config_json: Path | None = option(
        None, flag="--explain-config", help="A config.json: show how each of its keys is read."
    ),
    as_json: bool = JSON,
) -> None:
    """Count a model's parameters, FLOPs per token, cache bytes and arithmetic intensity.

    \b
    mw model llama-3-70b --seq-len 8192 --kv-dtype int8 --batch 16
    mw model llama-3-8b --tokens 15T
    mw model --explain-config my-model/config.json
    """
    if config_json is not None:
        return _explain(config_json, as_json=as_json)
    if model is None:
        models = [_listed(config) for config in PRESETS.values()]
        return emit({"models": models}) if as_json else show(_list(models))
    config = load_model_with(model, changes)
    length = seq_len or min(_DEFAULT_SEQ_LEN, config.max_seq_len)
    warn_of_long_context(config, length)
    document = model_document(config, length, kv_dtype, batch=batch)
    if tokens:
        document |= {"tokens": tokens, "train_flops": tokens * document["train_flops_per_token"]}
    if as_json:
        emit(document)
    else:
        mixers = (_mixers(document),) if document["mixers"] else ()
        show(_shape(config), _components(document), _totals(document), *mixers)
    return None


def _explain(path: Path, *, as_json: bool) -> None:
    """Print the meaning of each key. Exits 1 if no model can be read from the file."""
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        raise ModelError(f"{file}: --explain-config takes a config.json or its folder")
    explanation = explain_config(read_object(file), model_name(file))
    if as_json:
        emit(explanation_document(explanation))
    else:
        show(_explanation_table(explanation), f"\n{explanation.error}\n" if explanation.error else "")
    if explanation.error:
        raise typer.Exit(_IS_REFUSED)


def explanation_document(explanation: ConfigExplanation) -> dict:
    """The document of `mw model --explain-config`."""
    family = explanation.family
    return {
        "family": family.name,
        "class": family.class_names[0],
        "keys": [asdict(line) for line in explanation.keys],
        "error": explanation.error,
    }


def _explanation_table(explanation: ConfigExplanation) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("key", "value", f"as {explanation.family.title}", ""):
        table.add_column(name)
    for line in explanation.keys:
        value = "" if line.verdict in ("default", "missing") else brief(line.value)
        table.add_row(line.key, value, line.verdict, line.meaning)
    return table


def model_document(config: ModelConfig, seq_len: int, kv_dtype: str, *, batch: int = 1) -> dict:
    """The keys of `mw model` in docs/reference/json.md. batch: sequences at once."""
    params = counted.count_params(config)
    flops = counted.forward_flops(config, seq_len)
    kinds = counted.layer_kinds(config, seq_len, kv_dtype) if config.mixers else []
    return {
        "name": config.name,
        "params": {"total": params.total, **asdict(params)},
        "stored": _stored(config),
        "choice_biases": counted.choice_biases(config),
        "mtp_params": counted.mtp_params(config),
        "tower_params": config.tower_params,
        "mtp_flops_per_token": counted.mtp_flops_per_token(config, seq_len),
        "seq_len": seq_len,
        "train_flops_per_token": 3 * flops.total,
        "forward_flops_per_token": flops.total,
        "forward_flops": asdict(flops),
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": counted.kv_bytes_per_token(config, kv_dtype),
        "kv_bytes_per_token_without_gqa": counted.kv_bytes_per_token(_without_gqa(config), kv_dtype),
        "kv_bytes": counted.kv_cache_bytes(config, seq_len, kv_dtype),
        "batch": batch,
        "kv_bytes_of_batch": batch * counted.kv_cache_bytes(config, seq_len, kv_dtype),
        "kv_read_bytes": counted.kv_read_bytes(config, seq_len, kv_dtype),
        "state_bytes": counted.mixer_state_bytes(config, kv_dtype),
        "mixers": [asdict(kind) for kind in kinds],
        "flops_per_byte": {
            "prefill": _intensities(config, batch * seq_len, counted.prefill_intensity(config, seq_len)),
            "generate": _intensities(config, batch, counted.generation_intensity(config, seq_len)),
        },
    }


def _stored(config: ModelConfig) -> dict | None:
    """The bytes of weights as served in the number type of their published files; None if that is wide."""
    words = published_precision(config, by_engine=True)
    if not words:
        return None
    plain = Precision()
    tables = {"tables_dtype": plain.compute_dtype} if "weights_dtype" in words else {}
    return {
        "dtype": config.stored_dtype,
        "wide_dtype": plain.weights_dtype,
        "bytes": stored_bytes(config, replace(plain, **words, **tables)),
        "wide_bytes": stored_bytes(config, plain),
    }


def _without_gqa(config: ModelConfig) -> ModelConfig:
    """The model with keys and values for each query head, without latents."""
    num_heads, d_head, indexer = config.num_heads, config.d_head, config.indexer
    if indexer and indexer.block:  # an indexer of blocks has one head for each KV head
        indexer = replace(indexer, num_heads=num_heads)
    even = d_head + d_head % 2
    return replace(config, mla=None, num_kv_heads=num_heads, d_head=even, indexer=indexer)


def _intensities(config: ModelConfig, num_tokens: int, scores: float) -> dict[str, float]:
    """FLOPs per byte of every component in bf16. num_tokens: of all sequences at once."""
    parts = ("mlp", "attention", "vocab", "router")
    return {part: counted.matmul_intensity(config, part, num_tokens) for part in parts} | {"scores": scores}


def _shape(config: ModelConfig) -> str:
    """The model in a few lines: its dimensions, and differences from LLaMA."""
    lines = [
        f"{config.name}: layers L = {config.num_layers}, D = {config.d_model:,}, F = {config.d_ff:,}, "
        f"query heads N = {config.num_heads}, KV heads K = {config.num_kv_heads}, H = {config.d_head}, "
        f"V = {config.vocab_size:,}, context {config.max_seq_len:,}"
    ]
    if moe := config.moe:
        shared = f" and {moe.num_shared_experts} shared" if moe.num_shared_experts else ""
        dense = f"; dense layers: {config.num_dense_layers}" if config.num_dense_layers else ""
        lines.append(
            f"{moe.experts_per_token} of E = {moe.num_experts} experts{shared} per token, "
            f"M = {moe.d_ff:,}{dense}"
        )
    if mla := config.mla:
        rank = f"Q = {mla.q_rank:,}, " if mla.q_rank else ""
        lines.append(f"latent attention: {rank}R = {mla.kv_rank}, heads of {mla.nope_dim} + {mla.rope_dim}")
    if indexer := config.indexer:
        how = f"in blocks of {indexer.block}, chosen for each KV head" if indexer.block else "chosen"
        lines.append(
            f"sparse attention: a query reads {indexer.top_k:,} keys, {how} by {indexer.num_heads} heads of "
            f"{indexer.head_dim}"
        )
    if part := model_lacks(config):
        lines.append(f"{part}: planned, not yet run")
    local = [window for window in config.windows if window]
    if local:
        size = local[0].size
        what = f"within chunks of {size:,}" if local[0].chunked else f"to the last {size:,}"
        lines.append(f"{len(local)} of {config.num_layers} layers attend {what} positions")
    if num_plain := config.nope_every and sum(not layer.kind.turned for layer in config.layers):
        lines.append(f"{num_plain} of {config.num_layers} layers have no rotary positions")
    return "\n".join(lines) + "\n"


def _components(document: dict) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for name in ("parameters", "share", "FLOPs\nper token", "share", "FLOPs/byte\nprefill", "\ngenerate"):
        table.add_column(name, justify="right")
    params, flops, at = document["params"], document["forward_flops"], document["flops_per_byte"]
    for part, name in _COMPONENTS.items():
        if params.get(part) or flops.get(part):
            table.add_row(
                name,
                *_with_share(params.get(part), params["total"]),
                *_with_share(flops.get(part), document["forward_flops_per_token"]),
                *(
                    f"{at[phase][part]:,.1f}" if part in at[phase] else ""
                    for phase in ("prefill", "generate")
                ),
            )
    return table


def _with_share(value: float | None, total: float) -> tuple[str, str]:
    return ("", "") if not value else (format_count(value), f"{value / total:.1%}")


def _totals(document: dict) -> object:
    from rich.table import Table

    params, seq_len = document["params"], f"T = {document['seq_len']:,}"
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_row("\nparameters", "\n" + format_count(params["total"]), f"\n{params['total']:,}")
    if params["active"] != params["total"]:
        table.add_row("  active per token", format_count(params["active"]), f"{params['active']:,}")
    if biases := document["choice_biases"]:
        about = f"{biases:,}; buffers in most of transformers' models, whose counts leave them out"
        table.add_row("  biases of routers", format_count(biases), about)
    if stored := document["stored"]:
        all_wide = f"{format_bytes(stored['wide_bytes'])} in {stored['wide_dtype']}"
        wide = f"with the parts that stay in {stored['wide_dtype']}; {all_wide}"
        table.add_row(f"weights, served in {stored['dtype']}", format_bytes(stored["bytes"]), wide)
    if more := document["mtp_params"]:
        flops = document["mtp_flops_per_token"]
        work = f" and {format_count(flops)} FLOPs a token" if flops else ""
        about = f"{more:,} more{work}, in no other figure"
        table.add_row("  multi-token prediction", format_count(more), about)
    if towers := document["tower_params"]:
        table.add_row("  towers", format_count(towers), f"{towers:,} more, which see or hear; in memory only")
    at = f"at {seq_len}; causal attention counts half"
    table.add_row("forward FLOPs per token", format_count(document["forward_flops_per_token"]), at)
    table.add_row("training FLOPs per token", format_count(document["train_flops_per_token"]), at)
    if tokens := document.get("tokens"):
        run = f"of {format_count(tokens)} tokens; mw plan train --tokens gives its time and price"
        table.add_row("training FLOPs of a run", f"{document['train_flops']:.3g}", run)
    cache = f"in {document['kv_dtype']}, over all layers"
    table.add_row("KV cache per token", format_bytes(document["kv_bytes_per_token"]), cache)
    if (without := document["kv_bytes_per_token_without_gqa"]) != document["kv_bytes_per_token"]:
        table.add_row("  without GQA or MLA", format_bytes(without), cache)
    table.add_row("KV cache per sequence", format_bytes(document["kv_bytes"]), f"at {seq_len}")
    if (batch := document["batch"]) > 1:
        cached = format_bytes(document["kv_bytes_of_batch"])
        table.add_row(f"KV cache of {batch:,} sequences", cached, f"at {seq_len}")
    return table


def _mixers(document: dict) -> object:
    """The memory that each kind of layer keeps of a sequence."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("\nmixer")
    names = ("layers", "parameters", "cache\nper token", "cache\nper sequence", "state\nper sequence")
    for name in names:
        table.add_column(name, justify="right", vertical="bottom")
    for kind in document["mixers"]:
        memory = (kind["cache_bytes_per_token"], kind["cache_bytes"], kind["state_bytes"])
        shown = (format_bytes(number) if number else "" for number in memory)
        table.add_row(kind["mixer"], str(kind["num_layers"]), format_count(kind["params"]), *shown)
    return table


def _listed(config: ModelConfig) -> dict:
    params = counted.count_params(config)
    return {
        "name": config.name,
        "params": {"total": params.total, "active": params.active},
        "num_layers": config.num_layers,
        "d_model": config.d_model,
        "max_seq_len": config.max_seq_len,
    }


def _list(models: list[dict]) -> object:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("model")
    for name in ("parameters", "active", "layers", "D", "context"):
        table.add_column(name, justify="right")
    for model in models:
        total, active = model["params"]["total"], model["params"]["active"]
        table.add_row(
            model["name"],
            format_count(total),
            format_count(active) if active != total else "",
            str(model["num_layers"]),
            f"{model['d_model']:,}",
            f"{model['max_seq_len']:,}",
        )
    return table
