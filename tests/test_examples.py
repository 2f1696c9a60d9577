"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

import meshwright

SOURCE = Path(meshwright.__file__).parent
WITH_EXAMPLES = sorted(
    file.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for file in SOURCE.rglob("*.py")
    if ">>> " in file.read_text()
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples(module: str):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0, f"{module} has >>> outside a docstring"
    assert result.failed == 0
