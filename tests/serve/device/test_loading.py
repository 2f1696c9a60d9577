"""A folder with a model: a run of ours or Hugging Face's, read onto any layout; what is neither."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.nn.saving import save
from tests.serve.mock import byte_tokenizer

from meshwright.errors import CheckpointError, LayoutError, ModelError, PlanError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.hf import to_hf
from meshwright.models.parameters import parameters
from meshwright.nn.files.weights import save_hf
from meshwright.nn.params import abstract_params, flatten, init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.plan_file import Plan, save_plan
from meshwright.serve.device import loading
from meshwright.serve.device.loading import ModelFolder, draft_head_of, load_model_folder

CONFIG = ModelConfig("run", 2, 16, 24, 4, 2, 8, 300, 32)
TRAINED = Layout.of(fsdp=2, weights_dtype="f32")
SERVED = Layout.of(tensor=2)


@pytest.fixture(scope="module")
def trained() -> dict:
    return init_params(CONFIG, TRAINED, device_mesh(TRAINED), seed=4)


@pytest.fixture(scope="module")
def folders(trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same parameters as a run and as an HF folder. Not to be changed: copy them."""
    run, hf = tmp_path_factory.mktemp("run") / "run", tmp_path_factory.mktemp("hf") / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(to_hf(CONFIG)))
    state = {"params": trained, "opt_state": {"mu": trained["final_norm"]}}
    save(run / "checkpoints", 7, state, {})
    save_hf(trained, CONFIG, hf)
    for folder in (run, hf):
        byte_tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
    return {"run": run, "hf": hf}


def load(path: Path) -> ModelFolder:
    return load_model_folder(path)


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_both_kinds_give_the_model_its_tokenizer_and_its_parameters_on_any_layout(folders, trained, kind):
    folder = load(folders[kind])
    assert (folder.config, folder.tokenizer().vocab_size) == (CONFIG, 257)
    mesh = device_mesh(SERVED)
    params = folder.load_params(SERVED, mesh)
    abstract = abstract_params(CONFIG, SERVED, mesh)
    assert jax.tree.structure(params) == jax.tree.structure(trained)
    for found, wanted, array in zip(*map(jax.tree.leaves, (params, abstract, trained)), strict=True):
        assert (found.sharding, found.dtype) == (wanted.sharding, wanted.dtype)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(array).astype(found.dtype))


def test_a_run_exported_into_its_own_folder_is_still_the_run(folders, trained, tmp_path):
    folder = Path(shutil.copytree(folders["run"], tmp_path / "run"))
    (folder / "model.safetensors").write_bytes(b"")
    params = load(folder).load_params(TRAINED, device_mesh(TRAINED))
    np.testing.assert_array_equal(params["embed"], trained["embed"])


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (None, "there is no such folder"),
        (["model.safetensors"], "has no config.json"),
        (["config.json", "pytorch_model.bin"], "has no weights"),
    ],
)
def test_neither_kind_says_what_was_looked_for(tmp_path, files, found):
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
        for file in files:
            (path / file).write_text("{}")
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert str(error.value) == (
        f"checkpoint {path}: {found}; it takes config.json and either checkpoints/ (a run of meshwright)"
        " or *.safetensors (a Hugging Face model)"
    )


def test_an_unsound_config_is_refused_before_any_weight_is_read(folders, tmp_path):
    folder = Path(shutil.copytree(folders["hf"], tmp_path / "model"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"config\.json lacks num_hidden_layers, hidden_size"):
        load(folder)


def test_a_run_cut_short_or_without_a_checkpoint_is_refused(folders, tmp_path):
    folder = Path(shutil.copytree(folders["run"], tmp_path / "run"))
    (folder / "checkpoints" / "7" / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoints/7: is damaged: lacks SHA256SUMS"):
        load(folder).load_params(SERVED, device_mesh(SERVED))
    shutil.rmtree(folder / "checkpoints" / "7")
    with pytest.raises(CheckpointError, match=r"checkpoints holds none; train first"):
        load(folder).load_params(SERVED, device_mesh(SERVED))


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_a_layout_that_does_not_divide_is_refused(folders, kind):
    layout = Layout.of(tensor=4)
    with pytest.raises(LayoutError, match=r"2 KV heads \(K\) do not divide over tensor = 4"):
        load(folders[kind]).load_params(layout, device_mesh(layout))


def test_a_folder_without_a_tokenizer_still_gives_its_weights(folders, tmp_path):
    folder = Path(shutil.copytree(folders["hf"], tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    assert load(folder).load_params(SERVED, device_mesh(SERVED))["embed"].shape == (300, 16)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load(folder).tokenizer()


def test_a_draft_head_is_restored_without_the_model(tmp_path, monkeypatch):
    """Its arrays are the trained ones, with table and head of the vocabulary; no other array is read."""
    config = replace(CONFIG, draft_head="joint")
    weights = init_params(config, TRAINED, device_mesh(TRAINED), seed=4)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(to_hf(CONFIG)))
    save(run / "checkpoints", 7, {"params": weights, "opt_state": {}}, {})
    with pytest.raises(PlanError, match="has no draft head"):
        draft_head_of(load(run))
    save_plan(Plan(config, "cpu:2", Workload(16, 32), TRAINED), run / "plan.toml")
    asked: list[set[str]] = []
    restore = loading.restore_params

    def noted(directory, wanted):
        asked.append({*flatten(wanted)})
        return restore(directory, wanted)

    monkeypatch.setattr(loading, "restore_params", noted)
    folder = draft_head_of(load(run))
    params = flatten(folder.load_params(SERVED, device_mesh(SERVED)))
    assert asked == [{*parameters(config.head)}] == [{*params}]
    assert {"embed", "unembed"} < {*params} and not any(path.startswith("layers/") for path in params)
    for path, array in params.items():
        np.testing.assert_array_equal(
            np.asarray(array), np.asarray(flatten(weights)[path]).astype(array.dtype)
        )
