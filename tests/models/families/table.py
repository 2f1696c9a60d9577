"""The cases of all families, from the files in `cases/`."""

from importlib import import_module
from pathlib import Path
from typing import Any

from tests.models.families.case import COMMON, Tiny

_CASES = [
    import_module(f"tests.models.families.cases.{path.stem}")
    for path in sorted(Path(__file__).with_name("cases").glob("*.py"))
]
TINY: dict[str, Tiny] = {kind: tiny for case in _CASES for kind, tiny in case.TINY.items()}
FILES: dict[str, dict[str, Any]] = {
    name: file if "text_config" in file else COMMON | file
    for case in _CASES
    for name, file in case.HUB.items()
}
# Changes to the defaults of transformers' classes, by model type, of families that are only planned.
COUNTED: dict[str, dict[str, Any]] = {
    kind: changes for case in _CASES for kind, changes in getattr(case, "COUNTED", {}).items()
}
