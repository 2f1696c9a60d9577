"""Records of optimizers: state, blocks and work of a weight by hand; both halves have the same names."""

from dataclasses import replace
from math import prod

import pytest

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.models.parameters import Param
from meshwright.models.presets import load_model
from meshwright.optimizers import OPTIMIZERS
from meshwright.optimizers.optimizer import PACKED_DTYPES, WeightShard, state_bytes
from meshwright.train.optimizers import OPTAX

W = Param("LDF")
SIZES = {"L": 4, "D": 256, "F": 512, "V": 1000}
LAYOUT = Layout.of(fsdp=4, tensor=2)


def shard(path: str = "layers/w_in", param: Param = W) -> WeightShard:
    array = LAYOUT.rules.updated.weight(path.rpartition("/")[2], param.letters)
    return WeightShard(path, param, array, SIZES, LAYOUT.mesh)


def test_both_halves_have_the_same_names() -> None:
    assert list(OPTIMIZERS) == list(OPTAX)
    assert all(name == record.name and record.words for name, record in OPTIMIZERS.items())


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("adamw", {"m": "LDF", "v": "LDF"}),
        ("lion", {"m": "LDF"}),
        ("muon", {"m": "LDF"}),
        ("adafactor", {"v_row": "LD", "v_column": "LF"}),
    ],
)
def test_state_of_a_matrix(name: str, state: dict[str, str]) -> None:
    """w_in[L, D_fsdp, F_tensor] of 4 x 256 x 512 over 4 x 2 devices: 4 x 64 x 256 on each."""
    sizes = {"L": 4, "D": 64, "F": 256}
    elements = sum(prod(sizes[letter] for letter in letters) for letters in state.values())
    assert OPTIMIZERS[name].state("layers/w_in", W, SIZES) == state
    assert OPTIMIZERS[name].state_elements(shard()) == elements


def test_blocks_of_a_state_in_8_bits() -> None:
    """Rows of 256 numbers have two blocks, each with a float32 scale."""
    adamw, weight = OPTIMIZERS["adamw"], shard()
    elements, blocks = adamw.state_elements(weight), adamw.state_blocks(weight)
    assert (elements, blocks) == (2 * 4 * 64 * 256, 2 * 4 * 64 * 2)
    assert state_bytes("int8", elements, blocks) == elements + 4 * blocks
    assert state_bytes("bf16", elements, blocks) == 2 * elements


def test_work_of_an_update() -> None:
    """Muon's five iterations on one layer of four, dealt over 8 devices: 4 m^2 n + 2 m^3 each."""
    elements = 4 * 64 * 256
    assert OPTIMIZERS["adamw"].flops(shard()) == 19 * elements
    assert OPTIMIZERS["lion"].flops(shard()) == 14 * elements
    iterations = 5 * (4 * 256 * 256 * 512 + 2 * 256**3)
    assert OPTIMIZERS["muon"].flops(shard()) == 19 * elements + iterations
    assert OPTIMIZERS["muon"].flops(shard("embed", Param("VD"))) == 19 * 500 * 64


def test_exchanges_of_an_update() -> None:
    """Muon's momentum is padded to 8 layers; Adafactor sums its column, its row, and the row's mean."""
    momentum = [(one.axes, one.elements, one.times) for one in OPTIMIZERS["muon"].exchanges(shard())]
    assert momentum == [(("fsdp",), 8 * 64 * 256, 2), (("tensor",), 8 * 64 * 256, 2)]
    squares = [(one.axes, one.elements) for one in OPTIMIZERS["adafactor"].exchanges(shard())]
    assert squares == [(("fsdp",), 4 * 256), (("tensor",), 4 * 64), (("fsdp",), 4)]
    assert OPTIMIZERS["adamw"].exchanges(shard()) == OPTIMIZERS["lion"].exchanges(shard()) == []


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_adafactor_refuses_8_bits(dtype: str) -> None:
    with pytest.raises(LayoutError, match=f"optimizer_dtype = {dtype} with optimizer = adafactor, which"):
        OPTIMIZERS["adafactor"].check_dtype(dtype)
    for name in ("adamw", "lion", "muon"):
        OPTIMIZERS[name].check_dtype(dtype)


def test_adafactor_refuses_parts_of_layers() -> None:
    """Norms [L, D] of 128 layers have a row and a column; those of 32 layers are kept whole."""
    model = load_model("llama-3-8b")
    OPTIMIZERS["adafactor"].check_stages(model)
    with pytest.raises(LayoutError, match=r"averages over its 128 layers, of which a stage has a part"):
        OPTIMIZERS["adafactor"].check_stages(replace(model, num_layers=128))
