"""What tests of the C++ extension for CPUs need."""

import pytest

from meshwright.native import kernels


def needs_native() -> None:
    """Skips a test, with the reason, where the extension cannot be had."""
    if (reason := kernels.why_not_built()) is not None:
        pytest.skip(f"no native extension: {reason}")
