"""mw plot: curves of the textbook, as a table, an SVG or a page with a slider."""

from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.command_options import command
from meshwright.cli.completions import chips
from meshwright.cli.console import CHANGES, HARDWARE, JSON, emit, load_model_with, note, show
from meshwright.files import check_writable, write_whole
from meshwright.hardware import catalog
from meshwright.options import REQUIRED, option, parse_dtype
from meshwright.units import parse_count, parse_length

if TYPE_CHECKING:
    from meshwright.layout import Layout
    from meshwright.models.config import ModelConfig
    from meshwright.plan.curves import Plot

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_MODEL = option(REQUIRED, help="A preset, a config.json, a checkpoint folder or a TOML.")
_OUTPUT = option(
    None, flag="-o --output", help="Write the figure here: .svg, or .html with a slider if it has one."
)


@app.callback()
def plot() -> None:
    """Plot the textbook's curves for any model and machine.

    Every figure is also a table in the terminal; `-o` writes a picture.
    """


@command(app)
def bandwidth(hardware: str = HARDWARE, output: Path | None = _OUTPUT, as_json: bool = JSON) -> None:
    """Plot the bandwidth of collectives over the size of the array.

    \b
    mw plot bandwidth --hardware v5e:16x16 -o bandwidth.svg
    """
    from meshwright.plan import curves

    _show_plot(curves.bandwidth_plot(catalog.load(hardware)), output, as_json=as_json)


