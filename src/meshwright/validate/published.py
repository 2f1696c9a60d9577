"""Rows of a table of published measurements, read from CSV (docs/reference/json.md, "Published results").

A row has the model's dimensions, the hardware, the layout and one measured figure.
`validate/reproduce.py` turns it into a configuration that the planner prices. Its id and source name it in
reports; all other columns that are read are physical.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, get_args

from meshwright.errors import PlanError
from meshwright.files import read_text
from meshwright.units import and_more
from meshwright.validate.load_test_row import MAX_BATCH, ROW_MODES, LoadTestRow
from meshwright.validate.read_row import ReadRow, column_fields

STEP, THROUGHPUT, MEMORY = "step_seconds", "tokens_per_s_per_chip", "memory_bytes_per_chip"
METRICS = (STEP, THROUGHPUT, MEMORY)
INFERENCE_METRICS = ("tpot_s", "ttft_s", "request_latency_s", "tokens_per_s")
PER_CHIP = "tokens/s per chip"
# A table with this column measures serving.
_INFERENCE_COLUMN = "prompt_len"
# An inference table with this column has load tests.
_LOAD_TEST_COLUMN = "ttft_seconds"
_DELIMITERS = ",;\t"
# Columns of tokens that may be means over requests, which are rounded.
_MEANS = ("prompt_len", "output_len")
_REPLACED = "\ufffd"  # a byte that is not UTF-8
# Lines of one cell, at most.
_MOST_LINES = 100
# Missing columns that a message names.
_MOST_NAMED = 5


@dataclass(frozen=True)
class _ModelRow(ReadRow):
    """The model and the machine of a row.

    A cell is None if the source does not say; the planner's default then applies. mlp: gated or plain.
    d_ff: width of the feed-forward, or of an expert.
    """

    id: str
    source: str
    mlp: str
    n_layers: int
    d_model: int
    d_ff: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    vocab: int
    experts: int | None
    experts_per_token: int | None
    params_total: float | None
    params_active: float | None
    hardware: str
    chips: int
    nic_gbit_per_gpu: float | None
    hbm_bytes_per_second: float | None
    power_watts: float | None

    @cached_property
    def chip(self) -> str:
        """The chip's name: gb200-nvl72 of `gb200-nvl72:64`, v5e of `2*v5e:16x16`."""
        return self.hardware.rpartition(":")[0].rpartition("*")[2] or self.hardware


@dataclass(frozen=True)
class PublishedRow(_ModelRow):
    """One measured training figure.

    micro_batch: sequences of a data rank in a microbatch. zero_group: data ranks of a shard group, if these
    are not all. remat: none, selective or full, optionally with +offload. unit: the value's, in words.
    software, year: of the run. A table may lack the last three columns.
    """

    seq_len: int
    global_batch_sequences: int
    micro_batch: float | None
    dtype: str
    data: int | None
    fsdp: int | None
    tensor: int | None
    pipe: int | None
    interleave: int | None
    context: int | None
    expert: int | None
    zero: int | None
    zero_group: int | None
    sequence_parallel: int | None
    remat: str | None
    metric: str
    value: float
    unit: str | None = None
    software: str | None = None
    year: int | None = None

    @property
    def ran_out(self) -> bool:
        """Whether the program ran out of memory; `value` is then the memory of the chip."""
        return self.metric == MEMORY and "ran out" in (self.unit or "")

    @property
    def num_tokens(self) -> int:
        return self.seq_len * self.global_batch_sequences

    def seconds(self, value: float | None = None) -> float:
        """The step time of the row's figure, or of another `value` of its metric."""
        value = self.value if value is None else value
        return value if self.metric == STEP else self.num_tokens / self.chips / value

    def in_unit(self, seconds: float) -> float:
        """A step time in the row's own unit."""
        return seconds if self.metric == STEP else self.num_tokens / self.chips / seconds


@dataclass(frozen=True)
class InferenceRow(_ModelRow):
    """One measured figure of serving.

    unit: PER_CHIP for tokens a second of a chip, otherwise of all chips. batch: MAX_BATCH for "max".
    output_len: 0 for prompts without answers, whose own tokens count.
    """

    engine: str | None
    weight_dtype: str
    kv_dtype: str | None
    tensor: int | None
    pipe: int | None
    batch: int
    prompt_len: int
    output_len: int
    metric: str
    value: float
    unit: str

    @property
    def seq_len(self) -> int:
        """Positions of a whole request."""
        return self.prompt_len + self.output_len

    def seconds(self, figure: float | None = None, batch: int | None = None) -> float:
        """The time of the row's figure, or of another `figure` in its unit.

        A rate gives the time of a batch: the row's, or one of `batch` sequences.
        """
        value = self.value if figure is None else figure
        return value if self.metric != "tokens_per_s" else self._answered(batch) / value

    def in_unit(self, seconds: float, batch: int | None = None) -> float:
        """A time as a figure in the row's unit: the inverse of `seconds`."""
        return seconds if self.metric != "tokens_per_s" else self._answered(batch) / seconds

    def _answered(self, batch: int | None) -> float:
        """New tokens of a batch, or its prompts' tokens without answers; per chip if the unit is."""
        count = (self.batch if batch is None else batch) * (self.output_len or self.prompt_len)
        return count / self.chips if self.unit == PER_CHIP else count

    def chip_seconds_per_token(self, figure: float | None = None) -> float:
        """Chip-seconds of a token by the row's figure, or by `figure`; of a prompt token for TTFT."""
        num_tokens = {"tpot_s": 1, "ttft_s": self.prompt_len}.get(
            self.metric, self.output_len or self.prompt_len
        )
        return self.seconds(figure) * self.chips / (self.batch * num_tokens)


