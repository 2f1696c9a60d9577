"""HF checkpoints: the same logits as transformers, on any layout, and back; damage is named."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.nn import hf_models
from tests.nn.files.loaded import TOKENS, assert_same, f32, load, logits

from meshwright.errors import CheckpointError, LayoutError
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.nn.files.weights import save_hf
from meshwright.nn.params import abstract_params, init_params
from meshwright.nn.start.device_mesh import device_mesh

# Both add 32 to 48 float32 products in an order of their own, layer upon layer: logits of up to 5 come
# out within 7e-6. The norms' epsilon times ten moves them by 2e-3, a rotary base 1% off by 1e-2.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray]]:
    """Every model's folder and its logits. Not to be changed: copy it."""
    root = tmp_path_factory.mktemp("hf")
    return {
        kind: (root / kind, hf_models.logits(hf_models.save(kind, root / kind), TOKENS))
        for kind in hf_models.MODELS
    }


@pytest.fixture
def broken(folders, tmp_path) -> Path:
    """A copy of one folder, to damage."""
    return Path(shutil.copytree(folders["grouped"][0], tmp_path / "model"))


@pytest.mark.parametrize("kind", list(hf_models.MODELS))
def test_logits_equal_transformers(folders, kind):
    folder, expected = folders[kind]
    params, config = load(folder, f32())
    np.testing.assert_allclose(logits(params, config, f32()), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", ["tensor=2", "fsdp=2,tensor=4", "data=2,fsdp=4", "fsdp=8"])
def test_every_layout_gets_its_blocks_of_the_same_arrays(folders, layout):
    folder, _ = folders["stretched"]
    whole, _ = load(folder, f32())
    split, config = load(folder, f32(layout))
    assert_same(split, whole)
    abstract = abstract_params(config, f32(layout), device_mesh(f32(layout)))
    for block, wanted in zip(jax.tree.leaves(split), jax.tree.leaves(abstract), strict=True):
        assert (block.shape, block.dtype, block.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)


def test_a_split_model_gives_the_same_logits(folders):
    folder, expected = folders["grouped"]
    params, config = load(folder, f32("data=2,tensor=4"))
    found = logits(params, config, f32("data=2,tensor=4"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_checkpoints_in_several_files_are_read_through_their_index(folders, tmp_path):
    hf_models.make("grouped").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    params, _ = load(tmp_path, f32())
    single, _ = load(folders["grouped"][0], f32())
    assert_same(params, single)


def test_weights_arrive_in_the_type_of_the_layout(folders):
    folder, _ = folders["grouped"]
    wide, _ = load(folder, f32("tensor=2"))
    narrow, _ = load(folder, Layout.of(tensor=2, weights_dtype="bf16"))
    assert_same(narrow, jax.tree.map(lambda array: np.asarray(array).astype(ml_dtypes.bfloat16), wide))


@pytest.mark.parametrize("kind", ["grouped", "stretched"])
@pytest.mark.parametrize("file_bytes", [5_000_000_000, 20_000])
def test_transformers_loads_what_save_hf_writes(folders, tmp_path, kind, file_bytes):
    folder, expected = folders[kind]
    params, config = load(folder, f32("fsdp=2,tensor=2"))
    save_hf(params, config, tmp_path, file_bytes=file_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (file_bytes == 20_000)
    assert all(file.stat().st_size < 25_000 for file in tmp_path.glob("model-*"))
    model = hf_models.load(tmp_path)
    assert (type(model).__name__, model.dtype) == ("LlamaForCausalLM", hf_models.torch.float32)
    np.testing.assert_array_equal(hf_models.logits(model, TOKENS), expected)


def test_fresh_parameters_survive_the_way_to_hf_and_back_in_bfloat16(tmp_path):
    config = ModelConfig("small", 2, 16, 24, 4, 2, 6, 40, 32)
    layout = Layout.of(tensor=2)
    params = init_params(config, layout, device_mesh(layout), seed=1)
    save_hf(params, config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again, read = load(tmp_path, layout)
    assert (read.num_kv_heads, read.d_head, read.tied_embeddings) == (2, 6, False)
    assert_same(params, again)


def test_save_hf_overwrites_no_weights(folders, broken):
    params, config = load(folders["grouped"][0], f32())
    with pytest.raises(CheckpointError) as error:
        save_hf(params, config, broken)
    assert str(error.value) == (f"checkpoint {broken}: holds model.safetensors already; name another folder")


def change(folder: Path, **tensors: np.ndarray | None) -> None:
    """Replace, add or (None) take out tensors, whose dots are written as `__`."""
    file = folder / "model.safetensors"
    content = load_file(file)
    for name, value in tensors.items():
        content.pop(name.replace("__", "."), None)
        if value is not None:
            content[name.replace("__", ".")] = value
    save_file(content, file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"model__layers__1__mlp__up_proj__weight": None},
            "has no model.layers.1.mlp.up_proj.weight[48, 32], which model needs",
        ),
        (
            {"model__layers__2__self_attn__k_proj__weight": np.zeros((12, 32), np.float32)},
            "model.layers.2.self_attn.k_proj.weight is [12, 32] there and [24, 32] in model",
        ),
        (
            {"model__norm__weight": np.zeros(32, np.int8)},
            "model.norm.weight is stored as I8; fits: F32, BF16, F16",
        ),
        (
            {"model__layers__0__self_attn__q_proj__bias": np.zeros(48, np.float32)},
            "holds model.layers.0.self_attn.q_proj.bias, which model has not",
        ),
    ],
)
def test_a_tensor_that_differs_is_named(broken, tensors, message):
    change(broken, **tensors)
    with pytest.raises(CheckpointError) as error:
        load(broken, f32())
    assert str(error.value) == f"checkpoint {broken}: {message}"


def test_what_old_exports_store_besides_is_passed_over(folders, tmp_path):
    folder = Path(shutil.copytree(folders["tied"][0], tmp_path / "model"))
    change(
        folder,
        lm_head__weight=np.zeros((64, 32), np.float32),
        model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(3, np.float32),
    )
    params, _ = load(folder, f32())
    assert "unembed" not in params


@pytest.mark.parametrize("kept_bytes", [0, 4, 1000, -1])
def test_a_file_cut_short_is_named(broken, kept_bytes):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError) as error:
        load(broken, f32())
    message = str(error.value)
    assert message.startswith(f"checkpoint {broken}: does not load: model.safetensors: ")
    assert message.endswith("; copy or download it again")
    assert "\n" not in message


def test_a_missing_file_or_a_broken_index_is_named(tmp_path):
    hf_models.make("grouped").save_pretrained(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("model-*"))[2]
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"does not load: {lost.name} is missing; copy or download"):
        load(tmp_path, f32())
    index = tmp_path / "model.safetensors.index.json"
    for content in ("{", "{}", "[]", '{"weight_map": 3}'):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=r"index\.json has no whole weight_map; copy or download"):
            load(tmp_path, f32())


def test_a_layout_that_does_not_divide_is_refused_before_reading(broken):
    (broken / "model.safetensors").unlink()
    with pytest.raises(LayoutError, match=r"4 KV heads \(K\) do not divide over tensor = 8"):
        load(broken, f32("tensor=8"))