@command(app)
def roofline(
    chip: Annotated[str, typer.Argument(help="A chip of the catalog: h100, v5p.", autocompletion=chips)],
    output: Path | None = _OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Plot the FLOP/s that a chip's memory allows over the arithmetic intensity.

    mw shard prices one matmul on a chip, and mw plot strategies the collectives of a model.

    \b
    mw plot roofline v5p -o roofline.svg
    """
    from meshwright.plan import curves

    _show_plot(curves.roofline(chip), output, as_json=as_json)


@command(app)
def latency(
    chip: Annotated[str, typer.Argument(help="A chip of the catalog: h100, v5p.", autocompletion=chips)],
    num_bytes: int = option(1024, flag="--bytes", parser=parse_count, least=1, help="Bytes of the array."),
    most: int = option(1024, least=2, help="The largest number of devices."),
    output: Path | None = _OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Plot the time of a collective over the number of devices.

    \b
    mw plot latency h100 --bytes 1Ki
    """
    from meshwright.plan import curves

    _show_plot(curves.ring_latency(chip, num_bytes, most), output, as_json=as_json)


@command(app, name="attention")
def plot_attention(
    model: str = _MODEL, changes: str | None = CHANGES, output: Path | None = _OUTPUT, as_json: bool = JSON
) -> None:
    """Plot FLOPs of attention and of feed-forward layers over the context.

    \b
    mw plot attention --model llama-3-8b -o attention.svg
    """
    from meshwright.plan import curves

    _show_plot(curves.attention_share(load_model_with(model, changes)), output, as_json=as_json)


@command(app)
def fsdp(
    model: str = _MODEL,
    hardware: str = HARDWARE,
    batch_tokens: int = option(
        REQUIRED, parser=parse_count, least=1, help="Tokens of a step; the slider has 1/8 to 8 times it."
    ),
    changes: str | None = CHANGES,
    output: Path | None = _OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Plot step time over the FSDP degree at fixed chips, with a slider over the batch.

    \b
    mw plot fsdp --model llama-2-13b --hardware v5p:16x16x16 --batch-tokens 3M -o fsdp.html
    """
    from meshwright.plan import curves

    config, machine = load_model_with(model, changes), catalog.load(hardware)
    _show_plot(curves.fsdp_degree(config, machine, batch_tokens), output, as_json=as_json)


@command(app, name="strategies")
def plot_strategies(
    model: str = _MODEL,
    hardware: str = HARDWARE,
    changes: str | None = CHANGES,
    output: Path | None = _OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Plot compute and transfers of FSDP, TP and both over the batch, with a slider over chips.

    \b
    mw plot strategies --model llama-2-13b --hardware v5p:4x4x4 -o strategies.html
    """
    from meshwright.plan import curves

    config, machine = load_model_with(model, changes), catalog.load(hardware)
    _show_plot(curves.strategies_over_batch(config, machine), output, as_json=as_json)


@command(app)
def decode(
    model: str = _MODEL,
    hardware: str = HARDWARE,
    context: int = option(REQUIRED, parser=parse_length, least=1, help="Positions of each sequence's cache."),
    layout: str | None = option(
        None,
        help="Layout, for example tensor=8.",
        unset="all chips split the heads",
    ),
    batches: str = option("1,8,16,32,64,240", help="Numbers of sequences."),
    weights_dtype: str = option("bf16", parser=parse_dtype, help="Dtype of the weights."),
    kv_dtype: str = option("bf16", parser=parse_dtype, help="Dtype of the cache."),
    changes: str | None = CHANGES,
    output: Path | None = _OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Plot step time and tokens per second of generation over the batch.

    \b
    mw plot decode --model llama-2-13b --hardware v5e:8 --context 8192
    """
    from meshwright.layout.layout_checks import check_weights, layout_for
    from meshwright.plan import curves
    from meshwright.plan.degrees import check_chips

    config, machine = load_model_with(model, changes), catalog.load(hardware)
    chosen = layout_for(config, layout) if layout else _over_heads(config, machine.num_chips)
    check_weights(chosen.at("generate"), config, padded=True)
    check_chips(machine, chosen, config)
    precision = replace(chosen.precision, weights_dtype=weights_dtype, kv_dtype=kv_dtype)
    counts = [parse_count(text) for text in batches.split(",")]
    chosen = replace(chosen, precision=precision)
    _show_plot(curves.decode_batch(config, machine, context, chosen, counts), output, as_json=as_json)


def _over_heads(config: "ModelConfig", num_chips: int) -> "Layout":
    """The layout whose devices split the heads: KV heads first, then their queries, and replicas last."""
    from meshwright.layout import Layout
    from meshwright.layout.axes.tensor import cached_heads

    heads = cached_heads(config)
    tensor = gcd(heads, num_chips)
    copies = gcd(config.num_heads // heads, num_chips // tensor) if tensor == heads else 1
    words = {"kv_replicas": copies, "cache": "sequence"} if copies > 1 else {}
    return Layout.of(data=num_chips // (tensor * copies), tensor=tensor, **words)


@command(app)
def lookahead(
    acceptance: str = option("0.6,0.8,0.9", help="Probabilities that a draft token is accepted."),
    draft_cost: float = option(0.05, least=0, most=1, help="Time of a draft as a share of a step's."),
    most: int = option(10, least=1, most=64, help="The largest number of drafts per step."),
    output: Path | None = _OUTPUT,
    as_json: bool = JSON,
) -> None:
    """Plot speculative decoding over the number of drafts.

    \b
    mw plot lookahead --acceptance 0.6,0.8,0.9 --draft-cost 0.06
    """
    from meshwright.plan import curves

    shares = [_share(text) for text in acceptance.split(",")]
    _show_plot(curves.look_ahead(shares, draft_cost, most), output, as_json=as_json)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise typer.BadParameter(f"{text!r} is no probability; fits: 0 to 1", param_hint="--acceptance")
    return share


def _show_plot(plot: "Plot", output: Path | None, *, as_json: bool) -> None:
    """Print the values of a plot as tables, or as JSON; write its picture to `output`, if given."""
    from meshwright.report.pictures.curve_plots import curves_figure, curves_tables
    from meshwright.report.terminal.tables import rich_table

    if output:
        if output.suffix not in (".svg", ".html"):
            raise typer.BadParameter(f"{output} ends in neither .svg nor .html", param_hint="--output")
        check_writable(output)
        figure = curves_figure(plot)
        is_page = output.suffix == ".html"
        write_whole(output, figure.page() if is_page else figure.first_frame().standalone())
        note(f"wrote {output}")
    if as_json:
        emit(plot.to_dict())
        return
    show(plot.title)
    show(plot.caption)
    for table in curves_tables(plot):
        show(rich_table(table))
    for remark in plot.remarks:
        show(remark)
