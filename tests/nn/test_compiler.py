"""What the compiler is asked beyond its defaults."""

import pytest

from meshwright.layout import Layout
from meshwright.nn import compiler
from meshwright.nn.mesh import device_mesh


def test_an_option_that_xla_does_not_know_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"xla_cpu_enable_fast_math": False}
    monkeypatch.setitem(compiler._OPTIONS, "cpu", known | {"xla_cpu_no_such_option": True})
    mesh = device_mesh(Layout.of())
    with pytest.warns(UserWarning, match="XLA for cpu does not know xla_cpu_no_such_option: it is left out"):
        assert compiler.compiler_options(mesh) == known


def test_the_defaults_do_on_cpus() -> None:
    assert compiler.compiler_options(device_mesh(Layout.of())) is None
