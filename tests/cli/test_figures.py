"""mw model, mw collective: published figures through the command line."""

import json

import pytest

from meshwright.cli.collective import parse_collective
from meshwright.cli.main import main
from meshwright.errors import NotationError
from meshwright.notation.mesh import Mesh


def document(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_model(capsys):
    found = document(capsys, "model", "llama-3-70b", "--seq-len", "4096", "--kv-dtype", "int8")
    assert found["params"].keys() >= {"total", "active", "mlp", "attention", "vocab"}
    assert found["params"]["total"] == 70_553_706_496
    assert found["train_flops_per_token"] == 3 * found["forward_flops_per_token"]
    assert found["kv_bytes_per_token"] == 2 * 80 * 8 * 128


def test_model_in_words(capsys):
    assert main(["model", "tiny"]) == 0
    assert "at T = 128; causal attention counts half" in capsys.readouterr().out


def test_model_by_component(capsys):
    found = document(capsys, "model", "deepseek-v3", "--seq-len", "8192")
    params, flops = found["params"], found["forward_flops"]
    parts = ("mlp", "attention", "vocab", "norms", "router")
    assert sum(params[part] for part in parts) == params["total"] > params["active"]
    assert sum(flops.values()) == found["forward_flops_per_token"]
    assert found["kv_bytes"] == 8192 * found["kv_bytes_per_token"] == 8192 * 61 * 576 * 2
    assert found["flops_per_byte"]["prefill"]["scores"] == 8192 / 2
    assert main(["model", "deepseek-v3"]) == 0
    text = capsys.readouterr().out
    assert "8 of E = 256 experts and 1 shared per token, M = 2,048; dense layers: 3" in text
    assert "latent attention: Q = 1,536, R = 512, heads of 128 + 64" in text


def test_local_layers_in_words(capsys):
    assert main(["model", "gemma-3-1b"]) == 0
    assert "22 of 26 layers attend to the last 512 positions" in capsys.readouterr().out


def test_all_models_are_listed(capsys):
    listed = document(capsys, "model")["models"]
    assert len(listed) >= 40
    assert {"name", "params", "num_layers", "d_model", "max_seq_len"} <= listed[0].keys()
    assert main(["model"]) == 0
    text = capsys.readouterr().out
    assert all(model["name"] in text for model in listed)


def test_model_longer_than_its_context(capsys):
    assert main(["model", "tiny", "--seq-len", "129"]) == 0
    assert "warning: 129 positions exceed tiny's context of 128" in capsys.readouterr().err


def test_a_model_is_changed_on_the_fly(capsys):
    whole = document(capsys, "model", "llama-3-70b")
    more = document(capsys, "model", "llama-3-70b", "--set", "num_kv_heads=64")
    assert more["kv_bytes_per_token"] == 8 * whole["kv_bytes_per_token"]
    assert more["kv_bytes_per_token"] == whole["kv_bytes_per_token_without_gqa"]


CUBE = ["--mesh", "X=4,Y=4,Z=4", "--dims", "B=1024,D=4096", "--dtype", "bf16", "--hardware", "v4p:4x4x4"]


@pytest.mark.parametrize(
    ("written", "microseconds", "num_bytes"),
    [
        # How to Scale Your Model, "Sharded Matrices", question 2: W = 9e10 bytes/s both ways.
        ("AllGather_X([B_X, D_Y])", 2 * 1024 * 4096 / 4 / 9e4, 2 * 1024 * 4096 // 4),
        ("AllGather_XY([B_X, D_Y])", 2 * 1024 * 4096 / 2 / 9e4, 2 * 1024 * 4096),
        ("AllReduce_Z([B_X, D_Y]{U_Z})", 2 * 2 * 1024 * 4096 / 16 / 9e4, 2 * 1024 * 4096 // 16),
        ("ReduceScatter_{X,D}([B, D]{U_X})", 2 * 1024 * 4096 / 9e4, 2 * 1024 * 4096),
        ("AllToAll_X([B_X, D] -> [B, D_X])", 2 * 1024 * 4096 / 4 / 9e4, 2 * 1024 * 4096),
    ],
)
def test_collective(written: str, microseconds: float, num_bytes: int, capsys):
    found = document(capsys, "collective", written, *CUBE)
    assert found.keys() >= {"seconds", "bound", "bytes", "hops"}
    assert found["seconds"] == pytest.approx(microseconds * 1e-6)
    assert (found["bytes"], found["bound"]) == (num_bytes, "bandwidth")


def test_a_ring_used_one_way_is_slower_by_two_without_its_last_hop(capsys):
    both = document(capsys, "collective", "AllGather_X([B_X, D])", *CUBE)
    one = document(capsys, "collective", "AllGather_X([B_X, D])", *CUBE, "--one-way")
    assert one["seconds"] == pytest.approx(2 * both["seconds"] * 3 / 4)
    assert (both["hops"], one["hops"]) == (2, 3)


def test_collective_in_words(capsys):
    assert main(["collective", "AllGather_X([B_X, D])", *CUBE]) == 0
    assert capsys.readouterr().out == (
        "AllGather_{X} [B_X, D] -> [B, D]: 93.2 us, bound by bandwidth on ici; V = 8.39 MB, 2 hops\n"
    )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            "AllGater_X([B_X])",
            "'AllGater' at character 1 of 'AllGater_X([B_X])' is unknown; did you",
        ),
        ("AllGather_X([B_X)", "expected ',' at character 5 of '[B_X'"),
        ("AllGather_X [B_X]", "is not a collective at character 13; write AllGather_X"),
        ("AllGather([B_X])", "is not a collective at character 10"),
        ("AllGather_W([B_X])", "mesh axis W is unknown; this mesh has X, Y, Z"),
        ("AllGather_Y([B_X])", "from [B_X] to [B_X] it takes no step at all"),
        ("AllGather_X([B_XY])", "it takes AllGather_{X,Y} [B_XY] -> [B], then Slice_{Y} [B] -> [B_Y]"),
        ("AllToAll_X([B_X, D])", "does not name its result"),
        ("ReduceScatter_X([B]{U_X})", "names no dimension to scatter over"),
        ("AllToAll_X([B_X, D] -> [B, F_X])", "have different dimensions"),
    ],
)
def test_a_collective_that_cannot_be(written: str, message: str):
    with pytest.raises(NotationError) as caught:
        parse_collective(written, Mesh({"X": 4, "Y": 4, "Z": 4}))
    assert message in str(caught.value)


def test_sizes_that_are_missing_or_do_not_divide(capsys):
    options = ["--mesh", "X=8", "--hardware", "h100:8", "--dims"]
    assert main(["collective", "AllGather_X([B_X, D])", *options, "B=8"]) == 2
    assert "the size of D is missing" in capsys.readouterr().err
    assert main(["collective", "AllGather_X([B_X, D])", *options, "B=12,D=8"]) == 2
    assert "B = 12 does not divide over X = 8" in capsys.readouterr().err
