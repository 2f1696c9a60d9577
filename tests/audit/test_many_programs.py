"""Foreign programs by the hundred: the audit reads each, or says what it did not understand."""

import random
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tests.audit.foreign_programs import EDITS, FAMILIES, Foreign, foreign, product_flops

from meshwright.audit.foreign import audit_file
from meshwright.errors import AuditError

pytestmark = pytest.mark.sampled(4)

NUM_PROGRAMS = 200
# Edits of each program, and the seeds of those that are made in every run.
_EDITS_EACH = 4
_FEW = (2, 4)


def _audited(folder: Path, text: str) -> dict | str:
    """The audit of a text, or in one line why there is none."""
    file = folder / "program.txt"
    file.write_text(text)
    try:
        return audit_file(file)
    except AuditError as error:
        return str(error)


def _read(folder: Path, program: Foreign) -> dict:
    """A whole program's audit: its devices compute at least what the jaxpr asks for, or a gap is named."""
    found = _audited(folder, program.text)
    assert isinstance(found, dict), found
    assert found["not_understood"] or 8 * found["flops"]["compiled"] >= program.flops
    assert not (found["not_understood"] and found["verdict"] == "match")
    return found


def _check_edited(folder: Path, text: str, whole: dict, edit: str, draw: random.Random) -> bool:
    """An edited program is refused, or has a gap, or has the totals of the whole; whether it was edited."""
    edited = EDITS[edit](draw, text)
    if edited is None or edited == text:
        return False
    found = _audited(folder, edited)
    if isinstance(found, str):
        assert "\n" not in found
    elif not found["not_understood"]:
        before, after = ((one["flops"]["compiled"], one["bytes"]["compiled"]) for one in (whole, found))
        assert before == after, f"{edit}: {before} became {after} without a word"
    return True


def test_an_edited_program_is_never_a_silent_total(tmp_path: Path) -> None:
    """Programs in the manner of MaxText and of shard_map, and every edit of each."""
    draw, done = random.Random(7), set()
    for program in map(foreign, _FEW):
        whole = _read(tmp_path, program)
        done |= {edit for edit in EDITS if _check_edited(tmp_path, program.text, whole, edit, draw)}
    assert done == EDITS.keys()


def test_the_products_of_a_jaxpr_are_counted_apart() -> None:
    """Two layers in a scan, forward and both gradients: 2 x 3 products of 2 x 8 x 16 x 32 FLOPs."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w @ w.T), None), x, w)[0].sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(jnp.ones((2, 16, 32)), jnp.ones((8, 16)))
    assert product_flops(traced.jaxpr) == 2 * 3 * 2 * (2 * 8 * 16 * 32)
    assert len(FAMILIES) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_two_hundred_programs_are_read(part: int, tmp_path: Path) -> None:
    for seed in range(part, NUM_PROGRAMS, 8):
        program, draw = foreign(seed), random.Random(seed)
        whole = _read(tmp_path, program)
        for edit in draw.sample([*EDITS], _EDITS_EACH):
            _check_edited(tmp_path, program.text, whole, edit, draw)
