"""mw shard: its document, its board, and what it refuses."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.cli.main import main
from meshwright.cli.shard import default_hardware, parse_shard
from meshwright.errors import HardwareError, NotationError
from meshwright.notation.mesh import Mesh

PRODUCT = "A[I_X, J] . B[J_X, K] -> C[I_X, K]"
EXAMPLE = ["shard", PRODUCT, "--mesh", "X=4,Y=2", "--dims", "I=1024,J=4096,K=4096"]
STRATEGY_KEYS = {
    "name", "steps", "flops_per_device", "seconds_compute", "seconds_comms", "seconds", "bytes_per_device",
}  # fmt: skip
STEP_KEYS = {"op", "axes", "operand", "result", "bytes", "seconds"}


def document(capsys, *arguments: str, code: int = 0) -> dict:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_document_of_the_contract(capsys):
    found = document(capsys, *EXAMPLE, "--hardware", "v5e:4x2")
    best = found["strategies"][found["best"]]
    assert found["cases"] == {"X": 2, "Y": 1}
    assert all(one.keys() >= STRATEGY_KEYS for one in found["strategies"])
    assert all(step.keys() >= STEP_KEYS for one in found["strategies"] for step in one["steps"])
    assert best["seconds"] == min(one["seconds"] for one in found["strategies"])
    assert best["seconds_comms"] == pytest.approx(sum(step["seconds"] for step in best["steps"]))
    gather = next(one for one in found["strategies"] if one["name"] == "gather B over X")
    assert gather["steps"][0] == {
        "op": "all_gather",
        "axes": ["X"],
        "operand": "B[J_X, K]",
        "result": "B[J, K]",
        "bytes": 2 * 4096 * 4096,
        "seconds": pytest.approx(2 * 4096 * 4096 * 3 / 4 / 4.5e10),
        "windowed": False,
    }
    assert gather["flops_per_device"] == 2 * 1024 * 4096 * 4096 / 4


def test_the_board(capsys):
    assert main([*EXAMPLE, "--hardware", "v5e:4x2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "A[I_X, J] . B[J_X, K] -> C[I_X, K]"
    assert lines[1] == "  X=4, Y=2 on v5e:4x2; I=1,024, J=4,096, K=4,096; bf16"
    assert "  B[J_X, K]  8.39 MB per device  2 copies of each block" in lines
    case = "  X: case 2, splits I of A and J of B: an array can use an axis once, so one operand is resharded"
    assert case in lines
    assert any(line.startswith("  cheapest: ") for line in lines)
    assert any(line.startswith("    Multiply ") for line in lines)
    assert any(line.startswith("     t = matmul ") for line in lines)
    assert lines[-1].startswith("  against the next: ")


def test_an_open_output(capsys):
    call = ["shard", "A[I, J_X] . B[J_X, K]", "--mesh", "X=8", "--dims", "I=64,J=64,K=64"]
    found = document(capsys, *call, "--hardware", "h100:8")
    assert found["strategies"][-1]["out"] == "C[I, K]{U_X}"
    assert {one["out"] for one in found["strategies"]} >= {"C[I_X, K]", "C[I, K_X]"}
    assert main([*call, "--hardware", "h100:8"]) == 0
    assert "-> C[I, K] of any sharding" in capsys.readouterr().out


def test_a_reshard(capsys):
    call = [
        "shard",
        "A[I_X, J] -> A[I, J_X]",
        "--mesh",
        "X=8",
        "--dims",
        "I=1024,J=4096",
        "--hardware",
        "h100:8",
    ]
    found = document(capsys, *call)
    (one,) = found["strategies"]
    assert found["best"] == 0 and one.keys() >= STRATEGY_KEYS
    assert [step["op"] for step in one["steps"]] == ["all_to_all"]
    assert one["bytes_per_device"] == 2 * (1024 * 4096 * 2 // 8)
    assert main(call) == 0
    assert "  AllToAll_X  A[I_X, J] -> A[I, J_X]  8.39 MB" in capsys.readouterr().out


def test_nothing_to_reshard(capsys):
    assert main(["shard", "A[I_X] -> A[I_X]", "--mesh", "X=8", "--dims", "I=64", "--hardware", "h100:8"]) == 0
    assert "nothing to send" in capsys.readouterr().out


def test_a_memory_limit_that_nothing_fits(capsys):
    found = document(capsys, *EXAMPLE, "--memory-limit", "1k", code=1)
    assert found["best"] is None and found["strategies"]
    assert main([*EXAMPLE, "--memory-limit", "1k"]) == 1
    assert "none fits 1 kB per device; the first is the fastest" in capsys.readouterr().out


def test_throughput(capsys):
    found = document(capsys, *EXAMPLE, "--objective", "throughput")
    times = [one["seconds_pipelined"] for one in found["strategies"]]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            "A[I, J] . B[J, K] -> C[I_X, K_X]",
            "the wanted output is impossible: mesh axis X is used twice at character 10 of 'C[I_X, K_X]'; "
            "an array may use each axis once (each device would hold only a block of the diagonal)",
        ),
        ("A[I, J] . B[J, K] -> C[I, ", "expected a dimension at character"),
        ("A[I, J] . B[J, K] . C[K, L]", "is neither a product of two arrays nor a reshard; write"),
        ("A[Rows, J] . B[J, K]", "A[Rows, J]: dimension Rows of a product must be one letter"),
        ("A[I_W, J] . B[J, K]", "mesh axis W is unknown; this mesh has X, Y"),
        ("A[I, J] . B[J, K] -> C[I]", "'IJ,JK->I': K is in only one operand and not in the output"),
        ("A[I, J] . B[J, L]", "the size of L is missing"),
    ],
)
def test_what_is_refused_in_one_line(written: str, message: str, capsys):
    assert main(["shard", written, "--mesh", "X=4,Y=2", "--dims", "I=64,J=64,K=64,Rows=64"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_products_may_be_written_with_a_dot_and_its_letter():
    for text in (
        "A[I, J_X] . B[J_X, K]",
        "A[I, J_X]·B[J_X, K]",
        "A[I, J_X] ._J B[J_X, K]",
        "A[I, J_X] @ B[J_X, K]",
    ):
        operands, out = parse_shard(text)
        assert [str(array) for array in operands] == ["A[I, J_X]", "B[J_X, K]"] and out is None
    operands, out = parse_shard("[I, J_X] . [J_X, K] -> [I, K]")
    assert [str(array) for array in (*operands, out)] == ["A[I, J_X]", "B[J_X, K]", "C[I, K]"]
    operands, _ = parse_shard("A[I]{U_X} . B[I]")
    assert str(operands[0]) == "A[I]{U_X}"
    with pytest.raises(NotationError):
        parse_shard("A[I] + B[I]")


def test_the_default_hardware_is_shaped_like_the_mesh():
    assert default_hardware(Mesh({"X": 4, "Y": 2})).spec == "v5p:4x2x1"
    with pytest.raises(HardwareError, match="has 4 axes and v5p a 3D torus; give --hardware"):
        default_hardware(Mesh(dict.fromkeys("WXYZ", 2)))


def test_a_drawing(tmp_path: Path, capsys):
    path = tmp_path / "shard.svg"
    assert main([*EXAMPLE, "--svg", str(path)]) == 0
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert f"wrote {path}" in capsys.readouterr().err
    path.unlink()
    reshard = [
        "shard",
        "A[I_X, J] -> A[I, J_X]",
        "--mesh",
        "X=4,Y=2",
        "--dims",
        "I=64,J=64",
        "--svg",
        str(path),
    ]
    assert main(reshard) == 0 and path.exists()


def test_run_compares_with_what_xla_emits(capsys):
    call = ["shard", PRODUCT, "--mesh", "X=2,Y=2", "--dims", "I=8,J=8,K=8"]
    found = document(capsys, *call, "--run")
    assert found["max_abs_error"] == 0 and found["emitted"]
    assert {pair["status"] for pair in found["pairs"]} <= {"match", "equivalent"}


CHAIN = ["shard", "x[B_X, D] . w[D_X, F] -> h[B_X, F]; h . v[F, D_X] -> y[B_X, D]", "--mesh", "X=4"]
CHAIN_DIMS = ["--dims", "B=64,D=64,F=64"]
PASS_KEYS = {
    "steps", "seconds_compute", "seconds_critical", "seconds_ahead", "seconds_deferred", "seconds",
    "seconds_overlapped",
}  # fmt: skip


def test_a_chain_and_its_gradients(capsys):
    found = document(capsys, *CHAIN, *CHAIN_DIMS, "--backward")
    assert found.keys() == {"hardware", "bytes_per_device", "fits", "forward", "backward"}
    assert found["forward"].keys() == PASS_KEYS
    assert [step["op"] for step in found["forward"]["steps"]] == ["all_gather", "multiply"] * 2
    first, *_ = found["forward"]["steps"]
    assert (first["operands"], first["result"]) == (["w[D_X, F]"], "w[D, F]")
    assert (first["timing"], first["bytes"]) == ("ahead", 2 * 64 * 64)
    gathered = [step for step in found["backward"]["steps"] if step["op"] == "all_gather"]
    assert [step["repeats"] for step in gathered] == [3, 1]
    assert document(capsys, *CHAIN, *CHAIN_DIMS).keys() == {
        "hardware", "bytes_per_device", "fits", "forward",
    }  # fmt: skip


def test_the_board_of_a_chain(capsys):
    assert main([*CHAIN, *CHAIN_DIMS, "--backward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  X=4 on v5p:4x1x1; B=64, D=64, F=64; bf16"
    assert any(line.startswith("    1.  w[D, F] = AllGather_X(w[D_X, F])  (ahead of time)") for line in lines)
    assert [line.strip() for line in lines if line.endswith("ward")] == ["forward", "backward"]
    assert sum(line.startswith("     t = local ") for line in lines) == 2


def test_the_gradients_of_the_cheapest(capsys):
    found = document(capsys, *EXAMPLE, "--backward")
    assert found.keys() >= {"best", "strategies", "forward", "backward"}
    assert [step["result"] for step in found["backward"]["steps"]][-1] == "dA[I_X, J]"
    assert main([*EXAMPLE, "--backward"]) == 0
    assert "  backward\n    1.  dC[I_X, K] = ..." in capsys.readouterr().out


def test_run_compares_the_gradients_too(capsys):
    call = ["shard", PRODUCT, "--mesh", "X=2,Y=2", "--dims", "I=8,J=8,K=8", "--run", "--backward"]
    found = document(capsys, *call)
    assert found["max_abs_error"] == 0 and found["gradient_max_abs_errors"] == [0, 0]
    assert found["gradient_emitted"]
    assert main(call) == 0
    assert "and of the gradients of both operands from the dense ones 0 and 0" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--run"], ["--svg", "x.svg"]])
def test_what_a_chain_does_not_have(option: list[str], capsys):
    assert main([*CHAIN, *CHAIN_DIMS, *option]) == 2
    assert f"{option[0]}: takes one product or reshard, not a chain" in capsys.readouterr().err


BLOCK = ["shard", "x[B, D] . w[D, F] -> h; h . v[F, D] -> y[B, D]"]
BLOCK_DIMS = ["--mesh", "X=4", "--dims", "B=128,D=8192,F=32768", "--hardware", "v5e:2x2"]


def test_the_shardings_of_a_chain_are_searched(capsys):
    """How to Scale Your Model, "Sharded Matrices", question 7: F is split, and only y is reduced."""
    call = [*BLOCK, *BLOCK_DIMS, "--memory-limit", "300M"]
    found = document(capsys, *call, "--search", "x,w,v,y")
    assert found["arrays"] == ["x[B, D]", "w[D, F_X]", "v[F_X, D]", "y[B_X, D]"]
    assert found["fits"] and 2 * 2**28 / 2 <= found["bytes_per_device"] <= 300e6
    assert found["forward"]["seconds"] == pytest.approx(359e-6, rel=0.01)
    assert document(capsys, *call, "--search", "w,v")["forward"]["seconds"] == pytest.approx(377e-6, rel=0.01)
    whole = document(capsys, *call, code=1)
    assert not whole["fits"] and whole["bytes_per_device"] > 2**30
    assert main(call) == 1
    assert "0 of 1 tried fit 300 MB per device" in capsys.readouterr().out
    assert main([*call, "--search", "u"]) == 2
    assert "--search 'u' is in no statement" in capsys.readouterr().err


def test_a_product_is_searched_as_a_chain(capsys):
    """Question 5 on one plane: the batch and F are split, and nothing moves."""
    where = ["--mesh", "X=4,Y=4", "--dims", "B=1024,D=8192,F=32768", "--hardware", "v5p:4x4x1"]
    found = document(capsys, "shard", "A[B, D] . W[D, F] -> C[B, F]", *where, "--search", "A,W,C")
    assert found["forward"]["seconds_critical"] == 0


def test_a_chain_that_fits_nowhere_names_the_fewest_bytes(capsys):
    """Question 7 with 100 MB: both matrices, split into four parts, have 268 MB a device."""
    written = "x[B, D] . w[D, F] -> h; h . v[F, D] -> y[B, D]"
    where = ["--mesh", "X=4", "--dims", "B=128,D=8192,F=32768", "--hardware", "v5e:2x2"]
    assert main(["shard", written, "--search", "w,v", "--memory-limit", "100M", *where, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and 2**28 <= found["bytes_per_device"] < 2**28 + 2**23


def test_a_reshard_has_no_gradient(capsys):
    assert main(["shard", "A[I_X] -> A[I]", "--mesh", "X=4", "--dims", "I=8", "--backward"]) == 2
    assert "--backward: takes a product or a chain, not a reshard" in capsys.readouterr().err


def test_one_array_is_counted(capsys):
    """How to Scale Your Model, "Sharded Matrices": the bytes of fp32[1024, 4096] over X = 4, Y = 2."""
    where = ["--mesh", "X=4,Y=2", "--dims", "I=1024,J=4096", "--dtype", "f32"]
    for array, block, copies in (("A[I_XY, J]", [128, 4096], 1), ("A[I, J_Y]", [1024, 2048], 4)):
        assert main(["shard", array, *where, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["block"], document["copies"], document["bytes"]) == (block, copies, 16 * 2**20)
        assert document["bytes_per_device"] == 4 * block[0] * block[1]
        assert document["bytes_of_all_devices"] == copies * document["bytes"]
    assert main(["shard", "A[I_XY, J]", *where]) == 0
    assert (
        "each of 8 devices holds a block [128, 4096], 2.1 MB; 1 device holds each block"
        in capsys.readouterr().out
    )
    assert main(["shard", "A[I_XY, J]", *where, "--hardware", "h100:1x8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["seconds_read"] == pytest.approx(document["bytes_per_device"] / 3.35e12)
    assert main(["shard", "A[I_X, J_Y]", "--mesh", "X=2,Y=2", "--dims", "I=4,J=6"]) == 0
    assert "\n  X=1, Y=0: A[2:4, 0:3]\n" in capsys.readouterr().out
    assert main(["shard", "A[I_XY, J]", *where, "--backward"]) == 2
    assert "takes a product or a reshard, not one array" in capsys.readouterr().err


def test_an_array_without_sizes_is_counted_in_letters(capsys):
    """How to Scale Your Model, "Sharded Matrices": A[I_XY, J] has local shape (I/(|X| |Y|), J)."""
    assert main(["shard", "A[I_XY, J]", "--mesh", "X=4,Y=8"]) == 0
    assert capsys.readouterr().out == (
        "A[I_XY, J] on X=4, Y=8\n"
        "each of 32 devices holds a block [I/32, J], 1/32 of the elements; 1 device holds each block\n"
        "all devices together hold A once\n"
        "for bytes and the time to read a block, give --dims I=4096,J=4096\n"
    )
    copied = document(capsys, "shard", "A[I_X, J, K]", "--mesh", "X=4,Y=8,Z=2")
    assert (copied["block"], copied["copies"], copied["arrays_of_all_devices"]) == (["I/4", "J", "K"], 16, 16)
    partial = document(capsys, "shard", "[I_X, J]{U_Y}", "--mesh", "X=4,Y=8")
    assert (partial["block"], partial["copies"], partial["arrays_of_all_devices"]) == (["I/4", "J"], 1, 8)


@pytest.mark.parametrize(
    "written", ["A[I_X, J] -> A[I, J]", "A[I_X, J] . B[J, K]", "A[I_X] . B[I_X] -> h; h[J] = exp(h)"]
)
def test_a_price_needs_sizes(written, capsys):
    assert main(["shard", written, "--mesh", "X=4"]) == 2
    error = capsys.readouterr().err
    assert "the price needs the sizes of the dimensions; give --dims I=512" in error
    assert main(["shard", "A[I_X]", "--mesh", "X=4", "--run"]) == 2
    assert "--run: needs the sizes" in capsys.readouterr().err
