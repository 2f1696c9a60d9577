"""A Plan: model, hardware, workload and Layout in a short TOML that a user can edit.

Planning, training, serving and the audit exchange only this file.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

import meshwright
from meshwright.errors import MeshwrightError, PlanError, nearest
from meshwright.files import parse_toml, read_text, write_whole
from meshwright.hardware.catalog import with_file
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_experts, check_fits
from meshwright.layout.short import are_words, clean_words
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.model_files import model_from_dict
from meshwright.models.parameters import parameters
from meshwright.models.presets import PRESETS

# A plan's name in the folder of a run.
PLAN_FILE = "plan.toml"


@dataclass(frozen=True)
class Plan:
    """A model with its workload, hardware and layout.

    hardware: as on the command line (`v5p:16x16x16`, `cpu:8`, or the path of a machine's TOML). planned: the
    planner's figures. compiler: XLA's options for the training step, by name. tuned: the trials of `mw tune`,
    for the reader. asked: the conditions and software that the plan was asked for, for the reader.
    """

    model: ModelConfig
    hardware: str
    workload: Workload
    layout: Layout
    planned: Mapping[str, float] = field(default_factory=dict)
    compiler: Mapping[str, bool | int | str] = field(default_factory=dict)
    tuned: tuple[Mapping[str, object], ...] = ()
    asked: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fits(self.layout, self.model, self.workload.num_sequences, self.workload.seq_len)
        if self.workload.phase == "train":
            self.layout.precision.check_trains(bool(self.model.lora_rank))
        if self.workload.seq_len > self.model.max_seq_len:
            raise PlanError(
                f"seq_len = {self.workload.seq_len} is longer than {self.model.name}'s context of "
                f"{self.model.max_seq_len}; fits: --seq-len {self.model.max_seq_len}"
            )

    def __repr__(self) -> str:
        work = f"{self.workload.num_sequences:,} x {self.workload.seq_len:,} tokens"
        return f"Plan({self.model.name} on {self.hardware}, {work}: {self.layout})"

    @property
    def is_of_server(self) -> bool:
        """Whether the plan is for a server, which also prefills, and not only for a generate step."""
        return self.workload.phase == "generate" and "ttft_seconds" in self.planned

    @property
    def planned_step_seconds(self) -> float | None:
        return self.planned.get("step_seconds")


def written_shardings(config: ModelConfig, layout: Layout) -> dict[str, dict[str, str]]:
    """All weights and the main activations in the notation, for readers and reports."""
    activations = {"x": "BTD", "q": "BTNH", "k": "BTKH", "h": "BTF", "logits": "BTV"}
    return {
        "weights": {
            path.rpartition("/")[2]: str(layout.weight(path.rpartition("/")[2], param.letters))
            for path, param in parameters(config).items()
        },
        "activations": {name: str(layout.activation(name, letters)) for name, letters in activations.items()},
    }


def save_plan(plan: Plan, path: Path) -> None:
    """Write plan.toml atomically, with a hardware file named relative to it."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"{plan.model.name} on {plan.hardware}: {plan.layout}"))
    document.add("meshwright", tomlkit.item(meshwright.__version__))
    document.add("hardware", tomlkit.item(_relative(plan.hardware, path)))
    workload = _without_none(asdict(plan.workload))
    if plan.workload.phase == "train":
        del workload["phase"]  # training is the default
    document.add("workload", tomlkit.item(workload))
    document.add("layout", _layout_item(plan.layout))
    document.add("model", tomlkit.item(_without_none(asdict(plan.model))))
    document.add("planned", tomlkit.item(dict(plan.planned)))
    if plan.asked:
        document.add("asked", tomlkit.item(dict(plan.asked)))
    if plan.compiler:
        document.add("compiler", tomlkit.item(dict(plan.compiler)))
    if plan.tuned:
        document.add("tuned", tomlkit.item([_without_none(trial) for trial in plan.tuned]))
    document.add(tomlkit.nl())
    for group in written_shardings(plan.model, plan.layout).values():
        for written in group.values():
            document.add(tomlkit.comment(written))
    write_whole(path, tomlkit.dumps(document))


def _layout_item(layout: Layout) -> Table:
    """[layout.mesh], [layout.schedule], [layout.precision], and a line for each table of rules."""
    tables = layout.to_dict()
    item, rules = tomlkit.table(is_super_table=True), tomlkit.table()
    for name in ("mesh", "schedule", "precision"):
        item.add(name, tomlkit.item(tables[name]))
    for name, table in tables["rules"].items():
        line = tomlkit.inline_table()
        line.update(table)
        rules.add(name, line)
    item.add("rules", rules)
    return item


def load_plan(path: Path) -> Plan:
    """The plan of a plan.toml. Raises PlanError with the file and its fault."""
    if not path.suffix and not path.exists() and str(path).lower() in PRESETS:
        raise PlanError(
            f"{path} is a model and no plan; first type mw plan train --model {path} --hardware h100:8 "
            "--batch-tokens 1Mi --seq-len 8k -o plan.toml"
        )
    try:
        data = parse_toml(read_text(path, PlanError))
    except ValueError as error:
        raise PlanError(f"{path}: does not parse: {error}") from error
    try:
        return _from_dict(data, path)
    except MeshwrightError as error:
        raise type(error)(f"{path}: {error}") from error


def _from_dict(data: dict, path: Path) -> Plan:
    known = ["meshwright", "hardware", "workload", "layout", "model", "planned", "asked", "compiler", "tuned"]
    for key in data:
        if key not in known:
            raise PlanError(f"{key!r} is unknown; {nearest(key, known)}")
    if missing := [key for key in ("hardware", "workload", "layout", "model") if key not in data]:
        raise PlanError(f"lacks {', '.join(missing)}")
    for key in ("workload", "layout", "model"):
        if not isinstance(data[key], dict):
            raise PlanError(f"{key} = {data[key]!r} must be a table [{key}]")
    model = model_from_dict(data["model"], "[model]")
    if are_words(data["layout"]):
        check_experts(model, clean_words(data["layout"]))
    return Plan(
        model=model,
        hardware=_resolved(str(data["hardware"]), path),
        workload=Workload(**_checked(Workload, data["workload"], "[workload]", {"phase", "document_tokens"})),
        layout=Layout.from_dict(data["layout"]),
        planned=data.get("planned", {}),
        asked=_texts(data.get("asked", {})),
        compiler=_options(data.get("compiler", {})),
        tuned=tuple(data.get("tuned", ())),
    )


def _texts(table: object) -> dict[str, str]:
    """The table [asked]. Raises PlanError for another thing."""
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise PlanError(f"asked = {table!r} must be a table [asked] of texts")
    return table


def _options(table: object) -> dict[str, bool | int | str]:
    """The table [compiler]. Raises PlanError for an entry that is not an option of XLA."""
    if not isinstance(table, dict):
        raise PlanError(f"compiler = {table!r} must be a table [compiler]")
    for name, value in table.items():
        if not name.startswith("xla_") or not isinstance(value, bool | int | str):
            raise PlanError(
                f'[compiler]: {name} = {value!r} is not an option of XLA; fits: xla_name = true, 8 or "text"'
            )
    return table


def _checked(kind: type, values: Mapping, where: str, optional: set[str] | None = None) -> dict:
    """`values`, checked to be the fields of `kind`."""
    known = [f.name for f in fields(kind)]
    for key in values:
        if key not in known:
            raise PlanError(f"{where}: {key!r} is unknown; {nearest(key, known)}")
    if missing := [key for key in known if key not in values and key not in (optional or set())]:
        raise PlanError(f"{where} lacks {', '.join(missing)}")
    return dict(values)


def _relative(hardware: str, path: Path) -> str:
    return with_file(hardware, lambda file: os.path.relpath(Path(file).resolve(), path.parent.resolve()))


def _resolved(hardware: str, path: Path) -> str:
    return with_file(hardware, lambda file: os.path.relpath((path.parent / file).resolve()))


def _without_none(values: Mapping) -> dict:
    """`values`, and the tables and lists in it, without None, which TOML does not have."""
    return {key: _plain(value) for key, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _without_none(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value if one is not None]
    return value
