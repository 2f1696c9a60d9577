"""Options of the compiler beyond its defaults."""

from dataclasses import replace

import jax
import pytest

from meshwright.layout import Layout
from meshwright.nn.start import compiler_options
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.platforms import CPU, PLATFORMS
from meshwright.platforms.platform import Options


def _ask(monkeypatch: pytest.MonkeyPatch, options: Options) -> None:
    """Lets the platform of CPUs have these options of training steps."""
    monkeypatch.setattr(
        compiler_options,
        "platform_of",
        lambda mesh: replace(CPU, compiler=replace(CPU.compiler, train_options=options)),
    )


def test_an_option_that_xla_does_not_know_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"xla_cpu_enable_fast_math": False}
    _ask(monkeypatch, known | {"xla_cpu_no_such_option": True})
    mesh = device_mesh(Layout.of())
    sentence = "XLA for cpu does not know xla_cpu_no_such_option: it is left out"
    with pytest.warns(UserWarning, match=sentence) as seen:
        assert compiler_options.compiler_options(mesh) == known
    assert [warning.filename for warning in seen] == [__file__]  # it names the caller


@pytest.mark.parametrize(("num_microbatches", "pipelined"), [(1, True), (2, False)])
def test_gpus_pipeline_no_gathers_in_a_loop_over_microbatches(
    num_microbatches: int, pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them XLA for GPUs kept the activations of the first turn: 155 GB, planned at 78."""
    monkeypatch.setattr(compiler_options, "platform_of", lambda mesh: PLATFORMS["gpu"])
    monkeypatch.setattr(compiler_options, "_are_known", lambda options, mesh: True)
    options = compiler_options.compiler_options(device_mesh(Layout.of()), {}, num_microbatches)
    assert options is not None
    assert options["xla_gpu_enable_pipelined_all_gather"] == pipelined


def test_the_defaults_do_on_cpus() -> None:
    assert compiler_options.compiler_options(device_mesh(Layout.of())) is None


def test_options_are_asked_for_under_the_steps_own_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step asks: under jax.set_mesh, where a program of one device alone is refused."""
    known = {"xla_cpu_enable_fast_math": True}
    _ask(monkeypatch, known)
    mesh = device_mesh(Layout.of(fsdp=4))
    with jax.set_mesh(mesh):
        assert compiler_options.compiler_options(mesh) == known
        assert compiler_options.compiler_options(mesh, {"xla_cpu_enable_fast_math": False}) == {
            "xla_cpu_enable_fast_math": False
        }
