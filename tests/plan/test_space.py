"""What a search reads off many layouts at once, against each of them priced alone."""

from dataclasses import replace
from random import Random

import pytest

from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.candidate import Candidate
from meshwright.plan.given import parse_conditions
from meshwright.plan.rank import TIE
from meshwright.plan.space import Considered, Space
from meshwright.plan.train import price

_NUM_PRICED, _NUM_PRICED_SLOWLY = 30, 300
# Its terms are added in another order.
_ROUNDING = 1e-9


def _sample(
    model: str, hardware: str, workload: Workload, base: Layout, given: str = "", number: int = _NUM_PRICED
) -> list[tuple[Considered, Candidate]]:
    config, machine = load_model(model), load(hardware)
    space = Space(config, machine, workload, base, given=parse_conditions(given))
    choices = list(space.choices(space.meshes()))
    some = Random(0).sample(choices, min(number, len(choices)))
    return [(choice, price(config, machine, workload, choice.layout)) for choice in some]


@pytest.mark.parametrize(
    ("model", "hardware", "workload", "base", "given"),
    [
        pytest.param(
            "llama-3-8b",
            "h100:2x8",
            Workload(200, 4096),
            Layout.of(),
            "",
            id="a batch of 8 * 25",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama-3-8b", "2*v5e:4x2", Workload(32, 4096), Layout.of(context_method="ring"), "", id="slices"
        ),
        pytest.param(
            "llama-3-8b",
            "h100:1x8",
            Workload(64, 4096),
            Layout.of(matmul_dtype="fp8"),
            "",
            id="casts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama-3-8b",
            "h100:1x8",
            Workload(64, 4096),
            Layout.of(),
            "offload=true",
            id="offload",
            marks=pytest.mark.slow,
        ),
        pytest.param("llama-3-8b", "v6e:2x2", Workload(64, 8192), Layout.of(), "", id="offload on TPUs"),
        pytest.param(
            "gemma-2-9b", "v5p:2x4x4", Workload(32, 8192), Layout.of(), "", id="windows and a torus"
        ),
        pytest.param("gemma-2b", "v5e:2x4", Workload(16, 8192), Layout.of(), "tensor=1", id="one KV head"),
        pytest.param("mixtral-8x7b", "h100:1x8", Workload(64, 4096), Layout.of(), "context=1", id="experts"),
        pytest.param(
            "mixtral-8x7b",
            "h100:2x8",
            Workload(64, 4096),
            Layout.of(),
            "",
            id="experts on two hosts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "deepseek-v2-lite",
            "h100:1x8",
            Workload(32, 4096),
            Layout.of(),
            "",
            id="experts after dense layers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama-3-8b", "cpu:8", Workload(16, 1024), Layout.of(compute_dtype="f32"), "", id="measured"
        ),
    ],
)
def test_a_choice_has_the_memory_and_the_time_of_its_layout(
    model: str, hardware: str, workload: Workload, base: Layout, given: str
) -> None:
    for choice, candidate in _sample(model, hardware, workload, base, given):
        assert choice.bytes_per_chip == candidate.memory.total, choice.layout
        assert choice.host_bytes == candidate.memory.host, choice.layout
        assert choice.seconds == pytest.approx(candidate.step_seconds, rel=_ROUNDING), choice.layout
        assert choice.least_seconds <= choice.seconds * (1 + _ROUNDING)


@pytest.mark.parametrize(
    ("model", "hardware", "software", "words"),
    [
        ("llama-3-8b", "h100:1x8", None, {}),
        ("llama-3-8b", "h100:1x4", "nanotron", {}),
        ("llama-3-8b", "h100:1x4", None, {"weights_dtype": "nf4"}),
        ("mixtral-8x7b", "h100:1x4", None, {}),
        pytest.param("llama-3-8b", "2*v5e:4x2", None, {"context_method": "ring"}, marks=pytest.mark.slow),
        pytest.param("gemma-2-9b", "v5p:2x4x4", None, {}, marks=pytest.mark.slow),
        pytest.param("mixtral-8x7b", "h100:2x8", "megatron-core", {}, marks=pytest.mark.slow),
        pytest.param("deepseek-v2-lite", "v5p:2x2x2", None, {}, marks=pytest.mark.slow),
        pytest.param("gpt2", "v5e:4x4", None, {}, marks=pytest.mark.slow),
        pytest.param("qwen3-next-80b-a3b", "h100:2x8", None, {}, marks=pytest.mark.slow),
        pytest.param("llama-3-8b", "cpu:8", None, {"compute_dtype": "f32"}, marks=pytest.mark.slow),
    ],
)
def test_without_zero_no_pass_is_longer(
    model: str, hardware: str, software: str | None, words: dict[str, object]
) -> None:
    """The bounds of `Unsharded` are below those of families, and near where ZeRO changes little."""
    config, machine = load_model(model), load(hardware)
    if "weights_dtype" in words:
        config = replace(config, lora_rank=16)
    space = Space(
        config, machine.running(software) if software else machine, Workload(64, 2048), Layout.of(**words)
    )
    shares = [group.unsharded_seconds / group.least_seconds for group in space.groups(space.meshes())]
    assert max(share.max() for share in shares) <= 1 + _ROUNDING
    assert max(share.max() for share in shares) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "hardware", "workload", "context_method"),
    [
        ("llama-3-8b", "h100:2x8", Workload(200, 4096), "allgather"),
        ("llama-3-8b", "2*v5e:4x2", Workload(32, 4096), "ring"),
        ("mixtral-8x7b", "h100:2x8", Workload(64, 4096), "allgather"),
        ("deepseek-v2-lite", "v5p:2x2x2", Workload(32, 4096), "allgather"),
        ("gpt-oss-20b", "h100:1x8", Workload(32, 4096), "ring"),
        ("gpt2", "v5e:4x4", Workload(64, 1024), "allgather"),
        ("llama-3.1-405b", "h100:64x8", Workload(256, 8192), "allgather"),
    ],
)
def test_axes_that_a_mesh_lacks_change_nothing(
    model: str, hardware: str, workload: Workload, context_method: str
) -> None:
    """A mesh is recorded with others that have more axes."""
    base = Layout.of(context_method=context_method)
    for choice, candidate in _sample(model, hardware, workload, base, number=_NUM_PRICED_SLOWLY):
        assert choice.bytes_per_chip == candidate.memory.total, choice.layout
        assert choice.seconds == pytest.approx(candidate.step_seconds, rel=_ROUNDING), choice.layout


