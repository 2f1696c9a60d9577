"""Quantised checkpoints: written in compressed-tensors' form, read back, and their perplexity."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from tests.nn.small_models import TINY
from tokenizers import decoders, models, pre_tokenizers

from meshwright.cli.main import main
from meshwright.errors import CheckpointError, ModelError
from meshwright.layout import Layout
from meshwright.models.at_layer import Places
from meshwright.models.transformer import logits
from meshwright.nn.files.weights import load_hf, save_hf
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.params import flatten, init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device.quantized_checkpoint import quantize_folder

CONFIG = dataclasses.replace(TINY, vocab_size=256)
LAYOUT = Layout.of(weights_dtype="f32", compute_dtype="f32")
TEXT = "the quick brown fox jumps over the lazy dog " * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_hf(init_params(CONFIG, LAYOUT, device_mesh(LAYOUT), seed=0), CONFIG, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        ("int4", 0.5 / 7),
        pytest.param("int8", 0.5 / 127, marks=pytest.mark.slow),
        pytest.param("fp8", 2**-4, marks=pytest.mark.slow),
    ],
)
def test_what_is_written_is_read_back(checkpoint: Path, tmp_path: Path, dtype: str, most: float) -> None:
    """Each weight is off by half a step of its type at most; what is kept, by bf16's."""
    found = quantize_folder(checkpoint, tmp_path / "out", dtype, None, lambda _: None)
    mesh = device_mesh(LAYOUT)
    before, after = (flatten(load_hf(path, CONFIG, LAYOUT, mesh)) for path in (checkpoint, tmp_path / "out"))
    for name, weight in before.items():
        bound = max(most, 2**-8) * np.abs(weight).max() * 1.001
        assert np.abs(np.asarray(after[name]) - np.asarray(weight)).max() <= bound, name
    assert found["bytes_after"] < found["bytes_before"]
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "compressed-tensors"
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert "model.layers.0.mlp.up_proj.weight_scale" in set(file.keys())


def test_perplexity_before_and_after(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["quantize", str(checkpoint), "--to", "int8", "--eval", str(tmp_path / "text.txt")]
    assert main([*command, "-o", str(tmp_path / "out"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    tokens = np.frombuffer(TEXT.encode(), np.uint8)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_char = {byte: chr(byte) if chr(byte) in alphabet else "Ġ" for byte in set(tokens.tolist())}
    ids = np.array([[alphabet.index(to_char[byte]) for byte in tokens.tolist()]], np.int32)
    length = min(CONFIG.max_seq_len, ids.shape[1])
    windows = ids[0, : ids.shape[1] // length * length].reshape(-1, length)
    mesh = device_mesh(LAYOUT)
    with jax.set_mesh(mesh):
        params = load_hf(checkpoint, CONFIG, LAYOUT, mesh)
        places = Places(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), windows.shape))
        found, _ = logits(CONFIG, JaxOps(CONFIG, LAYOUT), params, jnp.asarray(windows), places)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(found))[:, :-1], windows[:, 1:, None], -1)
    assert document["perplexity_before"] == pytest.approx(np.exp(-chosen.mean()), rel=1e-4)
    assert document["perplexity_after"] == pytest.approx(document["perplexity_before"], rel=0.05)
    assert document["tokens"] == len(TEXT)


def test_a_folder_that_holds_something_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds files already; name another folder"):
        quantize_folder(checkpoint, tmp_path, "int8", None, lambda _: None)
    assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]


def test_weights_of_another_order_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tests.nn.hf_models").save("gpt2", tmp_path / "gpt")
    with pytest.raises(ModelError, match=r"stored \[in, out\], which compressed-tensors cannot represent"):
        quantize_folder(tmp_path / "gpt", tmp_path / "out", "int8", None, lambda _: None)
    assert not (tmp_path / "out").exists()
