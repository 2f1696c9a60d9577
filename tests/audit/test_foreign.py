"""Programs without a plan: what is read of their text, and how bad text is refused."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshwright
from meshwright.audit.facts.groups import DeviceGroups, inferred_mesh
from meshwright.audit.foreign import audit_file, audit_program
from meshwright.audit.hlo.read import parse_hlo
from meshwright.errors import AuditError, HardwareError
from meshwright.notation.mesh import Mesh

P = PartitionSpec

# Gathered twice, in a loop of ten turns: w over pairs of neighbours; then summed over every other device.
PROGRAM = """\
HloModule jit_f, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (w: bf16[128,64], x: bf16[8,256]) -> f32[8,64] {
  %w = bf16[128,64]{1,0} parameter(0), sharding={devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}, metadata={op_name="w"}
  %x = bf16[8,256]{1,0} parameter(1), sharding={devices=[2,1,2]<=[4] last_tile_dim_replicate}, metadata={op_name="x"}
  %whole = bf16[256,64]{1,0} all-gather(%w), dimensions={0}, replica_groups={{0,1},{2,3}}, metadata={op_name="jit(f)/w"}
  %y = f32[8,64]{1,0} dot(%x, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/y"}
  ROOT %z = f32[8,64]{1,0} all-reduce(%y), replica_groups={{0,2},{1,3}}, to_apply=%add, metadata={op_name="jit(f)/z"}
}
"""  # noqa: E501


def test_the_keys_are_those_of_a_plans_audit() -> None:
    found = audit_program(parse_hlo(PROGRAM), "v5e", Mesh({"data": 2, "tensor": 2}))
    gather, total = found["emitted"]
    assert gather == {
        "op": "all_gather",
        "axes": ["tensor"],
        "tensor": "w",
        "direction": "forward",
        "bytes": 256 * 64 * 2,
        "count": 1,
        "instruction": "whole",
        "source": "jit(f)/w",
        "dtype": "bf16",
        "group_size": 2,
        "seconds": gather["seconds"],
        "note": "",
        "where": "",
        "overlaps": None,
        "exposed_seconds": None,
        "conditional": False,
    }
    assert (total["op"], total["axes"], total["bytes"]) == ("all_reduce", ["data"], 8 * 64 * 4)
    assert found["bytes"] == {"planned": None, "compiled": 256 * 64 * 2 + 8 * 64 * 4}
    assert found["flops"] == {"planned": None, "compiled": 2 * 8 * 256 * 64}
    assert found["seconds"] == pytest.approx(gather["seconds"] + total["seconds"])
    assert (found["devices"], found["hardware"], found["not_understood"]) == (4, "v5e:4", [])


def test_seconds_grow_with_a_slower_machine() -> None:
    program = parse_hlo(PROGRAM.replace("64", "64000"))
    fast, slow = (audit_program(program, spec)["seconds"] for spec in ("v5p:2x2x1", "v5e:2x2"))
    assert slow > 1.5 * fast


def test_without_mesh_and_hardware_groups_have_sizes_and_no_seconds() -> None:
    found = audit_program(parse_hlo(PROGRAM))
    assert [(one["axes"], one["group_size"], one["seconds"]) for one in found["emitted"]] == [
        ([], 2, None),
        ([], 2, None),
    ]
    assert (found["seconds"], found["mesh"]) == (None, None)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "%new = f32[8,64]{1,0} teleport(%y)",
            "new: opcode teleport is unknown; its FLOPs and bytes are not counted",
        ),
        ("%new = f32[8,64]{1,0} send(%y)", "new: send communicates; its bytes are not counted"),
        (
            "%new = f32[8,64]{1,0} all-reduce(%y), replica_groups=spiral, to_apply=%add",
            "new: replica_groups=spiral: this form is unknown",
        ),
        (
            '%new = f32[8,64]{1,0} custom-call(%y), custom_call_target="mosaic"',
            "new: custom call mosaic; its FLOPs and bytes are not counted",
        ),
    ],
)
def test_what_is_not_understood_is_listed_and_differs(line: str, problem: str) -> None:
    found = audit_program(parse_hlo(PROGRAM.replace("  ROOT %z", f"  {line}\n  ROOT %z")))
    assert found["not_understood"] == [problem]
    assert (found["verdict"], len(found["emitted"])) == ("differs", 2)


def test_hardware_and_mesh_have_as_many_devices_as_the_program() -> None:
    program = parse_hlo(PROGRAM)
    with pytest.raises(AuditError, match="v5e:2x4 has 8 chips and the program 4 devices; fits: v5e:4"):
        audit_program(program, "v5e:2x4")
    message = "the mesh data=2,tensor=4 has 8 devices and the program 4; the axes must multiply to 4"
    with pytest.raises(AuditError, match=message):
        audit_program(program, None, Mesh({"data": 2, "tensor": 4}))
    with pytest.raises(HardwareError, match="v9"):
        audit_program(program, "v9")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "not a text file: byte 0 is not UTF-8"),
        (b"", "the text is not an HLO module: it has no ENTRY computation"),
        (b"module @jit_f attributes {} {\n}\n", "this is MLIR, not compiled HLO"),
        (PROGRAM[:760].encode(), "the text is cut short: it ends inside the computation main"),
        (PROGRAM.replace("dot(", "").encode(), "HLO instruction y without an opcode"),
        (
            b"HloModule f, num_partitions=8\n\nENTRY main {\n  a = f32[8]{0} parameter(0)\n"
            b'  ROOT b = f32[8]{0} custom-call(a), custom_call_target="Sharding", sharding={replicated}\n}\n',
            "not partitioned yet: b is a custom call of Sharding, which the partitioner removes",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "program.txt"
    file.write_bytes(content)
    with pytest.raises(AuditError, match=message) as caught:
        audit_file(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match=r"none\.txt: cannot be read: No such file or directory"):
        audit_file(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        ([((0, 1), (2, 3), (4, 5), (6, 7))], [4, 2]),
        ([((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))], [2, 4]),
        ([((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 2), (1, 3), (4, 6), (5, 7))], [2, 2, 2]),
        ([((0, 1, 4, 5), (2, 3, 6, 7))], [2, 2, 2]),
        ([], [8]),
    ],
)
def test_axes_are_inferred_where_no_mesh_is_given(groups: list, sizes: list[int]) -> None:
    mesh = inferred_mesh([DeviceGroups(one) for one in groups], 8)
    assert list(mesh.sizes.values()) == sizes


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def test_a_jitted_function_is_audited_on_the_mesh_of_its_arguments() -> None:
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(_mesh(), P("data", "tensor")))
    found = meshwright.audit(lambda x: (x @ x).sum(), x)
    assert found["mesh"] == {"data": 2, "tensor": 4}
    assert {axis for one in found["emitted"] for axis in one["axes"]} == {"data", "tensor"}


def test_a_function_that_does_not_compile_says_why() -> None:
    def product(x: jax.Array) -> jax.Array:
        return x @ jnp.ones((3, 3))

    with pytest.raises(AuditError, match=r"product does not compile: .*dot_general") as caught:
        meshwright.audit(product, jax.ShapeDtypeStruct((4, 4), "float32"))
    assert "\n" not in str(caught.value)


REPLICAS = """HloModule step, replica_count=4
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024] parameter(0)
  ROOT %y = f32[1024] all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


def test_a_program_of_replicas_is_read_as_one_of_partitions() -> None:
    """As pmap and torch/XLA make them."""
    found = audit_program(parse_hlo(REPLICAS), "v5e", Mesh({"data": 2, "tensor": 2}))
    assert (found["devices"], found["not_understood"]) == (4, [])
    assert [(one["op"], one["axes"], one["bytes"]) for one in found["emitted"]] == [
        ("all_reduce", ["tensor"], 4096)
    ]


def test_replicas_of_partitions_are_never_a_match() -> None:
    found = audit_program(parse_hlo(REPLICAS.replace("replica_count=4", "replica_count=2, num_partitions=2")))
    assert found["verdict"] == "differs"
    assert "2 replicas of 2 partitions" in found["not_understood"][0]
