"""FLOPs of LAPACK calls, against the counts of textbooks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.facts.matmuls import dot_flops
from meshwright.audit.hlo.read import parse_hlo

M, N = 48, 24


def _solved(a: Any) -> Any:
    return jax.scipy.linalg.solve_triangular(a[:N], a[N:], lower=True)


@pytest.mark.parametrize(
    ("run", "shape", "flops"),
    [
        (jnp.linalg.cholesky, (N, N), N**3 / 3),
        (jax.scipy.linalg.lu_factor, (N, N), 2 * N**3 / 3),
        (jnp.linalg.qr, (M, N), 2 * (2 * M * N**2 - 2 * N**3 / 3)),
        (jnp.linalg.eigh, (N, N), 9 * N**3),
        (jnp.linalg.eigvals, (N, N), 10 * N**3),
        (lambda a: jnp.linalg.svd(a, full_matrices=False), (M, N), 6 * M * N**2 + 20 * N**3),
        (lambda a: jnp.linalg.svd(a, compute_uv=False), (M, N), 2 * M * N**2 + 2 * N**3),
        (_solved, (2 * N, N), N**3),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_factorisation_has_the_flops_of_its_algorithm(
    run: Callable[[Any], Any], shape: tuple[int, ...], flops: float, count: int
) -> None:
    given = jax.ShapeDtypeStruct((count, *shape), jnp.float32)
    program = parse_hlo(jax.jit(jax.vmap(run)).lower(given).compile().as_text() or "")
    assert dot_flops(program) == pytest.approx(count * flops, rel=1e-3)
    assert not_understood(program) == []
