"""What the compiler is asked beyond its defaults."""

import jax
import pytest

from meshwright.layout import Layout
from meshwright.nn.start import compiler_options
from meshwright.nn.start.device_mesh import device_mesh


def test_an_option_that_xla_does_not_know_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"xla_cpu_enable_fast_math": False}
    monkeypatch.setitem(compiler_options._OPTIONS, "cpu", known | {"xla_cpu_no_such_option": True})
    mesh = device_mesh(Layout.of())
    with pytest.warns(UserWarning, match="XLA for cpu does not know xla_cpu_no_such_option: it is left out"):
        assert compiler_options.compiler_options(mesh) == known


def test_the_defaults_do_on_cpus() -> None:
    assert compiler_options.compiler_options(device_mesh(Layout.of())) is None


def test_options_are_asked_for_under_the_steps_own_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a step asks: under jax.set_mesh, where a program of one device alone is refused."""
    known = {"xla_cpu_enable_fast_math": True}
    monkeypatch.setitem(compiler_options._OPTIONS, "cpu", known)
    mesh = device_mesh(Layout.of(fsdp=4))
    with jax.set_mesh(mesh):
        assert compiler_options.compiler_options(mesh) == known
        assert compiler_options.compiler_options(mesh, {"xla_cpu_enable_fast_math": False}) == {
            "xla_cpu_enable_fast_math": False
        }
