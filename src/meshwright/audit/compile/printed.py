"""The text of a compiled program, constants included: a kernel's mask is one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


def program_text(compiled: "jax.stages.Compiled") -> str:
    """The optimised HLO of `compiled`, as `as_text()` prints it but for constants, here in full."""
    from jaxlib import _hlo as hlo  # pyright: ignore[reportAttributeAccessIssue]  # no public name for these options

    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    executable = compiled.runtime_executable()
    assert executable is not None, "a compiled program has an executable"
    return "\n\n".join(module.to_string(options) for module in executable.hlo_modules())
