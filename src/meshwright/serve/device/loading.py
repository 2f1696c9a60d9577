"""Load a model folder for a server: one of our runs, or a Hugging Face checkpoint.

a run       config.json, tokenizer.json, checkpoints/<step>/   (Orbax)
HF's        config.json, tokenizer.json, *.safetensors
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from meshwright.dtypes import number_type
from meshwright.errors import CheckpointError, PlanError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits
from meshwright.models.config import ModelConfig
from meshwright.models.model_files import read_model
from meshwright.models.parameters import parameters
from meshwright.nn.adapters import merged_adapters
from meshwright.nn.files.checkpoint import restore_params
from meshwright.nn.files.checkpoint_files import CHECKPOINTS
from meshwright.nn.files.weights import has_draft_head, load_hf
from meshwright.nn.params import abstract_params, build, flatten
from meshwright.plan_file import load_plan
from meshwright.serve.model_folder import check_model_folder
from meshwright.serve.text.tokenizer import Tokenizer, load_tokenizer

PLAN = "plan.toml"
_Params = dict[str, Any]
LoadParams = Callable[[Layout, Mesh], _Params]


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk, before anyone has chosen the layout that it will run with.

    load_params: the parameters on the shards of a layout and its mesh.
    """

    path: Path
    config: ModelConfig
    load_params: LoadParams

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer.

        Raises CheckpointError if it has none, or one with tokens that the model does not have.
        """
        tokenizer, size = load_tokenizer(self.path), self.config.vocab_size
        if tokenizer.vocab_size > size:
            raise CheckpointError(
                f"tokenizer.json has {tokenizer.vocab_size} tokens, but the model's vocabulary has {size}; "
                "they belong to different models"
            )
        return tokenizer


def load_model_folder(path: Path) -> ModelFolder:
    """The model in `path`; its weights are not read yet.

    If a run has also been exported into its own folder, its checkpoints count. Raises CheckpointError if
    `path` is neither kind, ModelError if its config.json is invalid. load_params raises CheckpointError if
    the weights are truncated or belong to another model.
    """
    check_model_folder(path)
    config = read_model(path).text
    if (path / CHECKPOINTS).is_dir():
        return ModelFolder(path, config, partial(_restore, path, config))
    return ModelFolder(path, config, partial(load_hf, path, config))


def draft_head_of(folder: ModelFolder) -> ModelFolder:
    """The draft head of a model, with the model's table and output projection among its parameters.

    Raises PlanError if the folder has none.
    """
    path, config = folder.path, folder.config
    if (path / CHECKPOINTS).is_dir():
        draft_head = load_plan(path / PLAN).model.draft_head if (path / PLAN).is_file() else None
        if draft_head:
            head = replace(config, draft_head="alone")
            return replace(folder, config=head, load_params=partial(_restore_head, path, config))
    elif has_draft_head(path, config):
        head = replace(config, draft_head="alone")
        return replace(folder, config=head, load_params=partial(load_hf, path, head))
    raise PlanError(
        f"--draft-head: {path} has no draft head that is read here; fits: a run of mw train --draft-head "
        "joint, a checkpoint with a module for the next tokens, or --draft-checkpoint DIR"
    )


def _restore(run: Path, config: ModelConfig, layout: Layout, mesh: Mesh) -> _Params:
    check_fits(layout, config)
    trained, stored = _as_trained(run, config, layout)
    return dict(
        merged_adapters(trained, restore_params(run / CHECKPOINTS, abstract_params(trained, stored, mesh)))
    )


def _restore_head(run: Path, config: ModelConfig, layout: Layout, mesh: Mesh) -> _Params:
    check_fits(layout, config)
    trained, stored = _as_trained(run, config, layout)
    of_head = abstract_params(trained, stored, mesh, only=parameters(trained.head))
    flat = flatten(restore_params(run / CHECKPOINTS, of_head))
    return build(trained.head, lambda path, _: flat[path])


def _as_trained(run: Path, config: ModelConfig, layout: Layout) -> tuple[ModelConfig, Layout]:
    """The model and the layout of the arrays in its run's checkpoints, with adapters or a draft head."""
    if not (run / PLAN).is_file():
        return config, layout
    plan = load_plan(run / PLAN)
    names = ("lora_rank", "lora_alpha", "draft_head")
    config = replace(config, **{name: getattr(plan.model, name) for name in names})
    trained_in = plan.layout.precision.weights_dtype
    if number_type(trained_in).scales is None:
        return config, layout
    return config, layout.replace(weights_dtype=trained_in, compute_dtype=layout.precision.weights_dtype)
