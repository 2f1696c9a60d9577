"""Records of platforms, and how rarely other rooms ask for the name of one."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import meshwright
from meshwright.hardware.catalog import chip, names
from meshwright.platforms import CPU, GPU, PLATFORMS, TPU, Attention

ROOT = Path(meshwright.__file__).parent
# Comparisons with the name of a platform, tables by such names, and comparisons of two names.
QUESTION = re.compile(
    r"""(==|!=|\bin|\bcase)\s*[(\[{]?["'](cpu|gpu|tpu|cuda)["']"""
    r"""|["'](cpu|gpu|tpu|cuda)["']\s*(==|!=|:|\bin\b)"""
    r"""|\b(chip\.kind|(target|platform)(\(\))?\.name)\s*(==|!=|\bin\b|\bnot in\b)\s*(?!None)"""
    r"""|(==|!=) (\w+\.)*chip\.kind\b"""
    r"""|\bis (not )?(CPU|GPU|TPU)\b|(==|!=)\s*(CPU|GPU|TPU)\b"""
)
# Files that hold the data or the compiler's code of one platform each.
OWN = ("platforms/", "audit/compile/platforms/")
MOST = 15


def test_few_places_ask_which_platform_it_is() -> None:
    found = [
        f"{file}:{number}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if not (file := str(path.relative_to(ROOT))).startswith(OWN)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if QUESTION.search(line) and not line.lstrip().startswith(("#", '"', ">>>"))
    ]
    assert len(found) < MOST, (
        "\n".join(found) + "\nAsk for a property of the platform's record (chip.platform, "
        "platforms.platform_of) and add it to platforms/platform.py, if it has none yet. Code of "
        "one compiler belongs in audit/compile/platforms/."
    )


@pytest.mark.parametrize(
    "line", ['if chip.kind == "cpu":', 'x = {"gpu": 1}', "if platform is TPU:", "name != chip.kind"]
)
def test_questions_are_recognised(line: str) -> None:
    assert QUESTION.search(line)


def test_every_chip_has_a_platform() -> None:
    assert {chip(name).platform for name in names()} == set(PLATFORMS.values())
    assert all(platform.name == name for name, platform in PLATFORMS.items())


LLAMA = Attention(
    head_dim=128, compute_dtype="bf16", kv_dtype="bf16", num_kv_heads=8, piece=4096, capability=9.0
)


def test_kernels_take_a_plain_model() -> None:
    kernels = [kernel for platform in (TPU, GPU) for kernel in (platform.flash, platform.paged)]
    assert [kernel and kernel.why_not(LLAMA) for kernel in kernels] == [None] * 4
    assert CPU.flash is None and CPU.paged is None


def test_kernels_report_their_first_reason() -> None:
    assert TPU.flash and GPU.flash
    assert TPU.flash.why_not(replace(LLAMA, piece=100)) == "pieces of 100 tokens are not a multiple of 128"
    assert TPU.flash.why_not(replace(LLAMA, piece=100, alibi=True)) == "the model has ALiBi"
    wide = replace(LLAMA, head_dim=256)
    assert GPU.flash.why_not(wide) is None
    assert GPU.flash.why_not(replace(wide, capability=8.0)) == "cuDNN has none for heads of 256"


def test_only_compilers_without_jaxlib_have_packages() -> None:
    assert TPU.compiler.packages and GPU.compiler.packages and not CPU.compiler.packages
    assert all(
        bool(platform.compiler.extra) == bool(platform.compiler.title) == bool(platform.compiler.packages)
        for platform in PLATFORMS.values()
    )