AnyRow = PublishedRow | InferenceRow
TableRow = AnyRow | LoadTestRow
_Row = TypeVar("_Row", PublishedRow, InferenceRow, LoadTestRow)


@dataclass(frozen=True)
class UnreadRow:
    """A row with a cell that cannot be read. reason: with the file's line and the column."""

    id: str
    source: str
    reason: str
    value: None = None


def read_rows(path: Path) -> list[TableRow | UnreadRow]:
    """The rows of a CSV of published results, in order.

    A line that is no CSV is one unread row. Raises PlanError for another file, or one that lacks a column.
    """
    text = read_text(path, PlanError, undecoded="replace").removeprefix("\ufeff")
    lines = list(StringIO(text, newline=""))
    head = lines[0] if lines else ""
    delimiter = max(_DELIMITERS, key=head.count)
    columns = [name.strip() for name in next(csv.reader([head], delimiter=delimiter), [])]
    kind = PublishedRow
    if _INFERENCE_COLUMN in columns:
        kind = LoadTestRow if _LOAD_TEST_COLUMN in columns else InferenceRow
    needed = [column.name for column in column_fields(kind) if column.default is MISSING]
    if missing := [name for name in needed if name not in columns]:
        if _REPLACED in head:
            read_text(path, PlanError)
        more = and_more(len(missing) - _MOST_NAMED)
        raise PlanError(
            f"{path}: lacks the column {', '.join(missing[:_MOST_NAMED])}{more}; its first line must name "
            "the columns, as in benchmarks/published/training.csv"
        )
    return list(_rows(lines, columns, delimiter, kind, path))


def _rows(
    lines: list[str], columns: list[str], delimiter: str, kind: type[TableRow], path: Path
) -> Iterator[TableRow | UnreadRow]:
    read = {PublishedRow: _row, InferenceRow: _inference_row, LoadTestRow: _load_test_row}[kind]
    for number, record in _records(lines, len(columns), delimiter):
        cells = dict(zip(columns, [] if isinstance(record, str) else record, strict=False))
        row_id, source = cells.get("id") or "no id", cells.get("source", "")
        where = f"{path}: line {number} ({row_id})"
        try:
            if isinstance(record, str):
                raise PlanError(f"{where} is not CSV: {record}")
            if len(record) != len(columns):
                raise PlanError(f"{where} does not have one cell for each of the {len(columns)} columns")
            yield read(cells, where)
        except PlanError as error:
            yield UnreadRow(row_id, source, str(error))


def _records(lines: list[str], num_cells: int, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    """The cells of each record after the header, or why it cannot be read, with the number of its last line.

    A cell in quotes may have several lines. If its end is missing, only its first line is lost.
    """
    place = 1
    while place < len(lines):
        num_quotes, last = 0, place
        for last in range(place, min(place + _MOST_LINES, len(lines))):
            num_quotes += lines[last].count('"')
            if num_quotes % 2 == 0:
                break
        try:
            records = list(csv.reader(lines[place : last + 1], delimiter=delimiter, strict=True))
        except csv.Error as error:
            yield place + 1, str(error)
            place += 1
            continue
        if last > place and [len(cells) for cells in records] != [num_cells]:
            last, records = place, [[]]
            yield place + 1, "a cell has a quote at its beginning and none at its end"
        yield from ((last + 1, cells) for cells in records if cells)
        place = last + 1


def _load_test_row(cells: dict[str, str], where: str) -> LoadTestRow:
    return _typed(LoadTestRow, cells, where, "mode", ROW_MODES)


def _inference_row(cells: dict[str, str], where: str) -> InferenceRow:
    return _typed(InferenceRow, cells, where, "metric", INFERENCE_METRICS)


def _typed(kind: type[_Row], cells: dict[str, str], where: str, column: str, known: Sequence[str]) -> _Row:
    """A row with typed values.

    Raises PlanError for a cell of another type, and for a value of `column` that is not `known`.
    """
    values = {f.name: _cell(where, f.name, cells.get(f.name, ""), f.type) for f in column_fields(kind)}
    row = kind(**values, where=where)
    if (value := getattr(row, column)) not in known:
        raise PlanError(f"{where}: {column} = {value!r} is unknown; fits: {', '.join(known)}")
    return row


def _row(cells: dict[str, str], where: str) -> PublishedRow:
    row = _typed(PublishedRow, cells, where, "metric", METRICS)
    if row.mlp not in ("gated", "plain"):
        raise PlanError(f"{where}: mlp = {row.mlp!r} is unknown; fits: gated, plain")
    if (row.experts is None) != (row.experts_per_token is None):
        raise PlanError(f"{where}: experts and experts_per_token go together; one of them is empty")
    return row


def _cell(where: str, column: str, text: str, kind: Any) -> Any:
    """The value of a cell; an empty cell is None if its column is optional."""
    text, optional = text.strip(), type(None) in get_args(kind)
    kind = get_args(kind)[0] if optional else kind
    if not text:
        if optional:
            return None
        raise PlanError(f"{where}: {column} is empty")
    if kind is str:
        return text
    if column in ("batch", "concurrency") and text == "max":
        return MAX_BATCH
    least = 0 if column in ("zero", "sequence_parallel", "output_len") else None
    try:
        value = float(text)
    except ValueError:
        raise PlanError(f"{where}: {column} = {text!r} is not a number") from None
    if column in _MEANS and value < float("inf"):
        value = float(round(value))
    if not (value > 0 or value == least) or value == float("inf") or (kind is int and value != int(value)):
        wanted = "a whole number" if kind is int else "a finite number"
        raise PlanError(f"{where}: {column} = {text!r} must be {wanted}{' above 0' if least is None else ''}")
    return kind(value)
