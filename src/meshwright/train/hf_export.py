"""A run's checkpoint as a Hugging Face model."""

import json
import shutil
import warnings
from pathlib import Path

from meshwright.errors import CheckpointError
from meshwright.files import write_whole
from meshwright.layout import Layout
from meshwright.models.hf import written_family
from meshwright.models.tokenizer_file import read_tokenizer
from meshwright.nn.adapters import merged_adapters
from meshwright.nn.files import checkpoint_files
from meshwright.nn.files.checkpoint import restore_params, sound_step
from meshwright.nn.files.weights import save_hf
from meshwright.nn.params import abstract_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.plan_file import PLAN_FILE, load_plan
from meshwright.train.bpe import BESIDE_TOKENIZER
from meshwright.train.job import check_run


def export_run(run: Path, folder: Path, *, step: int | None = None, best: bool = False) -> int:
    """Write a checkpoint for transformers: config.json, safetensors and tokenizer; returns its step.

    step: the checkpoint's, by default the last sound one. best: the checkpoint with the lowest validation
    loss. Weights keep their type in training, and quantised ones are widened to `compute_dtype`; adapters are
    added to their weights. A draft head is kept if files of the family have one. Raises CheckpointError if
    there is no such checkpoint, it is damaged, or `folder` already has weights.
    """
    check_run(run)
    if existing := next(folder.glob("*.safetensors*"), None):
        raise CheckpointError(f"checkpoint {folder}: holds {existing.name} already; name another folder")
    plan, checkpoints = load_plan(run / PLAN_FILE), run / checkpoint_files.CHECKPOINTS
    if best:
        losses = checkpoint_files.validation_losses(checkpoints)
        if not losses:
            raise CheckpointError(
                f"checkpoint: {checkpoints} holds none that was validated; leave --best out"
            )
        step = min(losses, key=lambda step: losses[step])
    step = sound_step(checkpoints, step)
    stored = plan.layout.precision
    layout = Layout.of(data=1, weights_dtype=stored.weights_dtype, compute_dtype=stored.compute_dtype)
    params = restore_params(checkpoints, abstract_params(plan.model, layout, device_mesh(layout)), step)
    family = written_family(plan.model.base)
    if plan.model.draft_head and family.drafts:
        save_hf(params, plan.model, folder)
    else:
        if plan.model.draft_head:
            warnings.warn(
                f"{plan.model.name}: files of {family.title} have no draft head, so it is left out; "
                "mw serve --draft-head reads it from the run",
                stacklevel=2,
            )
        save_hf(merged_adapters(plan.model, params), plan.model.base, folder)
    _copy_tokenizer(run, folder)
    return step


def _copy_tokenizer(run: Path, folder: Path) -> None:
    shutil.copyfile(run / "tokenizer.json", folder / "tokenizer.json")
    for name in BESIDE_TOKENIZER:
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    if (folder / "tokenizer_config.json").is_file():
        return
    end = json.loads((run / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    token = read_tokenizer(run / "tokenizer.json", CheckpointError).id_to_token(end)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}
    write_whole(folder / "tokenizer_config.json", json.dumps(described, indent=2) + "\n")