def test_meshes_give_the_same_choices_together_and_alone() -> None:
    config, machine, workload = load_model("llama-3-8b"), load("h100:1x8"), Workload(64, 4096)
    space = Space(config, machine, workload, Layout.of())
    together = {choice.layout: choice.seconds for choice in space.choices(space.meshes())}
    alone = {c.layout: c.seconds for mesh in space.meshes() for c in space.choices([mesh])}
    assert together.keys() == alone.keys()
    assert all(seconds == pytest.approx(alone[layout], rel=_ROUNDING) for layout, seconds in together.items())


def test_hosts_of_several_nodes_launch_the_norm_slowly_in_both_prices() -> None:
    config, workload, layout = load_model("llama-2-7b"), Workload(128, 4096), Layout.of(fsdp=32)
    machine = load("h100:4x8").running("pytorch-eager")
    choice = next(iter(Space(config, machine, workload, Layout.of()).choices([layout])))
    alone = price(config, machine, workload, choice.layout)
    assert choice.seconds == pytest.approx(alone.step_seconds, rel=_ROUNDING)


def test_tokens_of_groups_are_gathered_where_rows_travel_no_farther() -> None:
    config, machine, workload = load_model("mixtral-8x7b"), load("h100:1x8"), Workload(64, 4096)

    def degrees(given: str) -> dict[bool, set[int]]:
        space, found = Space(config, machine, workload, Layout.of(), given=parse_conditions(given)), {}
        for mesh in space.meshes():
            found.setdefault(mesh.schedule.grouped, set()).add(mesh.degree("expert"))
        return found

    assert degrees("") == {False: {1, 2, 4, 8}, True: {2}}
    assert degrees("grouped=false") == {False: {1, 2, 4, 8}}
    assert degrees("grouped=true") == {True: {2, 4, 8}}


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("num_sequences", [7, 12, 64])
def test_meshes_without_steps_alone_are_left_out_for_their_data_ranks(
    model: str, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Space(load_model(model), load("h100:2x8"), Workload(num_sequences, 4096), Layout.of())
    left = [str(mesh) for mesh in space.meshes()]
    monkeypatch.setattr(Space, "_divides", lambda *_: True)
    meshes = list(space.meshes())
    assert all(mesh.num_batch_shards == mesh.data * mesh.fsdp for mesh in meshes)
    assert left == [str(mesh) for mesh in meshes if num_sequences % mesh.num_batch_shards == 0]
    assert not any(space.microbatches(mesh) for mesh in meshes if str(mesh) not in left)


@pytest.mark.parametrize(
    ("model", "hardware"),
    [("llama-3-8b", "h100:1x8"), pytest.param("gemma-2-9b", "v5p:2x2x4", marks=pytest.mark.slow)],
)
def test_sequence_parallelism_costs_next_to_nothing(model: str, hardware: str) -> None:
    """So a search leaves out the form without it, unless a condition asks for it.

    On TPUs it may cost 3%, since XLA scatters over two dimensions of a torus by an all-reduce.
    """
    most = 1.03 if load(hardware).chip.kind == "tpu" else 1 + TIE
    space = Space(load_model(model), load(hardware), Workload(64, 4096), Layout.of())
    split = [mesh for mesh in space.meshes() if mesh.word("sequence_parallel")]
    assert len(split) > 5
    for mesh in split:
        whole = mesh.replace(sequence_parallel=False)
        without = {_without_mesh(choice): choice for choice in space.choices([whole])}
        for choice in space.choices([mesh]):
            if other := without.get(_without_mesh(choice)):
                assert choice.least_seconds <= most * other.least_seconds, mesh
                assert choice.bytes_per_chip <= other.bytes_per_chip, mesh


def _without_mesh(choice: Considered) -> tuple[object, ...]:
    return choice.microbatches, choice.schedule, choice.interleave, choice.remat, choice.offload


def test_sequence_parallelism_is_left_out_where_that_is_asked_for() -> None:
    config, machine, workload = load_model("llama-3-8b"), load("h100:1x8"), Workload(64, 4096)
    space = Space(config, machine, workload, Layout.of(), given=parse_conditions("sequence_parallel=false"))
    meshes = list(space.meshes())
    assert any(mesh.tensor > 1 for mesh in meshes)
    assert not any(mesh.word("sequence_parallel") for mesh in meshes)
