"""How many causal language models are read and run, and whether their parameters equal transformers' own.

    python benchmarks/families.py                     # every causal LM of the installed transformers
    python benchmarks/families.py --write benchmarks/results/families.json
    python benchmarks/families.py --configs FILE      # JSON lines with `name` and `config` (a config.json)

Each model is built by transformers on the meta device, with the sizes of its configuration's defaults or of
the file. Buffers that files hold (biases and tables that choose experts) count as parameters. A model that
transformers has no class for is read, but not compared.
"""

import argparse
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshwright.errors import ModelError
from meshwright.layout.runnable import model_lacks
from meshwright.models.count import count_params
from meshwright.models.hf import from_hf

# Sizes that the defaults of a class lack, as published.
_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "minimax": {"head_dim": 128},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}


class Row(NamedTuple):
    """One configuration.

    ours: parameters; None if it is not read. theirs: transformers' count; None if it cannot build the model.
    lacks: the part of the model that is only planned; None if the model runs.
    """

    name: str
    ours: int | None
    theirs: int | None
    note: str = ""
    lacks: str | None = None

    @property
    def is_read(self) -> bool:
        return self.ours is not None

    @property
    def runs(self) -> bool:
        return self.is_read and self.lacks is None

    @property
    def differs(self) -> bool:
        return self.ours is not None and self.theirs is not None and self.ours != self.theirs


def causal_lms() -> Iterator[tuple[str, dict[str, Any]]]:
    """The default configuration of every causal language model."""
    for model_type, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = classes if isinstance(classes, str) else classes[0]
        try:
            written = transformers.CONFIG_MAPPING[model_type]().to_dict()
        except Exception as error:  # a class whose defaults contradict each other
            print(f"{model_type}: its class has no valid defaults: {str(error).splitlines()[0]}")
            written = {"model_type": model_type}
        yield model_type, written | _SIZES.get(model_type, {}) | {"architectures": [name]}


def scored(name: str, config: Mapping[str, Any], *, counts: bool) -> Row:
    """One configuration, read by us and built by transformers."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = from_hf(config, name)
        if assumed := [str(each.message) for each in caught if "is not known; " in str(each.message)]:
            return Row(name, None, None, f"only by assumption: {assumed[0]}")
    except ModelError as error:
        return Row(name, None, None, str(error).partition("; supported:")[0])
    ours = count_params(model).total
    return Row(name, ours, *(_built(config) if counts else (None, "")), model_lacks(model))


def _built(config: Mapping[str, Any]) -> tuple[int | None, str]:
    """The parameters of transformers' model, and why they are not known."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        # The whole model ties its table, whatever its text part alone would do.
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {"model_type": config.get("model_type"), **text, **tied}
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config["model_type"]))
    if classes is None:
        return None, f"transformers has no {config['model_type']}"
    try:
        with torch.device("meta"):
            made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
            kind = getattr(transformers, classes if isinstance(classes, str) else classes[0])
            model = kind(made)
    except Exception as error:
        return None, f"transformers cannot build it: {str(error).splitlines()[:1]}"
    held = ("e_score_correction_bias", "tid2eid")
    buffers = (b.numel() for path, b in model.named_buffers() if path.endswith(held))
    return model.num_parameters() + sum(buffers), ""


# Why counts differ.
_DIFFERENCES = {
    "longcat_flash": "transformers also gives gate and in matrices to the experts that return their input",
}


def _result(rows: list[Row]) -> dict[str, Any]:
    compared = [row for row in rows if row.ours is not None and row.theirs is not None]
    return {
        "transformers": transformers.__version__,
        "models": len(rows),
        "read": sum(row.is_read for row in rows),
        "run": sum(row.runs for row in rows),
        "compared": len(compared),
        "equal": sum(not row.differs for row in compared),
        "differs": {
            row.name: {"ours": row.ours, "theirs": row.theirs, "why": _DIFFERENCES.get(row.name)}
            for row in compared
            if row.differs
        },
        "only_planned": {row.name: row.lacks for row in rows if row.is_read and row.lacks},
        "not_compared": {row.name: row.note for row in rows if row.is_read and row.theirs is None},
        "not_read": [row.name for row in rows if not row.is_read],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configs", type=Path, help="a file of JSON lines instead of transformers' classes")
    parser.add_argument("--no-counts", action="store_true", help="only read, which takes seconds")
    parser.add_argument("--only", nargs="*", help="names of models")
    parser.add_argument("--write", type=Path, help="a file for the result, as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    files = (
        ((f["name"], f["config"]) for f in map(json.loads, options.configs.open()))
        if options.configs
        else None
    )
    chosen = ((n, c) for n, c in files or causal_lms() if not options.only or n in options.only)
    rows = [scored(name, config, counts=not options.no_counts) for name, config in chosen]
    for row in rows:
        if row.ours is None:
            print(f"not read  {row.note}")
    for row in rows:
        if row.ours is not None and row.note:
            print(f"read      {row.name}: {row.note}")
    for row in rows:
        if row.differs:
            assert row.ours is not None and row.theirs is not None
            more = row.ours - row.theirs
            print(f"differs   {row.name}: {row.ours:,} parameters, transformers {row.theirs:,} ({more:+,})")
    num_read, num_run = sum(row.is_read for row in rows), sum(row.runs for row in rows)
    compared = [row for row in rows if row.theirs is not None]
    if options.write:
        options.write.write_text(json.dumps(_result(rows), indent=1) + "\n")
    print(
        f"{num_read} of {len(rows)} are read, {num_run} run; of {len(compared)} compared with transformers "
        f"{transformers.__version__}, {sum(not row.differs for row in compared)} have the same count"
    )


if __name__ == "__main__":
    main()
